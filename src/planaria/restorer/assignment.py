"""Which node takes which place of the next plan.

A place is a node's position in a pipeline, with the layers of each of its devices. What a node
would have to receive is the cost of giving it the place; the assignment with the least sum is found
exactly. Of equals the one that leaves most nodes at their place, or failing that in their pipeline.
Nodes may be more than places, and may hold anything, or nothing. Where templates are made for nodes
of different kinds a node takes a place of its own kind.

Source: Odyssey, section IV-B, figure 3.
Differs: Odyssey counts layers between two given groups, here it is bytes over all pipelines that
change.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planaria.core.cluster import Node
from planaria.core.plan import Pipeline, PipelineTemplate, Plan

# Solved in floating point, which holds whole numbers up to here exactly.
_EXACT_MAX = 2**53


@dataclass(frozen=True, slots=True)
class Opening:
    """A pipeline that is to be, with its places still open.

    Attributes:
        replaces: the index in the plan before of the pipeline that it stands for, -1 if of none.
    """

    template: PipelineTemplate
    replaces: int


def assigned(
    openings: Sequence[Opening],
    nodes: Sequence[Node],
    *,
    before: Plan,
    layer_bytes: Sequence[int],
) -> tuple[Pipeline, ...]:
    """The pipelines bound to nodes such that the nodes lack the fewest bytes. O(nodes^3).

    Args:
        nodes: that are free to take a place; as many as there are places, or more.
        layer_bytes: of each layer's state.
    """
    if not openings:
        return ()
    nodes = sorted(nodes, key=lambda node: node.node)
    missing_bytes = _missing_bytes(openings, nodes, layer_bytes)
    assert len(nodes) >= missing_bytes.shape[1]
    # All nodes together move fewer steps than one byte weighs.
    costs = missing_bytes * (2 * len(nodes) + 1) + _steps_away(openings, nodes, before)
    assert costs.max() < _EXACT_MAX
    weights = np.where(_is_of_kind(openings, nodes), costs.astype(np.float64), np.inf)
    # It takes half a second to import; the job's processes have it from their fork server.
    from scipy.optimize import linear_sum_assignment

    rows, places = linear_sum_assignment(weights)
    node_at = {int(place): nodes[row].node for row, place in zip(rows, places, strict=True)}
    in_order = (node_at[place] for place in sorted(node_at))
    return tuple(
        Pipeline(
            opening.template,
            tuple(next(in_order) for _ in range(opening.template.num_nodes)),
        )
        for opening in openings
    )


def _is_of_kind(openings: Sequence[Opening], nodes: Sequence[Node]) -> NDArray[np.bool_]:
    """Whether a node is what a place was made for; shape [nodes, places]."""
    is_for_kinds = any(opening.template.kinds for opening in openings)
    places = [kind for opening in openings for kind in opening.template.node_kinds]
    return np.array([[not is_for_kinds or node.kind == kind for kind in places] for node in nodes])


def _missing_bytes(
    openings: Sequence[Opening], nodes: Sequence[Node], layer_bytes: Sequence[int]
) -> NDArray[np.int64]:
    """What a node would lack at a place; shape [nodes, places]."""
    needs = np.array(
        [_flags(place, layer_bytes) for opening in openings for place in _places(opening.template)]
    )
    lacks = 1 - np.array([_flags(node.held, layer_bytes) for node in nodes])
    state_bytes = np.tile(np.array(layer_bytes, dtype=np.int64), len(nodes[0].held))
    missing: NDArray[np.int64] = (lacks * state_bytes) @ needs.T
    return missing


def _flags(layers_by_device: Sequence[frozenset[int]], layer_bytes: Sequence[int]) -> list[int]:
    """1 where a device has a layer, device after device."""
    return [
        int(layer in layers) for layers in layers_by_device for layer in range(len(layer_bytes))
    ]


def _places(template: PipelineTemplate) -> list[tuple[frozenset[int], ...]]:
    """For every node of the template the layers of its devices."""
    devices = [
        frozenset(range(stage.first_layer, stage.end_layer))
        for stage in template.stages
        for _ in range(stage.num_devices)
    ]
    per_node = template.devices_per_node
    return [tuple(devices[i : i + per_node]) for i in range(0, len(devices), per_node)]


def _steps_away(
    openings: Sequence[Opening], nodes: Sequence[Node], before: Plan
) -> NDArray[np.int64]:
    """0 where a node stays at its place, 1 in its pipeline, 2 elsewhere; shape [nodes, places]."""
    home: Mapping[int, tuple[int, int]] = {
        node: (index, position)
        for index, pipeline in enumerate(before.pipelines)
        for position, node in enumerate(pipeline.nodes)
    }
    places = [
        (opening.replaces, position)
        for opening in openings
        for position in range(opening.template.num_nodes)
    ]
    homes = [home.get(node.node, (-2, 0)) for node in nodes]
    return np.array(
        [[0 if p == h else 1 if p[0] == h[0] else 2 for p in places] for h in homes],
        dtype=np.int64,
    )
