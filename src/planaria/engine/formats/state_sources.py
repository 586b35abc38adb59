"""Named tensors in the formats of other tools: what a state is imported from.

A directory of torch.distributed.checkpoint (DCP) has a file `.metadata`, which torch reads with
pickle: what it names is checked before that, so that reading it runs no other code. Its other
files, and safetensors files, hold tensors alone.
"""

import pickle
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from planaria.engine.formats.dcp_export import quiet_torch
from planaria.errors import CheckpointError, ConfigError

_METADATA: Final = ".metadata"
# Modules whose classes describe a checkpoint, and what else a description consists of.
_DESCRIBING: Final = {
    "torch.distributed.checkpoint.metadata",
    "torch.distributed._shard.sharded_tensor.metadata",
}
_PLAIN: Final = {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(("torch", "Size"), ("torch", "device"), ("torch.serialization", "_get_layout")),
    *(("pathlib", "Path"), ("pathlib", "PosixPath"), ("pathlib", "WindowsPath")),
    *(("pathlib", "PurePosixPath"), ("collections", "OrderedDict")),
}


class StateSource(Protocol):
    """Named tensors in a directory."""

    @property
    def names(self) -> Collection[str]:
        """The names of all tensors."""
        ...

    def read(self, names: Collection[str]) -> dict[str, Tensor]:
        """Some of the tensors.

        Raises:
            CheckpointError: a file is damaged, or the disk refuses.
        """
        ...


def state_source(directory: Path) -> StateSource:
    """The tensors of a directory of DCP, or of safetensors files.

    Raises:
        ConfigError: it is neither, or two files have a tensor of the same name.
        CheckpointError: it is damaged, or is no plain checkpoint of DCP.
    """
    if (directory / _METADATA).is_file():
        return _DcpSource(directory, _tensor_entries(directory))
    if files := sorted(directory.glob("*.safetensors")):
        return _SafetensorsSource(_files_by_name(directory, files))
    remedy = (
        "is neither a directory of torch.distributed.checkpoint, with a file .metadata, nor one "
        "with *.safetensors"
    )
    raise ConfigError("SOURCE", str(directory), remedy)


@dataclass(frozen=True, slots=True)
class _DcpSource:
    directory: Path
    entries: Mapping[str, TensorStorageMetadata]

    @property
    def names(self) -> Collection[str]:
        return self.entries.keys()

    def read(self, names: Collection[str]) -> dict[str, Tensor]:
        state = {
            name: torch.empty(self.entries[name].size, dtype=self.entries[name].properties.dtype)
            for name in names
        }
        if state:
            with quiet_torch(f"cannot read {self.directory}"):
                load(state, storage_reader=FileSystemReader(self.directory), no_dist=True)
        return state


@dataclass(frozen=True, slots=True)
class _SafetensorsSource:
    files: Mapping[str, Path]

    @property
    def names(self) -> Collection[str]:
        return self.files.keys()

    def read(self, names: Collection[str]) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for path in {self.files[name] for name in names}:
            try:
                with safe_open(path, framework="pt") as file:
                    own = [name for name in names if self.files[name] == path]
                    tensors |= {name: file.get_tensor(name) for name in own}
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"cannot read {path}: {error}") from error
        return tensors


class _MetadataUnpickler(pickle.Unpickler):
    """Refuses everything that does not describe a checkpoint."""

    def find_class(self, module: str, name: str, /) -> Any:
        """The class or constant of this name; see pickle.Unpickler."""
        if (module, name) in _PLAIN or (module in _DESCRIBING and name.isidentifier()):
            value = super().find_class(module, name)
            if (module, name) in _PLAIN or getattr(value, "__module__", "") == module:
                return value
        if module == "torch" and isinstance(
            value := getattr(torch, name, None), torch.dtype | torch.layout | torch.memory_format
        ):
            return value
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _tensor_entries(directory: Path) -> dict[str, TensorStorageMetadata]:
    """The tensors that a checkpoint of DCP lists, by name."""
    path = directory / _METADATA
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"it is a {type(metadata).__name__}")
    except (
        OSError,
        EOFError,
        AttributeError,
        ImportError,
        ValueError,
        pickle.PickleError,
    ) as error:
        raise CheckpointError(
            f"{path} does not describe a checkpoint of torch.distributed.checkpoint: {error}"
        ) from error
    return {
        name: entry
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def _files_by_name(directory: Path, files: Sequence[Path]) -> dict[str, Path]:
    """The file of each tensor, by the tensor's name."""
    by_name: dict[str, Path] = {}
    for path in files:
        for name in _names_in(path):
            if (other := by_name.setdefault(name, path)) != path:
                remedy = (
                    f"{other.name} and {path.name} both have {name}, and only one of them can be "
                    "meant; name a directory with that one alone"
                )
                raise ConfigError("SOURCE", str(directory), remedy)
    return by_name


def _names_in(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
