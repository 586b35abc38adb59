"""Wasted time by tier, of planaria and of every system that is compared."""

from dataclasses import replace
from typing import Final

import pytest

from helpers.simulated_clusters import BACK, LOST, PLANARIA, outcome, small
from helpers.system_runs import two_deep
from planaria.simulator.failures.occurrences import Occurrence
from planaria.systems.bamboo import Bamboo
from planaria.systems.gemini import Gemini
from planaria.systems.highfreq import HighFreq
from planaria.systems.odyssey import Duration, Odyssey
from planaria.systems.oobleck import Oobleck
from planaria.systems.recycle import ReCycle
from planaria.systems.remote_saves import serialise_s
from planaria.systems.replicas import Replicas
from planaria.systems.restart import Restart
from planaria.systems.strawman import Strawman
from planaria.systems.system import RecoveryCosts, System
from planaria.systems.varuna import Varuna

COSTS: Final = RecoveryCosts(startup_s=0.0, node_start_s=0.0)
ORACLE: Final = Odyssey(duration=Duration.ORACLE)
FROM_PEERS: Final = (PLANARIA, Oobleck(), Bamboo(), ReCycle(), Odyssey(), ORACLE, Replicas())
FROM_SAVES: Final = (Restart(), Varuna(), Strawman(), HighFreq())


def named(system: System) -> str:
    return system.name


@pytest.mark.parametrize(
    ("system", "tier"),
    [
        *((system, "live") for system in FROM_PEERS),
        (Gemini(), "memory"),
        *((system, "disk") for system in FROM_SAVES),
    ],
    ids=lambda of: of if isinstance(of, str) else named(of),
)
def test_a_lost_node_costs_what_the_system_keeps_its_state_for(system: System, tier: str) -> None:
    """One node of eight is lost and is back: all that is redone and waited for is in one tier, and
    nodes that come back recover from none, unless all begin anew for them."""
    of = two_deep(microbatches=16, memory_bytes=200_000_000_000)
    result = outcome(
        replace(of, horizon_s=5 * 3600.0),
        Occurrence(12_000.0, LOST, (3,)),  # Strawman has saved by then.
        Occurrence(12_600.0, BACK, (3,)),
        costs=COSTS,
        system=system,
    )
    begins_anew = isinstance(system, Restart | Varuna)

    assert [name for name, of in result.wasted.items() if of["wasted_s"]] == [tier]
    assert result.wasted[tier]["recoveries"] == (2.0 if begins_anew else 1.0)
    assert result.wasted[tier]["redo_s"] == pytest.approx(result.ledger["redo"])
    assert result.wasted[tier]["transfer_s"] == pytest.approx(result.ledger["transfer"])


@pytest.mark.parametrize("system", [*FROM_PEERS[1:], Gemini(), *FROM_SAVES], ids=named)
def test_a_loss_while_a_job_starts_is_no_recovery(system: System) -> None:
    """There is no state yet that anybody could keep."""
    costs = replace(COSTS, startup_s=300.0)
    events = (Occurrence(100.0, LOST, (3,)), Occurrence(150.0, BACK, (3,)))
    of = two_deep(microbatches=16, memory_bytes=200_000_000_000)
    result = outcome(replace(of, horizon_s=1000.0), *events, costs=costs, system=system)

    assert sum(tier["recoveries"] for tier in result.wasted.values()) == 0.0


def test_gemini_wastes_what_its_equation_says() -> None:
    """Equation 1 without the detection and the start of processes: the iteration in flight and the
    one whose copy was under way, two copies to serialise, and the state of a node to fetch."""
    of = two_deep()
    each_s, num_done = of.setting.failure_free_s, 100
    at_s = (num_done + 0.5) * each_s
    events = (Occurrence(at_s, LOST, (5,)), Occurrence(at_s, BACK, (5,)))
    result = outcome(of, *events, costs=COSTS, system=Gemini())

    memory = result.wasted["memory"]
    assert memory["redo_s"] == pytest.approx(1.5 * each_s)
    fetch_s = memory["transfer_s"] - 2 * serialise_s(of.setting)
    assert 0.0 < fetch_s < 60.0
    assert memory["wasted_s"] == memory["redo_s"] + memory["transfer_s"]


def test_gemini_without_a_whole_group_wastes_what_is_not_saved() -> None:
    """Nodes 2 and 3 keep each other's copies. Without a save the job begins from its start."""
    of = two_deep()
    result = outcome(of, Occurrence(1000.0, LOST, (2, 3)), costs=COSTS, system=Gemini())

    assert result.wasted["start"]["recoveries"] == 1.0
    assert result.wasted["start"]["redo_s"] == pytest.approx(1000.0)
    assert result.wasted["memory"]["recoveries"] == 0.0


def test_planaria_wastes_less_with_copies_in_memory_than_with_saves() -> None:
    """Both nodes that hold a layer are lost, and other nodes have copies of it, or none has."""
    keys = {"resilience.policy": "reinstantiate", "checkpoint.persist_every": 50}
    holders = small(**keys).setting.catalog.plans[6].holders(0)
    wasted = {}
    for tier, copies in (("memory", 2), ("disk", 0)):
        of = small(**keys, **{"checkpoint.copies": copies})
        result = outcome(of, Occurrence(1000.0, LOST, holders), Occurrence(1500.0, BACK, holders))
        assert result.wasted[tier]["recoveries"] == 1.0
        assert result.wasted["live"]["recoveries"] == 0.0
        assert result.wasted[tier]["redo_s"] == pytest.approx(result.ledger["redo"])
        wasted[tier] = result.wasted[tier]["wasted_s"]

    assert 0.0 < wasted["memory"] < 0.3 * wasted["disk"]


@pytest.mark.parametrize("system", [PLANARIA, Oobleck(), Restart(), Varuna()], ids=named)
def test_the_time_to_load_a_save_is_a_transfer(system: System) -> None:
    """All nodes are lost and come back. Slow storage makes a job wait for layers, not start
    longer."""
    nodes = tuple(range(8))
    of = two_deep(**{"checkpoint.persist_every": 20})
    results = []
    for speed in (1e9, 1e8):
        costs = RecoveryCosts(startup_s=0.0, node_start_s=0.0, save_bytes_per_s=speed)
        events = (Occurrence(2000.0, LOST, nodes), Occurrence(2100.0, BACK, nodes))
        results.append(outcome(of, *events, costs=costs, system=system))
    fast, slow = results

    assert fast.ledger["restart"] == pytest.approx(slow.ledger["restart"], abs=0.1)
    assert fast.wasted["disk"]["transfer_s"] > 1.0
    assert slow.wasted["disk"]["transfer_s"] == pytest.approx(
        10.0 * fast.wasted["disk"]["transfer_s"], rel=0.01
    )
