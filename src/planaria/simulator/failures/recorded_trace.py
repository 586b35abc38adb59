"""Traces of what happened to the nodes of a real cluster, and how a simulated one replays them.

A trace has places for as many nodes as were there at once. Its nodes are *machines*, which are all
there at the start and come back into their own places; or *allocations*, as of spot machines: each
comes into a free place, once, and none comes back.

A seed draws where in the trace the run begins, and which places the nodes of the cluster have
(`Window.DRAWN`). After the trace's end a run goes on at its start, with the nodes in new places: as
far as it can be, those that are there stay there. A cluster with more nodes than the trace has
places is several clusters side by side, each with a window of its own. So each part of the trace is
as likely, and the rate per node is that of the trace. A trace in which no node comes back is one
experiment: a run that is no longer lies within it. `Window.START` replays the trace from its start,
the nodes in order; after its end nothing more happens.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import groupby
from random import Random
from typing import NamedTuple

from planaria.errors import ConfigError
from planaria.simulator.failures.occurrences import Occurrence, OccurrenceKind, merged_streams

ANY_NODE = ""  # Name of a node that the trace does not name; the replay draws one.


class Window(Enum):
    """Parts of a trace that a run replays."""

    DRAWN = "drawn"
    START = "start"


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """What happened to one node of a trace.

    Attributes:
        at_s: seconds since the trace's own origin.
        node: name of the node in the trace, or `ANY_NODE`.
        deadline_s: notice: time of the loss, in seconds since the origin.
        speed: slowed: share of the normal speed.
        cause: reason that the trace gives; may be empty.
    """

    at_s: float
    kind: OccurrenceKind
    node: str
    deadline_s: float | None = None
    speed: float = 1.0
    cause: str = ""


@dataclass(frozen=True, slots=True)
class RecordedTrace:
    """What happened to the nodes of one cluster.

    Attributes:
        name: file or shipped name, for messages.
        num_places: largest number of nodes that are there at once.
        machines: names of the nodes in the order of their places, at most num_places of them;
            empty if the nodes are allocations.
        begin_s: time at which the trace begins; what happens up to then is its first state.
        end_s: time at which it ends, more than begin_s.
        events: list in order of time; a node is lost only while it is there.
    """

    name: str
    num_places: int
    machines: tuple[str, ...]
    begin_s: float
    end_s: float
    events: tuple[TraceEvent, ...]

    @property
    def has_returns(self) -> bool:
        """Whether any node comes, or comes back, after the trace's start."""
        return any(e.kind is OccurrenceKind.BACK and e.at_s > self.begin_s for e in self.events)


class _PlaceEvent(NamedTuple):
    """An event with the place of its node, or with the node of that place."""

    event: TraceEvent
    number: int


@dataclass(slots=True)
class _TracePlaces:
    """Which places of a trace have a node, as its events are read."""

    trace: RecordedTrace
    window: Window
    rng: Random
    place_of: dict[str, int] = field(default_factory=dict)
    are_there: list[bool] = field(default_factory=list)
    speeds: dict[int, float] = field(default_factory=dict)
    notices: dict[int, TraceEvent] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = self.trace.machines
        self.place_of = {name: place for place, name in enumerate(names)}
        self.are_there = [bool(names)] * self.trace.num_places

    def on_event(self, event: TraceEvent) -> int:
        """Takes an event into the state; returns the place of its node."""
        match event.kind:
            case OccurrenceKind.BACK:
                place = self._place_to_fill(event.node)
                self.are_there[place] = True
            case OccurrenceKind.LOST:
                place = self._place_to_empty(event.node)
                self.are_there[place] = False
                self.speeds.pop(place, None)
                self.notices.pop(place, None)
            case OccurrenceKind.NOTICE:
                place = self.place_of[event.node]
                self.notices[place] = event
            case OccurrenceKind.SLOWED:
                place = self.place_of[event.node]
                self.speeds[place] = event.speed
            case OccurrenceKind.RESTORED:
                place = self.place_of[event.node]
                self.speeds.pop(place, None)
        return place

    def _place_to_fill(self, name: str) -> int:
        if self.trace.machines:
            return self.place_of[name]
        free = [place for place, is_there in enumerate(self.are_there) if not is_there]
        place = self.rng.choice(free) if self.window is Window.DRAWN else free[0]
        self.place_of[name] = place
        return place

    def _place_to_empty(self, name: str) -> int:
        if name == ANY_NODE:
            return self.rng.choice([place for place, there in enumerate(self.are_there) if there])
        return self.place_of[name] if self.trace.machines else self.place_of.pop(name)


@dataclass(frozen=True, slots=True)
class TraceSource:
    """Replays a trace; implements `FailureSource`."""

    trace: RecordedTrace
    window: Window = Window.DRAWN

    def check_places(self, num_nodes: int) -> None:
        """Refuses a cluster of too many nodes for a replay of the trace from its start.

        Raises:
            ConfigError: the trace has too few places.
        """
        size = self.trace.num_places
        if self.window is Window.START and num_nodes > size:
            raise ConfigError(
                "failures.window",
                self.window.value,
                f"{self.trace.name} has {size} nodes at once and the cluster has {num_nodes}; a "
                f"cluster of {size} nodes works, or failures.trace_nodes if it is of more and does "
                f"not name all, or the window {Window.DRAWN.value!r}, which plays several "
                "windows side by side",
            )

    def occurrences(self, num_nodes: int, *, horizon_s: float, rng: Random) -> Iterator[Occurrence]:
        """The occurrences of a window of the trace.

        Raises:
            ConfigError: the trace has too few places for a replay from its start.
        """
        self.check_places(num_nodes)
        size = self.trace.num_places
        blocks = [
            _ReplayedWindow(
                self.trace,
                self.window,
                first_node=first,
                num_nodes=min(size, num_nodes - first),
                rng=Random(rng.getrandbits(64)),
            )
            for first in range(0, num_nodes, size)
        ]
        return merged_streams([block.occurrences(horizon_s) for block in blocks])


class _ReplayedWindow:
    """A part of the cluster that replays one window.

    The block has as many nodes as the trace has places. Those from `num_nodes` on are not of the
    cluster, and what happens to them is left out.
    """

    def __init__(
        self,
        trace: RecordedTrace,
        window: Window,
        *,
        first_node: int,
        num_nodes: int,
        rng: Random,
    ) -> None:
        self._trace, self._window = trace, window
        self._first_node, self._num_nodes = first_node, num_nodes
        self._rng = rng
        self._node_at = list(range(trace.num_places))  # By place.
        if window is Window.DRAWN:
            rng.shuffle(self._node_at)

    def occurrences(self, horizon_s: float) -> Iterator[Occurrence]:
        """What happens to the block's nodes of the cluster."""
        events = (event for event in self._events(horizon_s) if event.number < self._num_nodes)
        for (at_s, kind, deadline_s, speed), group in groupby(events, key=_moment):
            if at_s > horizon_s:
                return
            same = list(group)
            nodes = tuple(sorted(self._first_node + number for _, number in same))
            cause = "; ".join(sorted({event.cause for event, _ in same if event.cause}))
            yield Occurrence(at_s, kind, nodes, deadline_s, speed, cause)

    def _events(self, horizon_s: float) -> Iterator[_PlaceEvent]:
        """What happens to the block's nodes, one at a time, at seconds of the run.

        Passes through the trace follow each other; the first one begins at the window.
        """
        start_s = self._window_start_s(horizon_s)
        places, events = self._state_at(start_s)
        yield from self._first_events(places, start_s)
        offset_s = -start_s
        while True:
            for event in events:
                place = places.on_event(event)
                yield _PlaceEvent(_at_run_time(event, offset_s), self._node_at[place])
            end_s = self._trace.end_s + offset_s
            if self._window is Window.START or end_s >= horizon_s:
                return
            before, (places, events) = places, self._state_at(self._trace.begin_s)
            yield from self._seam_events(before, places, end_s)
            offset_s = end_s - self._trace.begin_s
            yield from self._pending_events(places, offset_s, at_s=end_s)

    def _window_start_s(self, horizon_s: float) -> float:
        trace = self._trace
        if self._window is Window.START:
            return trace.begin_s
        is_within = not trace.has_returns and horizon_s <= trace.end_s - trace.begin_s
        last_s = trace.end_s - (horizon_s if is_within else 0.0)
        return self._rng.uniform(trace.begin_s, last_s)

    def _state_at(self, start_s: float) -> tuple[_TracePlaces, Iterator[TraceEvent]]:
        """The places at a time of the trace, and what happens later."""
        places = _TracePlaces(self._trace, self._window, self._rng)
        num_before = 0
        for event in self._trace.events:
            if event.at_s > start_s:
                break
            places.on_event(event)
            num_before += 1
        return places, (event for event in self._trace.events[num_before:])

    def _first_events(self, places: _TracePlaces, start_s: float) -> Iterator[_PlaceEvent]:
        """What the cluster is told at time 0 of what the window begins with."""
        for place, is_there in enumerate(places.are_there):
            node = self._node_at[place]
            if not is_there:
                missing = TraceEvent(0.0, OccurrenceKind.LOST, "", cause="not there at the start")
                yield _PlaceEvent(missing, node)
        yield from self._pending_events(places, -start_s, at_s=0.0)

    def _pending_events(
        self, places: _TracePlaces, offset_s: float, *, at_s: float
    ) -> Iterator[_PlaceEvent]:
        """What nodes are told when a pass through the trace begins: who is slow, or has notice."""
        for place, speed in places.speeds.items():
            slow = TraceEvent(at_s, OccurrenceKind.SLOWED, "", speed=speed)
            yield _PlaceEvent(slow, self._node_at[place])
        for place, notice in places.notices.items():
            late = replace(_at_run_time(notice, offset_s), at_s=at_s)
            yield _PlaceEvent(late, self._node_at[place])

    def _seam_events(
        self, before: _TracePlaces, after: _TracePlaces, at_s: float
    ) -> Iterator[_PlaceEvent]:
        """Puts the nodes in new places where the trace begins again; gives what that changes."""
        were_there = {
            self._node_at[place]: is_there for place, is_there in enumerate(before.are_there)
        }
        nodes, places = list(range(len(were_there))), list(range(len(were_there)))
        self._rng.shuffle(nodes)
        self._rng.shuffle(places)
        nodes.sort(key=lambda node: were_there[node])
        places.sort(key=lambda place: after.are_there[place])
        slow = {self._node_at[place] for place in before.speeds}
        for node, place in zip(nodes, places, strict=True):
            self._node_at[place] = node
            kind = None
            if were_there[node] != after.are_there[place]:
                kind = OccurrenceKind.LOST if were_there[node] else OccurrenceKind.BACK
            elif node in slow:
                kind = OccurrenceKind.RESTORED
            if kind:
                yield _PlaceEvent(TraceEvent(at_s, kind, "", cause="the trace begins again"), node)


def _at_run_time(event: TraceEvent, offset_s: float) -> TraceEvent:
    deadline_s = None if event.deadline_s is None else event.deadline_s + offset_s
    return replace(event, at_s=event.at_s + offset_s, deadline_s=deadline_s)


def _moment(pair: _PlaceEvent) -> tuple[float, OccurrenceKind, float | None, float]:
    """What the events of one occurrence have in common."""
    event, _ = pair
    return event.at_s, event.kind, event.deadline_s, event.speed
