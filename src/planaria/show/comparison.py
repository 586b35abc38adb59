"""A table of predicted and measured values: iterations, stage actions, memory and transitions."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from statistics import median

from rich.table import Table

from planaria.core.plan import Stage
from planaria.observe.metrics import (
    ActionRecord,
    EventRecord,
    IterationRecord,
    MemoryRecord,
    Report,
)
from planaria.show.words import (
    bytes_text,
    count_text,
    layers_text,
    seconds_range_text,
    seconds_text,
)

_ROWS_MAX = 24  # Rows of actions, and of memory; those that are furthest off are kept.
_NAME_LETTERS_MIN = 12
_NAMES = {"F": "forward", "B": "backward", "BI": "backward, input", "BW": "backward, weights"}


def comparison_table(report: Report) -> Table:
    """The table of a report: iterations of every epoch, actions and memory of the newest epoch that
    reported them, and all transitions."""
    rows = list(_texts(report))
    table = Table(title="predicted and measured", title_justify="left", box=None, pad_edge=False)
    # On a narrow terminal names are wrapped, numbers never: a cut number would be a wrong number.
    table.add_column("", style="bold", overflow="fold", min_width=_NAME_LETTERS_MIN)
    for index, heading in enumerate(("predicted", "corrected", "measured", "off by"), start=1):
        width = max(len(heading), *(len(row[index]) for row in rows)) if rows else None
        table.add_column(heading, justify="right", no_wrap=True, min_width=width)
    for row in rows:
        table.add_row(*row)
    return table


def off_text(predicted: float, measured: float) -> str:
    """Deviation of a measurement from its prediction, such as "+3.1%"; empty without one."""
    if predicted <= 0.0:
        return ""
    off = round(100 * (measured / predicted - 1.0), 1)
    return f"{off:+.1f}%" if off else "0.0%"


def _texts(report: Report) -> Iterator[tuple[str, ...]]:
    """The table's rows."""
    for row in (*_iterations(report.iterations), *_actions(report.actions)):
        yield _row_texts(*row)
    for event in report.events:
        if event.answer and event.predicted_recovery_s_max and event.recovery_s:
            yield _recovery_texts(event)
        if event.answer and event.predicted_downtime_s:
            is_part = event.predicted_recovery_s_max > 0.0
            name = f"{_transition_name(event)}{', transition' if is_part else ''}"
            yield _row_texts(name, event.predicted_downtime_s, 0.0, event.transition_s)
    yield from _memory_rows(report.memory)


def _row_texts(
    name: str, predicted_s: float, corrected_s: float, measured_s: float
) -> tuple[str, ...]:
    corrected = seconds_text(corrected_s) if corrected_s not in (0.0, predicted_s) else ""
    texts = (seconds_text(predicted_s), corrected, seconds_text(measured_s))
    return name, *texts, off_text(corrected_s or predicted_s, measured_s)


def _transition_name(event: EventRecord) -> str:
    return f"{event.answer} at {event.iteration}"


def _recovery_texts(event: EventRecord) -> tuple[str, ...]:
    """The row of a recovery, from when the coordinator noticed the loss until all went on."""
    least_s, most_s = event.predicted_recovery_s_min, event.predicted_recovery_s_max
    expected, measured = seconds_range_text(least_s, most_s), seconds_text(event.recovery_s)
    return _transition_name(event), expected, "", measured, _range_off_text(event)


def expected_text(event: EventRecord) -> str:
    """The predicted range of a recovery's time, counted from when its loss was noticed."""
    least_s, most_s = event.predicted_recovery_s_min, event.predicted_recovery_s_max
    return f"{seconds_range_text(least_s, most_s)} expected"


def _range_off_text(event: EventRecord) -> str:
    """Whether a recovery took a time within its predicted range, or how far off the nearer end."""
    if event.is_foreseen:
        return "within"
    is_short = event.recovery_s < event.predicted_recovery_s_min
    nearest_s = event.predicted_recovery_s_min if is_short else event.predicted_recovery_s_max
    return off_text(nearest_s, event.recovery_s)


def _memory_rows(records: Sequence[MemoryRecord]) -> Iterator[tuple[str, ...]]:
    """A row per rank in the newest epoch; if there are more than _ROWS_MAX, those of the ranks that
    are furthest off, or fullest where nothing can be compared, and the number of the others."""
    newest = [record for record in records if record.epoch == records[-1].epoch]
    num_left = len(newest) - _ROWS_MAX
    if num_left > 0:
        newest = sorted(newest, key=_memory_key, reverse=True)[:_ROWS_MAX]
    for record in newest:
        yield f"memory of rank {record.rank}", *_memory_texts(record)
    if num_left > 0:
        yield f"memory of {count_text(num_left, 'more rank')} is not shown", "", "", "", ""


def _memory_key(record: MemoryRecord) -> tuple[float, int]:
    off = record.tensor_bytes / (record.predicted_bytes or 1) - 1.0 if record.tensor_bytes else 0.0
    return abs(off), record.measured_bytes


def _memory_texts(record: MemoryRecord) -> tuple[str, ...]:
    """Predicted and measured bytes of tensors.

    A job that is not traced knows only its resident memory. That contains much besides tensors, so
    no deviation is given for it.
    """
    predicted = bytes_text(record.predicted_bytes)
    if not record.tensor_bytes:
        return predicted, "", f"resident {bytes_text(record.measured_bytes)}", ""
    off = off_text(record.predicted_bytes, record.tensor_bytes)
    return predicted, "", bytes_text(record.tensor_bytes), off


_Row = tuple[str, float, float, float]


def _iterations(records: Sequence[IterationRecord]) -> Iterator[_Row]:
    """A row per epoch with its median iteration.

    The first iteration of an epoch does one-time setup, so it counts only if it is the only one.
    """
    for epoch, of_epoch in groupby(records, key=lambda record: record.epoch):
        others = list(of_epoch)
        later = others[1:] or others
        measured_s = median(record.seconds for record in later)
        corrected_s = later[-1].predicted_s
        first_s = others[0].predicted_s
        name = f"iteration of epoch {epoch}"
        yield name, first_s, corrected_s if corrected_s != first_s else 0.0, measured_s


def _actions(records: Sequence[ActionRecord]) -> Iterator[_Row]:
    """A row per stage (range of layers) and kind of action in the newest epoch, averaged over
    ranks; those that are furthest off if there are more than _ROWS_MAX."""
    newest = [record for record in records if record.epoch == records[-1].epoch]
    newest.sort(key=_stage_key)
    rows = []
    for (first, end, kind), alike in groupby(newest, key=_stage_key):
        of_ranks = list(alike)
        name = f"{_NAMES[kind]} of {layers_text(Stage(first, end, 1))}"
        predicted_s, corrected_s, measured_s = (
            sum(getattr(record, key) for record in of_ranks) / len(of_ranks)
            for key in ("predicted_s", "corrected_s", "measured_s")
        )
        rows.append((name, predicted_s, corrected_s, measured_s))
    rows.sort(key=lambda row: abs(row[3] / (row[2] or 1.0) - 1.0), reverse=len(rows) > _ROWS_MAX)
    yield from rows[:_ROWS_MAX] if len(rows) > _ROWS_MAX else sorted(rows)


def _stage_key(record: ActionRecord) -> tuple[int, int, str]:
    return record.first_layer, record.end_layer, record.kind
