"""Timelines as a Chrome trace, for chrome://tracing or https://ui.perfetto.dev.

In the Trace Event Format a node is a process, and a lane of a rank is a thread. Predicted and
measured nodes are separate processes, the predicted ones above. Iterations follow each other; the
predicted and the measured timeline of an iteration start at the same time, so that they can be
compared by eye. The phases of a transition stand before the iteration that follows it, in a process
of the whole job. The peak memory of a rank in an iteration is a counter of its node. The largest
error with which ranks of several machines are placed is `otherData.clock_error_s`, in seconds.

Source: the torch.profiler and torch.distributed.pipelining traces, which use the same format.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from planaria.estimator.correction import Comparison, PeakBytes
from planaria.estimator.time import Timeline
from planaria.observe.metrics import EventRecord

_THREADS: Final = ("compute", "send", "reduce")
_GROUPS: Final = ("predicted", "measured")


def chrome_trace(
    iterations: Sequence[Comparison],
    transitions: Iterable[EventRecord] = (),
    *,
    devices_per_node: int = 1,
) -> dict[str, Any]:
    """The trace as plain dicts, ready for `json.dump`.

    Args:
        iterations: predicted and measured timelines, in order; one that was not measured has no
            spans.
        transitions: events of the job; those without an answer are ignored.
        devices_per_node: number of ranks of a node.
    """
    ranks = {
        span.rank
        for comparison in iterations
        for line in (comparison.predicted, comparison.measured)
        for span in line.spans
    }
    num_processes = 2 + max(ranks, default=0) // devices_per_node
    answered = [event for event in transitions if event.answer and event.detect_s]
    events: list[dict[str, Any]] = []
    for group, name in enumerate(_GROUPS):
        places = _Places(group * num_processes, devices_per_node)
        lines = [(comparison.predicted, comparison.measured)[group] for comparison in iterations]
        lanes = sorted({(span.rank, span.lane) for line in lines for span in line.spans})
        if answered:
            events += _job_names(name, places)
        events += _names(name, lanes, places)
        start_s = 0.0
        for comparison, line in zip(iterations, lines, strict=True):
            for event in (e for e in answered if e.iteration == comparison.iteration):
                events += _phases(event, start_s, places, is_measured=line is comparison.measured)
                start_s += event.detect_s + event.decide_s
                start_s += max(event.transition_s, event.predicted_downtime_s)
            events += _spans(line, start_s, places)
            events += _counters(
                comparison.peaks, start_s, places, is_measured=line is comparison.measured
            )
            # An iteration faster than its prediction must not run into the next one's.
            start_s += comparison.end_s
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"clock_error_s": _clock_error_s(iterations)},
    }


def _clock_error_s(iterations: Sequence[Comparison]) -> float | None:
    """The largest error of the iterations; None if one is unknown."""
    errors_s = [comparison.clock_error_s for comparison in iterations]
    known_s = [error_s for error_s in errors_s if error_s is not None]
    return max(known_s, default=0.0) if len(known_s) == len(errors_s) else None


class _Places(NamedTuple):
    """The trace's process and thread for each lane of a rank; the job's process comes first.

    Attributes:
        first_process: process of the job; those of the nodes follow it.
    """

    first_process: int
    devices_per_node: int

    def of(self, rank: int, lane: str) -> dict[str, int]:
        node, device = divmod(rank, self.devices_per_node)
        thread = device * len(_THREADS) + _THREADS.index(lane)
        return {"pid": self.first_process + 1 + node, "tid": thread}

    def of_job(self) -> dict[str, int]:
        return {"pid": self.first_process, "tid": 0}


def _names(
    group: str, lanes: Iterable[tuple[int, str]], places: _Places
) -> Iterator[dict[str, Any]]:
    """The metadata events that name processes and threads and put them in order."""
    named: set[int] = set()
    for rank, lane in lanes:
        place = places.of(rank, lane)
        node = rank // places.devices_per_node
        if node not in named:
            named.add(node)
            yield from _process_names(f"{group}: node {node}", place)
        yield from _thread_names(f"rank {rank} {lane}", place)


def _job_names(group: str, places: _Places) -> Iterator[dict[str, Any]]:
    yield from _process_names(f"{group}: job", places.of_job())
    yield from _thread_names("transitions", places.of_job())


def _process_names(name: str, place: dict[str, int]) -> Iterator[dict[str, Any]]:
    yield _metadata(place, "process_name", {"name": name})
    yield _metadata(place, "process_sort_index", {"sort_index": place["pid"]})


def _thread_names(name: str, place: dict[str, int]) -> Iterator[dict[str, Any]]:
    yield _metadata(place, "thread_name", {"name": name})
    yield _metadata(place, "thread_sort_index", {"sort_index": place["tid"]})


def _metadata(place: dict[str, int], name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, **place, "args": arguments}


def _spans(timeline: Timeline, start_s: float, places: _Places) -> Iterator[dict[str, Any]]:
    """The "complete" trace events of one iteration."""
    for span in timeline.spans:
        place = places.of(span.rank, span.lane)
        times_s = (start_s + span.start_s, start_s + span.end_s)
        yield _complete(str(span.action), span.lane, times_s, place)


def _counters(
    peaks: Iterable[PeakBytes], start_s: float, places: _Places, *, is_measured: bool
) -> Iterator[dict[str, Any]]:
    """Counter events with the peak memory of each rank in an iteration, set at its start."""
    for peak in peaks:
        place = places.of(peak.rank, _THREADS[0])
        num_bytes = peak.measured if is_measured else peak.predicted
        yield {
            "ph": "C",
            "name": f"peak memory of rank {peak.rank}",
            "ts": start_s * 1e6,
            "pid": place["pid"],
            "args": {"bytes": num_bytes},
        }


def _phases(
    event: EventRecord, start_s: float, places: _Places, *, is_measured: bool
) -> Iterator[dict[str, Any]]:
    """The phases of a transition; the prediction begins when the coordinator tells the answer."""
    predicted_s = event.predicted_downtime_s - event.predicted_transfer_s
    phases = (
        (
            ("detect", event.detect_s),
            ("decide", event.decide_s),
            ("regroup", event.regroup_s),
            ("transfer", event.transfer_s),
        )
        if is_measured
        else (("regroup", predicted_s), ("transfer", event.predicted_transfer_s))
    )
    if not is_measured:
        start_s += event.detect_s + event.decide_s
    for name, duration_s in phases:
        if duration_s > 0.0:
            text = f"{event.answer}: {name}"
            yield _complete(text, "transition", (start_s, start_s + duration_s), places.of_job())
        start_s += duration_s


def _complete(
    name: str, category: str, times_s: tuple[float, float], place: dict[str, int]
) -> dict[str, Any]:
    """A "complete" trace event; the format wants microseconds."""
    start_s, end_s = times_s
    duration_us = (end_s - start_s) * 1e6
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "ts": start_s * 1e6,
        "dur": duration_us,
        **place,
    }
