"""Nodes die, hang, stall and crash; the others finish with the bits of a run without failures."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from helpers.chaos import (
    FAMILY,
    ITERATIONS,
    N0,
    catalog_for,
    chaos_job,
    check_survived,
    long_but_the_first,
    only_recovery,
    recoveries,
    run_under_faults,
    sample_cases,
)
from helpers.jobs import NUM_LAYERS, digests
from planaria.core.inject import ITERATION_STEPS, RECOVERY_STEPS
from planaria.core.job import JobConfig, PolicyName
from planaria.errors import InsufficientError
from planaria.job.training_job import TrainingResult
from planaria.nodes.forkserver import ForkServer

pytestmark = pytest.mark.faults

FAMILIES = ("gpt2", "llama", "sequential")
DOWNTIME_S = 1.0  # The median of twenty; benchmarks/recovery.py asserts that.

OTHERS = tuple(name for name in get_args(PolicyName) if name != "reinstantiate")

Run = Callable[..., TrainingResult]


@pytest.fixture(scope="module")
def calm(
    server: ForkServer, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[str, str]]:
    """The digests of a family's job without failures, on two nodes."""
    found: dict[str, tuple[str, str]] = {}

    def digests_of(family: str) -> tuple[str, str]:
        if family not in found:
            directory = tmp_path_factory.mktemp(family) / "calm"
            result = run_under_faults(chaos_job(family, directory, server, nodes=N0, f=0), server)
            assert result.error is None
            found[family] = digests(result)
        return found[family]

    return digests_of


@pytest.fixture
def survive(
    server: ForkServer, tmp_path: Path, calm: Callable[[str], tuple[str, str]]
) -> Callable[..., TrainingResult]:
    """Runs a job with faults; it must end with the bits of the calm run."""

    def run(
        *specs: str,
        family: str = FAMILY,
        nodes: int = 6,
        f: int = 1,
        sizes: tuple[int, ...] = (),
        policy: PolicyName = "reinstantiate",
    ) -> TrainingResult:
        config = chaos_job(family, tmp_path / "run", server, nodes=nodes, f=f, policy=policy)
        if policy == "absorb":  # Of a neighbour's layers there is room for two of three.
            memory_bytes = 3 * config.cluster.device_memory_bytes
            config = replace(
                config, cluster=replace(config.cluster, device_memory_bytes=memory_bytes)
            )
        result = run_under_faults(config, server, *specs, sizes=sizes)
        check_survived(result, specs, calm(family))
        return result

    return run


SINGLE = [(f"kill:{node}@{iteration}",) for node in range(6) for iteration in range(ITERATIONS)] + [
    (f"kill:{node}@3.{step}",) for node in range(6) for step in ITERATION_STEPS[1:]
]
TWICE = [
    (f"kill:1@3.{first}", f"kill:{second}@3.{step}")
    for first in ("backward", "commit")
    for second in (0, 5)
    for step in RECOVERY_STEPS
]
AT_ONCE = [
    (f"kill:{a},{b}@3.{step}",)
    for a, b in itertools.combinations(range(8), 2)
    for step in ("start", "reduce")
]


@pytest.mark.parametrize("specs", sample_cases(SINGLE, 1))
def test_any_node_may_be_killed_in_any_iteration_and_at_any_step(
    specs: tuple[str, ...], survive: Run
) -> None:
    """Six nodes, f = 1."""
    result = survive(*specs, family="gpt2")

    event = only_recovery(result)
    assert event.kind == "kill"
    assert 0 < event.downtime_s < 3 * DOWNTIME_S
    assert len(result.report.final.nodes) == 5


def test_a_job_that_plans_for_joins_trains_and_survives(
    server: ForkServer, tmp_path: Path, calm: Callable[[str], tuple[str, str]]
) -> None:
    """Six nodes, and plans for up to nine; until some join, they change nothing."""
    without = chaos_job(FAMILY, tmp_path / "run", server)
    config = replace(without, cluster=replace(without.cluster, max_nodes=9))

    result = run_under_faults(config, server, "kill:1@3")

    assert result.error is None
    assert digests(result) == calm(FAMILY)
    assert len(result.report.final.nodes) == 5
    assert sorted(result.planned.catalog.plans) == list(range(N0, 10))
    assert result.planned.plan == catalog_for(without).plans[6]


@pytest.mark.long
@pytest.mark.parametrize("specs", AT_ONCE, ids=" ".join)
def test_any_two_nodes_may_be_killed_at_once(specs: tuple[str, ...], survive: Run) -> None:
    """Eight nodes, f = 2, so three pipelines: each layer has a holder left."""
    result = survive(*specs, nodes=8, f=2)

    assert len(result.report.final.nodes) == 6


@pytest.mark.parametrize("specs", sample_cases(TWICE, 1))
def test_a_second_node_may_be_killed_at_any_step_of_a_recovery(
    specs: tuple[str, ...], survive: Run
) -> None:
    """Eight nodes, f = 2: the recovery starts over with whoever is left."""
    result = survive(*specs, nodes=8, f=2)

    assert len(result.report.final.nodes) == 6


def test_more_than_f_nodes_may_go_at_once_while_each_layer_has_a_holder(survive: Run) -> None:
    """Three pipelines of two, f = 1: the first halves of two of them are lost."""
    result = survive("kill:0,2@3.backward")

    assert len(result.report.final.nodes) == 4


def test_a_loss_in_the_first_iteration_starts_anew_without_the_node(survive: Run) -> None:
    """Nobody holds anything that the seed does not tell, so nothing has to move."""
    event = only_recovery(survive("kill:0@0.backward"))

    assert event.transfer_bytes == 0


@pytest.mark.long
@pytest.mark.parametrize(
    "policy", [name for name in get_args(PolicyName) if name != "reinstantiate"]
)
@pytest.mark.parametrize("specs", [*SINGLE, *AT_ONCE[::4], *TWICE], ids=" ".join)
def test_every_policy_survives_what_one_does(
    specs: tuple[str, ...], policy: PolicyName, survive: Run
) -> None:
    """The sweeps above; what may be lost at once is the same. A single loss is answered by the
    policy itself, but where several are asked, and without nodes on standby."""
    num_nodes = 6 if specs in SINGLE else 8
    sizes = {6: (3, 3), 8: (2, 3, 3)}[num_nodes] if policy == "absorb" else ()
    f = 1 if specs in SINGLE else 2

    result = survive(*specs, policy=policy, nodes=num_nodes, f=f, sizes=sizes)

    assert len(result.report.final.nodes) == num_nodes - f
    if specs in SINGLE and policy not in ("adaptive", "rollback"):
        assert [event.policy for event in recoveries(result)] == [policy]


@pytest.mark.parametrize("family", long_but_the_first(FAMILIES))
def test_three_losses_in_a_row_leave_a_degraded_job(family: str, survive: Run) -> None:
    """Six nodes, f = 1, down to three, one more than n0."""
    result = survive("kill:5@1", "kill:4@3.forward", "kill:3@5.commit", family=family)

    assert len(result.report.final.nodes) == 3
    kinds = [event.kind for event in result.report.events]
    assert kinds.count("degraded") == 1


def test_the_fourth_loss_ends_with_a_checkpoint_that_resumes_to_the_same_bits(
    server: ForkServer, tmp_path: Path, calm: Callable[[str], tuple[str, str]]
) -> None:
    """One node is left, and the model needs two; more nodes are there the next day."""
    config = chaos_job(FAMILY, tmp_path / "run", server)
    specs = ("kill:5@1", "kill:4@2", "kill:3@4", "kill:2@6", "kill:1@6.backward")

    result = run_under_faults(config, server, *specs)

    assert isinstance(result.error, InsufficientError)
    assert "go on from it with --resume" in str(result.error)
    resumed = run_under_faults(config, server, resume=True)
    assert digests(resumed) == calm(FAMILY)


@pytest.mark.parametrize(
    ("specs", "sizes", "answer"),
    [
        pytest.param(("kill:1@3",), (3, 3), "simple", marks=pytest.mark.long),
        (("kill:0@3",), (2, 4), "borrow"),
        (("kill:0@3",), (2, 2), "merge"),
    ],
)
def test_each_step_of_the_local_answer_keeps_the_bits(
    specs: tuple[str, ...], sizes: tuple[int, ...], answer: str, survive: Run
) -> None:
    """Oobleck 5.1; the global answer is forbidden."""
    event = only_recovery(survive(*specs, nodes=sum(sizes), sizes=sizes))

    assert event.answer == answer


@pytest.mark.parametrize("family", long_but_the_first(FAMILIES))
@pytest.mark.parametrize("kind", long_but_the_first(["crash", "stall"]))
def test_a_worker_that_ends_or_stands_still_is_replaced_in_its_node(
    kind: str, family: str, survive: Run
) -> None:
    """All six nodes work to the end; the new worker's state comes from its peer."""
    result = survive(f"{kind}:1@3.backward", family=family)

    event = only_recovery(result)
    assert event.kind == kind
    assert len(result.report.final.nodes) == 6
    pids = [worker.pid for worker in result.report.workers if worker.rank == 1]
    assert len(pids) == 2
    if kind == "stall":
        assert "most recent call first" in event.reason


@pytest.mark.parametrize("family", long_but_the_first(FAMILIES))
def test_a_node_that_hangs_is_lost_when_its_lease_runs_out(family: str, survive: Run) -> None:
    """Nothing closes when a machine stands still."""
    result = survive("hang:4@3.forward", family=family)

    event = only_recovery(result)
    lease_s = JobConfig().cluster.lease_s
    assert lease_s * 0.8 < event.downtime_s < 3 * (lease_s + 1)


@pytest.mark.parametrize(
    "specs", long_but_the_first([("kill:2@3", "leader:@3.decide"), ("leader:@3.commit",)])
)
def test_the_coordinator_may_be_killed_too(specs: tuple[str, ...], survive: Run) -> None:
    """It goes on from its journal; training waits only where it needs a decision."""
    result = survive(*specs)

    restarts = [event for event in result.report.events if event.kind == "leader"]
    assert len(restarts) == 1
    assert restarts[0].detect_s < 3 * 2.0


LEADER = [(f"leader:@3.{step}",) for step in ITERATION_STEPS] + [
    ("kill:2@3", f"leader:@3.{step}") for step in RECOVERY_STEPS
]


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("specs", LEADER)
def test_the_coordinator_may_be_killed_at_any_step(
    specs: tuple[str, ...], family: str, survive: Run
) -> None:
    """Of an iteration, and of a recovery."""
    result = survive(*specs, family=family)

    assert [event.kind for event in result.report.events].count("leader") == 1


def test_survivors_are_the_same_processes_and_keep_their_layers(survive: Run) -> None:
    """No restart, and nothing made again: what a worker materialised is what it lacked."""
    result = survive("kill:5@3", sizes=(3, 3))

    workers = result.report.workers
    assert len({(worker.pid, worker.pid_start) for worker in workers}) == 6
    untouched = [worker for worker in workers if worker.node in (0, 1, 2)]
    for worker in untouched:
        assert worker.last_epoch == 1
    kept = sum(worker.layers_materialised for worker in untouched)
    assert kept == NUM_LAYERS  # Each layer once, at the start.


def test_when_below_stop_saves_and_ends(server: ForkServer, tmp_path: Path) -> None:
    """As Oobleck does with fewer than (f + 1) * n0 nodes."""
    config = chaos_job(FAMILY, tmp_path / "run", server, nodes=4)
    stop = replace(config.resilience, when_below="stop")

    result = run_under_faults(replace(config, resilience=stop), server, "kill:3@4")

    assert isinstance(result.error, InsufficientError)
    assert f"fewer than (f + 1) * n0 = {2 * N0}" in str(result.error)
    assert result.report.final.iteration == 4
    assert result.report.final.parameters_sha256


def test_a_fault_whose_place_never_comes_is_told(server: ForkServer, tmp_path: Path) -> None:
    """Whoever tests his job's survival has to know that nothing was tested."""
    config = chaos_job(FAMILY, tmp_path / "run", server, nodes=N0, f=0)
    result = run_under_faults(config, server, "kill:1@100")

    assert result.error is None
    assert [event.fired for event in result.report.events] == [False]
