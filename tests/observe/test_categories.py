"""Where the seconds of a run go: each category is entered where it happens, and nowhere else."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.recorder_messages import (
    change_message,
    commit_message,
    decision_message,
    kill,
    loss_message,
    parts,
    recorder,
    recover,
    running,
    starting,
)
from planaria.core.records import AwaitingMachine, AwaitingSaves, Forked
from planaria.observe.ledger import Category
from planaria.observe.recorder import Recorder

Told = Callable[[Recorder, float], object]

# What a recorder may be told at a moment, in whatever order.
WORDS: dict[str, Told] = {
    "running": lambda run, now_s: run.on_running(running(now_s, transfer_s=0.5)),
    "running without a node": lambda run, now_s: run.on_running(running(now_s, members=(5, 6, 7))),
    "committed": lambda run, now_s: run.on_committed(
        commit_message(run.next_iteration, now_s, eager_s=0.25)
    ),
    "committed, told by nobody": lambda run, now_s: run.on_committed(
        commit_message(run.next_iteration, now_s, ranks=())
    ),
    "ends": lambda run, now_s: run.on_committed(
        commit_message(run.next_iteration, now_s, ends=True)
    ),
    "injected": lambda run, now_s: run.on_fault(kill(), now_s=now_s),
    "lost": lambda run, now_s: run.on_recovering(loss_message(now_s, 6)),
    "crashed": lambda run, now_s: run.on_recovering(
        loss_message(now_s, 5, kind="crash", is_forking=True)
    ),
    "forked": lambda run, now_s: run.on_forked(Forked(now_s=now_s)),
    "waits": lambda run, now_s: run.on_awaiting_machine(AwaitingMachine(text="", now_s=now_s)),
    "waits for saves": lambda run, now_s: run.on_awaiting_saves(
        AwaitingSaves(text="", now_s=now_s)
    ),
    "decided": lambda run, now_s: run.on_decided(
        decision_message(now_s, iteration=run.next_iteration), predicted_peak_bytes=5
    ),
    "redone": lambda run, now_s: run.on_decided(
        decision_message(now_s, iteration=run.next_iteration, redone_samples=3),
        predicted_peak_bytes=5,
    ),
    "goes back": lambda run, now_s: run.on_decided(
        decision_message(now_s, iteration=max(0, run.next_iteration - 2), redone_samples=9),
        predicted_peak_bytes=5,
    ),
    "starting": lambda run, now_s: run.on_starting(starting(now_s)),
    "changed": lambda run, _: run.on_changed(change_message(7), predicted_peak_bytes=5),
    "restarted": lambda run, now_s: run.on_coordinator_restart(lost_s=now_s - 0.25, now_s=now_s),
    "degraded": lambda run, _: run.on_degraded("few are left", iteration=7),
    "ended": lambda run, _: run.on_end(),
}


@given(st.lists(st.tuples(st.sampled_from(sorted(WORDS)), st.floats(0.0, 3.0)), max_size=40))
def test_the_parts_sum_to_the_wall_time_whatever_a_run_is_told(
    words: list[tuple[str, float]],
) -> None:
    """Also what no coordinator would say, such as a commit in the middle of a recovery."""
    run, now_s = recorder(), 14.0
    for word, after_s in words:
        now_s += after_s
        WORDS[word](run, now_s)
    spent = parts(run, now_s)
    wall_s = spent.pop("wall")

    assert wall_s == now_s - 10.0
    assert sum(spent.values()) == pytest.approx(wall_s, abs=1e-9)
    assert min(spent.values()) > 0.0


def test_eager_forwards_are_redundant_by_their_share_of_what_was_computed() -> None:
    """Two ranks compute 0.75 s each and 0.25 s ahead; the iteration takes 2 s, less what saves
    held up."""
    run = recorder()
    run.on_committed(commit_message(6, 16.0, eager_s=0.25))

    spent = parts(run, 16.0)
    assert spent["redundant"] == pytest.approx(1.75 / 4)
    assert spent["useful"] == pytest.approx(1.75 * 3 / 4)


def test_nodes_without_a_layer_are_idle_by_their_share_of_the_members() -> None:
    """One of three, until a plan has work for it."""
    run = recorder()
    run.on_running(running(14.0, members=(5, 6, 7)))
    run.on_committed(commit_message(6, 16.0))
    first = parts(run, 16.0)
    run.on_running(running(16.0, members=(5, 6)))
    run.on_committed(commit_message(7, 18.0))

    assert first["idle"] == pytest.approx(1.75 / 3)
    assert first["useful"] == pytest.approx(1.75 * 2 / 3)
    assert parts(run, 18.0)["idle"] == first["idle"]


def test_a_worker_that_is_forked_anew_is_a_restart_until_it_reports() -> None:
    """Noticed at 20, there at 20.75; all have answered at 21. Those that are there have no part."""
    run = recorder()
    run.on_recovering(loss_message(20.0, 6, kind="crash", is_forking=True))
    run.on_forked(Forked(now_s=20.75))
    run.on_decided(decision_message(21.0), predicted_peak_bytes=5)

    assert parts(run, 21.0)["restart"] == 0.75
    assert parts(run, 21.0)["detect"] == 0.25


def test_a_fault_is_a_restart_from_when_it_is_noticed() -> None:
    """A worker that stands still from 19 on is killed at 20."""
    run = recorder()
    run.on_committed(commit_message(6, 18.0))
    run.on_fault(kill("stall:6@7"), now_s=19.0)
    run.on_recovering(loss_message(20.0, 6, kind="stall", is_forking=True))
    run.on_forked(Forked(now_s=20.5))

    assert parts(run, 20.5)["detect"] == 1.0
    assert parts(run, 20.5)["restart"] == 0.5


def test_the_node_of_a_worker_that_is_forked_anew_is_lost() -> None:
    """Nobody waits for the worker any more."""
    run = recorder()
    run.on_recovering(loss_message(20.0, 6, kind="crash", is_forking=True))
    run.on_recovering(loss_message(20.25, 6))

    assert parts(run, 21.0)["restart"] == 0.25
    assert parts(run, 21.0)["detect"] == 0.75


def test_a_coordinator_that_a_recovery_waits_for_is_a_restart() -> None:
    """It was lost while members answered, or before the loss could be noticed."""
    during, before = recorder(), recorder()
    during.on_recovering(loss_message(20.0, 6))
    during.on_coordinator_restart(lost_s=20.25, now_s=20.75)
    before.on_fault(kill("kill:6@7"), now_s=20.0)
    before.on_coordinator_restart(lost_s=19.5, now_s=20.5)
    before.on_recovering(loss_message(20.75, 6))

    for run in (during, before):
        assert parts(run, 21.0)["restart"] == 0.5
        assert parts(run, 21.0)["detect"] == 0.5


def test_training_goes_on_without_a_coordinator() -> None:
    """So a restart that nobody waits for has no seconds."""
    run = recorder()
    run.on_coordinator_restart(lost_s=15.0, now_s=15.5)
    run.on_committed(commit_message(6, 16.0))

    assert "restart" not in parts(run, 16.0)


def test_a_coordinator_that_is_lost_while_a_worker_is_forked() -> None:
    """The next one does not know of the worker; all wait for members to answer then."""
    run = recorder()
    run.on_recovering(loss_message(20.0, 6, kind="crash", is_forking=True))
    run.on_coordinator_restart(lost_s=20.25, now_s=20.75)

    assert run.ledger.category is Category.DETECT
    assert parts(run, 21.0)["restart"] == 0.75


def test_waiting_for_a_machine_is_idle() -> None:
    """From when nothing else is left to do until the machine is there."""
    run = recorder()
    run.on_recovering(loss_message(20.0, 6))
    run.on_awaiting_machine(AwaitingMachine(text="", now_s=20.5))
    run.on_recovering(loss_message(24.0, kind="granted"))
    run.on_decided(decision_message(24.25), predicted_peak_bytes=5)

    assert parts(run, 24.25)["idle"] == 3.5
    assert parts(run, 24.25)["detect"] == 0.75


def test_waiting_for_the_disk_of_saves_is_a_checkpoint_stall() -> None:
    run = recorder()
    run.on_recovering(loss_message(20.0, 6))
    run.on_awaiting_saves(AwaitingSaves(text="", now_s=20.5))
    run.on_decided(decision_message(24.0), predicted_peak_bytes=5)

    assert parts(run, 24.0)["checkpoint_stall"] == 3.5
    assert parts(run, 24.0)["detect"] == 0.5


def test_the_first_loss_counts_where_another_follows_in_the_recovery() -> None:
    """From the commit at 16 to the first loss at 20 the iteration was computed in vain, once."""
    run = recorder()
    run.on_committed(commit_message(6, 16.0))
    run.on_recovering(loss_message(20.0, 6))
    run.on_decided(decision_message(21.0, redone_samples=8), predicted_peak_bytes=5)
    run.on_decided(decision_message(21.0, redone_samples=8), predicted_peak_bytes=5)
    run.on_starting(starting(21.5))
    run.on_recovering(loss_message(22.0, 5))
    run.on_decided(decision_message(23.0, redone_samples=8), predicted_peak_bytes=5)
    run.on_starting(starting(23.5))
    run.on_running(running(24.0, epoch=5))

    assert parts(run, 24.0)["redo"] == 4.0


def test_a_node_that_is_lost_as_the_iteration_begins_has_lost_something() -> None:
    """It was killed at 15.9, before the coordinator had all reports of the iteration before; others
    computed the next one until it was noticed. At most an iteration of 2 s counts."""
    redo_s = []
    for noticed_s in (16.25, 19.0):
        run = recorder()
        run.on_fault(kill("kill:6@7"), now_s=15.9)
        run.on_committed(commit_message(6, 16.0))
        run.on_recovering(loss_message(noticed_s, 6))
        run.on_decided(decision_message(20.0, redone_samples=8), predicted_peak_bytes=5)
        run.on_starting(starting(20.5))
        redo_s.append(parts(run, 20.5)["redo"])

    assert redo_s == [0.25, 2.0]


def test_a_wait_for_a_coordinator_leaves_detection_its_own_seconds() -> None:
    """From 16.25 to 19 there was none. The iteration was computed in vain from 16 on, for 2 s: a
    quarter of a second is booked as detection, the rest as a restart, which the others wait for.
    All was taken from the detection, which lasted from 19 on."""
    run = recorder()
    run.on_fault(kill("kill:6@7"), now_s=15.9)
    run.on_committed(commit_message(6, 16.0))
    run.on_coordinator_restart(lost_s=16.25, now_s=19.0)
    run.on_recovering(loss_message(19.25, 6))
    run.on_decided(decision_message(19.5, redone_samples=8), predicted_peak_bytes=5)
    run.on_starting(starting(19.75))

    spent = parts(run, 19.75)
    assert (spent["restart"], spent["redo"], spent["detect"]) == (1.0, 2.0, 0.5)


def test_an_iteration_that_counts_after_all_is_not_redone() -> None:
    """At 20 a node is lost; iteration 7 took 2 s from 16 on and counts, so 2 s of iteration 8 are
    lost."""
    run = recorder()
    run.on_committed(commit_message(6, 16.0))
    run.on_recovering(loss_message(20.0, 6))
    run.on_decided(decision_message(21.0, iteration=8, redone_samples=8), predicted_peak_bytes=5)
    run.on_committed(commit_message(7, 21.5))
    run.on_starting(starting(22.0))

    assert parts(run, 22.0)["redo"] == 2.0


def test_nothing_is_redone_before_training_has_begun() -> None:
    """Whatever is said of samples."""
    run = Recorder(start_s=10.0, predicted_s=0.5, predicted_peak_bytes=9)
    run.on_recovering(loss_message(12.0, 6))
    run.on_decided(decision_message(13.0, redone_samples=8, iteration=0), predicted_peak_bytes=5)
    run.on_starting(starting(14.0))

    assert "redo" not in parts(run, 14.0)


def test_a_switch_does_not_hide_what_the_next_loss_wastes() -> None:
    """The iteration began with the commit at 16, not when all had gone over at 16.5."""
    run = recorder()
    run.on_committed(commit_message(6, 16.0))
    run.on_running(running(16.5, epoch=4))
    recover(run, redone_samples=8)

    assert parts(run, 26.0)["redo"] == 4.0
