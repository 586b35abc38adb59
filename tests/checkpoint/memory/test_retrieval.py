"""Copies on their way back."""

import os
from collections.abc import Iterator

import numpy as np
import pytest

from helpers.linked_ranks import TIMEOUT_S, link_ranks
from planaria.checkpoint.memory.arena import Arena
from planaria.checkpoint.memory.arena_file import arena_fd
from planaria.checkpoint.memory.filling import fill_alone
from planaria.checkpoint.memory.retrieval import receive_copy, send_copy
from planaria.checkpoint.memory.version import Bytes, Version
from planaria.checkpoint.memory.wire import fill_tensors, head_of
from planaria.core.copies import Label
from planaria.errors import CheckpointError
from planaria.transport.links import Links, Tag

LABEL = Label(-1, 0, 4)
STATE = {"weight": np.arange(50_000, dtype=np.float32), "step": np.array(7)}
EMPTY: Bytes = np.empty(0, dtype=np.uint8)


@pytest.fixture
def version() -> Iterator[Version]:
    """A copy that is whole."""
    fd = arena_fd()
    head = head_of(STATE)
    size = len(head) + sum(array.nbytes for array in STATE.values())
    made = Arena(fd).begin(0, LABEL, head=head, num_bytes=size, piece_bytes=size // 3)
    fill_tensors(made, STATE, fill_alone)
    made.hash_pieces()
    yield made
    os.close(fd)


def test_a_copy_comes_as_it_was_made(version: Version) -> None:
    """In pieces, to new memory or to what there is."""
    room = np.zeros(1 << 20, dtype=np.uint8)
    with link_ranks(2) as (source, target):
        send_copy(source, 1, version)
        found = receive_copy(target, 0, 0, LABEL, timeout_s=TIMEOUT_S, memory=room)

        assert list(found) == list(STATE)
        for name, array in STATE.items():
            assert np.array_equal(found[name], array)


@pytest.mark.parametrize("position", [0, 9, 60, -1])
@pytest.mark.parametrize("message", [0, 1, 3])
def test_a_copy_that_comes_otherwise_is_refused(
    message: int, position: int, version: Version, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever message has a bit that is wrong, be it the one that says what comes."""
    send = Links.send

    def sent(links: Links, peer: int, tag: Tag, content: Bytes = EMPTY, **rest: int) -> None:
        if tag.b == message:
            content = content.copy()
            content[position] ^= 4
        send(links, peer, tag, content, **rest)

    monkeypatch.setattr(Links, "send", sent)
    with link_ranks(2) as (source, target):
        send_copy(source, 1, version)
        with pytest.raises(CheckpointError):
            receive_copy(target, 0, 0, LABEL, timeout_s=TIMEOUT_S)
