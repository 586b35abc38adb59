"""The table [failures] of a scenario: what it builds, and what it refuses."""

from collections import Counter
from dataclasses import fields, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from planaria.errors import ConfigError
from planaria.job.scenario_file import load_scenario, scenario_from_tables
from planaria.profiles.shipped import shipped_path
from planaria.simulator.failures.failures_table import FailuresConfig, failure_source
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
from planaria.simulator.failures.recorded_trace import TraceSource, Window
from planaria.simulator.failures.repair_times import NEVER, RepairTime, TimeShape
from planaria.simulator.failures.slow_spells import SlowSpells
from planaria.simulator.failures.spot_prices import PriceLosses, SpotPrices
from planaria.simulator.failures.trace_files import SHIPPED_TRACES, shipped_trace

ROOT = Path(__file__).resolve().parents[3]
HOUR_S = 3600.0
SOME = RepairTime(600.0)


def build(directory: Path = Path(), *, num_nodes: int = 4, **keys: Any) -> FailureSource:
    return failure_source(
        FailuresConfig(**keys), num_nodes=num_nodes, devices_per_node=8, directory=directory
    )


@pytest.mark.parametrize(
    ("keys", "source"),
    [
        ({}, PoissonLosses(0.0, SOME)),
        ({"per_node_hour": 0.1, "repair": "never"}, PoissonLosses(0.1, NEVER)),
        (
            {"per_node_hour": 0.1, "repair_s": 60.0, "repair": "fixed", "lemon_nodes": 0.2},
            PoissonLosses(0.1, RepairTime(60.0, TimeShape.FIXED), lemons=Lemons(0.2, 0.41)),
        ),
        (
            {"kind": "bursts", "per_node_hour": 0.1, "burst_nodes": 3.0, "domain_nodes": 3},
            PoissonLosses(0.1, SOME, burst_nodes=3.0, domains=((0, 1, 2), (3,))),
        ),
        (
            {"kind": "weibull", "per_node_hour": 0.1, "weibull_shape": 0.5},
            WeibullLosses(0.1, SOME, 0.5),
        ),
        ({"kind": "preset", "preset": "llama3"}, preset_losses("llama3", devices_per_node=8)),
        (
            {"kind": "preset", "preset": "odyssey", "per_node_hour": 0.5, "repair_s": 9.0},
            replace(
                preset_losses("odyssey", devices_per_node=8),
                per_node_hour=0.5,
                repair=RepairTime(9.0),
            ),
        ),
        ({"kind": "prices", "bid": 2.0}, PriceLosses(SpotPrices(), 2.0)),
        ({"kind": "trace", "path": "bamboo-p3"}, TraceSource(shipped_trace("bamboo-p3"))),
        (
            {"kind": "trace", "path": "infinitehbd", "window": "start", "trace_nodes": 500},
            TraceSource(replace(shipped_trace("infinitehbd"), num_places=500), Window.START),
        ),
    ],
)
def test_each_kind_builds_its_source(keys: dict[str, Any], source: FailureSource) -> None:
    """Keys that are left out have the defaults of the page."""
    built = build(**keys)
    assert isinstance(built, MergedSource)
    losses, *others = built.sources
    assert isinstance(losses, MergedSource)
    assert losses.sources[0] == source
    for other in (losses.sources[1], *others):
        assert list(other.occurrences(4, horizon_s=1e9, rng=Random(0))) == []


def test_domains_have_a_repair_time_beside_a_trace() -> None:
    """The trace says when its own nodes are back."""
    source = build(
        kind="trace", path="bamboo-p3", domain_nodes=2, per_domain_hour=0.01, repair_s=60.0
    )

    assert isinstance(source, MergedSource)
    losses = source.sources[0]
    assert isinstance(losses, MergedSource)
    assert losses.sources[1] == DomainLosses(((0, 1), (2, 3)), 0.01, RepairTime(60.0))


def test_what_is_asked_for_besides_the_kind_is_merged_with_it() -> None:
    """Losses of domains are announced like others; maintenance has its own notice."""
    source = build(
        per_node_hour=0.1,
        domains=((0, 1), (2, 3)),
        per_domain_hour=0.01,
        notice_s=120.0,
        slow_per_node_hour=0.2,
        maintenance_every_s=36_000.0,
    )
    losses = MergedSource((PoissonLosses(0.1, SOME), DomainLosses(((0, 1), (2, 3)), 0.01, SOME)))

    assert source == MergedSource(
        (
            NoticedSource(losses, 120.0),
            SlowSpells(0.2, RepairTime(1800.0, TimeShape.LOGNORMAL), 0.3),
            Maintenance(36_000.0, 3600.0, 600.0, 1),
        )
    )
    stream = source.occurrences(4, horizon_s=200 * HOUR_S, rng=Random(0))
    kinds = {one.kind for one in checked_stream(stream, 4, horizon_s=200 * HOUR_S)}
    assert kinds == set(OccurrenceKind)


@pytest.mark.parametrize(
    "keys",
    [
        {"notice_s": 120.0},
        {"slow_per_node_hour": 0.1},
        {"maintenance_every_s": 36_000.0},
        {"per_domain_hour": 0.001, "domain_nodes": 2},
    ],
)
@pytest.mark.parametrize("base", [{"per_node_hour": 0.02}, {"kind": "trace", "path": "bamboo-p3"}])
def test_a_sweep_of_one_key_leaves_other_losses_as_they_were(
    keys: dict[str, Any], base: dict[str, Any]
) -> None:
    """Systems are compared under the same failures; so are the points of a sweep."""

    def times_of_losses(**more: Any) -> set[float]:
        source = build(num_nodes=32, **base, **more)
        stream = source.occurrences(32, horizon_s=10 * HOUR_S, rng=Random(0))
        return {one.at_s for one in stream if one.kind is OccurrenceKind.LOST}

    before = times_of_losses()
    hidden = before - times_of_losses(**keys)  # Of nodes that are away anyway.
    assert len(hidden) < 0.3 * len(before)


@pytest.mark.parametrize(
    "keys",
    [
        {"domain_nodes": 2, "per_domain_hour": 0.5},
        {"kind": "bursts", "per_node_hour": 0.5, "burst_nodes": 3.0, "domain_nodes": 4},
        {"domains": ((6, 9), (7, 8)), "per_domain_hour": 0.5, "per_node_hour": 0.1},
    ],
)
def test_standby_nodes_are_in_domains_too(keys: dict[str, Any]) -> None:
    """Domains of the nodes at work alone never lost one, and naming one was refused."""
    cluster = {"nodes": 8, "profile": "gpt2"}
    tables = {"cluster": cluster, "job": {"cluster": {"standby": 4}}, "failures": keys}
    source = scenario_from_tables(tables, name="standby").failures
    stream = source.occurrences(12, horizon_s=100 * HOUR_S, rng=Random(0))
    lost = Counter(
        node for item in stream if item.kind is OccurrenceKind.LOST for node in item.nodes
    )

    least, most = min(lost[node] for node in range(12)), max(lost.values())
    assert least > 0
    assert "domains" in keys or most < 2 * least


def test_a_trace_gets_the_notice_that_it_does_not_hold() -> None:
    """Every loss of Bamboo's trace but those at time 0 is announced 120 s earlier."""
    source = build(kind="trace", path="bamboo-p3", window="start", notice_s=120.0, num_nodes=32)
    stream: list[Occurrence] = list(
        checked_stream(
            source.occurrences(32, horizon_s=50_000, rng=Random(0)), 32, horizon_s=50_000
        )
    )
    announced = sum(len(one.nodes) for one in stream if one.kind is OccurrenceKind.NOTICE)

    assert announced == 167
    assert {
        (one.deadline_s or 0) - one.at_s for one in stream if one.kind is OccurrenceKind.NOTICE
    } <= {60.0, 120.0}


def test_a_path_is_relative_to_the_scenario(tmp_path: Path) -> None:
    """As paths of job files are."""
    (tmp_path / "mine.csv").write_text("time_s,event,nodes\n10,lost,3\n")

    source = build(tmp_path, kind="trace", path="mine.csv")

    stream = list(source.occurrences(4, horizon_s=10.0, rng=Random(0)))
    assert [one.kind for one in stream] == [OccurrenceKind.LOST]


def test_a_scenario_takes_its_failures_from_the_table(tmp_path: Path) -> None:
    """Lists of TOML become domains; a mistake is worded as the table's."""
    path = tmp_path / "mine.toml"
    text = '[cluster]\nnodes = 4\nprofile = "gpt2"\n[failures]\nkind = "bursts"\n'
    path.write_text(text + "per_node_hour = 0.1\ndomains = [[0, 1], [2, 3]]\n")

    assert load_scenario(path).failures == build(
        kind="bursts", per_node_hour=0.1, domains=((0, 1), (2, 3))
    )
    with pytest.raises(ConfigError, match=r"failures\.domains = 2: the cluster has nodes 0 to 1"):
        load_scenario(path, overrides=["cluster.nodes=2", "job.resilience.failures_tolerated=0"])
    with pytest.raises(ConfigError, match=r"failures\.notice = 5: .*did you mean notice_s"):
        load_scenario(path, overrides=["failures.notice=5"])


def test_paths_in_settings_of_a_scenario_are_relative_to_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of a job file are; the scenario's own stay relative to it."""
    scenarios, here = tmp_path / "scenarios", tmp_path / "here"
    scenarios.mkdir()
    here.mkdir()
    (here / "mine.json").write_bytes(shipped_path("gpt2").read_bytes())
    (scenarios / "beside.csv").write_text("time_s,event,nodes\n10,lost,3\n")
    path = scenarios / "mine.toml"
    text = '[cluster]\nnodes = 4\nprofile = "none.json"\n'
    path.write_text(text + '[failures]\nkind = "trace"\npath = "beside.csv"\n')
    monkeypatch.chdir(here)

    scenario = load_scenario(path, overrides=["cluster.profile=mine.json"])

    assert scenario.setting.job.model.profile == str(here / "mine.json")
    with pytest.raises(ConfigError, match=r"cluster\.profile = .*/scenarios/none\.json"):
        load_scenario(path)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"path": "x"}, "failures.path = 'x': has no meaning for kind poisson"),
        ({"kind": "trace", "path": "x", "per_node_hour": 1.0}, "has no meaning for kind trace"),
        ({"kind": "trace"}, "failures.path = '': must name a trace"),
        ({"kind": "trace", "path": "x"}, "there is no such file; shipped traces are"),
        ({"kind": "preset", "preset": "llama"}, "failures.preset = 'llama': must be one of opt,"),
        ({"kind": "preset", "preset": "opt", "repair": "fixed"}, "needs failures.repair_s"),
        ({"repair": "never", "repair_s": 9.0}, "has no meaning for failures.repair never"),
        ({"per_node_hour": -1.0}, "failures.per_node_hour = -1.0: must be 0 or more"),
        ({"per_node_hour": 1e300}, "failures.per_node_hour = 1e+300: must be at most 3600"),
        ({"slow_speed": 0.0}, "failures.slow_speed = 0.0: must be more than 0"),
        (
            {"kind": "weibull", "weibull_shape": 0.005},
            "failures.weibull_shape = 0.005: must be 0.1 or more",
        ),
        ({"slow_speed": 2.0}, "failures.slow_speed = 2.0: must be at most 0.9"),
        ({"lemon_nodes": 1.0}, "failures.lemon_nodes = 1.0: must be a share"),
        ({"kind": "bursts", "burst_nodes": 0.5}, "failures.burst_nodes = 0.5: must be 1 or more"),
        ({"maintenance_every_s": 60.0}, "must be more than failures.maintenance_s, 3600"),
        ({"domains": ((0,),), "domain_nodes": 2}, "leave one of them out"),
        ({"per_domain_hour": 1.0}, "needs failures.domains or failures.domain_nodes"),
        ({"domains": ((0, 4),)}, "failures.domains = 4: the cluster has nodes 0 to 3"),
        ({"domains": ((0, 1), (1,))}, "failures.domains = 1: this node is in two domains"),
        ({"domains": ((0, 1), ())}, "has an empty domain"),
    ],
)
def test_a_mistake_is_named_with_what_would_do(keys: dict[str, Any], message: str) -> None:
    """The key, its value and the remedy."""
    with pytest.raises(ConfigError) as caught:
        build(**keys)

    assert message in str(caught.value)


def test_the_page_lists_every_key_preset_and_trace() -> None:
    """A key that nobody can look up is not there."""
    page = (ROOT / "docs" / "FAILURES.md").read_text(encoding="utf-8")

    for key in fields(FailuresConfig):
        assert f"| `{key.name}` |" in page
        assert key.metadata["about"] in page
    for name, preset in PRESETS.items():
        assert f"| `{name}` | {preset.published} |" in page
        assert preset.source in page
    for name in SHIPPED_TRACES:
        assert f"`{name}`" in page


def test_a_trace_of_too_few_nodes_cannot_be_replayed_from_its_start() -> None:
    """The file says so before anything is planned."""
    with pytest.raises(ConfigError, match="has 30 nodes at once and the cluster has 31"):
        build(kind="trace", path="oobleck-5m", window="start", num_nodes=31)
