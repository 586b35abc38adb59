"""A state of another tool becomes a save, from which a job goes on with --resume.

The tensors have the names of `export_dcp`: "model.{name}" (or "{name}" alone), and
"optim.state.{name}.{key}" for the optimizer, as `get_optimizer_state_dict` of torch names them.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from planaria.checkpoint.disk.tiers import Manifest, Tier
from planaria.core.job import JobConfig, TrainingConfig
from planaria.core.specs import Prepared
from planaria.data.datasets import has_own_tokens, vocabulary_size
from planaria.engine.formats.dcp_export import ITERATION, MODEL, OPTIMIZER
from planaria.engine.formats.state_sources import StateSource, state_source
from planaria.engine.optimizer import optimizer_factory
from planaria.engine.prepare import load_model
from planaria.errors import ConfigError
from planaria.models.layers import SplitModel
from planaria.transport.timekeeping import Timekeeper

_MODELS: Final = (MODEL, "")
_STEP: Final = "step"
_NUM_SHOWN: Final = 2
_OPTIMIZERS: Final = (OPTIMIZER, "optimizer.state.", "state.")


class FactsFunction(Protocol):
    """Returns what a save says of a job."""

    def __call__(self, prepared: Prepared, /) -> Mapping[str, Any]:
        """The facts, from the model's config and the number of token ids of the data."""
        ...


def import_state(
    job: JobConfig,
    directory: Path,
    *,
    iteration: int,
    tier: Tier,
    cache_directory: Path,
    facts: FactsFunction,
) -> Manifest:
    """Makes a state the first save of a job.

    Args:
        directory: directory of the state; see `state_source`.
        iteration: number of iterations that made it; -1: what it says itself, or its optimizer's
            steps; 0 if it has neither.
        tier: tier in which the job saves.

    Raises:
        ConfigError: the state is not one of the job's model and optimizer, or the job is wrong.
        CheckpointError: a file of it is damaged, or the disk refuses.
    """
    if job.model.kind == "paced":
        raise ConfigError("model.kind", job.model.kind, "its layers have no state to import")
    model = load_model(job, cache_directory=cache_directory, profile=None, timekeeper=Timekeeper())
    size = vocabulary_size(
        job.data,
        cache_directory=cache_directory,
        seed=job.training.seed,
        objective=model.objective,
        model=job.model,
    )
    state = _find_state(state_source(directory), model, job, where=str(directory))
    number = state.iteration() if iteration < 0 else iteration
    with ExitStack() as undo:
        undo.callback(tier.discard, number, 0)
        files = tuple(
            tier.write_layer(number, 0, layer, state.layer(layer))
            for layer in range(model.num_layers)
        )
        known = Prepared(
            config=dict(model.config),
            vocabulary_size=size,
            has_own_tokens=has_own_tokens(job.data),
        )
        said = facts(known)
        manifest = Manifest(iteration=number, epoch=0, job=said, layers=files)
        tier.publish(manifest)
        undo.pop_all()
    return manifest


@dataclass(frozen=True, slots=True)
class _ImportedState:
    """A state in another format, found to be one of the job's model and optimizer.

    Attributes:
        where: place of the state, as people name it.
        prefix: beginning of the names of parameters in the source.
        parameters: name in the source by name of the parameter.
        optimizer: names in the source of the optimizer's state, by key, by name of the parameter;
            empty: the source has none.
        num_steps: number of steps that the optimizer has taken; 0: not known.
        is_own: whether the layers are the user's own, with kind = "python".
    """

    source: StateSource
    model: SplitModel
    where: str
    prefix: str
    parameters: Mapping[str, str]
    optimizer: Mapping[str, Mapping[str, str]]
    num_steps: int
    is_own: bool

    def iteration(self) -> int:
        """The number of iterations that made the state, as far as it says so."""
        if ITERATION in self.source.names:
            return int(self.source.read([ITERATION])[ITERATION])
        return self.num_steps

    def layer(self, layer: int) -> dict[str, np.ndarray]:
        """The state of a layer, as saves have it.

        Raises:
            ConfigError: a tensor has another shape, a frozen parameter or a buffer has another
                value, or one parameter has two.
        """
        shapes = self.model.parameter_shapes(layer)
        names = {f"parameter/{name}": self.parameters[name] for name in shapes}
        for name in shapes:
            places = self.optimizer.get(name, {})
            names |= {f"optimizer/{name}/{key}": place for key, place in places.items()}
        tensors = self.source.read(set(names.values()))
        for name, shape in shapes.items():
            own = tensors[self.parameters[name]].shape
            if own != shape:
                remedy = f"its {name} is {tuple(own)}, and that of the job's model {tuple(shape)}"
                raise ConfigError("SOURCE", self.where, remedy)
        structure = self.model.structure(layer)
        parameters = dict(structure.named_parameters(remove_duplicate=False))
        frozen = {name: each for name, each in parameters.items() if not each.requires_grad}
        kept = structure.state_dict().keys()  # Other buffers are made with the layer.
        buffers = structure.named_buffers(remove_duplicate=False)
        self._refuse_other_frozen(frozen | {name: each for name, each in buffers if name in kept})
        self._refuse_unequal_names(parameters)
        return {name: _array(name, tensors[place]) for name, place in names.items()}

    def _refuse_other_frozen(self, frozen: Mapping[str, Tensor]) -> None:
        """Refuses another value of what the job does not train than training would have."""
        places = [f"{self.prefix}{name}" for name in frozen]
        known = [place for place in places if place in self.source.names]
        for place, value in self.source.read(known).items():
            name = place.removeprefix(self.prefix)
            own_value = frozen[name].detach()
            if not torch.equal(value.to(own_value.dtype), own_value):
                own = "the function of model.target gives with training.seed"
                remedy = (
                    f"its {name} is not what "
                    f"{own if self.is_own else 'model.path or the seed gives'}, and the job does "
                    "not train it; begin with the model that the state was made from"
                )
                raise ConfigError("SOURCE", self.where, remedy)

    def _refuse_unequal_names(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Refuses two values of a trained parameter that has several names in its layer."""
        places: dict[nn.Parameter, list[str]] = {}
        for name, parameter in parameters.items():
            if parameter.requires_grad:
                places.setdefault(parameter, []).append(f"{self.prefix}{name}")
        for names in places.values():
            _refuse_unequal(self.source, names, f"parameter/{names[0]}", where=self.where)


def _find_state(
    source: StateSource, model: SplitModel, job: JobConfig, *, where: str
) -> _ImportedState:
    """The state of the job's model in a source.

    Raises:
        ConfigError: the source lacks a part of it, has that of another optimizer, or has two values
            of a tied parameter.
    """
    shapes = {
        name: shape
        for layer in range(model.num_layers)
        for name, shape in model.parameter_shapes(layer).items()
    }
    # A tied parameter may be there by one of its names alone, as optimizers know it.
    ties = [[use.name for use in group.uses] for group in model.tied]
    aliases = {name: [name, *tied] for tied in ties for name in tied}
    prefix = max(_MODELS, key=lambda each: sum(f"{each}{name}" in source.names for name in shapes))
    parameters: dict[str, str] = {}
    for name in shapes:
        known = (f"{prefix}{each}" for each in aliases.get(name, [name]))
        parameters[name] = next((each for each in known if each in source.names), "")
        if not parameters[name]:
            raise ConfigError("SOURCE", where, _lacking_text(source, name, job.model.kind))
    by_parameter = _optimizer_names(source.names)
    optimizer = {
        name: next(
            (by_parameter[each] for each in aliases.get(name, [name]) if each in by_parameter), {}
        )
        for name in shapes
    }
    for names in ties:
        _refuse_unequal_uses(source, names, prefix, by_parameter, where=where)
    kept = {n: _optimizer_keys(job.training, n) for n in {len(shape) for shape in shapes.values()}}
    for name, shape in shapes.items() if by_parameter else ():
        keys = kept[len(shape)]
        if optimizer[name].keys() != keys:
            remedy = (
                f"this one keeps {_names_text(keys)} of {name}, and {where} has "
                f"{_names_text(optimizer[name].keys())}; name the optimizer that it was made with"
            )
            raise ConfigError("training.optimizer", dict(job.training.optimizer), remedy)
    places = [names[_STEP] for names in optimizer.values() if _STEP in names]
    steps = {int(tensor) for tensor in source.read(places).values()}
    if len(steps) > 1:
        remedy = f"its parameters were stepped {min(steps)} to {max(steps)} times, not all alike"
        raise ConfigError("SOURCE", where, remedy)
    return _ImportedState(
        *(source, model, where, prefix, parameters, optimizer),
        num_steps=max(steps, default=0),
        is_own=job.model.kind == "python",
    )


def _refuse_unequal_uses(
    source: StateSource,
    names: Sequence[str],
    prefix: str,
    by_parameter: Mapping[str, Mapping[str, str]],
    *,
    where: str,
) -> None:
    """Refuses two values of a tied parameter, or of the optimizer's state of it.

    Args:
        names: names of the parameter, one for each layer that uses it.
        by_parameter: names of the optimizer's tensors, by parameter and key.
    """
    places = [f"{prefix}{name}" for name in names]
    _refuse_unequal(source, places, f"parameter/{names[0]}", where=where)
    states = [by_parameter[name] for name in names if name in by_parameter]
    for key in sorted({key for state in states for key in state}):
        places = [state[key] for state in states if key in state]
        _refuse_unequal(source, places, f"optimizer/{names[0]}/{key}", where=where)


def _refuse_unequal(source: StateSource, places: Sequence[str], name: str, *, where: str) -> None:
    """Refuses other bits under one name in the source than under another.

    Args:
        places: names in the source of what is one tensor in the job; it may lack some, and layers
            may use the same.
        name: name of the tensor in a save.
    """
    known = [place for place in dict.fromkeys(places) if place in source.names]
    if len(known) < 2:
        return
    first, *others = known
    arrays = {place: _array(name, tensor) for place, tensor in source.read(known).items()}
    for other in others:
        if not _have_same_bits(arrays[first], arrays[other]):
            remedy = (
                f"its {first} and {other} differ, and are one parameter in the job's model; give "
                "that the same value under both names, or a model that does not tie them"
            )
            raise ConfigError("SOURCE", where, remedy)


def _have_same_bits(array: np.ndarray, other: np.ndarray) -> bool:
    if (array.shape, array.dtype) != (other.shape, other.dtype):
        return False
    raw, other_raw = (
        np.ascontiguousarray(each).reshape(-1).view(np.uint8) for each in (array, other)
    )
    return np.array_equal(raw, other_raw)


def _optimizer_names(names: Collection[str]) -> dict[str, dict[str, str]]:
    """The names of the optimizer's tensors, by parameter and key."""
    by_parameter: dict[str, dict[str, str]] = {}
    for prefix in _OPTIMIZERS:
        for place in names:
            if place.startswith(prefix):
                name, _, key = place.removeprefix(prefix).rpartition(".")
                by_parameter.setdefault(name, {})[key] = place
        if by_parameter:
            break
    return by_parameter


def _optimizer_keys(training: TrainingConfig, num_dimensions: int) -> set[str]:
    """What the job's optimizer keeps of a parameter, found by a step of it."""
    parameter = nn.Parameter(torch.zeros((1,) * num_dimensions))
    optimizer = optimizer_factory(training)([("trial", parameter)])
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return {key for key, value in optimizer.state[parameter].items() if value is not None}


def _array(name: str, tensor: Tensor) -> np.ndarray:
    """A tensor as saves have it: steps as int64, and floats of 32 bits at least."""
    if name.endswith(f"/{_STEP}"):
        return np.array(int(tensor), dtype=np.int64)
    is_short = tensor.is_floating_point() and tensor.itemsize < torch.float32.itemsize
    if is_short or name.startswith("parameter/"):
        tensor = tensor.to(torch.float32)
    return tensor.numpy()


def _lacking_text(source: StateSource, name: str, kind: str) -> str:
    """The remedy for a source without a parameter of this name, with names that it has."""
    others = sorted(n for n in source.names if not n.startswith((*_OPTIMIZERS, ITERATION)))
    shown = get_close_matches(name, others, n=_NUM_SHOWN, cutoff=0.0)
    has = f" (it has {' and '.join(shown)})" if shown else ""
    rule = "name parameters LAYER_NUMBER.NAME, as the job's own layers do, or "
    return (
        f"it has no parameter {name}{has}; {rule if kind == 'python' else ''}"
        "name the job with the model that it was made of"
    )


def _names_text(keys: Collection[str]) -> str:
    return ", ".join(sorted(keys)) or "nothing"
