"""Times until something is over: until a lost node is back, or a slow one is fast again."""

from dataclasses import dataclass
from enum import Enum
from math import inf, log
from random import Random
from typing import Final

# Half of the losses of InfiniteHBD's 400 servers are over in 0.86 days, their mean is 5.55 days.
# The lognormal distribution with these has a 99th percentile of 76 days; the trace's is 81.
LOGNORMAL_SIGMA: Final = (2 * log(5.55 / 0.86)) ** 0.5


class TimeShape(Enum):
    """Distributions of times."""

    FIXED = "fixed"  # Always the mean.
    EXPONENTIAL = "exponential"
    LOGNORMAL = "lognormal"  # Most are short and a few very long, as repairs are.
    NEVER = "never"  # It is never over.


@dataclass(frozen=True, slots=True)
class RepairTime:
    """A distribution of times.

    Attributes:
        mean_s: mean in seconds; without meaning for `TimeShape.NEVER`.
    """

    mean_s: float
    shape: TimeShape = TimeShape.EXPONENTIAL

    def draw_s(self, rng: Random) -> float:
        """Draws a time, in seconds; infinite for `TimeShape.NEVER`."""
        match self.shape:
            case TimeShape.FIXED:
                return self.mean_s
            case TimeShape.EXPONENTIAL:
                return rng.expovariate(1 / self.mean_s) if self.mean_s else 0.0
            case TimeShape.LOGNORMAL:
                median_factor = -(LOGNORMAL_SIGMA**2) / 2
                return self.mean_s * rng.lognormvariate(median_factor, LOGNORMAL_SIGMA)
            case TimeShape.NEVER:
                return inf


NEVER: Final = RepairTime(inf, TimeShape.NEVER)
