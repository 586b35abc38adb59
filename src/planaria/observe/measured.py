"""What the ranks of a job tell of their own work, by epoch: seconds of each kind, and memory."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Final

from planaria.core.messages import IterationDone
from planaria.core.plan import Plan

_NEWEST: Final = 64  # Iterations of an epoch whose median is taken, so that jobs may be long.


@dataclass(slots=True)
class EpochMeasured:
    """Of one epoch.

    Attributes:
        corrections: of its profile: by which factors, and from which iteration on.
    """

    plan: Plan
    corrections: list[tuple[int, tuple[float, ...]]]
    _seconds: dict[tuple[int, str], deque[float]] = field(default_factory=dict)
    _peak_bytes: dict[int, tuple[int, int]] = field(default_factory=dict)

    def add(self, report: IterationDone) -> None:
        """Takes in an iteration of a rank."""
        for kind, seconds in report.action_s.items():
            newest = self._seconds.setdefault((report.rank, kind), deque(maxlen=_NEWEST))
            newest.append(seconds)
        tensor_bytes, peak_bytes = self._peak_bytes.get(report.rank, (0, 0))
        self._peak_bytes[report.rank] = (
            max(tensor_bytes, report.tensor_bytes),
            max(peak_bytes, report.peak_bytes),
        )

    def layer_factors(self, iteration: int) -> tuple[float, ...]:
        """Those that an iteration is predicted by; empty: the profile as it is."""
        return next(factors for first, factors in reversed(self.corrections) if first <= iteration)

    def seconds(self) -> dict[tuple[int, str], float]:
        """By rank and kind of action, those of an iteration: the median of the newest."""
        return {key: median(seconds) for key, seconds in sorted(self._seconds.items())}

    def peak_bytes(self) -> dict[int, tuple[int, int]]:
        """By rank, the most bytes of tensors that it held, and the most memory that it used."""
        return dict(sorted(self._peak_bytes.items()))


class Measured:
    """Of a job, by epoch."""

    def __init__(self) -> None:
        self.epochs: dict[int, EpochMeasured] = {}
        self._layer_factors: tuple[float, ...] = ()
        self._first = -1  # The iteration with which the newest epoch begins.

    def begun(self, epoch: int, plan: Plan) -> None:
        """An epoch begins with its first iteration, whose caches are cold: it does not count."""
        self.epochs[epoch] = EpochMeasured(plan, [(0, self._layer_factors)])
        self._first = -1

    def corrected(self, epoch: int, iteration: int, layer_factors: tuple[float, ...]) -> None:
        """From an iteration of the epoch on the profile is corrected by these."""
        self._layer_factors = layer_factors
        if epoch in self.epochs:
            self.epochs[epoch].corrections.append((iteration, layer_factors))

    def committed(self, iteration: int, reports: Iterable[IterationDone]) -> None:
        """Takes in a committed iteration."""
        for report in reports:
            measured = self.epochs.get(report.epoch)
            if measured is None:
                continue
            if self._first < 0:
                self._first = iteration
            if iteration > self._first:
                measured.add(report)


# -- what copies in memory took, and what a failure would waste with them --------------------------


class Copied:
    """The versions of a run that were complete, and the idle time of the network that they used."""

    def __init__(self) -> None:
        self._committed_s: dict[int, float] = {}  # By age, when all had it.
        self._complete: list[tuple[int, float]] = []  # Age, and when all copies of it were there.
        self._took_s: list[float] = []
        self._used_s: list[float] = []
        self._left_s: list[float] = []

    def committed(self, iteration: int, reports: Iterable[IterationDone], now_s: float) -> None:
        """Takes in a committed iteration."""
        self._committed_s[iteration + 1] = now_s
        reports = list(reports)
        for done in (report.copied for report in reports):
            if done.idle_s > 0.0:
                self._used_s.append(done.idle_used_s)
                self._left_s.append(max(0.0, done.idle_s - done.idle_used_s))
        age = max((report.copied.age for report in reports), default=-1)
        # The version that a job or an epoch begins with is of no iteration that was seen.
        if age in self._committed_s and (not self._complete or age > self._complete[-1][0]):
            self._complete.append((age, now_s))
            self._took_s.append(now_s - self._committed_s[age])

    def table(self, retrieval_s: float) -> dict[str, float]:
        """Keys of the report's table of checkpoints; none where no version was complete.

        The time that a failure wastes is Gemini's equation 1: until a version is complete, half
        of the time from one to the next, and to read it.

        Args:
            retrieval_s: what going back to copies took, 0.0 if nobody had to.
        """
        table = {
            "idle_used_s": fmean(self._used_s) if self._used_s else 0.0,
            "idle_left_s": fmean(self._left_s) if self._left_s else 0.0,
        }
        if len(self._complete) < 2:
            return table
        (first, first_s), (last, last_s) = self._complete[0], self._complete[-1]
        num_periods = len(self._complete) - 1
        checkpoint_s = fmean(self._took_s)
        wasted_s = checkpoint_s + (last_s - first_s) / num_periods / 2.0 + retrieval_s
        return table | {
            "every": (last - first) / num_periods,
            "checkpoint_s": checkpoint_s,
            "retrieval_s": retrieval_s,
            "expected_wasted_s": wasted_s,
        }
