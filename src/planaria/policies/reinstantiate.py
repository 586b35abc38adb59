"""Oobleck's answer to a loss: pipelines made anew from templates, so that every survivor works.

The local answer tries three steps for each pipeline that lost nodes, and changes few others:
1. Simple: the pipeline takes the template for its remaining nodes.
2. Borrow: it takes nodes from other pipelines, one at a time from the largest, until it has enough
   for the smallest template that fits. The lenders shrink to smaller templates.
3. Merge: if the others cannot lend enough, it joins the smallest other pipeline. If there is no
   template that large, the nodes of both are split over several templates.

The global answer is the plan that was made at the start for the number of remaining nodes,
regardless of the present pipelines. Both answers are bound to nodes such that the fewest bytes move
(unless another strategy to restore the job is given), and microbatches are distributed anew; the
global batch stays the same.

Source: Oobleck (SOSP '23), sections 4.2 and 5, figure 8.
Differs: all short pipelines are considered together, the one that lacks the fewest nodes first,
because its turn leaves most for the others; after a merge the next one may borrow again. A pipeline
that lost all nodes is made anew only if fewer than f + 1 would be left, else it is given up. Nodes
without work lend first. The global answer is not in the paper. A local answer is dropped if it has
fewer pipelines than the global one and fewer than f + 1, or if it gives work to fewer nodes, as
when new nodes join. With fewer than (f + 1) * n0 nodes Oobleck stops; here both answers go on with
the pipelines that fit.

Answers that leave more layers to distrusted nodes alone than another answer are dropped. If all
leave some, though trusted nodes could hold the whole model, there is a third answer: one pipeline
of trusted nodes, and the plan for the number of the other nodes.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from operator import itemgetter

from planaria.core.cluster import ClusterEvent, ClusterState, Node
from planaria.core.plan import Pipeline, PipelineTemplate, Plan, Transition, plain_plan
from planaria.planner.layout.instantiate import instantiations
from planaria.planner.plans import PlanCatalog
from planaria.policies.building import least_exposed, num_exposed, transition_between
from planaria.policies.policy import Prices
from planaria.restorer.assignment import UnboundPipeline
from planaria.restorer.cover import trusted_layers
from planaria.restorer.strategies import LEAST_BYTES, RestoreStrategy

POLICY = "reinstantiate"
GLOBAL = "global"
TRUSTED = "trusted"

_OUT_OF_REACH = 1 << 62


class LocalStep(IntEnum):
    """The steps of the local answer; a higher one changes more."""

    SIMPLE = 1
    BORROW = 2
    MERGE = 3


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """A pipeline as a number of nodes.

    Attributes:
        index: index of the pipeline in the plan before; -1: new.
        num_nodes: number of its nodes.
    """

    index: int
    num_nodes: int


@dataclass(frozen=True, slots=True)
class LocalAnswer:
    """The pipelines of a local answer.

    Attributes:
        parts: pipelines in the order of those that they replace, new ones last.
        step: highest step that was taken.
    """

    parts: tuple[Part, ...]
    step: LocalStep


@dataclass(frozen=True, slots=True)
class Reinstantiate:
    """The policy that makes pipelines anew; without plans in `every` it has only local answers."""

    catalog: PlanCatalog
    restoring: RestoreStrategy = LEAST_BYTES

    def propose(
        self, plan: Plan, cluster: ClusterState, event: ClusterEvent, prices: Prices
    ) -> tuple[Transition, ...]:
        """The local answer, the global one and, if needed, the third, as far as they exist.

        There is no answer with fewer than n0 nodes, nor if `ClusterState.lost_layers` names a
        layer: then only a checkpoint helps.
        """
        if cluster.lost_layers(plan.num_layers):
            return ()
        local = self._local_pipelines(plan, cluster, prices=prices)
        overall = self._global_pipelines(plan, cluster, prices=prices)
        if local and overall:
            wanted = min(self.catalog.problem.failures_tolerated + 1, len(overall[0]))
            if len(local[0]) < wanted or _num_nodes(local[0]) < _num_nodes(overall[0]):
                local = None
            elif local[0] == overall[0]:
                overall = None
        transitions = tuple(
            self.transition(pipelines, answer, plan, cluster, event, prices)
            for pipelines, answer in filter(None, (local, overall))
        )
        if all(num_exposed(transition.after, cluster) for transition in transitions):
            transitions += self._with_trusted_pipeline(plan, cluster, event, prices)
        return least_exposed(transitions, cluster)

    def transition(
        self,
        pipelines: tuple[Pipeline, ...],
        answer: str,
        plan: Plan,
        cluster: ClusterState,
        event: ClusterEvent,
        prices: Prices,
    ) -> Transition:
        """The transition from a plan to these pipelines, with microbatches distributed anew."""
        iteration_s, microbatches = self.catalog.distribution([p.template for p in pipelines])
        after = plain_plan(cluster.epoch, pipelines, microbatches)
        return transition_between(
            plan,
            after,
            cluster,
            prices,
            self.restoring,
            iteration_s=iteration_s,
            redone_samples=event.redone_samples,
            policy=POLICY,
            answer=answer,
        )

    def _local_pipelines(
        self, plan: Plan, cluster: ClusterState, *, prices: Prices
    ) -> tuple[tuple[Pipeline, ...], str] | None:
        """The pipelines of the local answer, and the name of the highest step taken; None if there
        is no such answer."""
        alive = {node.node for node in cluster.nodes}
        remaining = [len(alive.intersection(pipeline.nodes)) for pipeline in plan.pipelines]
        answer = local_answer(
            [len(pipeline.nodes) for pipeline in plan.pipelines],
            remaining,
            self.catalog.templates.keys(),
            num_idle=len(alive) - sum(remaining),
            min_pipelines=self.catalog.problem.failures_tolerated + 1,
        )
        if answer is None or len(answer.parts) > self.catalog.problem.num_microbatches:
            return None
        parts = set(answer.parts)
        kept = {
            index: pipeline
            for index, pipeline in enumerate(plan.pipelines)
            if remaining[index] == len(pipeline.nodes) and Part(index, remaining[index]) in parts
        }
        unbound = [
            UnboundPipeline(self.catalog.templates[part.num_nodes], part.index)
            for part in answer.parts
            if part.index not in kept
        ]
        busy = {node for pipeline in kept.values() for node in pipeline.nodes}
        free = [node for node in cluster.nodes if node.node not in busy]
        bound = self.restoring.assignment(
            unbound,
            _without_surplus(free, unbound),
            before=plan,
            layer_bytes=prices.layer_bytes,
            covered=trusted_layers(kept.values(), cluster.distrusted_nodes),
        )
        new_pipelines = iter(bound)
        pipelines = tuple(
            kept[part.index] if part.index in kept else next(new_pipelines) for part in answer.parts
        )
        return pipelines, answer.step.name.lower()

    def _global_pipelines(
        self, plan: Plan, cluster: ClusterState, *, prices: Prices
    ) -> tuple[tuple[Pipeline, ...], str] | None:
        """The pipelines of the global answer, and its name; None if there is no such plan."""
        planned = self.catalog.plans.get(len(cluster.nodes))
        if planned is None:
            return None
        templates = [pipeline.template for pipeline in planned.pipelines]
        return self._bound_pipelines(templates, plan, cluster, prices=prices), GLOBAL

    def _bound_pipelines(
        self,
        templates: Sequence[PipelineTemplate],
        plan: Plan,
        cluster: ClusterState,
        *,
        prices: Prices,
    ) -> tuple[Pipeline, ...]:
        """The pipelines of these templates, bound to all nodes anew."""
        unbound = unbound_pipelines(templates, plan, frozenset(node.node for node in cluster.nodes))
        return self.restoring.assignment(
            unbound,
            _without_surplus(cluster.nodes, unbound),
            before=plan,
            layer_bytes=prices.layer_bytes,
        )

    def _with_trusted_pipeline(
        self, plan: Plan, cluster: ClusterState, event: ClusterEvent, prices: Prices
    ) -> tuple[Transition, ...]:
        """The fastest answer that consists of a pipeline which trusted nodes can fill and the plan
        for the number of the other nodes.

        It has f + 1 pipelines, or as many as the global answer if that has fewer, and at least as
        many nodes at work as the global answer.
        """
        catalog, num_nodes = self.catalog, len(cluster.nodes)
        num_trusted = sum(node.is_trusted for node in cluster.nodes)
        planned = catalog.plans.get(num_nodes)
        if planned is None or num_trusted == num_nodes:
            return ()
        wanted = min(catalog.problem.failures_tolerated + 1, len(planned.pipelines))
        options = []
        for size, template in sorted(catalog.templates.items()):
            rest = catalog.plans.get(num_nodes - size)
            if rest is None or size > num_trusted:
                continue
            templates = (template, *(pipeline.template for pipeline in rest.pipelines))
            is_right = wanted <= len(templates) <= catalog.problem.num_microbatches
            if is_right and size + len(rest.nodes) >= len(planned.nodes):
                options.append((catalog.distribution(templates)[0], templates))
        if not options:
            return ()
        _, templates = min(options, key=itemgetter(0))
        pipelines = self._bound_pipelines(templates, plan, cluster, prices=prices)
        return (self.transition(pipelines, TRUSTED, plan, cluster, event, prices),)


def _without_surplus(nodes: Sequence[Node], unbound: Sequence[UnboundPipeline]) -> Sequence[Node]:
    """The nodes without the slowest of those that hold no layer, if there are more than places.

    If a node is distrusted, all stay, because places may need trusted nodes, whatever their speed.
    """
    num_surplus = len(nodes) - sum(pipeline.template.num_nodes for pipeline in unbound)
    if num_surplus <= 0 or not all(node.is_trusted for node in nodes):
        return nodes
    empty = [node for node in nodes if not any(node.held)]
    empty.sort(key=lambda node: (node.kind.speed, -node.node))
    surplus = {node.node for node in empty[:num_surplus]}
    return [node for node in nodes if node.node not in surplus]


def _num_nodes(pipelines: Sequence[Pipeline]) -> int:
    return sum(len(pipeline.nodes) for pipeline in pipelines)


def local_answer(
    before: Sequence[int],
    remaining: Sequence[int],
    sizes: Collection[int],
    *,
    num_idle: int,
    min_pipelines: int,
) -> LocalAnswer | None:
    """The result of the three steps in numbers of nodes; None if the survivors make no pipeline.

    Args:
        before: number of nodes of each pipeline before the loss.
        remaining: number of survivors in each pipeline.
        sizes: numbers of nodes for which there are templates.
        num_idle: number of survivors without work.
        min_pipelines: number of pipelines to reach if possible, f + 1.
    """
    parts = [Part(index, num_left) for index, num_left in enumerate(remaining) if num_left]
    given_up = [Part(index, 0) for index, num_left in enumerate(remaining) if not num_left]
    parts += given_up[: max(0, min_pipelines - len(parts))]
    intact = {Part(i, nodes) for i, nodes in enumerate(before) if remaining[i] == nodes}
    step = LocalStep.SIMPLE
    # The loop ends, since each turn leaves fewer short pipelines, or fewer pipelines.
    while short := [part for part in parts if part not in intact and part.num_nodes not in sizes]:
        part = min(short, key=lambda part: (_smallest_fit(part, sizes) - part.num_nodes, part))
        others = _parts_without(part, parts)
        enlarged = _parts_after_borrowing(part, others, sizes, intact=intact, num_idle=num_idle)
        if enlarged is not None:
            (parts, num_idle), step = enlarged, max(step, LocalStep.BORROW)
        elif part.num_nodes == 0:
            parts = others
        else:
            merged = _parts_after_merging(part, others, sizes)
            if merged is None:
                return None
            parts, step = merged, LocalStep.MERGE
    parts.sort(key=lambda part: (part.index < 0, part))
    return LocalAnswer(tuple(parts), step) if parts else None


def _smallest_fit(part: Part, sizes: Collection[int]) -> int:
    """The smallest template size that has room for the part's nodes; _OUT_OF_REACH if none has."""
    return min((size for size in sizes if size >= part.num_nodes), default=_OUT_OF_REACH)


def _parts_after_borrowing(
    part: Part,
    others: Sequence[Part],
    sizes: Collection[int],
    *,
    intact: Collection[Part],
    num_idle: int,
) -> tuple[list[Part], int] | None:
    """The parts after `part` has got enough nodes, and the number of nodes that are still idle;
    None if the others cannot lend enough.

    Of the largest pipelines, one that changes anyway lends first.
    """
    num_nodes = _smallest_fit(part, sizes)
    if num_nodes == _OUT_OF_REACH:
        return None
    num_from_idle = min(num_idle, num_nodes - part.num_nodes)
    lending = list(others)
    for _ in range(num_nodes - part.num_nodes - num_from_idle):
        lenders = [other for other in lending if other.num_nodes - 1 in sizes]
        if not lenders:
            return None
        lender = max(lenders, key=lambda p: (p.num_nodes, p not in intact, -p.index))
        lending[lending.index(lender)] = replace(lender, num_nodes=lender.num_nodes - 1)
    return [*lending, replace(part, num_nodes=num_nodes)], num_idle - num_from_idle


def _parts_after_merging(
    part: Part, others: Sequence[Part], sizes: Collection[int]
) -> list[Part] | None:
    """The parts after `part` was split or has joined the smallest other one; None if it can do
    neither."""
    split = _parts_of_split(part, sizes)
    if split:
        return [*others, *split]
    partners = [other for other in others if other.num_nodes]
    if not partners:
        return None
    partner = min(partners, key=lambda other: (other.num_nodes, other.index))
    rest = _parts_without(partner, others)
    merged = replace(partner, num_nodes=partner.num_nodes + part.num_nodes)
    # A merged part that still has no template is short, and gets a turn of its own.
    return [*rest, *(_parts_of_split(merged, sizes) or [merged])]


def _parts_of_split(part: Part, sizes: Collection[int]) -> list[Part]:
    """The parts into which the part's nodes are split, as few as possible, the largest first; empty
    if the templates allow no split."""
    if part.num_nodes in sizes:
        return [part]
    splits = instantiations(part.num_nodes, tuple(sizes), min_pipelines=1)
    fewest = min(splits, key=lambda split: (len(split), split), default=())
    return [Part(-1 if i else part.index, size) for i, size in enumerate(reversed(fewest))]


def _parts_without(part: Part, parts: Sequence[Part]) -> list[Part]:
    """The parts without one occurrence of `part`, which new pipelines may equal."""
    at = parts.index(part)
    return [*parts[:at], *parts[at + 1 :]]


def unbound_pipelines(
    wanted: Sequence[PipelineTemplate], plan: Plan, alive: frozenset[int]
) -> list[UnboundPipeline]:
    """Pipelines of these templates to bind to nodes, each in place of a pipeline of the plan before
    as far as there are any.

    One replaces a pipeline of the same template if possible, preferably one that lost no
    node, so that it may stay as it is.
    """
    templates = Counter(wanted)
    whole_first = sorted(
        range(len(plan.pipelines)),
        key=lambda index: (not alive.issuperset(plan.pipelines[index].nodes), index),
    )
    unbound = []
    for index in whole_first:
        template = plan.pipelines[index].template
        if templates[template]:
            templates[template] -= 1
            unbound.append(UnboundPipeline(template, index))
    replaced = {pipeline.replaces for pipeline in unbound}
    unused = (index for index in range(len(plan.pipelines)) if index not in replaced)
    unbound += [
        UnboundPipeline(template, next(unused, -1)) for template in sorted(templates.elements())
    ]
    return sorted(unbound, key=lambda pipeline: (pipeline.replaces < 0, pipeline.replaces))
