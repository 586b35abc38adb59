"""The table of devices, and what each entry promises about copies."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.linked_ranks import TIMEOUT_S, in_threads
from planaria.core.job import ClusterConfig, JobConfig, TrainingConfig
from planaria.engine.devices import (
    AUTO,
    LATE,
    Accelerator,
    CopyLane,
    LateDevice,
    PinnedMemory,
    find_device,
    usable_bytes,
)
from planaria.engine.prepare import device_of
from planaria.errors import ConfigError


def test_a_device_that_is_not_there_is_refused_with_those_that_are() -> None:
    """The message is all that a user sees who forgot a driver."""
    for kind in ("cudda", "xpu"):
        with pytest.raises(ConfigError, match="the choices are auto, cpu") as refused:
            find_device(kind, rank=0)
        assert refused.value.field == "cluster.device"


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_without_an_accelerator_ranks_compute_on_the_processor() -> None:
    """Nothing is copied, and no limit on its memory is known."""
    device = find_device(AUTO, rank=3)

    assert device.is_host
    assert usable_bytes(device, num_ranks=4) == 0


def test_ranks_share_the_memory_of_a_device() -> None:
    """Each gets less than its part, for what no tensor shows."""
    device = find_device(LATE, rank=0)
    device.memory_bytes, device.count = 80 << 30, 2

    for num_ranks, num_sharing in ((1, 1), (2, 1), (3, 2), (6, 3)):
        share = (80 << 30) // num_sharing
        assert 0.8 * share < usable_bytes(device, num_ranks=num_ranks) < share - (1 << 30)


def test_ranks_that_do_not_fit_on_a_device_are_refused() -> None:
    """No bytes would be taken for no limit, and the ranks end without memory while they train."""
    device = find_device(LATE, rank=0)
    device.memory_bytes, device.count = 6 << 30, 2

    assert 0 < usable_bytes(device, num_ranks=10) < 250 << 20
    for num_ranks in (11, 1000):
        with pytest.raises(ConfigError, match="10 ranks fit on its 2 devices") as refused:
            usable_bytes(device, num_ranks=num_ranks)
        assert "cluster.device_memory_bytes" in refused.value.remedy


def test_a_late_copy_is_made_when_it_is_waited_for_and_no_sooner() -> None:
    """A wait makes the copies before it, too, and none after it; each is made once."""
    device = LateDevice()
    targets, sources = torch.zeros(3), torch.ones(3)
    marks = [device.copy([(targets[n], sources[n])], CopyLane.STATE) for n in range(3)]
    assert targets.tolist() == [0, 0, 0]

    marks[1].wait()
    assert targets.tolist() == [1, 1, 0]
    sources.fill_(2.0)
    marks[0].wait()
    assert targets.tolist() == [1, 1, 0]
    marks[2].order()
    assert targets.tolist() == [1, 1, 2]


def test_a_device_that_was_used_before_the_fork_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own error names neither the cause nor what to do."""
    module = SimpleNamespace(
        is_available=lambda: True, device_count=lambda: 1, _is_in_bad_fork=lambda: True
    )
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)

    with pytest.raises(ConfigError, match="forked from has used a device"):
        find_device("cuda", rank=0)


class NewInductor:
    """The keys of torch's compiler that are set here; others are refused."""

    __slots__ = ("compile_threads", "deterministic")


class OldInductor:
    """Those of an older release."""

    __slots__ = ("compile_threads", "dynamic_scale_rblock", "shape_padding")


@pytest.mark.parametrize("is_deterministic", [True, False])
@pytest.mark.parametrize("inductor", [NewInductor, OldInductor])
def test_no_compiled_kernel_of_a_deterministic_job_is_chosen_by_its_speed(
    inductor: type, monkeypatch: pytest.MonkeyPatch, *, is_deterministic: bool
) -> None:
    """On a GPU some are timed first, and their bits differ; a fast job takes the fastest."""
    config, dynamo = inductor(), SimpleNamespace()
    monkeypatch.setitem(sys.modules, "torch._inductor.config", config)
    monkeypatch.setitem(sys.modules, "torch._dynamo.config", dynamo)
    training = TrainingConfig(compile=True, deterministic=is_deterministic)

    device_of(JobConfig(training=training, cluster=ClusterConfig(device="cpu")), rank=0)

    expected = {"deterministic": True}
    if inductor is OldInductor:
        expected = {"dynamic_scale_rblock": False, "shape_padding": False}
    chosen = {name: getattr(config, name, None) for name in expected}
    assert chosen == (expected if is_deterministic else dict.fromkeys(expected))


class FakeModule:
    """Torch's module for a type of device, which each thread must make its current one first.

    Attributes:
        ran: what was given to each stream, in order; "" is the stream that computes.
    """

    def __init__(self) -> None:
        self.ran: dict[str, list[str]] = {}
        self._thread = threading.local()
        self._names = iter("abcdefgh")

    def set_device(self, index: int) -> None:
        self._thread.index = index

    def get_device_name(self, _: int) -> str:
        return "fake"

    def get_device_properties(self, index: int) -> object:
        return SimpleNamespace(uuid=f"fake {index}")

    def mem_get_info(self, _: int) -> tuple[int, int]:
        return 1 << 30, 1 << 30

    def device_count(self) -> int:
        return 2

    def is_available(self) -> bool:
        return True

    def Stream(self, place: torch.device) -> "FakeStream":  # noqa: N802
        self.check(place)
        return FakeStream(self, next(self._names))

    def Event(self, **_: bool) -> "FakeEvent":  # noqa: N802
        return FakeEvent(self)

    def current_stream(self, place: torch.device) -> "FakeStream":
        self.check(place)
        return FakeStream(self, getattr(self._thread, "stream", ""))

    @contextmanager
    def stream(self, stream: "FakeStream") -> Iterator[None]:
        self.check()
        before = getattr(self._thread, "stream", "")
        self._thread.stream = stream.name
        yield
        self._thread.stream = before

    def check(self, place: torch.device | None = None) -> None:
        """A thread that is on another device would begin to use that one, too."""
        assert getattr(self._thread, "index", 0) == 1
        assert place is None or place.index == 1


class FakeStream:
    """A stream of the fake module."""

    def __init__(self, module: FakeModule, name: str) -> None:
        self.name = name
        self._module = module

    def note(self, what: str) -> None:
        self._module.check()
        self._module.ran.setdefault(self.name, []).append(what)

    def wait_stream(self, other: "FakeStream") -> None:
        self.note(f"wait {other.name}")

    def wait_event(self, event: "FakeEvent") -> None:
        self.note(f"wait {event.stream}")

    def synchronize(self) -> None:
        self.note("synchronize")


class FakeEvent:
    """An event of the fake module."""

    def __init__(self, module: FakeModule) -> None:
        self.stream = "?"
        self._module = module

    def record(self, stream: FakeStream) -> None:
        self._module.check()
        self.stream = stream.name

    def synchronize(self) -> None:
        self._module.check()


@pytest.fixture
def second(monkeypatch: pytest.MonkeyPatch) -> tuple[Accelerator, FakeModule]:
    """The second accelerator of a machine; this thread is on the first one again."""
    module = FakeModule()
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    device = Accelerator("cuda", 1)
    return device, module


@pytest.mark.parametrize("is_allowed", [True, False])
def test_fast_mode_leaves_the_choice_of_tf32_to_torch_and_the_user(
    second: tuple[Accelerator, FakeModule], monkeypatch: pytest.MonkeyPatch, *, is_allowed: bool
) -> None:
    """It has 10 bits of mantissa, and was switched on; torch's default for products is off."""
    device, _ = second
    places = SimpleNamespace(allow_tf32=is_allowed), SimpleNamespace(allow_tf32=is_allowed)
    monkeypatch.setattr(torch.backends.cuda, "matmul", places[0])
    monkeypatch.setattr(torch.backends, "cudnn", places[1])

    device.begin(is_deterministic=False, pinned_bytes=0)

    assert [place.allow_tf32 for place in places] == [is_allowed, is_allowed]


@pytest.mark.parametrize(
    "use",
    [
        Accelerator.finish,
        Accelerator.moment,
        Accelerator.mark,
        lambda device: device.copy([(torch.zeros(1), torch.ones(1))], CopyLane.LEAVING),
        lambda device: device.beside("sum").__enter__(),
    ],
)
def test_each_thread_is_on_its_device_before_it_uses_it(
    use: Callable[[Accelerator], object], second: tuple[Accelerator, FakeModule]
) -> None:
    """A thread begins on the first device of the machine: each rank would use memory there, too."""
    device, _ = second
    with in_threads(lambda: use(device)) as (one,):
        one.result(timeout=TIMEOUT_S)


def test_whoever_waits_for_a_mark_is_on_its_device(second: tuple[Accelerator, FakeModule]) -> None:
    """The thread that waits is seldom the one that has begun the copy."""
    device, _ = second
    marks = device.mark(), device.mark()
    for call in (marks[0].wait, marks[1].order):
        with in_threads(call) as (one,):
            one.result(timeout=TIMEOUT_S)


def test_messages_wait_for_no_copy_of_the_state(second: tuple[Accelerator, FakeModule]) -> None:
    """That of 17 GB would hold up the first ones of an iteration for half a second."""
    device, module = second
    pairs = [(torch.zeros(1), torch.ones(1))]
    for lane in (CopyLane.STATE, CopyLane.LEAVING, CopyLane.ARRIVING):
        device.copy(pairs, lane).order()

    assert module.ran == {
        "": ["wait a", "wait b", "wait c"],
        **{name: ["wait "] for name in "abc"},
    }

    late, targets = LateDevice(), torch.zeros(2)
    state = late.copy([(targets[0], torch.ones(()))], CopyLane.STATE)
    late.copy([(targets[1], torch.ones(()))], CopyLane.ARRIVING).wait()
    assert targets.tolist() == [0, 1]
    state.wait()
    assert targets.tolist() == [1, 1]


class PlacedTensor:
    """A tensor of a device, of which no more is known than the streams that keep its memory."""

    def __init__(self, place: torch.device) -> None:
        self.device = place
        self.streams: list[str] = []

    def copy_(self, _: object, *, non_blocking: bool) -> None:
        assert non_blocking

    def record_stream(self, stream: FakeStream) -> None:
        self.streams.append(stream.name)


def _untyped(part: object) -> list[Any]:
    return [part]


def test_memory_is_kept_until_the_streams_that_use_it_have_done_so(
    second: tuple[Accelerator, FakeModule],
) -> None:
    """Torch gives memory that is dropped away at once, to whatever its own stream computes next."""
    device, _ = second
    host, leaving, arriving, adopted = (
        PlacedTensor(place) for place in (torch.device("cpu"), *[device.place] * 3)
    )
    device.copy(_untyped((host, leaving)), CopyLane.LEAVING)
    device.copy(_untyped((arriving, host)), CopyLane.ARRIVING)
    for purpose in (nullcontext(), device.beside("sum")):
        with purpose:
            device.adopt(*_untyped(adopted))

    assert not host.streams
    assert (leaving.streams, arriving.streams, adopted.streams) == (["a"], ["b"], ["", "c"])


def test_what_a_device_is_brought_waits_for_nothing_that_it_computes(
    second: tuple[Accelerator, FakeModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy from memory that is not pinned would wait for all that the stream holds."""
    device, _ = second
    pinned, brought = torch.zeros(3), list[tuple[int, object, object]]()
    monkeypatch.setattr(device, "host_like", lambda _: pinned)

    def note(tensor: torch.Tensor, place: object, *, non_blocking: bool) -> torch.Tensor:
        brought.append((tensor.data_ptr(), place, non_blocking))
        return tensor

    monkeypatch.setattr(torch.Tensor, "to", note)

    assert device.bring(torch.arange(3.0)).tolist() == [0, 1, 2]
    assert brought == [(pinned.data_ptr(), device.place, True)]


def test_no_more_memory_is_pinned_than_the_limit_says() -> None:
    """In blocks as torch pins them; one that is given back is there for another of its size."""
    dropped: list[int] = []
    pinned = PinnedMemory(40, drop_unused=lambda: dropped.append(pinned.num_bytes))
    assert [pinned.take(num_bytes) for num_bytes in (9, 16, 8, 9, 1)] == [
        *(True, True, True),  # 16, 16 and 8 bytes
        *(False, False),
    ]
    pinned.give_back(9)
    assert pinned.take(13)
    assert not dropped
    pinned.give_back(13)
    pinned.give_back(16)
    assert pinned.take(32)  # Of two smaller ones.
    assert dropped == [40]
    assert pinned.num_bytes == 40
    assert not pinned.take(1)

    unlimited = PinnedMemory(0, drop_unused=lambda: None)
    assert all(unlimited.take(1 << 40) for _ in range(100))


def test_state_beyond_the_limit_is_copied_through_memory_that_is_not_pinned(
    second: tuple[Accelerator, FakeModule],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A line says so, once; memory that is dropped is pinned for others."""
    device, _ = second
    monkeypatch.setattr(device, "_pinned_like", lambda tensor: torch.zeros_like(tensor) + 1)
    monkeypatch.setattr(device, "_drop_unused", lambda: None)
    device._pinned = PinnedMemory(64, drop_unused=lambda: None)
    tensor = torch.empty(8)
    kept = [device.state_like(tensor) for _ in range(4)]
    is_pinned = [bool(torch.all(buffer == 1)) for buffer in kept[:2]]
    assert is_pinned == [True, True]
    (record,) = caplog.records
    assert "64 bytes are pinned already (cluster.pinned_memory_bytes)" in record.message
    del kept[0]
    assert torch.all(device.state_like(tensor) == 1)


def test_state_is_copied_though_the_kernel_pins_no_memory(
    second: tuple[Accelerator, FakeModule],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The job would end for what only makes it slower."""
    device, _ = second

    def refuse(_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("CUDA error: OS call failed or operation not supported on this OS")

    monkeypatch.setattr(device, "_pinned_like", refuse)

    with torch.device("meta"):  # A script may have a default of its own.
        buffers = [device.state_like(torch.empty(8)), device.host_like(torch.empty(8))]
    assert [(buffer.shape, buffer.device.type) for buffer in buffers] == [((8,), "cpu")] * 2
    assert [device.host_like(torch.empty(size)).shape for size in (5, 6)] == [(5,), (6,)]
    told, messages = [record.message for record in caplog.records]
    assert "no more memory can be pinned: CUDA error: OS call failed" in told
    assert "no memory can be pinned: CUDA error: OS call failed" in messages
    assert device._pinned.num_bytes == 0
