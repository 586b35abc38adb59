"""Copies on their way between ranks, each a few threads of this process."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest

from helpers.copying_ranks import (
    COPIES,
    KEPT,
    OWN,
    CopyingRank,
    assert_kept,
    copying_rank,
    damage_pieces,
    layer_state,
)
from helpers.linked_ranks import TIMEOUT_S, is_blocked, link_ranks, wait_until
from planaria.checkpoint.memory.arena import Arena
from planaria.checkpoint.memory.filling import Fill, fill_alone
from planaria.checkpoint.memory.stream import TRIES
from planaria.checkpoint.memory.turns import Buffers, Turns
from planaria.checkpoint.memory.version import Bytes, Version
from planaria.checkpoint.memory.wire import copy_peers
from planaria.core.copies import Label, LayerCopy
from planaria.errors import AbortedError, CheckpointError, PeerLostError
from planaria.transport.links import Channel, Links, Tag

SIZE = 300_000
EMPTY: Bytes = np.empty(0, dtype=np.uint8)
BUFFERS = Buffers(1 << 18, 4)


def state(layer: int, age: int) -> dict[str, np.ndarray]:
    """Of a layer of these tests."""
    return layer_state(layer, age, SIZE)


@contextmanager
def copying(
    copies: Sequence[LayerCopy] = COPIES,
    *,
    buffers: Buffers = BUFFERS,
    turns: Sequence[Turns] = (),
    fill: Fill = fill_alone,
) -> Iterator[list[CopyingRank]]:
    """Three ranks that copy."""
    with link_ranks(3) as all_links, ExitStack() as stack:
        yield [
            stack.enter_context(
                copying_rank(
                    links,
                    abort=partial(links.abort, first_epoch=1),
                    copies=copies,
                    buffers=buffers,
                    layer_bytes=SIZE,
                    turns=turns[links.rank] if turns else None,
                    fill=fill,
                )
            )
            for links in all_links
        ]


@pytest.mark.parametrize("buffers", [BUFFERS, Buffers(10_000, 1), Buffers(1 << 30, 2)])
def test_each_layer_is_kept_where_it_is_to_be(buffers: Buffers) -> None:
    """In whatever pieces it comes, version after version."""
    with copying(buffers=buffers) as ranks:
        for age in (3, 4, 5):
            for rank in ranks:
                rank.begin(age)
            for rank in ranks:
                rank.copier.wait_ended()
                assert rank.copier.has_ended
                assert not rank.copier.has_failed
                rank.copier.complete()
            assert_kept(ranks, age)

        labels = {
            label for rank in ranks for those in rank.arena.versions().values() for label in those
        }
        assert labels == {Label(-1, 0, 4), Label(-1, 0, 5)}
        assert not any(rank.failures for rank in ranks)


def test_a_version_stays_until_the_next_one_is_complete_everywhere() -> None:
    """One that has ended here may not have elsewhere."""
    with copying() as ranks:
        for age in (1, 2, 3):
            for rank in ranks:
                rank.begin(age)
            for rank in ranks:
                rank.copier.wait_ended()
                if age == 1:
                    rank.copier.complete()

        assert_kept(ranks, 1)
        assert_kept(ranks, 3)


def test_a_layer_that_has_not_changed_is_not_sent_again() -> None:
    """It takes up no more memory either, and is there of both versions; one that changes is."""
    with copying() as ranks:
        sent, taken = [], []
        for age in (5, 6, 7):
            for rank in ranks:
                own = {
                    layer: state(layer, 5 if layer < 2 else age) for layer in OWN[rank.links.rank]
                }
                rank.copier.begin(age, own)
            for rank in ranks:
                rank.copier.wait_ended()
                assert not rank.copier.has_failed
                rank.copier.complete()
            sent.append(sum(rank.links.sent_bytes[Channel.COPY] for rank in ranks))
            taken.append(ranks[2].arena.num_bytes)
            for rank in ranks:
                states = rank.kept(age)
                assert states.keys() == KEPT[rank.links.rank]
                for layer, found in states.items():
                    wanted = state(layer, 5 if layer < 2 else age)
                    assert all(np.array_equal(found[name], wanted[name]) for name in wanted)

        assert sent[1] - sent[0] < sent[0]
        assert taken[2] == taken[1] == taken[0]


class Noted:
    """Turns that let everything go, and note it.

    Attributes:
        dealt: sizes of the pieces of each version, as they were told beforehand.
        sent: target and size of each piece, as it went.
    """

    def __init__(self) -> None:
        self.dealt: list[list[int]] = []
        self.sent: list[tuple[int, int]] = []

    def chunk_bytes(self, most_bytes: int) -> int:
        return most_bytes

    def deal(self, sizes: Sequence[int]) -> None:
        assert sum(map(len, self.dealt)) == len(self.sent)
        self.dealt.append(list(sizes))

    def wait(self, target: int, num_bytes: int) -> None:
        self.sent.append((target, num_bytes))


def test_what_will_be_sent_is_known_before_the_first_piece() -> None:
    """One copy of all layers after the other, and nothing of a layer that has not changed."""
    turns = [Noted() for _ in OWN]
    with copying(turns=turns) as ranks:
        for age in (5, 6, 7):
            for rank in ranks:
                own = {n: state(n, age if n and age < 7 else 5) for n in OWN[rank.links.rank]}
                rank.copier.begin(age, own)
            for rank in ranks:
                rank.copier.wait_ended()
                rank.copier.complete()

    per_layer = -(-SIZE // BUFFERS.piece_bytes)
    assert [size for sizes in turns[0].dealt for size in sizes] == [n for _, n in turns[0].sent]
    targets = [1] * per_layer + [2] * (2 * per_layer)
    assert [target for target, _ in turns[0].sent[: 3 * per_layer]] == targets
    assert list(map(len, turns[0].dealt)) == [3 * per_layer, per_layer, per_layer]
    assert turns[2].dealt == [[], [], []]


def test_a_damaged_piece_before_a_layer_that_has_not_changed_is_sent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 2 gets layer 1 before layer 0, of which it answers nothing until layer 1 is there."""
    with copying() as ranks:
        for age in (5, 6):
            for rank in ranks:
                own = {n: state(n, age if n == 1 else 5) for n in OWN[rank.links.rank]}
                rank.copier.begin(age, own)
            for rank in ranks:
                rank.copier.wait_ended()
                rank.copier.complete()
            damage_pieces(monkeypatch)

        found = ranks[2].kept(6)
        assert np.array_equal(found[1]["parameter/weight"], state(1, 6)["parameter/weight"])


@pytest.mark.parametrize("is_spoilt", [False, True])
def test_a_layer_that_has_not_changed_is_sent_to_whoever_lost_it(is_spoilt: bool) -> None:
    """Or whose memory lies by now."""
    with copying() as ranks:
        for rank in ranks:
            rank.begin(5)
        for rank in ranks:
            rank.copier.wait_ended()
            rank.copier.complete()
        version = ranks[2].arena.peek(0, Label(-1, 0, 5))
        assert version is not None
        if is_spoilt:
            version.content[-1] ^= 1
        else:
            ranks[2].arena.drop(version)
        for rank in ranks:
            rank.copier.begin(6, {n: state(n, 5) for n in OWN[rank.links.rank]})
        for rank in ranks:
            rank.copier.wait_ended()
            assert not rank.copier.has_failed

        found = ranks[2].kept(6)
        assert found.keys() == KEPT[2]
        for name, array in state(0, 5).items():
            assert np.array_equal(found[0][name], array)


def test_the_own_copy_of_a_layer_that_has_not_changed_is_the_new_one() -> None:
    """A bit of the old one has flipped, which the new version does not inherit."""
    with copying() as ranks:
        for age in (5, 6):
            for rank in ranks:
                rank.copier.begin(age, {n: state(n, 5) for n in OWN[rank.links.rank]})
            for rank in ranks:
                rank.copier.wait_ended()
                rank.copier.complete()
            version = ranks[0].arena.peek(0, Label(-1, 0, age))
            assert version is not None
            if age == 5:
                version.content[-1] ^= 1

        assert version is not None
        assert version.is_intact()


def test_a_layer_may_change_once_it_is_copied() -> None:
    """What is sent is the copy, though its receivers have not begun yet."""
    with copying() as ranks:
        giver = ranks[0]
        states = {layer: state(layer, 7) for layer in OWN[0]}
        giver.copier.begin(7, states)
        for layer, arrays in states.items():
            giver.copier.wait_copied(layer)
            assert giver.copier.is_copied(layer)
            arrays["parameter/weight"][:] = 0
        assert not giver.copier.has_ended
        for rank in ranks[1:]:
            rank.begin(7)
        for rank in ranks:
            rank.copier.wait_ended()

        assert_kept(ranks, 7)


class HalfFill:
    """Copies half of what is asked for, and the other half once it may.

    Attributes:
        is_half: whether half is copied.
        goes_on: whether it may go on.
    """

    def __init__(self) -> None:
        self.is_half, self.goes_on = threading.Event(), threading.Event()

    def __call__(self, pairs: Sequence[tuple[Bytes, Bytes]]) -> None:
        fill_alone([(target[: SIZE // 2], source[: SIZE // 2]) for target, source in pairs])
        self.is_half.set()
        assert self.goes_on.wait(TIMEOUT_S)
        fill_alone([(target[SIZE // 2 :], source[SIZE // 2 :]) for target, source in pairs])


def test_a_layer_whose_copy_is_half_made_does_not_change_when_a_peer_is_lost() -> None:
    """The thread that keeps copies of others learns of it while the other one still copies. A mix
    of two states would have hashes of its own, and be restored."""
    fill, states = HalfFill(), {layer: state(layer, 7) for layer in OWN[0]}
    with copying(fill=fill) as ranks:
        copier, array = ranks[0].copier, states[0]["parameter/weight"]

        def step() -> None:
            with pytest.raises(PeerLostError):
                copier.wait_copied(0)
            array[:] = 0

        copier.begin(7, states)
        assert fill.is_half.wait(TIMEOUT_S)
        ranks[1].links.close()
        wait_until(lambda: copier._error is not None)
        stepping = threading.Thread(target=step)
        stepping.start()
        is_waiting = is_blocked(stepping, where="wait_copied")
        wait_until(lambda: is_waiting() or not stepping.is_alive())
        fill.goes_on.set()
        stepping.join()
        wait_until(lambda: ranks[0].kept(7).keys() == {*OWN[0]})

        assert np.array_equal(
            ranks[0].kept(7)[0]["parameter/weight"], state(0, 7)["parameter/weight"]
        )


def test_a_layer_may_change_once_its_copying_has_died(monkeypatch: pytest.MonkeyPatch) -> None:
    """By an error that nobody expects: training does not wait for a thread that is gone."""
    monkeypatch.setattr(Arena, "begin", Mock(side_effect=ValueError("a bug")))
    with copying() as ranks:
        ranks[0].begin(7)
        wait_until(lambda: ranks[0].copier._error is not None)

        with pytest.raises(ValueError, match="a bug"):
            ranks[0].copier.wait_copied(0)


def test_no_more_is_on_its_way_than_the_receiver_has_buffers_for() -> None:
    """Rank 1 takes nothing yet, so two pieces of layer 0 wait for it."""
    with copying(buffers=Buffers(20_000, 2)) as ranks:
        ranks[0].begin(7)
        for layer in OWN[0]:
            ranks[0].copier.wait_copied(layer)
        wait_until(is_blocked(ranks[0].copier._threads[0]))
        assert 15_000 < ranks[0].links.sent_bytes[Channel.COPY] < 21_000

        for rank in ranks[1:]:
            rank.begin(7)
        for rank in ranks:
            rank.copier.wait_ended()
        assert_kept(ranks, 7)


def test_a_piece_that_is_not_what_was_sent_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first try of every third one."""
    damaged = damage_pieces(monkeypatch)
    with copying(buffers=Buffers(40_000, 4)) as ranks:
        for rank in ranks:
            rank.begin(2)
        for rank in ranks:
            rank.copier.wait_ended()

        assert len(damaged) > 20
        assert_kept(ranks, 2)


@pytest.mark.parametrize("position", [0, 9, 40, -1])
def test_what_a_layer_begins_with_is_asked_for_again_too(
    position: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bit of its hash, or of what it says, is wrong the first time that it comes, be it that a
    layer comes or that it has not changed."""
    spoilt: set[tuple[int, int, Tag]] = set()
    send = Links.send

    def sent(links: Links, peer: int, tag: Tag, content: Bytes = EMPTY, **rest: int) -> None:
        key = (links.rank, peer, tag)
        if tag.channel is Channel.COPY and tag.b == 0 and key not in spoilt:
            spoilt.add(key)
            content = content.copy()
            content[position] ^= 4
        send(links, peer, tag, content, **rest)

    monkeypatch.setattr(Links, "send", sent)
    with copying() as ranks:
        for age in (2, 3):
            for rank in ranks:  # The state of age 2 again.
                own = OWN[rank.links.rank]
                rank.copier.begin(age, {layer: state(layer, 2) for layer in own})
            for rank in ranks:
                rank.copier.wait_ended()
                assert not rank.copier.has_failed
                rank.copier.complete()
        assert len(spoilt) == 2 * 4
        for rank in ranks:
            assert rank.kept(3).keys() == KEPT[rank.links.rank]


def test_a_link_that_spoils_everything_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """After some tries, as a lost one is."""
    store_piece = Mock(return_value=False)
    monkeypatch.setattr(Version, "store_piece", store_piece)
    copies = (LayerCopy(2, 1, (0,)),)
    with copying(copies) as ranks:
        for rank in ranks:
            rank.begin(2)
        with pytest.raises(PeerLostError, match=f"layer 2 .* {TRIES} times"):
            ranks[1].copier.wait_ended()

        assert store_piece.call_count == TRIES
        assert 2 not in ranks[0].arena.versions()


def test_without_memory_a_version_fails_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 has none, neither does rank 1 for what it holds; both end the version all the same."""
    begin = Arena.begin

    def begun(arena: Arena, layer: int, label: Label, **rest: object) -> Version:
        if full and (arena is ranks[2].arena or layer == 2):
            raise CheckpointError("no memory")
        return begin(arena, layer, label, **rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Arena, "begin", begun)
    with copying() as ranks:
        full = True
        for rank in ranks:
            rank.begin(2)
        for rank in ranks:
            rank.copier.wait_ended()
        assert [rank.copier.has_failed for rank in ranks] == [False, True, True]
        assert [rank.failures for rank in ranks] == [[], ["no memory"], ["no memory"]]
        assert_kept(ranks, 2, {0: {0, 1}, 1: {0}, 2: set()})

        for rank in ranks:
            rank.begin(3)
        for rank in ranks:
            rank.copier.wait_ended()
        assert [rank.failures for rank in ranks] == [[], ["no memory"], ["no memory"]]

        full = False
        for rank in ranks:
            rank.begin(4)
        for rank in ranks:
            rank.copier.wait_ended()
        assert not any(rank.copier.has_failed for rank in ranks)
        assert_kept(ranks, 4)


def test_the_end_of_the_epoch_ends_what_is_on_its_way() -> None:
    """Rank 1 never begins; who waits for it is freed, and the older version is whole."""
    with copying() as ranks:
        for rank in ranks:
            rank.begin(1)
        for rank in ranks:
            rank.copier.wait_ended()
            rank.copier.complete()
        for rank in (ranks[0], ranks[2]):
            rank.begin(2)
        for rank in ranks:
            rank.links.abort("a member is lost", first_epoch=1)
        for rank in (ranks[0], ranks[2]):
            with pytest.raises(AbortedError):
                rank.copier.wait_ended()

        assert_kept(ranks, 1)


def test_whom_a_rank_has_to_do_with() -> None:
    """Its links have to stand before the first version."""
    assert [copy_peers(rank, COPIES) for rank in range(3)] == [{1, 2}, {0}, {0}]
