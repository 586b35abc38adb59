"""A worker does what its orders say, and nothing else keeps it from that."""

import faulthandler
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace as replace_struct
from torch import Tensor

from helpers.jobs import NUM_LAYERS, shaped_plan, tiny_job
from helpers.served import TIMEOUT_S, Served
from helpers.strategies import layer_profile, model_profile
from planaria.checkpoint.disk.tiers import Tier
from planaria.core.job import JobConfig
from planaria.core.messages import (
    AT_COMMIT,
    Abort,
    EpochReady,
    IterationDone,
    LayerFile,
    LayersSaved,
    Message,
    PeerUnreachable,
    SaveFailed,
    SaveLayers,
    Shutdown,
    Stopped,
    WorkerFailed,
)
from planaria.core.specs import NodeSpec
from planaria.engine import process
from planaria.engine.comm.choice import open_comm
from planaria.engine.comm.host import HostComm, send_tensor
from planaria.engine.stage import RankStage
from planaria.errors import ConfigError, DivergedError, PeerLostError
from planaria.transport.links import Links
from planaria.transport.pulse import Pulse

Write = Callable[..., LayerFile]

ALONE = shaped_plan((1,), 1)
BARE_SPEC = NodeSpec(
    job=JobConfig(), node=0, token=b"", coordinator=("", 0), worker="", cache_directory=""
)


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


def whole_saves(served: Served) -> list[tuple[int, int]]:
    """Iteration and epoch of all of which every layer was written."""
    found = [fact for fact in served.line.of(LayersSaved) if isinstance(fact, LayersSaved)]
    return [(fact.iteration, fact.epoch) for fact in found if len(fact.files) == NUM_LAYERS]


@pytest.mark.parametrize("epoch", [0, 1])
def test_an_order_that_ends_nothing_does_not_call_off_the_last_save(
    epoch: int, alone: Served, disk: Disk
) -> None:
    """A coordinator that was restarted had told the epoch again, or a change at a commit came when
    training ended at that very commit: the job ended unsaved."""
    start = alone.start(ALONE)
    again = alone.start(ALONE, epoch=epoch, iteration=AT_COMMIT if epoch else 0)

    def tell_again() -> None:
        """In the last iteration, when the first has been committed and is being saved."""
        alone.line.on_look = lambda: None
        alone.line.give(again)
        disk.may_write.set()

    alone.line.on_look = tell_again
    alone.line.give(start)
    alone.line.wait(lambda: len(whole_saves(alone)) == 2)

    assert whole_saves(alone) == [(1, 0), (2, 0)]


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
    alone.line.wait(lambda: bool(whole_saves(alone)))

    assert whole_saves(alone) == [(age, 1)]


def test_a_save_that_was_due_after_a_loss_is_made_up_for(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one of the epoch before was in its way, and of no use: a job that saved at its end alone
    did without from then on, though it survived fewer failures."""
    monkeypatch.setattr("planaria.engine.saver.WAIT_S", 0.0)
    job = tiny_job("sequential", tmp_path, iterations=1_000_000, global_batch_size=2)
    served = Served(job, tmp_path)
    served.line.give(replace_struct(served.start(ALONE), persists=True))
    served.line.wait_told(IterationDone)
    served.line.give(Abort(epoch=1, nodes=(0,)))
    (stopped,) = served.line.wait_told(Stopped)
    assert isinstance(stopped, Stopped)
    start = served.start(ALONE, epoch=1, iteration=stopped.vector_iteration + 1)
    served.line.give(replace_struct(start, vector=stopped.vector, persists=True))
    (skipped,) = served.line.wait_told(SaveFailed)
    disk.may_write.set()
    served.line.wait(lambda: bool(whole_saves(served)))
    served.close()

    assert isinstance(skipped, SaveFailed)
    assert (skipped.epoch, skipped.is_skipped) == (1, True)
    ((iteration, epoch),) = whole_saves(served)
    assert iteration > start.iteration
    assert epoch == 1


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


def test_a_rank_that_has_lost_a_peer_computes_nothing_and_is_not_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it was doing had to end in time, and whatever it did then for longer had its agent kill
    it: it wrote the last save. And its layers were to blame for that, though it had only sent."""
    seen: dict[str, list[tuple[int, int]]] = {"forward": [], "send": []}
    forward = RankStage.forward

    def note_forward(stage: RankStage, *arguments: Any, **others: Any) -> Tensor:
        seen["forward"].append(served.pulse.layers)
        return forward(stage, *arguments, **others)

    def lose_second(*arguments: Any, **others: Any) -> None:
        seen["send"].append(served.pulse.layers)
        if len(seen["send"]) == 2:  # How long one takes is known by now.
            raise PeerLostError(1, "its machine burns")
        send_tensor(*arguments, **others)

    monkeypatch.setattr(RankStage, "forward", note_forward)
    monkeypatch.setattr("planaria.engine.comm.host.send_tensor", lose_second)
    plan = shaped_plan((2,), 2)
    served = Served(tiny_job("sequential", tmp_path, global_batch_size=4), tmp_path)
    peer = Links(1, token=b"")
    addresses = {0: served.links.address, 1: peer.address}
    served.line.give(replace_struct(served.start(plan), addresses=addresses))
    peer.begin(0, addresses=addresses, peers={0}, timeout_s=TIMEOUT_S)
    served.line.wait_told(PeerUnreachable)
    deadline_s, layers = served.pulse.deadline_s, served.pulse.layers
    served.close()
    peer.close()

    assert deadline_s == math.inf
    assert layers == (0, 0)
    assert seen == {"forward": [(0, NUM_LAYERS // 2)] * 2, "send": [(0, 0)] * 2}


@pytest.mark.parametrize("is_lost", [False, True])
def test_what_is_raised_in_an_epoch_that_is_over_is_no_mistake_of_the_job(
    is_lost: bool, alone: Served, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An abort of NCCL ends a receive as if all were well. What the message was to be is not what
    its layer expects: the job ended as by a mistake of its user, though a node was lost."""
    forward, is_first = RankStage.forward, True

    def read_rubbish(stage: RankStage, *arguments: Any, **others: Any) -> Tensor:
        nonlocal is_first
        if not is_first:
            return forward(stage, *arguments, **others)
        is_first = False
        comm = alone.worker._control.comm
        assert isinstance(comm, HostComm)
        if is_lost:
            comm._error = PeerLostError(1, "its connection closed")
        alone.line.give(Abort(epoch=1, nodes=(0,)))
        comm.abort("a member is lost")
        raise ConfigError("model", [1, 1, 1, 1, 1, 8], "give it another shape")

    monkeypatch.setattr(RankStage, "forward", read_rubbish)
    disk.may_write.set()
    alone.line.give(alone.start(ALONE))
    (stopped,) = alone.line.wait_told(Stopped)
    alone.line.give(alone.start(ALONE, epoch=1))
    alone.line.wait_told(IterationDone)

    assert isinstance(stopped, Stopped)
    assert set(stopped.ages.values()) == {0}
    assert not alone.line.of(WorkerFailed)
    assert len(alone.line.of(PeerUnreachable)) == is_lost


def _lose_a_child(*_: object, **__: object) -> None:
    raise RuntimeError("DataLoader worker (pid 7) exited unexpectedly")


def _diverge(*_: object, **__: object) -> None:
    raise DivergedError("loss", "nan", "lower training.learning_rate")


@pytest.mark.parametrize(("raises", "blame"), [(_lose_a_child, "node"), (_diverge, "job")])
def test_what_is_raised_on_a_node_that_will_be_taken_away_is_no_mistake_of_the_job(
    raises: Callable[..., None],
    blame: str,
    alone: Served,
    disk: Disk,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A SIGTERM to all processes of a machine ends those that code of the job has forked, and that
    code raises: the whole job ended. All ranks alike find that training diverges."""
    monkeypatch.setattr(RankStage, "forward", raises)
    disk.may_write.set()
    alone.line.is_noticed = True
    alone.line.give(alone.start(ALONE))
    (failed,) = alone.line.wait_told(WorkerFailed)

    assert isinstance(failed, WorkerFailed)
    assert failed.blame == blame


def test_a_loss_that_the_comm_has_seen_is_told_although_it_has_ended_all_waits(
    alone: Served, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank was taken for one that was told to leave the epoch, and waited for an order."""

    def end_waits(*_: object, **__: object) -> None:
        comm = alone.worker._control.comm
        assert isinstance(comm, HostComm)
        comm._error = PeerLostError(1, "its connection closed")
        comm.abort("a thread has failed")
        alone.links.check_epoch()

    monkeypatch.setattr(RankStage, "forward", end_waits)
    disk.may_write.set()
    alone.line.give(alone.start(ALONE))

    alone.line.wait_told(PeerUnreachable)


def test_the_forming_of_groups_is_no_moving_of_layers(
    alone: Served, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Links were taken for up to 26 times as slow, in all answers to losses that move layers."""
    moved_s: list[float] = []

    def form(*arguments: Any, **others: Any) -> None:
        moved_s.append(time.monotonic() - alone.links.linked_s)
        open_comm(*arguments, **others)

    monkeypatch.setattr("planaria.engine.worker.open_comm", form)
    disk.may_write.set()
    alone.line.give(alone.start(ALONE))
    (ready,) = alone.line.wait_told(EpochReady)

    assert isinstance(ready, EpochReady)
    assert 0.0 < ready.transfer_s <= moved_s[0] < ready.transfer_s + ready.comm_s


def test_the_end_of_an_epoch_frees_the_thread_that_reduces(alone: Served) -> None:
    """It may wait in a group of NCCL, which no link and no order of the epoch ends any more."""
    is_aborted = threading.Event()
    is_free: list[bool] = []

    class Comm:
        def abort(self, _: str) -> None:
            is_aborted.set()

        def close(self) -> None:
            assert is_free == [True]

    class Reducing:
        def close(self) -> None:
            is_free.append(is_aborted.wait(TIMEOUT_S))

    alone.line.comm = Comm()  # type: ignore[assignment]
    alone.worker._executor = Reducing()  # type: ignore[assignment]
    alone.worker._end_epoch(0)

    assert is_free == [True]


@pytest.fixture
def _process_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a worker's main function sets for its whole process would stay set here."""
    for place, name in (
        (torch, "set_num_threads"),
        (sys, "setswitchinterval"),
        (faulthandler, "register"),
        (faulthandler, "enable"),
    ):
        monkeypatch.setattr(place, name, lambda *_, **__: None)


@pytest.mark.usefixtures("_process_stays_as_it_is")
def test_the_links_of_a_worker_are_as_its_node_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others could not reach it at the loopback of their own machines, nor understand it without
    the checksums that they expect. It takes no message that the job cannot send."""
    told = []

    class Listening:
        """A worker that has nothing to do."""

        def __init__(self, _spec: NodeSpec, _control: object, links: Links, _pulse: Pulse) -> None:
            told.append(
                (
                    links.address[0],
                    links._own.protection.is_checked,
                    links._own.protection.num_bytes_max,
                )
            )
            links.close()

        def run(self, _: object) -> None:
            """Returns at once."""

    pulse = Pulse()
    layer = layer_profile("layer", 0.01, parameter_bytes=3 << 30, output_bytes=1 << 30)
    profile = model_profile((layer,) * 2)
    spec = replace_struct(BARE_SPEC, host="127.0.0.3", checks_links=True, profile=profile)
    monkeypatch.setattr(process, "Worker", Listening)
    monkeypatch.setattr(process, "Control", lambda *_, **__: None)
    process.main(spec, -1, -1, pulse)
    pulse.close()

    ((host, is_checked, num_bytes_max),) = told
    assert (host, is_checked) == ("127.0.0.3", True)
    state_bytes = 2 * (layer.parameter_bytes + layer.optimizer_bytes)
    sums_bytes, outputs_bytes = 4 * state_bytes, 16 * layer.output_bytes
    assert sums_bytes + outputs_bytes < num_bytes_max < (2 << 30) + sums_bytes + outputs_bytes


@pytest.mark.usefixtures("_process_stays_as_it_is")
def test_a_worker_whose_node_is_to_blame_leaves_once_it_has_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It left by an exception, whose traceback was printed below the one that was told."""
    told: list[Message] = []

    class Failing:
        """A worker that cannot read what others can."""

        def __init__(self, *_: object) -> None:
            self.send, self.is_noticed = told.append, False

        def run(self, _: object) -> None:
            raise OSError("Input/output error")

    pulse = Pulse()
    monkeypatch.setattr(process, "Worker", Failing)
    monkeypatch.setattr(process, "Control", lambda *_, **__: Failing())
    process.main(BARE_SPEC, -1, -1, pulse)
    pulse.close()

    (failed,) = told
    assert isinstance(failed, WorkerFailed)
    assert (failed.blame, failed.epoch) == ("node", -1)


@pytest.mark.usefixtures("_process_stays_as_it_is")
def test_a_worker_has_its_device_before_it_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA takes seconds to start where there are many GPUs, and keeps all threads from running.

    A device that does not start is told of all the same.
    """
    told: list[object] = []

    class Line:
        """A line to the agent, over which the worker beats from the beginning."""

        def __init__(self, *_: object, **__: object) -> None:
            told.append("beats")
            self.send, self.is_noticed = told.append, False

    def fail(*_: object, **__: object) -> None:
        told.append("device")
        raise RuntimeError("CUDA error: system not yet initialized")

    pulse = Pulse()
    monkeypatch.setattr(process, "Control", Line)
    monkeypatch.setattr(process, "device_of", fail, raising=False)
    process.main(BARE_SPEC, -1, -1, pulse)
    pulse.close()

    *begun, failed = told
    assert begun == ["device", "beats"]
    assert isinstance(failed, WorkerFailed)
    assert failed.blame == "node"


@pytest.fixture
def _no_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node's lease has run out, and it gets no other one."""
    monkeypatch.setattr(Pulse, "wait_member", lambda *_, **__: False)


@pytest.mark.usefixtures("_no_lease")
def test_a_worker_whose_node_has_no_lease_writes_nothing(alone: Served, disk: Disk) -> None:
    """Its node may have been evicted, and others may write the same save."""
    disk.may_write.set()
    alone.line.give(alone.start(ALONE))
    failed = alone.line.wait_told(SaveFailed)

    assert isinstance(failed[0], SaveFailed)
    assert "the node's lease has run out" in failed[0].reason
    assert not alone.line.of(LayersSaved)
