"""Answers that are remembered up to the numbers of nodes."""

from dataclasses import replace
from itertools import combinations

import pytest

from helpers.losses import (
    NUM_LAYERS,
    NUM_SAMPLES,
    check_transfers,
    example_catalog,
    plan_of,
    prices,
)
from planaria.core.cluster import ClusterState, Node, NodesChanged, NodesLost, survivors
from planaria.core.plan import Transition, plain_plan
from planaria.planner.reroute.reroutes import with_split_backwards
from planaria.policies.adaptive import Adaptive
from planaria.policies.policy import Policy
from planaria.policies.reinstantiate import Reinstantiate
from planaria.policies.reroute import Reroute
from planaria.policies.unequal_nodes import UnequalNodes
from planaria.simulator.economics.remembered import Remembered

CATALOG = example_catalog(8, n0=2, f=1)
PLAN = plan_of(CATALOG, (3, 2, 3), (4, 0, 7, 3, 5, 1, 6, 2))


def policies() -> Policy:
    """Two policies in one, without those that search for longer each time that they are asked."""
    anew = UnequalNodes(Reinstantiate(CATALOG))
    around = Reroute(CATALOG.problem, Adaptive(()))
    return Adaptive((anew, around))


def values(transitions: tuple[Transition, ...]) -> list[tuple[str, float, float]]:
    return sorted((t.policy, round(t.iteration_s, 9), round(t.downtime_s, 9)) for t in transitions)


def test_the_losses_of_nodes_at_equal_places_are_one_question() -> None:
    """Pipelines of 3, 2 and 3 nodes have five different places. Each answer moves what is missing,
    and is as good as a new one."""
    remembered = Remembered(policies())
    for lost in combinations(sorted(PLAN.nodes), 1):
        cluster = survivors(PLAN, lost, epoch=7)
        event = NodesLost(lost, NUM_SAMPLES)
        answers = remembered.propose(PLAN, cluster, event, prices(CATALOG))
        if cluster.lost_layers(NUM_LAYERS):
            continue
        for transition in answers:
            assert transition.before == PLAN
            assert transition.after.epoch == 7
            assert transition.redone_samples == NUM_SAMPLES
            assert set(transition.after.nodes) == set(PLAN.nodes).difference(lost)
            check_transfers(transition, cluster, prices(CATALOG).layer_bytes)
        direct = policies().propose(PLAN, cluster, event, prices(CATALOG))
        best = min(t.iteration_s for t in direct)
        assert min(t.iteration_s for t in answers) == pytest.approx(best, rel=0.02)

    assert (remembered.num_asked, remembered.num_asked - remembered.num_known) == (8, 5)


def test_equal_pipelines_with_split_backwards_are_one_question() -> None:
    """They have limits in flight, which are part of the question; they make it no other one."""
    pipelines = plan_of(CATALOG, (4, 4)).pipelines
    half = CATALOG.problem.num_microbatches // 2
    plan = with_split_backwards(CATALOG.problem, plain_plan(0, pipelines, (half, half)))
    assert plan.in_flight
    remembered = Remembered(policies())
    for lost in plan.nodes:
        cluster, event = survivors(plan, (lost,), epoch=7), NodesLost((lost,), NUM_SAMPLES)
        answers = remembered.propose(plan, cluster, event, prices(CATALOG))
        for transition in answers:
            assert set(transition.after.nodes) == set(plan.nodes).difference((lost,))
            check_transfers(transition, cluster, prices(CATALOG).layer_bytes)
        assert values(answers) == values(policies().propose(plan, cluster, event, prices(CATALOG)))
    tight = replace(plan, in_flight=dict.fromkeys(plan.in_flight, 1))
    remembered.propose(tight, cluster, event, prices(CATALOG))

    assert (remembered.num_asked, remembered.num_asked - remembered.num_known) == (9, 5)


def test_joins_are_remembered_too() -> None:
    """Whatever number the new node has."""
    catalog = example_catalog(9, n0=2, f=1)
    remembered = Remembered(UnequalNodes(Reinstantiate(catalog)))
    held = PLAN.held_by_rank
    for new in (8, 31):
        nodes = tuple(Node(n, (held.get(n, frozenset()),)) for n in (*sorted(PLAN.nodes), new))
        cluster = ClusterState(7, nodes)
        event = NodesChanged((new,), ())
        answers = remembered.propose(PLAN, cluster, event, prices(CATALOG))

        assert any(new in transition.after.nodes for transition in answers)
        for transition in answers:
            check_transfers(transition, cluster, prices(CATALOG).layer_bytes)

    assert remembered.num_known == 1


def test_a_plan_with_detours_is_another_question() -> None:
    """A second loss of the same nodes, after microbatches went around the first."""
    remembered = Remembered(policies())
    event, cluster = NodesLost((4,), NUM_SAMPLES), survivors(PLAN, (4,), epoch=7)
    first = remembered.propose(PLAN, cluster, event, prices(CATALOG))
    around = next(t.after for t in first if t.after.gone)
    again = NodesLost((5,), NUM_SAMPLES)
    for plan in (PLAN, around):
        after = survivors(plan, (4, 5), epoch=9)
        if after.lost_layers(NUM_LAYERS):
            continue
        answers = remembered.propose(plan, after, again, prices(CATALOG))
        assert values(answers) == values(policies().propose(plan, after, again, prices(CATALOG)))

    assert remembered.num_known == 0
