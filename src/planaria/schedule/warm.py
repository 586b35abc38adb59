"""Computes schedules when it is imported, so that forks of the process start with warm code.

In the first calls of a function Python specialises its bytecode and fills caches. A rank that is
forked before that does so when its job begins, together with all ranks of an emulated cluster, and
copies the memory pages that it writes.
"""

from planaria.core.plan import Pipeline, PipelineTemplate, Stage, plain_plan
from planaria.schedule.lower import rank_schedule

_NUM_STAGES, _NUM_MICROBATCHES, _NUM_CALLS = 4, 16, 4


def _compute() -> None:
    stages = tuple(Stage(first, first + 1, 1) for first in range(_NUM_STAGES))
    template = PipelineTemplate(stages, _NUM_STAGES)
    firsts = (0, _NUM_STAGES)
    pipelines = tuple(Pipeline(template, tuple(range(n, n + _NUM_STAGES))) for n in firsts)
    plan = plain_plan(0, pipelines, (_NUM_MICROBATCHES,) * len(pipelines))
    for _ in range(_NUM_CALLS):
        rank_schedule(plan, 0)


_compute()
