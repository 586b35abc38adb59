"""Layers on their way between ranks: in chunks, from one holder or several."""

import socket
from collections.abc import Sequence
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest

from helpers.linked_ranks import (
    TIMEOUT_S,
    TOKEN,
    addresses,
    in_threads,
    link_ranks,
    on_all,
    wait_until,
)
from planaria.core.job import ModelConfig, TrainingConfig
from planaria.core.plan import NUM_CHUNKS, Transfer
from planaria.engine.exchange import PIECE_BYTES, exchange_layers, wait_received
from planaria.engine.prepare import split_model
from planaria.engine.stage import RankStage
from planaria.errors import AbortedError, PeerLostError
from planaria.protocol.worker_state import transfer_peers
from planaria.transport.links import Channel, Links, Tag

TRAINING = TrainingConfig(learning_rate=0.1, seed=3)
AGE = 4


def stage(held: Sequence[int]) -> RankStage:
    model = ModelConfig(kind="python", target="helpers.user_models:sequential")
    split = split_model(model, seed=0, vocabulary_size=0, sequence_length=0)
    made = RankStage(split, training=TRAINING)
    made.hold(held, states={}, age=AGE)
    return made


@pytest.mark.parametrize("piece_bytes", [PIECE_BYTES, 1001], ids=["whole", "pieces"])
@pytest.mark.parametrize(
    "cuts",
    [(0, NUM_CHUNKS), (0, 1, NUM_CHUNKS), (0, 20, 21, NUM_CHUNKS), (0, 5, 21, 40, NUM_CHUNKS)],
    ids=["one", "two", "three", "four"],
)
def test_a_layer_is_whole_from_any_number_of_holders(
    cuts: tuple[int, ...], piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last rank lacks all of it, and gets the bits that the others hold."""
    monkeypatch.setattr("planaria.engine.exchange.PIECE_BYTES", piece_bytes)
    num_holders = len(cuts) - 1
    every = range(4)
    stages = [stage(every) for _ in range(num_holders)] + [stage(())]
    rounds = [
        [
            Transfer(layer, rank, num_holders, 0, cuts[rank], cuts[rank + 1])
            for rank in reversed(range(num_holders))
        ]
        for layer in every
    ]

    with link_ranks(num_holders + 1) as ranks:

        def run(links: Links) -> int:
            own = stages[links.rank]
            return exchange_layers(links, own, rounds, age=AGE, timeout_s=TIMEOUT_S)

        *_, received_bytes = on_all(ranks, run)

    found, expected = stages[-1], stages[0]
    assert sorted(found.layers) == list(every)
    for layer in every:
        state, whole = found.layers[layer].state(), expected.layers[layer].state()
        assert state.keys() == whole.keys()
        assert all(np.array_equal(state[name], whole[name]) for name in whole)
        assert found.layers[layer].age == AGE
    num_bytes = sum(a.nbytes for one in expected.layers.values() for a in one.state().values())
    assert received_bytes == num_bytes


def test_layers_come_while_the_link_to_another_holder_is_still_being_made() -> None:
    """Rank 2 enters the epoch when rank 0 has what rank 1 alone sends."""
    stages = [stage(()), stage([1, 2]), stage([2, 3])]
    rounds = [
        [
            Transfer(1, 1, 0, 0),
            Transfer(2, 1, 0, 0, 0, 40),
            Transfer(2, 2, 0, 0, 40, NUM_CHUNKS),
            Transfer(3, 2, 0, 0),
        ]
    ]
    ranks = [Links(rank, token=TOKEN) for rank in range(3)]

    def run(links: Links) -> int:
        peers = transfer_peers(rounds, links.rank)
        links.enter(1, addresses=addresses(ranks), peers=peers)
        own = stages[links.rank]
        num_bytes = exchange_layers(links, own, rounds, age=AGE, timeout_s=TIMEOUT_S)
        links.wait_linked(timeout_s=TIMEOUT_S)
        return num_bytes

    with in_threads(*(partial(run, links) for links in ranks[:2])) as (receiving, _):
        wait_until(lambda: 1 in stages[0].layers)
        assert sorted(stages[0].layers) == [1]
        run(ranks[2])
        receiving.result(timeout=TIMEOUT_S)

    assert sorted(stages[0].layers) == [1, 2, 3]
    for layer, holder in ((1, 1), (2, 2), (3, 2)):
        state, whole = (stages[rank].layers[layer].state() for rank in (0, holder))
        assert all(np.array_equal(state[name], whole[name]) for name in whole)
    for links in ranks:
        links.close()


def test_a_rank_that_only_sends_waits_until_all_is_taken() -> None:
    """Rank 1 has no part in the epoch: nothing else would tell it that its link to rank 0 broke
    before that came, and all waited for what was lost with it."""
    stages = [stage(()), stage([1])]
    rounds = [[Transfer(1, 1, 0, 0)]]

    def run(links: Links) -> None:
        exchange_layers(links, stages[links.rank], rounds, age=AGE, timeout_s=TIMEOUT_S)
        if links.rank == 1:
            wait_received(links, rounds)

    with link_ranks(2) as ranks:
        on_all(ranks, run)
        assert sorted(stages[0].layers) == [1]
    with link_ranks(2) as ranks, in_threads(lambda: run(ranks[1])) as (sending,):
        wait_until(lambda: ranks[1].sent_bytes[Channel.STATE] > 0)
        ranks[1]._peers[0].sock.shutdown(socket.SHUT_RDWR)
        with pytest.raises(PeerLostError):
            sending.result(timeout=TIMEOUT_S)


def test_an_abort_frees_who_exchanges_over_links_that_do_not_stand_yet() -> None:
    """What has arrived is kept; the next recovery counts on it."""
    stages = [stage(()), stage([1])]
    rounds = [[Transfer(1, 1, 0, 0), Transfer(2, 2, 0, 0)]]
    ranks = [Links(rank, token=TOKEN) for rank in range(3)]

    def run(links: Links) -> int:
        places = addresses(ranks)
        links.enter(1, addresses=places, peers=transfer_peers(rounds, links.rank))
        return exchange_layers(links, stages[links.rank], rounds, age=AGE, timeout_s=TIMEOUT_S)

    with in_threads(*(partial(run, links) for links in ranks[:2])) as (receiving, _):
        wait_until(lambda: 1 in stages[0].layers)
        ranks[0].abort("node 2 is gone", first_epoch=2)
        with pytest.raises(AbortedError, match="node 2"):
            receiving.result(timeout=TIMEOUT_S / 2)

    assert sorted(stages[0].layers) == [1]
    for links in ranks:
        links.close()


@pytest.mark.parametrize(
    "head",
    [
        b"[" * 5000,
        b'{"tensors":[["a","\xff",[1]]]}',
        b'{"tensors":[["a","<f4",[-1]]]}',
        b'{"tensors":[["a","|O",[1]]]}',
        b'{"tensors":[["a","nothing",[1]]]}',
        b'{"tensors":[["a","<f4",[4611686018427387904]]]}',
    ],
)
def test_a_layer_that_nobody_could_hold_is_refused(
    head: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its size is not believed, and the error names who sent it."""
    stages = [stage([1]), stage(())]
    rounds = [[Transfer(1, 0, 1, 0, 0, NUM_CHUNKS)]]
    send = Links.send

    def sent(links: Links, peer: int, tag: Tag, *content: Any, **rest: int) -> None:
        if tag.channel is Channel.STATE_HEAD and tag.b == 0:
            content = (np.frombuffer(head, dtype=np.uint8),)
        send(links, peer, tag, *content, **rest)

    monkeypatch.setattr(Links, "send", sent)
    with link_ranks(2) as ranks:

        def run(links: Links) -> str:
            try:
                exchange_layers(links, stages[links.rank], rounds, age=AGE, timeout_s=TIMEOUT_S)
            except PeerLostError as error:
                return str(error)
            return ""

        text = on_all(ranks, run)[1]

    assert "lost rank 0: the description of layer 1 makes no sense" in text
    assert not stages[1].layers


class Unequal:
    """Hashes that never agree."""

    num_digests = count()

    def update(self, _: memoryview) -> None:
        """Takes the bytes and forgets them."""

    def digest(self) -> bytes:
        return next(self.num_digests).to_bytes(16, "big")


def test_parts_that_did_not_arrive_as_they_were_sent_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The hash is that of these chunks, and names who sent them."""
    monkeypatch.setattr("planaria.engine.exchange.xxhash.xxh3_128", Unequal)
    stages = [stage([1]), stage([1]), stage(())]
    rounds = [[Transfer(1, 0, 2, 0, 0, 9), Transfer(1, 1, 2, 0, 9, NUM_CHUNKS)]]

    with link_ranks(3) as ranks:

        def run(links: Links) -> str:
            try:
                exchange_layers(links, stages[links.rank], rounds, age=AGE, timeout_s=TIMEOUT_S)
            except PeerLostError as error:
                return str(error)
            return ""

        assert "layer 1 arrived damaged" in on_all(ranks, run)[2]

    assert not stages[2].layers
