"""Collectives of a loop of one's own are noted, and copies go between them."""

import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from threading import Thread

import pytest
import torch
import torch.distributed as dist

from helpers.linked_ranks import TIMEOUT_S, link_ranks, on_all, wait_until
from planaria.checkpoint.memory.interleaving import CopyPeers
from planaria.core.copies import IdleSpan
from planaria.core.plan import Link
from planaria.engine.devices import LateDevice
from planaria.torchrun import collectives
from planaria.torchrun.collectives import BetweenCollectives, Collectives, measured_link
from planaria.transport.links import Channel, Links, Tag


class Work:
    """A collective that is over when the test says so."""

    def __init__(self) -> None:
        self.future: Future[None] = Future()

    def get_future(self) -> "Future[None]":
        return self.future


def _peers(peer: int) -> CopyPeers:
    """A peer of another node, with which copies are exchanged."""
    return CopyPeers([peer], [peer], is_far=lambda _: True)


@pytest.fixture
def noted() -> list[tuple[float, float]]:
    return []


@pytest.fixture
def watch(
    noted: list[tuple[float, float]], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Collectives]:
    """Of collectives that do nothing."""
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)
    monkeypatch.setattr(dist, "all_gather_into_tensor", lambda *_, **__: Work())
    monkeypatch.setattr(dist, "broadcast", lambda *_, **__: dist.all_reduce(torch.ones(1)))
    found = Collectives(lambda begun_s, ended_s: noted.append((begun_s, ended_s)))
    yield found
    found.close()


@pytest.mark.usefixtures("watch")
def test_one_that_is_waited_for_is_noted_when_it_is_over(noted: list[tuple[float, float]]) -> None:
    dist.all_reduce(torch.ones(1))

    ((begun_s, ended_s),) = noted
    assert begun_s <= ended_s


@pytest.mark.usefixtures("watch")
def test_one_under_way_is_noted_when_it_is_over(noted: list[tuple[float, float]]) -> None:
    work = dist.all_gather_into_tensor(torch.ones(1), torch.ones(1), async_op=True)
    assert noted == []
    work.get_future().set_result(None)

    assert len(noted) == 1


@pytest.mark.usefixtures("watch")
def test_one_of_which_nobody_knows_when_it_is_over_is_none_the_worse(
    noted: list[tuple[float, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gloo's scattered sums; the loop must not notice."""

    def get_future(_: Work) -> "Future[None]":
        raise RuntimeError("Work::getFuture not implemented.")

    monkeypatch.setattr(Work, "get_future", get_future)

    assert isinstance(dist.all_gather_into_tensor(torch.ones(1), torch.ones(1)), Work)
    assert len(noted) == 1


@pytest.mark.usefixtures("watch")
def test_one_that_is_made_of_another_is_noted_once(noted: list[tuple[float, float]]) -> None:
    dist.broadcast(torch.ones(1), 0)

    assert len(noted) == 1


def test_those_that_are_none_of_the_loops_are_not_noted(
    watch: Collectives, noted: list[tuple[float, float]]
) -> None:
    """Of this thread; another one may be in a backward meanwhile."""
    with watch.pause_watching():
        dist.all_reduce(torch.ones(1))
        assert noted == []
        other = Thread(target=lambda: dist.all_reduce(torch.ones(1)))
        other.start()
        other.join()

    assert len(noted) == 1


def test_in_the_end_all_is_as_it_was(watch: Collectives, noted: list[tuple[float, float]]) -> None:
    """Also for whoever kept a function from before."""
    kept = dist.all_reduce
    watch.close()
    kept(torch.ones(1))

    assert dist.all_reduce is not kept
    assert noted == []


def test_a_link_is_measured_while_all_send() -> None:
    with link_ranks(2) as ranks:

        def measured(links: Links) -> Link:
            others = [1 - links.rank]
            return measured_link(links, targets=others, sources=others)

        found = on_all(ranks, measured)

    assert len(found) == 2
    for link in found:
        assert 0.0 < link.latency_s < 1.0
        assert link.bandwidth_bytes_per_s > 1e6


@pytest.mark.usefixtures("watch")
def test_spans_lie_between_the_collectives_of_an_iteration() -> None:
    """They are known by how many are over; before they are, pieces go at once."""
    with link_ranks(2) as (left, right):
        turns = [
            BetweenCollectives(links, _peers(1 - links.rank), link=Link(1e-4, 1e9), iterations=2)
            for links in (left, right)
        ]
        try:
            for iteration in range(100_000):  # Until letters have come and gone.
                if turns[0].spans:
                    break
                for one in turns:
                    one.on_iteration_begin(begins=True)
                if not iteration:
                    turns[0].wait(1, 1 << 20)  # Returns at once.
                for _ in range(3):
                    dist.all_reduce(torch.ones(1))
            spans = turns[0].spans[1]
        finally:
            for one in reversed(turns):
                one.close()

    assert [span.after for span in spans] == sorted(span.after for span in spans)
    assert 0 <= spans[0].after <= spans[-1].after <= 3


@pytest.mark.usefixtures("watch")
def test_collectives_that_are_over_at_once_have_numbers_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those under way are noted by threads of torch; the second one comes here within the first."""
    numbers: list[int] = []
    second = Thread(target=lambda: dist.all_reduce(torch.ones(1)))

    def tag(channel: Channel, iteration: int, number: int) -> Tag:
        if not numbers:
            numbers.append(number)
            second.start()
            second.join(timeout=0.2)  # It waits, or has the same number.
        else:
            numbers.append(number)
        return Tag(channel, iteration, number)

    with link_ranks(2) as (links, _):
        turns = BetweenCollectives(links, _peers(1), link=Link(1e-4, 1e9), iterations=2)
        monkeypatch.setattr(collectives, "Tag", tag)
        dist.all_reduce(torch.ones(1))
        second.join()
        turns.close()

    assert numbers == [0, 1]


@pytest.mark.usefixtures("watch")
def test_what_is_recorded_between_rare_saves_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece that waits for a span goes at once then, and nothing is measured."""
    monkeypatch.setattr(collectives, "_RECORDED_MAX", 10)
    with link_ranks(2) as (links, _):
        turns = BetweenCollectives(links, _peers(1), link=Link(1e-4, 1e9), iterations=2)
        turns._turns._spans = {1: (IdleSpan(1000, 0.0, 1.0),)}
        turns.on_iteration_begin(begins=True)
        piece = Thread(target=turns.wait, args=(1, 1 << 20))
        piece.start()
        try:
            for number in range(500):
                turns._record(float(number), number + 0.5)
            assert len(turns._turns._done_s) < 10
            assert len(links.traffic.take()) < 20
            piece.join(TIMEOUT_S)
            assert not piece.is_alive()
        finally:
            turns.close()


@pytest.mark.timeout(300)  # The compiler's modules take 10 s to import, two minutes under load.
def test_compiled_functions_may_have_collectives_that_are_watched(tmp_path: Path) -> None:
    """Dynamo goes through what watches them, and has no clock nor what a thread keeps; a graph is
    whole with it. Nobody can tell when those are over, so they are not noted."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    noted = []
    watch = Collectives(lambda *times: noted.append(times))

    def doubled(values: torch.Tensor) -> torch.Tensor:
        sums = values * 2
        dist.all_reduce(sums)
        return sums + 1

    try:
        compiled = torch.compile(doubled, fullgraph=True, backend="eager")
        assert compiled(torch.ones(2)).tolist() == [3.0, 3.0]
        assert noted == []
        assert doubled(torch.ones(2)).tolist() == [3.0, 3.0]
        assert len(noted) == 1
    finally:
        watch.close()
        dist.destroy_process_group()


def test_watching_needs_collectives_by_any_of_their_names() -> None:
    """FSDP2 calls some of them, whatever torch calls them by now."""
    before = dist.all_reduce
    watch = Collectives(lambda *_: None)
    try:
        assert dist.all_reduce is not before
        names = ("all_gather_single", "all_gather_into_tensor")
        assert any(hasattr(getattr(dist, name, None), "__wrapped__") for name in names)
    finally:
        watch.close()
    assert dist.all_reduce is before


def test_collectives_of_a_device_are_noted_when_its_stream_has_passed_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In their order, by the host's clock, though each time is a bit late; none of those that the
    host waits for by itself."""
    noted: list[tuple[float, float]] = []
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: time.sleep(0.01))
    monkeypatch.setattr(dist, "all_gather_into_tensor", lambda *_, **__: Work())
    watch = Collectives(lambda *span: noted.append(span), device=LateDevice())

    begin_s = time.monotonic()
    for _ in range(3):
        dist.all_reduce(torch.ones(1))
    dist.all_gather_into_tensor(torch.ones(1), torch.ones(1), async_op=True)
    end_s = time.monotonic()
    wait_until(lambda: len(noted) == 3)
    watch.close()

    flat = [second for span in noted for second in span]
    assert flat == sorted(flat)
    assert begin_s <= flat[0]
    assert flat[-1] <= end_s + 1.0
