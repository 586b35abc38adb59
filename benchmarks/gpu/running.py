"""Runs the parts of a script that measures on a GPU, within a number of minutes.

Parts are independent: one that fails is reported, and the next one begins. Everything is printed at
once, and the results are written after each part, so that a run that is cut off has told what it
knew. Commands run in process groups of their own that end with their time limit.
"""

import argparse
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import psutil
import torch

ROOT: Final = Path(__file__).parents[2]
VERSION: Final = 1  # Version of the results.
TAIL_LINES: Final = 40
_KILL_TIMEOUT_S: Final = 10.0
_PR_SET_PDEATHSIG: Final = 1

# tests/conftest.py needs packages that a machine without a network may not have.
_COMM_TESTS: Final = (sys.executable, "-m", "pytest", "-q", "-rs", "--noconftest")
_COMM_FILES: Final = ("test_device_comm.py", "test_nccl_comm.py")

Row = dict[str, Any]


class NotRunError(Exception):
    """Raised by a part that cannot be run here; the text says why."""


def say(text: str) -> None:
    """Prints a line at once."""
    print(text, flush=True)


# -- the machine -----------------------------------------------------------------------------------


def accelerator() -> str:
    """The type of this machine's accelerator, as torch names it; "" if torch finds none."""
    if not torch.accelerator.is_available():
        return ""
    device = torch.accelerator.current_accelerator()
    return "" if device is None else device.type


def machine_facts(device: str) -> dict[str, str]:
    """What a reader of results has to know of the machine."""
    return {
        "device": device,
        "gpu": _gpu_name() if device not in ("cpu", "late") else "none",
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "processors": str(len(os.sched_getaffinity(0))),
        "memory": f"{psutil.virtual_memory().total / 1e9:.0f} GB",
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
    }


def _gpu_name() -> str:
    """The name and driver of the first GPU; from nvidia-smi, which takes no memory of the GPU."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    if shutil.which(query[0]) is None:
        return "unknown"
    result = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    return result.stdout.strip().partition("\n")[0] or "unknown"


def _commit() -> str:
    """The commit of the repository; "unknown" outside a clone."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    if shutil.which(command[0]) is None:
        return "unknown"
    result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return result.stdout.strip() or "unknown"


# -- commands --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ended:
    """A command that has ended.

    Attributes:
        code: exit code; None: it did not end in time and was killed.
        log: file with its output.
    """

    code: int | None
    seconds: float
    log: Path

    @property
    def problem(self) -> str:
        """Why the command failed, with the end of its output; "" if it did not fail."""
        if self.code == 0:
            return ""
        why = f"exit code {self.code}" if self.code is not None else "killed at its time limit"
        lines = self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        log = self.log.resolve()
        where = log.relative_to(ROOT) if log.is_relative_to(ROOT) else log
        text = "\n".join([f"{why} after {self.seconds:.0f} s; the end of {where}:", *lines])
        return text.replace(f"{ROOT}/", "")


def run_command(
    command: Sequence[str],
    *,
    log: Path,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
) -> Ended:
    """Runs a command with its output in a file; kills it and all its descendants in the end.

    The command dies with this thread, also if this process is killed: it is in a session of its
    own, and would take the device from the next measurement.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    began_s = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=_environment(environment or {}),
            start_new_session=True,
            preexec_fn=_die_with_parent(),
        )
        try:
            code: int | None = process.wait(timeout=max(1.0, timeout_s))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end_group(process)
    return Ended(code, time.monotonic() - began_s, log)


def comm_tests(chosen: str) -> tuple[str, ...]:
    """The command that runs tests of what goes between ranks; it needs pytest.

    Args:
        chosen: expression of pytest's option -k.
    """
    files = (str(ROOT / "tests" / "engine" / "comm" / name) for name in _COMM_FILES)
    return (*_COMM_TESTS, "-k", chosen, *files)


def _die_with_parent() -> Callable[[], None]:
    """A function for a new process, which the kernel then kills when its parent's thread ends."""
    libc = ctypes.CDLL(None)

    def ask_kernel() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    return ask_kernel


def last_json(log: Path) -> Row:
    """The JSON of the last line of an output that is an object.

    Raises:
        ValueError: no line is an object.
    """
    for line in reversed(log.read_text(errors="replace").splitlines()):
        if line.startswith("{"):
            found: Row = json.loads(line)
            return found
    raise ValueError(f"{log} has no line of JSON")


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    """This process's environment, in which children find planaria and the scripts' modules."""
    known = os.environ.get("PYTHONPATH", "")
    path = [str(ROOT / "src"), str(ROOT / "benchmarks"), str(ROOT / "tests")]
    offline = {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "COLUMNS": "120"}
    return {**os.environ, "PYTHONPATH": ":".join(filter(None, [known, *path])), **offline, **more}


def _end_group(process: "subprocess.Popen[bytes]") -> None:
    """Kills what is left of a command's processes, those in other groups too."""
    try:
        others = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        others = []
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for other in others:
        with suppress(psutil.NoSuchProcess):
            other.kill()
    process.wait(timeout=_KILL_TIMEOUT_S)


# -- parts -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Parts:
    """Runs parts and keeps what they found.

    Attributes:
        script: name of the script, for the results.
        minutes: time for all parts.
        results: file that takes the results; None: none is written.
        only: names of the parts to run; empty: all.
    """

    script: str
    facts: Mapping[str, str]
    minutes: float
    results: Path | None
    only: tuple[str, ...] = ()
    began_s: float = field(default_factory=time.monotonic)
    done: list[Row] = field(default_factory=list)

    def left_s(self) -> float:
        """Seconds that are left for all parts."""
        return 60.0 * self.minutes - (time.monotonic() - self.began_s)

    def run(self, name: str, part: Callable[[], list[Row]], *, least_s: float) -> None:
        """Runs a part, unless fewer than `least_s` seconds are left; keeps and prints its outcome.

        A part returns its rows; a row whose `is_met` is false has missed a goal.
        """
        if self.only and name not in self.only:
            return
        began_s = time.monotonic()
        say(f"\n== {name} ({self.left_s():.0f} s left)")
        rows: list[Row] = []
        reason = ""
        if self.left_s() < least_s:
            outcome, reason = "not run", f"it needs {least_s:.0f} s, {self.left_s():.0f} s are left"
        else:
            try:
                rows = part()
                outcome = "met" if all(row.get("is_met", True) for row in rows) else "MISSED"
            except NotRunError as error:
                outcome, reason = "not run", str(error)
            except Exception as error:
                outcome, reason = "failed", f"{type(error).__name__}: {error}"
                traceback.print_exc(file=sys.stdout)
        seconds = time.monotonic() - began_s
        say(f"== {name}: {outcome}{': ' + reason if reason else ''} ({seconds:.0f} s)")
        row = {"name": name, "outcome": outcome, "reason": reason, "seconds": seconds, "rows": rows}
        self.done.append(row)
        self._write()

    def _write(self) -> None:
        if self.results is None:
            return
        found = {
            "version": VERSION,
            "script": self.script,
            "machine": dict(self.facts),
            "seconds": time.monotonic() - self.began_s,
            "parts": self.done,
        }
        self.results.parent.mkdir(parents=True, exist_ok=True)
        beside = self.results.with_suffix(".part")
        beside.write_text(json.dumps(found, indent=1) + "\n")
        beside.replace(self.results)

    def report(self) -> int:
        """Prints the outcome of each part; returns 0 if parts were run and none missed its goal."""
        say(f"\n{self.script} on " + ", ".join(f"{key} {self.facts[key]}" for key in self.facts))
        for part in self.done:
            say(f"  {part['outcome']:8} {part['name']} ({part['seconds']:.0f} s) {part['reason']}")
        outcomes = {part["outcome"] for part in self.done}
        return 0 if outcomes & {"met"} and not outcomes & {"MISSED", "failed"} else 1


def begin_parts(script: str, options: argparse.Namespace, device: str) -> Parts | None:
    """The parts of a script, none of them run yet; None, and a line that says so, without a GPU.

    Args:
        options: options of the script that say where and for how long its parts run.
        device: type of the device; "": there is none.
    """
    if not device:
        say(f"{script}: skipped, torch finds no GPU (--device cpu --small runs it without)")
        return None
    facts = machine_facts(device)
    say(", ".join(f"{key} {value}" for key, value in facts.items()))
    options.directory.mkdir(parents=True, exist_ok=True)
    return Parts(
        script=script,
        facts=facts,
        minutes=options.minutes,
        results=options.results,
        only=tuple(options.only),
    )
