"""A record of when training's messages occupy a rank's link directions to and from other nodes.

Source: Gemini (SOSP '23), section 5.4: begin and end of all communication of an iteration.
"""

import math
import threading
from collections.abc import Callable
from typing import Final, NamedTuple

from planaria.transport.connection import Channel, Tag

# The channels of an iteration; copies are sent while these are silent.
_TRAINING: Final = frozenset(
    {Channel.FORWARD, Channel.BACKWARD, Channel.SCATTER, Channel.GATHER, Channel.COMMIT}
)


class Use(NamedTuple):
    """A message that leaves this rank's node or comes into it, and when it occupied the link.

    Attributes:
        start_s, end_s: moments by the monotonic clock.
    """

    is_out: bool
    peer: int
    tag: Tag
    start_s: float
    end_s: float


class Traffic:
    """The messages of training since they were last taken; none is recorded before `listen`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._uses: list[Use] = []
        self._bytes_per_s = math.inf
        self._is_far: Callable[[int], bool] | None = None

    def listen(self, *, bytes_per_s: float, is_far: Callable[[int], bool]) -> None:
        """Records messages from now on.

        Args:
            bytes_per_s: bandwidth to assume for links that are not paced.
            is_far: whether a peer is on another node.
        """
        with self._lock:
            self._bytes_per_s = bytes_per_s
            self._is_far = is_far

    def seconds(self, num_bytes: int) -> float:
        """Seconds that so many bytes take over a link that is not paced."""
        return num_bytes / self._bytes_per_s

    def note(self, use: Use) -> None:
        """Records a message if it is one of training, to or from another node."""
        with self._lock:
            is_far = self._is_far
            if is_far is not None and use.tag.channel in _TRAINING and is_far(use.peer):
                self._uses.append(use)

    def take(self) -> list[Use]:
        """Returns the messages recorded since the last call."""
        with self._lock:
            uses, self._uses = self._uses, []
            return uses
