"""Prepares and plans a job before any node starts.

`prepare` has a forked process look at model, data and profile. `plan_job` turns the result into
templates, a plan, and the time and memory that the estimator predicts for the plan.
"""

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec

from planaria.checkpoint.disk.tiers import Manifest, Start
from planaria.core.job import JobConfig
from planaria.core.plan import (
    ModelProfile,
    NodeKind,
    PipelineTemplate,
    Plan,
    one_device_profile,
    recomputing_profile,
    scaled_profile,
)
from planaria.core.specs import Prepared, PrepareRequest
from planaria.errors import (
    ConfigError,
    FeasibleValue,
    InfeasibleError,
    InsufficientError,
    Limit,
    TrainingError,
)
from planaria.estimator.time import Timeline
from planaria.job.checks import NUM_MICROBATCHES_MAX
from planaria.job.machine_kinds import plan_for_kinds
from planaria.job.predictions import prediction
from planaria.job.save_facts import changes_texts
from planaria.nodes.forkserver import ForkServer
from planaria.planner.plans import PlanCatalog, best_plan, plan_catalog
from planaria.planner.problem import Problem, batch_error
from planaria.planner.reroute.shadows import first_plan_with_shadows
from planaria.planner.templates import pipeline_templates, smallest_num_nodes
from planaria.policies.traits import TRAITS
from planaria.profiles.profile_json import decode_profile
from planaria.profiles.shipped import NOT_FOUND, profile_path
from planaria.schedule.buckets import ReductionOrder

# Modules that each rank's process needs; the fork server imports them once for all.
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

_ANEW: Final = Start()
_PREPARE = "planaria.engine.prepare:main"

# Shortest exact action of a paced job: a sleep ends up to 0.2 ms late on an idle machine.
ACTION_S_MIN = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A job, the facts on its model and data, and its plans.

    Attributes:
        catalog: plans for all numbers of nodes that may be left, or may join.
        plan: plan that the job begins with.
        predicted: predicted timeline of an iteration of that plan.
        predicted_peak_bytes: largest predicted peak memory of a device.
        resumed: checkpoint to go on from; None: the job begins anew.
    """

    config: JobConfig
    prepared: Prepared
    problem: Problem
    templates: Mapping[int, PipelineTemplate]
    catalog: PlanCatalog
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
    """A fork server that has imported the modules of the job's processes.

    Args:
        search_path: directories in which modules are looked for first.
        output: the same as in `ForkServer`.
    """
    preload: tuple[str, ...] = PRELOAD
    if config.model.kind == "hf":
        family = str(config.model.config.get("model_type", "")).replace("-", "_")
        preload += (*_PRELOAD_HF, f"transformers.models.{family}.modeling_{family}")
    if config.model.lora:
        preload += ("peft",)
    with suppress(FileNotFoundError):  # The current directory may have been removed.
        search_path = [*search_path, os.getcwd()]
    return ForkServer(preload, path=search_path, output=output)


def _check_same_layers(config: JobConfig, manifest: Manifest | None, num_layers: int) -> None:
    """Refuses a model of other layers than the save's, before a rank looks for them in vain."""
    num_saved = len(manifest.layers) if manifest else 0
    if num_saved not in (0, num_layers):
        remedy = (
            f"it has {num_layers} layers, and the checkpoint in {config.checkpoint.directory} has "
            f"{num_saved}; give the model that was saved, or begin anew in another directory"
        )
        raise ConfigError("model", config.model.target or config.model.path, remedy)


def cache_directory() -> str:
    """The directory in which tokens are kept between jobs; a job without text needs none.

    It is $XDG_CACHE_HOME/planaria. If that cannot be written, or the user has no home, it is in the
    system's temporary directory.
    """
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path = os.path.join(base, "planaria")
    # For a user who is in no password database "~" is not expanded.
    if os.path.isabs(path) and _can_write(path):
        return path
    try:
        instead = os.path.join(tempfile.gettempdir(), f"planaria-cache-{os.getuid()}")
    except FileNotFoundError:  # There is no usable temporary directory.
        return path
    is_own = _can_write(instead) and os.stat(instead).st_uid == os.getuid()
    return instead if is_own else path


def _can_write(path: str) -> bool:
    """Whether files can be made in a directory, which is made if it does not exist."""
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
    except OSError:
        return False
    return os.access(path, os.W_OK | os.X_OK)


def prepare(config: JobConfig, server: ForkServer, *, keeps_tokenizer: bool = False) -> Prepared:
    """The facts on model, data and profile of a job, found out in a process of its own.

    Args:
        keeps_tokenizer: see PrepareRequest.

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
        keeps_tokenizer=keeps_tokenizer,
    )
    answer = server.call(_PREPARE, msgspec.json.encode(request))
    prepared = msgspec.json.decode(answer, type=Prepared)
    if prepared.mistake is not None:
        raise mistake_error(prepared.mistake)
    if prepared.traceback:
        raise TrainingError(-1, prepared.traceback)
    return prepared


def mistake_error(mistake: tuple[str, str, str]) -> ConfigError:
    """The error for a user's mistake, given as (field, value as JSON, remedy)."""
    field, value, remedy = mistake
    return ConfigError(field, msgspec.json.decode(value), remedy)


def given_profile(config: JobConfig) -> ModelProfile | None:
    """The profile that the job names, scaled to the job's seconds; None if it is to be measured.

    Only its figures for one device remain, because the engine runs a stage on one device. Paced
    layers share no parameters.

    Raises:
        ConfigError: the profile cannot be read, or lacks the time of a layer on one device. Or it
            is for a paced job, and its layers take no time, or have another microbatch size.
    """
    if not config.model.profile:
        return None
    profile = read_profile(Path(config.model.profile))
    if config.model.kind == "paced":
        profile = replace(scaled_profile(profile, config.model.time_scale), tied=())
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
            f"its seconds are those of a whole microbatch, and microbatch_size is {there} "
            f"in the profile and {size} in the job; set training.microbatch_size = {there}"
        )
        raise ConfigError("model.profile", config.model.profile, remedy)
    return replace(one_device_profile(profile), device_memory_bytes=memory_bytes)


def check_given_profile(config: JobConfig) -> None:
    """Refuses a job that a given profile shows to be wrong, before torch is imported.

    Raises:
        ConfigError: it is.
    """
    given = given_profile(config)
    if given is not None:
        plan_job(config, Prepared(profile=given))


def read_profile(path: Path) -> ModelProfile:
    """The profile in a file, or the shipped profile of that name.

    Raises:
        ConfigError: the file is missing, cannot be read, or is no profile.
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
    catalog: PlanCatalog | None = None,
    start: Start = _ANEW,
    kinds: Mapping[int, NodeKind] | None = None,
    processors: int | None = None,
) -> Planned:
    """The job with its templates, its plans and their predictions.

    Args:
        plan: plan to begin with; None: the planner's best one. It may have fewer nodes than f
            needs, as that of a job that resumes.
        catalog: plans for all numbers of nodes that may be left; None: the planner's.
        start: checkpoint to go on from, and the first epoch.
        kinds: kinds of the nodes' machines; None: all nodes are processes of this one.
        processors: number of processors that all nodes share; None: those of this machine, if they
            are its processes.

    Raises:
        ConfigError: the nodes are too few or too small for the model, f or the batch.
        InsufficientError: the nodes are too few to resume with f, and the job is to stop then.
    """
    assert prepared.profile is not None
    manifest, epoch = start.manifest, start.epoch
    _check_same_layers(config, manifest, len(prepared.profile.layers))
    num_nodes = config.cluster.nodes if plan is None else len(plan.nodes)
    max_nodes = max(num_nodes, config.cluster.max_nodes)
    with worded_for_job(config):
        if processors is None:
            processors = shared_processors(config) if kinds is None else 0
        problem = problem_of(config, prepared.profile, processors=processors)
        check_size(problem, num_nodes)
        check_size(problem, max_nodes, limit=Limit.MAX_NODES)
        smaller = _smaller_problem(config, problem, num_nodes) if manifest or plan else problem
        templates = pipeline_templates(smaller, num_nodes, max_nodes=max_nodes)
        others = templates if plan is None else None
        if plan is None:
            best = best_plan(smaller, range(num_nodes), templates, epoch=epoch)
            plan = plan_for_kinds(smaller, best, kinds or {})
        catalog = catalog or plan_catalog(problem, max_nodes, templates)
        plan = replace(plan, epoch=epoch)
        if TRAITS[config.resilience.policy].has_shadows:
            plan = first_plan_with_shadows(smaller, plan, templates=others).plan
    assert len(plan.routes) == config.num_microbatches
    predicted = prediction(problem, plan)
    changes = changes_texts(manifest.job, config, prepared) if manifest else ()
    return Planned(
        config=config,
        prepared=msgspec.structs.replace(prepared, notes=(*prepared.notes, *changes)),
        problem=problem,
        templates=templates,
        catalog=catalog,
        plan=plan,
        predicted=predicted.timeline,
        predicted_peak_bytes=max(predicted.peak_bytes.values()) + config.chunk_buffers_bytes,
        resumed=manifest,
    )


def problem_of(config: JobConfig, profile: ModelProfile, *, processors: int) -> Problem:
    """What a plan of the job has to satisfy; see `Problem` for `processors`.

    Raises:
        ConfigError: the buffers for chunks of copies leave nothing of a device's memory.
    """
    recomputation = config.training.recomputation
    profile = _beside_chunks(config, profile)
    return Problem(
        profile=recomputing_profile(profile, recomputation),
        devices_per_node=config.cluster.devices_per_node,
        num_microbatches=config.num_microbatches,
        failures_tolerated=config.resilience.failures_tolerated,
        is_deterministic=config.training.deterministic,
        splits_backward=recomputation == "none" and not config.training.compile,
        chooses_recomputation=config.training.chooses_recomputation,
        reduction_order=ReductionOrder(config.resilience.reductions),
        processors=processors,
    )


def _beside_chunks(config: JobConfig, profile: ModelProfile) -> ModelProfile:
    """The profile with what the buffers for chunks of copies leave of a device's memory."""
    limit_bytes, buffers_bytes = profile.device_memory_bytes, config.chunk_buffers_bytes
    if not limit_bytes or not buffers_bytes:
        return profile
    if limit_bytes <= buffers_bytes:
        remedy = (
            f'with checkpoint.path = "device" a device gives twice as much of its {limit_bytes:_} '
            'bytes; make the buffers smaller, or take checkpoint.path = "host"'
        )
        raise ConfigError("checkpoint.buffer_bytes", config.checkpoint.buffer_bytes, remedy)
    return replace(profile, device_memory_bytes=limit_bytes - buffers_bytes)


@contextmanager
def worded_for_job(
    config: JobConfig, *, key_of: Callable[[str], str] = lambda key: key
) -> Iterator[None]:
    """Turns what the planner refuses into mistakes of a job file, or of a file that has a job.

    Args:
        key_of: function from a key of a job to the same key of the file.

    Raises:
        ConfigError: there is no plan.
    """
    size = config.training.microbatch_size

    def setting(limit: Limit, value: int) -> tuple[str, int]:
        if limit is Limit.DEVICE_MEMORY:
            value += config.chunk_buffers_bytes
        return key_of(_KEYS[limit]), value * size if limit is Limit.MICROBATCHES else value

    def text(way: FeasibleValue) -> str:
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
    text: Callable[[FeasibleValue], str],
) -> ConfigError:
    """The user's mistake, in the words of whoever asked for a plan.

    Args:
        setting: name and value under which the user has given a limit.
        text: wording of a value with which there is a plan, as the user would give it.
    """
    field, value = setting(error.limit, error.value)
    remedies = (
        f"; values that work: {', '.join(map(text, error.remedies))}" if error.remedies else ""
    )
    return ConfigError(field, value, error.why + remedies)


def shared_processors(config: JobConfig) -> int:
    """The number of processors that all nodes, which are processes of this machine, share.

    0 for a paced job, whose layers only sleep.
    """
    return 0 if config.model.kind == "paced" else len(os.sched_getaffinity(0))


def _smaller_problem(config: JobConfig, problem: Problem, num_nodes: int) -> Problem:
    """The problem with as many failures as `num_nodes` nodes tolerate, for a job that resumes.

    Raises:
        InsufficientError: they tolerate fewer than f, and the job file says to stop then.
    """
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
    """Refuses numbers of nodes and microbatches for which there is no plan, before any search.

    Args:
        limit: the quantity that gives the number of nodes, for the error.

    Raises:
        InfeasibleError: there are no nodes, more nodes than can have work, too few microbatches, or
            too many.
    """
    if num_nodes < 1:
        raise InfeasibleError(limit, num_nodes, "must be at least 1")
    num_microbatches, num_layers = problem.num_microbatches, len(problem.profile.layers)
    if num_microbatches > NUM_MICROBATCHES_MAX:
        why = f"{num_microbatches} microbatches are too many to plan for; make them larger"
        raise batch_error(problem, NUM_MICROBATCHES_MAX, why=why)
    most_nodes = _most_nodes(problem)
    # If no pipeline is possible at all, the planner says why.
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
        f"{num_nodes_max(problem)} nodes of {problem.devices_per_node} devices at work",
        FeasibleValue(Limit.MICROBATCHES, num_pipelines, or_more=True),
    )


def num_nodes_max(problem: Problem) -> int:
    """The largest number of nodes that all pipelines can keep at work; 0: they can keep none."""
    return _most_nodes(problem) * problem.num_microbatches


def _most_nodes(problem: Problem) -> int:
    """The largest number of nodes that one pipeline can keep at work; 0: it can keep none."""
    per_node = problem.devices_per_node
    counts = [
        max((count for count in layer.forward_s if count <= per_node), default=0)
        for layer in problem.profile.layers
    ]
    if not any(counts):
        return 0
    # Every device of a node needs a share of a layer, and no two nodes share a layer.
    return min(sum(counts) // per_node, len(counts) // -(-per_node // max(counts)))


def short_actions_text(planned: Planned) -> str:
    """The warning that a paced job's shortest action is too short for an exact sleep; "" if not."""
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
        text += f"; set model.time_scale = {time_scale:.3g}"
    return text
