"""The table of devices on which ranks compute: what each type of device has, in one place.

The processor is an entry of its own: its memory is the host's, so nothing is copied. An
accelerator, of any type that torch knows, has its own memory, a stream on which it computes and
others for copies, and pinned buffers on its host. `LATE` is the processor again, for tests:
its memory counts as a device's, and each copy is made at the last moment that its mark permits, so
a wait that is missing shows as wrong bits, every time and not once in a thousand runs.

A process may use a device only after it was forked for the last time, so `find_device` is called
by workers and by the process that prepares a job, and never by a fork server.

Source: torch.accelerator; torch.get_device_module for what it does not cover.
"""

import logging
import os
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from planaria.errors import ConfigError
from planaria.transport.timekeeping import clock_name

logger = logging.getLogger(__name__)

AUTO: Final = "auto"
LATE: Final = "late"
# What a process takes of a device for its context and libraries, and what its allocator loses.
_RESERVED_BYTES: Final = 1 << 30
_RESERVED_SHARE: Final = 0.1

Pairs = Sequence[tuple[Tensor, Tensor]]  # Targets and sources of copies.


class CopyLane(Enum):
    """What copies are made for; those of one lane are made one after the other."""

    LEAVING = "leaving"  # Messages, on their way to the host.
    ARRIVING = "arriving"  # Messages, on their way to the device.
    STATE = "state"  # The state of layers: copies take longer than an action.
    CHUNKS_LEAVING = "chunks leaving"  # Chunks of copies that go to other ranks.
    CHUNKS_ARRIVING = "chunks arriving"  # Chunks of copies that come from other ranks.


class Mark(Protocol):
    """A point in the work of a device: all copies up to it."""

    def wait(self) -> None:
        """Blocks until the device has passed the point."""

    def order(self) -> None:
        """Lets what the device computes from now on begin after the point; does not block."""


class Moment(Protocol):
    """A moment in the time of a device."""

    def wait(self) -> None:
        """Blocks until the device has passed the moment."""

    def seconds_since(self, earlier: Any) -> float:
        """The seconds from an earlier moment to this one; the device must have passed both."""


class Device:
    """The processor: tensors in the host's memory, and no copies.

    Attributes:
        place: the device as torch names it.
        is_host: whether its tensors are the host's memory.
        name: model of the device, for people.
        identity: name of this one device, unlike that of any other on any machine.
        memory_bytes: size of its memory; 0: unknown, or the host's.
        count: number of such devices on this machine.
    """

    def __init__(self) -> None:
        self.place = torch.device("cpu")
        self.is_host = True
        self.name = "cpu"
        self.identity = ""
        self.memory_bytes = 0
        self.count = 1

    def begin(self, *, is_deterministic: bool, pinned_bytes: int) -> None:
        """Must be called before the process computes; chooses which kernels may be used.

        Args:
            pinned_bytes: upper bound on the pinned memory that holds the state of layers; 0: there
                is none.
        """
        # One thread of a processor gives the same bits in both modes, and copies nothing.
        del is_deterministic, pinned_bytes

    def seed(self, seed: int) -> None:
        """Seeds the generators from which layers draw."""
        torch.default_generator.manual_seed(seed)

    def finish(self) -> None:
        """Blocks until all that was computed is there."""

    def moment(self) -> Moment | None:
        """The moment at which all that was computed so far is there; None: that is now."""
        return None

    def host_like(self, tensor: Tensor) -> Tensor:
        """A new tensor of the same shape in the host's memory, to or from which copies are fast."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")

    def state_like(self, tensor: Tensor) -> Tensor:
        """The same as `host_like`, for the state of layers, which may be more than can be pinned.

        Copies to or from memory that is not pinned are slower, and block.
        """
        return self.host_like(tensor)

    def bring(self, tensor: Tensor) -> Tensor:
        """A tensor of the host on the device, for what is computed from now on; does not block."""
        return tensor

    def copy(self, pairs: Pairs, lane: CopyLane) -> Mark:
        """Begins to copy the second of each pair to the first, after what was computed so far."""
        del lane
        for target, source in pairs:
            target.copy_(source)
        return _Passed()

    def mark(self) -> Mark:
        """The point that what the calling thread has computed so far ends at."""
        return _Passed()

    def beside(self, purpose: str) -> AbstractContextManager[object]:
        """A context in which the calling thread computes beside the others.

        Args:
            purpose: name of what is computed; one thread at a time computes for a purpose.
        """
        del purpose
        return nullcontext()

    def adopt(self, tensor: Tensor) -> None:
        """Lets the calling thread compute with a tensor that was made beside it."""

    def reset_peak(self) -> None:
        """Starts a new measurement of the peak of the memory in use."""

    def peak_bytes(self) -> int:
        """Peak of the memory that tensors of this process used since `reset_peak`."""
        return 0


class _Passed:
    """A point that was passed already."""

    def wait(self) -> None:
        """Returns at once."""

    def order(self) -> None:
        """Returns at once."""


class LateDevice(Device):
    """The processor as a device whose copies are made as late as their marks permit."""

    def __init__(self) -> None:
        super().__init__()
        self.is_host = False
        self.name = LATE
        # Copies of each lane that are not made yet, in the order of their marks.
        self._due: dict[CopyLane, list[Pairs]] = {lane: [] for lane in CopyLane}
        self._num_made = dict.fromkeys(CopyLane, 0)
        self._lock = threading.RLock()

    def moment(self) -> Moment:
        """This moment: it computes at once."""
        return _ReadMoment(time.perf_counter())

    def copy(self, pairs: Pairs, lane: CopyLane) -> Mark:
        """Keeps the copies until somebody waits for them."""
        with self._lock:
            self._due[lane].append(list(pairs))
            number = self._num_made[lane] + len(self._due[lane])
        return _LateMark(lambda: self._make(lane, number))

    def _make(self, lane: CopyLane, number: int) -> None:
        with self._lock, torch.no_grad():
            while self._num_made[lane] < number:
                self._num_made[lane] += 1
                for target, source in self._due[lane].pop(0):
                    target.copy_(source)


class _ReadMoment:
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def wait(self) -> None:
        """See `Moment`."""

    def seconds_since(self, earlier: "_ReadMoment") -> float:
        """See `Moment`."""
        return self._seconds - earlier._seconds


class _LateMark:
    def __init__(self, make: Callable[[], None]) -> None:
        self._make = make

    def wait(self) -> None:
        """Makes the copies up to this point."""
        self._make()

    def order(self) -> None:
        """Makes the copies up to this point."""
        self._make()


class Accelerator(Device):
    """One accelerator of this machine.

    Args:
        kind: type of the device in torch, such as "cuda".
        index: number of the device among those of this process.
    """

    def __init__(self, kind: str, index: int) -> None:
        super().__init__()
        self._module: Any = torch.get_device_module(kind)
        self.place = torch.device(kind, index)
        self.is_host = False
        self._module.set_device(index)
        self.name = str(self._module.get_device_name(index))
        properties = self._module.get_device_properties(index)
        self.identity = str(getattr(properties, "uuid", f"{clock_name()} {index}"))
        self.memory_bytes = int(self._module.mem_get_info(index)[1])
        self.count = int(self._module.device_count())
        self._streams: dict[str, Any] = {}
        self._lock = threading.Lock()  # Guards the streams.
        self._thread = threading.local()
        self._pinned = PinnedMemory(0, drop_unused=self._drop_unused)
        self._is_shortage_told = False
        self._is_limit_told = False

    def begin(self, *, is_deterministic: bool, pinned_bytes: int) -> None:
        """Chooses kernels that repeat bit for bit; or leaves the choice as it is."""
        self._pinned = PinnedMemory(pinned_bytes, drop_unused=self._drop_unused)
        if is_deterministic:
            matmul = torch.backends.cuda.matmul
            matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
            torch.use_deterministic_algorithms(True)
            # All memory is written before it is read.
            settings: Any = torch.utils.deterministic
            settings.fill_uninitialized_memory = False
            torch.backends.cudnn.benchmark = False
            matmul.allow_bf16_reduced_precision_reduction = False
            # The other kernels for attention choose how they split their work by what is free.
            torch.backends.cuda.enable_flash_sdp(False)
            torch.backends.cuda.enable_mem_efficient_sdp(False)
            torch.backends.cuda.enable_cudnn_sdp(False)

    def seed(self, seed: int) -> None:
        """Seeds the host's generator and the device's."""
        super().seed(seed)
        self._module.manual_seed(seed)

    def current_stream(self) -> Any:
        """The stream of the calling thread, which uses this device from now on.

        Each thread has a device of its own, the first one of the machine unless it says otherwise.
        Without that, a thread would begin to use the first one, too, and take memory there.
        """
        if not getattr(self._thread, "has_device", False):
            self._module.set_device(self.place.index)
            self._thread.has_device = True
        return self._module.current_stream(self.place)

    def _stream(self, purpose: str) -> Any:
        with self._lock:
            if purpose not in self._streams:
                self._streams[purpose] = self._module.Stream(self.place)
            return self._streams[purpose]

    def finish(self) -> None:
        """Blocks until the stream that computes is empty."""
        self.current_stream().synchronize()

    def moment(self) -> Moment:
        """The moment at which the stream that computes has done what it holds now."""
        stream = self.current_stream()
        event = self._module.Event(enable_timing=True, **self._waiting())
        event.record(stream)
        return _EventMoment(event)

    def host_like(self, tensor: Tensor) -> Tensor:
        """A new pinned tensor; torch keeps the memory of those that are dropped for the next.

        One that is not pinned, and a line, if no more memory can be.
        """
        try:
            return self._pinned_like(tensor)
        except RuntimeError as error:  # The kernel has a limit.
            if not self._is_limit_told:
                self._is_limit_told = True
                logger.warning(
                    "copies hold up training, because no memory can be pinned: %s", error
                )
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")

    def _pinned_like(self, tensor: Tensor) -> Tensor:
        self.current_stream()
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)

    def state_like(self, tensor: Tensor) -> Tensor:
        """A new pinned tensor; one that is not pinned, and a line, if that would be too much."""
        num_bytes, reason = tensor.nbytes, f"{self._pinned.num_bytes} bytes are pinned already"
        if self._pinned.take(num_bytes):
            try:
                buffer = self._pinned_like(tensor)
            except RuntimeError as error:  # The kernel, too, has a limit.
                self._pinned.forget(num_bytes)
                reason = f"no more memory can be pinned: {error}"
            else:
                weakref.finalize(buffer, self._pinned.give_back, num_bytes).atexit = False
                return buffer
        if not self._is_shortage_told:
            self._is_shortage_told = True
            logger.warning(
                "the state of some layers is copied through memory that is not pinned, and training"
                " waits for each copy, because %s (cluster.pinned_memory_bytes)",
                reason,
            )
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")

    def _drop_unused(self) -> None:
        # Older releases of torch have no public name for it.
        drop: Any = getattr(torch.accelerator, "empty_host_cache", None)
        (drop or torch._C._host_emptyCache)()

    def bring(self, tensor: Tensor) -> Tensor:
        """Copies from pinned memory: a copy from any other would wait for the whole stream."""
        return self.host_like(tensor).copy_(tensor).to(self.place, non_blocking=True)

    def copy(self, pairs: Pairs, lane: CopyLane) -> Mark:
        """Copies on the stream of the lane, after what the current stream holds now."""
        before, copies = self.current_stream(), self._stream(lane.value)
        copies.wait_stream(before)
        with torch.no_grad(), self._module.stream(copies):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
                for tensor in (target, source):
                    if tensor.device == self.place:
                        tensor.record_stream(copies)
            return self._mark_on(copies)

    def mark(self) -> Mark:
        """An event on the stream of the calling thread."""
        return self._mark_on(self.current_stream())

    def _mark_on(self, stream: Any) -> Mark:
        event = self._module.Event(**self._waiting())
        event.record(stream)
        return _EventMark(event, self.current_stream)

    def _waiting(self) -> dict[str, bool]:
        """The choice of how to wait for an event."""
        # A wait for one of CUDA would take a whole core; other types know no such choice.
        return {"blocking": True} if self.place.type == "cuda" else {}

    @contextmanager
    def beside(self, purpose: str) -> Iterator[None]:
        """The stream of the purpose, which lasts: torch keeps memory for each stream."""
        self.current_stream()  # Else the thread would leave this device at the end.
        with self._module.stream(self._stream(purpose)):
            yield

    def adopt(self, tensor: Tensor) -> None:
        """Keeps the memory until the stream of the calling thread has used it."""
        tensor.record_stream(self.current_stream())

    def reset_peak(self) -> None:
        self._module.reset_peak_memory_stats(self.place)

    def peak_bytes(self) -> int:
        return int(self._module.max_memory_allocated(self.place))


class _EventMark:
    def __init__(self, event: Any, stream: Callable[[], Any]) -> None:
        self._event = event
        self._stream = stream

    def wait(self) -> None:
        """Blocks until the device has passed the event."""
        self._stream()  # The thread may not have used the device before.
        self._event.synchronize()

    def order(self) -> None:
        """Lets the stream that computes wait for the event."""
        self._stream().wait_event(self._event)


class _EventMoment:
    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self) -> None:
        """See `Moment`; the calling thread has used the device."""
        self._event.synchronize()

    def seconds_since(self, earlier: "_EventMoment") -> float:
        """See `Moment`."""
        return float(earlier._event.elapsed_time(self._event)) / 1e3


class PinnedMemory:
    """Counts the memory that a process pins, and says when it is enough.

    Torch pins blocks whose sizes are powers of two, and keeps a block that nobody uses any more for
    the next one of its size.

    Args:
        limit_bytes: upper bound on all blocks; 0: there is none.
        drop_unused: drops the blocks that nobody uses.

    Attributes:
        num_bytes: size of all blocks.
    """

    def __init__(self, limit_bytes: int, *, drop_unused: Callable[[], None]) -> None:
        self.num_bytes = 0
        self._limit_bytes = limit_bytes
        self._drop_unused = drop_unused
        self._unused: Counter[int] = Counter()  # Number of blocks, by size.
        # Sizes of blocks that are given back; whoever drops a tensor must not wait for a lock.
        self._returned: deque[int] = deque()
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> bool:
        """Whether so many more bytes may be pinned; if so they count until they are given back."""
        size = _block_bytes(num_bytes)
        with self._lock:
            while self._returned:
                self._unused[self._returned.popleft()] += 1
            if self._unused[size]:
                self._unused[size] -= 1
                return True
            if self._is_too_much(size) and self._unused.total():
                self._drop_unused()
                self.num_bytes -= sum(size * count for size, count in self._unused.items())
                self._unused.clear()
            if self._is_too_much(size):
                return False
            self.num_bytes += size
            return True

    def give_back(self, num_bytes: int) -> None:
        """Notes that nobody uses a block any more."""
        self._returned.append(_block_bytes(num_bytes))

    def forget(self, num_bytes: int) -> None:
        """Notes that a block was not pinned after all."""
        with self._lock:
            self.num_bytes -= _block_bytes(num_bytes)

    def _is_too_much(self, num_bytes: int) -> bool:
        return 0 < self._limit_bytes < self.num_bytes + num_bytes


def _block_bytes(num_bytes: int) -> int:
    return 1 << max(0, num_bytes - 1).bit_length()


PROCESSOR: Final = Device()


def find_device(kind: str, *, rank: int) -> Device:
    """The device on which a rank computes.

    Accelerators are dealt out in turn: a rank has the accelerator of its number, modulo how many
    there are. So several ranks share one if there are fewer accelerators than ranks.

    Args:
        rank: number of the rank among those of the machine.
        kind: AUTO (an accelerator if the machine has one, else the processor), LATE, or a type of
            device of torch.

    Raises:
        ConfigError: torch knows no such type, or finds no device of it here.
    """
    if kind == LATE:
        return LateDevice()
    if kind != "cpu":  # Before torch looks for devices, which may read the second one.
        # Read when the first matrices are multiplied; without it cuBLAS refuses to repeat itself.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # Streams that share a queue wait for each other, and one may wait for another rank.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    if kind == AUTO:
        kind = _accelerator_kind() or "cpu"
    if kind == "cpu":
        return Device()
    count = _count(kind)
    if count and getattr(torch.get_device_module(kind), "_is_in_bad_fork", bool)():
        remedy = (
            "the process that workers are forked from has used a device, so they cannot; import "
            "what did so in the functions of the job that need it"
        )
        raise ConfigError("cluster.device", kind, remedy)
    if not count:
        remedy = f"torch {torch.__version__} finds no such device here; the choices are "
        choices = dict.fromkeys([AUTO, "cpu", _accelerator_kind()])
        raise ConfigError("cluster.device", kind, remedy + ", ".join(filter(None, choices)))
    return Accelerator(kind, rank % count)


def device_at(place: torch.device) -> Device:
    """The device at which a tensor of somebody else's program lies.

    The processor stands for types whose copies cannot be made beside other work.
    """
    if place.type != _accelerator_kind():
        return PROCESSOR
    module: Any = torch.get_device_module(place.type)
    return Accelerator(place.type, module.current_device() if place.index is None else place.index)


def usable_bytes(device: Device, *, num_ranks: int) -> int:
    """Bytes that each of a machine's ranks may hold on a device like this; 0: no limit is known.

    Raises:
        ConfigError: the machine's devices have no room for so many ranks.
    """
    if not device.memory_bytes:
        return 0
    share = device.memory_bytes // -(-num_ranks // device.count)
    limit_bytes = int((share - _RESERVED_BYTES) * (1 - _RESERVED_SHARE))
    if limit_bytes <= 0:
        num_fitting = device.memory_bytes // (_RESERVED_BYTES + 2) * device.count
        remedy = (
            f"{num_ranks} ranks (cluster.nodes with standby, or max_nodes, times devices_per_node) "
            f"share the {device.memory_bytes:_} bytes of {device.name}, and each takes "
            f"{_RESERVED_BYTES:_} for itself; {num_fitting} ranks fit on its {device.count} "
            "devices; start fewer on this machine, or say what each may hold with "
            "cluster.device_memory_bytes"
        )
        raise ConfigError("", num_ranks, remedy)
    return limit_bytes


def _accelerator_kind() -> str:
    """The type of accelerator that torch finds here; "": none."""
    if not torch.accelerator.is_available():
        return ""
    accelerator = torch.accelerator.current_accelerator()
    # Apple's has no float64, in which gradients are summed.
    return accelerator.type if accelerator is not None and accelerator.type != "mps" else ""


def _count(kind: str) -> int:
    try:
        module: Any = torch.get_device_module(kind)
    except RuntimeError:
        return 0
    return int(module.device_count()) if module.is_available() else 0
