"""The places that trusted nodes must take, so that the fewest layers are exposed.

A layer is exposed if only distrusted nodes hold it. Let y = 1 for a place that a trusted node
takes, and x = 1 for an exposed layer. The integer program is:

    minimize the sum of x, then the sum of y
    x of a layer + sum of y over the places that hold it >= 1
    sum of y over the places for a kind of node <= trusted nodes of that kind

Source: none; none of the papers has nodes that fail again and again.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from planaria.core.plan import NodeKind, Pipeline


def trusted_layers(pipelines: Iterable[Pipeline], distrusted: frozenset[int]) -> frozenset[int]:
    """The layers that at least one trusted node of these pipelines holds."""
    layers: set[int] = set()
    for pipeline in pipelines:
        if distrusted.isdisjoint(pipeline.nodes):  # The usual case.
            return frozenset(range(pipeline.template.stages[-1].end_layer))
        per_node = pipeline.template.devices_per_node
        ranks_by_stage = pipeline.ranks_by_stage()
        for stage, ranks in zip(pipeline.template.stages, ranks_by_stage, strict=True):
            if ranks[0] // per_node not in distrusted:
                layers.update(range(stage.first_layer, stage.end_layer))
    return frozenset(layers)


def widest_cover(
    places: Sequence[frozenset[int]],
    kinds: Sequence[NodeKind],
    num_trusted: Mapping[NodeKind, int],
) -> tuple[int, ...]:
    """The smallest set of places for trusted nodes with which the fewest layers are exposed.

    The matrix of this small integer program is nearly an interval matrix: 1,000 places and 100
    layers take a few milliseconds.

    Args:
        places: layers of each place, only those that no trusted node elsewhere holds.
        kinds: kind of node for which each place is made.
        num_trusted: number of trusted nodes of each kind.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp  # Slow to import, see assignment.py.

    layers = sorted(frozenset[int]().union(*places))
    distinct_kinds = sorted(set(kinds))
    holds = np.array([[layer in place for place in places] for layer in layers], dtype=float)
    covers = np.hstack([holds, np.eye(len(layers))])
    is_of_kind = np.array(
        [[kind == distinct_kind for kind in kinds] for distinct_kind in distinct_kinds], dtype=float
    )
    trusted_nodes_used = np.hstack([is_of_kind, np.zeros((len(is_of_kind), len(layers)))])
    # All places together must weigh less than one layer.
    weights = [*[1.0 / (len(places) + 1)] * len(places), *[1.0] * len(layers)]
    solution = milp(
        weights,
        integrality=np.ones(len(weights), dtype=np.int64),
        bounds=Bounds(0, 1),
        constraints=[
            LinearConstraint(covers, lb=1),
            LinearConstraint(
                trusted_nodes_used,
                ub=[num_trusted.get(distinct_kind, 0) for distinct_kind in distinct_kinds],
            ),
        ],
        options={"mip_rel_gap": 0.0},
    )
    assert solution.success, solution.message
    return tuple(int(place) for place in np.flatnonzero(solution.x[: len(places)] > 0.5))
