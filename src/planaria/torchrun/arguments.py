"""The arguments of a MemoryCheckpointer: their bounds, defaults, and the memory that they take."""

import contextlib
import ipaddress
import operator
import os
import socket
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, SupportsIndex

import torch.distributed as dist

from planaria.checkpoint.memory.room import available_bytes
from planaria.core.copies import BUFFER_BYTES_MIN, LayerCopy
from planaria.errors import ConfigError
from planaria.placement.placement import Strategy
from planaria.torchrun.gathering import gather_records
from planaria.transport.sockets import bare_host, is_literal

_LOOPBACK: Final = "127.0.0.1"
_PORT: Final = 9  # Any will do: nothing is sent.
# Addresses for documentation (RFC 5737, RFC 3849), which are reached by the default route.
_ANYWHERE: Final = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options that hold for each group of ranks; MemoryCheckpointer explains most of them.

    Attributes:
        host: address by which other nodes reach this one.
        store_port: port of this rank's store, at which ranks meet after a loss; 0: it has none.
    """

    copies: int
    placement: Strategy
    domain: str
    buffer_bytes: int
    profile_iterations: int
    persist_every: int
    host: str
    store_port: int


def check_least(
    *,
    copies: int,
    buffer_bytes: int,
    profile_iterations: int,
    idle_s: float,
    persist_every: int = 1,
    keep: int = 1,
) -> None:
    """Refuses numbers that are too small, or not whole numbers where only those make sense.

    Raises:
        ConfigError: a number is refused; the error names the first such.
    """
    for field, value, least, why in (
        ("copies", copies, 1, "the node's own copy counts"),
        ("buffer_bytes", buffer_bytes, BUFFER_BYTES_MIN, "smaller buffers make copies slow"),
        ("profile_iterations", profile_iterations, 0, "with 0 copies are sent at once"),
        ("persist_every", persist_every, 1, "it counts iterations"),
        ("keep", keep, 0, "with 0 all saves are kept"),
    ):
        if not isinstance(value, int) or value < least:
            raise ConfigError(field, value, f"must be a whole number of at least {least}; {why}")
    if not idle_s > 0:
        raise ConfigError(
            "idle_s",
            idle_s,
            "must be above 0, because else copies are lost together with the ranks",
        )


def whole_number(field: str, value: SupportsIndex) -> int:
    """A whole number of any type, such as those of numpy, as an int.

    Raises:
        ConfigError: it is none.
    """
    try:
        return operator.index(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(field, value, "must be a whole number") from error


def own_host() -> str:
    """The address by which other nodes reach this one.

    That is its address on the way to the master. If the master's name means the loopback here, as a
    machine's own name does on Debian, it is the address on the way to anywhere.

    Raises:
        ConfigError: ranks are on several machines, and no address but the loopback is known.
    """
    master = bare_host(os.environ.get("MASTER_ADDR", "127.0.0.1"))
    sources = _sources_towards(master)
    if host := _first_beyond_loopback(sources):
        return host
    host = sources[0] if sources else _LOOPBACK
    is_named_so = master == "localhost" or (is_literal(master) and _is_loopback(master))
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if is_named_so or int(os.environ.get("WORLD_SIZE", "1")) <= num_local:
        return host
    sources = [_source_address(family, address) for family, address in _ANYWHERE]
    if anywhere := _first_beyond_loopback(sources):
        return anywhere
    if "LOCAL_WORLD_SIZE" in os.environ:
        remedy = (
            "it means this machine's loopback here, and ranks are on other machines, too; name an "
            "address of its machine that others reach"
        )
        raise ConfigError("MASTER_ADDR", master, remedy)
    return host


def _sources_towards(name: str) -> list[str]:
    """This machine's addresses on the ways to those of a name."""
    try:
        infos = socket.getaddrinfo(name, _PORT, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):  # The latter if it cannot be a name.
        return []
    sources = (_source_address(family, str(endpoint[0])) for family, *_, endpoint in infos)
    return [source for source in sources if source]


def _source_address(family: int, address: str) -> str:
    """This machine's address on the way to an address, to which nothing is sent; "": no way."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((address, _PORT))
            source: str = sock.getsockname()[0]
            return source
    except OSError:
        return ""


def _first_beyond_loopback(addresses: Sequence[str]) -> str:
    return next((each for each in addresses if each and not _is_loopback(each)), "")


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def runtime_directory() -> Path:
    """The directory in which each keeper of the user has a directory for its socket.

    It is made if it is missing, for access by the user alone. Launchers have sockets there, too.
    """
    base = os.environ.get("XDG_RUNTIME_DIR")
    path = Path(base) / "planaria" if base else Path(f"/tmp/planaria-{os.getuid()}")
    with contextlib.suppress(OSError):  # The use of the directory raises a better error.
        path.mkdir(mode=0o700, exist_ok=True)
    return path


# -- a check, on all ranks, that nodes have the memory for the copies that they are to keep --------


def check_room_on_all(
    nodes: Sequence[str],
    copies: Sequence[LayerCopy],
    *,
    num_copies: int,
    own_bytes: int,
    arena_bytes: int,
    is_persisted: bool = False,
) -> None:
    """Refuses copies if a node lacks the memory for two versions of each shard that it keeps.

    One of the two is whole while the other one is copied. A version of the node's own shards that
    is being written to disk takes memory once more.

    Args:
        nodes: names of all ranks' nodes, by rank.
        copies: shards with the ranks that keep copies of them.
        num_copies: number of copies that the user asked for.
        own_bytes: size of this rank's own shard; 0: this rank copies none.
        arena_bytes: memory that this rank has for copies already.

    Raises:
        ConfigError: a node lacks memory; raised on all ranks.
    """
    sizes = gather_records(int, own_bytes)
    kept: defaultdict[str, float] = defaultdict(float)
    for node, size in zip(nodes, sizes, strict=True):
        kept[node] += size * (1.5 if is_persisted else 1.0)
    for copy in copies:
        for target in copy.targets:
            kept[nodes[target]] += sizes[copy.source]
    here, arenas = nodes[dist.get_rank()], gather_records(int, arena_bytes)
    there = sum(size for size, node in zip(arenas, nodes, strict=True) if node == here)
    needed, room = int(2 * kept[here]), available_bytes() + there
    short = "" if needed <= room else f"{here} has {room} bytes, and they take {needed} there"
    for reason in filter(None, gather_records(str, short)):
        raise ConfigError("copies", num_copies, f"{reason}; make fewer copies, or use more nodes")
