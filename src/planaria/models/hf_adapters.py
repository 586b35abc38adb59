"""Low-rank adapters (LoRA) in a model of transformers, by the package peft.

The model's own parameters are frozen, so only the adapters are trained, and only they move, are
copied and are saved: a rank reads the frozen ones from `model.path`, or draws them from the seed.

Source: Hu et al., LoRA (ICLR '22). An adapter adds B A x to a product W x; A is drawn at random and
B begins at 0, so that training begins with the model as it is.
"""

import importlib
import math
import re
from collections.abc import Collection, Iterable, Mapping
from enum import Enum
from typing import Any, Final

import torch
from torch import nn

from planaria.errors import ConfigError
from planaria.models.hf_frame import is_initialised, mark_initialised

_INSIDE: Final = ".base_layer"  # Part of the name of a parameter whose module has an adapter.
_FIRST, _SECOND = ".lora_A.", ".lora_B."
# What would train more than the adapters, or draw them in another way.
_FIXED: Final[dict[str, Any]] = {
    "bias": "none",
    "init_lora_weights": True,
    "modules_to_save": None,
    "trainable_token_indices": None,
}


def add_adapters(model: Any, arguments: Mapping[str, Any], *, trains_head: bool) -> dict[str, Any]:
    """Puts adapters into a model on the meta device, and freezes all else; returns their config.

    Args:
        arguments: arguments of peft's LoraConfig.
        trains_head: whether what follows the base model is trained, too: the head of a classifier
            begins with random values.

    Raises:
        ConfigError: peft is not installed, or does not know or refuses the arguments.
    """
    try:
        peft = importlib.import_module("peft")
    except ModuleNotFoundError as error:
        remedy = "it needs a package: pip install -e '.[lora]' in planaria's checkout"
        raise ConfigError("model.lora", dict(arguments), remedy) from error
    head = _head_modules(model) if trains_head else []
    try:
        config = peft.LoraConfig(**arguments)
        for key, value in _FIXED.items():
            if getattr(config, key, value) != value:
                remedy = f"{key} = {getattr(config, key)!r} is not supported; leave it out"
                raise ConfigError("model.lora", dict(arguments), remedy)
        if head:
            config.exclude_modules = _pattern_without_adapters(config.exclude_modules, head)
        with torch.device("meta"):
            peft.inject_adapter_in_model(config, model)
    except (TypeError, ValueError, KeyError) as error:
        raise ConfigError("model.lora", dict(arguments), str(error)) from error
    for name, parameter in model.named_parameters():
        if "lora_" in name and not is_adapter(name):
            remedy = f"{name} is drawn in a way that planaria does not know; leave that variant out"
            raise ConfigError("model.lora", dict(arguments), remedy)
        parameter.requires_grad_(is_adapter(name) or name.partition(".")[0] in head)
    values = {key: _plain(value) for key, value in config.to_dict().items()}
    return values | ({"modules_to_save": head} if head else {})


def _head_modules(model: Any) -> list[str]:
    """The names of the modules with parameters that follow the base model."""
    names = {name.partition(".")[0] for name, _ in model.named_parameters()}
    return sorted(names - {model.base_model_prefix})


def _pattern_without_adapters(given: Collection[str] | str | None, head: Collection[str]) -> str:
    """The pattern of modules that get no adapter: those given to peft, and the trained head.

    An export has the head whole, and peft looks for no adapter in a module that is saved whole.
    """
    names = "|".join(map(re.escape, head))
    if not given:
        return rf"({names})(\..*)?"
    if not isinstance(given, str):  # As peft reads a list.
        given = rf"(.*\.)?({'|'.join(map(re.escape, sorted(given)))})"
    return rf"({given})|({names})(\..*)?"


def _plain(value: object) -> object:
    """The value as JSON has it."""
    if isinstance(value, set | frozenset | tuple):
        return sorted(map(str, value))
    if isinstance(value, Enum):
        return value.value
    return value if isinstance(value, bool | int | float | str | list | dict | None) else str(value)


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return _FIRST in name or _SECOND in name


def name_without_adapters(name: str) -> str:
    """The name that a parameter has in the model without adapters."""
    return name.replace(_INSIDE, "")


def merge_adapters(module: nn.Module) -> None:
    """Adds what the adapters in a module do to the weights that they adapt, as peft does."""
    layers: Any = importlib.import_module("peft.tuners.tuners_utils")
    for part in module.modules():
        # Without parameters it belongs to another layer of the model, and has ghosts.
        if isinstance(part, layers.BaseTunerLayer) and any(True for _ in part.parameters()):
            part.merge()


def draw_adapters(named: Iterable[tuple[str, nn.Parameter]], *, seed: int) -> None:
    """Draws the parameters of adapters that have no value yet, as peft does, and marks them."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in named:
        if is_initialised(parameter) or not is_adapter(name):
            continue
        with torch.no_grad():
            if _SECOND in name:
                parameter.zero_()
            else:
                nn.init.kaiming_uniform_(parameter, a=math.sqrt(5), generator=generator)
        mark_initialised(parameter)
