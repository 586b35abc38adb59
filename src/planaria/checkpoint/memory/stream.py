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
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Final, NamedTuple

from planaria.checkpoint.memory.filling import HostCopy
from planaria.checkpoint.memory.landing import DevicePath, Landings, announcement, announcement_tag
from planaria.checkpoint.memory.receiver import CopyReceiver
from planaria.checkpoint.memory.turns import FlowControl
from planaria.checkpoint.memory.version import Bytes, Version
from planaria.checkpoint.memory.wire import (
    GOOD,
    Opening,
    State,
    answer_tag,
    fill_tensors,
    head_of,
    incoming_layers,
    opening_answer_tag,
    opening_message,
    opening_of,
    opening_tag,
    outgoing_copies,
    piece_tag,
)
from planaria.core.copies import Label, LayerCopy
from planaria.errors import AbortedError, CheckpointError, PeerLostError
from planaria.transport.links import Links, Tag

logger = logging.getLogger(__name__)

TRIES: Final = 3  # The number of times that a message is sent before its peer counts as lost.
_UNBOUNDED: Final = 1 << 62  # More than any layer has.


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPlan:
    """The layers that a rank copies in one epoch, where their copies go, and how they are labelled.

    Attributes:
        own: layers that this rank holds, and copies into its own node's memory; ascending.
        copies: copies of all layers that copy holders keep.
        since, epoch, run: the fields of the labels of this epoch's versions.
        complete_label: label of the newest version that was complete when the epoch began; None:
            there is none.
    """

    own: tuple[int, ...]
    copies: Sequence[LayerCopy]
    since: int
    epoch: int
    run: int = 0
    complete_label: Label | None

    def label(self, age: int) -> Label:
        """The label of the version of this age."""
        return Label(self.since, self.epoch, age, self.run)


class Copier:
    """A rank's part in the copies of one epoch; it has two threads until `close`.

    Args:
        host_copy: brings layers into the node's memory.
        flow: size and number of the pieces that are on their way, and when each may be sent.
        on_failure: takes the reason, the first time that a version cannot be complete.
        device_path: the way of pieces that go from device to device, in as many sub-buffers as
            `flow` has buffers, for all targets together; None: pieces go over links.

    Attributes:
        own: layers that this rank holds.
        complete_label: label of the newest version that is complete on all ranks; None: there is
            none.
    """

    def __init__(
        self,
        links: Links,
        plan: CopyPlan,
        *,
        host_copy: HostCopy,
        flow: FlowControl,
        on_failure: Callable[[str], None],
        device_path: DevicePath | None = None,
    ) -> None:
        self.own = plan.own
        self.complete_label = plan.complete_label
        self._links = links
        self._arena = host_copy.arena
        self._plan = plan
        self._piece_bytes_max = flow.buffers.piece_bytes if flow.buffers else _UNBOUNDED
        self._num_unacknowledged_max = flow.buffers.count if flow.buffers else _UNBOUNDED
        self._turns = flow.turns
        self._virtual_bytes = host_copy.virtual_bytes
        self._own_copies = OwnCopies(host_copy)
        self._on_failure = on_failure
        self._timeout_s = flow.timeout_s
        self._sends = outgoing_copies(links.rank, plan.copies)
        incoming = incoming_layers(links.rank, plan.copies)
        landings = None
        if device_path is not None and incoming:
            landings = Landings(
                device_path.receiver, check_epoch=links.check_epoch, on_error=self._end
            )
        self._receiver = CopyReceiver(
            links,
            incoming,
            host_copy=host_copy,
            on_failure=self._fail,
            timeout_s=flow.timeout_s,
            landings=landings,
        )
        self._chunks = device_path.sender if device_path else None
        self._num_announced: Counter[int] = Counter()  # By target.
        self._all_layers = {*plan.own, *self._receiver.layers}
        self._changed = threading.Condition()  # Guards all that follows.
        self._label: Label | None = None
        self._uncopied: set[int] = set()
        self._copied_s: dict[int, float] = {}  # When each layer was copied, by its thread's time.
        self._ended_s = 0.0
        self._num_running = 0
        self._has_failed = False
        self._is_failure_reported = False
        self._error: Exception | None = None
        self._queues: list[SimpleQueue[_VersionStart | None]] = []
        self._threads: list[threading.Thread] = []
        self._start("copy", self._copy_and_send)
        self._start("keep", self._receive)

    # -- what the compute thread calls ------------------------------------------------------------

    def begin(self, age: int, states: Mapping[int, State]) -> None:
        """Begins a version of the state as it is now; the one before must have ended.

        Args:
            age: number of iterations applied to the layers.
            states: views of the rank's own layers, by layer. A layer must not change before
                `wait_copied` has returned for it.
        """
        label = self._plan.label(age)
        with self._changed:
            assert not self._num_running
            self._label = label
            self._uncopied = set(self.own)
            self._has_failed = False
            self._num_running = len(self._threads)
        labels = {self.complete_label, label} if self.complete_label else {label}
        self._arena.keep_only(labels, layers=self._all_layers)
        start = _VersionStart(label, states, self._links.timekeeper.now_s())
        for queue in self._queues:
            queue.put(start)

    def wait_copied(self, layer: int) -> None:
        """Blocks until the layer is copied, so that it may change.

        Raises:
            AbortedError, PeerLostError: the copying ended early; the layer may change all the same.
        """
        with self._changed:
            # The other thread's error does not end the copy, which would be torn, and be whole.
            self._changed.wait_for(lambda: self.is_copied(layer))
            self._check()
            self._links.timekeeper.reach(self._copied_s.get(layer, 0.0))

    def is_copied(self, layer: int) -> bool:
        """Whether the layer is copied, or no copy of it is being made."""
        with self._changed:
            return not self._num_running or layer not in self._uncopied

    def wait_ended(self) -> None:
        """Blocks until the version has ended for this rank; raises as `wait_copied` does, but then
        layers may still be copied."""
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

    def complete(self) -> Label:
        """Notes that the version is complete: all ranks have ended it, and none has failed.

        Returns:
            Its label.
        """
        assert self._label is not None
        self.complete_label = self._label
        return self._label

    def close(self) -> None:
        """Ends the threads; the version must have ended, or its waits have been aborted."""
        for queue in self._queues:
            queue.put(None)
        self._receiver.close()
        for thread in self._threads:
            thread.join()
        self._error = None  # It refers to the frames in which it was raised, which hold layers.

    # -- threads ----------------------------------------------------------------------------------

    def _start(self, name: str, function: Callable[[Label, Mapping[int, State]], None]) -> None:
        queue: SimpleQueue[_VersionStart | None] = SimpleQueue()
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
        queue: SimpleQueue["_VersionStart | None"],
        function: Callable[[Label, Mapping[int, State]], None],
    ) -> None:
        while (version := queue.get()) is not None:
            self._links.timekeeper.reach(version.start_s)
            try:
                function(version.label, version.states)
            except Exception as error:
                self._end(error)
                return
            with self._changed:
                self._ended_s = max(self._ended_s, self._links.timekeeper.now_s())
                self._num_running -= 1
                self._changed.notify_all()

    def _end(self, error: Exception) -> None:
        """Ends the copying of this epoch with the error of a thread."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
        if not isinstance(error, AbortedError | PeerLostError):
            logger.error("rank %s: a thread of copies died", self._links.rank, exc_info=error)

    def _fail(self, reason: str) -> None:
        with self._changed:
            is_reported, self._has_failed = self._is_failure_reported, True
            self._is_failure_reported = True
        if not is_reported:
            self._on_failure(reason)

    def _receive(self, label: Label, _: Mapping[int, State]) -> None:
        """Receives the copies of a version that this rank keeps for others."""
        self._receiver.receive(label, self.complete_label)

    # -- sending ----------------------------------------------------------------------------------

    def _copy_and_send(self, label: Label, states: Mapping[int, State]) -> None:
        """Copies this rank's layers, then sends the copies that other ranks keep."""
        try:
            versions = self._copy_own(label, states)
        finally:  # From here on the layers may change, whatever has ended the copying.
            with self._changed:
                self._uncopied.clear()
                self._changed.notify_all()
        older = self.complete_label
        if older is not None and older.epoch != self._plan.epoch:
            older = None
        unchanged = {
            layer
            for layer, version in versions.items()
            if version and self._own_copies.finish_and_compare(version, older)
        }
        sent = (versions[layer] for _, layer in self._sends if layer not in unchanged)
        self._turns.deal([size for version in sent if version for size in self._sizes(version)])
        unanswered: dict[int, deque[_Unanswered]] = {target: deque() for target, _ in self._sends}
        for target, layer in self._sends:
            if layer in unchanged:  # The receiver answers nothing before it has earlier layers.
                self._take_answers(target, unanswered[target])
                if self._offer_unchanged(target, layer, label):
                    continue
            self._send(target, layer, label, versions[layer], unanswered[target])
        for target, messages in unanswered.items():
            self._take_answers(target, messages)

    def _copy_own(self, label: Label, states: Mapping[int, State]) -> dict[int, Version | None]:
        """Copies this rank's layers; returns the copies by layer, None where memory is lacking."""
        versions: dict[int, Version | None] = {}
        piece_bytes = self._turns.chunk_bytes(self._piece_bytes_max)
        for layer in self.own:
            try:
                versions[layer] = self._own_copies.copy_layer(
                    layer, label, states[layer], piece_bytes
                )
            except CheckpointError as error:
                versions[layer] = None
                self._fail(str(error))
            with self._changed:
                self._copied_s[layer] = self._links.timekeeper.now_s()
                self._uncopied.discard(layer)
                self._changed.notify_all()
        return versions

    def _send(
        self,
        target: int,
        layer: int,
        label: Label,
        version: Version | None,
        unanswered: "deque[_Unanswered]",
    ) -> None:
        """Sends a layer; each piece waits until there is a buffer for it."""
        opening = opening_of(version) if version else Opening()
        send = partial(self._send_opening, target, layer, label, opening)
        send()
        unanswered.append(_Unanswered(opening_answer_tag(label, layer), send, is_piece=False))
        for index in range(version.num_pieces if version else 0):
            while sum(message.is_piece for message in unanswered) >= self._num_unacknowledged_max:
                self._take_answer(target, unanswered)
            assert version is not None
            send = partial(self._send_piece, target, version, index)
            unanswered.append(_Unanswered(answer_tag(label, layer, index), send, buffer=send()))
        # A chunk that is asked for again must come before those of the next layer. If that one goes
        # to another target, it needs the same sub-buffers.
        if self._chunks is not None:
            self._take_answers(target, unanswered)

    def _sizes(self, version: Version) -> list[int]:
        """The bytes that each piece of a layer stands for."""
        pieces = map(version.piece, range(version.num_pieces))
        return [self._stands_for(version, piece) or len(piece) for piece in pieces]

    def _stands_for(self, version: Version, piece: Bytes) -> int:
        """The bytes of a larger layer that a piece stands for; 0: the layer stands for itself."""
        return self._virtual_bytes(version.layer) * len(piece) // len(version.content)

    def _offer_unchanged(self, target: int, layer: int, label: Label) -> bool:
        """Tells a receiver that a layer has not changed; returns whether it still has its copy."""
        self._send_opening(target, layer, label, Opening(is_same=True))
        return self._receive_answer(target, opening_answer_tag(label, layer))

    def _send_opening(self, target: int, layer: int, label: Label, opening: Opening) -> int:
        self._links.send(target, opening_tag(label, layer), opening_message(opening))
        return -1

    def _send_piece(self, target: int, version: Version, index: int) -> int:
        """Sends a piece when its turn comes; returns the device's sub-buffer that it takes, or -1.

        A piece that goes over the device is copied to its sub-buffer before its turn comes.
        """
        content = version.piece(index)
        if self._chunks is not None:
            buffer, number = self._chunks.load(content), self._num_announced[target]
            self._turns.wait(target, len(content))
            self._num_announced[target] += 1
            self._chunks.send(target, number, buffer)
            self._links.send(target, announcement_tag(number), announcement(index))
            return buffer
        tag = piece_tag(version.label, version.layer, index)
        stands_for = self._stands_for(version, content)
        self._turns.wait(target, stands_for or len(content))
        self._links.send(target, tag, content, virtual_bytes=stands_for)
        return -1

    def _take_answers(self, target: int, unanswered: "deque[_Unanswered]") -> None:
        """Waits until all messages to a receiver are answered, and sends damaged ones again."""
        while unanswered:
            self._take_answer(target, unanswered)

    def _take_answer(self, target: int, unanswered: "deque[_Unanswered]") -> None:
        """Waits for the receiver's answer to the oldest message; sends it again if it was damaged.

        Raises:
            PeerLostError: the message was damaged each of the times that it was sent.
        """
        message = unanswered[0]
        is_good = self._receive_answer(target, message.answer)
        if self._chunks is not None and message.buffer >= 0:
            self._chunks.free(message.buffer)
        if is_good:
            unanswered.popleft()
        elif message.tries < TRIES:
            message.tries += 1
            message.buffer = message.send()
        else:
            what = f"a copy of layer {message.answer.a}"
            raise PeerLostError(target, f"{what} arrived damaged {TRIES} times")

    def _receive_answer(self, target: int, answer: Tag) -> bool:
        """Waits for a receiver's answer; returns whether the message was good."""
        raw = self._links.receive(target, answer, timeout_s=self._timeout_s)
        return bool(raw[0] == GOOD[0])


@dataclass(slots=True)
class _Unanswered:
    """A message that is not answered yet.

    Attributes:
        answer: tag of the answer.
        send: sends the message once more, and returns the sub-buffer of the device that it takes.
        is_piece: whether it fills one of the receiver's buffers.
        buffer: the sub-buffer of the device that it takes; -1: none.
        tries: number of times that it was sent.
    """

    answer: Tag
    send: Callable[[], int]
    is_piece: bool = True
    buffer: int = -1
    tries: int = 1


class _VersionStart(NamedTuple):
    """A version that begins.

    Attributes:
        start_s: time at which it begins, as the thread that begins it counts time.
    """

    label: Label
    states: Mapping[int, State]
    start_s: float


# -- a rank's copies of its own layers, in its own node's memory -----------------------------------


class OwnCopies:
    """Makes a rank's copies of its own layers; `Copier` explains the arguments."""

    def __init__(self, host_copy: HostCopy) -> None:
        self._arena = host_copy.arena
        self._host_copy = host_copy

    def copy_layer(self, layer: int, label: Label, state: State, piece_bytes: int) -> Version:
        """Copies a layer as it is now; returns the copy, without its hashes.

        Args:
            piece_bytes: upper bound on the size of a piece, in the bytes that it stands for.

        Raises:
            CheckpointError: there is no memory for the copy.
        """
        head = head_of(state)
        num_bytes = len(head) + sum(array.nbytes for array in state.values())
        virtual_bytes = self._host_copy.virtual_bytes(layer)
        stands_for = virtual_bytes or num_bytes
        num_pieces = -(-stands_for // piece_bytes)
        version = self._arena.begin(
            layer, label, head=head, num_bytes=num_bytes, piece_bytes=-(-num_bytes // num_pieces)
        )
        self._host_copy.device_to_host(virtual_bytes, is_own=True)
        fill_tensors(version, state, self._host_copy.fill)
        return version

    def finish_and_compare(self, version: Version, older_label: Label | None) -> bool:
        """Hashes a copy, which is whole then, and compares it with the version of another label.

        The comparison uses the hashes that the other version got when it was made, so corruption of
        its bytes since then has no influence. The new copy keeps its own memory.

        Args:
            older_label: label to compare with; None: the copy counts as changed.

        Returns:
            Whether both versions have the same pieces.

        Raises:
            AbortedError: the copy is given up, because its bytes may be anything.
        """
        if self._host_copy.is_void():
            raise AbortedError(f"the copy of iteration {version.label.age} is given up")
        version.hash_pieces()
        self._arena.finish(version)
        older = self._arena.peek(version.layer, older_label) if older_label else None
        return older is not None and older.has_same_pieces(version)
