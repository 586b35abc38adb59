"""Reads a job file into a `JobConfig`, and turns every mistake in it into a `ConfigError`.

A job file is TOML with the tables and keys of `core/job.py`. It is read in four steps: parse;
anchor the input paths; lay the overrides (TABLE.KEY=VALUE) over it; build the records, each value
checked strictly against the type of its field. Then come the checks that need several keys.

A path in the file is relative to the file's directory, a path in an override to the current
directory; checkpoint.directory, where output goes, is always relative to the current directory.
All of them leave here absolute, because workers need not share a current directory.
The keys' page, docs/JOB.md, is what `python -m planaria.config` prints (`make docs`).

Not checked here: what only torch and transformers know (keys of model.config, of the optimizer and
of the learning rate's schedule); the engine checks those before it trains, in the same words.

Differs: pydantic would also coerce ("4" to 4, 4.0 to 4) and check whole dataclasses; here it
checks one field at a time and strictly, because its strict mode refuses to build dataclasses from
tables, and because an unknown key should be told its nearest known neighbour.
"""

import difflib
import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, asdict, fields, is_dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from planaria.core.job import DataConfig, JobConfig, ModelConfig, TrainingConfig
from planaria.errors import ConfigError
from planaria.profiles.shipped import NOT_FOUND, profile_path

_INPUT_PATHS = (("model", "path", Path), ("model", "profile", profile_path), ("data", "path", Path))

_MINIMUM = {
    "data.sequence_length": 1,
    "training.iterations": 1,
    "training.target_loss": 0,
    "training.global_batch_size": 1,
    "training.microbatch_size": 1,
    "training.gradient_clip": 0,
    "training.seed": 0,
    "resilience.failures_tolerated": 0,
    "checkpoint.persist_every": 0,
    "checkpoint.keep": 0,
    "cluster.nodes": 1,
    "cluster.devices_per_node": 1,
    "cluster.device_memory_bytes": 0,
    "cluster.lease_s": 0.5,
}
NODES_MAX = 10_000  # Nobody has more; one zero too many is told at once.
_MAXIMUM = dict.fromkeys(("cluster.nodes", "cluster.devices_per_node"), NODES_MAX)
# A plan has a route for each microbatch: beyond this, planning takes longer than training.
NUM_MICROBATCHES_MAX = 1 << 16
_POSITIVE = ("training.learning_rate", "model.time_scale")

# Which kinds of its table a key has a meaning for; keys that are not here fit every kind.
_KINDS = {
    "model.config": ("hf",),
    "model.path": ("hf",),
    "model.target": ("python",),
    "model.time_scale": ("paced",),
    "data.path": ("text", "hf"),
    "data.target": ("python",),
}

_EXPECTED = {
    "int_type": "must be an integer",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be a string, in quotes",
    "dict_type": "must be a table",
}

_BYTE_TOKENS = 256

Record = TypeVar("Record")


def load_job(path: Path, *, overrides: Sequence[str] = ()) -> JobConfig:
    """The checked job of a job file.

    Args:
        path: the TOML file; its stem is the job's name unless the file gives one.
        overrides: TABLE.KEY=VALUE, later ones win; VALUE is TOML, or else a plain string.

    Raises:
        ConfigError: the file, a key or a value is wrong, or two keys do not fit together.
    """
    data = _anchored(_parsed(path), directory=path.parent)
    data.setdefault("name", path.stem)
    return _overridden_job(data, overrides)


def overridden_job(job: JobConfig, *, directory: Path, overrides: Sequence[str]) -> JobConfig:
    """The checked job of a script in `directory`, with overrides as `load_job` takes them.

    Raises:
        ConfigError: as `load_job`.
    """
    return _overridden_job(_anchored(asdict(job), directory=directory), overrides)


def _overridden_job(data: dict[str, Any], overrides: Sequence[str]) -> JobConfig:
    for override in overrides:
        data = _overridden(data, override)
    return job_from_dict(data)


def job_from_dict(data: Mapping[str, Any], *, directory: Path = Path()) -> JobConfig:
    """The checked job of tables that are already parsed; input paths are relative to directory.

    Raises:
        ConfigError: as `load_job`.
    """
    tables = _anchored(data, directory=directory)
    job = _record(JobConfig, tables, prefix="")
    check_job(job)
    output = str(Path(job.checkpoint.directory).absolute())
    return replace(job, checkpoint=replace(job.checkpoint, directory=output))


def check_job(job: JobConfig) -> None:
    """Refuses values out of range, keys that do not fit together and inputs that are not there.

    Raises:
        ConfigError: the first mistake found.
    """
    _check_ranges(job)
    _check_kinds(job)
    _check_model(job.model)
    _check_data(job.data)
    _check_training(job.training)
    _check_paths(job)


def keys_table() -> str:
    """All keys of a job file as a markdown table: key, type, default, meaning."""
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    rows.extend(_rows(JobConfig, prefix=""))
    return "\n".join(rows) + "\n"


def keys_page() -> str:
    """The page docs/JOB.md: how a job file is read, and the table of its keys."""
    return f"""# The job file

Generated by `make docs` from `src/planaria/core/job.py`; edit there.

A job file is TOML; `name` stands above all tables, every other key in its table. A key that is
not listed is an error, and so is a value of another type. Every key has a default, but the model
must be named: by `model.config.model_type`, `model.path`, `model.target` or `model.profile`.

`planaria train JOB.toml --set table.key=value` overrides a key, also one inside a table value
(`--set model.config.n_layer=4`); the value is TOML, or else a plain string. `training.optimizer`
and `training.schedule` keep their default `name` when only their other keys are given.

Paths in the file are relative to the file; paths in `--set`, and `checkpoint.directory`, to the
current directory.

{keys_table()}"""


def _parsed(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError("job file", str(path), f"is not TOML: {error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError("job file", str(path), f"is not UTF-8 at byte {error.start}") from None
    except FileNotFoundError:
        near = sorted(file.name for file in path.parent.glob("*.toml"))
        remedy = "no such file" + _did_you_mean(path.name, near)
        raise ConfigError("job file", str(path), remedy) from None
    except OSError as error:
        raise ConfigError("job file", str(path), f"cannot be read: {error.strerror}") from None


def _anchored(data: Mapping[str, Any], *, directory: Path) -> dict[str, Any]:
    """A copy whose input paths are absolute; what is not a path is left for the type check."""
    copy = {key: dict(v) if isinstance(v, Mapping) else v for key, v in data.items()}
    for table, key, path in _INPUT_PATHS:
        value = copy[table].get(key) if isinstance(copy.get(table), dict) else None
        if isinstance(value, str) and value:
            copy[table][key] = str(path(directory, value).absolute())
    return copy


def _overridden(data: Mapping[str, Any], override: str) -> dict[str, Any]:
    name, equals, text = override.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError("--set", override, "must be TABLE.KEY=VALUE")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    return _with_value(data, keys, value=value, name=name.strip())


def _with_value(
    data: Mapping[str, Any], keys: Sequence[str], *, value: Any, name: str
) -> dict[str, Any]:
    """A copy of data in which the value under the nested keys is value."""
    first, *rest = keys
    if not rest:
        return {**data, first: value}
    inner = data.get(first, {})
    if not isinstance(inner, Mapping):
        raise ConfigError(name, value, f"{first} is no table, so nothing can be set inside it")
    return {**data, first: _with_value(inner, rest, value=value, name=name)}


def _record(kind: type[Record], values: Mapping[str, Any], *, prefix: str) -> Record:
    """The dataclass `kind` made of a table, every value checked."""
    assert is_dataclass(kind)
    known = {record_field.name: record_field for record_field in fields(kind)}
    for key, value in values.items():
        if key not in known:
            remedy = "is not a key of a job file" + _did_you_mean(key, known)
            raise ConfigError(prefix + key, value, remedy)
    hints = get_type_hints(kind)
    return kind(
        **{
            key: _value(known[key], value, hint=hints[key], name=prefix + key)
            for key, value in values.items()
        }
    )


def _value(record_field: "Field[Any]", value: Any, *, hint: Any, name: str) -> Any:
    if is_dataclass(hint) and isinstance(hint, type):
        if not isinstance(value, Mapping):
            raise ConfigError(name, value, f"must be a table: [{name}]")
        return _record(hint, value, prefix=name + ".")
    try:
        checked = TypeAdapter(hint).validate_python(value, strict=True)
    except ValidationError as error:
        raise ConfigError(name, value, _remedy(error, value, hint=hint)) from None
    if isinstance(checked, float) and not math.isfinite(checked):
        raise ConfigError(name, value, "must be a finite number")
    # Messages carry 64-bit integers.
    if isinstance(checked, int) and abs(checked) >= 2**63:
        raise ConfigError(name, value, "must fit in 64 bits")
    return {**_default(record_field), **checked} if isinstance(checked, Mapping) else checked


def _remedy(error: ValidationError, value: Any, *, hint: Any) -> str:
    if get_origin(hint) is Literal:
        choices = [str(choice) for choice in get_args(hint)]
        listed = ", ".join(f'"{choice}"' for choice in choices)
        return f"must be one of {listed}" + _did_you_mean(str(value), choices)
    first = error.errors()[0]
    return _EXPECTED.get(first["type"]) or first["msg"]


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    """The nearest known name as the end of a remedy, or else the list of all."""
    names = list(known)
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if nearest:
        return f"; did you mean {nearest[0]}?"
    return f"; known are {', '.join(names)}" if names else ""


def _check_ranges(job: JobConfig) -> None:
    for name, minimum in _MINIMUM.items():
        value = attrgetter(name)(job)
        if value < minimum:
            raise ConfigError(name, value, f"must be at least {minimum}")
    for name, maximum in _MAXIMUM.items():
        value = attrgetter(name)(job)
        if value > maximum:
            raise ConfigError(name, value, f"must be at most {maximum}")
    for name in _POSITIVE:
        if (value := attrgetter(name)(job)) <= 0:
            raise ConfigError(name, value, "must be more than 0")
    if not job.name or "/" in job.name:
        raise ConfigError("name", job.name, "must not be empty and must not contain a slash")


def _check_kinds(job: JobConfig) -> None:
    """Refuses a key that is set and has no meaning for the kind of its table."""
    unset = JobConfig()
    for name, kinds in _KINDS.items():
        table = name.partition(".")[0]
        kind, value = getattr(job, table).kind, attrgetter(name)(job)
        if kind not in kinds and value != attrgetter(name)(unset):
            allowed = " or ".join(f'"{one}"' for one in kinds)
            remedy = f'goes with {table}.kind = {allowed}, and the kind here is "{kind}"'
            raise ConfigError(name, value, remedy)


def _check_model(model: ModelConfig) -> None:
    if model.kind == "hf":
        model_type = model.config.get("model_type", "")
        if not model.path and not (model_type and isinstance(model_type, str)):
            remedy = 'must name an architecture, such as "gpt2"; or give model.path'
            raise ConfigError("model.config.model_type", model_type, remedy)
    elif model.kind == "python":
        _check_target("model.target", model.target, returned="the layers")
    elif not model.profile:
        raise ConfigError("model.profile", "", "must name a profile: a paced model is made of one")


def _check_target(name: str, target: str, *, returned: str) -> None:
    if not re.fullmatch(r"[^\W\d][\w.]*:[^\W\d]\w*", target):
        remedy = f'must be "module:function" of a function that returns {returned}'
        raise ConfigError(name, target, remedy)


def _check_data(data: DataConfig) -> None:
    if data.kind == "hf" and not data.path:
        raise ConfigError("data.path", "", "must name the directory of a saved dataset")
    if data.kind == "python":
        _check_target("data.target", data.target, returned="an indexable dataset")
    # A byte-pair encoding starts with the single bytes and learns the tokens above them.
    if data.tokenizer == "bpe" and data.vocabulary_size <= _BYTE_TOKENS:
        remedy = f"must be more than the {_BYTE_TOKENS} single bytes"
        raise ConfigError("data.vocabulary_size", data.vocabulary_size, remedy)


def _check_training(training: TrainingConfig) -> None:
    batch, microbatch = training.global_batch_size, training.microbatch_size
    if batch % microbatch:
        below = batch // microbatch * microbatch
        nearest = f"{below} or {below + microbatch}" if below else str(microbatch)
        remedy = (
            f"must be a multiple of training.microbatch_size = {microbatch}: {nearest} would do"
        )
        raise ConfigError("training.global_batch_size", batch, remedy)
    if batch // microbatch > NUM_MICROBATCHES_MAX:
        remedy = (
            f"makes {batch // microbatch} microbatches of training.microbatch_size = {microbatch}; "
            f"at most {NUM_MICROBATCHES_MAX} would do"
        )
        raise ConfigError("training.global_batch_size", batch, remedy)


def _check_paths(job: JobConfig) -> None:
    """Refuses inputs that are not there and an output directory that is a file."""
    if job.model.path and not Path(job.model.path, "config.json").is_file():
        raise ConfigError("model.path", job.model.path, "must be a directory with a config.json")
    if job.model.profile and not profile_path(Path(), job.model.profile).is_file():
        remedy = f"{NOT_FOUND}; planaria profile JOB -o FILE writes one"
        raise ConfigError("model.profile", job.model.profile, remedy)
    exists = Path.is_dir if job.data.kind == "hf" else Path.is_file
    if job.data.path and not exists(Path(job.data.path)):
        remedy = "no such directory" if job.data.kind == "hf" else "no such file"
        raise ConfigError("data.path", job.data.path, remedy)
    if job.data.path and job.data.kind == "text" and Path(job.data.path).stat().st_size == 0:
        raise ConfigError("data.path", job.data.path, "the file is empty")
    directory = job.checkpoint.directory
    if not directory or (Path(directory).exists() and not Path(directory).is_dir()):
        raise ConfigError("checkpoint.directory", directory, "must name a directory, new or old")


def _rows(kind: type, *, prefix: str) -> list[str]:
    assert is_dataclass(kind)
    hints = get_type_hints(kind)
    rows = []
    for record_field in fields(kind):
        hint = hints[record_field.name]
        if is_dataclass(hint) and isinstance(hint, type):
            rows.extend(_rows(hint, prefix=f"{prefix}{record_field.name}."))
            continue
        about = record_field.metadata["about"].replace("|", "\\|")
        default = "file name" if record_field.name == "name" else f"`{_toml(record_field)}`"
        rows.append(f"| `{prefix}{record_field.name}` | {_type_name(hint)} | {default} | {about} |")
    return rows


def _type_name(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " or ".join(f'`"{choice}"`' for choice in get_args(hint))
    names = {str: "string", int: "integer", float: "number", bool: "boolean"}
    return names.get(hint, "table")


def _toml(record_field: "Field[Any]") -> str:
    """The default as it would be written in the file."""
    default = _default(record_field)
    if isinstance(default, Mapping):
        pairs = ", ".join(f"{key} = {json.dumps(value)}" for key, value in default.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    return json.dumps(default)


def _default(record_field: "Field[Any]") -> Any:
    if record_field.default_factory is not MISSING:
        return record_field.default_factory()
    return record_field.default


if __name__ == "__main__":
    print(keys_page(), end="")
