"""What every `DeviceComm` promises, held against each implementation and device.

On the device whose copies come late, bits are wrong wherever a wait is missing.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import permutations
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from helpers.fake_groups import Fabric, GlooMaker
from helpers.linked_ranks import TIMEOUT_S, in_threads, link_ranks, tag, wait_until
from planaria.engine.comm.device_comm import DeviceComm
from planaria.engine.comm.host import HostComm
from planaria.engine.comm.nccl import GroupKey, GroupMaker, NcclComm, NcclMaker
from planaria.engine.devices import Device, find_device
from planaria.errors import AbortedError, PeerLostError
from planaria.transport.links import Channel, Links

KINDS = ["host cpu", "host late", "fake late", "gloo cpu"]
if torch.cuda.is_available():
    KINDS.append("host cuda")
if torch.cuda.device_count() > 1 and dist.is_nccl_available():
    KINDS.append("nccl cuda")
SIZES = [(7,), (0,), (1,), (5, 0, 3), (2, 11, 1, 64), (1000, 333)]
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.int64)


class Rank(NamedTuple):
    """A rank of an epoch: what it computes on, and what it exchanges with."""

    device: Device
    links: Links
    comm: DeviceComm
    fabric: Fabric | None = None

    def is_summing(self) -> bool:
        """Whether it has begun a sum."""
        if self.fabric is not None:  # The first one of a group was its first use.
            return any(key[1:] == ("all", 2, self.links.rank) for key in self.fabric.posted)
        return self.links.sent_bytes[Channel.SCATTER] > 0

    def tensor(self, seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor on the device."""
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64) * 1000
        return drawn.to(dtype).to(self.device.place)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """An implementation and a device; what has more than a few elements travels in pieces."""
    monkeypatch.setattr("planaria.engine.comm.pieces.PIECE_BYTES", 96)
    monkeypatch.setattr("planaria.engine.comm.nccl._BLOCK_BYTES", 800)
    return str(request.param)


@contextmanager
def open_ranks(kind: str, num_ranks: int) -> Iterator[list[Rank]]:
    """That many ranks in one epoch, which are aborted and closed at the end."""
    implementation, place = kind.split()
    if implementation == "nccl" and num_ranks > torch.cuda.device_count():
        pytest.skip("NCCL refuses two ranks of a group on one GPU")
    makers: dict[str, Callable[[], GroupMaker]]
    makers = {"fake": Fabric, "gloo": GlooMaker, "nccl": NcclMaker}
    maker = None if implementation == "host" else makers[implementation]()
    with link_ranks(num_ranks) as all_links:
        ranks = []
        for links in all_links:
            device = find_device(place, rank=links.rank)
            comm: DeviceComm = HostComm(links, device)
            if maker is not None:
                comm = NcclComm(links, device, all_keys(num_ranks), maker)
            fabric = maker if isinstance(maker, Fabric) else None
            ranks.append(Rank(device, links, comm, fabric))
        with in_threads(*(partial(form, rank.comm) for rank in ranks)) as running:
            for one in running:
                one.result(timeout=TIMEOUT_S)
        yield ranks
        for rank in ranks:
            rank.comm.abort("the test is over")
        for rank in ranks:
            rank.comm.close()


def form(comm: DeviceComm) -> None:
    if isinstance(comm, NcclComm):
        comm.form()


def all_keys(num_ranks: int) -> list[GroupKey]:
    """A group for each direction, and one for the sums of all ranks."""
    ranks, pairs = range(num_ranks), list(permutations(range(num_ranks), 2))
    copies = [(-2, *pair) for pair in pairs]
    return sorted([(-1, *ranks), *pairs, *copies] if num_ranks > 1 else [])


def receive(rank: Rank, source: int, index: int) -> Tensor:
    """The tensor, computed with on the device and brought to the host."""
    return (rank.comm.receive(source, tag(index)) + 0).cpu()


def test_tensors_arrive_as_they_were_sent(kind: str) -> None:
    """Of every dtype, without elements or dimensions, and strided as a transposed one is."""
    with open_ranks(kind, 2) as (left, right):
        shapes = [(2, 3, 5), (), (0, 4), (1,), (70, 300)]
        sent = [left.tensor(n, *shape) for n, shape in enumerate(shapes)]
        sent += [left.tensor(n, 6, 5, dtype=dtype) for n, dtype in enumerate(DTYPES)]
        sent += [left.tensor(9, 40, 30).T, left.tensor(8, 50)[::2]]
        for index, tensor in enumerate(sent):
            left.comm.send(1, tag(index), tensor, virtual_bytes=0)

        for index in reversed(range(len(sent))):  # Whoever receives may ask in another order.
            arrived = receive(right, 0, index)
            assert arrived.dtype == sent[index].dtype
            assert torch.equal(arrived, sent[index].cpu())


def test_both_ways_are_used_at_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A send waits for no receive, so two ranks may send to each other first."""
    monkeypatch.setattr("planaria.engine.comm.pieces.PIECE_BYTES", 1 << 18)
    with open_ranks(kind, 2) as ranks:
        sent = [rank.tensor(rank.links.rank, 300, 1000) for rank in ranks]
        for rank, tensor in zip(ranks, sent, strict=True):
            rank.comm.send(1 - rank.links.rank, tag(0), tensor, virtual_bytes=0)

        for rank in ranks:
            other = 1 - rank.links.rank
            assert torch.equal(receive(rank, other, 0), sent[other].cpu())


def parts(rank: Rank, sizes: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    """Sums of one rank, of very different magnitude, so that the order of additions shows."""
    number = rank.links.rank
    scale = 10.0 ** (3 * (number % 3))
    drawn = [rank.tensor(17 * number + n, size, dtype=dtype) for n, size in enumerate(sizes)]
    return [tensor.mul_(scale) for tensor in drawn]


def ascending(all_parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """What the sum must be: added in order from +0, rounded at the end."""
    totals = [torch.zeros_like(part, device="cpu") for part in all_parts[0]]
    for own in all_parts:
        for total, part in zip(totals, own, strict=True):
            total += part.cpu()
    return [total.to(torch.float32) for total in totals]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("num_holders", [1, 2, 4])
def test_a_sum_is_ascending_rounded_once_and_the_same_on_all_holders(
    num_holders: int, dtype: torch.dtype, kind: str
) -> None:
    """Sums in float32 are their own results, as those of a fast job."""
    with open_ranks(kind, num_holders) as ranks:
        numbers = range(num_holders)
        for bucket, sizes in enumerate(SIZES):
            sums = [parts(rank, sizes, dtype) for rank in ranks]
            results = sums
            if dtype is torch.float64:
                results = [[torch.empty_like(s, dtype=torch.float32) for s in own] for own in sums]
            expected = ascending(sums)
            calls = [
                lambda rank=rank, own=own, into=into, bucket=bucket: rank.comm.sum_over(
                    numbers, own, into, iteration=0, bucket=bucket, virtual_bytes=0
                )
                for rank, own, into in zip(ranks, sums, results, strict=True)
            ]
            with in_threads(*calls) as running:
                for one in running:
                    one.result(timeout=TIMEOUT_S)

            for own in results:
                for wanted, result in zip(expected, own, strict=True):
                    assert torch.equal(wanted.view(torch.int32), result.cpu().view(torch.int32))


@pytest.mark.parametrize("kind", [k for k in KINDS if k[:4] != "gloo"], indirect=True)
def test_an_abort_frees_whoever_waits(kind: str) -> None:
    """A receive, and a sum one of whose ranks never comes; the thread that sends ends."""
    with open_ranks(kind, 3) as (left, right, _):
        sums = [left.tensor(0, 40), right.tensor(0, 40)]
        with in_threads(
            lambda: left.comm.receive(2, tag(0)),
            lambda: sum_alone(left, sums[0]),
            lambda: sum_alone(right, sums[1]),
        ) as running:
            wait_until(lambda: left.is_summing() and right.is_summing())
            left.comm.abort("a member is lost")
            right.comm.abort("a member is lost")
            for one in running:
                with pytest.raises(AbortedError, match="a member is lost"):
                    one.result(timeout=TIMEOUT_S)
        with pytest.raises(AbortedError):
            left.comm.check()
        left.comm.close()


def sum_alone(rank: Rank, sums: Tensor) -> None:
    """The rank's part of a sum over three ranks."""
    rank.comm.sum_over((0, 1, 2), [sums], [sums], iteration=0, bucket=0, virtual_bytes=0)


@pytest.mark.parametrize("kind", [k for k in KINDS if k[:4] != "gloo"], indirect=True)
def test_a_peer_that_dies_ends_what_waits_for_it(kind: str) -> None:
    """A receive, and a sum; a send after it says so at the latest when the next call is made."""
    with open_ranks(kind, 3) as (left, right, other):
        with in_threads(
            lambda: left.comm.receive(2, tag(0)), lambda: sum_alone(right, right.tensor(0, 40))
        ) as running:
            wait_until(right.is_summing)
            other.links.close()
            for one in running:
                with pytest.raises(PeerLostError) as lost:
                    one.result(timeout=TIMEOUT_S)
                assert lost.value.rank == 2

        def send_until_refused() -> None:
            left.comm.send(2, tag(1), left.tensor(0, 4), virtual_bytes=0)
            left.comm.receive(1, tag(1))

        with pytest.raises(PeerLostError) as lost:
            send_until_refused()
        assert lost.value.rank == 2
