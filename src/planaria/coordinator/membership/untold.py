"""Nodes that a switch has made members, or members no more, before the launcher is told of it.

`Changed` tells of a change once every rank has begun its last epoch. If a loss or a new coordinator
ends the change before that, warnings tell who has left, and the answer to the loss who has joined.
The record of a switch's members names these nodes for the next coordinator.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Final

from planaria.coordinator.commands import Notify
from planaria.coordinator.frozen import replace
from planaria.coordinator.state import JobState, Phase
from planaria.core.kinds import LEAVING, ChangeKind
from planaria.core.records import Warned

# Event of the report, and what has happened.
_WORDS: Final = {
    ChangeKind.JOIN: ("joined", "has joined"),
    ChangeKind.DRAIN: ("drained", "has left, as it was asked to"),
    ChangeKind.PREEMPT: ("preempted", "has left, because its machine is taken away"),
}


def untold_after(
    state: JobState, nodes: tuple[int, ...], kinds: Mapping[int, ChangeKind]
) -> dict[int, ChangeKind]:
    """The untold nodes once a switch has made these nodes the members.

    Args:
        kinds: kind of the change for each node.
    """
    moved = sorted({*nodes}.symmetric_difference(state.nodes))
    return {**state.membership.untold, **{node: kinds[node] for node in moved}}


def without_told(state: JobState, nodes: Collection[int]) -> JobState:
    """The state in which these nodes are not untold any more."""
    untold = {node: kind for node, kind in state.membership.untold.items() if node not in nodes}
    return replace(state, membership=replace(state.membership, untold=untold))


def untold_joined(state: JobState, alive: Iterable[int]) -> tuple[int, ...]:
    """The nodes among these that no decision or change has named since they became members.

    A loss makes members of the nodes that join by a switch which is under way.
    """
    untold, before = state.membership.untold, {*state.nodes}
    joined = {node for node, kind in untold.items() if kind is ChangeKind.JOIN}
    if state.facts.loss is not None and state.phase in (Phase.RECORDING, Phase.STOPPING):
        joined.update(state.facts.loss.joined)
    return tuple(node for node in alive if node in joined or node not in before)


def untold_warnings(state: JobState, kinds: Iterable[ChangeKind] = LEAVING) -> tuple[Notify, ...]:
    """The warnings that tell of the untold nodes of these kinds, one for each kind."""
    warnings = []
    for kind in kinds:
        nodes = tuple(node for node, why in state.membership.untold.items() if why is kind)
        if not nodes:
            continue
        event, text = _WORDS[kind]
        warning = Warned(
            text=f"node {' and '.join(map(str, nodes))} {text}",
            left=nodes if kind in LEAVING else (),
            preempted=nodes if kind is ChangeKind.PREEMPT else (),
            event=event,
        )
        warnings.append(Notify(warning))
    return tuple(warnings)
