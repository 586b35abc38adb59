"""Where the seconds of a job went: each instant of wall time has one category.

The job as a whole does one thing at a time, so an instant has one category whatever single nodes
do. The seconds of an iteration that counts are divided by how much of the work was of which kind:
where one of four members has no layer, a quarter of them is idle.

Source: DESIGN 1.7 and 7 ("ledger"). The same ledger serves a real run and the simulator: it is
told the time, it does not look.
"""

from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import isclose


class Category(StrEnum):
    """What a second was spent on, for the job as a whole.

    Attributes:
        USEFUL: iterations that count, bubbles included; and what was computed of the one in which
            a job ended early.
        REDUNDANT: of the seconds of such iterations, the share of eager forwards in what all ranks
            computed.
        REDO: iterations that all went back before, and the part of an iteration that was lost with
            a node: both are computed again.
        DETECT: from a loss until every member has left the old epoch.
        DECIDE: until the next plan is on record and told.
        REGROUP: until the links of the next epoch are up, and the pauses of switches.
        TRANSFER: until every layer is where it belongs.
        RESTART: all wait for a worker that is forked anew, or for the next coordinator. A job that
            trains without a coordinator does not wait for it.
        CHECKPOINT_STALL: training waits for saves or copies, the last save included.
        STARTUP: until training begins.
        IDLE: all wait for a machine, as too few nodes are left; and of the seconds of iterations
            that count, the share of members without a layer.
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
    STARTUP = "startup"
    IDLE = "idle"


@dataclass(frozen=True, slots=True)
class Ledger:
    """Seconds by category; their sum is the wall time since `start_s`."""

    start_s: float
    now_s: float
    category: Category = Category.STARTUP
    seconds: dict[Category, float] = field(default_factory=dict)

    def enter(self, category: Category, now_s: float) -> "Ledger":
        """The ledger once the job does something else from now on."""
        assert now_s >= self.now_s, (now_s, self.now_s)
        spent = self.seconds | {
            self.category: self.seconds.get(self.category, 0.0) + now_s - self.now_s
        }
        return replace(self, now_s=now_s, category=category, seconds=spent)

    def moved(self, seconds: float, source: Category, target: Category) -> "Ledger":
        """The ledger with seconds that belong to another category, at most what source has."""
        assert seconds >= 0.0, seconds
        assert source is not target
        available = self.seconds.get(source, 0.0)
        taken = min(seconds, available)
        changed = {
            source: available - taken,
            target: self.seconds.get(target, 0.0) + taken,
        }
        return replace(self, seconds=self.seconds | changed)

    def parts(self) -> dict[str, float]:
        """All categories and their sum as `wall`, in seconds, as the report has them."""
        parts = {str(category): self.seconds.get(category, 0.0) for category in Category}
        wall_s = self.now_s - self.start_s
        assert isclose(sum(parts.values()), wall_s, rel_tol=1e-6, abs_tol=1e-6), (parts, wall_s)
        return parts | {"wall": wall_s}
