"""A Hugging Face model as layers: embedding, one per block, head.

The model is built once on the meta device, without its blocks (`hf_frame.py`). A layer is a module
that holds its own part of the model under the model's own names:

- embedding: runs the model's forward until it reaches the first block;
- block: is called directly, with the arguments (mask, positions, ...) that the model's forward
  passes to it (`hf_arguments.py`), for a padding mask, too (`hf_masks.py`);
- head: runs the model's forward with the layer's input in place of the last block's output.

Weights are drawn by the model's own rules with a seed for each layer, or read from disk. A
parameter shared with an earlier layer gets the value that it has in that layer.

A layer runs the operations of the whole model on the same tensors, so the bits are the same
however the model is split. Unless the config names others, attention and experts are "eager"
(products and a softmax; one expert after the other) where training is deterministic, because "sdpa"
and "grouped_mm" choose a kernel, and with it the bits, by device, shape and mask. Elsewhere they
are what transformers takes, which are these two if the model can.

Source: Oobleck (SOSP '23), section 6 (layers of a model, each built by the ranks that own it).
Differs: Oobleck traces with torch.fx, which cannot trace the models of transformers 5.
"""

import copy
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from planaria.checkpoint.disk.outgoing import ADAPTERS
from planaria.core.job import ModelConfig
from planaria.errors import ConfigError
from planaria.models.hf_adapters import (
    add_adapters,
    draw_adapters,
    is_adapter,
    name_without_adapters,
)
from planaria.models.hf_arguments import BlockArguments
from planaria.models.hf_frame import (
    BlockStub,
    Call,
    ForwardStopped,
    Frame,
    Ownership,
    find_blocks,
    ghost,
    initialise,
    mark_initialised,
    ownership,
    parameters_of,
    refusal,
    set_tensor,
)
from planaria.models.hf_heads import MASKED_ENTRY, HeadEntry, cheapest_entry
from planaria.models.hf_masks import (
    IDS,
    Masks,
    hidden_and_mask,
    masked_inputs,
    refuse_own_padding,
    with_mask,
)
from planaria.models.hf_model import (
    config_values,
    float32_names,
    inputs_of,
    meta_model,
    too_few_positions,
)
from planaria.models.hf_routers import Routers, RouterSums, routers_of
from planaria.models.hf_weights import Weights, weights_on_disk
from planaria.models.layers import (
    OWN_LAYERS,
    SplitFacts,
    SplitModel,
    TiedGroup,
    boundary,
    cross_entropy_sum,
    layer_seed,
    refuse_running_statistics,
    tied_groups,
)
from planaria.models.packing import is_packed, unpack

logger = logging.getLogger(__name__)

# Dimensions in names: B microbatch, L sequence, D model

_ROUTER_LOSS: Final = "output_router_logits"  # Key of configs of transformers.


class _Embedding(nn.Module):
    """The layer that computes the first block's input from token ids or images."""

    def __init__(self, frame: Frame, masks: Masks) -> None:
        super().__init__()
        self._frame = frame
        self._masks = masks

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: the model's own forward is no code of a layer."""

    def forward(self, inputs: Tensor) -> Tensor:
        model, mask = self._frame.model, ""
        arguments: Mapping[str, Tensor] = {self._frame.inputs.name: inputs}
        if is_packed(inputs):
            arguments, mask = masked_inputs(
                unpack(inputs), masks=self._masks, inputs=self._frame.inputs
            )
        if model.training != self.training:
            model.train(self.training)
        # Buffers that are not part of the layer (rotary frequencies) move to its device, but keep
        # their dtype.
        if any(buffer.device != inputs.device for buffer in model.buffers()):
            model.to(inputs.device)
        hidden_BLD = self._frame.hidden_states(arguments, _leave)
        if not self._frame.inputs.image:
            refuse_own_padding(arguments[IDS].shape[1], hidden_BLD.shape[1])
        return boundary(with_mask(hidden_BLD, mask), "embedding")


class _Block(nn.Module):
    """The layer that runs one block, with the arguments that the model's forward passes to it."""

    def __init__(
        self, index: int, path: str, arguments: BlockArguments, routers: Routers | None
    ) -> None:
        super().__init__()
        self._index = index
        self._path = path
        self._arguments = arguments
        self._routers = routers

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles the block itself, whose code all blocks share."""
        self.get_submodule(self._path).compile(*args, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        if self._routers is None:
            hidden_BLD, mask = hidden_and_mask(x)
            return boundary(with_mask(self._run_block(hidden_BLD, mask), mask), self._path)
        hidden_BLD, sums = _take_apart(x, self._routers)
        with self._routers.note_logits(self.get_submodule(self._path)) as noted:
            hidden_BLD = self._run_block(hidden_BLD, "")
        for logits_TE in noted:
            sums = self._routers.add(sums, logits_TE)
        return boundary((hidden_BLD, *sums.parts()), self._path)

    def _run_block(self, hidden_BLD: Tensor, mask: str) -> Tensor:
        call = self._arguments.call(self._index, hidden_BLD, mask)
        output = call.output(self.get_submodule(self._path), hidden_BLD)
        hidden = output[0] if isinstance(output, tuple) else output
        return boundary(hidden, self._path)


def _take_apart(x: Tensor, routers: Routers) -> tuple[Tensor, RouterSums]:
    """The hidden states and the routers' sums, of which the embedding passes on none."""
    value = unpack(x)
    if isinstance(value, Tensor):
        return value, routers.no_sums(value.device)
    hidden_BLD, *parts = value
    return hidden_BLD, RouterSums(*parts)


class _Head(nn.Module):
    """The layer that computes the logits from the last block's output, and the routers' loss."""

    def __init__(
        self, frame: Frame, entry: HeadEntry, masks: Masks, routers: Routers | None
    ) -> None:
        super().__init__()
        self._frame = frame
        self._entry = entry
        self._masks = masks
        self._routers = routers

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: the model's own forward is no code of a layer."""

    def forward(self, x: Tensor) -> Tensor:
        if self._frame.model.training != self.training:
            self._frame.model.train(self.training)
        if self._routers is None:
            hidden_BLD, mask = hidden_and_mask(x)
            if mask and self._masks.use().is_for_head:
                self._entry = MASKED_ENTRY  # From now on: it takes the ghosts to another device.
            return boundary(self._entry.logits(self._frame, hidden_BLD, mask), "head")
        hidden_BLD, sums = _take_apart(x, self._routers)
        logits = self._entry.logits(self._frame, hidden_BLD, "")
        return boundary((logits, self._routers.loss(sums)), "head")


@dataclass(frozen=True, slots=True, kw_only=True)
class HfLayers:
    """Builds the layers of a Hugging Face model.

    Attributes:
        frame: the model without its blocks, on the meta device.
        blocks: the blocks, on the meta device.
        leaves: name of the leaf by full parameter name, one mapping for each layer; two names have
            the same leaf if the layer itself uses a parameter twice.
        shapes: shape of each trained leaf by name, in the model's order, one mapping for each
            layer.
        aliases: all names of the same parameter, including this one, by name.
        head_entry: the way in which the head enters the model's forward.
        masks: use that the model makes of padding masks.
        tied: groups of uses of trained parameters.
        shared: groups of uses of all parameters, for their initial values.
        weights: the initial weights found on disk; may be empty.
        routers: the routers whose loss is part of the total; None: none is.
    """

    frame: Frame
    blocks: tuple[nn.Module, ...]
    layer_names: tuple[str, ...]
    leaves: tuple[Mapping[str, str], ...]
    shapes: tuple[Mapping[str, torch.Size], ...]
    aliases: Mapping[str, tuple[str, ...]]
    tied: tuple[TiedGroup, ...]
    shared: tuple[TiedGroup, ...]
    arguments: BlockArguments
    head_entry: HeadEntry
    masks: Masks
    weights: Weights
    routers: Routers | None
    seed: int

    def materialise(self, layer: int) -> nn.Module:
        """The layer with weights from disk, if they are there, else drawn by the model's rules."""
        frame = self._frame_of(layer)
        owners = {
            use.name: group.uses[0]
            for group in self.shared
            for use in group.uses[1:]
            if use.layer == layer
        }
        for name, leaf in frame.model.named_parameters():
            stored_name = next(filter(self.weights.has, self.aliases[name]), "")
            if stored_name:
                leaf.data.copy_(self.weights.tensor(stored_name))
                mark_initialised(leaf)
            elif name in owners:
                owner = self.materialise(owners[name].layer)
                leaf.data = owner.get_parameter(owners[name].name).data
                mark_initialised(leaf)
        seed = layer_seed(self.seed, layer)
        draw_adapters(frame.model.named_parameters(), seed=seed)
        initialise(frame.model, seed=seed)
        self._load_buffers(frame)
        return self._module(frame, layer)

    def structure(self, layer: int) -> nn.Module:
        """The layer with trained parameters of undefined value and valid buffers."""
        if len(self.shapes[layer]) < len(set(self.leaves[layer].values())):
            return self.materialise(layer)  # No state has its other parameters.
        frame = self._frame_of(layer)
        for leaf in frame.model.parameters():
            mark_initialised(leaf)
        initialise(frame.model, seed=0)
        self._load_buffers(frame)
        return self._module(frame, layer)

    def parameter_shapes(self, layer: int) -> dict[str, torch.Size]:
        return dict(self.shapes[layer])

    def float32_names(self) -> frozenset[str]:
        """See `SplitModel.float32_names`."""
        names = float32_names(self.frame.model)
        return names | {each for each in self.aliases if name_without_adapters(each) in names}

    def _frame_of(self, layer: int) -> Frame:
        """The frame with memory for this layer's parameters, and ghosts for all others."""
        frame = copy.deepcopy(self.frame)
        if 0 < layer <= len(self.blocks):
            frame.block_stubs[layer - 1] = copy.deepcopy(self.blocks[layer - 1])
        is_head = layer == len(self.layer_names) - 1
        place = self.head_entry.place if is_head else torch.device("cpu")
        made: dict[str, nn.Parameter] = {}
        for name, old in parameters_of(frame.model).items():
            leaf = self.leaves[layer].get(name)
            if leaf is None:
                set_tensor(frame.model, name, ghost(old.shape, dtype=old.dtype, device=place))
                continue
            if leaf not in made:
                empty = torch.empty(old.shape, dtype=torch.float32)
                made[leaf] = nn.Parameter(empty, requires_grad=old.requires_grad)
            set_tensor(frame.model, name, made[leaf])
        return frame

    def _load_buffers(self, frame: Frame) -> None:
        """Reads the buffers that are on disk (the correction of the routers of DeepSeek-V3)."""
        for name, buffer in frame.model.named_buffers():
            if name_without_adapters(name) in self.weights.buffers:
                buffer.copy_(self.weights.tensor(name))

    def _module(self, frame: Frame, layer: int) -> nn.Module:
        """The layer's own modules under their full names, in a module that runs them."""
        module: nn.Module
        if layer == 0:
            module = _Embedding(frame, self.masks)
        elif layer <= len(self.blocks):
            module = _Block(layer - 1, self.layer_names[layer], self.arguments, self.routers)
        else:
            module = _Head(frame, self.head_entry, self.masks, self.routers)
        _attach(module, frame.model, "", frozenset(self.leaves[layer]))
        return module.train()


def split_hf_model(
    model: ModelConfig, config: Any, *, seed: int, sequence_length: int, is_deterministic: bool
) -> SplitModel:
    """The layers of a Hugging Face model; only their shapes stay in memory.

    Args:
        config: the result of `hf_config` for the model.

    Raises:
        ConfigError: the architecture is not a chain of layers.
    """
    skeleton, objective = meta_model(config, is_deterministic=is_deterministic)
    routers = _routers_with_loss(config, skeleton)
    weights = weights_on_disk(model, skeleton)
    adapters: dict[str, Any] = {}
    if model.lora:
        adapters = add_adapters(skeleton, model.lora, trains_head=objective == "supervised")
        adapters["base_model_name_or_path"] = model.path
    parameters = parameters_of(skeleton)
    identities = {name: id(p) for name, p in parameters.items()}
    shapes = {name: p.shape for name, p in parameters.items()}
    path, block_stubs = find_blocks(skeleton)
    blocks = tuple(block_stubs)
    frame = Frame(skeleton.eval(), block_stubs, inputs_of(skeleton))
    layer_names = ("embedding", *(f"{path}.{index}" for index in range(len(blocks))), "head")
    for name, part in zip(layer_names, (skeleton, *blocks, skeleton), strict=True):
        refuse_running_statistics(name, part)
    own, arguments = _examine(frame, blocks, sequence_length=sequence_length)
    problem = _mask_problem(frame, routers)
    masks = Masks(arguments.frame, sequence_length=sequence_length, problem=problem)
    aliases = _aliases(identities)
    leaves = _leaves_by_layer(frame, own, aliases=aliases, layer_names=layer_names)
    _check_weights(weights, leaves, aliases=aliases, shapes=shapes)
    own_names = [dict.fromkeys(layer.values()) for layer in leaves]
    trained = [[n for n in names if parameters[n].requires_grad] for names in own_names]
    builder = HfLayers(
        frame=frame,
        blocks=blocks,
        layer_names=layer_names,
        leaves=leaves,
        shapes=tuple({name: shapes[name] for name in layer} for layer in trained),
        aliases=aliases,
        tied=tied_groups([{name: identities[name] for name in layer} for layer in trained]),
        shared=tied_groups([{name: identities[name] for name in layer} for layer in own_names]),
        arguments=arguments,
        head_entry=cheapest_entry(frame, own.head),
        masks=masks,
        weights=weights,
        routers=routers,
        seed=seed,
    )
    sizes = tuple(4 * sum(shapes[name].numel() for name in names) for names in own_names)
    facts = _facts(builder, _config_of(skeleton, routers, adapters), sizes)
    loss = routers.loss_sum if routers else cross_entropy_sum
    return SplitModel(builder, objective=objective, loss=loss, facts=facts)


def _mask_problem(frame: Frame, routers: Routers | None) -> str:
    """Why a model is given no padding mask, whatever it would do with it; "": it may be given."""
    if frame.inputs.image:
        return "it takes images"
    return f"the routers' loss ({_ROUTER_LOSS}) would count padding" if routers else ""


def _facts(
    builder: HfLayers, config: Mapping[str, Any], whole_bytes: tuple[int, ...]
) -> SplitFacts:
    return SplitFacts(
        config=config,
        vocabulary_size=getattr(builder.frame.model.config, "vocab_size", 0) or 0,
        loss_field="model.config",
        notes=builder.weights.notes,
        float32_names=builder.float32_names,
        whole_bytes=whole_bytes,
        has_router_loss=builder.routers is not None,
        mask_problem=builder.masks.refusal,
    )


def _config_of(
    skeleton: Any, routers: Routers | None, adapters: Mapping[str, Any]
) -> dict[str, Any]:
    """The content of config.json; or the config of the adapters, if only they are trained."""
    if adapters:
        return {ADAPTERS: adapters}
    return config_values(skeleton) | ({_ROUTER_LOSS: True} if routers else {})


def _routers_with_loss(config: Any, skeleton: Any) -> Routers | None:
    """The model's routers if its config asks for their loss, which is computed here from then on.

    Raises:
        ConfigError: it has none that can be computed here.
    """
    if not getattr(config, _ROUTER_LOSS, False):
        return None
    routers = routers_of(skeleton)
    if routers is None:
        remedy = (
            f"this model has no routers' loss that planaria knows; set it to false, or {OWN_LAYERS}"
        )
        raise ConfigError(f"model.config.{_ROUTER_LOSS}", True, remedy)
    setattr(skeleton.config, _ROUTER_LOSS, False)  # Its own forward has no blocks to ask.
    return routers


def _leave(_index: int, hidden_BLD: Tensor, _call: Call) -> Tensor:
    raise ForwardStopped(hidden_BLD)


def _attach(target: nn.Module, source: nn.Module, prefix: str, names: frozenset[str]) -> None:
    """Registers the parameters in `names` and their modules in `target`, at the same paths.

    A module is registered itself if all its parameters are in `names`, else a plain container.
    """
    for name, parameter in source.named_parameters(recurse=False, remove_duplicate=False):
        if f"{prefix}{name}" in names:
            target.register_parameter(name, parameter)
    for name, child in source.named_children():
        paths = {f"{prefix}{name}.{own_name}" for own_name in parameters_of(child)}
        if paths and paths <= names:
            target.add_module(name, child)
        elif paths & names:
            container = nn.Module()
            _attach(container, child, f"{prefix}{name}.", names)
            target.add_module(name, container)


def _examine(
    frame: Frame, blocks: tuple[nn.Module, ...], *, sequence_length: int
) -> tuple[Ownership, BlockArguments]:
    """The owners of the model's parameters, and the arguments of its blocks.

    Raises:
        ConfigError: the model is not a chain of layers, has too few positions, or its blocks take
            arguments that depend on more than shapes.
    """
    model = frame.model
    probe = copy.deepcopy(frame)
    try:
        initialise(probe.model, seed=0)
    except AttributeError as error:
        raise _unrunnable(model, error) from error
    arguments = BlockArguments(copy.deepcopy(probe))
    largest = 1 if frame.inputs.image else model.config.vocab_size - 1
    examples = [
        frame.inputs.constant((1, sequence_length), value, torch.empty(()))
        for value in (largest, 0)
    ]
    try:
        own = ownership(probe, blocks, inputs=examples[0])
    except (IndexError, RuntimeError) as error:
        # For a missing position an embedding raises an IndexError, and gather a RuntimeError.
        if "out of" not in str(error) or frame.inputs.image:
            raise _unrunnable(model, error) from error
        raise too_few_positions(model.config, sequence_length) from error
    except StopIteration as error:
        # `PreTrainedModel.dtype`: ghosts are no parameters.
        raise refusal(model, "its forward asks for the dtype of its parameters") from error
    except (AttributeError, TypeError, ValueError) as error:
        raise _unrunnable(model, error) from error
    for each in (frame, arguments.frame):
        for stub, count in zip(each.block_stubs, own.num_outputs, strict=True):
            stub.num_outputs = count  # type: ignore[assignment]
    name = frame.inputs.name
    calls = [arguments.record_calls({name: each}, torch.float32) for each in examples]
    for call, other in zip(*calls, strict=True):
        if not all(map(torch.equal, call.tensors(), other.tensors())):
            raise refusal(model, "its blocks take more inputs than hidden states")
    return own, arguments


def _unrunnable(model: Any, error: Exception) -> ConfigError:
    """The error for a model whose own code fails where its blocks are elsewhere."""
    if BlockStub.__name__ in str(error):
        return refusal(model, f"its code does more with its blocks than call them ({error})")
    return refusal(model, f"its code cannot be run on its inputs alone ({error})")


def _aliases(identities: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    names: dict[int, list[str]] = {}
    for name, identity in identities.items():
        names.setdefault(identity, []).append(name)
    return {name: tuple(names[identity]) for name, identity in identities.items()}


def _leaves_by_layer(
    frame: Frame,
    own: Ownership,
    *,
    aliases: Mapping[str, tuple[str, ...]],
    layer_names: tuple[str, ...],
) -> tuple[dict[str, str], ...]:
    """The first name of the leaf behind each parameter name, one mapping for each layer."""
    around = set(parameters_of(frame.model))
    layer_of = dict.fromkeys(own.embedding, 0) | dict.fromkeys(own.head, len(layer_names) - 1)
    for layer, path in enumerate(layer_names[1:-1], start=1):
        layer_of |= {name: layer for name in aliases if name.startswith(f"{path}.")}
    for name in around - layer_of.keys():
        # The model never reads the parameter by this name, only by another one (BERT's bias).
        layers = [layer_of[alias] for alias in aliases[name] if alias in layer_of]
        if not layers:  # Nothing depends on it (a mask token): it is kept, and never changes.
            frame.model.get_parameter(name).requires_grad_(False)
        layer_of[name] = max(layers, default=0)
    return tuple(
        {
            name: next(alias for alias in aliases[name] if layer_of[alias] == layer)
            for name in aliases
            if layer_of[name] == layer
        }
        for layer in range(len(layer_names))
    )


def _check_weights(
    weights: Weights,
    leaves: tuple[Mapping[str, str], ...],
    *,
    aliases: Mapping[str, tuple[str, ...]],
    shapes: Mapping[str, torch.Size],
) -> None:
    """Raises ConfigError if the files lack a block's parameter, or hold one in another shape."""
    if not weights.shapes:
        return
    for layer, names in enumerate(leaves):
        for name in names:
            stored = [alias for alias in aliases[name] if weights.has(alias)]
            for alias in stored:
                weights.check_shape(alias, shapes[alias])
            if is_adapter(name):
                continue
            if not stored and 0 < layer < len(leaves) - 1:
                raise ConfigError(
                    "model.path", weights.directory, f"no file in it holds the parameter {name}"
                )
            if not stored:
                logger.warning(
                    "%s is not in %s, so it starts with random values", name, weights.directory
                )
