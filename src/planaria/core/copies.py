"""Copies of layers: which states they are of, who keeps those in memory, and when they travel."""

from dataclasses import dataclass
from typing import NamedTuple


class Label(NamedTuple):
    """Which state of all layers a version of copies is.

    An iteration that is done again may give other bits, unless the job is deterministic; so its
    age alone does not tell a state.

    Attributes:
        since: the epoch in which the job had last gone back by then.
        epoch: in which the version was begun; of a loop of one's own a number that rises with each
            start, microseconds since 1970 if clocks do not go back.
        age: of the layers.
        run: a number drawn by chance for each start of a loop of one's own, whose nodes may keep
            versions of runs that did not know each other; 0 in a job.
    """

    since: int
    epoch: int
    age: int
    run: int = 0


def version_name(iteration: int, epoch: int) -> str:
    """Of the save, on disk or in an object store, that was made after so many iterations."""
    assert iteration >= 0
    assert epoch >= 0
    return f"{iteration}-{epoch}"


@dataclass(frozen=True, slots=True)
class LayerCopy:
    """The copies of a layer that its holders do not keep: who sends it, and to which ranks."""

    layer: int
    source: int
    targets: tuple[int, ...]


class IdleSpan(NamedTuple):
    """When copies may go, in an iteration of their source.

    Attributes:
        after: so many of the source's own forwards and backwards are done; 0: as soon as the
            iteration begins.
        offset_s: from then until the span begins.
        lasts_s: of the span.
    """

    after: int
    offset_s: float
    lasts_s: float


@dataclass(frozen=True, slots=True)
class IdleSpans:
    """When the way out of one node, and that into another, are idle, in order of time."""

    source: int
    target: int
    spans: tuple[IdleSpan, ...]


class CopiesDone(NamedTuple):
    """How far a rank's copies were when it had applied an iteration.

    Attributes:
        age: of the newest version that is known to be complete, -1 if none is.
        idle_s: of the spans in which copies might go; of these they took idle_used_s.
    """

    age: int = -1
    idle_s: float = 0.0
    idle_used_s: float = 0.0
