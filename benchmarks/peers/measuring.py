"""Kills one worker of torchft or torchrun, and measures the recovery from what survivors tell."""

import math
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from peers.telling import Event
from peers.watching import Watched

NUM_WORKERS = 6
KILLED_ITERATION = 15
CHECKPOINT_EVERY = 10
START_TIMEOUT_S = 120.0
RECOVER_TIMEOUT_S = 120.0
_MORE_ITERATIONS = 3  # Iterations after the recovery that show who works.


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """Times of one recovery, in seconds since just before the SIGKILL; see recovery.py."""

    detect_s: float
    downtime_s: float
    regained_s: float
    iteration_s: float
    redone_iterations: float
    num_idle: int

    @property
    def is_over(self) -> bool:
        """Whether the job recovered."""
        return math.isfinite(self.downtime_s)

    @property
    def lost_s(self) -> float:
        """Seconds that the failure cost."""
        return max(0.0, self.regained_s - self.iteration_s)


NEVER = Recovery(
    detect_s=math.nan,
    downtime_s=math.inf,
    regained_s=math.inf,
    iteration_s=0.0,
    redone_iterations=math.nan,
    num_idle=NUM_WORKERS - 1,
)


def torchft_recovery(
    victim: int, environment: Mapping[str, str], *, step: str, join_timeout_ms: int
) -> Recovery:
    """Recovery of torchft: NUM_WORKERS replicas, with their lighthouse in this process."""
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind="[::]:0",
        min_replicas=1,
        join_timeout_ms=join_timeout_ms,
        quorum_tick_ms=100,
        heartbeat_timeout_ms=5000,
    )
    try:
        with Watched("torchft", environment) as watched:
            for replica in range(NUM_WORKERS):
                watched.start(
                    ["peers.torchft_worker"],
                    TORCHFT_LIGHTHOUSE=lighthouse.address(),
                    REPLICA=str(replica),
                    REPLICAS=str(NUM_WORKERS),
                )
            survivors = set(range(NUM_WORKERS)) - {victim}
            return _recovery(watched, victim=victim, step=step, afterwards=survivors)
    finally:
        lighthouse.shutdown()


def torchrun_recovery(victim: int, environment: Mapping[str, str], *, step: str) -> Recovery:
    """Recovery of torchrun: NUM_WORKERS ranks, all of which torchrun restarts."""
    with tempfile.TemporaryDirectory() as directory, Watched("torchrun", environment) as watched:
        arguments = [
            *("peers.torchrun_agent", "--standalone", "--nnodes=1", "--max-restarts=3"),
            *(f"--nproc-per-node={NUM_WORKERS}", "-m", "peers.tied", "peers.torchrun_worker"),
        ]
        watched.start(
            arguments,
            CHECKPOINT=str(Path(directory) / "checkpoint.pt"),
            CHECKPOINT_EVERY=str(CHECKPOINT_EVERY),
        )
        return _recovery(watched, victim=victim, step=step, afterwards=range(NUM_WORKERS))


def _recovery(watched: Watched, *, victim: int, step: str, afterwards: Collection[int]) -> Recovery:
    """Kills the victim at a step of an iteration, and measures the recovery.

    Args:
        afterwards: ranks that are to train after the kill.
    """
    events = watched.events
    watched.wait("all in one job", lambda: _are_together(events), timeout_s=START_TIMEOUT_S)
    newest = max(event.iteration for event in events)
    killed = KILLED_ITERATION + CHECKPOINT_EVERY * (newest // CHECKPOINT_EVERY)

    def reached() -> Event | None:
        places = ((e, (e.rank, e.iteration, e.kind)) for e in events)
        return next((e for e, place in places if place == (victim, killed, step)), None)

    watched.wait(f"iteration {killed}", lambda: reached() is not None, timeout_s=START_TIMEOUT_S)
    last = reached()
    assert last is not None
    pids = {event.pid for event in events}
    killed_s = time.monotonic()
    os.kill(last.pid, signal.SIGKILL)

    def completed() -> dict[int, float]:
        after = [e for e in events if e.pid not in pids or e.iteration >= killed]
        return _completed(after, afterwards)

    try:
        watched.wait(
            "recovery",
            lambda: max(completed(), default=0) >= killed + _MORE_ITERATIONS,
            timeout_s=RECOVER_TIMEOUT_S,
        )
    except TimeoutError as error:
        print(error, file=sys.stderr)
        return NEVER
    ends_s = completed()
    first = min(ends_s, key=lambda iteration: ends_s[iteration])
    notices = [e.at_s for e in events if e.kind == "notice" and e.at_s > killed_s]
    working = max(e.workers for e in events if e.kind == "end" and e.iteration > killed)
    return Recovery(
        detect_s=min(notices, default=math.nan) - killed_s,
        downtime_s=ends_s[first] - killed_s,
        regained_s=ends_s[killed] - killed_s,
        iteration_s=_iteration_s([e for e in events if e.at_s < killed_s]),
        redone_iterations=max(_redone(events, rank, killed_s) for rank in afterwards),
        num_idle=len(afterwards) - working,
    )


def _redone(events: Sequence[Event], rank: int, killed_s: float) -> int:
    """Number of iterations that a rank started before the kill and again after it."""
    starts = [e for e in events if (e.kind, e.rank) == ("start", rank)]
    before = {e.iteration for e in starts if e.at_s < killed_s}
    return sum(e.at_s > killed_s and e.iteration in before for e in starts)


def _are_together(events: Sequence[Event]) -> bool:
    ranks = {e.rank for e in events if e.kind == "end" and e.workers == NUM_WORKERS}
    return len(ranks) == NUM_WORKERS


def _completed(events: Sequence[Event], ranks: Collection[int]) -> dict[int, float]:
    """Time at which each iteration was first complete on all of these ranks, by iteration."""
    ends: dict[int, dict[int, float]] = {}
    for event in events:
        if event.kind == "end" and event.rank in ranks:
            ends.setdefault(event.iteration, {}).setdefault(event.rank, event.at_s)
    return {i: max(by_rank.values()) for i, by_rank in ends.items() if len(by_rank) == len(ranks)}


def _iteration_s(events: Sequence[Event]) -> float:
    """Median seconds between the ends of iterations in which all workers took part."""
    full = [e for e in events if e.workers == NUM_WORKERS]
    ends = sorted(_completed(full, range(NUM_WORKERS)).values())
    return statistics.median(b - a for a, b in pairwise(ends))
