"""Which places trusted nodes have to take, so that no layer is left to distrusted nodes alone.

A layer that distrusted nodes alone hold is exposed. With y = 1 for a place that a trusted node is
to take, and x = 1 for an exposed layer, the fewest are exposed where

    sum of x is least, then sum of y
    x of a layer + sum of y over the places that hold it >= 1
    sum of y over the places for a kind of node <= trusted nodes of that kind

Source: DESIGN 5 (joins); none of the papers has nodes that fail again and again.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from planaria.core.plan import NodeKind, Pipeline


def trusted_layers(pipelines: Iterable[Pipeline], distrusted: frozenset[int]) -> frozenset[int]:
    """The layers that some node of these pipelines holds which is not distrusted."""
    layers: set[int] = set()
    for pipeline in pipelines:
        if distrusted.isdisjoint(pipeline.nodes):  # It holds the whole model: the usual case.
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
    """The places for trusted nodes with which the fewest layers are exposed, and few of them.

    A small integer program, whose matrix is nearly one of intervals: 1,000 places and 100 layers
    take a few milliseconds.

    Args:
        places: the layers of each that nobody else covers; together all that have to be covered.
        kinds: that each place is made for.
        num_trusted: nodes of each kind.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp  # As in assignment.py.

    layers = sorted(frozenset[int]().union(*places))
    of_each = sorted(set(kinds))
    holds = np.array([[layer in place for place in places] for layer in layers], dtype=float)
    covers = np.hstack([holds, np.eye(len(layers))])
    of_kind = np.array([[kind == one for kind in kinds] for one in of_each], dtype=float)
    spent = np.hstack([of_kind, np.zeros((len(of_kind), len(layers)))])
    # All places together weigh less than one layer.
    weights = [*[1.0 / (len(places) + 1)] * len(places), *[1.0] * len(layers)]
    found = milp(
        weights,
        integrality=np.ones(len(weights), dtype=np.int64),
        bounds=Bounds(0, 1),
        constraints=[
            LinearConstraint(covers, lb=1),
            LinearConstraint(spent, ub=[num_trusted.get(one, 0) for one in of_each]),
        ],
        options={"mip_rel_gap": 0.0},
    )
    assert found.success, found.message
    return tuple(int(place) for place in np.flatnonzero(found.x[: len(places)] > 0.5))
