"""The end of the last backward on each stage of a pipeline, for every number of microbatches.

Stage i keeps w = S - i microbatches in flight. With n microbatches it does the same as with more of
them, until its backward of microbatch n - w (or, if n < w, its forward of n - 1); then it has no
forwards left. So one run of 1F1B serves every n. After that only backwards remain, in the same
triangle for all n: in wave k stage i runs the backward of microbatch n - w + k.

The run can be short. Its state (when each stage and link is free) determines all later states, and
a constant added to the whole state is added to all later ones. So once the state equals that of p
microbatches ago plus a constant, it repeats for ever, and n microbatches take longer than n - p by
this constant. Pipelines become periodic after a few times S microbatches; p is the number of
microbatches that go around in the slowest cycle of stages.

Source: Baccelli et al., "Synchronization and Linearity" (1992), section 3.7, proves periodicity.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from planaria.estimator.makespan import Seconds, StageSeconds, StageTable, TickRun, stage_table

# How much a state may differ from the repeated one, as a share of the constant. The relative error
# of the makespan is at most that, far below the precision of any profile.
_TOLERANCE: Final = 1e-9
_FIRST_CHECK: Final = 3  # First check for a period, in microbatches per stage.
_CHECK_GROWTH: Final = 1.3  # Each later check comes after so many times as many microbatches.
# Most pipelines repeat at the first check, some after a hundred times as many microbatches. A
# pipeline that does not repeat runs again without the others, for this many times as long.
_RUN_GROWTH: Final = 4
_ENDLESS: Final = 1 << 60
_CHUNK_BYTES: Final = 1 << 26  # Limit for the states of one run, if it has more than one pipeline.


@dataclass(frozen=True, slots=True, eq=False)
class StageEnds:
    """End times of the S stages of a pipeline.

    Attributes:
        ends_s: end of each stage, shape [n, S]; row k - 1 is for k microbatches.
        period: number of microbatches after which rows repeat beyond row n: each is the row of
            this many microbatches less, plus period_s. 0: none found, so at most n microbatches
            may be asked for.
        period_s: seconds that one period adds.
    """

    ends_s: Seconds
    period: int
    period_s: float

    def by_stage_s(self, num_microbatches: int) -> Seconds:
        """End of each stage, shape [S]."""
        row, periods = self._rows_and_periods(np.array([num_microbatches]))
        ends_s: Seconds = self.ends_s[row[0]] + periods[0] * self.period_s
        return ends_s

    def latest_s(self, after_s: Sequence[float], num_microbatches: int) -> Seconds:
        """The latest end of a stage if each stage works on after its last backward.

        Args:
            after_s: seconds that each stage works on.

        Returns:
            Array of shape [num_microbatches]; entry n - 1 is for n microbatches; entries never
            decrease.
        """
        rows, periods = self._rows_and_periods(np.arange(1, num_microbatches + 1))
        latest_s = (self.ends_s + np.array(after_s)).max(axis=1)[rows] + periods * self.period_s
        never_fall_s: Seconds = np.maximum.accumulate(latest_s)  # Rounding aside.
        return never_fall_s

    def _rows_and_periods(
        self, numbers: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The row that each number of microbatches repeats, and how many periods to add."""
        beyond = np.maximum(numbers - len(self.ends_s), 0)
        assert self.period or not beyond.any()
        periods = -(-beyond // max(1, self.period))
        return numbers - periods * self.period - 1, periods


def stage_ends(pipelines: Sequence[StageSeconds], num_microbatches: int) -> list[StageEnds]:
    """The stage ends of each pipeline, for up to num_microbatches microbatches."""
    found_ends: dict[int, StageEnds] = {}
    factor = _FIRST_CHECK
    while len(found_ends) < len(pipelines):
        # A run pads its pipelines to the deepest one, so pipelines of similar depth share a run.
        missing = [index for index in range(len(pipelines)) if index not in found_ends]
        by_depth = sorted(missing, key=lambda i: len(pipelines[i].forward_s))
        while by_depth:
            depth = len(pipelines[by_depth[-1]].forward_s)
            num_ticks = 2 * min(num_microbatches, factor * depth) + depth
            max_together = max(1, _CHUNK_BYTES // (3 * 8 * num_ticks * depth))
            together, by_depth = by_depth[-max_together:], by_depth[:-max_together]
            table = stage_table([pipelines[i] for i in together])
            ends = _ends(table, num_microbatches, num_run=factor * depth)
            for index, pipeline_ends in zip(together, ends, strict=True):
                if pipeline_ends is not None:
                    num_stages = len(pipelines[index].forward_s)
                    own_s = np.ascontiguousarray(pipeline_ends.ends_s[:, -num_stages:])
                    found_ends[index] = StageEnds(
                        own_s, pipeline_ends.period, pipeline_ends.period_s
                    )
        factor *= _RUN_GROWTH
    return [found_ends[index] for index in range(len(pipelines))]


def _ends(table: StageTable, num_microbatches: int, *, num_run: int) -> list[StageEnds | None]:
    """The stage ends of the pipelines of a table, padded in front; None: num_run was too short."""
    states, periods, periods_s = _states_of_run(table, num_microbatches, num_run)
    columns = np.flatnonzero((periods > 0) | (num_run >= num_microbatches))
    states = states[..., columns]
    backward_s, transfer_s, latency_s = (
        rows_s[:, None, columns] for rows_s in (table.backward_s, table.transfer_s, table.latency_s)
    )
    num_stages = len(table.forward_s)
    max_microbatches = min(num_microbatches, (len(states) - num_stages) // 2)
    stage = np.arange(num_stages)[:, None]
    in_flight = num_stages - stage
    number = np.arange(1, max_microbatches + 1)[None, :]
    has_backward = number >= in_flight
    last_backward = 2 * num_stages - 1 - stage + 2 * (number - in_flight)
    last_forward = stage + 2 * (number - 1)
    tick_there = np.where(has_backward, last_backward, last_forward)
    # [S, N_b, C]: end of that action on the stage, and of the transfer on the link above it.
    end_s, up_s = states[tick_there, 0, stage], states[tick_there, 1, stage]
    for wave in range(1, num_stages):
        upper, lower = slice(0, num_stages - wave), slice(1, num_stages - wave + 1)
        runs = (wave >= in_flight - number)[upper, :, None]
        _add_action(end_s[upper], up_s[lower] + latency_s[lower], backward_s[upper], runs)
        _add_action(up_s[upper], end_s[upper], transfer_s[upper], runs)
    ends: list[StageEnds | None] = [None] * len(periods)
    for index, column in enumerate(columns.tolist()):
        period = int(periods[column])
        ends[column] = StageEnds(end_s[:, :, index].T, period, float(periods_s[column]))
    return ends


def _states_of_run(
    table: StageTable, num_microbatches: int, num_run: int
) -> tuple[Seconds, NDArray[np.int64], Seconds]:
    """The states of a run that lasts until all pipelines repeat, or num_run microbatches.

    Returns:
        The state after each tick, shape [ticks, 3, S + 1, C], see `TickRun`; the period of each
        pipeline in microbatches, 0 if it does not repeat; and this period in seconds.
    """
    run = TickRun(table)
    num_stages, num_pipelines = table.forward_s.shape
    states: list[Seconds] = []
    end = 2 * min(num_microbatches, num_run) + num_stages
    check = 2 * _FIRST_CHECK * num_stages
    periods = np.zeros(num_pipelines, dtype=np.int64)
    periods_s = np.zeros(num_pipelines)
    while len(states) < end:
        run.run_forwards(len(states), _ENDLESS)
        run.run_backwards(len(states), _ENDLESS)
        states.append(run.state_s.copy())
        if len(states) == check + 1 < end:
            periods, periods_s = _periods(states)
            if periods.all():
                end = check + num_stages
            check = 2 * int(_CHECK_GROWTH * check / 2)
    return np.stack(states), periods, periods_s


def _periods(states: list[Seconds]) -> tuple[NDArray[np.int64], Seconds]:
    """The period of each pipeline at the last state, in microbatches (0: none) and in seconds."""
    num_stages, num_pipelines = states[-1].shape[1] - 1, states[-1].shape[2]
    periods = np.zeros(num_pipelines, dtype=np.int64)
    periods_s = np.zeros(num_pipelines)
    for period in range(1, num_stages + 1):
        changes_s = states[-1] - states[-1 - 2 * period]
        # Leave out what never changes: there is no stage S, and no link above the first stage.
        later_s = np.concatenate((changes_s[0, :-1], changes_s[1, :-1], changes_s[2, 1:]))
        largest_s = later_s.max(axis=0)
        is_new = (largest_s - later_s.min(axis=0) <= _TOLERANCE * largest_s) & (periods == 0)
        periods[is_new] = period
        periods_s[is_new] = largest_s[is_new]
        if periods.all():
            break
    return periods, periods_s


def _add_action(
    end_s: Seconds, ready_s: Seconds, durations_s: Seconds, runs: NDArray[np.bool_]
) -> None:
    """Advances end_s to the end of an action that starts once its stage and its input are ready."""
    np.maximum(end_s, ready_s, out=end_s, where=runs)
    np.add(end_s, durations_s, out=end_s, where=runs)
