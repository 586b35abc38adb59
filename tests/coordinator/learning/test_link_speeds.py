"""Links between machines are priced by what they carry, by class, from reports alone."""

import msgspec
import pytest

from helpers.coordinated import END, FIRST, NOW_S, iteration_report, of_type, small_rules
from helpers.fake_cluster import FakeCluster
from helpers.jobs import shaped_plan
from planaria.coordinator.frozen import replace
from planaria.coordinator.learning.link_speeds import (
    NUM_NEWEST,
    link_speeds,
    measured_prices,
    with_link_speeds,
)
from planaria.coordinator.learning.overhead import prices_of, with_start
from planaria.coordinator.state import JobState, Loss
from planaria.core.findings import Findings
from planaria.core.kinds import LossKind
from planaria.core.messages import EpochReady, IterationDone, StartEpoch
from planaria.core.persistent_map import PersistentMap
from planaria.core.plan import Link, Transfer
from planaria.core.records import Committed, Decision

LINKS = {"intra_node": Link(0.0, 1e10), "inter_node": Link(0.001, 1e9)}
RULES = small_rules()
RULES = replace(
    RULES,
    prices=replace(RULES.prices, links=LINKS),
    domains={0: "left", 1: "left", 2: "right", 3: "right"},
)
PLAN = shaped_plan((2, 2), 6)
MIB = 1 << 20


def report(rank: int, **receptions: tuple[int, float]) -> IterationDone:
    """What came to a rank: `from1=(bytes, seconds)`."""
    sums = {int(name.removeprefix("from")): sums for name, sums in receptions.items()}
    return msgspec.structs.replace(iteration_report(rank, FIRST, epoch=0), receptions=sums)


@pytest.fixture
def cluster() -> FakeCluster:
    fake = FakeCluster(RULES, PLAN)
    fake.begin()
    return fake


def after(state: JobState, *reports: IterationDone) -> JobState:
    return with_link_speeds(RULES, state, reports)


def test_pairs_of_nodes_are_in_classes_by_their_domains(cluster: FakeCluster) -> None:
    """Rank 0 hears from its own domain and from the other one, and the two are not mixed."""
    heard = report(0, from1=(8 * MIB, 0.5), from2=(2 * MIB, 1.0), from3=(2 * MIB, 1.0))

    state = after(cluster.state, heard)

    assert link_speeds(state) == {"inter_node": 16.0 * MIB, "inter_domain": 2.0 * MIB}
    prices = measured_prices(RULES, state)
    assert prices.links["inter_node"] == Link(0.001, 16.0 * MIB)
    assert prices.links["inter_domain"] == Link(0.001, 2.0 * MIB)
    assert prices.links["intra_node"] == LINKS["intra_node"]
    assert (prices.kind_between(0, 1), prices.kind_between(1, 2)) == ("inter_node", "inter_domain")


def test_without_domains_all_links_are_of_the_class_that_prices_them(cluster: FakeCluster) -> None:
    """A profile may have both; then all links are taken for the slower ones."""
    both = {**LINKS, "inter_domain": Link(0.002, 1e8)}
    for links, kind in ((LINKS, "inter_node"), (both, "inter_domain")):
        rules = replace(RULES, prices=replace(RULES.prices, links=links), domains={})
        state = with_link_speeds(rules, cluster.state, (report(0, from2=(2 * MIB, 1.0)),))

        assert link_speeds(state) == {kind: 2.0 * MIB}
        prices = measured_prices(rules, state)
        assert prices.links[prices.kind_between(0, 2)].bandwidth_bytes_per_s == 2.0 * MIB


def test_one_slow_rank_and_some_slow_iterations_change_nothing(cluster: FakeCluster) -> None:
    """A pair that stalls is not the class, and neither is an hour in which all stalled."""
    stalled = report(3, from2=(MIB, 100.0))
    state = cluster.state
    for _ in range(NUM_NEWEST):
        state = after(
            state, report(0, from1=(4 * MIB, 1.0)), report(1, from0=(4 * MIB, 1.0)), stalled
        )
    for _ in range(NUM_NEWEST // 2):
        state = after(state, stalled)

    assert link_speeds(state) == {"inter_node": 4.0 * MIB}
    assert len(state.learning.findings.links["inter_node"]) == NUM_NEWEST
    for _ in range(NUM_NEWEST):
        state = after(state, report(0, from1=(2 * MIB, 1.0)))
    assert link_speeds(state) == {"inter_node": 2.0 * MIB}


def test_without_reports_of_traffic_nothing_is_learned(cluster: FakeCluster) -> None:
    """So is every job on one machine: its prices are those of the profile, to the last bit."""
    rules = replace(RULES, domains={})
    state = with_link_speeds(rules, cluster.state, (report(0), report(1)))

    assert state is cluster.state
    assert measured_prices(rules, state) == rules.prices
    assert prices_of(rules, state).links == rules.prices.links


def test_commits_take_the_reports_and_tell_the_speeds(cluster: FakeCluster) -> None:
    """They are on record, so another coordinator goes on with them."""
    reports = [
        msgspec.structs.replace(report(rank), receptions={rank ^ 1: (MIB, 0.25)})
        for rank in PLAN.all_ranks
    ]
    assert FIRST < END
    cluster.hear(*reports)

    (committed,) = of_type(cluster.commands, Committed)
    assert committed.links == link_speeds(cluster.state) == {"inter_node": 4.0 * MIB}
    # With each rank's peers, the notice would grow with the square of the ranks.
    assert committed.reports == tuple(report(rank) for rank in PLAN.all_ranks)
    cluster.lose(3)
    cluster.restart()
    assert link_speeds(cluster.state) == {"inter_node": 4.0 * MIB}


def test_recoveries_before_a_class_was_measured_no_longer_count(cluster: FakeCluster) -> None:
    """They took ten times what the profile said; the measured rate says that already."""
    findings = Findings(transfers_s=((1.0, 10.0),))
    learning = replace(cluster.state.learning, findings=findings)
    state = replace(cluster.state, learning=learning)
    assert prices_of(RULES, state).links["inter_node"].bandwidth_bytes_per_s < 2e8

    state = after(state, report(0, from1=(10**8, 1.0)))

    assert prices_of(RULES, state).links["inter_node"] == Link(0.001, 1e8)
    known = msgspec.structs.replace(state.learning.findings, transfers_s=((1.0, 2.0),))
    state = replace(state, learning=replace(state.learning, findings=known))
    again = after(state, report(0, from1=(10**8, 1.0)))
    assert again.learning.findings.transfers_s == ((1.0, 2.0),)


def test_what_links_carried_in_a_recovery_is_not_counted_twice(cluster: FakeCluster) -> None:
    """The link carries a tenth of what the profile says, and the layers took ten times as long: the
    next transfer is priced at ten times as much, not at a hundred."""
    size = 10**9
    order = StartEpoch(
        epoch=1,
        plan=PLAN,
        addresses={},
        iteration=FIRST,
        source="",
        rounds=((Transfer(0, 0, 1, size),),),
    )
    took_s = 0.001 + size / 1e8
    ready = EpochReady(
        rank=1, epoch=1, layers_materialised=1, transfer_s=took_s, receptions={0: (size, 10.0)}
    )
    state = cluster.state
    state = replace(
        state,
        facts=replace(
            state.facts,
            loss=Loss(LossKind.LOST, (3,), "closed", NOW_S),
            decision=Decision(order=order, predicted_s=1.0),
            ready=PersistentMap({1: ready}),
        ),
        learning=replace(
            state.learning,
            findings=Findings(),
            told_s=NOW_S,
            transfer_s=LINKS["inter_node"].seconds(size),
        ),
    )

    state = with_start(RULES, state, NOW_S + took_s + 1.0)

    (moved,) = state.learning.findings.transfers_s
    assert moved == pytest.approx((took_s, took_s))
    assert prices_of(RULES, state).links["inter_node"].seconds(size) == pytest.approx(took_s)
