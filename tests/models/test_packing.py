"""Several tensors as one: nothing of them is lost, and gradients flow where they should."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from planaria.engine.comm.device_comm import head_of
from planaria.errors import ConfigError
from planaria.models.layers import boundary
from planaria.models.packing import bring, describe, is_packed, pack, unpack

IDS = torch.tensor([[1, 2, 3], [-(2**62), 2**62, 5]])
MASK = torch.tensor([True, False, True])


def _assert_alike(one: Any, other: Any) -> None:
    (leaves, spec), (others, other_spec) = tree_flatten(one), tree_flatten(other)
    assert spec == other_spec
    for leaf, found in zip(leaves, others, strict=True):
        if isinstance(leaf, Tensor):
            assert leaf.dtype == found.dtype
            assert leaf.shape == found.shape
            bits = [t.detach().reshape(-1).contiguous().view(torch.uint8) for t in (leaf, found)]
            assert torch.equal(*bits)
        else:
            assert type(leaf) is type(found)
            assert leaf == found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "make",
    [
        lambda x: (x, IDS),
        lambda x: {"hidden": x, "rest": (MASK, None, 2.5, [IDS, "text"])},
        lambda x: (IDS, MASK, x.t(), x[0], x.sum()),
        lambda x: (x, torch.zeros(0, dtype=torch.int64), x[:, :0], True, 1),
        lambda _: {"ids": IDS},
        lambda x: (x, torch.full((3,), float("nan"), dtype=torch.float16)),
        lambda x: (x, "a" * 9000),  # A description longer than what is read at first.
    ],
)
def test_what_was_packed_is_what_is_unpacked(dtype: torch.dtype, make: Any) -> None:
    """Bit for bit, also on a rank that has only the bytes of the tensor."""
    value = make(torch.randn(3, 5, dtype=dtype))

    packed = pack(value, "layer")

    assert is_packed(packed)
    assert packed.is_contiguous()
    _assert_alike(value, unpack(packed))
    received = packed.detach().reshape(-1).view(torch.uint8).clone()
    _assert_alike(value, unpack(received.view(packed.dtype).view(packed.shape)))


def test_gradients_flow_through_tensors_of_any_floating_dtype() -> None:
    """As if nothing had been packed: the bits of each, and only of those that had a gradient."""
    x = torch.randn(2, 3, dtype=torch.bfloat16, requires_grad=True)
    y = torch.randn(4, dtype=torch.float64, requires_grad=True)
    unused, mask = torch.randn(3, requires_grad=True), torch.randn(5)
    value = {"x": x, "ids": IDS, "y": (y, unused, mask)}

    received = pack(value, "layer").detach().requires_grad_()
    parts = unpack(received)
    assert not parts["y"][2].requires_grad
    ((parts["x"] * 3).sum() + (parts["y"][0] ** 2).sum() + parts["ids"].sum()).backward()
    pack(value, "layer").backward(received.grad)  # type: ignore[no-untyped-call]

    assert torch.equal(x.grad, torch.full((2, 3), 3.0).bfloat16())  # type: ignore[arg-type]
    assert torch.equal(y.grad, 2 * y.detach())  # type: ignore[arg-type]
    assert torch.equal(unused.grad, torch.zeros(3))  # type: ignore[arg-type]
    assert mask.grad is None


def test_a_change_in_place_stays_where_it_is_made() -> None:
    """A layer may change what it got; neither the other tensors nor a second forward see it."""
    packed = pack((torch.zeros(3), torch.zeros(2)), "layer")

    unpack(packed)[0].add_(1.0)

    _assert_alike(unpack(packed), (torch.zeros(3), torch.zeros(2)))


def test_values_that_are_equal_but_of_other_types_are_not_mixed_up() -> None:
    """True, 1 and 1.0 have the same hash."""
    for value in (True, 1, 1.0):
        packed = pack((torch.zeros(1), value), "layer")
        assert type(unpack(packed.clone())[1]) is type(value)


def test_a_tensor_that_looks_packed_is_not_taken_for_one() -> None:
    """Five dimensions of size 1 before the last."""
    looks = torch.randn(1, 1, 1, 1, 1, 70)

    with pytest.raises(ConfigError, match="give it another shape"):
        unpack(looks)
    _assert_alike(looks, unpack(bring(looks, torch.clone)))


def test_a_batch_is_brought_with_its_description() -> None:
    """A single tensor as it is."""
    ids = torch.arange(4)

    assert bring(ids, lambda tensor: tensor) is ids
    _assert_alike({"ids": ids}, unpack(bring({"ids": ids}, torch.clone)))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), "layer 3 = 'object': a layer must return a tensor"),
        ((1, 2), "layer 3 = 'tuple': a layer must return a tensor"),
        ({(1, 2): torch.zeros(1)}, "layer 3 = .*keys of a dict must be texts"),
        ((torch.zeros(1), {1, 2}), "layer 3 = 'set': a layer must return a tensor"),
    ],
)
def test_what_cannot_be_passed_on_is_named(value: object, message: str) -> None:
    """With the layer."""
    with pytest.raises(ConfigError, match=message):
        pack(value, "layer 3")


def test_shapes_are_told_as_a_person_would() -> None:
    """In errors of a loss function."""
    value = {"x": torch.zeros(2, 3), "rest": (IDS, None)}

    assert describe(value) == "{x: float32 [2, 3], rest: (int64 [2, 3], NoneType)}"


def test_a_tensor_of_many_dimensions_crosses_packed() -> None:
    """The description that goes before a tensor has room for six dimensions."""
    output = torch.arange(4.0).reshape(1, 1, 2, 1, 2, 1, 1).requires_grad_()

    crossing = boundary(output, "1.Windows")
    received = unpack(crossing)

    head_of(crossing)  # It refuses what has more.
    assert torch.equal(output, received)
    received.backward(received.detach())
    assert output.grad is not None
    assert torch.equal(output, output.grad)
