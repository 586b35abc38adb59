"""How likely every layer of a plan survives lost nodes, by its live holders and by their copies."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from planaria.core.copies import LayerCopy
from planaria.core.plan import Plan
from planaria.placement.copies import keeping_places
from planaria.placement.survival import Estimate, survival_by_lost

LOST_MAX: Final = 16  # The states to count become many with the lost nodes.


@dataclass(frozen=True, slots=True)
class LayerSurvival:
    """That no layer is lost when so many nodes of the plan are, any of them alike.

    Attributes:
        live: that each has a live holder left.
        kept: that each has one or a copy holder left; holders keep copies of their own.
    """

    num_lost: int
    live: Estimate
    kept: Estimate


def layer_survival(
    plan: Plan, layer_copies: Sequence[LayerCopy], *, copies: int, rng: np.random.Generator
) -> tuple[LayerSurvival, ...]:
    """For 1, 2, .. twice as many lost nodes as there are copies, LOST_MAX at most.

    Args:
        copies: of each layer, its holder's own included.
        rng: for what cannot be counted.
    """
    num_nodes = len(plan.nodes)
    most_lost = min(num_nodes, 2 * copies, LOST_MAX)
    live, kept = (
        survival_by_lost(num_nodes, keeping_places(plan, those), most_lost=most_lost, rng=rng)
        for those in ((), layer_copies)
    )
    return tuple(LayerSurvival(lost, live[lost], kept[lost]) for lost in range(1, most_lost + 1))
