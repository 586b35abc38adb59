"""Tensors from device to device: groups of NCCL of our own, made anew in each epoch.

There is one group for each pair of ranks that a microbatch passes, and direction, and one for each
set of holders that sum gradients. All ranks make their groups in one order, so no two wait for each
other, and use each once before the epoch begins, because the first use is slow. The identifier of
a group goes over the links (`LinkStore`), so a group needs no port and no default group.

A message is announced over the links: its number, tag, dtype and shape. The receiver's thread posts
the receive as soon as it reads that, so the bytes move while the receiver computes, whatever it
asks for next, and nobody posts a receive for a peer that is gone. Sums are all-to-all exchanges of
segments that each rank adds in ascending order of rank and rounds once, as on links (groups.py);
so the bits are the same.

A chunk of a copy in memory goes over a group that only copies from its source to its target use, so
that training waits for no chunk. The source puts the send into the group before it announces the
chunk over the links, and the target posts the receive when it reads that. So both ranks have the
operations of a group in one order, and a receive waits for nothing but a send that is under way.
The thread that receives waits for nothing else but sub-buffers, which copies to the host free;
neither waits for the thread that sends. So no circle of waits can come about between ranks, in
whatever order each sends to its targets. These groups are formed with the others, before the epoch
begins: NCCL may let the making of a group wait for what is under way on the device, which may be
training that waits for the rank that makes its end of the group later.

A group is never taken apart: when an epoch ends, all its groups are aborted at once, each by a
thread of its own, because an abort may wait for a lock that a group holds while it is formed, and
for kernels of other groups that nothing but their abort ends. Those who wait are freed before that.

Source: ncclCommAbort; torch.distributed.ProcessGroupNCCL. Differs from a process group of torch: a
rank that is lost costs the epoch its groups, and nobody's process.
"""

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from planaria.core.copies import LayerCopy
from planaria.engine.comm.device_comm import HEAD_BYTES, head_of, parse_head
from planaria.engine.comm.pieces import flat_range, pairs_with
from planaria.engine.devices import Device
from planaria.errors import AbortedError, PeerLostError
from planaria.schedule.action import Schedule
from planaria.transport.links import UNLIMITED_S, Channel, Links, Tag
from planaria.transport.traffic import Use

logger = logging.getLogger(__name__)

# Larger blocks of a sum need more memory of the device beside the sums, about four times as much.
_BLOCK_BYTES: Final = 64 << 20
# Limit for threads that end soon. NCCL 2.28.9 took more than 5 s to abort a group that was being
# formed without its peer; by then nobody uses the group, and the next epoch must not wait.
_CLOSE_S: Final = 0.2

# (source, target) of a direction, the same after a -2 for copies, or the ranks of a sum after a -1.
GroupKey = tuple[int, ...]
_SUM: Final = -1
_COPIES: Final = -2


class Work(Protocol):
    """An operation of a group that is under way."""

    def wait(self) -> object:
        """Lets what the calling thread computes from now on come after the operation."""

    def is_completed(self) -> bool:
        """Whether it is over."""


class Group(Protocol):
    """The operations of a process group of torch that are used here."""

    def send(self, tensors: list[Tensor], target: int, tag: int, /) -> Work:
        """Sends a tensor to a rank of the group."""

    def recv(self, tensors: list[Tensor], source: int, tag: int, /) -> Work:
        """Receives a tensor from a rank of the group."""

    def alltoall_base(
        self, targets: Tensor, sources: Tensor, sizes: list[int], source_sizes: list[int], /
    ) -> Work:
        """Sends the k-th of as many equal parts to the k-th rank, and receives as many."""

    def _allgather_base(self, targets: Tensor, source: Tensor, /) -> Work:
        """Sends a tensor to all ranks, and receives those of all, in their order."""

    def abort(self) -> None:
        """Ends all operations of the group; it is of no use afterwards."""


class GroupMaker(Protocol):
    """Makes groups and aborts them."""

    def make(self, store: Store, rank: int, size: int) -> Group:
        """A new group, which is formed when it is first used.

        Args:
            rank: the own rank in the group.
        """

    def abort_all(self, groups: Sequence[Group]) -> None:
        """Aborts groups, none of which waits for the abort of another."""


class LinkStore(Store):
    """The store in which the ranks of one group leave what forms it; each has what all have set.

    Args:
        name: name of the group.
        peers: the other ranks of the group.
        number: number of the group in the epoch, the same on all ranks.

    Raises:
        AbortedError: `set` or `get` is called after the links have left the epoch of the group.
    """

    def __init__(self, links: Links, *, name: str, peers: Iterable[int], number: int) -> None:
        super().__init__()
        self.name = name
        self._links = links
        self._number = number
        self._epoch = links.epoch
        self._num_sent = 0
        self._num_received = dict.fromkeys(peers, 0)
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        """Has all ranks know the value."""
        self._check_epoch()
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._values[key] = data
        name = key.encode()
        payload = np.frombuffer(len(name).to_bytes(4, "big") + name + data, dtype=np.uint8)
        for peer in self._num_received:
            self._links.send(peer, self._tag(self._num_sent), payload)
        self._num_sent += 1

    def get(self, key: str) -> bytes:
        """The value, once a rank has set it."""
        while key not in self._values:
            self._check_epoch()
            wanted = {peer: self._tag(count) for peer, count in self._num_received.items()}
            peer, received = self._links.receive_any(wanted, timeout_s=UNLIMITED_S)
            self._num_received[peer] += 1
            payload = received.tobytes()
            end = 4 + int.from_bytes(payload[:4], "big")
            self._values[payload[4:end].decode()] = payload[end:]
        return self._values[key]

    def wait(self, keys: list[str], *_: object) -> None:
        """Blocks until ranks have set all of the keys."""
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        """Whether all of the keys are known here."""
        return self._values.keys() >= set(keys)

    def _check_epoch(self) -> None:
        """A call of NCCL may outlast its epoch; the next one's groups have the same tags."""
        if self._links.epoch != self._epoch:
            raise AbortedError(f"epoch {self._epoch} of the group {self.name} is over")

    def _tag(self, count: int) -> Tag:
        return Tag(Channel.GROUP, 1 + self._number, count)


class _Arrival(NamedTuple):
    tensor: Tensor
    work: Work | None


class NcclComm:
    """A `DeviceComm` over groups; `form` must be called before the methods that exchange.

    Args:
        links: the rank's links, which have entered the epoch and stand.
        device: the device of the tensors.
        keys: the groups of the epoch, in the same order on all ranks; see `group_keys`.
        maker: makes the groups.
    """

    def __init__(
        self, links: Links, device: Device, keys: Sequence[GroupKey], maker: GroupMaker
    ) -> None:
        self.waits_on_device = True
        self._links = links
        self._device = device
        self._epoch = links.epoch
        self._keys = keys
        self._maker = maker
        self._num_sent: Counter[int] = Counter()
        # What is being sent stays until it is sent.
        self._leaving: list[tuple[Work, Tensor]] = []
        self._leaving_chunks: list[tuple[Work, Tensor]] = []
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition()  # Guards all that follows.
        self._groups: dict[GroupKey, Group] = {}
        self._arrivals: dict[tuple[int, Tag], _Arrival] = {}
        self._is_formed = False
        self._abort_reason = ""
        self._is_aborting = False
        self._error: BaseException | None = None
        self._is_error_raised = False

    # -- forming ------------------------------------------------------------------------------

    def form(self) -> None:
        """Makes and warms all groups of this rank; blocks until all are formed.

        Raises:
            PeerLostError: a peer is gone, or a group could not be formed.
            AbortedError: `abort` was called, or the epoch aborted.
        """
        self._links.check_epoch()
        self._start("form", self._make_groups)
        with self._changed:
            self._changed.wait_for(lambda: self._is_formed or self._is_over())
        self.check()
        self._start("receive", self._post_receives)

    def _make_groups(self) -> None:
        own = self._links.rank
        for number, key in enumerate(self._keys):
            ranks = _ranks_of(key)
            if own not in ranks:
                continue
            others = [rank for rank in ranks if rank != own]
            store = LinkStore(self._links, name=str(key), peers=others, number=number)
            with self._translating(others[0], f"no group of ranks {list(ranks)} was formed"):
                group = self._maker.make(store, ranks.index(own), len(ranks))
                with self._changed:
                    is_late = self._is_over()
                    if not is_late:
                        self._groups[key] = group
                if is_late:
                    self._maker.abort_all([group])
                    return
                with self._device.beside("form"):
                    self._warm(key, group)
        with self._changed:
            self._is_formed = True
            self._changed.notify_all()

    def _warm(self, key: GroupKey, group: Group) -> None:
        place, size = self._device.place, len(_ranks_of(key))
        part = torch.ones(1, device=place)
        if key[0] == _SUM:
            parts = torch.ones(size, device=place)
            group.alltoall_base(torch.empty_like(parts), parts, [], [])
            # So the other is over, too.
            group._allgather_base(torch.empty_like(parts), part).wait()
        elif _ranks_of(key)[0] == self._links.rank:
            group.send([part], 1, 0).wait()
        else:
            group.recv([part], 0, 0).wait()
        self._device.finish()

    # -- messages -----------------------------------------------------------------------------

    def send(self, target: int, tag: Tag, tensor: Tensor, *, virtual_bytes: int) -> None:
        """See `DeviceComm`."""
        del virtual_bytes  # A paced job computes on processors.
        self.check()
        tensor = tensor.detach().contiguous()
        head = head_of(tensor), np.array(tag, dtype=np.int64)
        self._links.send(target, _head_tag(self._num_sent[target]), *head)
        self._num_sent[target] += 1
        if tensor.numel():
            with self._translating(target, "a send failed"):
                work = self._groups[self._links.rank, target].send([tensor], 1, 0)
            self._note_message(target, tag, tensor, is_out=True)
            self._leaving = [*self._incomplete(self._leaving), (work, tensor)]

    def _post_receives(self) -> None:
        """Posts the receive of each message as soon as its head has come."""
        own = self._links.rank
        sources = [key[0] for key in self._groups if key[0] >= 0 and key[0] != own]
        num_received = dict.fromkeys(sources, 0)
        while sources and not self._is_over():
            wanted = {source: _head_tag(count) for source, count in num_received.items()}
            source, message = self._links.receive_any(wanted, timeout_s=UNLIMITED_S)
            num_received[source] += 1
            dtype, shape = parse_head(message)
            channel, *numbers = message[HEAD_BYTES:].view(np.int64).tolist()
            with self._device.beside("receive"):
                tensor = torch.empty(shape, dtype=dtype, device=self._device.place)
                work = None
                if tensor.numel():
                    with self._translating(source, "a receive failed"):
                        work = self._groups[source, own].recv([tensor], 0, 0)
            tag = Tag(Channel(channel), *numbers)
            self._note_message(source, tag, tensor, is_out=False)
            with self._changed:
                self._arrivals[source, tag] = _Arrival(tensor, work)
                self._changed.notify_all()

    def _note_message(self, peer: int, tag: Tag, tensor: Tensor, *, is_out: bool) -> None:
        """Records when a message takes the network, as well as the host can know it."""
        begin_s, traffic = time.monotonic(), self._links.traffic
        traffic.note(Use(is_out, peer, tag, begin_s, begin_s + traffic.seconds(tensor.nbytes)))

    def receive(self, source: int, tag: Tag) -> Tensor:
        """See `DeviceComm`."""
        with self._changed:
            self._changed.wait_for(lambda: (source, tag) in self._arrivals or self._is_over())
            arrival = self._arrivals.pop((source, tag), None)
        if arrival is None:
            self.check()
            raise AssertionError("a wait that nothing has ended")
        if arrival.work is not None:
            with self._translating(source, "a receive failed"):
                arrival.work.wait()
            self._device.adopt(arrival.tensor)
        return arrival.tensor

    # -- chunks of copies ---------------------------------------------------------------------

    def send_chunk(self, target: int, number: int, chunk: Tensor) -> None:
        """See `ChunkComm`."""
        del number  # A group keeps the order of its operations.
        self.check()
        with self._translating(target, "a send of a copy failed"):
            work = self._groups[_COPIES, self._links.rank, target].send([chunk], 1, 0)
        self._leaving_chunks = [*self._incomplete(self._leaving_chunks), (work, chunk)]

    def receive_chunk(self, source: int, number: int, buffer: Tensor) -> None:
        """See `ChunkComm`."""
        del number
        self.check()
        with self._translating(source, "a receive of a copy failed"):
            self._groups[_COPIES, source, self._links.rank].recv([buffer], 0, 0).wait()

    # -- sums ---------------------------------------------------------------------------------

    def sum_over(
        self,
        ranks: Sequence[int],
        sums: Sequence[Tensor],
        results: Sequence[Tensor],
        *,
        iteration: int,
        bucket: int,
        virtual_bytes: int,
    ) -> None:
        """See `DeviceComm`."""
        del virtual_bytes  # The sums of a group come in one order on all ranks.
        self.check()
        begin_s = time.monotonic()
        group = self._groups[_SUM, *ranks] if len(ranks) > 1 else None
        others = [rank for rank in ranks if rank != self._links.rank] or [self._links.rank]
        size = sum(part.numel() for part in sums)
        step = _BLOCK_BYTES // sums[0].element_size()
        computed = self._device.mark()
        last = computed
        try:
            with self._device.beside("sum"), self._translating(others[0], "a sum failed"):
                computed.order()
                try:
                    for first in range(0, size, step):
                        end = min(first + step, size)
                        block, into = flat_range(sums, first, end), flat_range(results, first, end)
                        _sum_block(group, block, into, num_ranks=len(ranks))
                finally:
                    last = self._device.mark()
                self._device.finish()
        finally:  # After an error the device may still write results, which the next epoch clears.
            last.order()
        self.check()  # After an abort the results are anything.
        tag, end_s = Tag(Channel.SCATTER, iteration, bucket), time.monotonic()
        for peer in ranks:
            if peer != self._links.rank:
                self._links.traffic.note(Use(True, peer, tag, begin_s, end_s))
                self._links.traffic.note(Use(False, peer, tag, begin_s, end_s))

    # -- the end ------------------------------------------------------------------------------

    def check(self) -> None:
        """See `DeviceComm`."""
        with self._changed:
            if self._error is not None:  # It came before any abort.
                self._is_error_raised = True
                raise self._error
            if self._abort_reason:
                text = f"rank {self._links.rank}, epoch {self._epoch}: {self._abort_reason}"
                raise AbortedError(text)
        self._links.check_epoch()

    def abort(self, reason: str) -> None:
        """See `DeviceComm`."""
        with self._changed:
            if self._abort_reason:
                return
            self._abort_reason = reason
            self._changed.notify_all()
        # The links first: whoever sees what an aborted group left finds the epoch over.
        self._links.abort(reason, first_epoch=self._epoch + 1)
        self._abort_groups()

    def _abort_groups(self) -> None:
        with self._changed:
            groups = () if self._is_aborting else tuple(self._groups.values())
            self._is_aborting = True
        if groups:
            self._start("abort", lambda: self._maker.abort_all(groups))

    def close(self) -> None:
        """See `DeviceComm`."""
        self.abort("the epoch is over")
        deadline_s = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(timeout=max(0.0, deadline_s - time.monotonic()))
            if thread.is_alive():  # It keeps what it uses, and is of no use to anybody.
                logger.warning("thread %s of epoch %s goes on", thread.name, self._epoch)
        with self._changed:
            self._groups.clear()
        is_lost = isinstance(self._error, PeerLostError | AbortedError)
        if self._error is not None and not is_lost and not self._is_error_raised:
            self._is_error_raised = True
            raise self._error
        self._error = None  # It refers to its frames, which refer to this comm and to layers.

    def _incomplete(self, works: Iterable[tuple[Work, Tensor]]) -> list[tuple[Work, Tensor]]:
        """The operations that are still under way, each with its tensor; all after an abort.

        To ask one may wait for the abort of its group.
        """
        return [each for each in works if self._is_over() or not each[0].is_completed()]

    def _is_over(self) -> bool:
        return bool(self._abort_reason) or self._error is not None

    def _start(self, name: str, call: Callable[[], None]) -> None:
        """Runs a call in a thread of its own; its error ends the waits of all others."""

        def run() -> None:
            try:
                call()
            except BaseException as error:
                with self._changed:
                    if not self._is_over():
                        self._error = error
                    self._changed.notify_all()
                self._abort_groups()  # Whoever waits in one waits for what never comes.
                if self._is_formed:  # Else the epoch is needed to tell a loss from a failure.
                    self._links.abort("a thread has failed", first_epoch=self._epoch + 1)

        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    @contextmanager
    def _translating(self, peer: int, what: str) -> Iterator[None]:
        """Turns the error of a group into that of the epoch, if it is over, or of the peer.

        What the own device lacks is no fault of a peer's.
        """
        try:
            yield
        except (RuntimeError, PeerLostError) as error:
            self.check()
            if isinstance(error, PeerLostError | torch.OutOfMemoryError | torch.AcceleratorError):
                raise
            raise PeerLostError(peer, f"{what}: {str(error).splitlines()[0]}") from error


def _sum_block(
    group: Group | None, sums: Sequence[Tensor], results: Sequence[Tensor], *, num_ranks: int
) -> None:
    """Sums flat tensors of a few MB over the ranks of a group, and rounds them."""
    flat = torch.cat(list(sums))
    size = len(flat)
    length = -(-size // num_ranks)
    flat = torch.nn.functional.pad(flat, (0, num_ranks * length - size))
    parts = flat
    if group is not None:
        parts = torch.empty_like(flat)
        group.alltoall_base(parts, flat, [], []).wait()
    total = torch.zeros_like(parts[:length])
    for part in parts.view(num_ranks, length):
        total += part
    rounded = total.to(torch.float32)
    gathered = rounded
    if group is not None:
        gathered = torch.empty_like(flat, dtype=torch.float32)
        group._allgather_base(gathered, rounded).wait()
    for result, part in pairs_with(gathered[:size], results):
        result.copy_(part)


def group_keys(schedule: Schedule, copies: Iterable[LayerCopy] = ()) -> list[GroupKey]:
    """The groups of an epoch in the order in which all ranks make theirs.

    Args:
        copies: copies of layers that go from device to device.
    """
    keys: set[GroupKey] = {
        (_SUM, *bucket.ranks) for bucket in schedule.buckets if len(bucket.ranks) > 1
    }
    for route in schedule.routes:
        for before, after in pairwise(route):
            if before.rank != after.rank:
                keys |= {(before.rank, after.rank), (after.rank, before.rank)}
    keys |= {(_COPIES, copy.source, target) for copy in copies for target in copy.targets}
    return sorted(keys)


def _ranks_of(key: GroupKey) -> GroupKey:
    """The ranks of a group, in the order of their numbers in it."""
    return key if key[0] >= 0 else key[1:]


def _head_tag(number: int) -> Tag:
    return Tag(Channel.HEAD, 0, number)


class NcclMaker:
    """Makes groups of NCCL that nothing but `abort` ends.

    Torch would end the process when it finds an error or an operation that takes long; here the
    coordinator decides what is lost.

    Torch deals streams out of a pool of 32, again and again: after some epochs the stream of a
    group would be the one on which sums wait for other ranks, and a message behind such a sum would
    be one that this rank is waited for. The streams of groups come from a pool of their own, which
    is that of high priority.
    """

    def __init__(self) -> None:
        os.environ.update(
            TORCH_NCCL_ASYNC_ERROR_HANDLING="0",
            TORCH_NCCL_BLOCKING_WAIT="0",
            TORCH_NCCL_DUMP_ON_TIMEOUT="0",
            TORCH_NCCL_ENABLE_MONITORING="0",
            TORCH_NCCL_PROPAGATE_ERROR="0",
            TORCH_NCCL_RETHROW_CUDA_ERRORS="0",
            TORCH_NCCL_USE_COMM_NONBLOCKING="1",
            # Else the thread that watches a group sleeps for a minute after each operation that has
            # failed, and whoever drops the group waits for that thread.
            TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC="0",
        )
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # Its memory outlives an abort.
        # With it, one of seven starts that made fifty groups in a row hung (nccl issue 2379).
        os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")

    def make(self, store: Store, rank: int, size: int) -> Group:
        """See `GroupMaker`."""
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        options.config.blocking = 0
        options._timeout = timedelta(days=365)
        options.is_high_priority_stream = True
        group: Group = nccl(store, rank, size, options)
        return group

    def abort_all(self, groups: Sequence[Group]) -> None:
        """See `GroupMaker`."""
        abort_at_once(groups)


class Abortable(Protocol):
    """A group that can be aborted."""

    def abort(self) -> None:
        """Ends all operations of the group; it is of no use afterwards."""


def abort_at_once(groups: Sequence[Abortable]) -> None:
    """Aborts groups of NCCL, none of which waits for the abort of another; blocks until it is done.

    An abort frees memory of the device, which may wait for the kernels of all groups. Torch aborts
    each group in a new thread, so ncclGroupStart here would not make them one abort.
    """
    threads = [
        threading.Thread(target=_abort, args=(group,), name="abort group", daemon=True)
        for group in groups
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _abort(group: Abortable) -> None:
    try:
        group.abort()
    except RuntimeError as error:  # Nobody uses the group any more.
        logger.warning("a group of NCCL could not be aborted: %s", error)
