"""What each save of a job says about the job."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import msgspec

from planaria.checkpoint.disk.outgoing import MODEL_FACTS
from planaria.checkpoint.disk.storage import absolute
from planaria.core.job import JobConfig, ModelFacts
from planaria.core.specs import Prepared

# Keys of what export says of the tokenizer.
HAS_OWN_TOKENS: Final = "has_own_tokens"
TOKENIZER_FILE: Final = "tokenizer_file"
_NUM_SAMPLES: Final = "num_samples"


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


def save_facts(config: JobConfig, prepared: Prepared) -> dict[str, Any]:
    """The settings that a job which resumes is compared with, and what `checkpoint export` needs.

    Args:
        prepared: facts on the job; those on its data may be missing.
    """
    path = absolute(config.model.path) if config.model.path else ""
    facts = ModelFacts(
        model=replace(config.model, path=path),
        training=config.training,
        sequence_length=config.data.sequence_length,
        vocabulary_size=prepared.vocabulary_size,
    )
    return fingerprint(config) | {
        "config": prepared.config,
        MODEL_FACTS: msgspec.to_builtins(facts),
        HAS_OWN_TOKENS: prepared.has_own_tokens,
        TOKENIZER_FILE: prepared.tokenizer_file,
        _NUM_SAMPLES: prepared.num_samples.data,
    }


def changed_data_text(saved: Mapping[str, Any], prepared: Prepared) -> str:
    """The warning that there are other samples than when a save was made; "": there are not.

    Args:
        saved: facts that the save has on its job; an older one lacks the number of samples.
    """
    before, now = saved.get(_NUM_SAMPLES, 0), prepared.num_samples.data
    if not before or now == before:
        return ""
    return (
        f"the data have {now} samples, and had {before} when the checkpoint was saved: from here "
        "on samples come in another order, so that some are repeated and others left out"
    )
