"""One version of a layer in an arena's memory (arena.py): its bytes and a hash of each piece."""

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
class TableEntry:
    """A version's entry in the table of an arena.

    Attributes:
        state: free, being written, or whole, as the constants of arena.py number them.
        offset, capacity: begin and size of its extent in the file, in bytes; whole pages.
        num_bytes: size of head and tensors together.
        head_bytes: size of the head.
        piece_bytes: size of the pieces that are hashed one by one; the last may be smaller.
        digest: hash of the hashes of all pieces; zeros until the version is whole.
        was_complete: whether the version is known to have been complete on all ranks.
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
    was_complete: bool = False


class Version:
    """One version of a layer that is being written, or is whole.

    Attributes:
        entry: its entry in the table.
        content: bytes of head and tensors, in the arena's memory.
        num_pieces: number of pieces, each of which has a hash.
    """

    def __init__(self, memory: mmap.mmap, entry: TableEntry) -> None:
        self.layer = entry.layer
        self.label = entry.label
        self.num_pieces = num_pieces(entry.num_bytes, entry.piece_bytes)
        self.entry = entry
        self.content: Bytes = np.frombuffer(memory, dtype=np.uint8, count=entry.num_bytes)
        self._hashes: npt.NDArray[np.uint64] = np.frombuffer(
            memory,
            dtype=np.uint64,
            count=self.num_pieces,
            offset=padded_size(entry.num_bytes, HASH_BYTES),
        )

    @property
    def piece_bytes(self) -> int:
        """Size of a piece; the last one may be smaller."""
        return self.entry.piece_bytes

    @property
    def head(self) -> bytes:
        """The encoded description of the tensors."""
        return self.content[: self.entry.head_bytes].tobytes()

    @property
    def tensors(self) -> Bytes:
        """The bytes of the tensors, end to end."""
        return self.content[self.entry.head_bytes :]

    def piece(self, index: int) -> Bytes:
        """The bytes of one piece of head and tensors."""
        begin = index * self.entry.piece_bytes
        return self.content[begin : begin + self.entry.piece_bytes]

    def hash_pieces(self) -> None:
        """Hashes all pieces, whose bytes must be written, and stores the hashes."""
        for index in range(self.num_pieces):
            self._hashes[index] = hash_of(self.piece(index))

    def store_piece(self, index: int, piece: Bytes, value: int) -> bool:
        """Stores a piece that has come, and its hash.

        Args:
            piece: bytes that have come; they may be in the version's memory already.
            value: hash that the piece must have.

        Returns:
            False if the piece has another size or hash.
        """
        target = self.piece(index)
        if len(piece) != len(target) or hash_of(piece) != value:
            return False
        if piece.ctypes.data != target.ctypes.data:
            target[:] = piece
        self._hashes[index] = value
        return True

    @property
    def hashes(self) -> tuple[int, ...]:
        """The hashes of all pieces, which `hash_pieces` or `store_piece` have stored."""
        return tuple(self._hashes.tolist())

    def digest(self) -> bytes:
        """The hash of the hashes of all pieces."""
        return xxhash.xxh3_128_digest(self._hashes.tobytes())

    def has_same_pieces(self, other: "Version") -> bool:
        """Whether it has the same pieces as another version, by their hashes."""
        mine, theirs = self.entry, other.entry
        same = (mine.num_bytes, mine.head_bytes, mine.piece_bytes)
        return same == (theirs.num_bytes, theirs.head_bytes, theirs.piece_bytes) and (
            mine.digest == other.digest()
        )

    def is_intact(self) -> bool:
        """Whether all bytes are those that were written; hashes all pieces again to tell."""
        expected = self._hashes.tolist()
        actual = (hash_of(self.piece(index)) for index in range(self.num_pieces))
        return self.entry.digest == self.digest() and all(
            a == b for a, b in zip(expected, actual, strict=True)
        )


def hash_of(piece: Bytes) -> int:
    """The xxh3_64 hash of some bytes."""
    return xxhash.xxh3_64_intdigest(piece.data)


def num_pieces(num_bytes: int, piece_bytes: int) -> int:
    return -(-num_bytes // piece_bytes)


def padded_size(num_bytes: int, multiple: int) -> int:
    return -(-num_bytes // multiple) * multiple
