"""Starts a peer system's processes, kills one of its workers, and watches what the others tell."""

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from peers.telling import Event, read_event

_END_TIMEOUT_S = 20.0
_IMPORT_TIMEOUT_S = 300.0
_TAIL_BYTES = 3000


class Watched:
    """The processes of one system, all of which have ended when the `with` block ends.

    Their standard output is the write end of one pipe, their standard input the read end of
    another. They end when the second pipe is closed. The first pipe reaches its end when all
    processes have ended, including those that torchrun started.

    Args:
        name: name of the system, for messages.
        environment: environment variables of all processes.
    """

    def __init__(self, name: str, environment: Mapping[str, str]) -> None:
        self.name = name
        self._environment = dict(environment)
        self.events: list[Event] = []
        self._lifeline_in_fd, self._lifeline_fd = os.pipe()
        self._events_fd, self._events_in_fd = os.pipe()
        self._errors_fd = os.memfd_create("errors")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._rest = b""
        self._is_at_end = False

    def start(self, arguments: Sequence[str], **variables: str) -> None:
        """Starts one process.

        Args:
            arguments: module and its arguments.
            variables: further environment variables.
        """
        self._processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "peers.tied", *arguments],
                env=self._environment | variables,
                stdin=self._lifeline_in_fd,
                stdout=self._events_in_fd,
                stderr=self._errors_fd,
                start_new_session=True,
            )
        )

    def wait(self, what: str, condition: Callable[[], bool], *, timeout_s: float) -> None:
        """Blocks until a condition on `events` holds.

        Raises:
            TimeoutError: it did not hold in time; the message ends with the processes' last log.
        """
        end_s = time.monotonic() + timeout_s
        while not condition():
            left_s = end_s - time.monotonic()
            if left_s <= 0 or self._is_at_end:
                raise TimeoutError(f"{self.name}: {what}: not in {timeout_s:.0f} s\n{self._tail()}")
            self._read(left_s)

    def _read(self, timeout_s: float) -> None:
        if not select.select([self._events_fd], [], [], timeout_s)[0]:
            return
        data = os.read(self._events_fd, 1 << 16)
        self._is_at_end = not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        events = (read_event(line.decode(errors="replace")) for line in lines)
        self.events += [event for event in events if event is not None]

    def _tail(self) -> str:
        size = os.fstat(self._errors_fd).st_size
        first = max(0, size - _TAIL_BYTES)
        return os.pread(self._errors_fd, size - first, first).decode(errors="replace")

    def __enter__(self) -> "Watched":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self._lifeline_fd)
        for process in self._processes:
            process.kill()
            process.wait()
        os.close(self._events_in_fd)
        os.close(self._lifeline_in_fd)
        self.wait("end of all processes", lambda: self._is_at_end, timeout_s=_END_TIMEOUT_S)
        os.close(self._events_fd)
        os.close(self._errors_fd)


def peer_environment(bytecode: Path) -> dict[str, str]:
    """Environment of all processes of a peer system; compiles their imports first.

    PYTHONDONTWRITEBYTECODE is removed, because with it a restart would compile all of torch again.

    Args:
        bytecode: directory for the compiled modules.
    """
    environment = {key: v for key, v in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environment |= {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "PYTHONPYCACHEPREFIX": str(bytecode),
    }
    command = [sys.executable, "-c", "import torch.distributed.run, torch._dynamo, torchft"]
    subprocess.run(command, env=environment, check=True, timeout=_IMPORT_TIMEOUT_S)
    return environment
