"""When the pieces of a copy go, and what their receivers have for them."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Buffers:
    """What a receiver has for what one source sends to it.

    Attributes:
        num_bytes: of all of them.
        count: into which they are cut; a piece fills one at most.
    """

    num_bytes: int
    count: int

    @property
    def piece_bytes(self) -> int:
        """The most of a piece, in the bytes that it stands for."""
        return max(1, self.num_bytes // self.count)


class Turns(Protocol):
    """When pieces go."""

    def chunk_bytes(self, most_bytes: int) -> int:
        """Of the pieces of a version that begins now, in the bytes that they stand for."""

    def wait(self, target: int, num_bytes: int) -> None:
        """Blocks until a piece of so many bytes may go; raises AbortedError if none may ever."""


class AtOnce:
    """Turns of those who wait for nothing."""

    def chunk_bytes(self, most_bytes: int) -> int:
        """As large as they may be."""
        return most_bytes

    def wait(self, target: int, num_bytes: int) -> None:
        """It may go."""


class Unload(Protocol):
    """What the way from a device to its host takes."""

    def __call__(self, num_bytes: int, *, is_own: bool) -> None:
        """Returns when so many bytes have taken it; of this rank's layers, or of what comes."""


def nothing_to_unload(num_bytes: int, *, is_own: bool) -> None:
    """Bytes that are in their host's memory already."""
    del num_bytes, is_own
