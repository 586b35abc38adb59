"""When a pipeline's stages end with split backwards, and which partitions suit these.

There is no closed form for a schedule that puts gradients of weights off (schedule/routed.py), so
pipelines are run in virtual time, each by itself: plain ones never meet. What a run takes at least
follows from the stages' seconds, and says which partitions need not be run: with F_i, I_i and W_i
the seconds of stage i for the forward and both parts of the backward, c_i those of one way to the
next stage, stage k can begin when a forward has come to it, has n microbatches to do, and the last
of their gradients has to go all the way up:

    sum over i < k of F_i + c_i, and the larger of n * (F_k + I_k + W_k)
                                 and n * (F_k + I_k) + sum over i < k of c_i + I_i, + W_0 if k > 0.

Source: ReCycle (SOSP '24), decoupled backpropagation; Odyssey has whole backwards only.
"""

import numpy as np

from planaria.core.plan import PipelineTemplate, plain_plan
from planaria.estimator.time import predicted_timeline
from planaria.planner.partition.fitting import Rows
from planaria.planner.partition.refine import table_of
from planaria.planner.problem import Problem, Seconds, StageCosts
from planaria.planner.reroute.reroutes import with_split_backwards
from planaria.planner.times import pipelines_of
from planaria.schedule.lower import unchecked


class SplitTimes:
    """The runs of pipelines with split backwards, each made once."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._ends_s: dict[tuple[PipelineTemplate, int], tuple[float, ...] | None] = {}

    def ends_s(self, template: PipelineTemplate, num_microbatches: int) -> tuple[float, ...] | None:
        """When each stage has done its last backward; None if a device has no memory for one
        microbatch and its gradients."""
        pair = template, num_microbatches
        if pair not in self._ends_s:
            self._ends_s[pair] = self._run(*pair)
        return self._ends_s[pair]

    def _run(self, template: PipelineTemplate, num_microbatches: int) -> tuple[float, ...] | None:
        (pipeline,) = pipelines_of([template], range(template.num_nodes))
        plan = plain_plan(0, (pipeline,), (num_microbatches,))
        plan = with_split_backwards(self._problem, plan)
        if min(plan.in_flight.values()) < 1:
            return None
        schedule = unchecked(plan, tied=self._problem.profile.tied)
        timeline = predicted_timeline(schedule, self._problem.profile, plan=plan)
        ends_s = dict.fromkeys(plan.ranks, 0.0)
        for span in timeline.spans:
            if span.lane == "compute":
                ends_s[span.rank] = max(ends_s[span.rank], span.end_s)
        return tuple(ends_s[ranks[0]] for ranks in pipeline.ranks_by_stage())


def least_split_s(costs: StageCosts, rows: Rows, num_microbatches: int) -> Seconds:
    """What a pipeline of each of these partitions takes at least, shape [C]."""
    firsts, ends, groups = rows
    table = table_of(costs, rows)
    input_s = np.zeros_like(table.forward_s)
    for group in costs.groups:
        there = groups == group
        input_s[there] = _input_s(costs, group)[firsts[there], ends[there]]
    stage_s = table.forward_s + table.backward_s
    way_s = (table.transfer_s + table.latency_s)[1:]
    before_s = _before(table.forward_s + way_s)
    up_s = _before(way_s + input_s)
    # Stages in front of the first one fill the table up and take no time.
    first = (groups > 0).argmax(axis=0)
    columns = np.arange(groups.shape[1])
    last_s = (table.backward_s - input_s)[first, columns]
    is_first = np.arange(len(groups))[:, None] == first
    last_up_s = up_s + np.where(is_first, 0.0, last_s)
    both_s = num_microbatches * (table.forward_s + input_s) + last_up_s
    least_s: Seconds = (before_s + np.maximum(num_microbatches * stage_s, both_s)).max(axis=0)
    return least_s


def _before(seconds: Seconds) -> Seconds:
    """Of each row, the sum of those in front of it."""
    sums: Seconds = np.cumsum(seconds, axis=0) - seconds
    return sums


def _input_s(costs: StageCosts, group: int) -> Seconds:
    """[u, v]: of a backward's first part on one microbatch; 0 where there is no such stage."""
    count, speed = costs.count_of(group), costs.kinds[costs.kind_of(group)].speed
    layers = costs.problem.profile.layers
    until_s = np.cumsum([0.0, *(layer.backward_input_s.get(count, 0.0) for layer in layers)])
    there = np.isfinite(costs.seconds[group])
    between_s: Seconds = np.where(there, until_s[None, :] - until_s[:, None], 0.0) / speed
    return between_s
