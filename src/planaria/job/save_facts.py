"""What each save of a job says about the job."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import msgspec

from planaria.checkpoint.disk.outgoing import MODEL_FACTS, TOKENIZER_FILE
from planaria.checkpoint.disk.storage import absolute
from planaria.core.job import JobConfig, ModelFacts
from planaria.core.specs import Prepared

HAS_OWN_TOKENS: Final = "has_own_tokens"  # Key of what export says of the tokenizer.
_NUM_SAMPLES: Final = "num_samples"
_HELD_OUT: Final = "held_out"
# Keys of a model's configuration that say where it came from, and not what it computes.
_LABELS: Final = ("transformers_version", "_name_or_path", "architectures")


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
        "decay": training.decay,
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
        _HELD_OUT: _held_out_text(config, prepared),
    }


def _held_out_text(config: JobConfig, prepared: Prepared) -> str:
    """What the held-out data are whose losses end training; "": none do."""
    evaluation, number = config.evaluation, prepared.num_samples.held_out
    ends = evaluation.patience and number  # An import does not read the data.
    return f"{evaluation.data_name} with {number} samples" if ends else ""


def changes_texts(
    saved: Mapping[str, Any], config: JobConfig, prepared: Prepared
) -> tuple[str, ...]:
    """Warnings of what may change the result of a job that goes on, and is not refused.

    Code may move, and a configuration may gain keys, without another result.

    Args:
        saved: facts that the save has on its job; an older one lacks some.
    """
    texts = []
    number, now = saved.get(_NUM_SAMPLES, 0), prepared.num_samples.data
    if number and now != number:
        texts.append(
            f"the data have {now} samples, and had {number} when the checkpoint was saved: from "
            "here on samples come in another order, so that some are repeated and others left out"
        )
    held_out, before = _held_out_text(config, prepared), saved.get(_HELD_OUT, "")
    if held_out and before and held_out != before:
        texts.append(
            f"held-out data are {held_out}, and were {before} when the checkpoint was saved: "
            "evaluation.patience counts anew, without the losses of those"
        )
    target = saved.get(MODEL_FACTS, {}).get("model", {}).get("target", "")
    if target != config.model.target and MODEL_FACTS in saved:
        texts.append(
            f"model.target is {config.model.target!r}, and was {target!r} when the checkpoint was "
            "saved: the layers are compared by the shapes of their parameters only"
        )
    changed = [
        f"{key} = {value!r}, and was {old!r}"
        for key, value, old in differences(prepared.config, saved.get("config") or {})
        if key not in _LABELS
    ]
    if changed and prepared.config and saved.get("config"):
        texts.append(
            "the configuration of the model is another one than when the checkpoint was saved: "
            f"{'; '.join(changed)}"
        )
    return tuple(texts)


def differences(
    value: object, saved: object, *, name: str = ""
) -> Iterator[tuple[str, object, object]]:
    """The keys whose values differ, each with both values; None stands for a key that is not there.

    Args:
        name: name of the key whose values are compared; "": they are those of a whole job.
    """
    if isinstance(value, Mapping) and isinstance(saved, Mapping):
        for key in dict.fromkeys((*value, *saved)):
            inner = f"{name}.{key}" if name else key
            yield from differences(value.get(key), saved.get(key), name=inner)
    elif value != saved:
        yield name, value, saved
