"""The interfaces that decide when pieces of copies are sent, and the buffers of their receivers."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Buffers:
    """The buffers of a receiver for the pieces of one source.

    Attributes:
        num_bytes: size of all buffers together.
        count: number of buffers; a piece fills at most one.
    """

    num_bytes: int
    count: int

    @property
    def piece_bytes(self) -> int:
        """Greatest size of a piece, in the bytes that it stands for."""
        return max(1, self.num_bytes // self.count)


class Turns(Protocol):
    """Decides the size of pieces, and when each may be sent."""

    def chunk_bytes(self, most_bytes: int) -> int:
        """The size of the pieces of a version that begins now, in the bytes that they stand for.

        Args:
            most_bytes: upper bound on that size.
        """

    def wait(self, target: int, num_bytes: int) -> None:
        """Blocks until a piece of so many bytes may be sent.

        Raises:
            AbortedError: the epoch is over, so that no piece may be sent any more.
        """


class AtOnce:
    """Turns that let every piece go at once."""

    def chunk_bytes(self, most_bytes: int) -> int:
        """The greatest size that is allowed."""
        return most_bytes

    def wait(self, target: int, num_bytes: int) -> None:
        """Returns at once."""


class Unload(Protocol):
    """Takes the time in which bytes are copied from a device to its host's memory."""

    def __call__(self, num_bytes: int, *, is_own: bool) -> None:
        """Blocks for the time that so many bytes take.

        Args:
            is_own: whether they are of this rank's own layers, or came from another rank.
        """


def nothing_to_unload(num_bytes: int, *, is_own: bool) -> None:
    """Takes no time, for bytes that are in their host's memory already."""
    del num_bytes, is_own
