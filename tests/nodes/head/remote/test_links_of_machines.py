"""Links between machines are measured before the job is planned: which ones, and what is told."""

from pathlib import Path

import pytest

from helpers.heads import runs
from helpers.joined_machines import Cluster, cluster
from planaria.core.job import JobConfig, ModelConfig
from planaria.core.machine_messages import MachineFacts
from planaria.nodes.head.remote import machine_handle
from planaria.nodes.head.remote.link_classes import LinkClass, first_pairs
from planaria.transport import link_measurement
from planaria.transport.sockets import Address

JOB = JobConfig(model=ModelConfig(kind="paced", profile="gpt3-xl"))


def facts(host: str, domain: str = "") -> MachineFacts:
    return MachineFacts(name="m", host=host, domain=domain)


@pytest.mark.parametrize(
    ("machines", "pairs"),
    [
        ((facts("a"), facts("a")), {}),
        ((facts("a"), facts("a"), facts("b")), {LinkClass.NEAR: (0, 2)}),
        ((facts("a", "x"), facts("b", "y")), {LinkClass.FAR: (0, 1)}),
        (
            (facts("a", "x"), facts("b", "y"), facts("c", "y"), facts("d", "x")),
            {LinkClass.FAR: (0, 1), LinkClass.NEAR: (0, 3)},
        ),
    ],
)
def test_the_first_pair_of_each_class_is_measured(
    machines: tuple[MachineFacts, ...], pairs: dict[LinkClass, tuple[int, int]]
) -> None:
    """Two agents of one machine have no network between them."""
    assert first_pairs(machines) == pairs


async def join(made: Cluster, *places: tuple[str, str]) -> None:
    """Machines at these addresses and in these domains come."""
    for host, domain in places:
        made.join(host=host, domain=domain)
        await made.wait_ready(len(made.ends))


@runs
async def test_machines_measure_their_links(tmp_path: Path) -> None:
    """Near and far ones; the user reads both."""
    async with cluster(tmp_path, JOB) as made:
        await join(made, ("127.0.0.2", "x"), ("127.0.0.3", "x"), ("127.0.0.4", "y"))

        links = await made.machines.measure_links()

    assert sorted(links) == [LinkClass.FAR, LinkClass.NEAR]
    assert all(link.bandwidth_bytes_per_s > 0.0 for link in links.values())
    assert len([note for note in made.notes if "Gbit/s" in note]) == 2


@runs
async def test_a_machine_that_hangs_does_not_hold_up_the_start_of_the_job(tmp_path: Path) -> None:
    """Its kernel goes on to answer, so its connection never breaks: the head waited for ever."""
    async with cluster(tmp_path, JOB) as made:
        await join(made, ("127.0.0.2", ""), ("127.0.0.3", ""))
        server, _ = made.machines.connected
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(machine_handle, "ANSWER_TIMEOUT_S", 0.1)
            patch.setattr(server, "tell", lambda _: None)

            assert await made.machines.measure_links() == {}

    [told] = [note for note in made.notes if "could not measure" in note]
    assert f"{server.name} opens no port" in told


@runs
async def test_machines_that_cannot_reach_one_another_are_named(tmp_path: Path) -> None:
    """Before training, where it would only show as a broken link; the job is not refused, because
    the measurement may be at fault."""

    def refuse(_address: Address, _secret: bytes, *, budget_s: float) -> None:
        del budget_s
        raise ConnectionError("127.0.0.2:1 cannot be reached: no route")

    async with cluster(tmp_path, JOB) as made:
        await join(made, ("127.0.0.2", ""), ("127.0.0.3", ""))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(link_measurement, "measure_link", refuse)
            patch.setattr(
                link_measurement, "serve_measurement", lambda listener, _: listener.close()
            )

            assert await made.machines.measure_links() == {}

    [told] = [note for note in made.notes if "could not measure" in note]
    assert "(127.0.0.3)" in told
    assert "127.0.0.2:1 cannot be reached: no route" in told
    assert "--advertise" in told
