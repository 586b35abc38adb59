"""Jobs that the scripts for a GPU run with `python -m planaria train`, and what came of them."""

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

import numpy as np

from gpu.running import Ended, Row, run_command, say
from planaria.core.job import ClusterConfig

Tables = Mapping[str, Any]

_TEXT_SEED: Final = 7
_NUM_WORDS: Final = 4096
_WORD_LETTERS: Final = 8


@dataclass(frozen=True, slots=True)
class Started:
    """A job that is to be run.

    Attributes:
        tables: tables of the job file.
        injections: SPECs of the faults to inject.
        keeps_saves: whether the saves stay when the job has ended.
    """

    name: str
    tables: Tables
    injections: tuple[str, ...] = ()
    keeps_saves: bool = False


@dataclass(frozen=True, slots=True)
class JobRun:
    """A job that has ended.

    Attributes:
        report: its report; empty if it wrote none.
        saves: directory of its saves.
    """

    started: Started
    ended: Ended
    report: Mapping[str, Any] = field(repr=False)
    saves: Path

    @property
    def name(self) -> str:
        """Name of the job."""
        return self.started.name

    @property
    def problem(self) -> str:
        """Why there is no whole report; "" if there is."""
        if self.ended.problem or self.report:
            return self.ended.problem
        return f"no report; see {self.ended.log}"

    @property
    def hashes(self) -> tuple[str, str]:
        """The hashes of the final parameters and of the optimizer state; ("", "") without them."""
        final = self.report.get("final", {}) if not self.problem else {}
        return final.get("parameters_sha256", ""), final.get("optimizer_sha256", "")

    @property
    def pipelines(self) -> str:
        """The numbers of nodes of the first pipelines, as in "2+2+2"; "" without a report."""
        pipelines = self.report.get("plan", {}).get("pipelines", ())
        return "+".join(str(len(pipeline["nodes"])) for pipeline in pipelines)

    @property
    def recoveries(self) -> list[Row]:
        """Each event that training stood still for, with its cost in seconds and bytes."""
        keys = ("kind", "nodes", "iteration", "step", "answer", "downtime_s", "detect_s")
        more = ("decide_s", "regroup_s", "transfer_s", "transfer_bytes", "source_tier")
        return [
            {key: event[key] for key in keys + more}
            for event in self.report.get("events", ())
            if event["downtime_s"] > 0.0
        ]

    @property
    def unfired(self) -> list[str]:
        """Kinds and places of the faults whose places never came."""
        return [
            f"{event['kind']}@{event['iteration']}"
            for event in self.report.get("events", ())
            if not event["fired"]
        ]

    def iteration_s(self, *, first: int) -> list[float]:
        """The seconds of the iterations from `first` on."""
        return [record["seconds"] for record in self.report["iterations"][first:]]

    def peak_bytes(self) -> tuple[int, int]:
        """The highest measured peak memory of a rank, and the highest predicted one, in bytes."""
        records = self.report.get("iterations", ())
        measured = max((record["peak_bytes"] for record in records), default=0)
        predicted = max((record["predicted_peak_bytes"] for record in records), default=0)
        return measured, predicted

    def remove_saves(self) -> None:
        """Removes the job's saves."""
        shutil.rmtree(self.saves, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Runner:
    """Runs jobs on a device.

    Attributes:
        directory: directory of job files, logs and reports.
        device: type of the device, as in cluster.device; "cpu" works without that key.
        saves: directory of the saves.
    """

    directory: Path
    device: str
    saves: Path

    @property
    def torch_device(self) -> str:
        """The device as torch names it: planaria's test device is a processor."""
        return "cpu" if self.device == "late" else self.device

    def run(self, started: Started, *, timeout_s: float) -> JobRun:
        """Trains a job to its end; its failure is in the result."""
        directory = self.directory / started.name
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        saves = self.saves / started.name
        shutil.rmtree(saves, ignore_errors=True)
        job, report = directory / "job.toml", directory / "report.json"
        job.write_text(toml_text(started.tables))
        command = [sys.executable, "-m", "planaria", "train", str(job), "--report", str(report)]
        sets = [f'checkpoint.directory="{saves}"', *self._device_keys()]
        command += [word for text in sets for word in ("--set", text)]
        command += [word for spec in started.injections for word in ("--inject", spec)]
        say(f"   {started.name}: begins {' '.join(started.injections)}")
        ended = run_command(command, log=directory / "log", timeout_s=timeout_s)
        read = json.loads(report.read_text()) if report.exists() else {}
        run = JobRun(started=started, ended=ended, report=read, saves=saves)
        if not started.keeps_saves:
            run.remove_saves()
        return run

    def run_all(
        self, jobs: Sequence[Started], *, timeout_s: float, at_once: int
    ) -> tuple[JobRun, ...]:
        """Trains several jobs, so many at a time, each with the same time limit."""
        with ThreadPoolExecutor(max_workers=max(1, at_once)) as pool:
            return tuple(pool.map(lambda job: self.run(job, timeout_s=timeout_s), jobs))

    def _device_keys(self) -> list[str]:
        has_key = any(record.name == "device" for record in fields(ClusterConfig))
        return [f'cluster.device="{self.device}"'] if has_key or self.device != "cpu" else []


def toml_text(tables: Tables) -> str:
    """The tables as a TOML file; a table in a table gets a heading of its own."""
    return "\n".join(_lines(tables, heading="")) + "\n"


def _lines(table: Tables, *, heading: str) -> list[str]:
    inner = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    lines = [f"[{heading}]"] if heading else []
    lines += [f"{key} = {json.dumps(value)}" for key, value in table.items() if key not in inner]
    for key, value in inner.items():
        lines += _lines(value, heading=f"{heading}.{key}" if heading else key)
    return lines


def merged(tables: Tables, changes: Tables) -> dict[str, Any]:
    """The tables with other values for some keys."""
    found = dict(tables)
    for key, value in changes.items():
        is_table = isinstance(value, Mapping) and isinstance(found.get(key), Mapping)
        found[key] = merged(found[key], value) if is_table else value
    return found


def write_text(path: Path, *, num_bytes: int) -> None:
    """Writes a text of words in which some are frequent, the same on every machine."""
    generator = np.random.Generator(np.random.PCG64(_TEXT_SEED))
    letters = generator.integers(97, 123, size=(_NUM_WORDS, _WORD_LETTERS), dtype=np.uint8)
    lengths = generator.integers(2, _WORD_LETTERS + 1, size=_NUM_WORDS)
    words = [bytes(row[:n]) for row, n in zip(letters, lengths, strict=True)]
    draws = generator.zipf(1.3, size=num_bytes // 3) % _NUM_WORDS
    path.write_bytes(b" ".join(words[draw] for draw in draws)[:num_bytes])
