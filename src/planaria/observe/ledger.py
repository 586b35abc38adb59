"""The ledger of a job: it assigns each instant of wall time to one category.

The job as a whole does one thing at a time, so an instant has one category, whatever single nodes
do. The seconds of a committed iteration are then divided in proportion to the kinds of work: if
one of four members has no layer, a quarter of the seconds is idle.

A real run and the simulator share this ledger, so its callers pass the time; it reads no clock.
"""

from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import isclose

from planaria.observe.recoveries import Recoveries, SourceTier


class Category(StrEnum):
    """What the job as a whole spent a second on.

    Attributes:
        USEFUL: iterations that stay committed, bubbles included; and the computed part of the
            iteration in which a job ended early.
        REDUNDANT: the seconds of such iterations times the share of eager forwards in all
            computation.
        REDO: iterations that were undone when the job went back, and the part of an iteration that
            was lost with a node: both are computed again.
        DETECT: the time from a loss until every member has left the old epoch.
        DECIDE: the time from then until the next plan is recorded and sent.
        REGROUP: the time from then until every rank can go on, without TRANSFER, and the pauses for
            switches of the plan.
        TRANSFER: the time in which layers move, once the links of the next epoch are up.
        RESTART: the time in which all wait for a worker that is forked again, or for the next
            coordinator. A job that trains without a coordinator does not wait for it.
        CHECKPOINT_STALL: the time in which training waits for saves or copies, the last save
            included.
        EVALUATION: the time of evaluations on held-out data.
        STARTUP: the time before training begins.
        IDLE: the time in which all wait for a node, because too few are left; and the seconds of
            committed iterations times the share of members without a layer.
    """

    USEFUL = "useful"
    REDUNDANT = "redundant"
    REDO = "redo"
    DETECT = "detect"
    DECIDE = "decide"
    REGROUP = "regroup"
    TRANSFER = "transfer"
    RESTART = "restart"
    CHECKPOINT_STALL = "checkpoint_stall"
    EVALUATION = "evaluation"
    STARTUP = "startup"
    IDLE = "idle"


@dataclass(frozen=True, slots=True)
class Ledger:
    """Seconds by category, whose sum is the wall time since `start_s`, and the recoveries to which
    seconds of REDO and TRANSFER belong."""

    start_s: float
    now_s: float
    category: Category = Category.STARTUP
    seconds: dict[Category, float] = field(default_factory=dict)
    recoveries: Recoveries = field(default_factory=Recoveries)

    def enter(self, category: Category, now_s: float) -> "Ledger":
        """The ledger with the time until now booked, and with a new category from now on."""
        assert now_s >= self.now_s, (now_s, self.now_s)
        seconds = self.seconds.get(self.category, 0.0) + now_s - self.now_s
        spent = self.seconds | {self.category: seconds}
        return Ledger(self.start_s, now_s, category, spent, self.recoveries)

    def spend(self, category: Category, until_s: float) -> "Ledger":
        """The ledger with the time from its own until `until_s` booked in a category."""
        assert until_s >= self.now_s, (until_s, self.now_s)
        seconds = self.seconds.get(category, 0.0) + until_s - self.now_s
        spent = self.seconds | {category: seconds}
        return Ledger(self.start_s, until_s, category, spent, self.recoveries)

    def move(self, seconds: float, source: Category, target: Category) -> "Ledger":
        """The ledger with seconds moved from source to target, at most as many as source has."""
        assert seconds >= 0.0, seconds
        assert source is not target
        available = self.seconds.get(source, 0.0)
        moved_s = min(seconds, available)
        changed = {
            source: available - moved_s,
            target: self.seconds.get(target, 0.0) + moved_s,
        }
        return replace(self, seconds=self.seconds | changed)

    def recover(self, tier: SourceTier) -> "Ledger":
        """The ledger with a recovery in progress, from a state that this tier keeps."""
        return self._with_recoveries(self.recoveries.recover(tier))

    def close_recovery(self) -> "Ledger":
        """The ledger once training has gone on, or is over: what was redone and waited for since
        the last recovery is that of this one."""
        return self._with_recoveries(self._closed_recoveries())

    def _with_recoveries(self, recoveries: Recoveries) -> "Ledger":
        if recoveries is self.recoveries:
            return self
        return Ledger(self.start_s, self.now_s, self.category, self.seconds, recoveries)

    def _closed_recoveries(self) -> Recoveries:
        redo_s = self.seconds.get(Category.REDO, 0.0)
        return self.recoveries.close(redo_s, self.seconds.get(Category.TRANSFER, 0.0))

    def wasted_parts(self) -> dict[str, dict[str, float]]:
        """The table `wasted` of the report, with a recovery in progress; see `Recoveries.parts`."""
        return self._closed_recoveries().parts()

    def parts(self) -> dict[str, float]:
        """The ledger table of the report: seconds by category, and their sum as `wall`."""
        parts = {str(category): self.seconds.get(category, 0.0) for category in Category}
        wall_s = self.now_s - self.start_s
        assert isclose(sum(parts.values()), wall_s, rel_tol=1e-6, abs_tol=1e-6), (parts, wall_s)
        return parts | {"wall": wall_s}
