"""A bit flips in one node's parameters: the node is evicted, or the job ends before it saves it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.chaos import (
    FAMILY,
    ITERATIONS,
    chaos_job,
    check_survived,
    events_besides_load,
    long_but_the_first,
    only_recovery,
    recoveries,
    run_under_faults,
)
from helpers.jobs import digests, shaped_plan, tiny_job, train_shape
from planaria.checkpoint.disk.tiers import tier_of
from planaria.core.inject import parse_injection
from planaria.errors import InsufficientError
from planaria.job.training_job import Job, TrainingResult
from planaria.nodes.forkserver import ForkServer

pytestmark = pytest.mark.faults

Outvoted = Callable[..., TrainingResult]


@pytest.fixture(scope="module")
def calm(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The digests of the job in peace, on four nodes."""
    directory = tmp_path_factory.mktemp("calm") / "run"
    result = run_under_faults(chaos_job(FAMILY, directory, server, nodes=4), server)
    assert result.error is None
    return digests(result)


@pytest.fixture
def outvoted(server: ForkServer, tmp_path: Path, calm: tuple[str, str]) -> Outvoted:
    """Runs three pipelines of two nodes with faults, to the bits of the calm run."""

    def run(*specs: str) -> TrainingResult:
        config = chaos_job(FAMILY, tmp_path / "run", server)
        result = run_under_faults(config, server, *specs, sizes=(2, 2, 2))
        check_survived(result, specs, calm)
        return result

    return run


EVERYWHERE = [(node, iteration) for node in range(6) for iteration in (0, 3, 6)]


@pytest.mark.parametrize("place", long_but_the_first(EVERYWHERE))
def test_a_node_with_a_flipped_bit_is_evicted_before_it_spoils_a_step(
    place: tuple[int, int], outvoted: Outvoted
) -> None:
    """Each rank and iteration draws another bit of another layer."""
    node, iteration = place
    result = outvoted(f"flip:{node}@{iteration}")

    event = only_recovery(result)
    assert (event.kind, event.nodes, event.iteration) == ("flip", (node,), iteration)
    assert f"on node {node} have another hash than on most" in event.reason
    assert event.redone_samples == result.planned.config.training.global_batch_size
    assert result.report.final.nodes == tuple(one for one in range(6) if one != node)


def test_a_bit_that_flips_after_the_last_iteration_is_not_saved(outvoted: Outvoted) -> None:
    """No iteration follows that would find it; parameters are compared before a save, too."""
    result = outvoted(f"flip:0@{ITERATIONS - 1}")

    assert result.report.final.nodes == (1, 2, 3, 4, 5)


@pytest.mark.long
def test_the_masters_of_a_bfloat16_job_are_compared(server: ForkServer, tmp_path: Path) -> None:
    """They are what is stepped and saved."""
    config = tiny_job(FAMILY, tmp_path / "run", dtype="bfloat16")
    # Another plan at a commit might leave a layer to two nodes.
    resilience = replace(config.resilience, policy="reinstantiate")
    config = replace(config, cluster=replace(config.cluster, nodes=3), resilience=resilience)
    plan = shaped_plan((1, 1, 1), config.num_microbatches)
    calm = train_shape(tiny_job(FAMILY, tmp_path / "calm", dtype="bfloat16"), (2,), server)

    result = Job(config).run(plan=plan, injections=(parse_injection("flip:1@1"),), server=server)

    assert result.error is None
    assert result.report.final.nodes == (0, 2)
    assert digests(result) == digests(calm)


@pytest.mark.long
def test_holders_agree_in_fast_mode_too(server: ForkServer, tmp_path: Path) -> None:
    """Sums in float32 depend on the plan, but all holders get the same one: the guard finds the
    bit that is flipped, and no other."""
    config = chaos_job(FAMILY, tmp_path / "run", server, deterministic=False)
    result = run_under_faults(config, server, "flip:1@4", "kill:2@2.reduce", sizes=(2, 2, 2))

    assert result.error is None
    assert result.report.final.nodes == (0, 3, 4, 5)
    assert [event.kind for event in recoveries(result)] == ["kill", "flip"]


AT_THE_SAME_TIME = [
    ("flip:2@3", "leader:@4.commit"),
    ("flip:2@3", "leader:@4.decide"),
    ("flip:2@3", "leader:@4.detect"),
    ("flip:2@3", "leader:@3.optimizer"),
    ("flip:2@3", "leader:@4.transfer"),
]


@pytest.mark.long
@pytest.mark.parametrize("specs", AT_THE_SAME_TIME)
def test_the_coordinator_may_be_killed_at_the_same_time(
    specs: tuple[str, ...], outvoted: Outvoted
) -> None:
    """What the ranks found is told to the next one."""
    result = outvoted(*specs)

    assert result.report.final.nodes == (0, 1, 3, 4, 5)


LOST_TOO = [
    ("flip:2@3", "kill:1@4.commit"),
    ("flip:2@3", "kill:5@4.backward"),
    ("flip:2@3", "kill:3@4.start"),
    ("flip:2@3", "kill:1@3.decide"),
    ("flip:2@3", "kill:1@3.transfer"),
    ("flip:0,3@3",),
]


@pytest.mark.parametrize("specs", long_but_the_first(LOST_TOO))
def test_another_node_may_be_lost_or_odd_at_the_same_time(
    specs: tuple[str, ...], outvoted: Outvoted
) -> None:
    """The answers to that loss show the odd one, before any layer of it is sent to others."""
    assert len(outvoted(*specs).report.final.nodes) == 4


def test_two_holders_that_differ_end_the_job_and_it_goes_on_from_its_save(
    server: ForkServer, tmp_path: Path, calm: tuple[str, str]
) -> None:
    """Nobody can tell which of the two is right, so the newest save stays that of before."""
    config = chaos_job(FAMILY, tmp_path / "run", server, nodes=4)
    config = replace(config, checkpoint=replace(config.checkpoint, persist_every=1))

    result = run_under_faults(config, server, "flip:1@3", sizes=(2, 2))

    assert isinstance(result.error, InsufficientError)
    assert "nodes 1 and 3 have different parameters in layer" in str(result.error)
    assert "the newest checkpoint is of iteration 3; go on from it with --resume" in str(
        result.error
    )
    newest = tier_of(config.checkpoint.directory).newest()
    assert newest is not None
    assert newest.iteration == 3
    resumed = run_under_faults(config, server, sizes=(2, 2), resume=True)
    assert digests(resumed) == calm


def test_without_the_guard_nobody_looks(server: ForkServer, tmp_path: Path) -> None:
    """It is for nodes whose optimizers round differently, and costs what it says."""
    config = chaos_job(FAMILY, tmp_path / "run", server, nodes=4)
    config = replace(config, resilience=replace(config.resilience, corruption_guard=False))

    result = run_under_faults(config, server, "flip:1@3", sizes=(2, 2))

    assert result.error is None
    assert [(event.kind, event.fired) for event in events_besides_load(result)] == [("flip", True)]
