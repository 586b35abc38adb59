"""What the coordinator expects of the next failure: learned or told, in bursts, after restarts."""

from math import exp, inf

import msgspec
import numpy as np
import pytest

from helpers.coordinated import (
    FIRST,
    LEASE_S,
    NOW_S,
    NUM_MICROBATCHES,
    Survivors,
    of_type,
    small_rules,
)
from helpers.fake_cluster import FakeCluster
from helpers.jobs import shaped_plan
from planaria.coordinator.commands import Tick
from planaria.coordinator.frozen import replace
from planaria.coordinator.job_rules import Rules
from planaria.coordinator.learning.history import (
    MEMORY_S,
    PRIOR_FAILURES,
    PRIOR_NODES,
    PRIOR_S,
    begun_history,
    learned_failures_per_s,
    learned_nodes_per_failure,
    with_failure,
)
from planaria.coordinator.transition_choice import choice_among, outlook, time_to_failure_s
from planaria.core.cluster import NodesLost, survivors
from planaria.core.findings import FailureHistory
from planaria.core.messages import CopySpoilt, PeerUnreachable
from planaria.core.records import Decided, Progress

PLAN = shaped_plan((2, 2), NUM_MICROBATCHES)
HOUR_S = 3600.0


def failed_at(*times_s: float, began_s: float = 1.0) -> FailureHistory:
    history = begun_history(FailureHistory(), began_s)
    for node, now_s in enumerate(times_s):
        history = with_failure(history, now_s, nodes=(node,), lease_s=LEASE_S)
    return history


def trained(rules: Rules) -> FakeCluster:
    cluster = FakeCluster(rules, PLAN)
    cluster.begin()
    cluster.train(FIRST)
    return cluster


def test_the_first_expectation_is_a_failure_an_hour_and_calm_time_lowers_it() -> None:
    """Bounded by what is remembered: nobody knows that there will never be one."""
    calm = failed_at()

    rates = [learned_failures_per_s(calm, 1.0 + hours * HOUR_S) for hours in (0, 1, 5, 1000)]

    assert rates[0] == pytest.approx(1.0 / HOUR_S)
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(PRIOR_FAILURES / (PRIOR_S + MEMORY_S))
    assert learned_failures_per_s(FailureHistory(), NOW_S) == rates[0]


@pytest.mark.parametrize("after_s", [30.0, 60.0, 1800.0, 4 * HOUR_S])
def test_the_first_failure_is_believed(after_s: float) -> None:
    """Within a factor of four of one in the time until it came: jobs differ by far more."""
    rate = learned_failures_per_s(failed_at(1.0 + after_s), 1.0 + after_s)

    assert 1.0 / (4.0 * after_s) < rate <= 1.5 / after_s


@pytest.mark.parametrize("per_hour", [0.5, 2.0, 20.0])
def test_the_rate_of_failures_is_learned(per_hour: float) -> None:
    """Over 200 drawn jobs of two days, the mean of what each has learned is near the truth."""
    rng = np.random.default_rng(11)
    learned = []
    for _ in range(200):
        gaps_s = rng.exponential(HOUR_S / per_hour, int(60 * per_hour) + 20) + LEASE_S
        times_s = [float(t) for t in 1.0 + np.cumsum(gaps_s) if t < 48 * HOUR_S]
        learned.append(learned_failures_per_s(failed_at(*times_s), 48 * HOUR_S) * HOUR_S)

    assert np.mean(learned) == pytest.approx(per_hour, rel=0.08)


def test_what_is_long_ago_is_forgotten() -> None:
    """A cluster that had a bad day is not a bad cluster."""
    bad = failed_at(*(100.0 * n for n in range(1, 40)))
    soon, late = (learned_failures_per_s(bad, 4000.0 + s) for s in (0.0, 48 * HOUR_S))

    assert soon > 30 / HOUR_S
    # Two days are eight times what is remembered.
    assert late == pytest.approx((PRIOR_FAILURES + 39 * np.exp(-8)) / (PRIOR_S + MEMORY_S), rel=0.3)


def test_losses_within_a_lease_of_each_other_are_one_failure() -> None:
    """Eight nodes behind one switch are not eight failures, however they are noticed."""
    one = failed_at(1000.0)
    burst = failed_at(*(1000.0 + 0.9 * LEASE_S * n for n in range(8)))
    apart = failed_at(*(1000.0 + 1.1 * LEASE_S * n for n in range(8)))

    assert burst.weight == pytest.approx(one.weight, rel=0.01)
    assert apart.weight == pytest.approx(8 * one.weight, rel=0.01)


def test_how_many_nodes_a_failure_takes_is_learned() -> None:
    """Whether they are noticed at once or one by one; and forgotten like failures."""
    assert learned_nodes_per_failure(FailureHistory(), NOW_S) == PRIOR_NODES
    single, at_once = failed_at(), failed_at()
    for n in range(1, 40):
        single = with_failure(single, 100.0 * n, nodes=(n,), lease_s=LEASE_S)
        at_once = with_failure(at_once, 100.0 * n, nodes=range(3), lease_s=LEASE_S)
    one_by_one = failed_at(*(100.0 * n + 0.1 * LEASE_S * i for n in range(1, 40) for i in range(3)))

    assert 1.0 <= learned_nodes_per_failure(single, 4000.0) < 1.02
    for history in (at_once, one_by_one):
        assert learned_nodes_per_failure(history, 4000.0) == pytest.approx(3.0, rel=0.05)
        late_s = 4000.0 + 48 * HOUR_S
        assert learned_nodes_per_failure(history, late_s) == pytest.approx(PRIOR_NODES, rel=0.03)


def test_a_failure_takes_each_of_its_nodes_once() -> None:
    """Also where workers of one crash again and again, or first a worker is lost and then all of
    it; who was lost with another is another."""
    crashing = trained(small_rules())
    for status in (-9, -11, -9):
        crashing.crash(1, status=status)
    assert crashing.state.membership.history.nodes == 1.0

    going = trained(small_rules())
    going.crash(1)
    going.lose(1)
    assert going.state.membership.history.nodes == 1.0
    going.restart()
    going.lose(3)
    history = going.state.membership.history
    assert (history.nodes, history.weight) == (2.0, 1.0)


def test_where_nobody_is_lost_a_failure_takes_no_node() -> None:
    """A link that broke between live nodes, or a copy that is spoilt, take no live layer."""
    cut, spoilt = trained(small_rules()), trained(small_rules())
    cut.hear(PeerUnreachable(rank=0, epoch=0, peer=1, reason="closed"))
    cut.hear(Tick(), now_s=NOW_S + 2 * LEASE_S)
    spoilt.hear(CopySpoilt(rank=1, epoch=0, reason="a bit is wrong"))

    for cluster in (cut, spoilt):
        assert cluster.state.epoch == 1
        history = cluster.state.membership.history
        assert (history.nodes, history.weight) == (0.0, 1.0)


def test_the_job_file_overrides_what_is_learned() -> None:
    """In failures of the whole job in an hour."""
    cluster = trained(small_rules(failure_rate=4.0))
    cluster.lose(3)

    assert time_to_failure_s(cluster.rules, cluster.state, NOW_S) == HOUR_S / 4.0
    (notice,) = of_type(cluster.commands, Decided)
    assert notice.time_to_failure_s == HOUR_S / 4.0


def test_a_new_coordinator_knows_what_the_one_before_it_learned() -> None:
    """It stands in the newest record of members, also in one that a change has made."""
    cluster = trained(small_rules())
    cluster.lose(3)
    before = cluster.state.membership.history
    assert before == FailureHistory(since_s=NOW_S, weight=1.0, last_s=NOW_S, nodes=1.0, struck=(3,))
    cluster.join(4)
    cluster.train(cluster.state.commits.next_iteration)

    cluster.restart()

    assert cluster.state.membership.history == before


def test_a_new_coordinator_knows_for_how_long_the_job_was_spared() -> None:
    """Before the first failure nothing of it is on record but the iterations that are done."""
    cluster = trained(small_rules())
    cluster.progress = Progress(num_committed=FIRST + 3, ends=False)
    cluster.restart()

    assert cluster.state.membership.history == FailureHistory(since_s=NOW_S - 3.0)


def test_a_coordinator_that_is_lost_is_no_failure_of_nodes() -> None:
    """Training goes on without it."""
    cluster = trained(small_rules())
    cluster.restart()

    assert cluster.state.membership.history.weight == 0.0


def test_what_is_not_saved_is_what_was_trained_since_the_newest_save() -> None:
    """A failure in 100 s, one iteration is done."""
    rules = small_rules(failure_rate=36.0)
    state = trained(rules).state

    never = outlook(rules, state, NOW_S)
    checkpoint = replace(rules.job.checkpoint, persist_every=5)
    saving = replace(rules, job=replace(rules.job, checkpoint=checkpoint))
    often = outlook(saving, state, NOW_S)
    later = replace(state, saves=replace(state.saves, versions=((FIRST + 1, 0),)))
    published = outlook(rules, later, NOW_S)

    assert never.failures_per_s == pytest.approx(0.01)
    assert (never.unsaved_samples, never.between_saves) == (NUM_MICROBATCHES, inf)
    assert (often.unsaved_samples, often.between_saves) == (NUM_MICROBATCHES, 5 * NUM_MICROBATCHES)
    assert published.unsaved_samples == 0


def test_no_more_is_at_stake_than_the_job_has_left() -> None:
    """Four of its five iterations."""
    rules = small_rules()

    assert outlook(rules, trained(rules).state, NOW_S).remaining_samples == 4 * NUM_MICROBATCHES


@pytest.mark.parametrize(("copies", "lost_max"), [(1, inf), (2, 6), (3, 6)])
def test_copies_in_other_nodes_memory_leave_two_versions_at_risk(
    copies: int, lost_max: float
) -> None:
    """A version takes three iterations. Its own is lost with a node."""
    rules = small_rules(failure_rate=36.0)
    checkpoint = replace(rules.job.checkpoint, copies=copies)
    rules = replace(rules, version_iterations=3, job=replace(rules.job, checkpoint=checkpoint))

    assert outlook(rules, trained(rules).state, NOW_S).lost_max == lost_max * NUM_MICROBATCHES


@pytest.mark.parametrize(("gain", "is_offered"), [(0.02, False), (0.1, True)])
def test_what_nobody_would_change_to_is_not_what_an_answer_is_taken_for(
    gain: float, *, is_offered: bool
) -> None:
    """A commit asks for 3% more. What is told makes the score, and the pauses are in it, but not in
    what the recovery takes."""
    rules = small_rules(failure_rate=1.0)
    state = trained(rules).state
    endless = replace(rules.job.training, iterations=10**9)
    rules = replace(rules, job=replace(rules.job, training=endless))
    quick, *_ = Survivors().propose(
        PLAN, survivors(PLAN, (3,), epoch=1), NodesLost((3,), 0), rules.prices
    )
    quick = replace(quick, answer="quick")
    then = replace(quick, answer="good", iteration_s=quick.iteration_s / (1.0 + gain))
    both = replace(quick, answer="quick, then good", then=then)

    chosen, candidates = choice_among(rules, state, (quick, both), NOW_S)

    assert chosen == (both if is_offered else quick)
    assert [candidate.answer for candidate in candidates] == ["quick", both.answer][
        : 1 + is_offered
    ]
    for candidate in candidates:
        rate, batch = 1.0 / HOUR_S, rules.job.training.global_batch_size
        begin_s = candidate.downtime_s + candidate.pause_s
        score = batch / candidate.iteration_s * exp(-rate * begin_s)
        score -= rate * candidate.samples_at_risk
        if candidate.then_s:
            more = batch / candidate.then_s - batch / candidate.iteration_s
            score += exp(-rate * (begin_s + candidate.moving_s)) * more
        assert candidate.score == pytest.approx(score)
        assert candidate.downtime_s == quick.downtime_s
        assert bool(candidate.pause_s) == bool(candidate.then_s)


def test_a_save_may_be_published_before_its_iteration_counts() -> None:
    """All files were there before all reports, and failures come faster than iterations: nothing
    that is not saved would be lost. Found by the simulation."""
    rules = small_rules(failure_rate=36000.0)
    state = trained(rules).state

    saves = replace(state.saves, versions=((state.commits.next_iteration + 1, 0),))
    ahead = outlook(rules, replace(state, saves=saves), NOW_S)

    assert ahead.unsaved_samples == 0.0


def test_a_decision_tells_what_it_was_made_from() -> None:
    """So that it can be made again: the loss and the members as policies saw them, and findings."""
    cluster = trained(small_rules())
    before, findings = cluster.state.plan.epoch, cluster.state.learning.findings
    cluster.lose(3)

    (notice,) = of_type(cluster.commands, Decided)
    inputs = notice.inputs
    assert inputs is not None
    assert (inputs.plan_epoch, inputs.members) == (before, (0, 1, 2))
    assert inputs.plan == PLAN
    assert inputs.lost is not None
    assert (inputs.lost.nodes, inputs.changed) == ((3,), None)
    assert [node.node for node in inputs.cluster.nodes] == [0, 1, 2]
    assert inputs.findings == findings
    assert inputs.history.weight == 1.0
    again = msgspec.json.decode(msgspec.json.encode(notice), type=Decided)
    assert again.inputs == inputs
