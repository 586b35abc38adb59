"""Several tensors as one: what a layer passes to the next if it is more than a single tensor.

The engine keeps, sends and differentiates one tensor for each boundary between layers. A layer that
returns a tuple, list or dict, nested at will, has it packed: one tensor in one memory, which starts
with a description of its content, and holds the bits of all tensors one after another. So does its
gradient, which holds the gradients of those that had one (and is never added to another). A single
tensor of more dimensions than links can describe is packed, too.

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
PACKED_DIMS: Final = 6  # The most for which the description that goes before a tensor has room.
_ALIGN: Final = 16  # Bytes; the largest size of an element.
_PREFIX: Final = 16  # Bytes: the magic number, and the length of the description.
_FIRST_READ: Final = 4096  # Bytes that are copied from a device in the hope that they are enough.
_ATTRIBUTE: Final = "planaria_layout"
_WRONG_TYPE: Final = "a layer must return a tensor, or a tuple, list or dict with tensors"


@dataclass(frozen=True, slots=True)
class _Leaf:
    """One tensor, or one plain value, of a packed structure.

    Attributes:
        dtype: the tensor's dtype; None: the leaf is `value`.
        has_gradient: whether the tensor gets a gradient.
        begin: offset of the tensor's memory, in bytes.
    """

    dtype: torch.dtype | None
    shape: tuple[int, ...]
    has_gradient: bool
    begin: int
    value: object

    @property
    def num_bytes(self) -> int:
        """Size of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize if self.dtype else 0

    def view(self, memory: Tensor) -> Tensor:
        """The tensor in the memory of the packed one, as bytes."""
        assert self.dtype is not None
        part = memory[self.begin : self.begin + self.num_bytes]
        return part.view(self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True)
class _Layout:
    """The description of a packed tensor.

    Attributes:
        header: the description as bytes, aligned.
        num_bytes: size of the packed tensor.
    """

    spec: TreeSpec
    leaves: tuple[_Leaf, ...]
    header: bytes
    num_bytes: int

    @property
    def tensors(self) -> list[_Leaf]:
        """The leaves that are tensors."""
        return [leaf for leaf in self.leaves if leaf.dtype is not None]


def pack(value: object, name: str) -> Tensor:
    """One contiguous tensor with the content of a value.

    Args:
        value: a tensor, or tuples, lists and dicts of tensors, None, numbers and texts.
        name: name of its source, for errors.

    Raises:
        ConfigError: it is none of these, or has no tensor.
    """
    leaves, spec = tree_flatten(value)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not tensors:
        raise ConfigError(name, type(value).__name__, _WRONG_TYPE)
    layout = _layout_of_value(leaves, spec, name)
    if layout.spec != spec:
        raise ConfigError(name, describe(value), "the keys of a dict must be texts or numbers")
    base = next((t.dtype for t in tensors if t.is_floating_point()), torch.float32)
    packed: Tensor = _Pack.apply(layout, base, *tensors)  # type: ignore[no-untyped-call]
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
    tensors = iter(_Unpack.apply(tensor, layout))  # type: ignore[no-untyped-call]
    values = [leaf.value if leaf.dtype is None else next(tensors) for leaf in layout.leaves]
    return tree_unflatten(values, layout.spec)


def changeable_tensor(tensor: Tensor) -> Tensor:
    """A copy of a tensor, for a function that may change it; the same if it is packed, because
    `unpack` copies."""
    return tensor if is_packed(tensor) else tensor.clone()


def is_packed(tensor: Tensor) -> bool:
    """Whether a tensor has the shape of a packed one."""
    is_shaped = tensor.dim() == PACKED_DIMS and tensor.shape[:-1] == (1,) * (PACKED_DIMS - 1)
    return is_shaped and tensor.is_floating_point()


def describe(value: object) -> str:
    """The shapes and dtypes of a tensor, or of a structure of tensors, to show to people."""
    if isinstance(value, Tensor):
        return f"{_name_of(value.dtype)} {list(value.shape)}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {describe(part)}" for key, part in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "(" + ", ".join(map(describe, value)) + ")"
    return type(value).__name__


class _Pack(torch.autograd.Function):
    """Packs tensors; the gradient of each is a part of the packed tensor's."""

    @staticmethod
    def forward(ctx: Any, layout: _Layout, base: torch.dtype, *tensors: Tensor) -> Tensor:
        ctx.layout = layout
        memory = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=tensors[0].device)
        memory[: len(layout.header)] = _header_on(layout.header, memory.device)
        for leaf, tensor in zip(layout.tensors, tensors, strict=True):
            leaf.view(memory).copy_(tensor)
        return memory.view(base).view(*(1,) * (PACKED_DIMS - 1), -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        memory = gradients[0].contiguous().view(-1).view(torch.uint8)
        leaves = ctx.layout.tensors
        return None, None, *(leaf.view(memory) if leaf.has_gradient else None for leaf in leaves)


class _Unpack(torch.autograd.Function):
    """Takes a packed tensor apart; its gradient holds those of its parts."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, layout: _Layout) -> tuple[Tensor, ...]:
        ctx.layout, ctx.shape, ctx.base = layout, packed.shape, packed.dtype
        ctx.device = packed.device
        memory = packed.detach().contiguous().view(-1).view(torch.uint8)
        # Copies: no later operation in place may change another part, or what others still read.
        tensors = tuple(leaf.view(memory).clone() for leaf in layout.tensors)
        pairs = zip(layout.tensors, tensors, strict=True)
        ctx.mark_non_differentiable(*(t for leaf, t in pairs if not leaf.has_gradient))
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        memory = torch.zeros(ctx.layout.num_bytes, dtype=torch.uint8, device=ctx.device)
        for leaf, gradient in zip(ctx.layout.tensors, gradients, strict=True):
            if leaf.has_gradient and gradient is not None:
                leaf.view(memory).copy_(gradient)
        return memory.view(ctx.base).view(ctx.shape), None


def _layout_of_value(leaves: list[object], spec: TreeSpec, name: str) -> _Layout:
    try:
        content = [_describe_leaf(leaf, name) for leaf in leaves]
        return _layout(json.dumps([treespec_dumps(spec), content]))
    except (NotImplementedError, TypeError, ValueError) as error:
        raise ConfigError(name, str(error), _WRONG_TYPE) from error


def _describe_leaf(leaf: object, name: str) -> list[object]:
    if isinstance(leaf, Tensor):
        return [_name_of(leaf.dtype), tuple(leaf.shape), leaf.requires_grad, None]
    if not isinstance(leaf, bool | int | float | str | None):
        raise ConfigError(name, type(leaf).__name__, _WRONG_TYPE)
    return ["", (), False, leaf]


@lru_cache(maxsize=256)
def _layout(text: str) -> _Layout:
    data = text.encode()
    numbers = _MAGIC.to_bytes(8, "little") + len(data).to_bytes(8, "little")
    header = (numbers + data).ljust(_align(_PREFIX + len(data)), b" ")
    spec, content = json.loads(text)
    leaves, begin = [], len(header)
    for dtype_name, shape, has_gradient, value in content:
        dtype = getattr(torch, dtype_name) if dtype_name else None
        leaf = _Leaf(dtype, tuple(shape), has_gradient, begin, value)
        leaves.append(leaf)
        begin += _align(leaf.num_bytes)
    return _Layout(treespec_loads(spec), tuple(leaves), header, begin)


@lru_cache(maxsize=256)
def _header_on(header: bytes, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(header), dtype=torch.uint8).to(device)


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
        if _PREFIX + length > len(first):
            first = content[: _PREFIX + length].cpu().numpy().tobytes()
        layout = _layout(first[_PREFIX : _PREFIX + length].decode())
    assert isinstance(layout, _Layout)
    return layout


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _align(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN
