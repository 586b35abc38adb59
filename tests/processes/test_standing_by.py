"""Standby nodes take the places of lost ones, and machines are granted for those: the same bits."""

from dataclasses import replace
from pathlib import Path

import pytest

from helpers.chaos import (
    FAMILY,
    baseline_digests,
    chaos_job,
    check_survived,
    long_but_the_first,
    recoveries,
    run_under_faults,
)
from helpers.jobs import digests
from planaria.core.job import JobConfig, PolicyName
from planaria.core.specs import Prepared
from planaria.errors import InsufficientError
from planaria.job.planning import given_profile, plan_job
from planaria.job.training_job import TrainingResult
from planaria.nodes.forkserver import ForkServer

pytestmark = pytest.mark.faults

LONG = 40  # Iterations in which a machine that was granted comes before the end.
SHORT = 20  # Where nobody has to come.


def standing_by(
    directory: Path,
    server: ForkServer,
    *,
    nodes: int = 4,
    standby: int = 0,
    grant_s: float = 0.0,
    copies: int = 0,
    policy: PolicyName = "rollback",
    f: int = 1,
    iterations: int = LONG,
) -> JobConfig:
    """A job of pipelines of two nodes."""
    config = chaos_job(
        FAMILY, directory / "run", server, nodes=nodes, f=f, policy=policy, iterations=iterations
    )
    if copies:
        checkpoint = replace(config.checkpoint, copies=copies, profile_iterations=0)
        config = replace(config, checkpoint=checkpoint)
    return replace(config, cluster=replace(config.cluster, standby=standby, grant_s=grant_s))


def check(result: TrainingResult, server: ForkServer, *specs: str) -> None:
    iterations = result.planned.config.training.iterations
    check_survived(result, specs, baseline_digests(server, iterations))


def granted(result: TrainingResult) -> list[str]:
    return [event.reason for event in result.report.events if event.kind == "granted"]


@pytest.mark.parametrize("policy", long_but_the_first(("rollback", "adaptive", "repartition")))
def test_a_standby_node_takes_the_place_of_a_lost_one(
    policy: PolicyName, server: ForkServer, tmp_path: Path
) -> None:
    """It is no member before, and nobody else gets other layers."""
    config = standing_by(tmp_path, server, standby=1, policy=policy, iterations=SHORT)
    before = plan_job(config, Prepared(profile=given_profile(config))).plan
    result = run_under_faults(config, server, "kill:1@5.backward")

    check(result, server, "kill:1@5.backward")
    lost, *rest = recoveries(result)
    assert lost.kind == "kill"
    assert not [event for event in rest if event.kind != "joined"]
    assert result.report.final.nodes == (0, 2, 3, 4)
    first = {worker.node: worker.first_epoch for worker in result.report.workers}
    assert first[4] > 0
    if policy == "rollback":
        assert (lost.policy, lost.answer, lost.source_tier) == ("rollback", "standby", "live")
        layers = before.layers_by_rank
        moved = {w.node: w.layers_materialised for w in result.report.workers}
        assert moved[4] == len(layers[1])


def test_machines_are_granted_for_lost_ones_and_stand_by(
    server: ForkServer, tmp_path: Path
) -> None:
    """The first loss takes the standby node; the second the one that came for the first."""
    specs = ("kill:1@4", "kill:3@25")
    result = run_under_faults(standing_by(tmp_path, server, standby=1, grant_s=0.1), server, *specs)

    check(result, server, *specs)
    losses = [event for event in recoveries(result) if event.kind == "kill"]
    assert [event.answer for event in losses] == ["standby", "standby"]
    assert granted(result)[0] == "another machine is granted in place of that of node 1: node 5"
    assert result.report.final.nodes == (0, 2, 4, 5)


@pytest.mark.long
def test_without_a_standby_node_the_others_go_on_until_a_machine_is_granted(
    server: ForkServer, tmp_path: Path
) -> None:
    """It gets its layers silently, while copies are made of what the others have."""
    result = run_under_faults(
        standing_by(tmp_path, server, grant_s=0.2, copies=2), server, "kill:2@4"
    )

    check(result, server, "kill:2@4")
    lost, joined = recoveries(result)
    assert lost.policy == "reinstantiate"
    assert (joined.kind, joined.nodes, joined.redone_samples) == ("joined", (4,), 0)
    assert result.report.final.nodes == (0, 1, 3, 4)


@pytest.mark.long
def test_no_machine_is_granted_in_time(server: ForkServer, tmp_path: Path) -> None:
    """The job is done before; nothing is left of what was asked for."""
    config = standing_by(tmp_path, server, grant_s=600.0, iterations=SHORT)
    result = run_under_faults(config, server, "kill:2@4")

    check(result, server, "kill:2@4")
    assert result.report.final.nodes == (0, 1, 3)
    assert granted(result) == []


@pytest.mark.parametrize("step", long_but_the_first(("forward", "commit", "optimizer")))
def test_all_holders_of_a_layer_are_lost_and_standby_nodes_pull_its_copies(
    step: str, server: ForkServer, tmp_path: Path
) -> None:
    """Gemini's case: a whole placement, from the memory of those who kept copies of it."""
    config = standing_by(tmp_path, server, standby=2, copies=2, iterations=SHORT)
    config = replace(config, checkpoint=replace(config.checkpoint, every=1))
    plan = plan_job(config, Prepared(profile=given_profile(config))).plan
    spec = f"kill:{','.join(map(str, plan.holders(0)))}@8.{step}"
    result = run_under_faults(config, server, spec)

    check(result, server, spec)
    lost, *_ = recoveries(result)
    assert (lost.answer, lost.source_tier) == ("standby", "memory")
    assert lost.redone_samples <= 2 * config.training.global_batch_size
    assert set(result.report.final.nodes) > {4, 5}


def test_too_few_are_left_and_a_machine_is_waited_for(server: ForkServer, tmp_path: Path) -> None:
    """One of the two nodes that hold the model; the other has copies of all that it held."""
    config = standing_by(tmp_path, server, nodes=2, f=0, copies=2, grant_s=0.3)
    result = run_under_faults(config, server, "kill:1@8.forward")

    check(result, server, "kill:1@8.forward")
    lost, *_ = recoveries(result)
    assert lost.source_tier == "memory"
    assert lost.detect_s > 0.2
    assert result.report.final.nodes == (0, 2)


@pytest.mark.long
def test_too_few_are_left_and_no_machine_comes(server: ForkServer, tmp_path: Path) -> None:
    """The newest save that is whole is named, and the job goes on from it when nodes are back."""
    config = standing_by(tmp_path, server, iterations=SHORT)
    result = run_under_faults(config, server, "kill:0,1,2@8.forward")
    resumed = run_under_faults(config, server, resume=True)

    assert isinstance(result.error, InsufficientError)
    assert "go on from it with --resume" in str(result.error)
    assert digests(resumed) == baseline_digests(server, SHORT)


def test_a_node_that_hangs_is_given_back_with_its_machine(
    server: ForkServer, tmp_path: Path
) -> None:
    """It would wake up to find itself no member; its machine belongs to others by then."""
    config = standing_by(tmp_path, server, standby=1, grant_s=0.1)
    config = replace(config, cluster=replace(config.cluster, lease_s=0.6))
    result = run_under_faults(config, server, "hang:1@4.backward")

    check(result, server, "hang:1@4.backward")
    (lost, *_) = recoveries(result)
    assert lost.answer == "standby"
    assert len(granted(result)) == 1
