"""When an action of a rank is late, so that its worker is replaced.

It is late when it takes ten times as long as the longest of its kind, and longer than a lease. The
first of each kind in an epoch has no limit. The longest is that of all epochs of the process: after
a loss rows may be short at first, and as long as ever later.

Some inputs take longer than all before, though nothing hangs. One may be larger than any before, as
where rows have unequal lengths; then it takes longer in proportion. And what `training.compile` has
compiled for other shapes is compiled again for a new one, which takes seconds to minutes. An action
with such an input has ten minutes, or more: a worker that hangs in it is found later, but found.
"""

import math
from typing import Final, NamedTuple

from torch import Tensor

from planaria.core.job import JobConfig
from planaria.transport.pulse import Pulse

_LATE_FACTOR: Final = 10.0
_NEW_S: Final = 60.0  # Time that an action with a new input may take, before the factor.
READING_S: Final = 900.0  # Time in which samples are read.


class Workload(NamedTuple):
    """What the time of an action depends on.

    Attributes:
        kind: text of its kind.
        layers: first and end of its layers; both 0 if it computes none.
        shape: shape of the input of its first layer; empty if it is not known.
    """

    kind: str
    layers: tuple[int, int] = (0, 0)
    shape: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Number of elements of the input."""
        return math.prod(self.shape)


_DEVICE, _ITERATION = Workload("device"), Workload("iteration")


class ActionTimes:
    """How long the actions of a process have taken, in all its epochs."""

    def __init__(self, job: JobConfig) -> None:
        self._lease_s = job.cluster.lease_s
        self._compiles = job.training.compile
        self._longest_s: dict[str, float] = {}
        self._largest: dict[tuple[str, tuple[int, int]], Workload] = {}  # By kind and layers.
        self._compiled: set[Workload] = set()

    def is_new(self, workload: Workload) -> bool:
        """Whether its input may take longer than all that these layers have had."""
        kind, layers, shape = workload
        if not shape:
            return False
        if self._compiles:
            return workload not in self._compiled
        largest = self._largest.get((kind, layers))
        if largest is None:
            return True
        return shape != largest.shape and workload.size > largest.size

    def longest_s(self, workload: Workload, *, is_new: bool) -> float:
        """The time that an action may take if nothing hangs, in seconds; infinite: not known."""
        if not is_new:
            return self._longest_s.get(workload.kind, math.inf)
        largest = self._largest.get((workload.kind, workload.layers), workload)
        growth = max(1.0, workload.size / max(1, largest.size))
        return max(_NEW_S, growth * self._longest_s.get(workload.kind, 0.0))

    def limit_s(self, longest_s: float) -> float:
        """Seconds after which something is late that may take `longest_s`."""
        return max(self._lease_s, _LATE_FACTOR * longest_s)

    def note(self, workload: Workload, seconds: float) -> None:
        """Notes how long an action has taken."""
        kind, layers, shape = workload
        if seconds > self._longest_s.get(kind, -1.0):
            self._longest_s[kind] = seconds
        if not shape:
            return
        largest = self._largest.get((kind, layers))
        if largest is None or (shape != largest.shape and workload.size > largest.size):
            self._largest[kind, layers] = workload
        if self._compiles:
            self._compiled.add(workload)


class EpochLimits:
    """Tells the pulse by when each action of an epoch should end."""

    def __init__(self, times: ActionTimes, pulse: Pulse) -> None:
        self._times = times
        self._pulse = pulse
        self._kinds: set[str] = set()
        self._has_iterated = False
        self._new_s = 0.0  # Time that the actions of this iteration with new inputs may take.

    def begin_iteration(self) -> None:
        """Notes that the device has not been given anything yet."""
        self._new_s = 0.0

    def begin_reading(self) -> None:
        """Notes that samples are read; without a limit for the first ones of an epoch.

        A store that all ranks read may stand still for minutes, and nothing would be won if all
        that wait for it were replaced. One that hangs for one node alone must not hold up the job.
        """
        self._pulse.begin_action(READING_S if self._kinds else math.inf)

    def begin(self, workload: Workload, *, is_queued: bool = False) -> None:
        """Notes that an action begins.

        Args:
            is_queued: whether a device has been given others before. It takes some ahead; the next
                one, whatever it does itself, then lasts until one of those is computed.
        """
        self._workload, self._is_queued = workload, is_queued
        self._pulse.layers = workload.layers
        self._set_limit()

    def see_input(self, tensor: Tensor) -> None:
        """Gives the action more time, if its input turns out to be new."""
        kind, layers, _ = self._workload
        self._workload = Workload(kind, layers, tuple(tensor.shape))
        if self._times.is_new(self._workload):
            self._set_limit()

    def _set_limit(self) -> None:
        is_new = self._times.is_new(self._workload)
        longest_s = self._times.longest_s(self._workload, is_new=is_new)
        if is_new:
            self._new_s += longest_s
        if self._is_queued:
            longest_s = max(longest_s, self._new_s, self._longest_in_epoch_s(_DEVICE))
        is_first = self._workload.kind not in self._kinds
        self._pulse.begin_action(math.inf if is_first else self._times.limit_s(longest_s))

    def note(self, seconds: float) -> None:
        """Notes how long the action has taken."""
        self._times.note(self._workload, seconds)
        self._kinds.add(self._workload.kind)

    def begin_device(self, *, waits: bool) -> None:
        """Notes that the host waits for its device; without a limit in an epoch's first iteration.

        Args:
            waits: whether it may wait for devices of other ranks, since their hosts have announced
                what they will send. The one that hangs is late first, so that it alone is replaced.
        """
        longest_s = max(self._new_s, self._longest_in_epoch_s(_ITERATION))
        self._pulse.begin_action((2 if waits else 1) * self._times.limit_s(longest_s))

    def note_device(self, seconds: float) -> None:
        """Notes how long the device has taken for the longest action that it was given."""
        self._times.note(_DEVICE, seconds)

    def note_iteration(self, seconds: float) -> None:
        """Notes how long the computation of an iteration has taken."""
        self._times.note(_ITERATION, seconds)
        self._has_iterated = True

    def _longest_in_epoch_s(self, workload: Workload) -> float:
        if not self._has_iterated:
            return math.inf
        return self._times.longest_s(workload, is_new=False)
