"""Assignment of nodes to the places of the next plan.

A place is a node's position in a pipeline, with the layers of each of its devices. The cost of a
place for a node is the number of bytes that the node would have to receive. The assignment with the
smallest total cost is found exactly. Among equal ones it is the one that leaves most nodes at their
place or, if not there, in their pipeline. There may be more nodes than places, and a node may hold
any layers, or none. If templates are made for nodes of different kinds, a node takes a place of its
own kind.

This assignment may leave more layers to distrusted nodes alone than necessary. Then trusted nodes
must take places that cover the model: either a cover with few nodes (cover.py), or all places of
one pipeline, whichever moves the fewest bytes. The number of layers left to distrusted nodes alone
is then minimal, but a cover that was not tried may move fewer bytes. If there are many pipelines,
only those that have the fewest distrusted nodes in the first assignment are tried.

Source: Odyssey, section IV-B, figure 3.
Differs: Odyssey counts layers between two given groups; this module counts bytes over all pipelines
that change. Odyssey has no distrusted nodes.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from planaria.core.cluster import Node
from planaria.core.plan import NodeKind, Pipeline, PipelineTemplate, Plan
from planaria.restorer.cover import widest_cover

# Largest cost: the solver uses floating point, which is exact for whole numbers up to here.
_EXACT_MAX = 2**53
STEPS_COUNT_MAX: Final = 256  # With more vacant places only bytes are minimized, not steps.
_WHOLE_PIPELINES_MAX = 8  # Pipelines to try as covers; one takes up to 0.05 s for 1,000 nodes.


@dataclass(frozen=True, slots=True)
class UnboundPipeline:
    """A pipeline of the next plan that has no nodes yet.

    Attributes:
        replaces: index, in the plan before, of the pipeline that it replaces; -1: none.
    """

    template: PipelineTemplate
    replaces: int


def assign_nodes(
    unbound: Sequence[UnboundPipeline],
    nodes: Sequence[Node],
    *,
    before: Plan,
    layer_bytes: Sequence[int],
    covered: Collection[int] = (),
) -> tuple[Pipeline, ...]:
    """The pipelines with nodes bound to them such that the nodes lack the fewest bytes in total.

    Takes O(m^3) time for the m places whose node does not stay, and up to ten times O(nodes^3) if
    distrusted nodes would hold a layer alone. If m is above STEPS_COUNT_MAX, equal nodes are
    assigned together, and may end further from their old places than necessary.

    Args:
        nodes: nodes that may take a place; at least as many as there are places.
        layer_bytes: size of each layer's state.
        covered: layers that trusted nodes hold in pipelines that stay.
    """
    if not unbound:
        return ()
    nodes = sorted(nodes, key=lambda node: node.node)
    places = _places(unbound, before)
    assert len(nodes) >= len(places)
    node_at = _nodes_that_stay(places, nodes)
    staying_nodes = set(node_at.values())
    free_nodes = [node for node in nodes if node.node not in staying_nodes]
    vacant = [index for index in range(len(places)) if index not in node_at]
    if vacant:
        vacant_places = [places[index] for index in vacant]
        if len(vacant) > STEPS_COUNT_MAX:
            rows = _cheapest_rows_by_class(vacant_places, free_nodes, layer_bytes)
        else:
            rows = _cheapest_rows(_costs(vacant_places, free_nodes, before, layer_bytes))
        node_at.update(
            (index, free_nodes[row].node) for index, row in zip(vacant, rows, strict=True)
        )
    node_by_place = [node_at[index] for index in range(len(places))]
    if not all(node.is_trusted for node in nodes):
        uncovered = frozenset(range(len(layer_bytes))).difference(covered)
        covers = _covers(node_by_place, unbound, places=places, nodes=nodes, uncovered=uncovered)
        if covers:
            costs = _costs(places, nodes, before, layer_bytes)
            node_by_place = _cheapest_with_cover(costs, nodes, covers)
    next_node = iter(node_by_place)
    return tuple(
        Pipeline(
            pipeline.template,
            tuple(next(next_node) for _ in range(pipeline.template.num_nodes)),
        )
        for pipeline in unbound
    )


@dataclass(frozen=True, slots=True)
class _PlaceNeeds:
    """A place in a pipeline of the next plan.

    Attributes:
        home: (index of the pipeline that its pipeline replaces, position in it).
        node: node that had this place before; -1: none.
        needs: the layers of each device.
        kind: kind of node that the place requires; None: any.
    """

    home: tuple[int, int]
    node: int
    needs: tuple[frozenset[int], ...]
    kind: NodeKind | None


def _places(unbound: Sequence[UnboundPipeline], before: Plan) -> list[_PlaceNeeds]:
    """The places of all pipelines, in order."""
    is_for_kinds = any(pipeline.template.kinds for pipeline in unbound)
    places = []
    for pipeline in unbound:
        template = pipeline.template
        replaced = before.pipelines[pipeline.replaces].nodes if pipeline.replaces >= 0 else ()
        kinds = template.node_kinds
        for position, needs in enumerate(_needs(template)):
            node = replaced[position] if position < len(replaced) else -1
            kind = kinds[position] if is_for_kinds else None
            places.append(_PlaceNeeds((pipeline.replaces, position), node, needs, kind))
    return places


@cache
def _needs(template: PipelineTemplate) -> tuple[tuple[frozenset[int], ...], ...]:
    """The layers of each device of each node of the template."""
    devices = [
        frozenset(range(stage.first_layer, stage.end_layer))
        for stage in template.stages
        for _ in range(stage.num_devices)
    ]
    per_node = template.devices_per_node
    return tuple(tuple(devices[i : i + per_node]) for i in range(0, len(devices), per_node))


def _nodes_that_stay(places: Sequence[_PlaceNeeds], nodes: Sequence[Node]) -> dict[int, int]:
    """Nodes that keep their place, by index of the place: they hold exactly what it needs.

    At least one optimal assignment has all of them there. Proof: let a be such a node at place p,
    and take an assignment with a at q and b at p. Exchange them. A layer that b lacks at q is
    either held by a, so p needs it and b lacked it there, or a lacked it at q. So no more bytes
    move. And a and b are at most two steps away together; before, each was at least one step away.
    """
    by_number = {node.node: node for node in nodes}
    return {
        index: place.node
        for index, place in enumerate(places)
        if (node := by_number.get(place.node)) is not None
        and node.held == place.needs
        and place.kind in (None, node.kind)
    }


def _costs(
    places: Sequence[_PlaceNeeds],
    nodes: Sequence[Node],
    before: Plan | None,
    layer_bytes: Sequence[int],
) -> NDArray[np.float64]:
    """Cost of each place for each node, infinite for a wrong kind; shape [nodes, places].

    Args:
        before: the plan from whose places steps are counted; None: costs without steps. Costs are
            also without steps if they would be too large with them.
    """
    costs = _missing_bytes(places, nodes, layer_bytes)
    assert costs.max() < _EXACT_MAX
    if before is not None:
        # One byte must weigh more than all steps of all nodes together.
        with_steps = costs * (2 * len(nodes) + 1) + _steps_away(places, nodes, before)
        if with_steps.max() < _EXACT_MAX:
            costs = with_steps
    if any(place.kind is not None for place in places):
        kinds = [node.kind for node in nodes]
        is_of_kind = np.array([[place.kind in (None, kind) for place in places] for kind in kinds])
        costs = np.where(is_of_kind, costs, np.inf)
    return costs


def _cheapest_rows(costs: NDArray[np.float64]) -> list[int]:
    """The row of the node for each place, such that the sum of costs is minimal."""
    # The import takes half a second; the fork server does it once for the job's processes.
    from scipy.optimize import linear_sum_assignment

    columns, rows = linear_sum_assignment(costs.T)
    assert len(columns) == costs.shape[1]
    return [int(row) for row in rows]


def _cheapest_rows_by_class(
    places: Sequence[_PlaceNeeds], nodes: Sequence[Node], layer_bytes: Sequence[int]
) -> list[int]:
    """The row of the node for each place, such that the fewest bytes move."""
    rows_of: dict[tuple[object, ...], list[int]] = {}
    for row, node in enumerate(nodes):
        rows_of.setdefault((node.held, node.kind), []).append(row)
    columns_of: dict[tuple[object, ...], list[int]] = {}
    for column, place in enumerate(places):
        columns_of.setdefault((place.needs, place.kind), []).append(column)
    rows, columns = list(rows_of.values()), list(columns_of.values())
    sample_places = [places[column[0]] for column in columns]
    costs = _costs(sample_places, [nodes[row[0]] for row in rows], None, layer_bytes)
    numbers = cheapest_numbers(costs, list(map(len, rows)), list(map(len, columns)))
    row_by_place = [0] * len(places)
    for row, column in zip(*np.nonzero(numbers), strict=True):
        for _ in range(numbers[row, column]):
            row_by_place[columns[column].pop()] = rows[row].pop()
    return row_by_place


def _covers(
    node_by_place: Sequence[int],
    unbound: Sequence[UnboundPipeline],
    *,
    places: Sequence[_PlaceNeeds],
    nodes: Sequence[Node],
    uncovered: frozenset[int],
) -> list[tuple[int, ...]]:
    """Alternative sets of places for trusted nodes, each of which covers the most uncovered layers.

    It is empty if the assignment `node_by_place` already leaves the fewest uncovered layers to
    distrusted nodes.

    Args:
        uncovered: layers that no trusted node of a pipeline that stays holds.
    """
    distrusted = {node.node for node in nodes if not node.is_trusted}
    uncovered_by_place = [uncovered & _union(place.needs) for place in places]
    trusted_layers = _union(
        uncovered_by_place[i] for i, node in enumerate(node_by_place) if node not in distrusted
    )
    if trusted_layers == uncovered:
        return []
    is_for_kinds = any(place.kind is not None for place in places)
    kinds = [place.kind or NodeKind() for place in places]
    num_trusted = Counter(
        node.kind if is_for_kinds else NodeKind() for node in nodes if node.is_trusted
    )
    smallest_cover = widest_cover(uncovered_by_place, kinds, num_trusted)
    if len(_union(uncovered_by_place[place] for place in smallest_cover)) == len(trusted_layers):
        return []
    whole_pipelines = sorted(
        _whole_pipelines(unbound, uncovered_by_place, kinds=kinds, num_trusted=num_trusted),
        key=lambda chosen: sum(node_by_place[place] in distrusted for place in chosen),
    )
    return [smallest_cover, *whole_pipelines[:_WHOLE_PIPELINES_MAX]]


def _union(sets: Iterable[frozenset[int]]) -> frozenset[int]:
    return frozenset[int]().union(*sets)


def _whole_pipelines(
    unbound: Sequence[UnboundPipeline],
    uncovered_by_place: Sequence[frozenset[int]],
    *,
    kinds: Sequence[NodeKind],
    num_trusted: Mapping[NodeKind, int],
) -> Iterator[tuple[int, ...]]:
    """The places with uncovered layers of each pipeline that trusted nodes can fill."""
    first = 0
    for pipeline in unbound:
        end = first + pipeline.template.num_nodes
        places = tuple(place for place in range(first, end) if uncovered_by_place[place])
        needed = Counter(kinds[place] for place in places)
        if all(num_trusted.get(kind, 0) >= number for kind, number in needed.items()):
            yield places
        first = end


def _cheapest_with_cover(
    costs: NDArray[np.float64], nodes: Sequence[Node], covers: Sequence[tuple[int, ...]]
) -> list[int]:
    """The node of each place in the cheapest assignment that has trusted nodes at one cover."""
    is_distrusted = np.array([not node.is_trusted for node in nodes])
    candidates = []
    for cover in covers:
        restricted_costs = costs.copy()
        restricted_costs[np.ix_(is_distrusted, np.array(cover))] = np.inf
        candidates.append(_cheapest_rows(restricted_costs))
    rows = min(candidates, key=lambda rows: costs[rows, np.arange(len(rows))].sum())
    return [nodes[row].node for row in rows]


def _missing_bytes(
    places: Sequence[_PlaceNeeds], nodes: Sequence[Node], layer_bytes: Sequence[int]
) -> NDArray[np.float64]:
    """Bytes that each node would lack at each place; shape [nodes, places], whole numbers."""
    needs = np.array([_flags(place.needs, layer_bytes) for place in places])
    lacks = 1.0 - np.array([_flags(node.held, layer_bytes) for node in nodes])
    state_bytes = np.tile(np.array(layer_bytes, dtype=np.float64), len(nodes[0].held))
    missing: NDArray[np.float64] = (lacks * state_bytes) @ needs.T
    return missing


def _flags(
    layers_by_device: Sequence[frozenset[int]], layer_bytes: Sequence[int]
) -> NDArray[np.float64]:
    """Flags, 1.0 if a device has a layer; the layers of one device after those of another."""
    flags = np.zeros((len(layers_by_device), len(layer_bytes)))
    for device, layers in enumerate(layers_by_device):
        flags[device, list(layers)] = 1.0
    return flags.reshape(-1)


def _steps_away(
    places: Sequence[_PlaceNeeds], nodes: Sequence[Node], before: Plan
) -> NDArray[np.int64]:
    """Steps: 0 at a node's old place, 1 in its old pipeline, else 2; shape [nodes, places]."""
    homes = {
        node: (index, position)
        for index, pipeline in enumerate(before.pipelines)
        for position, node in enumerate(pipeline.nodes)
    }
    home = np.array([homes.get(node.node, (-2, 0)) for node in nodes])[:, None, :]
    place_home = np.array([place.home for place in places])[None, :, :]
    is_pipeline = home[..., 0] == place_home[..., 0]
    is_place = is_pipeline & (home[..., 1] == place_home[..., 1])
    steps: NDArray[np.int64] = 2 - is_pipeline.astype(np.int64) - is_place
    return steps


# -- assignment by classes, if hundreds of nodes and places are equal ------------------------------
# Nodes that hold the same layers form a class, and so do places that need the same layers. How many
# nodes of each class take places of each class is a transportation problem: a linear program whose
# corners are whole numbers. It has one variable per pair of classes, however many nodes there are.


def cheapest_numbers(
    costs: NDArray[np.float64], supplies: Sequence[int], demands: Sequence[int]
) -> NDArray[np.int64]:
    """Number of nodes of each class at places of each class, such that the sum of costs is minimal.

    The result is exact if different costs differ by at least a ten-millionth of the highest cost.

    Args:
        costs: cost of a place for a node, may be infinite; shape [classes of nodes, classes of
            places], as is the result.
        supplies, demands: number of nodes, and of places, in each class; every place gets a node.
    """
    # Slow to import, as in `_cheapest_rows`.
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import eye_array, kron

    num_supplies, num_demands = costs.shape
    is_possible = np.isfinite(costs)
    highest = max(1.0, float(costs[is_possible].max(initial=0.0)))
    by_supply = kron(eye_array(num_supplies), np.ones((1, num_demands)))
    by_demand = kron(np.ones((1, num_supplies)), eye_array(num_demands))
    solution = milp(
        np.where(is_possible, costs / highest, 0.0).reshape(-1),
        bounds=Bounds(0, np.where(is_possible, np.inf, 0.0).reshape(-1)),
        constraints=[
            LinearConstraint(by_supply, ub=supplies),
            LinearConstraint(by_demand, lb=demands, ub=demands),
        ],
        integrality=np.ones(costs.size, dtype=np.int64),
        options={"mip_rel_gap": 0.0},
    )
    assert solution.success, solution.message
    numbers: NDArray[np.int64] = np.rint(solution.x).astype(np.int64).reshape(costs.shape)
    return numbers
