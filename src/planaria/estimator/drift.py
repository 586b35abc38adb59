"""How far measured seconds are from predicted ones, and the profile that they correct.

A rank tells what its forwards and its backwards took, each kind in one sum. So seconds are known by
stage, and those of a stage's layers are taken to be off by the same factor. What layers of one
stage share in that way is told apart once other plans cut the model elsewhere: each factor
multiplies what is known so far, and the stages of all plans pull at it in turn.

Source: Kaczmarz's method, for products in the place of sums.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

from planaria.core.plan import LayerProfile, ModelProfile, Plan
from planaria.estimator.time import Timeline


class PeakBytes(NamedTuple):
    """The most bytes of tensors that a rank was to hold in an iteration, and held."""

    rank: int
    predicted: int
    measured: int


class Compared(NamedTuple):
    """An iteration as it was predicted when it began, and as it was; bytes by rank, ascending."""

    iteration: int
    predicted: Timeline
    measured: Timeline
    peaks: tuple[PeakBytes, ...] = ()


def corrected_profile(profile: ModelProfile, layer_factors: Sequence[float]) -> ModelProfile:
    """The profile with the seconds of each layer multiplied; as it is without factors."""
    if not layer_factors:
        return profile
    layers = tuple(map(_times, profile.layers, layer_factors))
    assert len(layers) == len(profile.layers)
    return replace(profile, layers=layers)


def with_more_bytes(profile: ModelProfile, more_bytes: Sequence[int]) -> ModelProfile:
    """The profile of layers that take more memory than it says, all the time."""
    layers = tuple(
        replace(layer, optimizer_bytes=layer.optimizer_bytes + more)
        for layer, more in zip(profile.layers, more_bytes, strict=True)
    )
    return replace(profile, layers=layers)


def _times(layer: LayerProfile, factor: float) -> LayerProfile:
    def times(seconds: Mapping[int, float]) -> dict[int, float]:
        return {count: value * factor for count, value in seconds.items()}

    return replace(
        layer,
        forward_s=times(layer.forward_s),
        backward_input_s=times(layer.backward_input_s),
        backward_weight_s=times(layer.backward_weight_s),
    )


def layer_ratios(
    plan: Plan, ratios: Mapping[int, float], *, excluded: Collection[int] = ()
) -> dict[int, float]:
    """By layer, how many times as long as predicted it takes: the median of its holders' ratios.

    Args:
        ratios: by rank, of its measured seconds to its predicted ones.
        excluded: ranks that tell nothing of a layer that others hold, for their node is slow.
    """
    found: defaultdict[int, list[float]] = defaultdict(list)
    others: defaultdict[int, list[float]] = defaultdict(list)
    for rank, ratio in ratios.items():
        for layer in plan.layers_by_rank[rank]:
            (others if rank in excluded else found)[layer].append(ratio)
    return {layer: median(found.get(layer) or others[layer]) for layer in {*found, *others}}
