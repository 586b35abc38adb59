"""The kernel of the simulator: a virtual clock, a heap of events, and processes that run on it.

Coroutines wait for `Future` objects, which other code resolves. Nothing runs concurrently, and
events of the same instant happen in the order in which they were scheduled. So a run is a function
of its seed.

A `Process` can be stopped, as by SIGSTOP: what is due meanwhile happens when it goes on. A killed
process does nothing any more. The clock of a process may have another rate than the loop's.

Source: SimPy's Environment (a heap of time, counter, event); trio's mock clock.
"""

import math
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from heapq import heappop, heappush
from typing import Any, Generic, TypeVar

Callback = Callable[[], None]
Result = TypeVar("Result")


class Loop:
    """The events of a run, under a virtual clock.

    Attributes:
        now_s: seconds since the run began.
        num_events: number of events that have happened.
        tasks: all tasks that were ever started.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_events = 0
        self._count = 0
        self._heap: list[tuple[float, int, Callback]] = []
        self.tasks: list[Coroutine[Any, Any, None]] = []

    def after(self, delay_s: float, callback: Callback) -> None:
        """Calls something after a delay."""
        self._count += 1
        heappush(self._heap, (self.now_s + delay_s, self._count, callback))

    @property
    def next_s(self) -> float:
        """Time of the next event; infinity if there is none."""
        return self._heap[0][0] if self._heap else math.inf

    def run(self, *, until_s: float, is_over: Callable[[], bool]) -> None:
        """Runs events until `is_over`, none is left, or the next one is later than `until_s`."""
        heap = self._heap
        while heap and heap[0][0] <= until_s and not is_over():
            self.now_s, _, callback = heappop(heap)
            self.num_events += 1
            callback()

    def close(self) -> None:
        """Closes all tasks in the order of their start, which garbage collection would not keep."""
        self._heap.clear()
        for task in self.tasks:
            task.close()


class Future(Generic[Result]):
    """A result that one coroutine awaits and other code sets once, or fails with an error."""

    __slots__ = ("_error", "_result", "_waiter", "is_done")

    def __init__(self) -> None:
        self.is_done = False
        self._result: Result
        self._error: BaseException | None = None
        self._waiter: Callback | None = None

    def resolve(self, result: Result) -> None:
        """Gives the waiter its result."""
        assert not self.is_done
        self._result = result
        self._wake()

    def fail(self, error: BaseException) -> None:
        """Raises an error where the waiter waits."""
        assert not self.is_done
        self._error = error
        self._wake()

    def _wake(self) -> None:
        self.is_done = True
        if self._waiter is not None:
            self._waiter()

    def set_waiter(self, waiter: Callback) -> None:
        """Sets what is called when the result is there; there may be only one waiter."""
        assert self._waiter is None
        self._waiter = waiter

    def __await__(self) -> "Generator[Future[Result], None, Result]":
        if not self.is_done:
            yield self
        if self._error is not None:
            raise self._error
        return self._result


class Process:
    """A simulated process: its callbacks and tasks run only while it is alive and not stopped.

    Args:
        rate: seconds that its clock counts per second of the loop.
        on_error: callback that gets an error raised in one of its tasks.

    Attributes:
        place: node on which it runs; -1: on no node.
        stopped_s: time at which it was stopped, by its own clock; -1: it runs.
    """

    def __init__(
        self,
        loop: Loop,
        name: str,
        *,
        place: int,
        on_error: Callable[[BaseException], None],
        rate: float = 1.0,
    ) -> None:
        self.name = name
        self.place = place
        self.is_alive = True
        self.stopped_s = -1.0
        self._loop = loop
        self._rate = rate
        self._on_error = on_error
        self._deferred: deque[Callback] = deque()
        self._at_exit: list[Callback] = []

    @property
    def now_s(self) -> float:
        """The time by this process's clock."""
        return self._loop.now_s * self._rate

    def call(self, callback: Callback) -> None:
        """Calls something now; if the process is stopped, once it goes on; if it is dead, never."""
        if not self.is_alive:
            return
        if self.stopped_s >= 0.0 or self._deferred:
            self._deferred.append(callback)
        else:
            callback()

    def after(self, delay_s: float, callback: Callback) -> None:
        """Calls something after a delay by this process's clock."""
        self._loop.after(delay_s / self._rate, lambda: self.call(callback))

    def sleep(self, delay_s: float) -> Future[None]:
        """An awaitable that is done after a delay by this process's clock."""
        future: Future[None] = Future()
        self.after(delay_s, lambda: future.resolve(None))
        return future

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Starts a task, which runs at once until it waits for the first time."""
        self._loop.tasks.append(coroutine)
        _Task(self, coroutine, self._on_error).resume()

    def at_exit(self, callback: Callback) -> None:
        """Calls something when the process ends."""
        self._at_exit.append(callback)

    def kill(self) -> None:
        """Ends the process at once."""
        if not self.is_alive:
            return
        self.is_alive = False
        self._deferred.clear()
        callbacks, self._at_exit = self._at_exit, []
        for callback in callbacks:
            callback()

    def stop(self) -> None:
        """Stops the process, until `resume`."""
        if self.stopped_s < 0.0:
            self.stopped_s = self.now_s

    def resume(self) -> None:
        """Continues a stopped process; everything that was due meanwhile happens now."""
        self.stopped_s = -1.0
        while self._deferred and self.is_alive and self.stopped_s < 0.0:
            self._deferred.popleft()()


class _Task:
    """A coroutine of a process."""

    __slots__ = ("_coroutine", "_on_error", "_process")

    def __init__(
        self,
        process: Process,
        coroutine: Coroutine[Any, Any, None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._process = process
        self._coroutine = coroutine
        self._on_error = on_error

    def resume(self) -> None:
        try:
            future = self._coroutine.send(None)
        except StopIteration:
            return
        except Exception as error:
            self._on_error(error)
            return
        future.set_waiter(self._wake)

    def _wake(self) -> None:
        self._process.call(self.resume)
