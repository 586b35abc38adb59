"""The head of a job in processes of its own (`planaria train --listen`), and what they cost."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec
import psutil

from planaria.core.plan import ModelProfile
from planaria.job.planning import read_profile
from planaria.transport.credentials import Credentials, read_credentials, write_credentials
from planaria.transport.sockets import Address

JOB: Final = """
name = "agents"

[model]
kind = "paced"
profile = "profile.json"
time_scale = 0.1

[training]
iterations = 1_000_000
global_batch_size = {num_microbatches}
microbatch_size = 1

[checkpoint]
directory = "checkpoints"

[cluster]
nodes = {num_nodes}
device_memory_bytes = 640_000
"""
MICROBATCHES_A_NODE: Final = 2
_JOIN: Final = "planaria agent --join "
_SMALLER: Final = 100_000
_END_TIMEOUT_S: Final = 20.0
_POLL_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class CpuSeconds:
    """Processor time of a head's processes, in seconds.

    Attributes:
        serving_s: that of the launcher, the fork server and the coordinator.
        searching_s: that of the process that looks for answers ahead, at a low priority.
    """

    serving_s: float
    searching_s: float

    def __sub__(self, other: "CpuSeconds") -> "CpuSeconds":
        return CpuSeconds(self.serving_s - other.serving_s, self.searching_s - other.searching_s)


class Head:
    """A head that waits for machines in a directory of its own.

    Args:
        num_nodes: number of machines that it waits for.

    Attributes:
        credentials: contents of its token file.
    """

    def __init__(self, directory: Path, *, num_nodes: int) -> None:
        token = directory / "token"
        write_credentials(token)
        self.credentials: Credentials = read_credentials(token)
        num_microbatches = MICROBATCHES_A_NODE * num_nodes
        text = JOB.format(num_nodes=num_nodes, num_microbatches=num_microbatches)
        (directory / "job.toml").write_text(text)
        (directory / "profile.json").write_bytes(msgspec.json.encode(_profile()))
        self._output = directory / "output"
        command = (
            *(sys.executable, "-m", "planaria", "train", "job.toml", "--listen", "127.0.0.1:0"),
            *("--nodes", str(num_nodes), "--token-file", str(token)),
        )
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        """All that it has printed."""
        return self._output.read_text()

    def address(self, *, timeout_s: float) -> Address:
        """The address at which it listens, once it does."""
        deadline_s = time.monotonic() + timeout_s
        while _JOIN not in self.output:
            self.check()
            assert time.monotonic() < deadline_s, self.output
            time.sleep(_POLL_S)
        host, _, port = self.output.partition(_JOIN)[2].split()[0].rpartition(":")
        return host, int(port)

    def check(self) -> None:
        """Raises what it has printed if it has ended."""
        if self._process.poll() is not None:
            raise RuntimeError(self.output)

    def cpu_s(self) -> CpuSeconds:
        """The processor time that it has taken so far."""
        serving_s = searching_s = 0.0
        own = psutil.Process(self._process.pid)
        for process in (own, *own.children(recursive=True)):
            times = process.cpu_times()
            if process.nice() > own.nice():
                searching_s += times.user + times.system
            else:
                serving_s += times.user + times.system
        return CpuSeconds(serving_s, searching_s)

    def is_searching(self) -> bool:
        """Whether the process that looks for answers ahead computes at this moment."""
        own = psutil.Process(self._process.pid)
        searchers = [p for p in own.children(recursive=True) if p.nice() > own.nice()]
        return any(
            p.status() in (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP) for p in searchers
        )

    def close(self) -> None:
        """Ends all its processes."""
        with contextlib.suppress(psutil.NoSuchProcess):
            own = psutil.Process(self._process.pid)
            processes = [own, *own.children(recursive=True)]
            self._process.send_signal(signal.SIGKILL)
            psutil.wait_procs(processes, timeout=_END_TIMEOUT_S)
        self._process.wait()


def _profile() -> ModelProfile:
    """Llama2 7B with a hundred thousandth of its bytes, so that layers move at once."""
    profile = read_profile(Path("llama2-7b"))
    layers = tuple(
        replace(
            layer,
            parameter_bytes=layer.parameter_bytes // _SMALLER,
            optimizer_bytes=layer.optimizer_bytes // _SMALLER,
            activation_bytes=layer.activation_bytes // _SMALLER,
            output_bytes=layer.output_bytes // _SMALLER,
        )
        for layer in profile.layers
    )
    return replace(profile, layers=layers)
