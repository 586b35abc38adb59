"""One socket of a rank's links: the queue of unsent bytes, and the message that is being read.

A connection begins with the handshake of `frames.py`, and where links are encrypted, with that of
TLS before it (`link_tls.py`). After it, a message is a header (epoch,
tag, length) and raw bytes. On checked links the header goes on with the xxh3_64 of the payload and
a CRC-32 of all of the header before it. Both are compared before the message is delivered, and a
message that arrives damaged ends its connection. Both ends of a link are checked, or neither. Once
an epoch is over its ranks change the arrays of which they still send the rest, so a payload of such
an epoch that differs from its checksum is dropped, and the connection goes on. Copies of layers
have hashes of their own, by which their receiver asks for what was damaged (`checkpoint.memory`),
so their payload is not hashed again. It may change on its way, too: a rank that leaves an epoch at
its last commit reuses the memory of copies that it still sends.

Any thread may call `append`, `is_drained` and `withdraw_memory`; only the thread that serves the
links calls the other methods.

The speed of a link is measured by its large messages. Bytes that wait in the kernel came at an
unknown time, so once a message begins to arrive they are read until none is left. What the message
still lacks then arrives between that moment and its end, and only that is counted.

What has arrived on all connections of a rank waits in its `LinkInbox`.
"""

import fcntl
import socket
import struct
import termios
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from planaria.errors import AuthenticationError
from planaria.transport.frames import HANDSHAKE_TIMEOUT_S, Role, handshake
from planaria.transport.link_tls import LinkSecurity, LinkTls
from planaria.transport.sockets import Endpoint, break_when_silent
from planaria.transport.timekeeping import clock_name

# A message of a job without a profile may have so many bytes.
MESSAGE_BYTES_MAX: Final = 1 << 40
# Links are measured by messages of at least so many bytes, of which at least so many were awaited.
MEASURED_BYTES_MIN: Final = 1 << 20
_AWAITED_BYTES_MIN: Final = 1 << 18
_HEADER = struct.Struct("!IBIIIQ")
_DIGEST = struct.Struct("!Q")
_CRC = struct.Struct("!I")
_COUNT = struct.Struct("i")  # Of bytes that wait in the kernel.
_READ_BYTES_MAX = 1 << 22  # Per wake-up and connection, so that no peer starves the others.
_IOV_MAX = 64
_RANK_BITS = 32
_PORT_BITS = 16
_CLOCK_BITS = 15


class Channel(IntEnum):
    """The purpose of a message; the first part of its tag."""

    FORWARD = 1
    BACKWARD = 2
    SCATTER = 3
    GATHER = 4
    COMMIT = 5
    STATE_HEAD = 6
    STATE = 7
    COMPARE = 8
    AGE = 9
    PACE = 10
    TAKEN = 11
    COPY = 12
    COPY_TAKEN = 13
    COPY_USE = 14
    GROUP = 15
    HEAD = 16
    CHUNK = 17
    EVALUATE = 18
    EVALUATE_TAKEN = 19
    EVALUATED = 20
    SAVED = 21
    ALIVE = 22


# Channels whose payloads are checked by those who receive them, and not by the link.
_CHECKED_BY_RECEIVERS: Final = frozenset({Channel.COPY})

_CHANNELS = frozenset(int(channel) for channel in Channel)


class Tag(NamedTuple):
    """Name of a message from one rank to another; unique within an epoch."""

    channel: Channel
    iteration: int
    a: int
    b: int = 0


class IncomingMessage(NamedTuple):
    """A message that has arrived completely."""

    epoch: int
    tag: Tag
    payload: npt.NDArray[np.uint8]


class MessageHeader(NamedTuple):
    """The header of a message.

    Attributes:
        num_bytes: size of the payload.
        digest: xxh3_64 of the payload; 0 on links that are not checked.
    """

    epoch: int
    tag: Tag
    num_bytes: int
    digest: int = 0


def header(epoch: int, tag: Tag, num_bytes: int) -> bytes:
    """The bytes that precede a payload of `num_bytes` bytes on links that are not checked."""
    return _HEADER.pack(epoch, tag.channel, tag.iteration, tag.a, tag.b, num_bytes)


def checked_header(epoch: int, tag: Tag, payload: Sequence[memoryview]) -> bytes:
    """The bytes that precede a payload on checked links."""
    hasher = xxhash.xxh3_64()
    for view in payload if tag.channel not in _CHECKED_BY_RECEIVERS else ():
        hasher.update(view)
    plain = header(epoch, tag, sum(map(len, payload)))
    head = plain + _DIGEST.pack(hasher.intdigest())
    return head + _CRC.pack(zlib.crc32(head))


def header_size(*, is_checked: bool) -> int:
    """Number of bytes of a header."""
    return _HEADER.size + (_DIGEST.size + _CRC.size if is_checked else 0)


def parse_header(head: bytes, *, is_checked: bool, num_bytes_max: int) -> MessageHeader:
    """The header in these bytes.

    Args:
        num_bytes_max: size of the largest payload that the job sends.

    Raises:
        ConnectionError: the header was damaged on its way.
        AuthenticationError: no rank of this job sends such a message.
    """
    assert len(head) == header_size(is_checked=is_checked)
    digest = 0
    if is_checked:
        (digest,) = _DIGEST.unpack_from(head, _HEADER.size)
        (crc,) = _CRC.unpack_from(head, _HEADER.size + _DIGEST.size)
        if crc != zlib.crc32(head[: -_CRC.size]):
            raise ConnectionError("a message's header was damaged on its way; its checksum differs")
    epoch, channel, iteration, a, b, num_bytes = _HEADER.unpack_from(head)
    if channel not in _CHANNELS or num_bytes > num_bytes_max:
        raise AuthenticationError(
            f"a message of {num_bytes} bytes on channel {channel} does not come from this job; its "
            f"messages have up to {num_bytes_max} bytes"
        )
    return MessageHeader(epoch, Tag(Channel(channel), iteration, a, b), num_bytes, digest)


def _new_memory(num_bytes: int, num_bytes_max: int) -> npt.NDArray[np.uint8]:
    """Memory for a payload of up to `num_bytes_max` bytes; its pages are taken as bytes arrive.

    Raises:
        MemoryError: this machine has less memory than the job needs.
        AuthenticationError: it has less, and nobody knows what the job sends.
    """
    try:
        return np.empty(num_bytes, dtype=np.uint8)
    except MemoryError as error:
        if num_bytes_max < MESSAGE_BYTES_MAX:
            raise
        reason = f"a message of {num_bytes} bytes does not come from this job: none has such memory"
        raise AuthenticationError(reason) from error


# (peer, epoch, tag, bytes of payload) to the memory that the message is to fill; None: any memory.
MemoryFor = Callable[[int, int, Tag, int], npt.NDArray[np.uint8] | None]


class Receptions:
    """The bytes of large messages that arrived, and the seconds in which they did."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[int, tuple[int, float]] = {}

    def add(self, peer: int, num_bytes: int, seconds: float) -> None:
        """Adds bytes that a peer sent and that arrived within so many seconds."""
        with self._lock:
            bytes_before, before_s = self._sums.get(peer, (0, 0.0))
            self._sums[peer] = bytes_before + num_bytes, before_s + seconds

    def take(self) -> dict[int, tuple[int, float]]:
        """Returns the (bytes, seconds) since the last call, by peer."""
        with self._lock:
            sums, self._sums = self._sums, {}
            return sums


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkProtection:
    """The protection of a rank's links against damage, absurd messages and strangers.

    Attributes:
        is_checked: whether messages have checksums; it must be the same on all ranks.
        num_bytes_max: size of the largest payload that the job sends; a link that claims to bring a
            larger one is closed.
        security: TLS of all links; None: they are plain. It must be the same on all ranks.
        num_ranks: number of ranks of the job; as many may connect at the same time.
    """

    is_checked: bool = False
    num_bytes_max: int = MESSAGE_BYTES_MAX
    security: LinkSecurity | None = None
    num_ranks: int = 0


@dataclass(frozen=True, slots=True)
class OwnEnd:
    """The facts that all connections of a rank share.

    Attributes:
        token: key of the job's links, which the handshake proves.
        identity: the rank, and the port at which it listens.
        memory_for: returns the memory for a message that begins to arrive; None: any will do.
        is_over: says whether an epoch is over for this rank.
        protection: protection of all links.
        clock: name of the monotonic clock that this rank reads.
        receptions: speed at which large messages arrive, by peer.
    """

    token: bytes
    identity: tuple[int, int]
    memory_for: MemoryFor
    is_over: Callable[[int], bool]
    protection: LinkProtection
    clock: str = field(default_factory=clock_name)
    receptions: Receptions = field(default_factory=Receptions)

    @property
    def number(self) -> int:
        """What this end says of itself in the handshake, as one number."""
        rank, port = self.identity
        traits = self.clock_number << 1 | self.protection.is_checked
        return (traits << _PORT_BITS | port) << _RANK_BITS | rank

    @property
    def clock_number(self) -> int:
        """A hash of the clock's name."""
        return zlib.crc32(self.clock.encode()) >> 32 - _CLOCK_BITS


def _parse_number(number: int) -> tuple[int, int, bool, int]:
    """The other end's rank, port, `is_checked` and `clock_number`."""
    rest, rank = divmod(number, 1 << _RANK_BITS)
    traits, port = divmod(rest, 1 << _PORT_BITS)
    clock_number, is_checked = divmod(traits, 2)
    return rank, port, bool(is_checked), clock_number


class Connection:
    """A socket with the state of its handshake, its unsent bytes and the message being read.

    Attributes:
        target: the rank that this end connects to; -1: this end accepted the connection.
        port: port at which the peer listens; a worker that is forked again has another one.
        untried: other endpoints of its target, which are tried if this one fails.
        peer: the rank at the other end; -1 until the handshake has proved it.
        has_own_clock: whether the peer reads the same monotonic clock as this rank.
        deadline_s: time at which the handshake is given up, by the monotonic clock.
        is_used: whether an epoch of this rank has relied on the connection.
        is_severed: whether a cut blocks the connection for now (transport/cuts.py).
        heard_s: moment at which bytes last came, by the monotonic clock; that at which the
            connection was made if none have.
        lock: must be held to write to the socket or close it: a descriptor that is closed during
            another thread's write may belong to another file by then.
    """

    def __init__(
        self,
        sock: socket.socket,
        own: OwnEnd,
        *,
        target: int,
        port: int,
        untried: list[Endpoint] | None = None,
    ) -> None:
        sock.setblocking(False)
        # A wait for a peer lasts for as long as its link is up (UNLIMITED_S in links.py).
        break_when_silent(sock)
        self.sock = sock
        self.target = target
        self.port = port
        self.untried = untried or []
        self.peer = -1
        self.has_own_clock = False
        self.heard_s = time.monotonic()
        self.deadline_s = self.heard_s + HANDSHAKE_TIMEOUT_S
        self.is_used = False
        self.is_severed = False
        self.lock = threading.Lock()
        self._unsent: deque[memoryview] = deque()
        security = own.protection.security
        self._tls = LinkTls(security, is_server=target < 0) if security else None
        role = Role.ACCEPT if target < 0 else Role.CONNECT
        self._handshake = handshake(own.token, role, identity=own.number)
        self._own = own
        self._reading = threading.Lock()  # Guards what follows.
        self._has_offered_memory = False
        self._header: MessageHeader | None = None  # Of the message whose payload arrives.
        self._payload = np.empty(0, dtype=np.uint8)
        # Moment at which all of the message that had come was read, and the bytes that it lacked
        # then; 0.0: there was none yet.
        self._drained_s = 0.0
        self._lacked_bytes = 0
        self._hasher = xxhash.xxh3_64()
        self._head = bytearray()
        self._view = memoryview(self._head)
        hello, num_bytes = next(self._handshake)
        self._unsent.append(memoryview(hello))
        self._expect(num_bytes)

    def append(self, views: Iterable[memoryview]) -> bool:
        """Queues bytes and writes what the kernel takes now. The lock must be held.

        Returns:
            False if the caller has to ask the serving thread to write the rest. True if nothing is
            left, or if bytes were queued before: whoever queued those has asked already.

        Raises:
            OSError: the connection broke.
        """
        is_waited_for = bool(self._unsent)
        self._unsent.extend(views)
        return is_waited_for or self.flush()

    def flush(self) -> bool:
        """Writes what the kernel takes now. The lock must be held.

        Returns:
            Whether nothing is left that the kernel can take later. With TLS, bytes may be left for
            which the other end has to send something first.

        Raises:
            OSError: the connection broke.
            AuthenticationError: the other end is no process of this run.
        """
        if self._tls is not None:
            return self._flush_encrypted(self._tls)
        while self._unsent:
            if self.is_severed:
                return False
            views = [self._unsent[i] for i in range(min(len(self._unsent), _IOV_MAX))]
            try:
                sent = self.sock.sendmsg(views)
            except (BlockingIOError, InterruptedError):
                return False
            while sent:
                if sent < len(self._unsent[0]):
                    self._unsent[0] = self._unsent[0][sent:]
                    break
                sent -= len(self._unsent.popleft())
        return True

    def _flush_encrypted(self, tls: LinkTls) -> bool:
        """See `flush`."""
        while not self.is_severed:
            try:
                while tls.unsent:
                    tls.unsent = tls.unsent[self.sock.send(tls.unsent) :]
            except (BlockingIOError, InterruptedError):
                return False
            if not tls.encrypt(self._unsent):
                return True
        return not self._unsent and not tls.unsent

    def is_drained(self) -> bool:
        """Whether the other end's kernel has all bytes that were appended, or it is closed."""
        with self.lock:
            if self.sock.fileno() < 0:
                return True
            has_unsent = bool(self._unsent) or (self._tls is not None and bool(self._tls.unsent))
            waiting = fcntl.ioctl(self.sock, termios.TIOCOUTQ, bytes(_COUNT.size))
            return not has_unsent and _COUNT.unpack(waiting) == (0,)

    def close(self) -> None:
        """Closes the socket and drops what is unsent."""
        with self.lock:
            self.sock.close()
            self._unsent.clear()

    def read(self) -> Iterator[IncomingMessage | None]:
        """Yields the messages that have arrived completely, and None when the handshake ends.

        Raises:
            OSError: the connection closed or broke; all that arrived before it was yielded.
            AuthenticationError: the bytes that came are not those of a peer of this job.
        """
        num_read = 0
        while True:
            with self._reading:
                try:
                    count = self._receive(can_receive=num_read < _READ_BYTES_MAX)
                except (BlockingIOError, InterruptedError):
                    if num_read < _READ_BYTES_MAX:
                        self._note_drained()
                    return
                if count == 0:
                    raise ConnectionError("closed by peer")
                num_read += count
                self.heard_s = time.monotonic()
                if self._header is not None and self._hashes(self._header.tag):
                    self._hasher.update(self._view[:count])
                self._view = self._view[count:]
                messages = tuple(self._completed_messages())
            yield from messages

    def _note_drained(self) -> None:
        """Notes the first moment at which no more of a large message waits in the kernel."""
        if not self._drained_s and len(self._payload) >= MEASURED_BYTES_MIN:
            self._drained_s, self._lacked_bytes = time.monotonic(), len(self._view)

    def _receive(self, *, can_receive: bool) -> int:
        """The number of bytes that have been read into the view; 0: the stream has ended.

        What TLS has received and not decrypted yet is read in any case: no event will tell of it.

        Raises:
            BlockingIOError: nothing more is there now, or may be received.
        """
        if self._tls is not None:
            return self._tls.read_into(self.sock, self._view, can_receive=can_receive)
        if not can_receive:
            raise BlockingIOError
        return self.sock.recv_into(self._view)

    def withdraw_memory(self) -> None:
        """Stops writing to the memory that was offered for the message that is arriving.

        The rest of the message goes elsewhere, so the message is incomplete.
        """
        with self._reading:
            if self._has_offered_memory:
                self._has_offered_memory = False
                self._view = memoryview(bytearray(len(self._view)))

    def _expect_header(self) -> None:
        self._expect(header_size(is_checked=self._own.protection.is_checked))

    def _completed_messages(self) -> Iterator[IncomingMessage | None]:
        """Yields what the bytes just read complete, as `read` does."""
        while not self._view:
            if self.peer < 0:
                self._step_handshake()
                if self.peer >= 0:
                    yield None
            else:
                yield from self._step_message()

    def _expect(self, num_bytes: int) -> None:
        """Has the next `num_bytes` bytes read as a part of the handshake, or as a header."""
        self._head = bytearray(num_bytes)
        self._header = None
        self._payload = np.empty(0, dtype=np.uint8)  # What was received is the receiver's alone.
        self._view = memoryview(self._head)

    def _step_message(self) -> Iterator[IncomingMessage]:
        """Handles a complete header, or yields the message once its payload is complete."""
        header, own = self._header, self._own
        if header is None:
            header = self._header = parse_header(
                bytes(self._head),
                is_checked=own.protection.is_checked,
                num_bytes_max=own.protection.num_bytes_max,
            )
            memory = own.memory_for(self.peer, header.epoch, header.tag, header.num_bytes)
            self._has_offered_memory = memory is not None
            if memory is None:
                memory = _new_memory(header.num_bytes, own.protection.num_bytes_max)
            self._payload = memory
            self._view = self._payload.data
            self._hasher.reset()
            return
        self._has_offered_memory = False
        is_sound = not self._hashes(header.tag) or self._hasher.intdigest() == header.digest
        # A rank changes what it still sends only once all ranks have left the epoch.
        if not is_sound and not own.is_over(header.epoch):
            raise ConnectionError(
                f"a message of {header.num_bytes} bytes on channel {header.tag.channel.name} was "
                "damaged on its way; its checksum differs"
            )
        payload = self._payload
        if self._drained_s:
            seconds = time.monotonic() - self._drained_s
            if self._lacked_bytes >= _AWAITED_BYTES_MIN:
                own.receptions.add(self.peer, self._lacked_bytes, seconds)
            self._drained_s = 0.0
        self._expect_header()
        if is_sound:
            yield IncomingMessage(header.epoch, header.tag, payload)

    def _hashes(self, tag: Tag) -> bool:
        """Whether this end compares the payload of such a message with its checksum."""
        return self._own.protection.is_checked and tag.channel not in _CHECKED_BY_RECEIVERS

    def _step_handshake(self) -> None:
        try:
            answer, num_bytes = self._handshake.send(bytes(self._head))
        except StopIteration as end:
            rank, port, is_checked, clock_number = _parse_number(int(end.value))
            if is_checked != self._own.protection.is_checked:
                checking = rank if is_checked else self._own.identity[0]
                raise AuthenticationError(
                    f"of ranks {self._own.identity[0]} and {rank} only rank {checking} sends "
                    "checksums; give all nodes of a job the same cluster.checksums"
                ) from end
            if self.target >= 0 and (rank, port) != (self.target, self.port):
                reason = f"rank {rank} of port {port} answers for rank {self.target}"
                raise AuthenticationError(reason) from end
            self.peer, self.port = rank, port
            self.has_own_clock = clock_number == self._own.clock_number
            self._expect_header()
            return
        self._expect(num_bytes)
        with self.lock:
            self._unsent.append(memoryview(answer))


# -- messages that have arrived for a rank and were not taken, and memory for those to come --------

Payload = npt.NDArray[np.uint8]


class LinkInbox:
    """The messages of a rank that have arrived and were not taken, by peer, epoch and tag.

    The caller makes sure that one thread at a time uses the messages. The memory for messages to
    come has a lock of its own, since one thread offers it and another one uses it.
    """

    def __init__(self) -> None:
        # With the moment at which each was due; 0.0: links are not paced.
        self._messages: dict[tuple[int, int, Tag], tuple[Payload, float]] = {}
        self._lock = threading.Lock()
        self._offered_memory: dict[tuple[int, int, Tag], Payload] = {}

    def __len__(self) -> int:
        return len(self._messages)

    def begin_epoch(self, epoch: int) -> set[int]:
        """Drops messages of older epochs; returns the peers that have sent some of this epoch."""
        self._messages = {key: m for key, m in self._messages.items() if key[1] >= epoch}
        with self._lock:
            self._offered_memory.clear()
        return {peer for peer, message_epoch, _ in self._messages if message_epoch == epoch}

    def add(self, peer: int, message: IncomingMessage, due_s: float) -> None:
        """Adds a message that has arrived."""
        self._messages[peer, message.epoch, message.tag] = message.payload, due_s

    def first(self, wanted: Mapping[int, Tag], epoch: int) -> tuple[int, Tag] | None:
        """The first of the wanted messages (tag by peer) that has arrived; None if none has."""
        arrived = (
            (peer, tag) for peer, tag in wanted.items() if (peer, epoch, tag) in self._messages
        )
        return next(arrived, None)

    def take(self, peer: int, epoch: int, tag: Tag) -> tuple[Payload, float]:
        """Takes a message that has arrived, with the moment at which it was due.

        Memory that was offered for the message and not used is free again.
        """
        with self._lock:
            self._offered_memory.pop((peer, epoch, tag), None)
        return self._messages.pop((peer, epoch, tag))

    def offer_memory(self, peer: int, epoch: int, tag: Tag, memory: Payload) -> None:
        """Offers memory for a message that may be about to arrive."""
        with self._lock:
            self._offered_memory[peer, epoch, tag] = memory

    def memory_for(self, peer: int, epoch: int, tag: Tag, num_bytes: int) -> Payload | None:
        """The memory offered for a message that begins to arrive; None: none of its size."""
        with self._lock:
            memory = self._offered_memory.pop((peer, epoch, tag), None)
        return memory if memory is not None and len(memory) == num_bytes else None
