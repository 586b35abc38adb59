"""A small cluster to be simulated, and what happens to it."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from random import Random
from typing import Any, Final

import pytest

from planaria.job.scenario_file import scenario_from_tables
from planaria.observe.ledger import Category
from planaria.simulator.economics.compare import ClusterScenario, JobOutcome, play
from planaria.simulator.economics.planaria_system import PlanariaSystem
from planaria.simulator.failures.occurrences import Occurrence, OccurrenceKind
from planaria.systems.system import RecoveryCosts, System

PLANARIA: Final = PlanariaSystem()
_DEFAULTS: Final = {"resilience.policy": "reinstantiate", "resilience.failures_tolerated": 1}
LOST, BACK, NOTICE = OccurrenceKind.LOST, OccurrenceKind.BACK, OccurrenceKind.NOTICE


class Occurrences:
    """A source of given occurrences."""

    def __init__(self, *occurrences: Occurrence) -> None:
        self._occurrences = occurrences

    def occurrences(self, num_nodes: int, *, horizon_s: float, rng: Random) -> Iterator[Occurrence]:
        """See FailureSource."""
        del num_nodes, horizon_s, rng
        yield from self._occurrences


class Wild:
    """A source that draws losses, returns, notices and slow nodes, close together or far apart."""

    def occurrences(self, num_nodes: int, *, horizon_s: float, rng: Random) -> Iterator[Occurrence]:
        """See FailureSource."""
        there, lost, doomed, now_s = set(range(num_nodes)), set[int](), dict[int, float](), 0.0
        while True:
            now_s += rng.choice((0.0, 0.01, 0.05, 1.0, 30.0, 300.0, 3000.0)) * rng.random()
            for node, at_s in sorted(doomed.items(), key=lambda one: one[1]):
                if at_s <= min(now_s, horizon_s):
                    del doomed[node]
                    there.discard(node)
                    lost.add(node)
                    yield Occurrence(at_s, LOST, (node,))
            if now_s > horizon_s:
                return
            free, draw = sorted(there.difference(doomed)), rng.random()
            if draw < 0.45 and free:
                nodes = tuple(sorted(rng.sample(free, min(len(free), rng.choice((1, 1, 1, 2, 3))))))
                there.difference_update(nodes)
                lost.update(nodes)
                yield Occurrence(now_s, LOST, nodes)
            elif draw < 0.85 and lost:
                nodes = tuple(sorted(rng.sample(sorted(lost), min(len(lost), rng.choice((1, 2))))))
                lost.difference_update(nodes)
                there.update(nodes)
                yield Occurrence(now_s, BACK, nodes)
            elif draw < 0.93 and free:
                node = rng.choice(free)
                doomed[node] = now_s + rng.choice((1.0, 30.0, 120.0))
                yield Occurrence(now_s, NOTICE, (node,), deadline_s=doomed[node])
            elif free:
                kind, speed = rng.choice(
                    ((OccurrenceKind.SLOWED, 0.5), (OccurrenceKind.RESTORED, 1.0))
                )
                yield Occurrence(now_s, kind, (rng.choice(free),), speed=speed)


@cache
def small(**job: Any) -> ClusterScenario:
    """Llama 2 7B on six nodes to which nothing happens; `job` has keys of a job file."""
    tables: dict[str, dict[str, object]] = {
        "training": {"deterministic": False},
        "checkpoint": {"persist_every": 50},
    }
    for key, value in {**_DEFAULTS, **job}.items():
        table, _, name = key.partition(".")
        tables.setdefault(table, {})[name] = value
    if tables["resilience"]["policy"] == "absorb":  # Nodes need room for their neighbours' layers.
        tables["cluster"] = {"device_memory_bytes": 200_000_000_000}
    cluster = {"nodes": 6, "profile": "llama2-7b", "price_per_node_hour": 2.0}
    return scenario_from_tables(
        {"cluster": cluster, "job": tables, "run": {"hours": 1.0}}, name="small"
    )


def outcome(
    of: ClusterScenario,
    *occurrences: Occurrence,
    costs: RecoveryCosts | None = None,
    system: System = PLANARIA,
) -> JobOutcome:
    """What a job trains to which these things happen."""
    setting = replace(of.setting, costs=costs or RecoveryCosts(startup_s=0.0))
    return play(replace(of, failures=Occurrences(*occurrences), setting=setting), system, 0)


def check_wasted(result: JobOutcome) -> None:
    """Asserts that all that was redone, and all that the job waited for layers, is in one tier, and
    that iterations are undone, and jobs started again, by states that are older than live ones."""
    tiers = result.wasted
    for key, category in (("redo_s", Category.REDO), ("transfer_s", Category.TRANSFER)):
        seconds = [of[key] for of in tiers.values()]
        assert min(seconds) >= 0.0
        assert sum(seconds) == pytest.approx(result.ledger[category])
    num_older = sum(tiers[tier]["recoveries"] for tier in ("memory", "disk", "start"))
    assert num_older or not (result.num_redone or result.num_restarts)


def conserve_seconds_and_samples(of: ClusterScenario, result: JobOutcome) -> None:
    """Asserts that the ledger sums to the wall time and wasted time to its part of the ledger, that
    no sample counts twice, and that the job is no faster than its devices compute without bubbles.
    It may be faster than its first plan."""
    check_wasted(result)
    parts = dict(result.ledger)
    assert parts.pop("wall") == pytest.approx(of.horizon_s)
    assert sum(parts.values()) == pytest.approx(of.horizon_s)
    assert min(parts.values()) >= 0.0
    batch = of.setting.job.training.global_batch_size
    assert result.samples % batch == 0
    problem = of.setting.catalog.problem
    device_s = problem.num_microbatches * sum(problem.profile.layer_s)
    num_devices = of.setting.num_machines * problem.devices_per_node
    assert result.samples_per_s <= batch * num_devices / device_s * (1 + 1e-9)
    assert all(before[0] <= after[0] for before, after in pairwise(result.curve))
