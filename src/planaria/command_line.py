"""What the commands share: arguments, files to write, and errors as messages and exit codes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from planaria.errors import CheckpointError, ConfigError, InsufficientError, TrainingError

JobFile = Annotated[
    Path, typer.Argument(metavar="JOB.toml|SCRIPT.py", help="The job, as a file or a script.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="TABLE.KEY=VALUE", help="Override a key of the job file."),
]


@contextmanager
def exit_codes() -> Iterator[None]:
    """Turns planaria's errors into a message and an exit code."""
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        yield
    except ConfigError as error:
        errors.print(f"planaria: {error}", markup=False)
        code = 2
    except TrainingError as error:
        errors.print(error.traceback.rstrip(), markup=False)
        where = f"in rank {error.rank}" if error.rank >= 0 else "before training began"
        left = f"; {error.standing}" if error.standing else ""
        errors.print(f"planaria: the job's own code raised {where}; see above{left}", markup=False)
        code = 1
    except InsufficientError as error:
        errors.print(f"planaria: {error}", markup=False)
        code = 3
    except CheckpointError as error:
        errors.print(f"planaria: {error}", markup=False)
        code = 1
    except KeyboardInterrupt as error:
        errors.print(f"planaria: {str(error) or 'interrupted before training began'}", markup=False)
        code = 130
    else:
        return
    raise typer.Exit(code)


def check_writable(option: str, path: Path | None) -> None:
    """Refuses, before hours of work, an output that cannot be written after them."""
    if path is None:
        return
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(option, str(path), "name a file in a directory that can be written to")


def write(path: Path, data: bytes) -> None:
    """Writes a file that the user asked for."""
    try:
        path.write_bytes(data)
    except OSError as error:
        raise ConfigError("output", str(path), f"cannot be written: {error.strerror}") from error
