"""The plans of a run, and what ranks report of their work: times, memory, and copies.

A run may last for months, so what is kept of an epoch that is over takes little memory.
"""

import zlib
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Final

import msgspec

from planaria.core.messages import IterationDone
from planaria.core.plan import Plan

_NEWEST: Final = 64  # A median is over the newest 64 iterations, so that memory stays bounded.
_FIGURES_MAX: Final = 1 << 18  # Medians, peaks and hops that are kept of epochs that are over.
_PLANS_MAX: Final = 4  # Plans that are kept as they are; older ones are deflated.
_AGES_MAX: Final = 4096  # A version that takes more iterations to be complete is not counted.


@dataclass(slots=True)
class EpochMeasurements:
    """Measurements of one epoch.

    Attributes:
        corrections: corrections of the profile, oldest first: the first iteration to which each
            applies, and its factors by layer.
    """

    plan: Plan
    corrections: list[tuple[int, tuple[float, ...]]]
    _seconds: dict[tuple[int, str], deque[float]] = field(default_factory=dict)
    _medians: dict[tuple[int, str], float] = field(default_factory=dict)
    _peak_bytes: dict[int, tuple[int, int]] = field(default_factory=dict)

    def add(self, report: IterationDone) -> None:
        """Adds what a rank measured in one iteration."""
        for kind, seconds in report.action_s.items():
            newest = self._seconds.setdefault((report.rank, kind), deque(maxlen=_NEWEST))
            newest.append(seconds)
        tensor_bytes, peak_bytes = self._peak_bytes.get(report.rank, (0, 0))
        self._peak_bytes[report.rank] = (
            max(tensor_bytes, report.tensor_bytes),
            max(peak_bytes, report.peak_bytes),
        )

    def layer_factors(self, iteration: int) -> tuple[float, ...]:
        """Factors by layer that correct the profile for an iteration; empty: no correction."""
        return next(factors for first, factors in reversed(self.corrections) if first <= iteration)

    def seconds(self) -> dict[tuple[int, str], float]:
        """Seconds per iteration by (rank, kind of action): medians of the newest iterations."""
        medians = {key: median(seconds) for key, seconds in self._seconds.items()}
        return dict(sorted((medians | self._medians).items()))

    def condense(self) -> None:
        """Keeps only the medians of an epoch that is over; what is reported late counts only where
        there is none."""
        self._medians = self.seconds()
        self._seconds.clear()

    @property
    def num_figures(self) -> int:
        """The number of medians and peaks of an epoch that is over, and of hops in its plan."""
        num_hops = sum(map(len, self.plan.routes))
        return len(self._medians) + len(self._peak_bytes) + num_hops

    def peak_bytes(self) -> dict[int, tuple[int, int]]:
        """Peak bytes by rank: (bytes of tensors, bytes of memory)."""
        return dict(sorted(self._peak_bytes.items()))


class Measurements:
    """Measurements of a job, by epoch.

    Args:
        figures_max: number of medians and peaks of epochs that are over, of all ranks, and of hops
            in their plans. Beyond it the oldest epochs are forgotten: a hundred ranks have hundreds
            of epochs before that, 8,000 have half a dozen, of which a report predicts each in
            seconds.
    """

    def __init__(self, figures_max: int = _FIGURES_MAX) -> None:
        self.epochs: dict[int, EpochMeasurements] = {}
        self._figures_max = figures_max
        self._layer_factors: tuple[float, ...] = ()
        self._first = -1  # The iteration with which the newest epoch begins.

    def begin_epoch(self, epoch: int, plan: Plan) -> None:
        """Begins an epoch, unless a restarted coordinator tells of it again. Its first iteration
        runs with cold caches and is not counted."""
        if epoch in self.epochs:
            return
        if self.epochs:
            self.epochs[max(self.epochs)].condense()
        num_figures = sum(measured.num_figures for measured in self.epochs.values())
        for oldest in sorted(self.epochs)[:-1]:
            if num_figures <= self._figures_max:
                break
            num_figures -= self.epochs.pop(oldest).num_figures
        self.epochs[epoch] = EpochMeasurements(plan, [(0, self._layer_factors)])
        self._first = -1

    def add_correction(self, epoch: int, iteration: int, layer_factors: tuple[float, ...]) -> None:
        """Records the factors that correct the profile from an iteration of the epoch on."""
        self._layer_factors = layer_factors
        if epoch in self.epochs:
            self.epochs[epoch].corrections.append((iteration, layer_factors))

    def add_iteration(self, iteration: int, reports: Iterable[IterationDone]) -> None:
        """Adds what the ranks measured in a committed iteration."""
        for report in reports:
            measured = self.epochs.get(report.epoch)
            if measured is None:
                continue
            if self._first < 0:
                self._first = iteration
            if iteration > self._first:
                measured.add(report)


class KeptPlans:
    """The plans of a run, by epoch: the newest as they are, older ones deflated.

    Those of an iteration with thousands of microbatches take megabytes each, of which most is
    alike.
    """

    def __init__(self) -> None:
        self._newest: dict[int, Plan] = {}
        self._older: dict[int, bytes] = {}

    def share(self, plan: Plan) -> Plan:
        """Keeps a plan; returns the equal one that is kept, if several messages tell it."""
        kept = self._newest.pop(plan.epoch, None)
        self._newest[plan.epoch] = plan if kept != plan else kept
        while len(self._newest) > _PLANS_MAX:
            epoch = next(iter(self._newest))
            encoded = msgspec.json.encode(self._newest.pop(epoch))
            self._older[epoch] = zlib.compress(encoded, level=1)
        return self._newest[plan.epoch]

    def json_by_epoch(self) -> dict[int, bytes]:
        """All plans as JSON, by epoch, ascending."""
        older = {epoch: zlib.decompress(deflated) for epoch, deflated in self._older.items()}
        newest = {epoch: msgspec.json.encode(plan) for epoch, plan in self._newest.items()}
        return dict(sorted((older | newest).items()))


# -- the cost of copies in memory, and the time that a failure wastes ------------------------------


@dataclass(slots=True)
class _Mean:
    """The mean of numbers that are not kept."""

    count: int = 0
    total: float = 0.0

    def add(self, number: float) -> None:
        self.count += 1
        self.total += number

    @property
    def value(self) -> float:
        return self.total / self.count if self.count else 0.0


class CopyMeasurements:
    """Measurements of copies in memory: complete versions, and the idle network time they used.

    They take as much memory for a long job as for a short one.
    """

    def __init__(self) -> None:
        self._committed_s: dict[int, float] = {}  # Commit time, by age, of what is not complete.
        self._newest_age = -1  # Age of the newest complete version.
        # (age, when all its copies were stored) of the newest version since the newest recovery.
        self._before: tuple[int, float] | None = None
        self._took_s, self._used_s, self._left_s = _Mean(), _Mean(), _Mean()
        self._period_s, self._period_iterations = _Mean(), _Mean()

    def add_iteration(self, iteration: int, reports: Iterable[IterationDone], now_s: float) -> None:
        """Adds what the ranks report about copies with a committed iteration."""
        self._committed_s[iteration + 1] = now_s
        if len(self._committed_s) > _AGES_MAX:
            del self._committed_s[next(iter(self._committed_s))]
        reports = list(reports)
        for done in (report.copied for report in reports):
            if done.idle_s > 0.0:
                self._used_s.add(done.idle_used_s)
                self._left_s.add(max(0.0, done.idle_s - done.idle_used_s))
        age = max((report.copied.age for report in reports), default=-1)
        # The version with which a job or an epoch begins belongs to no iteration seen here.
        if age in self._committed_s and age > self._newest_age:
            if self._before is not None:
                age_before, complete_s = self._before
                self._period_iterations.add(age - age_before)
                self._period_s.add(now_s - complete_s)
            self._newest_age, self._before = age, (age, now_s)
            self._took_s.add(now_s - self._committed_s[age])
            self._committed_s = {n: at_s for n, at_s in self._committed_s.items() if n > age}

    def on_recovered(self) -> None:
        """Leaves out versions from before the recovery: what they took, and the period to the next
        version, contain its downtime."""
        self._committed_s.clear()
        self._before = None

    def table(self, retrieval_s: float) -> dict[str, float]:
        """The report's table of copies, "memory" in `checkpoints`.

        The time that a failure wastes is Gemini's equation 1: the time until a version is
        complete, plus half of the period between versions, plus the time to read a version. It
        is left out, as are its parts, if no two versions were complete without a recovery between
        them.

        Args:
            retrieval_s: time that going back to copies took, 0.0 if it never happened.
        """
        table = {
            "idle_used_s": self._used_s.value,
            "idle_left_s": self._left_s.value,
        }
        if not self._period_s.count:
            return table
        checkpoint_s = self._took_s.value
        return table | {
            "every": self._period_iterations.value,
            "checkpoint_s": checkpoint_s,
            "retrieval_s": retrieval_s,
            "expected_wasted_s": checkpoint_s + self._period_s.value / 2.0 + retrieval_s,
        }
