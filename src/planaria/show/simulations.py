"""Simulated jobs: a table for a terminal, and JSON."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Final

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from planaria.observe.ledger import Category
from planaria.observe.recoveries import SourceTier
from planaria.show.words import count_text, share_text
from planaria.simulator.economics.compare import (
    PLANARIA,
    ClusterScenario,
    Interval,
    JobOutcome,
    Outcomes,
    interval,
    ratios,
)

VERSION: Final = 1
_WASTED_HEADING: Final = "Wasted time by the tier that kept the state of a recovery, in seconds:"
_WASTED_COLUMNS: Final = {
    "recoveries": "recoveries",
    "redo_s": "redone",
    "transfer_s": "waited",
    "wasted_s": "wasted",
}
_NAME_LETTERS_MIN: Final = 12
_UNBOUNDED: Final = 10_000  # Number of columns of a terminal that is wider than any table.


def simulation_json(scenario: ClusterScenario, outcomes: Outcomes) -> dict[str, Any]:
    """The content of `planaria simulate --json`."""
    planaria = outcomes.get(PLANARIA)
    return {
        "version": VERSION,
        "scenario": scenario.name,
        "seeds": len(next(iter(outcomes.values()))),
        "failure_free_samples_per_s": _failure_free(scenario),
        "systems": {name: _system_json(scenario, runs) for name, runs in outcomes.items()},
        "versus": {
            name: _interval_json(ratio)
            for name, runs in outcomes.items()
            if planaria and name != PLANARIA and (ratio := ratios(planaria, runs))
        },
    }


def _system_json(scenario: ClusterScenario, runs: Sequence[JobOutcome]) -> dict[str, Any]:
    dollars = [run.node_hours * scenario.price_per_node_hour for run in runs]
    return {
        "goodput_samples_per_s": _interval_json(interval([run.samples_per_s for run in runs])),
        "samples": fmean(run.samples for run in runs),
        "wall_s": fmean(run.wall_s for run in runs),
        "failures": fmean(run.num_failures for run in runs),
        "redone_iterations": fmean(run.num_redone for run in runs),
        "restarts": fmean(run.num_restarts for run in runs),
        "node_hours": fmean(run.node_hours for run in runs),
        "ledger": _mean_ledger(runs),
        "wasted": _mean_wasted(runs),
        "cost": fmean(dollars),
        "cost_per_million_samples": _dollars_per_million(runs, dollars),
    }


def _interval_json(of: Interval) -> dict[str, float | None]:
    return {"mean": of.mean, "low": of.low, "high": of.high}


def _mean_ledger(runs: Sequence[JobOutcome]) -> dict[str, float]:
    return {name: fmean(run.ledger[name] for run in runs) for name in runs[0].ledger}


def _mean_wasted(runs: Sequence[JobOutcome]) -> dict[str, dict[str, float]]:
    return {
        tier: {key: fmean(run.wasted[tier][key] for run in runs) for key in of}
        for tier, of in runs[0].wasted.items()
    }


def _dollars_per_million(runs: Sequence[JobOutcome], dollars: Sequence[float]) -> float | None:
    samples = sum(run.samples for run in runs)
    return 1e6 * sum(dollars) / samples if samples else None


def _failure_free(scenario: ClusterScenario) -> float:
    setting = scenario.setting
    return setting.job.training.global_batch_size / setting.failure_free_s


# -- for a terminal -------------------------------------------------------------------------------


def simulation_table(scenario: ClusterScenario, outcomes: Outcomes) -> Group:
    """The systems with their goodput, what the time was spent on, and what it cost."""
    setting = scenario.setting
    num_seeds = len(next(iter(outcomes.values())))
    heading = (
        f"{scenario.name}: {setting.model} on {count_text(setting.num_nodes, 'node')}, policy "
        f"{setting.job.resilience.policy}, {count_text(num_seeds, 'seed')}"
    )
    rate = f"{_failure_free(scenario):.4g} samples/s"
    free = f"without failures, by the estimator, with whole backwards: {rate}"
    parts: list[RenderableType] = [
        Text(heading, style="bold"),
        Text(free),
        _goodput_table(outcomes),
        _count_table(scenario, outcomes),
        Text("Share of the time:"),
        _ledger_table(outcomes),
    ]
    if tiers := _tiers(outcomes):
        parts += [Text(_WASTED_HEADING), _wasted_table(outcomes, tiers)]
    return Group(*parts)


def _goodput_table(outcomes: Outcomes) -> Table:
    table = _table("system", "samples/s", "95% interval", "planaria is", "95% interval")
    planaria = outcomes.get(PLANARIA)
    for name, runs in outcomes.items():
        goodput = interval([run.samples_per_s for run in runs])
        ratio = ratios(planaria, runs) if planaria and name != PLANARIA else None
        table.add_row(
            name,
            f"{goodput.mean:.4g}",
            _range_text(goodput, ".4g"),
            f"{ratio.mean:.3f}x" if ratio else "",
            _range_text(ratio, ".3f") if ratio else "",
        )
    return table


def _count_table(scenario: ClusterScenario, outcomes: Outcomes) -> Table:
    """Means over seeds of what is counted."""
    headings = ["failures", "iterations\nredone", "restarts", "node\nhours"]
    if scenario.price_per_node_hour:
        headings += ["cost, $", "$ per\nmillion\nsamples"]
    table = _table("system", *headings)
    for name, runs in outcomes.items():
        row = [
            name,
            f"{fmean(run.num_failures for run in runs):.1f}",
            f"{fmean(run.num_redone for run in runs):.1f}",
            f"{fmean(run.num_restarts for run in runs):.1f}",
            f"{fmean(run.node_hours for run in runs):.1f}",
        ]
        if scenario.price_per_node_hour:
            dollars = [run.node_hours * scenario.price_per_node_hour for run in runs]
            each = _dollars_per_million(runs, dollars)
            row += [f"{fmean(dollars):,.2f}", "" if each is None else f"{each:,.2f}"]
        table.add_row(*row)
    return table


def _table(first: str, *headings: str) -> Table:
    """An empty table; its cells are wrapped, never cut."""
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(first, no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", overflow="fold")
    return table


def _range_text(of: Interval, form: str) -> str:
    return "" if of.low is None else f"{of.low:{form}} to {of.high:{form}}"


def _ledger_table(outcomes: Outcomes) -> "_StackedTable":
    """Shares of the wall time by category; a category in which no system spends any is left out."""
    ledgers = {name: _mean_ledger(runs) for name, runs in outcomes.items()}
    spent = [c for c in Category if any(ledger[c] > 0.0 for ledger in ledgers.values())]
    columns = {
        str(category).replace("_", "\n"): [
            share_cell(ledger[category] / ledger["wall"]) for ledger in ledgers.values()
        ]
        for category in spent
    }
    return _StackedTable("system", list(ledgers), columns)


def _tiers(outcomes: Outcomes) -> list[SourceTier]:
    """The tiers from which some job got the state of a recovery, or of nodes that came."""
    wasted = [run.wasted for runs in outcomes.values() for run in runs]
    return [tier for tier in SourceTier if any(any(of[tier].values()) for of in wasted)]


def _wasted_table(outcomes: Outcomes, tiers: Sequence[SourceTier]) -> "_StackedTable":
    """Means over seeds of what recoveries cost, by tier."""
    wasted = {name: _mean_wasted(runs) for name, runs in outcomes.items()}
    columns = {
        f"{tier}:\n{heading}": [_number_cell(of[tier][key]) for of in wasted.values()]
        for tier in tiers
        for key, heading in _WASTED_COLUMNS.items()
    }
    return _StackedTable("system", list(wasted), columns)


def _number_cell(number: float) -> str:
    return f"{number:,.1f}" if number else "-"


def share_cell(share: float) -> str:
    """Like `share_text`, where a small share is told from none."""
    if not share:
        return "-"
    return "< 0.1%" if share < 0.0005 else share_text(share)


def sweep_table(points: Mapping[str, Outcomes]) -> "_StackedTable":
    """The mean goodput of each system, a row for each point of a sweep."""
    names = list(next(iter(points.values())))
    columns = {
        f"{name},\nsamples/s": [_mean_text(outcomes[name]) for outcomes in points.values()]
        for name in names
    }
    return _StackedTable("with", list(points), columns)


def _mean_text(runs: Sequence[JobOutcome]) -> str:
    goodput = interval([run.samples_per_s for run in runs])
    width = "" if goodput.high is None else f" +- {goodput.high - goodput.mean:.2g}"
    return f"{goodput.mean:.4g}{width}"


class _StackedTable:
    """A table whose columns go on in another table below where the terminal is too narrow.

    A name in the first column that leaves no room for any other is folded.

    Args:
        first: heading of the first column, which each of these tables has.
        names: cells of the first column.
        columns: cells of the other columns by their headings.
    """

    def __init__(
        self, first: str, names: Sequence[str], columns: Mapping[str, Sequence[str]]
    ) -> None:
        self._first, self._names, self._columns = first, names, columns

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The tables, each with as many columns as there is room for, and at least one."""
        unbounded = options.update(max_width=_UNBOUNDED)

        def num_over(headings: Sequence[str], letters: int) -> int:
            table = self._table(headings, letters)
            return console.measure(table, options=unbounded).maximum - options.max_width

        longest = letters = max(len(name) for name in (self._first, *self._names))
        most_over = max((num_over([heading], longest) for heading in self._columns), default=0)
        if most_over > 0:
            letters = max(_NAME_LETTERS_MIN, min(longest - most_over, options.max_width // 2))
        headings: list[str] = []
        for heading in self._columns:
            if headings and num_over([*headings, heading], letters) > 0:
                yield self._table(headings, letters)
                headings = []
            headings.append(heading)
        yield self._table(headings, letters)

    def _table(self, headings: Sequence[str], letters: int) -> Table:
        """The table with these columns, and with names of this width."""
        table = _table(self._first, *headings)
        table.columns[0].width = letters
        table.columns[0].no_wrap = False
        table.columns[0].overflow = "fold"
        for row, name in enumerate(self._names):
            table.add_row(name, *(self._columns[heading][row] for heading in headings))
        return table
