"""Checkpoints in memory for scripts that keep their own training loop, under torchrun.

    checkpointer = planaria.MemoryCheckpointer(model, optimizer)
    first = checkpointer.restore()
    for iteration in range(first, last):
        ...
        optimizer.step()
        checkpointer.save(iteration + 1)

Each rank's shard is copied into memory that the keeper owns, a process of its node (keeper.py), and
from there to other nodes, while training goes on. The next optimizer step waits until the copy on
the own node is done, and for nothing else. The copies survive the ranks and the program that
restarts them. A node that is lost takes its copies along; other nodes keep theirs. If a keeper is
gone, the next save notices that, and a new keeper owns the memory.

`restore` takes the newest version of which all shards exist. The number of ranks may have changed
since, and with it the sharding of model and optimizer. Versions of the run that began last count as
the newest, whatever their iteration: a run that began anew, or from an older version, supersedes
the versions of the run before.

A model that every rank holds whole (DDP) is copied once on each node, and sent to no other.

Source: Gemini (SOSP '23).
Differs from NVRx and lm-resiliency, which need the same ranks again to restore.
"""

import contextlib
import logging
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from planaria.checkpoint.memory.arena import Arena
from planaria.checkpoint.memory.filling import Filler, HostCopy, no_device
from planaria.checkpoint.memory.room import available_bytes
from planaria.checkpoint.memory.stream import Copier, CopyPlan
from planaria.checkpoint.memory.turns import AtOnce, Buffers, FlowControl
from planaria.checkpoint.memory.wire import State
from planaria.core.copies import IdleSpan, Label, LayerCopy
from planaria.errors import AbortedError, CheckpointError, ConfigError, PeerLostError
from planaria.placement.layer_copies import shard_copies
from planaria.torchrun.collectives import BetweenCollectives, between_collectives
from planaria.torchrun.gathering import gather_bytes, gather_records, true_on_all
from planaria.torchrun.keeper import KeeperSlot, attach
from planaria.torchrun.restores import Restores
from planaria.torchrun.save_checks import check_on_all, check_tensors_on_all, parts_of_state
from planaria.torchrun.shards import Stateful, TrainingState
from planaria.transport.links import UNLIMITED_S, Address, Links

logger = logging.getLogger(__name__)

_PLACE: Final = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}  # Defaults without torchrun.
_LINK_TIMEOUT_S: Final = 600.0
_EPOCH: Final = 0  # The only epoch of the links, which live as long as the ranks.


class _RankFacts(msgspec.Struct, frozen=True):
    """The facts that a rank tells all others when it begins.

    Attributes:
        node: name of its node, equal for all ranks with the same keeper.
        address: host and port at which it accepts links.
        labels: labels of the versions that it keeps, by shard.
        begin_us: time at which it began, in microseconds since 1970.
    """

    node: str
    address: Address
    labels: dict[int, tuple[Label, ...]]
    begin_us: int


class MemoryCheckpointer:
    """Checkpoints in memory of a model and its optimizer.

    Its options are parameters, and no record, so that a script can use it with one import.

    Every rank makes one, and all ranks make the same calls in the same order. The default process
    group must exist. Call `save` after the optimizer's step.

    Args:
        others: further objects to save, such as a scheduler, by name. Their state_dicts must be
            readable by torch.load with weights_only=True, and the same on all ranks.
        copies: number of copies of each shard, the one on its own node included.
        buffer_bytes: size of a rank's buffers for the copies of one sender; at least 64 KiB.
        is_interleaved: whether copies are sent between the loop's collectives, if these use the
            gloo backend; otherwise they are sent at once.
        profile_iterations: number of iterations in which collectives are measured before copies are
            sent between them; the measurement is repeated all the time. 0: no interleaving.
        name: name of the job, which distinguishes jobs of one user on one machine; ignored if
            `directory` is given.
        directory: directory of the keeper's socket; "": one named by the job, below XDG_RUNTIME_DIR
            or else /tmp.
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
        copies: int = 2,
        buffer_bytes: int = 64 << 20,
        is_interleaved: bool = True,
        profile_iterations: int = 20,
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
        )
        self._state = TrainingState(model, optimizer, others or {})
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._copies = copies
        self._buffers = Buffers(buffer_bytes, 4)
        self._profile_iterations = profile_iterations if is_interleaved else 0
        self._turns: BetweenCollectives | None = None
        place = Path(directory) if directory else runtime_directory() / name
        slot, num_slots = (int(os.environ.get(n, d)) for n, d in _PLACE.items())
        self._slot: KeeperSlot = attach(place, slot, num_slots=num_slots, idle_s=idle_s)
        self._can_be_kept = True
        self._arena = Arena(self._slot.fd)
        self._older = [Arena(fd) for fd in self._slot.further_fds]  # Of ranks that are no more.
        random_bytes = gather_bytes(secrets.token_bytes(24))[0]
        # A random number, since unrelated runs may use the same epochs.
        self._run = int.from_bytes(random_bytes[16:]) >> 2
        self._links = Links(self._rank, token=random_bytes[:16], host=own_host())
        node = f"{socket.gethostname()}:{place}#{self._slot.keeper_id}"
        mine = _RankFacts(node, self._links.address, self._versions(), time.time_ns() // 1000)
        ranks = gather_records(_RankFacts, mine)
        self._nodes = [rank.node for rank in ranks]
        if not self._rank and (num_nodes := len({*self._nodes})) < copies:
            logger.warning("only %s of %s copies are made: too few nodes", num_nodes, copies)
        self._restores = self._restores_of([rank.labels for rank in ranks])
        addresses = {number: rank.address for number, rank in enumerate(ranks)}
        others_than_this = addresses.keys() - {self._rank}
        self._links.begin(
            _EPOCH, addresses=addresses, peers=others_than_this, timeout_s=_LINK_TIMEOUT_S
        )
        self._epoch = _epoch_after(ranks)  # The epoch in the labels of this run's versions.
        # The version of earlier runs that is kept until one of this run is complete.
        self._complete_label = next(iter(self._restores.complete()), None)
        self._copier: Copier | None = None
        self._saved = -1
        self._is_closed = False
        self._filler = Filler(torch.get_num_threads())
        # It is called for every optimizer: another one may step parameters of the model, too.
        self._hook = register_optimizer_step_pre_hook(self._before_step)

    # -- restoring --------------------------------------------------------------------------------

    def restore(self) -> int:
        """Restores the newest version of which all shards exist.

        Versions of the run that began last come first, and within a run the newest one. A version
        is logged and skipped if it is damaged, belongs to another model, or is refused by one of
        `others`. In the middle of a run, `restore` waits for the version that is being copied, and
        may restore it.

        Returns:
            The iteration of the version; 0: there is none.

        Raises:
            CheckpointError: no version could be restored in the middle of a run; the model is
                unchanged.
            ConfigError: a tensor is sparse, or has no values yet, as on the meta device.
        """
        self._check_open()
        with self._pause_watching():
            return self._restore_newest()

    def _restore_newest(self) -> int:
        if self._copier is not None:
            self._end_run(self._copier)
        self._state.reshard()
        check_tensors_on_all(self._state)
        for label in self._restores.complete():
            reason = self._restores.restore_version(label)
            if not reason:
                self._complete_label, self._saved = label, label.age - 1
                return label.age
            if not self._rank:
                logger.warning("the copies of iteration %s are not used: %s", label.age, reason)
        if self._saved >= 0:  # The model has been trained, so 0 would be wrong.
            raise CheckpointError("no version in memory is complete: the model stays as it is")
        self._complete_label = None
        return 0

    def _end_run(self, copier: Copier) -> None:
        """Ends the run of versions in progress, since later states are not a continuation of it.

        After a restore the state of an iteration may differ from the same iteration's before.
        """
        self.wait_ended()
        self._complete_if_ended(copier)
        copier.close()
        self._copier = None
        self._epoch += 1
        labels = gather_records(dict[int, tuple[Label, ...]], self._versions())
        self._restores = self._restores_of(labels)

    def _restores_of(self, labels: Sequence[Mapping[int, tuple[Label, ...]]]) -> Restores:
        """This rank's part in restores, given the labels that each rank keeps, by shard."""
        arenas = (self._arena, *self._older)
        return Restores(self._links, self._state, arenas, dict(enumerate(labels)))

    # -- saving -----------------------------------------------------------------------------------

    def save(self, iteration: int) -> bool:
        """Begins a version of the state after so many iterations.

        Returns:
            Whether a version begins; the same on all ranks. It does not if the version before is
            still being copied, if a peer was lost, or if a node has no keeper any more.

        Raises:
            ConfigError: no fewer iterations were saved before. The first call, and calls
                after the optimizer's state got other parts, also raise it if a node lacks memory
                for the copies, or if a restore could not bring back all of the state.
        """
        self._check_open()
        if iteration <= self._saved:
            raise ConfigError(
                "iteration",
                iteration,
                f"must be above {self._saved}, the iteration that was saved before",
            )
        with self._pause_watching():
            begins = self._begin(iteration)
        if self._turns is not None:
            self._turns.on_iteration_begin(begins=begins)
        return begins

    def _pause_watching(self) -> AbstractContextManager[None]:
        """A context in which this thread's collectives do not count as the loop's."""
        return self._turns.pause_watching() if self._turns else nullcontext()

    def _begin(self, iteration: int) -> bool:
        self._state.reshard()
        copier = self._copier or self._make_copier()
        if not self._complete_if_ended(copier):
            return False
        if not self._are_checked:
            self._check(copier.own)
        copier.begin(iteration, self._states() if copier.own else {})
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
            logger.warning("rank %s makes no copies any more: %s", self._rank, error)
            is_free, is_whole = False, False
        is_checked = parts_of_state(self._state.optimizer) == self._checked
        are_free, are_whole, are_owned, self._are_checked = true_on_all(
            is_free, is_whole, self._is_owned(), is_checked
        )
        if are_free and are_whole:
            copier.complete()
            for arena in self._older:
                arena.keep_only((), layers=())
            self._older = []
        return are_free and are_owned

    def _is_owned(self) -> bool:
        """Whether a keeper owns this rank's memory; if the keeper is gone, another one is tried."""
        if self._can_be_kept and self._slot.is_gone:
            gone = f"rank {self._rank}: the process that owned copies on this machine is gone"
            try:
                self._slot.renew()
                logger.warning("%s; another process owns them now", gone)
            except CheckpointError as error:
                self._can_be_kept = False
                lost = "copies here end with this rank, and nothing is saved any more"
                logger.warning("%s, and no other one can be started: %s: %s", gone, lost, error)
        return self._can_be_kept

    def _states(self) -> dict[int, State]:
        """This rank's shard as it is now, by its number."""
        return {self._shard: self._state.shard(self._shard, self._num_shards)[1]}

    def _make_copier(self) -> Copier:
        """Makes the copier of this run, at the run's first save."""
        is_replicated = self._state.is_replicated
        self._num_shards = 1 if is_replicated else self._world_size
        self._shard = 0 if is_replicated else self._rank
        first = self._nodes.index(self._nodes[self._rank])
        own = () if is_replicated and first != self._rank else (self._shard,)
        self._shard_copies = () if is_replicated else shard_copies(self._nodes, self._copies)
        self._check(own)
        self._turns = self._turns or between_collectives(
            self._links,
            self._nodes,
            self._shard_copies,
            iterations=self._profile_iterations,
            device_type=self._state.device_type,
        )
        self._copier = Copier(
            self._links,
            self._arena,
            CopyPlan(
                own=own,
                copies=self._shard_copies,
                since=self._num_shards,
                epoch=self._epoch,
                run=self._run,
                complete_label=self._complete_label,
            ),
            host_copy=HostCopy(self._filler, _no_virtual_bytes, no_device),
            flow=FlowControl(self._buffers, self._turns or AtOnce(), UNLIMITED_S),
            on_failure=self._on_failure,
        )
        return self._copier

    def _check(self, own: Sequence[int]) -> None:
        """Checks that a restore can bring back all of the state, and that memory suffices."""
        check_on_all(self._state)
        state = self._states()[self._shard] if own else {}
        check_room_on_all(
            self._nodes,
            self._shard_copies,
            num_copies=self._copies,
            own_bytes=sum(array.nbytes for array in state.values()),
            arena_bytes=self._arena.num_bytes,
        )
        self._checked = parts_of_state(self._state.optimizer)

    @property
    def idle_spans(self) -> dict[int, tuple[IdleSpan, ...]]:
        """The spans of an iteration in which copies are sent, by the rank that they are sent to.

        `after` of a span counts collectives. Empty before spans are measured, and if copies are
        sent at once.
        """
        return self._turns.spans if self._turns else {}

    def _on_failure(self, reason: str) -> None:
        logger.warning("rank %s: copies are not complete: %s", self._rank, reason)

    def _before_step(self, *_: Any) -> None:
        """Waits before an optimizer's step, which changes the tensors that are being copied."""
        self.wait_copied()

    def wait_copied(self) -> None:
        """Blocks until model and optimizer may change; every optimizer step calls it by itself."""
        self._check_open()
        copier = self._copier
        if copier is not None and copier.own and copier.has_begun:
            self._wait(lambda: copier.wait_copied(copier.own[0]))

    def wait_ended(self) -> None:
        """Blocks until the newest version has ended for this rank: all its copies have arrived."""
        self._check_open()
        if self._copier is not None and self._copier.has_begun:
            if self._turns is not None:
                self._turns.rush()
            self._wait(self._copier.wait_ended)

    def _wait(self, wait: Callable[[], None]) -> None:
        """Calls `wait`; logs a lost peer instead of raising, so that training goes on."""
        try:
            wait()
        except (AbortedError, PeerLostError) as error:
            logger.warning("rank %s makes no copies any more: %s", self._rank, error)

    def close(self) -> None:
        """Ends copying and the keeper at the end of the job, so all copies are gone.

        Idempotent. Other methods raise a ConfigError afterwards.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._hook.remove()
        if self._turns is not None:
            self._turns.close()
        self._links.abort("it is over", first_epoch=_EPOCH + 1)
        if self._copier is not None:
            self._copier.close()
        self._filler.close()
        self._links.close()
        self._slot.end()

    def _check_open(self) -> None:
        if self._is_closed:
            remedy = "it is closed; make another MemoryCheckpointer"
            raise ConfigError("MemoryCheckpointer", "closed", remedy)

    def _versions(self) -> dict[int, tuple[Label, ...]]:
        versions: dict[int, tuple[Label, ...]] = {}
        for arena in (self._arena, *self._older):
            for shard, labels in arena.versions().items():
                versions[shard] = (*versions.get(shard, ()), *labels)
        return versions


def _epoch_after(ranks: Sequence[_RankFacts]) -> int:
    """An epoch above those of all known versions, whatever the clocks say.

    It is also at least the present time in microseconds, so that it is above the epochs of earlier
    runs whose memory is not known now, unless clocks have gone back.
    """
    known = [n.epoch for rank in ranks for labels in rank.labels.values() for n in labels]
    return max([1 + max(known, default=-1), *(rank.begin_us for rank in ranks)])


def _no_virtual_bytes(_shard: int) -> int:
    return 0


# -- the arguments of a MemoryCheckpointer, and their defaults -------------------------------------

# Pieces have a quarter of it, 16 KiB: that gives some 30 MB/s over a link within one machine.
# Pieces of 4 KiB give a tenth of that.
BUFFER_BYTES_MIN: Final = 64 << 10


def check_least(*, copies: int, buffer_bytes: int, profile_iterations: int, idle_s: float) -> None:
    """Refuses numbers that are too small, or not whole numbers where only those make sense.

    Raises:
        ConfigError: a number is refused; the error names the first such.
    """
    for field, value, least, why in (
        ("copies", copies, 1, "the node's own copy counts"),
        ("buffer_bytes", buffer_bytes, BUFFER_BYTES_MIN, "smaller buffers make copies slow"),
        ("profile_iterations", profile_iterations, 0, "with 0 copies are sent at once"),
    ):
        if not isinstance(value, int) or value < least:
            raise ConfigError(field, value, f"must be a whole number of at least {least}; {why}")
    if not idle_s > 0:
        raise ConfigError(
            "idle_s",
            idle_s,
            "must be above 0, because else copies are lost together with the ranks",
        )


def own_host() -> str:
    """The address by which other nodes reach this one."""
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.connect((master, 9))
            host: str = sock.getsockname()[0]
            return host
    except OSError:
        return "127.0.0.1"


def runtime_directory() -> Path:
    """The directory in which each keeper of the user has a directory for its socket.

    It is made if it is missing, for access by the user alone. Launchers have sockets there, too.
    """
    base = os.environ.get("XDG_RUNTIME_DIR")
    path = Path(base) / "planaria" if base else Path(f"/tmp/planaria-{os.getuid()}")
    with contextlib.suppress(OSError):  # The use of the directory raises a better error.
        path.mkdir(mode=0o700, exist_ok=True)
    return path


# -- a check, on all ranks, that nodes have the memory for the copies that they are to keep --------


def check_room_on_all(
    nodes: Sequence[str],
    copies: Sequence[LayerCopy],
    *,
    num_copies: int,
    own_bytes: int,
    arena_bytes: int,
) -> None:
    """Refuses copies if a node lacks the memory for two versions of each shard that it keeps.

    One of the two is whole while the other one is copied.

    Args:
        nodes: names of all ranks' nodes, by rank.
        copies: shards with the ranks that keep copies of them.
        num_copies: number of copies that the user asked for.
        own_bytes: size of this rank's own shard; 0: this rank copies none.
        arena_bytes: memory that this rank has for copies already.

    Raises:
        ConfigError: a node lacks memory; raised on all ranks.
    """
    sizes = gather_records(int, own_bytes)
    kept = Counter[str]()
    for node, size in zip(nodes, sizes, strict=True):
        kept[node] += size
    for copy in copies:
        for target in copy.targets:
            kept[nodes[target]] += sizes[copy.source]
    here, arenas = nodes[dist.get_rank()], gather_records(int, arena_bytes)
    there = sum(size for size, node in zip(arenas, nodes, strict=True) if node == here)
    needed, room = 2 * kept[here], available_bytes() + there
    short = "" if needed <= room else f"{here} has {room} bytes, and they take {needed} there"
    for reason in filter(None, gather_records(str, short)):
        raise ConfigError("copies", num_copies, f"{reason}; make fewer copies, or use more nodes")
