"""Saves what one rank holds, by itself: there is no head any more that could say who saves what.

The rank answers the others at the place of saves, waits for their answers, applies the newest
commit vector in any of them, and writes all its layers. So all ranks come to the same age.

Source: docs/protocol.md, "Nodes without a head".
"""

import time
from collections.abc import Callable, Mapping
from typing import Final

from planaria.checkpoint.disk.parts import EpochMark, PartAnswer, PartLayer, RankPart, RunPlace
from planaria.core.messages import PartSaved
from planaria.engine.stage import HeldLayer

_LOOK_S: Final = 0.2

Layers = Callable[[], Mapping[int, HeldLayer]]


def save_part(
    run: RunPlace,
    answer: PartAnswer,
    layers: Layers,
    *,
    num_layers: int,
    devices_per_node: int,
    timeout_s: float,
    apply: Callable[[int, bytes], None],
    tell: Callable[[PartSaved], None],
) -> None:
    """Writes the layers of a rank that has left all epochs, and tells how far it is.

    Args:
        layers: returns the complete layers.
        num_layers: number of layers of the model.
        timeout_s: longest wait for the answers of others.
        apply: takes the optimizer steps of an iteration, given its vector.

    Raises:
        CheckpointError: the storage refuses.
    """
    rank = answer.rank
    if reason := run.refusal(node=answer.node, epoch=answer.epoch):
        tell(PartSaved(rank=rank, is_done=True, reason=reason))
        return

    def may_write() -> bool:
        return not run.refusal(node=answer.node, epoch=answer.epoch)

    run.write_answer(answer)
    answers = _wait_answers(run, answer, devices_per_node=devices_per_node, timeout_s=timeout_s)
    newest = max(answers, key=lambda other: other.vector_iteration)
    if newest.vector:
        apply(newest.vector_iteration, newest.vector)
    files: list[PartLayer] = []
    for layer, held in sorted(layers().items()):
        state = dict(held.state_views())
        files.append(run.write_layer(layer, state, age=held.age, rank=rank, may_write=may_write))
        tell(_progress(rank, files))
    part = RankPart(
        node=answer.node,
        rank=rank,
        epoch=answer.epoch,
        since=answer.since,
        num_layers=num_layers,
        layers=tuple(files),
    )
    run.write_part(part, may_write=may_write)
    tell(_progress(rank, files, is_done=True))


def _progress(rank: int, files: list[PartLayer], *, is_done: bool = False) -> PartSaved:
    iteration = max((file.age for file in files), default=-1)
    return PartSaved(rank=rank, iteration=iteration, num_layers=len(files), is_done=is_done)


def _wait_answers(
    run: RunPlace, own: PartAnswer, *, devices_per_node: int, timeout_s: float
) -> list[PartAnswer]:
    """The answers of the ranks of the newest epoch, this one included, built on the same origin."""
    end_s = time.monotonic() + timeout_s
    while True:
        mark, answers = run.newest_mark(), run.answers()
        present = {answer.rank for answer in answers}
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
