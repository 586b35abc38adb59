"""Gradients that are complete without a reduction, for one rank alone holds their layers."""

from collections.abc import Collection

from planaria.engine.stage import Stage
from planaria.schedule.action import Schedule


def finish_unshared(
    stage: Stage, schedule: Schedule, *, buckets: Collection[int], layers: Collection[int]
) -> None:
    """Rounds the sums that no bucket has.

    Args:
        buckets: that this rank takes part in.
        layers: that the plan gives to this rank.
    """
    reduced = {
        (schedule.buckets[b].tied, layer) for b in buckets for layer in schedule.buckets[b].layers
    }
    for layer in sorted(layers):
        held = stage.layers[layer]
        if (-1, layer) not in reduced:
            held.gradients.copy_(held.sums)
    for index, group in enumerate(stage.model.tied):
        if all((index, use.layer) not in reduced for use in group.uses):
            total, uses = stage.tied_sum(group, layers)
            for held, name in uses:
                held.tied_gradients[name].copy_(total)
