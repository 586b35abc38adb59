"""From a job to its plan: what a process looks up before any node starts, and what follows.

`prepare` has a forked process look at model, data and profile; `plan_job` turns that into
templates, a plan, and the time and memory that the estimator predicts for it.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from planaria.checkpoint.tiers import Manifest
from planaria.core.job import JobConfig
from planaria.core.messages import Prepared, PrepareRequest
from planaria.core.plan import ModelProfile, PipelineTemplate, Plan, scaled
from planaria.core.profile_json import decode_profile
from planaria.errors import ConfigError, TrainingError
from planaria.estimator.memory import peak_bytes
from planaria.estimator.time import Timeline, predicted_timeline
from planaria.nodes.forkserver import ForkServer
from planaria.planner.plans import best_plan, pipeline_microbatches
from planaria.planner.templates import Problem, pipeline_templates
from planaria.schedule.lower import lowered

# What a rank's process would import at its start, imported once per job instead.
PRELOAD = (
    "torch",
    "torch._dynamo",
    "torch.optim",
    "torch.utils.checkpoint",
    "planaria.engine.worker",
    "planaria.nodes.agent",
)
_PRELOAD_HF = ("transformers.models.auto.modeling_auto", "planaria.engine.hf_layers")

_PREPARE = "planaria.engine.prepare:main"


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A job, what is known of its model and data, and its first plan."""

    config: JobConfig
    prepared: Prepared
    problem: Problem
    templates: Mapping[int, PipelineTemplate]
    plan: Plan
    predicted: Timeline
    predicted_peak_bytes: int
    resumed: Manifest | None = None


def fork_server(config: JobConfig, *, search_path: Sequence[str] = ()) -> ForkServer:
    """A fork server with what the job's processes import."""
    preload: tuple[str, ...] = PRELOAD
    if config.model.kind == "hf":
        family = str(config.model.config.get("model_type", "")).replace("-", "_")
        preload += (*_PRELOAD_HF, f"transformers.models.{family}.modeling_{family}")
    return ForkServer(preload, path=[*search_path, os.getcwd()])


def cache_directory() -> str:
    """Where tokens are kept between jobs: $XDG_CACHE_HOME/planaria."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(base, "planaria")


def prepare(config: JobConfig, server: ForkServer) -> Prepared:
    """What model, data and profile of a job are, found out in a process of its own.

    Raises:
        ConfigError: the job is wrong.
        TrainingError: the user's code raised.
    """
    request = PrepareRequest(
        job=config, cache_directory=cache_directory(), profile=given_profile(config)
    )
    answer = server.call(_PREPARE, msgspec.json.encode(request))
    prepared = msgspec.json.decode(answer, type=Prepared)
    if prepared.mistake is not None:
        raise ConfigError(*prepared.mistake)
    if prepared.traceback:
        raise TrainingError(-1, prepared.traceback)
    return prepared


def given_profile(config: JobConfig) -> ModelProfile | None:
    """The profile that the job names, in the job's own seconds; None if it is to be measured."""
    if not config.model.profile:
        return None
    profile = read_profile(Path(config.model.profile))
    scale = config.model.time_scale if config.model.kind == "paced" else 1.0
    memory_bytes = config.cluster.device_memory_bytes or profile.device_memory_bytes
    return replace(scaled(profile, scale), device_memory_bytes=memory_bytes)


def read_profile(path: Path) -> ModelProfile:
    """The profile in a file.

    Raises:
        ConfigError: it is missing or is no profile.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError("profile", str(path), f"cannot be read: {error.strerror}") from error
    return decode_profile(data, source=str(path))


def plan_job(
    config: JobConfig,
    prepared: Prepared,
    *,
    plan: Plan | None = None,
    manifest: Manifest | None = None,
) -> Planned:
    """The job's templates, its plan (the planner's unless one is given) and what they predict.

    Raises:
        ConfigError: the nodes are too few or too small for the model, f or the batch.
    """
    assert prepared.profile is not None
    problem = Problem(
        profile=prepared.profile,
        devices_per_node=config.cluster.devices_per_node,
        num_microbatches=config.num_microbatches,
        failures_tolerated=config.resilience.failures_tolerated,
        gradient_copies=3 if config.training.deterministic else 1,
    )
    epoch = manifest.epoch + 1 if manifest else 0
    templates: Mapping[int, PipelineTemplate] = {}
    if plan is None:
        templates = pipeline_templates(problem, config.cluster.nodes)
        plan = best_plan(problem, range(config.cluster.nodes), templates, epoch=epoch)
    plan = replace(plan, epoch=epoch)
    assert len(plan.routes) == config.num_microbatches
    predicted = predicted_timeline(
        lowered(plan, tied=prepared.profile.tied),
        prepared.profile,
        plan=plan,
        reduce_bytes_factor=1.5 if config.training.deterministic else 1.0,
    )
    return Planned(
        config=config,
        prepared=prepared,
        problem=problem,
        templates=templates,
        plan=plan,
        predicted=predicted,
        predicted_peak_bytes=_predicted_peak_bytes(problem, plan),
        resumed=manifest,
    )


def _predicted_peak_bytes(problem: Problem, plan: Plan) -> int:
    return max(
        stage_peak
        for pipeline, count in zip(plan.pipelines, pipeline_microbatches(plan), strict=True)
        for stage_peak in peak_bytes(
            problem.profile,
            pipeline.template,
            num_microbatches=count,
            gradient_copies=problem.gradient_copies,
        )
    )
