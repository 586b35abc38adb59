"""Odyssey's Figures 9, 12 and 13: errors of estimates, memory, and convergence.

Figures 9 and 13 are of 32 NPUs; ours are of the last recorded runs on nodes of this machine
(docs/LOG.md).
"""

from typing import Final

from planaria.core.plan import one_device_profile
from planaria.papers.odyssey.transfers import (
    answer,
    equal_blocks,
    restored_job,
    shipped_profile,
)
from planaria.papers.rows import Claim, How, PublishedRow
from planaria.policies.memory_checked import stage_peaks
from planaria.restorer.strategies import LEAST_BYTES

_BLOCKS: Final = 16
_PIPELINES: Final = (2, 2, 2, 2)
# Percent, docs/LOG.md, 2026-11-23, 53d4a92: worst errors of predicted iterations of paced nodes,
# before and after losses, and the mean one of two processes that compute.
_WORST_ERROR: Final = {
    "absorb": 1.31,
    "adaptive": 0.77,
    "morph": 1.19,
    "reinstantiate": 1.92,
    "repartition": 0.97,
    "reroute": 1.21,
}
_MEAN_ERROR_UNPACED: Final = 6.6
# docs/LOG.md, 2026-11-23, f8a6498: 3,500 iterations, a loss every seventy.
_CAPACITY: Final = "64 GB is the memory of a device, which every plan keeps"
_LOSS_WITHOUT: Final = 2.6249
_LOSS_FARTHEST: Final = 2.6252


def figure_9() -> tuple[PublishedRow, ...]:
    """Errors of the predicted time of an iteration, percent."""
    paced = "seven layouts of up to 32 paced nodes, whose layers take the time of a profile"
    rows = [
        PublishedRow(
            {"policy": policy, "error": "worst"},
            8.02,
            error,
            How.NODES,
            paced,
            claim=Claim.UNDER,
        )
        for policy, error in _WORST_ERROR.items()
    ]
    rows.append(
        PublishedRow(
            {"policy": "-", "error": "mean, real layers"},
            8.02,
            _MEAN_ERROR_UNPACED,
            How.NODES,
            "two processes that compute on two processors; the paper's 8.02 is its worst error",
            claim=Claim.UNDER,
        )
    )
    return tuple(rows)


def figure_12() -> tuple[PublishedRow, ...]:
    """Peak memory of pipelines before and after a loss, by Equation 14, GB."""
    profile = equal_blocks(one_device_profile(shipped_profile("llama2-7b")), _BLOCKS)
    layer = profile.layers[0]
    static_bytes = 2 * layer.parameter_bytes + layer.optimizer_bytes
    rows = []
    for name, depth in (("before, 2 stages", 2), ("after, 3 stages", 3)):
        layers_max = -(-_BLOCKS // depth)
        peak = layers_max * (static_bytes + depth * layer.activation_bytes) / 1e9
        rows.append(
            PublishedRow(
                {"pipeline": name, "by": "equation 14"},
                64.0,
                peak,
                How.FIRST_PRINCIPLES,
                "16 blocks assumed; the paper says well below 64 GB, and no rise",
                claim=Claim.UNDER,
                repeats=_CAPACITY,
            )
        )
    case = ("llama2-7b", _BLOCKS, _PIPELINES)
    transition = answer(case, (0,), LEAST_BYTES)
    assert transition is not None
    for name, plan in (("before", transition.before), ("after", transition.after)):
        catalog, _ = restored_job(case)
        peak = max(map(max, stage_peaks(catalog.problem, plan))) / 1e9
        rows.append(
            PublishedRow(
                {"pipeline": name, "by": "planaria's estimate"},
                64.0,
                peak,
                How.FIRST_PRINCIPLES,
                "every stage's own layers and microbatches in flight; node 0 is lost",
                claim=Claim.UNDER,
                repeats=_CAPACITY,
            )
        )
    return tuple(rows)


def figure_13() -> tuple[PublishedRow, ...]:
    """Differences of the loss after 3,500 iterations with failures to that without."""
    note = (
        "a small GPT-2 on CPU nodes, of which one dies every seventy iterations, all policies; the "
        "paper trains Llama-2 7B, prints no difference, and ends at 0.1 or less"
    )
    return tuple(
        PublishedRow({"mode": mode}, None, difference, How.NODES, note)
        for mode, difference in (
            ("deterministic", 0.0),
            ("fast", _LOSS_FARTHEST - _LOSS_WITHOUT),
        )
    )
