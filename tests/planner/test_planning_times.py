"""How long plans take in large jobs: three times what benchmarks/planner.py asks for, by the
process's own clock, as a machine may do other things too."""

from dataclasses import replace

import pytest

from helpers.cpu_time import quickest
from helpers.strategies import MEBIBYTE, equal_problem, layer_profile, model_profile
from planaria.core.plan import PipelineTemplate, Stage
from planaria.planner.plans import best_plan, plan_catalog
from planaria.planner.templates import pipeline_templates

PLAN_S_MAX = 3.0
LOOKUP_S_MAX = 3e-3
NUM_LAYERS = 32


@pytest.mark.parametrize("layers_held", [NUM_LAYERS, 8])
def test_a_thousand_nodes_are_planned_for_while_one_waits(layers_held: int) -> None:
    """Given the templates: sets of pipelines, microbatches and nodes; also where it takes several
    nodes to hold the model."""
    layers = tuple(
        layer_profile(f"layer {i}", 0.01 * (1 + i * 7 % 5 / 5), output_bytes=MEBIBYTE)
        for i in range(NUM_LAYERS)
    )
    memory_bytes = 0 if layers_held == NUM_LAYERS else (16 * layers_held + 40) * MEBIBYTE
    problem = replace(
        equal_problem(num_microbatches=4000, failures_tolerated=2),
        profile=model_profile(layers, device_memory_bytes=memory_bytes),
    )
    templates = pipeline_templates(problem, 1000)

    plan, cpu_s = quickest(
        lambda: best_plan(problem, range(1000), templates, epoch=0), limit_s=PLAN_S_MAX
    )

    assert cpu_s < PLAN_S_MAX
    assert plan.nodes == tuple(range(1000))
    assert (min(templates) == 1) == (memory_bytes == 0)


def test_a_failure_finds_its_plan_at_once() -> None:
    """It was made at the start; nothing is planned when nodes are lost."""
    layer = layer_profile("layer", 0.01, device_counts=tuple(range(1, 65)))
    problem = replace(equal_problem(), profile=model_profile((layer,)))
    templates = {n: PipelineTemplate((Stage(0, 1, n),), n) for n in range(1, 64)}
    catalog = plan_catalog(problem, 64, templates)

    plans, cpu_s = quickest(
        lambda: [catalog.plans.get(num_left) for num_left in range(1, 65)], limit_s=LOOKUP_S_MAX
    )

    assert cpu_s < LOOKUP_S_MAX
    assert None not in plans
