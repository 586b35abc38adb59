"""A change that is being made: its switches, and the waves in which layers move before the last."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from planaria.core.growing import Growing
from planaria.core.messages import EpochReady
from planaria.core.plan import Plan, Transfer, Transition
from planaria.core.records import Candidate
from planaria.policies.policy import Prices, bytes_by_link, transfer_s
from planaria.policies.unequal import STAY


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """The next epoch of a change, which begins when all ranks agree at a commit to begin it.

    Attributes:
        nodes: its members.
        is_told: its members are on record, and everybody is told.
        ready: those ranks that have begun it already.
    """

    epoch: int
    nodes: tuple[int, ...]
    plan: Plan
    rounds: tuple[tuple[Transfer, ...], ...]
    is_told: bool = False
    ready: Growing[int, EpochReady] = field(default_factory=Growing)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of members or of their work that is made while training goes on.

    Attributes:
        kinds: of the nodes that come, leave, or have other work: why.
        transition: to the plan at its end.
        waves: of transfers to silent ranks that are still to come, each an epoch's.
        time_to_failure_s: mean time to the next failure, as the candidates are weighed by it.
        silent: the layers that ranks have got silently so far.
        switch: the next epoch, None while the first iteration of one is awaited.
        trained: the ranks that took part in the epoch before the newest.
        pause_s, received_bytes: so far.
        reason: in words, where the kinds do not tell it.
    """

    kinds: Mapping[int, str]
    transition: Transition
    candidates: tuple[Candidate, ...]
    waves: tuple[tuple[Transfer, ...], ...]
    began_s: float
    time_to_failure_s: float
    silent: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    switch: Switch | None = None
    trained: tuple[int, ...] = ()
    pause_s: float = 0.0
    received_bytes: int = 0
    reason: str = ""


def waves_of(
    transition: Transition, *, iteration_s: float, leaving: tuple[int, ...], prices: Prices
) -> tuple[tuple[Transfer, ...], ...]:
    """All transfers in waves; a layer comes to a rank in one of them, whole.

    No wave keeps a link for longer than an iteration, unless it is a single layer of a rank.

    Args:
        iteration_s: of the plan before, by which all train meanwhile.
    """
    plan = transition.before
    per_node = plan.pipelines[0].template.devices_per_node
    stay = Counter(
        layer
        for rank, layers in plan.held_by_rank.items()
        if rank // per_node not in leaving
        for layer in layers
    )
    needs: dict[tuple[int, int], list[Transfer]] = {}
    for transfers in transition.rounds:
        for transfer in transfers:
            needs.setdefault((transfer.layer, transfer.target), []).append(transfer)
    waves: list[list[Transfer]] = []
    load: Counter[tuple[str, str, int]] = Counter()
    for layer, target in sorted(needs, key=lambda need: (stay[need[0]] > 0, stay[need[0]], need)):
        parts = needs[layer, target]
        more = bytes_by_link(parts, devices_per_node=per_node)
        is_full = any(
            prices.links[link[0]].seconds(load[link] + size) > iteration_s
            for link, size in more.items()
        )
        if not waves or is_full:
            waves.append([])
            load.clear()
        load += more
        waves[-1] += parts
    return tuple(tuple(wave) for wave in waves)


def weighed_as(
    changes: tuple[Transition, ...],
    *,
    iteration_s: float,
    leaving: tuple[int, ...],
    prices: Prices,
    switch_s: Callable[[Plan], float],
) -> tuple[Transition, ...]:
    """What each change is weighed as: the plan as it is, and once the layers have moved the change.

    Each wave moves while an iteration is trained; for what it takes longer than that the iteration
    waits, which is a pause like those of the switches.

    Args:
        changes: of one plan, by one policy; to stay with it may be among them.
        iteration_s: by the plan as it is, if it is not among them.
        switch_s: for how long nobody trains when an epoch with a plan begins at a commit.
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
    )
    as_it_is = next((change for change in changes if change.answer == STAY), as_it_is)
    as_it_is = replace(as_it_is, downtime_s=0.0)
    return tuple(
        as_it_is
        if change.answer == STAY
        else _followed(as_it_is, change, leaving=leaving, prices=prices, switch_s=switch_s)
        for change in changes
    )


def followed_as(
    answers: tuple[Transition, ...], *, prices: Prices, switch_s: Callable[[Plan], float]
) -> tuple[Transition, ...]:
    """What each answer to a loss is weighed as, if another plan is to follow: with the pauses until
    it begins, as `weighed_as` has them. What the answer itself moves need not move again, but is
    counted here, as nobody knows yet who will send what.
    """
    return tuple(
        _followed(one, one.then, leaving=(), prices=prices, switch_s=switch_s) if one.then else one
        for one in answers
    )


def _followed(
    first: Transition,
    then: Transition,
    *,
    leaving: tuple[int, ...],
    prices: Prices,
    switch_s: Callable[[Plan], float],
) -> Transition:
    """The first, with all pauses until the other one's plan begins, and that.

    A switch begins at the commit after the one that it is ordered at: the first one after the
    iteration in flight, and each further one two iterations after the one before, for it waits for
    the first step that a wave's layers take part in.
    """
    per_node = then.before.pipelines[0].template.devices_per_node
    waves = waves_of(then, iteration_s=first.iteration_s, leaving=leaving, prices=prices)
    takes_s = (transfer_s(wave, prices, devices_per_node=per_node) for wave in waves)
    longer_s = sum(max(0.0, wave_s - first.iteration_s) for wave_s in takes_s)
    pauses_s = (len(waves) * switch_s(first.after) if waves else 0.0) + switch_s(then.after)
    return replace(
        first,
        downtime_s=first.downtime_s + pauses_s + longer_s,
        then=replace(then, downtime_s=(2 * len(waves) + 1) * first.iteration_s),
    )
