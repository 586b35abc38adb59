"""Who keeps copies of which layers, as a job asks for it."""

from dataclasses import replace
from math import comb
from pathlib import Path
from typing import Any

import pytest

from helpers.coordinated import small_rules
from helpers.jobs import shaped_plan
from helpers.strategies import equal_problem
from planaria.coordinator.job_rules import Rules
from planaria.coordinator.placing import copies_of, idle_of, version_iterations
from planaria.core.job import CheckpointConfig
from planaria.core.plan import Link, Plan, one_device_profile
from planaria.job.planning import read_profile
from planaria.placement.layer_copies import keeping_places
from planaria.placement.survival import survivals
from planaria.planner.plans import foreseen_plans
from planaria.planner.problem import Problem
from planaria.planner.templates import pipeline_templates
from planaria.policies.policy import profile_prices


def placed_by(**keys: Any) -> Rules:
    """A job with these keys of its checkpoints."""
    rules = small_rules()
    return replace(rules, job=replace(rules.job, checkpoint=CheckpointConfig(**keys)))


def survives(rules: Rules, plan: Plan, num_lost: int) -> float:
    """That all layers do when so many nodes are lost."""
    num_nodes, kept_by = len(plan.nodes), keeping_places(plan, copies_of(rules, plan))
    return survivals(num_nodes, kept_by)[num_lost] / comb(num_nodes, num_lost)


def test_optimised_is_not_worse_than_mixed() -> None:
    """One pipeline, in which each layer is held by one node, so that placements tell most."""
    plan = shaped_plan((6,), 6)

    assert survives(placed_by(copies=2, strategy="mixed"), plan, 2) == pytest.approx(0.8)
    assert survives(placed_by(copies=2, strategy="optimised"), plan, 2) == pytest.approx(0.8)
    assert survives(placed_by(copies=2, strategy="ring"), plan, 2) == pytest.approx(0.6)


def test_optimised_is_better_than_mixed_under_failure_domains() -> None:
    """Racks of four: neither has both copies in one, and optimised has fewer pairs to lose."""
    plan, racks = shaped_plan((8,), 8), ((0, 1, 2, 3), (4, 5, 6, 7))
    mixed = placed_by(copies=2, strategy="mixed", failure_domains=racks)
    optimised = placed_by(copies=2, strategy="optimised", failure_domains=racks)

    for rules in (mixed, optimised):
        assert all(copy.source // 4 != copy.targets[0] // 4 for copy in copies_of(rules, plan))
    assert survives(optimised, plan, 2) > survives(mixed, plan, 2)


@pytest.mark.parametrize("strategy", ["mixed", "group", "ring", "optimised"])
@pytest.mark.parametrize("copies", [1, 2, 3])
def test_nodes_that_hold_layers_silently_before_they_join_change_no_number_of_copies(
    strategy: str, copies: int
) -> None:
    """The coordinator ended with a KeyError, or layers had no copies or ones on all nodes."""
    rules = placed_by(copies=copies, strategy=strategy)
    for shape, joiners in (((2,), 2), ((4,), 16), ((2, 2), 1)):
        num_layers = rules.num_layers
        plan = shaped_plan(shape, sum(shape))
        num_nodes, layers = len(plan.nodes), tuple(range(plan.num_layers))
        silent = {num_nodes + index: layers for index in range(joiners)}

        before, found = copies_of(rules, plan), copies_of(rules, replace(plan, silent=silent))

        assert num_layers == len(found)
        for copy, alone in zip(found, before, strict=True):
            assert copy.source in plan.ranks
            assert len(set(copy.targets)) == len(copy.targets) == len(alone.targets)
            assert set(copy.targets) <= set(plan.ranks).difference(plan.holders(copy.layer))


@pytest.mark.parametrize("strategy", ["mixed", "group", "ring", "optimised"])
def test_a_job_that_asks_for_more_copies_than_nodes_has_one_on_each(strategy: str) -> None:
    """As after losses."""
    plan = shaped_plan((3,), 6)
    copies = copies_of(placed_by(copies=5, strategy=strategy), plan)

    assert keeping_places(plan, copies) == (frozenset({0, 1, 2}),) * plan.num_layers


def test_a_job_without_copies_has_none() -> None:
    assert copies_of(placed_by(copies=0, strategy="optimised"), shaped_plan((3,), 6)) == ()


@pytest.mark.parametrize(
    ("gigabits", "iterations", "keys"),
    [
        (200, 1, {}),
        (200, 4, {"every": 4}),
        (5, 3, {}),
        (5, 4, {"every": 4}),
        (5, 1, {"mode": "naive"}),
        (200, 1, {"schedule": "paper"}),
        (5, 2, {"schedule": "paper"}),
        (5, 4, {"schedule": "paper", "every": 4}),
    ],
)
def test_a_version_takes_what_it_is_sent_for(
    gigabits: float, iterations: int, keys: dict[str, Any]
) -> None:
    """Llama-2 7B on 16 nodes; over slow links its copies do not fit into an iteration's idle time,
    unless nobody asks whether it is idle; the paper's last span reaches into the next one."""
    profile = one_device_profile(read_profile(Path("llama2-7b")))
    link = Link(profile.links["inter_node"].latency_s, gigabits * 1.25e8)
    problem = Problem(
        profile=replace(profile, links={**profile.links, "inter_node": link}),
        devices_per_node=1,
        num_microbatches=64,
        failures_tolerated=1,
    )
    plans = foreseen_plans(problem, 16, pipeline_templates(problem, 16))
    prices = profile_prices(problem.profile, regroup_s=0.05)
    rules = replace(placed_by(copies=2, **keys), catalog=plans, prices=prices)

    assert version_iterations(rules, plans.plans[16], chunk_bytes=32 << 20) == iterations


def test_spans_are_those_that_the_schedule_of_copies_sees() -> None:
    """The paper's are those of the source, so they are the same for both of its receivers."""
    plan = shaped_plan((3, 3), 6)
    problem = equal_problem(num_layers=plan.num_layers, num_microbatches=6)
    plans = foreseen_plans(problem, 6, pipeline_templates(problem, 6))
    found = {}
    for schedule in ("measured", "paper"):
        rules = replace(placed_by(copies=3, schedule=schedule), catalog=plans)
        spans: dict[int, set[Any]] = {}
        for one in idle_of(rules, plan, copies_of(rules, plan)):
            spans.setdefault(one.source, set()).add(one.spans)
        found[schedule] = max(map(len, spans.values()))

    assert found["paper"] == 1
    assert found["measured"] > 1
