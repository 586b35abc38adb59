"""Peak memory of a stage, against equation 14 of Odyssey by hand."""

from dataclasses import replace

import pytest
from hypothesis import given, settings

from helpers.strategies import MEBIBYTE, equal_problem, layer_profile, model_profile, problems
from planaria.core.plan import (
    PipelineTemplate,
    RecomputationCost,
    Stage,
    recomputing_profile,
)
from planaria.estimator.peak_memory import peak_bytes, stage_bytes
from planaria.planner.problem import Problem


def test_earlier_stages_hold_more_activations() -> None:
    """Equation 14: (N_pp - i) microbatches in flight; 16 MiB a layer stay, 1 MiB each moves."""
    template = PipelineTemplate((Stage(0, 2, 1), Stage(2, 4, 1), Stage(4, 6, 1)), 3)
    profile = equal_problem().profile

    peaks = peak_bytes(profile, template, num_microbatches=8, gradient_copies=1)

    assert peaks == (38 * MEBIBYTE, 36 * MEBIBYTE, 34 * MEBIBYTE)


def test_no_more_microbatches_are_in_flight_than_there_are() -> None:
    """With one microbatch every stage holds its activations once."""
    template = PipelineTemplate((Stage(0, 2, 1), Stage(2, 4, 1), Stage(4, 6, 1)), 3)
    profile = equal_problem().profile

    peaks = peak_bytes(profile, template, num_microbatches=1, gradient_copies=1)

    assert peaks == (34 * MEBIBYTE,) * 3


@pytest.mark.parametrize(("gradient_copies", "expected"), [(1, 16 + 1), (3, 24 + 1)])
def test_gradient_copies_count_in_multiples_of_the_parameters(
    gradient_copies: int, expected: int
) -> None:
    """Float64 sums beside float32 gradients are three times the parameters, not one."""
    template = PipelineTemplate((Stage(0, 1, 1),), 1)
    profile = equal_problem(num_layers=1).profile

    peaks = peak_bytes(profile, template, num_microbatches=4, gradient_copies=gradient_copies)

    assert (expected * MEBIBYTE,) == peaks


def test_devices_of_a_stage_shard_state_but_not_activations() -> None:
    """Odd bytes are rounded up: no device may hold more than is said."""
    layer = layer_profile("layer", 0.01, parameter_bytes=5, activation_bytes=3)
    template = PipelineTemplate((Stage(0, 1, 2),), 1)

    peaks = peak_bytes(model_profile((layer,)), template, num_microbatches=4, gradient_copies=1)

    assert peaks == ((5 + 5 + 10) // 2 + 3,)
    three = PipelineTemplate((Stage(0, 1, 3),), 1)
    peaks = peak_bytes(model_profile((layer,)), three, num_microbatches=4, gradient_copies=1)
    assert peaks == (7 + 3,)


def test_a_layer_that_is_computed_again_is_held_whole_while_its_backward_runs() -> None:
    """One layer of a stage at a time: 3 and 8 MiB are computed again, 1 MiB of each is kept."""
    costs = {"full": RecomputationCost(MEBIBYTE, {1: 0.02})}
    layers = tuple(
        replace(layer_profile(f"{n}", 0.01, activation_bytes=n * MEBIBYTE), recomputed=costs)
        for n in (4, 9)
    )
    profile = recomputing_profile(model_profile(layers), "full")
    template = PipelineTemplate((Stage(0, 2, 1),), 1)
    state_bytes = sum(2 * layer.parameter_bytes + layer.optimizer_bytes for layer in layers)

    peaks = peak_bytes(profile, template, num_microbatches=4, gradient_copies=1)
    table = stage_bytes(profile, num_devices=1, num_in_flight=1, gradient_copies=1)

    assert peaks == (state_bytes + 2 * MEBIBYTE + 8 * MEBIBYTE,) == (table[0, 2],)
    assert profile.layers[0].backward_s(1) == layers[0].backward_s(1) + 0.02


@settings(max_examples=30)
@given(problems())
def test_table_of_stages_equals_the_peaks_of_a_template(problem: Problem) -> None:
    """The planner searches with the table, and reports what the template says."""
    num_layers = len(problem.profile.layers)
    for cut in range(1, num_layers):
        template = PipelineTemplate((Stage(0, cut, 1), Stage(cut, num_layers, 1)), 2)
        peaks = peak_bytes(problem.profile, template, num_microbatches=9, gradient_copies=3)
        first, last = (
            stage_bytes(problem.profile, num_devices=1, num_in_flight=n, gradient_copies=3)
            for n in (2, 1)
        )

        assert peaks == (first[0, cut], last[cut, num_layers])
