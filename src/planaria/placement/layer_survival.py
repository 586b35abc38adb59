"""How likely every layer of a plan survives lost nodes, with and without copies."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from planaria.core.copies import LayerCopy
from planaria.core.plan import Plan
from planaria.placement.layer_copies import keeping_places
from planaria.placement.survival import Estimate, survival_by_lost

LOST_MAX: Final = 16  # The work of an exact count grows fast with the number of lost nodes.


@dataclass(frozen=True, slots=True)
class LayerSurvival:
    """How likely it is that no layer is lost if nodes of the plan are, all sets equally likely.

    Attributes:
        num_lost: number of lost nodes.
        live: probability that each layer still has a live holder.
        kept: probability that each layer still has a live holder or a copy holder.
    """

    num_lost: int
    live: Estimate
    kept: Estimate


def layer_survival(
    plan: Plan, layer_copies: Sequence[LayerCopy], *, copies: int, rng: np.random.Generator
) -> tuple[LayerSurvival, ...]:
    """The survival for 1, 2, .. min(2 * copies, LOST_MAX, number of nodes) lost nodes.

    Args:
        layer_copies: further copies of all layers.
        copies: number of copies of each layer, its holder's own included.
        rng: source of the samples that estimate what is too large to count.
    """
    num_nodes = len(plan.nodes)
    most_lost = min(num_nodes, 2 * copies, LOST_MAX)
    live, kept = (
        survival_by_lost(num_nodes, keeping_places(plan, extra), most_lost=most_lost, rng=rng)
        for extra in ((), layer_copies)
    )
    return tuple(LayerSurvival(lost, live[lost], kept[lost]) for lost in range(1, most_lost + 1))
