"""The positions of ranks' parts of a tensor, and assembling a part from the parts of others."""

from collections.abc import Mapping

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from planaria.checkpoint.memory.wire import State
from planaria.errors import CheckpointError


class TensorSlice(msgspec.Struct, frozen=True):
    """The position of a rank's part in the whole tensor.

    Attributes:
        whole: shape of the whole tensor.
        offset, shape: first index and shape of the rank's part, by dimension.
        dtype: torch's name of the dtype, without "torch.".
    """

    whole: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str


def local_part(tensor: Tensor) -> tuple[Tensor, TensorSlice]:
    """A rank's part of a tensor, and its position in the whole."""
    local, offset = tensor.detach(), (0,) * tensor.dim()
    if isinstance(tensor, DTensor):
        local = tensor.to_local().detach()
        _, offsets = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        offset = tuple(offsets)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return local, TensorSlice(tuple(tensor.shape), offset, tuple(local.shape), dtype)


def assemble_part(
    name: str,
    place: TensorSlice,
    parts: Mapping[int, TensorSlice],
    states: Mapping[int, State],
) -> Tensor:
    """A rank's part of a tensor, assembled from saved parts.

    Args:
        name: name of the tensor.
        place: position of the part to assemble.
        parts: positions of the saved parts, by shard.
        states: bytes by name of tensor, by shard.

    Raises:
        CheckpointError: the saved parts do not cover the part.
    """
    dtype = getattr(torch, place.dtype)
    target = torch.empty(place.shape, dtype=dtype)
    missing = target.numel()
    seen: list[TensorSlice] = []  # Several shards may have the same part.
    for n, there in parts.items():
        common = overlap(there, place)
        if common is None or there in seen:
            continue
        seen.append(there)
        source = torch.from_numpy(states[n][name].copy()).view(dtype).reshape(there.shape)
        into = tuple(slice(a - o, b - o) for (a, b), o in zip(common, place.offset, strict=True))
        out = tuple(slice(a - o, b - o) for (a, b), o in zip(common, there.offset, strict=True))
        target[into] = source[out]
        missing -= int(np.prod([b - a for a, b in common], dtype=np.int64))
        if is_in(place, there):
            return target
    if missing > 0:
        raise CheckpointError(f"part of {name} was not saved")
    return target


def overlap(part: TensorSlice, other: TensorSlice) -> list[tuple[int, int]] | None:
    """The (begin, end) in which two parts of a tensor overlap, by dimension; None: they do not."""
    bounds = []
    for a, n, b, m in zip(part.offset, part.shape, other.offset, other.shape, strict=True):
        begin, end = max(a, b), min(a + n, b + m)
        if begin >= end:
            return None
        bounds.append((begin, end))
    return bounds


def is_in(part: TensorSlice, other: TensorSlice) -> bool:
    """Whether a part of a tensor lies inside another one."""
    return all(
        b <= a and a + n <= b + m
        for a, n, b, m in zip(part.offset, part.shape, other.offset, other.shape, strict=True)
    )
