"""Checkpoints in memory for scripts that keep their own training loop, under torchrun.

    checkpointer = planaria.MemoryCheckpointer(model, optimizer)
    first = checkpointer.restore()
    for iteration in range(first, last):
        ...
        optimizer.step()
        checkpointer.save(iteration + 1)

Each rank's shard is copied into memory that a process of its machine owns (keeper.py),
and from there to other nodes, while training goes on; the next optimizer step waits until the copy
here is done, and for nothing else. Ranks that die, and whoever starts them again, leave the copies
alone; a machine that is lost takes its own along, and others have theirs. Where that process is
gone, the next save finds it out, and another one owns the memory. `restore` takes the newest
version that is there of all shards, for as many ranks as there are now: model and optimizer may be
cut in another way. The newest is one of the run that began last, whatever its iteration: a run that
began anew, or from an older version, leaves those of the run before behind.

A model that every rank holds whole (DDP) is copied once on each node, and sent to none.

Source: Gemini (SOSP '23); PEERS of this: NVRx and lm-resiliency, which need the same ranks again.
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
from planaria.checkpoint.memory.filling import Filler
from planaria.checkpoint.memory.room import available_bytes
from planaria.checkpoint.memory.stream import Copier
from planaria.checkpoint.memory.turns import AtOnce, Buffers, nothing_to_unload
from planaria.checkpoint.memory.wire import State
from planaria.core.copies import IdleSpan, Label, LayerCopy
from planaria.errors import AbortedError, CheckpointError, ConfigError, PeerLostError
from planaria.placement.copies import shard_copies
from planaria.torchrun.collectives import BetweenCollectives, between_collectives
from planaria.torchrun.gathering import gathered, gathered_as, on_all
from planaria.torchrun.keeper import Kept, attach
from planaria.torchrun.restores import Restores
from planaria.torchrun.save_checks import check_on_all, check_tensors_on_all, parts_of_state
from planaria.torchrun.shards import Held, Stateful
from planaria.transport.links import PATIENT_S, Address, Links

logger = logging.getLogger(__name__)

_PLACE: Final = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}  # As torchrun tells it.
_LINK_TIMEOUT_S: Final = 600.0
_EPOCH: Final = 0  # Of the links: they live as long as the ranks.


class _Rank(msgspec.Struct, frozen=True):
    """What a rank tells all others when it begins.

    Attributes:
        node: where it runs, and which keeper is there; those of one keeper have the same.
        labels: by shard, the versions that it keeps.
        begin_us: when it began, in microseconds since 1970.
    """

    node: str
    address: Address
    labels: dict[int, tuple[Label, ...]]
    begin_us: int


class MemoryCheckpointer:
    """Checkpoints in memory of a model and its optimizer; all ranks make one, and use it alike.

    The default process group must be there. Call `save` after the optimizer's step.

    Args:
        others: what else is saved, such as a scheduler; its state_dict has to be what torch.load
            reads with weights_only=True, and the same on all ranks.
        copies: of each shard, its own node's included.
        buffer_bytes: of copies on their way to a node, 64 KiB at least.
        is_interleaved: whether copies go between the loop's collectives, as far as those are of the
            gloo backend; else they go at once.
        profile_iterations: in which collectives are watched before that, and again and again.
        name: tells apart jobs of one user on one machine.
        directory: for the socket of the process that owns the memory; below XDG_RUNTIME_DIR, or
            below /tmp, if it is "".
        idle_s: for how long that process keeps copies when no rank is left; inf: for ever. That of
            the newest run counts.

    Raises:
        ConfigError: a value is wrong, or there is no process group.
        CheckpointError: the process that owns the memory does not start.
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
            remedy = "call torch.distributed.init_process_group before"
            raise ConfigError("MemoryCheckpointer", "no process group", remedy)
        check_least(
            copies=copies,
            buffer_bytes=buffer_bytes,
            profile_iterations=profile_iterations,
            idle_s=idle_s,
        )
        self._held = Held(model, optimizer, others or {})
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._copies = copies
        self._buffers = Buffers(buffer_bytes, 4)
        self._profile_iterations = profile_iterations if is_interleaved else 0
        self._turns: BetweenCollectives | None = None
        place = Path(directory) if directory else runtime_directory() / name
        slot, num_slots = (int(os.environ.get(n, d)) for n, d in _PLACE.items())
        self._kept: Kept = attach(place, slot, num_slots=num_slots, idle_s=idle_s)
        self._can_be_kept = True
        self._arena = Arena(self._kept.fd)
        self._older = [Arena(fd) for fd in self._kept.further_fds]  # Of ranks that are no more.
        drawn = gathered(secrets.token_bytes(24))[0]
        self._run = int.from_bytes(drawn[16:]) >> 2  # Other runs may count the same epochs.
        self._links = Links(self._rank, token=drawn[:16], host=own_host())
        node = f"{socket.gethostname()}:{place}#{self._kept.keeper_id}"
        mine = _Rank(node, self._links.address, self._versions(), time.time_ns() // 1000)
        told = [msgspec.json.decode(raw, type=_Rank) for raw in gathered(msgspec.json.encode(mine))]
        self._nodes = [rank.node for rank in told]
        if not self._rank and (num_nodes := len({*self._nodes})) < copies:
            logger.warning("%s of %s copies are made: there are no more nodes", num_nodes, copies)
        self._restores = self._restores_of([rank.labels for rank in told])
        addresses = {number: rank.address for number, rank in enumerate(told)}
        others_than_this = addresses.keys() - {self._rank}
        self._links.begin(
            _EPOCH, addresses=addresses, peers=others_than_this, timeout_s=_LINK_TIMEOUT_S
        )
        self._epoch = _epoch_after(told)  # Of this run's versions.
        # Stays until a version of this run is complete.
        self._found = next(iter(self._restores.complete()), None)
        self._copier: Copier | None = None
        self._saved = -1
        self._is_closed = False
        self._filler = Filler(torch.get_num_threads())
        # Of any: others may step parameters of the model, too.
        self._hook = register_optimizer_step_pre_hook(self._before_step)

    # -- back -------------------------------------------------------------------------------------

    def restore(self) -> int:
        """Takes over the newest version that is there of all shards; its iteration, 0 without one.

        Versions of the run that began last come first, the newest of them before the others.
        A version that turns out to be damaged, or of another model, or that `others` do not take
        over, is named and skipped. It may be called in the middle of a run, too: what is on its way
        is waited for, and may be what is restored.

        Raises:
            CheckpointError: in the middle of a run no version is whole; the model stays as it is.
            ConfigError: a tensor is sparse, or has no numbers yet, as on the meta device.
        """
        self._check_open()
        with self._unwatched():
            return self._restored()

    def _restored(self) -> int:
        if self._copier is not None:
            self._end_run(self._copier)
        self._held.reshard()
        check_tensors_on_all(self._held)
        for label in self._restores.complete():
            reason = self._restores.restored(label)
            if not reason:
                self._found, self._saved = label, label.age - 1
                return label.age
            if not self._rank:
                logger.warning("the copies of iteration %s are not used: %s", label.age, reason)
        if self._saved >= 0:  # The model is not as it was at first.
            raise CheckpointError("no version in memory is complete: the model stays as it is")
        self._found = None
        return 0

    def _end_run(self, copier: Copier) -> None:
        """What follows is another run, whose states may differ from those of the same iterations
        before."""
        self.wait_ended()
        self._completed(copier)
        copier.close()
        self._copier = None
        self._epoch += 1
        labels = gathered_as(dict[int, tuple[Label, ...]], self._versions())
        self._restores = self._restores_of(labels)

    def _restores_of(self, labels: Sequence[Mapping[int, tuple[Label, ...]]]) -> Restores:
        """From the versions that each rank keeps, by shard."""
        arenas = (self._arena, *self._older)
        return Restores(self._links, self._held, arenas, dict(enumerate(labels)))

    # -- forth ------------------------------------------------------------------------------------

    def save(self, iteration: int) -> bool:
        """Begins a version of the state as it is after so many iterations.

        Returns:
            False if none begins, because the one before is still on its way, or copies failed, or
            a machine has no process any more that owns their memory. All ranks return the same.

        Raises:
            ConfigError: so many iterations were saved before; at the first time, and when the
                optimizer's state has other parts than before, also that there is no memory for
                copies, or that something would not be there in a restore.
        """
        self._check_open()
        if iteration <= self._saved:
            raise ConfigError("iteration", iteration, f"must be above {self._saved}, saved before")
        with self._unwatched():
            begins = self._begin(iteration)
        if self._turns is not None:
            self._turns.started(begins=begins)
        return begins

    def _unwatched(self) -> AbstractContextManager[None]:
        """Collectives within are none of the loop's."""
        return self._turns.unwatched() if self._turns else nullcontext()

    def _begin(self, iteration: int) -> bool:
        self._held.reshard()
        copier = self._copier or self._begun()
        if not self._completed(copier):
            return False
        if not self._are_checked:
            self._check(copier.own)
        copier.begin(iteration, self._states() if copier.own else {})
        self._saved = iteration
        return True

    def _completed(self, copier: Copier) -> bool:
        """Whether the newest version has ended on all ranks, and another one may begin; if none has
        failed it is complete."""
        try:
            is_free = not copier.has_begun or copier.has_ended
            is_whole = copier.has_begun and not copier.has_failed
        except (AbortedError, PeerLostError) as error:
            logger.warning("rank %s copies no more: %s", self._rank, error)
            is_free, is_whole = False, False
        is_checked = parts_of_state(self._held.optimizer) == self._checked
        are_free, are_whole, are_owned, self._are_checked = on_all(
            is_free, is_whole, self._is_owned(), is_checked
        )
        if are_free and are_whole:
            copier.complete()
            for arena in self._older:
                arena.keep((), layers=())
            self._older = []
        return are_free and are_owned

    def _is_owned(self) -> bool:
        """Whether a process owns this rank's memory, if need be another one than before."""
        if self._can_be_kept and self._kept.is_gone:
            gone = f"rank {self._rank}: the process that owned copies on this machine is gone"
            try:
                self._kept.renew()
                logger.warning("%s: another one owns them now", gone)
            except CheckpointError as error:
                self._can_be_kept = False
                lost = "copies here end with this rank, and nothing is saved any more"
                logger.warning("%s, and there is no other: %s: %s", gone, lost, error)
        return self._can_be_kept

    def _states(self) -> dict[int, State]:
        """This rank's shard, as it is now."""
        return {self._shard: self._held.shard(self._shard, self._num_shards)[1]}

    def _begun(self) -> Copier:
        """The copier of this run, which begins with the first version."""
        is_replicated = self._held.is_replicated
        self._num_shards = 1 if is_replicated else self._world_size
        self._shard = 0 if is_replicated else self._rank
        first = self._nodes.index(self._nodes[self._rank])
        own = () if is_replicated and first != self._rank else (self._shard,)
        self._sent = () if is_replicated else shard_copies(self._nodes, self._copies)
        self._check(own)
        self._turns = self._turns or between_collectives(
            self._links,
            self._nodes,
            self._sent,
            iterations=self._profile_iterations,
            device_type=self._held.device_type,
        )
        self._copier = Copier(
            self._links,
            self._arena,
            own=own,
            copies=self._sent,
            since=self._num_shards,
            epoch=self._epoch,
            run=self._run,
            kept=self._found,
            buffers=self._buffers,
            turns=self._turns or AtOnce(),
            virtual_bytes=_real,
            fill=self._filler,
            unload=nothing_to_unload,
            failed=self._failed,
            timeout_s=PATIENT_S,
        )
        return self._copier

    def _check(self, own: Sequence[int]) -> None:
        """That all of the state would be there in a restore, and that there is room for it."""
        check_on_all(self._held)
        state = self._states()[self._shard] if own else {}
        check_room_on_all(
            self._nodes,
            self._sent,
            num_copies=self._copies,
            own_bytes=sum(array.nbytes for array in state.values()),
            arena_bytes=self._arena.num_bytes,
        )
        self._checked = parts_of_state(self._held.optimizer)

    @property
    def idle_spans(self) -> dict[int, tuple[IdleSpan, ...]]:
        """By rank that copies go to, the spans of an iteration in which they go: `after` so many
        collectives, and for how long. Empty before they are measured, and where copies go at once.
        """
        return self._turns.spans if self._turns else {}

    def _failed(self, reason: str) -> None:
        logger.warning("rank %s: copies are not complete: %s", self._rank, reason)

    def _before_step(self, *_: Any) -> None:
        """An optimizer's step changes what is being copied."""
        self.wait_copied()

    def wait_copied(self) -> None:
        """Blocks until model and optimizer may change; an optimizer's step does so by itself."""
        self._check_open()
        copier = self._copier
        if copier is not None and copier.own and copier.has_begun:
            self._wait(lambda: copier.wait_copied(copier.own[0]))

    def wait_ended(self) -> None:
        """Blocks until what this rank sends of the newest version is kept, and it keeps its own."""
        self._check_open()
        if self._copier is not None and self._copier.has_begun:
            if self._turns is not None:
                self._turns.rush()
            self._wait(self._copier.wait_ended)

    def _wait(self, wait: Callable[[], None]) -> None:
        """Training goes on without copies where they cannot be made any more."""
        try:
            wait()
        except (AbortedError, PeerLostError) as error:
            logger.warning("rank %s copies no more: %s", self._rank, error)

    def close(self) -> None:
        """Ends copying and gives the memory back: the job is over, and all but this raises then."""
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
        self._kept.end()

    def _check_open(self) -> None:
        if self._is_closed:
            remedy = "it is closed: make another MemoryCheckpointer"
            raise ConfigError("MemoryCheckpointer", "closed", remedy)

    def _versions(self) -> dict[int, tuple[Label, ...]]:
        found: dict[int, tuple[Label, ...]] = {}
        for arena in (self._arena, *self._older):
            for shard, labels in arena.versions().items():
                found[shard] = (*found.get(shard, ()), *labels)
        return found


def _epoch_after(ranks: Sequence[_Rank]) -> int:
    """Above the epochs of all versions that are known, whatever clocks say; and above those of
    earlier runs whose memory is not here now, as far as clocks tell which those are."""
    known = [n.epoch for rank in ranks for labels in rank.labels.values() for n in labels]
    return max([1 + max(known, default=-1), *(rank.begin_us for rank in ranks)])


def _real(_shard: int) -> int:
    return 0


# -- what a MemoryCheckpointer is given, and where it is if it is not told -------------------------

# Of 16 KiB a piece: some 30 MB/s over a link of this machine alone, a tenth of that at 4 KiB.
BUFFER_BYTES_MIN: Final = 64 << 10


def check_least(*, copies: int, buffer_bytes: int, profile_iterations: int, idle_s: float) -> None:
    """Refuses numbers that are too small, or no whole ones where only those will do.

    Raises:
        ConfigError: naming the first of them.
    """
    for field, value, least, why in (
        ("copies", copies, 1, "the node's own"),
        ("buffer_bytes", buffer_bytes, BUFFER_BYTES_MIN, "or copies are slow to go"),
        ("profile_iterations", profile_iterations, 0, "to send copies at once"),
    ):
        if not isinstance(value, int) or value < least:
            raise ConfigError(field, value, f"a whole number, at least {least}, {why}")
    if not idle_s > 0:
        raise ConfigError("idle_s", idle_s, "above 0, or copies are gone with the ranks")


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
    """Where a user's keepers have their sockets, each in a directory of its own; made for the user
    alone, as a launcher has its socket there, too."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    path = Path(base) / "planaria" if base else Path(f"/tmp/planaria-{os.getuid()}")
    with contextlib.suppress(OSError):  # Whoever then uses it says what is wrong.
        path.mkdir(mode=0o700, exist_ok=True)
    return path


# -- that nodes have the memory for the copies that they are to keep: all ranks find it out --------


def check_room_on_all(
    nodes: Sequence[str],
    copies: Sequence[LayerCopy],
    *,
    num_copies: int,
    own_bytes: int,
    arena_bytes: int,
) -> None:
    """Refuses copies for which a node has no memory: of each shard that is kept there a version
    that is whole, and one on its way.

    Args:
        nodes: of all ranks.
        num_copies: as the user has it.
        own_bytes: that this rank copies of its own.
        arena_bytes: that this rank has for copies now.

    Raises:
        ConfigError: on all ranks.
    """
    sizes = gathered_as(int, own_bytes)
    kept = Counter[str]()
    for node, size in zip(nodes, sizes, strict=True):
        kept[node] += size
    for copy in copies:
        for target in copy.targets:
            kept[nodes[target]] += sizes[copy.source]
    here, arenas = nodes[dist.get_rank()], gathered_as(int, arena_bytes)
    there = sum(size for size, node in zip(arenas, nodes, strict=True) if node == here)
    needed, room = 2 * kept[here], available_bytes() + there
    short = "" if needed <= room else f"{here} has {room} bytes, and they take {needed} there"
    for reason in filter(None, gathered_as(str, short)):
        raise ConfigError("copies", num_copies, f"{reason}: make fewer, or use more nodes")
