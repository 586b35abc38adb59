"""Parts of tensors, put together from others."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from planaria.checkpoint.memory.wire import State
from planaria.errors import CheckpointError
from planaria.torchrun.slices import (
    TensorSlice,
    assemble_part,
    has_position,
    local_part,
    part_of_dimension,
)

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


@contextmanager
def mesh_of_rank(rank: int, num_data: int, num_tensor: int) -> Iterator[DeviceMesh]:
    """The mesh of ranks for FSDP2 and tensor parallelism, of which this one is alone here."""
    size = num_data * num_tensor
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield init_device_mesh("cpu", (num_data, num_tensor), mesh_dim_names=("data", "tensor"))
    finally:
        dist.destroy_process_group()


def test_a_dimension_that_both_fsdp_and_tensor_parallelism_cut_may_be_uneven() -> None:
    """Torch says that rank 6 has the last row, and rank 7 has it."""
    with mesh_of_rank(7, 4, 2) as mesh:
        model = nn.Linear(COLUMNS, 9, bias=False)
        parallelize_module(model, mesh["tensor"], ColwiseParallel())
        fully_shard(model, mesh=mesh["data"])
        local, place = local_part(model.weight)

        assert has_position(model.weight)
        assert local.shape == place.shape == (1, COLUMNS)
        assert place.offset == (8, 0)


@given(size=st.integers(0, 40), outer=st.integers(1, 5), inner=st.integers(1, 5))
def test_parts_of_parts_are_those_that_torch_cuts(size: int, outer: int, inner: int) -> None:
    for n in range(outer):
        for m in range(inner):
            rows = torch.arange(size)
            for number, index in ((outer, n), (inner, m)):
                parts = rows.chunk(number)
                rows = parts[index] if index < len(parts) else rows[:0]
            first, length = part_of_dimension(size, ((outer, n), (inner, m)))

            assert length == len(rows)
            assert not length or first == int(rows[0])


@pytest.mark.parametrize(
    ("cuts", "rows", "is_known"),
    [
        ((Shard(0), Shard(0)), 2, True),
        ((Shard(0), Shard(0)), 3, False),  # Somebody has cut it by hand.
        ((Shard(0), _StridedShard(0, split_factor=2)), 2, False),  # Every other row of four.
    ],
)
def test_a_part_whose_position_is_not_known_is_seen(
    cuts: tuple[Shard, Shard], rows: int, is_known: bool
) -> None:
    with mesh_of_rank(0, 2, 2) as mesh:
        part = torch.zeros(rows, COLUMNS)
        tensor = DTensor.from_local(
            part, mesh, cuts, shape=torch.Size((8, COLUMNS)), stride=(COLUMNS, 1)
        )

        assert has_position(tensor) is is_known
