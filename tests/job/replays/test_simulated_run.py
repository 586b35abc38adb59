"""What happens in the simulation of a recorded run."""

from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from planaria.core.cluster import ClusterState, Node, NodesLost
from planaria.core.job import ClusterConfig
from planaria.job.replays.recorded_run import RecordedRun
from planaria.job.replays.simulated_run import _happenings
from planaria.observe.metrics import EventRecord


def happenings_of(*events: EventRecord) -> Any:
    config = SimpleNamespace(cluster=ClusterConfig(notice_s=20.0))
    run = SimpleNamespace(events=events, planned=SimpleNamespace(config=config))
    return _happenings(cast(RecordedRun, run))


@pytest.mark.parametrize(
    ("kind", "value", "notice_s"),
    [("preempt", 5.0, 5.0), ("preempted", 0.0, 20.0), ("drained", 0.0, 20.0)],
)
def test_a_node_that_leaves_has_a_notice(kind: str, value: float, notice_s: float) -> None:
    """Reports from before notices had a kind of their own tell them as drained."""
    event = EventRecord(kind=kind, nodes=(2,), iteration=4, value=value, at_s=7.0)
    happenings = happenings_of(event)

    [(at_s, _, happen)] = happenings.in_order
    assert at_s == 7.0
    assert isinstance(happen, partial)
    assert happen.args == ((2,), notice_s)
    assert happenings.left_out == []


def test_nodes_that_are_lost_together_are_all_lost() -> None:
    """The coordinator hears of them one by one, so the loss that it answers may name the last one
    alone; the others stayed in the simulation, and trained."""
    staying = ClusterState(0, (Node(0, held=(frozenset({0}),)), Node(3, held=(frozenset({1}),))))
    inputs: Any = SimpleNamespace(lost=NodesLost((2,), 0), cluster=staying)
    event = EventRecord(kind="kill", nodes=(1, 2), iteration=4, at_s=7.0, inputs=inputs)
    happenings = happenings_of(event)

    [(_, _, happen)] = happenings.in_order
    assert isinstance(happen, partial)
    assert happen.args == ((1, 2),)


@pytest.mark.parametrize(("nodes", "number"), [((6,), 1), ((), 0)])
def test_what_happened_to_a_node_at_an_unknown_time_is_left_out(
    nodes: tuple[int, ...], number: int
) -> None:
    """Reports had no time of a machine that was taken at once for a lost one: replays went on
    without it, and said nothing. An event that strikes no node is none of a simulation."""
    event = EventRecord(kind="joined" if nodes else "degraded", nodes=nodes, iteration=4)
    happenings = happenings_of(event)

    assert happenings.in_order == []
    assert len(happenings.left_out) == number


def test_a_node_whose_worker_crashed_is_not_lost() -> None:
    """The job stands still for it."""
    staying = ClusterState(0, (Node(1, held=(frozenset({0}),)),))
    inputs: Any = SimpleNamespace(lost=NodesLost((), 0), cluster=staying)
    event = EventRecord(
        kind="crash", nodes=(1,), iteration=4, at_s=7.0, over_at_s=7.5, inputs=inputs
    )

    assert happenings_of(event).stood_for == [event]
