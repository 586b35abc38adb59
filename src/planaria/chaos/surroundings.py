"""What stands around a run of chaos, as it was drawn (chaos/draw.py).

A temporary directory is this process's own, and that of the processes which it starts meanwhile. A
pipe or terminal is made for the run, which shows itself there. Nobody ever reads it. When its other
end closes, whoever prints there fails; with a terminal the kernel says so (SIGHUP), which is sent
from here, for chaos itself has another one.
"""

import os
import pty
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Final

from rich.console import Console

from planaria.chaos.draw import TEMPORARIES, Surroundings
from planaria.cli.command_line import unfailing
from planaria.cli.shown import Shown
from planaria.observe.metrics import IterationRecord

_MOUNT: Final = ("mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs")
_UNWRITABLE: Final = "/proc"  # Nobody can make a file there, whoever it is.
_HIDING: Final = "XDG_RUNTIME_DIR"  # Would be used in its stead.


def possible_temporaries(parent: Path) -> tuple[str, ...]:
    """What can be wrong with the temporary directory: a full one takes the right to mount."""
    with _full_directory(parent) as full:
        return tuple(kind for kind in TEMPORARIES if full is not None or kind != "full")


@contextmanager
def temporary_directory(kind: str, parent: Path) -> Iterator[None]:
    """This process, and those that it starts meanwhile, have such a temporary directory.

    Args:
        parent: where it is made.
    """
    with _full_directory(parent) if kind == "full" else nullcontext() as full:
        paths = {"full": full, "missing": parent / "missing", "unwritable": _UNWRITABLE}
        before = {name: os.environ.pop(name, None) for name in ("TMPDIR", _HIDING)}
        os.environ["TMPDIR"] = str(paths[kind])
        tempfile.tempdir = None  # Is looked up again.
        try:
            yield
        finally:
            del os.environ["TMPDIR"]
            os.environ.update({name: value for name, value in before.items() if value is not None})
            tempfile.tempdir = None


@contextmanager
def _full_directory(parent: Path) -> Iterator[Path | None]:
    """A small disk that is full; None if nothing may be mounted."""
    directory = Path(tempfile.mkdtemp(dir=parent))
    is_mounted = False
    try:
        with suppress(OSError):  # There is no such command.
            done = subprocess.run([*_MOUNT, str(directory)], check=False, capture_output=True)
            is_mounted = done.returncode == 0
        if is_mounted:
            _fill(directory)
        yield directory if is_mounted else None
    finally:
        if is_mounted:  # Whoever still has it open keeps it.
            subprocess.run(["umount", "-l", str(directory)], check=False, capture_output=True)
        directory.rmdir()


def _fill(directory: Path) -> None:
    with suppress(OSError), (directory / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


class UnreadOutput:
    """Shows a run on a pipe or terminal that nobody reads; a context in which that is there.

    Attributes:
        shown: the display.
        reader_fd: the other end, -1 once it is closed.
        has_hung_up: the run was told that its terminal is gone.
    """

    def __init__(self, surroundings: Surroundings) -> None:
        self._is_terminal = surroundings.output == "terminal"
        self._closes_at = surroundings.closes_at
        self.reader_fd, writer_fd = pty.openpty() if self._is_terminal else os.pipe()
        _block(writer_fd)
        self._stream = os.fdopen(writer_fd, "w")
        self.shown = Shown(Console(file=unfailing(self._stream)))
        self.has_hung_up = False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._close()
            self.shown.close()
            self._stream.close()

    def committed(self, record: IterationRecord) -> None:
        """Closes what nobody reads when its time has come; to be called while the job runs."""
        is_time = 0 <= self._closes_at <= record.iteration
        if not is_time or self.reader_fd < 0:
            return
        self._close()
        # Only a main thread heeds signals, and under nohup no job heeds this one.
        is_heeded = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
        if self._is_terminal and is_heeded and _is_main_thread():
            self.has_hung_up = True
            os.kill(os.getpid(), signal.SIGHUP)

    def _close(self) -> None:
        if self.reader_fd >= 0:
            os.close(self.reader_fd)
        self.reader_fd = -1


def _block(descriptor: int) -> None:
    """Leaves no room there: a pipe takes 64 KiB, of which a run prints a few."""
    os.set_blocking(descriptor, False)
    with suppress(BlockingIOError):
        while True:
            os.write(descriptor, b" ")
    os.set_blocking(descriptor, True)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
