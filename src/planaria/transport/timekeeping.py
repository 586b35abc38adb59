"""The clocks of a process and of its threads.

`clock_name` names the monotonic clock that a process reads. Such clocks of two machines tell
nothing about each other, and a machine's begins anew when it boots. A time namespace has a clock of
its own.

A `Timekeeper` is the time of a thread's work in a paced job, which makes up for threads that wake
up late. The seconds of a paced job are sleeps and waits for paced messages: each ends at a known
moment. A machine whose few cores simulate the nodes of a cluster wakes a thread some milliseconds
after that moment. The host's own work between two layers, which a real device hides by working off
a queue, adds to that. So by the time of its work, a thread goes on at the moment at which its wait
was over, and the sleeps that follow are shorter by the machine's lateness. A thread that is late by
more than `late_s_max` was stopped or slowed for another reason; its work goes on at the machine's
time.
"""

import math
import socket
import threading
import time
from pathlib import Path
from typing import Final

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE: Final = Path("/proc/self/ns/time")


def clock_name() -> str:
    """The name of `time.monotonic`; two processes whose clocks have one name read the same one."""
    try:
        boot = _BOOT.read_text().strip()
    except OSError:
        boot = socket.gethostname()
    try:
        return f"{boot} {_NAMESPACE.readlink()}"
    except OSError:  # Linux before 5.6 has no time namespaces.
        return boot


class Timekeeper(threading.local):
    """The time of each thread's work, by the machine's monotonic clock.

    Args:
        late_s_max: greatest lateness that is made up for; 0: the time is the machine's own.
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
        """Notes that this thread's wait was over at that moment."""
        self._reached_s = max(self._reached_s, moment_s)

    def catch_up(self) -> float:
        """Has this thread's work go on at the machine's time, and returns that.

        It is called after a wait whose end is not known.
        """
        self._reached_s = max(self._reached_s, time.monotonic())
        return self._reached_s

    def sleep(self, seconds: float) -> None:
        """Blocks until work of so many seconds is done that begins at `now_s`."""
        self._reached_s = self.now_s() + seconds
        left_s = self._reached_s - time.monotonic()
        if left_s > 0:
            time.sleep(left_s)
