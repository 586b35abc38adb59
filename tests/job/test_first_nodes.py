"""With which of the machines that have come a job begins."""

from dataclasses import replace
from pathlib import Path

import pytest

from helpers.left_runs import LISTENING, left_job
from planaria.core.job import ClusterConfig
from planaria.errors import ConfigError
from planaria.job.on_machines import num_first_nodes, open_head


@pytest.mark.parametrize(
    ("num_ready", "standby", "expected"),
    [(2, 0, 2), (3, 0, 3), (9, 0, 4), (2, 1, 2), (3, 1, 2), (4, 1, 3), (5, 1, 4), (9, 1, 4)],
)
def test_a_job_begins_with_all_machines_but_those_that_are_to_wait(
    num_ready: int, standby: int, expected: int
) -> None:
    """Those that were to wait became first nodes, more than cluster.max_nodes of them."""
    cluster = ClusterConfig(nodes=2, max_nodes=4, standby=standby)
    listening = replace(LISTENING, nodes_min=2, nodes_max=4 + standby)

    assert num_first_nodes(num_ready, cluster, listening) == expected


def test_machines_that_come_by_themselves_are_granted_by_nobody(tmp_path: Path) -> None:
    """Each grant was a node without a machine, which counted as lost at once."""
    job = left_job(tmp_path)
    job = replace(job, cluster=replace(job.cluster, grant_s=5.0))

    with (
        pytest.raises(ConfigError, match=r"cluster.grant_s = 5.0: .*cluster.wait_s"),
        open_head(job, LISTENING, search_path=(), left=None, note=pytest.fail),
    ):
        pytest.fail("it listens")
