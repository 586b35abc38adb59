"""Varuna's answer to a loss: the best symmetric grid of survivors, from the newest save on disk.

A grid has `width` pipelines of one template with `depth` nodes. Every depth that has a template is
tried, with as many pipelines as there are nodes for, and the fastest grid is taken; nodes beyond
width x depth idle. All ranks drop what they hold and load their layers from the newest complete
save. If there is none, they make them from the seed or the given weights, as at the start. What was
trained since the save is trained again. So no layer needs a live holder.

While training goes on, nothing has to be trained again: if nodes join or leave, the job changes to
the best grid for the present nodes, with layers from live holders. Grids with and without the slow
nodes are compared.

Source: Varuna (EuroSys '22), job morphing.
Differs: processes live on; Varuna starts them anew. Varuna's stages have equal numbers of
cut-points; here a template is cut so that stages take equally long. The microbatch size stays, as
it is part of the result. Varuna goes back to a save when nodes join, and saves when it is told that
a node leaves.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf
from operator import attrgetter
from typing import Final

from planaria.core.cluster import ClusterEvent, ClusterState, Node, NodesLost
from planaria.core.plan import PipelineTemplate, Plan, Transition, plain_plan
from planaria.planner.plans import PlanCatalog
from planaria.planner.reroute.reroutes import PricedPlan
from planaria.policies.building import transition_between
from planaria.policies.policy import Prices
from planaria.policies.reinstantiate import unbound_pipelines
from planaria.policies.unequal_nodes import stay_answer, with_kinds
from planaria.restorer.strategies import LEAST_BYTES, RestoreStrategy

POLICY: Final = "morph"


@dataclass(frozen=True, slots=True)
class Morph:
    """The policy that forms the fastest grid."""

    catalog: PlanCatalog
    restoring: RestoreStrategy = LEAST_BYTES

    def propose(
        self, plan: Plan, cluster: ClusterState, event: ClusterEvent, prices: Prices
    ) -> tuple[Transition, ...]:
        """The best grid; if no node is lost, joins or leaves, also the present plan.

        There is no answer with fewer nodes than the smallest template has, nor after a loss if the
        job must not go back. Unless the job goes back to a save on disk, there is none either if
        `ClusterState.lost_layers` names a layer.
        """
        fast = tuple(node for node in cluster.nodes if node.kind.speed >= 1.0)
        pools = dict.fromkeys((cluster.nodes, fast))
        grids = [grid for pool in pools if (grid := self._grid(pool, plan, cluster, prices))]
        if not grids:
            return ()
        best = min(grids, key=attrgetter("iteration_s"))
        if isinstance(event, NodesLost):
            if event.saved is None:
                return ()
            if event.saved.copied is None:
                return (self._from_save(best, plan, event, prices),)
            if cluster.lost_layers(plan.num_layers):
                return ()
            return (self._from_holders(best, plan, cluster, prices, event),)
        if cluster.lost_layers(plan.num_layers):
            return ()
        best_grid = self._from_holders(best, plan, cluster, prices, event)
        if event.joined or event.leaving:
            return (best_grid,)
        kinds = {node.node: node.kind for node in cluster.nodes}
        return (stay_answer(self.catalog, plan, cluster, kinds), best_grid)

    def _grid(
        self, pool: Sequence[Node], plan: Plan, cluster: ClusterState, prices: Prices
    ) -> PricedPlan | None:
        """The best grid of the nodes in `pool`; None if they are too few for any."""
        templates = grid_templates(self.catalog, len(pool))
        if not templates:
            return None
        # The last ones idle: distrusted nodes first, then slow ones, then those without work.
        at_work = set(plan.nodes)
        ordered = sorted(
            pool,
            key=lambda node: (
                not node.is_trusted,
                -node.kind.speed,
                node.node not in at_work,
                node.node,
            ),
        )
        chosen = ordered[: sum(template.num_nodes for template in templates)]
        unbound = unbound_pipelines(templates, plan, frozenset(node.node for node in chosen))
        bound = self.restoring.assignment(
            unbound, chosen, before=plan, layer_bytes=prices.layer_bytes
        )
        kinds = {node.node: node.kind for node in chosen}
        pipelines = with_kinds(Plan(cluster.epoch, bound, ()), kinds).pipelines
        iteration_s, microbatches = self.catalog.distribution([p.template for p in pipelines])
        return PricedPlan(plain_plan(cluster.epoch, pipelines, microbatches), iteration_s)

    def _from_save(
        self, grid: PricedPlan, plan: Plan, event: NodesLost, prices: Prices
    ) -> Transition:
        """The transition in which all ranks load their layers from the save, each node at the speed
        of its link to other nodes."""
        assert event.saved is not None
        per_node = self.catalog.problem.devices_per_node
        bytes_at: Counter[int] = Counter()
        for rank, layers in grid.plan.layers_by_rank.items():
            bytes_at[rank // per_node] += sum(prices.layer_bytes[layer] for layer in layers)
        load_s = 0.0
        if event.saved.source:  # Otherwise all ranks make their layers anew.
            load_s = prices.links["inter_node"].seconds(max(bytes_at.values()))
        return Transition(
            before=plan,
            after=grid.plan,
            rounds=(),
            downtime_s=prices.regroup_s + load_s,
            iteration_s=grid.iteration_s,
            redone_samples=event.saved.redone_samples,
            policy=POLICY,
            answer=_grid_name(grid.plan),
            goes_back=True,
        )

    def _from_holders(
        self,
        grid: PricedPlan,
        plan: Plan,
        cluster: ClusterState,
        prices: Prices,
        event: ClusterEvent,
    ) -> Transition:
        """The transition in which layers come from live holders, or from copies in memory if all
        nodes have gone back to these."""
        return transition_between(
            plan,
            grid.plan,
            cluster,
            prices,
            self.restoring,
            iteration_s=grid.iteration_s,
            redone_samples=event.redone_samples,
            policy=POLICY,
            answer=_grid_name(grid.plan),
        )


def grid_templates(catalog: PlanCatalog, num_nodes: int) -> tuple[PipelineTemplate, ...]:
    """The templates of the fastest grid; empty if there are too few nodes for any.

    A depth whose slowest pipeline alone takes no less than the best iteration so far is skipped.
    """
    num_microbatches = catalog.problem.num_microbatches
    bounds = []
    for depth, template in catalog.templates.items():
        width = min(num_nodes // depth, num_microbatches)
        if width:
            most = ceil(num_microbatches / width)
            bounds.append((catalog.times.makespan_s(template, most), depth, width))
    best_s = inf
    best: tuple[PipelineTemplate, ...] = ()
    for bound_s, depth, width in sorted(bounds):
        if bound_s >= best_s:
            break
        templates = (catalog.templates[depth],) * width
        share, remainder = divmod(num_microbatches, width)
        microbatches = [share + (index < remainder) for index in range(width)]
        iteration_s = catalog.times.iteration_s(templates, microbatches)
        if iteration_s < best_s:
            best_s, best = iteration_s, templates
    return best


def _grid_name(plan: Plan) -> str:
    """The name of a grid from its width and depth, such as "grid 3x2"."""
    return f"grid {len(plan.pipelines)}x{len(plan.pipelines[0].nodes)}"
