"""A Hugging Face model without its blocks: block stubs, visitors and ghosts.

A block stub is a module that replaces a block and passes its call to a visitor, a function. So the
model's own forward can be run for the part before the blocks, for the arguments of the blocks, or
for the part after them. A ghost is a stand-in for a parameter that must not take memory: a single
NaN expanded to the parameter's shape, so that every value computed from it shows as NaN.

`ownership` finds in the autograd graph which parameters are used before the blocks and which after
them: the embedding owns those on which the first block's input depends, the head those on which the
logits depend, given the last block's output. The blocks must be a chain: each takes what the one
before it returned, and nothing else that depends on parameters.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from planaria.errors import ConfigError
from planaria.models.layers import OWN_LAYERS, leaves_of

# Dimensions in names: B microbatch, L sequence, D model

_EXPERTS: Final = "_experts_implementation"  # Attribute of configs of transformers.


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of one block, without its hidden states.

    Attributes:
        is_named: whether the hidden states are passed as a keyword argument.
    """

    is_named: bool
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def output(self, block: nn.Module, hidden_BLD: Tensor) -> object:
        """The block's return value for these hidden states."""
        if self.is_named:
            return block(hidden_states=hidden_BLD, **self.kwargs)
        return block(hidden_BLD, *self.args, **self.kwargs)

    def tensors(self) -> list[Tensor]:
        """All tensors among the arguments."""
        leaves = tree_leaves((self.args, dict(self.kwargs)))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


Visit = Callable[[int, Tensor, Call], Tensor]


class ForwardStopped(Exception):
    """Raised by a visitor to leave the model's forward with the hidden states."""

    def __init__(self, hidden_BLD: Tensor) -> None:
        super().__init__()
        self.hidden_BLD = hidden_BLD


class _Visitor:
    """The function that all block stubs of one model call."""

    def __init__(self) -> None:
        self.visit: Visit | None = None


class BlockStub(nn.Module):
    """Replaces a block, and keeps its plain attributes, which the model's forward may read.

    Attributes:
        num_outputs: length of the tuple that the block returns; 0: it returns a single tensor.
    """

    def __init__(self, index: int, block: nn.Module, visitor: _Visitor) -> None:
        super().__init__()
        for name, value in vars(block).items():
            if not name.startswith("_") and not isinstance(value, nn.Module):
                setattr(self, name, value)
        self._index = index
        self._visitor = visitor
        self.num_outputs = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        visit = self._visitor.visit
        assert visit is not None
        is_named = not args
        hidden_BLD = kwargs.pop("hidden_states") if is_named else args[0]
        hidden_BLD = visit(self._index, hidden_BLD, Call(is_named, args[1:], kwargs))
        # The other values that a block returns, such as attention weights, must not be used: NaN
        # would show if they were.
        nothing = hidden_BLD.new_full((), float("nan"))
        extras = (nothing,) * (self.num_outputs - 1)
        return (hidden_BLD, *extras) if self.num_outputs else hidden_BLD


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a model takes: token ids, int64 [B, L], or images, [B, channels, rows, columns].

    Attributes:
        image: shape of an image; empty: token ids.
    """

    image: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """Name of the forward's argument."""
        return "pixel_values" if self.image else "input_ids"

    def constant(self, shape: Sequence[int], value: int, like: Tensor) -> Tensor:
        """Inputs of one value, of as many samples (and tokens) as the shape [B, L] says.

        Args:
            like: tensor on whose device they are, and in whose dtype images are.
        """
        if self.image:
            return like.new_full((shape[0], *self.image), value)
        return torch.full(tuple(shape[:2]), value, dtype=torch.int64, device=like.device)


class Frame:
    """A model with block stubs in place of its blocks; `copy.deepcopy` gives an independent one."""

    def __init__(self, model: Any, block_stubs: nn.ModuleList, inputs: Inputs) -> None:
        self.model = model
        self.inputs = inputs
        self.block_stubs = block_stubs
        self._visitor = _Visitor()
        for index, block in enumerate(block_stubs):
            block_stubs[index] = BlockStub(index, block, self._visitor)

    def logits(self, inputs: Mapping[str, Tensor], visit: Visit) -> Tensor:
        """The logits of the model's own forward, with `visit` called in place of each block.

        Args:
            inputs: arguments of the forward, by name.
        """
        self._visitor.visit = visit
        try:
            logits: Tensor = self.model(**inputs).logits
        finally:
            self._visitor.visit = None
        return logits

    def hidden_states(self, inputs: Mapping[str, Tensor], visit: Visit) -> Tensor:
        """The hidden states with which `visit` stops the model's forward (`ForwardStopped`).

        Args:
            inputs: arguments of the forward, by name.
        """
        try:
            self.logits(inputs, visit)
        except ForwardStopped as stop:
            return stop.hidden_BLD
        raise refusal(self.model, "its forward does not use all of its blocks")


@dataclass(frozen=True, slots=True)
class Ownership:
    """Parameters used before and after the blocks, and how many values each block returns.

    Attributes:
        embedding: names of the parameters used before the blocks.
        head: names of the parameters used after the blocks.
        num_outputs: length of the tuple that each block returns; 0: it returns a single tensor.
    """

    embedding: frozenset[str]
    head: frozenset[str]
    num_outputs: tuple[int, ...]


def find_blocks(model: Any) -> tuple[str, nn.ModuleList]:
    """Name and modules of the model's list of blocks.

    Of the `nn.ModuleList`s that are in no other, it is the longest, and of these the shallowest.
    """
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) > 0
    ]
    outermost = [
        (name, module)
        for name, module in lists
        if not any(name.startswith(f"{other}.") for other, _ in lists)
    ]
    if not outermost:
        raise refusal(model, "it has no nn.ModuleList of blocks")
    return max(outermost, key=lambda entry: (len(entry[1]), -entry[0].count(".")))


def refusal(model: Any, why: str) -> ConfigError:
    """The error for an architecture that is not a chain of layers."""
    return ConfigError("model.config.model_type", model.config.model_type, f"{why}; {OWN_LAYERS}")


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """All parameters by name, in the model's order; a shared one is under each of its names."""
    return {
        f"{path}.{name}" if path else name: parameter
        for path, module in model.named_modules()
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    }


def set_tensor(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Replaces the parameter of this name by a parameter or a ghost."""
    path, _, own_name = name.rpartition(".")
    module = model.get_submodule(path)
    delattr(module, own_name)
    setattr(module, own_name, tensor)


def ghost(shape: torch.Size, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of NaN that takes the memory of one element.

    It is not an nn.Parameter, so a copy of its module stays small and does not list it.
    """
    tensor = torch.full((), float("nan"), dtype=dtype, device=device).expand(shape)
    mark_initialised(tensor)
    return tensor


def move_ghosts(model: nn.Module, device: torch.device) -> None:
    """Takes all ghosts of a model to a device."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            is_ghost = isinstance(value, Tensor) and is_initialised(value)
            if is_ghost and value.device != device:
                setattr(module, name, ghost(value.shape, dtype=value.dtype, device=device))


def mark_initialised(tensor: Tensor) -> None:
    """Marks a tensor so that the initialisation of transformers does not change it."""
    tensor._is_hf_initialized = True  # type: ignore[attr-defined]


def is_initialised(tensor: Tensor) -> bool:
    """Whether a tensor is marked so."""
    return getattr(tensor, "_is_hf_initialized", False)


def initialise(model: Any, *, seed: int) -> None:
    """Draws all parameters that are not marked and computes all buffers, on the CPU.

    Both follow the model's own rules.

    Raises:
        ConfigError: a buffer stays undefined, or a module keeps another tensor without values.
    """
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            empty = torch.full(buffer.shape, _unset(buffer.dtype), dtype=buffer.dtype)
            setattr(module, name, empty)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model.initialize_weights()
    for name, buffer in model.named_buffers():
        unset = buffer.isnan() if buffer.is_floating_point() else buffer == _unset(buffer.dtype)
        if buffer.dtype != torch.bool and bool(unset.any()):
            raise refusal(model, f"its initialisation leaves buffer {name} undefined")
    for name, module in model.named_modules():
        if any(map(_is_undefined, vars(module).values())):
            raise refusal(model, f"{name} keeps a tensor that is neither parameter nor buffer")


def _is_undefined(value: object) -> bool:
    """Whether a value is a tensor without values that is no ghost."""
    return isinstance(value, Tensor) and value.is_meta and not is_initialised(value)


def ownership(frame: Frame, blocks: tuple[nn.Module, ...], *, inputs: Tensor) -> Ownership:
    """The parameters used before and after the blocks, found by two forwards without real weights.

    Args:
        frame: a frame that this function may change, with its parameters on the meta device and
            valid buffers.
        blocks: the model's blocks, on the meta device.
        inputs: inputs to run the model's forward on.

    Raises:
        ConfigError: the model is not a chain of layers, or pads its samples.
        IndexError: the model has too few positions or tokens for the ids.
    """
    parameters = parameters_of(frame.model)
    with torch.enable_grad():
        first_BLD, num_outputs = _walk_blocks(frame, blocks, inputs)
        if not frame.inputs.image:
            _refuse_another_length(inputs.shape[1], first_BLD.shape[1])
        embedding = _names_reached(first_BLD, frame.model, parameters)
        # The head runs on the meta device: the logits computed with a ghost would take real memory.
        for name, parameter in parameters.items():
            if name not in embedding:  # Frozen ones are used as well.
                set_tensor(frame.model, name, parameter.requires_grad_())
        for stub, count in zip(frame.block_stubs, num_outputs, strict=True):
            stub.num_outputs = count  # type: ignore[assignment]
        logits = _logits_after(frame, inputs, torch.empty_like(first_BLD, device="meta"))
        head = _names_reached(logits, frame.model, parameters)
    if embedding & head:
        why = f"{min(embedding & head)} is used before and after its blocks"
        raise refusal(frame.model, why)
    return Ownership(embedding, head, num_outputs)


def _refuse_another_length(num_ids: int, num_tokens: int) -> None:
    """Refuses blocks that get another number of tokens than the model, which a mask would hide.

    The arguments of blocks are those for ids of the length of the hidden states.
    """
    if num_tokens != num_ids:
        remedy = (
            f"its blocks get {num_tokens} tokens of such a sample, of which planaria hides none; "
            f"set it to {num_tokens} if the model pads samples; else {OWN_LAYERS}"
        )
        raise ConfigError("data.sequence_length", num_ids, remedy)


def _walk_blocks(
    frame: Frame, blocks: tuple[nn.Module, ...], inputs: Tensor
) -> tuple[Tensor, tuple[int, ...]]:
    """The first block's input, and the `num_outputs` of each block.

    Raises:
        ConfigError: the blocks are not a chain.
    """
    for name, parameter in parameters_of(frame.model).items():
        stand_in = ghost(parameter.shape, dtype=torch.float32, device=torch.device("cpu"))
        set_tensor(frame.model, name, stand_in.requires_grad_())
    taken: list[Tensor] = []
    returned: list[Tensor] = []
    num_outputs: dict[type[nn.Module], int] = {}

    def walk(index: int, hidden_BLD: Tensor, call: Call) -> Tensor:
        is_chain = index == len(taken) and (index == 0 or hidden_BLD is returned[-1])
        if not is_chain:
            raise refusal(frame.model, "its blocks do not form a chain")
        if any(tensor.requires_grad for tensor in call.tensors()):
            raise refusal(frame.model, "its blocks take more inputs than hidden states")
        taken.append(hidden_BLD)
        returned.append(hidden_BLD.detach().requires_grad_())
        block = blocks[index]
        if type(block) not in num_outputs:
            num_outputs[type(block)] = _num_outputs(frame, block, hidden_BLD, call)
        if index == len(blocks) - 1:
            raise ForwardStopped(taken[0])
        frame.block_stubs[index].num_outputs = num_outputs[type(block)]  # type: ignore[assignment]
        return returned[-1]

    first_BLD = frame.hidden_states({frame.inputs.name: inputs}, walk)
    return first_BLD, tuple(num_outputs[type(block)] for block in blocks)


def _logits_after(frame: Frame, inputs: Tensor, hidden_BLD: Tensor) -> Tensor:
    """The logits, on the meta device, given the last block's output.

    Raises:
        ConfigError: the part after the blocks cannot run alone, or a block does not run once.
    """
    visited: list[int] = []

    def pass_by(index: int, _hidden_BLD: Tensor, _call: Call) -> Tensor:
        visited.append(index)
        return hidden_BLD

    try:
        logits = frame.logits({frame.inputs.name: inputs}, pass_by)
    except (RuntimeError, NotImplementedError) as error:
        why = f"the part after its blocks cannot run alone ({error})"
        raise refusal(frame.model, why) from error
    if visited != list(range(len(frame.block_stubs))):
        raise refusal(frame.model, "it runs a block more than once")
    return logits


@torch.no_grad()
def _num_outputs(frame: Frame, block: nn.Module, hidden_BLD: Tensor, call: Call) -> int:
    """Length of the tuple that a block returns; 0: it returns a single tensor."""
    args, kwargs = tree_map_only(Tensor, lambda t: t.to("meta"), (call.args, dict(call.kwargs)))
    meta_BLD = torch.empty_like(hidden_BLD, device="meta")
    try:
        with _shape_only_experts(block):
            output = Call(call.is_named, args, kwargs).output(block, meta_BLD)
    except (RuntimeError, NotImplementedError, ValueError, IndexError) as error:
        if isinstance(error, NotImplementedError) or "meta" in str(error):
            why = f"a block needs values, not only shapes, to run ({error})"
            raise refusal(frame.model, why) from error
        remedy = (
            f"a {type(block).__name__} with it cannot run ({error}); give sizes that fit each "
            "other, such as heads that divide the hidden size, and no more experts per token "
            "than experts"
        )
        raise ConfigError("model.config", frame.model.config.model_type, remedy) from error
    hidden = output[0] if isinstance(output, tuple) and output else output
    if not isinstance(hidden, Tensor) or hidden.shape != hidden_BLD.shape:
        raise refusal(frame.model, "its blocks do not return hidden states")
    return len(output) if isinstance(output, tuple) else 0


@contextmanager
def _shape_only_experts(block: nn.Module) -> Iterator[None]:
    """Has a block's experts take no other steps for other values, which the meta device lacks."""
    configs = {id(c): c for m in block.modules() if (c := getattr(m, "config", None)) is not None}
    before = {key: getattr(c, _EXPERTS, None) for key, c in configs.items()}
    for config in configs.values():
        setattr(config, _EXPERTS, "batched_mm")
    try:
        yield
    finally:
        for key, config in configs.items():
            setattr(config, _EXPERTS, before[key])


def _names_reached(output: Tensor, model: nn.Module, names: Iterable[str]) -> frozenset[str]:
    """Names of the parameters on which the output depends."""
    reached = set(map(id, leaves_of(output)))
    return frozenset(name for name in names if id(_tensor(model, name)) in reached)


def _tensor(model: nn.Module, name: str) -> object:
    path, _, own_name = name.rpartition(".")
    return getattr(model.get_submodule(path), own_name)


def _unset(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point:
        return float("nan")
    return False if dtype == torch.bool else torch.iinfo(dtype).min
