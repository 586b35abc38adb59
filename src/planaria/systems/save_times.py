"""When the saves of a job are begun and complete, if one is begun only after the one before it.

A save is due after each `every` iterations. While one is being written none is begun, so saves that
take longer than the iterations between them are as far apart as they take, rounded up to a multiple
of `every`: those that are due meanwhile are skipped.
"""

from math import ceil, floor
from typing import NamedTuple

Pending = tuple[float, int]  # (time when a save is complete, iterations that it is of)


class WrittenSaves(NamedTuple):
    """The saves that were begun after some commits in a row.

    Attributes:
        complete: number of iterations of the newest one that is complete; 0: none is.
        pending: save that is still being written; None: none is.
    """

    complete: int
    pending: Pending | None


def saves_after(
    number: int,
    num_committed: int,
    now_s: float,
    *,
    pace_s: float,
    every: int,
    write_s: float,
    pending: Pending | None,
) -> WrittenSaves:
    """The saves after `number` more commits, the last of which is now.

    The result does not depend on how the commits are split over several calls.

    Args:
        pace_s: seconds from one of these commits to the next.
        every: number of iterations after which a save is due; 0: none ever is.
        write_s: seconds from the commit that a save is of until it is complete.
        pending: save that is being written before these commits; None: none is.
    """
    complete = 0
    first = num_committed - number + 1
    if pending is not None:
        if pending[0] > now_s:
            return WrittenSaves(0, pending)
        complete = pending[1]
        first = max(first, num_committed - floor((now_s - pending[0]) / pace_s))
    if not every:
        return WrittenSaves(complete, None)
    due = -(-first // every) * every
    if due > num_committed:
        return WrittenSaves(complete, None)
    apart = max(1, ceil(write_s / pace_s / every)) * every
    last = num_committed - (num_committed - due) % apart
    complete_s = now_s - (num_committed - last) * pace_s + write_s
    if complete_s <= now_s:
        return WrittenSaves(last, None)
    return WrittenSaves(last - apart if last > due else complete, (complete_s, last))
