"""The interfaces that decide when pieces of copies are sent, and the buffers of their receivers."""

from collections.abc import Sequence
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

    def deal(self, sizes: Sequence[int]) -> None:
        """Takes note of the pieces that are to be sent, before the first of a version is sent.

        Args:
            sizes: bytes that each piece stands for, in the order of sending.
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

    def deal(self, sizes: Sequence[int]) -> None:
        """Does nothing: no piece waits for a span."""

    def wait(self, target: int, num_bytes: int) -> None:
        """Returns at once."""


@dataclass(frozen=True, slots=True)
class FlowControl:
    """How fast a rank sends copies, and for how long it waits for its peers' messages.

    Attributes:
        buffers: buffers of each receiver for this rank; None: neither the size nor the number of
            unacknowledged pieces is bounded.
        turns: decides the size of pieces, and when each may be sent.
        timeout_s: longest wait for each message.
    """

    buffers: Buffers | None
    turns: Turns
    timeout_s: float
