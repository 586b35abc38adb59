"""Measures a rank's peak memory in an iteration: bytes of tensors, and memory of the process.

The memory of the process is that of its device, as the allocator counts it, or without a device
its resident memory.

Resident memory also includes messages, libraries, and memory that an allocator does not give back.
Odyssey's equation 14 predicts the bytes of tensors, so `TensorPeak` counts tensors, each storage
once: parameters, gradients and optimizer states, what autograd keeps of a microbatch between its
forward and its backward, and what is kept from one action to a later one. It counts after each
forward and backward, and before the gradients that a delayed weight backward leaves in `.grad` are
added to the sums. Tensors that live only within an action are not counted.

Counting takes some microseconds for each tensor that autograd keeps, so only traced jobs count.

Source: torch.autograd.graph.saved_tensors_hooks.
"""

import logging
import resource
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import psutil
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from planaria.engine.devices import Accelerator, Device
from planaria.engine.stage import RankStage


class TensorPeak:
    """Peak of the bytes of tensors that a rank holds, iteration by iteration.

    Attributes:
        peak_bytes: peak of the newest watched iteration; 0 before the first.
    """

    def __init__(self, stage: RankStage) -> None:
        self.peak_bytes = 0
        self._stage = stage
        self._state: dict[int, int] = {}  # Bytes by storage (address), as in `_saved`.
        self._saved: dict[int, int] = {}
        self._num_saved: dict[int, int] = {}  # Number of tensors that autograd keeps, by storage.
        self._saved_bytes = 0

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Watches an iteration, the body of the `with`; it must compute in the calling thread."""
        self.peak_bytes = 0
        self._state = _storages(
            tensor for held in self._stage.layers.values() for tensor in held.tensors()
        )
        with saved_tensors_hooks(self._pack, _unpack):
            yield

    def count_bytes(self, kept: Iterable[Tensor]) -> None:
        """Counts the bytes held now, and raises the peak if they are more.

        Args:
            kept: tensors that the rank itself, not autograd, keeps for later actions.
        """
        gradients = (
            parameter.grad
            for held in self._stage.layers.values()
            for parameter in held.parameters.values()
            if parameter.grad is not None
        )
        others = {**_storages(kept), **_storages(gradients)}
        others_bytes = sum(
            size
            for place, size in others.items()
            if place not in self._saved and place not in self._state
        )
        held_bytes = sum(self._state.values()) + self._saved_bytes + others_bytes
        self.peak_bytes = max(self.peak_bytes, held_bytes)

    def _pack(self, tensor: Tensor) -> "Tensor | _Saved":
        # Saving a node's own output undetached would make the node refer to itself, and a backward
        # in two parts, which retains the graph, would never free it.
        tensor = tensor.detach()
        storage = tensor.untyped_storage()
        place = storage.data_ptr()
        if place in self._state:
            return tensor
        if place not in self._saved:
            self._saved[place] = storage.nbytes()
            self._saved_bytes += storage.nbytes()
        self._num_saved[place] = self._num_saved.get(place, 0) + 1
        return _Saved(tensor, self, place)

    def forget(self, place: int) -> None:
        """Notes that autograd has dropped a tensor with this storage."""
        self._num_saved[place] -= 1
        if not self._num_saved[place]:
            del self._num_saved[place]
            self._saved_bytes -= self._saved.pop(place)


class _Saved:
    """A tensor that autograd keeps; it is deleted together with the graph."""

    __slots__ = ("_peak", "_place", "tensor")

    def __init__(self, tensor: Tensor, peak: TensorPeak, place: int) -> None:
        self.tensor = tensor
        self._peak = peak
        self._place = place

    def __del__(self) -> None:
        self._peak.forget(self._place)


def _unpack(saved: "Tensor | _Saved") -> Tensor:
    return saved.tensor if isinstance(saved, _Saved) else saved


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


# -- peak resident memory of this process (Linux) --------------------------------------------------

logger = logging.getLogger(__name__)

_PROCESS: Final = Path("/proc/self")


class DevicePeak:
    """Peak of the memory of a device that this process uses, since the last `reset`.

    Attributes:
        base_bytes: memory before there are layers.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.base_bytes = 0

    def reset(self) -> None:
        """Starts a new measurement."""
        self._device.reset_peak()

    def num_bytes(self) -> int:
        """Peak since `reset`, in bytes."""
        return self._device.peak_bytes()


class ResidentPeak:
    """Peak of the resident memory since the last `reset`.

    If the kernel does not measure it (gVisor, a read-only /proc), or from the first failure to read
    it on, the peak is the larger of the resident memory at `reset` and at `num_bytes`, which may be
    less than the true peak. That is logged once; a failure to measure never ends an iteration.

    Args:
        process: directory of this process in /proc.

    Attributes:
        base_bytes: resident memory before there are layers.
    """

    def __init__(self, process: Path = _PROCESS) -> None:
        self._process = process
        self._can_reset = True
        self._first_bytes = 0
        self.base_bytes = _resident_bytes()

    def reset(self) -> None:
        """Starts a new measurement."""
        if self._can_reset:
            try:
                (self._process / "clear_refs").write_text("5", encoding="ascii")
                self._kernel_bytes()
                return
            except (OSError, LookupError) as error:
                self._give_up(error)
        self._first_bytes = _resident_bytes()

    def num_bytes(self) -> int:
        """Peak of the resident memory since `reset`, in bytes."""
        if self._can_reset:
            try:
                return self._kernel_bytes()
            except (OSError, LookupError) as error:
                self._give_up(error)
        return max(self._first_bytes, _resident_bytes())

    def _give_up(self, error: Exception) -> None:
        self._can_reset = False
        what = "peaks of memory are taken from the resident memory between iterations"
        logger.warning("%s: the kernel does not measure them: %r", what, error)

    def _kernel_bytes(self) -> int:
        """The peak that the kernel has measured, in bytes.

        Raises:
            LookupError: the kernel measures none.
        """
        for line in (self._process / "status").read_text(errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        raise LookupError("status has no VmHWM")


def _resident_bytes() -> int:
    """Resident bytes now, or, if no file can be opened, the peak since the process started."""
    try:
        return int(psutil.Process().memory_info().rss)
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def memory_peak(device: Device) -> "DevicePeak | ResidentPeak":
    """What measures the peak memory of a rank that computes on this device."""
    return DevicePeak(device) if isinstance(device, Accelerator) else ResidentPeak()
