"""The copies of one process group: what a rank keeps, sends, restores and writes while it lasts.

MemoryCheckpointer makes one for the default process group of the moment, and another one if that
group breaks and is made anew of the ranks that live. All ranks make the same calls in the same
order.
"""

import logging
import os
import secrets
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Final

import torch.distributed as dist

from planaria.checkpoint.memory.filling import HostCopy, no_device, no_virtual_bytes
from planaria.checkpoint.memory.stream import Copier, CopyPlan
from planaria.checkpoint.memory.turns import AtOnce, Buffers, FlowControl
from planaria.checkpoint.memory.wire import State
from planaria.core.copies import IdleSpan, Label, LayerCopy
from planaria.engine.devices import device_at
from planaria.errors import AbortedError, CheckpointError, ConfigError, PeerLostError
from planaria.placement.layer_copies import shard_copies
from planaria.placement.placement import Placement
from planaria.torchrun.arguments import Options, check_room_on_all
from planaria.torchrun.collectives import BetweenCollectives, between_collectives
from planaria.torchrun.gathering import gather_bytes, gather_records, true_on_all
from planaria.torchrun.group_sockets import LossWatch, connections_between_ranks, errors_of_torch
from planaria.torchrun.host_bytes import HostBytes
from planaria.torchrun.persisting import (
    BroughtShards,
    KnownSaves,
    PersistentTier,
    Readiness,
    unread_error,
)
from planaria.torchrun.rank_memory import RankFacts, RankMemory, epoch_after
from planaria.torchrun.restores import Restores
from planaria.torchrun.save_checks import (
    check_on_all,
    check_tensors_on_all,
    parts_of_state,
    readable_on_all,
)
from planaria.torchrun.shard_placement import keepers_of, place_on_all, survival, whole_everywhere
from planaria.torchrun.shards import TrainingState
from planaria.transport.connection import LinkProtection
from planaria.transport.links import UNLIMITED_S, Address, Links
from planaria.transport.strangers import num_files_for, raise_soft_limit

logger = logging.getLogger(__name__)

_LINK_TIMEOUT_S: Final = 600.0
_NUM_BUFFERS: Final = 4
_EPOCH: Final = 0  # The only epoch of the links, which live as long as the group.


class GroupCopies:
    """A rank's part in the copies of the default process group.

    Args:
        had_version: whether a group before this one had a version, as far as this rank knows.

    Attributes:
        rank: number of this rank.
        ranks: facts about all ranks, by rank.
        links: links to the other ranks.
        connections: connections of the process group, if ranks meet after a loss.
    """

    def __init__(
        self,
        memory: RankMemory,
        state: TrainingState,
        tier: PersistentTier | None,
        options: Options,
        *,
        had_version: bool,
    ) -> None:
        self._memory, self._state, self._tier, self._options = memory, state, tier, options
        self._device = device_at(next(state.model.parameters()).device)
        self._host_bytes = HostBytes(self._device)
        self.rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._turns: BetweenCollectives | None = None
        self._copier: Copier | None = None
        self._placement, self._num_copies = Placement(()), options.copies
        self._saved, self._had_version = -1, had_version
        # How many times `persist_every` the newest version has whose save was begun.
        self._num_persisted = 0
        # Before this rank makes connections of its own to others.
        self.connections = connections_between_ranks() if options.store_port else frozenset()
        random_bytes = gather_bytes(secrets.token_bytes(24))[0]
        # A random number, since unrelated runs may use the same epochs.
        self._run = int.from_bytes(random_bytes[16:]) >> 2
        raise_soft_limit(num_files_for(self._world_size))
        protection = LinkProtection(num_ranks=self._world_size)
        token = random_bytes[:16]
        self.links = Links(self.rank, token=token, host=options.host, protection=protection)
        self._readiness = Readiness(self.links, self._world_size)
        os.register_at_fork(after_in_child=partial(_leave, weakref.ref(self.links)))
        try:
            with errors_of_torch():
                self._meet()
        except BaseException:
            self.links.close()
            raise
        self._watch: LossWatch | None = None
        if options.store_port:
            self._watch = LossWatch(self.links, self._world_size, self.connections)
        self._epoch = epoch_after(self.ranks)  # The epoch in the labels of this run's versions.
        self._is_above_saves = tier is None  # Whether that is above the epochs behind memory, too.
        # The version of earlier runs that is kept until one of this run is complete.
        self._complete_label = next(iter(self._restores.complete()), None)

    def _meet(self) -> None:
        """Learns of all other ranks, and links to them.

        Raises:
            PeerLostError: a rank was lost meanwhile.
        """
        self.ranks = gather_records(RankFacts, self._facts())
        self._nodes = [rank.node for rank in self.ranks]
        copies = self._options.copies
        if not self.rank and (num_nodes := len({*self._nodes})) < copies:
            logger.warning("only %s of %s copies are made: too few nodes", num_nodes, copies)
        self._restores = self._restores_of([rank.labels for rank in self.ranks])
        addresses = {number: rank.address for number, rank in enumerate(self.ranks)}
        others_than_this = addresses.keys() - {self.rank}
        self.links.enter(_EPOCH, addresses=addresses, peers=others_than_this)
        true_on_all(
            True
        )  # If a rank is gone by now, it fails at once; a missing link is waited for.
        self.links.wait_linked(timeout_s=_LINK_TIMEOUT_S)

    @property
    def stores(self) -> dict[int, Address]:
        """The address of each rank's store, by rank; a port is 0 where there is none."""
        return {
            number: (rank.address[0], rank.store_port) for number, rank in enumerate(self.ranks)
        }

    @property
    def is_alarmed(self) -> bool:
        """Whether a rank was taken for lost, rightly or not."""
        return self._watch is not None and self._watch.is_alarmed

    @property
    def name(self) -> str:
        """A name that no other group of this or another job has."""
        return str(self._run)  # The epoch may not have risen yet on a rank that lost its peers.

    @property
    def has_version(self) -> bool:
        """Whether there is a complete version as far as this rank knows: its own part has ended."""
        copier = self._copier
        label = copier.complete_label if copier is not None else self._complete_label
        if copier is None or label is not None:
            return label is not None
        try:
            return copier.has_ended and not copier.has_failed
        except (AbortedError, PeerLostError):
            return False

    def _facts(self) -> RankFacts:
        return RankFacts(
            node=self._memory.node,
            address=self.links.address,
            labels=self._memory.versions(),
            once_complete=self._memory.labels_once_complete(),
            begin_us=time.time_ns() // 1000,
            domain=self._options.domain,
            store_port=self._options.store_port,
        )

    # -- restoring --------------------------------------------------------------------------------

    def restore(self) -> int:
        """Restores the newest version; see `MemoryCheckpointer.restore`."""
        with errors_of_torch(), self._pause_watching():
            return self._restore_newest()

    def _restore_newest(self) -> int:
        if self._copier is not None:
            self._end_run(self._copier)
        self._state.reshard()
        check_tensors_on_all(self._state)
        in_memory, saves = self._restores.complete(), self._saves_of_all_ranks()
        on_disk, problem, reasons = saves.labels, saves.problem, []
        for label in sorted({*in_memory, *on_disk}, key=_begin_of, reverse=True):
            if saves.unread and _begin_of(label) < saves.unread:
                raise unread_error(problem)
            reason = self._restore_version(label, label in in_memory, label in on_disk)
            if not reason:
                self._complete_label, self._saved = label, label.age - 1
                self._memory.note_complete(label)
                if not (saves.is_listed or self.rank):
                    logger.warning("there may be newer saves than what memory had: %s", problem)
                self._note_persisted(label, on_disk)
                self._copy_anew(label)
                return label.age
            reasons.append(f"iteration {label.age}: {reason}")
            if not self.rank:
                logger.warning("the copies of iteration %s are not used: %s", label.age, reason)
        if self._saved >= 0:  # The model has been trained, so 0 would be wrong.
            raise CheckpointError("no version in memory is complete: the model stays as it is")
        if true_on_all(self._had_version)[0]:
            raise CheckpointError(
                "the ranks that are left have no version whole in memory; start the script again: "
                "memory of the machines of lost ranks may have the rest"
            )
        if (on_disk or problem) and self._tier:
            why = problem or "the log says why"
            raise CheckpointError(
                f"no save in {self._tier.place} can be used: {why}; mend that, or name another "
                "persist_directory to begin anew"
            )
        self._check_begin_anew(reasons)
        self._complete_label = None
        return 0

    def _check_begin_anew(self, reasons: Sequence[str]) -> None:
        """Refuses to begin anew where memory has state that the first save would drop.

        A version of which it is not known that it was ever complete is none: a job whose first save
        was cut off begins anew by itself.

        Args:
            reasons: why complete versions were not restored.
        """
        lacking = self._restores.incomplete()
        if reasons or any(label in lacking for rank in self.ranks for label in rank.once_complete):
            raise CheckpointError(
                f"no version in memory can be used: {'; '.join([*reasons, *lacking.values()])}; "
                f"to begin anew, remove {self._memory.place} on each machine"
            )
        for reason in lacking.values() if not self.rank else ():
            logger.warning("%s, and so is not used; it is not known to have been complete", reason)

    def _note_persisted(self, label: Label, on_disk: Sequence[Label]) -> None:
        """Notes what of the state that was restored is behind memory already."""
        ages = [saved.age for saved in on_disk if saved.age <= label.age]
        self._num_persisted = max(ages, default=0) // self._options.persist_every
        if self._tier is not None and label in on_disk:
            self._tier.note_saved(label)

    def _saves_of_all_ranks(self) -> KnownSaves:
        """The versions behind memory as rank 0 knows them; this run's epoch gets above theirs.

        The machines' clocks may not know of these.
        """
        tier = self._tier if not self.rank else None
        saves = self._readiness.do_with_all(tier.saves if tier is not None else KnownSaves)
        saves = gather_records(KnownSaves, saves)[0]
        epochs = [label.epoch for label in saves.labels] + [*(saves.unread or ())[:1]]
        self._epoch = max([self._epoch, *(1 + epoch for epoch in epochs)])
        self._is_above_saves = saves.is_listed
        return saves

    def _restore_version(self, label: Label, is_in_memory: bool, is_on_disk: bool) -> str:
        """Restores a version from memory, or else from the tier behind it; returns why it failed,
        empty if it did not.

        Raises:
            CheckpointError: it could not be read, and may be whole.
        """
        reason = self._restores.restore_version(label) if is_in_memory else "no memory has it"
        if reason and is_on_disk and self._tier:
            readers = {self._nodes.index(node) for node in self._nodes}
            shards = range(self.rank, label.since, self._world_size)
            if label.since == 1:  # All ranks need all of it, so each node reads it.
                shards = range(1 if self.rank in readers else 0)
            bring = partial(self._tier.bring, self._memory.arena, label, shards)
            brought = self._readiness.do_with_all(bring)
            failures = [each for each in gather_records(BroughtShards, brought) if each.reason]
            if failures and all(each.is_passing for each in failures):
                raise unread_error(failures[0].reason)
            reason = failures[0].reason if failures else self._restores.restore_version(label)
        return reason

    def _copy_anew(self, label: Label) -> None:
        """Begins to copy the restored version if fewer nodes keep it than should."""
        keeping: dict[int, set[str]] = {shard: set() for shard in range(label.since)}
        versions = gather_records(dict[int, tuple[Label, ...]], self._memory.versions())
        for node, labels_by_shard in zip(self._nodes, versions, strict=True):
            for shard, labels in labels_by_shard.items():
                if label in labels:
                    keeping[shard].add(node)
        num_nodes = len({*self._nodes})
        wanted = num_nodes if label.since == 1 else min(self._options.copies, num_nodes)
        if min(map(len, keeping.values())) < wanted and self._begin_with_room(label.age):
            if self._turns is not None:
                self._turns.rush()  # Nothing else uses the network yet.
            self._saved = label.age - 1
            self.wait_copied()

    def _begin_with_room(self, iteration: int) -> bool:
        """Begins a version with as many copies as there is memory for; returns whether it begins.

        The state was restored already, so the job goes on with fewer copies.
        """
        for num_copies in range(min(self._options.copies, len({*self._nodes})), 0, -1):
            self._num_copies = num_copies
            try:
                return self._begin(iteration)
            except ConfigError as error:
                if not self.rank:
                    logger.warning("%s copies are not made anew: %s", num_copies, error)
        self._num_copies = self._options.copies
        return False

    def _end_run(self, copier: Copier) -> None:
        """Ends the run of versions in progress, since later states are not a continuation of it.

        After a restore the state of an iteration may differ from the same iteration's before.
        """
        self._readiness.do_with_all(self.wait_ended)
        self._complete_if_ended(copier)
        copier.close()
        self._copier = None
        self._epoch += 1
        labels = gather_records(dict[int, tuple[Label, ...]], self._memory.versions())
        self._restores = self._restores_of(labels)

    def _restores_of(self, labels: Sequence[Mapping[int, tuple[Label, ...]]]) -> Restores:
        """This rank's part in restores, given the labels that each rank keeps, by shard."""
        arenas = (self._memory.arena, *self._memory.older)
        return Restores(self.links, self._readiness, self._state, arenas, dict(enumerate(labels)))

    # -- saving -----------------------------------------------------------------------------------

    def save(self, iteration: int) -> bool:
        """Begins a version; see `MemoryCheckpointer.save`."""
        if iteration <= self._saved:
            raise ConfigError(
                "iteration",
                iteration,
                f"must be above {self._saved}, the iteration that was saved before",
            )
        self._check_not_aborted()
        with errors_of_torch():
            with self._pause_watching():
                begins = self._begin(iteration)
            if self._turns is not None:
                self._turns.on_iteration_begin(begins=begins)
        return begins

    def _has_aborted(self) -> bool:
        """Whether groups of NCCL were aborted: what a device computes after that is anything."""
        return self._watch is not None and self._watch.has_aborted

    def _check_not_aborted(self) -> None:
        if self._has_aborted():
            raise dist.DistBackendError("a rank was lost or left, and groups of NCCL were aborted")

    def _pause_watching(self) -> AbstractContextManager[None]:
        """A context in which this thread's collectives do not count as the loop's."""
        return self._turns.pause_watching() if self._turns else nullcontext()

    def _begin(self, iteration: int) -> bool:
        self._state.reshard()
        copier = self._copier or self._make_copier()
        if not self._complete_if_ended(copier):
            return False
        if copier.complete_label == Label(self._num_shards, self._epoch, iteration, self._run):
            # Copied anew after a restore: a new one of this label would have it dropped first.
            self._saved = iteration
            return True
        if not self._are_checked:
            self._check(copier.own)
        states = self._states(copier.own)
        copier.begin(iteration, states)
        self._saved = iteration
        return True

    def _complete_if_ended(self, copier: Copier) -> bool:
        """Marks the newest version as complete if it has ended on all ranks and failed on none.

        Returns:
            Whether another version may begin: the newest one has ended on all ranks, and all ranks'
            memory is owned by keepers.
        """
        try:
            is_free = not copier.has_begun or copier.has_ended
            is_whole = copier.has_begun and not copier.has_failed
        except (AbortedError, PeerLostError) as error:
            logger.warning("rank %s makes no copies any more: %s", self.rank, error)
            is_free, is_whole = False, False
        is_checked = parts_of_state(self._state.optimizer) == self._checked
        is_quiet = self._tier is not None and not self._tier.is_writing
        is_saved = self._tier is not None and not self._tier.has_failed
        are_free, are_whole, are_owned, self._are_checked, are_quiet, are_saved = true_on_all(
            is_free, is_whole, self._memory.is_owned(self.rank), is_checked, is_quiet, is_saved
        )
        self._check_not_aborted()
        if are_free and are_whole:
            label = copier.complete()
            self._memory.note_complete(label)
            is_due = label.age // self._options.persist_every > self._num_persisted
            if are_quiet and (is_due or not are_saved):
                self._persist(label, {n: n for n in range(self._num_shards)})
            self._memory.drop_older()
        return are_free and are_owned

    def _persist(self, label: Label, writers: Mapping[int, int]) -> None:
        """Begins to write a complete version to the tier behind memory.

        Args:
            writers: rank that writes each shard, by shard.
        """
        assert self._tier is not None
        self._num_persisted = label.age // self._options.persist_every
        arenas = (self._memory.arena, *self._memory.older)
        self._tier.write(self.links, arenas, label, writers=writers)

    def persist(self) -> bool:
        """Writes the newest version now; see `MemoryCheckpointer.persist`."""
        if self._tier is None:
            raise ConfigError("persist_directory", "", "name a directory or the URL of a store")
        with errors_of_torch(), self._pause_watching():
            label, copier = self._complete_label, self._copier
            if copier is not None and copier.has_begun:
                self.wait_ended()
                self._readiness.do_with_all(self._tier.wait)
                self._complete_if_ended(copier)
                label = copier.complete_label
            if label is None:
                logger.warning("rank %s saves nothing: no version is complete", self.rank)
                return False
            self._readiness.do_with_all(self._tier.wait)  # Only one save may be in progress.
            if not true_on_all(self._tier.has_saved(label))[0]:
                versions = gather_records(dict[int, tuple[Label, ...]], self._memory.versions())
                self._persist(label, keepers_of(label, versions))
            self._readiness.do_with_all(self._tier.wait)
            return true_on_all(self._tier.has_saved(label))[0]

    def _gather_own_objects(self, mine: bytes) -> dict[int, bytes]:
        """The states of per_rank objects that this rank's shard has, by rank."""
        if not self._state.per_rank:
            return {}
        if self._state.is_replicated:  # The one shard has those of all.
            return dict(enumerate(gather_bytes(mine)))
        return {self.rank: mine}

    def _states(self, own: Sequence[int]) -> dict[int, State]:
        """The own shards as they are now, by their numbers: one or none; all ranks call it."""
        beside, mine = readable_on_all(self._state)
        own_objects = self._gather_own_objects(mine)
        if not own:
            return {}
        _, state = self._state.shard(
            self._shard,
            self._num_shards,
            beside=beside,
            per_rank=own_objects,
            read=self._host_bytes.read,
        )
        return {self._shard: state}

    def _make_copier(self) -> Copier:
        """Makes the copier of this run, at the run's first save."""
        is_replicated = self._state.is_replicated
        self._num_shards = 1 if is_replicated else self._world_size
        self._shard = 0 if is_replicated else self.rank
        first = self._nodes.index(self._nodes[self.rank])
        own = () if is_replicated and first != self.rank else (self._shard,)
        self._placement = self._place_copies()
        self._shard_copies: tuple[LayerCopy, ...] = ()
        if not is_replicated:
            self._shard_copies = shard_copies(self._nodes, self._placement)
        self._check(own)
        if not self._is_above_saves:  # Nothing was restored.
            problem = self._saves_of_all_ranks().problem
            if problem and not self.rank:
                logger.warning("it is not known what was saved earlier: %s", problem)
        self._turns = self._turns or between_collectives(
            self.links,
            self._nodes,
            self._shard_copies,
            iterations=self._options.profile_iterations,
            device=self._device,
            device_type=self._state.device_type,
        )
        self._copier = Copier(
            self.links,
            CopyPlan(
                own=own,
                copies=self._shard_copies,
                since=self._num_shards,
                epoch=self._epoch,
                run=self._run,
                complete_label=self._complete_label,
            ),
            host_copy=HostCopy(
                self._memory.arena,
                self._memory.filler,
                no_virtual_bytes,
                no_device,
                is_void=self._has_aborted,
            ),
            flow=FlowControl(
                Buffers(self._options.buffer_bytes, _NUM_BUFFERS),
                self._turns or AtOnce(),
                UNLIMITED_S,
            ),
            on_failure=self._on_failure,
        )
        return self._copier

    def _check(self, own: Sequence[int]) -> None:
        """Checks that a restore can bring back all of the state, and that memory suffices."""
        check_on_all(self._state)
        state = self._states(own).get(self._shard, {})
        check_room_on_all(
            self._nodes,
            self._shard_copies,
            num_copies=self._num_copies,
            own_bytes=sum(array.nbytes for array in state.values()),
            arena_bytes=self._memory.arena.num_bytes,
            is_persisted=self._tier is not None,
        )
        self._checked = parts_of_state(self._state.optimizer)

    def _place_copies(self) -> Placement:
        """The nodes that keep copies of each node's state, in the order of their first ranks."""
        if self._state.is_replicated:
            return whole_everywhere(self._nodes)
        domains = [rank.domain for rank in self.ranks]
        return place_on_all(
            self._nodes, self._num_copies, strategy=self._options.placement, domains=domains
        )

    @property
    def survival(self) -> tuple[float, ...]:
        """See `MemoryCheckpointer.survival`."""
        return survival(self._placement) if self._placement.holders else ()

    @property
    def idle_spans(self) -> dict[int, tuple[IdleSpan, ...]]:
        """See `MemoryCheckpointer.idle_spans`."""
        return self._turns.spans if self._turns else {}

    def _on_failure(self, reason: str) -> None:
        logger.warning("rank %s: copies are not complete: %s", self.rank, reason)

    def wait_copied(self) -> None:
        """Blocks until tensors may change; see `MemoryCheckpointer.wait_copied`."""
        copier = self._copier
        if copier is not None and copier.own and copier.has_begun:
            self._host_bytes.order()
            if self._host_bytes.has_views:
                self._wait(lambda: copier.wait_copied(copier.own[0]))

    def wait_ended(self) -> None:
        """Blocks until the newest version has ended for this rank: all its copies have arrived."""
        if self._copier is not None and self._copier.has_begun:
            if self._turns is not None:
                self._turns.rush()
            self._wait(self._copier.wait_ended)

    def _wait(self, wait: Callable[[], None]) -> None:
        """Calls `wait`; logs a lost peer instead of raising, so that training goes on."""
        try:
            wait()
        except (AbortedError, PeerLostError) as error:
            logger.warning("rank %s makes no copies any more: %s", self.rank, error)

    def leave(self) -> None:
        """Ends what waits for this rank, and for its device as a copy may; `end` waits for that."""
        if self._watch is not None:
            self._watch.leave()

    def end(self) -> None:
        """Ends the threads that copy, without waiting for what they send; links stay.

        Called once. Nothing refers to model and optimizer afterwards, since the script may need
        their memory for others.
        """
        if self._watch is not None:
            self._watch.say_farewell()
        if self._turns is not None:
            self._turns.close()
        self.links.abort("it is over", first_epoch=_EPOCH + 1)
        if self._copier is not None:
            self._copier.close()
            self._copier = None
        del self._state, self._restores, self._host_bytes


def _leave(reference: "weakref.ref[Links]") -> None:
    if links := reference():
        links.leave_to_parent()


def _begin_of(label: Label) -> tuple[int, int]:
    return label.epoch, label.age
