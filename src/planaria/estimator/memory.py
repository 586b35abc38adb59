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
from planaria.schedule.action import BACKWARD, FORWARD, Schedule

Table = NDArray[np.int64]


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
    """What each device of a stage holds, by the first rank of the stage.

    Attributes:
        state_bytes: all the time: parameters, gradients, optimizer states.
        microbatch_bytes: of one microbatch between the forward and the backward of all its layers.
        peak_bytes: the most in an iteration.
    """

    state_bytes: int
    microbatch_bytes: int
    peak_bytes: int


def bytes_by_rank(
    profile: ModelProfile, plan: Plan, schedule: Schedule, *, gradient_copies: int
) -> dict[int, RankBytes]:
    """What the ranks that compute hold under a schedule of the plan, whatever its routes.

    Equals `peak_bytes` where a pipeline's microbatches keep to its stages. O(actions).
    """
    found = {}
    for pipeline in plan.pipelines:
        stages = zip(pipeline.template.stages, pipeline.ranks_by_stage(), strict=True)
        for stage, (rank, *_) in stages:
            if rank in schedule.actions:
                layers = profile.layers[stage.first_layer : stage.end_layer]
                state_bytes = _state_bytes(layers, stage.num_devices, gradient_copies)
                microbatch_bytes = sum(layer.activation_bytes for layer in layers)
                most_bytes = _most_kept_bytes(profile, schedule, rank)
                found[rank] = RankBytes(state_bytes, microbatch_bytes, state_bytes + most_bytes)
    return found


def _state_bytes(layers: Sequence[LayerProfile], num_devices: int, gradient_copies: int) -> int:
    parameter_bytes = sum(layer.parameter_bytes for layer in layers)
    optimizer_bytes = sum(layer.optimizer_bytes for layer in layers)
    sharded_bytes = parameter_bytes * (1 + gradient_copies) + optimizer_bytes
    return -(-sharded_bytes // num_devices)


def _most_kept_bytes(profile: ModelProfile, schedule: Schedule, rank: int) -> int:
    """The most that activations of a rank take at any time."""
    before = [0]
    for layer in profile.layers:
        before.append(before[-1] + layer.activation_bytes)
    kept_bytes = most_bytes = 0
    for action in schedule.actions[rank]:
        if action.kind is FORWARD or action.kind is BACKWARD:
            hop = schedule.routes[action.microbatch][action.hop]
            hop_bytes = before[hop.end_layer] - before[hop.first_layer]
            kept_bytes += hop_bytes if action.kind is FORWARD else -hop_bytes
            most_bytes = max(most_bytes, kept_bytes)
    return most_bytes


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
