"""What the commands share: arguments, files to write, and errors as messages and exit codes."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Final, TextIO, cast

import typer
from rich.console import Console

from planaria.errors import CheckpointError, ConfigError, InsufficientError, TrainingError
from planaria.nodes.output import Outlet, descriptor_of, write_all

OUTPUT_TIMEOUT_S: Final = 10.0  # For somebody to read on, before a command ends all the same.

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
    more: tuple[str, ...] = ()
    try:
        yield
    except ConfigError as error:
        text, code = str(error), 2
    except TrainingError as error:
        left = f"; {error.standing}" if error.standing else ""
        text, code = f"{_failure(error)}; see above{left}", 1
        more = (error.traceback.rstrip(),)
    except InsufficientError as error:
        text, code = str(error), 3
    except CheckpointError as error:
        text, code = str(error), 1
    except KeyboardInterrupt as error:
        text, code = str(error) or "interrupted before training began", 130
    else:
        return
    errors = Console(file=unfailing(sys.stderr), highlight=False, soft_wrap=True)
    lines = (partial(errors.print, line, markup=False) for line in (*more, f"planaria: {text}"))
    finish(Outlet(errors.print), *lines)
    raise typer.Exit(code)


def _failure(error: TrainingError) -> str:
    """What failed, in words."""
    if error.blame != "job":
        return f"the worker of rank {error.rank} failed again and again"
    where = f"in rank {error.rank}" if error.rank >= 0 else "before training began"
    return f"the job's own code raised {where}"


def finish(outlet: Outlet, *last: Callable[[], object]) -> None:
    """Prints what is queued and then this, unless nobody reads it, or Ctrl-C comes meanwhile."""
    with contextlib.suppress(KeyboardInterrupt):
        outlet.close(*last, timeout_s=OUTPUT_TIMEOUT_S)


def unfailing(stream: TextIO | None) -> TextIO:
    """A stream of this process as one that never fails: what nobody takes is dropped."""
    return cast(TextIO, _Unfailing(stream))


class _Unfailing:
    """As much of a text stream as those use who only print."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._descriptor = descriptor_of(stream)
        self.encoding = getattr(stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        """Writes past the stream's own buffer: to flush that in the end would fail again."""
        if self._descriptor >= 0:
            write_all(self._descriptor, text.encode(self.encoding, errors="replace"))
        elif self._stream is not None:
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Nothing is left to be flushed."""

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return self._stream is not None and self._stream.isatty()


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
