"""What an answer is worth, and which one is the best."""

from dataclasses import replace
from itertools import combinations
from math import inf

import numpy as np
import pytest

from planaria.core.plan import (
    Pipeline,
    PipelineTemplate,
    Plan,
    Stage,
    Transition,
    plain_plan,
)
from planaria.policies.value import (
    Outlook,
    best_transition,
    expected_samples_per_s,
    mean_unsaved,
    samples_at_risk,
    share_at_risk,
)


def transition(
    *, downtime_s: float, iteration_s: float, redone_samples: int = 0, answer: str = "local"
) -> Transition:
    pipeline = Pipeline(PipelineTemplate((Stage(0, 2, 1),), 1), (0,))
    return Transition(
        before=plain_plan(0, (pipeline,), (2,)),
        after=plain_plan(1, (pipeline,), (2,)),
        rounds=(),
        downtime_s=downtime_s,
        iteration_s=iteration_s,
        redone_samples=redone_samples,
        policy="any",
        answer=answer,
    )


RARE = Outlook(failures_per_s=1.0 / 60.0)


@pytest.mark.parametrize("failures_per_s", [1.0, 0.05, 0.001])
def test_expected_samples_are_those_made_before_an_exponential_failure(
    failures_per_s: float,
) -> None:
    """A batch of 8 every 2 s once 10 s are over, and 4 samples are done again, 1 s more: against
    a million failures that are drawn, within 1% of the best that a plan without downtime makes."""
    priced = transition(downtime_s=10.0, iteration_s=2.0, redone_samples=4)
    times_s = np.random.default_rng(7).exponential(1.0 / failures_per_s, 1_000_000)

    expected = expected_samples_per_s(
        priced, global_batch_size=8, outlook=Outlook(failures_per_s=failures_per_s, lost_max=0.0)
    )

    drawn = float(np.maximum(0.0, times_s - 11.0).mean()) * failures_per_s * 8 / 2.0
    assert expected == pytest.approx(drawn, abs=0.01 * 8 / 2.0)


def test_a_plan_that_is_followed_by_another_is_worth_both() -> None:
    """4 samples/s from 1 s on, and 8 from 6 s on: against a million failures that are drawn."""
    later = transition(downtime_s=5.0, iteration_s=1.0)
    followed = replace(transition(downtime_s=1.0, iteration_s=2.0), then=later)
    times_s = np.random.default_rng(8).exponential(10.0, 1_000_000)

    expected = expected_samples_per_s(
        followed, global_batch_size=8, outlook=Outlook(failures_per_s=0.1, lost_max=0.0)
    )

    made = 4.0 * np.maximum(0.0, times_s - 1.0) + 4.0 * np.maximum(0.0, times_s - 6.0)
    assert expected == pytest.approx(float(made.mean()) / 10.0, rel=0.01)


def test_without_failures_the_fastest_iteration_is_best_and_with_many_the_least_downtime() -> None:
    """The limits; in between exp(-L * 9 s) = 2 / 3, so at a failure in 22 s, they are equal."""
    quick = transition(downtime_s=1.0, iteration_s=3.0, answer="quick")
    fast = transition(downtime_s=10.0, iteration_s=2.0, answer="fast")

    for rate, answer in ((0.0, "fast"), (1 / 23, "fast"), (1 / 22, "quick"), (1e6, "quick")):
        outlook = Outlook(failures_per_s=rate, lost_max=0.0)
        for candidates in ((quick, fast), (fast, quick)):
            best = best_transition(candidates, global_batch_size=8, outlook=outlook)
            assert best.answer == answer, rate
    without = Outlook(failures_per_s=0.0)
    assert expected_samples_per_s(fast, global_batch_size=8, outlook=without) == 8 / 2.0


def held_by(*pipelines: tuple[int, int], gone: tuple[int, ...] = (), each: int = 1) -> Plan:
    """Pipelines of two nodes, a layer each; with so many microbatches."""
    template = PipelineTemplate((Stage(0, 1, 1), Stage(1, 2, 1)), 2)
    bound = tuple(Pipeline(template, nodes) for nodes in pipelines)
    return replace(plain_plan(1, bound, (each,) * len(bound)), gone=gone)


@pytest.mark.parametrize(
    ("plan", "share"),
    [
        (held_by((0, 1)), 1.0),
        (held_by((0, 1), (2, 3)), 0.0),
        (held_by((0, 1), (2, 3), gone=(0,)), 1 / 3),  # Node 2 alone has the first layer.
        (held_by((0, 1), (2, 3), gone=(0, 3)), 1.0),
        (held_by((0, 1), (2, 3), (4, 5), gone=(0,)), 0.0),
    ],
)
def test_a_failure_of_one_node_takes_the_last_copy_if_that_holds_a_layer_alone(
    plan: Plan, share: float
) -> None:
    """With a place empty its peer is the only one; two whole pipelines have each layer twice."""
    assert share_at_risk(plan, nodes_per_failure=1.0) == pytest.approx(share)


@pytest.mark.parametrize("nodes_per_failure", [1.1, 1.5, 3.0])
@pytest.mark.parametrize(
    "plan",
    [
        held_by((0, 1), (2, 3)),
        held_by((0, 1), (2, 3), gone=(0,)),
        held_by((0, 1), (2, 3), (4, 5)),
    ],
)
def test_failures_of_several_nodes_take_last_copies_as_often_as_is_said(
    plan: Plan, nodes_per_failure: float
) -> None:
    """Against all sets of nodes, each size as likely as it is; what sets of holders have in common
    counts twice at most."""
    nodes, holders = plan.nodes, [plan.holders(layer) for layer in range(plan.num_layers)]
    share = 0.0
    for k in range(1, len(nodes) + 1):
        at_least = (1.0 - 1.0 / nodes_per_failure) ** (k - 1)
        exactly = at_least / nodes_per_failure if k < len(nodes) else at_least
        sets = [set(lost) for lost in combinations(nodes, k)]
        struck = sum(any(lost.issuperset(ranks) for ranks in holders) for lost in sets)
        share += exactly * struck / len(sets)

    assert share * (1 - 1e-4) <= share_at_risk(plan, nodes_per_failure=nodes_per_failure)
    assert share_at_risk(plan, nodes_per_failure=nodes_per_failure) <= 1.35 * share


def test_a_copy_more_is_worth_it_where_failures_take_two_nodes() -> None:
    """Three copies against two that train 5% faster; saves come often, but not now."""
    two = replace(
        transition(downtime_s=0.0, iteration_s=2.0, answer="two"), after=held_by((0, 1), (2, 3))
    )
    three = transition(downtime_s=0.0, iteration_s=2.1, answer="three")
    three_copies = held_by((0, 1), (2, 3), (4, 5))
    three = replace(three, before=replace(three_copies, epoch=0), after=three_copies)

    def best(nodes_per_failure: float) -> str:
        outlook = Outlook(
            failures_per_s=0.001,
            between_saves=8000.0,
            lost_max=inf,
            nodes_per_failure=nodes_per_failure,
        )
        return best_transition((two, three), global_batch_size=8, outlook=outlook).answer

    assert best(1.0) == "two"
    assert best(2.0) == "three"


@pytest.mark.parametrize(
    ("unsaved_samples", "price_s", "answer"),
    [(0.0, 0.1, "around"), (1000.0, 0.1, "anew"), (1000.0, 1000.0, "around")],
)
def test_a_second_copy_is_worth_a_small_price(
    unsaved_samples: float, price_s: float, answer: str
) -> None:
    """One node of three is the only holder of a layer: a third of what is not saved is at stake."""
    around = replace(
        transition(downtime_s=0.0, iteration_s=2.0, answer="around"),
        after=held_by((0, 1), (2, 3), gone=(0,)),
    )
    anew = transition(downtime_s=price_s, iteration_s=2.02, answer="anew")
    anew = replace(anew, after=held_by((4, 1), (2, 3)))
    outlook = Outlook(
        failures_per_s=0.001, unsaved_samples=unsaved_samples, lost_max=unsaved_samples
    )

    best = best_transition((around, anew), global_batch_size=8, outlook=outlook)

    assert best.answer == answer
    at_risk = samples_at_risk(around, global_batch_size=8, outlook=outlook)
    assert at_risk == pytest.approx(unsaved_samples / 3)


@pytest.mark.parametrize("remaining_samples", [inf, 100.0, 15.0])
@pytest.mark.parametrize(("between_saves", "lost_max"), [(inf, inf), (50.0, inf), (50.0, 1e-3)])
@pytest.mark.parametrize("is_followed", [False, True])
def test_what_is_made_and_lost_until_a_failure_is_the_mean_of_many(
    *, is_followed: bool, between_saves: float, lost_max: float, remaining_samples: float
) -> None:
    """A million are drawn; 20 samples are not saved now. One node of three holds a layer alone,
    then each does; 4 samples/s are made from 2 s on, and 8 from 12 s on, until the job ends."""
    first = replace(
        transition(downtime_s=1.0, iteration_s=2.0, redone_samples=4),
        after=held_by((0, 1), (2, 3), gone=(0,)),
    )
    then = replace(transition(downtime_s=10.0, iteration_s=1.0), after=held_by((0, 1), each=2))
    priced = replace(first, then=then if is_followed else None)
    times_s = np.random.default_rng(9).exponential(10.0, 1_000_000)
    is_then = (times_s >= 12.0) & is_followed
    made = np.where(is_then, 40.0 + 8.0 * (times_s - 12.0), 4.0 * np.maximum(0.0, times_s - 2.0))
    ends_s = 2.0 + remaining_samples / 4.0
    if is_followed and remaining_samples > 40.0:
        ends_s = 12.0 + (remaining_samples - 40.0) / 8.0
    unsaved = np.minimum((20.0 + made) % between_saves, lost_max)
    unsaved[times_s >= ends_s] = 0.0
    lost = float((unsaved * np.where(is_then, 1.0, 1 / 3)).mean())
    useful = float(np.minimum(made, remaining_samples).mean())
    outlook = Outlook(
        failures_per_s=0.1,
        unsaved_samples=20.0,
        between_saves=between_saves,
        lost_max=lost_max,
        remaining_samples=remaining_samples,
    )

    at_risk = samples_at_risk(priced, global_batch_size=8, outlook=outlook)
    score = expected_samples_per_s(priced, global_batch_size=8, outlook=outlook)

    assert at_risk == pytest.approx(lost, rel=0.01)
    spent_s = float(np.minimum(times_s, ends_s).mean())
    assert score == pytest.approx((useful - lost) / spent_s, rel=0.01, abs=0.01)


def test_without_failures_what_remains_is_made_in_the_least_time() -> None:
    """A plan twice as fast takes 10 s to begin, which 40 samples at 4 a second do not pay for."""
    now = transition(downtime_s=0.0, iteration_s=2.0, answer="now")
    later = transition(downtime_s=10.0, iteration_s=1.0, answer="later")

    for remaining_samples, answer in ((40.0, "now"), (400.0, "later"), (inf, "later")):
        outlook = Outlook(failures_per_s=0.0, remaining_samples=remaining_samples)
        best = best_transition((now, later), global_batch_size=8, outlook=outlook)
        assert best.answer == answer


def test_saves_that_do_not_come_are_not_counted_on() -> None:
    """A thousand samples are not saved, and each ten should be: the disk is full."""
    alone = replace(transition(downtime_s=0.0, iteration_s=2.0), after=held_by((0, 1), each=2))
    outlook = Outlook(failures_per_s=0.1, unsaved_samples=1000.0, between_saves=10.0, lost_max=inf)

    at_risk = samples_at_risk(alone, global_batch_size=8, outlook=outlook)

    assert at_risk == pytest.approx(1000.0 + 8 / 2.0 / 0.1)


def test_a_save_that_is_late_is_still_expected() -> None:
    """Two saves in a row are missing, on a slow disk, and a failure is far away."""
    alone = replace(transition(downtime_s=0.0, iteration_s=2.0), after=held_by((0, 1), each=2))
    outlook = Outlook(failures_per_s=1e-6, unsaved_samples=20.0, between_saves=10.0, lost_max=inf)

    assert samples_at_risk(alone, global_batch_size=8, outlook=outlook) <= 2 * 20.0


def test_all_that_was_trained_is_at_risk_where_no_bound_is_told() -> None:
    """Without copies or saves; a failure cost nothing where the bound was left out."""
    alone = replace(transition(downtime_s=0.0, iteration_s=2.0), after=held_by((0, 1), each=2))
    outlook = Outlook(failures_per_s=0.1, unsaved_samples=1000.0)

    at_risk = samples_at_risk(alone, global_batch_size=8, outlook=outlook)

    assert at_risk == pytest.approx(1000.0 + 8 / 2.0 / 0.1)


@pytest.mark.parametrize("lost_max", [0.0, 8.0, inf])
def test_nothing_is_at_risk_where_no_failure_is_expected(lost_max: float) -> None:
    """Whatever one would take; the mean work until it was divided by its rate, which is 0."""
    alone = replace(transition(downtime_s=0.0, iteration_s=2.0), after=held_by((0, 1), each=2))
    outlook = Outlook(failures_per_s=0.0, unsaved_samples=1000.0, lost_max=lost_max)

    assert samples_at_risk(alone, global_batch_size=8, outlook=outlook) == 0.0


def test_a_second_holder_is_worth_getting_though_a_failure_may_come_first() -> None:
    """All is lost with the next failure, in 300 s, and nothing was trained yet: what is lost while
    layers move is what was trained meanwhile, not what is in 300 s. Then nothing is lost."""
    alone = replace(
        transition(downtime_s=0.0, iteration_s=2.0, answer="alone"), after=held_by((0, 1), each=2)
    )
    safe = replace(transition(downtime_s=250.0, iteration_s=6.0), after=held_by((0, 1), (2, 3)))
    outlook = Outlook(failures_per_s=1 / 300.0, lost_max=inf)
    moving = replace(alone, answer="moving", then=safe)

    assert best_transition((alone, moving), global_batch_size=8, outlook=outlook) is moving


def test_of_equal_transitions_the_first_is_taken() -> None:
    """Every coordinator must take the same one; a policy names its least disruptive first."""
    one, other = (transition(downtime_s=1.0, iteration_s=1.0, answer=a) for a in ("b", "a"))

    assert best_transition((one, other), global_batch_size=8, outlook=RARE) is one


def test_a_transition_that_changes_the_global_batch_cannot_be_made() -> None:
    """Whoever is left computes all of it."""
    right = transition(downtime_s=1.0, iteration_s=1.0)
    less = plain_plan(1, right.after.pipelines, (1,))

    with pytest.raises(AssertionError):
        Transition(
            before=right.before,
            after=less,
            rounds=(),
            downtime_s=1.0,
            iteration_s=1.0,
            redone_samples=0,
            policy="any",
            answer="any",
        )


@pytest.mark.parametrize("unsaved", [0.0, 3.0, 7.0, 9.0])
@pytest.mark.parametrize("to_failure", [0.0, 1.0, 7.0, 500.0])
def test_what_is_not_saved_by_the_next_failure_is_the_mean_of_many(
    unsaved: float, to_failure: float
) -> None:
    """Of 200,000 drawn failures between saves each 7; and all there is without saves."""
    times = np.random.default_rng(3).exponential(to_failure, 200_000) if to_failure else np.zeros(1)
    ages = min(unsaved, 7.0) + times
    expected = np.mean(ages % 7.0) if to_failure else min(unsaved, 7.0)

    assert mean_unsaved(unsaved, to_failure, 7.0) == pytest.approx(expected, abs=0.02)
    assert mean_unsaved(unsaved, to_failure, inf) == unsaved + to_failure
