"""A pulse by which tests see how long each action may take."""

import math

from planaria.engine.iteration.lateness import READING_S
from planaria.transport.pulse import Pulse


class NotedPulse(Pulse):
    """A pulse that notes in how many seconds each action was to end, and this one is.

    Attributes:
        limits_s: seconds of each action so far, but not of the reading of samples.
        limit_s: seconds of the action under way, or of the reading.
    """

    def __init__(self) -> None:
        super().__init__()
        self.limits_s: list[float] = []

    def begin_action(self, limit_s: float) -> None:
        self.limits_s += [limit_s] if limit_s != READING_S else []
        self.limit_s = limit_s

    def begin_wait(self) -> None:
        super().begin_wait()
        self.limit_s = math.inf
