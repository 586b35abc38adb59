"""Lets a worker tell the benchmark what it does: one line per fact, with the machine's clock.

    @ start RANK PID ITERATION WORKERS SECONDS

CLOCK_MONOTONIC is the same for all processes of a machine, so their times can be compared.
"""

import os
import time
from dataclasses import dataclass

_EVENTS_FD = 1
_MARK = "@ "  # gloo writes to standard output, too.


@dataclass(frozen=True, slots=True)
class Event:
    """A fact of one worker.

    Attributes:
        kind: "start" or "backward": the iteration has reached it; "end": its optimizer step is
            done; "notice": the worker knows that something is wrong.
        workers: number of workers that take part, as far as this worker knows.
        at_s: time of the fact on CLOCK_MONOTONIC, in seconds.
    """

    kind: str
    rank: int
    pid: int
    iteration: int
    workers: int
    at_s: float


def tell(kind: str, *, rank: int, iteration: int, workers: int) -> None:
    """Writes one line in a single call, so that lines of other processes do not interrupt it."""
    line = f"{_MARK}{kind} {rank} {os.getpid()} {iteration} {workers} {time.monotonic():.6f}\n"
    os.write(_EVENTS_FD, line.encode())


def read_event(line: str) -> Event | None:
    """The event in a line that `tell` wrote; None: something else wrote the line."""
    if not line.startswith(_MARK):
        return None
    kind, rank, pid, iteration, workers, at_s = line.removeprefix(_MARK).split()
    return Event(kind, int(rank), int(pid), int(iteration), int(workers), float(at_s))
