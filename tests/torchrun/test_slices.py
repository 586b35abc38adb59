"""Parts of tensors, put together from others."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.checkpoint.memory.wire import State
from planaria.errors import CheckpointError
from planaria.torchrun.slices import TensorSlice, assemble_part

ROWS, COLUMNS = 7, 3


@settings(max_examples=40)
@given(
    cuts=st.sets(st.integers(1, ROWS - 1)),
    replicas=st.integers(1, 2),
    begin=st.integers(0, ROWS - 1),
    number=st.integers(0, ROWS),
)
def test_any_part_comes_from_any_parts(
    cuts: set[int], replicas: int, begin: int, number: int
) -> None:
    """Rows of a matrix, which some ranks hold twice; a part may be empty."""
    whole = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)
    number = min(number, ROWS - begin)
    parts: dict[int, TensorSlice] = {}
    states: dict[int, State] = {}
    for first, end in pairwise((0, *sorted(cuts), ROWS)):
        for _ in range(replicas):
            rank = len(parts)
            parts[rank] = TensorSlice(
                (ROWS, COLUMNS), (first, 0), (end - first, COLUMNS), "float32"
            )
            states[rank] = {"w": whole[first:end].reshape(-1).view(torch.uint8).numpy()}

    wanted = TensorSlice((ROWS, COLUMNS), (begin, 0), (number, COLUMNS), "float32")
    assert torch.equal(assemble_part("w", wanted, parts, states), whole[begin : begin + number])
    del parts[0]
    if replicas == 1 and begin < min({*cuts, ROWS}) and number:
        with pytest.raises(CheckpointError, match="part of w was not saved"):
            assemble_part("w", wanted, parts, states)
