"""Reads a scenario file: a job on a cluster whose nodes fail, to be simulated.

A scenario is TOML with five tables: `[cluster]`, `[job]` with any key of a job file, `[failures]`,
`[costs]` and `[run]`. docs/SIMULATE.md and docs/FAILURES.md list their keys.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any, Final

from planaria.core.plan import scaled_profile
from planaria.errors import ConfigError
from planaria.job.config import (
    job_from_dict,
    record_from_table,
    tables_of_file,
    with_absolute_paths,
    with_override,
)
from planaria.job.planning import (
    check_size,
    given_profile,
    problem_of,
    read_profile,
    worded_for_job,
)
from planaria.planner.plans import lazy_plan_catalog
from planaria.planner.reroute.shadows import first_plan_with_shadows
from planaria.planner.templates import pipeline_templates
from planaria.policies.traits import TRAITS
from planaria.profiles.shipped import NOT_FOUND, profile_path
from planaria.simulator.economics.compare import ClusterScenario
from planaria.simulator.failures.failures_table import FailuresConfig, failure_source
from planaria.simulator.failures.trace_files import SHIPPED_TRACES
from planaria.systems.system import RecoveryCosts, Setting

_FILE: Final = "a scenario"
_S_PER_HOUR: Final = 3600.0
_ITERATIONS_MAX: Final = 1 << 53  # More than any simulated job trains.
_SAVE_S: Final = 1800.0  # Time between saves, unless the job says it in iterations.
_MICROBATCHES: Final = 4  # Microbatches for each device, unless the job says a batch.
# Keys of a job that are no keys of [job]: the key of the scenario that says them.
_SAID_BY: Final = {
    "cluster.nodes": "cluster.nodes",
    "cluster.devices_per_node": "cluster.devices_per_node",
    "model.profile": "cluster.profile",
    "training.iterations": "run.iterations",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioClusterTable:
    """The table `[cluster]`.

    Attributes:
        nodes: number of nodes.
        devices_per_node: number of devices of each node.
        profile: a profile's file, or the name of a shipped one.
        price_per_node_hour: dollars for each hour of each node that is there.
    """

    nodes: int = 0
    devices_per_node: int = 1
    profile: str = ""
    price_per_node_hour: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioRunTable:
    """The table `[run]`: how much is simulated.

    Attributes:
        hours: simulated hours, at most.
        iterations: number of iterations after which a run ends; 0: it ends after `hours`.
    """

    hours: float = 24.0
    iterations: int = 0


def load_scenario(path: Path, *, overrides: Sequence[str] = ()) -> ClusterScenario:
    """The scenario in a file.

    Args:
        overrides: texts TABLE.KEY=VALUE, of which later ones win.

    Raises:
        ConfigError: the file, a table, a key or a value is wrong, or the nodes are too few.
    """
    return scenario_from_tables(_scenario_tables(path, overrides), name=path.stem)


def scenario_inputs(path: Path, *, overrides: Sequence[str] = ()) -> tuple[Path, ...]:
    """The files that a scenario names: its profile, and its trace if it has one.

    Args:
        overrides: the same as in `load_scenario`, which takes the scenario.
    """
    data = _scenario_tables(path, overrides)
    named = (data.get(table, {}).get(key) for table, key, _ in _PATHS)
    return tuple(Path(name) for name in named if name and Path(name).is_file())


def _scenario_tables(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """The tables of a scenario with absolute paths; later overrides win."""
    tables = tables_of_file(path, word="scenario")
    data = with_absolute_paths(tables, directory=path.parent, paths=_PATHS)
    if isinstance(job := data.get("job"), Mapping):
        data["job"] = with_absolute_paths(job, directory=path.parent)
    for override in overrides:
        data = with_override(data, override)
    return with_absolute_paths(data, directory=Path(), paths=_PATHS)  # Those of overrides.


def _trace_path(directory: Path, name: str) -> Path | str:
    """The file of a trace; a shipped name stays as it is."""
    path = Path(directory, name)
    return name if name in SHIPPED_TRACES and not path.is_file() else path


_PATHS: Final = (("cluster", "profile", profile_path), ("failures", "path", _trace_path))


def swept_overrides(sweeps: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """The overrides of each point of a sweep, for texts KEY=VALUE,VALUE,..; all combinations.

    Raises:
        ConfigError: a text has another form.
    """
    axes = []
    for sweep in sweeps:
        key, equals, values = sweep.partition("=")
        if not (equals and key.strip() and values.strip()):
            raise ConfigError("--sweep", sweep, "must be TABLE.KEY=VALUE,VALUE,..")
        axes.append([f"{key.strip()}={value}" for value in _swept_values(values)])
    yield from product(*axes)


def _swept_values(text: str) -> list[str]:
    """The values between commas that are not within brackets, braces or quotes."""
    values, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        else:
            depth += (letter in "[{") - (letter in "]}")
        if letter == "," and not depth and not quote:
            values.append("")
        else:
            values[-1] += letter
    return [value.strip() for value in values]


_TABLES: Final = ("cluster", "job", "failures", "costs", "run")


def scenario_from_tables(
    data: Mapping[str, Any], *, name: str, directory: Path = Path()
) -> ClusterScenario:
    """The scenario of tables that are already parsed; paths are relative to `directory`.

    Raises:
        ConfigError: the same as in `load_scenario`.
    """
    for table, value in data.items():
        if table not in _TABLES:
            remedy = f"is no table of a scenario; there are {', '.join(_TABLES)}"
            raise ConfigError(table, value, remedy)
        if not isinstance(value, Mapping):
            raise ConfigError(table, value, f"must be a table: [{table}]")
    cluster = record_from_table(
        ScenarioClusterTable, data.get("cluster", {}), prefix="cluster.", file=_FILE
    )
    run = record_from_table(ScenarioRunTable, data.get("run", {}), prefix="run.", file=_FILE)
    costs = record_from_table(RecoveryCosts, data.get("costs", {}), prefix="costs.", file=_FILE)
    failures = record_from_table(
        FailuresConfig, data.get("failures", {}), prefix="failures.", file=_FILE
    )
    _check(cluster, run, costs)
    setting = _setting(data.get("job", {}), cluster, costs, directory=directory)
    return ClusterScenario(
        name=name,
        setting=setting,
        failures=failure_source(
            failures,
            num_nodes=setting.num_machines,
            devices_per_node=cluster.devices_per_node,
            directory=directory,
        ),
        price_per_node_hour=cluster.price_per_node_hour,
        horizon_s=run.hours * _S_PER_HOUR,
        iterations=run.iterations,
    )


def _check(cluster: ScenarioClusterTable, run: ScenarioRunTable, costs: RecoveryCosts) -> None:
    if cluster.nodes < 1:
        raise ConfigError("cluster.nodes", cluster.nodes, "must be at least 1")
    if not cluster.profile:
        raise ConfigError("cluster.profile", "", "name a profile, such as llama2-7b")
    if cluster.price_per_node_hour < 0.0:
        remedy = "must be at least 0"
        raise ConfigError("cluster.price_per_node_hour", cluster.price_per_node_hour, remedy)
    if not run.hours > 0.0:
        raise ConfigError("run.hours", run.hours, "must be above 0")
    if run.iterations < 0:
        raise ConfigError("run.iterations", run.iterations, "must be at least 0")
    for cost in fields(costs):
        value = getattr(costs, cost.name)
        is_speed = cost.name in ("save_bytes_per_s", "profile_factor")
        if value < 0.0 or (is_speed and not value):
            remedy = f"must be {'above' if is_speed else 'at least'} 0"
            raise ConfigError(f"costs.{cost.name}", value, remedy)


def _check_job(tables: Mapping[str, Any]) -> None:
    """Refuses keys of the job that the scenario says itself."""
    for key, said_by in _SAID_BY.items():
        table, _, name = key.partition(".")
        values = tables.get(table, {})
        if not isinstance(values, Mapping):
            raise ConfigError(f"job.{table}", values, f"must be a table: [job.{table}]")
        if name in values:
            remedy = f"a scenario says it in {said_by}; leave it out"
            raise ConfigError(f"job.{key}", values[name], remedy)


@contextmanager
def _worded_for_scenario() -> Iterator[None]:
    """Names the keys of a scenario in mistakes of its job.

    Raises:
        ConfigError: a value is wrong.
    """
    try:
        yield
    except ConfigError as error:
        raise ConfigError(error.field and _key_of(error.field), error.value, error.remedy) from None


def _key_of(key: str) -> str:
    """The key of a scenario that says what this key of a job says."""
    return _SAID_BY.get(key, f"job.{key}")


def _setting(
    tables: Mapping[str, Any],
    cluster: ScenarioClusterTable,
    costs: RecoveryCosts,
    *,
    directory: Path,
) -> Setting:
    """The job with its plans."""
    _check_job(tables)
    path = profile_path(directory, cluster.profile)
    if not path.is_file():
        remedy = f"{NOT_FOUND}; planaria profile JOB -o FILE writes one"
        raise ConfigError("cluster.profile", cluster.profile, remedy)
    size = read_profile(path).microbatch_size
    training = dict(tables.get("training", {}))
    training.setdefault("microbatch_size", size)
    num_devices = cluster.nodes * cluster.devices_per_node
    training.setdefault("global_batch_size", _MICROBATCHES * size * num_devices)
    given = {
        **tables,
        "name": "simulated",
        "model": {"kind": "paced", "profile": cluster.profile, **tables.get("model", {})},
        "training": {**training, "iterations": _ITERATIONS_MAX},
        "cluster": {
            **tables.get("cluster", {}),
            "nodes": cluster.nodes,
            "devices_per_node": cluster.devices_per_node,
        },
    }
    with _worded_for_scenario():
        job = job_from_dict(given, directory=directory)
        profile = given_profile(job)
    assert profile is not None
    profile = scaled_profile(profile, costs.profile_factor)
    with worded_for_job(job, key_of=_key_of), _worded_for_scenario():
        problem = problem_of(job, profile, processors=0)
        check_size(problem, cluster.nodes)
        templates = pipeline_templates(problem, cluster.nodes)
        catalog = lazy_plan_catalog(problem, cluster.nodes, templates)
        if TRAITS[job.resilience.policy].has_shadows:
            plan = catalog.plans[cluster.nodes]
            first_plan_with_shadows(problem, plan, templates=catalog.templates)
    costs = costs.with_ranks(num_devices)
    setting = Setting(job=job, catalog=catalog, costs=costs, model=profile.model)
    if "persist_every" in tables.get("checkpoint", {}):
        return setting
    every = max(1, round(_SAVE_S / setting.failure_free_s))
    return replace(
        setting, job=replace(job, checkpoint=replace(job.checkpoint, persist_every=every))
    )
