"""planaria trains large PyTorch models on nodes that fail."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planaria.core.job import (
        CheckpointConfig,
        ClusterConfig,
        DataConfig,
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
    from planaria.job.job import Job, TrainingResult
    from planaria.observe.metrics import Report
    from planaria.torchrun.memory_checkpointer import MemoryCheckpointer

__version__ = "0.1.0"

_MODULES = {
    "CheckpointConfig": "core.job",
    "CheckpointError": "errors",
    "ClusterConfig": "core.job",
    "ConfigError": "errors",
    "DataConfig": "core.job",
    "InsufficientError": "errors",
    "Job": "job.job",
    "JobConfig": "core.job",
    "MemoryCheckpointer": "torchrun.memory_checkpointer",
    "ModelConfig": "core.job",
    "PlanariaError": "errors",
    "Report": "observe.metrics",
    "ResilienceConfig": "core.job",
    "TrainingConfig": "core.job",
    "TrainingError": "errors",
    "TrainingResult": "job.job",
}

__all__ = [
    "CheckpointConfig",
    "CheckpointError",
    "ClusterConfig",
    "ConfigError",
    "DataConfig",
    "InsufficientError",
    "Job",
    "JobConfig",
    "MemoryCheckpointer",
    "ModelConfig",
    "PlanariaError",
    "Report",
    "ResilienceConfig",
    "TrainingConfig",
    "TrainingError",
    "TrainingResult",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """A public name, imported when it is first used: workers and commands need few of them."""
    if name not in _MODULES:
        raise AttributeError(f"module 'planaria' has no attribute {name!r}")
    return getattr(importlib.import_module(f"planaria.{_MODULES[name]}"), name)
