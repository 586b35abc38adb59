"""The address at which the other machines reach one that is offered to a job."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from helpers.fake_fork_server import FakeForkServer
from helpers.heads import CREDENTIALS
from planaria.errors import ConfigError
from planaria.nodes import machine
from planaria.nodes.machine_spec import MachineSpec


class _Route:
    """The machine's end of a connection to a head."""

    def __init__(self, host: str) -> None:
        self._host = host

    def get_extra_info(self, name: str) -> tuple[str, int, int, int]:
        assert name == "sockname"
        return self._host, 1, 0, 2


def _spec(cache: Path, *, host: str) -> MachineSpec:
    made: Any = FakeForkServer()
    return MachineSpec(
        heads=(("head", 1),),
        credentials=CREDENTIALS,
        host=host,
        domain="",
        notice="",
        has_code=False,
        stays=False,
        cache_directory=str(cache),
        server=lambda *_: made,
        note=lambda _: None,
    )


def test_a_machine_that_only_its_neighbours_reach_by_a_scope_ends(tmp_path: Path) -> None:
    """The route to the head was one of a link-local address, which says on its own machine alone
    which interface it means: each worker died when it listened there."""
    made = machine._Machine(_spec(tmp_path, host=""))
    reader: Any = None  # Nothing is read.
    route: Any = _Route("fe80::1")
    with pytest.raises(ConfigError, match=r"fe80::1, a link-local .*--advertise.*--interface"):
        asyncio.run(made._talk(reader, route))


def test_a_route_to_a_head_changes_no_address_that_others_know(tmp_path: Path) -> None:
    """A machine that runs a node may find its next head by a link-local address."""
    assert _spec(tmp_path, host="").own_host("10.0.0.1", known="") == "10.0.0.1"
    assert _spec(tmp_path, host="").own_host("fe80::1", known="10.0.0.1") == "10.0.0.1"
    assert _spec(tmp_path, host="node-1").own_host("fe80::1", known="") == "node-1"
