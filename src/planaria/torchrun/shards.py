"""A rank's part of a model and its optimizer, for scripts with their own training loop.

A shard is all local tensors of a rank, each with its position in the whole tensor (the DTensors of
FSDP2 and tensor parallelism; a plain tensor is whole), and the state that is not a tensor
(loop_state.py). From the shards of any number of ranks, the state of any other number of ranks is
assembled, slice by slice.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from planaria.checkpoint.memory.wire import State
from planaria.errors import CheckpointError
from planaria.torchrun.loop_state import (
    NonTensorState,
    decoded_state,
    encoded_state,
    readable_state,
)
from planaria.torchrun.slices import TensorSlice, assemble_part, is_in, local_part, overlap

EXTRA_STATES: Final = (
    "model.get_extra_state"  # Name of the model's extra states among other objects'.
)
HEAD: Final = "shard"  # The name of the bytes that encode the `Shard`, which describes the others.


class Stateful(Protocol):
    """An object that a script saves besides model and optimizer: a scheduler, a sampler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object: ...


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a rank's shard.

    Attributes:
        rank: number of the shard: the rank that holds it; 0 if all ranks hold the same.
        world_size: number of shards.
        tensors: positions of tensors in the whole ones, by name; the names are "parameter/...",
            "buffer/..." and "optimizer/{parameter}/{key}".
        beside: state that is not a tensor, as `loop_state.encoded_state` encodes it.
        per_rank: state of the objects of which every rank has its own, encoded likewise, by rank;
            that of this rank, or of all ranks if all hold the same shard.
    """

    rank: int
    world_size: int
    tensors: dict[str, TensorSlice]
    beside: bytes
    per_rank: dict[int, bytes] = {}


def bytes_now(tensors: Mapping[str, Tensor]) -> State:
    """The bytes of tensors; views of those that are contiguous and on the host."""
    return {name: _bytes(tensor) for name, tensor in tensors.items()}


@dataclass(frozen=True, slots=True)
class TrainingState:
    """A model, its optimizer and the other objects that are saved, as this rank has them.

    Attributes:
        others: objects whose states are the same on all ranks, by name.
        per_rank: objects of which every rank has its own, by name.
    """

    model: nn.Module
    optimizer: Optimizer
    others: Mapping[str, Stateful]
    per_rank: Mapping[str, Stateful] = field(default_factory=dict)

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds all of the model."""
        return not any(isinstance(p, DTensor) for p in self.model.parameters())

    @property
    def device_type(self) -> str:
        """The type of device of the model's collectives; offloaded shards may lie elsewhere."""
        parameter = next(self.model.parameters())
        return (
            parameter.device_mesh.device_type
            if isinstance(parameter, DTensor)
            else parameter.device.type
        )

    def reshard(self) -> None:
        """Has FSDP2 put the shards of parameters back into the model.

        After a forward without a backward the root module has plain tensors in their place, which
        the optimizer does not know.
        """
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def shard(
        self,
        rank: int,
        world_size: int,
        *,
        beside: bytes = b"",
        per_rank: Mapping[int, bytes] | None = None,
        read: Callable[[Mapping[str, Tensor]], State] = bytes_now,
    ) -> tuple[Shard, State]:
        """This rank's shard, and its bytes under the names of the shard's tensors and HEAD.

        The bytes of contiguous parameters and optimizer state on the host are views; all other
        bytes are copies.

        Args:
            beside: value of this field of the shard; empty: the state as it is now.
            per_rank: value of this field of the shard.
            read: brings tensors to the host as bytes.

        Raises:
            ConfigError: a value that is not a tensor cannot be written.
        """
        slices: dict[str, TensorSlice] = {}
        tensors: dict[str, Tensor] = {}
        for name, value in self.tensors():
            local, slices[name] = local_part(value)
            # The next forward changes buffers without waiting for the copy.
            tensors[name] = local.clone() if name.startswith("buffer/") else local
        shard = Shard(
            rank=rank,
            world_size=world_size,
            tensors=slices,
            beside=beside or encoded_state(self.non_tensor_state()),
            per_rank=dict(per_rank or {}),
        )
        tensors[HEAD] = torch.frombuffer(bytearray(msgspec.json.encode(shard)), dtype=torch.uint8)
        return shard, read(tensors)

    def per_rank_state(self) -> bytes:
        """The encoded state of the objects of which every rank has its own; empty: it has none.

        Raises:
            ConfigError: a value cannot be written.
        """
        return encoded_state(self._own_objects()) if self.per_rank else b""

    def readable_values(self) -> tuple[bytes, bytes]:
        """The encoded state besides tensors, and the value of `per_rank_state`, as they are now.

        Raises:
            ConfigError: a value cannot be written or read back; the error names it.
        """
        beside = readable_state(self.non_tensor_state())
        return beside, readable_state(self._own_objects()) if self.per_rank else b""

    def _own_objects(self) -> NonTensorState:
        return NonTensorState(per_rank={n: own.state_dict() for n, own in self.per_rank.items()})

    def slices(self) -> dict[str, TensorSlice]:
        """The positions of this rank's tensors in the whole ones, by name, as they are now."""
        return {name: local_part(value)[1] for name, value in self.tensors()}

    def repeated_tensors(self, world_size: int) -> Iterator[tuple[str, np.ndarray]]:
        """Yields name and bytes of the tensors, except buffers, that are not DTensors of all ranks.

        Several ranks may hold the same part of such a tensor, and a restore gives them all one
        rank's. The name of a part of a DTensor contains its offset.
        """
        for name, value in self.tensors():
            if name.startswith("buffer/"):
                continue
            if not isinstance(value, DTensor):
                yield name, _bytes(value.detach())
            elif value.device_mesh.size() < world_size:
                local, place = local_part(value)
                yield f"{name} from {place.offset}", _bytes(local)

    def non_tensor_state(self) -> NonTensorState:
        """The state that is not a tensor, as it is now."""
        values = self._optimizer_values(self._parameters())
        return NonTensorState(
            {name: value for name, value in values if not isinstance(value, Tensor)},
            [{**group, "params": len(group["params"])} for group in self.optimizer.param_groups],
            {name: other.state_dict() for name, other in self._other_objects().items()},
        )

    def _other_objects(self) -> dict[str, Stateful]:
        """`others`, and the extra states of the model's modules if there are any."""
        extra = _ExtraStates(self.model)
        return {**self.others, EXTRA_STATES: extra} if extra.modules else dict(self.others)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields all tensors that are saved, with their names."""
        parameters = self._parameters()  # In a model of many layers, finding them takes a while.
        yield from ((f"parameter/{name}", tensor) for name, tensor in parameters.items())
        yield from ((f"buffer/{name}", tensor) for name, tensor in self._buffers().items())
        for name, value in self._optimizer_values(parameters):
            if isinstance(value, Tensor):
                yield name, value

    def _optimizer_values(
        self, parameters: Mapping[str, nn.Parameter]
    ) -> Iterator[tuple[str, Any]]:
        """Yields the values of the optimizer's state, with their names."""
        for name, parameter in parameters.items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                yield f"optimizer/{name}/{key}", value

    def _parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())

    def _buffers(self) -> dict[str, Tensor]:
        """The persistent buffers by name, each once; others, such as caches, are made again."""
        names: dict[Tensor, str] = {}
        for path, module in self.model.named_modules():
            for name, buffer in module.named_buffers(path, recurse=False):
                if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                    names.setdefault(buffer, name)
        return {name: buffer for buffer, name in names.items()}

    # -- restoring --------------------------------------------------------------------------------

    def needed_shards(self, shards: Mapping[int, Shard], *, rather: frozenset[int]) -> set[int]:
        """The numbers of the shards of a version that this rank needs.

        Args:
            shards: all shards of the version, by number.
            rather: numbers of shards that this rank keeps, which are preferred.

        Raises:
            CheckpointError: the version belongs to another model or optimizer, or lacks an object
                that is saved besides them.
        """
        self._check(decoded_state(shards[min(shards)].beside))
        needed: set[int] = set()
        for name, wanted in self._places(shards).items():
            holders = [n for n, shard in shards.items() if name in shard.tensors]
            overlapping = [
                n for n in holders if overlap(shards[n].tensors[name], wanted) is not None
            ]
            sufficient = [n for n in overlapping if is_in(wanted, shards[n].tensors[name])]
            if sufficient:
                needed.add(min(sufficient, key=lambda n: (n not in needed, n not in rather, n)))
            else:
                needed.update(overlapping)
        return needed or {min(shards)}

    def assemble(
        self, shards: Mapping[int, Shard], states: Mapping[int, State]
    ) -> dict[str, Tensor]:
        """This rank's part of every tensor of a version, in memory of its own, by name.

        Args:
            shards: all shards of the version, by number.
            states: bytes of the `needed_shards`, by number.

        Raises:
            CheckpointError: the shards lack a part of a tensor.
        """
        tensors = {}
        for name, place in self._places(shards).items():
            there = {n: shards[n].tensors for n in states}
            parts = {n: slices[name] for n, slices in there.items() if name in slices}
            tensors[name] = assemble_part(name, place, parts, states)
        return tensors

    def _check(self, non_tensors: NonTensorState) -> None:
        """Raises a CheckpointError if the saved state does not fit this model and optimizer."""
        if missing := self._other_objects().keys() - non_tensors.others.keys():
            raise CheckpointError(f"nothing was saved of {', '.join(sorted(missing))}")
        here = [len(group["params"]) for group in self.optimizer.param_groups]
        there = [group["params"] for group in non_tensors.groups]
        if here != there:
            raise CheckpointError(
                f"the optimizer's groups have {here} parameters now, and had {there} when "
                "they were saved"
            )
        owners = {_owner(name) for name in non_tensors.numbers}
        if strange := owners - self._parameters().keys():
            raise CheckpointError(
                f"{min(strange)} was optimized in the saved run, and this model does not have it"
            )

    def load_others(self, raw: bytes) -> None:
        """Loads the states of the objects that are saved besides model and optimizer.

        Args:
            raw: state that is not a tensor, as `loop_state.encoded_state` encodes it.

        Raises:
            CheckpointError: an object refused its state, and may have loaded half of it.
        """
        _load_objects("others", self._other_objects(), decoded_state(raw).others)

    def load_per_rank(self, raw: bytes) -> None:
        """Loads the states of the objects of which every rank has its own.

        Args:
            raw: result of `per_rank_state` on the rank of this number.

        Raises:
            CheckpointError: an object refused its state, and may have loaded half of it.
        """
        _load_objects("per_rank", self.per_rank, decoded_state(raw).per_rank)

    def load(self, tensors: Mapping[str, Tensor], any_shard: Shard) -> None:
        """Loads a version into the model and the optimizer.

        Args:
            tensors: this rank's parts of all tensors, from `assemble`.
            any_shard: any shard of the version.
        """
        non_tensors = decoded_state(any_shard.beside)
        left = dict(tensors)
        with torch.no_grad():
            for kind, own in (("parameter", self._parameters()), ("buffer", self._buffers())):
                for name, tensor in own.items():
                    _local(tensor).copy_(left.pop(f"{kind}/{name}"))
            self._load_optimizer(left, any_shard.tensors, non_tensors)

    def _load_optimizer(
        self,
        filled: Mapping[str, Tensor],
        slices: Mapping[str, TensorSlice],
        non_tensors: NonTensorState,
    ) -> None:
        for group, saved in zip(self.optimizer.param_groups, non_tensors.groups, strict=True):
            for key in saved.keys() - {"params"}:
                group[key] = _group_value(group.get(key), saved[key])
        groups = {
            parameter: group
            for group in self.optimizer.param_groups
            for parameter in group["params"]
        }
        state: dict[nn.Parameter, dict[str, Any]] = {}
        parameters = self._parameters()
        # Each is filled once, also if two parameters share it.
        spare = {id(value): value for _, value in self._optimizer_values(parameters)}
        for name, local in filled.items():
            parameter, key = parameters[_owner(name)], _key(name)
            mold = (
                _step_mold(parameter, local, groups.get(parameter, {}))
                if key == "step"
                else _mold(parameter, local, slices.get(name))
            )
            own = spare.pop(id(self.optimizer.state.get(parameter, {}).get(key)), None)
            value = mold.fill(own, local)
            state.setdefault(parameter, {})[key] = value
        for name, number in non_tensors.numbers.items():
            state.setdefault(parameters[_owner(name)], {})[_key(name)] = number
        self.optimizer.state.clear()
        for parameter, values in state.items():
            self.optimizer.state[parameter] = values

    def _places(self, shards: Mapping[int, Shard]) -> dict[str, TensorSlice]:
        """The part of each tensor that this rank is to have, by name.

        Raises:
            CheckpointError: the version belongs to another model.
        """
        here = self.slices()
        places = {name: here[name] for name in here if not name.startswith("optimizer/")}
        saved = {
            name: saved_slice
            for shard in shards.values()
            for name, saved_slice in shard.tensors.items()
        }
        for name, place in places.items():
            if name not in saved or saved[name].whole != place.whole:
                there = saved[name].whole if name in saved else "nothing"
                raise CheckpointError(f"{name} has shape {place.whole} now, and {there} was saved")
            if saved[name].dtype != place.dtype:
                there = saved[name].dtype
                raise CheckpointError(
                    f"{name} has type {place.dtype} now, and had {there} when it was saved"
                )
        for name, saved_slice in saved.items():
            if name in places:
                continue
            of_parameter = places.get(f"parameter/{_owner(name)}")
            if of_parameter is None:
                raise CheckpointError(f"{name} was saved, and this model does not have it")
            place = TensorSlice(
                saved_slice.whole,
                (0,) * len(saved_slice.whole),
                saved_slice.whole,
                saved_slice.dtype,
            )
            if of_parameter.whole == saved_slice.whole:
                place = msgspec.structs.replace(of_parameter, dtype=saved_slice.dtype)
            places[name] = place
        return places


class _ExtraStates:
    """The state of a model's modules that is in a state_dict and in no tensor of theirs.

    Attributes:
        modules: modules that have such a state, by name.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = {
            name: module
            for name, module in model.named_modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state
        }

    def state_dict(self) -> dict[str, Any]:
        return {name: module.get_extra_state() for name, module in self.modules.items()}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        for name, module in self.modules.items():
            module.set_extra_state(state_dict[name])


def _load_objects(
    kind: str, objects: Mapping[str, Stateful], states: Mapping[str, Mapping[str, Any]]
) -> None:
    for name, other in objects.items():
        if name not in states:
            raise CheckpointError(f"nothing was saved of {kind}.{name}")
        try:
            other.load_state_dict(dict(states[name]))
        except Exception as error:  # Each type raises its own errors.
            what = f"{kind}.{name} does not accept the state that was saved of it"
            raise CheckpointError(f"{what}: {type(error).__name__}: {error}") from error


def _owner(name: str) -> str:
    """The name of the parameter that a value of the optimizer's state belongs to."""
    return name.removeprefix("optimizer/").rpartition("/")[0]


def _key(name: str) -> str:
    """The key of a value in its parameter's state."""
    return name.rpartition("/")[2]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _bytes(local: Tensor) -> np.ndarray:
    """A tensor's bytes; a view if the tensor is contiguous and on the host, otherwise a copy."""
    flat = local.cpu().contiguous().reshape(-1)
    array: np.ndarray = flat.view(torch.uint8).numpy()
    return array


@dataclass(frozen=True, slots=True)
class _Mold:
    """How a tensor of the optimizer's state is to be.

    Attributes:
        like: parameter like which it is sharded; None: it is a plain tensor.
    """

    device: torch.device
    dtype: torch.dtype
    like: DTensor | None = None

    def fill(self, own: object, local: Tensor) -> Tensor:
        """Such a tensor with the values of `local`: `own` if that is one, and else a new one.

        A device may lack memory for a second state beside the one that the optimizer has.
        """
        if isinstance(own, Tensor) and self._fits(own, local):
            _local(own).copy_(local)
            return own
        moved = local.to(self.device, self.dtype)
        if self.like is None:
            return moved
        return DTensor.from_local(
            moved,
            self.like.device_mesh,
            self.like.placements,
            run_check=False,
            shape=self.like.shape,
            stride=self.like.stride(),
        )

    def _fits(self, own: Tensor, local: Tensor) -> bool:
        if isinstance(own, DTensor) is (self.like is None):
            return False
        if isinstance(own, DTensor) and self.like is not None:
            places = (own.device_mesh, own.placements, own.shape)
            if places != (self.like.device_mesh, self.like.placements, self.like.shape):
                return False
        part = _local(own)
        kinds = (type(part), part.shape, part.dtype, part.device)
        return kinds == (Tensor, local.shape, self.dtype, self.device)


def _step_mold(parameter: nn.Parameter, local: Tensor, group: Mapping[str, Any]) -> _Mold:
    """A parameter's count of steps, on the device where torch's load_state_dict would put it.

    That is the host, or the parameter's device if the optimizer's kernels read the count there.
    """
    if group.get("fused") or group.get("capturable"):
        return _Mold(parameter.device, torch.float32)
    return _Mold(local.device, local.dtype)


def _mold(parameter: nn.Parameter, local: Tensor, saved: TensorSlice | None) -> _Mold:
    """A tensor of the optimizer on its parameter's device, in the dtype in which it was saved.

    If its whole has the shape of the parameter, it is sharded like the parameter.
    """
    is_cut = saved is not None and saved.whole == tuple(parameter.shape)
    like = parameter if isinstance(parameter, DTensor) and is_cut else None
    return _Mold(parameter.device, local.dtype, like)


def _group_value(own: Any, saved: Any) -> Any:
    """The value to set in a param group for a saved one.

    If the group has a tensor of the same shape there, the value is copied into it, since a schedule
    or a compiled step may hold that tensor.
    """
    if not isinstance(own, Tensor) or not isinstance(saved, Tensor | float | int):
        return saved
    value = torch.as_tensor(saved, device=own.device)
    return own.copy_(value) if value.shape == own.shape else saved
