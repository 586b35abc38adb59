"""When a rank's ways to other nodes are taken by what training sends and receives.

Source: Gemini (SOSP '23), section 5.4: begin and end of all communication of an iteration.
"""

import math
import threading
from collections.abc import Callable
from typing import Final, NamedTuple

from planaria.transport.connection import Channel, Tag

# What an iteration is made of; copies have to keep clear of these.
_TRAINING: Final = frozenset(
    {Channel.FORWARD, Channel.BACKWARD, Channel.SCATTER, Channel.GATHER, Channel.COMMIT}
)


class Use(NamedTuple):
    """A message on its way out of this rank's node, or into it, and when it took the way."""

    is_out: bool
    peer: int
    tag: Tag
    start_s: float
    end_s: float


class Traffic:
    """The messages of training since they were last taken; nothing is noted until `listen`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._uses: list[Use] = []
        self._bytes_per_s = math.inf
        self._is_far: Callable[[int], bool] | None = None

    def listen(self, *, bytes_per_s: float, is_far: Callable[[int], bool]) -> None:
        """From now on messages are noted.

        Args:
            bytes_per_s: of a way on which nobody else knows how long a message takes.
            is_far: whether a peer is on another node.
        """
        with self._lock:
            self._bytes_per_s = bytes_per_s
            self._is_far = is_far

    def seconds(self, num_bytes: int) -> float:
        """What so many bytes take where nobody else knows."""
        return num_bytes / self._bytes_per_s

    def note(self, use: Use) -> None:
        """A message of training takes, or has taken, the way."""
        with self._lock:
            is_far = self._is_far
            if is_far is not None and use.tag.channel in _TRAINING and is_far(use.peer):
                self._uses.append(use)

    def take(self) -> list[Use]:
        """What was noted since the last time."""
        with self._lock:
            uses, self._uses = self._uses, []
            return uses
