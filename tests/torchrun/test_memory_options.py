"""Numbers that a MemoryCheckpointer cannot do with are refused by name."""

import socket
import stat
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from planaria.core.copies import BUFFER_BYTES_MIN
from planaria.errors import ConfigError
from planaria.torchrun import arguments
from planaria.torchrun.arguments import check_least, own_host
from planaria.torchrun.rank_memory import RankMemory

LOCAL = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")

FINE: dict[str, Any] = {
    "copies": 1,
    "buffer_bytes": BUFFER_BYTES_MIN,
    "profile_iterations": 0,
    "idle_s": inf,
}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("copies", 0), ("copies", 2.5)),
        *(("buffer_bytes", 0), ("buffer_bytes", BUFFER_BYTES_MIN - 1), ("buffer_bytes", 1e9)),
        *(("profile_iterations", -1), ("idle_s", 0), ("idle_s", -1.0), ("idle_s", nan)),
    ],
)
def test_numbers_that_will_not_do_are_refused(field: str, value: float) -> None:
    """Buffers of a few bytes would send a copy for minutes."""
    check_least(**FINE)

    with pytest.raises(ConfigError, match=r"a whole number of at least|above 0,") as caught:
        check_least(**{**FINE, field: value})
    assert caught.value.field == field
    assert caught.value.value is value


class Network:
    """The names that a machine knows, and its own address on the way to others."""

    def __init__(self) -> None:
        self.names = {"head": ["127.0.1.1"], "six": ["fd00::1"], "both": ["127.0.1.1", "10.0.0.1"]}
        self.sources = {"127.0.1.1": "127.0.0.1", "fd00::1": "fd00::7", "10.0.0.1": "10.0.0.7"}

    def resolve(self, name: str, port: int, **_: Any) -> list[Any]:
        if name not in self.names:
            raise socket.gaierror("no such name")
        families = {":": socket.AF_INET6, ".": socket.AF_INET}
        return [
            (families[":" if ":" in address else "."], 0, 0, "", (address, port))
            for address in self.names[name]
        ]

    def source(self, _: int, address: str) -> str:
        return self.sources.get(address, "")


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    """One of two machines with a rank each."""
    network = Network()
    monkeypatch.setattr(socket, "getaddrinfo", network.resolve)
    monkeypatch.setattr(arguments, "_source_address", network.source)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    return network


@pytest.mark.parametrize(
    ("master", "host"),
    [("six", "fd00::7"), ("both", "10.0.0.7"), ("head", "10.9.9.9"), ("unknown", "10.9.9.9")],
)
def test_other_machines_are_given_an_address_that_they_reach(
    master: str, host: str, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian has a machine's own name mean its loopback, and a network may have IPv6 alone."""
    network.sources["192.0.2.1"] = "10.9.9.9"  # The way to anywhere.
    monkeypatch.setenv("MASTER_ADDR", master)

    assert own_host() == host


@pytest.mark.usefixtures("network")
def test_a_machine_that_others_could_not_reach_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would wait for ten minutes; where all ranks are on it, its loopback will do."""
    monkeypatch.setenv("MASTER_ADDR", "head")
    with pytest.raises(ConfigError, match="an address of its machine that others reach") as caught:
        own_host()
    assert caught.value.field == "MASTER_ADDR"

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert own_host() == "127.0.0.1"


@pytest.mark.parametrize("master", ["127.0.0.1", "localhost", "127.0.0.9"])
def test_a_master_at_the_loopback_has_all_nodes_on_one_machine(
    master: str, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the number of nodes there, each with a keeper of its own."""
    network.names[master] = ["127.0.0.1"]
    network.sources["127.0.0.1"] = "127.0.0.1"
    network.sources["192.0.2.1"] = "10.9.9.9"
    monkeypatch.setenv("MASTER_ADDR", master)

    assert own_host() == "127.0.0.1"


@pytest.mark.parametrize(
    ("local", "field"),
    [
        ({"LOCAL_RANK": "1"}, "LOCAL_WORLD_SIZE"),
        ({"LOCAL_RANK": "0"}, "LOCAL_WORLD_SIZE"),
        ({"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK"),
        ({"LOCAL_RANK": "-1", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK"),
    ],
)
def test_a_place_on_a_machine_of_unknown_size_is_refused(
    local: dict[str, str], field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first start would do, and a restart would read places that others hold."""
    for name in LOCAL:
        monkeypatch.delenv(name, raising=False)
    for name, value in local.items():
        monkeypatch.setenv(name, value)

    with pytest.raises(ConfigError) as caught:
        RankMemory(tmp_path, idle_s=1.0)
    assert caught.value.field == field


def test_machines_may_share_the_directory_of_their_keepers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each took the other's socket for that of a killed keeper, and removed it."""
    for name in LOCAL:
        monkeypatch.delenv(name, raising=False)
    place, memories = tmp_path / "place", []
    try:
        for machine in ("one.cluster", "two.cluster"):
            monkeypatch.setattr(socket, "gethostname", lambda machine=machine: machine)
            memories.append(RankMemory(place, idle_s=60.0))

        assert not any(memory._slot.is_gone for memory in memories)
        sockets = sorted(path.parent.name for path in place.rglob("socket"))
        assert sockets == ["one_cluster", "two_cluster"]
        modes = {stat.S_IMODE(path.stat().st_mode) for path in (place, *place.iterdir())}
        assert modes == {0o700}
    finally:
        for memory in memories:
            memory.close()
