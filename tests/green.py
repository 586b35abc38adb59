"""Runs `make test` at one commit again and again, over several sittings, and keeps each result.

    python tests/green.py --runs 20

The commit is cloned into a temporary directory with an environment of its own, so that the working
tree may change meanwhile. Each finished run appends a line to the results file, so a sitting may
end at any moment: the next one goes on from what the file holds. A red run prints what failed and
why, and starts the count over.

    {"commit": .., "started": .., "seconds": .., "status": .., "failures": [..], "steal": ..}

`seconds` is the wall time of `make test`, without the installation; `steal` the share of the
machine's time that others took meanwhile.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec
import psutil

ROOT: Final = Path(__file__).resolve().parent.parent
RESULTS: Final = ROOT / "benchmarks" / "results" / "green.jsonl"
GOAL_S: Final = 12 * 60.0
_FAILURE_STARTS: Final = ("FAILED", "ERROR", "make: ***")
_REPORT_START: Final = "= FAILURES ="
_FAILURES_MAX: Final = 50


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One run of `make test`.

    Attributes:
        status: exit status of make, 0 if everything passed.
        failures: lines of the output that name what failed.
        steal: share of the machine's processor time that other machines took, 0 to 1.
    """

    commit: str
    started: str
    seconds: float
    status: int
    failures: tuple[str, ...]
    steal: float


def num_green(runs: Sequence[Run], commit: str) -> int:
    """Green runs at the commit since its last red one."""
    count = 0
    for run in runs:
        if run.commit == commit:
            count = count + 1 if run.status == 0 else 0
    return count


def read_runs(path: Path) -> list[Run]:
    """The runs that a results file holds; none if there is no file."""
    if not path.exists():
        return []
    return [msgspec.json.decode(line, type=Run) for line in path.read_bytes().splitlines()]


def run_once(clone: Path, commit: str) -> Run:
    """Runs `make test` in a clone."""
    started, start_s, before = datetime.now(UTC), time.monotonic(), psutil.cpu_times()
    with tempfile.TemporaryFile("w+") as output:
        made = subprocess.run(
            ["make", "test"],
            cwd=clone,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
        output.seek(0)
        text = output.read()
    failures = [line for line in text.splitlines() if line.startswith(_FAILURE_STARTS)]
    if made.returncode:
        print(text.partition(_REPORT_START)[2] or text)
    after = psutil.cpu_times()
    total_s = sum(after) - sum(before)
    return Run(
        commit=commit,
        started=started.isoformat(timespec="seconds"),
        seconds=round(time.monotonic() - start_s, 1),
        status=made.returncode,
        failures=tuple(failures[:_FAILURES_MAX]),
        steal=round((after.steal - before.steal) / total_s, 4) if total_s > 0 else 0.0,
    )


def cloned(repository: Path, commit: str, directory: Path) -> Path:
    """A clone at the commit, installed."""
    clone = directory / "clone"
    subprocess.run(["git", "clone", "--quiet", str(repository), str(clone)], check=True)
    subprocess.run(["git", "checkout", "--quiet", "--detach", commit], cwd=clone, check=True)
    subprocess.run(["make", ".venv/ready"], cwd=clone, check=True, stdout=subprocess.DEVNULL)
    return clone


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs until enough runs in a row are green (0), or one is red or too slow (1)."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=20, help="green runs in a row that are wanted")
    parser.add_argument("--commit", default="HEAD")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--repository", type=Path, default=ROOT)
    options = parser.parse_args(arguments)
    revision = ["git", "rev-parse", "--verify", f"{options.commit}^{{commit}}"]
    commit = subprocess.check_output(revision, cwd=options.repository, text=True).strip()
    count = num_green(read_runs(options.results), commit)
    print(f"{commit}: {count} of {options.runs} runs in a row are green", flush=True)
    if count >= options.runs:
        return 0
    options.results.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="planaria-green-") as directory:
        clone = cloned(options.repository, commit, Path(directory))
        while count < options.runs:
            run = run_once(clone, commit)
            with options.results.open("ab") as results:
                results.write(msgspec.json.encode(run) + b"\n")
            count = num_green(read_runs(options.results), commit)
            verdict = "green" if run.status == 0 else f"red: {'; '.join(run.failures)}"
            late = f", above the goal of {GOAL_S:.0f} s" if run.seconds > GOAL_S else ""
            print(f"{run.started}: {run.seconds:.0f} s{late}, {verdict}; {count} in a row")
            sys.stdout.flush()
            if run.status:
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
