"""Proves how near the search comes to the best layout, on the clusters of Odyssey's figure 6.

There are two classes of layouts, with whole and with split backwards. For each cluster
(papers/odyssey/layouts.py) and class, the benchmark prints the iteration time before the loss, that
of the best layout that the search finds after it, and which share of the throughput is left. Then
it prints the share that is proved: no layout of the class, with any number of pipelines, depths,
layers and microbatches, takes less than that share of the time.

The proof looks at all partitions that a bound does not rule out. It adds up the most microbatches
that a pipeline of each depth can end in that time, over all ways to use the nodes; where these are
enough, it looks at all layouts of such pipelines, with the reductions between them. Last, the
benchmark prints what the ranges cost (resilience.dp_range, pp_range): the gap to the same search
without them.

The goal is 99%. Exits 1 if less is proved.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from time import process_time
from typing import Final

import numpy as np
from numpy.typing import NDArray

from planaria.core.plan import PipelineTemplate
from planaria.estimator.makespan import ends_of_each
from planaria.estimator.reductions import equal_reduce_s
from planaria.papers.odyssey.layouts import (
    CLUSTERS,
    OdysseyCluster,
    best_layout,
    cluster_problem,
    iteration_before,
)
from planaria.planner.layout.depths import Ranges
from planaria.planner.partition.fewest_stages import PartitionRows, can_fit
from planaria.planner.partition.refine import table_of
from planaria.planner.partition.split_times import SplitTimes, least_split_s
from planaria.planner.problem import Problem, Seconds, Shape, stage_costs
from planaria.planner.templates import RankedTemplate, fastest_templates, template_of
from planaria.planner.times import iteration_after

GOAL: Final = 0.99
SHARES: Final = (0.9, 0.95, 0.98, GOAL, 0.995, 0.999)  # Shares that are tried in turn.
SHAPES_MAX: Final = 500_000  # If there are more partitions, nothing is proved.
LAYOUTS_MAX: Final = 20_000  # If there are more layouts of the same depths, nothing is proved.
EVERYWHERE: Final = Ranges(dp=1000, pp=1000)


def main() -> int:
    """Prints a line for each cluster and class; returns 1 if one is below the goal."""
    print(f"{'':<9} {'class':<6} {'before':>8} {'after':>8} {'share':>7} {'published':>9}", end="")
    print(f" {'proved':>7} {'full range':>10} {'search':>8}  pipelines")
    is_below = False
    for cluster in CLUSTERS:
        problem = cluster_problem(cluster)
        for is_split in (False, True):
            is_below |= _compare(replace(problem, splits_backward=is_split), cluster)
    return 1 if is_below else 0


def _compare(problem: Problem, cluster: OdysseyCluster) -> bool:
    """Prints the line of a cluster and class; returns whether less than the goal is proved."""
    before_s, present = iteration_before(problem, cluster)
    num_left = cluster.pipelines * cluster.depth - cluster.num_lost
    began_s = process_time()
    best = best_layout(problem, num_left, present, Ranges())
    search_s = process_time() - began_s
    anywhere = best_layout(problem, num_left, present, EVERYWHERE)
    proved, cuts = 0.0, _Cuts(problem)
    for share in SHARES:
        if _is_beaten(problem, cuts, num_left, share * best.iteration_s):
            break
        proved = share
    print(
        f"{cluster.name:<9} {'split' if problem.splits_backward else 'whole':<6}"
        f" {before_s:7.3f}s {best.iteration_s:7.3f}s {before_s / best.iteration_s:7.2%}"
        f" {cluster.published_percent / 100:9.2%} {proved:7.1%}"
        f" {best.iteration_s / anywhere.iteration_s - 1:10.2%} {search_s:7.2f}s  "
        + " + ".join(
            f"{one.num_nodes} ({count})"
            for one, count in zip(best.templates, best.microbatches, strict=True)
        ),
        flush=True,
    )
    return proved < GOAL


class _Cuts:
    """Costs and bounds that the proofs for all times share."""

    def __init__(self, problem: Problem) -> None:
        self.costs = stage_costs(problem)
        self.split_times = SplitTimes(problem)
        self._ranked: dict[tuple[int, int], RankedTemplate | None] = {}

    def ranked(self, depth: int, count: int) -> RankedTemplate | None:
        """The fastest template of a depth with whole backwards for a number of microbatches; None:
        none fits."""
        if (depth, count) not in self._ranked:
            found = fastest_templates(self.costs, {(depth,): count})
            self._ranked[depth, count] = found.get((depth,))
        return self._ranked[depth, count]


def _is_beaten(problem: Problem, cuts: _Cuts, num_nodes: int, time_s: float) -> bool:
    """Whether some layout may take less than a time; True if that cannot be proved."""
    proof: _Proof | None = None
    for number in range(1, num_nodes + 1):
        proof = _Proof(problem, cuts, number, time_s * (1 - 1e-12), fewer_pipelines=proof)
        try:
            if any(map(proof.is_beaten, _spreads(num_nodes, number))):
                return True
        except _TooManyError:
            return True
    return False


def _spreads(num_nodes: int, number: int, least: int = 1) -> Iterator[tuple[int, ...]]:
    """All ways to distribute nodes over a number of pipelines, sizes ascending.

    Args:
        number: number of pipelines.
        least: lower bound on the nodes of a pipeline.
    """
    if number == 1:
        yield (num_nodes,)
        return
    for first in range(least, num_nodes // number + 1):
        for others in _spreads(num_nodes - first, number - 1, first):
            yield (first, *others)


_Ended = tuple[PipelineTemplate, tuple[float, ...]]  # A pipeline, and when its stages end.


class _TooManyError(Exception):
    """Raised if there are too many partitions or layouts to look at all of them."""


class _Proof:
    """The pipelines that can end in a time, for a number of pipelines.

    Args:
        fewer_pipelines: the proof for one pipeline less, whose reductions take no longer.
    """

    def __init__(
        self,
        problem: Problem,
        cuts: _Cuts,
        num_pipelines: int,
        time_s: float,
        *,
        fewer_pipelines: "_Proof | None",
    ) -> None:
        self.problem = problem
        self._fewer_pipelines = fewer_pipelines
        self.num_pipelines = num_pipelines
        self.time_s = time_s
        self._cuts = cuts
        self._costs = cuts.costs
        self._known: dict[int, int] = {}
        # [u, v]: time by which a stage of layers [u, v) delays the next stage's first microbatch;
        # with whole backwards, the delay of the last microbatch's backward is included.
        (group,) = self._costs.groups
        trip_s = self._costs.round_trip_s(between_nodes=True)
        self._lead_s: Seconds = (
            self._costs.forward_s[group] + 0.5 * trip_s
            if problem.splits_backward
            else self._costs.seconds[group] + trip_s
        )

    def is_beaten(self, depths: Sequence[int]) -> bool:
        """Whether pipelines of these depths can run all microbatches in time.

        Raises:
            _TooManyError: there are too many layouts to find out.
        """
        capacities = [self._capacity(depth) for depth in depths]
        num_spare = sum(capacities) - self.problem.num_microbatches
        if min(capacities) == 0 or num_spare < 0:
            return False
        num_looked_at = 0
        ranges = [range(max(1, most - num_spare), most + 1) for most in capacities]
        for counts in product(*ranges):
            if sum(counts) != self.problem.num_microbatches:
                continue
            found = [list(self._in_time(*size)) for size in zip(depths, counts, strict=True)]
            for pipelines in product(*found):
                templates, ends_s = zip(*pipelines, strict=True)
                if iteration_after(self.problem, templates, ends_s).end_s <= self.time_s:
                    return True
                num_looked_at += 1
                if num_looked_at > LAYOUTS_MAX:
                    raise _TooManyError
        return False

    def _capacity(self, depth: int) -> int:
        """An upper bound on the microbatches that a pipeline of a depth can end in time."""
        if depth not in self._known:
            fewer = self._fewer_pipelines
            most = fewer._capacity(depth) if fewer else self.problem.num_microbatches
            counts = range(most, 0, -1)
            self._known[depth] = next((n for n in counts if self._can_end(depth, n)), 0)
        return self._known[depth]

    def _can_end(self, depth: int, count: int) -> bool:
        try:
            return any(True for _ in self._in_time(depth, count))
        except _TooManyError:
            return True

    def _in_time(self, depth: int, count: int) -> Iterator[_Ended]:
        """The pipelines that end a number of microbatches in time, with the end times of their
        stages, in the order of their bounds.

        Raises:
            _TooManyError: there are too many partitions to look at.
        """
        is_split = self.problem.splits_backward
        ranked = self._cuts.ranked(depth, count)
        if ranked is None or (not is_split and ranked.bound_s > self.time_s):
            return
        rows = self._within(depth, count)
        if not rows.ends.size:
            return
        whole_s = ends_of_each(table_of(self._costs, rows), count)
        bounds_s = least_split_s(self._costs, rows, count) if is_split else whole_s[0]
        bounds_s = np.where(can_fit(self._costs, rows), bounds_s, np.inf)
        for index in np.argsort(bounds_s, kind="stable").tolist():
            if bounds_s[index] > self.time_s:
                return
            template = template_of(self._costs, _shape(rows, index))
            ends_s = (
                self._cuts.split_times.ends_s(template, count)
                if is_split
                else tuple(whole_s[:, index].tolist())
            )
            if ends_s is not None and self._is_reduced_in_time(template, ends_s):
                yield template, ends_s

    def _is_reduced_in_time(self, template: PipelineTemplate, ends_s: Sequence[float]) -> bool:
        """Whether a pipeline ends in time with its reductions, if all others have its partition: no
        other case has shorter reductions.

        Args:
            ends_s: end times of its stages.
        """
        reduce_s = equal_reduce_s(
            self.problem.profile,
            template,
            num_pipelines=self.num_pipelines,
            bytes_factor=self.problem.reduce_bytes_factor,
        )
        both = zip(ends_s, reduce_s, strict=True)
        return all(end_s + sum_s <= self.time_s for end_s, sum_s in both)

    def _within(self, depth: int, count: int) -> PartitionRows:
        """The partitions whose stages can all end their microbatches in time.

        Raises:
            _TooManyError: there are too many to look at.
        """
        costs = self._costs
        (group,) = costs.groups
        nothing = np.zeros((0, 0), dtype=np.int64)
        ends_model = self._ends_model(depth, count)
        ends = np.zeros((1, 1), dtype=np.int64)
        leads_s = np.zeros(1)
        for stage in range(depth):
            firsts = ends[:, -1]
            parts = []
            for end in np.flatnonzero(ends_model[stage + 1]).tolist():
                there = (firsts < end) & self._may_end(leads_s, firsts, end, count)
                rows = np.flatnonzero(there)
                if rows.size:
                    column = np.full((len(rows), 1), end)
                    lead_s = leads_s[rows] + self._lead_s[firsts[rows], end]
                    parts.append((np.hstack((ends[rows], column)), lead_s))
            if not parts:
                return PartitionRows(nothing, nothing, nothing)
            ends = np.vstack([part for part, _ in parts])
            leads_s = np.concatenate([lead_s for _, lead_s in parts])
            if len(ends) > SHAPES_MAX:
                raise _TooManyError
        return PartitionRows(ends[:, :-1].T, ends[:, 1:].T, np.full_like(ends[:, 1:].T, group))

    def _ends_model(self, depth: int, count: int) -> NDArray[np.bool_]:
        """Matrix that tells at [k, u] whether stages from the k-th on can have layers [u, L) and
        end in time, if the stages before them delay them as little as possible."""
        num_layers = self._costs.num_layers
        layers = np.arange(num_layers + 1)
        first_s = np.full((depth + 1, num_layers + 1), np.inf)
        first_s[0, 0] = 0.0
        for stage in range(depth):
            first_s[stage + 1] = (first_s[stage][:, None] + self._lead_s).min(axis=0)
        found = np.zeros((depth + 1, num_layers + 1), dtype=np.bool_)
        found[depth, num_layers] = True
        for stage in reversed(range(depth)):
            in_time = self._may_end(first_s[stage][:, None], layers[:, None], layers, count)
            found[stage] = (in_time & found[stage + 1]).any(axis=1)
        return found

    def _may_end(
        self,
        leads_s: Seconds,
        firsts: NDArray[np.int64],
        ends: NDArray[np.int64] | int,
        count: int,
    ) -> NDArray[np.bool_]:
        """Whether stages of some layers can end a number of microbatches in time.

        Args:
            leads_s: lower bounds on the start of their first microbatches.
            firsts, ends: first layer and end layer of each stage.
        """
        (group,) = self._costs.groups
        found: NDArray[np.bool_] = (
            leads_s + count * self._costs.seconds[group][firsts, ends] <= self.time_s
        )
        return found


def _shape(rows: PartitionRows, index: int) -> Shape:
    return tuple(zip(rows.ends[:, index].tolist(), rows.groups[:, index].tolist(), strict=True))


if __name__ == "__main__":
    sys.exit(main())
