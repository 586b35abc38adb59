"""Reads a job file into a `JobConfig`, and turns every mistake in it into a `ConfigError`.

A job file is TOML with the tables and keys of `core/job.py`. It is read in four steps: parse it;
make its input paths absolute; apply the overrides (TABLE.KEY=VALUE); build the records, where each
value is checked strictly against the type of its field. Then follow the checks of checks.py.

A path in the file is relative to the file's directory, and a path in an override to the current
directory. checkpoint.directory, where output goes, is always relative to the current directory. All
paths in the result are absolute, because workers need not share a current directory.
`python -m planaria.job.config` prints the page of all keys, docs/JOB.md (`make docs`).

Differs: pydantic could also coerce values ("4" to 4, 4.0 to 4) and check whole dataclasses. Here it
checks one field at a time, strictly. Its strict mode refuses to build dataclasses from tables, and
the error for an unknown key should name the nearest known key.
"""

import difflib
import json
import math
import os
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from planaria.checkpoint.disk.storage import absolute, absolute_path
from planaria.core.job import EvaluationConfig, JobConfig
from planaria.errors import ConfigError
from planaria.job.checks import (
    check_job,
    check_output,
    check_profile,
    is_utf_8,
    name_refusals,
    without_copies,
)
from planaria.profiles.shipped import profile_path

_INPUT_PATHS = (
    *(("model", "path", Path), ("model", "profile", profile_path)),
    *(("data", "path", Path), ("evaluation", "path", Path)),
)

_EXPECTED = {
    "int_type": "must be an integer",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be a string, in quotes",
    "dict_type": "must be a table",
    "tuple_type": "must be a list",
}

Record = TypeVar("Record")


def load_job(path: Path, *, overrides: Sequence[str] = ()) -> JobConfig:
    """The checked job of a job file.

    Args:
        path: TOML file; its stem is the job's name unless the file gives one.
        overrides: texts TABLE.KEY=VALUE, of which later ones win; VALUE is TOML, or else a plain
            string.

    Raises:
        ConfigError: the file, a key or a value is wrong, or two keys do not fit together.
    """
    data = with_absolute_paths(tables_of_file(path), directory=path.parent)
    data.setdefault("name", path.stem)
    return _job_with_overrides(data, overrides)


def overridden_job(job: JobConfig, *, directory: Path, overrides: Sequence[str]) -> JobConfig:
    """The checked job of a script in `directory`, with overrides as `load_job` takes them.

    Raises:
        ConfigError: the same as in `load_job`.
    """
    data = asdict(job)
    for table, key in (("evaluation", "every"), ("checkpoint", "copies")):
        if not data[table][key]:
            del data[table][key]  # As good as not given.
    return _job_with_overrides(with_absolute_paths(data, directory=directory), overrides)


def checked_job(job: JobConfig) -> JobConfig:
    """The same job of a program, with every value checked as one of a job file is.

    Input paths stay as they are, and are not looked at: those of a script's job are relative to the
    script.

    Raises:
        ConfigError: a value has another type than its key, or two keys do not fit together.
    """
    checked = record_from_table(JobConfig, _tables(job), prefix="")
    check_job(checked)
    check_output(checked)
    output = absolute(checked.checkpoint.directory)
    return replace(checked, checkpoint=replace(checked.checkpoint, directory=output))


def _tables(record: Any) -> dict[str, Any]:
    """The values of a record by key; those of records in it are tables."""
    values = {key.name: getattr(record, key.name) for key in fields(record)}
    return {key: _tables(v) if is_dataclass(v) else v for key, v in values.items()}


def _job_with_overrides(data: dict[str, Any], overrides: Sequence[str]) -> JobConfig:
    for override in overrides:
        data = with_override(data, override)
    return job_from_dict(data)


def job_from_dict(
    data: Mapping[str, Any], *, directory: Path = Path(), is_recorded: bool = False
) -> JobConfig:
    """The checked job of tables that are already parsed.

    Args:
        directory: directory that input paths are relative to.
        is_recorded: whether the job is one of the past, whose files need not be there.

    Raises:
        ConfigError: the same as in `load_job`.
    """
    tables = with_absolute_paths(data, directory=directory)
    job = record_from_table(JobConfig, tables, prefix="")
    if not job.evaluation.every and "every" in tables.get("evaluation", {}):
        job = replace(job, evaluation=EvaluationConfig())  # Turned off, with all its keys.
    if not job.checkpoint.copies and "copies" in tables.get("checkpoint", {}):
        job = replace(job, checkpoint=without_copies(job.checkpoint))  # The same.
    check_job(job)
    if not is_recorded:
        check_profile(job)
        check_output(job)
    output = absolute(job.checkpoint.directory)
    return replace(job, checkpoint=replace(job.checkpoint, directory=output))


def keys_table() -> str:
    """The keys of a job file as a markdown table: key, type, default, meaning."""
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    rows.extend(_rows(JobConfig, prefix=""))
    return "\n".join(rows) + "\n"


def keys_page() -> str:
    """The page docs/JOB.md: how a job file is read, and the table of its keys."""
    return f"""# The job file

Generated by `make docs` from `src/planaria/core/job.py`; edit there.

A job file is a TOML file. The key `name` stands above all tables, and every other key stands in its
table. A key that is not in the list below is an error, and so is a value of another type. Every key
has a default, but a job must name its model, with `model.config.model_type`, `model.path`,
`model.target` or `model.profile`.

`planaria train JOB.toml --set TABLE.KEY=VALUE` overrides a key, and also a key inside a value that
is itself a table (`--set model.config.n_layer=4`). The value is read as TOML; if it is no TOML, it
is taken as a string. If a job sets only other keys of `training.optimizer` or `training.schedule`,
their `name` keeps its default.

A path in the file is relative to the directory of the file. A path in `--set` is relative to the
current directory, and so is `checkpoint.directory` wherever it is set. A leading `~` is the home
directory. In the column "meaning" a word before a colon is a value of the key, or of the `kind` of
its table.

{keys_table()}"""


def tables_of_file(path: Path, *, word: str = "job file") -> dict[str, Any]:
    """The tables of a TOML file, not checked.

    Args:
        word: word for the file in messages.

    Raises:
        ConfigError: the file cannot be read, or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(word, str(path), f"is not TOML: {error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(word, str(path), f"is not UTF-8 at byte {error.start}") from None
    except FileNotFoundError:
        near = sorted(file.name for file in path.parent.glob("*.toml"))
        remedy = "there is no such file" + _nearest_or_all(path.name, near)
        raise ConfigError(word, str(path), remedy) from None
    except OSError as error:
        raise ConfigError(word, str(path), f"cannot be read: {error.strerror}") from None


def with_absolute_paths(
    data: Mapping[str, Any],
    *,
    directory: Path,
    paths: Sequence[tuple[str, str, Callable[[Path, str], Path | str]]] = _INPUT_PATHS,
) -> dict[str, Any]:
    """A copy with absolute input paths; values of another type are left for the type check.

    Args:
        paths: table and key of each path, and the function that finds it from `directory`; a text
            that it returns is no path, and stays as it is.

    Raises:
        ConfigError: the system refuses to look for a path.
    """
    copy = {key: dict(v) if isinstance(v, Mapping) else v for key, v in data.items()}
    for table, key, path in paths:
        value = copy[table].get(key) if isinstance(copy.get(table), dict) else None
        if isinstance(value, str) and value:
            with name_refusals(f"{table}.{key}", value):
                resolved = path(directory, os.path.expanduser(value))
            copy[table][key] = (
                resolved if isinstance(resolved, str) else str(absolute_path(resolved))
            )
    return copy


def with_override(data: Mapping[str, Any], override: str) -> dict[str, Any]:
    """A copy of tables with one override TABLE.KEY=VALUE, as `load_job` takes it.

    Raises:
        ConfigError: the text has another form, or names a key inside a value.
    """
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
    """A copy of `data` in which the nested keys lead to `value`."""
    first, *rest = keys
    if not rest:
        return {**data, first: value}
    inner = data.get(first, {})
    if not isinstance(inner, Mapping):
        raise ConfigError(name, value, f"{first} is not a table, so no key can be set inside it")
    return {**data, first: _with_value(inner, rest, value=value, name=name)}


def record_from_table(
    kind: type[Record], values: Mapping[str, Any], *, prefix: str, file: str = "a job file"
) -> Record:
    """The record of dataclass `kind` that a table describes, with every value checked.

    Args:
        prefix: text before the name of each key in messages.
        file: the file, in the words of messages.

    Raises:
        ConfigError: a key is unknown, or a value has another type than its key.
    """
    assert is_dataclass(kind)
    known = {record_field.name: record_field for record_field in fields(kind)}
    for key, value in values.items():
        if key not in known:
            remedy = f"is not a key of {file}" + _nearest_or_all(key, known)
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
        return record_from_table(hint, value, prefix=name + ".")
    try:
        given = _as_tuples(value) if get_origin(hint) is tuple else value
        checked = TypeAdapter(hint).validate_python(given, strict=True)
    except ValidationError as error:
        raise ConfigError(name, value, _remedy(error, value, hint=hint)) from None
    _check_content(checked, name=name)
    return {**_default(record_field), **checked} if isinstance(checked, Mapping) else checked


def _check_content(value: Any, *, name: str) -> None:
    """Refuses numbers and texts that no message can carry, in tables and lists, too."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(name, value, "must be a finite number")
    if isinstance(value, int) and abs(value) >= 2**63:
        raise ConfigError(name, value, "must fit in 64 bits")
    if isinstance(value, str) and not is_utf_8(value):
        raise ConfigError(name, value, "its name is not UTF-8; rename it, or name another one")
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _check_content(inner, name=f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            _check_content(inner, name=f"{name}[{index}]")


def _as_tuples(value: Any) -> Any:
    """The value with tuples instead of lists, as frozen records need."""
    return tuple(map(_as_tuples, value)) if isinstance(value, list | tuple) else value


def _remedy(error: ValidationError, value: Any, *, hint: Any) -> str:
    if get_origin(hint) is Literal:
        choices = [str(choice) for choice in get_args(hint)]
        listed = ", ".join(f'"{choice}"' for choice in choices)
        return f"must be one of {listed}" + _did_you_mean(str(value), choices)
    if get_origin(hint) is Union:
        return f"must be: {_type_name(hint)}".replace("`", "")
    first = error.errors()[0]
    return _EXPECTED.get(first["type"]) or first["msg"]


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a remedy that names the nearest known name; "" if none is near."""
    nearest = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {nearest[0]}?" if nearest else ""


def _nearest_or_all(name: str, known: Collection[str]) -> str:
    """The end of a remedy that names the nearest known name, or all if none is near."""
    all_names = f"; there are {', '.join(known)}" if known else ""
    return _did_you_mean(name, known) or all_names


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
    if get_origin(hint) is Union:
        return " or ".join(_type_name(kind) for kind in get_args(hint))
    if get_origin(hint) is tuple:
        return "list"
    names = {str: "string", int: "integer", float: "number", bool: "boolean"}
    return names.get(hint, "table")


def _toml(record_field: "Field[Any]") -> str:
    """The default as a job file would write it."""
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
