"""How many nodes a job needs: to go on at all, and to survive as many failures as it promises."""

from typing import Final

from planaria.coordinator.commands import Notify
from planaria.coordinator.frozen import replace
from planaria.coordinator.job_rules import Rules
from planaria.coordinator.state import JobState, Step
from planaria.core.kinds import ChangeKind
from planaria.core.messages import StartEpoch
from planaria.core.plan import Plan
from planaria.core.records import Warned

# The save may be what ends its rank: it copies the state in host memory. CRASHES_MAX signals in a
# row evict a node.
_OWED_TRIES_MAX: Final = 2


def shortage_text(rules: Rules, num_left: int) -> str:
    """Why `num_left` nodes are too few to go on by themselves; empty if they can go on."""
    wanted = (rules.job.resilience.failures_tolerated + 1) * rules.n0
    if num_left < rules.n0:
        return f"{left_text(num_left)}, fewer than the n0 = {rules.n0} that the model needs"
    if num_left < wanted and rules.job.resilience.when_below == "stop":
        return (
            f"{left_text(num_left)}, fewer than (f + 1) * n0 = {wanted}, and "
            'resilience.when_below = "stop"'
        )
    return ""


def with_untold_shortage(rules: Rules, state: JobState, num_left: int) -> JobState:
    """The state of a job whose members have agreed to end before all is trained.

    If nobody asked for that, the coordinator before this one did, because nodes were short, and was
    lost before it recorded why.
    """
    stop = state.stop
    if stop.is_requested:
        return state
    shortage = shortage_text(rules, num_left) or "nodes were too few to go on"
    return replace(state, stop=replace(stop, is_requested=True, shortage=shortage))


def refuse_drains(rules: Rules, state: JobState, num_left: int) -> Step:
    """The state in which no node is drained any more, if too few nodes would be left without them.

    The user's wish to drain is the first thing to be given up when nodes are short. Nodes whose
    machines are unfit leave later.

    Args:
        num_left: number of nodes after all leaving nodes have left, drained or preempted.
    """
    members = state.membership
    drained = {n: members.leaving[n] for n in state.nodes if _is_drained(state, n)}
    shortage = shortage_text(rules, num_left)
    if not (drained and shortage):
        return state, ()
    text = f"node {', '.join(map(str, drained))} cannot be drained: {shortage}"
    leaving = {node: leave for node, leave in members.leaving.items() if node not in drained}
    unfit = {node: leave for node, leave in drained.items() if leave.is_unfit}
    members = replace(members, leaving=leaving, postponed={**members.postponed, **unfit})
    return replace(state, membership=members), (Notify(Warned(text=text, undrained=(*drained,))),)


def without_drains(state: JobState) -> JobState:
    """The state in which no user's request to drain a node is left.

    Nodes whose machines are unfit are still to leave, as soon as others can take their places.
    """
    leaving = {
        node: leave
        for node, leave in state.membership.leaving.items()
        if leave.kind is not ChangeKind.DRAIN or leave.is_unfit
    }
    return replace(state, membership=replace(state.membership, leaving=leaving))


def _is_drained(state: JobState, node: int) -> bool:
    leaving = state.membership.leaving
    return node in leaving and leaving[node].kind is ChangeKind.DRAIN


def degraded_text(rules: Rules, num_nodes: int, plan: Plan) -> str:
    """The warning that f failures are not tolerated; empty if they are.

    Args:
        num_nodes: number of members; some may have no layers in the plan.
    """
    num_survived = num_tolerated(rules, num_nodes, plan)
    if num_survived >= rules.job.resilience.failures_tolerated:
        return ""
    wanted = (rules.job.resilience.failures_tolerated + 1) * rules.n0
    why = (
        f"{left_text(num_nodes)}, fewer than (f + 1) * n0 = {wanted}"
        if num_nodes < wanted
        else f"a layer is on only {num_survived + 1} of {num_nodes} nodes"
    )
    return f"{why}; from now on the job survives only f' = {num_survived} failures at once"


def is_newly_degraded(rules: Rules, state: JobState, num_nodes: int, plan: Plan) -> bool:
    """Whether fewer than f failures are tolerated, and fewer than the launcher knows."""
    return num_tolerated(rules, num_nodes, plan) < _known_tolerance(rules, state)


def _known_tolerance(rules: Rules, state: JobState) -> int:
    f = rules.job.resilience.failures_tolerated
    return f if state.membership.tolerance is None else min(f, state.membership.tolerance)


def with_tolerance(rules: Rules, state: JobState) -> JobState:
    """The state in which the launcher knows how many failures the newest plan tolerates."""
    tolerance = num_tolerated(rules, len(state.nodes), state.plan)
    return replace(state, membership=replace(state.membership, tolerance=tolerance))


def owes_save(rules: Rules, state: JobState, plan: Plan) -> bool:
    """Whether the job has become less safe since the newest save began that is complete.

    False if that save was tried too often already.
    """
    f, num_nodes = rules.job.resilience.failures_tolerated, len(state.nodes)
    is_owed = state.saves.owed_since >= 0 and state.saves.num_owed_tries < _OWED_TRIES_MAX
    is_unsafe = num_tolerated(rules, num_nodes, plan) < f
    return (is_owed and is_unsafe) or is_newly_degraded(rules, state, num_nodes, plan)


def with_owed_save(rules: Rules, state: JobState, order: StartEpoch) -> JobState:
    """The state in which the save of an order, if it has one, is owed until it is complete."""
    if not order.persists or not is_newly_degraded(rules, state, len(state.nodes), order.plan):
        return state
    return replace(state, saves=replace(state.saves, owed_since=order.epoch, num_owed_tries=0))


def with_owed_try(state: JobState) -> JobState:
    """The state in which the save of this epoch, if it has one, counts as tried."""
    decision, saves = state.facts.decision, state.saves
    assert decision is not None
    if not (isinstance(decision.order, StartEpoch) and decision.order.persists):
        return state
    return replace(state, saves=replace(saves, num_owed_tries=saves.num_owed_tries + 1))


def num_tolerated(rules: Rules, num_nodes: int, plan: Plan) -> int:
    """The largest number of nodes that may be lost at once, whichever they are; see
    `degraded_text`."""
    return min(num_nodes // rules.n0, *map(len, plan.holder_sets)) - 1


def left_text(num_nodes: int) -> str:
    """The number of nodes that are left, in words."""
    return f"{num_nodes} node{'s are' if num_nodes != 1 else ' is'} left"
