"""The exact time of one pipeline's iteration under 1F1B, without building a schedule.

1F1B on stage i of S runs the forward of microbatch m at tick i + 2m and its backward at tick
2S - 1 - i + 2m. This one rule gives the warmup, steady and cooldown phases, also with fewer
microbatches than stages. An action starts when its stage has ended the action before and its input
has arrived: the output of the stage above for a forward, the gradient of the stage below for a
backward. Both come from earlier ticks, so one pass over the ticks finds the end of every action,
for all stages and for many pipelines at once.

Without the last microbatch all other actions keep their order, so the makespan never decreases
with the number of microbatches; ends.py computes it for every number.

Source: Oobleck (SOSP '23), section 4.1.2, figure 5.
Differs: the paper adds T1 + T2 + T3, which is exact for equal stages without transfers. The sum is
too low if transfers take time, or if the stages after the slowest one are light. This module
computes the time of the schedule itself. A transfer overlaps with computing. It occupies its link,
so the next transfer waits, and it arrives one latency later, as in estimator/time.py. The reduction
of gradients and the optimizer are left out.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planaria.core.plan import Link, ModelProfile, PipelineTemplate, stage_layers

Seconds = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Times of one microbatch along a pipeline of S stages.

    Attributes:
        forward_s: time of the forward on each stage.
        backward_s: time of the whole backward on each stage.
        transfer_s: time for which an output occupies the link from stage i to i + 1, and its
            gradient the link back; S - 1 entries.
        latency_s: time from the end of a transfer to its arrival; S - 1 entries.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    transfer_s: tuple[float, ...]
    latency_s: tuple[float, ...]

    def __post_init__(self) -> None:
        assert len(self.forward_s) == len(self.backward_s)
        assert len(self.transfer_s) == len(self.latency_s) == len(self.forward_s) - 1


def stage_seconds(profile: ModelProfile, template: PipelineTemplate) -> StageSeconds:
    """The times of one microbatch on the template's stages, and on the links between them."""
    stages, links = template.stages, _links(profile, template)
    speeds = [kind.speed for kind in template.stage_kinds()]
    layers_by_stage = [stage_layers(profile, stage) for stage in stages]
    return StageSeconds(
        forward_s=tuple(
            sum(layer.forward_s[stage.num_devices] for layer in layers) / speed
            for stage, layers, speed in zip(stages, layers_by_stage, speeds, strict=True)
        ),
        backward_s=tuple(
            sum(layer.backward_s(stage.num_devices) for layer in layers) / speed
            for stage, layers, speed in zip(stages, layers_by_stage, speeds, strict=True)
        ),
        transfer_s=tuple(
            profile.layers[stage.end_layer - 1].output_bytes / link.bandwidth_bytes_per_s
            for stage, link in zip(stages, links, strict=False)
        ),
        latency_s=tuple(link.latency_s for link in links),
    )


def makespan_s(seconds: StageSeconds, num_microbatches: int) -> float:
    """Time from the first forward to the last backward of one iteration; takes O(S * N_b) time."""
    return float(makespans_of_each(stage_table([seconds]), num_microbatches)[0])


@dataclass(frozen=True, slots=True, eq=False)
class ActionEnds:
    """Ends of the forwards and backwards of one pipeline's iteration, each of shape [S, N_b]."""

    forward_s: Seconds
    backward_s: Seconds


def action_ends(seconds: StageSeconds, num_microbatches: int) -> ActionEnds:
    """The end of every action of an iteration, see `makespan_s`; takes O(S * N_b) time."""
    run = TickRun(stage_table([seconds]))
    num_ticks = 2 * (num_microbatches + run.num_stages - 1)
    ends_s = np.empty((num_ticks, run.num_stages))
    for tick in range(num_ticks):
        run.run_forwards(tick, num_microbatches)
        run.run_backwards(tick, num_microbatches)
        ends_s[tick] = run.end_s[:, 0]
    stage = np.arange(run.num_stages)[:, None]
    forward_tick = stage + 2 * np.arange(num_microbatches)[None, :]
    backward_tick = 2 * run.num_stages - 1 - 2 * stage + forward_tick
    return ActionEnds(ends_s[forward_tick, stage], ends_s[backward_tick, stage])


@dataclass(frozen=True, slots=True)
class StageTable:
    """`StageSeconds` of C pipelines, one per column; row -1 is the last stage of each pipeline.

    Shorter pipelines are padded in front with stages that take no time. Such a stage passes a
    microbatch on at once, and may hold one more microbatch than the stage below it, so it never
    delays anything.

    Attributes:
        forward_s, backward_s: times by stage, shape [S, C] with S stages of the longest pipeline.
        transfer_s, latency_s: times by link, shape [S + 1, C]; row i is the link above stage i, and
            the first and last row are 0.
    """

    forward_s: Seconds
    backward_s: Seconds
    transfer_s: Seconds
    latency_s: Seconds


def stage_table(pipelines: Sequence[StageSeconds]) -> StageTable:
    """The pipelines as one table."""
    num_stages = max(len(seconds.forward_s) for seconds in pipelines)

    def columns(values: Iterable[tuple[float, ...]], num_rows: int) -> Seconds:
        rows = [(0.0,) * (num_rows - len(column)) + column for column in values]
        return np.ascontiguousarray(np.array(rows).T)

    links = [seconds.transfer_s for seconds in pipelines]
    latencies = [seconds.latency_s for seconds in pipelines]
    return StageTable(
        columns((seconds.forward_s for seconds in pipelines), num_stages),
        columns((seconds.backward_s for seconds in pipelines), num_stages),
        columns(((*link, 0.0) for link in links), num_stages + 1),
        columns(((*latency, 0.0) for latency in latencies), num_stages + 1),
    )


def makespans_of_each(table: StageTable, num_microbatches: int) -> Seconds:
    """The makespan of each pipeline of a table; shape [C]."""
    makespans_s: Seconds = ends_of_each(table, num_microbatches)[0]
    return makespans_s


def ends_of_each(table: StageTable, num_microbatches: int) -> Seconds:
    """The end of the last backward on each stage of each pipeline of a table; shape [S, C]."""
    assert num_microbatches >= 1
    run = TickRun(table)
    for tick in range(2 * (num_microbatches + run.num_stages - 1)):
        run.run_forwards(tick, num_microbatches)
        run.run_backwards(tick, num_microbatches)
    ends_s: Seconds = run.end_s
    return ends_s


class TickRun:
    """A run of 1F1B tick by tick, for all pipelines of a table at once.

    Attributes:
        end_s: end of the newest action of each stage, shape [S, C].
        down_s, up_s: end of the newest transfer down and up on each link, shape [S + 1, C]; link i
            lies above stage i.
        state_s: one array of shape [3, S + 1, C] that contains end_s (with one row more), up_s and
            down_s.
    """

    def __init__(self, table: StageTable) -> None:
        self.table = table
        self.num_stages, num_pipelines = table.forward_s.shape
        self.state_s = np.zeros((3, self.num_stages + 1, num_pipelines))
        stages_s, self.up_s, self.down_s = self.state_s
        self.end_s = stages_s[:-1]
        # Most of the time the same two sets of stages act in turns, so their views are cached.
        self._down: dict[tuple[int, int], tuple[Seconds, ...]] = {}
        self._up: dict[tuple[int, int], tuple[Seconds, ...]] = {}

    def run_forwards(self, tick: int, num_microbatches: int) -> None:
        """Runs the forwards of a tick, on every second stage, and sends the outputs down."""
        first = max(tick % 2, tick - 2 * (num_microbatches - 1))
        end = min(self.num_stages, tick + 1)
        if (first, end) not in self._down:
            stages, below = slice(first, end, 2), slice(first + 1, end + 1, 2)
            durations_s = self.table.forward_s[stages]
            self._down[first, end] = self._step_arguments(
                stages, durations_s, self.down_s, stages, below
            )
        _run_step(*self._down[first, end])

    def run_backwards(self, tick: int, num_microbatches: int) -> None:
        """Runs the backwards of a tick, on the other stages, and sends the gradients up."""
        num_stages = self.num_stages
        first = max(1 - tick % 2, 2 * num_stages - 1 - tick)
        end = min(num_stages, 2 * (num_microbatches + num_stages - 1) - tick)
        if (first, end) not in self._up:
            stages, below = slice(first, end, 2), slice(first + 1, end + 1, 2)
            durations_s = self.table.backward_s[stages]
            self._up[first, end] = self._step_arguments(
                stages, durations_s, self.up_s, below, stages
            )
        _run_step(*self._up[first, end])

    def _step_arguments(
        self,
        stages: slice,
        durations_s: Seconds,
        links_s: Seconds,
        links_in: slice,
        links_out: slice,
    ) -> tuple[Seconds, ...]:
        """The arguments of `_run_step` for these stages and the links into and out of them."""
        return (
            self.end_s[stages],
            links_s[links_in],
            self.table.latency_s[links_in],
            durations_s,
            links_s[links_out],
            self.table.transfer_s[links_out],
            np.empty_like(self.end_s[stages]),
        )


def _run_step(
    end_s: Seconds,
    sent_s: Seconds,
    latency_s: Seconds,
    durations_s: Seconds,
    link_s: Seconds,
    transfer_s: Seconds,
    arrival_s: Seconds,
) -> None:
    """Runs one action on each of these stages, and the transfer after it; updates arrays in place.

    Args:
        end_s: end of the stage's action before; becomes the end of this action.
        sent_s: time at which the input has left its link; it arrives one latency later.
        link_s: time at which the link of the output is free; becomes the end of the transfer.
        arrival_s: scratch array for the arrival of the input.
    """
    np.add(sent_s, latency_s, out=arrival_s)
    np.maximum(end_s, arrival_s, out=end_s)
    np.add(end_s, durations_s, out=end_s)
    np.maximum(link_s, end_s, out=link_s)
    np.add(link_s, transfer_s, out=link_s)


def _links(profile: ModelProfile, template: PipelineTemplate) -> tuple[Link, ...]:
    """The link below each stage except the last."""
    links = []
    next_device = 0
    for stage in template.stages[:-1]:
        next_device += stage.num_devices
        on_boundary = next_device % template.devices_per_node == 0
        links.append(profile.links["inter_node" if on_boundary else "intra_node"])
    return tuple(links)
