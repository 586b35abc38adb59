"""Saves what one rank holds, by itself: there is no head any more that could say who saves what.

The rank answers the others at the place of saves, waits for their answers, and applies the newest
commit vector in any of them. So all ranks come to the same age. Then it writes its layers, but for
those that enough others write: of the ranks that have answered that they hold a layer, the first
f + 1 by a draw write it. The first of all always finds itself among them, so each layer is written,
whichever answers the others have seen. What the place refuses for a while is tried again: nobody
else may hold these layers.

Source: docs/protocol.md, "Nodes without a head".
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar

import msgspec
import xxhash

from planaria.checkpoint.disk.parts import (
    AnswerName,
    EpochMark,
    PartAnswer,
    PartLayer,
    RankPart,
    RunPlace,
    answer_name,
)
from planaria.checkpoint.disk.storage import may_pass
from planaria.core.messages import PartSaved
from planaria.engine.stage import HeldLayer
from planaria.errors import CheckpointError

logger = logging.getLogger(__name__)

_LOOK_S: Final = 0.2
_LOOKING_SHARE: Final = 4.0  # Least pause between two looks, in times of what a look takes.
_PAUSE_S: Final = 2.0  # Pause before a refused request is made again.
_SIGN_S: Final = 20.0  # Interval of signs of life; the next head waits for a minute without one.

Layers = Callable[[], Mapping[int, HeldLayer]]
Answer = TypeVar("Answer")


def save_part(
    run: RunPlace,
    answer: PartAnswer,
    layers: Layers,
    *,
    num_layers: int,
    num_writers: int,
    devices_per_node: int,
    timeout_s: float,
    patience_s: float,
    apply: Callable[[int, bytes], None],
    tell: Callable[[PartSaved], None],
) -> None:
    """Writes the layers of a rank that has left all epochs, and tells how far it is.

    Args:
        answer: answer to the others, without the layers.
        layers: returns the complete layers.
        num_layers: number of layers of the model.
        num_writers: number of ranks that write each layer, if as many hold it.
        timeout_s: longest wait for the answers of others.
        patience_s: time for which each request is tried again that the storage refuses.
        apply: takes the optimizer steps of an iteration, given its vector.

    Raises:
        CheckpointError: the storage refuses for good.
    """
    answer, done = _with_layers(answer, layers()), _Progress(answer.rank)
    storage = _PatientStorage(lambda: tell(done.message()), patience_s=patience_s)
    reason = storage.request(lambda: run.refusal(node=answer.node, epoch=answer.epoch))
    if reason:
        tell(PartSaved(rank=answer.rank, is_done=True, reason=reason))
        return

    def may_write() -> bool:
        return not run.refusal(node=answer.node, epoch=answer.epoch)

    storage.request(lambda: run.write_answer(answer))
    known = _wait_answers(
        run, answer, storage, devices_per_node=devices_per_node, timeout_s=timeout_s
    )
    newest = storage.request(lambda: _newest_answer(run, answer, known.names))
    if newest.vector:
        apply(newest.vector_iteration, newest.vector)
    with _signs_of_life(run, answer):
        for layer, held in sorted(layers().items()):
            done.age = max(done.age, held.age)
            if known.is_left(layer, age=held.age, answer=answer, num_writers=num_writers):
                done.num_left += 1
                continue
            state = dict(held.state_views())
            write = partial(run.write_layer, layer, state, age=held.age, rank=answer.rank)
            done.files.append(storage.request(partial(write, may_write=may_write)))
            tell(done.message())
    part = done.part(answer, num_layers=num_layers)
    storage.request(lambda: run.write_part(part, may_write=may_write))
    tell(done.message(is_done=True))


def _with_layers(answer: PartAnswer, layers: Mapping[int, HeldLayer]) -> PartAnswer:
    """The answer, with the layers in it if they are a range of one age and state."""
    states = {(held.age, held.gradients_of == held.age) for held in layers.values()}
    numbers = sorted(layers)
    if len(states) != 1 or numbers[-1] - numbers[0] >= len(numbers):
        return answer
    ((age, is_complete),) = states
    extent = (numbers[0], numbers[-1] + 1)
    return msgspec.structs.replace(answer, layers=extent, age=age, is_complete=is_complete)


@dataclass(slots=True)
class _Progress:
    """What a rank has written so far.

    Attributes:
        age: highest age of its layers.
        num_left: number of layers that are left to others.
    """

    rank: int
    files: list[PartLayer] = field(default_factory=list)
    age: int = -1
    num_left: int = 0

    def message(self, *, is_done: bool = False) -> PartSaved:
        """The report to the agent."""
        return PartSaved(
            rank=self.rank,
            iteration=self.age,
            num_layers=len(self.files),
            num_others=self.num_left,
            is_done=is_done,
        )

    def part(self, answer: PartAnswer, *, num_layers: int) -> RankPart:
        """The list of what it has written."""
        return RankPart(
            node=answer.node,
            rank=answer.rank,
            epoch=answer.epoch,
            since=answer.since,
            num_layers=num_layers,
            layers=tuple(self.files),
        )


@dataclass(frozen=True, slots=True)
class _KnownAnswers:
    """The answers of the newest epoch's members, this rank's included, built on its origin.

    Attributes:
        are_all: whether all of its members have answered.
    """

    names: tuple[AnswerName, ...]
    are_all: bool

    def is_left(self, layer: int, *, age: int, answer: PartAnswer, num_writers: int) -> bool:
        """Whether a rank leaves a layer to others that hold it.

        The first ones by a draw write it, so that all ranks write about as much. The parts of ranks
        that have not heard of this rank's epoch may not count (assembly.py).

        Args:
            age: age of the layer in this rank.
            answer: answer of this rank.
        """
        rank, are_all = answer.rank, self.are_all

        def draw(holder: int) -> tuple[int, int]:
            return xxhash.xxh3_64_intdigest(f"{layer} {holder}".encode()), holder

        others = (
            name.rank
            for name in self.names
            if name.rank != rank
            and name.epoch >= answer.epoch
            and name.holds(layer, age=age, are_all=are_all)
        )
        return sum(draw(other) < draw(rank) for other in others) >= num_writers


@contextmanager
def _signs_of_life(run: RunPlace, answer: PartAnswer) -> Iterator[None]:
    """Writes a rank's answer again and again, while a store may not list what is being written.

    The next head waits for parts as long as anything changes (job/lost_heads.py).
    """
    is_over = threading.Event()

    def write() -> None:
        while not is_over.wait(_SIGN_S):
            # Its storage may refuse, and then the next sign may come through.
            with suppress(CheckpointError, MemoryError):
                if not run.refusal(node=answer.node, epoch=answer.epoch):
                    run.write_answer(answer)

    with suppress(RuntimeError):  # The machine allows no more threads.
        threading.Thread(target=write, name="signs", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


class _PatientStorage:
    """Makes requests again that the place of saves refuses for a while.

    Args:
        tell_life: tells the agent, after each refusal, that the rank goes on.
        patience_s: time for which a request is made again.

    Attributes:
        patience_s: see above.
        refused_s: time of the last refusal; -inf: there was none.
    """

    def __init__(self, tell_life: Callable[[], None], *, patience_s: float) -> None:
        self._tell_life = tell_life
        self.patience_s = patience_s
        self.refused_s = float("-inf")

    def request(self, make: Callable[[], Answer]) -> Answer:
        """The answer to a request.

        Raises:
            CheckpointError: the place refuses for good, or for too long.
        """
        end_s, is_told = time.monotonic() + self.patience_s, False
        while True:
            try:
                return make()
            except CheckpointError as error:
                self.refused_s = time.monotonic()
                if not may_pass(error) or self.refused_s + _PAUSE_S >= end_s:
                    raise
                if not is_told:
                    logger.warning("tried again for %g s: %s", self.patience_s, error)
                is_told = True
            self._tell_life()
            time.sleep(_PAUSE_S)


def _wait_answers(
    run: RunPlace,
    own: PartAnswer,
    storage: _PatientStorage,
    *,
    devices_per_node: int,
    timeout_s: float,
) -> _KnownAnswers:
    """Waits until all members of the newest epoch have answered, or it has taken too long."""

    def look() -> tuple[EpochMark | None, tuple[AnswerName, ...], float]:
        look_begin_s = time.monotonic()
        mark, names = run.newest_mark(), run.answer_names()
        return mark, names, time.monotonic() - look_begin_s

    begin_s, own_name = time.monotonic(), answer_name(own)
    while True:
        mark, names, look_s = storage.request(look)
        are_all = _has_all(mark, (own_name, *names), devices_per_node)
        # The answers of others may have been refused as well.
        waits_since_s = min(storage.refused_s, begin_s + storage.patience_s)
        left_s = max(begin_s, waits_since_s) + timeout_s - time.monotonic()
        if are_all or left_s < 0.0:
            break
        # A store takes longer to list the answers of thousands of ranks.
        time.sleep(min(max(_LOOK_S, _LOOKING_SHARE * look_s), left_s + _LOOK_S))
    others = (
        name
        for name in names
        if _is_member(name, mark, devices_per_node=devices_per_node)
        and name.since == own.since
        and name.rank != own.rank
    )
    return _KnownAnswers((own_name, *others), are_all)


def _newest_answer(run: RunPlace, own: PartAnswer, names: Sequence[AnswerName]) -> PartAnswer:
    """The answer with the newest vector; of several the rank's own one."""
    newer = (name for name in names if name.vector_iteration > own.vector_iteration)
    for name in sorted(newer, key=lambda each: each.vector_iteration, reverse=True):
        if (answer := run.answer(name)) is not None:
            return answer
    return own


def _has_all(mark: EpochMark | None, names: Sequence[AnswerName], devices_per_node: int) -> bool:
    """Whether all ranks of the newest epoch have answered; unknown of one that is not marked."""
    if mark is None or mark.epoch < max(name.epoch for name in names):
        return False
    ranks = {
        n * devices_per_node + device for n in mark.nodes for device in range(devices_per_node)
    }
    return ranks <= {name.rank for name in names}


def _is_member(name: AnswerName, mark: EpochMark | None, *, devices_per_node: int) -> bool:
    """Whether an answer counts in the newest epoch.

    One of an epoch that was not marked in time may be of a node that is out by now, whose vector
    would still be one of the same history.
    """
    return mark is None or name.epoch > mark.epoch or name.rank // devices_per_node in mark.nodes
