"""Connections between simulated processes, with delays, cuts and breaks.

A connection behaves like TCP: messages arrive whole, in order and once, after a delay; or the
connection breaks, and messages in flight are lost. While two places are cut off from each other,
messages wait until the places are joined again, unless the cut broke the connection.
"""

from collections import Counter, deque
from collections.abc import Callable
from random import Random
from typing import Any

from planaria.simulator.loop import Loop, Process

_CLOSE = object()  # The last message that an end sends.


class Network:
    """All connections of a run.

    Attributes:
        delay_s: lower bound on the delay of a message; the upper bound is twice that.
        is_uneven: whether the delays of new connections are 1 to about 30 times as long.
        slow_share: share of messages that take up to slow_s, 0 to 1.
        slow_s: upper bound on the delay of a slow message.
    """

    def __init__(self, loop: Loop, rng: Random) -> None:
        self.delay_s = 0.0003
        self.is_uneven = False
        self.slow_share = 0.0
        self.slow_s = 0.3
        self._loop = loop
        self._rng = rng
        self._cuts: set[frozenset[int]] = set()
        self._num_isolated: Counter[int] = Counter()  # How often each place is isolated now.
        self._ends: list[Endpoint] = []

    def pair(self, near: Process, far: Process) -> "tuple[Endpoint, Endpoint]":
        """Both ends of a new connection; the owner of an end sets its callbacks."""
        factor = 10.0 ** (self._rng.random() * 1.5) if self.is_uneven else 1.0
        ends = Endpoint(self, near, factor), Endpoint(self, far, factor)
        ends[0].other, ends[1].other = ends[1], ends[0]
        self._ends += ends
        for end in ends:
            end.process.at_exit(end.close)
        return ends

    def is_cut(self, place: int, other: int) -> bool:
        """Whether two places are cut off from each other."""
        is_isolated = self._num_isolated and (
            self._num_isolated[place] > 0 or self._num_isolated[other] > 0
        )
        return bool(is_isolated) or frozenset((place, other)) in self._cuts

    def cut(self, place: int, other: int, *, breaks: bool) -> None:
        """Cuts two places off from each other."""
        self._cuts.add(frozenset((place, other)))
        if breaks:
            for end in self._between(place, other):
                end.break_off()

    def reconnect(self, place: int, other: int) -> None:
        """Joins two places again; messages that waited arrive."""
        self._cuts.discard(frozenset((place, other)))
        for end in self._between(place, other) if not self.is_cut(place, other) else ():
            end.send_waiting()

    def isolate(self, place: int, *, breaks: bool) -> None:
        """Cuts a place off from all others, also from those that come later."""
        self._num_isolated[place] += 1
        for end in self._ends_at(place) if breaks else ():
            end.break_off()

    def rejoin(self, place: int) -> None:
        """Ends one isolation of a place; if it was the last one, messages that waited arrive."""
        self._num_isolated[place] -= 1
        for end in self._ends_at(place) if not self._num_isolated[place] else ():
            if not self.is_cut(end.process.place, end.other.process.place):
                end.send_waiting()

    def break_all(self, process: Process) -> None:
        """Breaks every connection of a process: messages in flight are lost, and both ends learn
        of it."""
        for end in [end for end in self._ends if process in (end.process, end.other.process)]:
            end.break_off()

    def latency_s(self, factor: float = 1.0) -> float:
        """The delay of the next message on a connection.

        Args:
            factor: slowness of the connection; 1 is normal.
        """
        if self.slow_share and self._rng.random() < self.slow_share:
            return self._rng.random() * self.slow_s
        return factor * self.delay_s * (1.0 + self._rng.random())

    def after(self, delay_s: float, callback: Callable[[], None]) -> None:
        """Calls something after a delay, outside of all processes."""
        self._loop.after(delay_s, callback)

    @property
    def now_s(self) -> float:
        return self._loop.now_s

    def _ends_at(self, place: int) -> "list[Endpoint]":
        self._ends = [end for end in self._ends if not end.is_over]
        return [end for end in self._ends if place in (end.process.place, end.other.process.place)]

    def _between(self, place: int, other: int) -> "list[Endpoint]":
        self._ends = [end for end in self._ends if not end.is_over]
        places = {place, other}
        return [end for end in self._ends if {end.process.place, end.other.process.place} == places]


class Endpoint:
    """One end of a connection; its owner calls the methods.

    Attributes:
        on_message: callback that gets each message.
        on_close: callback for when the other end has closed and all its messages have arrived, or
            the connection has broken.
    """

    __slots__ = (
        "_arrives_s",
        "_factor",
        "_is_closed",
        "_is_lost",
        "_network",
        "_waiting_messages",
        "on_close",
        "on_message",
        "other",
        "process",
    )

    def __init__(self, network: Network, process: Process, factor: float) -> None:
        self.process = process
        self.other: Endpoint
        self.on_message: Callable[[Any], None] = _ignore
        self.on_close: Callable[[], None] = _ignore
        self._network = network
        self._factor = factor
        self._arrives_s = 0.0
        self._waiting_messages: deque[object] = deque()
        self._is_closed = False
        self._is_lost = False

    @property
    def is_over(self) -> bool:
        """Whether neither end can receive anything any more."""
        return self._is_lost or (self._is_closed and self.other._is_closed)

    def send(self, message: object) -> None:
        """Sends a message without waiting; does nothing if the connection is closed."""
        if self._is_closed or self._is_lost:
            return
        now_s = self._network.now_s
        self._arrives_s = max(self._arrives_s, now_s + self._network.latency_s(self._factor))
        self._network.after(self._arrives_s - now_s, lambda: self._arrive(message))

    def close(self) -> None:
        """Closes the connection; messages sent before still arrive."""
        self.send(_CLOSE)
        self._is_closed = True

    def break_off(self) -> None:
        """Breaks the connection: this end receives nothing more, and its messages in flight may be
        lost."""
        if not self._is_lost:
            self._is_lost = True
            self._waiting_messages.clear()
            delay_s = self._network.latency_s()
            self._network.after(delay_s, lambda: self.process.call(self._on_end))

    def send_waiting(self) -> None:
        """Delivers the messages that waited for the places to be joined."""
        while self._waiting_messages:
            self._deliver(self._waiting_messages.popleft())

    def _arrive(self, message: object) -> None:
        """Delivers a message; holds it back if the places are cut off or others wait before it."""
        if self._waiting_messages or self._network.is_cut(
            self.process.place, self.other.process.place
        ):
            self._waiting_messages.append(message)
        else:
            self._deliver(message)

    def _deliver(self, message: object) -> None:
        other = self.other
        other.process.call(lambda: other._receive(message))

    def _receive(self, message: object) -> None:
        if self._is_lost:
            return
        if message is _CLOSE:
            self._is_lost = True
            self._on_end()
        elif not self._is_closed:
            self.on_message(message)

    def _on_end(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self.on_close()


def _ignore(*_: object) -> None:
    """The callback of an end whose owner has not set one."""
