"""The network between some nodes and all others is down: nothing closes, and nothing comes."""

from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.chaos import (
    FAMILY,
    ITERATIONS,
    chaos_job,
    check_report,
    long_but_the_first,
    only_recovery,
    recoveries,
    run_under_faults,
)
from helpers.jobs import digests
from planaria.core.job import JobConfig
from planaria.job.training_job import TrainingResult
from planaria.nodes.forkserver import ForkServer

pytestmark = pytest.mark.faults

Cut = Callable[..., TrainingResult]
LEASE_S = JobConfig().cluster.lease_s


@pytest.fixture(scope="module")
def calm(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The digests of the job in peace, on four nodes."""
    directory = tmp_path_factory.mktemp("calm") / "run"
    return digests(run_under_faults(chaos_job(FAMILY, directory, server, nodes=4), server))


@pytest.fixture
def cut(server: ForkServer, tmp_path: Path, calm: tuple[str, str]) -> Cut:
    """Runs three pipelines of two nodes with faults, to the bits of the calm run."""

    def run(*specs: str) -> TrainingResult:
        result = run_under_faults(chaos_job(FAMILY, tmp_path / "run", server), server, *specs)
        assert result.error is None, f"{specs}: {result.error}"
        assert digests(result) == calm, specs
        numbers = [record.iteration for record in result.report.iterations]
        assert numbers == list(range(ITERATIONS))
        assert all(event.fired for event in result.report.events), specs
        check_report(result)
        return result

    return run


@pytest.mark.parametrize("spec", long_but_the_first(["cut:1@3.forward", "cut=20:1@3.forward"]))
def test_a_node_that_is_cut_off_for_longer_than_its_lease_is_lost(spec: str, cut: Cut) -> None:
    """The others go on without it; that it hears nothing of."""
    result = cut(spec)

    event = only_recovery(result)
    assert (event.kind, event.nodes, event.reason) == ("cut", (1,), "its lease ran out")
    assert LEASE_S * 0.8 < event.downtime_s < 3 * (LEASE_S + 1)
    assert result.report.final.nodes == (0, 2, 3, 4, 5)


def test_after_a_cut_that_is_shorter_than_the_lease_all_go_on_where_they_were(cut: Cut) -> None:
    """Training waits, and nobody is lost."""
    result = cut("cut=1:1,2@3.forward")

    assert recoveries(result) == []
    assert result.report.final.nodes == tuple(range(6))
    assert max(record.seconds for record in result.report.iterations) > 0.8


def test_of_two_sides_the_one_with_the_coordinator_goes_on(cut: Cut) -> None:
    """It is the smaller one here, and it has all layers: a pipeline of two, once a lease is out."""
    result = cut("cut:0,1,2,3@3.reduce")

    assert result.report.final.nodes == (4, 5)


@pytest.mark.long
def test_a_node_that_is_cut_off_while_others_recover_is_lost_then(cut: Cut) -> None:
    """What it was told to begin, it can not."""
    result = cut("kill:5@3", "cut:0@3.transfer")

    assert result.report.final.nodes == (1, 2, 3, 4)
