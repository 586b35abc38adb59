"""What time it is for the work of a thread, on a machine that is late.

The seconds of a paced job are sleeps, and waits for messages that take their time: each ends at a
moment that is known. A machine whose few cores are the nodes of a cluster wakes a thread some
milliseconds after that, and the host's own work between two layers, which a device hides by working
off a queue, comes on top. So work begins, by its own time, when what it waited for was over; and
sleeps that follow make up for what the machine was late. What is late by more than `late_s_max` was
stopped or slow for another reason, and begins when it begins.
"""

import math
import threading
import time


class Timekeeper(threading.local):
    """The time of each thread's work, by the machine's monotonic clock.

    Args:
        late_s_max: lateness that is made up for; with 0 it is the machine's own time.
    """

    def __init__(self, late_s_max: float = 0.0) -> None:
        self._late_s_max = late_s_max
        self._reached_s = -math.inf

    def now_s(self) -> float:
        """The time of this thread's work."""
        machine_s = time.monotonic()
        if machine_s - self._reached_s > self._late_s_max:
            self._reached_s = machine_s
        return self._reached_s

    def reach(self, moment_s: float) -> None:
        """What this thread waited for was over at that moment."""
        self._reached_s = max(self._reached_s, moment_s)

    def catch_up(self) -> float:
        """The machine's time, from which this thread's work goes on: nobody knows when what it
        waited for was over."""
        self._reached_s = max(self._reached_s, time.monotonic())
        return self._reached_s

    def sleep(self, seconds: float) -> None:
        """Returns when work that takes so long is done."""
        self._reached_s = self.now_s() + seconds
        left_s = self._reached_s - time.monotonic()
        if left_s > 0:
            time.sleep(left_s)
