"""Who keeps copies of which layers in memory, in an epoch, and when they travel."""

from functools import partial
from typing import Final

from planaria.coordinator.state import Rules
from planaria.core.copies import IdleSpans, LayerCopy
from planaria.core.plan import Plan
from planaria.placement.copies import layer_copies
from planaria.placement.fewer_sets import optimised_copies
from planaria.placement.idle import predicted_idle, predicted_sending
from planaria.placement.interleave import PREDICTED_GAMMA
from planaria.placement.placement import PaperStrategy, paper_placement
from planaria.planner.problem import Problem

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
    problem = _predictable(rules, plan)
    return predicted_idle(problem, plan, copies) if copies and problem else ()


def version_iterations(rules: Rules, plan: Plan, *, chunk_bytes: int) -> int:
    """How many iterations a version of the copies is on its way, as predicted, if it waits for idle
    spans; a version begins when the one before is there, or as often as the job says.

    Args:
        chunk_bytes: of a buffer.
    """
    checkpoint = rules.job.checkpoint
    least = 1 if checkpoint.every == "auto" else checkpoint.every
    problem = _predictable(rules, plan)
    copies = copies_of(rules, plan)
    if problem is None or not copies:
        return least
    sending = predicted_sending(
        problem,
        plan,
        copies,
        layer_bytes=rules.prices.layer_bytes,
        chunk_bytes=chunk_bytes,
        gamma=PREDICTED_GAMMA if checkpoint.gamma == "auto" else checkpoint.gamma,
    )
    return max((least, *(node.iterations for node in sending.values())))


def _predictable(rules: Rules, plan: Plan) -> Problem | None:
    """What an iteration is predicted by, if copies wait for idle spans of it and it is worth it."""
    if rules.every is None or rules.job.checkpoint.mode not in SCHEDULED:
        return None
    is_long = sum(map(len, plan.routes)) > _MOST_HOPS
    return None if is_long else rules.every.problem
