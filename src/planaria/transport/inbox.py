"""What has arrived for a rank and was not taken yet, and memory for what is to arrive."""

import threading
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from planaria.transport.connection import Received, Tag

Payload = npt.NDArray[np.uint8]


class Inbox:
    """Messages by peer, epoch and tag. Whoever uses it sees to it that one thread at a time does;
    memory for them is given by one thread, and taken by another."""

    def __init__(self) -> None:
        self._messages: dict[tuple[int, int, Tag], tuple[Payload, float]] = {}  # And when due.
        self._lock = threading.Lock()
        self._places: dict[tuple[int, int, Tag], Payload] = {}

    def __len__(self) -> int:
        return len(self._messages)

    def begin(self, epoch: int) -> set[int]:
        """Drops what is of older epochs; the peers that have sent something of this one."""
        self._messages = {key: one for key, one in self._messages.items() if key[1] >= epoch}
        with self._lock:
            self._places.clear()
        return {peer for peer, of, _ in self._messages if of == epoch}

    def put(self, peer: int, message: Received, due_s: float) -> None:
        """A message has arrived."""
        self._messages[peer, message.epoch, message.tag] = message.payload, due_s

    def first(self, wanted: Mapping[int, Tag], epoch: int) -> tuple[int, Tag] | None:
        """Of the messages wanted, by peer, one that is here."""
        here = (want for want in wanted.items() if (want[0], epoch, want[1]) in self._messages)
        return next(here, None)

    def take(self, peer: int, epoch: int, tag: Tag) -> tuple[Payload, float]:
        """A message that is here, and when it is due; memory that it did not lie in is free."""
        with self._lock:
            self._places.pop((peer, epoch, tag), None)
        return self._messages.pop((peer, epoch, tag))

    def place(self, peer: int, epoch: int, tag: Tag, memory: Payload) -> None:
        """Memory for a message that may be about to arrive."""
        with self._lock:
            self._places[peer, epoch, tag] = memory

    def placed(self, peer: int, epoch: int, tag: Tag, num_bytes: int) -> Payload | None:
        """The memory for a message that begins to arrive, if it fills that."""
        with self._lock:
            memory = self._places.pop((peer, epoch, tag), None)
        return memory if memory is not None and len(memory) == num_bytes else None
