"""Losses of which nodes are told in advance: maintenance, and the notice of spot machines.

Source: EC2 gives a spot machine two minutes and Google Cloud gives it 30 s (both by their
documentation). Recorded traces hold no notices, so `NoticedSource` adds them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from heapq import heappop, heappush, merge
from itertools import count, groupby
from math import ceil
from random import Random
from typing import Final

from planaria.simulator.failures.occurrences import FailureSource, Occurrence, OccurrenceKind

EC2_NOTICE_S: Final = 120.0
GCP_NOTICE_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class NoticedSource:
    """A source whose losses are announced; implements `FailureSource`.

    A node that came back less than notice_s before its loss gets notice when it comes back. Losses
    that the source announces itself keep their notice. Nodes that are missing from the start get
    none, nor do losses behind the horizon: the source is asked for the same losses as without
    notices, so that runs with several notices can be compared.

    Attributes:
        notice_s: seconds from a notice to the loss.
    """

    source: FailureSource
    notice_s: float

    def occurrences(self, num_nodes: int, *, horizon_s: float, rng: Random) -> Iterator[Occurrence]:
        """The occurrences of the source, with notices."""
        # Each occurrence is held back until no later one can still give a notice before it.
        held: list[tuple[float, int, Occurrence]] = []
        numbers = count()
        back_s: dict[int, float] = {}
        announced: set[int] = set()
        for occurrence in self.source.occurrences(num_nodes, horizon_s=horizon_s, rng=rng):
            while held and held[0][0] <= occurrence.at_s - self.notice_s:
                yield heappop(held)[2]
            match occurrence.kind:
                case OccurrenceKind.NOTICE:
                    announced.update(occurrence.nodes)
                case OccurrenceKind.BACK:
                    back_s.update((node, occurrence.at_s) for node in occurrence.nodes)
                case OccurrenceKind.LOST:
                    for notice in self._notices(occurrence, back_s, announced):
                        heappush(held, (notice.at_s, next(numbers), notice))
                    announced.difference_update(occurrence.nodes)
            heappush(held, (occurrence.at_s, next(numbers), occurrence))
        while held:
            yield heappop(held)[2]

    def _notices(
        self, loss: Occurrence, back_s: dict[int, float], announced: set[int]
    ) -> Iterator[Occurrence]:
        times = sorted(
            (max(back_s.get(node, 0.0), loss.at_s - self.notice_s), node)
            for node in loss.nodes
            if node not in announced
        )
        for at_s, pairs in groupby(times, key=lambda pair: pair[0]):
            if at_s < loss.at_s:
                yield replace(
                    loss,
                    at_s=at_s,
                    kind=OccurrenceKind.NOTICE,
                    nodes=tuple(node for _, node in pairs),
                    deadline_s=loss.at_s,
                )


@dataclass(frozen=True, slots=True)
class Maintenance:
    """Rounds in which every node is taken out once, some at a time; implements `FailureSource`.

    The groups of a round follow each other at equal times, and rounds at once. A seed draws how far
    the round of time 0 is; nodes that are being maintained then are missing from the start.

    Attributes:
        every_s: seconds of a round; 0: there is none.
        duration_s: seconds that a node is away; less than every_s.
        notice_s: seconds from notice to loss.
        nodes_at_once: number of nodes in a group.
    """

    every_s: float
    duration_s: float
    notice_s: float = 0.0
    nodes_at_once: int = 1
    cause: str = "maintenance"

    def occurrences(self, num_nodes: int, *, horizon_s: float, rng: Random) -> Iterator[Occurrence]:
        """The notices, losses and returns."""
        if not self.every_s:
            return iter(())
        assert self.duration_s < self.every_s
        begun_s = rng.uniform(0, self.every_s)  # Since the round of time 0 began.

        def part(kind: OccurrenceKind, after_s: float) -> Iterator[Occurrence]:
            for at_s, nodes in self._losses(num_nodes, begun_s):
                is_notice = kind is OccurrenceKind.NOTICE
                if is_notice and at_s <= 0.0:
                    continue
                deadline_s = at_s if is_notice else None
                part_s = max(0.0, at_s + after_s)
                if part_s > horizon_s:
                    return
                yield Occurrence(part_s, kind, nodes, deadline_s, cause=self.cause)

        parts = [
            part(OccurrenceKind.BACK, self.duration_s),
            part(OccurrenceKind.NOTICE, -self.notice_s) if self.notice_s else iter(()),
            part(OccurrenceKind.LOST, 0.0),
        ]
        return merge(*parts, key=lambda occurrence: occurrence.at_s)

    def _losses(self, num_nodes: int, begun_s: float) -> Iterator[tuple[float, tuple[int, ...]]]:
        """The groups that are away after time 0, each with the time of its loss."""
        num_groups = -(-num_nodes // self.nodes_at_once)
        spacing_s = self.every_s / num_groups
        for number in count(ceil((begun_s - self.duration_s) / spacing_s)):
            first = number % num_groups * self.nodes_at_once
            nodes = range(first, min(first + self.nodes_at_once, num_nodes))
            yield number * spacing_s - begun_s, tuple(nodes)
