"""Connections between simulated processes, with what a network does to them.

A connection is TCP's: what is sent arrives whole, in order, once, after a delay; or the connection
breaks, and what was under way is lost. Where two places are cut off from each other, what is sent
waits until they are joined again, unless the cut broke the connection.
"""

from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

from planaria.simulator.loop import Loop, Process

_CLOSE = object()  # The last that an end sends.


class Network:
    """All connections of a run.

    Attributes:
        delay_s: of a message, at least; up to twice that.
        is_uneven: some connections are up to thirty times as slow as others.
        slow_share: of messages that take up to slow_s, 0 to 1.
    """

    def __init__(self, loop: Loop, rng: Random) -> None:
        self.delay_s = 0.0003
        self.is_uneven = False
        self.slow_share = 0.0
        self.slow_s = 0.3
        self._loop = loop
        self._rng = rng
        self._cuts: set[frozenset[int]] = set()
        self._ends: list[End] = []

    def pair(self, near: Process, far: Process) -> "tuple[End, End]":
        """Both ends of a new connection; whoever owns one sets what it does with what comes."""
        factor = 10.0 ** (self._rng.random() * 1.5) if self.is_uneven else 1.0
        ends = End(self, near, factor), End(self, far, factor)
        ends[0].other, ends[1].other = ends[1], ends[0]
        self._ends += ends
        for end in ends:
            end.process.at_exit(end.close)
        return ends

    def is_cut(self, place: int, other: int) -> bool:
        """Whether nothing gets from one place to the other."""
        return frozenset((place, other)) in self._cuts

    def cut(self, place: int, other: int, *, breaks: bool) -> None:
        """Cuts two places off from each other."""
        self._cuts.add(frozenset((place, other)))
        if breaks:
            for end in self._between(place, other):
                end.lose()

    def join(self, place: int, other: int) -> None:
        """Joins them again; what waited arrives."""
        self._cuts.discard(frozenset((place, other)))
        for end in self._between(place, other):
            end.send_held()

    def break_all(self, process: Process) -> None:
        """Breaks every connection of a process: what is under way is lost, and both ends know."""
        for end in [end for end in self._ends if process in (end.process, end.other.process)]:
            end.lose()

    def latency_s(self, factor: float = 1.0) -> float:
        """How long the next message takes, on a connection so much slower than others."""
        if self.slow_share and self._rng.random() < self.slow_share:
            return self._rng.random() * self.slow_s
        return factor * self.delay_s * (1.0 + self._rng.random())

    def after(self, delay_s: float, callback: Callable[[], None]) -> None:
        """Has something happen outside of all processes."""
        self._loop.after(delay_s, callback)

    @property
    def now_s(self) -> float:
        return self._loop.now_s

    def _between(self, place: int, other: int) -> "list[End]":
        self._ends = [end for end in self._ends if not end.is_over]
        places = {place, other}
        return [end for end in self._ends if {end.process.place, end.other.process.place} == places]


class End:
    """One end of a connection; the methods are for whoever owns it.

    Attributes:
        received: is given each message.
        closed: is called once the other end has closed, after all that it sent.
    """

    __slots__ = (
        "_arrives_s",
        "_factor",
        "_held",
        "_is_closed",
        "_is_lost",
        "_network",
        "closed",
        "other",
        "process",
        "received",
    )

    def __init__(self, network: Network, process: Process, factor: float) -> None:
        self.process = process
        self.other: End
        self.received: Callable[[Any], None] = _ignore
        self.closed: Callable[[], None] = _ignore
        self._network = network
        self._factor = factor
        self._arrives_s = 0.0
        self._held: deque[object] = deque()
        self._is_closed = False
        self._is_lost = False

    @property
    def is_over(self) -> bool:
        """Whether nothing can come of it any more."""
        return self._is_lost or (self._is_closed and self.other._is_closed)

    def send(self, message: object) -> None:
        """Sends a message, without waiting; nothing if the connection is closed."""
        if self._is_closed or self._is_lost:
            return
        now_s = self._network.now_s
        self._arrives_s = max(self._arrives_s, now_s + self._network.latency_s(self._factor))
        self._network.after(self._arrives_s - now_s, lambda: self._arrive(message))

    def close(self) -> None:
        """Ends the connection, after what was sent."""
        self.send(_CLOSE)
        self._is_closed = True

    def lose(self) -> None:
        """Breaks the connection: this end hears nothing more, what it sent may be lost."""
        if not self._is_lost:
            self._is_lost = True
            self._held.clear()
            delay_s = self._network.latency_s()
            self._network.after(delay_s, lambda: self.process.do(self._hear_end))

    def send_held(self) -> None:
        """Sends what waited for the places to be joined."""
        while self._held:
            self._deliver(self._held.popleft())

    def _arrive(self, message: object) -> None:
        """What meets a cut waits, and what was sent after it waits behind it."""
        if self._held or self._network.is_cut(self.process.place, self.other.process.place):
            self._held.append(message)
        else:
            self._deliver(message)

    def _deliver(self, message: object) -> None:
        other = self.other
        other.process.do(lambda: other._take(message))

    def _take(self, message: object) -> None:
        if self._is_lost:
            return
        if message is _CLOSE:
            self._is_lost = True
            self._hear_end()
        elif not self._is_closed:
            self.received(message)

    def _hear_end(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self.closed()


def _ignore(*_: object) -> None:
    """What an end does that nobody has taken up yet."""
