"""Computes a schedule when it is imported, so that it is not the first one in forks of the process.

Python rewrites code for what it meets in its first calls, and fills its caches. A rank that is
forked before that does it when its job begins, all ranks of an emulated cluster at once, and copies
the pages that it writes.
"""

from planaria.core.plan import Pipeline, PipelineTemplate, Stage, plain_plan
from planaria.schedule.lower import lowered_for

_NUM_STAGES, _NUM_MICROBATCHES, _NUM_CALLS = 4, 16, 4


def _compute() -> None:
    stages = tuple(Stage(first, first + 1, 1) for first in range(_NUM_STAGES))
    template = PipelineTemplate(stages, _NUM_STAGES)
    firsts = (0, _NUM_STAGES)
    pipelines = tuple(Pipeline(template, tuple(range(n, n + _NUM_STAGES))) for n in firsts)
    plan = plain_plan(0, pipelines, (_NUM_MICROBATCHES,) * len(pipelines))
    for _ in range(_NUM_CALLS):
        lowered_for(plan, 0)


_compute()
