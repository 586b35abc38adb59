"""The state of a training loop besides its tensors: learning rates, schedulers, samplers.

It is written by torch.save, since JSON turns keys that are numbers into strings and tuples into
lists, and cannot express inf. It is read by torch.load with weights_only=True, which runs no code
from the file and refuses types that it does not know. So the state of each version is read back as
a test before the version begins.
"""

import random
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any, Final

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from planaria.errors import CheckpointError, ConfigError

# Types of numpy that may be read: some schedules compute learning rates with numpy, and the states
# of its random generators contain arrays.
_NUMPY: Final[tuple[Any, ...]] = (
    *(np.float64().__reduce__()[0], np.empty(0).__reduce__()[0]),
    *(np.ndarray, np.dtype),
    *{type(np.dtype(code)) for code in f"?{np.typecodes['AllInteger']}{np.typecodes['AllFloat']}"},
)
_REMEDY: Final = (
    "torch.load with weights_only=True does not read it back; build it from numbers, "
    "strings, tensors, lists and dicts, or pass its type to "
    "torch.serialization.add_safe_globals"
)


_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None), dict, list, tuple)


@dataclass(frozen=True, slots=True)
class NonTensorState:
    """The saved state that is not a tensor of the model or of its optimizer.

    Attributes:
        numbers: values of the optimizer's state that are not tensors, by name.
        groups: the optimizer's param_groups, each with the number of its parameters as "params".
        others: state_dict of each further object that is saved, by name.
        per_rank: state_dict of each object of which every rank has its own, by name.
    """

    numbers: Mapping[str, Any] = field(default_factory=dict)
    groups: Sequence[Mapping[str, Any]] = ()
    others: Mapping[str, Any] = field(default_factory=dict)
    per_rank: Mapping[str, Any] = field(default_factory=dict)

    @property
    def _fields(self) -> tuple[Any, ...]:
        return self.numbers, self.groups, self.others, self.per_rank


class RandomGenerators:
    """The global generators of Python, numpy and torch, and torch's for the rank's accelerator.

        MemoryCheckpointer(model, optimizer, per_rank={"random": RandomGenerators()})

    After a restore a rank draws the numbers that it would have drawn.
    """

    def state_dict(self) -> dict[str, Any]:
        """The states of all generators, by name."""
        states: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
        }
        if module := _device_module():
            states["device"] = module.get_rng_state()
        return states

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Sets the generators that were saved and exist here."""
        random.setstate(state_dict["python"])
        np.random.set_state(state_dict["numpy"])
        torch.set_rng_state(state_dict["torch"])
        module = _device_module()
        if module and "device" in state_dict:
            module.set_rng_state(state_dict["device"])


def encoded_state(non_tensors: NonTensorState) -> bytes:
    """The bytes of the state.

    Raises:
        ConfigError: a value cannot be written; the error names it.
    """
    try:
        return _bytes_of(non_tensors._fields)
    except Exception as error:  # Each type raises its own errors.
        raise _refusal(non_tensors) from error


def decoded_state(raw: bytes) -> NonTensorState:
    """The state that `encoded_state` has turned into bytes.

    Raises:
        CheckpointError: the bytes cannot be read.
    """
    try:
        return NonTensorState(*_value_of(raw))
    except Exception as error:  # Each type raises its own errors.
        raise CheckpointError(
            f"the saved values that are not tensors cannot be read: {error}"
        ) from error


def readable_state(non_tensors: NonTensorState) -> bytes:
    """The bytes of the state, as `encoded_state` has them, from which a restore can read it back.

    That is tried with empty tensors, since a copy of a model in it may have gigabytes.

    Raises:
        ConfigError: a value cannot be written or read back, or is a part of a tensor though all
            ranks get the same one; the error names it.
    """
    for name, value in _leaves("others", non_tensors.others):
        if isinstance(value, DTensor):
            remedy = (
                "all ranks would get the part of rank 0; let its state_dict return whole tensors "
                "(full_tensor, or get_optimizer_state_dict with full_state_dict=True), or give "
                "the object in per_rank, to have it restored on as many ranks as now"
            )
            raise ConfigError(name, type(value).__name__, remedy)
    for name, value in non_tensors.numbers.items():
        if not isinstance(value, float | int | str | None):
            remedy = (
                "only tensors and numbers of an optimizer's state can be saved, not lists or dicts"
            )
            raise ConfigError(name, type(value).__name__, remedy)
    raw = encoded_state(non_tensors)
    try:
        _value_of(_bytes_of(_without_numbers(non_tensors._fields)))
    except Exception as error:  # Each type raises its own errors.
        raise _refusal(non_tensors) from error
    return raw


def _without_numbers(value: Any) -> Any:
    """The value with empty tensors in place of ordinary ones, which can always be read."""
    if type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided:
        return value if value.is_quantized else torch.empty(0, dtype=value.dtype, device="cpu")
    if type(value) in (list, tuple):
        return type(value)(map(_without_numbers, value))
    if type(value) in (dict, OrderedDict):
        emptied = copy(value)  # A state_dict has attributes, too.
        emptied.update((key, _without_numbers(inner)) for key, inner in value.items())
        return emptied
    return value


def state_digests(states: Mapping[str, Any]) -> dict[str, str]:
    """A digest of each state, equal for equal states of two processes.

    The bytes of equal states may differ: those of sets, of tensors on two devices, and of values
    that are one object here and two there. Of types that are none of torch's, numpy's or Python's
    own only the name counts.
    """
    return {
        name: xxhash.xxh3_128_hexdigest("\n".join(sorted(_texts(name, state))).encode())
        for name, state in states.items()
    }


def _texts(name: str, state: Any) -> Iterator[str]:
    for path, value in _leaves(name, state):
        if isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta:
            flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            content = (
                f"{value.dtype} {tuple(value.shape)} {xxhash.xxh3_128_hexdigest(flat.numpy().data)}"
            )
        elif isinstance(value, np.ndarray | np.generic) and value.dtype != object:
            content = f"{value.dtype} {value.shape} {xxhash.xxh3_128_hexdigest(value.tobytes())}"
        elif isinstance(value, set | frozenset):
            content = str(sorted(map(repr, value)))
        else:
            is_plain = isinstance(value, _PLAIN)
            content = repr(value) if is_plain else type(value).__name__
        yield f"{path}: {content}"


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields all values in nested dicts, lists and tuples, with their full names."""
    if isinstance(value, Mapping):
        pairs = [*value.items()]
    else:
        pairs = [*enumerate(value)] if isinstance(value, list | tuple) else []
    if not pairs:
        yield name, value
    for key, inner in pairs:
        yield from _leaves(f"{name}.{key}", inner)


def _refusal(non_tensors: NonTensorState) -> ConfigError:
    refused = (pair for pair in _named_values(non_tensors) if not _comes_back(pair[1]))
    name, value = _innermost(*next(refused, ("others", non_tensors.others)))
    return ConfigError(name, type(value).__name__, _REMEDY)


def _named_values(non_tensors: NonTensorState) -> Iterator[tuple[str, Any]]:
    yield from non_tensors.numbers.items()
    for group in non_tensors.groups:
        yield from ((f"optimizer.{key}", value) for key, value in group.items())
    yield from ((f"others.{name}", value) for name, value in non_tensors.others.items())
    yield from ((f"per_rank.{name}", value) for name, value in non_tensors.per_rank.items())


def _innermost(name: str, value: Any) -> tuple[str, Any]:
    """The innermost value in nested dicts that cannot be read back, with its full name."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not _comes_back(inner):
                return _innermost(f"{name}.{key}", inner)
    return name, value


def _comes_back(value: Any) -> bool:
    try:
        _value_of(_bytes_of(value))
    except Exception:  # Each type raises its own errors.
        return False
    return True


def _bytes_of(value: Any) -> bytes:
    file = BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _value_of(raw: bytes) -> Any:
    with torch.serialization.safe_globals(list(_NUMPY)):
        # The devices of the writer may not exist here.
        return torch.load(BytesIO(raw), map_location="cpu", weights_only=True)


def _device_module() -> Any:
    """Torch's module for this process's accelerator; None: there is none."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return None if accelerator is None else torch.get_device_module(accelerator)
