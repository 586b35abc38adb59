"""Published numbers beside ours: tables for a terminal, and JSON."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from planaria.papers.rows import Claim, Experiment, How, PublishedRow
from planaria.show.words import count_text

_CLAIMS: Final = {Claim.EQUAL: "", Claim.OVER: "> ", Claim.UNDER: "< "}

Results = Mapping[str, Sequence[PublishedRow]]  # Rows by the name of their experiment.


def reproduction_table(experiment: Experiment, rows: Sequence[PublishedRow]) -> Group:
    """The rows of an experiment, and below them the notes that its rows have."""
    names = dict.fromkeys(name for row in rows for name in row.keys)
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(", ".join(names))
    for title in ("published", "ours", "ratio"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("how", no_wrap=True)
    table.add_column("", no_wrap=True)
    notes: dict[str, int] = {}
    for row in rows:
        note = row.full_note
        mark = f"[{notes.setdefault(note, len(notes) + 1)}]" if note else ""
        table.add_row(*row_texts(row), Text(mark))
    parts: list[RenderableType] = [
        Text(f"{experiment.name}: {experiment.title}", style="bold"),
        Text(f"{experiment.source}; {experiment.unit}. {experiment.note}".rstrip()),
        table,
        *(Text(f"[{number}] {note}") for note, number in notes.items()),
        Text(_verdict(rows)),
    ]
    return Group(*parts)


def reproductions_table(experiments: Mapping[str, Experiment], results: Results) -> Group:
    """A row for each experiment: how many of its printed numbers come back, and how many of those
    that follow from no other printed number; and below, why others do not."""
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("experiment", no_wrap=True)
    table.add_column("what it is")
    for title in ("rows with a\nprinted number", "come\nback", "of their\nown", "come\nback"):
        table.add_column(title, justify="right")
    table.add_column("how")
    for name, rows in results.items():
        ways = dict.fromkeys(row.how.value for row in rows)
        table.add_row(
            name,
            experiments[name].title,
            str(sum(row.is_comparable for row in rows)),
            str(sum(row.has_come_back for row in rows)),
            str(sum(row.is_own for row in rows)),
            str(sum(row.is_own and row.has_come_back for row in rows)),
            ", ".join(ways),
        )
    return Group(table, Text("What does not come back:"), *_reasons(results))


def _reasons(results: Results) -> Iterator[Text]:
    """A line for each reason, with the number of rows that it is about."""
    for name, rows in results.items():
        reasons = Counter(
            row.full_note
            for row in rows
            if row.how is How.NOT or (row.is_comparable and not row.has_come_back)
        )
        for reason, count in reasons.items():
            yield Text(f"{name}, {count_text(count, 'row')}: {reason}")


def reproduction_json(name: str, rows: Sequence[PublishedRow]) -> dict[str, Any]:
    """The content of `planaria reproduce NAME --json`."""
    return {
        "name": name,
        "rows": [
            {
                **row.keys,
                "published": row.published,
                "ours": row.ours,
                "ratio": row.ratio,
                "how": row.how_text,
                "is_own": row.is_own,
            }
            for row in rows
        ],
    }


def row_texts(row: PublishedRow) -> tuple[str, str, str, str, str]:
    """The name of a row, the published number, ours, their ratio, and how ours came about."""
    return (
        keys_text(row),
        f"{_CLAIMS[row.claim]}{number_text(row.published)}",
        number_text(row.ours),
        "" if row.ratio is None else _ratio_text(row.ratio),
        row.how.value,
    )


def keys_text(row: PublishedRow) -> str:
    """The keys of a row, separated by commas."""
    texts = (f"{key:g}" if isinstance(key, float) else str(key) for key in row.keys.values())
    return ", ".join(texts)


def number_text(number: float | None) -> str:
    """A number with as many digits as a table of a paper prints."""
    if number is None:
        return "-"
    digits = 0 if abs(number) >= 10_000 else 2 if abs(number) >= 10 or not number else 3
    return f"{number:,.{digits}f}"


def _ratio_text(ratio: float) -> str:
    return f"{ratio:.3f}" if ratio >= 0.1 else f"{ratio:.2g}"


def _verdict(rows: Sequence[PublishedRow]) -> str:
    num_printed = sum(row.is_comparable for row in rows)
    num_back = sum(row.has_come_back for row in rows)
    if not num_printed:
        return "No row has a printed number that could come back."
    verb = "comes" if num_back == 1 else "come"
    rows_text = count_text(num_printed, "row")
    text = f"{num_back} of {rows_text} with a printed number {verb} back"
    own = [row for row in rows if row.is_own]
    if len(own) == num_printed:
        return text
    num_own = sum(row.has_come_back for row in own)
    return f"{text}; {num_own} of the {len(own)} that are results of their own"
