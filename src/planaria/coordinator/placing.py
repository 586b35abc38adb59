"""Which ranks keep copies of which layers in memory during an epoch, and when copies are sent."""

from functools import partial
from typing import Final

from planaria.coordinator.job_rules import Rules
from planaria.core.copies import IdleSpans, LayerCopy
from planaria.core.plan import Plan
from planaria.placement.fewer_sets import optimised_copies
from planaria.placement.idle import predicted_idle, predicted_sending
from planaria.placement.interleave import PREDICTED_GAMMA
from planaria.placement.layer_copies import layer_copies
from planaria.placement.placement import PaperStrategy, paper_placement
from planaria.planner.problem import Problem

SCHEDULED: Final = ("interleaved", "unpipelined")  # Modes in which copies wait for idle spans.

# A plan with more hops than this is not predicted: all ranks wait while it is.
_MOST_HOPS: Final = 10_000


def copies_of(rules: Rules, plan: Plan) -> tuple[LayerCopy, ...]:
    """The copies of each layer that the plan's nodes keep.

    There are as many of each layer as the job asks for, but at most one on each node.
    """
    job, num_nodes = rules.job.checkpoint, len(plan.nodes)
    copies = min(job.copies, num_nodes)
    if not copies:
        return ()
    placed = optimised_copies
    if job.strategy != "optimised":  # `mixed` equals `group` where groups come out even.
        strategy: PaperStrategy = "ring" if job.strategy == "ring" else "mixed"
        placed = partial(layer_copies, placement=paper_placement(num_nodes, copies, strategy))
    return placed(
        plan, copies=copies, domains=job.failure_domains, layer_bytes=rules.prices.layer_bytes
    )


def idle_of(rules: Rules, plan: Plan, copies: tuple[LayerCopy, ...]) -> tuple[IdleSpans, ...]:
    """The predicted idle spans in which these copies may be sent.

    Empty if copies do not wait for idle spans, or if the plan is so large that its ranks observe
    the spans sooner than they can be predicted.
    """
    problem = _predictable_problem(rules, plan)
    return predicted_idle(problem, plan, copies) if copies and problem else ()


def version_iterations(rules: Rules, plan: Plan, *, chunk_bytes: int) -> int:
    """The predicted number of iterations from one version of the copies to the next.

    It is the job's `checkpoint.every`, or longer if a version that waits for idle spans takes more
    iterations to arrive: a version begins when the one before has arrived.

    Args:
        chunk_bytes: size of one buffer.
    """
    checkpoint = rules.job.checkpoint
    least = 1 if checkpoint.every == "auto" else checkpoint.every
    problem = _predictable_problem(rules, plan)
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


def _predictable_problem(rules: Rules, plan: Plan) -> Problem | None:
    """The problem that predicts an iteration of the plan.

    None if copies do not wait for idle spans, or if the plan is too large to be worth predicting.
    """
    if rules.catalog is None or rules.job.checkpoint.mode not in SCHEDULED:
        return None
    is_long = sum(map(len, plan.routes)) > _MOST_HOPS
    return None if is_long else rules.catalog.problem
