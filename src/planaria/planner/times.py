"""Iteration times of plans in which every microbatch stays within one pipeline.

The results are exactly those of the estimator for the plan's schedule, but no schedule is built:
the times at which stages end under 1F1B are looked up, and reductions follow in the order of their
buckets.

Source: Oobleck (SOSP '23), section 4.2.2.
Differs: the paper takes the time of the slowest pipeline for that of the whole iteration.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from planaria.core.plan import Pipeline, PipelineTemplate, Plan
from planaria.estimator.ends import StageEnds, stage_ends
from planaria.estimator.makespan import Seconds, stage_seconds
from planaria.estimator.reductions import Reductions, equal_reduce_s, reduction_starts_s
from planaria.planner.problem import Problem
from planaria.schedule.action import Bucket
from planaria.schedule.buckets import buckets_of


class Reduction(NamedTuple):
    """The reduction of a bucket, with its start and end in seconds from the iteration's start."""

    bucket: Bucket
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Iteration:
    """What follows the forwards and backwards of an iteration.

    Attributes:
        reductions: reductions in the order of their buckets. Their ranks are those that the
            pipelines would have on nodes 0, 1, .. in order.
        end_s: seconds from the start of the iteration until its commit vector is summed.
    """

    reductions: tuple[Reduction, ...]
    end_s: float


class PlainTimes:
    """Times of a job's pipelines, each alone and all together.

    Args:
        templates: templates to compute in advance; others are computed when asked for.
    """

    def __init__(self, problem: Problem, templates: Iterable[PipelineTemplate] = ()) -> None:
        self._problem = problem
        self._ends: dict[PipelineTemplate, StageEnds] = {}
        self._add(templates)

    def ends(self, template: PipelineTemplate) -> StageEnds:
        """When the template's stages end, for every number of microbatches."""
        if template not in self._ends:
            self._add([template])
        return self._ends[template]

    def makespan_s(self, template: PipelineTemplate, num_microbatches: int) -> float:
        """Seconds until a pipeline has done its last backward."""
        return float(self.ends(template).by_stage_s(num_microbatches)[0])

    def ends_by_count_s(self, template: PipelineTemplate, *, num_pipelines: int) -> Seconds:
        """Seconds until a pipeline has finished its reductions, if all pipelines have its template.

        Returns:
            array whose entry n - 1 is for n microbatches; the entries never fall.
        """
        reduce_s = equal_reduce_s(
            self._problem.profile,
            template,
            num_pipelines=num_pipelines,
            bytes_factor=self._problem.reduce_bytes_factor,
        )
        return self.ends(template).latest_s(reduce_s, self._problem.num_microbatches)

    def iteration_s(
        self, templates: Sequence[PipelineTemplate], microbatches: Sequence[int]
    ) -> float:
        """Iteration time of pipelines of these templates.

        Args:
            microbatches: number of microbatches of each pipeline.
        """
        return self.iteration(templates, microbatches).end_s

    def iteration(
        self, templates: Sequence[PipelineTemplate], microbatches: Sequence[int]
    ) -> Iteration:
        """Reductions and end of the iteration whose time `iteration_s` gives."""
        pairs = list(zip(templates, microbatches, strict=True))
        stages_s = {pair: self.ends(pair[0]).by_stage_s(pair[1]).tolist() for pair in set(pairs)}
        return iteration_after(self._problem, templates, [stages_s[pair] for pair in pairs])

    def bubble_share(
        self, templates: Sequence[PipelineTemplate], microbatches: Sequence[int]
    ) -> float:
        """Share of the iteration in which the stages of these pipelines do not compute, 0 to 1; it
        is defined as `Timeline.bubble_share` is."""
        pairs = zip(templates, microbatches, strict=True)
        busy_s = sum(count * self.computing_s(template) for template, count in pairs)
        num_stages = sum(len(template.stages) for template in templates)
        all_s = num_stages * self.iteration_s(templates, microbatches)
        return max(0.0, 1.0 - busy_s / all_s) if all_s else 0.0

    def computing_s(self, template: PipelineTemplate) -> float:
        """Seconds that all stages of the template together compute for one microbatch."""
        seconds = stage_seconds(self._problem.profile, template)
        return sum(seconds.forward_s) + sum(seconds.backward_s)

    def _add(self, templates: Iterable[PipelineTemplate]) -> None:
        new = [template for template in dict.fromkeys(templates) if template not in self._ends]
        seconds = [stage_seconds(self._problem.profile, template) for template in new]
        ends = stage_ends(seconds, self._problem.num_microbatches)
        self._ends.update(zip(new, ends, strict=True))


def iteration_after(
    problem: Problem, templates: Sequence[PipelineTemplate], ends_s: Sequence[Sequence[float]]
) -> Iteration:
    """The reductions that follow when stages end at given times, whatever their schedule was.

    Args:
        ends_s: times at which each stage of each pipeline has done its last backward.
    """
    profile = problem.profile
    plan = Plan(0, pipelines_of(templates, range(sum(t.num_nodes for t in templates))), ())
    end_s_of = {
        ranks[0]: end_s
        for pipeline, stages_s in zip(plan.pipelines, ends_s, strict=True)
        for ranks, end_s in zip(pipeline.ranks_by_stage(), stages_s, strict=True)
    }
    buckets = buckets_of(plan, tied=profile.tied, order=problem.reduction_order)
    # A rank that is not the first of its stage has no entry. It hands its gradients over when the
    # first one does, so it does not change the maximum.
    handed_over_s = [max(end_s_of.get(rank, 0.0) for rank in b.ranks) for b in buckets]
    reductions = Reductions(profile, plan, bytes_factor=problem.reduce_bytes_factor)
    reduce_s = [reductions.seconds(bucket) for bucket in buckets]
    starts_s = reduction_starts_s(buckets, handed_over_s, reduce_s)
    timed = tuple(
        Reduction(bucket, start_s, start_s + duration_s)
        for bucket, start_s, duration_s in zip(buckets, starts_s, reduce_s, strict=True)
    )
    last_s = max((*end_s_of.values(), *(reduction.end_s for reduction in timed)))
    return Iteration(timed, last_s + reductions.commit_s())


def pipelines_of(
    templates: Sequence[PipelineTemplate], nodes: Sequence[int]
) -> tuple[Pipeline, ...]:
    """One pipeline of each of these templates, on consecutive nodes of the sequence."""
    assert sum(template.num_nodes for template in templates) == len(nodes)
    unused = iter(nodes)
    return tuple(
        Pipeline(template, tuple(next(unused) for _ in range(template.num_nodes)))
        for template in templates
    )
