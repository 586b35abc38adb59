"""What `planaria events` says of an event."""

from dataclasses import replace

import pytest

from planaria.observe.metrics import EventRecord
from planaria.show.story import event_lines

PRICES = {"policy": "reinstantiate", "iteration_s": 1.25, "downtime_s": 0.5, "score": 7.9}
KILLED = EventRecord(
    kind="kill",
    nodes=(3,),
    iteration=5,
    step="backward",
    policy="reinstantiate",
    answer="borrow",
    candidates=(
        PRICES | {"answer": "borrow"},
        PRICES | {"answer": "global", "iteration_s": 1.5, "score": 6.25},
    ),
    time_to_failure_s=2400.0,
    detect_s=0.2,
    decide_s=0.1,
    regroup_s=0.05,
    transfer_s=0.4,
    transfer_bytes=3 << 20,
    downtime_s=0.75,
    predicted_downtime_s=0.5,
    predicted_transfer_s=0.3,
    redone_samples=12,
    reason="its connection closed",
)


def test_a_loss_is_told_with_its_choice_its_reason_and_what_was_predicted() -> None:
    """What happened and where; each candidate's price; why; predicted beside measured by phase."""
    assert list(event_lines(KILLED)) == [
        "iteration 5, backward: node 3 was killed (its connection closed)",
        "Every rank had stopped for it after 200.0 ms.",
        (
            "planaria chose borrow: an iteration takes 1.25 s after a pause of 500.0 ms; global "
            "would take 1.50 s after 500.0 ms; the next failure is expected in 40 min."
        ),
        (
            "It is expected to train the most samples a second that count until the next failure: "
            "borrow 7.90, global 6.25."
        ),
        (
            "The decision took 100.0 ms. The transition after it took 450.0 ms; 500.0 ms was "
            "predicted (-10.0%): regroup 50.0 ms (200.0 ms predicted), transfer 400.0 ms (300.0 ms "
            "predicted)."
        ),
        "3.0 MiB of layers moved, 12 samples were done again.",
    ]


def test_a_recovery_is_told_with_the_range_that_was_expected_of_it() -> None:
    """From when it was noticed until all went on."""
    expected = replace(
        KILLED,
        recovery_s=0.74,
        predicted_recovery_s=0.5,
        predicted_recovery_s_min=0.06,
        predicted_recovery_s_max=0.9,
    )

    took = list(event_lines(expected))[-2]
    assert took.startswith(
        "All nodes went on 740.0 ms after the loss was noticed, 60-900 ms expected. The decision "
        "took 100.0 ms."
    )


def test_the_reason_names_what_a_failure_costs_where_that_differs() -> None:
    """The scores are less by that."""
    borrow, other = KILLED.candidates
    risky = replace(KILLED, candidates=(borrow, {**other, "samples_at_risk": 12.0}))

    assert list(event_lines(risky))[3] == (
        "It is expected to train the most samples a second that count until the next failure, "
        "less what that failure costs: borrow 7.90, global 6.25."
    )


@pytest.mark.parametrize(
    ("tier", "where"), [("memory", "copies in memory"), ("disk", "the newest save")]
)
def test_where_all_went_back_to_is_told(tier: str, where: str) -> None:
    """Live layers need no word."""
    lines = list(event_lines(replace(KILLED, source_tier=tier)))
    assert lines[-2] == f"All nodes went back to {where}."
    assert len(lines) == len(list(event_lines(replace(KILLED, source_tier="live")))) + 1


def test_a_recovery_that_the_next_coordinator_begins_is_told_as_one() -> None:
    """It found that the members were being changed, and nobody knew who had begun."""
    reason = "the coordinator before this one was changing the members"
    led = replace(KILLED, kind="leader", nodes=(), step="", reason=reason)

    first, second, *_ = event_lines(led)
    assert first == f"iteration 5: the coordinator was lost ({reason})"
    assert second == "Every rank had stopped for it after 200.0 ms."


def test_a_recovery_that_was_never_over_moved_nothing() -> None:
    """The job ended in it, or is in it still."""
    ended = replace(
        KILLED, detect_s=0.0, decide_s=0.0, regroup_s=0.0, transfer_s=0.0, downtime_s=0.0
    )

    first, chosen, why, last = event_lines(ended)
    assert first.endswith("node 3 was killed (its connection closed)")
    assert chosen.startswith("planaria chose borrow")
    assert why.startswith("It is expected to train")
    assert last == "No node has gone on with this answer."


def test_what_did_not_move_is_not_told() -> None:
    """An answer may need no layer to move."""
    still = replace(KILLED, transfer_bytes=0, redone_samples=1)

    assert list(event_lines(still))[-1] == "1 sample was done again."


def test_a_change_is_a_pause_and_redoes_nothing() -> None:
    """Nothing was detected: training went on."""
    joined = replace(
        KILLED,
        kind="joined",
        nodes=(6, 7),
        step="",
        detect_s=0.0,
        decide_s=0.0,
        downtime_s=0.05,
        redone_samples=0,
        candidates=KILLED.candidates[:1],
        reason="",
    )

    assert list(event_lines(joined)) == [
        "iteration 5: nodes 6, 7 joined",
        "planaria chose borrow: an iteration takes 1.25 s after a pause of 500.0 ms.",
        "Training paused for 50.0 ms; 500.0 ms was predicted.",
        "3.0 MiB of layers moved.",
    ]


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (
            EventRecord(kind="leader", nodes=(), iteration=12, step="start", detect_s=0.8622),
            (
                "iteration 12, start: the coordinator was killed; it ran again after 862.2 ms, "
                "training went on without it"
            ),
        ),
        (
            EventRecord(
                kind="leader",
                nodes=(),
                iteration=10,
                step="decide",
                detect_s=0.25,
                reason="all waited for it",
            ),
            (
                "iteration 10, decide: the coordinator was killed; it ran again after 250.0 ms, "
                "all waited for it"
            ),
        ),
        (
            EventRecord(kind="leader", nodes=(), iteration=9),
            "iteration 9: the coordinator was lost",
        ),
        (
            EventRecord(kind="leader", nodes=(), iteration=9, fired=False),
            "iteration 9: leader was never injected, because the job never came to that place",
        ),
        (
            EventRecord(kind="kill", nodes=(1,), iteration=9, fired=False),
            (
                "iteration 9: kill of node 1 was never injected, because the job never came to "
                "that place"
            ),
        ),
        (
            EventRecord(kind="join", nodes=(), iteration=5, step="start"),
            "iteration 5, start: nodes came to join",
        ),
        (
            EventRecord(kind="store", nodes=(), iteration=5, step="start"),
            "iteration 5, start: the checkpoint directory became slow",
        ),
        (
            EventRecord(kind="disk", nodes=(), iteration=5, step="start"),
            "iteration 5, start: the disk of the journal did not answer",
        ),
        (
            EventRecord(kind="join", nodes=(6,), iteration=5, reason="standing by"),
            "iteration 5: node 6 came to join (standing by)",
        ),
        (
            EventRecord(kind="crash", nodes=(1,), iteration=9, step="~2.5"),
            "iteration 9, 2.5 s after training began: node 1 had its workers killed",
        ),
        (
            EventRecord(kind="kill", nodes=(1,), iteration=0, step="~2.5", fired=False),
            (
                "2.5 s after training began: kill of node 1 was never injected, because the job "
                "never came to that place"
            ),
        ),
        (
            EventRecord(kind="degraded", nodes=(), iteration=2, reason="3 nodes are left"),
            "iteration 2: degraded (3 nodes are left)",
        ),
        (
            EventRecord(kind="save_failed", nodes=(), iteration=4, reason="disk full"),
            "iteration 4: save failed (disk full)",
        ),
        (
            EventRecord(kind="cut", nodes=(1, 2), iteration=4),
            "iteration 4: nodes 1, 2 were cut off",
        ),
        (
            EventRecord(kind="preempt", nodes=(3,), iteration=4, reason="by its machine"),
            "iteration 4: node 3 was told to leave (by its machine)",
        ),
        (
            EventRecord(kind="preempted", nodes=(3, 4), iteration=4),
            "iteration 4: nodes 3, 4 had notice that they would be gone",
        ),
        (
            EventRecord(kind="preempted", nodes=(3,), iteration=4),
            "iteration 4: node 3 had notice that it would be gone",
        ),
        (
            EventRecord(kind="drained", nodes=(3,), iteration=4),
            "iteration 4: node 3 left, as the user asked",
        ),
        (
            EventRecord(kind="unslowed", nodes=(1,), iteration=20, step="start"),
            "iteration 20, start: node 1 got its speed back",
        ),
        (
            EventRecord(kind="fast", nodes=(1, 3), iteration=25),
            "iteration 25: nodes 1, 3 were no longer taken for slow",
        ),
        (
            EventRecord(kind="reformed", nodes=(0, 2), iteration=4),
            "iteration 4: nodes 0, 2 got other work",
        ),
    ],
)
def test_what_was_not_answered_is_one_sentence(event: EventRecord, text: str) -> None:
    """There is no choice to explain."""
    assert list(event_lines(event)) == [text]
