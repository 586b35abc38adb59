"""Copies of layers: which state they are of, who keeps them in memory, and when they are sent."""

from dataclasses import dataclass
from typing import Final, NamedTuple

# Least size of a rank's buffers. There are four as a rule, so that pieces have 16 KiB: that gives
# some 30 MB/s over a link within one machine. Pieces of 4 KiB give a tenth of that.
BUFFER_BYTES_MIN: Final = 64 << 10


class Label(NamedTuple):
    """The name of one version of the copies: which state of all layers it is.

    The age alone does not name a state, because an iteration that is done again may give other
    bits, unless the job is deterministic.

    Attributes:
        since: epoch in which the job had last gone back when the version was begun.
        epoch: epoch in which the version was begun. In a user's own training loop: a number that
            rises with each start, microseconds since 1970 if clocks do not go back.
        age: number of iterations applied to the layers.
        run: 0 in a job. In a user's own training loop a random number drawn at each start, because
            its nodes may keep versions of runs that did not know each other.
    """

    since: int
    epoch: int
    age: int
    run: int = 0


def version_name(iteration: int, epoch: int) -> str:
    """The name of the save, on disk or in an object store, of the state after `iteration`
    iterations."""
    assert iteration >= 0
    assert epoch >= 0
    return f"{iteration}-{epoch}"


@dataclass(frozen=True, slots=True)
class LayerCopy:
    """The copies of one layer on ranks that do not hold it: which rank sends it, and to which
    ranks."""

    layer: int
    source: int
    targets: tuple[int, ...]


class IdleSpan(NamedTuple):
    """A span in an iteration of the source in which copies may be sent.

    Attributes:
        after: number of the source's own forwards and backwards after which the span is due; 0: the
            beginning of the iteration.
        offset_s: seconds from that moment until the span begins.
        lasts_s: length of the span in seconds.
    """

    after: int
    offset_s: float
    lasts_s: float


@dataclass(frozen=True, slots=True)
class IdleSpans:
    """The spans in which the outgoing link of one node and the incoming link of another are both
    idle.

    Attributes:
        source: rank that sends.
        target: rank that receives.
        spans: spans in order of time.
    """

    source: int
    target: int
    spans: tuple[IdleSpan, ...]


class CopiesDone(NamedTuple):
    """The progress of a rank's copies when it had applied an iteration.

    Attributes:
        age: age of the newest version that is known to be complete; -1: none is.
        idle_s: seconds of the spans in which copies might be sent.
        idle_used_s: seconds of these spans in which copies were sent.
    """

    age: int = -1
    idle_s: float = 0.0
    idle_used_s: float = 0.0
