"""Bounds on what strangers cost: connections that have not proved themselves, and lines of the log.

Whoever reaches a port can open connections to it, and as many as they like. Only so many of those
that have proved nothing are kept at once (`Unproven`). When one more comes, the source that has the
most of them loses its oldest: so a flood from one machine takes no place from the others. Fewer are
kept where descriptors are scarce, but always a few, among which a machine of the job may be.
"""

import ipaddress
import logging
import math
import resource
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, Generic, TypeVar

NUM_UNPROVEN_MAX: Final = 512  # Machines of a large job may come at the same time.
_UNPROVEN_PER_RANK: Final = 2  # Its worker, and the one before, whose end is not noticed yet.
# Share of the descriptors of a process that unproven connections may take, and share that they
# leave free for the job's own connections and files.
_FILES_SHARE: Final = 0.25
_NUM_ALWAYS_KEPT: Final = 8
_LOG_PERIOD_S: Final = 10.0
_LINES_PER_PERIOD: Final = 5
_PREFIX_BYTES: Final = 8  # A machine has all IPv6 addresses that begin alike.

Item = TypeVar("Item")


def num_unproven_max(num_ranks: int) -> int:
    """Number of unproven connections that a rank keeps: all its peers may come at the same time.

    Args:
        num_ranks: number of ranks of the job.
    """
    return max(NUM_UNPROVEN_MAX, _UNPROVEN_PER_RANK * num_ranks)


def num_files_for(num_ranks: int) -> int:
    """Number of descriptors of which all peers that come at the same time take their share.

    Args:
        num_ranks: number of ranks of the job.
    """
    return round(_UNPROVEN_PER_RANK * num_ranks / _FILES_SHARE)


def raise_soft_limit(num_files: int) -> None:
    """Lets this process, and those it starts, open so many files, if its hard limit does.

    With a lower hard limit it may open as many as that says.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        num_files = min(num_files, hard)
    if soft != resource.RLIM_INFINITY and soft < num_files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, hard))


class Unproven(Generic[Item]):
    """Items that stand for unproven connections, in the order of their arrival.

    Args:
        num_max: number of items that are kept; fewer where the process may open few files.
    """

    def __init__(self, num_max: int = NUM_UNPROVEN_MAX) -> None:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        num_affordable = num_max if limit == resource.RLIM_INFINITY else int(_FILES_SHARE * limit)
        self._num_max = max(1, min(num_max, num_affordable))
        self._sources: dict[Item, bytes] = {}
        self._by_source: dict[bytes, dict[Item, None]] = {}

    def __len__(self) -> int:
        return len(self._sources)

    def __iter__(self) -> Iterator[Item]:
        return iter(self._sources)

    def add(self, item: Item, source: bytes) -> None:
        """Keeps an item until it is removed."""
        self._sources[item] = source
        self._by_source.setdefault(source, {})[item] = None

    def remove(self, item: Item) -> None:
        """Forgets an item; one that is not kept is ignored."""
        source = self._sources.pop(item, None)
        if source is None:
            return
        del self._by_source[source][item]
        if not self._by_source[source]:
            del self._by_source[source]

    def surplus(self, descriptor: int) -> Item | None:
        """The item that has to give way, if there are more than may be kept. O(sources).

        Args:
            descriptor: number of the newest connection's socket. The kernel takes the lowest that
                is free, so it tells how many are in use.
        """
        num_kept = self._num_max
        if _are_scarce(descriptor):
            num_kept = min(num_kept, _NUM_ALWAYS_KEPT)
        return self.oldest_of_most() if len(self) > num_kept else None

    def oldest_of_most(self) -> Item | None:
        """The oldest item of the source that has the most items; None if there are none."""
        if not self._by_source:
            return None
        most = max(self._by_source, key=lambda source: len(self._by_source[source]))
        return next(iter(self._by_source[most]))


def _are_scarce(descriptor: int) -> bool:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit != resource.RLIM_INFINITY and descriptor >= (1.0 - _FILES_SHARE) * limit


class RefusalLog:
    """The log of refused connections: a line each, but only a few lines in ten seconds.

    Args:
        log: logger to which the lines go.
        now_s: clock.
    """

    def __init__(self, log: logging.Logger, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._now_s = now_s
        self._end_s = -math.inf  # End of the period in which the next refusals are counted.
        self._num = 0

    def add(self, reason: object) -> None:
        """Logs a refusal, or counts it for the line that the next one after the period brings."""
        now_s = self._now_s()
        if now_s >= self._end_s:
            num_more, self._num = self._num - _LINES_PER_PERIOD, 0
            if num_more > 0:
                self._log.warning("refused %s more connections before that", num_more)
            self._end_s = now_s + _LOG_PERIOD_S
        self._num += 1
        if self._num <= _LINES_PER_PERIOD:
            self._log.warning("refused a connection: %s", reason)


def source_of(address: tuple[Any, ...]) -> bytes:
    """The machine to which an endpoint of a socket belongs, as far as its address tells."""
    host = address[0].partition("%")[0] if address else ""
    if ":" not in host:
        return socket.inet_pton(socket.AF_INET, host) if host else b""
    # A listener for both families shows IPv4 addresses as IPv6 ones that begin alike.
    ip = ipaddress.IPv6Address(host)
    return ip.ipv4_mapped.packed if ip.ipv4_mapped else ip.packed[:_PREFIX_BYTES]
