"""Replays of recorded traces: windows, places, and clusters of other sizes than the trace's."""

from collections import Counter
from pathlib import Path
from random import Random

import pytest

from planaria.errors import ConfigError
from planaria.simulator.failures.occurrences import Occurrence, OccurrenceKind, checked_stream
from planaria.simulator.failures.recorded_trace import RecordedTrace, TraceSource, Window
from planaria.simulator.failures.trace_files import read_trace, shipped_trace

LOST, BACK, NOTICE = OccurrenceKind.LOST, OccurrenceKind.BACK, OccurrenceKind.NOTICE
HOUR_S = 3600.0
OWN = """time_s,event,nodes,deadline_s,speed
10,slowed,0,,0.5
20,notice,1,40
40,lost,1
50,back,1
60,restored,0
70,slowed,2,,0.5
80,lost,3
"""


def replay(
    trace: RecordedTrace,
    num_nodes: int,
    *,
    horizon_s: float,
    seed: int = 0,
    window: Window = Window.DRAWN,
) -> list[Occurrence]:
    stream = TraceSource(trace, window).occurrences(
        num_nodes, horizon_s=horizon_s, rng=Random(seed)
    )
    return list(checked_stream(stream, num_nodes, horizon_s=horizon_s))


def num_lost(stream: list[Occurrence]) -> int:
    """Losses of nodes, without those that are missing from the start."""
    return sum(len(one.nodes) for one in stream if one.kind is LOST and one.at_s > 0)


@pytest.mark.parametrize("name", ["bamboo-p3", "oobleck-1h", "oobleck-ec2-g4dn", "infinitehbd"])
@pytest.mark.parametrize("num_nodes", [1, 32, 70])
@pytest.mark.parametrize("hours", [1, 40])
def test_every_replay_is_in_order_and_loses_no_node_twice(
    name: str, num_nodes: int, hours: float
) -> None:
    """Whatever the window, the size of the cluster and the length; the same seed gives the same."""
    trace = shipped_trace(name)

    for seed in range(3):
        stream = replay(trace, num_nodes, horizon_s=hours * HOUR_S, seed=seed)
        again = replay(trace, num_nodes, horizon_s=hours * HOUR_S, seed=seed)
        assert stream == again, f"seed {seed}"


def test_a_replay_from_the_start_has_every_loss() -> None:
    """The times and sizes are those of the file, whatever the seed."""
    trace = shipped_trace("bamboo-p3")
    stream = replay(trace, 32, horizon_s=20 * HOUR_S, window=Window.START)
    losses = Counter(event.at_s for event in trace.events if event.kind is LOST)

    assert stream == replay(trace, 32, horizon_s=20 * HOUR_S, window=Window.START, seed=1)
    assert stream[0].nodes == tuple(range(18, 32))  # They are not there at the start.
    assert losses == Counter(
        {one.at_s: len(one.nodes) for one in stream if one.kind is LOST and one.at_s > 0}
    )


def test_a_trace_may_begin_late() -> None:
    """The artifact's second list begins at 480 s, with 15 nodes."""
    stream = replay(shipped_trace("oobleck-ec2-g4dn"), 30, horizon_s=HOUR_S, window=Window.START)

    assert stream[0].nodes == tuple(range(15, 30))
    assert stream[1].at_s == 60


def test_losses_per_node_do_not_depend_on_the_size_of_the_cluster() -> None:
    """Large clusters replay several windows, small ones a part of the nodes; long runs go on."""
    trace = shipped_trace("bamboo-p3")
    length_s = trace.end_s
    for num_nodes, num_seeds in ((4, 40), (32, 6), (96, 2)):
        losses = [
            num_lost(replay(trace, num_nodes, horizon_s=2 * length_s, seed=seed))
            for seed in range(num_seeds)
        ]
        per_place = sum(losses) / num_seeds / num_nodes / 2

        assert per_place == pytest.approx(167 / 32, rel=0.1), f"{num_nodes} nodes"


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("bamboo-p3", 0.2),
        ("oobleck-ec2-p3", 0.2),
        ("oobleck-ec2-g4dn", 0.7),
        pytest.param("bamboo-p3", 0.7, marks=pytest.mark.long),
        pytest.param("oobleck-ec2-p3", 0.7, marks=pytest.mark.long),
        pytest.param("oobleck-ec2-g4dn", 0.2, marks=pytest.mark.long),
    ],
)
def test_each_part_of_a_trace_is_as_likely(name: str, share: float) -> None:
    """Runs that began within a trace and ended there had its ends less often than its middle: 6% to
    10% more losses, or 12% fewer, than the trace."""
    trace = shipped_trace(name)
    horizon_s = share * (trace.end_s - trace.begin_s)
    number = sum(
        num_lost(replay(trace, trace.num_places, horizon_s=horizon_s, seed=seed))
        for seed in range(600)
    )
    in_trace = sum(event.kind is LOST for event in trace.events)

    assert number / 600 == pytest.approx(share * in_trace, rel=0.04)


def test_a_trace_in_which_no_node_comes_back_is_one_experiment() -> None:
    """Nodes that come back where it begins again would make it another one."""
    trace = shipped_trace("oobleck-10m")
    for seed in range(20):
        stream = replay(trace, 16, horizon_s=0.9 * trace.end_s, seed=seed)
        assert BACK not in {one.kind for one in stream}, f"seed {seed}"


def test_any_node_may_come_back_where_a_trace_begins_again() -> None:
    """Those beyond the cluster came back first, and those of small clusters never."""
    trace = shipped_trace("bamboo-p3")
    seams = [
        one
        for seed in range(40)
        for one in replay(trace, 16, horizon_s=trace.end_s, seed=seed)
        if one.cause == "the trace begins again"
    ]

    assert 2.0 < sum(len(one.nodes) for one in seams) / 40 < 6.0


def test_where_a_trace_begins_again_only_the_difference_is_changed() -> None:
    """Bamboo's trace ends with 10 nodes and begins with 18: 8 come back, and none is lost."""
    trace = shipped_trace("bamboo-p3")
    seams = [
        one
        for seed in range(5)
        for one in replay(trace, 32, horizon_s=2 * trace.end_s, seed=seed)
        if one.cause == "the trace begins again"
    ]

    assert {one.kind for one in seams} == {BACK}
    assert {len(one.nodes) for one in seams} <= {8}
    assert len(seams) >= 5


def test_a_slow_node_is_fast_where_the_trace_begins_again(tmp_path: Path) -> None:
    """The trace begins with fast nodes."""
    path = tmp_path / "own.csv"
    path.write_text("time_s,event,nodes,speed\n10,slowed,0,0.5\n100,end,,\n")
    trace = read_trace(path, num_machines=6)

    for seed in range(5):
        kinds = [one.kind for one in replay(trace, 6, horizon_s=1000, seed=seed)]
        expected = [OccurrenceKind.SLOWED, OccurrenceKind.RESTORED] * 9
        assert kinds[:18] == expected, f"seed {seed}"


def test_a_node_that_is_slow_from_the_start_is_slow_where_the_trace_begins_again(
    tmp_path: Path,
) -> None:
    """Once for each pass through the trace, and never after the spell."""
    path = tmp_path / "own.csv"
    path.write_text("time_s,event,nodes,speed\n0,slowed,0,0.5\n60,restored,0,\n100,end,,\n")
    trace = read_trace(path, num_machines=6)

    for seed in range(5):
        kinds = [one.kind for one in replay(trace, 6, horizon_s=1000, seed=seed)]
        assert kinds.count(OccurrenceKind.SLOWED) >= 10, f"seed {seed}"


def test_seeds_draw_windows_and_places() -> None:
    """One replay is an anecdote; the interval over seeds needs others."""
    trace = shipped_trace("infinitehbd")
    replays = {tuple(replay(trace, 64, horizon_s=480 * HOUR_S, seed=seed)) for seed in range(5)}

    assert len(replays) == 5


def test_seeds_draw_places_where_the_window_is_the_whole_trace() -> None:
    """The nodes of a small cluster are other ones of the recorded machines for each seed."""
    trace = shipped_trace("infinitehbd")
    replays = [replay(trace, 40, horizon_s=trace.end_s, seed=seed) for seed in range(5)]

    assert len({tuple(one.at_s for one in stream) for stream in replays}) == 5


def test_a_small_cluster_has_the_share_of_nodes_that_the_trace_has() -> None:
    """Of 32 places of Bamboo's trace 24.0 have a node on average."""
    trace = shipped_trace("bamboo-p3")
    shares = []
    for seed in range(40):
        there, before_s, node_s = 8, 0.0, 0.0
        for one in replay(trace, 8, horizon_s=trace.end_s, seed=seed):
            node_s += there * (one.at_s - before_s)
            before_s = one.at_s
            there += len(one.nodes) * {LOST: -1, BACK: 1}[one.kind]
        shares.append((node_s + there * (trace.end_s - before_s)) / trace.end_s / 8)

    assert sum(shares) / len(shares) == pytest.approx(24.0 / 32, abs=0.03)


def test_a_window_begins_with_the_state_of_its_moment(tmp_path: Path) -> None:
    """A node that is slow or has notice then is so at time 0."""
    path = tmp_path / "own.csv"
    path.write_text(OWN + "100,end,\n")
    trace = read_trace(path)

    streams = [replay(trace, 4, horizon_s=20, seed=seed) for seed in range(60)]
    firsts = [{one.kind: one for one in stream if one.at_s == 0} for stream in streams]
    pairs = [
        (first, stream) for first, stream in zip(firsts, streams, strict=True) if NOTICE in first
    ]

    assert len(pairs) > 3
    for first, stream in pairs:
        assert first[OccurrenceKind.SLOWED].speed == 0.5
        notice = first[NOTICE]
        losses = [(one.at_s, one.nodes) for one in stream if one.kind is LOST]
        assert losses == [(notice.deadline_s, notice.nodes)]


def test_nodes_of_a_series_of_counts_are_drawn(tmp_path: Path) -> None:
    """The file says only how many there are."""
    path = tmp_path / "counts.csv"
    path.write_text("time_h,nodes\n0,8\n1,6\n2,7\n")
    trace = read_trace(path)
    replays = [
        replay(trace, 8, horizon_s=3 * HOUR_S, seed=seed, window=Window.START) for seed in range(20)
    ]

    assert all([len(one.nodes) for one in stream] == [2, 1] for stream in replays)
    assert len({stream[0].nodes for stream in replays}) > 5


def test_a_cluster_larger_than_the_trace_cannot_replay_it_from_the_start() -> None:
    """Nothing is known of the further nodes; the message says what would do."""
    with pytest.raises(ConfigError, match="has 30 nodes at once and the cluster has 31"):
        replay(shipped_trace("oobleck-5m"), 31, horizon_s=9, window=Window.START)
