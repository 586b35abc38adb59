"""Wasted time by tier in the report of a real run, from the messages of its coordinator."""

import pytest
from msgspec import structs

from helpers.recorder_messages import (
    commit_message,
    decision_message,
    loss_message,
    parts,
    recorder,
    recover,
    running,
    starting,
)
from planaria.core.records import Decided
from planaria.observe.recorder import Recorder


def trained() -> Recorder:
    """A run that has committed three iterations, by 20."""
    run = recorder()
    for iteration, now_s in ((6, 16.0), (7, 18.0), (8, 20.0)):
        run.on_committed(commit_message(iteration, now_s))
    return run


def answered(run: Recorder, *decisions: Decided) -> dict[str, dict[str, float]]:
    """A loss at 20 that is answered so, and answered anew before training goes on; what all waste
    until 26."""
    run.on_recovering(loss_message(20.0, 6))
    for decision in decisions:
        run.on_decided(decision, predicted_peak_bytes=555)
        run.on_starting(starting(23.0))
    run.on_running(running(26.0, epoch=4, pid=80, regroup_s=0.5, transfer_s=2.5))
    wasted = run.ledger.wasted_parts()
    spent = parts(run, 26.0)
    assert sum(tier["redo_s"] for tier in wasted.values()) == pytest.approx(spent.get("redo", 0.0))
    assert sum(tier["transfer_s"] for tier in wasted.values()) == pytest.approx(spent["transfer"])
    return {name: tier for name, tier in wasted.items() if any(tier.values())}


LIVE = decision_message(21.0, redone_samples=8, iteration=9)
COPIES = structs.replace(decision_message(21.0, redone_samples=8), copied=7)
SAVE = structs.replace(decision_message(21.0, redone_samples=8), source="7-3")
START = structs.replace(decision_message(21.0, redone_samples=8, iteration=6), transfer_bytes=0)


@pytest.mark.parametrize(
    ("decision", "tier", "redo_s"),
    [(LIVE, "live", 1.0), (COPIES, "memory", 4.5), (SAVE, "disk", 4.5), (START, "start", 6.25)],
)
def test_a_recovery_has_the_tier_that_kept_the_state(
    decision: Decided, tier: str, redo_s: float
) -> None:
    """That of its event, or the start of a job that has neither copies nor saves. An iteration
    takes two seconds less what saves take, and one second of the iteration in flight is lost."""
    assert answered(trained(), decision) == {
        tier: {
            "recoveries": 1.0,
            "redo_s": pytest.approx(redo_s),
            "transfer_s": 2.5,
            "wasted_s": pytest.approx(redo_s + 2.5),
        }
    }


def test_an_answer_that_another_loss_breaks_off_is_no_recovery_of_its_own() -> None:
    """All went back to copies, a node was lost, and then only the save was left."""
    wasted = answered(trained(), COPIES, SAVE)

    assert list(wasted) == ["disk"]
    assert wasted["disk"]["recoveries"] == 1.0


def test_recoveries_add_up() -> None:
    """One from live layers after one from a save."""
    run = trained()
    answered(run, SAVE)
    run.on_committed(commit_message(7, 28.0))
    run.on_recovering(loss_message(28.0, 5))
    run.on_decided(decision_message(29.0, iteration=8), predicted_peak_bytes=555)
    run.on_starting(starting(30.0))
    run.on_running(running(31.0, epoch=4, pid=80, regroup_s=0.25, transfer_s=0.75))
    wasted = run.ledger.wasted_parts()

    assert [tier["recoveries"] for tier in wasted.values()] == [1.0, 0.0, 1.0, 0.0]
    assert wasted["live"]["transfer_s"] == 0.75
    assert wasted["disk"]["transfer_s"] == 2.5


def test_a_recovery_counts_that_is_not_over_at_the_end() -> None:
    """A job may end in it."""
    run = trained()
    run.on_recovering(loss_message(20.0, 6))
    run.on_decided(SAVE, predicted_peak_bytes=555)

    assert run.ledger.wasted_parts()["disk"]["recoveries"] == 1.0


def test_without_losses_nothing_is_wasted() -> None:
    """Of what a job did; a recovery with no sample that is done again wastes its transfer."""
    run = recorder()
    run.on_committed(commit_message(6, 16.0))
    before = run.ledger.wasted_parts()
    recover(run)

    assert not any(any(tier.values()) for tier in before.values())
    assert run.ledger.wasted_parts()["live"] == {
        "recoveries": 1.0,
        "redo_s": 0.0,
        "transfer_s": 2.5,
        "wasted_s": 2.5,
    }
