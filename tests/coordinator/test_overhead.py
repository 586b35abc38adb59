"""What a recovery takes beside moving layers is measured, and priced into the next one."""

from dataclasses import replace

import msgspec
import pytest

from coordinated import NOW_S, small_rules
from fake_cluster import FakeCluster
from jobs import shaped_plan
from planaria.coordinator.overhead import (
    NUM_NEWEST,
    prices_of,
    switch_s,
    with_choice,
    with_start,
    with_switch,
)
from planaria.coordinator.state import JobState, Loss
from planaria.core.growing import Growing
from planaria.core.messages import EpochReady
from planaria.core.plan import Transition
from planaria.core.records import Findings

RULES = small_rules()  # Its regroup_s is 0.1.
PLAN = shaped_plan((2,), 6)


def state_with(findings: Findings) -> JobState:
    """A job that has lost a node, and knows this."""
    state = JobState(term=0, epoch=1, nodes=PLAN.nodes, plan=PLAN, next_iteration=0)
    loss = Loss("lost", (2,), "closed", NOW_S)
    return replace(state, loss=loss, learning=replace(state.learning, findings=findings))


def recovered(state: JobState, *, transfer_s: float, total_s: float) -> JobState:
    """The state after a recovery whose layers were to take so long, and which took so long."""
    price_s = prices_of(RULES, state).regroup_s + transfer_s
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
    return with_start(with_choice(RULES, state, chosen, NOW_S), NOW_S + total_s)


def test_what_the_first_recovery_costs_is_taken_from_the_start_and_then_measured() -> None:
    """Links are all that is known at first; what is left of a recovery's time is its overhead."""
    unknown = state_with(Findings())
    begun = state_with(Findings(linked_s=0.4))
    once = recovered(begun, transfer_s=2.0, total_s=2.25)

    assert prices_of(RULES, unknown).regroup_s == RULES.prices.regroup_s
    assert prices_of(RULES, begun).regroup_s == 0.4
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


def test_a_start_tells_what_links_took_and_a_restart_in_the_middle_nothing() -> None:
    """Who did not see the choice cannot know what came after it."""
    ready = EpochReady(rank=0, epoch=0, layers_materialised=1, regroup_s=0.5)
    state = replace(state_with(Findings()), ready=Growing({0: ready}))

    started = with_start(replace(state, loss=None), NOW_S)
    restarted = with_start(state, NOW_S)

    assert started.learning.findings == Findings(linked_s=0.5)
    assert restarted.learning.findings == Findings()


def test_switches_are_measured_for_themselves() -> None:
    """A pause at a commit has nothing of a recovery."""
    state = state_with(Findings(linked_s=0.4, overheads_s=(0.3,)))
    assert switch_s(RULES, state_with(Findings())) == RULES.prices.regroup_s
    assert switch_s(RULES, state) == 0.4
    for pause_s in (0.01, 0.02, 0.9):
        state = with_switch(state, pause_s)

    assert switch_s(RULES, state) == 0.02
    assert prices_of(RULES, state).regroup_s == 0.3


def test_what_was_measured_outlives_the_coordinator() -> None:
    """It is on record with the members of the next epoch."""
    cluster = FakeCluster(small_rules(), shaped_plan((2, 2, 2), 6))
    cluster.begin()
    findings = msgspec.structs.replace(cluster.state.learning.findings, overheads_s=(0.7,))
    learning = replace(cluster.state.learning, findings=findings)
    cluster.state = replace(cluster.state, learning=learning)
    cluster.lose(5)
    before = cluster.state.learning.findings

    cluster.restart()

    assert before.overheads_s[0] == 0.7
    assert cluster.state.learning.findings.overheads_s[0] == 0.7
