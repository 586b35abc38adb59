"""Copies layers to memory while training goes on: to the rank's own node, and to copy holders.

A version of all layers begins at a commit, after which no rank's state changes until the next
optimizer step. One thread of each rank copies the rank's layers into its own node's memory, hashes
them there piece by piece, and sends the copies that other ranks keep, each piece when its turn
comes. Before a layer is stepped, training waits for the layer's copy in the own node's memory, and
for nothing else. A second thread receives the copies that this rank keeps for others; they arrive
directly in their final memory. Each piece is hashed there and acknowledged, so that no more pieces
are on their way to a receiver than it has buffers for; a damaged piece is asked for again.

A layer that has not changed since the complete version of its epoch is not sent again: receivers
that still have that version make it a part of the new version, too.

A version ends for a rank when all that it sends is acknowledged and all that it is to keep has
arrived. A copy that fails for lack of memory counts as ended and stops nothing else. A rank reports
the end with the next commit; if all ranks have ended the version and none has failed, the version
is complete, and the one before is dropped.

Source: Gemini (SOSP '23), section 5: sub-buffers, copies sent piece by piece.
Differs: pieces are sent from the copy in the own node's memory, so an optimizer step waits for that
memory and not for the network.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Final, NamedTuple

from planaria.checkpoint.memory.arena import Arena
from planaria.checkpoint.memory.arrivals import Arrivals
from planaria.checkpoint.memory.filling import Fill, fill_alone
from planaria.checkpoint.memory.turns import Buffers, Turns, Unload
from planaria.checkpoint.memory.version import Version
from planaria.checkpoint.memory.wire import (
    GOOD,
    Opening,
    State,
    answer_tag,
    fill_tensors,
    head_of,
    opening_answer_tag,
    opening_of,
    opening_tag,
    piece_tag,
    sealed,
    sent_by,
    sent_to,
)
from planaria.core.copies import Label, LayerCopy
from planaria.errors import AbortedError, CheckpointError, PeerLostError
from planaria.transport.links import Links, Tag

logger = logging.getLogger(__name__)

TRIES: Final = 3  # The number of times that a message is sent before its peer counts as lost.
_WHOLE: Final = 1 << 62  # More than any layer has.


class Copier:
    """A rank's part in the copies of one epoch; it has two threads until `close`.

    Args:
        own: layers that this rank holds, and copies into its own node's memory.
        copies: copies of all layers that copy holders keep.
        since, epoch, run: the fields of the labels of this epoch's versions.
        kept: label of the newest version that was complete when the epoch began; None: there is
            none.
        buffers: buffers of each receiver for this rank; None: neither the size nor the number of
            unacknowledged pieces is bounded.
        turns: decides the size of pieces, and when each may be sent.
        virtual_bytes: returns the bytes that a layer's state stands for on paced links; 0: its real
            size.
        fill: copies the bytes of this rank's own layers.
        unload: takes the time in which the virtual bytes would be copied from a device to its
            host's memory.
        failed: takes the reason, the first time that a version cannot be complete.
        timeout_s: longest wait for each message.
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
        run: int = 0,
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
        self._run = run
        self._most_bytes = buffers.piece_bytes if buffers else _WHOLE
        self._window = buffers.count if buffers else _WHOLE
        self._turns = turns
        self._virtual_bytes = virtual_bytes
        self._copies = OwnCopies(arena, virtual_bytes=virtual_bytes, fill=fill, unload=unload)
        self._tell_failed = failed
        self._timeout_s = timeout_s
        self._sends = sent_by(links.rank, copies)
        self._arrivals = Arrivals(
            links,
            arena,
            sent_to(links.rank, copies),
            virtual_bytes=virtual_bytes,
            unload=unload,
            failed=self._fail,
            timeout_s=timeout_s,
        )
        self._all_kept = {*own, *self._arrivals.layers}
        self._changed = threading.Condition()  # Guards all that follows.
        self._label: Label | None = None
        self._uncopied: set[int] = set()
        self._copied_s: dict[int, float] = {}  # When each layer was copied, by its thread's time.
        self._ended_s = 0.0
        self._num_running = 0
        self._has_failed = False
        self._is_told = False
        self._error: Exception | None = None
        self._queues: list[SimpleQueue[_Begun | None]] = []
        self._threads: list[threading.Thread] = []
        self._start("copy", self._give)
        self._start("keep", self._keep)

    # -- what the compute thread calls ------------------------------------------------------------

    def begin(self, age: int, states: Mapping[int, State]) -> None:
        """Begins a version of the state as it is now; the one before must have ended.

        Args:
            age: number of iterations applied to the layers.
            states: views of the rank's own layers, by layer. A layer must not change before
                `wait_copied` has returned for it.
        """
        label = Label(self._since, self._epoch, age, self._run)
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
        """Blocks until the layer is copied, so that it may change.

        Raises:
            AbortedError, PeerLostError: the copying ended early.
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
        """Whether a version was begun in this epoch."""
        return self._label is not None

    @property
    def has_ended(self) -> bool:
        """Whether a version was begun and has ended for this rank; raises as `wait_copied` does."""
        with self._changed:
            self._check()
            return self._label is not None and not self._num_running

    @property
    def has_failed(self) -> bool:
        """Whether the version cannot be complete, because this rank failed to keep a copy."""
        with self._changed:
            return self._has_failed

    def complete(self) -> None:
        """Notes that the version is complete: all ranks have ended it, and none has failed."""
        assert self._label is not None
        self.kept = self._label

    def close(self) -> None:
        """Ends the threads; the version must have ended, or its waits have been aborted."""
        for queue in self._queues:
            queue.put(None)
        for thread in self._threads:
            thread.join()

    # -- threads ----------------------------------------------------------------------------------

    def _start(self, name: str, function: Callable[[Label, Mapping[int, State]], None]) -> None:
        queue: SimpleQueue[_Begun | None] = SimpleQueue()
        thread = threading.Thread(
            target=self._serve, args=(queue, function), name=name, daemon=True
        )
        self._queues.append(queue)
        self._threads.append(thread)
        thread.start()

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

    def _keep(self, label: Label, _: Mapping[int, State]) -> None:
        """Receives the copies of a version that this rank keeps for others."""
        self._arrivals.keep(label, self.kept)

    # -- sending ----------------------------------------------------------------------------------

    def _give(self, label: Label, states: Mapping[int, State]) -> None:
        """Copies this rank's layers, then sends the copies that other ranks keep."""
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
        unanswered: dict[int, deque[_Sent]] = {target: deque() for target, _ in self._sends}
        for target, layer in self._sends:
            if layer not in same or not self._has_same(target, layer, label):
                self._send(target, layer, label, versions[layer], unanswered[target])
        for target, sent in unanswered.items():
            while sent:
                self._take_answer(target, sent)

    def _send(
        self,
        target: int,
        layer: int,
        label: Label,
        version: Version | None,
        unanswered: "deque[_Sent]",
    ) -> None:
        """Sends a layer; each piece waits until the receiver has a buffer for it."""
        opening = opening_of(version) if version else Opening()
        say = partial(self._send_opening, target, layer, label, opening)
        say()
        unanswered.append(_Sent(opening_answer_tag(label, layer), say, is_piece=False))
        for index in range(version.num_pieces if version else 0):
            while sum(one.is_piece for one in unanswered) >= self._window:
                self._take_answer(target, unanswered)
            assert version is not None
            say = partial(self._send_piece, target, version, index)
            say()
            unanswered.append(_Sent(answer_tag(label, layer, index), say))

    def _has_same(self, target: int, layer: int, label: Label) -> bool:
        """Tells a receiver that a layer has not changed; returns whether it still has its copy."""
        self._send_opening(target, layer, label, Opening(is_same=True))
        return self._is_good(target, opening_answer_tag(label, layer))

    def _send_opening(self, target: int, layer: int, label: Label, opening: Opening) -> None:
        self._links.send(target, opening_tag(label, layer), sealed(opening))

    def _send_piece(self, target: int, version: Version, index: int) -> None:
        content = version.piece(index)
        tag = piece_tag(version.label, version.layer, index)
        stands_for = self._virtual_bytes(version.layer) * len(content) // len(version.content)
        self._turns.wait(target, stands_for or len(content))
        self._links.send(target, tag, content, virtual_bytes=stands_for)

    def _take_answer(self, target: int, unanswered: "deque[_Sent]") -> None:
        """Waits for the receiver's answer to the oldest message; sends it again if it was damaged.

        Raises:
            PeerLostError: the message was damaged each of the times that it was sent.
        """
        sent = unanswered[0]
        if self._is_good(target, sent.answer):
            unanswered.popleft()
        elif sent.tries < TRIES:
            sent.tries += 1
            sent.say()
        else:
            what = f"a copy of layer {sent.answer.a}"
            raise PeerLostError(target, f"{what} did not arrive as it was sent, {TRIES} times")

    def _is_good(self, target: int, answer: Tag) -> bool:
        raw = self._links.receive(target, answer, timeout_s=self._timeout_s)
        return bool(raw[0] == GOOD[0])


@dataclass(slots=True)
class _Sent:
    """A message that is not answered yet.

    Attributes:
        answer: tag of the answer.
        say: sends the message once more.
        is_piece: whether it fills one of the receiver's buffers.
        tries: number of times that it was sent.
    """

    answer: Tag
    say: Callable[[], None]
    is_piece: bool = True
    tries: int = 1


class _Begun(NamedTuple):
    """A version that begins.

    Attributes:
        begun_s: time at which it began, as the thread that began it counts time.
    """

    label: Label
    states: Mapping[int, State]
    begun_s: float


# -- a rank's copies of its own layers, in its own node's memory -----------------------------------


class OwnCopies:
    """Makes a rank's copies of its own layers; `Copier` explains the arguments."""

    def __init__(
        self,
        arena: Arena,
        *,
        virtual_bytes: Callable[[int], int],
        fill: Fill,
        unload: Unload,
    ) -> None:
        self._arena = arena
        self._virtual_bytes = virtual_bytes
        self._fill = fill
        self._unload = unload

    def made(self, layer: int, label: Label, state: State, piece_bytes: int) -> Version:
        """A copy of a layer as it is now, without its hashes.

        Args:
            piece_bytes: upper bound on the size of a piece, in the bytes that it stands for.

        Raises:
            CheckpointError: there is no memory for the copy.
        """
        head = head_of(state)
        num_bytes = len(head) + sum(array.nbytes for array in state.values())
        stands_for = self._virtual_bytes(layer) or num_bytes
        num_pieces = -(-stands_for // piece_bytes)
        version = self._arena.begin(
            layer, label, head=head, num_bytes=num_bytes, piece_bytes=-(-num_bytes // num_pieces)
        )
        self._unload(self._virtual_bytes(layer), is_own=True)
        fill_tensors(version, state, self._fill)
        return version

    def is_same(self, version: Version, kept: Label | None) -> bool:
        """Hashes a copy, which is whole then, and compares it with the version of another label.

        The comparison uses the hashes that the other version got when it was made, so corruption of
        its bytes since then has no influence. The new copy keeps its own memory.

        Args:
            kept: label to compare with; None: the copy counts as changed.

        Returns:
            Whether both versions have the same pieces.
        """
        version.seal()
        self._arena.finish(version)
        older = self._arena.peek(version.layer, kept) if kept else None
        return older is not None and older.is_like(version)
