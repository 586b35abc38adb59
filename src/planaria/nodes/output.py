"""Output that never blocks or fails its writer: printed text is queued, and threads write it.

The reader of a pipe may be gone (`| head`), a terminal may be stopped (Ctrl-S) or closed, or a disk
may be full. Then a write fails, or blocks for as long as nobody reads. Neither the launcher's event
loop nor a worker may block or fail for that, so neither writes to the output itself: the loop posts
to an `Outlet`, and the job's processes print into pipes that are always read. Lines that do not fit
into a queue are dropped; their number is printed once somebody reads again.

A separate process, the relay, reads these pipes, because the launcher may be stopped (Ctrl-Z), and
then the processes that print would block. This file is the relay's program. It imports nothing of
planaria, and ends after the last process that prints.
"""

import atexit
import contextlib
import io
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, BinaryIO, Final, TextIO, cast

logger = logging.getLogger(__name__)

_QUEUED_BYTES_MAX: Final = 4 << 20
_PIECE_BYTES: Final = 400  # Memory that a piece takes in the queue besides its text.
_READ_BYTES: Final = 1 << 16
_LINE_BYTES_MAX: Final = 1 << 16
_STDERR_FD: Final = 2
OUTPUT_TIMEOUT_S: Final = 10.0  # Time that a command waits at its end for a reader of its output.
_ENVIRONMENT: Final = ("LD_LIBRARY_PATH",)  # Variables without which Python may not start.


class Outlet:
    """Prints what is posted, piece by piece, in a thread of its own.

    Args:
        note: prints a text that says how many lines were dropped; called in that thread.
        queued_bytes_max: maximum memory of the queue.
    """

    def __init__(
        self, note: Callable[[str], None], *, queued_bytes_max: int = _QUEUED_BYTES_MAX
    ) -> None:
        self._note = note
        self._queued_bytes_max = queued_bytes_max
        self._queue: deque[tuple[Callable[[], object], int]] = deque()
        self._queued_bytes = 0
        self._num_dropped = 0  # Lines dropped since the newest piece in the queue.
        self._num_printed = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._is_over = False

    def post(self, prints: Callable[[], object], *, num_bytes: int = 0, num_lines: int = 1) -> None:
        """Queues a function that prints; drops it if the queue is full or closed.

        Args:
            num_bytes: size of the text that it prints.
            num_lines: number of lines that it prints.
        """
        num_bytes += _PIECE_BYTES
        with self._changed:
            # After a drop, half of the queue must be free; else notes and single lines alternate.
            room = self._queued_bytes_max // (2 if self._num_dropped else 1)
            if self._is_closed:
                return
            if self._queue and self._queued_bytes + num_bytes > room:
                self._num_dropped += num_lines
                return
            self._queue_note()
            self._append(prints, num_bytes)

    def close(self, *last: Callable[[], object], timeout_s: float) -> bool:
        """Prints what is queued, then `last`; returns whether everything was printed.

        Gives up if nothing could be printed for `timeout_s`.
        """
        with self._changed:
            if last or self._num_dropped:
                self._queue_note()
                for prints in last:
                    self._append(prints, _PIECE_BYTES)
            self._is_closed = True
            self._changed.notify_all()
            has_progressed = self._thread is not None
            while has_progressed and not self._is_over:
                num_printed = self._num_printed
                has_progressed = self._changed.wait(timeout_s) or num_printed < self._num_printed
            return self._is_over or self._thread is None

    def _queue_note(self) -> None:
        if self._num_dropped:
            lines = "1 line is" if self._num_dropped == 1 else f"{self._num_dropped} lines are"
            text = f"({lines} left out here: nobody read them in time)"
            self._num_dropped = 0
            self._append(partial(self._note, text), _PIECE_BYTES)

    def _append(self, prints: Callable[[], object], num_bytes: int) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._print, daemon=True)
            self._thread.start()
        self._queue.append((prints, num_bytes))
        self._queued_bytes += num_bytes
        self._changed.notify_all()

    def _print(self) -> None:
        while (prints := self._next()) is not None:
            try:
                prints()
            except Exception:
                logger.exception("something could not be shown")

    def _next(self) -> Callable[[], object] | None:
        """Waits for the next function that prints; None: the outlet is closed and empty."""
        with self._changed:
            self._num_printed += 1
            self._changed.notify_all()
            if not self._queue:
                self._queue_note()
            while not (self._queue or self._is_closed):
                self._changed.wait()
            if not self._queue:
                self._is_over = True
                self._changed.notify_all()
                return None
            prints, num_bytes = self._queue.popleft()
            self._queued_bytes -= num_bytes
            return prints


class ForwardedOutput:
    """Passes on what processes print, without ever blocking or failing them.

    They do not block while this process is stopped either.

    Args:
        output: callback, called in a thread of its own with each line of both streams; None: the
            streams go to this process's own stdout and stderr, as they arrive.

    Attributes:
        stdout_fd: descriptor to which the processes are to print; closed by `begin`.
        stderr_fd: descriptor for their errors, likewise.
    """

    def __init__(self, output: Callable[[str], None] | None) -> None:
        self._sources: list[_Pipes] = []
        sources = self._sources
        with contextlib.ExitStack() as undo:
            for _ in range(1 if output is not None else 2):
                sources.append(_Pipes())
                undo.callback(sources[-1].close)
            self._relay = _start_relay(sources)
            undo.pop_all()
        self.stdout_fd, self.stderr_fd = sources[0].print_write_fd, sources[-1].print_write_fd
        if output is not None:
            outlet = Outlet(output)
            self._passing = [
                (outlet, partial(_pass_lines, self._relayed_data(*sources), outlet, output))
            ]
        else:
            targets = (descriptor_of(sys.__stdout__), descriptor_of(sys.__stderr__))
            self._passing = [
                (outlet, partial(_pass_bytes, self._relayed_data(source), outlet, target))
                for source, target in zip(sources, targets, strict=True)
                for outlet in (Outlet(partial(_write_note, target)),)
            ]
        self._readers = [
            threading.Thread(target=passes, daemon=True) for _, passes in self._passing
        ]

    def begin(self) -> None:
        """Starts to pass on, until the last process that has these descriptors is gone.

        Raises:
            RuntimeError: a thread could not be started.
        """
        for source in self._sources:
            source.close(source.print_write_fd)
        for index, reader in enumerate(self._readers):
            try:
                reader.start()
            except RuntimeError:
                for source in self._sources[index:]:
                    source.close()
                self._end_relay()
                raise

    def drop(self) -> None:
        """Releases everything; to be called instead of `begin` if no process will print."""
        for source in self._sources:
            source.close()
        self._end_relay()

    def _end_relay(self) -> None:
        self._relay.kill()
        self._relay.wait()

    def close(self, *, timeout_s: float) -> None:
        """Waits until all text is passed on, but not for ever.

        Waits neither for processes that go on nor for a reader that takes nothing. Text that was
        not taken is offered once more when this process ends.
        """
        end_s = time.monotonic() + timeout_s
        for reader in self._readers:
            reader.join(timeout=max(0.0, end_s - time.monotonic()))
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._relay.wait(timeout=max(0.0, end_s - time.monotonic()))
        for outlet, _ in self._passing:
            if not outlet.close(timeout_s=timeout_s):
                atexit.register(outlet.close, timeout_s=timeout_s)

    def _relayed_data(self, source: "_Pipes") -> Iterator[bytes]:
        """Yields what the relay passes on; if the relay was killed, reads its pipe from then on."""
        yield from _pipe_data(source.pass_read_fd)
        if self._relay.wait() != 0:
            yield from _pipe_data(source.print_read_fd)
        else:
            os.close(source.print_read_fd)


class _Pipes:
    """The pipe into which processes print, and the pipe into which the relay passes that on.

    Attributes:
        print_read_fd: read end of the first pipe, for the relay.
        print_write_fd: write end of the first pipe, for the processes.
        pass_read_fd: read end of the second pipe, for this process.
        pass_write_fd: write end of the second pipe, for the relay.
    """

    def __init__(self) -> None:
        self._open: set[int] = set()
        self.print_read_fd, self.print_write_fd = self._pipe()
        try:
            self.pass_read_fd, self.pass_write_fd = self._pipe()
        except OSError:
            self.close()
            raise

    def _pipe(self) -> tuple[int, int]:
        ends = os.pipe()
        self._open.update(ends)
        return ends

    def close(self, *ends: int) -> None:
        """Closes these ends; without arguments all open ones, which nobody may read by then."""
        for end in ends or tuple(self._open):
            self._open.remove(end)
            os.close(end)


def _start_relay(sources: Sequence[_Pipes]) -> subprocess.Popen[bytes]:
    ends = [end for source in sources for end in (source.print_read_fd, source.pass_write_fd)]
    try:
        return subprocess.Popen(
            # Without site-packages Python starts in 15 ms.
            [sys.executable, "-I", "-S", __file__, *map(str, ends)],
            pass_fds=ends,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # The terminal's signals must not reach the relay.
            env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
        )
    finally:
        for source in sources:
            source.close(source.pass_write_fd)


def _relay(*ends: int) -> None:
    """The relay's main function."""
    relays = []
    for source_fd, target_fd in zip(ends[::2], ends[1::2], strict=True):
        outlet = Outlet(partial(_write_note, target_fd))
        relays.append(threading.Thread(target=_pass_all, args=(source_fd, outlet, target_fd)))
    for relay in relays:
        relay.start()
    for relay in relays:
        relay.join()


def _pass_all(source_fd: int, outlet: Outlet, target_fd: int) -> None:
    _pass_bytes(_pipe_data(source_fd), outlet, target_fd)
    outlet.close(timeout_s=threading.TIMEOUT_MAX)  # If the launcher is gone, writes fail at once.
    os.close(target_fd)


def descriptor_of(stream: TextIO | None) -> int:
    """The file descriptor of a stream; -1: it has none."""
    if stream is None:  # It was closed when this process began; another file may have its number.
        return -1
    try:
        return stream.fileno()
    except (OSError, ValueError):
        return -1


def write_all(descriptor: int, data: bytes) -> None:
    """Writes all data, however long that takes; drops the rest if writing fails."""
    rest = memoryview(data)
    with contextlib.suppress(OSError):
        while rest:
            try:
                rest = rest[os.write(descriptor, rest) :]
            except BlockingIOError:  # Another process that shares the file made it non-blocking.
                writable = select.poll()
                writable.register(descriptor, select.POLLOUT)
                writable.poll()


def finish(outlet: Outlet, *last: Callable[[], object]) -> None:
    """Prints what is queued, then `last`; gives up if nobody reads, or on Ctrl-C."""
    with contextlib.suppress(KeyboardInterrupt):
        outlet.close(*last, timeout_s=OUTPUT_TIMEOUT_S)


def unfailing(stream: TextIO | None) -> TextIO:
    """A stream to the same descriptor that never fails: text that nobody reads is dropped.

    It bypasses the buffer of the given stream and has no buffer itself, because flushing one at the
    end could fail, or wait for a reader, again.
    """
    descriptor = descriptor_of(stream)
    if stream is not None and descriptor < 0:  # A test's stream is in memory.
        return stream
    encoding = (stream and stream.encoding) or "utf-8"
    errors = "backslashreplace" if descriptor == _STDERR_FD else "replace"
    raw = _Unfailing(descriptor)
    # A TextIOWrapper accepts an unbuffered stream, as `python -u` uses it; typeshed does not know.
    return io.TextIOWrapper(
        cast(BinaryIO, raw), encoding=encoding, errors=errors, write_through=True
    )


class _Unfailing(io.RawIOBase):
    """A raw stream to a descriptor, which it never closes; a descriptor of -1 drops all data."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor

    def writable(self) -> bool:
        """True: the stream only writes."""
        return True

    def write(self, data: Any) -> int:
        """Writes all data, or drops it."""
        write_all(self._descriptor, bytes(data))
        return len(data)

    def fileno(self) -> int:
        """The descriptor, as in `io.IOBase`."""
        if self._descriptor < 0:
            raise io.UnsupportedOperation("it has no descriptor")
        return self._descriptor

    def isatty(self) -> bool:
        """Whether the descriptor is a terminal."""
        return self._descriptor >= 0 and os.isatty(self._descriptor)


def flush_own() -> None:
    """Flushes what this process has printed; ignores errors."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def _write_note(descriptor: int, text: str) -> None:
    write_all(descriptor, f"\n{text}\n".encode())


def _pass_bytes(source: Iterator[bytes], outlet: Outlet, target_fd: int) -> None:
    for data in source:
        num_lines = max(1, data.count(b"\n"))  # A progress bar ends no line.
        outlet.post(partial(write_all, target_fd, data), num_bytes=len(data), num_lines=num_lines)


def _pass_lines(source: Iterator[bytes], outlet: Outlet, output: Callable[[str], None]) -> None:
    rest = b""
    for data in source:
        *lines, rest = (rest + data).split(b"\n")
        if len(rest) > _LINE_BYTES_MAX:
            lines.append(rest)
            rest = b""
        for line in lines:
            text = line.decode(errors="replace")
            outlet.post(partial(output, text), num_bytes=len(line))
    if rest:
        outlet.post(partial(output, rest.decode(errors="replace")), num_bytes=len(rest))


def _pipe_data(descriptor: int) -> Iterator[bytes]:
    """Yields what is written into a pipe until its last writer is gone, then closes it."""
    try:
        while data := os.read(descriptor, _READ_BYTES):
            yield data
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    _relay(*map(int, sys.argv[1:]))
