"""Checks that a restore could bring back all that ranks hold; all ranks raise the same error.

A model that every rank holds whole is saved by one rank of each node. State that differs between
ranks in other ways than by DTensors would be lost: the parts of an optimizer that is sharded apart
from its model, or those of a model that is cut by hand or into stages. The state that an optimizer
keeps for parameters of other models would be lost, too.

Tensors that are not DTensors of all ranks are hashed, at some 20 GB/s, and the hashes are compared
among the ranks that hold parts of the same names at the same positions. Buffers are not compared:
those of BatchNorm differ between the ranks of DDP. Of the states of other objects digests are
compared among all ranks.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import Final

import msgspec
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from planaria.errors import ConfigError
from planaria.torchrun.gathering import gather_records, true_on_all
from planaria.torchrun.loop_state import state_digests
from planaria.torchrun.shards import EXTRA_STATES, TrainingState
from planaria.torchrun.slices import has_position

logger = logging.getLogger(__name__)

_SHARD: Final = "shard it with its model, by FSDP2"
_HOLD: Final = "make it a parameter of the model, or give a module that holds both as the model"


class _Refusal(msgspec.Struct, frozen=True):
    """The fields of a rank's ConfigError; all empty: the rank has none."""

    field: str = ""
    value: str = ""
    remedy: str = ""


class _StructureDigests(msgspec.Struct, frozen=True):
    """Digests of the structure of a rank's tensors.

    Attributes:
        names: digest of the names of parameters and buffers.
        model: digest of the names, shapes, positions and dtypes of parameters and buffers.
        optimizer: digest of the same of the optimizer's state.
    """

    names: str
    model: str
    optimizer: str


class _ValueDigests(msgspec.Struct, frozen=True):
    """Digests of the tensors of a rank that are not DTensors of all ranks.

    Attributes:
        names: digest of their names and positions.
        values: digest of these and of their values.
    """

    names: str
    values: str


def check_on_all(state: TrainingState) -> None:
    """Refuses state that a restore could not bring back completely.

    Raises:
        ConfigError: the state of a rank is refused; all ranks raise the same error.
    """
    check_tensors_on_all(state)
    _refuse_on_all(lambda: _check_own(state))
    digests = gather_records(_StructureDigests, _structure_digests(state))
    if state.is_replicated:
        _check_shapes(state, digests)
    _check_names(state, digests)
    _check_values(state)
    _check_others(state)


def check_tensors_on_all(state: TrainingState) -> None:
    """Refuses tensors without a stored value for each element: lazy, sparse and meta tensors.

    Refuses DTensors of which a rank has no part, or of which it is not known what part, too.

    Raises:
        ConfigError: a tensor of a rank is refused; all ranks raise the same error.
    """
    _refuse_on_all(lambda: _check_tensors(state))


def readable_on_all(state: TrainingState) -> tuple[bytes, bytes]:
    """This rank's `TrainingState.readable_values`.

    Raises:
        ConfigError: a value of a rank is refused; all ranks raise the same error.
    """
    values: list[tuple[bytes, bytes]] = []
    _refuse_on_all(lambda: values.append(state.readable_values()))
    return values[0]


def parts_of_state(optimizer: Optimizer) -> frozenset[tuple[int, object]]:
    """The parts (owner, key) of the state of an optimizer and of optimizers that it contains.

    Most optimizers have no state before their first step. If the parts change, the state has to be
    checked again.
    """
    inner = [each for each in vars(optimizer).values() if isinstance(each, Optimizer)]
    return frozenset(
        (id(owner), key)
        for each in (optimizer, *inner)
        for owner, values in each.state.items()
        for key in (values if isinstance(values, Mapping) else ("",))
    )


def _refuse_on_all(check_own: Callable[[], None]) -> None:
    """Runs a check on each rank; if any fails, all ranks raise the lowest rank's ConfigError."""
    refusal = _Refusal()
    try:
        check_own()
    except ConfigError as error:
        refusal = _Refusal(error.field, str(error.value), error.remedy)
    if true_on_all(not refusal.field)[0]:
        return
    for refused in gather_records(_Refusal, refusal):
        if refused.field:
            raise ConfigError(refused.field, refused.value, refused.remedy)


def _check_tensors(state: TrainingState) -> None:
    for name, tensor in state.tensors():
        if is_lazy(tensor):
            remedy = "it has no shape yet; run the model once first"
            raise ConfigError(name, "uninitialized", remedy)
        if tensor.layout != torch.strided:
            remedy = (
                "only dense tensors can be saved; make it one, or a buffer that is not persistent"
            )
            raise ConfigError(name, str(tensor.layout), remedy)
        if tensor.is_meta:
            raise ConfigError(name, "meta", "it has no numbers yet; call to_empty, and fill it")
        if isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is None:
            remedy = (
                f"rank {dist.get_rank()} is no part of its mesh, so the whole could not be "
                "restored there; distribute it over a mesh of all ranks"
            )
            raise ConfigError(name, str(tensor.device_mesh), remedy)
        if not has_position(tensor):
            remedy = (
                "ranks have other parts of it than torch says; shard it by FSDP2 and tensor "
                "parallelism, in this order of the mesh's dimensions, or into even parts"
            )
            raise ConfigError(name, str(getattr(tensor, "placements", "")), remedy)


def _check_own(state: TrainingState) -> None:
    """Does the checks that a rank can do without the others."""
    _check_inner_optimizers(state.optimizer)
    _check_parameters(state)
    _check_state(state)
    state.readable_values()


def _check_shapes(state: TrainingState, digests: Sequence[_StructureDigests]) -> None:
    """Refuses ranks whose tensors have other names, shapes or dtypes than those of rank 0."""
    for rank, own in enumerate(digests):
        if own.model != digests[0].model:
            remedy = f"rank {rank} holds other tensors than rank 0; make them DTensors of the whole"
            raise ConfigError("model", type(state.model).__name__, remedy)
        if own.optimizer != digests[0].optimizer:
            remedy = (
                f"rank {rank} holds other parts of its state than rank 0; {_SHARD}, or not at all"
            )
            raise ConfigError("optimizer", type(state.optimizer).__name__, remedy)


def _check_names(state: TrainingState, digests: Sequence[_StructureDigests]) -> None:
    """Refuses parameters and buffers that some ranks lack, since a restore expects all of them."""
    odd = next(
        (rank for rank, digest in enumerate(digests) if digest.names != digests[0].names), None
    )
    if odd is None:
        return
    own = [name for name in state.slices() if not name.startswith("optimizer/")]
    names = [frozenset(rank_names) for rank_names in gather_records(list[str], own)]
    name = min(names[0] ^ names[odd])
    having, lacking = (0, odd) if name in names[0] else (odd, 0)
    remedy = (
        f"rank {lacking} has no {name!r}, and rank {having} has; give all ranks a model "
        "with the same names, sharded by DTensors; stages of a pipeline cannot be saved"
    )
    raise ConfigError("model", type(state.model).__name__, remedy)


def _check_values(state: TrainingState) -> None:
    """Refuses tensors that differ between ranks although one rank's would be restored on all."""
    repeated = state.repeated_tensors(dist.get_world_size())
    hashes = {name: xxhash.xxh3_64_hexdigest(array.data) for name, array in repeated}
    digests = gather_records(
        _ValueDigests, _ValueDigests(_digest([*hashes]), _digest([*hashes.items()]))
    )
    alike = {digest.names: rank for rank, digest in reversed([*enumerate(digests)])}
    pairs = [(alike[digest.names], rank) for rank, digest in enumerate(digests)]
    odd = [(like, rank) for like, rank in pairs if digests[rank].values != digests[like].values]
    if not odd:
        return
    like, rank = odd[0]
    by_name = gather_records(dict[str, str], hashes if dist.get_rank() in odd[0] else {})
    name = next(
        name for name, value_hash in by_name[like].items() if by_name[rank][name] != value_hash
    )
    remedy = (
        f"rank {rank} holds other values than rank {like}, and a tensor that is not a "
        "DTensor of all ranks is restored on all ranks with the values of one; make it a "
        "DTensor of the whole, or equal on all ranks"
    )
    raise ConfigError("model", name, remedy)


def _check_others(state: TrainingState) -> None:
    """Refuses other objects whose states differ: one's would be restored on all ranks.

    Nobody can leave extra states of modules out, and torch restores those of one rank, too; the
    user is warned.
    """
    by_rank = gather_records(dict[str, str], state_digests(state.non_tensor_state().others))
    for rank, own in enumerate(by_rank):
        for name in sorted(own.keys() | by_rank[0].keys()):
            if own.get(name) == by_rank[0].get(name):
                continue
            if name == EXTRA_STATES:
                if not dist.get_rank():
                    text = "%s differs on rank %s; a restore gives all ranks that of rank 0"
                    logger.warning(text, name, rank)
            else:
                remedy = (
                    f"rank {rank} has another state of it than rank 0, which a restore would "
                    "give to all ranks; make them equal, or give the object in per_rank"
                )
                raise ConfigError("others", name, remedy)


def _structure_digests(state: TrainingState) -> _StructureDigests:
    slices = sorted(state.slices().items())
    model = [pair for pair in slices if not pair[0].startswith("optimizer/")]
    optimizer = [pair for pair in slices if pair[0].startswith("optimizer/")]
    return _StructureDigests(
        _digest([name for name, _ in model]), _digest(model), _digest(optimizer)
    )


def _digest(values: Sequence[object]) -> str:
    return sha256(msgspec.json.encode(values)).hexdigest()


def _check_inner_optimizers(optimizer: Optimizer) -> None:
    """Refuses an optimizer that contains another one with state of its own."""
    for inner in vars(optimizer).values():
        is_apart = isinstance(inner, Optimizer) and inner.state is not optimizer.state
        if is_apart and any(inner.state.values()):
            remedy = (
                f"the state of the {type(inner).__name__} within it would not be saved; pass "
                f"that optimizer if it has the state of all parameters, else {_SHARD}"
            )
            raise ConfigError("optimizer", type(optimizer).__name__, remedy)


def _check_parameters(state: TrainingState) -> None:
    """Refuses an optimizer of parameters that do not belong to the model."""
    own = {id(parameter) for parameter in state.model.parameters()}
    for index, group in enumerate(state.optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in own:
                field = f"optimizer.param_groups[{index}]['params'][{position}]"
                value = f"a parameter of shape {tuple(parameter.shape)}"
                raise ConfigError(field, value, f"the model does not have it; {_HOLD}")


def _check_state(state: TrainingState) -> None:
    """Refuses optimizer state that belongs to no parameter of the model, or cannot be saved."""
    names = {id(parameter): name for name, parameter in state.model.named_parameters()}
    for owner, values in state.optimizer.state.items():
        if values == {}:  # A mere look-up has added it: `state` is a defaultdict.
            continue
        if id(owner) in names:
            _check_keys(names[id(owner)], owner, values)
        elif isinstance(owner, Tensor):
            value = f"a tensor of shape {tuple(owner.shape)}"
            raise ConfigError("optimizer.state", value, f"the model does not have it; {_HOLD}")
        else:
            remedy = "only the state of parameters can be saved; keep it in a param group"
            raise ConfigError("optimizer.state", str(owner), remedy)


def _check_keys(parameter: str, owner: Tensor, values: Mapping[object, object]) -> None:
    """Refuses keys under which no state is saved, and DTensors of another shape than their owner's.

    A restore would not know how to shard the latter.
    """
    for key, value in values.items():
        if isinstance(value, DTensor) and value.shape != owner.shape:
            field = f"optimizer.state of {parameter}, {key}"
            remedy = (
                "a DTensor whose shape is not that of its parameter would be restored as a "
                "plain tensor"
            )
            raise ConfigError(field, tuple(value.shape), remedy)
        if not isinstance(key, str) or "/" in key:
            field = f"a key of optimizer.state of {parameter}"
            raise ConfigError(field, repr(key), "the keys of state must be strings without a /")
