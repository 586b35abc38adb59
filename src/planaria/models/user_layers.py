"""Layers from a function of the user's, for kind = "python".

It returns an `nn.Sequential`, or a list whose items are modules or functions without arguments
that build a module; either alone or in a pair with a loss. A function of the list is called alone,
under a seed of its layer's own, so nothing else is ever allocated; modules are built by calling
the user's function as plain torch would, and one is kept.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from planaria.errors import ConfigError
from planaria.models.layers import (
    LossFunction,
    SplitModel,
    TiedGroup,
    boundary,
    cross_entropy_sum,
    layer_seed,
    refuse_running_statistics,
    tied_groups,
)
from planaria.user_functions import user_function

LayerItem: TypeAlias = nn.Module | Callable[[], nn.Module]


def split_user_model(target: str, *, seed: int) -> SplitModel:
    """The layers that the user's function returns; nothing but their shapes stays in memory.

    Raises:
        ConfigError: it returns something else, or layers that cannot be trained as a chain.
    """
    function = user_function(target, field="model.target")
    with torch.random.fork_rng(devices=[]):
        items, loss = _call(function, target=target, seed=seed)
        with torch.device("meta"):
            # A function's module is wanted for its shapes only; a built module is as it is.
            modules = [_built(item) for item in items]
    names = tuple(f"{index}.{type(module).__name__}" for index, module in enumerate(modules))
    for name, module in zip(names, modules, strict=True):
        refuse_running_statistics(name, module)
        _refuse_other_dtypes(name, module)
    parameters = [
        {f"{index}.{name}": parameter for name, parameter in module.named_parameters()}
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
    return SplitModel(builder, objective="supervised", loss=loss)


class _UserLayer(nn.Module):
    """A module of the user's under its index, named as inside nn.Sequential."""

    def __init__(self, index: int, module: nn.Module, name: str) -> None:
        super().__init__()
        self._key = str(index)
        self._name = name
        self.add_module(self._key, module)

    def forward(self, x: Tensor) -> Tensor:
        return boundary(self.get_submodule(self._key)(x), self._name)


@dataclass(frozen=True, slots=True)
class _UserLayers:
    """The builder for layers that the user's function returns.

    Attributes:
        factories: by layer; None where the function returned a built module.
        shapes: by layer, the parameters under their full names.
    """

    function: Callable[[], object]
    target: str
    seed: int
    factories: tuple[Callable[[], nn.Module] | None, ...]
    layer_names: tuple[str, ...]
    shapes: tuple[dict[str, torch.Size], ...]
    tied: tuple[TiedGroup, ...]

    def materialise(self, layer: int) -> nn.Module:
        """The layer alone; other modules that the user's function built are dropped."""
        factory = self.factories[layer]
        with torch.random.fork_rng(devices=[]):
            if factory is not None:
                torch.manual_seed(layer_seed(self.seed, layer))
                module = _built(factory)
            else:
                items, _ = _call(self.function, target=self.target, seed=self.seed)
                # A copy, for a parameter that another layer shares must be a leaf of its own.
                module = copy.deepcopy(_built(items[layer]))
        return _UserLayer(layer, module, self.layer_names[layer]).train()

    def structure(self, layer: int) -> nn.Module:
        """The layer with its first weights: only building it gives buffers their values."""
        return self.materialise(layer)

    def parameter_shapes(self, layer: int) -> dict[str, torch.Size]:
        return dict(self.shapes[layer])


def _class_loss_sum(output: Tensor, targets: Tensor) -> Tensor:
    if targets.is_floating_point():
        raise ConfigError(
            "model.target",
            str(targets.dtype),
            "targets that are not class numbers need a loss: return (layers, loss_function), "
            "where loss_function(output, targets) is the sum over the microbatch",
        )
    return cross_entropy_sum(output, targets)


def _call(
    function: Callable[[], object], *, target: str, seed: int
) -> tuple[list[LayerItem], LossFunction]:
    """What the user's function returns under the job's seed, checked."""
    torch.manual_seed(seed)
    result = function()
    loss: LossFunction = _class_loss_sum
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


def _built(item: LayerItem) -> nn.Module:
    module = item if isinstance(item, nn.Module) else item()
    if not isinstance(module, nn.Module):
        raise ConfigError(
            "model.target", type(module).__name__, "a layer's function returns a module"
        )
    return module


def _refuse_other_dtypes(layer_name: str, module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if parameter.dtype != torch.float32:
            raise ConfigError(
                f"model (layer {layer_name})",
                f"{name}: {parameter.dtype}",
                'build it in float32; training.dtype = "bfloat16" trains it in bfloat16',
            )
