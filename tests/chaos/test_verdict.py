"""The judge of runs under faults: what it must object to, and when an early end had to be."""

from dataclasses import replace
from typing import Any

import pytest

from helpers.jobs import shaped_plan
from planaria.chaos.verdict import (
    BaselineRun,
    baseline_run,
    failure_justification,
    injected_events,
    justification,
    undecidable,
    violations,
    violations_until_end,
)
from planaria.core.plan import Pipeline
from planaria.observe.metrics import EventRecord, FinalRecord, IterationRecord, Report

NUM_ITERATIONS = 4


def iteration(number: int, *, epoch: int = 0, digest: str = "") -> IterationRecord:
    return IterationRecord(
        iteration=number,
        loss=1.0,
        samples=8,
        sample_digest=digest or f"samples of {number}",
        seconds=0.5,
        epoch=epoch,
        predicted_s=0.5,
        peak_bytes=0,
        predicted_peak_bytes=0,
    )


def report(*, numbers: tuple[int, ...] = (0, 1, 2, 3), **fields: Any) -> Report:
    """Of a run that ended as the run in peace did."""
    final = FinalRecord(
        iteration=NUM_ITERATIONS,
        loss=1.0,
        parameters_sha256="parameters",
        optimizer_sha256="optimizer",
        nodes=(0, 1, 2, 3),
        epoch=0,
        checkpoint="4-0",
    )
    given: dict[str, Any] = {
        "job": {},
        "seed": 7,
        "versions": {},
        "workers": (),
        "iterations": tuple(iteration(number) for number in numbers),
        "events": (),
        "checkpoints": {},
        "ledger": {"useful": 2.0, "startup": 1.0, "wall": 3.0},
        "final": final,
    }
    return Report(**(given | fields))


def baseline() -> BaselineRun:
    return baseline_run(report(), num_needed=2, num_nodes_max=20, num_layers=10)


def event(kind: str, *nodes: int, **fields: Any) -> EventRecord:
    """Of a fault that was injected: what the job notices by itself has no step."""
    return EventRecord(kind=kind, nodes=nodes, iteration=1, **({"step": "start"} | fields))


def test_nothing_is_wrong_with_a_run_that_ends_as_in_peace() -> None:
    """Of which the judge knows hashes, samples and seconds."""
    assert violations(report(), baseline()) == ()
    assert (baseline().training_s, baseline().wall_s) == (2.0, 3.0)
    assert violations(report(numbers=(2, 3)), baseline(), first=2) == ()


MISTAKES = {
    "iterations are not each committed once": report(numbers=(0, 1, 1, 2, 3)),
    "iterations are not each": report(numbers=(0, 2, 3)),
    "iteration 2 used other samples": report(
        iterations=(iteration(0), iteration(1), iteration(2, digest="others"), iteration(3))
    ),
    "the ledger's parts are 2.5 s": report(ledger={"useful": 2.5, "wall": 3.0}),
    "negative seconds in the ledger: redo": report(ledger={"useful": 4.0, "redo": -1.0, "wall": 3}),
    "0.5 s are wasted by tier, and 1.0 s": report(
        ledger={"useful": 2.0, "redo": 1.0, "wall": 3.0}, wasted={"live": {"wasted_s": 0.5}}
    ),
    "phases of 0.5 s, downtime of 1.0 s": report(
        events=(event("kill", 1, answer="simple", detect_s=0.5, downtime_s=1.0),)
    ),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_each_mistake_before_the_end_is_found(what: str) -> None:
    """Also in a run that ended early."""
    (found,) = violations_until_end(MISTAKES[what], baseline())

    assert found.startswith(what)


@pytest.mark.parametrize("name", ["parameters_sha256", "optimizer_sha256"])
def test_other_bits_in_the_end_are_found_and_none_at_all(name: str) -> None:
    """Of the parameters and of the optimizer's state."""
    final = report().final
    wrong: Any = {name: "wrong"}
    missing: Any = {name: ""}

    (other,) = violations(report(final=replace(final, **wrong)), baseline())
    (none,) = violations(report(final=replace(final, **missing)), baseline())

    assert other == f"{name} is wrong, and in the baseline run it is {getattr(final, name)}"
    assert none.startswith(f"{name} is missing")


def test_an_end_before_the_last_iteration_is_found() -> None:
    """Even with the right bits, which cannot be."""
    final = replace(report().final, iteration=3)

    assert violations(report(numbers=(0, 1, 2), final=final), baseline()) == (
        "3 iterations are done in the end, not 4",
    )


FIRST = shaped_plan((2, 2), 10)  # Nodes 0 and 2 hold the first half, 1 and 3 the second.


@pytest.mark.parametrize(
    ("events", "why"),
    [
        ((event("kill", 0, 1, 2),), "1 of 4 nodes were left"),
        ((event("preempt", 0), event("hang", 1), event("cut", 3)), "1 of 4 nodes were left"),
        ((event("kill", 0, 1), *[event("crash", 2)] * 3), "1 of 4 nodes were left"),
        ((event("kill", 0, 2),), "all holders of layer 0 were struck: [0, 2]"),
        ((event("kill", 1), event("crash", 3)), "all holders of layer 5 were struck: [1, 3]"),
        ((event("flip", 1),), "of layer 5 only [1, 3] could be compared"),
        ((), ""),
        ((event("kill", 0, 1),), ""),
        ((event("kill", 0), event("crash", 1)), ""),
        ((event("kill", 0, 2, fired=False),), ""),
        ((event("lost", 0), event("lost", 2)), ""),
        ((event("crash", 0, 2, step=""),), ""),
        ((event("store"), event("disk")), ""),
        ((event("leader"), event("join")), ""),
    ],
)
def test_an_early_end_is_justified_by_what_was_struck(
    events: tuple[EventRecord, ...], why: str
) -> None:
    """Not by what the job itself says of it: a node that was lost but not struck does not count."""
    assert justification(report(events=events), [FIRST], num_needed=2).startswith(why)
    assert bool(justification(report(events=events), [FIRST], num_needed=2)) == bool(why)


def test_only_plans_since_the_last_that_ran_count() -> None:
    """Layers that were lost in part before that have been moved since."""
    iterations = (iteration(0), iteration(1, epoch=1), iteration(2, epoch=1))
    events = (event("kill", 3), event("crash", 1))
    moved = report(iterations=iterations, events=events)

    assert not justification(moved, [replace(FIRST, epoch=0), SHAPED], num_needed=2)
    assert justification(replace(moved, iterations=iterations[:1]), [FIRST, SHAPED], num_needed=2)
    # Of an iteration in flight at the loss all gradients were there: nothing had been moved yet.
    assert justification(replace(moved, iterations=iterations[:2]), [FIRST, SHAPED], num_needed=2)


@pytest.mark.parametrize(
    ("events", "why"),
    [
        ((event("flip", 1), event("kill", 3)), "of layer 5 only [1] was left"),
        ((event("flip", 1), event("crash", 3)), "of layer 5 only [1] was left"),
        ((event("flip", 1),), ""),
        ((event("flip", 1), event("kill", 0)), ""),
        ((event("kill", 1, 3),), ""),
    ],
)
def test_a_flipped_bit_in_the_last_holder_cannot_be_found(
    events: tuple[EventRecord, ...], why: str
) -> None:
    """Two that differ can: the job ends then."""
    assert undecidable(report(events=events), [FIRST]) == why


def test_what_a_job_notices_by_itself_was_not_injected() -> None:
    """A busy machine may make a worker stand still; nobody did that."""
    struck, noticed, never = event("kill", 1), event("stall", 2, step=""), event("cut", fired=False)

    assert injected_events(report(events=(struck, noticed, never))) == [struck]


CRASHED = [event("crash", 1)] * 3


@pytest.mark.parametrize(
    ("events", "why"),
    [
        ((*CRASHED, event("crash", 0)), "workers ended of the same crash on nodes [0, 1]"),
        ((event("stall", 1, 2), event("stall", 1), event("hang", 1)), "workers ended of the same"),
        ((*CRASHED, event("kill", 3)), "of a crash ended all who held layer 5: [1, 3]"),
        ((*CRASHED, event("kill", 0, 2)), "workers of node 1 ended of a crash again and again"),
        (CRASHED, ""),
        ((*CRASHED[1:], event("crash", 0)), ""),
        ((*CRASHED[1:], event("stall", 1), event("crash", 0)), ""),
        ((*CRASHED[1:], event("crash", 1, step=""), event("crash", 0)), ""),
        ((*CRASHED, event("crash", 0, fired=False)), ""),
    ],
)
def test_a_job_may_fail_only_where_no_node_can_be_to_blame(
    events: tuple[EventRecord, ...], why: str
) -> None:
    """Equal ends of workers on one node evict it; on two, or on one that is needed, they end the
    job."""
    found = failure_justification(report(events=tuple(events)), [FIRST], num_needed=2)

    assert found.startswith(why)
    assert bool(found) == bool(why)


def with_two_devices(pipeline: Pipeline) -> Pipeline:
    """The pipeline on nodes of two devices, which share each stage."""
    stages = tuple(replace(stage, num_devices=2) for stage in pipeline.template.stages)
    return replace(pipeline, template=replace(pipeline.template, stages=stages))


@pytest.mark.parametrize(("crashes", "is_justified"), [(2, False), (3, True)])
def test_what_ends_all_workers_of_a_node_has_happened_to_it_once(
    crashes: int, is_justified: bool
) -> None:
    """The coordinator counts the ends of each rank. A job that failed after two on a node of two
    ranks was called right."""
    plan = replace(FIRST, pipelines=tuple(map(with_two_devices, FIRST.pipelines)))
    struck = report(events=(*[event("crash", 1)] * crashes, event("crash", 0)))

    assert bool(failure_justification(struck, [plan], num_needed=2)) == is_justified


SHAPED = replace(shaped_plan((1, 2), 10), epoch=1)  # Node 0 holds all layers.
