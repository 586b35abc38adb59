"""The memory of a node in which copies of layers outlive the processes that train.

An agent makes one file in memory for each of its workers before it forks them, so the file needs no
name; a worker that ends leaves it to the next worker of its rank. A layer may have several versions
in it: a new one is written while an older one is whole, until the older one is dropped. A version
is addressed by its layer and by a label, which distinguishes two states of the same age.

    0        a table of entries, one for each version: its extent, its layer and its label
    256 KiB  extents, one for each version: a head that names the tensors, then the tensors' bytes
             end to end, then one hash for each piece of head and tensors

A process that is killed while it writes leaves a version that is not whole, which nobody reads. A
version is hashed again when it is read, piece by piece, so that corrupted memory is detected.

Source: Gemini (SOSP '23), section 3.
Differs: the agent owns the memory; in the paper the training process does.
"""

import mmap
import os
import struct
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from planaria.checkpoint.memory.arena_file import TABLE_BYTES
from planaria.checkpoint.memory.room import available_bytes
from planaria.checkpoint.memory.version import (
    HASH_BYTES,
    TableEntry,
    Version,
    num_pieces,
    padded_size,
)
from planaria.core.copies import Label
from planaria.errors import CheckpointError

_ENTRY: Final = struct.Struct("=QQqqqQQQQQ16sqQ")  # The first word, the state, is written last.
_STATE: Final = struct.Struct("=Q")
_COMPLETE: Final = struct.Struct("=Q")  # The last word of an entry: 1, or 0 if it is not known.
_ENTRY_BYTES: Final = 128
_FREE, _WRITING, _WHOLE = 0, 1, 2
# An extent is used again if it is at most so many times as large as needed: the number of hashes,
# and with it the size, differs from version to version.
_SLACK: Final = 1.125
_SPARE: Final = 32  # Memory is reserved with 1/32 more, for hashes and for rough sizes.
# Memory is reserved in pieces; after each one it may turn out that no more is needed.
_PIECE_BYTES: Final = 1 << 24


class Arena:
    """The copies that a rank keeps, in memory that its agent owns.

    Any thread may call it. Only one process may use it at a time.

    Args:
        fd: descriptor from `arena_fd`; the file may hold versions of an earlier process.

    Attributes:
        torn: labels of the versions that an earlier process had begun here and not ended, until the
            first `keep_only`.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._changed = threading.Condition()  # Guards all that follows.
        self._table = mmap.mmap(fd, TABLE_BYTES)
        self._end = os.fstat(fd).st_size
        self._entries: dict[int, TableEntry] = {}
        self._maps: dict[int, mmap.mmap] = {}  # By the offset of an extent.
        # Free extents (offset, capacity) by layer, for later versions of that layer.
        self._spare: dict[int, list[tuple[int, int]]] = {}
        self._reserved: set[int] = set()  # Offsets of extents that were reserved.
        self._layers_in_reservation: set[int] = set()
        self._held: dict[Label, frozenset[int]] = {}  # Layers of versions that are not dropped.
        states = np.frombuffer(self._table, dtype=np.uint64)[:: _ENTRY_BYTES // _STATE.size]
        for index in np.flatnonzero(states == _WHOLE).tolist():
            self._entries[index] = self._read_entry(index)
        indices = np.flatnonzero(states == _WRITING).tolist()
        self.torn = frozenset(self._read_entry(index).label for index in indices)
        states[states == _WRITING] = _FREE
        self._punch_gaps()

    @property
    def num_bytes(self) -> int:
        """The bytes of all extents, free ones included."""
        with self._changed:
            spare = sum(capacity for extents in self._spare.values() for _, capacity in extents)
            return spare + sum(capacity for _, capacity in self._extents())

    def versions(self) -> dict[int, tuple[Label, ...]]:
        """The labels of the whole versions of each layer, ascending."""
        labels_by_layer: dict[int, list[Label]] = {}
        with self._changed:
            for entry in self._entries.values():
                if entry.state == _WHOLE:
                    labels_by_layer.setdefault(entry.layer, []).append(entry.label)
        return {layer: tuple(sorted(labels)) for layer, labels in sorted(labels_by_layer.items())}

    def complete_labels(self) -> frozenset[Label]:
        """The labels of versions here of which it was noted that all ranks had them whole."""
        with self._changed:
            return frozenset(each.label for each in self._entries.values() if each.was_complete)

    def note_complete(self, label: Label) -> None:
        """Notes, for later processes too, that all ranks have a version of this label whole."""
        with self._changed:
            for index, entry in self._entries.items():
                if entry.state == _WHOLE and entry.label == label:
                    self._entries[index] = replace(entry, was_complete=True)
                    at = index * _ENTRY_BYTES + _ENTRY.size - _COMPLETE.size
                    _COMPLETE.pack_into(self._table, at, 1)

    def begin(
        self, layer: int, label: Label, *, head: bytes, num_bytes: int, piece_bytes: int
    ) -> Version:
        """A new version, with only its head written; an older one of the same label is dropped.

        Args:
            head: encoded description of the tensors.
            num_bytes: size of head and tensors together.
            piece_bytes: size of the pieces that are hashed one by one; the last may be smaller.

        Raises:
            CheckpointError: there is no memory for it, or the table of versions is full.
        """
        assert piece_bytes > 0
        assert len(head) <= num_bytes
        with self._changed:
            self._changed.wait_for(lambda: layer not in self._layers_in_reservation)
            self._drop_all(layer, label)
            hashes = num_pieces(num_bytes, piece_bytes) * HASH_BYTES
            needed = padded_size(
                padded_size(num_bytes, HASH_BYTES) + hashes, mmap.ALLOCATIONGRANULARITY
            )
            index = self._free_index()
            offset, capacity = self._extent(layer, needed)
            entry = TableEntry(
                state=_WRITING,
                layer=layer,
                label=label,
                offset=offset,
                capacity=capacity,
                num_bytes=num_bytes,
                head_bytes=len(head),
                piece_bytes=piece_bytes,
            )
            self._write_entry(index, entry)
            version = Version(self._memory_of(entry), entry)
        version.content[: len(head)] = np.frombuffer(head, dtype=np.uint8)
        return version

    def reserve(self, sizes: Mapping[int, int], *, is_over: Callable[[], bool]) -> None:
        """Allocates and touches memory for two versions of each layer, for all layers one first.

        It takes about half a second for each GB, in which other threads may use the arena: only a
        version of the layer whose memory is being made waits for it.

        Args:
            sizes: approximate size of head and tensors, by layer; 0: it has no tensors.
            is_over: tells whether the rest is needed no more.

        Raises:
            CheckpointError: there is not enough memory.
        """
        for num_versions in (1, 2):
            for layer, num_bytes in sizes.items():
                capacity = padded_size(num_bytes + num_bytes // _SPARE, mmap.ALLOCATIONGRANULARITY)
                with self._changed:
                    # An extent of no bytes cannot be mapped; the head alone needs no reservation.
                    if not num_bytes or self._num_extents(layer) >= num_versions:
                        continue
                    self._check_available(layer, capacity)
                    extent = self._end, capacity
                    self._end += capacity
                    os.ftruncate(self._fd, self._end)
                    self._layers_in_reservation.add(layer)
                memory = None
                try:
                    memory = self._touched_memory(layer, *extent, is_over=is_over)
                finally:
                    with self._changed:
                        self._note_reserved(layer, extent, memory)
                if memory is None:
                    return

    def _touched_memory(
        self, layer: int, offset: int, capacity: int, *, is_over: Callable[[], bool]
    ) -> mmap.mmap | None:
        """The memory of an extent of the file, allocated and touched; None if it is over."""
        memory = mmap.mmap(self._fd, capacity, offset=offset)
        pages = np.frombuffer(memory, dtype=np.uint8)
        for first in range(0, capacity, _PIECE_BYTES):
            if is_over():
                return None
            num_bytes = min(_PIECE_BYTES, capacity - first)
            self._allocate(layer, offset + first, num_bytes)
            # numpy lets other threads run, which a mapping of all pages at once would not.
            pages[first : first + num_bytes : mmap.PAGESIZE] = 0
        return memory

    def finish(self, version: Version) -> None:
        """Marks a version as whole; all its pieces and their hashes must be written."""
        with self._changed:
            whole = replace(version.entry, state=_WHOLE, digest=version.digest())
            index = next(i for i, entry in self._entries.items() if entry == version.entry)
            self._write_entry(index, whole)
            version.entry = whole

    def peek(self, layer: int, label: Label) -> Version | None:
        """A whole version, without a check of its bytes; None if there is none."""
        with self._changed:
            entry = self._whole(layer, label)
            return Version(self._memory_of(entry), entry) if entry else None

    def share(self, layer: int, label: Label, *, like: Label) -> bool:
        """Makes a version out of an older one of a layer that has not changed; both share memory.

        An existing version of the new label is dropped.

        Args:
            like: label of the older version.

        Returns:
            False if the older version does not exist, or its bytes are not those that were written.
        """
        older = self.peek(layer, like)
        if older is None or not older.is_intact():
            return False
        if label == like:
            return True
        with self._changed:
            entry = older.entry
            self._drop_all(layer, label)
            copy = replace(entry, label=label, was_complete=False)
            self._write_entry(self._free_index(), copy)
            return True

    def read(self, layer: int, label: Label) -> Version:
        """A whole version, whose bytes were checked. Its memory is valid until it is dropped.

        Raises:
            CheckpointError: there is none, or its bytes are not those that were written; then it is
                dropped.
        """
        what = f"the copy of layer {layer} of iteration {label.age} in memory"
        version = self.peek(layer, label)
        if version is None:
            raise CheckpointError(f"{what} is not there any more")
        if not version.is_intact():
            self.drop(version)
            raise CheckpointError(f"{what} has changed since it was written")
        return version

    def read_all(self, label: Label, *, layers: Collection[int]) -> dict[int, Version]:
        """Those of the layers that have a whole version of this label, as `read`.

        All are checked before an error is raised: whatever spoilt one may have spoilt others.
        """
        versions: dict[int, Version] = {}
        errors: list[CheckpointError] = []
        for layer, labels in self.versions().items():
            if layer in layers and label in labels:
                try:
                    versions[layer] = self.read(layer, label)
                except CheckpointError as error:
                    errors.append(error)
        if errors:
            more = f"; and {len(errors) - 1} more with it" if len(errors) > 1 else ""
            raise CheckpointError(f"{errors[0]}{more}")
        return versions

    def drop(self, version: Version) -> None:
        """Drops a version, if it still exists."""
        with self._changed:
            self._drop_all(version.layer, version.label)

    def hold(self, label: Label, *, layers: Collection[int]) -> None:
        """Keeps versions of this label until `release`, whatever `keep_only` drops."""
        with self._changed:
            self._held[label] = frozenset(layers)

    def release(self, label: Label) -> None:
        """Ends `hold`; the next `keep_only` may drop the versions."""
        with self._changed:
            self._held.pop(label, None)

    def keep_only(self, labels: Collection[Label], *, layers: Collection[int]) -> None:
        """Drops all versions except those of these labels, and those that are held.

        Free memory goes back to the kernel, except that of `layers`: their next versions use it.
        """
        with self._changed:
            self.torn = frozenset()
            for index, entry in list(self._entries.items()):
                is_held = entry.layer in self._held.get(entry.label, ())
                if entry.label not in labels and not is_held:
                    self._drop(index)
            self._punch_spare(but=layers)

    # -- with the lock held -----------------------------------------------------------------------

    def _whole(self, layer: int, label: Label) -> TableEntry | None:
        wanted = (_WHOLE, layer, label)
        entries = self._entries.values()
        return next((e for e in entries if (e.state, e.layer, e.label) == wanted), None)

    def _free_index(self) -> int:
        for index in range(TABLE_BYTES // _ENTRY_BYTES):
            if index not in self._entries:
                return index
        raise CheckpointError(f"a rank can keep at most {len(self._entries)} copies of layers")

    def _extent(self, layer: int, needed: int) -> tuple[int, int]:
        """An extent (offset, capacity) for a version of the layer: a free one or a new one."""
        spare = self._spare.get(layer, [])
        for extent in sorted(spare, key=lambda extent: extent[1]):
            # Before the first step of the optimizer a layer needs less than was reserved for it.
            is_close = extent[1] <= _SLACK * needed or extent[0] in self._reserved
            if needed <= extent[1] and is_close:
                spare.remove(extent)
                return extent
        self._punch_spare_of(layer)  # The layer's size has changed: its free extents do not fit.
        return self._new_extent(layer, needed)

    def _new_extent(self, layer: int, needed: int) -> tuple[int, int]:
        """A new extent (offset, capacity) at the end of the file."""
        offset = self._end
        self._allocate(layer, offset, needed)
        self._end += needed
        return offset, needed

    def _note_reserved(self, layer: int, extent: tuple[int, int], memory: mmap.mmap | None) -> None:
        """Lets versions use an extent; gives it back if it was not made."""
        self._layers_in_reservation.discard(layer)
        self._changed.notify_all()
        if memory is None:
            self._punch(*extent)
            return
        self._maps[extent[0]] = memory
        self._reserved.add(extent[0])
        self._spare.setdefault(layer, []).append(extent)

    def _check_available(self, layer: int, needed: int) -> None:
        # The kernel would give memory until it has to kill a process for lack of it.
        if (available := available_bytes()) < needed:
            raise CheckpointError(
                f"there is no memory for a copy of layer {layer}: it takes {needed} bytes, "
                f"and {available} are free"
            )

    def _allocate(self, layer: int, offset: int, needed: int) -> None:
        self._check_available(layer, needed)
        try:
            os.posix_fallocate(self._fd, offset, needed)  # It touches the memory, too.
        except OSError as error:
            text = (
                f"there is no memory for a copy of layer {layer} of {needed} bytes: "
                f"{error.strerror}"
            )
            raise CheckpointError(text) from error

    def _num_extents(self, layer: int) -> int:
        """The number of extents of a layer, free or not."""
        offsets = {entry.offset for entry in self._entries.values() if entry.layer == layer}
        return len(offsets) + len(self._spare.get(layer, ()))

    def _memory_of(self, entry: TableEntry) -> mmap.mmap:
        return self._map(entry.offset, entry.capacity)

    def _map(self, offset: int, capacity: int) -> mmap.mmap:
        if offset not in self._maps:
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            self._maps[offset] = mmap.mmap(self._fd, capacity, flags=flags, offset=offset)
        return self._maps[offset]

    def _drop_all(self, layer: int, label: Label) -> None:
        for index, entry in list(self._entries.items()):
            if (entry.layer, entry.label) == (layer, label):
                self._drop(index)

    def _drop(self, index: int) -> None:
        entry = self._entries.pop(index)
        _STATE.pack_into(self._table, index * _ENTRY_BYTES, _FREE)
        if entry.offset not in {other.offset for other in self._entries.values()}:
            self._spare.setdefault(entry.layer, []).append((entry.offset, entry.capacity))

    def _punch_spare(self, *, but: Collection[int]) -> None:
        """Gives the memory of free extents back to the kernel, except those of some layers."""
        for layer in self._spare.keys() - set(but):
            self._punch_spare_of(layer)

    def _punch_spare_of(self, layer: int) -> None:
        for offset, capacity in self._spare.pop(layer, ()):
            self._maps.pop(offset, None)
            self._reserved.discard(offset)
            self._punch(offset, capacity)

    def _punch_gaps(self) -> None:
        """Gives back memory outside of all versions, which a killed process may have left."""
        begin = TABLE_BYTES
        for offset, capacity in (*self._extents(), (self._end, 0)):
            self._punch(begin, offset - begin)
            begin = offset + capacity

    def _extents(self) -> list[tuple[int, int]]:
        """The extents of all versions; versions of a layer that has not changed share one."""
        return sorted({(entry.offset, entry.capacity) for entry in self._entries.values()})

    def _punch(self, offset: int, num_bytes: int) -> None:
        if num_bytes:
            mmap.mmap(self._fd, num_bytes, offset=offset).madvise(mmap.MADV_REMOVE)

    def _read_entry(self, index: int) -> TableEntry:
        fields = _ENTRY.unpack_from(self._table, index * _ENTRY_BYTES)
        state, layer, since, epoch, age, *rest, run, was_complete = fields
        entry = TableEntry(state, layer, Label(since, epoch, age, run), *rest)
        return replace(entry, was_complete=bool(was_complete))

    def _write_entry(self, index: int, entry: TableEntry) -> None:
        self._entries[index] = entry
        at = index * _ENTRY_BYTES
        fields = (entry.offset, entry.capacity, entry.num_bytes, entry.head_bytes)
        *label, run = entry.label
        rest = (*label, *fields, entry.piece_bytes, entry.digest, run, entry.was_complete)
        _ENTRY.pack_into(self._table, at, _FREE, entry.layer, *rest)
        _STATE.pack_into(self._table, at, entry.state)
