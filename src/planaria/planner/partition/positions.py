"""Where in a pipeline's nodes its stages may begin, counted from the end.

All that a program over tails of the model has to know of the nodes in front of a tail is what the
tail has left: nodes of each kind, and devices of the node that it begins in. Each such remainder
is a position, a number; a stage on some of the node's devices leads to one that is smaller. One
table over positions serves pipelines of all numbers of nodes, in all orders of kinds.

Where nodes are all of one kind a position is the number of devices left.
"""

from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planaria.planner.problem import Counts, StageCosts


class Option(NamedTuple):
    """One way for a stage to begin at a position.

    Attributes:
        group: the devices of the stage.
        after: the position behind it.
        between_nodes: whether what follows lies in another node.
    """

    group: int
    after: int
    between_nodes: bool


class Positions:
    """The positions of pipelines of at most so many nodes of each kind.

    Args:
        most: at most.
    """

    def __init__(self, costs: StageCosts, most: Counts) -> None:
        self._costs = costs
        self._inner = costs.devices_per_node - 1  # Positions inside a node of each kind.
        self._each = 1 + len(most) * self._inner
        sizes = [count + 1 for count in most]
        self._steps = tuple(prod(sizes[kind + 1 :]) for kind in range(len(sizes)))
        self._most = most
        self._options: dict[int, tuple[Option, ...]] = {}

    def of(self, counts: Counts) -> int:
        """That of whole nodes, so many of each kind."""
        steps = zip(counts, self._steps, strict=True)
        return sum(count * step for count, step in steps) * self._each

    def options(self, position: int) -> tuple[Option, ...]:
        """The stages that may begin there."""
        if position not in self._options:
            self._options[position] = tuple(self._found(position))
        return self._options[position]

    def nodes_left(self) -> NDArray[np.int64]:
        """[p, k]: nodes of each kind left at a position, the one that it lies in included."""
        vectors = np.array(list(product(*(range(count + 1) for count in self._most))))
        nodes = np.repeat(vectors, self._each, axis=0)
        for kind in range(len(self._most)):
            for free in range(self._inner):
                nodes[1 + kind * self._inner + free :: self._each, kind] += 1
        return nodes

    def _found(self, position: int) -> list[Option]:
        vector, inside = divmod(position, self._each)
        if inside:
            kind, free = divmod(inside - 1, self._inner)
            return self._in_node(vector, kind, free + 1)
        return [
            option
            for kind, (step, most) in enumerate(zip(self._steps, self._most, strict=True))
            if vector // step % (most + 1)
            for option in self._in_node(vector - step, kind, self._costs.devices_per_node)
        ]

    def _in_node(self, behind: int, kind: int, free: int) -> list[Option]:
        """The stages on a node with so many free devices, before all nodes of a vector."""
        base = behind * self._each
        found = []
        for count in self._costs.counts:
            if count < free:
                after = base + 1 + kind * self._inner + free - count - 1
                found.append(Option(self._costs.group(kind, count), after, False))
            elif count == free:
                found.append(Option(self._costs.group(kind, count), base, True))
        return found
