"""A worker's connection to its agent: one thread reads it, and ends the process with the agent.

The thread blocks in a selector over the agent's socket and the launcher's lifeline pipe. When
either closes, the node or the job is over, and the worker exits at once, whatever its compute
thread is doing. An `Abort` first frees the compute thread, then is queued for it. The thread also
beats, which shows the agent that the process runs, and it reports a SIGTERM as a notice that the
node will be taken away.
"""

import contextlib
import os
import queue
import selectors
import signal
import socket
import sys
import threading
import traceback

from planaria.core.messages import (
    AT_COMMIT,
    Abort,
    Message,
    Order,
    Shutdown,
    StartEpoch,
    StopRequested,
)
from planaria.transport.frames import FrameDecoder, frame, order_of
from planaria.transport.links import Links
from planaria.transport.pulse import Pulse


class Orders:
    """Queue of the orders that a worker was given; one thread puts, another one waits."""

    def __init__(self) -> None:
        self._waiting: queue.Queue[Order] = queue.Queue()
        self._first_epoch = -1  # Epochs before this one are over.
        self._is_shut_down = False

    def put(self, order: Order) -> None:
        """Appends an order."""
        if isinstance(order, Abort):
            self._first_epoch = max(self._first_epoch, order.epoch)
        if isinstance(order, Shutdown):
            self._is_shut_down = True
        self._waiting.put(order)

    def wait(self) -> Order:
        """Blocks until there is an order, and removes it from the queue."""
        return self._waiting.get()

    def is_over(self, epoch: int) -> bool:
        """Whether saves of this epoch are of no use any more.

        Only an `Abort` of a later epoch or a `Shutdown` ends an epoch. A restarted coordinator
        repeats the orders to begin an epoch or to save in it, and an order to begin the next epoch
        at a commit leaves this one running.
        """
        return epoch < self._first_epoch or self._is_shut_down


class Control:
    """Sends and receives a worker's messages.

    Args:
        links: the worker's links, which an `Abort` aborts.
        pulse: the worker's pulse, which beats every `beat_s` seconds.
        notice: message to send on SIGTERM, which means that the node will be taken away.

    Attributes:
        stop_requested: event, set while the ranks are asked to stop at the next commit.
        next_epoch: epoch of the newest order to begin one at a commit; -1: there was none.
    """

    def __init__(
        self,
        agent_fd: int,
        lifeline_fd: int,
        *,
        links: Links,
        pulse: Pulse,
        beat_s: float,
        notice: Message,
    ) -> None:
        self.stop_requested = threading.Event()
        self.next_epoch = -1
        self._socket = socket.socket(fileno=agent_fd)
        self._lifeline_fd = lifeline_fd
        self._lock = threading.Lock()
        self._orders = Orders()
        self._links = links
        self._pulse = pulse
        self._beat_s = beat_s
        self._notice = notice
        self._signal_fd, wakeup_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # Python runs signal handlers in the main thread, which may be busy in a torch kernel.
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.set_wakeup_fd(wakeup_fd, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, name="control", daemon=True).start()

    def send(self, message: Message) -> None:
        """Sends a message; may be called from any thread."""
        with self._lock:
            self._socket.sendall(frame(message))

    def is_over(self, epoch: int) -> bool:
        """Whether saves of this epoch are of no use any more, see `Orders.is_over`."""
        return self._orders.is_over(epoch)

    def wait_order(self) -> Order:
        """Blocks until the coordinator gives the next order; the process ends with its agent."""
        return self._orders.wait()

    def _listen(self) -> None:
        """Serves until the connection ends, then ends the process; never returns.

        A process without this thread would not notice that the job has ended.
        """
        try:
            self._serve()
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError):  # If the launcher was killed, nobody reads stderr.
                sys.stderr.flush()
            os._exit(1)

    def _serve(self) -> None:
        """Receives messages until the agent or the launcher is gone."""
        decoder = FrameDecoder()
        selector = selectors.DefaultSelector()
        selector.register(self._socket, selectors.EVENT_READ)
        selector.register(self._lifeline_fd, selectors.EVENT_READ)
        selector.register(self._signal_fd, selectors.EVENT_READ)
        while True:
            self._pulse.beat()
            for key, _ in selector.select(self._beat_s):
                if key.fileobj == self._signal_fd:
                    if signal.SIGTERM in os.read(self._signal_fd, 1 << 10):
                        self.send(self._notice)
                    continue
                data = self._socket.recv(1 << 20) if key.fileobj is self._socket else b""
                if not data:
                    return
                for body in decoder.feed(data):
                    message = order_of(body)
                    if isinstance(message, StopRequested):
                        self.stop_requested.set()
                        continue
                    assert isinstance(message, Order)
                    if isinstance(message, StartEpoch):
                        if message.iteration == AT_COMMIT:
                            self.next_epoch = message.epoch
                        else:
                            self.stop_requested.clear()
                    if isinstance(message, Abort):
                        self._links.abort("a member is lost", first_epoch=message.epoch)
                    self._orders.put(message)
