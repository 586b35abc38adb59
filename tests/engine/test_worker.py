"""A worker does what its orders say, and nothing else keeps it from that."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs import NUM_LAYERS, shaped_plan, tiny_job
from planaria.checkpoint.tiers import Tier
from planaria.core.messages import (
    AT_COMMIT,
    Abort,
    IterationDone,
    LayerFile,
    LayersSaved,
    SaveLayers,
    Shutdown,
    Stopped,
    WorkerFailed,
)
from served import TIMEOUT_S, Served

Write = Callable[..., LayerFile]

ALONE = shaped_plan((1,), 1)


class Disk:
    """Where layers are written once that is allowed.

    Attributes:
        may_write: set when it is.
        breaks: it then raises what is no failure of a disk.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.may_write = threading.Event()
        self.breaks = False
        write: Write = Tier.write_layer

        def wait_and_write(tier: Tier, *rest: Any, **others: Any) -> LayerFile:
            assert self.may_write.wait(TIMEOUT_S)
            if self.breaks:
                raise RuntimeError("a mistake of ours")
            return write(tier, *rest, **others)

        patch.setattr(Tier, "write_layer", wait_and_write)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    """A disk that does not write yet."""
    return Disk(monkeypatch)


@pytest.fixture
def alone(tmp_path: Path, disk: Disk) -> Iterator[Served]:
    """The only rank of a job of two iterations, the first of which is saved, too."""
    job = tiny_job("sequential", tmp_path, iterations=2, global_batch_size=2)
    served = Served(replace(job, checkpoint=replace(job.checkpoint, persist_every=1)), tmp_path)
    yield served
    disk.may_write.set()
    served.close()


def saved(alone: Served) -> dict[int, int]:
    """How many layers were written, by iteration."""
    found = [fact for fact in alone.line.of(LayersSaved) if isinstance(fact, LayersSaved)]
    return {fact.iteration: len(fact.files) for fact in found}


@pytest.mark.parametrize("epoch", [0, 1])
def test_an_order_that_ends_nothing_does_not_call_off_the_last_save(
    epoch: int, alone: Served, disk: Disk
) -> None:
    """A coordinator that was restarted had told the epoch again, or a change at a commit came when
    training ended at that very commit: the job ended unsaved."""
    start = alone.start(ALONE)
    again = alone.start(ALONE, epoch=epoch, iteration=AT_COMMIT if epoch else 0)
    alone.line.on_look = disk.may_write.set
    alone.line.give(start, again)
    alone.line.wait_told(LayersSaved, 2 * NUM_LAYERS)
    alone.line.give(Shutdown())

    assert saved(alone) == {1: NUM_LAYERS, 2: NUM_LAYERS}


def test_the_last_save_of_those_who_are_left_is_written_though_it_is_told_again(
    alone: Served, disk: Disk
) -> None:
    """The repeated order called the save off, and was then refused as one that was carried out."""
    alone.line.give(alone.start(ALONE))
    alone.line.wait_told(IterationDone)
    alone.line.give(Abort(epoch=1, nodes=(0,)))
    (stopped,) = alone.line.wait_told(Stopped)
    assert isinstance(stopped, Stopped)
    (age,) = set(stopped.ages.values())
    order = SaveLayers(
        epoch=1, iteration=age, layers={0: tuple(stopped.ages)}, vector=b"", since=stopped.since
    )
    alone.line.on_look = disk.may_write.set
    alone.line.give(order, order)
    alone.line.wait_told(LayersSaved, NUM_LAYERS)
    alone.line.give(Shutdown())
    alone.end()

    assert saved(alone)[age] == NUM_LAYERS


def test_a_save_that_broke_does_not_keep_a_worker_from_leaving(alone: Served, disk: Disk) -> None:
    """It raised what the save had left when the job had ended: the worker took that for a mistake
    of the job's, waited to be shut down once more, and was killed."""
    disk.breaks = True
    alone.line.give(alone.start(ALONE))
    alone.line.wait_told(IterationDone)
    alone.line.give(Abort(epoch=1, nodes=(0,)), Shutdown())
    alone.line.wait_told(Stopped)
    disk.may_write.set()
    alone.end()

    assert alone.error is None
    assert not alone.line.of(WorkerFailed)
