"""The positions of ranks' parts of a tensor, and assembling a part from the parts of others."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Shard, _StridedShard

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
        _, offset = _shape_and_offset(tensor)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return local, TensorSlice(tuple(tensor.shape), offset, tuple(local.shape), dtype)


def has_position(tensor: Tensor) -> bool:
    """Whether it is known which part of a tensor a rank has, one of the tensor's mesh."""
    if not isinstance(tensor, DTensor):
        return True
    mesh, cuts = tensor.device_mesh, tensor.placements
    for n, cut in enumerate(cuts):
        if isinstance(cut, _StridedShard):
            later = [mesh.size(m) for m in range(n + 1, mesh.ndim) if _cuts(cuts[m], cut.dim)]
            if cut.split_factor != math.prod(later):
                return False  # Its rows do not lie side by side.
    return _shape_and_offset(tensor)[0] == tuple(tensor.to_local().shape)


def _shape_and_offset(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of a rank's part and its first index, by dimension.

    FSDP2 cuts the parts of tensor parallelism, so of a dimension that both cut, the last mesh
    dimension cuts first. Torch's own function is wrong where these parts are uneven.
    """
    mesh, cuts = tensor.device_mesh, tensor.placements
    shape, offset = map(list, compute_local_shape_and_global_offset(tensor.shape, mesh, cuts))
    coordinate = mesh.get_coordinate()
    strided = {cut.dim for cut in cuts if isinstance(cut, _StridedShard)}
    if coordinate is not None:
        for dim in strided:
            nested = [
                (mesh.size(n), coordinate[n]) for n, cut in enumerate(cuts) if _cuts(cut, dim)
            ]
            offset[dim], shape[dim] = part_of_dimension(tensor.shape[dim], nested[::-1])
    return tuple(shape), tuple(offset)


def part_of_dimension(size: int, cuts: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The first index and the size of a part, which is cut again and again as `torch.chunk` does.

    Args:
        cuts: number of parts and index of the one that is kept, of each cut in turn.
    """
    first = 0
    for num_parts, index in cuts:
        part = -(-size // num_parts)
        begin = min(size, index * part)
        first, size = first + begin, min(part, size - begin)
    return first, size


def _cuts(placement: Any, dim: int) -> bool:
    return isinstance(placement, Shard | _StridedShard) and placement.dim == dim


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
    target = torch.empty(place.shape, dtype=dtype, device="cpu")
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
