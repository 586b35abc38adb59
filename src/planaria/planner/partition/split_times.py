"""When a pipeline's stages end with split backwards, and a lower bound on that.

There is no closed form for a schedule that puts off gradients of weights (schedule/routed.py). So
each pipeline is simulated in virtual time. It is simulated alone, because pipelines whose
microbatches stay in them do not affect each other before their reductions. A lower bound on the
result follows from the stages' seconds, and shows which partitions need no simulation.

Stage i takes F_i seconds for a forward, I_i for the gradient of its input and W_i for that of its
weights; a transfer from stage i to stage i + 1, or back, takes c_i. Stage k can begin once the
first forward has reached it, must process n microbatches, and the gradient of the last one must
pass all stages before k. So for every k the pipeline takes at least

    sum over i < k of (F_i + c_i)
    + max(n * (F_k + I_k + W_k),
          n * (F_k + I_k) + sum over i < k of (c_i + I_i) + (W_0 if k > 0)).

Source: ReCycle (SOSP '24), decoupled backpropagation; Odyssey has whole backwards only.
"""

import numpy as np
from numpy.typing import NDArray

from planaria.core.plan import PipelineTemplate, plain_plan
from planaria.estimator.work_times import WorkTimes
from planaria.planner.partition.fewest_stages import PartitionRows
from planaria.planner.partition.refine import table_of
from planaria.planner.problem import Problem, Seconds, StageCosts
from planaria.planner.reroute.reroutes import with_split_backwards
from planaria.planner.times import pipelines_of
from planaria.schedule.routed import routed_work


class SplitTimes:
    """End times of pipelines with split backwards; each pipeline is simulated only once."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._ends_s: dict[tuple[PipelineTemplate, int], tuple[float, ...] | None] = {}

    def ends_s(self, template: PipelineTemplate, num_microbatches: int) -> tuple[float, ...] | None:
        """Seconds until each stage has done its last backward; None if some device has no memory
        for one microbatch and its gradients, or if activations are computed again."""
        pair = template, num_microbatches
        if pair not in self._ends_s:
            self._ends_s[pair] = self._simulated_ends_s(*pair)
        return self._ends_s[pair]

    def _simulated_ends_s(
        self, template: PipelineTemplate, num_microbatches: int
    ) -> tuple[float, ...] | None:
        (pipeline,) = pipelines_of([template], range(template.num_nodes))
        plan = plain_plan(0, (pipeline,), (num_microbatches,))
        if plan.recomputation_by_rank:  # A forward would run again for each part of a backward.
            return None
        plan = with_split_backwards(self._problem, plan)
        if min(plan.in_flight.values()) < 1:
            return None
        ends_s = WorkTimes(self._problem.profile, plan).computed_s(plan.routes, routed_work(plan))
        return tuple(ends_s[ranks[0]] for ranks in pipeline.ranks_by_stage())


def least_split_s(
    costs: StageCosts, rows: PartitionRows, num_microbatches: int | NDArray[np.int64]
) -> Seconds:
    """Lower bound on the seconds that a pipeline of each partition takes, shape [C].

    Args:
        num_microbatches: a number, or M numbers of shape [M, 1, 1] for a result of shape [M, C].
    """
    firsts, ends, groups = rows
    table = table_of(costs, rows)
    input_s = np.zeros_like(table.forward_s)
    for group in costs.groups:
        has_group = groups == group
        input_s[has_group] = _input_s(costs, group)[firsts[has_group], ends[has_group]]
    stage_s = table.forward_s + table.backward_s
    trip_s = (table.transfer_s + table.latency_s)[1:]
    before_s = _sums_before(table.forward_s + trip_s)
    up_s = _sums_before(trip_s + input_s)
    # Rows in front of a partition's first stage are padding, and take no time.
    first = (groups > 0).argmax(axis=0)
    columns = np.arange(groups.shape[1])
    last_s = (table.backward_s - input_s)[first, columns]
    is_first = np.arange(len(groups))[:, None] == first
    last_up_s = up_s + np.where(is_first, 0.0, last_s)
    both_s = num_microbatches * (table.forward_s + input_s) + last_up_s
    least_s: Seconds = (before_s + np.maximum(num_microbatches * stage_s, both_s)).max(axis=-2)
    return least_s


def _sums_before(seconds: Seconds) -> Seconds:
    """Table of the same shape, each row the sum of the rows before it."""
    sums: Seconds = np.cumsum(seconds, axis=0) - seconds
    return sums


def _input_s(costs: StageCosts, group: int) -> Seconds:
    """Table [u, v]: seconds that a stage takes for the gradient of its input, for one microbatch;
    0 where there is no such stage."""
    count, speed = costs.count_of(group), costs.kinds[costs.kind_of(group)].speed
    layers = costs.problem.profile.layers
    until_s = np.cumsum([0.0, *(layer.backward_input_s.get(count, 0.0) for layer in layers)])
    is_stage = np.isfinite(costs.seconds[group])
    between_s: Seconds = np.where(is_stage, until_s[None, :] - until_s[:, None], 0.0) / speed
    return between_s
