"""Frames and the handshake: fed bytes, they give bytes, however the stream is cut."""

import asyncio
import gc
import struct
import zlib
from collections.abc import Generator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.core.messages import Heartbeat, SaveLayers, StopRequested, WorkerExited
from planaria.errors import AuthenticationError
from planaria.transport import frames
from planaria.transport.frames import (
    FRAME_BYTES_MAX,
    LINKS,
    NODES,
    PROBES,
    FrameDecoder,
    Role,
    derive,
    fact_of,
    frame,
    handshake,
    order_of,
    shake_hands,
)

TOKEN = b"the job's token"
Handshake = Generator[tuple[bytes, int], bytes, int]


def ends(connecting: bytes = TOKEN, accepting: bytes = TOKEN) -> tuple[Handshake, Handshake]:
    return (
        handshake(connecting, Role.CONNECT, identity=3),
        handshake(accepting, Role.ACCEPT, identity=1 << 63),
    )


def finished(steps: Handshake, data: bytes) -> int:
    """The identity that a handshake returns once it has read the last bytes."""
    with pytest.raises(StopIteration) as end:
        steps.send(data)
    return int(end.value.value)


def test_both_ends_learn_who_the_other_is() -> None:
    """Each asks for exactly as many bytes as the other sends."""
    connect, accept = ends()
    (hello, hello_bytes), (peer_hello, peer_hello_bytes) = next(connect), next(accept)
    proof, proof_bytes = connect.send(peer_hello)
    peer_proof, peer_proof_bytes = accept.send(hello)

    assert (len(peer_hello), len(hello)) == (hello_bytes, peer_hello_bytes)
    assert (len(peer_proof), len(proof)) == (proof_bytes, peer_proof_bytes)
    assert finished(connect, peer_proof) == 1 << 63
    assert finished(accept, proof) == 3


def test_an_end_with_another_token_is_refused_by_both() -> None:
    """The error says which end is the stranger."""
    connect, accept = ends(accepting=b"another")
    hello, peer_hello = next(connect)[0], next(accept)[0]
    proof, peer_proof = connect.send(peer_hello)[0], accept.send(hello)[0]

    with pytest.raises(AuthenticationError, match=r"ACCEPT.*another job token"):
        connect.send(peer_proof)
    with pytest.raises(AuthenticationError, match=r"CONNECT.*another job token"):
        accept.send(proof)


def test_another_protocol_is_refused_before_anything_is_proved() -> None:
    """The hello of a stranger is as long as it likes; its first bytes tell."""
    connect, _ = ends()
    _, num_bytes = next(connect)

    with pytest.raises(AuthenticationError, match="speaks b'GET / HT'"):
        connect.send(b"GET / HTTP/1.1\r\n".ljust(num_bytes))


@pytest.mark.parametrize("role", list(Role))
def test_an_end_is_not_answered_with_its_own_words(role: Role) -> None:
    """Who sends our hello and our proof back knows no token."""
    steps = handshake(TOKEN, role, identity=3)
    hello, _ = next(steps)
    proof, _ = steps.send(hello)

    with pytest.raises(AuthenticationError, match="another job token"):
        steps.send(proof)


def test_a_proof_serves_one_connection_only() -> None:
    """A recorded handshake, replayed, meets another nonce."""
    connect, accept = ends()
    recorded_hello, peer_hello = next(connect)[0], next(accept)[0]
    recorded_proof, _ = connect.send(peer_hello)
    _, replayed_on = ends()
    next(replayed_on)
    replayed_on.send(recorded_hello)

    with pytest.raises(AuthenticationError):
        replayed_on.send(recorded_proof)


def test_each_purpose_has_its_own_key() -> None:
    """Whoever may connect for one purpose cannot pass for another."""
    keys = {TOKEN, *(derive(TOKEN, purpose) for purpose in (NODES, LINKS, PROBES))}

    assert len(keys) == 4
    assert derive(TOKEN, LINKS) != derive(b"another", LINKS)


def test_the_token_never_travels() -> None:
    """Nor does anything that is the same in two handshakes, but magic and identity."""
    sent = []
    for _ in range(2):
        connect, accept = ends()
        hello, peer_hello = next(connect)[0], next(accept)[0]
        sent.append((hello, connect.send(peer_hello)[0]))

    assert all(TOKEN not in data for pair in sent for data in pair)
    assert sent[0][0] != sent[1][0]
    assert sent[0][1] != sent[1][1]


async def _shaken(sent: bytes, *, end_of_stream: bool) -> int:
    reader = asyncio.StreamReader()
    reader.feed_data(sent)
    if end_of_stream:
        reader.feed_eof()
    return await shake_hands(reader, _Sink(), token=TOKEN, role=Role.ACCEPT, identity=0)


class _Sink(asyncio.StreamWriter):
    """Takes what is written, and forgets it."""

    def __init__(self) -> None:
        self.written = b""

    def write(self, data: object) -> None:
        assert isinstance(data, bytes)
        self.written += data

    def __del__(self) -> None:
        self.written = b""


@pytest.mark.parametrize("num_bytes", [0, 1, 31])
def test_a_truncated_handshake_ends_with_its_stream(num_bytes: int) -> None:
    """Half a hello is no reason to wait."""
    hello, _ = next(ends()[0])

    with pytest.raises(asyncio.IncompleteReadError):
        asyncio.run(_shaken(hello[:num_bytes], end_of_stream=True))


def test_an_end_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would hold a descriptor for ever."""
    monkeypatch.setattr(frames, "HANDSHAKE_TIMEOUT_S", 0.01)

    with pytest.raises(AuthenticationError, match="nothing came"):
        asyncio.run(_shaken(b"", end_of_stream=False))


async def _both_over_streams() -> tuple[int, int]:
    accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        identity = await shake_hands(reader, writer, token=TOKEN, role=Role.ACCEPT, identity=7)
        accepted.set_result(identity)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    identity = await shake_hands(reader, writer, token=TOKEN, role=Role.CONNECT, identity=3)
    result = identity, await asyncio.wait_for(accepted, 10.0)
    writer.close()
    server.close()
    return result


def test_streams_shake_hands() -> None:
    """The asyncio form is the same handshake."""
    assert asyncio.run(_both_over_streams()) == (7, 3)


@given(st.lists(st.binary(max_size=50), max_size=12), st.data())
def test_frames_survive_any_cut(bodies: list[bytes], data: st.DataObject) -> None:
    """A stream may be handed on in pieces of any size, also byte by byte."""
    stream = b"".join(struct.pack("!I", len(body)) + body for body in bodies)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    decoder = FrameDecoder()

    bounds = [0, *cuts, len(stream)]
    pieces = [stream[a:b] for a, b in pairwise(bounds)]
    assert bodies == [body for piece in pieces for body in decoder.feed(piece)]


def exited(node: int) -> WorkerExited:
    return WorkerExited(node=node, rank=node, pid=70 + node, status=-9)


def test_messages_come_back_as_they_went() -> None:
    """A frame holds one message, tagged with its type."""
    messages = [exited(4), Heartbeat(node=4, sent_s=0.5), exited(5)]
    decoder = FrameDecoder()

    bodies = decoder.feed(b"".join(frame(message) for message in messages))

    assert messages == [fact_of(body) for body in bodies]


def test_fed_bytes_count_also_where_nobody_looks_at_the_bodies() -> None:
    """Feeding acts when it is called, not when its result is walked through."""
    data = frame(StopRequested())
    decoder = FrameDecoder()
    decoder.feed(data[:5])

    assert len(decoder.feed(data[5:])) == 1


def test_a_frame_too_long_to_be_ours_is_refused_at_its_length() -> None:
    """Its bytes are not waited for, let alone stored."""
    assert FrameDecoder().feed(struct.pack("!I", FRAME_BYTES_MAX)) == []
    with pytest.raises(AuthenticationError, match=str(FRAME_BYTES_MAX + 1)):
        FrameDecoder().feed(struct.pack("!I", FRAME_BYTES_MAX + 1))


def long_message() -> WorkerExited:
    return WorkerExited(node=1, rank=1, pid=71, status=-9, stack="a line of a stack\n" * 10_000)


def test_a_long_message_travels_deflated_and_comes_back_as_it_went() -> None:
    """The plan of thousands of nodes goes to each of them."""
    data = frame(long_message())

    assert len(data) < 10_000
    (body,) = FrameDecoder().feed(data)
    assert fact_of(body) == long_message()


@pytest.mark.parametrize("num_bytes", [10, -1])
def test_what_cannot_be_inflated_is_refused(num_bytes: int) -> None:
    """Damaged, and cut short."""
    data = bytearray(frame(long_message()))
    if num_bytes > 0:
        data[4 : 4 + num_bytes] = bytes(num_bytes)
    else:
        data[:4] = struct.pack("!I", struct.unpack_from("!I", data)[0] - 1)
        data = data[:-1]
    with pytest.raises(AuthenticationError, match="does not come from planaria"):
        FrameDecoder().feed(bytes(data))


def test_a_small_frame_that_inflates_without_end_is_refused() -> None:
    """It would fill the memory."""
    with pytest.raises(AuthenticationError, match="does not end"):
        FrameDecoder(bytes_max=100_000).feed(deflated(200_000))


def deflated(num_bytes: int) -> bytes:
    body = zlib.compress(bytes(num_bytes))
    return struct.pack("!I", 1 << 31 | len(body)) + body


def test_no_garbage_is_looked_for_while_a_long_order_is_read() -> None:
    """It is looked for again afterwards, if it was before; also where it is none."""
    order = SaveLayers(epoch=0, iteration=1, layers={rank: (rank,) for rank in range(20_000)})
    (body,) = FrameDecoder().feed(frame(order))
    phases: list[str] = []

    def note(phase: str, _: dict[str, int]) -> None:
        phases.append(phase)

    gc.collect()
    gc.callbacks.append(note)
    try:
        read = order_of(body)
        noted = phases.count("start")
    finally:
        gc.callbacks.remove(note)

    assert read == order
    assert noted <= 1  # Right afterwards.
    assert gc.isenabled()
    with pytest.raises(AuthenticationError):
        order_of(b"{")
    assert gc.isenabled()
