"""Control messages on a byte stream: length-prefixed JSON frames, and the handshake before them.

A frame is its length (4 bytes, big endian) and a JSON message. Long messages are deflated: the plan
of thousands of nodes, which is sent to all of them, shrinks to a thirtieth. `FrameDecoder` and
`handshake` touch no socket: they take bytes and return bytes, so that blocking sockets, selectors
and asyncio share one implementation.

Handshake: both ends send a hello (magic, a random nonce, their identity), then prove that they
know the job's token by an HMAC over both hellos. The role is part of the proof, so that nobody can
answer an end with its own proof. The token itself never travels, and never proves anything itself:
each purpose of a connection has a key of its own, which follows from the token (`derive`). So a
proof for one purpose is worth nothing for another. An end that sends nothing is given up after
`HANDSHAKE_TIMEOUT_S`, so that strangers cannot use up descriptors.
"""

import asyncio
import hmac
import os
import struct
import zlib
from collections.abc import Generator
from enum import Enum
from typing import Any, Final, TypeVar

import msgspec

from planaria.core.garbage import no_collection
from planaria.core.messages import FromNode, Message, ToNode, ToWorker
from planaria.errors import AuthenticationError, StrangerError

_LENGTH = struct.Struct("!I")
_MAGIC = b"planar01"
_NONCE_BYTES = 16
_HELLO = struct.Struct(f"!8s{_NONCE_BYTES}sQ")
_PROOF_BYTES = 32
FRAME_BYTES_MAX = 1 << 28
# A node says far less than it is told: it is never told by nodes which plan holds. Each of many
# nodes may have the coordinator keep so many bytes.
FROM_NODE_BYTES_MAX: Final = 1 << 24
_DEFLATED = 1 << 31  # The bit of the length field that marks a deflated body.
_DEFLATED_FROM_BYTES = 1 << 16
HANDSHAKE_TIMEOUT_S = 10.0

# The purposes of connections within a job; for those to the public port of a head see acceptor.py.
NODES: Final = "nodes"  # From a node's agent to the coordinator on the same machine.
LINKS: Final = "links"  # From rank to rank.
LINK_CERTIFICATES: Final = "link certificates"  # For TLS from rank to rank (link_tls.py).
PROBES: Final = "probes"  # From any process to the launcher, where faults are injected.

_from_node_decoder: msgspec.json.Decoder[FromNode] = msgspec.json.Decoder(FromNode)
_order_decoder: msgspec.json.Decoder[ToNode] = msgspec.json.Decoder(ToNode)
_worker_order_decoder: msgspec.json.Decoder[ToWorker] = msgspec.json.Decoder(ToWorker)


Decoded = TypeVar("Decoded")


class Role(Enum):
    """The end of a connection that makes a proof."""

    CONNECT = b"connect"
    ACCEPT = b"accept"


def frame(message: Message) -> bytes:
    """The message as one frame."""
    body = msgspec.json.encode(message)
    assert len(body) <= FRAME_BYTES_MAX
    if len(body) < _DEFLATED_FROM_BYTES:
        return _LENGTH.pack(len(body)) + body
    deflated = zlib.compress(body, level=1)
    return _LENGTH.pack(_DEFLATED | len(deflated)) + deflated


def derive(token: bytes, purpose: str) -> bytes:
    """The key for one purpose, 32 bytes; from it nobody learns the token or another key."""
    return hmac.digest(token, purpose.encode(), "sha256")


class FrameDecoder:
    """Cuts a byte stream into the bodies of its frames.

    It keeps no more than has arrived, whatever length a frame claims.

    Args:
        bytes_max: largest body that is accepted, deflated or not.
    """

    def __init__(self, *, bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The bodies that are complete once `data` has arrived.

        Raises:
            AuthenticationError: the next frame is longer than allowed, or its body is damaged.
        """
        self._buffer += data
        bodies = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            is_deflated, length = length & _DEFLATED, length & ~_DEFLATED
            if length > self._bytes_max:
                raise AuthenticationError(
                    f"a frame of {length} bytes does not come from planaria: {self._bytes_max} are "
                    "allowed"
                )
            if len(self._buffer) < _LENGTH.size + length:
                break
            body = bytes(self._buffer[_LENGTH.size : _LENGTH.size + length])
            bodies.append(_inflated_body(body, self._bytes_max) if is_deflated else body)
            del self._buffer[: _LENGTH.size + length]
        return bodies


def order_of(body: bytes) -> ToNode:
    """The message to a node that a frame's body holds.

    Raises:
        AuthenticationError: the body holds no such message.
    """
    with no_collection():
        return message_of(body, _order_decoder)


def worker_order_of(body: bytes) -> ToWorker:
    """The message to a worker that a frame's body holds.

    Raises:
        AuthenticationError: the body holds no such message.
    """
    with no_collection():
        return message_of(body, _worker_order_decoder)


def fact_of(body: bytes) -> FromNode:
    """The message from a node that a frame's body holds.

    Raises:
        AuthenticationError: the body holds no such message.
    """
    return message_of(body, _from_node_decoder)


def message_of(body: bytes, decoder: msgspec.json.Decoder[Decoded]) -> Decoded:
    """The message that a frame's body holds.

    Raises:
        AuthenticationError: the body holds no message of the decoder's type.
    """
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError, AssertionError) as error:
        # msgspec lets errors of UTF-8 and of deep nesting out as they are, and some types assert
        # what whoever makes them must ensure.
        reason = str(error) or "it contradicts itself"
        raise AuthenticationError(f"a message does not come from planaria: {reason}") from error


def _inflated_body(deflated: bytes, bytes_max: int) -> bytes:
    """The body of a deflated frame.

    Raises:
        AuthenticationError: the data is damaged, or inflates to more bytes than a frame may have.
    """
    inflater = zlib.decompressobj()
    try:
        body = inflater.decompress(deflated, bytes_max)
    except zlib.error as error:
        raise AuthenticationError(f"a frame does not come from planaria: {error}") from error
    if not inflater.eof:
        raise AuthenticationError("a frame does not come from planaria: it does not end")
    return body


def handshake(
    token: bytes, role: Role, *, identity: int
) -> Generator[tuple[bytes, int], bytes, int]:
    """Proves this end to the other one and checks the other one's proof.

    Yields (bytes to send, number of bytes to read next); the caller sends it the bytes read. The
    generator returns the other end's identity.

    Args:
        token: key of the connection's purpose.
        identity: number of this end, below 2^64; the other end trusts it once it has the proof.

    Raises:
        AuthenticationError: the other end speaks another protocol or has another token.
    """
    hello = _HELLO.pack(_MAGIC, os.urandom(_NONCE_BYTES), identity)
    peer_hello = yield hello, _HELLO.size
    magic, _, peer_identity = _HELLO.unpack(peer_hello)
    if magic != _MAGIC:
        raise StrangerError(f"the other end speaks {magic!r}, not {_MAGIC!r}")
    peer_role = Role.ACCEPT if role is Role.CONNECT else Role.CONNECT
    proof = yield _proof(token, role, hello, peer_hello), _PROOF_BYTES
    if not hmac.compare_digest(proof, _proof(token, peer_role, peer_hello, hello)):
        raise AuthenticationError(f"the other end ({peer_role.name}) has another job token")
    return int(peer_identity)


def _proof(token: bytes, role: Role, own_hello: bytes, peer_hello: bytes) -> bytes:
    return hmac.digest(token, role.value + own_hello + peer_hello, "sha256")


async def shake_hands(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    *,
    token: bytes,
    role: Role,
    identity: int,
) -> int:
    """Does the `handshake` over an asyncio stream; returns the other end's identity.

    Raises:
        AuthenticationError: the handshake was refused, or took more than HANDSHAKE_TIMEOUT_S.
        IncompleteReadError, ConnectionError: the stream ended.
    """
    steps = handshake(token, role, identity=identity)
    answer: Any = None
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            while True:
                data, num_bytes = steps.send(answer)
                writer.write(data)
                answer = await reader.readexactly(num_bytes)
    except TimeoutError as error:
        raise AuthenticationError(f"nothing came for {HANDSHAKE_TIMEOUT_S:.0f} s") from error
    except StopIteration as end:
        return int(end.value)
