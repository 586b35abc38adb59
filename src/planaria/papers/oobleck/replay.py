"""Replays a list of lost and added nodes at measured rates, as the simulator of Oobleck's authors
does.

The tables of the paper are output of that simulator. It knows a system by its samples per second on
30 to 15 nodes, and by the constant times that it needs after a loss. This module keeps what decides
the numbers, even where it is no model of a cluster:

- Times are whole milliseconds, and the time of an iteration is rounded down to one.
- A new node takes 45 s until it is ready. More than 30 nodes are as fast as 30, fewer than 15 as
  15.
- After a loss the nodes regroup for a constant time. An iteration that ends meanwhile counts. The
  time of the regrouping is part of the first iteration after it.
- Nodes that are lost together begin a regrouping each. The first one that ends empties the list of
  nodes, so the second one ends with none, and training stands still until the next node comes or
  goes. `Overlap.IS_ONE` leaves that out, to show what it costs.
- Events wait in a heap and are compared by time and kind alone: the heap orders the alike ones.
  Whether a save fails is asked of the heap's array, which is not sorted. So saves of Varuna fail in
  which no node is lost. `FailedSaves.AS_MEANT` leaves that out, to show what it costs.
- The rate of a run is the samples of the iterations that count, divided by the time from the start
  of the first iteration to the end of the last. The run ends with the last line of the list.

Source: SymbioticLab/Oobleck, branch sosp23-artifact, tools/simulator (MIT); its README says that it
makes the paper's figures. What it does is written anew here.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from heapq import heapify, heappop, heappush
from typing import Final, Protocol

READY_MS: Final = 45_000  # Time that a new node takes until it can train.

Change = tuple[int, str, int]  # Time in milliseconds, "add" or "remove", and the node's number.


class _Kind(IntEnum):
    """Kinds of events; those of one millisecond are handled in this order."""

    ADD = 1
    REMOVE = 2
    READY = 3
    REGROUP_END = 4
    ITERATION_END = 5
    SAVE_END = 6


class _Event:
    """An event in the heap.

    Attributes:
        value: number of a node, time of a regrouping, or version of an iteration.
    """

    __slots__ = ("key", "kind", "time_ms", "value")

    def __init__(self, time_ms: int, kind: _Kind, value: int) -> None:
        self.time_ms, self.kind, self.value = time_ms, kind, value
        self.key = time_ms * 8 + kind

    def __lt__(self, other: "_Event") -> bool:
        return self.key < other.key


class Status(Enum):
    """States of a job."""

    STOPPED = "stopped"
    REGROUPING = "regrouping"
    RUNNING = "running"


class Overlap(Enum):
    """Treatment of nodes that are lost together."""

    AS_PUBLISHED = "as published"
    IS_ONE = "one regrouping"


class FailedSaves(Enum):
    """Saves that fail."""

    AS_PUBLISHED = "as published"
    AS_MEANT = "only those in which a node is lost"


@dataclass(slots=True)
class ReplayNode:
    """A node of the replay.

    Attributes:
        is_ready: whether it can train.
        places: pairs (pipeline, stage) that it computes; two after a neighbour was lost.
    """

    is_ready: bool = False
    places: list[tuple[int, int]] = field(default_factory=list)


@dataclass(slots=True)
class ReplayedIteration:
    """An iteration that ended; times are in milliseconds."""

    start_ms: int
    end_ms: int
    is_counted: bool = True


@dataclass(frozen=True, slots=True)
class ReplayOutcome:
    """The result of a replay.

    Attributes:
        samples_per_s: mean rate over the run.
        spent_ms: milliseconds by what they were spent on, as the authors' simulator counts them.
            They overlap: an iteration that is lost later is counted as training, too.
        trained_share: share of the run's time that is in iterations that count, with the
            regroupings inside them.
    """

    samples_per_s: float
    spent_ms: Mapping[str, float]
    trained_share: float

    def share(self, name: str) -> float:
        """The share of a kind of time in the sum of all kinds."""
        return self.spent_ms.get(name, 0.0) / sum(self.spent_ms.values())


class ReplayedSystem(Protocol):
    """What tells the compared systems apart."""

    @property
    def samples_per_iteration(self) -> float:
        """Number of samples of an iteration."""

    def iteration_ms(self, num_nodes: int) -> int:
        """Time of an iteration on so many nodes."""

    def regroup(self, run: "Replay") -> None:
        """Lets all nodes regroup, because the job starts or a loss stops it."""

    def on_removed(self, run: "Replay", node: ReplayNode) -> None:
        """Answers the loss of a node, which is no longer among the run's nodes."""

    def on_iteration_end(self, run: "Replay") -> None:
        """Records the iteration that ends now, and begins the next one."""


class Replay:
    """A run of a system through a list of changes; it is used once.

    Args:
        stages: number of stages of a pipeline; training stops with fewer nodes.
    """

    def __init__(
        self,
        system: ReplayedSystem,
        *,
        stages: int = 12,
        overlap: Overlap = Overlap.AS_PUBLISHED,
        saves: FailedSaves = FailedSaves.AS_PUBLISHED,
    ) -> None:
        self.stages = stages
        self.nodes: dict[int, ReplayNode] = {}
        self.num_pipelines = 0
        self.num_waiting = 0  # Number of nodes that are ready and have no place.
        self.status = Status.STOPPED
        self.now_ms = 0
        self.iteration_ms = 0
        self.iteration_start_ms = 0
        self.iterations: list[ReplayedIteration] = []
        self.spent_ms: dict[str, float] = defaultdict(float)
        self._system, self._overlap, self._saves = system, overlap, saves
        # Number of regroupings that have ended; iterations of older versions are void.
        self._version = 0
        self._start_ms: int | None = None
        self._regrouping: list[int] = []
        self._events: list[_Event] = []

    def outcome(self, changes: Sequence[Change]) -> ReplayOutcome:
        """The result of training from the first change to the last."""
        for time_ms, change, number in changes:
            self._push(time_ms, _Kind.ADD if change == "add" else _Kind.REMOVE, number)
        heapify(self._events)  # It reorders events of the same time and kind.
        while self._events[0].time_ms < changes[-1][0]:
            event = heappop(self._events)
            self.now_ms = event.time_ms
            self._handle(event.kind, event.value)
        counted = [iteration for iteration in self.iterations if iteration.is_counted]
        if self._start_ms is None or not counted:
            return ReplayOutcome(0.0, self.spent_ms, 0.0)
        duration_ms = self.iterations[-1].end_ms - self._start_ms
        return ReplayOutcome(
            self._system.samples_per_iteration * len(counted) / (duration_ms / 1000.0),
            self.spent_ms,
            sum(iteration.end_ms - iteration.start_ms for iteration in counted) / duration_ms,
        )

    def regroup_for(self, duration_ms: int) -> None:
        """Lets all nodes that are ready regroup for a time, and then train."""
        self.status = Status.REGROUPING
        self._regrouping = [number for number, node in self.nodes.items() if node.is_ready]
        self._push(self.now_ms + duration_ms, _Kind.REGROUP_END, duration_ms)

    def record_iteration(self) -> None:
        """Keeps the iteration that ends now."""
        self.iterations.append(ReplayedIteration(self.iteration_start_ms, self.now_ms))
        self.iteration_start_ms = self.now_ms

    def begin_iteration(self, start_ms: int) -> None:
        """Begins the next iteration now or later."""
        self.spent_ms["iterations"] += self.iteration_ms
        self.end_iteration_at(start_ms + self.iteration_ms)

    def end_iteration_at(self, end_ms: int) -> None:
        """Lets the present iteration end then, unless a regrouping ends before."""
        self._push(end_ms, _Kind.ITERATION_END, self._version)

    def fails_save(self, end_ms: int) -> bool:
        """Whether a save that ends then fails because a node is lost."""
        if self._saves is FailedSaves.AS_MEANT:
            return any(e.kind is _Kind.REMOVE and e.time_ms < end_ms for e in self._events)
        self._push(end_ms, _Kind.SAVE_END, 0)
        heapify(self._events)
        kinds = (_Kind.REMOVE, _Kind.SAVE_END)
        return next(e.kind for e in self._events if e.kind in kinds) is _Kind.REMOVE

    def _push(self, time_ms: int, kind: _Kind, value: int) -> None:
        heappush(self._events, _Event(time_ms, kind, value))

    def _handle(self, kind: _Kind, value: int) -> None:
        match kind:
            case _Kind.ADD:
                self.nodes[value] = ReplayNode()
                self._push(self.now_ms + READY_MS, _Kind.READY, value)
            case _Kind.REMOVE:
                self._system.on_removed(self, self.nodes.pop(value))
            case _Kind.READY if value in self.nodes:
                self._on_ready(value)
            case _Kind.REGROUP_END:
                self._on_regroup_end(value)
            case _Kind.ITERATION_END if value == self._version:
                self._system.on_iteration_end(self)

    def _on_ready(self, number: int) -> None:
        self.nodes[number].is_ready = True
        if self.status is Status.STOPPED:
            self._system.regroup(self)
        elif self.status is Status.REGROUPING:
            self._regrouping.append(number)
        else:
            self.num_waiting += 1

    def _on_regroup_end(self, duration_ms: int) -> None:
        if any(number not in self.nodes for number in self._regrouping):
            self.regroup_for(duration_ms)
            return
        if not self._regrouping and self._overlap is Overlap.IS_ONE:
            return
        self._assign_places()
        self._version += 1
        self._regrouping = []
        if not self.num_pipelines:
            self.status = Status.STOPPED
            return
        self.status = Status.RUNNING
        self.iteration_ms = self._system.iteration_ms(
            sum(node.is_ready for node in self.nodes.values())
        )
        if self._start_ms is None:
            self._start_ms = self.iteration_start_ms = self.now_ms
        self.begin_iteration(self.now_ms)

    def _assign_places(self) -> None:
        """Fills whole pipelines with the nodes that regrouped, in their order; the others wait."""
        self.num_pipelines = len(self._regrouping) // self.stages
        places = [
            (pipeline, stage)
            for pipeline in range(self.num_pipelines)
            for stage in range(self.stages)
        ]
        for index, number in enumerate(self._regrouping):
            self.nodes[number].places = places[index : index + 1]
        self.num_waiting = len(self._regrouping) - len(places)
