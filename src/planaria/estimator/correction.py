"""Factors of measured times over predicted ones, and the profile corrected by them.

A rank reports one sum for its forwards and one for its backwards. So times are known per stage, and
all layers of a stage are assumed to be off by the same factor. Layers of one stage become
distinguishable once other plans cut the model elsewhere: each new factor multiplies the factor so
far, so the stages of all plans correct it in turn.

Source: Kaczmarz's method, with products in place of sums.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

from planaria.core.plan import ModelProfile, Plan, scaled_layer
from planaria.estimator.time import Timeline


class PeakBytes(NamedTuple):
    """Predicted and measured peak bytes of tensors on a rank in an iteration."""

    rank: int
    predicted: int
    measured: int


class Comparison(NamedTuple):
    """An iteration as predicted when it began, and as measured.

    Attributes:
        peaks: peak memory, sorted by rank.
        clock_error_s: the same as in IterationRecord.
    """

    iteration: int
    predicted: Timeline
    measured: Timeline
    peaks: tuple[PeakBytes, ...] = ()
    clock_error_s: float | None = 0.0

    @property
    def end_s(self) -> float:
        """End of the last span, or of the iteration if that is later. Ranks begin one by one, so
        the last ones may end later than an iteration takes."""
        ends_s = (span.end_s for span in self.measured.spans)
        return max(self.predicted.iteration_s, self.measured.iteration_s, *ends_s)


def corrected_profile(profile: ModelProfile, layer_factors: Sequence[float]) -> ModelProfile:
    """The profile with the times of each layer multiplied by its factor; no factors: unchanged."""
    if not layer_factors:
        return profile
    layers = tuple(map(scaled_layer, profile.layers, layer_factors))
    assert len(layers) == len(profile.layers)
    return replace(profile, layers=layers)


def with_more_bytes(profile: ModelProfile, more_bytes: Sequence[int]) -> ModelProfile:
    """The profile with more bytes per layer, held all the time (as if for the optimizer)."""
    layers = tuple(
        replace(layer, optimizer_bytes=layer.optimizer_bytes + extra)
        for layer, extra in zip(profile.layers, more_bytes, strict=True)
    )
    return replace(profile, layers=layers)


def layer_ratios(
    plan: Plan, ratios: Mapping[int, float], *, excluded: Collection[int] = ()
) -> dict[int, float]:
    """Ratio of measured to predicted time by layer: the median of its holders' ratios.

    Args:
        ratios: ratio of measured to predicted time, by rank.
        excluded: ranks that are ignored for layers that others hold, because their node is slow.
    """
    trusted_ratios: defaultdict[int, list[float]] = defaultdict(list)
    excluded_ratios: defaultdict[int, list[float]] = defaultdict(list)
    for rank, ratio in ratios.items():
        for layer in plan.layers_by_rank[rank]:
            (excluded_ratios if rank in excluded else trusted_ratios)[layer].append(ratio)
    return {
        layer: median(trusted_ratios.get(layer) or excluded_ratios[layer])
        for layer in {*trusted_ratios, *excluded_ratios}
    }
