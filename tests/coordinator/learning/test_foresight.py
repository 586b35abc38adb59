"""How long a recovery is expected to take, from when its loss is noticed."""

import pytest

from coordinator.learning.test_profile_correction import LAYER_S, NUM_LAYERS, sharing, training
from helpers.coordinated import NOW_S, of_type
from helpers.fake_cluster import FakeCluster
from planaria.coordinator.frozen import replace
from planaria.coordinator.learning import foresight
from planaria.coordinator.learning.foresight import (
    ANSWERING_S,
    DECIDE_S,
    GO_ON_LEAST,
    expected_recovery,
    with_likely,
    with_recovery,
)
from planaria.coordinator.learning.overhead import NUM_NEWEST
from planaria.coordinator.state import Loss
from planaria.core.kinds import LossKind
from planaria.core.records import Decided

PRICE_S = 0.2
# Five layers in a stage, whose backward takes two thirds of what they take.
LONGEST_S = LAYER_S * NUM_LAYERS / 2 * 2 / 3
LOSS = Loss(LossKind.LOST, (1,), "closed", NOW_S)


def expected(cluster: FakeCluster, price_s: float = PRICE_S) -> foresight.DurationRange:
    return expected_recovery(cluster.rules, cluster.state, price_s)


def test_ranks_stop_for_as_long_as_their_longest_action_at_most() -> None:
    """A loss strikes at any moment: half of it is likely, and nothing of it the least."""
    least_s, likely_s, most_s = expected(training())

    assert least_s == pytest.approx(ANSWERING_S[0] + DECIDE_S[0] + GO_ON_LEAST * PRICE_S)
    assert likely_s == pytest.approx(LONGEST_S / 2 + ANSWERING_S[1] + DECIDE_S[1] + PRICE_S)
    assert most_s > LONGEST_S + PRICE_S
    assert least_s < likely_s < most_s


def test_where_ranks_share_processors_their_actions_last_longer() -> None:
    """Four ranks on one processor end theirs four times as late; on four they share nothing."""
    own, one, four = (expected(training(catalog=sharing(number))) for number in (0, 1, 4))

    assert own == four
    assert one.likely_s - own.likely_s == pytest.approx(3 * LONGEST_S / 2)
    assert one.least_s == own.least_s


def test_an_answer_that_takes_longer_ends_later() -> None:
    """By its price at least, in each figure of the range."""
    quick, slow = (expected(training(), price_s) for price_s in (0.0, 1.0))

    assert slow.likely_s == pytest.approx(quick.likely_s + 1.0)
    assert slow.least_s == pytest.approx(quick.least_s + GO_ON_LEAST)
    assert slow.most_s > quick.most_s + 1.0


def test_what_recoveries_took_widens_the_range_of_the_next() -> None:
    """A tenth, and ten times, of what was likely; what is older than the newest is forgotten."""
    cluster = training()
    before = expected(cluster)
    state = cluster.state
    for number, took in enumerate((0.1, 10.0, *(1.0,) * NUM_NEWEST)):
        state = with_likely(state, before.likely_s)
        state = replace(state, facts=replace(state.facts, loss=LOSS))
        state = with_recovery(state, NOW_S + took * before.likely_s)
        if number == 1:
            least_s, likely_s, most_s = expected_recovery(cluster.rules, state, PRICE_S)
            assert least_s == pytest.approx(0.1 * before.likely_s)
            assert most_s == pytest.approx(10.0 * before.likely_s)
            assert likely_s == before.likely_s

    assert expected_recovery(cluster.rules, state, PRICE_S) == before
    assert len(state.learning.findings.recoveries_s) == NUM_NEWEST


def test_a_recovery_that_another_coordinator_foresaw_teaches_nothing() -> None:
    """Nobody knows what it was expected to take."""
    cluster = training()
    state = replace(
        cluster.state,
        facts=replace(cluster.state.facts, loss=LOSS),
    )

    assert with_recovery(state, NOW_S + 1.0) == state


def test_a_decision_tells_its_recovery_from_when_the_loss_was_noticed() -> None:
    """Both ends of the range, and the moment from which it counts; and it is learned from."""
    cluster = training((2, 2, 2))
    cluster.lose(5)
    (decided,) = of_type(cluster.commands, Decided)

    assert decided.noticed_s == NOW_S
    assert decided.predicted_recovery_s > decided.predicted_downtime_s
    assert decided.predicted_recovery_s_min < decided.predicted_recovery_s
    assert decided.predicted_recovery_s < decided.predicted_recovery_s_max
    ((likely_s, took_s),) = cluster.state.learning.findings.recoveries_s
    assert (likely_s, took_s) == (decided.predicted_recovery_s, 0.0)
