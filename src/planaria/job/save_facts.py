"""What each save of a job says about the job."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec

from planaria.checkpoint.disk.outgoing import MODEL_FACTS
from planaria.checkpoint.disk.storage import absolute
from planaria.core.job import JobConfig, ModelFacts


def fingerprint(config: JobConfig) -> dict[str, Any]:
    """The settings that must not change between the run that saved and the one that resumes."""
    training = config.training
    return {
        "name": config.name,
        "model": {"kind": config.model.kind, "config": dict(config.model.config)}
        | (
            {"lora": dict(config.model.lora), "path": Path(config.model.path).name}
            if config.model.lora
            else {}
        ),
        "data": {
            key: value
            for key, value in asdict(config.data).items()
            # The bits do not depend on workers, and older saves do not name collate.
            if key != "workers" and (key != "collate" or value)
        }
        | {"path": Path(config.data.path).name},
        "global_batch_size": training.global_batch_size,
        "microbatch_size": training.microbatch_size,
        "optimizer": dict(training.optimizer),
        "dtype": training.dtype,
        "seed": training.seed,
    }


def save_facts(
    config: JobConfig, *, values: Mapping[str, Any], vocabulary_size: int
) -> dict[str, Any]:
    """The settings that a job which resumes is compared with, and what `checkpoint export` needs.

    Args:
        values: configuration of the model, as other tools read it from config.json.
        vocabulary_size: number of token ids of the data; 0: not known.
    """
    path = absolute(config.model.path) if config.model.path else ""
    facts = ModelFacts(
        model=replace(config.model, path=path),
        training=config.training,
        sequence_length=config.data.sequence_length,
        vocabulary_size=vocabulary_size,
    )
    return fingerprint(config) | {"config": values, MODEL_FACTS: msgspec.to_builtins(facts)}
