"""Ranks without a head come to one age by what they tell each other at the place of saves."""

import errno
import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from helpers.linked_ranks import in_threads, wait_until
from helpers.virtual_time import VirtualTime
from planaria.checkpoint.disk.assembly import assemble
from planaria.checkpoint.disk.parts import EpochMark, PartAnswer, PartLayer, RunPlace, next_run
from planaria.checkpoint.disk.storage import Storage
from planaria.checkpoint.disk.tiers import Tier, tier_of
from planaria.core.messages import PartSaved
from planaria.engine.part_writing import save_part
from planaria.errors import CheckpointError, UnreadableError, UnwritableError

NUM_LAYERS = 3
TIMEOUT_S = 30.0  # No test waits for it unless a rank is missing.
VECTOR = b"the vector of iteration 17"


class Rank:
    """A rank that holds layers of one age, with complete gradients of the next iteration.

    Attributes:
        messages: messages to its agent.
    """

    def __init__(self, rank: int, layers: Sequence[int], *, age: int, vector: bytes = b"") -> None:
        self.rank, self.age = rank, age
        self.vector = vector
        self.messages: list[PartSaved] = []
        self._layers = layers

    def layers(self) -> Any:
        """The layers, which have the state of their age."""

        def state(layer: int) -> Any:
            array = np.full(2, 100 * self.age + layer, dtype=np.float32)
            # After the optimizer step there are no gradients.
            gradients_of = self.age if self.age == 17 else -1
            views = {"parameter/weight": array}
            return SimpleNamespace(
                age=self.age, gradients_of=gradients_of, state_views=lambda: views
            )

        return {layer: state(layer) for layer in self._layers}

    def apply(self, iteration: int, vector: bytes) -> None:
        """Applies an iteration, if it is not applied yet."""
        assert (iteration, vector) == (17, VECTOR)
        self.age = 18

    def save(
        self,
        run: RunPlace,
        *,
        since: int = -1,
        timeout_s: float = TIMEOUT_S,
        patience_s: float = TIMEOUT_S,
        num_writers: int = 2,
        epoch: int = 0,
    ) -> None:
        save_part(
            run,
            PartAnswer(
                node=self.rank,
                rank=self.rank,
                epoch=epoch,
                since=since,
                vector_iteration=17 if self.vector else -1,
                vector=self.vector,
            ),
            self.layers,
            num_layers=NUM_LAYERS,
            num_writers=num_writers,
            devices_per_node=1,
            timeout_s=timeout_s,
            patience_s=patience_s,
            apply=self.apply,
            tell=self.messages.append,
        )


@pytest.fixture
def tier(tmp_path: Path) -> Tier:
    return tier_of(str(tmp_path / "saves"))


@pytest.fixture
def run(tier: Tier) -> RunPlace:
    """A run whose epoch has nodes 0 and 1."""
    place = RunPlace(tier.storage, next_run(tier.storage, "a1"))
    place.write_mark(EpochMark(epoch=0, nodes=(0, 1), job={}))
    return place


def test_a_rank_that_does_not_know_that_an_iteration_counts_learns_it_from_another(
    tier: Tier, run: RunPlace
) -> None:
    """One has applied iteration 17, the other holds its gradients alone: both save age 18."""
    ranks = [Rank(0, (0, 1), age=18, vector=VECTOR), Rank(1, (1, 2), age=17)]
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda rank: rank.save(run), ranks))

    assembly = assemble(tier, newer_than=-1)
    assert assembly.manifest is not None, assembly.text
    assert assembly.manifest.iteration == 18
    for rank in ranks:
        assert rank.messages[-1] == PartSaved(
            rank=rank.rank, iteration=18, num_layers=2, is_done=True
        )


def test_each_layer_is_written_as_often_as_may_be_lost_and_once_more(tier: Tier) -> None:
    """Every holder wrote it, so the state was written once for each pipeline."""
    run = RunPlace(tier.storage, next_run(tier.storage, "c3"))
    run.write_mark(EpochMark(epoch=0, nodes=tuple(range(8)), job={}))
    # One has all gradients of iteration 17 and its vector, the others have applied it.
    ranks = [Rank(n, (0, 1, 2), age=18 if n else 17, vector=VECTOR) for n in range(8)]
    with in_threads(*[partial(rank.save, run) for rank in ranks]) as savings:
        for saving in savings:
            saving.result(timeout=TIMEOUT_S)

    parts = run.contents().parts
    assert len(parts) == 8
    written = Counter(layer.file.layer for part in parts for layer in part.layers)
    assert written == dict.fromkeys(range(NUM_LAYERS), 2)
    for rank in ranks:
        told = rank.messages[-1]
        assert (told.iteration, told.num_layers + told.num_others) == (18, NUM_LAYERS)
    assembly = assemble(tier, newer_than=-1)
    assert assembly.manifest is not None, assembly.text
    assert assembly.manifest.iteration == 18


@pytest.mark.parametrize(
    ("state", "are_all", "is_left"),
    [
        ({"age": 18}, False, True),
        ({"age": 17}, False, False),
        ({"age": 17, "is_complete": True}, True, False),
        ({"age": 17, "is_complete": True, "vector_iteration": 17}, False, True),
        # They may learn of a vector of iteration 18 that is not here yet.
        ({"age": 18, "is_complete": True}, False, False),
        ({"age": 18, "is_complete": True}, True, True),
        ({"age": 18, "is_complete": True, "vector_iteration": 18}, True, False),
        ({"age": 18, "epoch": 4}, False, False),
        # Their epoch is not marked yet, so that nobody knows who is in it.
        ({"age": 18, "is_complete": True, "epoch": 6}, True, False),
        ({"age": 18, "epoch": 6}, False, True),
        ({"age": 18, "since": 2}, False, False),
    ],
)
def test_a_rank_leaves_a_layer_to_ranks_that_surely_come_to_its_age(
    state: dict[str, Any], *, are_all: bool, is_left: bool, tier: Tier
) -> None:
    """And whose parts count if its own does."""
    run = RunPlace(tier.storage, next_run(tier.storage, "d4"))
    nodes = (0, 1, 2, 3, *(() if are_all else (4,)))
    run.write_mark(EpochMark(epoch=5, nodes=nodes, job={}))
    vector = VECTOR if state.get("vector_iteration") == 17 else b""
    for number in (0, 2, 3):
        known: dict[str, Any] = {"epoch": 5, "since": -1, "layers": (0, NUM_LAYERS)} | state
        run.write_answer(PartAnswer(node=number, rank=number, vector=vector, **known))
    rank = Rank(1, (0, 1, 2), age=18, vector=VECTOR)
    rank.save(run, timeout_s=0.0, num_writers=1, epoch=5)

    # The draw of another one is the first for each layer.
    assert rank.messages[-1].num_others == (NUM_LAYERS if is_left else 0)
    assert rank.messages[-1].num_layers == (0 if is_left else NUM_LAYERS)


def test_layers_that_are_no_range_are_all_written(run: RunPlace) -> None:
    """The name of an answer cannot say which ones these are."""
    rank = Rank(1, (0, 2), age=17)
    rank.save(run, timeout_s=0.0, num_writers=1)

    (name,) = run.answer_names()
    assert (name.first_layer, name.end_layer, name.age) == (0, 0, -1)
    assert run.answer(name) is not None
    assert rank.messages[-1].num_layers == 2


def test_a_rank_does_not_wait_for_ever_for_one_that_is_lost(tier: Tier, run: RunPlace) -> None:
    """What one rank holds may be all that there is."""
    rank = Rank(1, (0, 1, 2), age=17)
    rank.save(run, timeout_s=0.1)

    assembly = assemble(tier, newer_than=-1)
    assert assembly.manifest is not None, assembly.text
    assert assembly.manifest.iteration == 17


def test_a_vector_from_before_the_job_went_back_is_not_applied(run: RunPlace) -> None:
    Rank(0, (0, 1), age=18, vector=VECTOR).save(run, since=-1, timeout_s=0.0)
    rank = Rank(1, (1, 2), age=17)
    rank.save(run, since=3)

    assert rank.age == 17


def test_a_vector_of_a_node_that_is_out_is_not_applied(run: RunPlace) -> None:
    """The others have done that iteration again, perhaps with other bits."""
    Rank(2, (0, 1), age=18, vector=VECTOR).save(run, timeout_s=0.0)
    rank = Rank(1, (1, 2), age=17)
    rank.save(run, timeout_s=0.1)

    assert rank.age == 17


def test_a_rank_of_a_run_that_its_head_has_not_marked_writes_nothing(
    tier: Tier, run: RunPlace
) -> None:
    """No save could be made of it. The reason tells that from a run that another one followed."""
    place = RunPlace(tier.storage, next_run(tier.storage, "b2"))
    rank, older = Rank(0, (0, 1), age=17), Rank(1, (1, 2), age=17)
    rank.save(place)
    place.write_mark(EpochMark(epoch=0, nodes=(0, 1), job={}))
    older.save(run)

    reasons = [each.messages[-1].reason for each in (rank, older)]
    assert reasons == [
        f"its head has written nothing to {place.where}, or the run has ended",
        f"another run of the job has begun ({place.name})",
    ]
    assert (run.contents().answers, place.contents().answers) == ((), ())


def test_a_rank_whose_node_is_out_writes_nothing(run: RunPlace) -> None:
    run.write_mark(EpochMark(epoch=1, nodes=(0,), job={}))
    begin_s = time.monotonic()
    rank = Rank(1, (1, 2), age=17)
    rank.save(run)

    assert time.monotonic() - begin_s < TIMEOUT_S
    assert rank.messages[-1].is_done
    assert "without node 1" in rank.messages[-1].reason
    assert (run.contents().answers, run.contents().parts) == ((), ())


class _RefusingStorage:
    """A storage that refuses some requests, counted from 1.

    Attributes:
        num_requests: number of requests so far.
    """

    def __init__(self, storage: Storage, *, refused: Container[int]) -> None:
        self.num_requests = 0
        self._storage = storage
        self._refused = refused

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._storage, name)
        return method if name == "where" else partial(self._request, method)

    def _request(self, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        self.num_requests += 1
        if self.num_requests in self._refused:
            kind = UnwritableError if method.__name__ == "write" else UnreadableError
            raise kind("503") from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return method(*arguments, **named)


def test_a_rank_saves_although_the_place_refuses_any_request_for_a_moment(
    tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first refusal cost all that the node held. The agent hears meanwhile that it goes on."""
    monkeypatch.setattr("planaria.engine.part_writing._PAUSE_S", 0.0)
    num_requests = 0
    for number in itertools.count(1):
        name = next_run(tier.storage, f"{number:x}")
        mark = EpochMark(epoch=0, nodes=(1,), job={})
        RunPlace(tier.storage, name).write_mark(mark)
        refusing = _RefusingStorage(tier.storage, refused=(number, number + 1))
        rank = Rank(1, (0, 1, 2), age=17)
        rank.save(RunPlace(cast(Storage, refusing), name))
        if refusing.num_requests < number:
            break
        num_requests = max(num_requests, refusing.num_requests)
        told = [(message.num_layers, message.is_done) for message in rank.messages]
        assert told[-1] == (3, True), number
        assert told == sorted(told), number
        assert len(told) >= 5, number
        assert len(RunPlace(tier.storage, name).contents().parts) == 1, number

    assert num_requests > 10


def test_a_rank_gives_up_what_the_place_refuses_for_good(
    run: RunPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its node ends then, so that the machine may have another job."""
    clock = VirtualTime()
    monkeypatch.setattr("planaria.engine.part_writing.time", clock)
    refusing = _RefusingStorage(run.storage, refused=range(4, 1 << 30))
    rank = Rank(1, (0, 1, 2), age=17)

    with pytest.raises(CheckpointError, match="503"):
        rank.save(RunPlace(cast(Storage, refusing), run.name), patience_s=TIMEOUT_S)
    assert refusing.num_requests > 5
    assert 0.8 * TIMEOUT_S <= clock.now_s <= TIMEOUT_S
    assert not any(message.is_done for message in rank.messages)


def test_the_next_head_sees_that_a_rank_writes_what_a_store_does_not_list_yet(
    run: RunPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store lists a content once it is whole. The head heard nothing for a minute, and went on
    from an older save."""
    monkeypatch.setattr("planaria.engine.part_writing._SIGN_S", 0.01)
    may_end = threading.Event()
    write_layer = RunPlace.write_layer

    def upload(*arguments: Any, **named: Any) -> PartLayer:
        assert may_end.wait(20.0)
        return write_layer(*arguments, **named)

    monkeypatch.setattr(RunPlace, "write_layer", upload)
    with in_threads(lambda: Rank(1, (0,), age=17).save(run, timeout_s=0.0)) as (saving,):
        try:
            seen: set[float] = set()

            def has_changed_twice() -> bool:
                entry = run.storage.entries(run.name).get(
                    f"{run.name}/answer-00001-e0-s-1-v-1-a17-l0-1-c"
                )
                seen.update([entry.modified_s] if entry else [])
                return len(seen) >= 3

            wait_until(has_changed_twice)
        finally:
            may_end.set()
        saving.result(timeout=20.0)

    assert len(run.contents().parts) == 1
