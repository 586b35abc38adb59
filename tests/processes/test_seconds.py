"""The ledger of real runs: each category has seconds where it should, and nowhere else."""

from dataclasses import replace
from pathlib import Path

import pytest

from helpers.chaos import FAMILY, baseline_digests, chaos_job, check_survived, run_under_faults
from planaria.core.job import PolicyName
from planaria.job.training_job import TrainingResult
from planaria.nodes.forkserver import ForkServer

pytestmark = pytest.mark.faults

ITERATIONS = 8
LONG = pytest.mark.long
# How busy the machine is decides these, or they are in every run.
LEFT_OUT = {"useful", "startup", "checkpoint_stall", "regroup", "transfer", "wall"}


def check(result: TrainingResult, categories: set[str]) -> None:
    """Of those that are not left out, these have seconds. A node that the machine makes slow may be
    left without work, so idle. What others compute in vain until a loss is noticed is redone, and
    that may be the whole detection: the next coordinator may notice the loss as the last member
    tells that it has left the epoch."""
    ledger = result.report.ledger
    found = {name for name, spent in ledger.items() if spent > 0.0} - LEFT_OUT
    of_chance = {"detect"} if {"redo", "restart"} <= found else set()
    of_chance |= {"idle"} if any(event.kind == "slow" for event in result.report.events) else set()
    assert categories - of_chance == found - of_chance, ledger
    assert min(ledger.values()) >= 0.0
    assert sum(ledger.values()) == pytest.approx(2 * ledger["wall"], abs=1e-6)


@pytest.mark.parametrize(
    ("specs", "policy", "categories"),
    [
        pytest.param("", "reinstantiate", "", marks=LONG),
        pytest.param("kill:1@4", "reinstantiate", "redo detect decide", marks=LONG),
        pytest.param("kill:1@4.optimizer", "reinstantiate", "detect decide", marks=LONG),
        pytest.param(
            "crash:1@4.backward", "reinstantiate", "redo detect decide restart", marks=LONG
        ),
        pytest.param("leader:@4", "reinstantiate", "", marks=LONG),
        ("kill:1@4.backward leader:@4.decide", "reinstantiate", "redo detect decide restart"),
        pytest.param("kill:1@4.backward", "morph", "redo detect decide idle", marks=LONG),
    ],
)
def test_a_category_has_seconds_where_it_should(
    specs: str, policy: PolicyName, categories: str, server: ForkServer, tmp_path: Path
) -> None:
    """In peace, after losses, and where the coordinator is lost while all train or wait for it.
    Under morph five nodes are a grid of four. A vector that was complete makes its iteration count;
    whether the next one had begun by then is told by its samples."""
    config = chaos_job(FAMILY, tmp_path / "run", server, policy=policy, iterations=ITERATIONS)
    result = run_under_faults(config, server, *specs.split())

    check_survived(result, specs.split(), baseline_digests(server, ITERATIONS))
    expected = set(categories.split())
    is_redone = any(event.redone_samples for event in result.report.events)
    assert is_redone or "redo" not in expected
    check(result, expected | ({"redo"} if is_redone else set()))


def test_forwards_ahead_are_redundant(server: ForkServer, tmp_path: Path) -> None:
    """Under absorb, all the time."""
    config = chaos_job(FAMILY, tmp_path / "run", server, policy="absorb", iterations=ITERATIONS)
    memory_bytes = 3 * config.cluster.device_memory_bytes
    config = replace(config, cluster=replace(config.cluster, device_memory_bytes=memory_bytes))
    result = run_under_faults(config, server, sizes=(3, 3))

    check_survived(result, (), baseline_digests(server, ITERATIONS))
    check(result, {"redundant"})


def test_a_machine_that_is_waited_for_leaves_the_job_idle(
    server: ForkServer, tmp_path: Path
) -> None:
    """Of two nodes, which hold the model together, one is left until the other's is granted."""
    config = chaos_job(FAMILY, tmp_path / "run", server, nodes=2, f=0, iterations=ITERATIONS)
    config = replace(
        config,
        cluster=replace(config.cluster, grant_s=0.3),
        checkpoint=replace(config.checkpoint, copies=2, profile_iterations=0),
    )
    result = run_under_faults(config, server, "kill:1@5.forward")

    check_survived(result, ("kill:1@5.forward",), baseline_digests(server, ITERATIONS))
    check(result, {"redo", "detect", "decide", "idle"})
    assert result.report.ledger["idle"] > 0.2
