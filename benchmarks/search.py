"""How near to the best layout the search comes, on the clusters of Odyssey's figure 6.

For each line of odyssey-figure-6.toml: what an iteration takes before the loss, with whole and with
split backwards; what the best layout that the search finds takes after it, in each of these two
classes; and what share of the throughput that is. Then what is proved of it: no layout of its
class, of any number of pipelines, depths, layers and microbatches, takes less than that share of
its time.
To this end all partitions are looked at that a bound does not rule out: the most microbatches that
a pipeline of each depth ends in a time, added up over all ways to use the nodes. Last, what the
ranges cost (resilience.dp_range, pp_range): the same search without them.

The goal is 99%. Exits 1 if less is proved.
"""

import sys
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import process_time
from typing import Any, Final

import numpy as np

from planaria.core.plan import LayerProfile, ModelProfile, PipelineTemplate
from planaria.estimator.reductions import equal_reduce_s
from planaria.planner.depths import Ranges
from planaria.planner.fitting import Rows, fitting
from planaria.planner.partitions import Partitions
from planaria.planner.plans import bind
from planaria.planner.problem import Problem, Seconds, Shape, stage_costs
from planaria.planner.refine import least_s, table_of
from planaria.planner.reroutes import simulated_s, with_split_backwards
from planaria.planner.search import Layout, layouts
from planaria.planner.split_times import least_split_s
from planaria.planner.templates import RankedTemplate, fastest_templates, template_of
from planaria.planner.times import PlainTimes
from planaria.planning import read_profile

GOAL: Final = 0.99
SHARES: Final = (0.9, 0.95, 0.98, GOAL, 0.995, 0.999)  # That are tried in turn.
SHAPES_MAX: Final = 100_000  # More are not looked at: nothing is proved then.
EVERYWHERE: Final = Ranges(dp=1000, pp=1000)
LAYOUTS: Final = Path(__file__).with_name("odyssey-figure-6.toml")


def main() -> int:
    """Prints a line for each cluster and class; 1 if one is below the goal."""
    told = tomllib.loads(LAYOUTS.read_text())
    profile = replace(
        read_profile(Path(told["model"])), device_memory_bytes=told["device_memory_bytes"]
    )
    print(f"{'':<9} {'class':<6} {'before':>8} {'after':>8} {'share':>7} {'published':>9}", end="")
    print(f" {'proved':>7} {'full range':>10} {'search':>8}  pipelines")
    is_below = False
    for cluster in told["layout"]:
        problem = _problem(profile, cluster)
        for is_split in (False, True):
            is_below |= _compare(replace(problem, splits_backward=is_split), cluster)
    return 1 if is_below else 0


def _compare(problem: Problem, cluster: dict[str, Any]) -> bool:
    """Whether less than the goal is proved."""
    depth, number = cluster["depth"], cluster["pipelines"]
    count = problem.num_microbatches // number
    template = fastest_templates(stage_costs(problem), {(depth,): count})[(depth,)].template
    present = [template] * number
    plan = bind(problem, present, range(number * depth), epoch=0)
    if problem.splits_backward:
        plan = with_split_backwards(problem, plan)
    before_s = simulated_s(problem, plan)
    num_left = number * depth - cluster["lost"]
    began_s = process_time()
    best = _best(problem, num_left, present, Ranges())
    search_s = process_time() - began_s
    anywhere = _best(problem, num_left, present, EVERYWHERE)
    proved, cuts = 0.0, _Cuts(problem)
    for share in SHARES:
        if _is_beaten(problem, cuts, num_left, share * best.iteration_s):
            break
        proved = share
    print(
        f"{cluster['name']:<9} {'split' if problem.splits_backward else 'whole':<6}"
        f" {before_s:7.3f}s {best.iteration_s:7.3f}s {before_s / best.iteration_s:7.2%}"
        f" {cluster['published']:9.2%} {proved:7.1%}"
        f" {best.iteration_s / anywhere.iteration_s - 1:10.2%} {search_s:7.2f}s  "
        + " + ".join(
            f"{one.num_nodes} ({count})"
            for one, count in zip(best.templates, best.microbatches, strict=True)
        ),
        flush=True,
    )
    return proved < GOAL


def _best(
    problem: Problem, num_nodes: int, present: Sequence[PipelineTemplate], ranges: Ranges
) -> Layout:
    """The fastest layout of the problem's class that the whole search finds."""
    found: dict[bool, Layout] = {}
    for front in layouts(problem, num_nodes, present=present, ranges=ranges):
        for layout in front:
            known = found.get(layout.splits_backward)
            if known is None or layout.iteration_s < known.iteration_s:
                found[layout.splits_backward] = layout
    return found[problem.splits_backward]


def _problem(profile: ModelProfile, cluster: dict[str, Any]) -> Problem:
    """A stage is a node with all its devices."""
    count = cluster["devices_per_stage"]
    return Problem(
        profile=replace(profile, layers=tuple(_on(layer, count) for layer in profile.layers)),
        devices_per_node=count,
        num_microbatches=cluster["microbatches"],
        failures_tolerated=0,
    )


def _on(layer: LayerProfile, count: int) -> LayerProfile:
    return replace(
        layer,
        forward_s={count: layer.forward_s[count]},
        backward_input_s={count: layer.backward_input_s[count]},
        backward_weight_s={count: layer.backward_weight_s[count]},
    )


class _Cuts:
    """What serves proofs for all times: partitions, and their bounds with whole backwards."""

    def __init__(self, problem: Problem) -> None:
        self.costs = stage_costs(problem)
        self.plain = PlainTimes(problem)
        self.partitions = Partitions(problem)
        self._ranked: dict[tuple[int, int], RankedTemplate | None] = {}

    def ranked(self, depth: int, count: int) -> RankedTemplate | None:
        """The fastest with whole backwards, None if none fits."""
        if (depth, count) not in self._ranked:
            found = fastest_templates(self.costs, {(depth,): count})
            self._ranked[depth, count] = found.get((depth,))
        return self._ranked[depth, count]


def _is_beaten(problem: Problem, cuts: _Cuts, num_nodes: int, time_s: float) -> bool:
    """Whether some layout may be faster than that."""
    for number in range(1, num_nodes + 1):
        proof = _Proof(problem, cuts, number, time_s * (1 - 1e-12))
        # The most that so many pipelines on so many nodes end.
        ended = {(0, 0): 0}
        for pipelines in range(number):
            for (used, nodes), most in list(ended.items()):
                if used != pipelines:
                    continue
                for depth in range(1, num_nodes - nodes + 1):
                    capacity = proof.capacity(depth)
                    if capacity:
                        key = used + 1, nodes + depth
                        ended[key] = max(ended.get(key, 0), most + capacity)
        if ended.get((number, num_nodes), 0) >= problem.num_microbatches:
            return True
    return False


class _Proof:
    """What pipelines end in a time, where there are so many of them."""

    def __init__(self, problem: Problem, cuts: _Cuts, num_pipelines: int, time_s: float) -> None:
        self.problem = problem
        self.num_pipelines = num_pipelines
        self.time_s = time_s
        self._cuts = cuts
        self._costs = cuts.costs
        self._partitions = cuts.partitions
        self._known: dict[int, int] = {}

    def capacity(self, depth: int) -> int:
        """The most microbatches that some pipeline of so many nodes ends, or more."""
        if depth not in self._known:
            self._known[depth] = next(
                (n for n in range(self.problem.num_microbatches, 0, -1) if self._can_end(depth, n)),
                0,
            )
        return self._known[depth]

    def _can_end(self, depth: int, count: int) -> bool:
        size = depth, count
        ranked = self._cuts.ranked(depth, count)
        if ranked is None or (not self.problem.splits_backward and ranked.bound_s > self.time_s):
            return False
        known = self._partitions.whole(size)
        if known is not None and self.problem.splits_backward:
            for _ in self._partitions.improve_split(size):
                pass
            known = self._partitions.split(size)
        if known is not None and self._takes_s(known, count) <= self.time_s:
            return True
        rows = self._within(depth, count)
        if rows is None:
            return True
        if not rows.ends.size:
            return False
        bounds_s = np.where(
            fitting(self._costs, rows),
            self._least_s(rows, count),
            np.inf,
        )
        in_order = np.argsort(bounds_s, kind="stable")
        return any(
            self._takes_s(template_of(self._costs, shape), count) <= self.time_s
            for index in in_order[: int((bounds_s <= self.time_s).sum())].tolist()
            for shape in [_shape(rows, index)]
        )

    def _least_s(self, rows: Rows, count: int) -> Seconds:
        if not self.problem.splits_backward:
            return least_s(table_of(self._costs, rows), count)
        return least_split_s(self._costs, rows, count)

    def _takes_s(self, template: PipelineTemplate, count: int) -> float:
        """With the reductions that it has if all others are cut like it: no others are shorter."""
        if not self.problem.splits_backward:
            times = self._cuts.plain.of_each_number(template, num_pipelines=self.num_pipelines)
            return float(times[count - 1])
        ends_s = self._partitions.split_times.ends_s(template, count)
        if ends_s is None:
            return float("inf")
        reduce_s = equal_reduce_s(
            self.problem.profile,
            template,
            num_pipelines=self.num_pipelines,
            bytes_factor=self.problem.reduce_bytes_factor,
        )
        return max(end_s + sum_s for end_s, sum_s in zip(ends_s, reduce_s, strict=True))

    def _within(self, depth: int, count: int) -> Rows | None:
        """The partitions whose stages can all have done their microbatches in time; None if they
        are too many to look at."""
        costs = self._costs
        (group,) = costs.groups
        nothing = np.zeros((0, 0), dtype=np.int64)
        if depth > costs.num_layers:
            return Rows(nothing, nothing, nothing)
        stage_s, trip_s = costs.seconds[group], costs.round_trip_s(between_nodes=True)
        share = 0.5 if self.problem.splits_backward else 1.0
        lead_of = costs.forward_s[group] if self.problem.splits_backward else stage_s
        ends = np.zeros((1, 1), dtype=np.int64)
        leads_s = np.zeros(1)
        for stage in range(depth):
            last = costs.num_layers - (depth - stage - 1)
            firsts = ends[:, -1]
            options = [costs.num_layers] if stage == depth - 1 else range(stage + 1, last + 1)
            parts = []
            for end in options:
                there = (firsts < end) & (leads_s + count * stage_s[firsts, end] <= self.time_s)
                if there.any():
                    rows = np.flatnonzero(there)
                    column = np.full((len(rows), 1), end)
                    lead_s = leads_s[rows] + lead_of[firsts[rows], end] + share * trip_s[end]
                    parts.append((np.hstack((ends[rows], column)), lead_s))
            if not parts:
                return Rows(nothing, nothing, nothing)
            ends = np.vstack([part for part, _ in parts])
            leads_s = np.concatenate([lead_s for _, lead_s in parts])
            if len(ends) > SHAPES_MAX:
                return None
        return Rows(ends[:, :-1].T, ends[:, 1:].T, np.full_like(ends[:, 1:].T, group))


def _shape(rows: Rows, index: int) -> Shape:
    return tuple(zip(rows.ends[:, index].tolist(), rows.groups[:, index].tolist(), strict=True))


if __name__ == "__main__":
    sys.exit(main())
