"""Draws losses of nodes: one at a time, in bursts, by failure domains, and as nodes age.

All rates are per node that is there: a node that is lost cannot be lost again, and so the cluster
has fewer losses meanwhile. `PoissonLosses` draws the losses of the whole cluster and leaves out
those that begin with a node that is lost already. That gives each node its rate exactly and keeps
only the times at which nodes come back. A burst takes other nodes that are there; in a domain it
is smaller if some of it are lost already.

Source: bursts are those of spot machines: Bamboo's EC2 P3 trace has 167 losses at 79 times. Lemons
are those of InfiniteHBD's trace: 40 of its 400 servers have 41% of the losses. Weibull
distributions of shape 0.7 to 0.8 fit the times between failures of LANL's clusters (Schroeder and
Gibson, DSN '06): after a failure the next one is near.
"""

from bisect import bisect
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import accumulate
from math import gamma, log1p
from math import log as ln
from random import Random
from typing import Final

from planaria.simulator.failures.occurrences import Occurrence, OccurrenceKind
from planaria.simulator.failures.repair_times import RepairTime

Domains = tuple[tuple[int, ...], ...]

BURST_NODES: Final = 167 / 79
WEIBULL_SHAPE: Final = 0.7
_HOUR_S: Final = 3600.0
_DRAWS_MAX: Final = 10_000  # Draws for the other nodes of a burst.


@dataclass(frozen=True, slots=True)
class Lemons:
    """Nodes that fail more often than others; a seed draws which.

    Attributes:
        node_share: share of the nodes that are lemons, between 0 and 1; at least one node is.
        loss_share: share of the losses that they have, between 0 and 1.
    """

    node_share: float = 0.1
    loss_share: float = 0.41


@dataclass(frozen=True, slots=True)
class PoissonLosses:
    """Losses that do not depend on earlier ones; implements `FailureSource`.

    Attributes:
        per_node_hour: losses per hour of a node that is there.
        burst_nodes: mean number of nodes that are lost at once, 1 or more; the number is drawn from
            a geometric distribution.
        domains: sets of nodes; all nodes of a burst are of one domain, which may end it early. A
            node in no domain is lost alone. Empty: any nodes.
        lemons: nodes that have more than their share of the losses; None: all have the same rate.
        cause: cause of the occurrences.
    """

    per_node_hour: float
    repair: RepairTime
    burst_nodes: float = 1.0
    domains: Domains = ()
    lemons: Lemons | None = None
    cause: str = ""

    def occurrences(self, num_nodes: int, *, horizon_s: float, rng: Random) -> Iterator[Occurrence]:
        """The losses and returns."""
        pools = self._pools(num_nodes)
        size = sum(_mean_burst(self.burst_nodes, len(pool) + 1) for pool in pools) / num_nodes
        per_s = self.per_node_hour / _HOUR_S * num_nodes / size
        totals = list(accumulate(_weights(num_nodes, self.lemons, rng)))

        def draw_node() -> int:
            return min(bisect(totals, rng.random() * totals[-1]), num_nodes - 1)

        def draw_nodes(lost: Collection[int]) -> list[int]:
            node = draw_node()
            number = min(_drawn_burst(self.burst_nodes, rng), len(pools[node]) + 1)
            if self.domains:
                return [node, *rng.sample(pools[node], number - 1)]
            if node in lost:
                return []
            number, nodes = min(number, num_nodes - len(lost)), {node}
            for _ in range(_DRAWS_MAX):
                if len(nodes) == number:
                    break
                other = draw_node()
                nodes.update(() if other in lost else (other,))
            # The others hardly ever fail, or never: any of them are as likely.
            others = set(range(num_nodes)).difference(nodes, lost) if len(nodes) < number else ()
            nodes.update(rng.sample(sorted(others), number - len(nodes)))
            return sorted(nodes)

        def draw_repairs_s(nodes: Sequence[int]) -> list[float]:
            return [self.repair.draw_s(rng) for _ in nodes]

        times_s = _arrivals(per_s, horizon_s, rng)
        return _with_returns(
            times_s, draw_nodes, draw_repairs_s, horizon_s=horizon_s, cause=self.cause
        )

    def _pools(self, num_nodes: int) -> list[Sequence[int]]:
        """The other nodes that a burst may take with a node, by node."""
        if not self.domains:
            return [range(num_nodes - 1)] * num_nodes  # Their number is all that is used.
        pools: list[Sequence[int]] = [()] * num_nodes
        for domain in self.domains:
            for node in domain:
                pools[node] = tuple(other for other in domain if other != node)
        return pools


@dataclass(frozen=True, slots=True)
class DomainLosses:
    """Losses of all nodes of a failure domain at once; implements `FailureSource`.

    They are back together. A node that another source has lost does not matter here.

    Attributes:
        domains: sets of nodes, none of which has a node of another one.
        per_domain_hour: losses per hour of a domain that is there.
    """

    domains: Domains
    per_domain_hour: float
    repair: RepairTime
    cause: str = "failure domain"

    def occurrences(self, num_nodes: int, *, horizon_s: float, rng: Random) -> Iterator[Occurrence]:
        """The losses and returns."""
        assert all(node < num_nodes for domain in self.domains for node in domain)
        per_s = self.per_domain_hour / _HOUR_S * len(self.domains)

        def draw_repairs_s(nodes: Sequence[int]) -> list[float]:
            return [self.repair.draw_s(rng)] * len(nodes)

        def draw_nodes(_lost: Collection[int]) -> list[int]:
            return sorted(rng.choice(self.domains))

        times_s = _arrivals(per_s, horizon_s, rng)
        return _with_returns(
            times_s, draw_nodes, draw_repairs_s, horizon_s=horizon_s, cause=self.cause
        )


@dataclass(frozen=True, slots=True)
class WeibullLosses:
    """Losses of nodes whose rate depends on their age; implements `FailureSource`.

    A node is new when it comes back. At time 0 the nodes have been running for long, so the rate is
    per_node_hour from the start.

    Attributes:
        per_node_hour: one over the mean hours from return to loss.
        shape: shape of the distribution; below 1 new nodes fail more often, at 1 it is Poisson's.
    """

    per_node_hour: float
    repair: RepairTime
    shape: float = WEIBULL_SHAPE
    cause: str = ""

    def occurrences(self, num_nodes: int, *, horizon_s: float, rng: Random) -> Iterator[Occurrence]:
        """The losses and returns."""
        if not self.per_node_hour:
            return
        scale_s = _HOUR_S / self.per_node_hour / gamma(1 + 1 / self.shape)
        events = [
            (self._residual_s(scale_s, rng), node, OccurrenceKind.LOST) for node in range(num_nodes)
        ]
        heapify(events)
        while events and events[0][0] <= horizon_s:
            at_s, node, kind = heappop(events)
            yield Occurrence(at_s, kind, (node,), cause=self.cause)
            if kind is OccurrenceKind.LOST:
                heappush(events, (at_s + self.repair.draw_s(rng), node, OccurrenceKind.BACK))
            else:
                age_s = rng.weibullvariate(scale_s, self.shape)
                heappush(events, (at_s + age_s, node, OccurrenceKind.LOST))

    def _residual_s(self, scale_s: float, rng: Random) -> float:
        """Draws the time to the first loss of a node that has been running for long.

        A moment falls into an interval with a chance in proportion to its length. The length of
        such an interval is scale * G^(1/shape), G of a gamma distribution with 1 + 1/shape; the
        moment lies anywhere in it.
        """
        length_s: float = scale_s * rng.gammavariate(1 + 1 / self.shape, 1.0) ** (1 / self.shape)
        return length_s * rng.random()


def _arrivals(per_s: float, horizon_s: float, rng: Random) -> Iterator[float]:
    """Times of a Poisson process from 0 to the horizon."""
    at_s = 0.0
    while per_s:
        at_s += rng.expovariate(per_s)
        if at_s > horizon_s:
            return
        yield at_s


def _with_returns(
    times_s: Iterator[float],
    draw_nodes: Callable[[Collection[int]], Sequence[int]],
    draw_repairs_s: Callable[[Sequence[int]], Sequence[float]],
    *,
    horizon_s: float,
    cause: str,
) -> Iterator[Occurrence]:
    """The losses of nodes that are there, and their returns, in order of time.

    Args:
        times_s: times of the losses.
        draw_nodes: function from the nodes that are lost to those of a loss, of which only others
            count.
    """
    lost: set[int] = set()
    returns: list[tuple[float, int]] = []

    def returns_until(end_s: float) -> Iterator[Occurrence]:
        while returns and returns[0][0] <= end_s:
            at_s = returns[0][0]
            nodes = []
            while returns and returns[0][0] == at_s:
                nodes.append(heappop(returns)[1])
            lost.difference_update(nodes)
            yield Occurrence(at_s, OccurrenceKind.BACK, tuple(nodes))

    for at_s in times_s:
        yield from returns_until(at_s)
        there = tuple(sorted(node for node in draw_nodes(lost) if node not in lost))
        if not there:
            continue
        yield Occurrence(at_s, OccurrenceKind.LOST, there, cause=cause)
        lost.update(there)
        for node, repair_s in zip(there, draw_repairs_s(there), strict=True):
            heappush(returns, (at_s + repair_s, node))
    yield from returns_until(horizon_s)


def _weights(num_nodes: int, lemons: Lemons | None, rng: Random) -> list[float]:
    """The rate of each node in proportion to the others."""
    if lemons is None:
        return [1.0] * num_nodes
    number = min(max(1, round(lemons.node_share * num_nodes)), num_nodes)
    of_lemon = lemons.loss_share / number
    of_other = (1 - lemons.loss_share) / max(1, num_nodes - number)
    are_lemons = set(rng.sample(range(num_nodes), number))
    return [of_lemon if node in are_lemons else of_other for node in range(num_nodes)]


def _drawn_burst(mean: float, rng: Random) -> int:
    """Draws from the geometric distribution of 1, 2, ... with this mean."""
    return 1 if mean <= 1 else 1 + int(ln(1 - rng.random()) / log1p(-1 / mean))


def _mean_burst(mean: float, largest: int) -> float:
    """The mean of that distribution where larger numbers count as `largest`."""
    return mean * (1 - (1 - 1 / mean) ** largest) if mean > 1 else 1.0
