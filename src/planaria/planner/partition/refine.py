"""Local search for the fastest partition by simulated 1F1B, from partitions with a low bound.

A bound leaves out some of what transfers and unequal stages cost a real schedule. So the partitions
that `BoundSearch` finds are only the start of this search. It times them, then those that differ
from the best one by a small change, then those near the next best. It ends when nothing near the
best few is left to time, or the budget is spent. A small change moves the cuts of neighbouring
stages by a layer, moves devices of a node from stage to stage, splits a stage, joins two or all
stages of a node, or exchanges two neighbouring nodes of different kinds with their stages. Changes
that a closed form shows to be slower than the best few are not timed (`least_s`).

Not proved to find the fastest; docs/PLANNER.md compares it with exhaustive search on small
instances. With many microbatches, a partition is timed here for some of them, and the others are
counted at the steady rate of its slowest cycle; the few partitions that remain are then timed in
full (templates.py).

Source: Oobleck (SOSP '23), section 4.1.2.
Differs: the paper takes the partition with the least T1 + T2 + T3 at N_b = 4S.
"""

from bisect import insort
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from typing import Final

import numpy as np

from planaria.estimator.makespan import Seconds, StageTable, makespans_of_each
from planaria.planner.partition.fewest_stages import PartitionRows, can_fit, rows_of
from planaria.planner.problem import Counts, Shape, StageCosts

NUM_KEPT: Final = 5  # Number of best partitions near which the search looks.
ROUNDS_MAX: Final = 12
BUDGET: Final = 2_000_000  # Simulated ticks x stages for one pipeline size.
_FEWEST: Final = 16  # Number of changes that may be timed however little budget is left.
_CHANGES_MAX: Final = 256  # About how many changes move cuts by one layer.
_CUTS_MAX: Final = 9  # Number of cuts tried between two stages whose devices change.
_SETTLED_STAGES: Final = 2  # Microbatches per stage after which the rate is taken for steady.


def nearby(
    costs: StageCosts, starts: Mapping[Counts, Sequence[Shape]], microbatches: Mapping[Counts, int]
) -> dict[Counts, list[Shape]]:
    """The few partitions near given ones that seem to be the fastest, by nodes of each kind.

    All numbers of nodes are searched at once, because a tick of a simulation costs little more for
    hundreds of partitions than for ten.

    Args:
        starts: partitions that fit, by nodes of each kind.
        microbatches: number of microbatches of a pipeline, by its nodes of each kind.
    """
    searches = {counts: _NeighbourSearch(costs, microbatches[counts]) for counts in starts}
    to_time = [(searches[counts], shape) for counts, shapes in starts.items() for shape in shapes]
    for _ in range(ROUNDS_MAX):
        if not to_time:
            break
        _time_partitions(costs, to_time)
        to_time = [
            (search, shape) for search in searches.values() for shape in search.shapes_to_time()
        ]
    return {counts: search.best() for counts, search in searches.items()}


class _NeighbourSearch:
    """The search for one number of nodes."""

    def __init__(self, costs: StageCosts, num_microbatches: int) -> None:
        self.num_microbatches = num_microbatches
        self._costs = costs
        self._budget = BUDGET
        self._best: list[tuple[float, Shape]] = []
        self._seen: set[Shape] = set()
        self._done: set[Shape] = set()

    def best(self) -> list[Shape]:
        """The fastest partitions so far, the best one first."""
        return [shape for _, shape in self._best]

    def learn(self, shape: Shape, seconds: float, stage_ticks: int) -> None:
        """Records how long a partition takes, and charges the budget for its simulation."""
        self._seen.add(shape)
        insort(self._best, (seconds, shape))
        del self._best[NUM_KEPT:]
        self._budget -= stage_ticks

    def shapes_to_time(self) -> list[Shape]:
        """The partitions worth timing near the best one that has any; empty if the search is
        over."""
        for shape in self.best():
            if self._budget > 0 and shape not in self._done:
                self._done.add(shape)
                promising = self._promising(neighbours(self._costs, shape))
                if promising:
                    return promising
        return []

    def _promising(self, shapes: Sequence[Shape]) -> list[Shape]:
        """The partitions that are new, fit, and may be among the best, by ascending lower bound.

        Those with the highest lower bounds are left out where the budget does not suffice for all.
        """
        new = [shape for shape in shapes if shape not in self._seen]
        self._seen.update(new)
        if not new:
            return []
        rows = rows_of(new)
        lowest_s = least_s(table_of(self._costs, rows), self.num_microbatches)
        lowest_s[~can_fit(self._costs, rows)] = np.inf
        limit_s = self._best[-1][0] if len(self._best) == NUM_KEPT else np.inf
        num_stages = max(map(len, new))
        settled = min(self.num_microbatches, _SETTLED_STAGES * num_stages)
        affordable = max(_FEWEST, self._budget // _stage_ticks(num_stages, settled))
        order = np.argsort(lowest_s, kind="stable")[:affordable].tolist()
        return [new[index] for index in order if lowest_s[index] < limit_s]


def _time_partitions(costs: StageCosts, to_time: Sequence[tuple[_NeighbourSearch, Shape]]) -> None:
    """Simulates partitions and tells their searches how long they take."""
    max_settled = _SETTLED_STAGES * max(len(shape) for _, shape in to_time)
    groups: dict[int, list[tuple[_NeighbourSearch, Shape]]] = {}
    for search, shape in to_time:
        groups.setdefault(min(search.num_microbatches, max_settled), []).append((search, shape))
    for settled, group in groups.items():
        table = table_of(costs, rows_of([shape for _, shape in group]))
        seconds = makespans_of_each(table, settled)
        num_left = np.array([search.num_microbatches - settled for search, _ in group])
        if num_left.any():
            seconds = seconds + num_left * steady_period_s(table)
        for (search, shape), shape_s in zip(group, seconds.tolist(), strict=True):
            search.learn(shape, shape_s, _stage_ticks(len(shape), settled))


def _stage_ticks(num_stages: int, num_microbatches: int) -> int:
    return 2 * (num_microbatches + num_stages) * num_stages


def neighbours(costs: StageCosts, shape: Shape) -> list[Shape]:
    """The partitions that differ from this one by one small change, whether they fit or not."""
    shapes = dict.fromkeys((*_cut_moves(shape), *_device_moves(costs, shape)))
    shapes |= dict.fromkeys((*_stage_splits(costs, shape), *_node_joins(costs, shape)))
    shapes |= dict.fromkeys(_node_swaps(costs, shape))
    shapes.pop(shape, None)
    return list(shapes)


def _cut_moves(shape: Shape) -> Iterator[Shape]:
    """Partitions with a run of neighbouring cuts moved by one layer, or a single cut by two."""
    num_cuts = len(shape) - 1
    longest = max(1, _CHANGES_MAX // (2 * max(1, num_cuts)))
    edges = (0, *(end for end, _ in shape))
    for first in range(num_cuts):
        for last in range(first, min(num_cuts, first + longest)):
            # Layers of the stages at either side of the run; at least one layer must remain.
            before = edges[first + 1] - edges[first]
            after = edges[last + 2] - edges[last + 1]
            for step in (-1, 1) if last > first else (-1, 1, -2, 2):
                if -before < step < after:
                    moved = [(end + step, count) for end, count in shape[first : last + 1]]
                    yield (*shape[:first], *moved, *shape[last + 1 :])


def _device_moves(costs: StageCosts, shape: Shape) -> Iterator[Shape]:
    """Partitions with two neighbouring stages of a node joined, or with their devices and layers
    divided in another way."""
    first, device = 0, 0
    for index, ((cut, group), (end, next_group)) in enumerate(pairwise(shape)):
        device += costs.count_of(group)
        if device % costs.devices_per_node:
            joint_group = group + costs.count_of(next_group)
            before, after = shape[:index], shape[index + 2 :]
            if joint_group in costs.groups:
                yield (*before, (end, joint_group), *after)
            for first_group, second_group in _group_pairs(costs, joint_group):
                for new_cut in _cuts(costs, first, end, first_group, second_group):
                    yield (*before, (new_cut, first_group), (end, second_group), *after)
        first = cut


def _stage_splits(costs: StageCosts, shape: Shape) -> Iterator[Shape]:
    """Partitions with a stage of several devices split into two."""
    first = 0
    for index, (end, group) in enumerate(shape):
        for first_group, second_group in _group_pairs(costs, group):
            for cut in _cuts(costs, first, end, first_group, second_group):
                yield (*shape[:index], (cut, first_group), (end, second_group), *shape[index + 1 :])
        first = end


def _group_pairs(costs: StageCosts, group: int) -> Iterator[tuple[int, int]]:
    """Pairs of groups of the same node that together have the devices of a given group."""
    no_devices = costs.group(costs.kind_of(group), 0)
    for count in costs.counts:
        if costs.count_of(group) - count in costs.counts:
            yield no_devices + count, group - count


def _node_joins(costs: StageCosts, shape: Shape) -> Iterator[Shape]:
    """Partitions with all stages of a node, three or more, joined into one.

    `_device_moves` joins the stages of a node that has two.
    """
    if costs.devices_per_node not in costs.counts:
        return
    index = 0
    for node in _nodes(costs, shape):
        end = index + len(node)
        if len(node) > 2:
            whole_group = costs.group(costs.kind_of(node[0][1]), costs.devices_per_node)
            yield (*shape[:index], (shape[end - 1][0], whole_group), *shape[end:])
        index = end


def _node_swaps(costs: StageCosts, shape: Shape) -> Iterator[Shape]:
    """Partitions with two neighbouring nodes of different kinds exchanged, stages included."""
    if len(costs.kinds) == 1:
        return
    nodes = _nodes(costs, shape)
    for index, (first_node, second_node) in enumerate(pairwise(nodes)):
        if costs.kind_of(first_node[0][1]) != costs.kind_of(second_node[0][1]):
            stages = chain(*nodes[:index], second_node, first_node, *nodes[index + 2 :])
            widths, groups = zip(*stages, strict=True)
            yield tuple(zip(accumulate(widths), groups, strict=True))


def _nodes(costs: StageCosts, shape: Shape) -> list[list[tuple[int, int]]]:
    """The stages of each node, as pairs of number of layers and group."""
    nodes: list[list[tuple[int, int]]] = []
    device = first = 0
    for end, group in shape:
        if device % costs.devices_per_node == 0:
            nodes.append([])
        nodes[-1].append((end - first, group))
        device += costs.count_of(group)
        first = end
    return nodes


def _cuts(costs: StageCosts, first: int, end: int, group: int, next_group: int) -> Iterator[int]:
    """The cuts of layers [first, end) between two stages; if there are more than _CUTS_MAX, those
    that divide the time most evenly."""
    cuts = np.arange(first + 1, end)
    uneven_s = np.maximum(costs.seconds[group][first, cuts], costs.seconds[next_group][cuts, end])
    best = np.argsort(uneven_s, kind="stable")[:_CUTS_MAX]
    return (int(cut) for cut in cuts[best] if np.isfinite(uneven_s[cut - first - 1]))


def table_of(costs: StageCosts, rows: PartitionRows) -> StageTable:
    """The seconds of the stages and links of partitions, one column per partition."""
    firsts, ends, groups = rows
    forward_s, backward_s = np.zeros((2, *ends.shape))
    for group in costs.groups:
        has_group = groups == group
        stages = (firsts[has_group], ends[has_group])
        forward_s[has_group] = costs.forward_s[group][stages]
        backward_s[has_group] = costs.backward_s[group][stages]
    devices = np.cumsum(costs.count_of(groups), axis=0)
    between_nodes = devices % costs.devices_per_node == 0
    transfers_s = np.where(between_nodes, costs.transfer_s[1][ends], costs.transfer_s[0][ends])
    latency_s = np.where(between_nodes, costs.latency_s[1], costs.latency_s[0])
    is_last = np.arange(len(ends))[:, None] == len(ends) - 1
    has_no_link = is_last | (groups == 0)
    no_link = np.zeros((1, ends.shape[1]))
    return StageTable(
        forward_s=forward_s,
        backward_s=backward_s,
        transfer_s=np.vstack((no_link, np.where(has_no_link, 0.0, transfers_s))),
        latency_s=np.vstack((no_link, np.where(has_no_link, 0.0, latency_s))),
    )


def steady_period_s(table: StageTable) -> Seconds:
    """Seconds per microbatch of each pipeline once 1F1B is steady.

    Stages k to j pass j - k + 1 microbatches around in a cycle. One turn takes the seconds of all
    these stages and a round trip over each link between them. The slowest cycle sets the rate,
    unless the transfers on a link take longer, since they follow one another.

    Returns:
        array of shape [C].
    """
    periods_s: Seconds = np.maximum(table.transfer_s.max(axis=0), slowest_cycle_s(table))
    return periods_s


def slowest_cycle_s(table: StageTable) -> Seconds:
    """Seconds per stage of each pipeline's slowest cycle, shape [C]."""
    means_s = (cycles_s.max(axis=0) / width for width, cycles_s in _cycles_s(table))
    slowest_s: Seconds = np.max(list(means_s), axis=0)
    return slowest_s


def least_s(table: StageTable, num_microbatches: int) -> Seconds:
    """Lower bound on the makespan of each pipeline; not lower than the bound of bound.py.

    The last microbatch passes all stages forward and backward. Before it, the cycle of stages k to
    j turns once for every j - k + 1 microbatches; it is closed from microbatch S - 1 - j on.

    Returns:
        array of shape [C], in seconds.
    """
    stage_s, trip_s = _stages_and_trips_s(table)
    num_stages = len(stage_s)
    until_s = np.cumsum(stage_s + trip_s, axis=0)
    bounds_s: Seconds = (until_s - trip_s + (num_microbatches - 1) * stage_s).max(axis=0)
    last = np.arange(num_stages)[:, None]
    for width, cycles_s in _cycles_s(table):
        turns = np.maximum(0, num_microbatches - num_stages + last[width - 1 :]) // width
        np.maximum(bounds_s, until_s[-1] + (turns * cycles_s).max(axis=0), out=bounds_s)
    return bounds_s


def _cycles_s(table: StageTable) -> Iterator[tuple[int, Seconds]]:
    """Yields each number of stages from 1 to S, with the seconds of the cycles of so many stages,
    one row per first stage."""
    stage_s, trip_s = _stages_and_trips_s(table)
    until_s = np.vstack((np.zeros_like(stage_s[:1]), np.cumsum(stage_s + trip_s, axis=0)))
    for width in range(1, len(stage_s) + 1):
        yield width, until_s[width:] - until_s[:-width] - trip_s[width - 1 :]


def _stages_and_trips_s(table: StageTable) -> tuple[Seconds, Seconds]:
    """Seconds of a microbatch, forward and backward, in each stage; and those of its round trip
    from each stage to the next."""
    return table.forward_s + table.backward_s, 2 * (table.transfer_s + table.latency_s)[1:]
