"""Queues for the paced link directions of a node: when each is free, and the messages that wait.

A clock holds the moment at which a link direction becomes free. It is stored in a file in memory
that the workers of a node inherit. It is read and written under a record lock, which the kernel
releases when the process that holds it is killed. A lane is one process's queue for a link
direction. It reserves the direction slice by slice, at most one slice ahead: so the flows of
several ranks share a direction, and what a dead process still had to send delays nobody.

No function here reads the time: moments are arguments.
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
# (moment from which a slice may begin, its length in seconds) to the moment at which it begins.
Reserve = Callable[[float, float], float]


def shared_clocks(num_clocks: int) -> int:
    """The descriptor of a file in memory with `num_clocks` clocks, all free; workers inherit it."""
    descriptor = os.memfd_create("clocks")
    os.ftruncate(descriptor, num_clocks * _CLOCK.size)
    return descriptor


class Clock:
    """The moment at which a link direction becomes free, shared by processes with the descriptor.

    Only one thread of a process may use it at a time: the record lock only excludes processes.
    """

    def __init__(self, descriptor: int, index: int) -> None:
        self._descriptor = descriptor
        self._offset = index * _CLOCK.size

    def reserve(self, ready_s: float, lasts_s: float) -> float:
        """Reserves the link direction for `lasts_s` seconds, from `ready_s` on or once it is free.

        Returns:
            The moment at which the reserved time begins.
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


class Slice(NamedTuple, Generic[Flow, Content]):
    """A slice of a message, and the time for which it has the link direction.

    Attributes:
        content: the message, which travels with its last slice; None: an earlier slice.
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
    """A queue for a link direction: first in, first out within a flow; flows take turns."""

    def __init__(self, reserve: Reserve) -> None:
        self._reserve = reserve
        self._flows: OrderedDict[Flow, deque[_Waiting[Content]]] = OrderedDict()
        self._next: Slice[Flow, Content] | None = None

    @property
    def next_s(self) -> float:
        """The begin of the slice that is reserved and not yet begun; infinite if there is none."""
        return self._next.start_s if self._next else math.inf

    def put(self, flow: Flow, content: Content | None, *, ready_s: float, lasts_s: float) -> None:
        """Queues a message that takes the link direction for `lasts_s`, but not before `ready_s`.

        Args:
            content: the message; None: a slice of a message whose last slice comes later.
        """
        num_slices = max(1, math.ceil(lasts_s / SLICE_S))
        waiting = _Waiting(content, ready_s, lasts_s / num_slices, num_slices)
        self._flows.setdefault(flow, deque()).append(waiting)

    def due_slices(self, now_s: float) -> Iterator[Slice[Flow, Content]]:
        """Yields the slices that begin by now, and reserves the time of the one after them.

        No later slice is reserved, so that other processes get their turns on the direction.
        """
        while self._next is not None or self._flows:
            self._next = self._next or self._reserve_next()
            if self._next.start_s > now_s:
                return
            due, self._next = self._next, None
            yield due

    def drop(self, flow: Flow) -> list[Content]:
        """Removes a flow; returns its messages whose last slice had not begun."""
        dropped = [waiting.content for waiting in self._flows.pop(flow, ())]
        if self._next is not None and self._next.flow == flow:
            dropped.insert(0, self._next.content)
            self._next = None
        return [content for content in dropped if content is not None]

    def drop_all(self) -> list[tuple[Flow, Content]]:
        """Removes all flows; returns their messages whose last slice had not begun."""
        flows = dict.fromkeys([self._next.flow] if self._next else []) | dict.fromkeys(self._flows)
        return [(flow, content) for flow in flows for content in self.drop(flow)]

    def _reserve_next(self) -> Slice[Flow, Content]:
        """The next slice of the flow whose turn it is, with its reserved time."""
        flow, queue = self._flows.popitem(last=False)
        first = queue[0]
        start_s = self._reserve(first.ready_s, first.slice_s)
        first.num_slices -= 1
        if not first.num_slices:
            queue.popleft()
        if queue:
            self._flows[flow] = queue
        return Slice(flow, None if first.num_slices else first.content, start_s, first.slice_s)
