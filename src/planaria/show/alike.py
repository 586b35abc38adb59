"""Pipelines that do the same: one template, as many microbatches. A picture draws them once."""

from dataclasses import dataclass

from planaria.core.plan import ModelProfile, Pipeline, PipelineTemplate, Plan
from planaria.estimator.makespan import ActionEnds, StageSeconds, action_ends, stage_seconds
from planaria.planner.plans import pipeline_microbatches
from planaria.show.words import counted


@dataclass(frozen=True, slots=True, eq=False)
class Alike:
    """Pipelines of one template with as many microbatches, and one iteration of any of them.

    Attributes:
        num_microbatches: of each of the pipelines.
        seconds: of one microbatch, by stage.
        ends: of every forward and backward, since the iteration began.
    """

    template: PipelineTemplate
    num_microbatches: int
    pipelines: tuple[Pipeline, ...]
    seconds: StageSeconds
    ends: ActionEnds

    @property
    def name(self) -> str:
        """Such as "3 pipelines of 4 nodes"."""
        nodes = counted(self.template.num_nodes, "node")
        return f"{counted(len(self.pipelines), 'pipeline')} of {nodes}"

    @property
    def work(self) -> str:
        """What each of them gets, such as "16 microbatches each"."""
        each = " each" if len(self.pipelines) > 1 else ""
        return f"{counted(self.num_microbatches, 'microbatch')}{each}"

    @property
    def nodes(self) -> tuple[int, ...]:
        """Of all of them."""
        return tuple(node for pipeline in self.pipelines for node in pipeline.nodes)

    @property
    def stages_s(self) -> tuple[float, ...]:
        """Seconds of the forward and the backward of one microbatch, by stage."""
        both = zip(self.seconds.forward_s, self.seconds.backward_s, strict=True)
        return tuple(map(sum, both))

    @property
    def iteration_s(self) -> float:
        return float(self.ends.backward_s.max())

    @property
    def bubble_share(self) -> float:
        """The part of the iteration in which stages do not compute, 0 to 1."""
        all_s = len(self.stages_s) * self.iteration_s
        return 1.0 - self.num_microbatches * sum(self.stages_s) / all_s if all_s else 0.0


def alike(profile: ModelProfile, plan: Plan) -> tuple[Alike, ...]:
    """The pipelines of a plan in groups, in the order of their first ones."""
    groups: dict[tuple[PipelineTemplate, int], list[Pipeline]] = {}
    for pipeline, count in zip(plan.pipelines, pipeline_microbatches(plan), strict=True):
        groups.setdefault((pipeline.template, count), []).append(pipeline)
    return tuple(
        Alike(template, count, tuple(pipelines), seconds, action_ends(seconds, count))
        for (template, count), pipelines in groups.items()
        for seconds in (stage_seconds(profile, template),)
    )
