"""Readers of traces: what they make of each format, and what they say of a wrong file."""

import json
import subprocess
import sys
import zipfile
from collections import Counter
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

import pytest

from planaria.errors import ConfigError
from planaria.simulator.failures.occurrences import OccurrenceKind
from planaria.simulator.failures.recorded_trace import ANY_NODE, RecordedTrace, TraceEvent
from planaria.simulator.failures.trace_files import (
    SHIPPED_TRACES,
    read_trace,
    shipped_trace,
    trace_at,
)

ROOT = Path(__file__).resolve().parents[3]
LOST, BACK, NOTICE = OccurrenceKind.LOST, OccurrenceKind.BACK, OccurrenceKind.NOTICE
SLOWED, RESTORED = OccurrenceKind.SLOWED, OccurrenceKind.RESTORED


def trace(directory: Path, text: str, *, num_machines: int = 0) -> RecordedTrace:
    path = directory / "trace"
    path.write_text(text)
    return read_trace(path, name="my.trace", num_machines=num_machines)


def loss_times_s(trace: RecordedTrace) -> list[float]:
    return [event.at_s for event in trace.events if event.kind is LOST]


def test_bamboos_trace_is_as_it_was_counted() -> None:
    """Its 167 losses are at 79 times, 8.31 minutes apart, of at most 32 nodes."""
    bamboo = shipped_trace("bamboo-p3")
    times_s = sorted(set(loss_times_s(bamboo)))

    assert (bamboo.num_places, bamboo.machines) == (32, ())
    assert (bamboo.begin_s, bamboo.end_s) == (0, 40_920)
    assert (len(loss_times_s(bamboo)), len(times_s), times_s[0]) == (167, 79, 34 * 60)
    assert mean(b - a for a, b in pairwise(times_s)) == pytest.approx(8.31 * 60, abs=0.5)


@pytest.mark.parametrize(
    ("name", "period_s"),
    [("5m", 300), ("10m", 600), ("30m", 1800), ("1h", 3600), ("3h", 10_800), ("6h", 21_600)],
)
def test_oobleck_loses_a_node_every_so_often(name: str, period_s: float) -> None:
    """15 of 30 nodes, none of which comes back."""
    oobleck = shipped_trace(f"oobleck-{name}")
    gaps_s = [b - a for a, b in pairwise(loss_times_s(oobleck))]

    assert (oobleck.num_places, len(gaps_s)) == (30, 14)
    assert mean(gaps_s) == pytest.approx(period_s, rel=0.01)


def test_infinitehbds_trace_is_as_it_was_counted() -> None:
    """400 servers, of which 231 had 582 losses: 4.2 per 1,000 node-days; two faults overlapped."""
    servers = shipped_trace("infinitehbd")
    back_s = {}
    repairs_s = []
    for event in reversed(servers.events):
        if event.kind is BACK:
            back_s[event.node] = event.at_s
        else:
            repairs_s.append(back_s[event.node] - event.at_s)
    losses = Counter(event.node for event in servers.events if event.kind is LOST)
    lemons = sum(number for _, number in losses.most_common(40))

    assert (servers.num_places, len(servers.machines), len(repairs_s)) == (400, 231, 582)
    assert 1000 * len(repairs_s) / 400 / (servers.end_s / 86_400) == pytest.approx(4.2, abs=0.05)
    assert mean(repairs_s) / 86_400 == pytest.approx(5.55, abs=0.01)
    assert median(repairs_s) / 86_400 == pytest.approx(0.86, abs=0.02)
    assert lemons / len(repairs_s) == pytest.approx(0.41, abs=0.01)
    assert servers.events[0].cause == "GPU: GPU DBE(Double Bit ECC) > Threshold"


def test_parcaes_format(tmp_path: Path) -> None:
    """An invented file; what planaria does not use of the format is left out."""
    lines = [
        [0, "add", {"nodes": ["node-0", "node-1"], "duration": 60_000, "plan": [2, 1]}],
        [60_000, "no-op", {"nodes": [], "duration": 60_000}],
        [120_000, "remove", {"nodes": ["node-1"], "duration": 60_000}],
        [180_000, "migration", {"nodes": [], "duration": 60_000}],
        [240_000, "add", {"nodes": ["node-2"], "duration": 90_000}],
    ]
    text = "# a comment\n" + "\n".join(map(json.dumps, lines))
    parcae = trace(tmp_path, text)

    assert (parcae.num_places, parcae.begin_s, parcae.end_s) == (2, 0, 330)
    assert parcae.events == (
        TraceEvent(0, BACK, "node-0"),
        TraceEvent(0, BACK, "node-1"),
        TraceEvent(120, LOST, "node-1"),
        TraceEvent(240, BACK, "node-2"),
    )


@pytest.mark.parametrize("head", ["time_s,nodes\n0,2\n60,1\n120,3\n", "0,2\n60000,1\n120000,3\n"])
def test_a_series_of_counts_names_no_node(tmp_path: Path, head: str) -> None:
    """Without a first line with the unit, times are milliseconds, as in Parcae's file."""
    counts = trace(tmp_path, head)

    assert counts.num_places == 3
    assert counts.events == (
        *[TraceEvent(0, BACK, ANY_NODE)] * 2,
        TraceEvent(60, LOST, ANY_NODE),
        *[TraceEvent(120, BACK, ANY_NODE)] * 2,
    )


def test_planarias_own_format(tmp_path: Path) -> None:
    """It has all that can happen to nodes."""
    own = trace(
        tmp_path,
        "time_s, event, nodes, deadline_s, speed, cause\n"
        "# two nodes are told, and go\n"
        "10, notice, 0 2, 40\n"
        "20, slowed, 1, , 0.5, hot\n"
        "\n"
        "30, restored, 1\n"
        "40, lost, 0 2-3, , , switch\n"
        "50, back, 0\n"
        "90, end\n",
    )

    assert (own.num_places, own.machines, own.end_s) == (4, ("0", "1", "2", "3"), 90)
    assert own.events == (
        TraceEvent(10, NOTICE, "0", deadline_s=40),
        TraceEvent(10, NOTICE, "2", deadline_s=40),
        TraceEvent(20, SLOWED, "1", speed=0.5, cause="hot"),
        TraceEvent(30, RESTORED, "1"),
        TraceEvent(40, LOST, "0", cause="switch"),
        TraceEvent(40, LOST, "2", cause="switch"),
        TraceEvent(40, LOST, "3", cause="switch"),
        TraceEvent(50, BACK, "0"),
    )


def test_machines_that_a_file_does_not_name_are_counted(tmp_path: Path) -> None:
    """A machine to which nothing happens makes the rate per machine smaller."""
    own = trace(tmp_path, "time_s,event,nodes\n10,lost,3\n", num_machines=9)

    assert own.num_places == 9


OWN = "time_s,event,nodes,deadline_s,speed\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: must begin like a trace"),
        ("hello\n", "line 1: must begin like a trace"),
        ("0,add,a\n9,ad,b\n", "line 2: must be like 60000,add,node19"),
        ("0,add,a\n9,remove,b\n", "line 2: b is not there; leave the row out"),
        ("0,add,a\n9,add,a\n", "line 2: a is there already"),
        ("5,add,a\n\n4,remove,a\n", "line 3: is earlier than line 1; sort the rows"),
        ("x,add,a\n", "line 1: the time is 'x'; it must be a number, 0 or more"),
        ("nan,add,a\n", "line 1: the time is 'nan'; it must be a number"),
        ("0,add,a\n", "line 1: all happens at one time; rows of later times"),
        ("time_s,nodes\n", "line 1: no node is ever there"),
        ("time_s,nodes\n0,2\n9,x\n", "line 3: must be a time and a number of nodes"),
        ('[0, "add", {"nodes": ["a"]}]\n[1]\n', "line 2: must be like"),
        ('[0, "add", {"nodes": ["a"]}]\n[9, "grow", {"nodes": []}]\n', "line 2: 'grow' must be"),
        ('[\n{"node_id": "a"}]', "line 2: a fault must have node_id, event_time in days"),
        ("[\n{]", "line 2: is not JSON"),
        (
            '[{"node_id": "a", "event_time": 1, "event_type": "fault_start"},\n',
            "line 2: the list does not end",
        ),
        ("0,9999999\n9,1\n", "line 1: 9999999 is too large; a trace has at most 1,000,000 nodes"),
        (OWN + "1,lost,0-9999999\n", "line 2: 9999999 is too large"),
        (OWN + f"1,lost,{'9' * 5000}\n", "line 2: 99999999999999999999 is too large"),
        (
            '[{"node_id": "a", "event_time": 1, "event_type": "fault_end"}]',
            "line 1: a fault of a ends that never began",
        ),
        ("[]", "line 1: nothing happens after time 0"),
        (OWN + "1,lost,0\n2,lost,0\n", "line 3: node 0 is lost; it must be back first"),
        (OWN + "1,back,0\n", "line 2: node 0 is back but was not lost"),
        (OWN + "1,lost,a\n", "line 2: nodes has 'a'; it must be like 0 3 8-11"),
        (OWN + "1,lost,3-2\n", "line 2: nodes has '3-2'; it must be like 0 3 8-11"),
        (OWN + "1,lost,3 11-8\n", "line 2: nodes has '11-8'; it must be like 0 3 8-11"),
        (OWN + "1,lost,\n", "line 2: nodes is ''; it must name nodes"),
        (OWN + "1,lost,3 3\n", "line 2: nodes is '3 3'; it must name nodes, each once"),
        (OWN + "1,gone,3\n", "line 2: event is 'gone'; it must be end, or lost, back, notice"),
        (OWN + "1,notice,3\n", "line 2: deadline_s is ''; it must be a number"),
        (OWN + "5,notice,3,4\n", "line 2: deadline_s is earlier than time_s"),
        (OWN + "5,notice,3,9\n", "line 2: node 3 is not lost at the deadline; add a row 9,lost,3"),
        (OWN + "5,slowed,3\n", "line 2: speed is ''"),
        (OWN + "5,slowed,3,,0\n", "line 2: speed is 0; it must be more"),
        (OWN + "5,restored,3\n", "line 2: node 3 is restored but was not slowed"),
        (OWN + "5,lost,3,,,,,\n", "line 2: has 8 cells; the first line names 5 columns"),
        (OWN + "0,lost,3\n", "line 2: nothing happens after time 0"),
        ("time_s,event,nodes,pace\n", "line 1: pace is no column; there are time_s, event"),
    ],
)
def test_a_wrong_file_is_refused_by_its_line(tmp_path: Path, text: str, message: str) -> None:
    """A trace is long; nobody finds the row otherwise."""
    with pytest.raises(ConfigError) as caught:
        trace(tmp_path, text)

    assert f"trace file = 'my.trace': {message}" in str(caught.value)


def test_too_few_machines_are_refused(tmp_path: Path) -> None:
    """The message names the key that holds the number."""
    with pytest.raises(ConfigError, match=r"names 4 nodes; failures\.trace_nodes must be that"):
        trace(tmp_path, OWN + "1,lost,3\n", num_machines=3)


def test_a_path_comes_before_a_shipped_name(tmp_path: Path) -> None:
    """A file always means itself; a name that is neither lists the shipped ones."""
    assert trace_at(tmp_path, "infinitehbd").num_places == 400
    (tmp_path / "infinitehbd").write_text(OWN + "1,lost,1\n")

    assert trace_at(tmp_path, "infinitehbd").num_places == 2
    with pytest.raises(ConfigError, match=r"no such file; shipped traces are bamboo-p3, oobleck-"):
        trace_at(tmp_path, "bamboo")


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    """And so is one that cannot be read at all."""
    (tmp_path / "a").write_bytes(b"0,\xff")

    with pytest.raises(ConfigError, match="is not UTF-8 at byte 2"):
        read_trace(tmp_path / "a")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_trace(tmp_path)


def test_the_wheel_has_the_traces_and_their_licences(tmp_path: Path) -> None:
    """Who installs planaria replays them by name."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())

    folder = Path("planaria/simulator/failures/recorded")
    for path in SHIPPED_TRACES.values():
        inside = folder / path.parent.name
        assert str(inside / path.name) in names
        assert str(inside / "LICENSE") in names
        assert any(name.endswith(f"/licenses/src/{inside}/LICENSE") for name in names), inside
    assert str(folder / "README.md") in names
