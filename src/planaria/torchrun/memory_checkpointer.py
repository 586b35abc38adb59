"""Checkpoints in memory for scripts that keep their own training loop, under torchrun.

    checkpointer = planaria.MemoryCheckpointer(model, optimizer)
    first = checkpointer.restore()
    for iteration in range(first, last):
        ...
        optimizer.step()
        checkpointer.save(iteration + 1)
    checkpointer.close()

Each rank's shard is copied into memory that the keeper owns, a process of its node (keeper.py), and
from there to other nodes, while training goes on. The next optimizer step waits until the copy on
the own node is done, and for nothing else. The copies survive the ranks and the program that
restarts them. They end with `close`, or after `idle_s` without ranks. A node that is lost takes its
copies along; other nodes keep theirs. If a keeper is gone, the next save notices that, and a new
keeper owns the memory.

`restore` takes the newest version of which all shards exist. The number of ranks may have changed
since, and with it the sharding of model and optimizer. Versions of the run that began last count as
the newest, whatever their iteration: a run that began anew, or from an older version, supersedes
the versions of the run before.

After a restore the version is copied anew at once if fewer nodes keep it than should, as after a
loss: so the next loss is survived, too.

With `persist_directory` some versions are also written to a disk or store (persisting.py), from
which `restore` takes what no memory has any more. With `can_reform` the ranks that live make a new
process group after a loss, without a restart (survivors.py):

    is_broken = False
    while True:
        try:
            if is_broken:
                model = optimizer = None  # Or the old ones take memory beside the new ones.
                checkpointer.reform()
                model, optimizer = build()  # As at the start, on the new group.
                checkpointer.use(model, optimizer)  # With the others and per_rank of the first.
            for iteration in range(checkpointer.restore(), last):
                ...
            break
        except RuntimeError:  # A peer is gone, perhaps while that was done.
            is_broken = True

A model that every rank holds whole (DDP) is copied once on each node, and sent to no other.

Source: Gemini (SOSP '23).
Differs from NVRx and lm-resiliency, which need the same ranks again to restore.
"""

import gc
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from planaria.core.copies import IdleSpan
from planaria.errors import CheckpointError, ConfigError
from planaria.placement.placement import Strategy
from planaria.torchrun.arguments import (
    Options,
    check_least,
    own_host,
    runtime_directory,
    whole_number,
)
from planaria.torchrun.gathering import true_on_all
from planaria.torchrun.group_copies import GroupCopies
from planaria.torchrun.group_sockets import check_errors_stay
from planaria.torchrun.persisting import PersistentTier
from planaria.torchrun.rank_memory import RankMemory
from planaria.torchrun.shard_placement import check_strategy
from planaria.torchrun.shards import Stateful, TrainingState
from planaria.torchrun.survivors import MeetingStore, Ranks, group_settings, leave_group

logger = logging.getLogger(__name__)

# Longest wait at the end for a version that is being written, and for what others are sent.
_CLOSE_S: Final = 60.0


class MemoryCheckpointer:
    """Checkpoints in memory of a model and its optimizer.

    Its options are parameters, and no record, so that a script can use it with one import.

    Every rank makes one, and all ranks make the same calls in the same order. The default process
    group must exist. Call `save` after the optimizer's step.

    Args:
        others: further objects to save, such as a scheduler, by name. Their state_dicts must be
            readable by torch.load with weights_only=True, and the same on all ranks.
        per_rank: likewise objects of which each rank has its own, such as `RandomGenerators()` or
            the position in its data. They are restored where there are as many ranks as before.
        copies: number of copies of each shard, the one on its own node included.
        placement: way to choose the nodes that keep copies: "mixed", "group" or "ring" as in the
            paper, or "optimised", which heeds `domain`.
        domain: name of the failure domain of this rank's node, such as its rack or zone.
        buffer_bytes: size of a rank's buffers for the copies of one sender; at least 64 KiB.
        is_interleaved: whether copies are sent between the loop's collectives, if these use the
            gloo backend; otherwise they are sent at once.
        profile_iterations: number of iterations in which collectives are measured before copies are
            sent between them; the measurement is repeated all the time. 0: no interleaving.
        persist_directory: directory or URL of an object store for versions that outlive all nodes,
            the same place for all ranks; "": none.
        persist_every: number of iterations in which one of these is written.
        keep: number of these to keep; 0: all.
        can_reform: whether `reform` may be called: each rank then listens at a port for others.
        name: name of the job, which distinguishes jobs of one user on one machine; ignored if
            `directory` is given.
        directory: directory in which each machine has one for its keeper's socket; "": one named by
            the job, below XDG_RUNTIME_DIR or else /tmp.
        idle_s: seconds that the keeper keeps copies when no rank is left; the newest run's value
            counts; inf: for ever.

    Raises:
        ConfigError: a value is wrong, or there is no process group.
        CheckpointError: the keeper does not start, or the rank's slot or the directory is taken.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        others: Mapping[str, Stateful] | None = None,
        per_rank: Mapping[str, Stateful] | None = None,
        copies: int = 2,
        placement: Strategy = "mixed",
        domain: str = "",
        buffer_bytes: int = 64 << 20,
        is_interleaved: bool = True,
        profile_iterations: int = 20,
        persist_directory: str = "",
        persist_every: int = 100,
        keep: int = 2,
        can_reform: bool = False,
        name: str = "job",
        directory: str = "",
        idle_s: float = 600.0,
    ) -> None:
        if not dist.is_initialized():
            remedy = "call torch.distributed.init_process_group first"
            raise ConfigError("MemoryCheckpointer", "no process group", remedy)
        check_least(
            copies=copies,
            buffer_bytes=buffer_bytes,
            profile_iterations=profile_iterations,
            idle_s=idle_s,
            persist_every=persist_every,
            keep=keep,
        )
        check_strategy(placement, domain)
        if can_reform:
            check_errors_stay()
        self._tier = PersistentTier(persist_directory, keep=keep) if persist_directory else None
        self._store = MeetingStore() if can_reform else None
        self._options = Options(
            copies=copies,
            placement=placement,
            domain=domain,
            buffer_bytes=buffer_bytes,
            profile_iterations=profile_iterations if is_interleaved else 0,
            persist_every=persist_every,
            host=own_host(),  # Once: later the machine by which it is found may be lost.
            store_port=self._store.port if self._store else 0,
        )
        place = Path(directory) if directory else runtime_directory() / name
        self._memory = RankMemory(place, idle_s=idle_s)
        self._settings, self._is_closed = group_settings(), False
        self._is_new = True  # Nothing was saved or restored here yet.
        self._generation = 0  # The number of groups before this one.
        self._had_version = False  # One of them had a version, as far as this rank knows.
        self._group = self._begin(TrainingState(model, optimizer, others or {}, per_rank or {}))
        self._first_name = self._group.name  # Of later ones some ranks may not have learned.
        # What the members of the default group know of each other, by rank.
        self._stores = self._group.stores
        self._rank, self._is_used = self._group.rank, True
        # It is called for every optimizer: another one may step parameters of the model, too.
        self._hook = register_optimizer_step_pre_hook(self._before_step)

    def _begin(self, state: TrainingState) -> GroupCopies:
        self._names = _names_of(state)
        return GroupCopies(
            self._memory, state, self._tier, self._options, had_version=self._had_version
        )

    def restore(self) -> int:
        """Restores the newest version of which all shards exist.

        Versions of the run that began last come first, and within a run the newest one. A version
        is logged and skipped if it is damaged, belongs to another model, or is refused by one of
        `others`. In the middle of a run, `restore` waits for the version that is being copied, and
        may restore it. If fewer nodes than should keep the version, its copies are made anew; where
        memory does not suffice for all, fewer are made, and the log says so. Rank 0 also logs that
        a version is of a run before this one.

        Returns:
            The iteration of the version; 0: there is none.

        Raises:
            CheckpointError: no version could be restored in the middle of a run or after `reform`,
                or none of those that were complete in memory or in `persist_directory`, or that
                cannot be read; or a newer one in `persist_directory` could not be read now and may
                be whole. The model and all copies are unchanged. After `reform` a restart of the
                script may find what memory of machines of lost ranks has.
            ConfigError: a tensor is sparse, or has no values yet, as on the meta device.
            RuntimeError: a peer was lost meanwhile.
        """
        self._check_used()
        iteration = self._group.restore()
        if iteration and self._is_new and not self._rank:
            anew = f"remove {self._memory.place} on each machine"
            anew += " and name another persist_directory" if self._tier else ""
            what = "restored iteration %s of a run before this one; to begin from scratch, %s"
            logger.warning(what, iteration, anew)
        self._is_new = False
        return iteration

    def save(self, iteration: int) -> bool:
        """Begins a version of the state after so many iterations.

        Returns:
            Whether a version begins, or is complete as it was restored; the same on all ranks. None
            begins if the version before is still being copied, if a peer was lost, or if a node
            has no keeper any more.

        Raises:
            ConfigError: it is no whole number, or no fewer iterations were saved before, or a
                restore could not read back a value of state besides tensors. The first call, and
                calls after the optimizer's state got other parts, also raise it if a node lacks
                memory for the copies, or if a restore could not bring back all of the state.
            RuntimeError: a peer was lost meanwhile.
        """
        self._check_used()
        self._is_new = False
        return self._group.save(whole_number("iteration", iteration))

    def persist(self) -> bool:
        """Writes the newest version to `persist_directory` now; blocks until it is there.

        That is the newest that is complete; before the first save, the one that was restored.

        Returns:
            Whether it is there, the same on all ranks; if not, the log says why.

        Raises:
            ConfigError: there is no persist_directory.
            RuntimeError: a peer was lost meanwhile.
        """
        self._check_used()
        return self._group.persist()

    def _before_step(self, *_: Any) -> None:
        """Keeps an optimizer's step from changing tensors that are being copied."""
        self.wait_copied()

    def wait_copied(self) -> None:
        """Blocks until model and optimizer may change; every optimizer step calls it by itself.

        Changes on an accelerator are ordered after the copies from it, and do not wait here.
        """
        self._check_open()
        self._group.wait_copied()

    def wait_ended(self) -> None:
        """Blocks until the newest version has ended for this rank: all its copies have arrived."""
        self._check_open()
        self._group.wait_ended()

    @property
    def survival(self) -> tuple[float, ...]:
        """The probabilities that memory has all state if 0, 1, 2, .. nodes are lost at once.

        Every set of as many nodes is equally likely. Empty before the first save.
        """
        return self._group.survival

    @property
    def idle_spans(self) -> dict[int, tuple[IdleSpan, ...]]:
        """The spans of an iteration in which copies are sent, by the rank that they are sent to.

        `after` of a span counts collectives. Empty before spans are measured, and if copies are
        sent at once.
        """
        return self._group.idle_spans

    # -- going on without a restart ---------------------------------------------------------------

    def reform(self, *, timeout_s: float = 60.0) -> None:
        """Makes the default process group anew, of the ranks that live, after a peer was lost.

        Call it where a collective raised an error; all ranks that live must call it. Then make
        model and optimizer anew, as at the start, and call `use` with them and with the objects of
        `others` and `per_rank`. If another rank is lost by then,
        call it again. RANK and WORLD_SIZE in the environment are set to the new numbers. It lets go
        of the old model and optimizer; while the script has them, they take memory, too.

        Args:
            timeout_s: longest wait for a rank whose process lives, which may still wait in a
                collective for a lost one; give it more than the process group's own timeout.

        Raises:
            ConfigError: `can_reform` is not set.
            CheckpointError: no rank was lost; or no group can be made, or no more than half of the
                ranks are left and the others may not have ended; start the script again.
        """
        self._check_open()
        if self._store is None:
            remedy = "set it, so that ranks can meet after a loss"
            raise ConfigError("can_reform", False, remedy)
        group = self._group if self._is_used else None
        self._is_used = False
        if group is not None:
            self._had_version |= group.has_version
            group.leave()
            group.end()
        # What it remembers of layouts refers to the groups of that time.
        propagator: Any = DTensor._op_dispatcher.sharding_propagator
        propagator.propagate_op_sharding.cache_clear()
        gc.collect()  # A model that is sharded refers to itself, and to its groups.
        leave_group(self._store.connections if group is None else group.connections)
        self._generation += 1
        ranks = Ranks(
            rank=self._rank,
            stores=self._stores,
            generation=self._generation,
            lost=lambda: group.links.lost_peers.keys() if group else (),
            claim=self._claim,
        )
        members = self._store.meet(ranks, self._settings, timeout_s=timeout_s)
        is_alarmed = group is not None and group.is_alarmed
        if group is not None:
            group.links.close()
        lost, place = sorted(self._stores.keys() - {*members}), members.index(self._rank)
        logger.warning("rank %s is rank %s now, without ranks %s", self._rank, place, lost)
        self._stores = {number: self._stores[member] for number, member in enumerate(members)}
        self._rank = place
        if true_on_all(not lost and not is_alarmed)[0]:
            raise CheckpointError("no rank was lost, so the error had another reason")

    def _claim(self) -> bool:
        name = f"{self._first_name}-{self._generation}"
        return self._tier is not None and self._tier.claim(name, f"rank {self._rank}")

    def use(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        others: Mapping[str, Stateful] | None = None,
        per_rank: Mapping[str, Stateful] | None = None,
    ) -> None:
        """Begins with a model that was made anew after `reform`; `restore` fills it.

        Args:
            others, per_rank: objects of the same names as in the constructor, for the new model.

        Raises:
            ConfigError: the names are not those of the constructor.
        """
        self._check_open()
        state = TrainingState(model, optimizer, others or {}, per_rank or {})
        for field, names in _names_of(state).items():
            if names != self._names[field]:
                before = ", ".join(sorted(self._names[field])) or "none"
                remedy = f"the constructor had {before}; give `use` objects of the same names"
                raise ConfigError(field, ", ".join(sorted(names)), remedy)
        self._is_new = False
        self._memory.adopt()
        if self._tier is not None:
            self._tier.forget_saves()
        self._group = self._begin(state)
        self._is_used = True

    def close(self) -> None:
        """Ends copying and the keeper at the end of the job, so all copies in memory are gone.

        A version that is being written to `persist_directory` is waited for, a minute at most, and
        as long until others have what this rank sent to them.
        Idempotent. Other methods raise a ConfigError afterwards.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._hook.remove()
        if self._tier is not None:
            self._tier.wait(_CLOSE_S)
        if self._is_used:
            self._group.end()
            # Or others take this rank for lost, and none may publish what was just written.
            self._group.links.drain(timeout_s=_CLOSE_S)
        self._group.links.close()
        self._memory.close()

    def _check_open(self) -> None:
        if self._is_closed:
            remedy = "it is closed; make another MemoryCheckpointer"
            raise ConfigError("MemoryCheckpointer", "closed", remedy)

    def _check_used(self) -> None:
        self._check_open()
        if not self._is_used:
            remedy = "make model and optimizer anew, and call `use` with them"
            raise ConfigError("MemoryCheckpointer", "reformed", remedy)


def _names_of(state: TrainingState) -> dict[str, frozenset[str]]:
    """The names of the objects that are saved besides model and optimizer, by argument."""
    return {"others": frozenset(state.others), "per_rank": frozenset(state.per_rank)}
