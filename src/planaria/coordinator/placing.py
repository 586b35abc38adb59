"""Who keeps copies of which layers in memory, in an epoch, and when they travel."""

from functools import partial
from typing import Final

from planaria.coordinator.state import Rules
from planaria.core.copies import IdleSpans, LayerCopy
from planaria.core.plan import Plan
from planaria.planner.copies import layer_copies
from planaria.planner.fewer_sets import optimised_copies
from planaria.planner.idle import predicted_idle
from planaria.planner.placement import PaperStrategy, paper_placement

SCHEDULED: Final = ("interleaved", "unpipelined")  # Modes in which copies wait for idle spans.

_MOST_HOPS: Final = 10_000  # That are worth predicting an iteration for, while all wait.


def copies_of(rules: Rules, plan: Plan) -> tuple[LayerCopy, ...]:
    """As the job asks for; as many copies as there are nodes if it asks for more."""
    job, num_nodes = rules.job.checkpoint, len(plan.nodes)
    copies = min(job.copies, num_nodes)
    if not copies:
        return ()
    placed = optimised_copies
    if job.strategy != "optimised":  # `mixed` is `group` where groups come out even.
        strategy: PaperStrategy = "ring" if job.strategy == "ring" else "mixed"
        placed = partial(layer_copies, placement=paper_placement(num_nodes, copies, strategy))
    return placed(
        plan, copies=copies, domains=job.failure_domains, layer_bytes=rules.prices.layer_bytes
    )


def idle_of(rules: Rules, plan: Plan, copies: tuple[LayerCopy, ...]) -> tuple[IdleSpans, ...]:
    """When these copies may go, as predicted; nothing where they do not wait for that, or where the
    ranks know it sooner than it is predicted."""
    if not copies or rules.every is None or rules.job.checkpoint.mode not in SCHEDULED:
        return ()
    if sum(map(len, plan.routes)) > _MOST_HOPS:
        return ()
    return predicted_idle(rules.every.problem, plan, copies)
