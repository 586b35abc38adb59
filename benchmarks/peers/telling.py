"""How a worker tells the benchmark what it does: a line per fact, with the machine's clock.

    @ start RANK PID ITERATION WORKERS SECONDS

CLOCK_MONOTONIC is one clock for all processes of a machine, so times of several can be compared.
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
        kind: "start" or "backward", which an iteration has reached; "end" when its optimizer step
            is done; or "notice" when the worker knows that something is wrong.
        workers: how many take part, as far as the worker knows.
    """

    kind: str
    rank: int
    pid: int
    iteration: int
    workers: int
    at_s: float


def tell(kind: str, *, rank: int, iteration: int, workers: int) -> None:
    """Writes one line, which others' lines do not interrupt."""
    line = f"{_MARK}{kind} {rank} {os.getpid()} {iteration} {workers} {time.monotonic():.6f}\n"
    os.write(_EVENTS_FD, line.encode())


def read_event(line: str) -> Event | None:
    """What `tell` wrote, or None if somebody else wrote the line."""
    if not line.startswith(_MARK):
        return None
    kind, rank, pid, iteration, workers, at_s = line.removeprefix(_MARK).split()
    return Event(kind, int(rank), int(pid), int(iteration), int(workers), float(at_s))
