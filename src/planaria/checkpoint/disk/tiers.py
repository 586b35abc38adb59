"""The durable checkpoint tier, on disk or in an object store.

A version of a job's state is one safetensors file for each layer, and a manifest:

    {directory}/{iteration}-{epoch}/layer-00003.safetensors     "parameter/{name}",
                                                                "optimizer/{name}/{state}";
                                                                of the last layer perhaps
                                                                "held_out/losses"
    {directory}/{iteration}-{epoch}/kept                        if the user keeps it for good
    {directory}/{iteration}-{epoch}/manifest.json               created last, and once

A version exists when its manifest exists. Each layer is written by a rank that holds it; its file
exists completely or not at all. Then one process publishes the manifest, which fails if there is
one already (storage.py: on disk a hard link ensures that, in a store a condition of the request). A
crash at any instant therefore leaves either a complete version or one that no reader looks at.
Every file is hashed from the bytes in memory before it is written, and checked against that hash
when it is read.

A layer is written from the tensors themselves. The hash covers what was to be written, not what the
disk made of it.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import xxhash

from planaria.checkpoint.disk.storage import (
    VERSION_NAME,
    Content,
    ContentInfo,
    Storage,
    check_member,
    digest_of,
    storage_of,
)
from planaria.core.copies import version_name
from planaria.core.messages import LayerFile
from planaria.errors import CheckpointError, LateError, UnreadableError

# numpy has no bfloat16: an array of this type holds its bits, which a.view(np.uint16) shows.
BFLOAT16 = np.dtype([("bfloat16", "<u2")])

# In the order in which the library lays tensors out.
_DTYPES: dict[str, np.dtype[Any]] = {
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F64": np.dtype("<f8"),
    "C64": np.dtype("<c8"),
    "F32": np.dtype("<f4"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "BF16": BFLOAT16,
    "F16": np.dtype("<f2"),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
_RANKS = {name: number for number, name in enumerate(_DTYPES)}
_SIZE_BYTES = 8  # At the beginning of a safetensors file, the size of its header.
_ALIGNMENT = 8
_MANIFEST = "manifest.json"
_DAMAGED = "damaged.json"
_KEPT = "kept"
UNPUBLISHED = "it has no manifest, so its save was never completed"
SET_ASIDE = "it was damaged, and set aside"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The table of contents of a version.

    Attributes:
        version: version of the manifest's format.
        iteration: number of iterations that made this state.
        epoch: epoch in which it was saved.
        job: facts that identify the model and its optimizer; the caller sets and compares them.
        layers: one file per layer; empty only at iteration 0, which means: start from the seed.
    """

    version: int = 1
    iteration: int
    epoch: int
    job: Mapping[str, Any]
    layers: tuple[LayerFile, ...]


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run begins.

    Attributes:
        manifest: checkpoint to go on from; None: the job begins anew.
        epoch: the first epoch, which no version has. A damaged one must not change either, so
            saves of the same name could not be written.
    """

    manifest: Manifest | None = None
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class SavedVersion:
    """A version that the tier has at least one file of.

    Attributes:
        manifest: its manifest; None: the version is not complete.
        reason: why the version is not complete; empty: it is.
        error: the error with which its manifest, which exists, could not be read now: the version
            may prove complete another time. None: there was none.
        is_kept: whether the user keeps it for good.
        num_bytes: size of all its files.
        modified_s: time at which the last of them was written, in seconds since 1970.
    """

    iteration: int
    epoch: int
    manifest: Manifest | None
    reason: str
    error: UnreadableError | None = None
    is_kept: bool = False
    num_bytes: int = 0
    modified_s: float = 0.0

    @property
    def name(self) -> str:
        """The name of its directory."""
        return version_name(self.iteration, self.epoch)

    @property
    def is_unreadable(self) -> bool:
        """Whether its manifest could not be read now."""
        return self.error is not None


def newest_complete(versions: Iterable[SavedVersion]) -> Manifest | None:
    """The manifest of the first complete version; None if there is none.

    Args:
        versions: versions of a tier, the newest first.

    Raises:
        UnreadableError: a newer version cannot be read now, and may be complete.
    """
    for version in versions:
        if version.error is not None:
            raise version.error
        if version.manifest is not None:
            return version.manifest
    return None


def tier_of(place: str) -> "Tier":
    """The tier at a directory or the URL of an object store.

    Raises:
        ConfigError: the URL names no store that can be used.
    """
    return Tier(storage_of(place))


@dataclass(frozen=True, slots=True)
class Tier:
    """Versions of one job's state. All methods raise a CheckpointError if the storage refuses.

    Only one job at a time may read or write a tier.

    Attributes:
        is_by_epoch: whether the newest version is that of the newest epoch, and not that of the
            most iterations.
    """

    storage: Storage
    is_by_epoch: bool = False

    def where(self, iteration: int, epoch: int) -> str:
        """The place of a version, as people name it."""
        return self.storage.where(version_name(iteration, epoch))

    def write_layer(
        self,
        iteration: int,
        epoch: int,
        layer: int,
        tensors: Mapping[str, np.ndarray],
        *,
        may_write: Callable[[], bool] = lambda: True,
    ) -> LayerFile:
        """Writes one layer of an unpublished version; replaces the layer if it was written before.

        Args:
            may_write: whether the writer still belongs to the job; asked before each step.

        Raises:
            CheckpointError: the version is published already, or the writer may not write any more;
                no incomplete file is left then.
        """
        version, file = version_name(iteration, epoch), _layer_file_name(layer)
        name = f"{version}/{file}"
        if self.is_published(iteration, epoch):
            where = self.storage.where(name)
            raise CheckpointError(
                f"cannot write {where}: its version is complete and must not change"
            )
        content = safetensors_content(tensors)
        digest = digest_of(content)
        check_member(self.storage.where(name), may_write)
        self.storage.write(name, content, may_write=may_write)
        return LayerFile(layer, file, *digest)

    def publish(self, manifest: Manifest) -> None:
        """Makes a version complete by writing its manifest; all its layers must be written.

        Idempotent, since a caller whose answer was lost asks again.

        Raises:
            CheckpointError: another manifest exists already, or a layer is missing.
        """
        assert manifest.layers or manifest.iteration == 0
        version = version_name(manifest.iteration, manifest.epoch)
        name = f"{version}/{_MANIFEST}"
        where = self.storage.where(name)
        if reason := _missing_files(self.storage.entries(version), version, manifest):
            raise CheckpointError(f"cannot publish {where}: {reason}; write that layer again")
        content = msgspec.json.format(msgspec.json.encode(manifest))
        if not self.storage.create(name, content):
            raise CheckpointError(
                f"{self.storage.where(version)} belongs to another job, which has "
                "completed it; set checkpoint.directory of one of the two jobs to another "
                "place"
            )

    def keep(self, iteration: int, epoch: int) -> None:
        """Marks a version, before it is published, as one that no pruning removes."""
        self.storage.create(f"{version_name(iteration, epoch)}/{_KEPT}", b"by the user\n")

    def versions(self) -> tuple[SavedVersion, ...]:
        """All versions that have at least one file, newest first."""
        return tuple(self.each_version())

    def each_version(self) -> Iterator[SavedVersion]:
        """Yields what `versions` returns; reads a manifest only when its version is asked for."""
        for iteration, epoch, entries in self._each_contents():
            yield self._version(iteration, epoch, entries)

    def next_epoch(self) -> int:
        """The first epoch after those of all versions, also of incomplete ones."""
        return 1 + max((epoch for _, epoch, _ in self._each_contents()), default=-1)

    def is_published(self, iteration: int, epoch: int) -> bool:
        """Whether a version has a manifest, though it may be damaged."""
        version = version_name(iteration, epoch)
        return f"{version}/{_MANIFEST}" in self.storage.entries(version)

    def _each_contents(self) -> Iterator[tuple[int, int, Mapping[str, ContentInfo]]]:
        """Yields iteration, epoch and contents of all versions, newest first."""
        contents: dict[tuple[int, int], dict[str, ContentInfo]] = {}
        for name, entry in self.storage.entries("").items():
            if match := VERSION_NAME.fullmatch(name.partition("/")[0]):
                contents.setdefault((int(match[1]), int(match[2])), {})[name] = entry
        step = -1 if self.is_by_epoch else 1
        for numbers in sorted(contents, key=lambda each: each[::step], reverse=True):
            yield (*numbers, contents[numbers])

    def manifest(self, version: str) -> Manifest:
        """The manifest of a complete version, given its name.

        Raises:
            CheckpointError: the version is not complete.
        """
        try:
            return self._manifest(version, self.storage.entries(version))
        except UnreadableError:
            raise
        except CheckpointError as error:
            where = self.storage.where(version)
            raise CheckpointError(f"{where} is not complete any more: {error}") from error

    def newest(self) -> Manifest | None:
        """The manifest of the newest complete version; None if there is none.

        The hashes of layers are checked when these are read, not here.

        Raises:
            UnreadableError: a newer version cannot be read now, and may be complete.
        """
        return newest_complete(self.each_version())

    def read_layer(self, manifest: Manifest, layer: int) -> dict[str, np.ndarray]:
        """One layer's tensors by name, in memory of their own.

        Raises:
            CheckpointError: the manifest has no such layer, or its file is gone, cut short or
                changed.
        """
        return tensors_in(*self._layer_content(manifest, layer))

    def check(self, version: str, layer: int) -> None:
        """Reads a layer of a complete version as far as to its hash; layer -1: the manifest alone.

        Raises:
            CheckpointError: it is not what was saved; an UnreadableError if it might be read
                another time.
        """
        manifest = self.manifest(version)
        if layer >= 0 and all(entry.layer != layer for entry in manifest.layers):
            # Nothing is damaged, so it must not be set aside.
            raise UnreadableError(f"it has no layer {layer}, so it is of another model")
        if layer >= 0:
            self._layer_content(manifest, layer)

    def _layer_content(self, manifest: Manifest, layer: int) -> tuple[str, bytes]:
        """The place of a layer's file, and its content, which is what was written."""
        entry = next((entry for entry in manifest.layers if entry.layer == layer), None)
        version = version_name(manifest.iteration, manifest.epoch)
        if entry is None:
            where = self.storage.where(f"{version}/{_MANIFEST}")
            raise CheckpointError(f"{where} has no layer {layer}")
        name = f"{version}/{entry.file}"
        where, content = self.storage.where(name), self.storage.read(name)
        if len(content) != entry.num_bytes:
            raise CheckpointError(
                f"{where} has {len(content)} bytes instead of {entry.num_bytes}, so it was "
                "cut or replaced; use an older version"
            )
        if xxhash.xxh3_128_hexdigest(content) != entry.xxh3_128:
            raise CheckpointError(
                f"{where} does not hold what was written to it; use an older version"
            )
        return where, content

    def prune(self, keep: int, *, unused: Collection[str] = ()) -> tuple[str, ...]:
        """Removes what `each_pruned` removes and returns the names, oldest first."""
        return tuple(self.each_pruned(keep, unused=unused))

    def each_pruned(self, keep: int, *, unused: Collection[str] = ()) -> Iterator[str]:
        """Removes versions that are no longer needed; yields the name of each, the oldest first.

        These are the complete versions beyond the `keep` newest, and the versions without a
        manifest that are older than the newest complete one: nobody finishes them any more. A
        version that the user keeps for good, that was set aside, or that cannot be read now does
        not count among the `keep` newest, and stays. Reads `keep` manifests (one if `keep` is 0),
        and one more for each complete version removed.

        Args:
            keep: number of complete versions to keep; 0: all of them.
            unused: names of versions whose layers could not be read, though their manifests can;
                they are kept and not counted.

        Raises:
            CheckpointError: the first version that cannot be removed; the others are removed before
                it is raised.
        """
        assert keep >= 0
        doomed, num_complete = [], 0
        for iteration, epoch, entries in self._each_contents():
            name = version_name(iteration, epoch)
            is_published = f"{name}/{_MANIFEST}" in entries
            if not is_published and num_complete and f"{name}/{_DAMAGED}" not in entries:
                doomed.append(name)
            if not is_published or name in unused or (num_complete and not keep):
                continue
            if f"{name}/{_KEPT}" in entries:
                continue
            if self._version(iteration, epoch, entries).manifest is not None:
                num_complete += 1
                if 0 < keep < num_complete:
                    doomed.append(name)
        doomed.reverse()
        refusals = []
        for name in doomed:
            try:
                self._remove(name)
            except CheckpointError as error:
                refusals.append(error)
            else:
                yield name
        if refusals:
            raise refusals[0]

    def discard(self, iteration: int, epoch: int) -> None:
        """Removes an unpublished version; does nothing if it does not exist.

        Raises:
            CheckpointError: the version is published.
        """
        version = version_name(iteration, epoch)
        if self.is_published(iteration, epoch):
            where = self.storage.where(version)
            raise CheckpointError(
                f"cannot discard {where}: its version is complete; prune removes it"
            )
        self._remove(version)

    def set_aside(self, version: str) -> None:
        """Makes a damaged version incomplete: its manifest gets another name, its layers stay."""
        name = f"{version}/{_MANIFEST}"
        if name in self.storage.entries(version):
            self.storage.create(f"{version}/{_DAMAGED}", self.storage.read(name))
            self.storage.remove(version, [name])

    def _remove(self, version: str) -> None:
        """Removes a version's manifest first, so that a crash leaves no complete version."""
        names = sorted(self.storage.entries(version), key=_is_layer)
        self.storage.remove(version, names)

    def _version(
        self, iteration: int, epoch: int, entries: Mapping[str, ContentInfo]
    ) -> SavedVersion:
        version = version_name(iteration, epoch)
        manifest, reason, unread = None, "", None
        try:
            manifest = self._manifest(version, entries)
        except LateError:  # A storage that did not answer says nothing about this version.
            raise
        except CheckpointError as error:
            reason, unread = str(error), error if isinstance(error, UnreadableError) else None
        return SavedVersion(
            iteration,
            epoch,
            manifest,
            reason,
            unread,
            is_kept=f"{version}/{_KEPT}" in entries,
            num_bytes=sum(entry.num_bytes for entry in entries.values()),
            modified_s=max(entry.modified_s for entry in entries.values()),
        )

    def _manifest(self, version: str, entries: Mapping[str, ContentInfo]) -> Manifest:
        """The manifest of a version; raises a CheckpointError that says why it cannot be used."""
        if f"{version}/{_MANIFEST}" not in entries:
            is_set_aside = f"{version}/{_DAMAGED}" in entries
            raise CheckpointError(SET_ASIDE if is_set_aside else UNPUBLISHED)
        content = self.storage.read(f"{version}/{_MANIFEST}")
        try:
            manifest = msgspec.json.decode(content, type=Manifest)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise CheckpointError(f"bad manifest: {error}") from error
        if reason := _reason_unusable(version, entries, manifest):
            raise CheckpointError(reason)
        return manifest


def _is_layer(name: str) -> bool:
    return not name.endswith(f"/{_MANIFEST}")


def _reason_unusable(version: str, entries: Mapping[str, ContentInfo], manifest: Manifest) -> str:
    """Why a decoded manifest cannot be used; empty if it can."""
    if manifest.version != 1:
        return f"its format is version {manifest.version}, this planaria reads version 1"
    if version_name(manifest.iteration, manifest.epoch) != version:
        return f"its manifest belongs to version {manifest.iteration}-{manifest.epoch}"
    if not manifest.layers and manifest.iteration > 0:
        return "its manifest lists no layers"
    return _missing_files(entries, version, manifest)


def _missing_files(entries: Mapping[str, ContentInfo], version: str, manifest: Manifest) -> str:
    """The first layer whose file does not exist as listed, in words; empty if all do."""
    for layer in manifest.layers:
        # A name of any other form could lead out of the version.
        if layer.file != _layer_file_name(layer.layer):
            return f"layer {layer.layer} has the file name {layer.file!r}"
        entry = entries.get(f"{version}/{layer.file}")
        if entry is None:
            return f"{layer.file} is missing"
        if entry.num_bytes != layer.num_bytes:
            return f"{layer.file} has {entry.num_bytes} bytes instead of {layer.num_bytes}"
    return ""


def _layer_file_name(layer: int) -> str:
    return f"layer-{layer:05d}.safetensors"


def safetensors_content(
    tensors: Mapping[str, np.ndarray], *, metadata: Mapping[str, str] | None = None
) -> Content:
    """The content of a safetensors file with these tensors, the widest numbers first.

    It is what safetensors.serialize returns, as views of the tensors: nothing is copied.
    """
    arrays = {name: _plain(array) for name, array in tensors.items()}
    names = sorted(arrays, key=lambda name: (_RANKS[_type_name(arrays[name])], name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in names:
        array, first = arrays[name], end
        end += array.nbytes
        described = {"dtype": _type_name(array), "shape": array.shape, "data_offsets": (first, end)}
        header[name] = described
    encoded = msgspec.json.encode(header)
    encoded += b" " * (-len(encoded) % _ALIGNMENT)
    size = len(encoded).to_bytes(_SIZE_BYTES, "little")
    parts = (arrays[name].reshape(-1).view(np.uint8).data for name in names)
    return (memoryview(size + encoded), *parts)


def _plain(array: np.ndarray) -> np.ndarray:
    """The array in C order and little-endian, as safetensors files store it."""
    plain = np.asarray(array, dtype=array.dtype.newbyteorder("<"), order="C")
    assert plain.dtype in _DTYPES.values(), array.dtype
    return plain


def _type_name(array: np.ndarray) -> str:
    return next(name for name, dtype in _DTYPES.items() if dtype == array.dtype)


def tensors_in(where: str, content: bytes) -> dict[str, np.ndarray]:
    """The tensors of a safetensors file, in memory of their own.

    Args:
        where: place of the file, as people name it.

    Raises:
        CheckpointError: the content is of another format.
    """
    try:
        first = _SIZE_BYTES + int.from_bytes(content[:_SIZE_BYTES], "little")
        header = msgspec.json.decode(content[_SIZE_BYTES:first], type=dict[str, dict[str, Any]])
        header.pop("__metadata__", None)
        return {
            name: np.frombuffer(
                content,
                _DTYPES[entry["dtype"]],
                count=math.prod(entry["shape"]),
                offset=first + entry["data_offsets"][0],
            )
            .reshape(entry["shape"])
            .copy()
            for name, entry in header.items()
        }
    except (msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{where} is not a safetensors file of planaria: {error}") from error


def newest_checkpoint_text(tier: Tier) -> str:
    """The newest checkpoint that a job that ended early has left, in words."""
    try:
        newest = tier.newest()
    except CheckpointError as error:
        return f"the newest checkpoint is not known: {error}"
    if newest is None:
        return "there is no checkpoint"
    return f"the newest checkpoint is of iteration {newest.iteration}; go on from it with --resume"
