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
import time
import traceback

from planaria.core.messages import (
    Abort,
    Message,
    Order,
    SavePart,
)
from planaria.engine.comm.device_comm import DeviceComm
from planaria.protocol.worker_state import EVERY_EPOCH, MessageSummary, on_message
from planaria.transport.frames import FrameDecoder, frame, worker_order_of
from planaria.transport.links import Links
from planaria.transport.pulse import Pulse


class Control:
    """Sends and receives a worker's messages.

    Args:
        links: the worker's links, which an `Abort` aborts.
        pulse: the worker's pulse, which beats every `beat_s` seconds.
        notice: message to send on SIGTERM, which means that the node will be taken away.

    Attributes:
        comm: the comm of the epoch, which an `Abort` of that epoch aborts, too; None: none is open.
        is_noticed: whether SIGTERM has come, which also ends processes that code of the job has
            forked where all processes of the machine get it.
        line: summary of all orders that have arrived, also of those that wait for their turn.
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
        self.line = MessageSummary()
        self.comm: DeviceComm | None = None
        self.is_noticed = False
        self._socket = socket.socket(fileno=agent_fd)
        self._lifeline_fd = lifeline_fd
        self._lock = threading.Lock()
        self._orders: queue.Queue[Order] = queue.Queue()
        self._links = links
        self._pulse = pulse
        self._beat_s = beat_s
        self._notice = notice
        self._signal_fd, wakeup_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # Python runs signal handlers in the main thread, which may be busy in a torch kernel.
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.set_wakeup_fd(wakeup_fd, warn_on_full_buffer=False)
        # A child that code of the job forks is no rank. SIGTERM ends it: `terminate` of
        # multiprocessing sends it, and then waits for the child.
        self._forking = threading.local()
        os.register_at_fork(
            before=self._block_sigterm,
            after_in_parent=self._restore_signals,
            after_in_child=self._leave_to_parent,
        )
        threading.Thread(target=self._listen, name="control", daemon=True).start()

    def send(self, message: Message) -> None:
        """Sends a message; may be called from any thread."""
        with self._lock:
            self._socket.sendall(frame(message))

    def is_over(self, epoch: int) -> bool:
        """Whether saves of this epoch are of no use any more, see `MessageSummary.is_over`."""
        return self.line.is_over(epoch)

    def is_stopping(self) -> bool:
        """Whether the job is asked to stop at the next commit."""
        return self.line.stop_requested

    def wait_order(self) -> Order:
        """Blocks until the coordinator says what to do next; the process ends with its agent."""
        return self._orders.get()

    def _on_sigterm(self, *_: object) -> None:
        self.is_noticed = True

    def _block_sigterm(self) -> None:
        """Keeps the SIGTERM of a child that is forked now until it is the child's own."""
        self._forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))

    def _restore_signals(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._forking.mask)

    def _leave_to_parent(self) -> None:
        """Makes a forked child no rank: SIGTERM ends it, and it has no line to agent or peers.

        The agent reads the line until no process has it open, then looks how the rank has ended.
        Peers see the loss of a rank in the same way.
        """
        self._socket.close()
        self._links.leave_to_parent()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._restore_signals()

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
                    message = worker_order_of(body)
                    self.line, order = on_message(self.line, message, now_s=time.monotonic())
                    if isinstance(message, Abort):
                        self._abort("a member is lost", first_epoch=message.epoch)
                    if isinstance(message, SavePart):
                        self._abort("there is no head", first_epoch=EVERY_EPOCH)
                    if order is not None:
                        self._orders.put(order)

    def _abort(self, reason: str, *, first_epoch: int) -> None:
        """Ends all epochs before `first_epoch` for the threads that wait in one."""
        self._links.abort(reason, first_epoch=first_epoch)
        comm = self.comm
        if comm is not None and self._links.epoch < first_epoch:
            comm.abort(reason)
