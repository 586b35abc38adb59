"""What must hold of any plan, by itself: it covers the model, and can be run to its end."""

from collections.abc import Collection, Iterator
from dataclasses import replace

from planaria.core.plan import Plan
from planaria.errors import DeadlockError
from planaria.schedule.lower import lowered


def wrong_in(plan: Plan, *, num_layers: int, num_microbatches: int) -> Iterator[str]:
    """What is wrong in the plan, in words; nothing in a right one."""
    for route in (*plan.routes, *(pipeline.route() for pipeline in plan.pipelines)):
        ends = [0, *(hop.end_layer for hop in route)]
        starts = [*(hop.first_layer for hop in route), num_layers]
        if ends != starts:
            yield f"{route} does not cover the model once"
    yield from _wrong_in_work(plan)
    if len(plan.routes) != num_microbatches:
        yield f"{len(plan.routes)} microbatches"


def _wrong_in_work(plan: Plan) -> Iterator[str]:
    """Work is where its layers are, all have some, and there is an order in which it ends."""
    layers = {rank: set(own) for rank, own in plan.layers_by_rank.items()}
    hops = {hop for route in plan.routes for hop in route}
    for hop in hops:
        if not set(range(hop.first_layer, hop.end_layer)) <= layers.get(hop.rank, set()):
            yield f"{hop} is computed where its layers are not"
            return
    if idle := layers.keys() - {hop.rank for hop in hops}:
        yield f"ranks {sorted(idle)} have no work in {plan.routes}"
    try:
        lowered(plan)
    except DeadlockError as error:
        yield f"the schedule of epoch {plan.epoch} does not end: {error}"


def is_another(plan: Plan, before: Plan) -> bool:
    """Whether to train by it is to train in another way."""
    return replace(plan, epoch=before.epoch) != before


def num_exposed(plan: Plan, trusted: Collection[int]) -> int:
    """How many layers no trusted node computes."""
    per_node = plan.pipelines[0].template.devices_per_node
    of_trusted = [layers for r, layers in plan.layers_by_rank.items() if r // per_node in trusted]
    return plan.num_layers - len(set().union(*of_trusted))
