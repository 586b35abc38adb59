"""Saves what one rank holds, by itself: there is no head any more that could say who saves what.

The rank answers the others at the place of saves, waits for their answers, applies the newest
commit vector in any of them, and writes all its layers. So all ranks come to the same age. What the
place refuses for a while is tried again: nobody else may hold these layers.

Source: docs/protocol.md, "Nodes without a head".
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Final, TypeVar

from planaria.checkpoint.disk.parts import EpochMark, PartAnswer, PartLayer, RankPart, RunPlace
from planaria.checkpoint.disk.storage import may_pass
from planaria.core.messages import PartSaved
from planaria.engine.stage import HeldLayer
from planaria.errors import CheckpointError

logger = logging.getLogger(__name__)

_LOOK_S: Final = 0.2
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
    devices_per_node: int,
    timeout_s: float,
    patience_s: float,
    apply: Callable[[int, bytes], None],
    tell: Callable[[PartSaved], None],
) -> None:
    """Writes the layers of a rank that has left all epochs, and tells how far it is.

    Args:
        layers: returns the complete layers.
        num_layers: number of layers of the model.
        timeout_s: longest wait for the answers of others.
        patience_s: time for which each request is tried again that the storage refuses.
        apply: takes the optimizer steps of an iteration, given its vector.

    Raises:
        CheckpointError: the storage refuses for good.
    """
    rank = answer.rank
    files: list[PartLayer] = []
    storage = _PatientStorage(lambda: tell(_progress(rank, files)), patience_s=patience_s)
    reason = storage.request(lambda: run.refusal(node=answer.node, epoch=answer.epoch))
    if reason:
        tell(PartSaved(rank=rank, is_done=True, reason=reason))
        return

    def may_write() -> bool:
        return not run.refusal(node=answer.node, epoch=answer.epoch)

    storage.request(lambda: run.write_answer(answer))
    answers = _wait_answers(
        run, answer, storage, devices_per_node=devices_per_node, timeout_s=timeout_s
    )
    newest = max(answers, key=lambda other: other.vector_iteration)
    if newest.vector:
        apply(newest.vector_iteration, newest.vector)
    with _signs_of_life(run, answer):
        for layer, held in sorted(layers().items()):
            state = dict(held.state_views())
            write = partial(run.write_layer, layer, state, age=held.age, rank=rank)
            files.append(storage.request(partial(write, may_write=may_write)))
            tell(_progress(rank, files))
    part = RankPart(
        node=answer.node,
        rank=rank,
        epoch=answer.epoch,
        since=answer.since,
        num_layers=num_layers,
        layers=tuple(files),
    )
    storage.request(lambda: run.write_part(part, may_write=may_write))
    tell(_progress(rank, files, is_done=True))


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


def _progress(rank: int, files: list[PartLayer], *, is_done: bool = False) -> PartSaved:
    iteration = max((file.age for file in files), default=-1)
    return PartSaved(rank=rank, iteration=iteration, num_layers=len(files), is_done=is_done)


def _wait_answers(
    run: RunPlace,
    own: PartAnswer,
    storage: _PatientStorage,
    *,
    devices_per_node: int,
    timeout_s: float,
) -> list[PartAnswer]:
    """The answers of the ranks of the newest epoch, this one included, built on the same origin."""
    begin_s = time.monotonic()
    while True:
        mark, answers = storage.request(lambda: (run.newest_mark(), run.answers()))
        present = {answer.rank for answer in answers}
        # The answers of others may have been refused as well.
        waits_since_s = min(storage.refused_s, begin_s + storage.patience_s)
        end_s = max(begin_s, waits_since_s) + timeout_s
        if _has_all(mark, present, devices_per_node) or time.monotonic() > end_s:
            break
        time.sleep(_LOOK_S)
    members = [answer for answer in answers if _is_member(answer, mark)]
    return [own, *(answer for answer in members if answer.since == own.since)]


def _has_all(mark: EpochMark | None, present: set[int], devices_per_node: int) -> bool:
    """Whether all ranks of the marked epoch have answered."""
    if mark is None:
        return False
    ranks = {
        n * devices_per_node + device for n in mark.nodes for device in range(devices_per_node)
    }
    return ranks <= present


def _is_member(answer: PartAnswer, mark: EpochMark | None) -> bool:
    """Whether an answer counts in the newest epoch.

    One of an epoch that was not marked in time may be of a node that is out by now, whose vector
    would still be one of the same history.
    """
    return mark is None or answer.epoch > mark.epoch or answer.node in mark.nodes
