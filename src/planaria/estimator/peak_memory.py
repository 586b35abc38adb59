"""The peak memory of a device in an iteration.

Odyssey, equation 14: a stage always holds its parameters, their gradients and optimizer states, and
it holds the activations of each microbatch between its forward and its backward. Under 1F1B stage i
of S has at most min(N_b, S - i) such microbatches.

Source: Odyssey, section IV-C, equation 14.
Differs: bytes are summed over the stage's own layers, while the paper takes an average layer. The
number of in-flight microbatches is limited by N_b, which the paper leaves out. `gradient_copies` is
the number of gradient bytes per parameter byte (1, or 3 if float64 sums are kept besides float32
gradients). In bfloat16 a layer also holds the parameters with which it computes. A stage of several
devices shards parameters, gradients and optimizer states evenly over them. Activations are counted
in full on each device, which is an upper bound for every way to divide the work. A parameter that
two layers of a stage share counts twice, because each use has a gradient of its own. A layer whose
activations are computed again holds all of them while its backward runs, one layer of a stage at a
time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from planaria.core.plan import (
    LayerProfile,
    ModelProfile,
    PipelineTemplate,
    Plan,
    Route,
    profile_on,
    stage_layers,
)
from planaria.schedule.action import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Schedule,
)
from planaria.schedule.routed import WORK_KINDS, RoutedWork

Table = NDArray[np.int64]

# Change, by kind of action, in (kept activations, kept gradients) of its hop.
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
    """Peak bytes of each device of a stage, by stage.

    Args:
        num_microbatches: N_b, number of microbatches of the pipeline in an iteration.
    """
    num_stages = len(template.stages)
    peaks = []
    for i, stage in enumerate(template.stages):
        layers = stage_layers(profile, stage)
        peaks.append(
            single_stage_bytes(
                layers,
                num_devices=stage.num_devices,
                num_in_flight=min(num_microbatches, num_stages - i),
                gradient_copies=gradient_copies,
            )
        )
    return tuple(peaks)


def single_stage_bytes(
    layers: Sequence[LayerProfile], *, num_devices: int, num_in_flight: int, gradient_copies: int
) -> int:
    """Peak bytes of each device of a stage of these layers."""
    state_bytes = _state_bytes(layers, num_devices, gradient_copies)
    activation_bytes = sum(layer.activation_bytes for layer in layers)
    return state_bytes + num_in_flight * activation_bytes + backward_bytes(layers)


def backward_bytes(layers: Sequence[LayerProfile]) -> int:
    """The most bytes that the backward of one of these layers computes again before it needs
    them."""
    return max((layer.backward_bytes for layer in layers), default=0)


@dataclass(frozen=True, slots=True)
class RankBytes:
    """Bytes on each device of a stage.

    Attributes:
        state_bytes: size of parameters, gradients and optimizer states, which are always held, and
            of what one backward computes again.
        microbatch_bytes: bytes that one microbatch needs between forward and backward of all
            layers of the stage.
    """

    state_bytes: int
    microbatch_bytes: int


def bytes_by_rank(
    profile: ModelProfile, plan: Plan, *, gradient_copies: int
) -> dict[int, RankBytes]:
    """Bytes of each device of a stage, by the stage's first rank; without nodes in `plan.gone`."""
    by_rank = {}
    at_work = plan.layers_by_rank
    for pipeline in plan.pipelines:
        stages = zip(pipeline.template.stages, pipeline.ranks_by_stage(), strict=True)
        for stage, (rank, *_) in stages:
            if rank in at_work:
                layers = stage_layers(profile, stage)
                shadows = [profile.layers[layer] for layer in plan.shadows.get(rank, ())]
                held_layers = (*layers, *shadows)
                state_bytes = _state_bytes(held_layers, stage.num_devices, gradient_copies)
                state_bytes += backward_bytes(held_layers)
                kept_bytes = sum(layer.activation_bytes for layer in layers)
                if plan.splits_backward:
                    kept_bytes += sum(layer.output_bytes for layer in layers)
                by_rank[rank] = RankBytes(state_bytes, kept_bytes)
    return by_rank


def kept_bytes(profile: ModelProfile, schedule: Schedule, rank: int) -> int:
    """Peak bytes that a rank keeps between forwards and backwards under a schedule, for any routes.

    A split backward keeps the activations, and the gradients between its layers, from its first
    part to its second. Takes O(actions) time.

    Args:
        profile: profile on that rank, as `profile_on` gives it.
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


class WorkBytes:
    """What ranks keep between forwards and backwards, for plans that have the same pipelines.

    It is what `kept_bytes` computes from a schedule, to the byte, from the work alone.

    Args:
        plan: one of these plans, with any routes.
    """

    def __init__(self, profile: ModelProfile, plan: Plan) -> None:
        self._profile, self._plan = profile, plan
        self._changes: dict[int, tuple[Route, Sequence[int]]] = {}  # By id of the route.

    def most_kept(self, routes: Sequence[Route], work: RoutedWork) -> dict[int, int]:
        """Peak bytes that each rank keeps, by rank."""
        changes = work.by_visit(routes, self._route_changes, self._changes)
        return {
            rank: max(accumulate(map(changes.__getitem__, numbers)), default=0)
            for rank, numbers in work.by_rank.items()
        }

    def _route_changes(self, route: Route) -> list[int]:
        """The bytes that each kind of work on each hop adds to what its rank keeps."""
        changes = []
        for hop in route:
            profile = profile_on(self._profile, self._plan, hop.rank)
            layers = profile.layers[hop.first_layer : hop.end_layer]
            activation_bytes = sum(layer.activation_bytes for layer in layers)
            gradient_bytes = sum(layer.output_bytes for layer in layers)
            for kind in WORK_KINDS:
                num_activations, num_gradients = _KEEP[kind]
                changes.append(num_activations * activation_bytes + num_gradients * gradient_bytes)
        return changes


def _state_bytes(layers: Sequence[LayerProfile], num_devices: int, gradient_copies: int) -> int:
    sharded_bytes = sum(_layer_state_bytes(layer, gradient_copies) for layer in layers)
    return -(-sharded_bytes // num_devices)


def _layer_state_bytes(layer: LayerProfile, gradient_copies: int) -> int:
    trained_bytes = layer.parameter_bytes * (1 + gradient_copies) + layer.optimizer_bytes
    return trained_bytes + layer.working_bytes + layer.frozen_bytes


def stage_bytes(
    profile: ModelProfile, *, num_devices: int, num_in_flight: int, gradient_copies: int
) -> Table:
    """Peak bytes of a device, for every possible stage of the model.

    Returns:
        Table of shape [L + 1, L + 1]; entry [u, v] is for layers [u, v), and 0 if u >= v.
    """
    sharded = [_layer_state_bytes(layer, gradient_copies) for layer in profile.layers]
    activations = [layer.activation_bytes for layer in profile.layers]
    table: Table = -(-_range_sums(sharded) // num_devices)
    table += num_in_flight * _range_sums(activations)
    table += _range_maxima([layer.backward_bytes for layer in profile.layers])
    return table


def _range_sums(values: list[int]) -> Table:
    """Table whose entry [u, v] is sum(values[u:v]), 0 if u >= v."""
    before = np.concatenate(([0], np.cumsum(values, dtype=np.int64)))
    sums: Table = np.maximum(before[None, :] - before[:, None], 0)
    return sums


def _range_maxima(values: list[int]) -> Table:
    """Table whose entry [u, v] is max(values[u:v]), 0 if u >= v."""
    size = len(values) + 1
    maxima: Table = np.zeros((size, size), dtype=np.int64)
    for first in range(size - 1):
        maxima[first, first + 1 :] = np.maximum.accumulate(values[first:])
    return maxima
