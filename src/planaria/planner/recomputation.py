"""Which layers of a stage compute their activations again, where memory binds.

A stage that fits computes nothing again. Otherwise as few layers as possible do, those first that
free the most bytes for a second. One kind of recomputation is tried after the other, and for each
layer the one that keeps the least; the choice that takes the fewest seconds wins.

Source: Odyssey, equation 14, for what a stage holds.
Differs: Odyssey's stages keep all activations.
"""

from dataclasses import replace
from typing import Final

from planaria.core.plan import LayerProfile, ModelProfile, Recomputation, Stage
from planaria.estimator.peak_memory import single_stage_bytes

_LEAST: Final = "least"
_KINDS: Final = ("selective", "full", _LEAST)


def least_kept_profile(profile: ModelProfile) -> ModelProfile:
    """The profile if every layer keeps as little as it can."""
    layers = tuple(layer.recomputing(_mode(layer, _LEAST)) for layer in profile.layers)
    return replace(profile, layers=layers)


def cheapest_that_fits(
    profile: ModelProfile,
    stage: Stage,
    *,
    num_in_flight: int,
    gradient_copies: int,
    limit_bytes: int,
) -> Stage:
    """The stage with the recomputation that takes the fewest seconds, of those that fit; unchanged
    if it fits without, or if nothing fits. O(layers^2)."""
    layers = profile.layers[stage.first_layer : stage.end_layer]

    def fits(modes: tuple[Recomputation, ...]) -> bool:
        kept = [layer.recomputing(mode) for layer, mode in zip(layers, modes, strict=True)]
        held_bytes = single_stage_bytes(
            kept,
            num_devices=stage.num_devices,
            num_in_flight=num_in_flight,
            gradient_copies=gradient_copies,
        )
        return held_bytes <= limit_bytes

    nothing: tuple[Recomputation, ...] = tuple("none" for _ in layers)
    if fits(nothing):
        return stage
    choices = []
    for kind in _KINDS:
        modes = list(nothing)
        for index in _best_first(layers, kind, stage.num_devices):
            modes[index] = _mode(layers[index], kind)
            if fits(tuple(modes)):
                seconds = sum(
                    _additional_s(layer, mode, stage.num_devices)
                    for layer, mode in zip(layers, modes, strict=True)
                )
                choices.append((seconds, tuple(modes)))
                break
    return replace(stage, recomputation=min(choices)[1]) if choices else stage


def _mode(layer: LayerProfile, kind: str) -> Recomputation:
    """The mode in which a layer takes part in one kind of recomputation; "none" if it would not
    keep less."""
    costs = {"none": layer.activation_bytes} | {
        mode: cost.activation_bytes for mode, cost in layer.recomputed.items()
    }
    modes: tuple[Recomputation, ...] = ("none", "selective", "full")
    allowed = [
        mode for mode in modes if mode in costs and (mode == "none" or kind in (mode, _LEAST))
    ]
    return min(allowed, key=lambda mode: costs[mode])


def _best_first(layers: tuple[LayerProfile, ...], kind: str, count: int) -> list[int]:
    """The layers that would keep less, those first that free the most bytes for a second."""

    def seconds_for_a_byte(index: int) -> float:
        layer, mode = layers[index], _mode(layers[index], kind)
        freed_bytes = layer.activation_bytes - layer.recomputed[mode].activation_bytes
        return _additional_s(layer, mode, count) / freed_bytes

    helpful = [index for index, layer in enumerate(layers) if _mode(layer, kind) != "none"]
    return sorted(helpful, key=seconds_for_a_byte)


def _additional_s(layer: LayerProfile, mode: Recomputation, count: int) -> float:
    return 0.0 if mode == "none" else layer.recomputed[mode].additional_s[count]
