"""What stages take in the virtual time in which a schedule is put into order.

Pipelines that the planner cuts have stages that take about as long as each other, and count as
equal. Around empty places that is not so: a rank does the work of others besides its own, and what
it takes first decides who waits for it. (Two pipelines of three stages, the second of which takes
half as long forward, and one rank that does it for both: 136 s an iteration, 160 s if all stages
count as equal.)

Not modelled: links within a node, which are taken for those between nodes, and links that are busy.
"""

from typing import Final

from planaria.core.plan import Plan, Ticks
from planaria.planner.problem import Problem

_TICKS_MAX: Final = 1000


def stage_ticks(problem: Problem, plan: Plan) -> dict[int, Ticks]:
    """By rank, what its stage takes in multiples of a thousandth of the longest of its parts."""
    at_work = plan.layers_by_rank
    all_layers, link = problem.profile.layers, problem.profile.links["inter_node"]
    seconds = {}
    for pipeline in plan.pipelines:
        stages, kinds = pipeline.template.stages, pipeline.template.stage_kinds()
        for stage, kind, ranks in zip(stages, kinds, pipeline.ranks_by_stage(), strict=True):
            layers = all_layers[stage.first_layer : stage.end_layer]
            count = stage.num_devices
            input_bytes = all_layers[stage.first_layer - 1].output_bytes if stage.first_layer else 0
            of_stage = (
                sum(layer.forward_s[count] for layer in layers) / kind.speed,
                sum(layer.backward_input_s[count] for layer in layers) / kind.speed,
                sum(layer.backward_weight_s[count] for layer in layers) / kind.speed,
                link.seconds(input_bytes),
            )
            seconds.update(dict.fromkeys((r for r in ranks if r in at_work), of_stage))
    tick_s = max(max(of_stage[:3]) for of_stage in seconds.values()) / _TICKS_MAX or 1.0
    return {
        rank: Ticks(*(round(s / tick_s) for s in of_stage)) for rank, of_stage in seconds.items()
    }
