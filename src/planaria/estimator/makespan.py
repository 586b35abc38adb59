"""The time of one pipeline's iteration under 1F1B, exactly, without building a schedule.

1F1B on stage i of S runs the forward of microbatch m at tick i + 2m and its backward at tick
2S - 1 - i + 2m, for every m there is. That one rule gives warmup, steady and cooldown, also with
fewer microbatches than stages. An action starts when its stage has ended the action before and its
input has arrived: the output of the stage above for a forward, the gradient of the stage below for
a backward. Both are of earlier ticks, so one pass over the ticks finds every end, for all stages
and for many pipelines at once.

Dropping the last microbatch leaves all other actions in the same order, so the makespan never
falls with the number of microbatches.

Source: Oobleck (SOSP '23), section 4.1.2, figure 5.
Differs: the paper adds T1 + T2 + T3, which is exact for equal stages without transfers, and falls
below the truth where transfers count or where the stages after the slowest one are light. This is
the time of the schedule itself. A transfer overlaps with computing; it occupies its link, so that
the next one waits, and arrives one latency later, as in estimator/time.py. The reduction of
gradients and the optimizer are left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planaria.core.plan import Link, ModelProfile, PipelineTemplate

Seconds = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """What one microbatch costs along a pipeline of S stages.

    Attributes:
        forward_s: by stage.
        backward_s: by stage, input and weight.
        transfer_s: that an output occupies the link from stage i to i + 1, and its gradient the
            link back: S - 1 entries, as latency_s.
        latency_s: from the end of a transfer to its arrival.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    transfer_s: tuple[float, ...]
    latency_s: tuple[float, ...]

    def __post_init__(self) -> None:
        assert len(self.forward_s) == len(self.backward_s)
        assert len(self.transfer_s) == len(self.latency_s) == len(self.forward_s) - 1


def stage_seconds(profile: ModelProfile, template: PipelineTemplate) -> StageSeconds:
    """The seconds of the template's stages, and of the links between them."""
    layers, stages, links = profile.layers, template.stages, _links(profile, template)
    return StageSeconds(
        forward_s=tuple(
            sum(layer.forward_s[s.num_devices] for layer in layers[s.first_layer : s.end_layer])
            for s in stages
        ),
        backward_s=tuple(
            sum(layer.backward_s(s.num_devices) for layer in layers[s.first_layer : s.end_layer])
            for s in stages
        ),
        transfer_s=tuple(
            profile.layers[stage.end_layer - 1].output_bytes / link.bandwidth_bytes_per_s
            for stage, link in zip(stages, links, strict=False)
        ),
        latency_s=tuple(link.latency_s for link in links),
    )


def makespan_s(seconds: StageSeconds, num_microbatches: int) -> float:
    """The time from the first forward to the last backward of one iteration. O(S * N_b)."""
    return float(makespans_of_each([seconds], num_microbatches)[0])


def makespans_of_each(pipelines: Sequence[StageSeconds], num_microbatches: int) -> Seconds:
    """The makespan of each of several pipelines, all of the same number of stages.

    Returns:
        shape [len(pipelines)].
    """
    return _makespans_s(pipelines, np.full(len(pipelines), num_microbatches))


def makespans_up_to(seconds: StageSeconds, num_microbatches: int) -> Seconds:
    """The makespan of one pipeline with 1, 2, .. num_microbatches; it never falls.

    Returns:
        shape [num_microbatches]; entry n - 1 is the makespan of n microbatches.
    """
    makespans_s = _makespans_s([seconds], np.arange(1, num_microbatches + 1))
    assert (np.diff(makespans_s) >= 0).all()
    return makespans_s


def _makespans_s(pipelines: Sequence[StageSeconds], num_microbatches: NDArray[np.int64]) -> Seconds:
    """The makespans of C pipelines, or of one with C numbers of microbatches, a column each."""
    assert num_microbatches.min() >= 1
    forward_s = np.array([seconds.forward_s for seconds in pipelines]).T
    backward_s = np.array([seconds.backward_s for seconds in pipelines]).T
    transfer_s = np.array([(0.0, *seconds.transfer_s, 0.0) for seconds in pipelines]).T
    latency_s = np.array([(0.0, *seconds.latency_s, 0.0) for seconds in pipelines]).T
    num_stages, num_pipelines = len(forward_s), len(num_microbatches)
    end_s = np.zeros((num_stages, num_pipelines))
    # Link i lies above stage i, link i + 1 below it; above the first and below the last is nobody.
    down_s, up_s = np.zeros((2, num_stages + 1, num_pipelines))
    stage = np.arange(num_stages)[:, None]
    most = int(num_microbatches.max())
    all_equal = int(num_microbatches.min()) == most
    for tick in range(2 * (most + num_stages - 1)):
        # Every second stage has a forward in this tick, the others a backward.
        first = max(tick % 2, tick - 2 * (most - 1))
        down = slice(first, min(num_stages, tick + 1), 2)
        runs = all_equal or (tick - stage[down]) // 2 < num_microbatches
        _act(end_s[down], down_s[:-1][down] + latency_s[:-1][down], forward_s[down], runs)
        _act(down_s[1:][down], end_s[down], transfer_s[1:][down], runs)

        first = max(1 - tick % 2, 2 * num_stages - 1 - tick)
        up = slice(first, min(num_stages, 2 * (most + num_stages - 1) - tick), 2)
        runs = all_equal or (tick - 2 * num_stages + 1 + stage[up]) // 2 < num_microbatches
        _act(end_s[up], up_s[1:][up] + latency_s[1:][up], backward_s[up], runs)
        _act(up_s[:-1][up], end_s[up], transfer_s[:-1][up], runs)
    makespans_s: Seconds = end_s[0]
    return makespans_s


def _act(
    end_s: Seconds, ready_s: Seconds, lasts_s: Seconds, runs: NDArray[np.bool_] | bool
) -> None:
    """Move end_s on to the end of what starts when it is free and the input is ready."""
    np.maximum(end_s, ready_s, out=end_s, where=runs)
    np.add(end_s, lasts_s, out=end_s, where=runs)


def _links(profile: ModelProfile, template: PipelineTemplate) -> tuple[Link, ...]:
    """The link below each stage but the last."""
    links = []
    next_device = 0
    for stage in template.stages[:-1]:
        next_device += stage.num_devices
        on_boundary = next_device % template.devices_per_node == 0
        links.append(profile.links["inter_node" if on_boundary else "intra_node"])
    return tuple(links)
