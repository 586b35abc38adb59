"""Draws spells in which a node is slow: it goes on, and everybody waits for it.

Source: FALCON (arXiv 2410.12588) sees slow nodes in a cluster of 10,000 GPUs for tens of seconds to
ten hours, and jobs 34% longer on average. How often a node is slow it does not print: the rate is
the user's. The speeds are assumed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from random import Random
from typing import Final

from planaria.simulator.failures.occurrences import Occurrence, OccurrenceKind
from planaria.simulator.failures.repair_times import RepairTime, TimeShape

HIGHEST_SPEED: Final = 0.9
_DURATION: Final = RepairTime(1800.0, TimeShape.LOGNORMAL)


@dataclass(frozen=True, slots=True)
class SlowSpells:
    """Spells of single nodes; implements `FailureSource`.

    A spell begins only when the node's earlier one is over.

    Attributes:
        per_node_hour: spells per hour of a node that is fast.
        duration: time of a spell.
        lowest_speed: share of the normal speed in the worst spell; speeds are drawn evenly.
        highest_speed: share of the normal speed in the mildest spell.
    """

    per_node_hour: float
    duration: RepairTime = _DURATION
    lowest_speed: float = 0.3
    highest_speed: float = HIGHEST_SPEED
    cause: str = "slow"

    def occurrences(self, num_nodes: int, *, horizon_s: float, rng: Random) -> Iterator[Occurrence]:
        """The begins and ends of spells."""
        per_s = self.per_node_hour / 3600.0 * num_nodes
        slow: set[int] = set()
        ends: list[tuple[float, int]] = []

        def ends_until(end_s: float) -> Iterator[Occurrence]:
            while ends and ends[0][0] <= end_s:
                at_s, node = heappop(ends)
                slow.discard(node)
                yield Occurrence(at_s, OccurrenceKind.RESTORED, (node,))

        at_s = 0.0
        while per_s:
            at_s += rng.expovariate(per_s)
            if at_s > horizon_s:
                break
            yield from ends_until(at_s)
            node = rng.randrange(num_nodes)
            if node in slow:
                continue
            slow.add(node)
            heappush(ends, (at_s + self.duration.draw_s(rng), node))
            speed = rng.uniform(self.lowest_speed, self.highest_speed)
            yield Occurrence(at_s, OccurrenceKind.SLOWED, (node,), speed=speed, cause=self.cause)
        yield from ends_until(horizon_s)
