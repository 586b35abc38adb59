"""Timelines as pictures: a Chrome trace, for chrome://tracing or https://ui.perfetto.dev.

Trace Event Format: a process per node and a thread per lane of a rank. Predicted and measured
nodes are processes of their own, the predicted ones above. Measured iterations stand one after
the other, and each has the prediction at its start, so that the two can be compared by eye.

Source: the torch.profiler and torch.distributed.pipelining traces, which use the same format.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from planaria.estimator.time import Timeline

_THREADS = ("compute", "send", "reduce")


def chrome_trace(
    predicted: Timeline, measured: Sequence[Timeline], *, devices_per_node: int = 1
) -> dict[str, Any]:
    """The trace as plain dicts, ready for `json.dump`.

    Args:
        measured: iterations in order; if empty the prediction stands alone.
    """
    groups = {"predicted": [predicted] * max(1, len(measured)), "measured": measured}
    # An iteration faster than its prediction must not run into the next one's.
    slots_s = [max(timeline.iteration_s, predicted.iteration_s) for timeline in measured]
    starts_s = list(accumulate(slots_s, initial=0.0))
    ranks = {span.rank for group in groups.values() for line in group for span in line.spans}
    num_nodes = 1 + max(ranks, default=0) // devices_per_node
    events: list[dict[str, Any]] = []
    for index, (name, group) in enumerate(groups.items()):
        places = _Places(index * num_nodes, devices_per_node)
        lanes = sorted({(span.rank, span.lane) for line in group for span in line.spans})
        events += _names(name, lanes, places)
        for start_s, timeline in zip(starts_s, group, strict=False):
            events += _spans(timeline, start_s, places)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


class _Places(NamedTuple):
    """Which process and thread of the trace a lane of a rank has."""

    first_process: int
    devices_per_node: int

    def of(self, rank: int, lane: str) -> dict[str, int]:
        node, device = divmod(rank, self.devices_per_node)
        thread = device * len(_THREADS) + _THREADS.index(lane)
        return {"pid": self.first_process + node, "tid": thread}


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
            yield _metadata(place, "process_name", {"name": f"{group}: node {node}"})
            yield _metadata(place, "process_sort_index", {"sort_index": place["pid"]})
        yield _metadata(place, "thread_name", {"name": f"rank {rank} {lane}"})
        yield _metadata(place, "thread_sort_index", {"sort_index": place["tid"]})


def _metadata(place: dict[str, int], name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, **place, "args": arguments}


def _spans(timeline: Timeline, start_s: float, places: _Places) -> Iterator[dict[str, Any]]:
    """The complete events of one iteration, times in microseconds."""
    for span in timeline.spans:
        yield {
            "ph": "X",
            "name": str(span.action),
            "cat": span.lane,
            "ts": (start_s + span.start_s) * 1e6,
            "dur": (span.end_s - span.start_s) * 1e6,
            **places.of(span.rank, span.lane),
        }
