"""Eager forwards of shadowed layers: what a rank would have to compute if the next one were lost.

A rank whose shadows include all layers of the next hop of a microbatch also computes the forward of
that hop, from its own output, which it has anyway. It does so before it waits for a message, one
forward at a time, the oldest first, and at the latest before the backward that drops its output.
The result is not kept.

Source: Bamboo (NSDI '23), eager forward redundant computation.
Differs: Bamboo keeps the outputs in CPU memory, to go on with the iteration in which a node is
lost. Here that iteration is committed or redone as a whole, so the outputs are of no use. A first
hop has no hop before it, so its forward is not computed ahead.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

from planaria.core.plan import Plan, Route
from planaria.schedule.action import (
    BACKWARD,
    BACKWARD_INPUT,
    FORWARD,
    RECEIVE_BACKWARD,
    RECEIVE_FORWARD,
    SHADOW,
    Action,
    Schedule,
)


def place_shadows(schedule: Schedule, plan: Plan) -> Schedule:
    """The schedule with an eager forward of each hop that is shadowed.

    Args:
        schedule: schedule with its transfers.
        plan: plan that names the shadows.
    """
    if not plan.shadows:
        return schedule
    actions = {
        rank: tuple(_with_shadows(own, schedule.routes, frozenset(plan.shadows.get(rank, ()))))
        for rank, own in schedule.actions.items()
    }
    return replace(schedule, actions=actions)


def _with_shadows(
    actions: Sequence[Action], routes: Sequence[Route], shadows: frozenset[int]
) -> Iterator[Action]:
    due: deque[Action] = deque()
    for action in actions:
        if action.kind in (RECEIVE_FORWARD, RECEIVE_BACKWARD) and due:
            yield due.popleft()
        if action.kind in (BACKWARD, BACKWARD_INPUT):
            own = Action(SHADOW, action.microbatch, action.hop + 1)
            if own in due:
                due.remove(own)
                yield own
        yield action
        if action.kind is FORWARD and _is_shadowed(action, routes, shadows):
            due.append(Action(SHADOW, action.microbatch, action.hop + 1))
    assert not due


def _is_shadowed(action: Action, routes: Sequence[Route], shadows: frozenset[int]) -> bool:
    """Whether the rank of a forward can also compute the next hop of its microbatch."""
    route = routes[action.microbatch]
    if action.hop + 1 == len(route):
        return False
    after = route[action.hop + 1]
    return shadows.issuperset(range(after.first_layer, after.end_layer))
