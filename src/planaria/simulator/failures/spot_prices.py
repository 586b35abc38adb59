"""Draws prices of spot machines, and the nodes that are lost because the price is above their bid.

The logarithm of the price in a zone is an Ornstein-Uhlenbeck process: it wanders, and returns to
its mean. Each node bids about what the job bids. It is lost when the price of its zone rises above
its bid, and back when the price has fallen below. So a rise takes many nodes of one zone at once.

The model and its defaults are assumed: they are not fitted to recorded prices. Differs: EC2 has
ended machines for want of capacity and not of a bid since 2017; the price here stands for the
demand for a zone's machines.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import exp, sqrt
from random import Random
from typing import NamedTuple

from planaria.simulator.failures.occurrences import Occurrence, OccurrenceKind


class ZonePrice(NamedTuple):
    """The price of a node in a zone from a time on.

    Attributes:
        price: dollars per node-hour, if the mean price is in them.
    """

    at_s: float
    zone: int
    price: float


@dataclass(frozen=True, slots=True)
class SpotPrices:
    """A model of the prices in some zones; those of different zones are independent.

    Attributes:
        mean_price: median of the price, in dollars per node-hour or any other unit.
        sigma: standard deviation of the logarithm of the price.
        return_s: time in which a deviation falls to 1/e of itself, in seconds.
        step_s: seconds from price to price.
    """

    mean_price: float = 1.0
    sigma: float = 0.35
    return_s: float = 3 * 3600.0
    step_s: float = 60.0
    num_zones: int = 3

    def prices(self, horizon_s: float, rng: Random) -> Iterator[ZonePrice]:
        """The prices from time 0 to the horizon; each time has one of every zone, in order."""
        keep = exp(-self.step_s / self.return_s)
        noise = self.sigma * sqrt(1 - keep**2)
        deviations = [rng.gauss(0, self.sigma) for _ in range(self.num_zones)]
        for step in range(int(horizon_s // self.step_s) + 1):
            for zone, deviation in enumerate(deviations):
                yield ZonePrice(step * self.step_s, zone, self.mean_price * exp(deviation))
                deviations[zone] = keep * deviation + rng.gauss(0, noise)


@dataclass(frozen=True, slots=True)
class PriceLosses:
    """Nodes that are there while the price is at most their bid; implements `FailureSource`.

    Node i is in zone i modulo the number of zones.

    Attributes:
        bid: price up to which the job pays for a node, in the unit of the prices.
        bid_sigma: standard deviation of the logarithm of a node's own bid; 0: all nodes of a zone
            come and go together.
    """

    prices: SpotPrices = SpotPrices()
    bid: float = 1.5
    bid_sigma: float = 0.1

    def occurrences(self, num_nodes: int, *, horizon_s: float, rng: Random) -> Iterator[Occurrence]:
        """The losses and returns."""
        bids = [self.bid * exp(rng.gauss(0, self.bid_sigma)) for _ in range(num_nodes)]
        are_there = [True] * num_nodes
        num_zones = self.prices.num_zones
        for at_s, zone, price in self.prices.prices(horizon_s, rng):
            members = range(zone, num_nodes, num_zones)
            lost = [node for node in members if are_there[node] and price > bids[node]]
            back = [node for node in members if not are_there[node] and price <= bids[node]]
            for kind, nodes in ((OccurrenceKind.LOST, lost), (OccurrenceKind.BACK, back)):
                for node in nodes:
                    are_there[node] = kind is OccurrenceKind.BACK
                if nodes:
                    yield Occurrence(at_s, kind, tuple(nodes), cause=f"price in zone {zone}")
