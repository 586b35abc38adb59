"""How groups of NCCL are formed, aborted and given up, on groups that are none of NCCL's."""

import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from helpers.fake_groups import Fabric
from helpers.linked_ranks import TIMEOUT_S, begin_all, in_threads, link_ranks, tag, wait_until
from helpers.streamed_device import StreamedDevice
from planaria.core.plan import Hop
from planaria.engine.comm.nccl import GroupKey, LinkStore, NcclComm, NcclMaker, group_keys
from planaria.engine.devices import LateDevice, find_device
from planaria.errors import AbortedError, PeerLostError
from planaria.schedule.action import Bucket, Schedule
from planaria.transport.links import Channel, Tag

PAIR: list[GroupKey] = [(-1, 0, 1), (0, 1), (1, 0)]
ABORT_S_MAX = 0.1


@contextmanager
def comms(
    fabric: Fabric, num_ranks: int = 2, keys: Sequence[GroupKey] = PAIR
) -> Iterator[list[NcclComm]]:
    """Ranks of an epoch; none has formed its groups."""
    with link_ranks(num_ranks) as all_links:
        opened = [NcclComm(links, LateDevice(), keys, fabric) for links in all_links]
        yield opened
        for comm in opened:
            comm.abort("the test is over")
        for comm in opened:
            comm.close()


@contextmanager
def formed(fabric: Fabric) -> Iterator[list[NcclComm]]:
    """Two ranks that have formed their groups."""
    with comms(fabric) as opened:
        with in_threads(*(comm.form for comm in opened)) as running:
            for one in running:
                one.result(timeout=TIMEOUT_S)
        yield opened


def abort_s(comm: NcclComm) -> float:
    """Seconds that an abort takes."""
    begin_s = time.monotonic()
    comm.abort("a member is lost")
    return time.monotonic() - begin_s


@pytest.mark.parametrize("is_stuck", [False, True])
def test_an_abort_ends_the_forming_of_a_group_whose_peer_never_comes(is_stuck: bool) -> None:
    """At once, also where the abort of the group itself waits for a lock of the group."""
    fabric, goes_on = Fabric(), threading.Event()
    if is_stuck:
        fabric.on_abort = lambda: goes_on.wait(TIMEOUT_S)  # type: ignore[assignment]
    with comms(fabric) as (comm, _), in_threads(comm.form) as (forming,):
        wait_until(lambda: bool(fabric.posted))
        seconds = abort_s(comm)
        with pytest.raises(AbortedError, match="a member is lost"):
            forming.result(timeout=ABORT_S_MAX if is_stuck else TIMEOUT_S)
        goes_on.set()

    assert seconds < ABORT_S_MAX


def test_a_group_that_cannot_be_formed_ends_the_epoch() -> None:
    """The rank says which peers it was to reach, and why it did not."""
    fabric = Fabric()

    def refuse(_: str) -> None:
        raise RuntimeError("NCCL error: no device for eth7\nand a stack")

    fabric.on_make = refuse
    text = r"group of ranks \[0, 1\].*eth7"
    with comms(fabric) as (_, comm), pytest.raises(PeerLostError, match=text) as lost:
        comm.form()

    assert lost.value.rank == 0


def test_an_epoch_that_is_over_forms_no_groups() -> None:
    """The order may have come while the links were made."""
    fabric = Fabric()
    with comms(fabric) as (comm, _):
        comm._links.abort("a member is lost", first_epoch=1)
        with pytest.raises(AbortedError):
            comm.form()

    assert not fabric.posted


def test_a_group_that_is_made_while_the_epoch_is_aborted_is_aborted_too() -> None:
    """Its maker is in a call that nothing ends."""
    fabric, goes_on, is_making = Fabric(), threading.Event(), threading.Event()

    def make_slowly(_: str) -> None:
        is_making.set()
        assert goes_on.wait(TIMEOUT_S)

    fabric.on_make = make_slowly
    with comms(fabric) as (comm, _):
        with in_threads(comm.form) as (forming,):
            assert is_making.wait(TIMEOUT_S)
            comm.abort("a member is lost")
            with pytest.raises(AbortedError):
                forming.result(timeout=TIMEOUT_S)
        goes_on.set()
        wait_until(lambda: fabric.num_aborted == [1])


def test_all_groups_are_aborted_in_one_call_and_once() -> None:
    """One after the other, groups of NCCL may wait for each other."""
    fabric = Fabric()
    with formed(fabric) as (left, right):
        for comm in (left, left, right):
            comm.abort("a member is lost")
        wait_until(lambda: len(fabric.num_aborted) == 2)

    assert fabric.num_aborted == [3, 3]


@pytest.fixture
def maker() -> Iterator[NcclMaker]:
    """A maker of groups of NCCL; the environment is afterwards what it was."""
    environment = dict(os.environ)
    try:
        yield NcclMaker()
    finally:
        os.environ.clear()
        os.environ.update(environment)


def test_no_group_of_nccl_waits_for_the_abort_of_another(
    maker: NcclMaker, caplog: pytest.LogCaptureFixture
) -> None:
    """Each frees memory, which may wait for the kernels of all; an error of one is said."""
    all_begun = threading.Barrier(3)

    class Waiting:
        def abort(self) -> None:
            if all_begun.wait(TIMEOUT_S) == 0:
                raise RuntimeError("NCCL error: unhandled cuda error")

    groups: Any = [Waiting() for _ in range(all_begun.parties)]
    maker.abort_all(groups)

    assert not all_begun.broken
    assert caplog.messages == [
        "a group of NCCL could not be aborted: NCCL error: unhandled cuda error"
    ]


def test_what_has_arrived_is_kept_until_the_stream_that_computes_has_used_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its memory is of the stream that has received it, which may be given it again."""
    adopted: list[torch.Tensor] = []
    with formed(Fabric()) as (left, right):
        monkeypatch.setattr(right._device, "adopt", adopted.append)
        left.send(1, tag(0), torch.arange(3.0), virtual_bytes=0)
        arrived = right.receive(0, tag(0))

    (taken,) = adopted
    assert taken is arrived
    assert arrived.tolist() == [0.0, 1.0, 2.0]


def test_the_results_of_a_sum_that_was_aborted_are_refused() -> None:
    """An abort of NCCL lets kernels end as if all were well."""
    fabric = Fabric()
    fabric.is_silent = True
    sums = torch.ones(5)
    with (
        formed(fabric) as (comm, _),
        in_threads(
            lambda: comm.sum_over((0, 1), [sums], [sums], iteration=0, bucket=0, virtual_bytes=0)
        ) as (one,),
    ):
        wait_until(lambda: ("(-1, 0, 1)", "all", 2, 0) in fabric.posted)
        comm.abort("a member is lost")
        with pytest.raises(AbortedError):
            one.result(timeout=TIMEOUT_S)


def test_what_follows_a_sum_that_has_failed_comes_after_what_it_left_on_the_device() -> None:
    """The sums are cleared for the next epoch while the device may still write to them."""
    fabric, device = Fabric(), StreamedDevice()
    with formed(fabric) as (comm, _):
        comm._device = device
        comm._groups[-1, 0, 1].abort()
        with pytest.raises(PeerLostError, match="a sum failed"):
            sum_ones(comm)

    assert device.waits == [("sum", ""), ("", "sum")]


def sum_ones(comm: NcclComm) -> None:
    sums = torch.ones(5)
    comm.sum_over((0, 1), [sums], [sums], iteration=0, bucket=0, virtual_bytes=0)


def test_an_operation_that_fails_ends_the_epoch_with_its_peer() -> None:
    """Nothing was aborted, so the peer or the way to it must be at fault."""
    fabric = Fabric()
    with formed(fabric) as (comm, _):
        comm._groups[0, 1].abort()
        with pytest.raises(PeerLostError, match="a send failed") as lost:
            comm.send(1, tag(0), torch.ones(3), virtual_bytes=0)

    assert lost.value.rank == 1


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 128.00 MiB"),
        torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"),
    ],
)
def test_what_the_own_device_lacks_is_no_lost_peer(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peers of a rank without memory for a sum were left out, one after the other."""

    def fail(*_: object) -> None:
        raise error

    with formed(Fabric()) as (comm, _):
        monkeypatch.setattr(torch.nn.functional, "pad", fail)
        with pytest.raises(type(error)) as raised:
            sum_ones(comm)

    assert raised.value is error


def test_nobody_asks_an_operation_of_an_aborted_group_whether_it_is_over() -> None:
    """The answer would wait for the abort, which may wait for NCCL."""
    fabric, num_asked = Fabric(), 0

    def ask() -> None:
        nonlocal num_asked
        num_asked += 1
        comm.abort("a member is lost")

    with formed(fabric) as (comm, _):
        for number in range(3):
            fabric.on_ask = ask if number == 2 else fabric.on_ask
            comm.send(1, tag(number), torch.ones(3), virtual_bytes=0)

    assert num_asked == 1


def test_an_error_of_a_thread_that_nobody_has_seen_is_raised_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is a mistake of planaria's."""

    def misread(_: object) -> None:
        raise ValueError("what is this?")

    monkeypatch.setattr("planaria.engine.comm.nccl.parse_head", misread)
    with formed(Fabric()) as (left, right):
        left.send(1, tag(0), torch.ones(3), virtual_bytes=0)
        wait_until(lambda: right._error is not None)
        with pytest.raises(ValueError, match="what is this"):
            right.close()
        with pytest.raises(ValueError, match="what is this"):
            right.receive(0, tag(0))


def test_an_error_of_a_thread_frees_who_waits_in_a_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is waited for may come from a rank that waits for this one."""
    misread = Mock(side_effect=ValueError("what is this?"))
    monkeypatch.setattr("planaria.engine.comm.nccl.parse_head", misread)
    with formed(Fabric()) as (left, right):
        left.send(1, tag(0), torch.ones(3), virtual_bytes=0)

        with pytest.raises(AbortedError):
            right._links.receive(0, tag(9), timeout_s=TIMEOUT_S)
        with pytest.raises(ValueError, match="what is this"):
            right.check()


def test_a_comm_that_is_closed_holds_no_groups() -> None:
    """What frees them waits for threads of torch, which the garbage collector must not."""
    with formed(Fabric()) as (comm, _):
        groups = [weakref.ref(group) for group in comm._groups.values()]
        comm.close()

        assert len(groups) == 3
        wait_until(lambda: not any(group() for group in groups))


def test_what_a_rank_sets_all_ranks_of_the_group_get() -> None:
    """In any order; a rank may set nothing at all."""
    with link_ranks(3) as ranks:
        stores = [
            LinkStore(links, name="", peers={0, 1, 2} - {links.rank}, number=0) for links in ranks
        ]
        stores[0].set("a", b"1")
        stores[0].set("b", b"")
        stores[2].set("c", "3")

        assert [stores[1].get(key) for key in ("c", "b", "a")] == [b"3", b"", b"1"]
        assert stores[0].get("a") == b"1"
        assert stores[1].check(["a", "c"])
        assert not stores[1].check(["a", "d"])

        with in_threads(lambda: stores[1].get("d")) as (one,):
            ranks[1].abort("a member is lost", first_epoch=1)
            with pytest.raises(AbortedError):
                one.result(timeout=TIMEOUT_S)


def test_a_store_takes_nothing_of_the_next_epoch() -> None:
    """A call of NCCL that outlasts its epoch would take what forms a group of the next one."""
    with link_ranks(2) as ranks:
        stores = [LinkStore(links, name="", peers={1 - links.rank}, number=0) for links in ranks]
        begin_all(ranks, 1)
        with pytest.raises(AbortedError, match="epoch 0"):
            stores[0].set("a", b"1")
        with pytest.raises(AbortedError, match="epoch 0"):
            stores[1].get("a")


def test_groups_of_nccl_have_streams_that_nothing_else_uses(
    maker: NcclMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's streams are few; two that are one would have ranks wait for each other for ever."""
    made: list[SimpleNamespace] = []

    class Nccl:
        def __init__(self, *arguments: Any) -> None:
            made.append(arguments[-1])

        @staticmethod
        def Options() -> SimpleNamespace:  # noqa: N802
            return SimpleNamespace(config=SimpleNamespace(), is_high_priority_stream=False)

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    maker.make(Store(), 0, 2)

    (options,) = made
    assert options.is_high_priority_stream
    assert options.config.blocking == 0


def test_torch_leaves_it_to_the_coordinator_what_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the user sets for NCCL itself stays."""
    monkeypatch.setattr(os, "environ", {"NCCL_CUMEM_ENABLE": "1"})
    NcclMaker()

    assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "0"
    assert os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] == "0"  # A minute otherwise.
    assert os.environ["NCCL_CUMEM_ENABLE"] == "1"


def test_each_direction_and_each_set_of_holders_has_a_group() -> None:
    """In one order on all ranks; who holds layers alone needs none."""
    routes = [(Hop(0, 0, 2), Hop(2, 2, 4)), (Hop(1, 0, 2), Hop(1, 2, 3), Hop(2, 3, 4))]
    buckets = (Bucket((0, 1), (0, 1)), Bucket((2,), (1,)), Bucket((3,), (0, 1)))
    schedule = Schedule(routes=tuple(routes), actions={}, buckets=buckets)

    assert group_keys(schedule) == [(-1, 0, 1), (0, 2), (1, 2), (2, 0), (2, 1)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("after_s", [0.3, 4.0])
def test_nccl_itself_is_aborted_at_once_if_a_peer_never_comes(after_s: float) -> None:
    """While it starts, and when all that is missing is the peer."""
    with link_ranks(2) as all_links:
        comm = NcclComm(all_links[0], find_device("cuda", rank=0), PAIR, NcclMaker())
        with in_threads(comm.form) as (forming,):
            time.sleep(after_s)
            assert not forming.done()
            seconds = abort_s(comm)
            with pytest.raises(AbortedError, match="a member is lost"):
                forming.result(timeout=ABORT_S_MAX)
        begin_s = time.monotonic()
        comm.close()

    assert seconds < ABORT_S_MAX
    assert time.monotonic() - begin_s < 1.0


def test_idle_spans_know_what_goes_over_groups() -> None:
    """Chunks of copies keep out of its way: messages and sums, at both ends, but no chunks."""
    fabric = Fabric()
    with comms(fabric, keys=[*PAIR, (-2, 0, 1)]) as (left, right):
        with in_threads(left.form, right.form) as running:
            for one in running:
                one.result(timeout=TIMEOUT_S)
        for comm in (left, right):
            comm._links.traffic.listen(bytes_per_s=80.0, is_far=lambda _: True)
        tag = Tag(Channel.FORWARD, 3, 1, 2)
        left.send(1, tag, torch.ones(40), virtual_bytes=0)
        left.send_chunk(1, 0, torch.ones(40))
        right.receive_chunk(0, 0, torch.empty(40))
        right.receive(0, tag)
        calls = [
            lambda comm=comm: comm.sum_over(
                (0, 1), [torch.ones(3)], [torch.ones(3)], iteration=3, bucket=7, virtual_bytes=0
            )
            for comm in (left, right)
        ]
        with in_threads(*calls) as running:
            for one in running:
                one.result(timeout=TIMEOUT_S)

        sums = Tag(Channel.SCATTER, 3, 7)
        for comm, is_out in ((left, True), (right, False)):
            peer = 1 - comm._links.rank
            message, *others = comm._links.traffic.take()
            assert message[:3] == (is_out, peer, tag)
            assert message.end_s - message.start_s == pytest.approx(2.0)
            assert [use[:3] for use in others] == [(True, peer, sums), (False, peer, sums)]
            assert all(message.start_s <= use.start_s < use.end_s for use in others)
