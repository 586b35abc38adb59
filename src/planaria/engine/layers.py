"""A model as a list of layers, each a module of its own that a rank can build alone.

`split_model` looks at a model once and returns a `SplitModel`: names, shapes and ties of its
layers, and how to build any one of them. Layers come from a Hugging Face architecture
(`hf_layers.py`) or from a function of the user's (here), which returns an `nn.Sequential` or a
list whose items are modules or functions without arguments that build a module. A function of
the list is called alone, under a seed of its layer's own, so nothing else is ever allocated;
modules are built by calling the user's function as plain torch would, and one is kept.

A parameter that several layers use (tied embeddings) is a leaf in each of them, and the group
of its uses is in `SplitModel.tied`: gradients are summed over the group by the caller.

Differs: Oobleck (SOSP '23), section 6, splits with torch.fx by a list of names per model;
torch.fx cannot trace the models of transformers 5.
"""

import copy
import hashlib
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _NormBase

from planaria.core.job import ModelConfig
from planaria.engine.targets import user_function
from planaria.errors import ConfigError

OWN_LAYERS = 'give the layers yourself with kind = "python"'

LossFunction: TypeAlias = Callable[[Tensor, Tensor], Tensor]
LayerItem: TypeAlias = nn.Module | Callable[[], nn.Module]


@dataclass(frozen=True, slots=True)
class TiedUse:
    """One use of a shared parameter: its layer and its name in that layer's module."""

    layer: int
    name: str


@dataclass(frozen=True, slots=True)
class TiedGroup:
    """One parameter that several layers use, in layer order; the first use is the owner."""

    uses: tuple[TiedUse, ...]


class LayerBuilder(Protocol):
    """What knows the layers of one model and builds them; the methods are those of SplitModel."""

    @property
    def layer_names(self) -> tuple[str, ...]: ...

    @property
    def tied(self) -> tuple[TiedGroup, ...]: ...

    def materialise(self, layer: int) -> nn.Module: ...

    def structure(self, layer: int) -> nn.Module: ...

    def parameter_shapes(self, layer: int) -> dict[str, torch.Size]: ...


class SplitModel:
    """A model cut into layers; calling one layer after another is calling the model.

    Layer 0 takes the inputs (token ids [B, L] of a language model), each other layer what the
    one before it returned, the last returns the logits. Outputs are contiguous, layers keep
    nothing between calls, and work in bfloat16 after `module.to(torch.bfloat16)`.

    Attributes:
        layer_names: for people: "embedding", "transformer.h.0", ..., "head".
        objective: what the targets are: "causal" (the next tokens, shifted by the data set),
            "masked" (the hidden tokens, -100 elsewhere) or "supervised".
        tied: the parameters that more than one layer uses.
    """

    __slots__ = ("_builder", "_loss", "layer_names", "objective", "tied")

    def __init__(self, builder: LayerBuilder, *, objective: str, loss: LossFunction) -> None:
        self._builder = builder
        self._loss = loss
        self.layer_names = builder.layer_names
        self.objective = objective
        self.tied = builder.tied

    @property
    def num_layers(self) -> int:
        """The number of layers, embedding and head included."""
        return len(self.layer_names)

    def materialise(self, layer: int) -> nn.Module:
        """The layer with its first weights: float32, CPU, train mode, the same bits anywhere."""
        return self._builder.materialise(layer)

    def structure(self, layer: int) -> nn.Module:
        """The layer with parameters of undefined value, for state that arrives from elsewhere."""
        return self._builder.structure(layer)

    def parameter_shapes(self, layer: int) -> dict[str, torch.Size]:
        """The shape of each of the layer's parameters, in `named_parameters` order."""
        return self._builder.parameter_shapes(layer)

    def loss_sum(self, output: Tensor, targets: Tensor) -> Tensor:
        """The loss summed over the targets of a microbatch, a float32 scalar.

        Args:
            output: what the last layer returned.
            targets: one per position or per sample; -100 counts for nothing in cross entropy.
        """
        loss = self._loss(output, targets)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ConfigError("model.target", shape, "the loss function returns one number")
        return loss.float().reshape(())


def split_model(
    model: ModelConfig, *, seed: int, vocabulary_size: int, sequence_length: int
) -> SplitModel:
    """The model of a job as layers; nothing but shapes stays in memory.

    Args:
        seed: of the first weights.
        vocabulary_size: token ids are below it; the model's own if its config names none.
        sequence_length: tokens in a sample.

    Raises:
        ConfigError: the model cannot be built, or cannot be trained as a chain of layers.
    """
    if model.kind == "python":
        builder, loss = _user_layers(model.target, seed=seed)
        return SplitModel(builder, objective="supervised", loss=loss)
    if model.kind != "hf":
        raise ConfigError("model.kind", model.kind, 'only "hf" and "python" have layers to split')
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError("model.kind", model.kind, "pip install 'planaria[hf]'")
    # Importing transformers takes seconds, and jobs with layers of their own do not need it.
    from planaria.engine.hf_layers import split_hf_model

    hf_builder, objective = split_hf_model(
        model, seed=seed, vocabulary_size=vocabulary_size, sequence_length=sequence_length
    )
    return SplitModel(hf_builder, objective=objective, loss=_cross_entropy_sum)


def boundary(output: object, layer_name: str) -> Tensor:
    """The output of a layer as it crosses to the next one: one contiguous tensor.

    Raises:
        ConfigError: the layer returned something else.
    """
    if isinstance(output, Tensor):
        return output.contiguous()
    raise ConfigError(
        f"model (layer {layer_name})",
        type(output).__name__,
        "a layer takes and returns exactly one tensor; pack what the next layers need into one, "
        f"or {OWN_LAYERS}",
    )


def refuse_running_statistics(layer_name: str, module: nn.Module) -> None:
    """Raises ConfigError where a part of the layer gathers statistics over batches."""
    for part in module.modules():
        if isinstance(part, nn.SyncBatchNorm) or (
            isinstance(part, _NormBase) and part.track_running_stats
        ):
            raise _batch_statistics_error(layer_name, type(part).__name__)


def buffer_values(module: nn.Module) -> dict[str, Tensor]:
    """A copy of the layer's buffers, to hold against `refuse_changing_buffers` after a forward."""
    return {name: buffer.detach().clone() for name, buffer in module.named_buffers()}


def refuse_changing_buffers(layer_name: str, before: dict[str, Tensor], module: nn.Module) -> None:
    """Raises ConfigError where a forward in train mode changed a buffer of the layer."""
    after = dict(module.named_buffers())
    for name in sorted(before.keys() | after.keys()):
        if name not in before or name not in after or not torch.equal(before[name], after[name]):
            raise _batch_statistics_error(layer_name, f"buffer {name}")


def layer_seed(seed: int, layer: int) -> int:
    """The seed of one layer's first weights.

    The CPU generator reads 32 bits of a seed only, so job seed and layer are hashed into those.
    """
    digest = hashlib.blake2b(f"{seed}/{layer}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def tied_groups(names_by_layer: Sequence[dict[str, int]]) -> tuple[TiedGroup, ...]:
    """The groups of a model, from each layer's parameter names and the identity behind each."""
    uses: dict[int, list[TiedUse]] = {}
    for layer, names in enumerate(names_by_layer):
        for name, identity in names.items():
            uses.setdefault(identity, []).append(TiedUse(layer, name))
    return tuple(TiedGroup(tuple(group)) for group in uses.values() if len(group) > 1)


def _batch_statistics_error(layer_name: str, value: str) -> ConfigError:
    return ConfigError(
        f"model (layer {layer_name})",
        value,
        "a forward must not change state by the statistics of its batch, for these depend on how "
        "samples are spread over nodes; use GroupNorm (or LayerNorm)",
    )


def _cross_entropy_sum(output: Tensor, targets: Tensor) -> Tensor:
    logits = output.reshape(-1, output.shape[-1]).float()
    return functional.cross_entropy(logits, targets.reshape(-1), ignore_index=-100, reduction="sum")


def _class_loss_sum(output: Tensor, targets: Tensor) -> Tensor:
    if targets.is_floating_point():
        raise ConfigError(
            "model.target",
            str(targets.dtype),
            "targets that are not class numbers need a loss: return (layers, loss_function), "
            "where loss_function(output, targets) is the sum over the microbatch",
        )
    return _cross_entropy_sum(output, targets)


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


def _user_layers(target: str, *, seed: int) -> tuple[_UserLayers, LossFunction]:
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
    return builder, loss


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
