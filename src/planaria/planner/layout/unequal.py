"""Plans for nodes that differ in speed and memory.

The method is the one for equal nodes (plans.py), with one template for each combination of numbers
of nodes of each kind. The nodes of a template are in the order that makes it fastest; a slow node
gets fewer layers, and a pipeline of slow nodes fewer microbatches. A template is made for the
microbatches that a pipeline of its speed would get. The templates of the chosen set are made again
for the microbatches that they get there, as long as that makes the set faster.

Not proved to find the best plan; tests/planner/layout/test_unequal.py compares it with all
sets, orders, partitions and batches of small clusters.

Source: none of the papers; they assume equal nodes.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import product
from math import prod
from typing import Final

import numpy as np

from planaria.core.plan import NodeKind, Pipeline, PipelineTemplate, Plan, plain_plan
from planaria.errors import FeasibleValue, InfeasibleError, Limit
from planaria.planner.layout.distribution import check_microbatches
from planaria.planner.layout.instantiate import sets_of
from planaria.planner.layout.sets import PipelineSet, SetSearch, distribute_microbatches
from planaria.planner.partition.fewest_stages import FewestStages
from planaria.planner.partition.positions import Positions
from planaria.planner.partition.windows import windows
from planaria.planner.plans import PlanCatalog
from planaria.planner.problem import Counts, Problem, stage_costs
from planaria.planner.templates import RankedTemplate, fastest_templates
from planaria.planner.times import PlainTimes

PARTS_MAX: Final = 1500  # Bound on combinations of numbers of nodes of each kind.
EFFORT_MAX: Final = 16_000  # Takes 0.5 s; 24 nodes and 34 layers are 39,000 and take 1.1 s.
_ROUNDING: Final = 1e-9  # Tolerance for rounding errors in sums of speeds.


class UnequalPlanner:
    """Plans for any of the given nodes that are left.

    Args:
        nodes: kinds of the nodes, by node number.

    Attributes:
        times: times of the templates' pipelines.
        ranked: objective and bound of each template made so far.

    Raises:
        InfeasibleError: there are too many kinds, or no pipeline of these nodes holds the model.
    """

    def __init__(self, problem: Problem, nodes: Mapping[int, NodeKind]) -> None:
        self._problem = problem
        self._nodes = nodes
        self._costs = stage_costs(problem, sorted(set(nodes.values())))
        counts = self._counts(nodes)
        num_parts = prod(count + 1 for count in counts)
        if num_parts > PARTS_MAX:
            why = f"make {num_parts} different pipelines; at most {PARTS_MAX} work: give "
            why += "nodes that are nearly alike the same speed and memory"
            raise InfeasibleError(Limit.KINDS, len(self._costs.kinds), why)
        self.ranked: dict[PipelineTemplate, RankedTemplate] = {}
        self._templates = self._fastest(self._microbatches(counts))
        self.times = PlainTimes(problem, self._templates.values())
        self._search = SetSearch(problem, self._templates, self.times)

    def plan(self, nodes: Collection[int], *, min_pipelines: int, epoch: int) -> Plan:
        """The plan with the lowest predicted iteration time in which each of the nodes works.

        Raises:
            InfeasibleError: no min_pipelines or more pipelines that hold the model use all nodes,
                or there are fewer microbatches than pipelines.
        """
        check_microbatches(self._problem, min_pipelines)
        counts = self._counts(nodes)
        best = self._search.fastest(counts, min_pipelines)
        if best is None:
            raise self._no_plan_error(nodes, min_pipelines)
        templates, microbatches = self._mutually_best(best)
        unused = {
            kind: iter([node for node in sorted(nodes) if self._nodes[node] == kind])
            for kind in self._costs.kinds
        }
        pipelines = tuple(
            Pipeline(template, tuple(next(unused[kind]) for kind in template.node_kinds))
            for template in templates
        )
        return plain_plan(epoch, pipelines, microbatches)

    def templates(
        self, nodes: Collection[int], *, min_pipelines: int
    ) -> Sequence[PipelineTemplate]:
        """Templates of the plan with the lowest predicted iteration time; empty if there is no
        plan."""
        best = self._search.fastest(self._counts(nodes), min_pipelines)
        return self._mutually_best(best)[0] if best is not None else ()

    def most_pipelines(self, nodes: Collection[int], *, at_most: int) -> int:
        """The largest n up to at_most for which n or more pipelines that hold the model use all of
        these nodes; 0 if there is none."""
        sizes, counts = list(self._templates), self._counts(nodes)
        for number in range(at_most, 0, -1):
            if next(sets_of(counts, sizes, min_pipelines=number), None) is not None:
                return number
        return 0

    def _counts(self, nodes: Collection[int]) -> Counts:
        kinds = Counter(self._nodes[node] for node in nodes)
        return tuple(kinds[kind] for kind in self._costs.kinds)

    def _microbatches(self, nodes: Counts) -> dict[Counts, int]:
        """Number of microbatches of a pipeline if all pipelines were as fast as it, by its number
        of nodes of each kind.

        All pipelines are included that hold the model and leave enough nodes for f of the smallest
        ones. So are those of up to 2 * n0 - 1 nodes, because fewer than (f + 1) * n0 nodes may need
        one.
        """
        costs = self._costs
        fewest_stages = FewestStages(costs, Positions(costs, nodes), windows(costs, 1, np.inf))
        parts = product(*(range(count + 1) for count in nodes))
        feasible = [part for part in parts if any(part) and fewest_stages.is_feasible(part)]
        if not feasible:
            why = "no pipeline of them holds the model; give them more memory, or more of them"
            raise InfeasibleError(Limit.NODES, sum(nodes), why)
        n0 = min(map(sum, feasible))
        max_nodes = max(2 * n0 - 1, sum(nodes) - self._problem.failures_tolerated * n0)
        speeds = np.array([kind.speed for kind in costs.kinds])
        microbatches: dict[Counts, int] = {}
        for part in feasible:
            if sum(part) <= max_nodes:
                num_alike = max(1, int(nodes @ speeds / (part @ speeds) + _ROUNDING))
                microbatches[part] = -(-self._problem.num_microbatches // num_alike)
        return microbatches

    def _fastest(self, microbatches: Mapping[Counts, int]) -> dict[Counts, PipelineTemplate]:
        ranked = fastest_templates(self._costs, microbatches)
        self.ranked.update(
            (ranked_template.template, ranked_template) for ranked_template in ranked.values()
        )
        return {part: ranked_template.template for part, ranked_template in ranked.items()}

    def _mutually_best(
        self, best: PipelineSet
    ) -> tuple[Sequence[PipelineTemplate], tuple[int, ...]]:
        """Templates of a set and the number of microbatches of each pipeline.

        Templates are made again for the numbers, and numbers distributed again for the templates,
        as long as that makes the set faster.
        """
        templates: Sequence[PipelineTemplate] = [self._templates[size] for size in best.sizes]
        iteration_s, microbatches = best.iteration_s, best.microbatches
        while True:
            pairs = list(zip(best.sizes, microbatches, strict=True))
            by_count = {
                count: self._fastest({size: count for size, number in pairs if number == count})
                for count in set(microbatches)
            }
            new_templates = [by_count[count][size] for size, count in pairs]
            new_microbatches = distribute_microbatches(
                self._problem, new_templates, times=self.times
            )
            next_s = self.times.iteration_s(new_templates, new_microbatches)
            if next_s >= iteration_s:
                return templates, microbatches
            iteration_s, templates, microbatches = next_s, new_templates, new_microbatches

    def _no_plan_error(self, nodes: Collection[int], min_pipelines: int) -> InfeasibleError:
        """The error that says why no set of pipelines uses these nodes, and what would work."""
        num_possible = self.most_pipelines(nodes, at_most=min_pipelines)
        if num_possible == min_pipelines:
            why = "all nodes work only in more pipelines than there are microbatches"
            remedy = FeasibleValue(Limit.MICROBATCHES, len(nodes), or_more=True)
            return InfeasibleError(Limit.MICROBATCHES, self._problem.num_microbatches, why, remedy)
        why = f"they make no {min_pipelines} pipelines that hold the model"
        if num_possible:
            return InfeasibleError(
                Limit.NODES, len(nodes), why, FeasibleValue(Limit.FAILURES, num_possible - 1)
            )
        why += "; some fit in no pipeline with any of the others: leave them out"
        return InfeasibleError(Limit.NODES, len(nodes), why)


def planning_effort(problem: Problem, nodes: Mapping[int, NodeKind]) -> int:
    """The effort of planning for these nodes: possible pipelines x nodes x layers."""
    num_parts = prod(count + 1 for count in Counter(nodes.values()).values())
    return num_parts * len(nodes) * len(problem.profile.layers)


def unequal_plans(
    problem: Problem, nodes: Mapping[int, NodeKind]
) -> tuple[PlanCatalog, tuple[RankedTemplate, ...]]:
    """The best plans for all nodes and for those left when the 1 to f fastest nodes fail; and the
    templates that the plan for all nodes uses.

    Where too few nodes are left for f + 1 pipelines, the plan has as many as possible; there is no
    plan where no pipelines use all nodes that are left.

    Raises:
        InfeasibleError: `UnequalPlanner` or its `plan` raises it.
    """
    planner = UnequalPlanner(problem, nodes)
    min_pipelines = problem.failures_tolerated + 1
    plans = {len(nodes): planner.plan(nodes, min_pipelines=min_pipelines, epoch=0)}
    slowest_first = sorted(nodes, key=lambda node: (nodes[node].speed, -node))
    for num_left in range(len(nodes) - 1, len(nodes) - min_pipelines, -1):
        nodes_left = slowest_first[:num_left]
        max_pipelines = planner.most_pipelines(nodes_left, at_most=min_pipelines)
        if max_pipelines:
            plans[num_left] = planner.plan(nodes_left, min_pipelines=max_pipelines, epoch=0)
    catalog = PlanCatalog(problem=problem, templates={}, plans=plans, times=planner.times)
    used = dict.fromkeys(pipeline.template for pipeline in plans[len(nodes)].pipelines)
    return catalog, tuple(planner.ranked[template] for template in used)
