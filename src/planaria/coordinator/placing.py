"""Which ranks keep copies of which layers in memory during an epoch, and when copies are sent.

Copies are kept outside the failure domains of those who hold the layer. Domains are sets of nodes
that the job file gives by number, or those of the machines that nodes run on, which have names.
"""

from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Final

from planaria.coordinator.commands import Notify
from planaria.coordinator.frozen import replace
from planaria.coordinator.job_rules import Rules
from planaria.coordinator.state import JobState, Step
from planaria.core.copies import IdleSpans, LayerCopy
from planaria.core.persistent_map import PersistentMap
from planaria.core.plan import Plan
from planaria.core.records import Warned
from planaria.placement.fewer_sets import optimised_copies
from planaria.placement.idle import predicted_idle, predicted_idle_of_sources, predicted_sending
from planaria.placement.interleave import PREDICTED_GAMMA
from planaria.placement.layer_copies import keeping_places, layer_copies
from planaria.placement.placement import PaperStrategy, paper_placement
from planaria.planner.problem import Problem

SCHEDULED: Final = ("interleaved", "unpipelined")  # Modes in which copies wait for idle spans.

# A plan with more hops than this is not predicted: all ranks wait while it is.
_MOST_HOPS: Final = 10_000
_NOBODY: Final[Mapping[int, str]] = PersistentMap()


def copies_of(
    rules: Rules, plan: Plan, arrived: Mapping[int, str] = _NOBODY
) -> tuple[LayerCopy, ...]:
    """The copies of each layer that the plan's nodes keep.

    There are as many of each layer as the job asks for, but at most one on each node.

    Args:
        arrived: name of the failure domain of each node that has arrived and is in one.
    """
    job, num_nodes = rules.job.checkpoint, len(plan.nodes)
    copies = min(job.copies, num_nodes)
    if not copies:
        return ()
    placed = optimised_copies
    if job.strategy != "optimised":  # `mixed` equals `group` where groups come out even.
        strategy: PaperStrategy = "ring" if job.strategy == "ring" else "mixed"
        placed = partial(layer_copies, placement=paper_placement(num_nodes, copies, strategy))
    domains = job.failure_domains or tuple(named_domains(rules, arrived).values())
    return placed(plan, copies=copies, domains=domains, layer_bytes=rules.prices.layer_bytes)


def named_domains(rules: Rules, arrived: Mapping[int, str]) -> dict[str, tuple[int, ...]]:
    """The nodes of each failure domain that has a name, ascending.

    Args:
        arrived: name of the failure domain of each node that has arrived and is in one.
    """
    nodes: dict[str, list[int]] = {}
    for node, name in sorted({**rules.domains, **arrived}.items()):
        nodes.setdefault(name, []).append(node)
    return {name: tuple(members) for name, members in sorted(nodes.items())}


def with_exposed_domains(
    rules: Rules, state: JobState, plan: Plan, copies: Iterable[LayerCopy]
) -> Step:
    """The state in which the user is warned of each domain whose loss takes the last of a layer.

    Nobody is warned of the same domain again, unless it was safe in between. A domain with all
    nodes of the plan in it is nothing to warn of, nor is a plan in the middle of a change.
    """
    domains = named_domains(rules, state.membership.domains)
    if not domains or plan.silent:
        return state, ()
    kept_by = [{plan.nodes[place] for place in places} for places in keeping_places(plan, copies)]
    exposed = {
        name: layers
        for name, nodes in domains.items()
        if not set(plan.nodes) <= set(nodes)
        and (layers := [layer for layer, keepers in enumerate(kept_by) if keepers <= set(nodes)])
    }
    warnings = tuple(
        Notify(Warned(text=_exposure_text(name, layers)))
        for name, layers in exposed.items()
        if name not in state.membership.exposed
    )
    members = replace(state.membership, exposed=frozenset(exposed))
    return replace(state, membership=members), warnings


def _exposure_text(name: str, layers: Collection[int]) -> str:
    noun = "layer" if len(layers) == 1 else "layers"
    return (
        f"domain {name!r} has all holders of {len(layers)} {noun}, so its loss would set the job "
        "back to its newest save; add machines of other domains, or set checkpoint.copies"
    )


def idle_of(rules: Rules, plan: Plan, copies: tuple[LayerCopy, ...]) -> tuple[IdleSpans, ...]:
    """The predicted idle spans in which these copies may be sent, as `checkpoint.schedule` sees
    them.

    Empty if copies do not wait for idle spans, or if the plan is so large that its ranks observe
    the spans sooner than they can be predicted.
    """
    problem = _predictable_problem(rules, plan)
    if not copies or problem is None:
        return ()
    if rules.job.checkpoint.schedule == "paper":
        return predicted_idle_of_sources(problem, plan, copies)
    return predicted_idle(problem, plan, copies)


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
    if checkpoint.schedule == "paper":
        return max((least, *(node.endless_iterations for node in sending.values())))
    return max((least, *(node.iterations for node in sending.values())))


def _predictable_problem(rules: Rules, plan: Plan) -> Problem | None:
    """The problem that predicts an iteration of the plan.

    None if copies do not wait for idle spans, or if the plan is too large to be worth predicting.
    """
    if rules.catalog is None or rules.job.checkpoint.mode not in SCHEDULED:
        return None
    is_long = sum(map(len, plan.routes)) > _MOST_HOPS
    return None if is_long else rules.catalog.problem
