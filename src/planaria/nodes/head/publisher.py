"""Completes saves by their manifests, and removes failed and old ones, for the coordinator.

The disk or store may take long, or never answer, while the coordinator must beat and answer
heartbeats. So `PublisherThread` carries out the requests to its `Publisher` in a thread of its own,
one after the other. Apart from it, only the coordinator's journal (journal.py) uses a disk.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Final

from planaria.checkpoint.disk.parts import (
    EpochMark,
    HeadMark,
    RunPlace,
    newer_run,
    remove_runs,
)
from planaria.checkpoint.disk.storage import may_pass
from planaria.checkpoint.disk.tiers import UNPUBLISHED, Manifest, Tier
from planaria.checkpoint.disk.time_limits import LOOK_TIMEOUT_S, answer_in_time
from planaria.coordinator.commands import (
    Discard,
    Pruned,
    Publish,
    Published,
    SaveChecked,
    SavesListed,
)
from planaria.coordinator.saves import SLOW_S, VersionEvent
from planaria.core.messages import BY_PUBLISHER, SaveFailed
from planaria.core.records import Saved, ToLauncher, Unsaved, Warned
from planaria.errors import CheckpointError, UnreadableError, UnwritableError
from planaria.nodes.head.remote.run_record import JournalHold

logger = logging.getLogger(__name__)

_REMOVALS_MAX: Final = 64  # Waiting requests; if there are more, failed saves are left to pruning.
_AGAIN_S: Final = 5.0  # The first pause before a failed request is made again.
_POLL_S: Final = 0.02
# A save that a disk or store refuses is published again after this time.
_NEXT_TRY_S: Final = 1.0
# So it is told why before the coordinator, which waits for the last save, gives it up.
_PATIENCE_SHARE: Final = 0.9


@dataclass(frozen=True, slots=True)
class MarkedRun:
    """A run that nodes find at the place of saves when they have lost their head.

    Attributes:
        place: directory of the run.
        head: addresses at which the head listens; None: nobody looks for it.
        hold: hold of this head on the run's journal; None: no other head can take the run up.
    """

    place: RunPlace
    head: HeadMark | None = None
    hold: JournalHold | None = None


class Publisher:
    """Publishes and discards versions of the disk tier.

    Args:
        fingerprint: description of the job to write into each checkpoint.
        keep: number of newest checkpoints to keep; 0: all.
        run: the run, as nodes that lose their head find it; None: they end with it.
        queue: sends an event to the coordinator.
        notify: sends a message to the launcher.
    """

    def __init__(
        self,
        tier: Tier,
        *,
        fingerprint: Mapping[str, Any],
        keep: int,
        run: MarkedRun | None = None,
        queue: Callable[[VersionEvent | SaveChecked | SaveFailed], None],
        notify: Callable[[ToLauncher], None],
    ) -> None:
        self._tier = tier
        self._fingerprint = fingerprint
        self._keep = keep
        self._run = None if run is None else run.place
        self._head = None if run is None else run.head
        self._run_name = "" if run is None else run.place.name
        self._hold = None if run is None else run.hold
        self._queue = queue
        self._notify = notify

    def tell_saves(self, *, source: str) -> bool:
        """Reports which saves exist, of this run and of earlier ones, the newest first.

        False if the disk refuses to list them, or a save could not be read.

        Args:
            source: the save from which this run started; "": none. The coordinator knows of it, so
                it is reported only if it does not exist any more.
        """
        refusals, has_source = [], not source
        try:
            for version in self._tier.each_version():
                has_source = has_source or version.name == source
                if version.manifest and version.manifest.layers and version.name != source:
                    self._queue(Published(version.iteration, version.epoch))
                elif version.is_unreadable and version.name != source:
                    refusals.append(version.reason)
            if not has_source:
                self._queue(Pruned(source))
            self._queue(SavesListed())
        except CheckpointError as error:  # No SavesListed is sent: a recovery goes on waiting.
            refusals.append(str(error))
        if refusals:
            text = f"older saves cannot be used until they can be read: {refusals[0]}"
            self._notify(Warned(text=text))
        return not refusals

    def publish(
        self, command: Publish, *, tries_again: Callable[[CheckpointError], bool] = lambda _: False
    ) -> bool:
        """Creates the manifest of a save; False if that fails, or if another head saves there.

        The coordinator before this one may have created it already, right before it ended.

        Args:
            tries_again: whether to try again after an error of the disk or store; it may block.
        """
        manifest = Manifest(
            iteration=command.iteration,
            epoch=command.epoch,
            job=self._fingerprint,
            layers=command.files,
        )
        try:
            while True:
                try:
                    self._publish(manifest)
                    break
                except (UnreadableError, UnwritableError) as error:
                    if not tries_again(error):
                        raise
        except CheckpointError as error:
            failed = SaveFailed(
                rank=BY_PUBLISHER,
                epoch=command.epoch,
                iteration=command.iteration,
                reason=str(error),
            )
            self._queue(failed)
            return False
        self._queue(Published(command.iteration, command.epoch))
        self._notify(Saved(iteration=command.iteration, epoch=command.epoch))
        return True

    def _publish(self, manifest: Manifest) -> None:
        if newer := newer_run(self._tier.storage, self._run_name):
            raise CheckpointError(
                f"a newer run of this job saves in {self._tier.storage.where('')} ({newer}); "
                "this one has nothing to save there any more: stop it, or the newer one"
            )
        try:
            self._check_hold()
        except UnreadableError as error:  # The journal's disk must not cost a save.
            logger.warning("%s", error)
        self._tier.publish(manifest)

    def _check_hold(self) -> None:
        """Raises an error if another head has taken the run up, since its saves are there now.

        Raises:
            CheckpointError: it has; an UnreadableError: that is not known.
        """
        if self._hold is None:
            return
        directory = str(self._hold.directory)
        try:
            is_lost = answer_in_time(self._hold.is_lost, where=directory, timeout_s=LOOK_TIMEOUT_S)
        except (MemoryError, OSError) as error:
            raise UnreadableError(
                f"whose journal is in {directory} is not known: {error}"
            ) from error
        if is_lost:
            raise CheckpointError("another head has taken this run up, and saves for it")

    def mark_epoch(self, epoch: int, nodes: tuple[int, ...]) -> bool:
        """Marks an epoch's members for nodes that lose their head (docs/protocol.md, P1).

        False if the disk refuses, or if another head has taken the run up, and marks its epochs.

        After it, where the head listens is written; another head may have written there meanwhile,
        while this one was cut off.
        """
        if self._run is None:
            return True
        try:
            self._check_hold()
            self._run.write_mark(EpochMark(epoch=epoch, nodes=nodes, job=dict(self._fingerprint)))
            if self._head is not None:
                self._run.write_head(self._head)
        except CheckpointError as error:
            self._notify(Warned(text=f"if the head is lost, nodes cannot save: {error}"))
            return False
        return True

    def prune(self, unused: frozenset[str]) -> None:
        """Removes saves that are too old, and incomplete ones, these even if all saves are kept.

        What nodes of earlier runs have saved by themselves is older than the newest save.

        Args:
            unused: versions that do not count as saves to keep.
        """
        refusals = []
        try:
            self._check_hold()
            for source in self._tier.each_pruned(self._keep, unused=unused):
                self._queue(Pruned(source))
        except CheckpointError as error:
            refusals.append(error)
        try:
            if self._run is not None:
                remove_runs(self._tier.storage, before=self._run.name)
        except CheckpointError as error:
            refusals.append(error)
        if refusals:
            self._notify(Warned(text=f"old checkpoints stay: {refusals[0]}"))

    def discard(self, iteration: int, epoch: int) -> None:
        """Removes the files of a failed save, unless another head may have a save of that name."""
        try:
            if newer_run(self._tier.storage, self._run_name):
                return
            self._check_hold()
            self._tier.discard(iteration, epoch)
        except CheckpointError as error:
            self._notify(Warned(text=str(error)))

    def check_save(
        self,
        source: str,
        layer: int,
        *,
        tries_again: Callable[[CheckpointError], bool] = lambda _: False,
    ) -> None:
        """Reads what a node could not read of a version, and reports whether it is as it was saved.

        A damaged version is marked as not to be used. It stays on disk, for a person to look at.
        The view of one node does not suffice for that: its mount of the saves may be gone.

        Args:
            layer: layer of the version; -1: its manifest.
            tries_again: whether to try again after an error that may pass; it may block.
        """
        where, is_sound, text = self._tier.storage.where(source), False, ""
        try:
            while not is_sound:
                try:
                    self._tier.check(source, layer)
                    is_sound = True
                except UnreadableError as error:
                    if not (may_pass(error) and tries_again(error)):
                        raise
        except UnreadableError as error:
            text = f"{where} is not used as long as it cannot be read: {error}"
        except CheckpointError:
            text = self._set_aside(source)
        if text:
            self._notify(Warned(text=text))
        self._queue(SaveChecked(source, is_sound))

    def _set_aside(self, source: str) -> str:
        text = f"{self._tier.storage.where(source)} is damaged, and not used any more"
        try:
            self._tier.set_aside(source)
        except CheckpointError as error:
            return f"{text}: {error}"
        return text

    def publish_start(self, epoch: int) -> None:
        """Publishes a save without layers, if the job has no save.

        So the job can be resumed, from its seed or given weights.
        """
        manifest = Manifest(iteration=0, epoch=epoch, job=self._fingerprint, layers=())
        try:
            self._check_hold()
            # If there is a save that cannot be read now, a resumed job must not silently restart.
            if all(version.reason == UNPUBLISHED for version in self._tier.each_version()):
                self._tier.publish(manifest)
        except CheckpointError as error:
            self._notify(Warned(text=str(error)))


class Unfinished(Enum):
    """Kind of the requests that are not carried out when the job stops waiting, the worst first."""

    SAVES = "a save, and what comes behind it"
    REMOVALS = "what no save depends on"
    NOTHING = "nothing that is of use after the job"


@dataclass(frozen=True, slots=True)
class _DiskRequest:
    """A request to the disk.

    Attributes:
        act: function that carries it out.
        what: description in words, to follow "to" in messages.
        unfinished: kind that it has if it is not carried out.
    """

    act: Callable[[], None]
    what: str
    unfinished: Unfinished = Unfinished.NOTHING


class _Retry:
    """A request that is made again as long as it fails, each time after a longer pause.

    Attributes:
        ask: function that makes it again; None: it has not failed.
        at_s: time at which it is to be made again.
    """

    def __init__(self) -> None:
        self.ask: Callable[[], None] | None = None
        self.at_s = 0.0
        self._pause_s = _AGAIN_S / 2.0

    def note(self, ask: Callable[[], None], now_s: float, *, is_done: bool) -> None:
        """Notes whether the request was carried out."""
        self.ask = None if is_done else ask
        self._pause_s = _AGAIN_S / 2.0 if is_done else 2.0 * self._pause_s
        self.at_s = now_s + self._pause_s


class PublisherThread:
    """Makes a publisher act in a thread, in the order of the requests, without waiting for it.

    Args:
        where: place of the saves, to show in messages.
        notify: sends a message to the launcher.
        on_error: callback, called in the thread with an unexpected exception of the publisher.
        now_s: returns the time, in seconds.
    """

    def __init__(
        self,
        publisher: Publisher,
        *,
        where: str,
        notify: Callable[[ToLauncher], None],
        on_error: Callable[[Exception], None],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._publisher = publisher
        self._where = where
        self._notify = notify
        self._on_error = on_error
        self._now_s = now_s
        self._requests: deque[_DiskRequest] = deque()  # The first one is under way.
        self._removals: set[tuple[int, int]] = set()  # Failed saves whose removals wait.
        self._changed = threading.Condition()  # Its lock is reentrant, on which `tick` relies.
        self._since_s = 0.0
        self._warned_s = SLOW_S / 2.0
        self._patience_s: tuple[float, float] | None = None  # Timeouts of a save and of removals.
        self._has_failed = False
        self._refusal = ""  # Why the request under way has not succeeded so far.
        self._listing, self._marking = _Retry(), _Retry()
        # A request that is never answered must not hold up the end of the process.
        threading.Thread(target=self._run, name="publisher", daemon=True).start()

    def tell_saves(self, *, source: str) -> None:
        """See Publisher."""
        self._add_request(lambda: self._list_saves(source), "list older saves")

    def publish(self, command: Publish) -> None:
        """See Publisher; afterwards saves that are too old are removed.

        If the disk or store refuses, it is tried again: for SLOW_S or, once the job waits for it,
        for as long as the job does.
        """
        what = f"make the save of iteration {command.iteration} complete"
        self._add_request(lambda: self._publish(command), what, unfinished=Unfinished.SAVES)

    def discard(self, command: Discard) -> None:
        """Reports a failed save, and queues the removal of its files, unless that waits already."""
        iteration, epoch = command.iteration, command.epoch
        if command.reason:
            self._notify(Unsaved(iteration=iteration, epoch=epoch, reason=command.reason))
        with self._changed:
            is_waiting = (iteration, epoch) in self._removals
            if is_waiting or len(self._requests) >= _REMOVALS_MAX:
                return
            self._removals.add((iteration, epoch))
        what = f"remove the failed save of iteration {iteration}"
        remove = partial(self._discard, iteration, epoch)
        self._add_request(remove, what, unfinished=Unfinished.REMOVALS)

    def check_save(self, source: str, layer: int) -> None:
        """See Publisher."""
        check = partial(self._publisher.check_save, source, layer)
        act = partial(check, tries_again=self._awaits_next_try)
        self._add_request(act, f"check {source}, which a node could not read")

    def mark_epoch(self, epoch: int, nodes: tuple[int, ...]) -> None:
        """See Publisher."""
        self._add_request(lambda: self._mark_epoch(epoch, nodes), f"mark epoch {epoch}")

    def publish_start(self, epoch: int) -> None:
        """See Publisher."""
        what = "note that the job begins anew"
        self._add_request(
            lambda: self._publisher.publish_start(epoch), what, unfinished=Unfinished.SAVES
        )

    def tick(self) -> None:
        """Tells the user if a request takes long, and again when it takes twice as long.

        Also lists the saves again, or marks the newest epoch again, if that has failed.
        """
        with self._changed:
            if not self._requests:
                for retry in (self._marking, self._listing):
                    if retry.ask is not None and self._now_s() >= retry.at_s:
                        retry.ask()
                return
            what, slow_s = self._requests[0].what, self._now_s() - self._since_s
            waiting_text, refusal = self._waiting_text(), self._refusal
        if slow_s >= 2.0 * self._warned_s:
            self._warned_s = slow_s
            why = f"refuses ({refusal})" if refusal else "is slow"
            text = (
                f"{self._where} {why}: it has taken {slow_s:.0f} s so far to {what}; {waiting_text}"
            )
            self._notify(Warned(text=text))

    def end_training(self, *, timeout_s: float, removal_timeout_s: float) -> None:
        """Must be called when training has ended, so that the job now waits for the requests.

        Args:
            timeout_s: maximum wait for each save, from when it is under way.
            removal_timeout_s: maximum wait for all other requests together.
        """
        with self._changed:
            if self._patience_s is None:
                self._warned_s = SLOW_S / 2.0  # The user waits from now on.
            self._patience_s = timeout_s, removal_timeout_s

    def continue_training(self) -> None:
        """Must be called while training goes on, since it may have ended for a while before."""
        with self._changed:
            self._patience_s = None

    def finish(self, *, timeout_s: float, removal_timeout_s: float) -> Unfinished:
        """Blocks until all requests are carried out, take too long, or fail; returns what is left.

        Args:
            timeout_s: see `end_training`.
            removal_timeout_s: see `end_training`.
        """
        self.end_training(timeout_s=timeout_s, removal_timeout_s=removal_timeout_s)
        end_s = self._now_s() + removal_timeout_s
        with self._changed:
            while self._requests:
                unfinished = self._unfinished_kind()
                deadline_s = self._since_s + timeout_s if unfinished is Unfinished.SAVES else end_s
                if self._has_failed or self._now_s() >= deadline_s:
                    return unfinished
                self._changed.wait(_POLL_S)
        return Unfinished.NOTHING

    def _unfinished_kind(self) -> Unfinished:
        kinds = {request.unfinished for request in self._requests}
        return next(
            (unfinished for unfinished in Unfinished if unfinished in kinds), Unfinished.NOTHING
        )

    def _waiting_text(self) -> str:
        """Text that says what the job does while a request takes long, and what the user can do."""
        if self._patience_s is None:
            todo = "Check the disk or store, or save less often"
            return f"training goes on, and newer saves wait. {todo}"
        patience_s = self._patience_s[0 if self._unfinished_kind() is Unfinished.SAVES else 1]
        return f"the job waits for it, {patience_s:g} s at most. Check the disk or store"

    def _list_saves(self, source: str) -> None:
        is_listed = self._publisher.tell_saves(source=source)
        with self._changed:
            ask = partial(self.tell_saves, source=source)
            self._listing.note(ask, self._now_s(), is_done=is_listed)

    def _mark_epoch(self, epoch: int, nodes: tuple[int, ...]) -> None:
        is_marked = self._publisher.mark_epoch(epoch, nodes)
        with self._changed:
            ask = partial(self.mark_epoch, epoch, nodes)
            self._marking.note(ask, self._now_s(), is_done=is_marked)

    def _discard(self, iteration: int, epoch: int) -> None:
        with self._changed:
            self._removals.discard((iteration, epoch))
        self._publisher.discard(iteration, epoch)

    def _publish(self, command: Publish) -> None:
        if self._publisher.publish(command, tries_again=self._awaits_next_try):
            prune = partial(self._publisher.prune, command.unused)
            self._add_request(prune, "remove old saves", unfinished=Unfinished.REMOVALS)

    def _awaits_next_try(self, error: CheckpointError) -> bool:
        """Waits until a refused request is to be made again; False: it has had its time."""
        with self._changed:
            patience_s = SLOW_S
            if self._patience_s is not None:
                patience_s = _PATIENCE_SHARE * self._patience_s[0]
            if self._now_s() + _NEXT_TRY_S >= self._since_s + patience_s:
                return False
            self._refusal = str(error)
        time.sleep(_NEXT_TRY_S)
        return True

    def _add_request(
        self, act: Callable[[], None], what: str, *, unfinished: Unfinished = Unfinished.NOTHING
    ) -> None:
        with self._changed:
            self._requests.append(_DiskRequest(act, what, unfinished))
            if len(self._requests) == 1:
                self._since_s = self._now_s()
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._requests:
                    self._changed.wait()
                request = self._requests[0]
            try:
                request.act()
            except Exception as error:
                self._on_error(error)
                with self._changed:
                    self._has_failed = True
                    self._changed.notify_all()
                return
            with self._changed:
                self._requests.popleft()
                self._since_s, self._refusal = self._now_s(), ""
                self._changed.notify_all()
