"""Links that break between live nodes: who has to go, so that the others reach one another.

A node that others cannot reach is mostly lost, and then its lease runs out first; while one has run
out, nobody else is blamed. But a cut may lie between nodes that both reach the head, and may let
packets through one way. Each rank whose link broke complains of its peer. Then:

1. The next epoch has the same nodes, because a link may break once and hold when it is made anew.
2. When links break in BROKEN_LINKS_MAX epochs, and all ranks report no iteration in between, a node
   goes: of those that the job can do without, the one that is cut off from the most others, by all
   complaints of these epochs. Every further such epoch costs another node, until no two that are
   left are cut off. If its machine has failed before, it goes at once: a machine that was left out,
   and whose network is no better yet, would stop the others for three epochs each time that it
   comes back.
3. If the job can do without none of them, for example because each side of a cut holds layers that
   the other has not, all stay: what is live is not given up for a cut that may heal, though there
   may be a save to go back to. After cluster.wait_s the live layers are saved, for which no rank
   needs another one, and the job ends.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Final

from planaria.coordinator.crashes import missing_without, shortage_without
from planaria.coordinator.frozen import replace
from planaria.coordinator.job_rules import Rules
from planaria.coordinator.membership.trust import num_failures
from planaria.coordinator.outcomes import held_layers, outcome_of
from planaria.coordinator.recovery import begin_recovery
from planaria.coordinator.state import JobState, Phase, Step
from planaria.core.kinds import LossKind

BROKEN_LINKS_MAX: Final = 3  # Number of epochs.
_NUM_TOLD_COMPLAINTS: Final = 2  # Those of both ends of a link, say.


def on_broken_links(rules: Rules, state: JobState, now_s: float) -> Step:
    """Ends an epoch in which live nodes cannot reach each other."""
    state = _with_complaints(state, now_s)
    times = state.troubles.broken_links
    is_repeated = times >= BROKEN_LINKS_MAX
    outcast = _outcast(rules, state)
    if outcast >= 0 and (is_repeated or num_failures(state, outcast, now_s)):
        how = f"{times} times in a row" if is_repeated else "again"
        reason = f"others could not reach it {how}"
        return begin_recovery(rules, state, LossKind.LOST, (outcast,), reason=reason, now_s=now_s)
    complaints = state.facts.complaints[:_NUM_TOLD_COMPLAINTS]
    texts = [f"rank {complaint.rank} {complaint.reason}" for complaint in complaints]
    reason = f"a link broke between live nodes: {'; '.join(texts)}"
    wait_s, stop = rules.job.cluster.wait_s, state.stop
    if is_repeated and now_s - state.troubles.unlinked_s > wait_s and not stop.must_end:
        reason = f"{reason}; none of them can be left out, and nothing changed for {wait_s:g} s"
        state = replace(state, stop=replace(stop, must_end=reason))
    return begin_recovery(rules, state, LossKind.LOST, (), reason=reason, now_s=now_s)


def _with_complaints(state: JobState, now_s: float) -> JobState:
    """The state in which the complaints of this epoch are added to those before it."""
    troubles, num_devices = state.troubles, state.devices_per_node
    pairs = (
        (complaint.rank // num_devices, complaint.peer // num_devices)
        for complaint in state.facts.complaints
    )
    unlinked = troubles.unlinked | {(min(pair), max(pair)) for pair in pairs}
    since_s = troubles.unlinked_s if troubles.broken_links else now_s
    troubles = replace(
        troubles,
        broken_links=troubles.broken_links + 1,
        unlinked=unlinked,
        unlinked_s=since_s,
    )
    return replace(state, troubles=troubles)


def _outcast(rules: Rules, state: JobState) -> int:
    """The node that is cut off from the most members, of those that the job can do without.

    The one with the highest number, if there are several; -1: there is none.
    """
    pairs = [pair for pair in state.troubles.unlinked if all(map(state.is_member, pair))]
    counts = Counter(node for pair in pairs for node in pair)
    held = _held_layers(rules, state)
    for node in sorted(counts, key=lambda node: (counts[node], node), reverse=True):
        is_needed = shortage_without(rules, state, node)
        if not is_needed and not missing_without(rules, state, node, held=held):
            return node
    return -1


def _held_layers(rules: Rules, state: JobState) -> Mapping[int, Collection[int]]:
    """The layers that each rank holds: not those that it was to receive over broken links."""
    planned, facts = state.plan.layers_by_rank, state.facts
    if state.phase is not Phase.STARTING or not state.has_all_ranks(facts.answers):
        return planned
    answered = held_layers(rules, state, outcome_of(state))
    return {
        rank: planned.get(rank, ()) if rank in facts.ready else layers
        for rank, layers in answered.items()
    }
