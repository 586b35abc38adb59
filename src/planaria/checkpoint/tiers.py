"""The disk tier: whole versions of a job's state as safetensors files and one manifest.

    {directory}/{iteration}-{epoch}/layer-00003.safetensors     "parameter/{name}",
                                                                "optimizer/{name}/{state}"
    {directory}/{iteration}-{epoch}/manifest.json               created last, and once

A version exists when its manifest does. Layers are written by whoever holds them, each under a
temporary name, synced and renamed; then one process publishes the manifest by a hard link, which
fails if there is one already. A crash at any instant therefore leaves a version that is complete
or one that no reader looks at. Every file is hashed from the bytes in memory before it is
written, and checked against that hash when it is read.

Differs: a layer is laid out in memory before it is written, so writing costs its bytes once more;
in return the hash is of what was meant, not of what the disk made of it.
"""

import errno
import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash
from safetensors import SafetensorError, TensorSpec, deserialize, serialize

from planaria.core.messages import LayerFile
from planaria.errors import CheckpointError

# numpy has no bfloat16: an array of this type carries its bits, a.view(np.uint16) shows them.
BFLOAT16 = np.dtype([("bfloat16", "<u2")])

_DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": BFLOAT16,
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
    "C64": np.dtype("<c8"),
}
_MANIFEST = "manifest.json"
_VERSION_NAME = re.compile(r"(0|[1-9]\d*)-(0|[1-9]\d*)", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a version holds.

    Attributes:
        iteration: the number of iterations that made this state.
        epoch: the plan epoch in which it was saved.
        job: what identifies the model and its optimizer; the caller's, compared by the caller.
        layers: one file per layer; empty only at iteration 0, which means: start from the seed.
    """

    version: int = 1
    iteration: int
    epoch: int
    job: Mapping[str, Any]
    layers: tuple[LayerFile, ...]


@dataclass(frozen=True, slots=True)
class Version:
    """A directory of the tier: complete with its manifest, or without one and why."""

    iteration: int
    epoch: int
    directory: Path
    manifest: Manifest | None
    reason: str


@dataclass(frozen=True, slots=True)
class DiskTier:
    """Versions of one job's state below `directory`, which is made when first written to."""

    directory: Path

    def write_layer(
        self,
        iteration: int,
        epoch: int,
        layer: int,
        tensors: Mapping[str, np.ndarray],
        *,
        may_write: Callable[[], bool] = lambda: True,
    ) -> LayerFile:
        """Writes and syncs one layer of an unpublished version; again replaces it.

        Args:
            may_write: whether the writer still belongs to the job; asked before each step.

        Raises:
            CheckpointError: the version is published already, the disk refused, or the writer may
                not write any more; nothing half-written is left then.
        """
        directory = self._version_directory(iteration, epoch)
        path = directory / _layer_file_name(layer)
        if (directory / _MANIFEST).exists():
            raise CheckpointError(f"cannot write {path}: its version is published and final")
        content = _serialized(tensors)
        _check_member(path, may_write)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            _write_whole(path, content, may_write=may_write)
        except OSError as error:
            raise _write_error(path, error) from error
        return LayerFile(layer, path.name, len(content), xxhash.xxh3_128_hexdigest(content))

    def publish(self, manifest: Manifest) -> Path:
        """Makes a version exist, once all its layers are written; returns its directory.

        Raises:
            CheckpointError: it is published already, a layer is missing, or the disk refused.
        """
        assert manifest.layers or manifest.iteration == 0
        directory = self._version_directory(manifest.iteration, manifest.epoch)
        path = directory / _MANIFEST
        try:
            directory.mkdir(parents=True, exist_ok=True)
            reason = _missing_files(directory, manifest)
            if reason:
                raise CheckpointError(f"cannot publish {path}: {reason}; write that layer again")
            _create_once(path, msgspec.json.format(msgspec.json.encode(manifest)))
            _sync_directory(self.directory)
        except FileExistsError as error:
            raise CheckpointError(f"{path} exists: this version is published already") from error
        except OSError as error:
            raise _write_error(path, error) from error
        return directory

    def versions(self) -> tuple[Version, ...]:
        """Every version directory, newest first by (iteration, epoch), complete or not."""
        if not self.directory.is_dir():
            return ()
        numbers = [
            (int(match[1]), int(match[2]))
            for entry in self.directory.iterdir()
            if (match := _VERSION_NAME.fullmatch(entry.name))
        ]
        return tuple(self._version(*number) for number in sorted(numbers, reverse=True))

    def newest(self) -> Manifest | None:
        """The newest complete version; its hashes are checked when its layers are read."""
        return next((v.manifest for v in self.versions() if v.manifest is not None), None)

    def read_layer(self, manifest: Manifest, layer: int) -> dict[str, np.ndarray]:
        """One layer's tensors by name, in memory of their own.

        Raises:
            CheckpointError: the file is gone, cut short or changed, or the layer is not in it.
        """
        entry = next((entry for entry in manifest.layers if entry.layer == layer), None)
        directory = self._version_directory(manifest.iteration, manifest.epoch)
        if entry is None:
            raise CheckpointError(f"{directory / _MANIFEST} has no layer {layer}")
        path = directory / entry.file
        try:
            content = path.read_bytes()
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
        if len(content) != entry.num_bytes:
            raise CheckpointError(
                f"{path} has {len(content)} bytes instead of {entry.num_bytes}: it was cut or "
                "replaced; use an older version"
            )
        if xxhash.xxh3_128_hexdigest(content) != entry.xxh3_128:
            raise CheckpointError(f"{path} is not what was written to it; use an older version")
        return _deserialized(path, content)

    def prune(self, keep: int) -> tuple[Path, ...]:
        """Removes what is no longer needed and returns those directories, oldest first.

        That is the complete versions beyond the `keep` newest (0: none of them), and the
        directories without a manifest that are older than the newest complete version: nobody
        finishes them any more. One whose manifest cannot be read stays, for a person to look at.

        Raises:
            CheckpointError: the disk refused.
        """
        assert keep >= 0
        versions = self.versions()
        complete = [index for index, version in enumerate(versions) if version.manifest]
        if not complete:
            return ()
        surplus = set(complete[keep:]) if keep else set()
        abandoned = {
            index
            for index, version in enumerate(versions)
            if index > complete[0] and not (version.directory / _MANIFEST).exists()
        }
        doomed = [versions[index].directory for index in sorted(surplus | abandoned, reverse=True)]
        for directory in doomed:
            _remove_version(directory)
        return tuple(doomed)

    def discard(self, iteration: int, epoch: int) -> None:
        """Removes an unpublished version, if it is there.

        Raises:
            CheckpointError: it is published, or the disk refused.
        """
        directory = self._version_directory(iteration, epoch)
        if (directory / _MANIFEST).exists():
            raise CheckpointError(f"cannot discard {directory}: it is published; prune removes it")
        if directory.exists():
            _remove_version(directory)

    def _version_directory(self, iteration: int, epoch: int) -> Path:
        assert iteration >= 0
        assert epoch >= 0
        return self.directory / f"{iteration}-{epoch}"

    def _version(self, iteration: int, epoch: int) -> Version:
        directory = self._version_directory(iteration, epoch)
        try:
            manifest = msgspec.json.decode((directory / _MANIFEST).read_bytes(), type=Manifest)
            reason = _unusable(directory, manifest)
        except FileNotFoundError:
            return Version(iteration, epoch, directory, None, "no manifest: never published")
        except OSError as error:
            return Version(iteration, epoch, directory, None, f"cannot read it: {error.strerror}")
        except msgspec.DecodeError as error:
            return Version(iteration, epoch, directory, None, f"bad manifest: {error}")
        return Version(iteration, epoch, directory, None if reason else manifest, reason)


def _unusable(directory: Path, manifest: Manifest) -> str:
    """Why a decoded manifest cannot be used; empty if it can."""
    if manifest.version != 1:
        return f"its format is version {manifest.version}, this planaria reads version 1"
    if f"{manifest.iteration}-{manifest.epoch}" != directory.name:
        return f"its manifest is of {manifest.iteration}-{manifest.epoch}"
    if not manifest.layers and manifest.iteration > 0:
        return "its manifest lists no layers"
    return _missing_files(directory, manifest)


def _missing_files(directory: Path, manifest: Manifest) -> str:
    """Which layer's file is not there as listed; empty if all are."""
    for entry in manifest.layers:
        # A name of any other form could lead out of the directory.
        if entry.file != _layer_file_name(entry.layer):
            return f"layer {entry.layer} has the file name {entry.file!r}"
        path = directory / entry.file
        if not path.is_file():
            return f"{entry.file} is missing"
        if path.stat().st_size != entry.num_bytes:
            return f"{entry.file} has {path.stat().st_size} bytes instead of {entry.num_bytes}"
    return ""


def _layer_file_name(layer: int) -> str:
    return f"layer-{layer:05d}.safetensors"


def _serialized(tensors: Mapping[str, np.ndarray]) -> bytes:
    arrays = {name: _plain(array) for name, array in tensors.items()}
    specs = {
        name: TensorSpec(
            dtype="bfloat16" if array.dtype == BFLOAT16 else array.dtype.name,
            shape=array.shape,
            data_ptr=array.ctypes.data,
            data_len=array.nbytes,
        )
        for name, array in arrays.items()
    }
    return serialize(specs)


def _plain(array: np.ndarray) -> np.ndarray:
    """The array in C order and little-endian, which is how the file has it."""
    assert array.dtype.newbyteorder("<") in _DTYPES.values(), array.dtype
    return np.asarray(array, dtype=array.dtype.newbyteorder("<"), order="C")


def _deserialized(path: Path, content: bytes) -> dict[str, np.ndarray]:
    try:
        # The stubs of safetensors leave this one function untyped.
        tensors = deserialize(content)  # type: ignore[no-untyped-call]
        return {
            name: np.frombuffer(tensor["data"], _DTYPES[tensor["dtype"]]).reshape(tensor["shape"])
            for name, tensor in tensors
        }
    except (SafetensorError, KeyError) as error:
        raise CheckpointError(f"{path} is no safetensors file of planaria: {error}") from error


def _check_member(path: Path, may_write: Callable[[], bool]) -> None:
    if not may_write():
        raise CheckpointError(f"{path} is not written: the node's lease has run out")


def _write_whole(path: Path, content: bytes, *, may_write: Callable[[], bool]) -> None:
    """Puts content at path, on the disk, or leaves path as it was."""
    partial = _partial(path)
    try:
        _write_synced(partial, content)
        _check_member(path, may_write)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    _sync_directory(path.parent)


def _create_once(path: Path, content: bytes) -> None:
    """Puts content at path, on the disk; FileExistsError if there is anything."""
    partial = _partial(path)
    try:
        _write_synced(partial, content)
        os.link(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    _sync_directory(path.parent)


def _partial(path: Path) -> Path:
    """A name beside path that no other writer has; process ids repeat on a shared disk."""
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(directory: Path) -> None:
    """A new name is durable only when the directory that holds it is synced."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_version(directory: Path) -> None:
    """Removes a version, its manifest first: what a crash leaves is not complete any more."""
    try:
        with suppress(FileNotFoundError):
            (directory / _MANIFEST).unlink()
            _sync_directory(directory)
        shutil.rmtree(directory)
    except OSError as error:
        raise CheckpointError(f"cannot remove {directory}: {error.strerror}") from error


def _write_error(path: Path, error: OSError) -> CheckpointError:
    remedies = {
        errno.ENOSPC: "free space there, or set checkpoint.directory to a larger disk",
        errno.EDQUOT: "free some of the quota, or set checkpoint.directory to another disk",
        errno.EACCES: "make it writable, or set checkpoint.directory to a place that is",
        errno.EROFS: "it is read-only: set checkpoint.directory to a place that is not",
        errno.EPERM: "set checkpoint.directory to a file system with hard links",
    }
    remedy = remedies.get(error.errno or 0, "set checkpoint.directory to a healthy disk")
    return CheckpointError(
        f"cannot write {path}: {error.strerror}; {remedy} (older versions are intact)"
    )
