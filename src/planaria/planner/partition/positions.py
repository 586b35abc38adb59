"""Positions: numbers that say which nodes and devices are left for a suffix of the model.

A dynamic program places the layers from u on (a suffix) on the nodes that the layers before u do
not use. It has to know only what is left for the suffix: the number of whole nodes of each kind,
and the free devices of the node that the suffix begins in. Each such remainder has a number, its
position. A stage uses some devices of one node, so it leads from a position to a smaller one. One
table over positions serves pipelines of all numbers of nodes, in all orders of kinds.

Where all nodes are of one kind, a position equals the number of devices left.
"""

from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planaria.planner.problem import Counts, StageCosts


class Option(NamedTuple):
    """A choice of devices for the stage that begins at a position.

    Attributes:
        group: group of the stage.
        after: position behind the stage.
        between_nodes: whether the next stage lies in another node.
    """

    group: int
    after: int
    between_nodes: bool


class Positions:
    """The positions of pipelines whose number of nodes of each kind is limited.

    Args:
        max_nodes: upper bound on nodes of each kind in one pipeline.
    """

    def __init__(self, costs: StageCosts, max_nodes: Counts) -> None:
        self._costs = costs
        self._inner = costs.devices_per_node - 1  # Positions inside a node, for each kind.
        self._each = 1 + len(max_nodes) * self._inner
        sizes = [count + 1 for count in max_nodes]
        self._steps = tuple(prod(sizes[kind + 1 :]) for kind in range(len(sizes)))
        self._max_nodes = max_nodes
        self._options: dict[int, tuple[Option, ...]] = {}

    def position_of(self, counts: Counts) -> int:
        """The position at which exactly `counts[k]` whole nodes of kind k are left."""
        steps = zip(counts, self._steps, strict=True)
        return sum(count * step for count, step in steps) * self._each

    def options(self, position: int) -> tuple[Option, ...]:
        """The choices of devices for a stage that begins at a position."""
        if position not in self._options:
            self._options[position] = tuple(self._all_options(position))
        return self._options[position]

    def nodes_left(self) -> NDArray[np.int64]:
        """Table [p, k]: number of nodes of kind k left at position p, a partly used node
        included."""
        vectors = np.array(list(product(*(range(count + 1) for count in self._max_nodes))))
        nodes = np.repeat(vectors, self._each, axis=0)
        for kind in range(len(self._max_nodes)):
            for free in range(self._inner):
                nodes[1 + kind * self._inner + free :: self._each, kind] += 1
        return nodes

    def _all_options(self, position: int) -> list[Option]:
        vector, inside = divmod(position, self._each)
        if inside:
            kind, free = divmod(inside - 1, self._inner)
            return self._in_node(vector, kind, free + 1)
        return [
            option
            for kind, (step, max_nodes) in enumerate(zip(self._steps, self._max_nodes, strict=True))
            if vector // step % (max_nodes + 1)
            for option in self._in_node(vector - step, kind, self._costs.devices_per_node)
        ]

    def _in_node(self, nodes_behind: int, kind: int, free: int) -> list[Option]:
        """The choices for a stage on a node of which some devices are free.

        Args:
            nodes_behind: index of the combination of whole nodes that are left besides this node.
            kind: index of the node's kind.
            free: number of its free devices.
        """
        position_behind = nodes_behind * self._each
        options = []
        for count in self._costs.counts:
            if count < free:
                after = position_behind + 1 + kind * self._inner + free - count - 1
                options.append(Option(self._costs.group(kind, count), after, False))
            elif count == free:
                options.append(Option(self._costs.group(kind, count), position_behind, True))
        return options
