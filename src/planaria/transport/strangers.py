"""Bounds on what strangers cost: connections that have not proved themselves, and lines of the log.

Whoever reaches a port can open connections to it, and as many as they like. Only so many of those
that have proved nothing are kept at once (`Unproven`). When one more comes, the source that has the
most of them loses its oldest: so a flood from one machine takes no place from the others.
"""

import asyncio
import logging
import socket
from collections.abc import Iterator
from typing import Any, Final, Generic, TypeVar

_LOG_PERIOD_S: Final = 10.0
_LINES_PER_PERIOD: Final = 5
_PREFIX_BYTES: Final = 8  # A machine has all IPv6 addresses that begin alike.

Item = TypeVar("Item")


class Unproven(Generic[Item]):
    """Items that stand for unproven connections, in the order of their arrival.

    Args:
        num_max: number of items that are kept.
    """

    def __init__(self, num_max: int) -> None:
        self._num_max = num_max
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

    def surplus(self) -> Item | None:
        """The item that has to give way, if there are more than may be kept. O(sources)."""
        return self.oldest_of_most() if len(self) > self._num_max else None

    def oldest_of_most(self) -> Item | None:
        """The oldest item of the source that has the most items; None if there are none."""
        if not self._by_source:
            return None
        most = max(self._by_source, key=lambda source: len(self._by_source[source]))
        return next(iter(self._by_source[most]))


class RefusalLog:
    """The log of refused connections: a line each, but only a few lines in ten seconds.

    Args:
        log: logger to which the lines go.
        period_s: time in which at most five lines are written, and one that counts the others.
    """

    def __init__(self, log: logging.Logger, *, period_s: float = _LOG_PERIOD_S) -> None:
        self._log = log
        self._period_s = period_s
        self._num = 0

    def add(self, reason: object) -> None:
        """Logs a refusal; must be called on an event loop."""
        if not self._num:
            asyncio.get_running_loop().call_later(self._period_s, self._end_period)
        self._num += 1
        if self._num <= _LINES_PER_PERIOD:
            self._log.warning("refused a connection: %s", reason)

    def _end_period(self) -> None:
        num_more, self._num = self._num - _LINES_PER_PERIOD, 0
        if num_more > 0:
            self._log.warning(
                "refused %s more connections in the last %.0f s", num_more, self._period_s
            )


def source_of(address: tuple[Any, ...]) -> bytes:
    """The machine to which an endpoint of a socket belongs, as far as its address tells."""
    host = address[0].partition("%")[0] if address else ""
    if ":" in host:
        return socket.inet_pton(socket.AF_INET6, host)[:_PREFIX_BYTES]
    return socket.inet_pton(socket.AF_INET, host) if host else b""
