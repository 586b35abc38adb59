"""Examines a user's layers and loss on the first microbatch, before training begins.

A loss must be the sum over the targets of a microbatch. Whether it is a mean is found out without
knowing its formula: some samples are given to it once, and twice over. A sum doubles, and each
sample's gradient stays the same; a mean stays the same, and each sample's gradient is halved. Only
a loss that does exactly the latter is refused. Whatever cannot be told is let through: a loss that
draws random numbers, fails on fewer samples, has further terms, or gets values that may depend on
the number of samples.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from planaria.errors import ConfigError
from planaria.models.layers import SplitModel, has_unclear_classes, leaves_of, loss_call
from planaria.models.packing import changeable_tensor, describe, pack, unpack

logger = logging.getLogger(__name__)

_RATIO_MAX: Final = 1.25  # Of a mean it is 1, of a sum 2.
_GRADIENT_TOLERANCE: Final = 0.1  # Relative norm; a mean in bfloat16 is off by 0.01.
_REPEAT_TOLERANCE: Final = 1e-4
_ONE_ARGUMENT: Final = (
    "a layer gets one argument: what the layer before it returned; a tuple is not unpacked"
)
_UNCLEAR_CLASSES: Final = (
    "the last layer returns %s for targets %s: the last dimension is taken for the classes, and "
    "not the second, which is as long; if the classes are there, return x.movedim(1, -1)"
)
_CHANGES_INPUT: Final = (
    "it changes its input in place, which the layer before it, or another rank, may still need; "
    "set inplace=False in its modules, or let its forward begin with x = x.clone()"
)


def first_output(module: nn.Module, hidden: Tensor, *, name: str) -> Tensor:
    """The output of a layer; an exception of the layer's gets a note of what the layer got.

    Args:
        hidden: the layer's input, a leaf; may be packed.
        name: index and class of the layer, for people.

    Raises:
        ConfigError: the layer changes its input in place.
    """
    try:
        output: Tensor = module(hidden)
    except (ConfigError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if _is_change_of_leaf(error) and _takes_copy(module, hidden):
            raise ConfigError("model.target", f"layer {name}", _CHANGES_INPUT) from error
        hint = f"; {_ONE_ARGUMENT}" if _lacks_arguments(error, module) else ""
        error.add_note(f"layer {name} got {describe(unpack(hidden))}{hint}")
        raise
    return output


def refuse_no_gradient(model: SplitModel, layer: int, output: Tensor) -> None:
    """Refuses a layer whose output depends on nothing that is trained, though something should be.

    Args:
        output: the layer's output for the first microbatch, with its graph; may be packed.

    Raises:
        ConfigError: the layer, or one before it, has parameters to train, which would never change.
    """
    trained = [n for n in range(layer + 1) if model.parameter_shapes(n)]
    if output.requires_grad or not trained:
        return
    names = ", ".join(model.layer_names[n] for n in trained)
    remedy = (
        f"its output has no gradient, so the parameters of {names} would never change; leave out "
        "detach() and torch.no_grad(), or freeze those parameters with requires_grad_(False)"
    )
    raise ConfigError("model.target", f"layer {model.layer_names[layer]}", remedy)


def refuse_foreign(module: nn.Module, hidden: Tensor, output: Tensor, *, name: str) -> None:
    """Refuses a layer that uses trained tensors that are not among its parameters.

    Args:
        hidden: the layer's input, a leaf; may be packed.
        output: its output, with its graph; may be packed.
        name: index and class of the layer, for people.

    Raises:
        ConfigError: the layer does, and nothing would train them.
    """
    own = {id(parameter) for parameter in module.parameters()}
    foreign = [leaf for leaf in leaves_of(output, beside=hidden) if id(leaf) not in own]
    if not foreign:
        return
    # Leaves that a forward makes anew, such as the places by which a force derives, are no state.
    again = {id(leaf) for leaf in leaves_of(module(hidden), beside=hidden)}
    if shapes := [str(tuple(leaf.shape)) for leaf in foreign if id(leaf) in again]:
        remedy = (
            f"it uses trained tensors of shape {', '.join(shapes)} beside its parameters, and "
            "nothing would train them; make them parameters of it, or their modules modules in it: "
            "take nn.ModuleList for a list, and a method for a lambda or a function within one"
        )
        raise ConfigError("model.target", f"layer {name}", remedy)


def _is_change_of_leaf(error: Exception) -> bool:
    return any("leaf Variable that requires grad" in str(part) for part in error.args)


def _takes_copy(module: nn.Module, hidden: Tensor) -> bool:
    """Whether a layer runs on a copy of its input, which is no leaf."""
    try:
        module(hidden.clone())
    except Exception as error:
        logger.info("the layer fails on a copy of its input, too: %r", error)
        return False
    return True


def _lacks_arguments(error: Exception, module: nn.Module) -> bool:
    """Whether the exception says that the user's forward needs more arguments than one."""
    forwards = [getattr(type(part), "forward", None) for part in module.children()]
    names = [getattr(forward, "__qualname__", "?") for forward in forwards]
    is_type_error = isinstance(error, TypeError)
    return is_type_error and any(str(error).startswith(f"{name}() missing") for name in names)


def examine_loss(model: SplitModel, output: Tensor, targets: Tensor, *, num_samples: int) -> None:
    """Refuses a loss that cannot be trained by, or is a mean; warns of classes that are unclear.

    It may draw random numbers, as the loss may.

    Args:
        output: the last layer's output of a microbatch, with its graph; may be packed.
        targets: targets of the microbatch; may be packed.
        num_samples: number of samples of the microbatch.

    Raises:
        ConfigError: the loss has no gradient, is a mean, or see `SplitModel.loss_sum`.
    """
    # The loss may change what it gets.
    values = unpack(changeable_tensor(output.detach())), unpack(targets)
    loss = model.loss_sum(output, changeable_tensor(targets))
    call = loss_call(*values)
    if output.requires_grad and not loss.requires_grad:
        remedy = (
            "it returned a number without a gradient, from which no layer can learn; leave out "
            "detach(), torch.no_grad() and torch.tensor() of a number"
        )
        raise ConfigError("model.target", call, remedy)
    if shapes := [str(tuple(leaf.shape)) for leaf in leaves_of(loss, beside=output)]:
        remedy = (
            f"it uses trained tensors of shape {', '.join(shapes)} beside what the layers return, "
            "and nothing would train them; put them in the last layer (for a penalty on all "
            "weights use the optimizer's weight_decay)"
        )
        raise ConfigError("model.target", call, remedy)
    if model.has_class_loss and has_unclear_classes(*values):
        logger.warning(_UNCLEAR_CLASSES, *map(describe, values))
    leaves, spec = tree_flatten(values)
    if not math.isfinite(loss.item()) or not _are_of_samples(leaves, num_samples):
        return
    half = max(1, num_samples // 2)  # Twice the half takes no more memory than the microbatch.
    try:
        # On the processor: where the loss fails on an accelerator, nothing could be computed later.
        once, again, twice = (
            _loss_of_repeated(model, leaves, spec, half=half, times=times) for times in (1, 1, 2)
        )
    except Exception as error:
        logger.info("whether the loss is a mean is not known: it failed on %s: %s", half, error)
        return
    is_repeatable = math.isclose(once.value, again.value, rel_tol=_REPEAT_TOLERANCE)
    if is_repeatable and _is_mean(once, twice):
        remedy = (
            f"the loss of the same samples twice over is {twice.value / once.value:.2f} times that "
            "of the samples once, so it is a mean, and a sum is needed; return the sum over the "
            'targets (in torch: reduction="sum"), or the mean times the number of targets it got'
        )
        raise ConfigError("model.target", call, remedy)


def _are_of_samples(leaves: Sequence[Any], num_samples: int) -> bool:
    """Whether all that a loss gets is one row for each sample.

    A number that a layer passes on, of samples perhaps, would not double with the samples.
    """
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return all(tensor.shape[:1] == (num_samples,) for tensor in tensors) and all(
        isinstance(leaf, Tensor | str | None) for leaf in leaves
    )


@dataclass(frozen=True, slots=True)
class _Repeated:
    """A loss, and its gradients by the output's parts, in float64."""

    value: float
    gradients: tuple[Tensor, ...]


def _loss_of_repeated(
    model: SplitModel, leaves: Sequence[Any], spec: TreeSpec, *, half: int, times: int
) -> _Repeated:
    """The loss of the first `half` samples, given `times` times."""
    repeated = [
        torch.cat([leaf.detach()[:half].cpu()] * times) if isinstance(leaf, Tensor) else leaf
        for leaf in leaves
    ]
    output, targets = tree_unflatten(repeated, spec)
    inputs = [leaf.requires_grad_() for leaf in tree_leaves(output) if _is_of_floats(leaf)]
    # The loss may change what it gets.
    output = tree_map(lambda leaf: leaf.clone() if _is_of_floats(leaf) else leaf, output)
    loss = model.loss_sum(_one_tensor(output), _one_tensor(targets))
    gradients = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
    return _Repeated(loss.item(), tuple(gradient.double() for gradient in gradients))


def _is_of_floats(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _one_tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else pack(value, "data")


def _is_mean(once: _Repeated, twice: _Repeated) -> bool:
    """Whether the loss stayed what it was, and the gradient of each sample was halved."""
    if not (0.0 < once.value < math.inf and abs(twice.value / once.value - 1.0) < _RATIO_MAX - 1.0):
        return False
    pairs = list(zip(once.gradients, twice.gradients, strict=True))
    squares = sum(float(before.square().sum()) for before, _ in pairs)
    off = sum(
        float((after - torch.cat([before, before]) / 2).square().sum()) for before, after in pairs
    )
    return squares > 0.0 and off <= squares * _GRADIENT_TOLERANCE**2
