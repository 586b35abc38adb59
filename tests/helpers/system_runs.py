"""Runs of compared systems on a small cluster."""

from dataclasses import replace
from functools import cache
from random import Random
from typing import Any, Final

from helpers.simulated_clusters import Wild, conserve_seconds_and_samples
from planaria.job.scenario_file import scenario_from_tables
from planaria.simulator.economics.compare import ClusterScenario, JobOutcome, play
from planaria.systems.system import RecoveryCosts, Setting, System, SystemRun

FREE_START: Final = RecoveryCosts(startup_s=0.0, node_start_s=0.0)


@cache
def two_deep(
    nodes: int = 8, microbatches: int = 0, memory_bytes: int = 90_000_000_000, **job: Any
) -> ClusterScenario:
    """Llama 2 7B, to which nothing happens, on nodes two of which can hold it."""
    tables: dict[str, dict[str, object]] = {
        "training": {"deterministic": False},
        "checkpoint": {"persist_every": 100},
        "resilience": {"failures_tolerated": 1},
        "cluster": {"device_memory_bytes": memory_bytes},
    }
    if microbatches:
        tables["training"]["global_batch_size"] = microbatches
    for key, value in job.items():
        table, _, name = key.partition(".")
        tables.setdefault(table, {})[name] = value
    cluster = {"nodes": nodes, "profile": "llama2-7b"}
    return scenario_from_tables(
        {"cluster": cluster, "job": tables, "run": {"hours": 1.0}}, name="two_deep"
    )


def setting_with(costs: RecoveryCosts = FREE_START, **job: Any) -> Setting:
    """The setting of such a job with other costs."""
    return replace(two_deep(**job).setting, costs=costs)


def free_iteration_s(system: System, setting: Setting) -> float:
    """Seconds of an iteration while nothing happens, over a day."""
    run = system.begin(replace(setting, costs=FREE_START))
    run.run_until(86_400.0)
    return run.account.now_s / run.account.num_iterations


def committed_at(run: SystemRun, now_s: float) -> int:
    """Number of iterations that count at a time."""
    run.run_until(now_s)
    return run.account.num_iterations


def check_conserves(system: System, seed: int, *, hours: float = 3.0, **job: Any) -> JobOutcome:
    """Plays a job to which anything happens, and asserts that it conserves seconds and samples,
    trains no more than without failures, and that the same seed gives the same result."""
    rng = Random(seed)
    costs = RecoveryCosts(
        startup_s=rng.choice((0.0, 20.0)),
        node_start_s=rng.choice((0.0, 10.0)),
        save_bytes_per_s=rng.choice((1e8, 1e9)),
    )
    of = two_deep(**job)
    of = replace(
        of,
        failures=Wild(),
        setting=replace(of.setting, costs=costs),
        horizon_s=hours * 3600.0,
    )
    result = play(of, system, seed)

    conserve_seconds_and_samples(of, result)
    calm = system.begin(replace(of.setting, costs=FREE_START))
    calm.run_until(of.horizon_s)
    assert result.samples <= calm.account.samples + of.setting.job.training.global_batch_size
    assert play(of, system, seed) == result, seed
    return result
