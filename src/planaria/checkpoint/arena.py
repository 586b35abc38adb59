"""Memory of a node in which copies of layers outlive the processes that train.

An agent makes one file in memory for each of its workers before it forks them, so it needs no name;
a worker that ends leaves it to the next one of its rank. Of a layer there are as many versions as
somebody has not dropped yet: one is written while an older one is whole. A version is addressed by
its layer and by a label, which tells apart two states of one age.

    0        a table of entries, one for each version: where it is, and of what
    256 KiB  extents, one for each version: a head, which names tensors, then the bytes of these
             end to end, then one hash for each piece of both

A process that is killed while it writes leaves a version that is not whole, which nobody reads.
What is read is hashed again, piece by piece, so that memory that lies is found.

Source: DESIGN 6 (checkpoints), where the agent owns the memory; the paper has it in the training
process (Gemini, SOSP '23, section 3).
"""

import mmap
import os
import struct
import threading
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from planaria.checkpoint.room import available_bytes
from planaria.core.copies import Label
from planaria.errors import CheckpointError

Bytes = npt.NDArray[np.uint8]

_ENTRY: Final = struct.Struct("=QQqqqQQQQQ16s")  # Its state is the first word, and written last.
_STATE: Final = struct.Struct("=Q")
_ENTRY_BYTES: Final = 128
_FREE, _WRITING, _WHOLE = 0, 1, 2
_TABLE_BYTES: Final = 1 << 18
HASH_BYTES: Final = 8
_SLACK: Final = 1.125  # Of memory that is used again: hashes take more or less of it.


@dataclass(frozen=True, slots=True)
class _Entry:
    """One version, as the table has it.

    Attributes:
        offset, capacity: of its extent, whole pages.
        num_bytes: of head and tensors.
        piece_bytes: how many of them a hash is of.
        digest: of the hashes.
    """

    state: int
    layer: int
    label: Label
    offset: int
    capacity: int
    num_bytes: int
    head_bytes: int
    piece_bytes: int
    digest: bytes = bytes(16)


def arena_fd() -> int:
    """A file in memory for the copies that a rank keeps; those who inherit it share them."""
    fd = os.memfd_create("planaria-copies")
    os.ftruncate(fd, _TABLE_BYTES)
    return fd


class Version:
    """One version of a layer that is being written, or is whole.

    Attributes:
        entry: as the table has it.
        content: head and tensors.
        num_pieces: that are hashed each by itself.
    """

    def __init__(self, memory: mmap.mmap, entry: _Entry) -> None:
        self.layer = entry.layer
        self.label = entry.label
        self.num_pieces = _num_pieces(entry.num_bytes, entry.piece_bytes)
        self.entry = entry
        self.content: Bytes = np.frombuffer(memory, dtype=np.uint8, count=entry.num_bytes)
        self._hashes: npt.NDArray[np.uint64] = np.frombuffer(
            memory,
            dtype=np.uint64,
            count=self.num_pieces,
            offset=_padded(entry.num_bytes, HASH_BYTES),
        )

    @property
    def piece_bytes(self) -> int:
        """Of head and tensors, that one hash is of."""
        return self.entry.piece_bytes

    @property
    def head(self) -> bytes:
        """What names the tensors."""
        return self.content[: self.entry.head_bytes].tobytes()

    @property
    def tensors(self) -> Bytes:
        """Their bytes, end to end."""
        return self.content[self.entry.head_bytes :]

    def piece(self, index: int) -> Bytes:
        """The bytes of a piece of head and tensors."""
        begin = index * self.entry.piece_bytes
        return self.content[begin : begin + self.entry.piece_bytes]

    def seal(self) -> None:
        """Hashes all pieces, whose bytes are there, and notes that."""
        for index in range(self.num_pieces):
            self._hashes[index] = hash_of(self.piece(index))

    def take(self, index: int, piece: Bytes, value: int) -> bool:
        """Takes in a piece that has come, which may lie in its place already; False if it has
        another hash."""
        target = self.piece(index)
        if len(piece) != len(target) or hash_of(piece) != value:
            return False
        if piece.ctypes.data != target.ctypes.data:
            target[:] = piece
        self._hashes[index] = value
        return True

    @property
    def hashes(self) -> tuple[int, ...]:
        """Of all pieces, which were sealed or taken."""
        return tuple(self._hashes.tolist())

    def digest(self) -> bytes:
        """Of the hashes of all pieces."""
        return xxhash.xxh3_128_digest(self._hashes.tobytes())

    def is_like(self, other: "Version") -> bool:
        """Whether it is the same, piece by piece, as another one that was sealed."""
        mine, theirs = self.entry, other.entry
        same = (mine.num_bytes, mine.head_bytes, mine.piece_bytes)
        return same == (theirs.num_bytes, theirs.head_bytes, theirs.piece_bytes) and (
            mine.digest == other.digest()
        )

    def is_right(self) -> bool:
        """Whether all bytes are those that were written; hashes them."""
        wanted = self._hashes.tolist()
        found = (hash_of(self.piece(index)) for index in range(self.num_pieces))
        return self.entry.digest == self.digest() and all(
            a == b for a, b in zip(wanted, found, strict=True)
        )


def hash_of(piece: Bytes) -> int:
    """The xxh3_64 of some bytes."""
    return xxhash.xxh3_64_intdigest(piece.data)


class Arena:
    """The copies that a rank keeps, through the memory that its agent owns.

    Any thread may call it. One process uses it at a time.

    Args:
        fd: as `arena_fd` made it.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()  # Guards all that follows.
        self._table = mmap.mmap(fd, _TABLE_BYTES)
        self._end = os.fstat(fd).st_size
        self._entries: dict[int, _Entry] = {}
        self._maps: dict[int, mmap.mmap] = {}  # By where an extent begins.
        self._spare: dict[int, list[tuple[int, int]]] = {}  # Extents by layer, to be used again.
        states = np.frombuffer(self._table, dtype=np.uint64)[:: _ENTRY_BYTES // _STATE.size]
        for index in np.flatnonzero(states == _WHOLE).tolist():
            self._entries[index] = self._read(index)
        states[states == _WRITING] = _FREE
        self._punch_gaps()

    @property
    def num_bytes(self) -> int:
        """What the extents take up, those to be used again included."""
        with self._lock:
            spare = sum(capacity for extents in self._spare.values() for _, capacity in extents)
            return spare + sum(capacity for _, capacity in self._extents())

    def versions(self) -> dict[int, tuple[Label, ...]]:
        """Of each layer the versions that are whole, ascending."""
        found: dict[int, list[Label]] = {}
        with self._lock:
            for entry in self._entries.values():
                if entry.state == _WHOLE:
                    found.setdefault(entry.layer, []).append(entry.label)
        return {layer: tuple(sorted(labels)) for layer, labels in sorted(found.items())}

    def begin(
        self, layer: int, label: Label, *, head: bytes, num_bytes: int, piece_bytes: int
    ) -> Version:
        """A version to be written, its head too; one of that label before is dropped.

        Args:
            head: what names the tensors.
            num_bytes: of head and tensors.
            piece_bytes: of which there is one hash.

        Raises:
            CheckpointError: there is no memory for it, or there are too many.
        """
        assert piece_bytes > 0
        assert len(head) <= num_bytes
        with self._lock:
            self._drop_all(layer, label)
            hashes = _num_pieces(num_bytes, piece_bytes) * HASH_BYTES
            needed = _padded(_padded(num_bytes, HASH_BYTES) + hashes, mmap.ALLOCATIONGRANULARITY)
            index = self._free_index()
            offset, capacity = self._extent(layer, needed)
            entry = _Entry(
                state=_WRITING,
                layer=layer,
                label=label,
                offset=offset,
                capacity=capacity,
                num_bytes=num_bytes,
                head_bytes=len(head),
                piece_bytes=piece_bytes,
            )
            self._write(index, entry)
            version = Version(self._mapped(entry), entry)
        version.content[: len(head)] = np.frombuffer(head, dtype=np.uint8)
        return version

    def finish(self, version: Version) -> None:
        """All pieces of a version are there, and their hashes: it is whole."""
        with self._lock:
            whole = replace(version.entry, state=_WHOLE, digest=version.digest())
            index = next(i for i, entry in self._entries.items() if entry == version.entry)
            self._write(index, whole)
            version.entry = whole

    def peek(self, layer: int, label: Label) -> Version | None:
        """A whole version, whose bytes nobody has looked at; None if there is none such."""
        with self._lock:
            entry = self._whole(layer, label)
            return Version(self._mapped(entry), entry) if entry else None

    def share(self, layer: int, label: Label, *, like: Label) -> bool:
        """Makes a version of what is there of another label, for the layer has not changed; False
        if that is not there, or not what was written. One of that label before is dropped."""
        older = self.peek(layer, like)
        if older is None or not older.is_right():
            return False
        with self._lock:
            entry = older.entry
            self._drop_all(layer, label)
            self._write(self._free_index(), replace(entry, label=label))
            return True

    def read(self, layer: int, label: Label) -> Version:
        """A whole version. Its memory is valid until it is dropped.

        Raises:
            CheckpointError: there is none such, or its bytes are not those that were written.
        """
        what = f"the copy of layer {layer} of iteration {label.age} in memory"
        version = self.peek(layer, label)
        if version is None:
            raise CheckpointError(f"{what} is not there any more")
        if not version.is_right():
            self.drop(version)
            raise CheckpointError(f"{what} is not what was written there")
        return version

    def drop(self, version: Version) -> None:
        """Forgets a version, if it is still there."""
        with self._lock:
            self._drop_all(version.layer, version.label)

    def keep(self, labels: Collection[Label], *, layers: Collection[int]) -> None:
        """Drops all versions but those of these labels; gives back the memory of those that are
        dropped, unless these layers may use it for their next version."""
        with self._lock:
            for index, entry in list(self._entries.items()):
                if entry.label not in labels:
                    self._drop(index)
            self._punch_spare(but=layers)

    # -- with the lock held -----------------------------------------------------------------------

    def _whole(self, layer: int, label: Label) -> _Entry | None:
        wanted = (_WHOLE, layer, label)
        entries = self._entries.values()
        return next((e for e in entries if (e.state, e.layer, e.label) == wanted), None)

    def _free_index(self) -> int:
        for index in range(_TABLE_BYTES // _ENTRY_BYTES):
            if index not in self._entries:
                return index
        raise CheckpointError(f"{len(self._entries)} copies of layers are all that a rank can keep")

    def _extent(self, layer: int, needed: int) -> tuple[int, int]:
        """Where a version of the layer may lie: where an older one lay, or at the end."""
        spare = self._spare.get(layer, [])
        for extent in sorted(spare, key=lambda extent: extent[1]):
            if needed <= extent[1] <= _SLACK * needed:
                spare.remove(extent)
                return extent
        self._punch_spare_of(layer)  # The layer has another size by now.
        # The kernel would give memory until it kills some process for it.
        if (available := available_bytes()) < needed:
            raise CheckpointError(
                f"no memory for a copy of layer {layer}: it takes {needed} bytes, and {available} "
                "are left"
            )
        offset = self._end
        try:
            os.posix_fallocate(self._fd, offset, needed)  # Also touches it.
        except OSError as error:
            text = f"no memory for a copy of layer {layer} of {needed} bytes: {error.strerror}"
            raise CheckpointError(text) from error
        self._end += needed
        return offset, needed

    def _mapped(self, entry: _Entry) -> mmap.mmap:
        if entry.offset not in self._maps:
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            memory = mmap.mmap(self._fd, entry.capacity, flags=flags, offset=entry.offset)
            self._maps[entry.offset] = memory
        return self._maps[entry.offset]

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
        """Gives back the memory of spare extents, but of these layers."""
        for layer in self._spare.keys() - set(but):
            self._punch_spare_of(layer)

    def _punch_spare_of(self, layer: int) -> None:
        for offset, capacity in self._spare.pop(layer, ()):
            self._maps.pop(offset, None)
            self._punch(offset, capacity)

    def _punch_gaps(self) -> None:
        """Gives back what is no version's: a process that was killed may have left it."""
        begin = _TABLE_BYTES
        for offset, capacity in (*self._extents(), (self._end, 0)):
            self._punch(begin, offset - begin)
            begin = offset + capacity

    def _extents(self) -> list[tuple[int, int]]:
        """Of all versions, each once; those of a layer that has not changed share one."""
        return sorted({(entry.offset, entry.capacity) for entry in self._entries.values()})

    def _punch(self, offset: int, num_bytes: int) -> None:
        if num_bytes:
            mmap.mmap(self._fd, num_bytes, offset=offset).madvise(mmap.MADV_REMOVE)

    def _read(self, index: int) -> _Entry:
        state, layer, *rest = _ENTRY.unpack_from(self._table, index * _ENTRY_BYTES)
        return _Entry(state, layer, Label(*rest[:3]), *rest[3:])

    def _write(self, index: int, entry: _Entry) -> None:
        self._entries[index] = entry
        at = index * _ENTRY_BYTES
        fields = (entry.offset, entry.capacity, entry.num_bytes, entry.head_bytes)
        rest = (*entry.label, *fields, entry.piece_bytes, entry.digest)
        _ENTRY.pack_into(self._table, at, _FREE, entry.layer, *rest)
        _STATE.pack_into(self._table, at, entry.state)


def _num_pieces(num_bytes: int, piece_bytes: int) -> int:
    return -(-num_bytes // piece_bytes)


def _padded(num_bytes: int, multiple: int) -> int:
    return -(-num_bytes // multiple) * multiple
