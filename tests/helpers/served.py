"""A worker in this process, whose agent is the test."""

import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

from planaria.core.job import JobConfig
from planaria.core.messages import Abort, Fact, Message, Order, Shutdown, StartEpoch, WorkerReady
from planaria.core.plan import Plan
from planaria.core.specs import NodeSpec
from planaria.engine.control import Control
from planaria.engine.prepare import device_of
from planaria.engine.worker import Worker
from planaria.protocol import worker_state
from planaria.protocol.worker_state import on_message
from planaria.transport.links import Links
from planaria.transport.pulse import Pulse

TIMEOUT_S = 20.0
_NEVER = 1 << 20  # The epoch before which all are over.


class Line:
    """A worker's line to its agent, without the agent; see engine/control.py.

    Attributes:
        is_noticed: whether the worker has got a SIGTERM.
        told: what the worker has said.
        on_look: is called whenever the worker looks whether an epoch is over.
    """

    def __init__(self, links: Links) -> None:
        self.line = worker_state.MessageSummary()
        self.comm = None
        self.is_noticed = False
        self.told: list[Message] = []
        self.on_look: Callable[[], object] = lambda: None
        self._links = links
        self._orders: queue.Queue[Order] = queue.Queue()
        self._changed = threading.Condition()

    def send(self, message: Message) -> None:
        with self._changed:
            self.told.append(message)
            self._changed.notify_all()

    def wait_order(self) -> Order:
        return self._orders.get()

    def is_over(self, epoch: int) -> bool:
        self.on_look()
        return self.line.is_over(epoch)

    def give(self, *orders: Order) -> None:
        """Tells the worker what to do."""
        for order in orders:
            self.line, _ = on_message(self.line, order, now_s=time.monotonic())
            if isinstance(order, Abort):
                self._links.abort("a member is lost", first_epoch=order.epoch)
            self._orders.put(order)

    def wait(self, is_told: Callable[[], bool]) -> None:
        """Blocks until the worker has said what is waited for."""
        with self._changed:
            assert self._changed.wait_for(is_told, TIMEOUT_S), self.told

    def wait_told(self, kind: type[Fact]) -> list[Message]:
        """Blocks until the worker has said something of a kind."""
        self.wait(lambda: bool(self.of(kind)))
        return self.of(kind)

    def of(self, kind: type[Fact]) -> list[Message]:
        return [message for message in self.told if isinstance(message, kind)]


class Served:
    """A worker of a job, in a thread; `end` waits for the end of it.

    Attributes:
        error: that it has ended with.
    """

    def __init__(self, job: JobConfig, directory: Path, *, rank: int = 0) -> None:
        spec = NodeSpec(
            job=job,
            node=rank,
            token=b"",
            coordinator=("", 0),
            worker="",
            cache_directory=str(directory / "cache"),
        )
        self.links, self.pulse = Links(rank, token=b""), Pulse()
        self.line = Line(self.links)
        self.worker = Worker(spec, cast(Control, self.line), self.links, self.pulse)
        self.error: BaseException | None = None
        self._device = device_of(job, rank=rank)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self.line.wait_told(WorkerReady)

    def start(self, plan: Plan, *, epoch: int = 0, iteration: int = 0) -> StartEpoch:
        """The order to begin an epoch of a plan, in which nobody else is waited for."""
        addresses = {self.links.rank: self.links.address}
        return StartEpoch(epoch=epoch, plan=plan, addresses=addresses, iteration=iteration)

    def end(self) -> None:
        """Blocks until it has ended, as it was told to."""
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()

    def close(self) -> None:
        """Ends it, whatever it does."""
        self.line.give(Abort(epoch=_NEVER, nodes=()), Shutdown())
        self.end()
        self.links.close()
        self.pulse.close()

    def _run(self) -> None:
        try:
            self.worker.run(self._device)
        except BaseException as error:  # For the test to look at.
            self.error = error
