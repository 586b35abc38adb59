"""The Chrome trace of predicted and measured timelines."""

import json
from typing import Any

import pytest

from planaria.estimator.correction import Comparison, PeakBytes
from planaria.estimator.time import Span, Timeline
from planaria.observe.metrics import EventRecord
from planaria.schedule.action import parse_action
from planaria.show.chrome_trace import chrome_trace

PREDICTED = Timeline(
    (
        Span(0, "compute", parse_action("0F0"), 0.0, 0.5),
        Span(0, "send", parse_action("0SF0"), 0.5, 0.75),
        Span(3, "reduce", parse_action("R0"), 1.0, 1.5),
    ),
    2.0,
)
MEASURED = Timeline((Span(0, "compute", parse_action("0F0"), 0.25, 1.0),), 3.0)
COMPARED = Comparison(0, PREDICTED, MEASURED)


def events(trace: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def test_a_trace_names_a_process_per_node_and_a_thread_per_lane() -> None:
    """Rank 3 is device 1 of node 1; measured nodes are processes of their own."""
    trace = chrome_trace([COMPARED], devices_per_node=2)

    named = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events(trace, "M")
        if event["name"] == "thread_name"
    }
    assert named == {
        (1, 0): "rank 0 compute",
        (1, 1): "rank 0 send",
        (2, 5): "rank 3 reduce",
        (4, 0): "rank 0 compute",
    }
    assert [
        event["args"]["name"] for event in events(trace, "M") if event["name"] == "process_name"
    ] == ["predicted: node 0", "predicted: node 1", "measured: node 0"]


def test_spans_are_microseconds_and_named_by_their_action() -> None:
    """As the format wants it, and plain enough for json."""
    trace = json.loads(json.dumps(chrome_trace([Comparison(0, PREDICTED, Timeline((), 0.0))])))

    assert [(event["name"], event["ts"], event["dur"]) for event in events(trace, "X")] == [
        ("0F0", 0.0, 5e5),
        ("0SF0", 5e5, 2.5e5),
        ("R0", 1e6, 5e5),
    ]


def test_each_measured_iteration_has_the_prediction_at_its_start() -> None:
    """A slow iteration moves the next one; a fast one leaves room for its prediction."""
    fast = Timeline(MEASURED.spans, 1.0)

    trace = chrome_trace(
        [Comparison(i, PREDICTED, one) for i, one in enumerate((MEASURED, fast, MEASURED))]
    )

    starts = {True: [], False: []}  # type: dict[bool, list[float]]
    for event in events(trace, "X"):
        if event["name"] == "0F0":
            starts[event["pid"] >= 4].append(event["ts"])
    assert starts[False] == [0.0, 3e6, 5e6]
    assert starts[True] == [0.25e6, 3.25e6, 5.25e6]


def test_a_rank_that_began_late_does_not_run_into_the_next_iteration() -> None:
    """It stands where it began, so it may end later than an iteration takes."""
    late = Timeline((Span(0, "compute", parse_action("0F0"), 2.5, 4.0),), 3.0)

    trace = chrome_trace([Comparison(i, PREDICTED, late) for i in range(2)])

    starts = [e["ts"] for e in events(trace, "X") if e["name"] == "0F0" and e["pid"] >= 4]
    assert starts == [2.5e6, 4e6 + 2.5e6]


@pytest.mark.parametrize(
    ("errors_s", "expected"),
    [((), 0.0), ((0.0, 0.0), 0.0), ((0.25, 0.5, 0.0), 0.5), ((0.25, None), None)],
)
def test_a_trace_says_how_well_its_ranks_are_placed(
    errors_s: tuple[float | None, ...], expected: float | None
) -> None:
    """The worst iteration counts, and one of which it is unknown above all."""
    trace = chrome_trace([COMPARED._replace(clock_error_s=error_s) for error_s in errors_s])

    assert trace["otherData"] == {"clock_error_s": expected}


def test_peak_memory_is_a_counter_of_each_rank_in_both_groups() -> None:
    """From the start of its iteration on; ranks of a node have counters of different names."""
    peaks = (PeakBytes(2, 100, 110), PeakBytes(3, 200, 190))
    iterations = [COMPARED, Comparison(1, PREDICTED, MEASURED, peaks)]

    trace = chrome_trace(iterations, devices_per_node=2)

    found = [(e["pid"], e["name"], e["ts"], e["args"]["bytes"]) for e in events(trace, "C")]
    assert found == [
        (2, "peak memory of rank 2", 3e6, 100),
        (2, "peak memory of rank 3", 3e6, 200),
        (5, "peak memory of rank 2", 3e6, 110),
        (5, "peak memory of rank 3", 3e6, 190),
    ]


def test_a_transition_stands_before_the_iteration_after_it_in_both_its_forms() -> None:
    """What is predicted begins once that is told; both leave room for the longer of the two."""
    lost = EventRecord(
        kind="lost",
        nodes=(1,),
        iteration=1,
        answer="simple",
        detect_s=1.0,
        decide_s=0.25,
        regroup_s=0.25,
        transfer_s=0.5,
        downtime_s=2.0,
        predicted_downtime_s=3.0,
        predicted_transfer_s=0.75,
    )
    after = Comparison(1, PREDICTED, MEASURED)

    found = events(chrome_trace([COMPARED, after], [lost]), "X")

    phases = {
        (event["pid"], event["name"]): (event["ts"] / 1e6, event["dur"] / 1e6)
        for event in found
        if event["cat"] == "transition"
    }
    assert phases == {
        (0, "simple: regroup"): (4.25, 2.25),
        (0, "simple: transfer"): (6.5, 0.75),
        (5, "simple: detect"): (3.0, 1.0),
        (5, "simple: decide"): (4.0, 0.25),
        (5, "simple: regroup"): (4.25, 0.25),
        (5, "simple: transfer"): (4.5, 0.5),
    }
    forwards = [event["ts"] / 1e6 for event in found if event["name"] == "0F0"]
    assert forwards == [0.0, 7.25, 0.25, 7.5]


def test_iterations_that_nothing_was_measured_of_have_no_transitions() -> None:
    """A report's other events are no phases of anything."""
    slow = EventRecord(kind="slow", nodes=(1,), iteration=0, answer="recut", downtime_s=0.1)

    trace = chrome_trace([COMPARED], [slow])

    assert not [event for event in events(trace, "X") if event["cat"] == "transition"]
