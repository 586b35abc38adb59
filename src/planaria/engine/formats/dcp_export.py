"""A save as a directory of torch.distributed.checkpoint (DCP).

`torch.distributed.checkpoint.load` reads it into {"model": model.state_dict(), "optim":
get_optimizer_state_dict(model, optimizer), "iteration": torch.tensor(0)}, whole or sharded, or into
a part of that. "optim" and "iteration" are there if they are asked for.

Tensors are read when they are written, so that one layer at a time is in memory.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save

from planaria.checkpoint.disk.outgoing import new_directory
from planaria.engine.formats.whole_model import Adapters, WholeModel
from planaria.engine.optimizer import learning_rate, optimizer_factory
from planaria.engine.staging import as_tensor
from planaria.errors import CheckpointError, ConfigError

MODEL: Final = "model."
OPTIMIZER: Final = "optim.state."
ITERATION: Final = "iteration"
_IN_SAVE: Final = "optimizer/"


def export_dcp(model: WholeModel, output: Path, *, with_optimizer: bool) -> tuple[str, ...]:
    """Writes a save to a new directory; returns the names of its files.

    Args:
        with_optimizer: whether the optimizer's state and the iteration are written, too.

    Raises:
        ConfigError: the directory is not empty, or is a file; or the optimizer's state is that of
            adapters that are merged.
        CheckpointError: the save is damaged, or lacks a parameter of the model; or the disk
            refuses.
    """
    if with_optimizer and model.has_adapters and model.adapters is Adapters.MERGED:
        remedy = "its state is that of adapters, which --merge removes; leave one of the two out"
        raise ConfigError("--optimizer", True, remedy)
    path = new_directory(output).path
    shown, places = _entries(model, model.tensors, MODEL)
    state: dict[str, Any] = {"model": shown}
    if with_optimizer:
        shown, others = _entries(model, partial(_optimizer_tensors, model), OPTIMIZER)
        optimizer = {"state": _by_parameter(shown), "param_groups": _parameter_groups(model)}
        state |= {"optim": optimizer, ITERATION: torch.tensor(model.manifest.iteration)}
        places |= others
    # Tensors are written in their order, also where there is a GPU.
    writer = FileSystemWriter(path, thread_count=1, per_thread_copy_ahead=0)
    with quiet_torch(f"cannot write {path}"):
        save(state, storage_writer=writer, planner=_LayerByLayer(places), no_dist=True)
    return tuple(sorted(file.name for file in path.iterdir()))


@contextmanager
def quiet_torch(what: str) -> Iterator[None]:
    """Has DCP not warn that only one process takes part, and makes its errors a CheckpointError.

    Args:
        what: beginning of the error's message.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except CheckpointException as error:
        reason, _ = next(iter(error.failures.values()))
        if not isinstance(reason, Exception):  # Ctrl-C, which torch catches, too.
            raise reason from None
        raise CheckpointError(f"{what}: {reason}") from error


class _Place(NamedTuple):
    """Where a tensor comes from: under a name among what a function returns for a layer."""

    read: Callable[[int], Mapping[str, Tensor]]
    layer: int
    name: str


class _LayerByLayer(DefaultSavePlanner):
    """Plans with tensors on the meta device, and reads the layer of each when it is written."""

    def __init__(self, places: Mapping[str, _Place]) -> None:
        super().__init__()
        self._places = places
        self._layer: tuple[object, int] = (None, -1)
        self._tensors: Mapping[str, Tensor] = {}

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The tensor of an entry, or its other value; see DefaultSavePlanner."""
        place = self._places.get(index.fqn)
        if place is None:
            return super().lookup_object(index)
        if (place.read, place.layer) != self._layer:
            self._layer, self._tensors = (place.read, place.layer), place.read(place.layer)
        return self._tensors[place.name]


def _entries(
    model: WholeModel, read: Callable[[int], Mapping[str, Tensor]], prefix: str
) -> tuple[dict[str, Tensor], dict[str, _Place]]:
    """What a function returns for all layers, on the meta device, and the place of each by key."""
    shown: dict[str, Tensor] = {}
    places: dict[str, _Place] = {}
    for layer in range(model.split.num_layers):
        for name, tensor in read(layer).items():
            shown[name] = tensor.to("meta")
            places[prefix + name] = _Place(read, layer, name)
    return shown, places


def _by_parameter(named: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The optimizer's state of each parameter."""
    state: dict[str, dict[str, Tensor]] = {}
    for path, tensor in named.items():
        name, _, key = path.rpartition(".")
        state.setdefault(name, {})[key] = tensor
    return state


def _optimizer_tensors(model: WholeModel, layer: int) -> dict[str, Tensor]:
    """The optimizer's state of a layer as torch keeps it, by "{parameter}.{key}"."""
    tensors = {}
    for path, array in model.tier.read_layer(model.manifest, layer).items():
        if path.startswith(_IN_SAVE):
            name, _, key = path.removeprefix(_IN_SAVE).rpartition("/")
            tensor = as_tensor(array)
            tensors[f"{name}.{key}"] = tensor.float() if key == "step" else tensor
    return tensors


def _parameter_groups(model: WholeModel) -> list[dict[str, Any]]:
    """The groups of all parameters, with the learning rate of the next iteration."""
    training = model.facts.training
    # Where a parameter is tied, torch knows it by its first name alone.
    later = {use.name for group in model.split.tied for use in group.uses[1:]}
    shapes = map(model.split.parameter_shapes, range(model.split.num_layers))
    trials = [
        (name, nn.Parameter(torch.zeros((1,) * len(shape))))
        for layer in shapes
        for name, shape in layer.items()
        if name not in later
    ]
    rate = learning_rate(training, model.manifest.iteration)
    # How planaria computes the steps is no matter of whoever reads this.
    free = {"foreach": None, "fused": None}
    return [
        {**group, **{key: free[key] for key in free if key in group}}
        | {"lr": rate, "params": group["param_names"]}
        for group in optimizer_factory(training)(trials).param_groups
    ]
