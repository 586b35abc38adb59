"""What copies in memory took, and what a failure would waste with them."""

from collections.abc import Iterable
from statistics import fmean

from planaria.core.messages import IterationDone


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
