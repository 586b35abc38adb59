"""The tier behind memory, for scripts with their own training loop: a directory or object store.

Some complete versions in memory are written there, one safetensors file for each shard, and a
manifest last (checkpoint/disk/tiers.py). Each rank writes its own shard from its memory of copies,
in a thread; of a version that was restored it writes some of those that it keeps. What it writes
stays in memory until then, so its own shard takes memory once more. Rank 0 hears from all others
how that went, and publishes the version. Training waits for none of this: a version that is due
while an older one is still being written is left out.

The newest version is that of the run that began last, as in memory.
"""

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec
import numpy as np

from planaria.checkpoint.disk.storage import absolute, storage_of
from planaria.checkpoint.disk.tiers import BFLOAT16, SET_ASIDE, UNPUBLISHED, Manifest, Tier
from planaria.checkpoint.disk.time_limits import TimeLimitedStorage
from planaria.checkpoint.memory.arena import Arena
from planaria.checkpoint.memory.filling import (
    HostCopy,
    fill_alone,
    no_device,
    no_virtual_bytes,
)
from planaria.checkpoint.memory.stream import OwnCopies
from planaria.checkpoint.memory.wire import State, state_of
from planaria.core.copies import Label, version_name
from planaria.core.messages import LayerFile
from planaria.errors import AbortedError, CheckpointError, PeerLostError, UnreadableError
from planaria.torchrun.shards import HEAD, Shard
from planaria.transport.links import UNLIMITED_S, Channel, Links, Tag

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_KIND: Final = "MemoryCheckpointer"
_PIECE_BYTES: Final = 16 << 20  # Of a version that is brought back to memory.
_NOTHING: Final = np.zeros(1, dtype=np.uint8)
# Fields of tags, beside the 0 of messages about shards that are written.
_READY: Final = 1
_ALL_READY: Final = 2
_READ_TIMEOUT_S: Final = 60.0  # Of a request to the disk or store; a read of much gets more.
# The types of tensors that safetensors files have; others are written as bytes.
_DTYPES: Final[Mapping[str, np.dtype[Any]]] = {
    "bfloat16": BFLOAT16,
    **{
        name: np.dtype(name)
        for name in (
            *("float64", "float32", "float16", "complex64", "bool"),
            *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
        )
    },
}


class _WrittenShards(msgspec.Struct, frozen=True):
    """A rank's message to rank 0 about the shards that it writes.

    Attributes:
        files: their files.
        reason: why they are not written, in words; empty: they are.
    """

    files: tuple[LayerFile, ...] = ()
    reason: str = ""


class KnownSaves(msgspec.Struct, frozen=True):
    """The versions behind memory, as far as they are known.

    Attributes:
        labels: labels of the complete ones, newest first.
        unread: epoch and iteration of the newest one that could not be read now and may be
            complete; None: there is none.
        problem: why there may be other complete ones, in words; empty: there are none.
        is_listed: whether the epochs of all of them are known.
    """

    labels: tuple[Label, ...] = ()
    unread: tuple[int, int] | None = None
    problem: str = ""
    is_listed: bool = True


class BroughtShards(msgspec.Struct, frozen=True):
    """A rank's message to all others about the shards that it brings to memory.

    Attributes:
        reason: why that failed, in words; empty: it did not.
        is_passing: whether it may succeed another time.
    """

    reason: str = ""
    is_passing: bool = False


class PersistentTier:
    """One rank's part in the saves of versions on a disk or in an object store.

    Args:
        place: directory or URL, the same on all ranks.
        keep: number of complete saves to keep; 0: all of them.

    Raises:
        ConfigError: the URL names no store that can be used.
    """

    def __init__(self, place: str, *, keep: int) -> None:
        self.place = absolute(place)
        self._keep = keep
        storage = storage_of(self.place)
        self._tier = Tier(storage, is_by_epoch=True)
        self._read_tier = Tier(TimeLimitedStorage(storage, timeout_s=_READ_TIMEOUT_S), True)
        self._thread: threading.Thread | None = None
        self._begun: Label | None = None  # The label whose save was begun last.
        self._saved: Label | None = None  # The newest label whose save has ended well, here.

    # -- saving -----------------------------------------------------------------------------------

    @property
    def is_writing(self) -> bool:
        """Whether a version is still being written."""
        return self._thread is not None and self._thread.is_alive()

    def write(
        self, links: Links, arenas: Sequence[Arena], label: Label, *, writers: Mapping[int, int]
    ) -> None:
        """Begins to write a complete version, on all `writers` and on rank 0; `wait` ends before.

        Args:
            arenas: arenas that this rank can read.
            writers: rank that writes each shard, by shard.
        """
        self._begun = label
        own = [shard for shard, rank in writers.items() if rank == links.rank]
        for arena in arenas:
            arena.hold(label, layers=own)
        arguments = links, tuple(arenas), label, writers
        self._thread = threading.Thread(
            target=self._write, args=arguments, name="persist", daemon=True
        )
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> None:
        """Blocks until no version is being written, or until the time is over."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    @property
    def has_failed(self) -> bool:
        """Whether this rank's part in the save that was begun last has not ended well so far."""
        return self._saved != self._begun

    def has_saved(self, label: Label) -> bool:
        """Whether this rank's part in the save of a version has ended well."""
        return self._saved == label

    def note_saved(self, label: Label) -> None:
        """Notes that a version is complete there, which another run has saved."""
        self._begun = self._saved = label

    def forget_saves(self) -> None:
        """Forgets how saves of an earlier group ended: its rank 0 may have published none."""
        self._begun = self._saved = None

    def _write(
        self, links: Links, arenas: Sequence[Arena], label: Label, writers: Mapping[int, int]
    ) -> None:
        try:
            shards = sorted(shard for shard, rank in writers.items() if rank == links.rank)
            written = self._write_shards(arenas, label, shards)
            tag = Tag(Channel.SAVED, label.age, 0, 0)
            reason = written.reason
            if not links.rank:
                reason = self._publish(links, label, tag, {*writers.values()}, written)
            elif shards:
                links.send(0, tag, np.frombuffer(msgspec.json.encode(written), dtype=np.uint8))
            if not reason:
                self._saved = label
            else:
                logger.warning("iteration %s is not saved: %s", label.age, reason)
        except (AbortedError, PeerLostError) as error:
            logger.warning("iteration %s is not saved: %s", label.age, error)
        finally:
            for arena in arenas:
                arena.release(label)

    def _write_shards(
        self, arenas: Sequence[Arena], label: Label, shards: Collection[int]
    ) -> _WrittenShards:
        files = []
        try:
            if shards and self._tier.is_published(label.age, label.epoch):
                # Perhaps by an earlier try that did not learn of it: then nothing is left to write.
                there = self._tier.manifest(version_name(label.age, label.epoch))
                if there.job == _job_of(label):
                    return _WrittenShards(tuple(f for f in there.layers if f.layer in shards))
            for shard in shards:
                arena = next((a for a in arenas if label in a.versions().get(shard, ())), arenas[0])
                tensors = _typed_tensors(state_of(arena.read(shard, label)))
                files.append(self._tier.write_layer(label.age, label.epoch, shard, tensors))
        except Exception as error:  # Whatever it is, rank 0 waits for this rank's message.
            return _WrittenShards(reason=_text(error))
        return _WrittenShards(tuple(files))

    def _publish(
        self, links: Links, label: Label, tag: Tag, writers: Collection[int], own: _WrittenShards
    ) -> str:
        """Publishes a version once all shards are written; returns why not, empty if it did."""
        written = [own]
        for rank in sorted({*writers} - {links.rank}):
            raw = links.receive(rank, tag, timeout_s=UNLIMITED_S)
            written.append(msgspec.json.decode(raw.tobytes(), type=_WrittenShards))
        if reason := next((each.reason for each in written if each.reason), ""):
            return reason
        files = sorted((f for each in written for f in each.files), key=lambda f: f.layer)
        if [file.layer for file in files] != list(range(label.since)):
            return f"memory has {len(files)} of its {label.since} shards"
        manifest = Manifest(
            iteration=label.age,
            epoch=label.epoch,
            job=_job_of(label),
            layers=tuple(files),
        )
        try:
            self._tier.publish(manifest)
        except Exception as error:
            return _text(error)
        try:
            self._tier.prune(self._keep)
        except Exception as error:  # The next save tries it again.
            logger.warning("older saves in %s are not removed: %s", self.place, _text(error))
        return ""

    def claim(self, name: str, owner: str) -> bool:
        """Whether `owner` is the first that claims a name at this place."""
        try:
            return self._tier.storage.create(f".claims/{name}", owner.encode())
        except CheckpointError as error:
            logger.warning("%s cannot be claimed in %s: %s", name, self.place, error)
            return False

    # -- reading ----------------------------------------------------------------------------------

    def saves(self) -> KnownSaves:
        """The versions that are there; it is logged why some are not used."""
        labels, unread, problem = [], None, ""
        try:
            for version in self._read_tier.each_version():
                if version.manifest is None and version.reason not in (UNPUBLISHED, SET_ASIDE):
                    where = self._tier.where(version.iteration, version.epoch)
                    logger.warning("a save is not used, %s: %s", where, version.reason)
                    if unread is None and version.is_unreadable:
                        unread, problem = (version.epoch, version.iteration), ""
                    problem = problem or f"{where}: {version.reason}"
                elif version.manifest and version.manifest.job.get("kind") == _KIND:
                    labels.append(_label_of(version.manifest))
        except CheckpointError as error:
            return KnownSaves(problem=str(error), is_listed=False)
        return KnownSaves(tuple(labels), unread, problem if unread or not labels else "")

    def bring(self, arena: Arena, label: Label, shards: Collection[int]) -> BroughtShards:
        """Brings shards of a version to memory; returns how that went."""
        copies = OwnCopies(HostCopy(arena, fill_alone, no_virtual_bytes, no_device))
        try:
            manifest = self._read_tier.manifest(version_name(label.age, label.epoch))
            for shard in sorted(shards):
                tensors = self._read_tier.read_layer(manifest, shard)
                state = {name: _bytes(array) for name, array in tensors.items()}
                version = copies.copy_layer(shard, label, state, _PIECE_BYTES)
                copies.finish_and_compare(version, None)
        except CheckpointError as error:
            return BroughtShards(str(error), isinstance(error, UnreadableError))
        return BroughtShards()


def unread_error(reason: str) -> CheckpointError:
    """The error where a save is newer than all that can be restored, and may be complete."""
    return CheckpointError(
        f"the newest save may be complete, and cannot be read now: {reason}; start the script "
        "again when it can be read, or remove that save to go on from an older one"
    )


def _text(error: Exception) -> str:
    """An error in words, with its type if planaria has not worded it."""
    is_worded = isinstance(error, CheckpointError)
    return str(error) if is_worded else f"{type(error).__name__}: {error}"


def _job_of(label: Label) -> dict[str, Any]:
    """The facts in the manifest of a version that identify it, besides iteration and epoch."""
    return {"kind": _KIND, "shards": label.since, "run": label.run}


def _label_of(manifest: Manifest) -> Label:
    job = manifest.job
    return Label(int(job["shards"]), manifest.epoch, manifest.iteration, int(job["run"]))


def _typed_tensors(state: State) -> dict[str, np.ndarray]:
    """A shard's tensors in their own types and shapes, as views where their bytes are aligned."""
    head: Shard = msgspec.json.decode(state[HEAD].tobytes(), type=Shard)
    tensors: dict[str, np.ndarray] = {}
    for name, array in state.items():
        place = head.tensors.get(name)
        dtype = _DTYPES.get(place.dtype) if place else None
        raw = array.reshape(-1)
        tensors[name] = raw.view(dtype).reshape(place.shape) if place and dtype else raw
    return tensors


def _bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


# -- waits for what takes some ranks long ----------------------------------------------------------


class Readiness:
    """One rank's part in waits of all ranks for each other, over links.

    A disk or store may take longer than the collectives of the script may take, and so may shards
    that move between ranks. The ranks that wait in one would take the rank that is busy for lost.
    So all wait here before.

    Args:
        links: links to all other ranks.
        num_ranks: number of ranks.
    """

    def __init__(self, links: Links, num_ranks: int) -> None:
        self._links, self._num_ranks = links, num_ranks
        self._num_waits = 0

    def do_with_all(self, work: Callable[[], Result]) -> Result:
        """Does this rank's work, and blocks until all have done theirs while their links are up.

        All ranks call it equally often.

        Returns:
            The result of this rank's work.

        Raises:
            PeerLostError, AbortedError: a rank was lost, or the links were closed.
        """
        result = work()
        self._num_waits += 1
        ready, all_ready = (
            Tag(Channel.SAVED, self._num_waits, kind) for kind in (_READY, _ALL_READY)
        )
        if self._links.rank:
            self._links.send(0, ready, _NOTHING)
            self._links.receive(0, all_ready, timeout_s=UNLIMITED_S)
            return result
        others = range(1, self._num_ranks)
        awaited = dict.fromkeys(others, ready)
        while awaited:
            rank, _ = self._links.receive_any(awaited, timeout_s=UNLIMITED_S)
            del awaited[rank]
        for rank in others:
            self._links.send(rank, all_ready, _NOTHING)
        return result
