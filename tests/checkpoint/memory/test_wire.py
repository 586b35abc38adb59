"""Openings of copies: what is believed of them."""

import msgspec
import numpy as np
import pytest

from planaria.checkpoint.memory.wire import (
    Opening,
    Tensor,
    bytes_of,
    checked_opening,
    head_of,
    opening_message,
    tensors_of,
)

HEAD = head_of({"weight": np.zeros((5, 2), dtype=np.float32), "step": np.array(7)})
WHOLE = Opening(
    num_bytes=len(HEAD) + 48, piece_bytes=(len(HEAD) + 48) // 2, head=HEAD, hashes=(1, 2)
)


def test_an_opening_comes_back_as_it_was_sent() -> None:
    """One of a layer without tensors, too, and one that says that nothing has changed."""
    empty = head_of({})
    for opening in (
        *(WHOLE, Opening(), Opening(is_same=True)),
        Opening(num_bytes=len(empty), piece_bytes=100, head=empty, hashes=(3,)),
    ):
        assert checked_opening(opening_message(opening)) == opening


@pytest.mark.parametrize(
    "changes",
    [
        {"num_bytes": 1 << 60},
        {"num_bytes": -1},
        {"num_bytes": 0},
        {"piece_bytes": 0},
        {"piece_bytes": -5},
        {"piece_bytes": 1},
        {"hashes": (1,)},
        {"hashes": ()},
        {"head": b""},
        {"head": b"["},
        {"head": b"[" * 100_000},
        {"head": b'[["a","<f4",[1000000000000000000]]]'},
    ],
)
def test_an_opening_that_contradicts_itself_is_refused(changes: dict[str, object]) -> None:
    """Its hash is right, but whoever sent it keeps no such copy: no memory is taken for it."""
    opening = msgspec.structs.replace(WHOLE, **changes)

    assert checked_opening(opening_message(opening)) is None


@pytest.mark.parametrize(
    "tensor",
    [
        Tensor("a", "<f4", (-1, -1)),
        Tensor("a", "|O", (1,)),
        Tensor("a", "nothing", ()),
    ],
)
def test_a_tensor_that_cannot_be_is_refused(tensor: Tensor) -> None:
    """Object arrays hold pointers."""
    with pytest.raises(ValueError, match=r"no (tensor|dtype)"):
        bytes_of([tensor])


def test_sizes_do_not_wrap() -> None:
    """As they did in 64 bits, to sizes that look small."""
    assert bytes_of([Tensor("a", "<f8", (1 << 31, 1 << 31))]) == 1 << 65
    assert bytes_of(tensors_of(HEAD)) == 48
