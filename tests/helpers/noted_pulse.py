"""A pulse by which tests see how long each action may take."""

import math

from planaria.transport.pulse import Pulse


class NotedPulse(Pulse):
    """A pulse that notes in how many seconds each action was to end, and this one is."""

    def __init__(self) -> None:
        super().__init__()
        self.limits_s: list[float] = []

    def begin_action(self, limit_s: float) -> None:
        self.limits_s.append(limit_s)
        self.limit_s = limit_s

    def begin_wait(self) -> None:
        super().begin_wait()
        self.limit_s = math.inf
