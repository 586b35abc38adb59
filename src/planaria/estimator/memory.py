"""What a device must hold at the peak of an iteration.

Odyssey, equation 14: a stage holds its parameters, their gradients and optimizer states all the
time, and the activations of each microbatch that is between its forward and its backward. Under
1F1B stage i of S has at most min(N_b, S - i) such microbatches.

Source: Odyssey, section IV-C, equation 14.
Differs: bytes are summed over the stage's own layers, where the paper takes an average layer;
in-flight microbatches stop at N_b, which the paper leaves out; `gradient_copies` counts what is
kept per parameter byte (1, or 3 where float64 sums stand beside the float32 gradients). A stage of
several devices shards parameters, gradients and optimizer states evenly over them; activations
are counted whole on each, which is the most that any way of sharing the work needs. A parameter
that two layers of a stage share counts twice: each use has a gradient of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planaria.core.plan import LayerProfile, ModelProfile, PipelineTemplate, Plan
from planaria.schedule.action import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Schedule,
)

Table = NDArray[np.int64]

# By kind, how many times the activations of its hop are kept behind it, and the gradients.
_KEEP = {
    FORWARD: (1, 0),
    BACKWARD: (-1, 0),
    BACKWARD_INPUT: (0, 1),
    BACKWARD_WEIGHT: (-1, -1),
}


def peak_bytes(
    profile: ModelProfile,
    template: PipelineTemplate,
    *,
    num_microbatches: int,
    gradient_copies: int,
) -> tuple[int, ...]:
    """The most that each device of a stage holds, by stage.

    Args:
        num_microbatches: N_b, those that the pipeline gets in an iteration.
    """
    num_stages = len(template.stages)
    peaks = []
    for i, stage in enumerate(template.stages):
        layers = profile.layers[stage.first_layer : stage.end_layer]
        state_bytes = _state_bytes(layers, stage.num_devices, gradient_copies)
        activation_bytes = sum(layer.activation_bytes for layer in layers)
        in_flight = min(num_microbatches, num_stages - i)
        peaks.append(state_bytes + in_flight * activation_bytes)
    return tuple(peaks)


@dataclass(frozen=True, slots=True)
class RankBytes:
    """What each device of a stage holds.

    Attributes:
        state_bytes: all the time: parameters, gradients, optimizer states.
        microbatch_bytes: of one microbatch between the forward and the backward of all its layers.
    """

    state_bytes: int
    microbatch_bytes: int


def bytes_by_rank(
    profile: ModelProfile, plan: Plan, *, gradient_copies: int
) -> dict[int, RankBytes]:
    """By the first rank of each stage whose node is there."""
    found = {}
    at_work = plan.layers_by_rank
    for pipeline in plan.pipelines:
        stages = zip(pipeline.template.stages, pipeline.ranks_by_stage(), strict=True)
        for stage, (rank, *_) in stages:
            if rank in at_work:
                layers = profile.layers[stage.first_layer : stage.end_layer]
                shadows = [profile.layers[layer] for layer in plan.shadows.get(rank, ())]
                held = (*layers, *shadows)
                state_bytes = _state_bytes(held, stage.num_devices, gradient_copies)
                kept_bytes = sum(layer.activation_bytes for layer in layers)
                if plan.splits_backward:
                    kept_bytes += sum(layer.output_bytes for layer in layers)
                found[rank] = RankBytes(state_bytes, kept_bytes)
    return found


def kept_bytes(profile: ModelProfile, schedule: Schedule, rank: int) -> int:
    """The most that activations of a rank take at any time under a schedule, whatever its routes.

    A split backward keeps them, and the gradients between its layers, from its first part to its
    second. O(actions).
    """
    activations, outputs = [0], [0]
    for layer in profile.layers:
        activations.append(activations[-1] + layer.activation_bytes)
        outputs.append(outputs[-1] + layer.output_bytes)
    kept_bytes = most_bytes = 0
    for action in schedule.actions[rank]:
        if action.kind in _KEEP:
            hop = schedule.routes[action.microbatch][action.hop]
            num_activations, num_gradients = _KEEP[action.kind]
            activation_bytes = activations[hop.end_layer] - activations[hop.first_layer]
            gradient_bytes = outputs[hop.end_layer] - outputs[hop.first_layer]
            kept_bytes += num_activations * activation_bytes + num_gradients * gradient_bytes
            most_bytes = max(most_bytes, kept_bytes)
    return most_bytes


def _state_bytes(layers: Sequence[LayerProfile], num_devices: int, gradient_copies: int) -> int:
    parameter_bytes = sum(layer.parameter_bytes for layer in layers)
    optimizer_bytes = sum(layer.optimizer_bytes for layer in layers)
    sharded_bytes = parameter_bytes * (1 + gradient_copies) + optimizer_bytes
    return -(-sharded_bytes // num_devices)


def stage_bytes(
    profile: ModelProfile, *, num_devices: int, num_in_flight: int, gradient_copies: int
) -> Table:
    """What a device holds at the peak, for every stage that the model could have.

    Returns:
        shape [L + 1, L + 1]; entry [u, v] is that of layers [u, v), and 0 where u >= v.
    """
    sharded = [
        layer.parameter_bytes * (1 + gradient_copies) + layer.optimizer_bytes
        for layer in profile.layers
    ]
    activations = [layer.activation_bytes for layer in profile.layers]
    table: Table = -(-_range_sums(sharded) // num_devices)
    table += num_in_flight * _range_sums(activations)
    return table


def _range_sums(values: list[int]) -> Table:
    """[u, v] -> sum(values[u:v]), 0 where u >= v."""
    before = np.concatenate(([0], np.cumsum(values, dtype=np.int64)))
    sums: Table = np.maximum(before[None, :] - before[:, None], 0)
    return sums
