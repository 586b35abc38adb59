"""Tiny jobs for tests: every family with ten layers, and any plan shape for them."""

from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from helpers.strategies import equal_problem
from planaria.core.job import (
    CheckpointConfig,
    ClusterConfig,
    DataConfig,
    JobConfig,
    ModelConfig,
    ResilienceConfig,
    TrainingConfig,
)
from planaria.core.plan import Pipeline, PipelineTemplate, Plan, Stage, plain_plan
from planaria.job.training_job import Job, TrainingResult
from planaria.nodes.forkserver import ForkServer
from planaria.nodes.head.leader_spec import LeaderSpec
from planaria.planner.plans import outline_of
from planaria.profiles.profile_json import encode_profile

NUM_LAYERS = 10
NUM_BLOCKS = NUM_LAYERS - 2
SEQUENCE_LENGTH = 16

_WIDE = {
    "num_hidden_layers": NUM_BLOCKS,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": NUM_BLOCKS, "n_embd": 16, "n_head": 2, "n_positions": 64},
    "llama": {**_WIDE, "num_key_value_heads": 1, "attention_dropout": 0.1},
    "qwen2": {**_WIDE, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "bert": _WIDE,
}
FAMILIES = (*CONFIGS, "sequential", "encoder")
_USER_DATA = (
    ("helpers.user_models:points", ""),
    ("helpers.user_models:sentences", "helpers.user_models:padded_sentences"),
)


_profiles: dict[str, bytes] = {}


def tiny_job(family: str, directory: Path, **training: Any) -> JobConfig:
    """A job of a few thousand parameters; `directory` takes its checkpoints."""
    if family in CONFIGS:
        model = ModelConfig(config={"model_type": family, **CONFIGS[family]})
        data = DataConfig(sequence_length=SEQUENCE_LENGTH)
    else:
        model = ModelConfig(kind="python", target=f"helpers.user_models:{family}")
        target, collate = _USER_DATA[family == "encoder"]
        data = DataConfig(kind="python", target=target, collate=collate)
    settings: dict[str, Any] = {
        "iterations": 3,
        "global_batch_size": 20,
        "microbatch_size": 2,
        "learning_rate": 1e-2,
        "gradient_clip": 1.0,
        "seed": 7,
    }
    return JobConfig(
        name=family,
        model=model,
        data=data,
        training=TrainingConfig(**(settings | training)),
        resilience=ResilienceConfig(failures_tolerated=0),
        checkpoint=CheckpointConfig(directory=str(directory / "checkpoints")),
        cluster=ClusterConfig(nodes=1),
    )


def template(num_stages: int, *, num_layers: int = NUM_LAYERS) -> PipelineTemplate:
    """Stages of one device each, as even as they can be, the smaller ones first."""
    cuts = [num_layers * i // num_stages for i in range(num_stages + 1)]
    stages = tuple(Stage(a, b, 1) for a, b in pairwise(cuts))
    return PipelineTemplate(stages, num_stages)


def shaped_plan(sizes: tuple[int, ...], num_microbatches: int) -> Plan:
    """Pipelines of these numbers of nodes, microbatches dealt by number of nodes."""
    nodes = iter(range(sum(sizes)))
    pipelines = tuple(
        Pipeline(template(size), tuple(next(nodes) for _ in range(size))) for size in sizes
    )
    cuts = [num_microbatches * sum(sizes[:i]) // sum(sizes) for i in range(len(sizes) + 1)]
    microbatches = tuple(b - a for a, b in pairwise(cuts))
    return plain_plan(0, pipelines, microbatches)


@cache
def shapes(num_nodes: int, smallest: int = 1) -> tuple[tuple[int, ...], ...]:
    """All multisets of pipeline sizes that use all nodes, each ascending."""
    if num_nodes == 0:
        return ((),)
    return tuple(
        (first, *rest)
        for first in range(smallest, num_nodes + 1)
        for rest in shapes(num_nodes - first, first)
        if not rest or rest[0] >= first
    )


def with_profile(config: JobConfig, server: ForkServer) -> JobConfig:
    """The job with a profile, which is measured once for all jobs with such a model."""
    training = config.training
    key = repr((config.model, config.data, training.optimizer, training.dtype))
    if key not in _profiles:
        every_kind = replace(training, activation_checkpointing="auto")
        measured = Job(replace(config, training=every_kind)).profile(server=server)
        _profiles[key] = encode_profile(measured)
    path = Path(config.checkpoint.directory).with_name("profile.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_profiles[key])
    return replace(config, model=replace(config.model, profile=str(path)))


def train_shape(
    config: JobConfig, sizes: tuple[int, ...], server: ForkServer, **arguments: Any
) -> TrainingResult:
    """Trains the job on pipelines of these sizes; no better plan is looked for meanwhile, for which
    it would leave them at a commit.
    """
    config = replace(
        with_profile(config, server),
        cluster=replace(config.cluster, nodes=sum(sizes)),
        resilience=replace(config.resilience, failures_ahead=0),
    )
    plan = shaped_plan(sizes, config.num_microbatches)
    return Job(config).train(plan=plan, server=server, **arguments)


def digests(result: TrainingResult) -> tuple[str, str]:
    """What must not depend on anything but the job."""
    return result.report.final.parameters_sha256, result.report.final.optimizer_sha256


def leader_spec(directory: Path, *, token: bytes = b"") -> LeaderSpec:
    """What the coordinator of a job of ten layers on one node is told."""
    problem = equal_problem(num_layers=NUM_LAYERS, num_microbatches=10)
    plan = shaped_plan((1,), 10)
    return LeaderSpec(
        job=tiny_job("sequential", directory),
        plan=plan,
        predicted_s=1.0,
        problem=problem,
        templates={1: plan.pipelines[0].template},
        outlines={1: outline_of(plan)},
        first_iteration=0,
        source="",
        fingerprint={},
        directory=str(directory / "store"),
        token=token,
    )
