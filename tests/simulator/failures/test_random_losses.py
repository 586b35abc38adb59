"""Drawn failures: their rates, and what all sources keep."""

import gc
import tracemalloc
from collections import Counter
from itertools import islice, pairwise
from math import sqrt
from random import Random
from statistics import mean, median

import pytest

from planaria.simulator.failures.occurrences import (
    FailureSource,
    MergedSource,
    Occurrence,
    OccurrenceKind,
    checked_stream,
)
from planaria.simulator.failures.planned_losses import Maintenance, NoticedSource
from planaria.simulator.failures.presets import PRESETS, preset_losses
from planaria.simulator.failures.random_losses import (
    DomainLosses,
    Lemons,
    PoissonLosses,
    WeibullLosses,
)
from planaria.simulator.failures.recorded_trace import TraceSource
from planaria.simulator.failures.repair_times import NEVER, RepairTime, TimeShape
from planaria.simulator.failures.slow_spells import SlowSpells
from planaria.simulator.failures.spot_prices import PriceLosses, SpotPrices
from planaria.simulator.failures.trace_files import shipped_trace

LOST, BACK, NOTICE = OccurrenceKind.LOST, OccurrenceKind.BACK, OccurrenceKind.NOTICE
SLOWED, RESTORED = OccurrenceKind.SLOWED, OccurrenceKind.RESTORED
HOUR_S = 3600.0
HOUR = RepairTime(HOUR_S)
DOMAINS = tuple(tuple(range(first, first + 8)) for first in range(0, 40, 8))
SOURCES: dict[str, FailureSource] = {
    "poisson": PoissonLosses(0.05, HOUR),
    "never back": PoissonLosses(0.05, NEVER),
    "back at once": PoissonLosses(0.05, RepairTime(0.0, TimeShape.FIXED)),
    "bursts": PoissonLosses(0.3, HOUR, burst_nodes=4.0),
    "bursts in domains": PoissonLosses(0.3, HOUR, burst_nodes=4.0, domains=DOMAINS),
    "lemons": PoissonLosses(0.1, HOUR, burst_nodes=1.5, lemons=Lemons()),
    "weibull": WeibullLosses(0.1, HOUR),
    "domains": DomainLosses(DOMAINS, 0.05, HOUR),
    "slow": SlowSpells(0.1),
    "maintenance": Maintenance(20 * HOUR_S, HOUR_S, 600.0, nodes_at_once=3),
    "prices": PriceLosses(SpotPrices(step_s=600.0)),
}
SOURCES["noticed"] = NoticedSource(SOURCES["bursts"], 120.0)
SOURCES["noticed with maintenance"] = NoticedSource(
    MergedSource((SOURCES["poisson"], SOURCES["maintenance"])), 1200.0
)
SOURCES["all"] = MergedSource(tuple(SOURCES.values()))


def draw(source: FailureSource, num_nodes: int, *, hours: float, seed: int = 0) -> list[Occurrence]:
    horizon_s = hours * HOUR_S
    stream = source.occurrences(num_nodes, horizon_s=horizon_s, rng=Random(seed))
    return list(checked_stream(stream, num_nodes, horizon_s=horizon_s))


def node_hours(stream: list[Occurrence], num_nodes: int, *, hours: float) -> float:
    """Hours of nodes that are there."""
    total_s, before_s, there = 0.0, 0.0, num_nodes
    for one in stream:
        total_s += there * (one.at_s - before_s)
        before_s = one.at_s
        there += len(one.nodes) * {LOST: -1, BACK: 1}.get(one.kind, 0)
    return (total_s + there * (hours * HOUR_S - before_s)) / HOUR_S


def losses(stream: list[Occurrence]) -> list[Occurrence]:
    return [one for one in stream if one.kind is LOST]


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_is_in_order_and_loses_no_node_twice(name: str) -> None:
    """The same seed gives the same stream, and another seed another one."""
    source = SOURCES[name]
    for num_nodes in (40, 43):
        streams = [draw(source, num_nodes, hours=60, seed=seed) for seed in range(3)]

        for seed, stream in enumerate(streams):
            assert stream, f"seed {seed}"
            assert stream == draw(source, num_nodes, hours=60, seed=seed), f"seed {seed}"
        assert streams[0] != streams[1]


@pytest.mark.parametrize(
    "name", [name for name in SOURCES if "domains" not in name and name != "all"]
)
def test_a_cluster_may_have_one_node(name: str) -> None:
    """Bursts, lemons and groups are drawn from what there is."""
    for seed in range(5):
        draw(SOURCES[name], 1, hours=200, seed=seed)


@pytest.mark.parametrize(
    ("name", "per_node_hour"),
    [
        *(("poisson", 0.05), ("never back", 0.05), ("back at once", 0.05), ("bursts", 0.3)),
        *(("bursts in domains", 0.3), ("lemons", 0.1)),
    ],
)
def test_the_rate_is_that_of_a_node_which_is_there(name: str, per_node_hour: float) -> None:
    """Within five standard deviations, which bursts of mean size m make larger."""
    for seed in range(2):
        stream = draw(SOURCES[name], 40, hours=300, seed=seed)
        expected = per_node_hour * node_hours(stream, 40, hours=300)
        number = sum(len(one.nodes) for one in losses(stream))
        of_bursts = mean(len(one.nodes) ** 2 for one in losses(stream)) / mean(
            len(one.nodes) for one in losses(stream)
        )
        deviation = sqrt(expected * of_bursts)
        # Lemons are away more often, so there are fewer of them than their share.
        allowed = 5 * deviation + (0.15 * expected if name == "lemons" else 0)
        assert number == pytest.approx(expected, abs=allowed), f"seed {seed}"


def test_weibulls_rate_holds_from_the_start() -> None:
    """With shape 0.7 new nodes fail more often; at time 0 the nodes are not new."""
    at_once = RepairTime(0.0, TimeShape.FIXED)
    for shape in (0.7, 1.0, 2.0):
        source = WeibullLosses(0.01, at_once, shape)
        stream = losses(draw(source, 2000, hours=50))
        early = sum(one.at_s < 10 * HOUR_S for one in stream)

        assert early == pytest.approx(200, abs=5 * sqrt(200) * 1.5), shape
        assert len(stream) == pytest.approx(1000, abs=5 * sqrt(1000) * 1.5), shape


def test_weibulls_losses_of_a_node_follow_each_other() -> None:
    """Below shape 1 a node that came back is lost soon again more often than by chance."""
    at_once = RepairTime(0.0, TimeShape.FIXED)

    def share_within_an_hour(shape: float) -> float:
        times: dict[int, list[float]] = {}
        for one in losses(draw(WeibullLosses(0.02, at_once, shape), 200, hours=1000)):
            times.setdefault(one.nodes[0], []).append(one.at_s)
        gaps = [b - a for of_node in times.values() for a, b in pairwise(of_node)]
        return mean(gap < HOUR_S for gap in gaps)

    assert share_within_an_hour(1.0) == pytest.approx(0.02, abs=0.01)
    assert share_within_an_hour(0.7) > 0.06


def test_bursts_have_their_mean_size_and_stay_in_a_domain() -> None:
    """A domain ends a burst early; the rate of losses stays."""
    never_far = RepairTime(1.0)
    free = losses(draw(PoissonLosses(0.3, never_far, burst_nodes=3.0), 400, hours=30))
    stream = losses(
        draw(PoissonLosses(0.3, never_far, burst_nodes=3.0, domains=DOMAINS), 40, hours=300)
    )

    assert mean(len(one.nodes) for one in free) == pytest.approx(3.0, abs=0.3)
    assert max(len(one.nodes) for one in free) > 8
    assert all(len({node // 8 for node in one.nodes}) == 1 for one in stream)
    assert max(len(one.nodes) for one in stream) == 8


def test_bursts_have_their_mean_size_while_many_nodes_are_away() -> None:
    """Members that were away already were left out: 7.95 times an hour 1.83 nodes were lost, where
    the trace of spot machines has 6.95 times and 2.11 nodes."""
    stream = draw(preset_losses("spot-p3", devices_per_node=1), 32, hours=600)
    lost = losses(stream)
    nodes_there = node_hours(stream, 32, hours=600) / 600
    rate = PRESETS["spot-p3"].per_node_hour * nodes_there

    assert mean(len(one.nodes) for one in lost) == pytest.approx(167 / 79, rel=0.05)
    assert sum(len(one.nodes) for one in lost) / 600 == pytest.approx(rate, rel=0.05)


def test_a_domain_is_lost_and_comes_back_as_one() -> None:
    """A switch or a rack takes all its nodes; 0.05 per hour while it is there."""
    stream = draw(DomainLosses(DOMAINS, 0.05, HOUR), 40, hours=2000)

    assert {one.nodes for one in stream} == set(DOMAINS)
    expected = 0.05 * 5 * 2000 * 20 / 21  # It is away for 1 of 21 hours.
    assert len(losses(stream)) == pytest.approx(expected, abs=5 * sqrt(expected))


def test_lemons_have_their_share_of_the_losses() -> None:
    """40 of 400 nodes have 41%, and other ones for another seed."""
    source = PoissonLosses(0.02, RepairTime(1.0), lemons=Lemons(0.1, 0.41))
    most = []
    for seed in range(2):
        number = Counter(
            node for one in losses(draw(source, 400, hours=500, seed=seed)) for node in one.nodes
        )
        lemons = number.most_common(40)
        most.append({node for node, _ in lemons})
        share = sum(count for _, count in lemons) / number.total()
        assert share == pytest.approx(0.41, abs=0.03), f"seed {seed}"

    assert most[0] != most[1]


def test_repair_times_have_their_mean() -> None:
    """Half of the lognormal ones last less than a sixth of the mean."""
    rng = Random(0)

    def draws(shape: TimeShape) -> list[float]:
        return [RepairTime(600.0, shape).draw_s(rng) for _ in range(40_000)]

    assert set(draws(TimeShape.FIXED)) == {600.0}
    assert mean(draws(TimeShape.EXPONENTIAL)) == pytest.approx(600, rel=0.03)
    assert mean(draws(TimeShape.LOGNORMAL)) == pytest.approx(600, rel=0.15)
    assert median(draws(TimeShape.LOGNORMAL)) == pytest.approx(600 * 0.86 / 5.55, rel=0.05)
    assert NEVER.draw_s(rng) == float("inf")


def test_every_loss_is_announced_in_time() -> None:
    """The notice comes notice_s earlier, or when a node that was away is back."""
    stream = draw(SOURCES["noticed"], 40, hours=100)
    notices: dict[int, Occurrence] = {}
    back_s: dict[int, float] = {}
    num_late = 0
    for one in stream:
        for node in one.nodes:
            match one.kind:
                case OccurrenceKind.NOTICE:
                    notices[node] = one
                case OccurrenceKind.BACK:
                    back_s[node] = one.at_s
                case OccurrenceKind.LOST:
                    notice = notices.pop(node)
                    assert notice.deadline_s == one.at_s
                    assert notice.at_s == max(one.at_s - 120, back_s.get(node, 0.0))
                    num_late += notice.at_s > one.at_s - 120

    assert num_late > 0
    assert not notices


def test_notices_change_no_loss() -> None:
    """They are added, and nothing is drawn for them."""
    with_notice = [one for one in draw(SOURCES["noticed"], 40, hours=100) if one.kind is not NOTICE]

    assert with_notice == draw(SOURCES["bursts"], 40, hours=100)


def test_maintenance_keeps_the_notice_that_it_gives() -> None:
    """It is announced once, by its own time."""
    source = NoticedSource(Maintenance(20 * HOUR_S, HOUR_S, 600.0), 120.0)
    notices = [one for one in draw(source, 5, hours=100) if one.kind is NOTICE and one.at_s]

    assert len(notices) == pytest.approx(25, abs=5)
    assert {round(one.deadline_s or 0) - round(one.at_s) for one in notices} <= {599, 600, 601}


def test_maintenance_takes_every_node_once_a_round() -> None:
    """In groups, at equal times."""
    source = Maintenance(20 * HOUR_S, HOUR_S, nodes_at_once=3)
    stream = [one for one in losses(draw(source, 10, hours=100)) if one.at_s]
    times_s = [one.at_s for one in stream]

    groups = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (9,)]
    first = groups.index(stream[0].nodes)
    assert [one.nodes for one in stream[:4]] == [*groups[first:], *groups[:first]]
    assert [b - a for a, b in pairwise(times_s)] == pytest.approx([5 * HOUR_S] * (len(times_s) - 1))


@pytest.mark.parametrize(("every_days", "hours"), [(30, 24), (7, 24), (7, 168), (7, 240)])
def test_a_short_run_has_its_share_of_a_round_of_maintenance(every_days: int, hours: float) -> None:
    """A run of a day had 0.035 nodes taken out where each of 30 is once in 30 days."""
    source = Maintenance(every_days * 24 * HOUR_S, 6 * HOUR_S)
    streams = [losses(draw(source, 30, hours=hours, seed=seed)) for seed in range(200)]
    begun = [len([one for one in stream if one.at_s]) for stream in streams]
    away = [sum(len(one.nodes) for one in stream if not one.at_s) for stream in streams]

    assert mean(begun) == pytest.approx(30 * hours / 24 / every_days, rel=0.03, abs=0.1)
    assert mean(away) == pytest.approx(30 * 6 / 24 / every_days, abs=0.1)  # From the start.


def test_slow_spells_have_their_rate_and_speeds() -> None:
    """A spell is at 0.3 to 0.9 of the normal speed; half are over in 5 minutes."""
    stream = draw(SlowSpells(0.1, RepairTime(1800.0, TimeShape.LOGNORMAL)), 100, hours=100)
    speeds = [one.speed for one in stream if one.kind is SLOWED]

    # A node is slow for 0.5 of 10.5 hours.
    assert len(speeds) == pytest.approx(100 * 100 * 0.1 / 1.05, abs=5 * sqrt(1000))
    assert min(speeds) == pytest.approx(0.3, abs=0.02)
    assert max(speeds) == pytest.approx(0.9, abs=0.02)


def test_prices_return_to_their_mean() -> None:
    """Each step has a price of each zone; the zones do not move together."""
    prices = list(SpotPrices(2.0, step_s=600.0).prices(2000 * HOUR_S, Random(0)))
    by_zone = [[price for _, zone, price in prices if zone == index] for index in range(3)]

    assert [zone for _, zone, _ in prices[:4]] == [0, 1, 2, 0]
    assert [at_s for at_s, _, _ in prices[:4]] == [0, 0, 0, 600]
    for of_zone in by_zone:
        assert median(of_zone) == pytest.approx(2.0, rel=0.1)
        assert mean(price > 3 for price in of_zone) == pytest.approx(0.123, abs=0.05)


def test_a_price_takes_nodes_of_one_zone() -> None:
    """With one bid for all they go together, and are back together."""
    stream = draw(PriceLosses(SpotPrices(step_s=600.0), bid_sigma=0.0), 9, hours=500)

    assert {one.nodes for one in stream} == {(0, 3, 6), (1, 4, 7), (2, 5, 8)}
    share = 1 - node_hours(stream, 9, hours=500) / 9 / 500
    assert share == pytest.approx(0.123, abs=0.08)


@pytest.mark.parametrize(
    ("name", "per_1000_node_days"),
    [
        *(("opt", 15.6), ("llama3", 3.79), ("minder", 2.0), ("gemini", 15.0)),
        *(("odyssey", 2400.0), ("infinitehbd", 4.18), ("spot-p3", 14_690.0)),
    ],
)
def test_presets_have_the_published_rates(name: str, per_1000_node_days: float) -> None:
    """And each says where its rate is printed."""
    preset = PRESETS[name]

    assert preset.per_node_hour * 24_000 == pytest.approx(per_1000_node_days, rel=0.005)
    assert preset.published
    assert preset.source
    one_device = preset_losses(name, devices_per_node=1)
    eight = preset_losses(name, devices_per_node=8)
    assert one_device.per_node_hour == preset.per_node_hour
    assert eight.per_node_hour == preset.per_node_hour * (8 if name == "odyssey" else 1)
    assert losses(draw(eight, 200, hours=240 if per_1000_node_days < 100 else 5))


def test_every_preset_is_tested() -> None:
    """A new one comes with its number."""
    assert set(PRESETS) == {
        *("opt", "llama3", "minder", "gemini", "odyssey", "infinitehbd", "spot-p3")
    }


def test_a_long_run_of_a_large_cluster_has_its_rate() -> None:
    """1,000 nodes for 100 days at 4 losses per 1,000 node-days."""
    stream = draw(PoissonLosses(4 / 1000 / 24, RepairTime(600.0)), 1000, hours=2400)

    assert len(losses(stream)) == pytest.approx(400, abs=100)


@pytest.mark.parametrize("name", ["noticed with maintenance", "slow", "weibull", "trace"])
def test_memory_does_not_grow_with_the_length_of_a_run(name: str) -> None:
    """A source keeps what it knows of each node, and no occurrence that was read."""
    trace = TraceSource(shipped_trace("bamboo-p3"))
    source = {**SOURCES, "trace": trace}[name]

    def live_bytes(num_read: int) -> int:
        stream = source.occurrences(12, horizon_s=1e9, rng=Random(0))
        tracemalloc.start()
        assert sum(1 for _ in islice(stream, num_read)) == num_read
        gc.collect()
        live, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return live

    gc.freeze()  # What other tests left need not be looked through.
    live_bytes(10)  # What is made once, such as caches.
    assert live_bytes(1500) < 1.5 * live_bytes(150) + 4000


@pytest.mark.parametrize(
    "source",
    [
        PoissonLosses(0.0, HOUR),
        WeibullLosses(0.0, HOUR),
        DomainLosses((), 0.0, HOUR),
        SlowSpells(0.0),
    ],
)
def test_a_rate_of_zero_gives_nothing(source: FailureSource) -> None:
    """A run without failures is a scenario, too."""
    assert draw(source, 5, hours=1000) == []


def test_a_burst_takes_nodes_that_never_fail_alone() -> None:
    """A share of 0 leaves a lemon no weight; a burst of all nodes must have it all the same."""
    source = PoissonLosses(0.1, RepairTime(1.0), burst_nodes=4.0, lemons=Lemons(0.25, 0.0))
    stream = source.occurrences(4, horizon_s=1e6, rng=Random(1))

    assert max(len(one.nodes) for one in stream if one.kind is OccurrenceKind.LOST) == 4
