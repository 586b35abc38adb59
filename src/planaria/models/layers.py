"""A model as a list of layers, each a module of its own that a rank can build alone.

A `SplitModel` knows the names, shapes and tied parameters of a model's layers, and builds any one
of them. The layers come from a Hugging Face architecture (hf_layers.py) or from a function that the
user wrote (user_layers.py).

A parameter that several layers use (tied embeddings) is a separate leaf in each of them.
`SplitModel.tied` lists the groups of such uses; the caller sums the gradients over each group.

Differs: Oobleck (SOSP '23), section 6, splits with torch.fx by a list of names per model;
torch.fx cannot trace the models of transformers 5.
"""

import hashlib
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves

from planaria.core.plan import LayerProfile
from planaria.errors import ConfigError
from planaria.models.packing import PACKED_DIMS, describe, is_packed, pack, unpack

_LEAF: Final = "torch::autograd::AccumulateGrad"  # Name of the nodes of leaves.
OWN_LAYERS = 'give the layers yourself with kind = "python"'

_TORCH: Final = str(Path(torch.__file__).parent)
_OF_WRONG_SHAPES: Final = (IndexError, RuntimeError, TypeError, ValueError)

LossFunction: TypeAlias = Callable[[Any, Any], Tensor]


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
    """Builds the layers of one model; see `SplitModel` for its methods."""

    @property
    def layer_names(self) -> tuple[str, ...]: ...

    @property
    def tied(self) -> tuple[TiedGroup, ...]: ...

    def materialise(self, layer: int) -> nn.Module: ...

    def structure(self, layer: int) -> nn.Module: ...

    def parameter_shapes(self, layer: int) -> dict[str, torch.Size]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitFacts:
    """What is known of a model besides its layers.

    Attributes:
        config: content of the config.json from which other tools can build the same model; empty:
            they cannot.
        vocabulary_size: number of token ids that the model knows; 0: nobody knows.
        loss_field: key of the job that an error of the loss names.
        notes: lines for the user to read before the job trains.
        float32_names: function that returns the names of parameters and buffers that stay in
            float32 where the layers work in bfloat16.
        whole_bytes: bytes of each layer; see `SplitModel.whole_bytes`.
        has_router_loss: whether the last layer returns the loss of routers beside the logits.
        mask_problem: see `SplitModel`.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    vocabulary_size: int = 0
    loss_field: str = "model.target"
    notes: tuple[str, ...] = ()
    float32_names: Callable[[], frozenset[str]] = frozenset
    whole_bytes: tuple[int, ...] = ()
    has_router_loss: bool = False
    mask_problem: Callable[[], str] = str


class SplitModel:
    """A model split into layers; calling one layer after another is the same as calling the model.

    Layer 0 takes the inputs (token ids [B, L] of a language model), each other layer takes the
    output of the one before it, and the last returns the logits. Outputs are contiguous; several
    tensors are packed as one (packing.py). Layers
    keep no state between calls, and they work in bfloat16 once all other tensors than those of
    `float32_names` are cast to it.

    Attributes:
        layer_names: names to show to people: "embedding", "transformer.h.0", ..., "head".
        objective: kind of targets: "causal" (the next tokens, shifted by the data set), "masked"
            (the hidden tokens, -100 elsewhere) or "supervised".
        tied: groups of uses of the parameters that more than one layer uses.
        virtual: profile of each layer of a paced model; empty: the model is not paced.
        mask_problem: function that returns the sentence why the model cannot be given samples of
            unequal length, with a mask that hides their padding; "": it can, or the layers are the
            user's.
        config, notes, float32_names, vocabulary_size: the same as in `SplitFacts`.
    """

    __slots__ = (
        *("_builder", "_has_router_loss", "_loss", "_loss_field", "_whole_bytes", "config"),
        *("float32_names", "layer_names", "mask_problem", "notes", "objective", "tied", "virtual"),
        "vocabulary_size",
    )

    def __init__(
        self,
        builder: LayerBuilder,
        *,
        objective: str,
        loss: LossFunction,
        virtual: tuple[LayerProfile, ...] = (),
        facts: SplitFacts | None = None,
    ) -> None:
        facts = facts or SplitFacts()
        self._loss_field, self._whole_bytes = facts.loss_field, facts.whole_bytes
        self._has_router_loss = facts.has_router_loss
        self.mask_problem = facts.mask_problem
        self.config, self.notes = facts.config, facts.notes
        self.float32_names, self.vocabulary_size = facts.float32_names, facts.vocabulary_size
        self.virtual = virtual
        self._builder = builder
        self._loss = loss
        self.layer_names = builder.layer_names
        self.objective = objective
        self.tied = builder.tied

    @property
    def num_layers(self) -> int:
        """Number of layers, including embedding and head."""
        return len(self.layer_names)

    @property
    def has_class_loss(self) -> bool:
        """Whether the loss is `class_loss_sum`, for want of one of the user's."""
        return self._loss is class_loss_sum

    def materialise(self, layer: int) -> nn.Module:
        """The layer with its initial weights: float32, CPU, the same bits anywhere.

        It is in train mode, but for what the user has put into eval mode.
        """
        return self._builder.materialise(layer)

    def structure(self, layer: int) -> nn.Module:
        """The layer, into which a state is to be loaded; its trained parameters have any value."""
        return self._builder.structure(layer)

    def parameter_shapes(self, layer: int) -> dict[str, torch.Size]:
        """The shape of each parameter of the layer that is trained, in `named_parameters` order."""
        return self._builder.parameter_shapes(layer)

    def whole_bytes(self, layer: int) -> int:
        """Bytes of the layer's parameters, trained or not, and of buffers of the user's own layers.

        0 if the model is paced.
        """
        return self._whole_bytes[layer] if self._whole_bytes else 0

    def virtual_output_bytes(self, layer: int) -> int:
        """Bytes of the layer's output according to its profile; 0 if the model is not paced."""
        return self.virtual[layer].output_bytes if self.virtual else 0

    def virtual_parameter_bytes(self, layers: Iterable[int]) -> int:
        """Bytes of the layers' parameters according to the profile; 0 if the model is not paced."""
        return sum(self.virtual[layer].parameter_bytes for layer in layers) if self.virtual else 0

    def virtual_state_bytes(self, layer: int) -> int:
        """Bytes of the layer's parameters and optimizer state according to its profile.

        0 if the model is not paced.
        """
        if not self.virtual:
            return 0
        return self.virtual[layer].parameter_bytes + self.virtual[layer].optimizer_bytes

    def predictions(self, output: Tensor) -> Any:
        """What metrics get of the last layer's output, which may be packed: all but the loss of
        routers."""
        values = unpack(output)
        return values[0] if self._has_router_loss else values

    def loss_sum(self, output: Tensor, targets: Tensor) -> Tensor:
        """The loss summed over the targets of a microbatch, a float32 scalar.

        Args:
            output: the last layer's output; may be packed.
            targets: one target per position or per sample; cross entropy ignores -100. May be
                packed.

        Raises:
            ConfigError: the loss function failed, or did not return one number.
        """
        values = unpack(output), unpack(targets)
        try:
            loss = self._loss(*values)
        except (torch.OutOfMemoryError, ConfigError):
            raise
        except Exception as error:
            call, frames = loss_call(*values), traceback.extract_tb(error.__traceback__)
            own = [frame for frame in frames if not frame.filename.startswith(_TORCH)]
            is_own_words = own[-1] is frames[-1] and (own[-1].line or "").startswith("raise")
            if is_own_words or not isinstance(error, _OF_WRONG_SHAPES):
                error.add_note(f"{call} raised it; it gets the last layer's output and the targets")
                raise
            place = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})"
            place = "" if own[-1].filename == __file__ else place
            remedy = f"{error}{place}; it gets the last layer's output and the targets"
            raise ConfigError(self._loss_field, call, remedy) from error
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            remedy = f"it returned {describe(loss)}, and must return one number"
            raise ConfigError(self._loss_field, loss_call(*values), remedy)
        return loss.float().reshape(())


def loss_call(output: Any, targets: Any) -> str:
    """The call of a loss with the shapes that it gets, to show to people."""
    return f"loss_function({describe(output)}, {describe(targets)})"


def boundary(output: object, layer_name: str) -> Tensor:
    """The output of a layer as one contiguous tensor; `unpack` gives the next layer what it was.

    Raises:
        ConfigError: the layer returned something else than tensors.
    """
    if (
        isinstance(output, Tensor)
        and output.is_floating_point()
        and output.dim() <= PACKED_DIMS
        and not is_packed(output)
    ):
        return output.contiguous()
    return pack(output, f"model (layer {layer_name})")


def refuse_running_statistics(layer_name: str, module: nn.Module) -> None:
    """Raises ConfigError if a part of the layer keeps running statistics over batches."""
    for part in module.modules():
        if isinstance(part, nn.SyncBatchNorm) or (
            isinstance(part, _NormBase) and part.track_running_stats
        ):
            raise _batch_statistics_error(layer_name, type(part).__name__)


def layer_values(module: nn.Module, *, has_trained: bool) -> dict[str, Tensor]:
    """A copy of the layer's buffers and frozen parameters, for `refuse_changes`.

    Args:
        has_trained: whether the trained parameters are in it, too.
    """
    parameters = {
        name: parameter
        for name, parameter in module.named_parameters()
        if has_trained or not parameter.requires_grad
    }
    values = {**dict(module.named_buffers()), **parameters}
    return {name: tensor.detach().clone() for name, tensor in values.items()}


def refuse_changes(layer_name: str, before: dict[str, Tensor], module: nn.Module) -> None:
    """Raises ConfigError if a forward in train mode has changed what is in `layer_values`."""
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    after = {**dict(module.named_buffers()), **dict(module.named_parameters())}
    for name in sorted(before.keys() | (after.keys() - trained)):
        if name in before and name in after and torch.equal(before[name], after[name]):
            continue
        if name not in trained:
            raise _batch_statistics_error(layer_name, f"buffer {name}")
        remedy = (
            f"its forward changes its parameter {name}, and each holder of the layer would change "
            "it by samples of its own; give it its value where the layer is built"
        )
        raise ConfigError("model.target", f"layer {layer_name}", remedy)


def leaves_of(output: Tensor, *, beside: Tensor | None = None) -> Iterator[Tensor]:
    """Yields the leaves of the graph of a tensor, which a backward from it would reach.

    Args:
        beside: tensor whose graph is left out, and itself if it is a leaf.
    """
    seen = {None, None if beside is None else beside.grad_fn}
    waiting = [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        assert node is not None
        seen.add(node)
        leaf = getattr(node, "variable", None) if node.name() == _LEAF else None
        if leaf is not None and leaf is not beside:
            yield leaf
        waiting += [child for child, _ in node.next_functions]


def layer_seed(seed: int, layer: int) -> int:
    """The seed of one layer's initial weights.

    The CPU generator uses only 32 bits of a seed, so job seed and layer are hashed to 32 bits.
    """
    digest = hashlib.blake2b(f"{seed}/{layer}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def kept_tensors(module: nn.Module) -> list[str]:
    """The names of attributes in which a forward has left tensors through which gradients flow.

    Parts with hooks before their forward are left out: they compute their weights anew from
    parameters, as for a norm of weights.
    """
    names = []
    for path, part in module.named_modules():
        for name, value in vars(part).items() if not part._forward_pre_hooks else ():
            leaves = tree_leaves(value) if isinstance(value, list | tuple | dict | Tensor) else []
            if any(isinstance(leaf, Tensor) and leaf.grad_fn is not None for leaf in leaves):
                names.append(f"{path}.{name}".removeprefix("."))
    return names


def tied_groups(names_by_layer: Sequence[dict[str, int]]) -> tuple[TiedGroup, ...]:
    """The groups of tied parameters of a model.

    Args:
        names_by_layer: identity of the parameter behind each name, by name, for each layer.
    """
    uses: dict[int, list[TiedUse]] = {}
    for layer, names in enumerate(names_by_layer):
        for name, identity in names.items():
            uses.setdefault(identity, []).append(TiedUse(layer, name))
    return tuple(TiedGroup(tuple(group)) for group in uses.values() if len(group) > 1)


def class_loss_sum(output: Tensor, targets: Tensor) -> Tensor:
    """The loss of layers that have none: the cross entropy, with classes in the last dimension.

    Raises:
        ConfigError: targets are no class numbers, or classes are in the second dimension.
    """
    if targets.is_floating_point():
        raise ConfigError(
            "model.target",
            str(targets.dtype),
            "targets that are not class numbers need a loss: return (layers, loss_function), "
            "where loss_function(output, targets) is the sum over the microbatch",
        )
    if targets.shape != output.shape[:-1] and _has_second_for_classes(output, targets):
        remedy = (
            "without a loss_function the loss is the cross entropy over the last dimension, and "
            "the classes are in the second; let the last layer return x.movedim(1, -1), or return "
            "(layers, loss_function)"
        )
        raise ConfigError("model.target", loss_call(output, targets), remedy)
    return cross_entropy_sum(output, targets)


def has_unclear_classes(output: Tensor, targets: Tensor) -> bool:
    """Whether `class_loss_sum` may have taken the last dimension for the second by mistake."""
    if output.dim() < 3 or output.shape[1] != output.shape[-1]:
        return False
    return targets.shape != output.shape[:-1] or _has_second_for_classes(output, targets)


def _has_second_for_classes(output: Tensor, targets: Tensor) -> bool:
    """Whether torch's own cross entropy would take the second of many dimensions for classes."""
    return output.dim() > 2 and targets.shape == output.shape[:1] + output.shape[2:]


def cross_entropy_sum(output: Tensor, targets: Tensor) -> Tensor:
    """The cross entropy over the last dimension, summed; targets of -100 are ignored."""
    logits = output.reshape(-1, output.shape[-1]).float()
    return functional.cross_entropy(logits, targets.reshape(-1), ignore_index=-100, reduction="sum")


def _batch_statistics_error(layer_name: str, value: str) -> ConfigError:
    return ConfigError(
        f"model (layer {layer_name})",
        value,
        "a forward must not change the layer's state by statistics of its batch, because "
        "these depend on how samples are spread over nodes; use GroupNorm or LayerNorm",
    )
