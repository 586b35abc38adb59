"""From a job to its plan: what a process looks up before any node starts, and what follows.

`starting_point` checks the checkpoint directory; `prepare` has a forked process look at model,
data and profile; `plan_job` turns that into templates, a plan, and the time and memory that the
estimator predicts for it.
"""

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec

from planaria.checkpoint.disk.tiers import Manifest, Tier, newest_complete
from planaria.core.job import JobConfig
from planaria.core.plan import ModelProfile, PipelineTemplate, Plan, on_one_device, scaled
from planaria.core.profile_json import decode_profile
from planaria.core.specs import Prepared, PrepareRequest
from planaria.errors import (
    CheckpointError,
    ConfigError,
    InfeasibleError,
    InsufficientError,
    LateError,
    Limit,
    TrainingError,
    Way,
)
from planaria.estimator.time import Timeline
from planaria.job.checks import NUM_MICROBATCHES_MAX
from planaria.job.predictions import prediction
from planaria.nodes.forkserver import ForkServer
from planaria.planner.plans import EveryPlan, best_plan, every_plan
from planaria.planner.problem import Problem, batch_error
from planaria.planner.reroute.shadows import shadowed_start
from planaria.planner.templates import pipeline_templates, smallest_num_nodes
from planaria.profiles.shipped import NOT_FOUND, profile_path
from planaria.schedule.buckets import ReductionOrder

# What a rank's process would import at its start, imported once per job instead.
PRELOAD = (
    "scipy.optimize",
    "scipy.sparse.csgraph",
    "torch",
    "torch._dynamo",
    "torch.optim",
    "torch.utils.checkpoint",
    "planaria.engine.process",
    "planaria.nodes.agent",
    "planaria.nodes.head.leader",
    "planaria.schedule.warm",
)
_PRELOAD_HF = ("transformers.models.auto.modeling_auto", "planaria.models.hf_layers")

_PREPARE = "planaria.engine.prepare:main"

ACTION_S_MIN = 0.005  # Of a paced job; a sleep ends up to 0.2 ms late on an idle machine.


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A job, what is known of its model and data, and its first plan."""

    config: JobConfig
    prepared: Prepared
    problem: Problem
    templates: Mapping[int, PipelineTemplate]
    every: EveryPlan
    plan: Plan
    predicted: Timeline
    predicted_peak_bytes: int
    resumed: Manifest | None = None


def fork_server(
    config: JobConfig,
    *,
    search_path: Sequence[str] = (),
    output: Callable[[str], None] | None = None,
) -> ForkServer:
    """A fork server with what the job's processes import; `output` as `ForkServer` has it."""
    preload: tuple[str, ...] = PRELOAD
    if config.model.kind == "hf":
        family = str(config.model.config.get("model_type", "")).replace("-", "_")
        preload += (*_PRELOAD_HF, f"transformers.models.{family}.modeling_{family}")
    with suppress(FileNotFoundError):  # Somebody has removed it.
        search_path = [*search_path, os.getcwd()]
    return ForkServer(preload, path=search_path, output=output)


def fingerprint(config: JobConfig) -> dict[str, Any]:
    """What must not change between the run that saved and the one that resumes."""
    training = config.training
    return {
        "name": config.name,
        "model": {"kind": config.model.kind, "config": dict(config.model.config)},
        "data": asdict(config.data) | {"path": Path(config.data.path).name},
        "global_batch_size": training.global_batch_size,
        "microbatch_size": training.microbatch_size,
        "optimizer": dict(training.optimizer),
        "dtype": training.dtype,
        "seed": training.seed,
    }


def starting_point(config: JobConfig, tier: Tier, *, resume: bool) -> Manifest | None:
    """The checkpoint to go on from, None for a fresh start; a minute's work is not lost later.

    Raises:
        ConfigError: there is none, it is another job's, or a fresh start would mix with it; or a
            newer version cannot be read now, whose saves of later on would be taken for newer.
        LateError: the disk or store does not answer.
    """
    directory = config.checkpoint.directory
    try:
        versions = tier.versions()
        manifest = newest_complete(versions)
    except LateError:
        raise
    except CheckpointError as error:
        remedy = f"{error}; start again when it can be read"
        raise ConfigError("checkpoint.directory", directory, remedy) from error
    if not resume:
        if manifest is not None:
            raise ConfigError(
                "checkpoint.directory",
                directory,
                f"it holds a checkpoint of iteration {manifest.iteration}: go on from it with "
                "--resume, or name another directory",
            )
        return None
    if manifest is None:
        why = f" ({versions[0].name}: {versions[0].reason})" if versions else ""
        remedy = f"it holds no complete checkpoint to resume from{why}; leave --resume out"
        raise ConfigError("checkpoint.directory", directory, remedy)
    _check_same_job(config, manifest)
    return manifest


def skipped_texts(tier: Tier, manifest: Manifest) -> tuple[str, ...]:
    """Which versions are newer than the checkpoint to go on from, and why they cannot be used."""
    newest = (manifest.iteration, manifest.epoch)
    return tuple(
        f"{tier.storage.where(version.name)} is not complete, and not used ({version.reason}): "
        f"going on from {tier.where(*newest)}"
        for version in tier.versions()
        if (version.iteration, version.epoch) > newest
    )


def _check_same_job(config: JobConfig, manifest: Manifest) -> None:
    directory = config.checkpoint.directory
    for key, value in msgspec.to_builtins(fingerprint(config)).items():
        if key != "name" and manifest.job.get(key) != value:
            remedy = f"the checkpoint in {directory} was saved with {manifest.job.get(key)!r}"
            raise ConfigError(key, value, remedy)
    if manifest.iteration >= config.training.iterations:
        raise ConfigError(
            "training.iterations",
            config.training.iterations,
            f"the checkpoint has {manifest.iteration} already; ask for more to train on",
        )


def cache_directory() -> str:
    """Where tokens are kept between jobs: $XDG_CACHE_HOME/planaria; in the system's temporary
    directory where that cannot be written, or there is no home. A job without text needs none."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path = os.path.join(base, "planaria")
    if os.path.isabs(path) and _can_write(path):  # A user whom no table knows has "~" for a home.
        return path
    try:
        instead = os.path.join(tempfile.gettempdir(), f"planaria-cache-{os.getuid()}")
    except FileNotFoundError:  # There is none in which anything could be made.
        return path
    is_own = _can_write(instead) and os.stat(instead).st_uid == os.getuid()
    return instead if is_own else path


def _can_write(path: str) -> bool:
    """Whether it is a directory, made if need be, in which files can be made."""
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
    except OSError:
        return False
    return os.access(path, os.W_OK | os.X_OK)


def prepare(config: JobConfig, server: ForkServer) -> Prepared:
    """What model, data and profile of a job are, found out in a process of its own.

    Raises:
        ConfigError: the job is wrong.
        TrainingError: the user's code raised.
        InsufficientError: the process was killed.
    """
    request = PrepareRequest(
        job=config,
        cache_directory=cache_directory(),
        profile=given_profile(config),
        processors=shared_processors(config),
    )
    answer = server.call(_PREPARE, msgspec.json.encode(request))
    prepared = msgspec.json.decode(answer, type=Prepared)
    if prepared.mistake is not None:
        raise mistake_error(prepared.mistake)
    if prepared.traceback:
        raise TrainingError(-1, prepared.traceback)
    return prepared


def mistake_error(mistake: tuple[str, str, str]) -> ConfigError:
    """The user's mistake in a message; its value is JSON."""
    field, value, remedy = mistake
    return ConfigError(field, msgspec.json.decode(value), remedy)


def given_profile(config: JobConfig) -> ModelProfile | None:
    """The profile that the job names, in the job's own seconds; None if it is to be measured.

    Only its figures for one device remain: the engine runs a stage on one device. Paced layers
    share no parameters.

    Raises:
        ConfigError: it cannot be read, a layer of it does not run on one device, or the layers of a
            paced job take no time there, or the time of other microbatches.
    """
    if not config.model.profile:
        return None
    profile = read_profile(Path(config.model.profile))
    if config.model.kind == "paced":
        profile = replace(scaled(profile, config.model.time_scale), tied=())
    memory_bytes = config.cluster.device_memory_bytes or profile.device_memory_bytes
    if any(1 not in layer.forward_s for layer in profile.layers):
        remedy = 'every layer needs its time on one device: a key "1" in forward_s'
        raise ConfigError("model.profile", config.model.profile, remedy)
    if config.model.kind == "paced" and not any(layer.forward_s[1] for layer in profile.layers):
        remedy = "its layers take no time at all on one device, so there is nothing to pace"
        raise ConfigError("model.profile", config.model.profile, remedy)
    size = config.training.microbatch_size
    if config.model.kind == "paced" and size != profile.microbatch_size:
        there = profile.microbatch_size
        remedy = (
            "its seconds are of whole microbatches, and microbatch_size is "
            f"{there} there and {size} here; training.microbatch_size = {there} would do"
        )
        raise ConfigError("model.profile", config.model.profile, remedy)
    return replace(on_one_device(profile), device_memory_bytes=memory_bytes)


def read_profile(path: Path) -> ModelProfile:
    """The profile in a file, or the shipped one of that name.

    Raises:
        ConfigError: it is missing or is no profile.
    """
    try:
        data = profile_path(Path(), str(path)).read_bytes()
    except FileNotFoundError as error:
        raise ConfigError("profile", str(path), NOT_FOUND) from error
    except OSError as error:
        raise ConfigError("profile", str(path), f"cannot be read: {error.strerror}") from error
    return decode_profile(data, source=str(path))


_KEYS: Final = {
    Limit.NODES: "cluster.nodes",
    Limit.MAX_NODES: "cluster.max_nodes",
    Limit.KINDS: "nodes of different kinds",
    Limit.DEVICES_PER_NODE: "cluster.devices_per_node",
    Limit.DEVICE_MEMORY: "cluster.device_memory_bytes",
    Limit.FAILURES: "resilience.failures_tolerated",
    Limit.MICROBATCHES: "training.global_batch_size",
}


def plan_job(
    config: JobConfig,
    prepared: Prepared,
    *,
    plan: Plan | None = None,
    every: EveryPlan | None = None,
    manifest: Manifest | None = None,
) -> Planned:
    """The job's templates, its plans (the planner's unless some are given) and what they predict.

    Raises:
        ConfigError: the nodes are too few or too small for the model, f or the batch.
        InsufficientError: they are too few for f to resume, and the job is to stop then.
    """
    assert prepared.profile is not None
    epoch = manifest.epoch + 1 if manifest else 0
    num_nodes = config.cluster.nodes if plan is None else len(plan.nodes)
    max_nodes = max(num_nodes, config.cluster.max_nodes)
    with worded_for_job(config):
        problem = Problem(
            profile=prepared.profile,
            devices_per_node=config.cluster.devices_per_node,
            num_microbatches=config.num_microbatches,
            failures_tolerated=config.resilience.failures_tolerated,
            is_deterministic=config.training.deterministic,
            splits_backward=not config.training.activation_checkpointing,
            reduction_order=ReductionOrder(config.resilience.reductions),
            processors=shared_processors(config),
        )
        check_size(problem, num_nodes)
        check_size(problem, max_nodes, limit=Limit.MAX_NODES)
        smaller = _smaller_problem(config, problem, num_nodes) if manifest else problem
        templates = pipeline_templates(smaller, num_nodes, max_nodes=max_nodes)
        if plan is None:
            plan = best_plan(smaller, range(num_nodes), templates, epoch=epoch)
        every = every_plan(problem, max_nodes, templates) if every is None else every
        plan = replace(plan, epoch=epoch)
        if config.resilience.policy == "absorb":
            plan = shadowed_start(problem, plan).plan
    assert len(plan.routes) == config.num_microbatches
    predicted = prediction(problem, plan)
    return Planned(
        config=config,
        prepared=prepared,
        problem=problem,
        templates=templates,
        every=every,
        plan=plan,
        predicted=predicted.timeline,
        predicted_peak_bytes=max(predicted.peak_bytes.values()),
        resumed=manifest,
    )


@contextmanager
def worded_for_job(config: JobConfig) -> Iterator[None]:
    """Turns what the planner refuses into mistakes of a job file.

    Raises:
        ConfigError: there is no plan.
    """
    size = config.training.microbatch_size

    def setting(limit: Limit, value: int) -> tuple[str, int]:
        return _KEYS[limit], value * size if limit is Limit.MICROBATCHES else value

    def text(way: Way) -> str:
        key, value = setting(way.limit, way.value)
        more = " or more" if way.or_more else ""
        noun = "microbatch" if way.value == 1 else "microbatches"
        batch = f" ({way.value} {noun} of {size})" if way.limit is Limit.MICROBATCHES else ""
        return f"{key} = {value}{more}{batch}"

    try:
        yield
    except InfeasibleError as error:
        raise infeasible_mistake(error, setting=setting, text=text) from error


def infeasible_mistake(
    error: InfeasibleError,
    *,
    setting: Callable[[Limit, int], tuple[str, int]],
    text: Callable[[Way], str],
) -> ConfigError:
    """The user's mistake, in the words of whoever asked for a plan.

    Args:
        setting: name and value under which the user has given a limit.
        text: how the user would give a value with which there is a plan.
    """
    field, value = setting(error.limit, error.value)
    ways = f"; would do: {', '.join(map(text, error.ways))}" if error.ways else ""
    return ConfigError(field, value, error.why + ways)


def shared_processors(config: JobConfig) -> int:
    """The processors that the layers of all nodes share, for these are processes of this machine;
    0 of a paced job, whose layers sleep."""
    return 0 if config.model.kind == "paced" else len(os.sched_getaffinity(0))


def _smaller_problem(config: JobConfig, problem: Problem, num_nodes: int) -> Problem:
    """The problem with the failures that so many nodes tolerate, if a resumed job may go on so."""
    n0 = smallest_num_nodes(problem)
    wanted = (problem.failures_tolerated + 1) * n0
    if not n0 <= num_nodes < wanted:
        return problem
    if config.resilience.when_below == "stop":
        raise InsufficientError(
            f"{num_nodes} node{'s are' if num_nodes > 1 else ' is'} fewer than "
            f"(f + 1) * n0 = {wanted}, and "
            'resilience.when_below = "stop"; start more nodes'
        )
    return replace(problem, failures_tolerated=num_nodes // n0 - 1)


def check_size(problem: Problem, num_nodes: int, *, limit: Limit = Limit.NODES) -> None:
    """Refuses at once what no plan could use, however long one searched.

    Args:
        limit: what says so many nodes.

    Raises:
        InfeasibleError: there are no nodes, more than could have work, no microbatches or too many.
    """
    if num_nodes < 1:
        raise InfeasibleError(limit, num_nodes, "must be at least 1")
    num_microbatches, num_layers = problem.num_microbatches, len(problem.profile.layers)
    if num_microbatches > NUM_MICROBATCHES_MAX:
        why = f"{num_microbatches} microbatches are too many to plan for; make them larger"
        raise batch_error(problem, NUM_MICROBATCHES_MAX, why=why)
    most_nodes = _most_nodes(problem)
    # Where a pipeline cannot be, the planner says why.
    num_pipelines = -(-num_nodes // most_nodes) if most_nodes else 1
    if num_microbatches >= num_pipelines:
        return
    num_pipelines = max(num_pipelines, min(problem.failures_tolerated + 1, num_nodes))
    if num_microbatches <= problem.failures_tolerated:
        why = f"{num_nodes} nodes work in {num_pipelines} pipelines or more, each of which needs a "
        raise batch_error(problem, num_pipelines, why=why + "microbatch")
    raise InfeasibleError(
        limit,
        num_nodes,
        f"{num_layers} layers x {num_microbatches} microbatches keep at most "
        f"{most_nodes * num_microbatches} nodes of {problem.devices_per_node} devices at work",
        Way(Limit.MICROBATCHES, num_pipelines, or_more=True),
    )


def _most_nodes(problem: Problem) -> int:
    """No pipeline keeps more nodes at work; 0 if none keeps a node at work."""
    per_node = problem.devices_per_node
    counts = [
        max((count for count in layer.forward_s if count <= per_node), default=0)
        for layer in problem.profile.layers
    ]
    if not any(counts):
        return 0
    # Of each node every device has a share of a layer, and no two nodes share one.
    return min(sum(counts) // per_node, len(counts) // -(-per_node // max(counts)))


def short_actions_text(planned: Planned) -> str:
    """What to say of a paced job whose shortest action is lost in this machine's own times; ""."""
    model, profile = planned.config.model, planned.prepared.profile
    assert profile is not None
    if model.kind != "paced":
        return ""
    shortest_s = min(
        sum(layer.forward_s[1] for layer in profile.layers[stage.first_layer : stage.end_layer])
        for pipeline in planned.plan.pipelines
        for stage in pipeline.template.stages
    )
    if shortest_s >= ACTION_S_MIN:
        return ""
    text = f"the shortest forward takes {1000 * shortest_s:.3g} ms, and below "
    text += f"{1000 * ACTION_S_MIN:.0f} ms a sleep is not exact"
    if shortest_s > 0:
        time_scale = model.time_scale * ACTION_S_MIN / shortest_s
        text += f"; model.time_scale = {time_scale:.3g} would do"
    return text
