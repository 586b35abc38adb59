"""Compares the predictions of `make demo` with measurements, in many runs on this machine.

The job trains on six emulated nodes, two of which are killed. The nodes share the processors of
this machine, and predictions have to take that into account. The goals, over all runs:

- The median iteration of each epoch, before and after each loss, is within 25% of the prediction at
  the beginning of the epoch, and within 25% of that at its end, by the profile as the job has
  corrected it by then. The median of these errors is within 10%.
- At least 9 of 10 recoveries, from when the loss is noticed until every rank goes on, take a time
  in the predicted range.

The first iteration of an epoch is left out, as in the report's own table, since it does one-time
setup.

The machine has to be quiet, as nobody can predict what other programs take of its processors. Their
load in the second before a run is printed with it.

`--runs N` sets the number of runs. `--results FILE` keeps the figures of each run as a line of
JSON; runs that are in the file are not repeated. Exits 1 if a goal is missed.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import psutil

from planaria.core.inject import parse_injection
from planaria.job.training_job import Job
from planaria.observe.metrics import EventRecord, IterationRecord, Report

VERSION: Final = 1  # Version of the figures of a run.
JOB: Final = Path(__file__).parents[1] / "examples" / "gpt2-text.toml"
NODES: Final = 6
FAULTS: Final = ("kill:4@15.backward", "kill:1@30.commit")  # The same as in examples/survive.py.
EACH_GOAL: Final = 0.25
MEDIAN_GOAL: Final = 0.10
RANGE_GOAL: Final = 0.9


@dataclass(frozen=True, slots=True)
class Iterations:
    """The iterations of an epoch.

    Attributes:
        first_s: predicted time of an iteration when the epoch began.
        newest_s: predicted time of an iteration when the epoch ended.
        measured_s: median time of an iteration.
    """

    epoch: int
    first_s: float
    newest_s: float
    measured_s: float

    @property
    def errors(self) -> tuple[float, float]:
        """The deviation of the median from each prediction, as a share of the prediction."""
        return (
            abs(self.measured_s / self.first_s - 1.0),
            abs(self.measured_s / self.newest_s - 1.0),
        )


@dataclass(frozen=True, slots=True)
class Recovery:
    """The predicted and the measured time of a recovery, from when its loss was noticed.

    Attributes:
        least_s, most_s: ends of the predicted range.
        likely_s: most likely time, as predicted.
    """

    answer: str
    least_s: float
    likely_s: float
    most_s: float
    measured_s: float

    @property
    def is_foreseen(self) -> bool:
        """Whether the measured time is in the predicted range."""
        return self.least_s <= self.measured_s <= self.most_s


@dataclass(frozen=True, slots=True)
class Run:
    """The figures of one run.

    Attributes:
        busy: share of the processors that other programs took before the run, 0 to 1.
    """

    iterations: tuple[Iterations, ...]
    recoveries: tuple[Recovery, ...]
    busy: float


def main() -> int:
    """Does the runs that are missing and prints the results of all; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    runs = known_runs(options.results)[: options.runs] if options.results else []
    for number, run in enumerate(runs):
        print_run(number, run)
    for number in range(len(runs), options.runs):
        run = measured_run()
        runs.append(run)
        print_run(number, run)
        if options.results:
            with options.results.open("a") as lines:
                lines.write(run_line(run))
    texts, are_met = verdicts(runs)
    print("\n".join(texts))
    return 0 if are_met else 1


def measured_run() -> Run:
    """Trains the job once; returns the figures."""
    with tempfile.TemporaryDirectory() as directory:
        overrides = [f"cluster.nodes={NODES}", f'checkpoint.directory="{directory}"']
        job = Job.from_file(JOB, overrides=overrides)
        busy = psutil.cpu_percent(interval=1.0) / 100
        report = job.train(injections=tuple(map(parse_injection, FAULTS))).report
    return run_of(report, busy=busy)


def run_of(report: Report, *, busy: float) -> Run:
    """The figures of a report."""
    groups = [list(group) for _, group in groupby(report.iterations, key=_epoch)]
    return Run(
        iterations=tuple(_iterations(group) for group in groups if len(group) > 1),
        recoveries=tuple(_recovery(event) for event in report.events if event.recovery_s),
        busy=busy,
    )


def _epoch(record: IterationRecord) -> int:
    return record.epoch


def _iterations(records: Sequence[IterationRecord]) -> Iterations:
    later = records[1:]
    return Iterations(
        epoch=records[0].epoch,
        first_s=records[0].predicted_s,
        newest_s=records[-1].predicted_s,
        measured_s=statistics.median(record.seconds for record in later),
    )


def _recovery(event: EventRecord) -> Recovery:
    return Recovery(
        answer=event.answer,
        least_s=event.predicted_recovery_s_min,
        likely_s=event.predicted_recovery_s,
        most_s=event.predicted_recovery_s_max,
        measured_s=event.recovery_s,
    )


def print_run(number: int, run: Run) -> None:
    """Prints a line for each epoch and each recovery of a run."""
    print(f"run {number}; the processors were {100 * run.busy:.0f}% busy before it")
    for one in run.iterations:
        first, newest = one.errors
        print(
            f"  iteration of epoch {one.epoch}: predicted {one.first_s:.3f} s, at its end "
            f"{one.newest_s:.3f} s, measured {one.measured_s:.3f} s: off by {100 * first:.1f}% and "
            f"{100 * newest:.1f}%"
        )
    for loss in run.recoveries:
        print(
            f"  recovery, {loss.answer}: expected {loss.least_s:.3f} to {loss.most_s:.3f} s, "
            f"likely {loss.likely_s:.3f} s, measured {loss.measured_s:.3f} s: "
            f"{'within' if loss.is_foreseen else 'OUTSIDE'}",
            flush=True,
        )


def verdicts(runs: Sequence[Run]) -> tuple[list[str], bool]:
    """The results in words, and whether all goals are met."""
    errors = [error for run in runs for one in run.iterations for error in one.errors]
    foreseen = [loss.is_foreseen for run in runs for loss in run.recoveries]
    if not errors or not foreseen:
        return ["no run has iterations and recoveries: nothing is shown"], False
    worst, middle = max(errors), statistics.median(errors)
    share = sum(foreseen) / len(foreseen)
    met = (worst <= EACH_GOAL, middle <= MEDIAN_GOAL, share >= RANGE_GOAL)
    iterations = f"iterations: of {len(errors)} errors the worst is {100 * worst:.1f}%, goal"
    recoveries = f"recoveries: {sum(foreseen)} of {len(foreseen)} in their range, goal"
    texts = [
        f"{iterations} {100 * EACH_GOAL:.0f}%: {_verdict(met[0])}",
        f"their median is {100 * middle:.1f}%, goal {100 * MEDIAN_GOAL:.0f}%: {_verdict(met[1])}",
        f"{recoveries} {100 * RANGE_GOAL:.0f}%: {_verdict(met[2])}",
    ]
    return texts, all(met)


def _verdict(is_met: bool) -> str:
    return "met" if is_met else "MISSED"


def run_line(run: Run) -> str:
    """A run as a line of JSON."""
    return json.dumps({"version": VERSION, **asdict(run)}) + "\n"


def known_runs(path: Path) -> list[Run]:
    """The runs in a file that have this version; none if there is no file."""
    if not path.exists():
        return []
    lines = map(json.loads, path.read_text().splitlines())
    return [_run(line) for line in lines if line["version"] == VERSION]


def _run(line: dict[str, Any]) -> Run:
    return Run(
        iterations=tuple(Iterations(**one) for one in line["iterations"]),
        recoveries=tuple(Recovery(**one) for one in line["recoveries"]),
        busy=line["busy"],
    )


if __name__ == "__main__":
    sys.exit(main())
