"""Copying with several threads."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.checkpoint.memory import filling
from planaria.checkpoint.memory.filling import Fill, Filler, fill_alone
from planaria.checkpoint.memory.version import Bytes

sizes = st.lists(st.integers(0, 100), max_size=8)


def copied(fill: Fill, lengths: list[int]) -> tuple[list[Bytes], list[Bytes]]:
    """Sources that nobody may write to, and what became of the targets."""
    rng = np.random.default_rng(len(lengths))
    sources = [rng.integers(1, 256, length, dtype=np.uint8) for length in lengths]
    for source in sources:
        source.flags.writeable = False
    targets: list[Bytes] = [np.zeros(length, dtype=np.uint8) for length in lengths]
    fill(list(zip(targets, sources, strict=True)))
    return sources, targets


@given(sizes, st.integers(1, 4), st.integers(1, 40))
def test_all_bytes_are_copied_whatever_threads_there_are(
    lengths: list[int], num_threads: int, piece_bytes: int
) -> None:
    """Pieces and arrays end where they like; it may be called again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filling, "_PIECE_BYTES", piece_bytes)
        filler = Filler(num_threads)
        for fill in (filler, filler, fill_alone):
            for source, target in zip(*copied(fill, lengths), strict=True):
                assert np.array_equal(source, target)
        filler.close()


def test_what_goes_wrong_in_another_thread_is_raised() -> None:
    """Or a copy that is not one would be taken for whole."""
    filler = Filler(4)
    wrong = [(np.zeros(1, dtype=np.uint8), np.zeros(3, dtype=np.uint8))] * 8
    with pytest.raises(ValueError, match="broadcast"):
        filler(wrong)
    filler.close()
