"""Groups of pipelines with one template and equal microbatches, which are shown once."""

from dataclasses import dataclass

from planaria.core.plan import ModelProfile, Pipeline, PipelineTemplate, Plan
from planaria.estimator.makespan import StageSeconds, stage_seconds
from planaria.planner.plans import pipeline_microbatches
from planaria.show.words import count_text


@dataclass(frozen=True, slots=True)
class AlikePipelines:
    """Pipelines of one template with equal microbatches.

    Attributes:
        num_microbatches: number of microbatches of each of the pipelines.
        indices: the pipelines' indices in the plan, in the order of `pipelines`.
        seconds: times of one microbatch by stage.
    """

    template: PipelineTemplate
    num_microbatches: int
    indices: tuple[int, ...]
    pipelines: tuple[Pipeline, ...]
    seconds: StageSeconds

    @property
    def name(self) -> str:
        """The number and size of the pipelines, such as "3 pipelines of 4 nodes"."""
        nodes = count_text(self.template.num_nodes, "node")
        return f"{count_text(len(self.pipelines), 'pipeline')} of {nodes}"

    @property
    def work(self) -> str:
        """The microbatches of a pipeline, such as "16 microbatches each"."""
        each = " each" if len(self.pipelines) > 1 else ""
        return f"{count_text(self.num_microbatches, 'microbatch')}{each}"

    @property
    def nodes(self) -> tuple[int, ...]:
        """The nodes of all pipelines, ascending."""
        return tuple(sorted(node for pipeline in self.pipelines for node in pipeline.nodes))

    @property
    def stages_s(self) -> tuple[float, ...]:
        """Seconds of a forward and a backward of one microbatch, by stage."""
        both = zip(self.seconds.forward_s, self.seconds.backward_s, strict=True)
        return tuple(map(sum, both))

    def bubble_share(self, iteration_s: float) -> float:
        """The share of the plan's iteration in which the stages do not compute, 0 to 1."""
        busy_s = self.num_microbatches * sum(self.stages_s)
        all_s = len(self.stages_s) * iteration_s
        return max(0.0, 1.0 - busy_s / all_s) if all_s else 0.0


def alike_pipelines(profile: ModelProfile, plan: Plan) -> tuple[AlikePipelines, ...]:
    """The groups of a plan's pipelines, in the order of their first pipelines."""
    groups: dict[tuple[PipelineTemplate, int], list[int]] = {}
    counts = pipeline_microbatches(plan)
    for index, (pipeline, count) in enumerate(zip(plan.pipelines, counts, strict=True)):
        groups.setdefault((pipeline.template, count), []).append(index)
    return tuple(
        AlikePipelines(
            template=template,
            num_microbatches=count,
            indices=tuple(indices),
            pipelines=tuple(plan.pipelines[index] for index in indices),
            seconds=stage_seconds(profile, template),
        )
        for (template, count), indices in groups.items()
    )
