"""What a stage computes again where memory binds: as little as fits, and its seconds count."""

from dataclasses import replace

import pytest

from helpers.strategies import MEBIBYTE, layer_profile, model_profile
from planaria.core.plan import PipelineTemplate, RecomputationCost, stage_layers
from planaria.errors import InfeasibleError
from planaria.estimator.makespan import stage_seconds
from planaria.estimator.peak_memory import peak_bytes
from planaria.job.predictions import prediction
from planaria.planner.plans import best_plan, plan_catalog
from planaria.planner.problem import Problem
from planaria.planner.reroute.reroutes import price_plan
from planaria.planner.templates import pipeline_template, pipeline_templates, smallest_num_nodes

NUM_LAYERS = 6
STATE_BYTES = 8 * MEBIBYTE  # Of a layer: parameters, gradients and optimizer.
COSTS = {
    "selective": RecomputationCost(4 * MEBIBYTE, {1: 0.001}),
    "full": RecomputationCost(MEBIBYTE, {1: 0.01}),
}


def _problem(memory_bytes: int, *, chooses: bool = True, costs: bool = True) -> Problem:
    """Six layers that keep 10 MiB for a microbatch, or less if they compute it again."""
    layer = layer_profile(
        "layer", 0.01, parameter_bytes=2 * MEBIBYTE, activation_bytes=10 * MEBIBYTE
    )
    layer = replace(layer, optimizer_bytes=4 * MEBIBYTE, recomputed=COSTS if costs else {})
    profile = replace(model_profile((layer,) * NUM_LAYERS), device_memory_bytes=memory_bytes)
    return Problem(
        profile=profile,
        devices_per_node=1,
        num_microbatches=4,
        failures_tolerated=0,
        chooses_recomputation=chooses,
    )


def _template(problem: Problem, num_nodes: int) -> PipelineTemplate:
    template = pipeline_template(problem, num_nodes)
    assert template is not None
    return template


def test_where_memory_is_enough_plans_are_those_without_a_choice() -> None:
    """Bit for bit: a choice that is not needed changes nothing."""
    for memory_bytes in (0, 200 * MEBIBYTE):
        chosen, plain = (_problem(memory_bytes, chooses=chooses) for chooses in (True, False))
        templates = pipeline_templates(chosen, 4)

        assert templates == pipeline_templates(plain, 4)
        assert best_plan(chosen, range(4), templates, epoch=0) == best_plan(
            plain, range(4), templates, epoch=0
        )


def test_as_few_layers_as_fit_compute_again_and_the_cheaper_kind_first() -> None:
    """One stage: 48 MiB of state, 60 of activations, in 106 MiB: one layer frees the 2 that lack,
    but holds what it frees while its backward runs, so the second is needed as well."""
    (stage,) = _template(_problem(106 * MEBIBYTE), 1).stages

    assert sorted(stage.recomputation) == ["none"] * 4 + ["selective"] * 2


def test_the_dearer_kind_is_taken_where_the_cheaper_one_does_not_fit() -> None:
    """Selective everywhere needs 48 + 24 + 6 MiB."""
    (stage,) = _template(_problem(77 * MEBIBYTE), 1).stages

    assert "full" in stage.recomputation


@pytest.mark.parametrize("num_nodes", [1, 2, 3])
def test_every_stage_fits_and_its_seconds_count(num_nodes: int) -> None:
    """The estimate by the template and that by the schedule agree."""
    problem = _problem(78 * MEBIBYTE)
    template = _template(problem, num_nodes)
    peaks = peak_bytes(problem.profile, template, num_microbatches=4, gradient_copies=1)
    plan = best_plan(problem, range(num_nodes), {num_nodes: template}, epoch=0)
    predicted = prediction(problem, plan)

    assert max(peaks) == max(predicted.peak_bytes.values()) <= 78 * MEBIBYTE
    for stage, seconds in zip(
        template.stages, stage_seconds(problem.profile, template).backward_s, strict=True
    ):
        layers = stage_layers(problem.profile, stage)
        assert seconds == sum(layer.backward_s(1) for layer in layers)
        base = problem.profile.layers[stage.first_layer : stage.end_layer]
        has_choice = bool(stage.recomputation)
        assert (seconds > sum(layer.backward_s(1) for layer in base)) is has_choice


def test_a_loss_is_survived_that_does_not_fit_without_recomputation() -> None:
    """Two nodes hold the model; the one that is left needs to compute activations again."""
    limited = _problem(80 * MEBIBYTE, chooses=False)
    choosing = _problem(80 * MEBIBYTE)

    assert smallest_num_nodes(limited) > 1 == smallest_num_nodes(choosing)
    catalog = plan_catalog(choosing, 2, pipeline_templates(choosing, 2))
    assert catalog.plans[1].recomputation_by_rank[0]
    with pytest.raises(InfeasibleError):
        plan_catalog(limited, 1, pipeline_templates(limited, 1))


def test_backwards_are_not_split_where_activations_are_computed_again() -> None:
    """A forward would run again for each of the two parts of a backward."""
    problem = _problem(80 * MEBIBYTE)
    plan = best_plan(problem, range(1), {1: _template(problem, 1)}, epoch=0)
    priced = price_plan(problem, plan)

    assert priced is not None
    assert not priced.plan.splits_backward


def test_a_profile_without_costs_leaves_nothing_to_choose() -> None:
    """Profiles of older versions have none."""
    problem = _problem(80 * MEBIBYTE, costs=False)

    assert pipeline_template(problem, 1) is None
