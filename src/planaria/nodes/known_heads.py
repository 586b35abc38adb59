"""Where nodes and agents that have lost their head look for one.

They try the addresses that they were given, all at once, and those at which a head of the job's
newest run has written that it listens: a head may be started anywhere, with the same place of
saves. While there is no head, that file is read every 5 s at most. Addresses that are new in it
come first. They never take the place of the given ones. Who wrote the file need not be trusted: a
head proves that it has the token file, wherever it listens.

A head that answers may be none for this node: it is one of another job, say, or it was replaced by
a newer one. So an address that has answered is left out of the next tries, unless it is kept.

Source: docs/protocol.md, "Nodes without a head".
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final

import msgspec

from planaria.checkpoint.disk.parts import RunPlace, newest_run
from planaria.checkpoint.disk.storage import Storage, storage_of
from planaria.checkpoint.disk.time_limits import LOOK_TIMEOUT_S, TimeLimitedStorage
from planaria.errors import PlanariaError
from planaria.nodes.child_answers import answer_of_child
from planaria.nodes.daemon_threads import answer_of_thread
from planaria.transport.sockets import (
    Address,
    Endpoint,
    address_text,
    endpoints_of,
    literal_endpoints,
)

logger = logging.getLogger(__name__)

LOOK_PERIOD_S: Final = 5.0
_NUM_NAMED_MAX: Final = 4  # Connections that hundreds of nodes begin at once, for each.

# Returns the addresses that are written at a place of saves, without blocking the event loop.
Look = Callable[[str], Awaitable[tuple[Address, ...]]]


class KnownHeads:
    """The addresses at which a head may be. Used on one event loop.

    Args:
        given: addresses that the user has given.
        look: see Look.
        place: place of the job's saves, where heads write their addresses; "": none is known.
        clock_s: returns the time in seconds.

    Attributes:
        place: see above.
    """

    def __init__(
        self,
        given: Sequence[Address],
        look: Look,
        *,
        place: str = "",
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.place = place
        self._given = tuple(given)
        self._look, self._clock_s = look, clock_s
        self._addresses = self._given  # The first is tried first.
        self._left_out: set[Address] = set()
        self._has_answered = False  # Whether one has since they were last tried.
        self._named: frozenset[Address] = frozenset()
        self._looking: asyncio.Task[None] | None = None
        self._look_s = clock_s()  # A head was there a moment ago.

    @property
    def num_addresses(self) -> int:
        """The number of addresses at which a head may be."""
        return len(self._addresses)

    def look_at(self, place: str) -> None:
        """Has another place of saves looked at; what was read at the one before is forgotten."""
        if place == self.place:
            return
        self.place, self._named = place, frozenset()
        self._addresses = self._given

    def next_addresses(self) -> tuple[Address, ...]:
        """The addresses to try next, all at once, while there is no head; the best one first.

        Those are left out that have answered, until all others have, or were tried in vain. This
        has the place of saves looked at if that was not done lately.
        """
        now_s = self._clock_s()
        if self.place and self._looking is None and now_s - self._look_s >= LOOK_PERIOD_S:
            self._look_s = now_s
            self._looking = asyncio.create_task(self._take_named(self.place))
        if not self._has_answered or self._left_out.issuperset(self._addresses):
            self._left_out.clear()
        self._has_answered = False
        return tuple(address for address in self._addresses if address not in self._left_out)

    def leave_out(self, address: Address) -> None:
        """Has an address that has answered left out of the next tries, unless it is kept."""
        self._left_out.add(address)
        self._has_answered = True

    def keep(self, address: Address) -> None:
        """Has an address tried first next time: a head that is lost comes back there, probably."""
        self._left_out.clear()
        if address in self._addresses:  # Else the file names another one since.
            self._addresses = (address, *(each for each in self._addresses if each != address))

    async def _take_named(self, place: str) -> None:
        """Takes the addresses that are written at a place, those that are new there first."""
        try:
            named = (await self._look(place))[:_NUM_NAMED_MAX]
        except (MemoryError, OSError, PlanariaError, RuntimeError) as error:
            # RuntimeError: no thread can be started.
            logger.info("where a head listens cannot be read: %s", error)
            return
        finally:
            self._looking = None
        if place != self.place:  # The job has ended meanwhile.
            return
        if not named:  # A look that failed in a child process, or no head of the run has written.
            return
        new = [address for address in named if address not in self._named]
        kept = [
            address
            for address in self._addresses
            if address not in new and (address in self._given or address in named)
        ]
        self._addresses = (*new, *kept)
        self._named = frozenset(named)


def addresses_at(storage: Storage) -> tuple[Address, ...]:
    """The addresses that a head of the newest run has written; (): there are none.

    Raises:
        CheckpointError: the storage refuses.
    """
    name = newest_run(storage)
    mark = RunPlace(storage, name).head() if name else None
    return () if mark is None else mark.addresses


def look_by_thread() -> Look:
    """Looks by a thread. A storage that hangs keeps one thread, and no other look is made then."""
    storages: dict[str, TimeLimitedStorage] = {}

    def addresses(place: str) -> tuple[Address, ...]:
        if place not in storages:
            storages.clear()
            storages[place] = TimeLimitedStorage(storage_of(place), timeout_s=LOOK_TIMEOUT_S)
        return addresses_at(storages[place])

    return lambda place: answer_of_thread(partial(addresses, place), name="head")


async def look_by_child(place: str) -> tuple[Address, ...]:
    """Looks by a child process, for an agent.

    An agent forks workers, so it has no threads; those of an object store's client would hang in
    the workers.
    """

    def answer() -> bytes:
        try:
            return msgspec.json.encode(addresses_at(storage_of(place)))
        except PlanariaError:
            return b""

    data = await answer_of_child(answer, timeout_s=LOOK_TIMEOUT_S)
    return msgspec.json.decode(data, type=tuple[Address, ...]) if data else ()


async def endpoints_by_child(address: Address) -> list[Endpoint]:
    """Resolves an address by a child process, for an agent, as `look_by_child` looks; see Resolve.

    Raises:
        OSError: the name does not resolve.
    """
    if literal := literal_endpoints(address):
        return literal

    def answer() -> bytes:
        try:
            return msgspec.json.encode(endpoints_of(address))
        except OSError as error:
            return msgspec.json.encode(str(error))

    data = await answer_of_child(answer, timeout_s=LOOK_TIMEOUT_S)
    resolved = msgspec.json.decode(data or b'"no answer"', type=list[Endpoint] | str)
    if isinstance(resolved, str):
        raise OSError(resolved)
    return resolved


def connection_problem(error: EOFError | OSError, head: Address) -> str:
    """Why there is no connection to a head; the system's own words do not name the head."""
    if isinstance(error, OSError) and error.errno:
        return f"the connection to {address_text(head)} broke: {error.strerror}"
    return str(error)
