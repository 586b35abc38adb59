"""The most bytes of tensors that a rank holds in an iteration, counted where they are kept.

Resident memory has messages in it, libraries, and what an allocator does not give back. What
Odyssey's equation 14 predicts is tensors, so those are counted, each storage once: parameters,
gradients and optimizer states, what autograd keeps of a microbatch between its forward and its
backward, and what waits between two actions. The count is taken after each forward and backward,
and before the gradients that a backward leaves are added to sums. What lives within an action only
is not seen.

It takes some microseconds for each tensor that autograd keeps, so only jobs that are traced count.

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

from planaria.engine.stage import Stage


class TensorPeak:
    """What a rank holds, iteration after iteration.

    Attributes:
        peak_bytes: of the newest iteration that was watched; 0 before.
    """

    def __init__(self, stage: Stage) -> None:
        self.peak_bytes = 0
        self._stage = stage
        self._state: dict[int, int] = {}  # Bytes by storage, as all below.
        self._saved: dict[int, int] = {}
        self._num_saved: dict[int, int] = {}  # How many tensors that autograd keeps share it.
        self._saved_bytes = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """An iteration, whose forwards and backwards run in this thread."""
        self.peak_bytes = 0
        self._state = _storages(
            tensor for held in self._stage.layers.values() for tensor in held.tensors()
        )
        with saved_tensors_hooks(self._pack, _unpacked):
            yield

    def note(self, waiting: Iterable[Tensor]) -> None:
        """Counts what is held now.

        Args:
            waiting: what the rank keeps for later actions, but not for autograd.
        """
        gradients = (
            parameter.grad
            for held in self._stage.layers.values()
            for parameter in held.parameters.values()
            if parameter.grad is not None
        )
        others = {**_storages(waiting), **_storages(gradients)}
        others_bytes = sum(
            size
            for place, size in others.items()
            if place not in self._saved and place not in self._state
        )
        held_bytes = sum(self._state.values()) + self._saved_bytes + others_bytes
        self.peak_bytes = max(self.peak_bytes, held_bytes)

    def _pack(self, tensor: Tensor) -> "Tensor | _Saved":
        # A node that saves its own output would keep itself: a backward in two parts retains it.
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
        """Autograd has let go of a tensor with this storage."""
        self._num_saved[place] -= 1
        if not self._num_saved[place]:
            del self._num_saved[place]
            self._saved_bytes -= self._saved.pop(place)


class _Saved:
    """A tensor that autograd keeps; it is gone when the graph is."""

    __slots__ = ("_peak", "_place", "tensor")

    def __init__(self, tensor: Tensor, peak: TensorPeak, place: int) -> None:
        self.tensor = tensor
        self._peak = peak
        self._place = place

    def __del__(self) -> None:
        self._peak.forget(self._place)


def _unpacked(saved: "Tensor | _Saved") -> Tensor:
    return saved.tensor if isinstance(saved, _Saved) else saved


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


# -- how much memory this process has used at most (Linux) -----------------------------------------

logger = logging.getLogger(__name__)

_PROCESS: Final = Path("/proc/self")


class Peak:
    """The most memory that is resident from one `reset` to the next.

    Where the kernel does not let that be measured (gVisor, a /proc that is read-only), it is what
    is resident at the two moments, which may be less; that is told once. So it is from the first
    time on that it cannot be read: a statistic ends no iteration.

    Args:
        process: what the kernel tells of this process.
    """

    def __init__(self, process: Path = _PROCESS) -> None:
        self._process = process
        self._can_reset = True
        self._first_bytes = 0

    def reset(self) -> None:
        """Starts the measurement anew."""
        if self._can_reset:
            try:
                (self._process / "clear_refs").write_text("5", encoding="ascii")
                self._kernel_bytes()
                return
            except (OSError, LookupError) as error:
                self._give_up(error)
        self._first_bytes = _resident_bytes()

    def num_bytes(self) -> int:
        """The most since `reset`."""
        if self._can_reset:
            try:
                return self._kernel_bytes()
            except (OSError, LookupError) as error:
                self._give_up(error)
        return max(self._first_bytes, _resident_bytes())

    def _give_up(self, error: Exception) -> None:
        self._can_reset = False
        what = "peaks of memory are what is resident between iterations"
        logger.warning("%s: the kernel does not measure them: %r", what, error)

    def _kernel_bytes(self) -> int:
        """What the kernel has measured.

        Raises:
            LookupError: it measures nothing.
        """
        for line in (self._process / "status").read_text(errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        raise LookupError("status has no VmHWM")


def _resident_bytes() -> int:
    """What is resident now, or, where no more files can be opened, was at most."""
    try:
        return int(psutil.Process().memory_info().rss)
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
