"""Nodes die under resilience.policy = "absorb": neighbours compute their layers, same bits."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.chaos import (
    FAMILY,
    baseline_digests,
    chaos_job,
    check_survived,
    long_but_the_first,
    only_recovery,
    recoveries,
    run_under_faults,
)
from planaria.job.training_job import TrainingResult
from planaria.nodes.forkserver import ForkServer
from planaria.schedule.action import Kind

pytestmark = pytest.mark.faults

ITERATIONS = 10
SIZES = (3, 3)

Run = Callable[..., TrainingResult]


@pytest.fixture
def calm(server: ForkServer) -> tuple[str, str]:
    """The digests of the job without failures."""
    return baseline_digests(server, ITERATIONS)


@pytest.fixture
def absorb(server: ForkServer, tmp_path: Path, calm: tuple[str, str]) -> Run:
    """Runs a job on two pipelines of three nodes with faults, to the bits of the baseline run."""

    def run(*specs: str, trace: bool = False) -> TrainingResult:
        config = chaos_job(FAMILY, tmp_path / "run", server, policy="absorb", iterations=ITERATIONS)
        config = replace(
            config,
            # Of one node's layers there is room for two of three.
            cluster=replace(
                config.cluster, device_memory_bytes=3 * config.cluster.device_memory_bytes
            ),
        )
        result = run_under_faults(config, server, *specs, sizes=SIZES, trace=trace)
        check_survived(result, specs, calm)
        return result

    return run


def test_forwards_are_computed_ahead_and_change_nothing(absorb: Run) -> None:
    """All but the last nodes of pipelines have the input of layers that they keep."""
    result = absorb(trace=True)

    spans = [span for one in result.measured_timelines() for span in one.spans]
    shadows = {span.rank for span in spans if span.action.kind is Kind.SHADOW}
    assert shadows == {0, 1, 3, 4}


@pytest.mark.parametrize("node", long_but_the_first([1, 0, 2]))
def test_a_lost_node_is_absorbed(node: int, absorb: Run) -> None:
    """The first, the middle and the last of a pipeline; nothing is sent, and nobody idles."""
    result = absorb(f"kill:{node}@4.backward")

    event = only_recovery(result)
    assert (event.policy, event.answer) == ("absorb", "absorb")
    assert event.received_bytes == 0
    assert len(result.report.final.nodes) == 5


def test_neighbours_that_are_lost_are_left_to_another_policy(absorb: Run) -> None:
    """Its plan is protected again, so the next loss can be absorbed."""
    result = absorb("kill:0,1@3", "kill:5@6")

    first, _ = recoveries(result)
    assert first.policy == "reinstantiate"
    assert first.received_bytes > 0
