"""Ways of a node that take their time: until when each is taken, and what waits for it.

A clock is until when a way is taken. It lies in a file in memory that the workers of a node
inherit, and is read and written under a record lock, which the kernel takes back from a process
that is killed. What waits in a lane takes its way slice by slice, never more than one ahead: so the
flows of several ranks share a way, and what a dead process had still to send keeps nobody waiting.

Nothing here knows what time it is: moments are arguments.
"""

import fcntl
import math
import os
import struct
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, TypeVar

SLICE_S: Final = 0.01

_CLOCK: Final = struct.Struct("=d")

Flow = TypeVar("Flow")
Content = TypeVar("Content")
# When something is ready, and how long it takes the way: when that begins.
Reserve = Callable[[float, float], float]


def shared_clocks(num_clocks: int) -> int:
    """The descriptor of a file in memory with so many clocks, all free; for others to inherit."""
    descriptor = os.memfd_create("clocks")
    os.ftruncate(descriptor, num_clocks * _CLOCK.size)
    return descriptor


class Clock:
    """Until when a way is taken, the same for all processes that have the descriptor.

    One thread of a process uses it at a time: the lock is between processes.
    """

    def __init__(self, descriptor: int, index: int) -> None:
        self._descriptor = descriptor
        self._offset = index * _CLOCK.size

    def reserve(self, ready_s: float, lasts_s: float) -> float:
        """Takes the way for so long, as soon as something is ready and the way is free.

        Returns:
            when that begins.
        """
        place = (_CLOCK.size, self._offset)
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX, *place)
        try:
            free_s: float = _CLOCK.unpack(os.pread(self._descriptor, *place))[0]
            start_s = max(ready_s, free_s)
            os.pwrite(self._descriptor, _CLOCK.pack(start_s + lasts_s), self._offset)
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN, *place)
        return start_s


class Begun(NamedTuple, Generic[Flow, Content]):
    """A slice whose time has come.

    Attributes:
        content: what travels with the last slice; None with those before.
    """

    flow: Flow
    content: Content | None
    start_s: float
    lasts_s: float


@dataclass(slots=True)
class _Waiting(Generic[Content]):
    content: Content | None
    ready_s: float
    slice_s: float
    num_slices: int


class Lane(Generic[Flow, Content]):
    """What waits for a way: in order within a flow, by turns between flows."""

    def __init__(self, reserve: Reserve) -> None:
        self._reserve = reserve
        self._flows: OrderedDict[Flow, deque[_Waiting[Content]]] = OrderedDict()
        self._next: Begun[Flow, Content] | None = None

    @property
    def next_s(self) -> float:
        """When the next slice begins; infinite if there is none, or nobody asked for it yet."""
        return self._next.start_s if self._next else math.inf

    def put(self, flow: Flow, content: Content | None, *, ready_s: float, lasts_s: float) -> None:
        """Adds something that takes the way for so long, and cannot begin before it is ready."""
        num_slices = max(1, math.ceil(lasts_s / SLICE_S))
        waiting = _Waiting(content, ready_s, lasts_s / num_slices, num_slices)
        self._flows.setdefault(flow, deque()).append(waiting)

    def begun(self, now_s: float) -> Iterator[Begun[Flow, Content]]:
        """The slices that begin by now. The one after them gets its place, and nothing else does:
        others on the same way come in between."""
        while self._next is not None or self._flows:
            self._next = self._next or self._reserved()
            if self._next.start_s > now_s:
                return
            begun, self._next = self._next, None
            yield begun

    def drop(self, flow: Flow) -> list[Content]:
        """Takes a flow out; what of it had not begun."""
        dropped = [waiting.content for waiting in self._flows.pop(flow, ())]
        if self._next is not None and self._next.flow == flow:
            dropped.insert(0, self._next.content)
            self._next = None
        return [content for content in dropped if content is not None]

    def drop_all(self) -> list[tuple[Flow, Content]]:
        """As `drop`, of all flows."""
        flows = dict.fromkeys([self._next.flow] if self._next else []) | dict.fromkeys(self._flows)
        return [(flow, content) for flow in flows for content in self.drop(flow)]

    def _reserved(self) -> Begun[Flow, Content]:
        """The next slice of the flow whose turn it is, with its place on the way."""
        flow, queue = self._flows.popitem(last=False)
        first = queue[0]
        start_s = self._reserve(first.ready_s, first.slice_s)
        first.num_slices -= 1
        if not first.num_slices:
            queue.popleft()
        if queue:
            self._flows[flow] = queue
        return Begun(flow, None if first.num_slices else first.content, start_s, first.slice_s)
