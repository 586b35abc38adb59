"""What happens in the simulation of a recorded run."""

from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

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
