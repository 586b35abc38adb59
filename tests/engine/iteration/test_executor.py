"""What a rank's iterations promise where the device computes while it is given more."""

import gc
import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.jobs import NUM_LAYERS, shaped_plan, tiny_job
from helpers.linked_ranks import link_ranks
from helpers.noted_pulse import NotedPulse
from helpers.streamed_device import StreamedDevice
from planaria.core.commit import Votes, vector_layout
from planaria.core.plan import Plan
from planaria.data.batches import Batches
from planaria.data.datasets import UserDataset, load_dataset
from planaria.engine.comm.host import HostComm
from planaria.engine.devices import PROCESSOR, Device, LateDevice
from planaria.engine.iteration.executor import Executor, ExecutorCallbacks, RankContext
from planaria.engine.iteration.lateness import READING_S, ActionTimes
from planaria.engine.prepare import load_model
from planaria.engine.stage import RankStage
from planaria.errors import AbortedError, PeerLostError
from planaria.schedule.lower import rank_schedule
from planaria.transport.links import Tag
from planaria.transport.pulse import Pulse

JOB = tiny_job("sequential", Path(), iterations=1)
LEASE_S = JOB.cluster.lease_s


@contextmanager
def executor_on(
    device: Device, plan: Plan, pulse: Pulse, *, is_timed: bool = False
) -> Iterator[Executor]:
    """The executor of the first rank of a plan, on this device."""
    with link_ranks(len(plan.all_ranks)) as (links, *_):
        model = load_model(JOB, cache_directory=Path(), profile=None, timekeeper=links.timekeeper)
        stage = RankStage(model, training=JOB.training, device=device)
        stage.hold(plan.held_by_rank[0], states={}, age=0)
        executor = Executor(
            plan,
            rank_schedule(plan, 0),
            context=RankContext(
                stage=stage,
                links=links,
                layout=vector_layout(JOB, NUM_LAYERS),
                pulse=pulse,
                times=ActionTimes(JOB),
                resilience=JOB.resilience,
            ),
            comm=HostComm(links, device),
            callbacks=ExecutorCallbacks(
                on_step=lambda *_: None,
                on_action_done=lambda: None,
                on_computed=lambda _: None,
                is_timed=lambda: is_timed,
                on_tensors=lambda _: None,
            ),
        )
        yield executor
        executor.close()


class SlowDevice(LateDevice):
    """A device that takes ten seconds for an action, which it is given in no time."""

    def moment(self) -> "TenLater":
        return TenLater()


class TenLater:
    """A moment ten seconds after the one before."""

    def wait(self) -> None:
        """See `Moment`."""

    def seconds_since(self, _: object) -> float:
        """See `Moment`."""
        return 10.0


def test_an_action_may_last_as_long_as_the_device_computes_what_it_was_given_before() -> None:
    """A device takes some actions ahead; a rank whose next one had to wait was killed as hung."""
    pulse = NotedPulse()
    plan = shaped_plan((1,), JOB.num_microbatches)
    dataset = load_dataset(JOB.data, objective="causal", seed=0, cache_directory=Path())
    with executor_on(SlowDevice(), plan, pulse) as executor:
        batches = Batches(dataset, JOB.training, iteration=0)
        executor.run(0, batches, votes=lambda: Votes(0, 0, 0, 0))
        first, pulse.limits_s = pulse.limits_s, []
        for held in executor._own_layers():
            held.age = 0
        executor.run(0, batches, votes=lambda: Votes(0, 0, 0, 0))

    assert set(first) == {math.inf}
    own, *others, _ = pulse.limits_s  # Nothing is before the first one.
    assert LEASE_S <= own < 100.0
    assert min(others) >= 100.0


@pytest.mark.parametrize("num_targets", [0, 7])
def test_a_vector_says_if_an_iteration_has_no_targets(num_targets: int) -> None:
    """Its loss is 0 then, and reaches no target_loss."""
    dataset = load_dataset(JOB.data, objective="causal", seed=0, cache_directory=Path())
    batches = Batches(dataset, JOB.training, iteration=0)
    batches._num_targets = num_targets
    with executor_on(SlowDevice(), shaped_plan((1,), JOB.num_microbatches), Pulse()) as executor:
        vector, _ = executor.run(0, batches, votes=lambda: Votes(0))

    assert vector.votes.untargeted == (num_targets == 0)


class UnequalBatches(Batches):
    """Microbatches of which number 5 has fifty times as many rows, if the iteration has one so."""

    def inputs(self, index: int) -> Any:
        return super().inputs(index).repeat(self._times(index), 1)

    def targets(self, index: int) -> Any:
        return super().targets(index).repeat(self._times(index))

    def _times(self, index: int) -> int:
        return 50 if self.iteration and index == 5 else 1


def test_an_action_with_a_larger_input_has_more_time_and_yet_a_limit() -> None:
    """A worker was killed where rows were long after short ones, again and again."""
    pulse, plan = NotedPulse(), shaped_plan((1,), JOB.num_microbatches)
    dataset = load_dataset(JOB.data, objective="causal", seed=0, cache_directory=Path())
    with executor_on(PROCESSOR, plan, pulse) as executor:
        for iteration in range(2):
            pulse.limits_s = []
            for held in executor._own_layers():
                held.age = iteration
            batches = UnequalBatches(dataset, JOB.training, iteration=iteration)
            executor.run(iteration, batches, votes=lambda: Votes(0, 0, 0, 0))

    long = [limit_s for limit_s in pulse.limits_s if limit_s >= 600.0]
    assert len(long) == 2  # Its forward, and its backward.
    assert max(long) < math.inf
    assert len(pulse.limits_s) > 2 * JOB.num_microbatches


class NotingItems:
    """Samples that note by when whoever reads them should be done.

    Attributes:
        limits_s: seconds in which the action should end during which each sample was read.
    """

    def __init__(self, items: Any, pulse: NotedPulse) -> None:
        self.limits_s: list[float] = []
        self._items = items
        self._pulse = pulse

    def __getitem__(self, index: int) -> Any:
        self.limits_s.append(self._pulse.limit_s)
        return self._items[index]


def test_a_store_that_stands_still_makes_no_action_late() -> None:
    """All ranks that read it were killed, and no copy of their layers was left: the job began
    anew."""
    pulse, plan = NotedPulse(), shaped_plan((1,), JOB.num_microbatches)
    dataset = load_dataset(JOB.data, objective="supervised", seed=0, cache_directory=Path())
    assert isinstance(dataset, UserDataset)
    items = NotingItems(dataset.items, pulse)
    with executor_on(PROCESSOR, plan, pulse) as executor:
        for iteration in range(2):
            for held in executor._own_layers():
                held.age = iteration
            noting = replace(dataset, items=items)
            batches = Batches(noting, JOB.training, iteration=iteration)
            executor.run(iteration, batches, votes=lambda: Votes(0, 0, 0, 0))

    assert len(items.limits_s) >= 2 * JOB.training.global_batch_size
    assert set(items.limits_s) == {math.inf, READING_S}  # One that hangs for good is late.
    assert min(pulse.limits_s) < math.inf


def test_the_time_in_which_samples_are_read_does_not_make_limits_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A layer that hung after a store had stood still for minutes was found after an hour."""
    pulse, plan = NotedPulse(), shaped_plan((1,), JOB.num_microbatches)
    dataset = load_dataset(JOB.data, objective="supervised", seed=0, cache_directory=Path())
    now_s, load = 0.0, Batches.load

    def load_slowly(batches: Batches, index: int) -> tuple[Any, Any]:
        nonlocal now_s
        now_s += 60.0
        return load(batches, index)

    monkeypatch.setattr(Batches, "load", load_slowly)
    with executor_on(PROCESSOR, plan, pulse) as executor:
        executor._now_s = lambda: now_s
        for iteration in range(2):
            for held in executor._own_layers():
                held.age = iteration
            batches = Batches(dataset, JOB.training, iteration=iteration)
            executor.run(iteration, batches, votes=lambda: Votes(0, 0, 0, 0))

    assert now_s >= 2 * 60.0
    assert {limit_s for limit_s in pulse.limits_s if limit_s < math.inf} == {LEASE_S}


def test_a_reduction_waits_for_its_layers_and_what_follows_it_for_the_reduction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if it fails. It waits for no action that the device was given since."""
    device, plan = StreamedDevice(), shaped_plan((1, 1), 2)
    with executor_on(device, plan, Pulse()) as executor:

        def fail(*_: object, **__: object) -> None:
            assert device.waits == [("reduce", "")]
            raise AbortedError("a member is lost")

        executor._iteration = 0
        monkeypatch.setattr(executor._comm, "sum_over", fail)
        with pytest.raises(AbortedError):
            executor._run_bucket(0, 0.0, device.mark())

    assert device.waits == [("reduce", ""), ("", "reduce")]


def test_memory_that_a_sum_lacks_is_that_of_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage without memory is planned smaller only if it is told which layers lacked it."""
    pulse, plan = Pulse(), shaped_plan((1, 1), JOB.num_microbatches)
    dataset = load_dataset(JOB.data, objective="causal", seed=0, cache_directory=Path())

    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    with executor_on(LateDevice(), plan, pulse) as executor:
        monkeypatch.setattr(executor._comm, "sum_over", fail)
        with pytest.raises(torch.OutOfMemoryError):
            executor.run(
                0, Batches(dataset, JOB.training, iteration=0), votes=lambda: Votes(0, 0, 0, 0)
            )

    assert pulse.layers == (0, NUM_LAYERS)


def test_the_comm_of_a_closed_executor_is_freed_without_the_garbage_collector() -> None:
    """That may run in the thread that beats, which would wait there until groups are freed."""
    plan = shaped_plan((1,), JOB.num_microbatches)
    gc.disable()
    try:
        with executor_on(LateDevice(), plan, Pulse()) as executor:
            freed = weakref.ref(executor), weakref.ref(executor._comm)
        del executor

        assert [each() for each in freed] == [None, None]
    finally:
        gc.enable()


class WaitingDevice(LateDevice):
    """A device that computes in no time, and waits 100 s for each message; the host does not.

    Attributes:
        now_s: time.
        waits: seconds that each wait of the host took, and the limit for it.
    """

    def __init__(self, pulse: NotedPulse) -> None:
        super().__init__()
        self.now_s = 0.0
        self.waits: list[tuple[float, float]] = []
        self._there_s = 0.0  # When the device is done with what it was given.
        self._pulse = pulse

    def receive(self, like: Tensor) -> Tensor:
        """A message for which the device waits."""
        self._there_s += 100.0
        return torch.zeros_like(like)

    def wait_until(self, there_s: float) -> None:
        """Waits for the device."""
        self.waits.append((max(0.0, there_s - self.now_s), self._pulse.limit_s))
        self.now_s = max(self.now_s, there_s)

    def finish(self) -> None:
        self.wait_until(self._there_s)

    def moment(self) -> "WaitedMoment":
        return WaitedMoment(self, self._there_s)


class WaitedMoment:
    """A moment of such a device."""

    def __init__(self, device: WaitingDevice, there_s: float) -> None:
        self._device = device
        self._there_s = there_s

    def wait(self) -> None:
        """See `Moment`."""
        self._device.wait_until(self._there_s)

    def seconds_since(self, earlier: "WaitedMoment") -> float:
        """See `Moment`."""
        return self._there_s - earlier._there_s


@pytest.mark.parametrize("is_timed", [True, False])
def test_a_device_that_waits_for_another_rank_neither_computes_nor_is_late(
    is_timed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With NCCL a receive returns before its message is there. If a device hung, the ranks that
    waited for it were killed in its place, and where actions are timed they counted as slow."""
    pulse = NotedPulse()
    device, plan = WaitingDevice(pulse), shaped_plan((2,), JOB.num_microbatches)
    dataset = load_dataset(JOB.data, objective="causal", seed=0, cache_directory=Path())
    with executor_on(device, plan, pulse, is_timed=is_timed) as executor:

        def receive(_: int, tag: Tag) -> Tensor:
            return device.receive(executor._outputs[tag.a, tag.b])

        executor._comm.waits_on_device = True
        executor._now_s = lambda: device.now_s
        monkeypatch.setattr(executor._comm, "receive", receive)
        monkeypatch.setattr(executor._comm, "send", lambda *_, **__: None)
        monkeypatch.setattr(executor, "_commit", lambda _: None)
        for _ in range(2):
            device.waits.clear()
            executor.run(
                0, Batches(dataset, JOB.training, iteration=0), votes=lambda: Votes(0, 0, 0, 0)
            )

    own = [limit_s for seconds, limit_s in device.waits if not seconds]
    others = [limit_s for seconds, limit_s in device.waits if seconds]
    assert set(executor.action_s.values()) == {0.0}
    assert len(others) == JOB.num_microbatches
    assert max(own + others) < math.inf  # A device that hangs is found, whatever it does.
    assert min(others) >= 2 * min(own)  # Before those that wait for it.


class BreakingDevice(LateDevice):
    """A device whose epoch ends with an error while it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.comms: list[HostComm] = []

    def finish(self) -> None:
        for comm in self.comms:
            comm._error = PeerLostError(1, "its connection closed")


def test_gradients_that_were_computed_while_a_peer_was_lost_are_refused() -> None:
    """An abort of NCCL lets a receive end as if all were well, and what follows it compute."""
    device, plan = BreakingDevice(), shaped_plan((1,), JOB.num_microbatches)
    dataset = load_dataset(JOB.data, objective="causal", seed=0, cache_directory=Path())
    with executor_on(device, plan, Pulse()) as executor:
        assert isinstance(executor._comm, HostComm)
        device.comms.append(executor._comm)
        with pytest.raises(PeerLostError):
            executor.run(
                0, Batches(dataset, JOB.training, iteration=0), votes=lambda: Votes(0, 0, 0, 0)
            )

        assert {held.gradients_of for held in executor._own_layers()} == {-1}


def break_off(broken: str, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> RankStage:
    """The stage of a rank whose iteration ended when this method of its comm was called."""
    dataset = load_dataset(JOB.data, objective="causal", seed=0, cache_directory=Path())
    batches = Batches(dataset, JOB.training, iteration=0)
    with executor_on(LateDevice(), plan, Pulse()) as executor:
        comm, stage = executor._comm, executor._stage
        assert isinstance(comm, HostComm)

        def fail(*_: object, **__: object) -> None:
            comm._error = PeerLostError(1, "its connection closed")
            comm.check()

        monkeypatch.setattr(comm, broken, fail)
        with suppress(PeerLostError):
            executor.run(0, batches, votes=lambda: Votes(0, 0, 0, 0))
        comm.abort("a member is lost")
    comm.close()
    monkeypatch.undo()
    return stage


@pytest.mark.parametrize(("broken", "pipelines"), [("sum_over", (1, 1)), ("receive", (2,))])
def test_an_iteration_that_was_broken_off_keeps_no_layer(
    broken: str, pipelines: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that move elsewhere would be on the device beside those that come instead."""
    plan = shaped_plan(pipelines, JOB.num_microbatches)
    gc.disable()
    try:
        stage = break_off(broken, plan, monkeypatch)
        dropped = [weakref.ref(held) for held in stage.layers.values()]
        stage.keep_only(())

        assert [each() for each in dropped] == [None] * len(dropped)
    finally:
        gc.enable()
