"""Shared parts of the commands: arguments, output files, and errors as messages and exit codes."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, TextIO

import typer
from rich import box
from rich.console import Console, RenderableType
from rich.table import Column, Table

from planaria.checkpoint.disk.storage import absolute_path, may_pass
from planaria.errors import (
    CheckpointError,
    ConfigError,
    DoneError,
    InsufficientError,
    TrainingError,
)
from planaria.job.checks import name_refusals
from planaria.nodes.output import Outlet, finish, unfailing

_PIPED_COLUMNS = 1000

JobFile = Annotated[
    Path,
    typer.Argument(
        metavar="JOB.toml|SCRIPT.py", help="The job: a job file, or a script that defines `job`."
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a key of the job file, such as cluster.nodes=4; repeatable.",
    ),
]
# By option: the path of a file, None if nobody asked for it, and what makes its content.
Files = dict[str, tuple[Path | None, Callable[[], bytes]]]


def plain_table(*headings: str) -> Table:
    """An empty table. Cells are wrapped, never cut: half a path or address is of no use."""
    columns = (Column(heading, overflow="fold") for heading in headings)
    return Table(*columns, box=box.SIMPLE, pad_edge=False)


def text_console(
    file: TextIO | None = None,
    *,
    stderr: bool = False,
    highlight: bool = False,
    soft_wrap: bool = False,
) -> Console:
    """A console that shows every text as it is: [a] is no style, and :b: is no picture.

    Args:
        file, stderr, highlight, soft_wrap: those of `rich.console.Console`.
    """
    return Console(
        file=file,
        stderr=stderr,
        highlight=highlight,
        soft_wrap=soft_wrap,
        markup=False,
        emoji=False,
    )


def table_console() -> Console:
    """A console for tables: in a file or a pipe they are not made to fit a window of 80 columns."""
    console = text_console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _PIPED_COLUMNS
    return console


@contextmanager
def exit_codes() -> Iterator[None]:
    """Turns planaria's errors into a message and an exit code."""
    traceback_lines: tuple[str, ...] = ()
    try:
        yield
    except DoneError as error:
        text, code = f"the job is done: {error}", 0
    except ConfigError as error:
        text, code = str(error), os.EX_TEMPFAIL if may_pass(error) else 2
    except TrainingError as error:
        standing = f"; {error.checkpoint_text}" if error.checkpoint_text else ""
        text, code = f"{_failure(error)}; see above{standing}", 1
        traceback_lines = (error.traceback.rstrip(),)
    except InsufficientError as error:
        text, code = str(error), 3
    except CheckpointError as error:
        text, code = str(error), 1
    except KeyboardInterrupt as error:
        text, code = str(error) or "interrupted", 130
    else:
        return
    errors = text_console(unfailing(sys.stderr), soft_wrap=True)
    lines = (partial(errors.print, line) for line in (*traceback_lines, f"planaria: {text}"))
    finish(Outlet(errors.print), *lines)
    raise typer.Exit(code)


def _failure(error: TrainingError) -> str:
    """The failure in words."""
    if error.blame != "job":
        return f"the worker of rank {error.rank} failed again and again"
    where = f"in rank {error.rank}" if error.rank >= 0 else "before training began"
    return f"the job's own code raised an error {where}"


def check_writable(option: str, path: Path | None, *others: Path | None) -> None:
    """Refuses an output file that cannot be written, before hours of work for it.

    Args:
        others: files that the command reads, or writes, too; the file must be none of them.
    """
    if path is None:
        return
    folder = absolute_path(path).parent
    with name_refusals(option, str(path)):
        if any(other is not None and _is_same_file(path, other) for other in others):
            remedy = "the command reads or writes that file, too; name another one"
            raise ConfigError(option, str(path), remedy)
        if path.is_dir() or not folder.is_dir():
            raise ConfigError(option, str(path), "name a file in a writable directory")
        if path.exists() and not os.access(path, os.W_OK):
            raise ConfigError(option, str(path), "this file is not writable; name another one")
        if not path.exists() and not os.access(folder, os.W_OK):
            raise ConfigError(option, str(path), "name a file in a writable directory")


def _is_same_file(path: Path, other: Path) -> bool:
    if path.exists() and other.exists():
        return path.is_file() and path.samefile(other)  # /dev/null takes anything.
    return absolute_path(path) == absolute_path(other)


def hand_over(files: Files, shown: Iterable[RenderableType], *, console: Console) -> None:
    """Writes the files that the user asked for, then prints: nobody may read what is printed.

    Raises:
        typer.Exit: a file cannot be written; the others are, and stderr says why.
    """
    failures = write_files(files)
    for failure in failures:
        typer.echo(f"planaria: {failure}", err=True)
    for renderable in shown:
        console.print(renderable)
    if failures:
        raise typer.Exit(1)


def write_files(files: Files) -> list[ConfigError]:
    """Writes files; returns the failures, which are not to hide a result."""
    failures = []
    for option, (path, data) in files.items():
        try:
            if path is not None:
                write(option, path, data())
        except ConfigError as error:
            failures.append(error)
    return failures


def json_data(content: object) -> bytes:
    """The content of a JSON file for scripts and people."""
    return (json.dumps(content, indent=2) + "\n").encode()


def write(option: str, path: Path, data: bytes) -> None:
    """Writes a file that the user asked for with that option."""
    try:
        path.write_bytes(data)
    except OSError as error:
        raise ConfigError(option, str(path), f"cannot be written: {error.strerror}") from error
