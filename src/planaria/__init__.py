"""planaria trains large PyTorch models on nodes that fail.

General layout, from the top down; imports go down only (docs/ARCHITECTURE.md has a picture):

    cli, job, chaos                     commands; the job file and its report; drawn faults
    show, profiles                      tables and pictures; shipped profiles
    engine, torchrun                    one rank of a job; MemoryCheckpointer for other loops
    nodes, simulator                    all other processes of a job; the same, modelled
    models, data, checkpoint, transport layers; samples; copies and saves; links
    ------- the wall: what is above acts, what is below decides and is pure --------------------
    coordinator, protocol, store        recoveries; what agents and workers decide; records
    policies                            answers to a loss, and what they are worth
    placement, planner, restorer        who keeps copies; pipelines; who takes which place
    estimator, schedule, observe, core  times; actions; facts and the ledger; the vocabulary
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planaria.core.job import (
        CheckpointConfig,
        ClusterConfig,
        DataConfig,
        EvaluationConfig,
        JobConfig,
        ModelConfig,
        ResilienceConfig,
        TrainingConfig,
    )
    from planaria.errors import (
        CheckpointError,
        ConfigError,
        InsufficientError,
        PlanariaError,
        TrainingError,
    )
    from planaria.job.training_job import Job, TrainingResult
    from planaria.observe.metrics import EvaluationRecord, EventRecord, IterationRecord, Report
    from planaria.show.callbacks import Callbacks
    from planaria.show.trackers import TensorBoard, WandB
    from planaria.torchrun.loop_state import RandomGenerators
    from planaria.torchrun.memory_checkpointer import MemoryCheckpointer

__version__ = "0.1.0"

_MODULES = {
    "Callbacks": "show.callbacks",
    "CheckpointConfig": "core.job",
    "CheckpointError": "errors",
    "ClusterConfig": "core.job",
    "ConfigError": "errors",
    "DataConfig": "core.job",
    "EvaluationConfig": "core.job",
    "EvaluationRecord": "observe.metrics",
    "EventRecord": "observe.metrics",
    "InsufficientError": "errors",
    "IterationRecord": "observe.metrics",
    "Job": "job.training_job",
    "JobConfig": "core.job",
    "MemoryCheckpointer": "torchrun.memory_checkpointer",
    "ModelConfig": "core.job",
    "PlanariaError": "errors",
    "RandomGenerators": "torchrun.loop_state",
    "Report": "observe.metrics",
    "ResilienceConfig": "core.job",
    "TensorBoard": "show.trackers",
    "TrainingConfig": "core.job",
    "TrainingError": "errors",
    "TrainingResult": "job.training_job",
    "WandB": "show.trackers",
}

__all__ = [
    "Callbacks",
    "CheckpointConfig",
    "CheckpointError",
    "ClusterConfig",
    "ConfigError",
    "DataConfig",
    "EvaluationConfig",
    "EvaluationRecord",
    "EventRecord",
    "InsufficientError",
    "IterationRecord",
    "Job",
    "JobConfig",
    "MemoryCheckpointer",
    "ModelConfig",
    "PlanariaError",
    "RandomGenerators",
    "Report",
    "ResilienceConfig",
    "TensorBoard",
    "TrainingConfig",
    "TrainingError",
    "TrainingResult",
    "WandB",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """A public name, imported when it is first used: workers and commands need few of them."""
    if name not in _MODULES:
        raise AttributeError(f"module 'planaria' has no attribute {name!r}")
    return getattr(importlib.import_module(f"planaria.{_MODULES[name]}"), name)
