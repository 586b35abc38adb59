"""Where the seconds of a job went: each instant of wall time has one category.

Source: DESIGN 1.7 and 7 ("ledger"). The same ledger serves a real run and the simulator: it is
told the time, it does not look.
"""

from dataclasses import dataclass, field, replace
from enum import StrEnum


class Category(StrEnum):
    """What a second was spent on, for the job as a whole."""

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
        return parts | {"wall": self.now_s - self.start_s}
