"""A job whose links are paced: its bytes take their time, in iterations and in a recovery."""

import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.jobs import digests
from planaria.core.inject import parse_injection
from planaria.core.job import (
    CheckpointConfig,
    ClusterConfig,
    JobConfig,
    ModelConfig,
    ResilienceConfig,
    TrainingConfig,
)
from planaria.core.plan import LayerProfile, Link, ModelProfile
from planaria.estimator.time import predicted_timeline
from planaria.job.training_job import Job, TrainingResult
from planaria.nodes.forkserver import ForkServer
from planaria.profiles.profile_json import encode_profile
from planaria.schedule.lower import plan_schedule

pytestmark = [pytest.mark.timed, pytest.mark.faults]

MEGABYTE = 1_000_000
BANDWIDTH = 100 * MEGABYTE
LOST = 2


def _profile() -> ModelProfile:
    """Eight layers of 5 ms, 2 MB of parameters each, that are sent in 60 ms with their optimizer;
    two nodes have room for them."""
    second = {1: 0.005}
    layer = LayerProfile("", second, second, second, 2 * MEGABYTE, 4 * MEGABYTE, 0, MEGABYTE)
    return ModelProfile(
        model="eight",
        microbatch_size=1,
        dtype="float32",
        device="cpu",
        device_memory_bytes=64 * MEGABYTE,
        layers=tuple(replace(layer, name=f"block.{index}") for index in range(8)),
        links={"intra_node": Link(0.0, 1e12), "inter_node": Link(0.002, BANDWIDTH)},
    )


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    path.write_bytes(encode_profile(_profile()))
    return path


def _run(
    profile: Path, server: ForkServer, name: str, *specs: str, time_scale: float = 1.0
) -> TrainingResult:
    job = JobConfig(
        model=ModelConfig(kind="paced", profile=str(profile), time_scale=time_scale, jitter=0.0),
        training=TrainingConfig(iterations=6, global_batch_size=8, microbatch_size=1),
        checkpoint=CheckpointConfig(directory=str(profile.parent / name)),
        resilience=ResilienceConfig(policy="reinstantiate"),  # Of which something has to move.
        cluster=ClusterConfig(nodes=4),
    )
    injections = tuple(parse_injection(spec) for spec in specs)
    result = Job(job).train(server=server, injections=injections)
    assert len(result.report.iterations) == 6
    return result


def test_iterations_last_as_long_as_their_messages_and_reductions(
    profile: Path, server: ForkServer
) -> None:
    """At least what is predicted, whose reductions alone take a fifth of it; the same bits as
    where nothing takes any time."""
    result = _run(profile, server, "paced")
    nothing = _run(profile, server, "nothing", time_scale=1e-6)

    predicted_s = result.report.iterations[0].predicted_s
    links = {"inter_node": Link(0.0, 1e12), "intra_node": Link(0.0, 1e12)}
    free = replace(_profile(), links=links)
    computed_s = predicted_timeline(
        plan_schedule(result.planned.plan), free, plan=result.planned.plan
    ).iteration_s
    seconds = [record.seconds for record in result.report.iterations[1:]]
    assert predicted_s > 1.2 * computed_s
    assert 0.98 * predicted_s <= statistics.median(seconds)
    assert min(seconds) <= 3.0 * predicted_s  # benchmarks/prediction.py asserts far less.
    assert digests(result) == digests(nothing)


def test_a_recovery_lasts_as_long_as_the_state_that_moves(
    profile: Path, server: ForkServer
) -> None:
    """One node lacks one layer, which comes over its one way in, whoever sends it; and the bits are
    those of a run in peace."""
    calm = _run(profile, server, "calm", time_scale=1e-6)
    struck = _run(profile, server, "struck", f"kill:{LOST}@2")

    (event,) = [event for event in struck.report.events if event.kind == "kill"]
    moved_s = event.transfer_bytes / BANDWIDTH
    assert event.transfer_bytes == 6 * MEGABYTE
    assert event.transfer_s + event.regroup_s >= moved_s - 1e-3
    assert event.transfer_s <= 3 * moved_s + 0.5
    assert digests(struck) == digests(calm)
