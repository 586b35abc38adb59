"""What a rank holds of a model and its optimizer, for scripts that keep their own training loop.

A shard is all local tensors of a rank, each with its place in the whole one (DTensor of FSDP2 and
tensor parallelism; a plain tensor is whole), and what is not a tensor as JSON. From the shards of
any number of ranks the state of any other number is put together, slice by slice.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from planaria.checkpoint.wire import State
from planaria.errors import CheckpointError, ConfigError

HEAD: Final = "shard"  # The name of the bytes that tell of all others.


class Stateful(Protocol):
    """What a script saves beside model and optimizer: a scheduler, a sampler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object: ...


class Slice(msgspec.Struct, frozen=True):
    """Where a rank's tensor lies in the whole one.

    Attributes:
        whole: shape of the whole one.
        offset, shape: of the rank's part.
        dtype: by torch's name.
    """

    whole: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank holds.

    Attributes:
        rank, world_size: whose it is, of how many.
        tensors: by name; "parameter/...", "buffer/..." and "optimizer/{parameter}/{key}".
        numbers: of the optimizer's state, by name, what is no tensor.
        groups: the optimizer's param_groups, without the parameters.
        others: by name, the state of what is saved beside, as JSON.
    """

    rank: int
    world_size: int
    tensors: dict[str, Slice]
    numbers: dict[str, float]
    groups: list[dict[str, Any]]
    others: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Held:
    """A model, its optimizer, and what else is saved, as this rank has them."""

    model: nn.Module
    optimizer: Optimizer
    others: Mapping[str, Stateful]

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds all of the model."""
        return not any(isinstance(p, DTensor) for p in self.model.parameters())

    @property
    def device_type(self) -> str:
        """Where the model's collectives are, by torch's name; its shards may lie elsewhere."""
        one = next(self.model.parameters())
        return one.device_mesh.device_type if isinstance(one, DTensor) else one.device.type

    def shard(self, rank: int, world_size: int) -> tuple[Shard, State]:
        """What this rank holds, and its bytes, under the names of the shard's tensors and HEAD:
        views of what an optimizer's step changes, copies of all else.

        Raises:
            ConfigError: something beside is no JSON.
        """
        slices: dict[str, Slice] = {}
        numbers: dict[str, float] = {}
        state: dict[str, np.ndarray] = {}
        for name, value in self._values():
            if isinstance(value, Tensor):
                local, slices[name] = _placed(value)
                # The next forward changes it, and waits for no copy.
                is_buffer = name.startswith("buffer/")
                state[name] = _bytes(local.to("cpu", copy=True) if is_buffer else local)
            else:
                numbers[name] = float(value)
        shard = Shard(
            rank=rank,
            world_size=world_size,
            tensors=slices,
            numbers=numbers,
            groups=[
                {key: _plain(key, value) for key, value in group.items() if key != "params"}
                for group in self.optimizer.param_groups
            ],
            others={name: _plain(name, one.state_dict()) for name, one in self.others.items()},
        )
        state[HEAD] = np.frombuffer(msgspec.json.encode(shard), dtype=np.uint8)
        return shard, state

    def _values(self) -> Iterator[tuple[str, Any]]:
        yield from ((f"parameter/{name}", p) for name, p in self._parameters().items())
        yield from ((f"buffer/{name}", buffer) for name, buffer in self._buffers().items())
        for name, parameter in self._parameters().items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                yield f"optimizer/{name}/{key}", value

    def _parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())

    def _buffers(self) -> dict[str, Tensor]:
        return dict(self.model.named_buffers())

    # -- back -------------------------------------------------------------------------------------

    def wanted(self, shards: Mapping[int, Shard], *, rather: frozenset[int]) -> set[int]:
        """The ranks whose shards this rank needs, of those of one version.

        Args:
            rather: those that it has itself.

        Raises:
            CheckpointError: the version is not of this model.
        """
        found: set[int] = set()
        for name, wanted in self._places(shards).items():
            having = [n for n, shard in shards.items() if name in shard.tensors]
            overlapping = [
                n for n in having if _common(shards[n].tensors[name], wanted) is not None
            ]
            whole = [n for n in overlapping if _is_in(wanted, shards[n].tensors[name])]
            if whole:
                found.add(min(whole, key=lambda n: (n not in found, n not in rather, n)))
            else:
                found.update(overlapping)
        return found or {min(shards)}

    def assembled(
        self, shards: Mapping[int, Shard], states: Mapping[int, State]
    ) -> dict[str, Tensor]:
        """This rank's part of every tensor of a version, in memory of its own.

        Args:
            shards: of all of its ranks.
            states: the bytes of those that are `wanted`.

        Raises:
            CheckpointError: something was not saved.
        """
        if missing := self.others.keys() - shards[min(shards)].others.keys():
            raise CheckpointError(f"nothing was saved of {', '.join(sorted(missing))}")
        there = {n: shards[n] for n in states}
        return {
            name: _filled(name, place, there, states)
            for name, place in self._places(shards).items()
        }

    def load(self, tensors: Mapping[str, Tensor], told: Shard) -> None:
        """Takes over the state of a version.

        Args:
            tensors: as assembled.
            told: any shard of it.
        """
        filled = dict(tensors)
        with torch.no_grad():
            for kind, own in (("parameter", self._parameters()), ("buffer", self._buffers())):
                for name, tensor in own.items():
                    _local(tensor).copy_(filled.pop(f"{kind}/{name}"))
            self._load_optimizer(filled, told)
        for name, one in self.others.items():
            one.load_state_dict(told.others[name])

    def _load_optimizer(self, filled: Mapping[str, Tensor], told: Shard) -> None:
        state: dict[nn.Parameter, dict[str, Any]] = {}
        parameters = self._parameters()
        for name, local in filled.items():
            owner, _, key = name.removeprefix("optimizer/").rpartition("/")
            parameter = parameters[owner]
            state.setdefault(parameter, {})[key] = _like(parameter, local, told.tensors.get(name))
        for name, number in told.numbers.items():
            owner, _, key = name.removeprefix("optimizer/").rpartition("/")
            state.setdefault(parameters[owner], {})[key] = number
        self.optimizer.state.clear()
        for parameter, values in state.items():
            self.optimizer.state[parameter] = values
        for group, saved in zip(self.optimizer.param_groups, told.groups, strict=True):
            for key, value in saved.items():
                is_tuple = isinstance(group.get(key), tuple)
                group[key] = tuple(value) if is_tuple else value

    def _places(self, shards: Mapping[int, Shard]) -> dict[str, Slice]:
        """By name which part of each tensor this rank is to have."""
        places = {
            name: _placed(value)[1]
            for name, value in self._values()
            if isinstance(value, Tensor) and not name.startswith("optimizer/")
        }
        saved = {name: one for shard in shards.values() for name, one in shard.tensors.items()}
        for name, place in places.items():
            if name not in saved or saved[name].whole != place.whole:
                there = saved[name].whole if name in saved else "nothing"
                raise CheckpointError(f"{name} is {place.whole} here, and {there} was saved of it")
        for name, one in saved.items():
            if name in places:
                continue
            owner = name.removeprefix("optimizer/").rpartition("/")[0]
            of_parameter = places.get(f"parameter/{owner}")
            if of_parameter is None:
                raise CheckpointError(f"{name} was saved, and is not of this model")
            place = Slice(one.whole, (0,) * len(one.whole), one.whole, one.dtype)
            if of_parameter.whole == one.whole:
                place = msgspec.structs.replace(of_parameter, dtype=one.dtype)
            places[name] = place
        return places


def _placed(tensor: Tensor) -> tuple[Tensor, Slice]:
    """A rank's part of a tensor, and where it lies."""
    local, offset = tensor.detach(), (0,) * tensor.dim()
    if isinstance(tensor, DTensor):
        local = tensor.to_local().detach()
        _, found = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        offset = tuple(found)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return local, Slice(tuple(tensor.shape), offset, tuple(local.shape), dtype)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _bytes(local: Tensor) -> np.ndarray:
    """A tensor's bytes: a view where it lies in this process's memory, end to end."""
    flat = local.cpu().contiguous().reshape(-1)
    array: np.ndarray = flat.view(torch.uint8).numpy()
    return array


def _like(parameter: nn.Parameter, local: Tensor, saved: Slice | None) -> Tensor:
    """A tensor of the optimizer, cut and placed as its parameter is, if it is of its shape."""
    if saved is None or saved.whole != tuple(parameter.shape):
        return local
    if not isinstance(parameter, DTensor):
        return local.to(parameter.device)
    return DTensor.from_local(
        local.to(parameter.device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _filled(
    name: str, place: Slice, shards: Mapping[int, Shard], states: Mapping[int, State]
) -> Tensor:
    """A rank's part of a tensor, put together."""
    dtype = getattr(torch, place.dtype)
    target = torch.empty(place.shape, dtype=dtype)
    missing = target.numel()
    parts = {n: shard.tensors[name] for n, shard in shards.items() if name in shard.tensors}
    seen: list[Slice] = []  # Replicas have the same parts.
    for n, there in parts.items():
        common = _common(there, place)
        if common is None or there in seen:
            continue
        seen.append(there)
        source = torch.from_numpy(states[n][name].copy()).view(dtype).reshape(there.shape)
        into = tuple(slice(a - o, b - o) for (a, b), o in zip(common, place.offset, strict=True))
        out = tuple(slice(a - o, b - o) for (a, b), o in zip(common, there.offset, strict=True))
        target[into] = source[out]
        missing -= int(np.prod([b - a for a, b in common], dtype=np.int64))
        if _is_in(place, there):
            return target
    if missing > 0:
        raise CheckpointError(f"part of {name} was not saved")
    return target


def _common(one: Slice, other: Slice) -> list[tuple[int, int]] | None:
    """Where two parts of a tensor overlap, by dimension; None if they do not."""
    found = []
    for a, n, b, m in zip(one.offset, one.shape, other.offset, other.shape, strict=True):
        begin, end = max(a, b), min(a + n, b + m)
        if begin >= end:
            return None
        found.append((begin, end))
    return found


def _is_in(part: Slice, other: Slice) -> bool:
    """Whether a part of a tensor lies in another one."""
    return all(
        b <= a and a + n <= b + m
        for a, n, b, m in zip(part.offset, part.shape, other.offset, other.shape, strict=True)
    )


def _plain(name: str, value: Any) -> Any:
    """The value as JSON gives it back."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise ConfigError(name, type(value).__name__, f"its state is no JSON: {error}") from error
