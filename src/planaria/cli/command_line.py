"""What the commands share: arguments, files to write, and errors as messages and exit codes."""

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final, TextIO, cast

import typer
from rich.console import Console

from planaria.checkpoint.disk.storage import absolute_path
from planaria.errors import CheckpointError, ConfigError, InsufficientError, TrainingError
from planaria.nodes.output import Outlet, descriptor_of, write_all

_STDERR_FD: Final = 2
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
        text, code = str(error) or "interrupted", 130
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
    """A stream of this process as one that never fails: what nobody takes is dropped.

    It writes past the buffer of the stream, and has none itself: to flush that in the end would
    fail again, or wait again for nobody.
    """
    descriptor = descriptor_of(stream)
    if stream is not None and descriptor < 0:  # In memory, as a test has it.
        return stream
    encoding = (stream and stream.encoding) or "utf-8"
    errors = "backslashreplace" if descriptor == _STDERR_FD else "replace"
    raw = _Unfailing(descriptor)
    # A TextIOWrapper takes what is unbuffered, as python -u has it; typeshed does not know.
    return io.TextIOWrapper(
        cast(BinaryIO, raw), encoding=encoding, errors=errors, write_through=True
    )


class _Unfailing(io.RawIOBase):
    """Bytes to a descriptor, which is not closed with it; -1 drops them."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor

    def writable(self) -> bool:
        """It is all that it is for."""
        return True

    def write(self, data: Any) -> int:
        """Writes all of it, or drops it."""
        write_all(self._descriptor, bytes(data))
        return len(data)

    def fileno(self) -> int:
        """See IOBase."""
        if self._descriptor < 0:
            raise io.UnsupportedOperation("it has no descriptor")
        return self._descriptor

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return self._descriptor >= 0 and os.isatty(self._descriptor)


def check_writable(option: str, path: Path | None) -> None:
    """Refuses, before hours of work, an output that cannot be written after them."""
    if path is None:
        return
    folder = absolute_path(path).parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(option, str(path), "name a file in a directory that can be written to")


def write(path: Path, data: bytes) -> None:
    """Writes a file that the user asked for."""
    try:
        path.write_bytes(data)
    except OSError as error:
        raise ConfigError("output", str(path), f"cannot be written: {error.strerror}") from error
