"""Several tensors as one: what a layer passes to the next if it is more than a single tensor.

The engine keeps, sends and differentiates one tensor for each boundary between layers. A layer that
returns a tuple, list or dict, nested at will, has it packed: one tensor in one memory, which starts
with a description of its content. Tensors of the floating dtype that comes first are part of it as
they are, so gradients flow through them. All others (token ids, masks, tensors of other dtypes) are
packed bit by bit and have no gradient.

A packed tensor is known by its shape, five ones and its length, which no layer returns, and by the
magic number at its beginning. On a device its description is copied to the host, once for each
boundary between ranks; within a rank the tensor carries it along.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import (
    TreeSpec,
    tree_flatten,
    tree_unflatten,
    treespec_dumps,
    treespec_loads,
)

from planaria.errors import ConfigError

_MAGIC: Final = 0x504C414E41524941
_DIMS: Final = 6
_ALIGN: Final = 8  # Bytes; the largest size of an element that is viewed in a packed tensor.
_PREFIX: Final = 16  # Bytes: the magic number, and the length of the description.
_FIRST_READ: Final = 4096  # Bytes that are copied from a device in the hope that they are enough.
_ATTRIBUTE: Final = "planaria_layout"


@dataclass(frozen=True, slots=True)
class _Leaf:
    """One tensor, or one plain value, of a packed structure.

    Attributes:
        dtype: name of the tensor's dtype; "": the leaf is `value`.
        is_bits: whether the tensor is packed bit by bit.
    """

    dtype: str
    shape: tuple[int, ...]
    is_bits: bool
    value: object = None

    @property
    def num_bytes(self) -> int:
        """Size of the tensor, aligned if it is packed bit by bit."""
        size = math.prod(self.shape) * torch_dtype(self.dtype).itemsize
        return _align(size) if self.is_bits else size


@dataclass(frozen=True, slots=True)
class _Layout:
    """The description of a packed tensor.

    Attributes:
        header: the description as bytes, aligned.
    """

    spec: TreeSpec
    leaves: tuple[_Leaf, ...]
    header: bytes


def torch_dtype(name: str) -> torch.dtype:
    """The dtype that torch calls so."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def pack(value: object, name: str) -> Tensor:
    """One contiguous tensor with the content of a value.

    Args:
        value: a tensor, or tuples, lists and dicts of tensors, None, numbers and texts.
        name: name of its source, for errors.

    Raises:
        ConfigError: it is none of these, or a tensor that is packed bit by bit needs a gradient.
    """
    leaves, spec = tree_flatten(value)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not tensors:
        raise ConfigError(name, type(value).__name__, _WRONG_TYPE)
    base = next((t.dtype for t in tensors if t.is_floating_point()), torch.float32)
    described = tuple(_describe_leaf(leaf, base, name) for leaf in leaves)
    layout = _layout(_text(described, spec, name))
    parts = [_header_on(layout.header, base, tensors[0].device)]
    carried = []
    for leaf, description in zip(leaves, described, strict=True):
        if description.is_bits:
            parts.append(_bits(leaf, base))
        elif description.dtype:
            carried.append(leaf.reshape(-1))
    packed = torch.cat([*parts, *carried]).view(*(1,) * (_DIMS - 1), -1)
    setattr(packed, _ATTRIBUTE, layout)
    return packed


def bring(value: object, move: Callable[[Tensor], Tensor]) -> Tensor:
    """Inputs or targets of a microbatch as one tensor on a device, packed if they are several.

    Args:
        move: takes a tensor to the device.
    """
    if isinstance(value, Tensor) and not is_packed(value):
        return move(value)
    packed = pack(value, "data")
    moved = move(packed)
    setattr(moved, _ATTRIBUTE, getattr(packed, _ATTRIBUTE))
    return moved


def unpack(tensor: Tensor) -> Any:
    """The value that was packed; the tensor itself if nothing was packed in it."""
    if not is_packed(tensor):
        return tensor
    layout = _layout_of(tensor)
    flat = tensor.view(-1)
    offset = len(layout.header)
    bits = flat.detach().view(torch.uint8)
    values: list[object] = []
    sizes = []
    for leaf in layout.leaves:
        if leaf.is_bits:
            size = math.prod(leaf.shape) * torch_dtype(leaf.dtype).itemsize
            part = bits[offset : offset + size].view(torch_dtype(leaf.dtype))
            values.append(part.view(leaf.shape))
            offset += leaf.num_bytes
        else:
            values.append(leaf.value)
            if leaf.dtype:
                sizes.append(math.prod(leaf.shape))
    rest = flat[offset // tensor.element_size() :]
    carried = iter(torch.split(rest, sizes) if sizes else ())
    for index, leaf in enumerate(layout.leaves):
        if leaf.dtype and not leaf.is_bits:
            values[index] = next(carried).view(leaf.shape)
    return tree_unflatten(values, layout.spec)


def is_packed(tensor: Tensor) -> bool:
    """Whether a tensor has the shape of a packed one."""
    is_shaped = tensor.dim() == _DIMS and tensor.shape[:-1] == (1,) * (_DIMS - 1)
    return is_shaped and tensor.is_floating_point()


def describe(value: object) -> str:
    """The shapes and dtypes of a tensor, or of a structure of tensors, to show to people."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {describe(part)}" for key, part in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "(" + ", ".join(map(describe, value)) + ")"
    return type(value).__name__


_WRONG_TYPE = "a layer must return a tensor, or a tuple, list or dict with tensors"


def _describe_leaf(leaf: object, base: torch.dtype, name: str) -> _Leaf:
    if not isinstance(leaf, Tensor):
        if not isinstance(leaf, bool | int | float | str | None):
            raise ConfigError(name, type(leaf).__name__, _WRONG_TYPE)
        return _Leaf("", (), is_bits=False, value=leaf)
    is_bits = leaf.dtype != base
    dtype = str(leaf.dtype).removeprefix("torch.")
    if is_bits and leaf.requires_grad:
        remedy = (
            f"one of its tensors is {str(base).removeprefix('torch.')}, and gradients flow through "
            "one dtype; convert it, or detach it"
        )
        raise ConfigError(name, dtype, remedy)
    return _Leaf(dtype, tuple(leaf.shape), is_bits=is_bits)


def _text(leaves: tuple[_Leaf, ...], spec: TreeSpec, name: str) -> str:
    """The description of a packed tensor, as JSON."""
    content = [[leaf.dtype, leaf.shape, leaf.is_bits, leaf.value] for leaf in leaves]
    try:
        return json.dumps([treespec_dumps(spec), content])
    except (NotImplementedError, TypeError, ValueError) as error:
        raise ConfigError(name, str(error), _WRONG_TYPE) from error


@lru_cache(maxsize=256)
def _layout(text: str) -> _Layout:
    spec, content = json.loads(text)
    leaves = tuple(_Leaf(d, tuple(shape), is_bits=b, value=v) for d, shape, b, v in content)
    data = text.encode()
    numbers = _MAGIC.to_bytes(8, "little") + len(data).to_bytes(8, "little")
    header = (numbers + data).ljust(_align(_PREFIX + len(data)), b" ")
    return _Layout(treespec_loads(spec), leaves, header)


@lru_cache(maxsize=256)
def _header_on(header: bytes, base: torch.dtype, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(header), dtype=torch.uint8).to(device).view(base)


def _layout_of(tensor: Tensor) -> _Layout:
    layout = getattr(tensor, _ATTRIBUTE, None)
    if layout is None:
        content = tensor.detach().view(-1).view(torch.uint8)
        first = content[:_FIRST_READ].cpu().numpy().tobytes()
        magic, length = (int.from_bytes(first[i : i + 8], "little") for i in (0, 8))
        if magic != _MAGIC:
            remedy = (
                "a tensor with five dimensions of size 1 before the last; give it another shape"
            )
            raise ConfigError("model", list(tensor.shape), remedy)
        size = _align(_PREFIX + length)
        if size > len(first):
            first = content[:size].cpu().numpy().tobytes()
        layout = _layout(first[_PREFIX : _PREFIX + length].decode())
    assert isinstance(layout, _Layout)
    return layout


def _bits(tensor: Tensor, base: torch.dtype) -> Tensor:
    """The tensor's memory as elements of `base`, aligned."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    missing = _align(len(flat)) - len(flat)
    return torch.nn.functional.pad(flat, (0, missing)).view(base)


def _align(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN
