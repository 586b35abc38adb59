"""The saver writes what the layers were when it was asked, off the training path."""

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from helpers.jobs import tiny_job
from helpers.linked_ranks import in_threads, wait_until
from helpers.virtual_time import VirtualTime
from planaria.checkpoint.disk.tiers import Manifest, Tier, tier_of
from planaria.core.job import TrainingConfig
from planaria.core.messages import LayerFile, LayersSaved, Message, SaveFailed
from planaria.engine.devices import PROCESSOR, Device, LateDevice
from planaria.engine.prepare import load_model
from planaria.engine.saver import Saver
from planaria.engine.stage import HeldLayer, RankStage
from planaria.engine.staging import State
from planaria.errors import CheckpointError, UnwritableError
from planaria.transport.timekeeping import Timekeeper

TRAINING = TrainingConfig()


def layers(*numbers: int) -> dict[int, HeldLayer]:
    return {
        number: HeldLayer(number, nn.Linear(3, 2), training=TRAINING, tied=()) for number in numbers
    }


Write = Callable[..., LayerFile]


def always() -> bool:
    return True


def never(epoch: int) -> bool:
    del epoch
    return False


def saver_of(
    place: Path,
    send: Callable[[Message], None],
    *,
    may_write: Callable[[], bool] = always,
    is_over: Callable[[int], bool] = never,
    timeout_s: float = 600.0,
) -> Saver:
    """The saver of rank 3, which saves in a directory."""
    return Saver(
        tier_of(str(place)),
        rank=3,
        send=send,
        may_write=may_write,
        is_over=is_over,
        timeout_s=timeout_s,
    )


class _SlowDisk:
    """Waits for the test before it writes; notes what it wrote."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.may_write = threading.Event()
        self.iterations: list[int] = []
        self.num_begun = 0
        write: Write = Tier.write_layer

        def wait_and_write(
            tier: Tier, iteration: int, *rest: Any, may_write: Callable[[], bool]
        ) -> LayerFile:
            self.num_begun += 1
            assert self.may_write.wait(20.0)
            self.iterations.append(iteration)
            return write(tier, iteration, *rest, may_write=may_write)

        patch.setattr(Tier, "write_layer", wait_and_write)


def test_a_save_holds_the_layers_of_the_moment_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training goes on while the disk is slow; what it changes then is not in the save."""
    disk, tier = _SlowDisk(monkeypatch), tier_of(str(tmp_path))
    sent: list[Message] = []
    saver = saver_of(tmp_path, sent.append)
    held = layers(0, 1)
    before = {number: layer.state() for number, layer in held.items()}
    assert saver.save(held, iteration=7, epoch=2)
    with torch.no_grad():
        for layer in held.values():
            for master in layer.masters.values():
                master.add_(1.0)
    assert sent == []
    disk.may_write.set()
    saver.wait_written(0)

    first, message = sent
    assert isinstance(first, LayersSaved)
    assert isinstance(message, LayersSaved)
    assert first.files == message.files[:1]  # Whoever waits sees that it gets on.
    assert (message.rank, message.iteration, message.epoch) == (3, 7, 2)
    assert [file.layer for file in message.files] == [0, 1]
    manifest = Manifest(iteration=7, epoch=2, job={}, layers=message.files)
    tier.publish(manifest)
    for number, state in before.items():
        read = tier.read_layer(manifest, number)
        assert read.keys() == state.keys()
        assert all(np.array_equal(state[name], read[name]) for name in state)


def test_the_next_save_waits_for_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most one copy of the state is in memory, however slow the disk."""
    monkeypatch.setattr("planaria.engine.saver.WAIT_S", 20.0)
    disk, state = _SlowDisk(monkeypatch), HeldLayer.state
    sent: list[Message] = []
    copied: list[HeldLayer] = []
    looks: list[int] = []

    def copy(layer: HeldLayer) -> State:
        copied.append(layer)
        return state(layer)

    def look(epoch: int) -> bool:
        looks.append(epoch)
        return False

    monkeypatch.setattr(HeldLayer, "state", copy)
    saver = saver_of(tmp_path, sent.append, is_over=look)
    saver.save(layers(0), iteration=1, epoch=0)
    wait_until(lambda: disk.num_begun == 1)
    num_looks = len(looks)  # Only a save that waits for the one before looks again.
    with in_threads(lambda: saver.save(layers(0), iteration=2, epoch=0)) as (second,):
        wait_until(lambda: len(looks) > num_looks)
        num_copies, num_begun = len(copied), disk.num_begun
        disk.may_write.set()
        assert second.result(20.0)
    saver.wait_written(0)

    assert (num_copies, num_begun) == (1, 1)
    assert disk.iterations == [1, 2]
    assert [message.iteration for message in sent if isinstance(message, LayersSaved)] == [1, 2]


def test_training_does_not_wait_for_a_save_that_takes_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one is not made, and that is told; one after it is, once the disk has answered."""
    monkeypatch.setattr("planaria.engine.saver.WAIT_S", 0.0)
    disk = _SlowDisk(monkeypatch)
    sent: list[Message] = []
    saver = saver_of(tmp_path, sent.append)
    assert saver.save(layers(0), iteration=2, epoch=0)
    assert not saver.save(layers(0), iteration=4, epoch=0)
    assert saver.is_writing

    (message,) = sent
    assert isinstance(message, SaveFailed)
    assert message.is_skipped
    assert (message.rank, message.iteration) == (3, 4)
    assert "rank 3 was still writing the save of iteration 2" in message.reason
    disk.may_write.set()
    assert saver.wait_written(0, timeout_s=20.0)
    assert not saver.is_writing
    saver.save(layers(0), iteration=6, epoch=0)
    saver.wait_written(0)
    assert disk.iterations == [2, 6]


def test_the_last_save_waits_for_its_turn_until_its_epoch_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job has ended without it, or goes on in another epoch."""
    disk = _SlowDisk(monkeypatch)
    sent: list[Message] = []
    over: set[int] = set()
    saver = saver_of(tmp_path, sent.append, is_over=over.__contains__)
    saver.save(layers(0), iteration=2, epoch=0)
    over.add(0)
    saver.save_last(layers(0), iteration=3, epoch=0)
    assert not sent
    disk.may_write.set()
    saver.save_last(layers(0), iteration=3, epoch=1)

    assert disk.iterations == [2, 3]
    saves = [(one.iteration, one.epoch) for one in sent if isinstance(one, LayersSaved)]
    assert saves == [(2, 0), (3, 1)]


@pytest.mark.parametrize("is_busy", [False, True])
def test_the_last_save_is_written_once_though_it_begins_before_it_is_waited_for(
    is_busy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile held-out data are evaluated; after that where another save takes long."""
    monkeypatch.setattr("planaria.engine.saver.WAIT_S", 0.0)
    disk = _SlowDisk(monkeypatch)
    sent: list[Message] = []
    saver = saver_of(tmp_path, sent.append)
    if is_busy:
        saver.save(layers(0), iteration=2, epoch=1)
    saver.begin_last(layers(0), iteration=3, epoch=1)
    wait_until(lambda: disk.num_begun == 1)
    disk.may_write.set()
    for _ in range(2):
        saver.save_last(layers(0), iteration=3, epoch=1)

    assert disk.iterations == ([2, 3] if is_busy else [3])


@pytest.mark.parametrize("device", [PROCESSOR, LateDevice()], ids=["cpu", "late"])
def test_a_layer_that_is_loaded_anew_changes_nothing_of_the_last_save_of_it(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last save writes the layer's own memory, or the mirror of it, and outlasts its epoch."""
    disk, tier = _SlowDisk(monkeypatch), tier_of(str(tmp_path))
    sent: list[Message] = []
    over: set[int] = set()
    saver = saver_of(tmp_path, sent.append, is_over=over.__contains__)
    job = tiny_job("sequential", tmp_path)
    model = load_model(job, cache_directory=tmp_path, profile=None, timekeeper=Timekeeper())
    stage = RankStage(model, training=TRAINING, device=device)
    stage.hold((0,), states={}, age=0)
    before = {name: np.array(array) for name, array in stage.layers[0].state().items()}
    with in_threads(lambda: saver.save_last(stage.layers, iteration=1, epoch=0)) as (saving,):
        wait_until(lambda: saver.is_writing)
        stage.keep_only(())
        other = {name: array + 1 for name, array in before.items()}
        stage.hold((0,), states={0: other}, age=0)
        views = stage.layers[0].state_views()
        assert all(np.array_equal(views[name], other[name]) for name in before)
        disk.may_write.set()
        saving.result(timeout=20.0)

    (message,) = sent
    assert isinstance(message, LayersSaved)
    manifest = Manifest(iteration=1, epoch=0, job={}, layers=message.files)
    tier.publish(manifest)
    read = tier.read_layer(manifest, 0)
    assert read.keys() == before.keys()
    assert all(np.array_equal(before[name], read[name]) for name in before)


@pytest.mark.parametrize("device", [PROCESSOR, LateDevice()], ids=["cpu", "late"])
def test_a_layer_that_may_have_changed_while_it_was_written_is_not_told(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the epoch is over nothing keeps the next one from a step; the file would be complete,
    with bytes of two ages."""
    disk = _SlowDisk(monkeypatch)
    sent: list[Message] = []
    over: set[int] = set()
    saver = saver_of(tmp_path, sent.append, is_over=over.__contains__)
    held = HeldLayer(0, nn.Linear(3, 2), training=TRAINING, tied=(), device=device)
    with in_threads(lambda: saver.save_last({0: held}, iteration=1, epoch=0)) as (saving,):
        wait_until(lambda: bool(disk.num_begun))
        over.add(0)
        saving.result(timeout=20.0)
    held.gradients_of = 0
    held.apply(0, learning_rate=0.1, scale=1.0)
    disk.may_write.set()
    assert saver.wait_written(1, timeout_s=20.0)

    assert disk.iterations == [1]
    assert not sent


def test_what_is_left_of_a_save_is_not_written_when_its_epoch_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is of no use any more, and the save of the next epoch is in need of its place."""
    disk = _SlowDisk(monkeypatch)
    sent: list[Message] = []
    over: set[int] = set()
    saver = saver_of(tmp_path, sent.append, is_over=over.__contains__)
    saver.save(layers(0, 1, 2), iteration=2, epoch=0)
    over.add(0)
    disk.may_write.set()
    saver.save_last(layers(0, 1), iteration=3, epoch=1)

    assert disk.iterations in ([2, 3, 3], [3, 3])  # It may not have begun with the first layer.
    saves = [(one.epoch, len(one.files)) for one in sent if isinstance(one, LayersSaved)]
    assert saves[-2:] == [(1, 1), (1, 2)]


def test_a_save_that_fails_is_told_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No exception, no word of success; the next save is tried as if nothing had been."""
    sent: list[Message] = []
    write: Write = Tier.write_layer

    def refuse(
        tier: Tier,
        iteration: int,
        epoch: int,
        layer: int,
        tensors: State,
        *,
        may_write: Callable[[], bool],
    ) -> LayerFile:
        if layer > 0:
            raise CheckpointError("no space left")
        return write(tier, iteration, epoch, layer, tensors, may_write=may_write)

    monkeypatch.setattr(Tier, "write_layer", refuse)
    saver = saver_of(tmp_path, sent.append)
    saver.save(layers(0, 1), iteration=4, epoch=1)
    saver.wait_written(0)
    saver.save(layers(0), iteration=5, epoch=1)
    saver.wait_written(0)

    assert sent[1] == SaveFailed(rank=3, epoch=1, iteration=4, reason="no space left")
    assert isinstance(sent[2], LayersSaved)


class _RefusingDisk:
    """Refuses the first writes.

    Attributes:
        num_refused: number of writes that it has refused.
    """

    def __init__(
        self, patch: pytest.MonkeyPatch, refusal: OSError, *, num_refusals: float = float("inf")
    ) -> None:
        self.num_refused = 0
        write: Write = Tier.write_layer

        def refuse_at_first(*arguments: Any, may_write: Callable[[], bool]) -> LayerFile:
            if self.num_refused < num_refusals:
                self.num_refused += 1
                raise UnwritableError(str(refusal.strerror)) from refusal
            return write(*arguments, may_write=may_write)

        patch.setattr(Tier, "write_layer", refuse_at_first)


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_the_last_save_is_tried_again_as_long_as_the_disk_refuses_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No other save follows it. It was lost for good after four refusals, in 3.5 s."""
    monkeypatch.setattr("planaria.engine.saver._PAUSE_S", 0.001)
    disk = _RefusingDisk(monkeypatch, FULL, num_refusals=9)
    sent: list[Message] = []
    saver = saver_of(tmp_path, sent.append)
    saver.save_last(layers(0, 1), iteration=4, epoch=1)

    assert disk.num_refused == 9
    assert [type(message) for message in sent] == [LayersSaved, LayersSaved]
    assert caplog.text.count("tries again") == 1


@pytest.mark.parametrize(
    ("number", "timeout_s", "is_tried_again"),
    [(errno.ENOSPC, 20.0, True), (errno.EACCES, 600.0, False)],
)
def test_a_last_save_that_is_refused_for_good_is_told(
    number: int,
    timeout_s: float,
    is_tried_again: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At once where only the user can mend it; else before the coordinator has waited in vain."""
    clock = VirtualTime()
    monkeypatch.setattr("planaria.engine.saver.time", clock)
    reason = os.strerror(number)
    disk = _RefusingDisk(monkeypatch, OSError(number, reason))
    sent: list[Message] = []
    saver = saver_of(tmp_path, sent.append, timeout_s=timeout_s)
    saver.save_last(layers(0), iteration=4, epoch=1)

    assert sent == [SaveFailed(rank=3, epoch=1, iteration=4, reason=reason)]
    assert (disk.num_refused > 1) == is_tried_again
    assert (clock.now_s >= 0.8 * timeout_s) == is_tried_again
    assert clock.now_s < timeout_s


def test_the_last_save_is_not_tried_again_once_its_epoch_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank is needed in the next one."""
    monkeypatch.setattr("planaria.engine.saver._PAUSE_S", 30.0)
    sent: list[Message] = []
    over: set[int] = set()

    def refuse(*_: Any, **__: Any) -> LayerFile:
        over.add(1)
        raise UnwritableError("no space") from FULL

    monkeypatch.setattr(Tier, "write_layer", refuse)
    saver = saver_of(tmp_path, sent.append, is_over=over.__contains__)
    saver.save_last(layers(0), iteration=4, epoch=1)
    assert saver.wait_written(2, timeout_s=20.0)

    assert not sent


def _no_memory(*_: Any, **__: Any) -> Any:
    raise MemoryError("for 5 bytes")


def _no_tensor(*_: Any, **__: Any) -> Any:
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 5 bytes")


def _no_thread(*_: Any) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize(
    ("owner", "name", "refuse"),
    [
        (HeldLayer, "state", _no_tensor),
        (threading.Thread, "start", _no_thread),
        (Tier, "write_layer", _no_memory),
    ],
    ids=["to copy", "for a thread", "to write"],
)
def test_a_save_that_finds_no_memory_is_told_and_training_goes_on(
    owner: type, name: str, refuse: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended the epoch, the third time the node; or only the next save told of it."""
    sent: list[Message] = []
    saver = saver_of(tmp_path, sent.append)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, refuse)
        assert saver.save(layers(0), iteration=4, epoch=1)
        assert saver.wait_written(1, timeout_s=20.0)
    assert saver.save(layers(0), iteration=5, epoch=1)
    saver.wait_written(1)

    failed, saved = sent
    assert isinstance(failed, SaveFailed)
    assert (failed.iteration, failed.is_skipped) == (4, False)
    assert "rank 3 has no memory" in failed.reason
    assert isinstance(saved, LayersSaved)


def test_a_last_save_that_finds_no_memory_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training is over, and in the next epoch another holder of the layers may have memory."""
    saver = saver_of(tmp_path, lambda _: None)
    monkeypatch.setattr(Tier, "write_layer", _no_memory)

    with pytest.raises(MemoryError):
        saver.save_last(layers(0), iteration=4, epoch=1)
    assert not saver.is_writing


def test_a_node_that_lost_its_place_while_the_disk_was_slow_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lease was good when the save began; others may write the same layers by now."""
    disk = _SlowDisk(monkeypatch)
    sent: list[Message] = []
    is_member = threading.Event()
    is_member.set()
    saver = saver_of(tmp_path, sent.append, may_write=is_member.is_set)
    saver.save(layers(0, 1), iteration=4, epoch=1)
    is_member.clear()
    disk.may_write.set()
    saver.wait_written(0)

    (message,) = sent
    assert isinstance(message, SaveFailed)
    assert (message.rank, message.epoch, message.iteration) == (3, 1, 4)
    assert "lease" in message.reason
    assert not any(tmp_path.iterdir())


def test_a_mistake_in_writing_reaches_the_training_thread(tmp_path: Path) -> None:
    """What is no failure of the disk is ours, and must not be lost in a thread."""

    def broken(message: Message) -> None:
        raise RuntimeError(f"cannot send {type(message).__name__}")

    saver = saver_of(tmp_path, broken)
    saver.save(layers(0), iteration=1, epoch=0)

    with pytest.raises(RuntimeError, match="cannot send LayersSaved"):
        saver.wait_written(0)


def test_nothing_is_waited_for_where_nothing_was_saved(tmp_path: Path) -> None:
    """The end of a run that another rank saves."""
    saver_of(tmp_path, lambda _: None).wait_written(0)

    assert not any(tmp_path.iterdir())
