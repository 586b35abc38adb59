"""Reads files of what happened to the nodes of a cluster; `recorded/` holds those that are shipped.

Formats, told apart by their first line:

- Bamboo's and Oobleck's: rows `480000,add,node1` and `540000,remove,node1`: milliseconds, change,
  allocation.
- Parcae's: a JSON list in each line: milliseconds, `"add"`, `"remove"`, `"no-op"` or
  `"migration"`, and a table with the allocations (`"nodes"`) and the line's `"duration"` in
  milliseconds. Lines that begin with # are left out.
- A series of counts: rows of a time and the number of allocations from then on, below a line
  `time_s,nodes` (or `time_ms`, `time_h`); without that line times are milliseconds, as in Parcae's
  p3.csv. The file does not say which allocations are lost; the replay draws them.
- InfiniteHBD's: a JSON list of tables with `node_id`, `event_time` in days, `event_type`
  (`fault_start` or `fault_end`) and `fault_type`. The nodes are machines. Faults of a machine that
  overlap are one loss.
- planaria's own, below a line `time_s,event,nodes` with, as needed, the further columns
  `deadline_s`, `speed` and `cause`. `event` is lost, back, notice, slowed or restored; `nodes` are
  numbers of machines and ranges of them, `0 3 8-11`; a notice has the time of its loss in
  `deadline_s`. A row `7200,end,` says how long the trace is, if that is longer than to its last
  event. Empty lines and lines that begin with # are left out.
"""

import csv
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

from planaria.errors import ConfigError
from planaria.simulator.failures.occurrences import OccurrenceKind
from planaria.simulator.failures.recorded_trace import ANY_NODE, RecordedTrace, TraceEvent

_RECORDED: Final = Path(__file__).with_name("recorded")
_OOBLECK: Final = ("5m", "10m", "30m", "1h", "3h", "6h", "ec2-p3", "ec2-g4dn")
SHIPPED_TRACES: Final[Mapping[str, Path]] = {
    "bamboo-p3": _RECORDED / "bamboo" / "p3-trace.csv",
    **{f"oobleck-{name}": _RECORDED / "oobleck" / f"{name}.csv" for name in _OOBLECK},
    "infinitehbd": _RECORDED / "infinitehbd" / "fault_trace.json",
}
# Its file names the 231 that had faults; the others had none (README of the trace).
_INFINITEHBD_SERVERS: Final = 400
_NODES_MAX: Final = 1_000_000
_UNITS_S: Final = {"time_ms": 1e-3, "time_s": 1.0, "time_h": 3600.0}
_OWN_COLUMNS: Final = ("time_s", "event", "nodes", "deadline_s", "speed", "cause")
_FORMATS: Final = (
    "must begin like a trace: with 0,add,node1 (Bamboo, Oobleck), with 0,18 or time_s,nodes "
    '(counts), with [0, "add", {"nodes": [...]}] (Parcae), with [{"node_id": ...}] '
    "(InfiniteHBD), or with time_s,event,nodes (planaria)"
)


class _Row(NamedTuple):
    """An event, or the end of the trace, and the line that gives it."""

    line: int
    event: TraceEvent


@dataclass(frozen=True, slots=True)
class _File:
    """The text of a trace.

    Attributes:
        name: path or shipped name, for messages.
    """

    name: str
    text: str

    def error(self, line: int, remedy: str) -> ConfigError:
        """The error of one line, counted from 1."""
        return ConfigError("trace file", self.name, f"line {line}: {remedy}")

    def rows(self) -> Iterator[tuple[int, list[str]]]:
        """The lines of a CSV file that hold something, each with its number."""
        for line, row in enumerate(csv.reader(self.text.splitlines()), start=1):
            cells = [cell.strip() for cell in row]
            if any(cells) and not cells[0].startswith("#"):
                yield line, cells

    def number(self, line: int, text: str, name: str) -> float:
        """A number that is finite and not negative."""
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value < 1e15:
            raise self.error(line, f"{name} is {text!r}; it must be a number, 0 or more")
        return value

    def count(self, line: int, digits: str) -> int:
        """A number of nodes, or the number of a node, that a cluster may have."""
        if len(digits) > len(str(_NODES_MAX)) or int(digits) > _NODES_MAX:
            remedy = f"{digits[:20]} is too large; a trace has at most {_NODES_MAX:,} nodes"
            raise self.error(line, remedy)
        return int(digits)


def shipped_trace(name: str) -> RecordedTrace:
    """The trace of a shipped name; see `SHIPPED_TRACES`."""
    return read_trace(SHIPPED_TRACES[name], name=name, num_machines=_servers(name))


def trace_at(directory: Path, name: str, *, num_machines: int = 0) -> RecordedTrace:
    """The trace that a user names.

    Args:
        name: path relative to directory, or a shipped name; an existing file takes precedence.
        num_machines: number of machines; see `read_trace`.

    Raises:
        ConfigError: there is no such trace, or the file is wrong.
    """
    path = Path(directory, name)
    if name in SHIPPED_TRACES and not path.is_file():
        number = num_machines or _servers(name)
        return read_trace(SHIPPED_TRACES[name], name=name, num_machines=number)
    return read_trace(path, num_machines=num_machines)


def _servers(name: str) -> int:
    return _INFINITEHBD_SERVERS if name == "infinitehbd" else 0


def read_trace(path: Path, *, name: str = "", num_machines: int = 0) -> RecordedTrace:
    """The trace in a file of any of the formats.

    Args:
        name: word for the trace in messages; the path if it is empty.
        num_machines: number of machines, where the file names only those to which something
            happened; 0: as many as it names. Not used for allocations.

    Raises:
        ConfigError: the file cannot be read, is of no known format, or contradicts itself; the
            message names the line and what would do.
    """
    file = _File(name or str(path), _text(path, name or str(path)))
    reader = _reader(file)
    return reader(file, num_machines)


def _text(path: Path, name: str) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError("trace file", name, f"is not UTF-8 at byte {error.start}") from None
    except FileNotFoundError:
        remedy = f"there is no such file; shipped traces are {', '.join(SHIPPED_TRACES)}"
        raise ConfigError("trace file", name, remedy) from None
    except OSError as error:
        raise ConfigError("trace file", name, f"cannot be read: {error.strerror}") from None


_Reader = Callable[[_File, int], RecordedTrace]


def _reader(file: _File) -> _Reader:
    line, cells = next(file.rows(), (1, [""]))
    if cells[0].startswith("["):
        rest = "".join(cells)[1:].lstrip() or file.text.lstrip()[1:].lstrip()
        return _read_infinitehbd if rest.startswith(("{", "]")) else _read_parcae
    match cells:
        case ["time_s", "event", *_]:
            return _read_own
        case [unit, "nodes"] if unit in _UNITS_S:
            return _read_counts
        case [_, "add" | "remove", _]:
            return _read_bamboo
        case [at, number] if at.isdecimal() and number.isdecimal():
            return _read_counts
    raise file.error(line, _FORMATS)


def _read_bamboo(file: _File, num_machines: int) -> RecordedTrace:
    del num_machines
    rows = []
    for line, cells in file.rows():
        match cells:
            case [at, "add" | "remove" as change, node] if node:
                kind = OccurrenceKind.BACK if change == "add" else OccurrenceKind.LOST
                at_s = file.number(line, at, "the time") / 1000
                rows.append(_Row(line, TraceEvent(at_s, kind, node)))
            case _:
                raise file.error(line, "must be like 60000,add,node19 or 60000,remove,node19")
    return _allocations(file, rows)


def _read_parcae(file: _File, num_machines: int) -> RecordedTrace:
    del num_machines
    rows: list[_Row] = []
    end_s = 0.0
    for line, text in enumerate(file.text.splitlines(), start=1):
        if not text.strip() or text.startswith("#"):
            continue
        match _json_line(text):
            case [int() | float() as at_ms, str() as change, {"nodes": list() as nodes, **more}]:
                at_s = file.number(line, str(at_ms), "the time") / 1000
                duration = str(more.get("duration", 0))
                end_s = max(end_s, at_s + file.number(line, duration, "duration") / 1000)
            case _:
                raise file.error(line, 'must be like [60000, "remove", {"nodes": ["node-3"]}]')
        if change not in {"add", "remove", "no-op", "migration"}:
            raise file.error(line, f"{change!r} must be add, remove, no-op or migration")
        if change in {"add", "remove"}:
            kind = OccurrenceKind.BACK if change == "add" else OccurrenceKind.LOST
            rows.extend(_Row(line, TraceEvent(at_s, kind, str(node))) for node in nodes)
    return _allocations(file, rows, end_s=end_s)


def _json_line(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None


def _read_counts(file: _File, num_machines: int) -> RecordedTrace:
    del num_machines
    rows: list[_Row] = []
    unit_s = _UNITS_S["time_ms"]
    number, end_s = 0, 0.0
    for line, cells in file.rows():
        match cells:
            case [unit, "nodes"] if unit in _UNITS_S and not rows:
                unit_s = _UNITS_S[unit]
                continue
            case [at, count] if count.isdecimal():
                at_s = file.number(line, at, "the time") * unit_s
            case _:
                raise file.error(line, "must be a time and a number of nodes, like 60000,19")
        kind = OccurrenceKind.BACK if file.count(line, count) > number else OccurrenceKind.LOST
        event = TraceEvent(at_s, kind, ANY_NODE)
        rows.extend([_Row(line, event)] * abs(int(count) - number))
        number = int(count)
        end_s = at_s
    return _allocations(file, rows, end_s=end_s)


def _allocations(file: _File, rows: Sequence[_Row], *, end_s: float = 0.0) -> RecordedTrace:
    """The trace of nodes that come and go, once checked."""
    _check_order(file, rows)
    there: set[str] = set()
    number = num_places = 0
    for line, event in rows:
        is_back = event.kind is OccurrenceKind.BACK
        if event.node != ANY_NODE and (event.node in there) is is_back:
            state = "is there already" if is_back else "is not there"
            raise file.error(line, f"{event.node} {state}; leave the row out, or name another node")
        (there.add if is_back else there.discard)(event.node)
        number += 1 if is_back else -1
        num_places = max(num_places, number)
    last_line = rows[-1].line if rows else 1
    if not num_places:
        raise file.error(last_line, "no node is ever there; the first rows must add some")
    begin_s = rows[0].event.at_s
    end_s = max(end_s, rows[-1].event.at_s)
    if end_s <= begin_s:
        raise file.error(last_line, "all happens at one time; rows of later times must follow")
    events = tuple(event for _, event in rows)
    return RecordedTrace(file.name, num_places, (), begin_s, end_s, events)


def _check_order(file: _File, rows: Sequence[_Row]) -> None:
    for before, after in pairwise(rows):
        if after.event.at_s < before.event.at_s:
            remedy = f"is earlier than line {before.line}; sort the rows by time"
            raise file.error(after.line, remedy)


def _read_infinitehbd(file: _File, num_machines: int) -> RecordedTrace:
    rows = []
    num_faults: Counter[str] = Counter()  # Open ones of each machine.
    for line, fault in _json_items(file):
        match fault:
            case {
                "node_id": str() as node,
                "event_time": int() | float() as days,
                "event_type": "fault_start" | "fault_end" as change,
            }:
                at_s = file.number(line, str(days), "event_time") * 86_400
            case _:
                raise file.error(
                    line,
                    "a fault must have node_id, event_time in days, and event_type fault_start or "
                    "fault_end",
                )
        is_start = change == "fault_start"
        if not is_start and not num_faults[node]:
            raise file.error(line, f"a fault of {node} ends that never began; leave the fault out")
        num_faults[node] += 1 if is_start else -1
        if num_faults[node] == (1 if is_start else 0):
            kind = OccurrenceKind.LOST if is_start else OccurrenceKind.BACK
            rows.append(_Row(line, TraceEvent(at_s, kind, node, cause=_cause(fault))))
    return _machines(file, rows, names=tuple(num_faults), num_machines=num_machines, end_s=0.0)


def _json_items(file: _File) -> Iterator[tuple[int, Any]]:
    """The items of a JSON list, each with the line on which it begins."""
    decoder, text = json.JSONDecoder(), file.text
    place, line = text.index("[") + 1, 1 + text.count("\n", 0, text.index("[") + 1)
    while True:
        rest = len(text) - len(text[place:].lstrip(" \t\r\n,")) if place < len(text) else place
        line += text.count("\n", place, rest)
        if text[rest : rest + 1] == "]":
            return
        if rest == len(text):
            raise file.error(line, "the list does not end; the file may have been cut off")
        try:
            item, place = decoder.raw_decode(text, rest)
        except json.JSONDecodeError as error:
            raise file.error(error.lineno, f"is not JSON: {error.msg}") from None
        yield line, item
        line += text.count("\n", rest, place)


def _cause(fault: Mapping[str, Any]) -> str:
    match fault.get("fault_type"):
        case {"Class": str() as group, "Desc": str() as text}:
            return text if group == text else f"{group}: {text}"
    return ""


def _read_own(file: _File, num_machines: int) -> RecordedTrace:
    lines = file.rows()
    header_line, columns = next(lines)
    for column in columns:
        if column not in _OWN_COLUMNS:
            raise file.error(
                header_line, f"{column} is no column; there are {', '.join(_OWN_COLUMNS)}"
            )
    rows: list[_Row] = []
    end_s = 0.0
    for line, cells in lines:
        values = dict(zip(columns, cells, strict=False))
        if len(cells) > len(columns):
            raise file.error(
                line, f"has {len(cells)} cells; the first line names {len(columns)} columns"
            )
        at_s = file.number(line, values["time_s"], "time_s")
        if values.get("event") == "end":
            end_s = at_s
            continue
        event = _own_event(file, line, values, at_s)
        nodes = _numbers(file, line, values.get("nodes", ""))
        rows.extend(_Row(line, replace(event, node=str(node))) for node in nodes)
    highest = max((int(row.event.node) for row in rows), default=-1)
    number = max(highest + 1, num_machines)
    names = tuple(map(str, range(number)))
    return _machines(file, rows, names=names, num_machines=num_machines, end_s=end_s)


def _own_event(file: _File, line: int, values: Mapping[str, str], at_s: float) -> TraceEvent:
    """The event of a row, still without its node."""
    kinds = ", ".join(OccurrenceKind)
    if values.get("event") not in set(OccurrenceKind):
        raise file.error(line, f"event is {values.get('event')!r}; it must be end, or {kinds}")
    kind = OccurrenceKind(values["event"])
    deadline_s, speed = None, 1.0
    if kind is OccurrenceKind.NOTICE:
        deadline_s = file.number(line, values.get("deadline_s", ""), "deadline_s")
        if deadline_s < at_s:
            raise file.error(
                line, "deadline_s is earlier than time_s; it must be the time of the loss"
            )
    if kind is OccurrenceKind.SLOWED:
        speed = file.number(line, values.get("speed", ""), "speed")
        if speed <= 0:
            raise file.error(line, "speed is 0; it must be more: a node that stands still is lost")
    return TraceEvent(at_s, kind, "", deadline_s, speed, values.get("cause", ""))


def _numbers(file: _File, line: int, text: str) -> list[int]:
    """The numbers of "0 3 8-11"."""
    numbers: list[int] = []
    for word in text.split():
        first, dash, last = word.partition("-")
        wrong = f"nodes has {word!r}; it must be like 0 3 8-11"
        if not first.isdecimal() or not (last.isdecimal() or not dash):
            raise file.error(line, wrong)
        named = range(file.count(line, first), file.count(line, last or first) + 1)
        if not named:  # The first one is after the last one.
            raise file.error(line, wrong)
        numbers.extend(named)
    if not numbers or len(set(numbers)) != len(numbers):
        raise file.error(line, f"nodes is {text!r}; it must name nodes, each once, like 0 3 8-11")
    return numbers


def _machines(
    file: _File, rows: Sequence[_Row], *, names: tuple[str, ...], num_machines: int, end_s: float
) -> RecordedTrace:
    """The trace of machines, once checked."""
    _check_order(file, rows)
    lost: set[str] = set()
    slow: set[str] = set()
    losses = {(event.node, event.at_s) for _, event in rows if event.kind is OccurrenceKind.LOST}
    for line, event in rows:
        _check_machine(file, line, event, lost, slow, losses)
    last_line = rows[-1].line if rows else 1
    if not rows or max(end_s, rows[-1].event.at_s) <= 0:
        raise file.error(last_line, "nothing happens after time 0; rows of later times must follow")
    if num_machines and num_machines < len(names):
        remedy = f"names {len(names)} nodes; failures.trace_nodes must be that or more"
        raise ConfigError("trace file", file.name, remedy)
    events = tuple(event for _, event in rows)
    number = max(num_machines, len(names))
    return RecordedTrace(file.name, number, names, 0.0, max(end_s, events[-1].at_s), events)


def _check_machine(
    file: _File,
    line: int,
    event: TraceEvent,
    lost: set[str],
    slow: set[str],
    losses: set[tuple[str, float]],
) -> None:
    """Refuses what cannot happen to a machine in its state, and else takes it into that state."""
    node, is_lost = event.node, event.node in lost
    match event.kind:
        case OccurrenceKind.BACK:
            if not is_lost:
                raise file.error(line, f"node {node} is back but was not lost; lose it first")
            lost.discard(node)
        case _ if is_lost:
            raise file.error(line, f"node {node} is lost; it must be back first")
        case OccurrenceKind.LOST:
            lost.add(node)
            slow.discard(node)
        case OccurrenceKind.NOTICE:
            assert event.deadline_s is not None
            if (node, event.deadline_s) not in losses:
                row = f"{event.deadline_s:g},lost,{node}"
                raise file.error(line, f"node {node} is not lost at the deadline; add a row {row}")
        case OccurrenceKind.SLOWED:
            slow.add(node)
        case OccurrenceKind.RESTORED:
            if node not in slow:
                raise file.error(line, f"node {node} is restored but was not slowed; slow it first")
            slow.discard(node)
