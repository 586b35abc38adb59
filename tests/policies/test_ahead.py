"""Answers found ahead: one for all losses that are alike, and as good as one found on the spot."""

from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from itertools import combinations, islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.losses import (
    NUM_LAYERS,
    NUM_SAMPLES,
    check_transfers,
    example_catalog,
    plan_of,
    prices,
)
from planaria.core.cluster import ClusterEvent, ClusterState, NodesChanged, NodesLost, survivors
from planaria.core.plan import NodeKind, Pipeline, Plan
from planaria.planner.layout.depths import Ranges
from planaria.planner.layout.search import LayoutSearches, SearchResults
from planaria.planner.plans import PlanCatalog
from planaria.planner.reroute.reroutes import simulated_s
from planaria.policies.adaptive import Adaptive
from planaria.policies.ahead import ForeseenAnswers, Lookup, _pipeline_class, look_ahead, losses
from planaria.policies.policy import Policy
from planaria.policies.reinstantiate import Reinstantiate
from planaria.policies.repartition import Repartition
from planaria.policies.reroute import Reroute
from planaria.policies.unequal_nodes import UnequalNodes, with_kinds


def policies(catalog: PlanCatalog) -> tuple[Policy, LayoutSearches]:
    """All of them in one, and where it looks for layouts."""
    searched = LayoutSearches(Ranges(), SearchResults(catalog.problem))
    anew = UnequalNodes(Reinstantiate(catalog))
    around = Reroute(catalog.problem, Adaptive(()))
    return Adaptive((anew, around, Repartition(catalog.problem, anew, searched))), searched


def looked_ahead(catalog: PlanCatalog, plan: Plan, *, failures_ahead: int) -> Lookup:
    policy, searched = policies(catalog)
    foreseen = ForeseenAnswers()
    for found in look_ahead(
        policy, searched, plan, prices=prices(catalog), failures_ahead=failures_ahead
    ):
        if found is not None:
            foreseen.add(found.plan, found.lost, partial(tuple, found.transitions))
    return Lookup(policy, foreseen, UnequalNodes(Reinstantiate(catalog)))


def listed(plan: Plan, number: int) -> list[tuple[int, ...]]:
    return [lost for lost in losses(plan, number) if lost is not None]


@pytest.fixture(scope="module")
def job() -> tuple[PlanCatalog, Plan, Lookup]:
    """Pipelines of which two are alike, on shuffled nodes, and the answers to any two losses."""
    catalog = example_catalog(8, n0=2, f=1)
    plan = plan_of(catalog, (3, 2, 3), (4, 0, 7, 3, 5, 1, 6, 2))
    return catalog, plan, looked_ahead(catalog, plan, failures_ahead=2)


def test_one_loss_of_each_sort_is_looked_at_the_likeliest_first() -> None:
    """Of 28 pairs of 8 nodes in pipelines of 3, 2 and 3 there are 16 sorts. Sorts are as likely as
    they have sets, and each set is of one of them."""
    catalog = example_catalog(8, n0=2, f=1)
    plan = plan_of(catalog, (3, 2, 3))

    singles, pairs = listed(plan, 1), listed(plan, 2)

    assert singles == [(0,), (1,), (2,), (3,), (4,)]
    # In a pipeline of 3: 3, in that of 2: 1; across those of 3: 6; across 3 and 2: 6.
    assert len(pairs) == 16
    assert all(len(set(pair)) == 2 for pair in pairs)
    # Places 0 and 1 of different pipelines of 3 can be had in two ways, place 0 of both in one.
    assert pairs.index((0, 6)) < pairs.index((0, 5))


@settings(max_examples=12)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 3))
def test_every_loss_is_of_a_sort_that_is_looked_at(sizes: list[int], number: int) -> None:
    """Sorts are what is left of a set when pipelines of one template change places."""
    number = min(number, sum(sizes))
    catalog = example_catalog(sum(sizes), n0=1, f=0)
    plan = plan_of(catalog, tuple(sizes))

    def sort(lost: tuple[int, ...]) -> Counter[tuple[int, tuple[int, ...]]]:
        return Counter(
            (len(p.nodes), tuple(i for i, node in enumerate(p.nodes) if node in lost))
            for p in plan.pipelines
        )

    found = listed(plan, number)

    sets = list(combinations(plan.nodes, number))
    sizes_of_sorts = Counter(frozenset(sort(lost).items()) for lost in sets)
    looked_at = [frozenset(sort(lost).items()) for lost in found]
    assert len(set(looked_at)) == len(looked_at)
    assert set(looked_at) == set(sizes_of_sorts)
    numbers = [sizes_of_sorts[one] for one in looked_at]
    assert numbers == sorted(numbers, reverse=True)


def test_no_more_sorts_are_listed_than_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """40 nodes of 40 speeds have 9,880 sorts of three; at 1,000 nodes listing them took minutes."""
    catalog = example_catalog(40, n0=4, f=1)
    plan = plan_of(catalog, (4,) * 10)
    plan = with_kinds(plan, {node: NodeKind(0.5 + node / 100) for node in plan.nodes})
    calls = []

    def counted(pipeline: Pipeline, gone: Collection[int], lost: Collection[int]) -> object:
        calls.append(lost)
        return _pipeline_class(pipeline, gone, lost)

    monkeypatch.setattr("planaria.policies.ahead._pipeline_class", counted)
    monkeypatch.setattr("planaria.policies.ahead.LOSSES_MAX", 16)
    steps = list(losses(plan, 3))

    assert len(listed(plan, 3)) == 16
    assert len(calls) < 2 * (2 * 16 + 1) * (40 * 3 + 10)
    # The process that looks ahead sees a newer plan between two steps.
    assert steps.count(None) == 1 + 16 + 16


@pytest.mark.parametrize("most", [5, 8, 12])
def test_the_likeliest_sorts_are_the_same_with_a_bound(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """What is left out early would have come last."""
    plan = plan_of(example_catalog(20, n0=2, f=1), (3, 2, 3, 2, 3, 3, 4))
    expected = listed(plan, 2)[:most]
    monkeypatch.setattr("planaria.policies.ahead.LOSSES_MAX", most)

    assert listed(plan, 2) == expected


@pytest.mark.parametrize(("number", "every_nth"), [(1, 1), (2, 3)])
def test_the_answers_to_losses_that_are_alike_are_whole_and_at_their_price(
    job: tuple[PlanCatalog, Plan, Lookup], number: int, every_nth: int
) -> None:
    """Renamed answers send what is missing, leave nobody without work, and take as long."""
    catalog, plan, ahead = job
    for lost in islice(combinations(sorted(plan.nodes), number), 0, None, every_nth):
        cluster = survivors(plan, lost, epoch=7)
        if cluster.lost_layers(NUM_LAYERS):
            continue
        event = NodesLost(lost, NUM_SAMPLES)
        found = ahead.foreseen.answers(plan, cluster, event, prices(catalog))
        assert found
        direct = ahead.policy.propose(plan, cluster, event, prices(catalog))
        assert {x.policy for x in found} == {x.policy for x in direct}
        for transition in found:
            assert transition.before == plan
            assert transition.redone_samples == NUM_SAMPLES
            assert transition.after.epoch == 7
            assert set(transition.after.nodes) == set(plan.nodes).difference(lost)
            check_transfers(transition, cluster, prices(catalog).layer_bytes)
            run_s = simulated_s(catalog.problem, transition.after)
            assert transition.iteration_s == pytest.approx(run_s, rel=0.02)
            if transition.then is not None:
                assert transition.then.before == plan
                assert transition.then.after in [other.after for other in found]
        best = min(x.iteration_s for x in found)
        assert best <= 1.02 * min(x.iteration_s for x in direct)


def test_what_is_not_known_is_answered_in_a_hurry_while_everybody_waits(
    job: tuple[PlanCatalog, Plan, Lookup], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss at once, a notice only where the plan is large; what is known stays known."""
    catalog, plan, ahead = job
    unknown = survivors(plan, (4, 0, 3), epoch=1)
    lost, leaves = NodesLost((0, 3, 4), 0), NodesChanged((), (4,))

    def policies_of(event: ClusterEvent, cluster: ClusterState) -> set[str]:
        return {one.policy for one in ahead.propose(plan, cluster, event, prices(catalog))}

    usual = survivors(plan, (4,), epoch=1)
    assert policies_of(lost, unknown) == {"reinstantiate"}
    assert policies_of(NodesLost((4,), 0), usual) > {"reinstantiate"}
    assert policies_of(leaves, usual) > {"reinstantiate"}
    monkeypatch.setattr("planaria.policies.ahead._HOPS_MAX", sum(map(len, plan.routes)) - 1)
    assert policies_of(leaves, usual) == {"reinstantiate"}


def test_what_is_equal_is_found_as_one_object(job: tuple[PlanCatalog, Plan, Lookup]) -> None:
    """So that the answers of a thousand nodes are unpickled in some ms."""
    catalog, plan, _ = job
    policy, searched = policies(catalog)
    found = look_ahead(policy, searched, plan, prices=prices(catalog), failures_ahead=1)
    for answers in filter(None, found):
        plans = [one.after for one in answers.transitions]
        parts = [x for one in plans for x in (*one.pipelines, *one.routes)]
        assert len({id(part) for part in parts}) == len(set(parts))
        for one in answers.transitions:
            assert one.before is plan
            assert one.then is None or any(one.then.after is other for other in plans)


def test_what_is_known_has_the_prices_of_now(job: tuple[PlanCatalog, Plan, Lookup]) -> None:
    """A job learns from each recovery what the next one takes."""
    catalog, plan, ahead = job
    event, cluster = NodesLost((4,), 0), survivors(plan, (4,), epoch=1)
    cheap = prices(catalog)
    dear = replace(cheap, regroup_s=cheap.regroup_s + 9.0)

    found = ahead.foreseen.answers(plan, cluster, event, cheap)
    again = ahead.foreseen.answers(plan, cluster, event, dear)

    assert found is not None
    assert again is not None
    assert all(one.is_foreseen for one in found)  # The report says so.
    for one, other in zip(found, again, strict=True):
        assert other.downtime_s == pytest.approx(one.downtime_s + 9.0)


def test_the_policy_answers_what_is_not_known(job: tuple[PlanCatalog, Plan, Lookup]) -> None:
    """Survivors that hold less, are slow or distrusted, other events."""
    catalog, plan, ahead = job
    event = NodesLost((4,), 0)
    usual = survivors(plan, (4,), epoch=1)
    first, *others = usual.nodes
    empty = replace(first, held=(frozenset(),))
    slow = replace(first, kind=NodeKind(0.5))
    distrusted = replace(first, is_trusted=False)
    foreseen = ahead.foreseen

    assert foreseen.answers(plan, usual, event, prices(catalog)) is not None
    for node in (empty, slow, distrusted):
        cluster = ClusterState(1, (node, *others))
        assert foreseen.answers(plan, cluster, event, prices(catalog)) is None
    assert foreseen.answers(plan, usual, NodesChanged((), (4,)), prices(catalog)) is None
    three = survivors(plan, (4, 0, 3), epoch=1)
    assert foreseen.answers(plan, three, NodesLost((0, 3, 4), 0), prices(catalog)) is None
    direct = ahead.hurried.propose(plan, three, NodesLost((0, 3, 4), 0), prices(catalog))
    assert ahead.propose(plan, three, NodesLost((0, 3, 4), 0), prices(catalog)) == direct


def test_what_is_known_counts_slow_nodes_as_slow() -> None:
    """They were taken for fast ones: the answer was a plan at a speed that they do not have."""
    catalog = example_catalog(6, n0=2, f=1)
    plan = with_kinds(plan_of(catalog, (3, 3)), {0: NodeKind(0.5)})
    ahead = looked_ahead(catalog, plan, failures_ahead=1)

    for lost in plan.nodes:
        nodes = survivors(plan, (lost,), epoch=1).nodes
        nodes = tuple(replace(node, kind=plan.kinds_by_node[node.node]) for node in nodes)
        cluster, event = ClusterState(1, nodes), NodesLost((lost,), 0)
        known = ahead.foreseen.answers(plan, cluster, event, prices(catalog))
        assert known is not None
        direct = ahead.policy.propose(plan, cluster, event, prices(catalog))
        assert [x.answer for x in known] == [x.answer for x in direct]
        for transition, expected in zip(known, direct, strict=True):
            assert transition.after.slow_nodes == ({0: 0.5} if lost else {})
            assert transition.iteration_s == pytest.approx(expected.iteration_s)
