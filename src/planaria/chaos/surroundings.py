"""Makes the surroundings of a chaos run that were drawn for it (chaos/draw.py).

The temporary directory is set for this process and for the processes that it starts meanwhile. A
pipe or terminal is made for the run, which shows its progress there, and nobody ever reads it. Once
its other end is closed, writing to it fails. A closed terminal also makes the kernel send SIGHUP;
here this module sends it, because the terminal of chaos itself stays open.
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
from planaria.job.console_display import ConsoleDisplay
from planaria.nodes.output import unfailing
from planaria.observe.metrics import IterationRecord

_MOUNT: Final = ("mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs")
_UNWRITABLE: Final = "/proc"  # No user can make a file there, not even root.
_HIDING: Final = "XDG_RUNTIME_DIR"  # If it were set, it would be used instead of TMPDIR.


def possible_temporaries(parent: Path) -> tuple[str, ...]:
    """The bad temporary directories that can be made; a full one needs the right to mount."""
    with _full_directory(parent) as full:
        return tuple(kind for kind in TEMPORARIES if full is not None or kind != "full")


@contextmanager
def temporary_directory(kind: str, parent: Path) -> Iterator[None]:
    """Gives this process, and those that it starts meanwhile, a bad temporary directory.

    Args:
        kind: fault of the directory, one of TEMPORARIES.
        parent: directory in which it is made.
    """
    with _full_directory(parent) if kind == "full" else nullcontext() as full:
        paths = {"full": full, "missing": parent / "missing", "unwritable": _UNWRITABLE}
        old_values = {name: os.environ.pop(name, None) for name in ("TMPDIR", _HIDING)}
        os.environ["TMPDIR"] = str(paths[kind])
        tempfile.tempdir = None  # tempfile looks its directory up again.
        try:
            yield
        finally:
            del os.environ["TMPDIR"]
            os.environ.update(
                {name: value for name, value in old_values.items() if value is not None}
            )
            tempfile.tempdir = None


@contextmanager
def _full_directory(parent: Path) -> Iterator[Path | None]:
    """A small file system that is full; None if this process may not mount one."""
    directory = Path(tempfile.mkdtemp(dir=parent))
    is_mounted = False
    try:
        with suppress(OSError):  # The mount command may be missing.
            mount = subprocess.run([*_MOUNT, str(directory)], check=False, capture_output=True)
            is_mounted = mount.returncode == 0
        if is_mounted:
            _fill(directory)
        yield directory if is_mounted else None
    finally:
        if is_mounted:  # A lazy unmount works even if a process still has a file open there.
            subprocess.run(["umount", "-l", str(directory)], check=False, capture_output=True)
        directory.rmdir()


def _fill(directory: Path) -> None:
    with suppress(OSError), (directory / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


class UnreadOutput:
    """A pipe or terminal that shows a run and that nobody reads.

    An instance is called for a context, at whose end the pipe or terminal is closed.

    Attributes:
        display: display that prints there.
        reader_fd: file descriptor of the other end; -1: it is closed.
        has_hung_up: whether the run was told by SIGHUP that its terminal is gone.
    """

    def __init__(self, surroundings: Surroundings) -> None:
        self._is_terminal = surroundings.output == "terminal"
        self._closes_at = surroundings.closes_at
        self.reader_fd, writer_fd = pty.openpty() if self._is_terminal else os.pipe()
        _fill_output(writer_fd)
        self._stream = os.fdopen(writer_fd, "w")
        self.display = ConsoleDisplay(Console(file=unfailing(self._stream)))
        self.has_hung_up = False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._close()
            self.display.close()
            self._stream.close()

    def on_commit(self, record: IterationRecord) -> None:
        """Closes the reading end at its iteration; to be called at each commit."""
        is_time = 0 <= self._closes_at <= record.iteration
        if not is_time or self.reader_fd < 0:
            return
        self._close()
        # Python handles signals in the main thread only, and under nohup SIGHUP is ignored.
        is_handled = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
        if self._is_terminal and is_handled and _is_main_thread():
            self.has_hung_up = True
            os.kill(os.getpid(), signal.SIGHUP)

    def _close(self) -> None:
        if self.reader_fd >= 0:
            os.close(self.reader_fd)
        self.reader_fd = -1


def _fill_output(descriptor: int) -> None:
    """Fills the output. A pipe holds 64 KiB, so what a run prints would not fill it."""
    os.set_blocking(descriptor, False)
    with suppress(BlockingIOError):
        while True:
            os.write(descriptor, b" ")
    os.set_blocking(descriptor, True)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
