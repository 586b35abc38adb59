"""The choice among the answers of several policies, against all of them tried one by one."""

from collections.abc import Sequence
from dataclasses import replace
from math import exp

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.losses import NUM_SAMPLES, example_catalog, jobs, plan_of, prices
from planaria.core.cluster import (
    ClusterEvent,
    ClusterState,
    NodesChanged,
    NodesLost,
    survivors,
)
from planaria.core.plan import Plan, Transition
from planaria.planner.plans import PlanCatalog
from planaria.planner.reroute.reroutes import num_without_work
from planaria.policies.adaptive import Adaptive
from planaria.policies.policy import Policy, Prices
from planaria.policies.reinstantiate import Reinstantiate
from planaria.policies.reroute import Reroute
from planaria.policies.unequal_nodes import UnequalNodes, stay_answer
from planaria.policies.value import Outlook, best_transition


def policies(catalog: PlanCatalog) -> tuple[Policy, Policy]:
    """Pipelines made anew, and rerouting alone."""
    return UnequalNodes(Reinstantiate(catalog)), Reroute(catalog.problem, Adaptive(()))


def proposed(
    catalog: PlanCatalog, policy: Policy, plan: Plan, lost: tuple[int, ...]
) -> tuple[Transition, ...]:
    cluster = survivors(plan, lost, epoch=plan.epoch + 1)
    return policy.propose(plan, cluster, NodesLost(lost, NUM_SAMPLES), prices(catalog))


def expected_samples(transition: Transition, outlook: Outlook) -> float:
    """The objective once more, from the definition: who holds what is counted layer by layer, and
    what follows is worth its own as soon as it begins. As much is lost whenever it is."""
    rate = outlook.failures_per_s
    redone_s = transition.iteration_s * transition.redone_samples / NUM_SAMPLES
    begins_s, plans = [transition.downtime_s + redone_s], [transition]
    if transition.then is not None:
        begins_s.append(begins_s[0] + transition.then.downtime_s)
        plans.append(transition.then)
    total = 0.0
    for index, one in enumerate(plans):
        left, over = exp(-rate * begins_s[index]), 0.0
        if index + 1 < len(plans):
            over = exp(-rate * begins_s[index + 1])
        holders = [set(one.after.holders(x)) for x in range(one.after.num_layers)]
        alone = {rank for ranks in holders if len(ranks) == 1 for rank in ranks}
        at_risk = rate * outlook.lost_max * len(alone) / len(one.after.nodes)
        total += NUM_SAMPLES / one.iteration_s * (left - over)
        total -= at_risk * ((left if index else 1.0) - over)
    return total


def losing(failures_per_s: float, samples: float) -> Outlook:
    """So many are lost with a last copy."""
    return Outlook(failures_per_s=failures_per_s, unsaved_samples=samples, lost_max=samples)


@settings(max_examples=6)
@given(jobs(), st.data())
def test_the_choice_is_the_best_of_all_candidates(
    job: tuple[PlanCatalog, Plan], data: st.DataObject
) -> None:
    """Losses one after the other, each answered by the choice; rates from one in a second to one
    in a year. No answer of any policy is better, and none is missing or there twice."""
    catalog, plan = job
    while True:
        lost = tuple(
            sorted(data.draw(st.sets(st.sampled_from(plan.nodes), min_size=1, max_size=2)))
        )
        outlook = losing(
            10.0 ** data.draw(st.floats(-7.5, 0.0)), samples=data.draw(st.floats(0.0, 1e6))
        )
        apart = [one for p in policies(catalog) for one in proposed(catalog, p, plan, lost)]
        together = proposed(catalog, Adaptive(policies(catalog)), plan, lost)

        plans = [one.after for one in together if one.then is None]
        assert all(one not in plans[:index] for index, one in enumerate(plans))
        assert all(one.after in plans for one in apart)
        if not apart:
            return
        best = best_transition(together, global_batch_size=NUM_SAMPLES, outlook=outlook)
        whole = [one for one in apart if not one.after.gone]
        fastest = min(whole, key=lambda one: one.iteration_s, default=None)
        followed = [replace(one, then=fastest) for one in apart if one.after.gone and fastest]
        most = max(expected_samples(one, outlook) for one in (*apart, *followed))
        assert expected_samples(best, outlook) == pytest.approx(most)
        plan = best.after


def test_one_job_is_answered_by_either_policy() -> None:
    """Pipelines made anew take 20 s and are a quarter faster: they pay where failures are rare, or
    where the node that rerouting leaves as the only holder of its layers would take much along."""
    catalog = example_catalog(8, n0=2, f=1)
    plan = plan_of(catalog, (4, 4))
    large = tuple(10_000 * size for size in prices(catalog).layer_bytes)
    found = Adaptive(policies(catalog)).propose(
        plan,
        survivors(plan, (2,), epoch=1),
        NodesLost((2,), NUM_SAMPLES),
        replace(prices(catalog), layer_bytes=large),
    )
    assert {one.policy for one in found} == {"reroute", "reinstantiate"}

    def chosen(
        options: Sequence[Transition], failures_per_s: float, unsaved_samples: float
    ) -> tuple[str, str]:
        outlook = losing(failures_per_s, unsaved_samples)
        best = best_transition(options, global_batch_size=NUM_SAMPLES, outlook=outlook)
        return best.policy, best.answer

    single = [one for one in found if one.then is None]
    assert chosen(single, 0.001, 0.0) == ("reinstantiate", "global")
    assert chosen(single, 0.03, 0.0) == ("reroute", "reroute")
    assert chosen(single, 0.03, 5000.0)[0] == "reinstantiate"
    assert chosen(found, 0.001, 0.0) == ("reroute", "reroute, then global")
    assert chosen(found, 0.03, 5000.0)[0] == "reinstantiate"


class Idler:
    """A policy whose answers leave a node without work."""

    def __init__(self, catalog: PlanCatalog) -> None:
        self.catalog = catalog

    def propose(
        self, plan: Plan, cluster: ClusterState, event: ClusterEvent, prices: Prices
    ) -> tuple[Transition, ...]:
        fewer = ClusterState(cluster.epoch, cluster.nodes[1:])
        return Reinstantiate(self.catalog).propose(plan, fewer, event, prices)


def test_every_survivor_works_where_some_policy_has_work_for_it() -> None:
    """Even if the others would be as fast without it."""
    catalog = example_catalog(8, n0=2, f=1)
    cluster, event = survivors(plan_of(catalog, (4, 4)), (2,), epoch=1), NodesLost((2,), 0)
    plan = plan_of(catalog, (4, 4))
    policy = Adaptive((Idler(catalog), policies(catalog)[0]))

    found = policy.propose(plan, cluster, event, prices(catalog))

    assert found
    assert all(len(one.after.nodes) == 7 for one in found)


class Stayer(Idler):
    """A policy that keeps the plan, whatever happens."""

    def propose(
        self, plan: Plan, cluster: ClusterState, event: ClusterEvent, prices: Prices
    ) -> tuple[Transition, ...]:
        del event, prices
        kinds = {node.node: node.kind for node in cluster.nodes}
        return (stay_answer(self.catalog, plan, cluster, kinds),)


def test_a_plan_that_is_kept_is_an_answer_even_if_others_have_work_for_more_nodes() -> None:
    """So that what else is proposed can be held against it."""
    catalog = example_catalog(8, n0=2, f=1)
    plan = plan_of(catalog, (4, 3))
    cluster = survivors(plan_of(catalog, (4, 4)), (), epoch=1)
    event = NodesChanged(joined=(7,), leaving=())
    policy = Adaptive((Stayer(catalog), policies(catalog)[0]))

    stay, *others = policy.propose(plan, cluster, event, prices(catalog))

    assert stay.keeps_plan
    assert others
    assert all(len(one.after.nodes) == 8 for one in others)


class Unvisited(Idler):
    """A policy whose answers give every node a place, and one of them no microbatch."""

    def propose(
        self, plan: Plan, cluster: ClusterState, event: ClusterEvent, prices: Prices
    ) -> tuple[Transition, ...]:
        found = Reinstantiate(self.catalog).propose(plan, cluster, event, prices)
        return tuple(replace(one, after=self._unvisited(one.after)) for one in found)

    def _unvisited(self, plan: Plan) -> Plan:
        return replace(plan, routes=tuple(plan.routes[0] for _ in plan.routes))


def test_a_place_that_no_microbatch_visits_is_no_work() -> None:
    """Seen in the simulation: a node that everybody else goes around."""
    catalog = example_catalog(8, n0=2, f=1)
    plan = plan_of(catalog, (4, 4))
    cluster, event = survivors(plan, (2,), epoch=1), NodesLost((2,), 0)
    policy = Adaptive((Unvisited(catalog), policies(catalog)[0]))

    found = policy.propose(plan, cluster, event, prices(catalog))

    assert found
    assert not any(num_without_work(one.after) for one in found)
