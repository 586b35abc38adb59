"""Chunks of copies that go from device to device: how they leave, and how they come to the host.

A source copies each chunk from its arena to a free sub-buffer of its device, sends it from there
when its turn comes, and announces it over the links. A receiver has it arrive in a free sub-buffer
of its own device. A thread waits until the chunk is on the host, checks and answers it, while the
next chunks arrive in other sub-buffers. A copy counts only then; a chunk that is damaged is sent
and announced once more, before any chunk of the next layer.

The thread that receives waits for sub-buffers and announcements, the thread of `Landings` for
copies to the host. Neither waits for anything that its own rank sends, so ranks that send to each
other cannot wait in a circle.

Source: Gemini (SOSP '23), sections 5.2 and 5.3.
Differs: chunks come from the copy in the source's arena and not from the state on its device, so an
optimizer step never waits for the network. It costs a copy from the host to the device.
"""

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Final, NamedTuple, Protocol

import numpy as np

from planaria.checkpoint.memory.version import Bytes, hash_of
from planaria.errors import AbortedError, PeerLostError
from planaria.transport.links import Channel, Tag

# After an abort a device may still wait for a chunk; NCCL has taken seconds to give one up.
_CLOSE_S: Final = 0.2
# Nothing wakes a thread that waits for its own device when the epoch is aborted, so it asks.
_CHECK_S: Final = 0.05


class ChunkSender(Protocol):
    """The sub-buffers of a device from which chunks leave; one thread calls its methods."""

    def load(self, content: Bytes) -> int:
        """Begins to copy bytes to a sub-buffer, of which one must be free; returns its number."""

    def send(self, target: int, number: int, buffer: int) -> None:
        """Begins to send a sub-buffer, as the chunk of this number to the target.

        Raises:
            AbortedError, PeerLostError: the epoch is over.
        """

    def free(self, buffer: int) -> None:
        """Lets a sub-buffer be loaded again; the receiver has what it held."""


class ChunkReceiver(Protocol):
    """The sub-buffers of a device in which chunks arrive.

    Attributes:
        num_buffers: number of sub-buffers.
    """

    num_buffers: int

    def receive(self, source: int, number: int, num_bytes: int) -> int:
        """Begins to receive a chunk in a sub-buffer, of which one must be free; returns its number.

        Raises:
            AbortedError, PeerLostError: the epoch is over.
        """

    def land(self, buffer: int) -> Bytes:
        """Blocks until what a sub-buffer holds is on the host; valid until `free`."""

    def free(self, buffer: int) -> None:
        """Lets a sub-buffer receive again; any thread may call it."""


@dataclass(frozen=True, slots=True)
class DevicePath:
    """The way of copies over devices: both ends of a rank."""

    sender: ChunkSender
    receiver: ChunkReceiver


class Landings:
    """A thread that waits until chunks are on the host, in the order in which they have begun.

    Args:
        check_epoch: raises an AbortedError once the epoch is over.
        on_error: takes the error that ends the thread.
    """

    def __init__(
        self,
        receiver: ChunkReceiver,
        *,
        check_epoch: Callable[[], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        self._receiver = receiver
        self._check_epoch = check_epoch
        self._on_error = on_error
        self._queue: SimpleQueue[_Landing | None] = SimpleQueue()
        self._storing = threading.Lock()  # Held while the host's memory is written.
        self._changed = threading.Condition()  # Guards all that follows.
        self._num_in_flight: Counter[int] = Counter()
        self._error: Exception | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="land", daemon=True)
        self._thread.start()

    def begin(
        self, source: int, number: int, num_bytes: int, *, store: Callable[[Bytes], None]
    ) -> None:
        """Begins to receive a chunk once a sub-buffer is free.

        Args:
            store: takes the bytes once they are on the host; not after `close`.

        Raises:
            AbortedError, PeerLostError: the epoch is over.
            Exception: the error that has ended the thread.
        """
        self._wait(lambda: self._num_in_flight.total() < self._receiver.num_buffers)
        buffer = self._receiver.receive(source, number, num_bytes)
        with self._changed:
            self._num_in_flight[source] += 1
        self._queue.put(_Landing(source, buffer, store))

    def num_in_flight(self, source: int) -> int:
        """The number of chunks of a source that have begun and are not stored yet."""
        with self._changed:
            return self._num_in_flight[source]

    def wait_stored(self, source: int) -> None:
        """Blocks until all chunks of a source that have begun are stored.

        Raises:
            AbortedError: the epoch is over.
            Exception: the error that has ended the thread.
        """
        self._wait(lambda: not self._num_in_flight[source])

    def _wait(self, condition: Callable[[], bool]) -> None:
        """Blocks until a condition holds, however long the device takes; raises as its callers."""
        with self._changed:
            while not self._changed.wait_for(
                lambda: self._error or self._is_closed or condition(), timeout=_CHECK_S
            ):
                self._check_epoch()
            if self._error is not None:
                raise self._error
            if self._is_closed:
                raise AbortedError("the epoch is over")

    def close(self) -> None:
        """Ends the thread; from now on no chunk is stored.

        The thread may outlive this call, if its device gives up a chunk late; it then does nothing.
        """
        with self._storing, self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._queue.put(None)
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        try:
            while (landing := self._queue.get()) is not None:
                content = self._receiver.land(landing.buffer)
                with self._storing:
                    if self._is_closed:
                        return
                    landing.store(content)
                self._receiver.free(landing.buffer)
                with self._changed:
                    self._num_in_flight[landing.source] -= 1
                    self._changed.notify_all()
        except Exception as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
            self._on_error(error)


class _Landing(NamedTuple):
    source: int
    buffer: int
    store: Callable[[Bytes], None]


# -- announcements ---------------------------------------------------------------------------------


def announcement_tag(number: int) -> Tag:
    """The tag of the message that announces a chunk, which the source has begun to send."""
    return Tag(Channel.CHUNK, 0, number)


def announcement(index: int) -> Bytes:
    """The message that announces a piece of the layer whose opening came before: index and hash."""
    number = np.array([index], dtype=np.uint64).view(np.uint8)
    digest = np.array([hash_of(number)], dtype=np.uint64).view(np.uint8)
    return np.concatenate([number, digest])


def announced_index(source: int, message: Bytes, *, num_pieces: int) -> int:
    """The index of the piece that a message announces.

    Raises:
        PeerLostError: the message is damaged. What it announces can then not be received.
    """
    number, digest = message[:8], message[8:]
    index = int(number.view(np.uint64)[0]) if len(number) == 8 else -1
    if digest.tobytes() != hash_of(number).to_bytes(8, "little") or not 0 <= index < num_pieces:
        raise PeerLostError(source, "the announcement of a copy arrived damaged")
    return index
