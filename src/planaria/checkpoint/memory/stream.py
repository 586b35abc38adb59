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

TRIES: Final = 3  # Of a piece.
_WHOLE: Final = 1 << 62  # More than any layer has.


class Copier:
    """A rank's part in the copies of one epoch; two threads from its start until `close`.

    Args:
        own: the layers that this rank has a copy of because it holds them.
        copies: of all layers.
        since, epoch, run: of the labels of this epoch's versions.
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
        self._copied_s: dict[int, float] = {}  # When each layer was; all by the time of the work.
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
            states: views of the rank's own layers. They must not change until `wait_copied`.
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
        """Keeps what others send of a version."""
        self._arrivals.keep(label, self.kept)

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
        """Sends a layer, as its receiver has buffers for it."""
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
        """Tells a receiver that a layer has not changed; whether it still has that."""
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
        """Waits for what the receiver says of the oldest message; sends it again if it has to.

        Raises:
            PeerLostError: it never arrives as it was sent.
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
    """A message that is not answered yet, which `say` sends once more."""

    answer: Tag
    say: Callable[[], None]
    is_piece: bool = True
    tries: int = 1


class _Begun(NamedTuple):
    """A version that begins, and when that was by the time of the work."""

    label: Label
    states: Mapping[int, State]
    begun_s: float


# -- a rank's copies of its own layers, in its own node's memory -----------------------------------


class OwnCopies:
    """Makes them; for the arguments see Copier in stream.py."""

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
        """A copy of a layer as it is now, whose hashes are still to be made.

        Args:
            piece_bytes: of which there is one, in the bytes that they stand for.

        Raises:
            CheckpointError: there is no memory for it.
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
        """Hashes a copy, which is whole then; whether it is the same as that of another label was
        when it was made. What is in memory now is the new one, in case the old one has changed."""
        version.seal()
        self._arena.finish(version)
        older = self._arena.peek(version.layer, kept) if kept else None
        return older is not None and older.is_like(version)
