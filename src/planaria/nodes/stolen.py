"""What the host of a virtual machine takes from its processors, and gives to other machines."""

from collections import deque

import psutil


class Stolen:
    """Seconds that were taken, as its owner looks at them again and again.

    Attributes:
        total_s: from the first look on; of all processors the one that lost most between two looks.
    """

    def __init__(self, num_recent: int) -> None:
        self.total_s = 0.0
        self._last = _by_processor()
        self._recent: deque[float] = deque(maxlen=num_recent)

    def look(self) -> None:
        """Adds what was taken since the last look."""
        now = _by_processor()
        taken_s = max((b - a for a, b in zip(self._last, now, strict=False)), default=0.0)
        self._last = now
        self._recent.append(max(0.0, taken_s))
        self.total_s += self._recent[-1]

    @property
    def recent_s(self) -> float:
        """In as many of the newest looks as it was made for."""
        return sum(self._recent)


def _by_processor() -> list[float]:
    return [times.steal for times in psutil.cpu_times(percpu=True)]
