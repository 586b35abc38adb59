"""What a recovery takes beside moving layers is measured, and priced into the next one."""

import msgspec
import pytest

from helpers.coordinated import NOW_S, small_rules
from helpers.fake_cluster import FakeCluster
from helpers.jobs import shaped_plan
from planaria.coordinator.frozen import replace
from planaria.coordinator.learning.overhead import (
    FIRST_RECOVERY,
    FIRST_SWITCH,
    NUM_NEWEST,
    RANK_S,
    prices_of,
    regroup_s,
    switch_s,
    with_choice,
    with_order,
    with_start,
    with_switch,
)
from planaria.coordinator.state import Commits, JobState, Loss
from planaria.core.findings import Findings
from planaria.core.kinds import LossKind
from planaria.core.messages import EpochReady
from planaria.core.persistent_map import PersistentMap
from planaria.core.plan import Link, Transition
from planaria.policies.building import scheduling_s

LINKS = {kind: Link(0.001, 1e9) for kind in ("intra_node", "inter_node")}
RULES = small_rules()  # Its regroup_s is 0.1.
RULES = replace(RULES, prices=replace(RULES.prices, links=LINKS))
PLAN = shaped_plan((2,), 6)


def state_with(findings: Findings) -> JobState:
    """A job that has lost a node, and knows this."""
    state = JobState(
        term=0, epoch=1, nodes=PLAN.nodes, plan=PLAN, commits=Commits(next_iteration=0)
    )
    loss = Loss(LossKind.LOST, (2,), "closed", NOW_S)
    return replace(
        state,
        facts=replace(state.facts, loss=loss),
        learning=replace(state.learning, findings=findings),
    )


def recovered(
    state: JobState, *, transfer_s: float, total_s: float, took_s: float | None = None
) -> JobState:
    """The state after a recovery whose layers were to take `transfer_s` by the profile, and took
    `took_s`, or just that, and which took so long in all."""
    prices = prices_of(RULES, state)
    link, of_profile = prices.links["inter_node"], RULES.prices.links["inter_node"]
    factor = of_profile.bandwidth_bytes_per_s / link.bandwidth_bytes_per_s
    price_s = prices.regroup_s + transfer_s * factor
    took_s = transfer_s if took_s is None else took_s
    ready = EpochReady(rank=0, epoch=1, layers_materialised=1, transfer_s=took_s)
    state = replace(state, facts=replace(state.facts, ready=PersistentMap({0: ready})))
    chosen = Transition(
        before=PLAN,
        after=replace(PLAN, epoch=1),
        rounds=(),
        downtime_s=price_s,
        iteration_s=1.0,
        redone_samples=0,
        policy="",
        answer="",
    )
    state = with_order(with_choice(RULES, state, chosen, NOW_S - 9.0), NOW_S)
    return with_start(RULES, state, NOW_S + total_s)


def test_what_a_recovery_costs_is_a_prior_at_first_and_then_measured() -> None:
    """What is left of its time is its overhead, and what there was before all were told is not."""
    begun = state_with(Findings())
    once = recovered(begun, transfer_s=2.0, total_s=2.25)

    assert prices_of(RULES, begun).regroup_s == RULES.prices.regroup_s + RANK_S
    assert prices_of(RULES, once).regroup_s == pytest.approx(0.25)
    assert prices_of(RULES, recovered(once, transfer_s=2.0, total_s=2.75)).regroup_s == (
        pytest.approx(0.5)
    )


def test_the_newest_recoveries_count_and_one_exception_does_not() -> None:
    """The median of five; a recovery faster than its layers' price has no negative rest."""
    state = state_with(Findings())
    for overhead_s in (9.0, 9.0, 0.2, 0.2, 0.3, 0.3, 9.0):
        state = recovered(state, transfer_s=1.0, total_s=1.0 + overhead_s)
    fast = recovered(state_with(Findings()), transfer_s=1.0, total_s=0.5)

    assert prices_of(RULES, state).regroup_s == pytest.approx(0.3)
    assert len(state.learning.findings.overheads_s) == NUM_NEWEST
    assert prices_of(RULES, fast).regroup_s == 0.0


def test_transfers_that_take_longer_than_links_say_cost_more() -> None:
    """Whatever else a recovery takes is not theirs; the fifth last is forgotten."""
    state = state_with(Findings())
    size = 10**9
    for _ in range(NUM_NEWEST):
        state = recovered(state, transfer_s=1.0, took_s=3.0, total_s=3.5)
    slow = prices_of(RULES, state)
    for _ in range(NUM_NEWEST):
        state = recovered(state, transfer_s=1.0, total_s=1.5)
    usual = prices_of(RULES, state)

    for kind, link in RULES.prices.links.items():
        assert slow.links[kind].seconds(size) == pytest.approx(3 * link.seconds(size), rel=0.01)
        assert usual.links[kind].seconds(size) == pytest.approx(link.seconds(size))
    assert slow.regroup_s == usual.regroup_s == pytest.approx(0.5)


def test_who_waits_for_the_links_of_others_does_not_transfer() -> None:
    """Rank 0 has its links a second earlier than rank 1, which sends to it for half a second."""
    state = state_with(Findings())
    early = EpochReady(rank=0, epoch=1, layers_materialised=1, regroup_s=0.1, transfer_s=1.5)
    late = EpochReady(rank=1, epoch=1, layers_materialised=1, regroup_s=1.1, transfer_s=0.0)
    learning = replace(state.learning, told_s=NOW_S, transfer_s=0.25)
    state = replace(
        state,
        facts=replace(state.facts, ready=PersistentMap({0: early, 1: late})),
        learning=learning,
    )

    findings = with_start(RULES, state, NOW_S + 2.0).learning.findings

    (moved,), (overhead_s,) = findings.transfers_s, findings.overheads_s
    assert moved == pytest.approx((0.25, 0.5))
    assert overhead_s == pytest.approx(1.5)


def test_a_few_bytes_tell_little_of_links_and_none_nothing() -> None:
    """A microsecond's worth of bytes takes as long as a message."""
    none = recovered(state_with(Findings()), transfer_s=0.0, took_s=0.01, total_s=0.5)
    few = state_with(Findings())
    for _ in range(NUM_NEWEST):
        few = recovered(few, transfer_s=1e-6, took_s=0.01, total_s=0.5)

    assert none.learning.findings.transfers_s == ()
    assert prices_of(RULES, none).links == RULES.prices.links
    assert prices_of(RULES, none).regroup_s == pytest.approx(0.5)
    link, cheap = prices_of(RULES, few).links["inter_node"], RULES.prices.links["inter_node"]
    assert 1.0 < link.seconds(10**9) / cheap.seconds(10**9) < 4.0


def test_a_start_tells_what_schedules_took_and_a_restart_in_the_middle_no_overhead() -> None:
    """Who did not see the choice cannot know what came after it."""
    ready = (
        EpochReady(rank=0, epoch=0, layers_materialised=1, scheduled_s=0.1),
        EpochReady(rank=1, epoch=0, layers_materialised=1, scheduled_s=0.2),
    )
    state = state_with(Findings())
    state = replace(state, facts=replace(state.facts, ready=PersistentMap(dict(enumerate(ready)))))

    first = replace(state, facts=replace(state.facts, loss=None))
    started = with_start(RULES, first, NOW_S).learning.findings
    restarted = with_start(RULES, with_order(state, NOW_S), NOW_S).learning.findings

    assert started.hop_s == pytest.approx(0.15 / scheduling_s(PLAN, 1.0))
    assert restarted.hop_s == started.hop_s
    assert started.overheads_s == restarted.overheads_s == ()


def test_switches_are_measured_for_themselves() -> None:
    """A pause at a commit has nothing of a recovery."""
    state = state_with(Findings(hop_s=0.001, overheads_s=(0.3,)))
    assert switch_s(RULES, state_with(Findings()), PLAN) == RULES.prices.regroup_s
    assert switch_s(RULES, state, PLAN) == FIRST_SWITCH * scheduling_s(PLAN, 0.001)
    quick = EpochReady(rank=0, epoch=1, layers_materialised=1)
    state = replace(state, facts=replace(state.facts, ready=PersistentMap({0: quick})))
    for pause_s in (0.01, 0.02, 0.9):
        state = with_switch(RULES, state, pause_s)

    assert switch_s(RULES, state, PLAN) == 0.02
    assert prices_of(RULES, state).regroup_s == 0.3


@pytest.mark.parametrize("processors", [0, 2])
def test_schedules_are_priced_by_what_they_are_computed_from(processors: int) -> None:
    """As long again for as many hops again, after recoveries and switches alike, somewhat longer in
    the first recovery; where ranks share processors they wait for each other."""
    rules = replace(RULES, processors=processors)
    small, large = shaped_plan((2,) * 4, 8), shaped_plan((8,), 64)
    ready = PersistentMap(
        {r: EpochReady(rank=r, epoch=1, layers_materialised=1, scheduled_s=0.01) for r in range(8)}
    )
    state = state_with(Findings())
    facts = replace(state.facts, ready=ready)
    state = replace(state, plan=small, nodes=small.nodes, facts=facts)
    sharing = 4.0 if processors else 1.0
    more = scheduling_s(large, 1.0) / scheduling_s(small, 1.0)
    started = with_start(rules, replace(state, facts=replace(state.facts, loss=None)), NOW_S)
    paused = with_switch(rules, state, 0.01 * sharing + 0.5)
    told = replace(state, learning=replace(state.learning, told_s=NOW_S))
    recovered = with_start(rules, told, NOW_S + FIRST_RECOVERY * 0.01 * sharing + 0.25)

    assert more > 5.0
    assert switch_s(rules, started, large) == pytest.approx(FIRST_SWITCH * 0.01 * sharing * more)
    assert switch_s(rules, paused, large) == pytest.approx(0.01 * sharing * more + 0.5)
    assert regroup_s(rules, started, large) == pytest.approx(
        RULES.prices.regroup_s + RANK_S * sharing + FIRST_RECOVERY * 0.01 * sharing * more
    )
    assert regroup_s(rules, recovered, large) == pytest.approx(0.01 * sharing * more + 0.25)


def test_what_was_measured_outlives_the_coordinator() -> None:
    """It is on record with the members of the next epoch."""
    cluster = FakeCluster(small_rules(), shaped_plan((2, 2, 2), 6))
    cluster.begin()
    findings = msgspec.structs.replace(
        cluster.state.learning.findings, overheads_s=(0.7,), transfers_s=((0.1, 0.2),)
    )
    learning = replace(cluster.state.learning, findings=findings)
    cluster.state = replace(cluster.state, learning=learning)
    cluster.lose(5)
    before = cluster.state.learning.findings

    cluster.restart()

    assert before.overheads_s[0] == 0.7
    assert cluster.state.learning.findings.overheads_s[0] == 0.7
    assert cluster.state.learning.findings.transfers_s[0] == (0.1, 0.2)
