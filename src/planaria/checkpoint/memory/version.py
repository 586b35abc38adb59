"""One version of a layer in an arena's memory (arena.py): its bytes, and a hash of each piece."""

import mmap
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from planaria.core.copies import Label

Bytes = npt.NDArray[np.uint8]

HASH_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class Entry:
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


class Version:
    """One version of a layer that is being written, or is whole.

    Attributes:
        entry: as the table has it.
        content: head and tensors.
        num_pieces: that are hashed each by itself.
    """

    def __init__(self, memory: mmap.mmap, entry: Entry) -> None:
        self.layer = entry.layer
        self.label = entry.label
        self.num_pieces = num_pieces(entry.num_bytes, entry.piece_bytes)
        self.entry = entry
        self.content: Bytes = np.frombuffer(memory, dtype=np.uint8, count=entry.num_bytes)
        self._hashes: npt.NDArray[np.uint64] = np.frombuffer(
            memory,
            dtype=np.uint64,
            count=self.num_pieces,
            offset=padded(entry.num_bytes, HASH_BYTES),
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


def num_pieces(num_bytes: int, piece_bytes: int) -> int:
    return -(-num_bytes // piece_bytes)


def padded(num_bytes: int, multiple: int) -> int:
    return -(-num_bytes // multiple) * multiple
