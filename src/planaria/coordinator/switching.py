"""A change that is under way: its switches, and the waves in which layers move before the last one.

Each wave of transfers, and at the end the new plan itself, begins an epoch of its own by a switch.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TypeAlias

import msgspec

from planaria.coordinator.frozen import replace
from planaria.core.kinds import ChangeKind
from planaria.core.messages import EpochReady
from planaria.core.persistent_map import PersistentMap
from planaria.core.plan import Plan, Transfer, Transition
from planaria.core.records import Candidate, DecisionInputs
from planaria.policies.building import Load, busiest_s, load_of, transfer_s
from planaria.policies.policy import Prices
from planaria.policies.unequal_nodes import STAY


class Switch(msgspec.Struct, frozen=True, kw_only=True):
    """The next epoch of a change, which begins at a commit at which all ranks agree to begin it.

    Attributes:
        nodes: members of that epoch.
        rounds: transfers at its start, round by round.
        is_told: whether its members are on record and everybody was told of it.
        ready: ranks that have begun it already, with their reports.
    """

    epoch: int
    nodes: tuple[int, ...]
    plan: Plan
    rounds: tuple[tuple[Transfer, ...], ...]
    is_told: bool = False
    ready: PersistentMap[int, EpochReady] = msgspec.field(default_factory=PersistentMap)


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A change of members or of their work that is made while training goes on.

    Attributes:
        kinds: reason of the change for each node that joins, leaves or gets other work.
        transition: transition to the plan at the end of the change.
        candidates: transitions that were weighed for it, with their prices.
        waves: transfers to silent ranks that are still to come, one epoch for each wave.
        began_s: time at which the change was chosen.
        time_to_failure_s: mean time to the next failure with which the candidates were weighed.
        silent: layers that each rank has received as a silent member so far.
        switch: switch to the next epoch; None while the first iteration after a switch is awaited.
        trained: ranks that took part in the epoch before the newest.
        pause_s: seconds that the change has paused training so far.
        received_bytes: bytes of layers that moved so far.
        reason: reason in words; "" if `kinds` says enough.
        inputs: facts from which the change was chosen.
    """

    kinds: Mapping[int, ChangeKind]
    transition: Transition
    candidates: tuple[Candidate, ...]
    waves: tuple[tuple[Transfer, ...], ...]
    began_s: float
    time_to_failure_s: float
    silent: Mapping[int, tuple[int, ...]] = msgspec.field(default_factory=dict)
    switch: Switch | None = None
    trained: tuple[int, ...] = ()
    pause_s: float = 0.0
    received_bytes: int = 0
    reason: str = ""
    inputs: DecisionInputs | None = None


def _waves_of(
    transition: Transition, *, iteration_s: float, leaving: tuple[int, ...], prices: Prices
) -> tuple[tuple[Transfer, ...], ...]:
    """All transfers of a transition in waves, in each of which whole layers go to ranks.

    No wave keeps a link busy for longer than an iteration, or than the longest of its layers alone.
    Layers with the fewest holders that stay come first, and of these the longest.

    Args:
        iteration_s: duration of an iteration with the old plan, by which all train meanwhile.
    """
    plan = transition.before
    per_node = plan.devices_per_node
    staying = [h for rank, h in plan.held_by_rank.items() if rank // per_node not in leaving]
    stay = Counter[int]()
    for layers, num_ranks in Counter(staying).items():  # Most ranks hold the same few sets.
        stay.update(dict.fromkeys(layers, num_ranks))
    needs: dict[tuple[int, int], list[Transfer]] = {}
    for transfers in transition.rounds:
        for transfer in transfers:
            needs.setdefault((transfer.layer, transfer.target), []).append(transfer)
    everything = [transfer for parts in needs.values() for transfer in parts]
    if transfer_s(everything, prices, devices_per_node=per_node) <= iteration_s:  # The usual case.
        order = sorted(needs, key=lambda need: (stay[need[0]], need))
        return (tuple(transfer for need in order for transfer in needs[need]),) if needs else ()
    loads = {n: load_of(parts, prices, devices_per_node=per_node) for n, parts in needs.items()}
    alone_s = {need: busiest_s(load, prices) for need, load in loads.items()}
    order = sorted(needs, key=lambda need: (stay[need[0]], -alone_s[need], need))
    waves = _first_fits([loads[need] for need in order], iteration_s=iteration_s, prices=prices)
    moved: list[list[Transfer]] = [[] for _ in range(max(waves) + 1)]
    for need, wave in zip(order, waves, strict=True):
        moved[wave] += needs[need]
    return tuple(map(tuple, moved))


def _first_fits(loads: list[Load], *, iteration_s: float, prices: Prices) -> list[int]:
    """The wave of each load: the first one that has room for it, in the order of the loads.

    A wave is passed over where even the smallest load of a direction would find no room there, so
    it takes O(directions of all loads) as a rule. 96,000 transfers of 500 nodes take 0.5 s.
    """
    smallest: Load = {}
    for load in loads:
        for direction, on_kinds in load.items():
            least = smallest.setdefault(direction, dict(on_kinds))
            for kind, num_bytes in on_kinds.items():
                least[kind] = min(num_bytes, least.get(kind, num_bytes))
    limits_s: list[float] = []
    filled: list[Load] = []
    first_open: dict[tuple[bool, str, int], int] = {}
    waves: list[int] = []

    def has_room(wave: int, load: Load) -> bool:
        return busiest_s(load, prices, beside=filled[wave]) <= limits_s[wave]

    def is_full(wave: int, direction: tuple[bool, str, int]) -> bool:
        least = smallest[direction].items()
        return not any(has_room(wave, {direction: {kind: size}}) for kind, size in least)

    for load in loads:
        wave = max(first_open.get(direction, 0) for direction in load)
        while wave < len(filled) and not has_room(wave, load):
            for direction in load:
                if first_open.get(direction, 0) == wave and is_full(wave, direction):
                    first_open[direction] = wave + 1
            wave += 1
        if wave == len(filled):
            filled.append({})
            limits_s.append(max(iteration_s, busiest_s(load, prices)))
        for direction, on_kinds in load.items():
            on_direction = filled[wave].setdefault(direction, {})
            for kind, num_bytes in on_kinds.items():
                on_direction[kind] = on_direction.get(kind, 0) + num_bytes
        waves.append(wave)
    return waves


_Rounds: TypeAlias = tuple[tuple[Transfer, ...], ...]


class KnownWaves:
    """The waves of transitions from one plan. Those of a transition are found once, unless
    iterations take another time.

    Args:
        leaving: nodes of the plan that leave.
    """

    def __init__(self, *, leaving: tuple[int, ...], prices: Prices) -> None:
        self.prices = prices
        self._leaving = leaving
        # By the id of a transition's rounds, with these, whose hash would take longer.
        self._known: dict[tuple[int, float], tuple[_Rounds, _Rounds]] = {}

    def of(self, transition: Transition, *, iteration_s: float) -> _Rounds:
        """The waves of a transition while iterations of the old plan take so long."""
        key = id(transition.rounds), iteration_s
        if key not in self._known:
            waves = _waves_of(
                transition, iteration_s=iteration_s, leaving=self._leaving, prices=self.prices
            )
            self._known[key] = transition.rounds, waves
        return self._known[key][1]


def weighed_changes(
    changes: tuple[Transition, ...],
    *,
    iteration_s: float,
    waves: KnownWaves,
    switch_s: Callable[[Plan], float],
) -> tuple[Transition, ...]:
    """The transition that each change is weighed as: the plan as it is, followed by the change.

    The change follows once its layers have moved. Each wave moves while an iteration is trained; if
    it takes longer, the iteration waits for it, which is a pause like those of the switches.

    Args:
        changes: one policy's proposals for one plan; staying with the plan may be among them.
        iteration_s: duration of an iteration with the plan as it is, used if staying is not among
            the changes.
        waves: waves of the changes, found so far.
        switch_s: function from a plan to the seconds in which nobody trains when an epoch with that
            plan begins at a commit.
    """
    if not changes:
        return ()
    before = changes[0].before
    as_it_is = replace(
        changes[0],
        after=replace(before, epoch=changes[0].after.epoch),
        rounds=(),
        iteration_s=iteration_s,
        redone_samples=0,
        answer=STAY,
        then=None,
        keeps_plan=True,
    )
    as_it_is = next((change for change in changes if change.keeps_plan), as_it_is)
    as_it_is = replace(as_it_is, downtime_s=0.0)
    return tuple(
        as_it_is if change.keeps_plan else _with_sequel(as_it_is, change, waves, switch_s=switch_s)
        for change in changes
    )


def followed_answers(
    answers: tuple[Transition, ...], *, prices: Prices, switch_s: Callable[[Plan], float]
) -> tuple[Transition, ...]:
    """The transition that each answer to a loss is weighed as.

    If another plan is to follow, the pauses until it begins are added, as in `weighed_changes`.
    Layers that the answer moves need not move again for that plan; they are counted nevertheless,
    because it is not known yet which rank will send what.
    """
    waves = KnownWaves(leaving=(), prices=prices)
    return tuple(
        _with_sequel(answer, answer.then, waves, switch_s=switch_s) if answer.then else answer
        for answer in answers
    )


def _with_sequel(
    first: Transition,
    then: Transition,
    known_waves: KnownWaves,
    *,
    switch_s: Callable[[Plan], float],
) -> Transition:
    """The first transition with all pauses until the other plan begins, followed by the other.

    A switch begins one commit after the commit at which it is ordered. So the first switch begins
    after the iteration in flight. Each further one begins two iterations after the one before,
    because it also waits for the first step in which the layers of the last wave take part.
    """
    per_node = then.before.devices_per_node
    waves, prices = known_waves.of(then, iteration_s=first.iteration_s), known_waves.prices
    takes_s = (transfer_s(wave, prices, devices_per_node=per_node) for wave in waves)
    longer_s = sum(max(0.0, wave_s - first.iteration_s) for wave_s in takes_s)
    pauses_s = (len(waves) * switch_s(first.after) if waves else 0.0) + switch_s(then.after)
    return replace(
        first,
        downtime_s=first.downtime_s + pauses_s + longer_s,
        then=replace(then, downtime_s=(2 * len(waves) + 1) * first.iteration_s),
    )
