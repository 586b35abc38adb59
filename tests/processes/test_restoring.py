"""Ways to restore a job and to sum gradients: several holders send a layer, and the bits stay."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.chaos import (
    catalog_for,
    chaos_job,
    check_report,
    only_recovery,
    run_under_faults,
    sized_plan,
)
from helpers.jobs import digests
from planaria.core.cluster import NodesLost, survivors
from planaria.core.job import JobConfig
from planaria.core.plan import Transfer
from planaria.nodes.forkserver import ForkServer
from planaria.policies.policy import profile_prices
from planaria.policies.reinstantiate import Reinstantiate
from planaria.restorer.strategies import LEAST_BYTES, NAIVE, RestoreStrategy

SIZES = (2, 2, 2)
LOST = 3
ITERATIONS = 4


def job(directory: Path, server: ForkServer) -> JobConfig:
    # With 12 samples a sum of float64 lies so near a rounding border that its order decides: one
    # element in five million, see docs/ASSUMPTIONS.md.
    return chaos_job("wide", directory, server, iterations=ITERATIONS, global_batch_size=20)


@pytest.fixture(scope="module")
def calm(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The digests of the job without losses."""
    result = run_under_faults(
        job(tmp_path_factory.mktemp("wide") / "calm", server), server, sizes=SIZES
    )
    assert result.error is None
    return digests(result)


def moved(config: JobConfig, restoring: RestoreStrategy) -> list[Transfer]:
    """What is sent after the loss."""
    catalog = replace(catalog_for(config), plans={})
    plan = sized_plan(config, SIZES)
    (found,) = Reinstantiate(catalog, restoring).propose(
        plan,
        survivors(plan, (LOST,), epoch=1),
        NodesLost((LOST,), 0),
        profile_prices(catalog.problem.profile, regroup_s=0.0),
    )
    return [transfer for transfers in found.rounds for transfer in transfers]


def test_several_holders_send_a_layer_and_the_bits_are_those_of_a_run_in_peace(
    server: ForkServer, tmp_path: Path, calm: tuple[str, str]
) -> None:
    """Three pipelines of two lose a node; blocks have more than two MiB."""
    config = job(tmp_path / "run", server)
    expected = moved(config, LEAST_BYTES)
    num_sources = Counter((transfer.layer, transfer.target) for transfer in expected)
    assert max(num_sources.values()) > 1

    result = run_under_faults(config, server, f"kill:{LOST}@2.backward", sizes=SIZES)

    assert result.error is None
    assert digests(result) == calm
    check_report(result)
    event = only_recovery(result)
    assert event.transfer_bytes == sum(transfer.num_bytes for transfer in expected)


@pytest.mark.long
def test_the_naive_ways_keep_the_bits_and_move_more(
    server: ForkServer, tmp_path: Path, calm: tuple[str, str]
) -> None:
    """What users measure with them is the way, not another result."""
    config = job(tmp_path / "run", server)
    naive = replace(config.resilience, assignment="naive", reductions="uncoloured")
    expected = moved(config, NAIVE)

    result = run_under_faults(
        replace(config, resilience=naive), server, f"kill:{LOST}@2.backward", sizes=SIZES
    )

    assert result.error is None
    assert digests(result) == calm
    check_report(result)
    event = only_recovery(result)
    assert event.transfer_bytes == sum(transfer.num_bytes for transfer in expected)
    assert event.transfer_bytes > sum(t.num_bytes for t in moved(config, LEAST_BYTES))
