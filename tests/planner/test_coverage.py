"""No node idles, after whatever failures: the planner itself, for all small jobs there are."""

import random

import pytest

from helpers.strategies import layer_profile, model_profile
from planaria.core.plan import PipelineTemplate, Stage
from planaria.planner.plans import PlanCatalog, pipeline_microbatches, plan_catalog
from planaria.planner.problem import Problem

SEED = 20_261_121
NODES_MAX, FAILURES_MAX, N0_MAX = 64, 4, 6
NUM_MICROBATCHES = 7
CASES = [
    (n0, f, num_nodes)
    for n0 in range(1, N0_MAX + 1)
    for f in range(FAILURES_MAX + 1)
    for num_nodes in range((f + 1) * n0, NODES_MAX + 1)
]
# The fewest nodes of every n0 and f, the most of some, and a few between.
SMALLEST = [case for case in CASES if case[2] == (case[1] + 1) * case[0]]
LARGEST = [(n0, f, NODES_MAX) for n0 in (1, N0_MAX) for f in (0, FAILURES_MAX)]
SAMPLE = sorted({*SMALLEST, *LARGEST, *random.Random(SEED).sample(CASES, 4)})


def cheap_job(n0: int, f: int, num_nodes: int) -> PlanCatalog:
    """All plans with templates of n0 .. N - f * n0 nodes, each one stage: quick to time."""
    layer = layer_profile("layer", 0.01, device_counts=tuple(range(1, NODES_MAX + 1)))
    problem = Problem(
        profile=model_profile((layer,)),
        devices_per_node=1,
        num_microbatches=NUM_MICROBATCHES,
        failures_tolerated=f,
    )
    sizes = range(n0, num_nodes - f * n0 + 1)
    templates = {size: PipelineTemplate((Stage(0, 1, size),), size) for size in sizes}
    return plan_catalog(problem, num_nodes, templates)


def check(n0: int, f: int, num_nodes: int) -> None:
    """Every number of nodes that is enough for f + 1 pipelines has a plan with all at work."""
    catalog = cheap_job(n0, f, num_nodes)
    for survivors in range((f + 1) * n0, num_nodes + 1):
        case = f"n0 = {n0}, f = {f}, N = {num_nodes}, {survivors} left"
        plan = catalog.plans[survivors]
        sizes = [len(pipeline.nodes) for pipeline in plan.pipelines]
        assert plan.nodes == tuple(range(survivors)), case
        assert sum(sizes) == survivors, case
        assert len(sizes) >= f + 1, case
        assert set(sizes) <= set(range(n0, num_nodes - f * n0 + 1)), case
        counts = pipeline_microbatches(plan)
        assert min(counts) >= 1, case
        assert sum(counts) == NUM_MICROBATCHES, case


def test_no_node_idles_in_the_plans_of_a_sample() -> None:
    """Oobleck, appendix A; `test_no_node_idles_in_any_plan` has the others."""
    for case in SAMPLE:
        check(*case)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("n0", range(1, N0_MAX + 1))
def test_no_node_idles_in_any_plan(n0: int) -> None:
    """All N <= 64, f <= 4 and n0 <= 6, every N' from N down to (f + 1) n0."""
    for case in CASES:
        if case[0] == n0:
            check(*case)
