"""Copies of layers on their way to memory: a rank's own, and those that other ranks keep.

A version of all layers begins at a commit, when no rank's state changes until the next optimizer
step. One thread of each rank copies its layers into its own node's memory, hashes them there piece
by piece, and sends what others keep, each piece when its turn comes; before a layer is stepped its
copy is waited for, which is all that training ever waits. Another thread keeps what comes, which
arrives where it is to lie. A piece is hashed there and acknowledged, so that no more than the
buffers of a receiver are on their way to it; one that is not what was sent is asked for again.

A layer that is what it was in the complete version of its epoch is not sent again: those who still
have that make it theirs of the new version, too.

A version ends for a rank when all that it sends is acknowledged and all that it is to keep is
there, or has failed for want of memory, which ends nothing else. Who ends it says so with the next
commit; if all have, and none has failed, the version is complete, and the one before is dropped.

Source: Gemini (SOSP '23), section 5: sub-buffers, copies sent piece by piece.
Differs: sent from the own copy, so an optimizer step waits for memory and not for the network.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Final, NamedTuple

import msgspec
import numpy as np

from planaria.checkpoint.arena import Arena, Bytes, Version
from planaria.checkpoint.filling import Fill, fill_alone
from planaria.checkpoint.own import OwnCopies
from planaria.checkpoint.turns import Buffers, Turns, Unload
from planaria.checkpoint.wire import (
    Opening,
    State,
    answer_tag,
    opening_of,
    opening_tag,
    piece_tag,
    sent_by,
    sent_to,
)
from planaria.core.copies import Label, LayerCopy
from planaria.errors import AbortedError, CheckpointError, PeerLostError
from planaria.transport.links import Links, Tag

logger = logging.getLogger(__name__)

TRIES: Final = 3  # Of a piece.
_WHOLE: Final = 1 << 62  # More than any layer has.
_GOOD: Final = np.ones(1, dtype=np.uint8)
_BAD: Final = np.zeros(1, dtype=np.uint8)


class Copier:
    """A rank's part in the copies of one epoch; two threads from its start until `close`.

    Args:
        own: the layers that this rank has a copy of because it holds them.
        copies: of all layers.
        since, epoch: of the labels of this epoch's versions.
        kept: the newest version that was complete when the epoch began, if any.
        buffers: of each receiver for this rank; None: a layer goes whole, whatever its size.
        fill: copies this rank's own layers.
        virtual_bytes: that a layer's state stands for where links are paced; 0: what it is.
        unload: takes the time in which bytes get from a device to its host's memory, where they
            only stand for what does.
        failed: is told why a version cannot be complete, the first time that one cannot.
        timeout_s: for the next piece.
    """

    def __init__(
        self,
        links: Links,
        arena: Arena,
        *,
        own: Sequence[int],
        copies: Sequence[LayerCopy],
        since: int,
        epoch: int,
        kept: Label | None,
        buffers: Buffers | None,
        turns: Turns,
        virtual_bytes: Callable[[int], int],
        fill: Fill = fill_alone,
        unload: Unload,
        failed: Callable[[str], None],
        timeout_s: float,
    ) -> None:
        self.kept = kept
        self._links = links
        self._arena = arena
        self.own = tuple(sorted(own))
        self._since = since
        self._epoch = epoch
        self._most_bytes = buffers.piece_bytes if buffers else _WHOLE
        self._window = buffers.count if buffers else _WHOLE
        self._turns = turns
        self._virtual_bytes = virtual_bytes
        self._copies = OwnCopies(arena, virtual_bytes=virtual_bytes, fill=fill, unload=unload)
        self._unload = unload
        self._tell_failed = failed
        self._timeout_s = timeout_s
        self._sends = sent_by(links.rank, copies)
        self._receives = sent_to(links.rank, copies)
        self._all_kept = {*own, *(n for layers in self._receives.values() for n in layers)}
        self._changed = threading.Condition()  # Guards all that follows.
        self._label: Label | None = None
        self._uncopied: set[int] = set()
        self._copied_s: dict[int, float] = {}  # When each layer was; all by the time of the work.
        self._ended_s = 0.0
        self._num_running = 0
        self._has_failed = False
        self._is_told = False
        self._error: Exception | None = None
        self._queues: list[SimpleQueue[_Begun | None]] = []
        self._threads: list[threading.Thread] = []
        for name, function in (("copy", self._give), ("keep", self._keep)):
            queue: SimpleQueue[_Begun | None] = SimpleQueue()
            thread = threading.Thread(
                target=self._serve, args=(queue, function), name=name, daemon=True
            )
            self._queues.append(queue)
            self._threads.append(thread)
            thread.start()

    # -- what the compute thread calls ------------------------------------------------------------

    def begin(self, age: int, states: Mapping[int, State]) -> None:
        """Begins a version of the state as it is now; the one before must have ended.

        Args:
            states: views of the rank's own layers. They must not change until `wait_copied`.
        """
        label = Label(self._since, self._epoch, age)
        with self._changed:
            assert not self._num_running
            self._label = label
            self._uncopied = set(self.own)
            self._has_failed = False
            self._num_running = len(self._threads)
        self._arena.keep({self.kept, label} if self.kept else {label}, layers=self._all_kept)
        begun = _Begun(label, states, self._links.timekeeper.now_s())
        for queue in self._queues:
            queue.put(begun)

    def wait_copied(self, layer: int) -> None:
        """Blocks until the layer may change.

        Raises:
            AbortedError, PeerLostError: what ended the copying.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._error or not self._num_running or layer not in self._uncopied
            )
            self._check()
            self._links.timekeeper.reach(self._copied_s.get(layer, 0.0))

    def wait_ended(self) -> None:
        """Blocks until the version has ended for this rank; raises as `wait_copied` does."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or not self._num_running)
            self._check()
            self._links.timekeeper.reach(self._ended_s)

    @property
    def has_begun(self) -> bool:
        """Whether there is a version of this epoch."""
        return self._label is not None

    @property
    def has_ended(self) -> bool:
        """Whether the version has ended for this rank."""
        with self._changed:
            self._check()
            return self._label is not None and not self._num_running

    @property
    def has_failed(self) -> bool:
        """Whether the version cannot be complete, because of this rank."""
        with self._changed:
            return self._has_failed

    def complete(self) -> None:
        """All ranks have ended the version, and none has failed."""
        assert self._label is not None
        self.kept = self._label

    def close(self) -> None:
        """Ends the threads; what they wait for must have been aborted or be over."""
        for queue in self._queues:
            queue.put(None)
        for thread in self._threads:
            thread.join()

    # -- threads ----------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _serve(
        self,
        queue: SimpleQueue["_Begun | None"],
        function: Callable[[Label, Mapping[int, State]], None],
    ) -> None:
        while (version := queue.get()) is not None:
            self._links.timekeeper.reach(version.begun_s)
            try:
                function(version.label, version.states)
            except Exception as error:
                with self._changed:
                    self._error = self._error or error
                    self._changed.notify_all()
                if not isinstance(error, AbortedError | PeerLostError):
                    logger.exception("rank %s: a thread that copies died", self._links.rank)
                return
            with self._changed:
                self._ended_s = max(self._ended_s, self._links.timekeeper.now_s())
                self._num_running -= 1
                self._changed.notify_all()

    def _fail(self, reason: str) -> None:
        with self._changed:
            is_told, self._has_failed, self._is_told = self._is_told, True, True
        if not is_told:
            self._tell_failed(reason)

    # -- giving -----------------------------------------------------------------------------------

    def _give(self, label: Label, states: Mapping[int, State]) -> None:
        """Copies this rank's layers, then sends what others keep."""
        versions: dict[int, Version | None] = {}
        piece_bytes = self._turns.chunk_bytes(self._most_bytes)
        for layer in self.own:
            try:
                versions[layer] = self._copies.made(layer, label, states[layer], piece_bytes)
            except CheckpointError as error:
                versions[layer] = None
                self._fail(str(error))
            with self._changed:
                self._copied_s[layer] = self._links.timekeeper.now_s()
                self._uncopied.discard(layer)
                self._changed.notify_all()
        # From here on the layers may change.
        kept = self.kept if self.kept and self.kept.epoch == self._epoch else None
        same = {n for n, one in versions.items() if one and self._copies.is_same(one, kept)}
        unacknowledged: dict[int, deque[_Piece]] = {target: deque() for target, _ in self._sends}
        for target, layer in self._sends:
            if layer not in same or not self._has_same(target, layer, label):
                self._send(target, layer, label, versions[layer], unacknowledged[target])
        for target, pieces in unacknowledged.items():
            while pieces:
                self._take_answer(target, label, pieces)

    def _send(
        self,
        target: int,
        layer: int,
        label: Label,
        version: Version | None,
        unacknowledged: "deque[_Piece]",
    ) -> None:
        """Sends a layer, as its receiver has buffers for it."""
        self._send_opening(target, layer, label, opening_of(version) if version else Opening())
        if version is None:
            return
        for index in range(version.num_pieces):
            while len(unacknowledged) >= self._window:
                self._take_answer(target, label, unacknowledged)
            piece = _Piece(version, index)
            self._send_piece(target, label, piece)
            unacknowledged.append(piece)

    def _has_same(self, target: int, layer: int, label: Label) -> bool:
        """Tells a receiver that a layer has not changed; whether it still has that."""
        self._send_opening(target, layer, label, Opening(is_same=True))
        answer = self._links.receive(target, answer_tag(label, layer, 0), timeout_s=self._timeout_s)
        return bool(answer[0] == _GOOD[0])

    def _send_opening(self, target: int, layer: int, label: Label, opening: Opening) -> None:
        encoded = np.frombuffer(msgspec.json.encode(opening), dtype=np.uint8)
        self._links.send(target, opening_tag(label, layer), encoded)

    def _send_piece(self, target: int, label: Label, piece: "_Piece") -> None:
        version, index = piece.version, piece.index
        content = version.piece(index)
        tag = piece_tag(label, version.layer, index)
        stands_for = self._virtual_bytes(version.layer) * len(content) // len(version.content)
        self._turns.wait(target, stands_for or len(content))
        self._links.send(target, tag, content, virtual_bytes=stands_for)

    def _take_answer(self, target: int, label: Label, unacknowledged: "deque[_Piece]") -> None:
        """Waits for what the receiver says of the oldest piece; sends it again if it has to.

        Raises:
            PeerLostError: it never arrives as it was sent.
        """
        piece = unacknowledged[0]
        tag = answer_tag(label, piece.version.layer, piece.index)
        answer = self._links.receive(target, tag, timeout_s=self._timeout_s)
        if answer[0] == _GOOD[0]:
            unacknowledged.popleft()
        elif piece.tries < TRIES:
            piece.tries += 1
            self._send_piece(target, label, piece)
        else:
            what = f"a copy of layer {piece.version.layer}"
            raise PeerLostError(target, f"{what} did not arrive as it was sent, {TRIES} times")

    # -- keeping ----------------------------------------------------------------------------------

    def _keep(self, label: Label, _: Mapping[int, State]) -> None:
        """Keeps what others send of a version."""
        steps = {
            source: self._kept_from(source, label, layers)
            for source, layers in self._receives.items()
        }
        wanted = {source: next(step) for source, step in steps.items()}
        while wanted:
            source, received = self._links.receive_any(wanted, timeout_s=self._timeout_s)
            try:
                wanted[source] = steps[source].send(received)
            except StopIteration:
                del wanted[source]

    def _kept_from(
        self, source: int, label: Label, layers: Sequence[int]
    ) -> Generator[Tag, Bytes, None]:
        """Asks for the messages of one source, in the order in which it sends them."""
        for layer in layers:
            raw = yield opening_tag(label, layer)
            opening = msgspec.json.decode(raw.tobytes(), type=Opening)
            if opening.is_same:
                has_it = bool(self.kept and self._arena.share(layer, label, like=self.kept))
                self._links.send(source, answer_tag(label, layer, 0), _GOOD if has_it else _BAD)
                if has_it:
                    continue
                raw = yield opening_tag(label, layer)
                opening = msgspec.json.decode(raw.tobytes(), type=Opening)
            version = None
            if opening.num_bytes:
                version = self._opened(layer, label, opening)
            for index in range(len(opening.hashes)):
                self._place(source, version, index)
            for index, value in enumerate(opening.hashes):
                is_good = False
                while not is_good:
                    message = yield piece_tag(label, layer, index)
                    stands_for = self._virtual_bytes(layer) * len(message) // opening.num_bytes
                    self._unload(stands_for, is_own=False)
                    is_good = version is None or version.take(index, message, value)
                    answer = _GOOD if is_good else _BAD
                    if not is_good:
                        self._place(source, version, index)
                        logger.warning("a piece of a copy from rank %s is bad", source)
                    self._links.send(source, answer_tag(label, layer, index), answer)
            if version is not None:
                self._arena.finish(version)

    def _place(self, source: int, version: Version | None, index: int) -> None:
        """Has a piece arrive where it is to lie, unless it has begun to arrive."""
        if version is not None:
            tag = piece_tag(version.label, version.layer, index)
            self._links.place(source, tag, version.piece(index))

    def _opened(self, layer: int, label: Label, opening: Opening) -> Version | None:
        """Room for a layer that comes; None if there is none, and what comes is not kept."""
        try:
            return self._arena.begin(
                layer,
                label,
                head=opening.head,
                num_bytes=opening.num_bytes,
                piece_bytes=opening.piece_bytes,
            )
        except CheckpointError as error:
            self._fail(str(error))
            return None


@dataclass(slots=True)
class _Piece:
    """One that is not acknowledged yet."""

    version: Version
    index: int
    tries: int = 1


class _Begun(NamedTuple):
    """A version that begins, and when that was by the time of the work."""

    label: Label
    states: Mapping[int, State]
    begun_s: float
