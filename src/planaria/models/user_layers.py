"""Layers from a function that the user wrote, for kind = "python".

The function returns an `nn.Sequential`, or a list whose items are modules or functions without
arguments that build a module; either one alone or in a pair with a loss. A rank calls only the
list's functions of the layers that it needs, each with its layer's seed, so no other layer is
allocated. To get an item that is a module, it calls the user's function, which builds all modules,
and keeps that one.

A layer is called with what the one before it returned, a tensor, or a tuple, list or dict with
tensors (packing.py); the first with the inputs of a microbatch, the loss with the last one's value.
"""

import copy
import logging
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from planaria.errors import ConfigError
from planaria.models.layers import (
    LossFunction,
    SplitFacts,
    SplitModel,
    TiedGroup,
    boundary,
    class_loss_sum,
    kept_tensors,
    layer_seed,
    refuse_running_statistics,
    tied_groups,
)
from planaria.models.packing import unpack
from planaria.user_functions import user_function

logger = logging.getLogger(__name__)

LayerItem: TypeAlias = nn.Module | Callable[[], nn.Module]


def split_user_model(target: str, *, seed: int) -> SplitModel:
    """The layers that the user's function returns; only their shapes stay in memory.

    Raises:
        ConfigError: the function returns something else, or layers that cannot be trained as a
            chain.
    """
    function = user_function(target, field="model.target")
    with _draw_from(seed):
        items, loss = _call(function, target=target)
        modules = [_outline(item) for item in items]
    names = tuple(f"{index}.{type(module).__name__}" for index, module in enumerate(modules))
    for name, module in zip(names, modules, strict=True):
        refuse_running_statistics(name, module)
        _refuse_other_dtypes(name, module)
        _refuse_computed(name, module)
        _refuse_hooks(name, module)
    float32 = frozenset(
        f"{index}.{kept}"
        for index, module in enumerate(modules)
        for kept in _float32_names(names[index], module)
    )
    parameters = [
        {
            f"{index}.{name}": parameter
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        }
        for index, module in enumerate(modules)
    ]
    builder = _UserLayers(
        function=function,
        target=target,
        seed=seed,
        factories=tuple(None if isinstance(item, nn.Module) else item for item in items),
        layer_names=names,
        shapes=tuple({name: p.shape for name, p in layer.items()} for layer in parameters),
        tied=tied_groups([{name: id(p) for name, p in layer.items()} for layer in parameters]),
    )
    facts = SplitFacts(
        float32_names=lambda: float32,
        notes=_eval_notes(names, modules),
        whole_bytes=tuple(map(_num_bytes, modules)),
    )
    return SplitModel(builder, objective="supervised", loss=loss, facts=facts)


def _eval_notes(names: Sequence[str], modules: Sequence[nn.Module]) -> tuple[str, ...]:
    """A line on the layers that are in eval mode and have parameters to train."""
    in_eval = [
        name
        for name, module in zip(names, modules, strict=True)
        if not module.training and any(p.requires_grad for p in module.parameters())
    ]
    if not in_eval:
        return ()
    text = (
        "layers that are trained are in eval mode, in which dropout does nothing "
        f"({', '.join(in_eval)}); from_pretrained of transformers returns models in it; call "
        "train() on them where they are built, if that is not meant"
    )
    return (text,)


def _float32_names(layer_name: str, module: nn.Module) -> Iterator[str]:
    """The tensors that the layer and its modules keep in float32, under each of their names."""
    tensors = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    kept: set[int] = set()
    for path, part in module.named_modules():
        given = getattr(part, "float32_names", ())
        if not isinstance(given, list | tuple | set | frozenset):
            remedy = "give a list of names of parameters, buffers or modules in it"
            raise ConfigError(f"model (layer {layer_name})", f"float32_names = {given!r}", remedy)
        for name in given:
            whole = f"{path}.{name}" if path else name
            same = [t for key, t in tensors.items() if f"{key}.".startswith(f"{whole}.")]
            if not same:
                remedy = f"{type(part).__name__} has no parameter or buffer {name!r}"
                field = f"model (layer {layer_name})"
                raise ConfigError(field, f"float32_names = {given!r}", remedy)
            kept.update(map(id, same))
    return (name for name, tensor in tensors.items() if id(tensor) in kept)


def _num_bytes(module: nn.Module) -> int:
    """Bytes of the parameters and buffers, of those with several names for each."""
    parameters = module.named_parameters(remove_duplicate=False)
    buffers = module.named_buffers(remove_duplicate=False)
    return sum(tensor.numel() * tensor.element_size() for _, tensor in (*parameters, *buffers))


@contextmanager
def _ignore_weights_on_meta() -> Iterator[None]:
    """Keeps torch silent when a layer's function loads weights on the meta device.

    Torch warns, once for each parameter, that they are dropped there. Where the layer is built to
    be trained they are not.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore",
            message=r"for \S+: copying from a non-meta parameter .* to a meta parameter",
            category=UserWarning,
        )
        yield


class _UserLayer(nn.Module):
    """A module of the user's, whose parameters have the names that they have in nn.Sequential."""

    def __init__(self, index: int, module: nn.Module, name: str) -> None:
        super().__init__()
        self._key = str(index)
        self._name = name
        self.add_module(self._key, module)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles the user's module, without the packing of what it takes and returns."""
        self.get_submodule(self._key).compile(*args, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        module = self._modules[self._key]  # `get_submodule` takes ten times as long.
        assert module is not None
        return boundary(module(unpack(x)), self._name)


@dataclass(frozen=True, slots=True)
class _UserLayers:
    """Builds the layers that the user's function returns.

    Attributes:
        function: the user's function.
        target: name of the function in the job file.
        factories: function that builds the module, for each layer; None: the user's function
            returned the module itself.
        shapes: shapes of the trained parameters by full name, one mapping for each layer.
    """

    function: Callable[[], object]
    target: str
    seed: int
    factories: tuple[Callable[[], nn.Module] | None, ...]
    layer_names: tuple[str, ...]
    shapes: tuple[dict[str, torch.Size], ...]
    tied: tuple[TiedGroup, ...]

    def materialise(self, layer: int) -> nn.Module:
        """The layer with its initial weights, without other modules that the function built."""
        factory = self.factories[layer]
        with _draw_from(self.seed if factory is None else layer_seed(self.seed, layer)):
            if factory is None:
                items, _ = _call(self.function, target=self.target)
                factory = items[layer]
            module = _build(factory)
        # A copy, because a parameter shared with another layer must be a separate leaf, and what
        # the function keeps must stay as it is for the next time.
        module = _independent_copy(module)
        in_eval = [part for part in module.modules() if not part.training]
        module.train()  # The user's own may leave parts in eval mode.
        for part in in_eval:
            part.training = False
        return _UserLayer(layer, module, self.layer_names[layer])

    def structure(self, layer: int) -> nn.Module:
        """The layer with its initial weights: its buffers get their values only by building it."""
        return self.materialise(layer)

    def parameter_shapes(self, layer: int) -> dict[str, torch.Size]:
        return dict(self.shapes[layer])


@contextmanager
def _draw_from(seed: int) -> Iterator[None]:
    """A context in which torch, numpy and Python draw from the seed, and as before afterwards.

    All holders of a layer must draw the same, also of buffers, which nobody compares.
    """
    before = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            _seed_torch(seed)
            np.random.seed(seed & 0xFFFFFFFF)
            random.seed(seed)
            yield
    finally:
        np.random.set_state(before[0])
        random.setstate(before[1])


def _seed_torch(seed: int) -> None:
    """Seeds torch's generators, on processors and on accelerators if there are any.

    Without accelerators `torch.manual_seed` takes a stack of calls for each kind of them, and so
    longer than to draw a small layer.
    """
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def _call(function: Callable[[], object], *, target: str) -> tuple[list[LayerItem], LossFunction]:
    """The layers and the loss that the user's function returns, within `_draw_from`.

    Raises:
        ConfigError: the function returns something else.
    """
    result = function()
    loss: LossFunction = class_loss_sum
    if isinstance(result, tuple):
        if len(result) != 2 or not callable(result[1]):
            raise _wrong_return(target, result)
        result, loss = result
    if not isinstance(result, nn.Sequential | nn.ModuleList | list) or len(result) == 0:
        raise _wrong_return(target, result)
    items = list(result)
    for item in items:
        if not isinstance(item, nn.Module) and not callable(item):
            raise _wrong_return(target, item)
    return items, loss


def _wrong_return(target: str, value: object) -> ConfigError:
    return ConfigError(
        "model.target",
        f"{target} -> {type(value).__name__}",
        "return an nn.Sequential, or a list of modules or of functions without arguments that "
        "build a module, or a pair of either and loss_function(output, targets)",
    )


def _outline(item: LayerItem) -> nn.Module:
    """The module, on the meta device if its function can be run there: only shapes are needed.

    A function that takes numbers out of tensors cannot, and then takes the memory of its layer.
    """
    try:
        with torch.device("meta"), _ignore_weights_on_meta():
            return _build(item)
    except ConfigError:
        raise
    except Exception as error:
        logger.info("a layer's function is run on the processor instead of meta: %r", error)
    return _build(item)


def _build(item: LayerItem) -> nn.Module:
    module = item if isinstance(item, nn.Module) else item()
    if not isinstance(module, nn.Module):
        raise ConfigError(
            "model.target", type(module).__name__, "the function of a layer must return a module"
        )
    return module


def _independent_copy(module: nn.Module) -> nn.Module:
    """A copy that shares nothing with the module.

    Torch copies no tensor that was computed from parameters. Those that are left here are computed
    anew by a hook before each forward, as for a norm of weights.
    """
    tensors = [leaf for part in module.modules() for leaf in tree_leaves(list(vars(part).values()))]
    computed = [t for t in tensors if isinstance(t, Tensor) and t.grad_fn is not None]
    return copy.deepcopy(module, {id(tensor): tensor.detach().clone() for tensor in computed})


def _refuse_computed(layer_name: str, module: nn.Module) -> None:
    if names := kept_tensors(module):
        remedy = (
            f"it computes {', '.join(names)} from its parameters where it is built, and not again "
            "while they are trained; compute it in forward, or detach() it"
        )
        raise ConfigError("model.target", f"layer {layer_name}", remedy)


def _refuse_hooks(layer_name: str, module: nn.Module) -> None:
    """Refuses hooks on trained parameters, which torch does not copy with them."""
    for name, parameter in module.named_parameters():
        hooks = parameter._backward_hooks or parameter._post_accumulate_grad_hooks
        if parameter.requires_grad and hooks:
            remedy = (
                f"its parameter {name} has a hook on its gradient, which no copy of the layer has; "
                "mask it in forward, as in torch.where(mask, weight, weight.detach()), or freeze "
                "it with requires_grad_(False)"
            )
            raise ConfigError("model.target", f"layer {layer_name}", remedy)


def _refuse_other_dtypes(layer_name: str, module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if parameter.dtype != torch.float32:
            raise ConfigError(
                f"model (layer {layer_name})",
                f"{name}: {parameter.dtype}",
                'build it in float32; training.dtype = "bfloat16" trains it in bfloat16',
            )
