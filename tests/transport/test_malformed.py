"""Whatever bytes come, reading them raises nothing but AuthenticationError."""

import random
import struct
import zlib
from random import Random
from typing import Any

import msgspec
import pytest

from helpers.random_json import damaged_body, random_body
from planaria.core.machine_messages import FromMachine, ToMachine
from planaria.core.messages import FromNode, ToNode
from planaria.core.records import FromLauncher, ToLauncher
from planaria.errors import AuthenticationError
from planaria.transport.frames import FROM_NODE_BYTES_MAX, FrameDecoder, message_of
from planaria.transport.probe import LauncherMessage, StepReached

TYPES: tuple[Any, ...] = (
    *(FromNode, ToNode, FromMachine, ToMachine, ToLauncher, FromLauncher),
    *(StepReached, LauncherMessage),
)
DECODERS = {decoded_type: msgspec.json.Decoder(decoded_type) for decoded_type in TYPES}
BODIES_OF_A_KIND = 40  # Damaged bodies that are made of one that is whole.


@pytest.mark.parametrize(
    "num_frames",
    [24_000, pytest.param(1_000_000, marks=(pytest.mark.long, pytest.mark.timeout(0)))],
)
def test_malformed_frames_are_refused_and_nothing_else_happens(num_frames: int) -> None:
    """Whoever has the token may still send nonsense, by a bug or in another version."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = Random(seed)
    refused = 0
    for _ in range(num_frames // BODIES_OF_A_KIND):
        decoded_type = rng.choice(TYPES)
        whole = random_body(decoded_type, rng)
        for _ in range(BODIES_OF_A_KIND):
            refused += _is_refused(_damaged_frame(whole, rng), decoded_type, rng)

    assert refused > num_frames // 4


def _damaged_frame(whole: bytes, rng: Random) -> bytes:
    """A frame of a damaged body, deflated or not; some also have a wrong length or bad bytes."""
    body, is_deflated = damaged_body(whole, rng), 0
    if rng.random() < 0.1:
        body, is_deflated = zlib.compress(body, level=1), 1 << 31
    length = len(body) if rng.random() < 0.9 else rng.randrange(1 << 32)
    data = bytearray(struct.pack("!I", length & 0x7FFFFFFF | is_deflated) + body)
    if rng.random() < 0.1:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def _is_refused(data: bytes, decoded_type: Any, rng: Random) -> bool:
    """Whether the stream is refused; it arrives in two parts."""
    decoder = FrameDecoder(bytes_max=FROM_NODE_BYTES_MAX)
    cut = rng.randrange(len(data))
    try:
        for body in (*decoder.feed(data[:cut]), *decoder.feed(data[cut:])):
            message_of(body, DECODERS[decoded_type])
    except AuthenticationError:
        return True
    return False


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[" * 100_000,
        b'{"type":"Heartbeat","node":1,"sent_s":0,"x":' + b"[" * 100_000,
        b'{"type":"\xff"}',
        b'{"type":"Heartbeat","node":' + b"9" * 5000 + b',"sent_s":0}',
        b'{"type":"Heartbeat","node":1,"sent_s":1e999}',
        b'{"type":"Heartbeat","node":1}',
        b'{"type":"Nothing"}',
        b"null",
        b'{"type":"Heartbeat","node":1,"sent_s":0}{',
    ],
)
def test_each_kind_of_nonsense_is_refused(body: bytes) -> None:
    """Deep nesting, bad UTF-8, numbers out of range, and messages of other programs."""
    with pytest.raises(AuthenticationError, match="does not come from planaria"):
        message_of(body, DECODERS[FromNode])


def test_what_contradicts_itself_is_refused() -> None:
    """Plans assert what their makers ensure; whoever sends one ensures nothing."""
    rng = Random(0)
    bodies = (random_body(ToNode, rng) for _ in range(2000))
    causes = set()
    for body in bodies:
        try:
            message_of(body, DECODERS[ToNode])
        except AuthenticationError as error:
            causes.add(type(error.__cause__))

    assert AssertionError in causes


def test_a_claimed_length_takes_no_memory() -> None:
    """A thousand connections that each claim the longest frame cost what they send."""
    decoders = [FrameDecoder() for _ in range(1000)]
    for decoder in decoders:
        assert decoder.feed(struct.pack("!I", (1 << 28)) + b"{") == []

    assert sum(len(decoder._buffer) for decoder in decoders) == 5000


@pytest.mark.parametrize("is_deflated", [False, True])
def test_a_node_may_say_less_than_it_is_told(is_deflated: bool) -> None:
    """Many nodes may send at once, and each may fill so much of the coordinator's memory."""
    allowed, too_long = bytes(1000), bytes(1001)
    for body in (allowed, too_long):
        packed = zlib.compress(body) if is_deflated else body
        data = struct.pack("!I", len(packed) | is_deflated << 31) + packed
        if body is allowed:
            assert FrameDecoder(bytes_max=1000).feed(data) == [body]
        else:
            with pytest.raises(AuthenticationError):
                FrameDecoder(bytes_max=1000).feed(data)
