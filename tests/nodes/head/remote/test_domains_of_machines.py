"""Machines that name their failure domains: which nodes they run, and what these are told."""

from pathlib import Path

import msgspec
import pytest

from helpers.heads import CREDENTIALS, runs
from helpers.joined_machines import TIMEOUT_S, cluster
from helpers.tasks import wait_until
from planaria.core.job import CheckpointConfig, JobConfig, ModelConfig
from planaria.core.specs import NodeSpec
from planaria.errors import ConfigError
from planaria.job.on_machines import Listening, open_head

PACED = JobConfig(model=ModelConfig(kind="paced", profile="gpt3-xl"))
SPEC = NodeSpec(
    job=PACED, node=0, token=b"", coordinator=("", 0), worker="", cache_directory="", machine=""
)


@runs
async def test_machines_of_one_domain_are_neighbours(tmp_path: Path) -> None:
    """Pipelines are made of neighbours, so most of them lie within one domain. Each node knows its
    domain, and tells the coordinator."""
    async with cluster(tmp_path, PACED) as made:
        for number, domain in enumerate(("b", "a", "b", "a")):
            made.join(domain=domain)
            await made.wait_ready(number + 1)

        reserved = made.machines.reserve((0, 1, 2, 3))
        for node in (1, 3, 0, 2):
            made.machines.start(msgspec.structs.replace(SPEC, node=node), is_granted=False)
        await wait_until(lambda: len(made.specs) == 4)

    assert [reserved[node].domain for node in range(4)] == ["a", "a", "b", "b"]
    assert {spec.node: spec.domain for spec in made.specs} == {0: "a", 1: "a", 2: "b", 3: "b"}
    assert len({spec.machine for spec in made.specs}) == 4


@runs
async def test_a_machine_that_is_gone_is_replaced_by_any_that_is_free(tmp_path: Path) -> None:
    """Its number was reserved for it, and must not wait for it."""
    async with cluster(tmp_path, PACED) as made:
        made.join(domain="b")
        await made.wait_ready(1)
        gone = made.join(domain="a")
        await made.wait_ready(2)
        made.machines.reserve((0,))
        gone.cancel()
        await wait_until(lambda: made.machines.num_ready == 1)

        made.machines.start(SPEC, is_granted=False)
        await wait_until(lambda: len(made.specs) == 1)

    assert made.specs[0].domain == "b"


def test_numbers_of_nodes_name_no_machines_that_come_by_themselves(tmp_path: Path) -> None:
    checkpoint = CheckpointConfig(directory=str(tmp_path), failure_domains=((0, 1), (2, 3)))
    job = JobConfig(model=PACED.model, checkpoint=checkpoint)
    listening = Listening(
        address="127.0.0.1:0",
        credentials=CREDENTIALS,
        nodes_min=1,
        nodes_max=1,
        wait_s=TIMEOUT_S,
    )

    with (
        pytest.raises(ConfigError, match=r"checkpoint\.failure_domains = .*--domain NAME"),
        open_head(job, listening, search_path=(), left=None, note=print),
    ):
        pass
