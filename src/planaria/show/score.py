"""The results of many runs under faults, as a table and as JSON."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rich import box
from rich.table import Table


class ScoredRun(Protocol):
    """The part of `RunOutcome` in chaos/runs.py that is shown."""

    @property
    def number(self) -> int: ...
    @property
    def specs(self) -> tuple[str, ...]: ...
    @property
    def surroundings(self) -> tuple[str, ...]: ...
    @property
    def injected_faults(self) -> Mapping[str, int]: ...
    @property
    def reason(self) -> str: ...
    @property
    def justification(self) -> str: ...
    @property
    def undecidable(self) -> str: ...
    @property
    def is_resumed(self) -> bool: ...
    @property
    def violations(self) -> tuple[str, ...]: ...
    @property
    def seconds(self) -> float: ...


def run_text(run: ScoredRun) -> str:
    """One line with the faults of a run and its result."""
    result = "survived, the same bits"
    if run.violations:
        result = "DID NOT END AS IT MUST"
    elif run.undecidable:
        result = f"not judged: {run.undecidable}"
    elif run.reason:
        result = f"ended early: {run.justification}; resumed to the same bits"
    words = " ".join((*run.specs, *run.surroundings))
    return f"run {run.number}, {run.seconds:.1f} s: {words}: {result}"


def score(runs: Sequence[ScoredRun]) -> dict[str, Any]:
    """The numbers of all runs, as JSON."""
    faults: Counter[str] = Counter()
    surroundings: Counter[str] = Counter()
    for run in runs:
        faults.update(run.injected_faults)
        surroundings.update(word.partition("@")[0] for word in run.surroundings)
    ended = [run for run in runs if run.reason]
    survived = [run for run in runs if not (run.reason or run.violations or run.undecidable)]
    return {
        "runs": len(runs),
        "faults": sum(faults.values()),
        "faults_by_kind": dict(sorted(faults.items())),
        "surroundings": dict(sorted(surroundings.items())),
        "survived_identical": len(survived),
        "ended_early": len(ended),
        "justified": sum(bool(run.justification) for run in ended),
        "resumed_identical": sum(run.is_resumed for run in ended),
        "undecidable": sum(bool(run.undecidable) for run in runs),
        "failures": sum(bool(run.violations) for run in runs),
        "slowest_s": max((run.seconds for run in runs), default=0.0),
    }


def score_table(runs: Sequence[ScoredRun]) -> Table:
    """The numbers of all runs, as a table."""
    numbers = score(runs)
    kinds, surroundings = (
        ", ".join(f"{count} {name}" for name, count in numbers[key].items())
        for key in ("faults_by_kind", "surroundings")
    )
    table = Table(box=box.SIMPLE_HEAD, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    rows = (
        ("runs", "runs", f"the slowest took {numbers['slowest_s']:.1f} s"),
        ("faults", "faults", kinds),
        ("survived", "survived_identical", "with the bits of the baseline run"),
        (
            "ended early",
            "ended_early",
            "too few nodes or layers were left, workers failed alike, or SIGHUP came",
        ),
        ("  with good reason", "justified", "as the faults that struck explain"),
        ("  resumed", "resumed_identical", "to the bits of the baseline run"),
        ("not judged", "undecidable", "a bit flipped in the only holder that was left"),
        ("failures", "failures", ""),
    )
    for name, key, about in rows:
        table.add_row(name, str(numbers[key]), about)
    if surroundings:
        table.add_row("surroundings", str(sum(numbers["surroundings"].values())), surroundings)
    return table
