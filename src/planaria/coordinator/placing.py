"""Who keeps copies of which layers in memory, in an epoch."""

from planaria.coordinator.state import Rules
from planaria.core.copies import LayerCopy
from planaria.core.plan import Plan
from planaria.planner.copies import layer_copies
from planaria.planner.placement import paper_placement


def copies_of(rules: Rules, plan: Plan) -> tuple[LayerCopy, ...]:
    """As the job asks for; as many copies as there are nodes if it asks for more."""
    copies = min(rules.job.checkpoint.copies, len(plan.nodes))
    if not copies:
        return ()
    placement = paper_placement(len(plan.nodes), copies, "mixed")
    layer_bytes = rules.prices.layer_bytes
    return layer_copies(plan, copies=copies, placement=placement, layer_bytes=layer_bytes)
