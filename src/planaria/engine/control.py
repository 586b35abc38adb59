"""A worker's line to its agent: one thread that reads, and ends the process with its agent.

The thread blocks in a selector over the agent's socket and the launcher's lifeline pipe. When
either closes, the node or the job is over and the worker leaves at once, whatever its compute
thread does.
"""

import os
import queue
import selectors
import socket
import sys
import threading
import traceback

from planaria.core.messages import Message, Shutdown, StartEpoch, StopRequested
from planaria.transport.frames import FrameDecoder, frame, to_node_decoder


class Control:
    """Sends and receives a worker's messages.

    Attributes:
        stop_requested: set once the user asked for a stop at the next commit.
    """

    def __init__(self, agent_fd: int, lifeline_fd: int) -> None:
        self.stop_requested = threading.Event()
        self._socket = socket.socket(fileno=agent_fd)
        self._lifeline_fd = lifeline_fd
        self._lock = threading.Lock()
        self._orders: queue.Queue[StartEpoch | Shutdown] = queue.Queue()
        threading.Thread(target=self._listen, name="control", daemon=True).start()

    def send(self, message: Message) -> None:
        """Sends a message; any thread may."""
        with self._lock:
            self._socket.sendall(frame(message))

    def wait_order(self) -> StartEpoch | Shutdown:
        """Blocks until the coordinator says what to do next; the process ends with its agent."""
        return self._orders.get()

    def _listen(self) -> None:
        """Never returns: when this thread ends, for whatever reason, so does the process. Without
        it nobody would hear of the end of the job."""
        try:
            self._serve()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(1)

    def _serve(self) -> None:
        """Takes messages in until the agent or the launcher is gone."""
        decoder = FrameDecoder()
        selector = selectors.DefaultSelector()
        selector.register(self._socket, selectors.EVENT_READ)
        selector.register(self._lifeline_fd, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                data = self._socket.recv(1 << 20) if key.fileobj is self._socket else b""
                if not data:
                    return
                for body in decoder.feed(data):
                    message = to_node_decoder.decode(body)
                    if isinstance(message, StopRequested):
                        self.stop_requested.set()
                    else:
                        self._orders.put(message)
