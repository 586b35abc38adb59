"""Replays a list of lost and added nodes at measured rates, as the simulator of Oobleck's authors
does.

The tables of the paper are output of that simulator. It knows a system by its samples per second on
30 to 15 nodes, and by the constant times that it needs after a loss. This module keeps what decides
the numbers, even where it is no model of a cluster:

- Times are whole milliseconds, and the time of a step is rounded down to one.
- A new node takes 45 s until it is ready. More than 30 nodes are as fast as 30, fewer than 15 as
  15.
- After a loss the nodes meet for a constant time. A step that ends meanwhile counts. The time of
  the meeting is part of the first step after it.
- Nodes that are lost together begin a meeting each. The first meeting that ends empties the list of
  nodes, so the second one ends with none, and training stands still until the next node comes or
  goes. `Overlap.IS_ONE` leaves that out, to show what it costs.
- Events wait in a heap and are compared by time and kind alone: the heap orders the alike ones.
  Whether a save fails is asked of the heap's array, which is not sorted. So saves of Varuna fail in
  which no node is lost. `FailedSaves.AS_MEANT` leaves that out, to show what it costs.
- The rate of a run is the samples of the steps that count, divided by the time from the start of
  the first step to the end of the last. The run ends with the last line of the list.

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
    MEETING_END = 4
    STEP_END = 5
    SAVE_END = 6


class _Event:
    """An event in the heap.

    Attributes:
        value: number of a node, time of a meeting, or version of a step.
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
    MEETING = "meeting"
    RUNNING = "running"


class Overlap(Enum):
    """Treatment of nodes that are lost together."""

    AS_PUBLISHED = "as published"
    IS_ONE = "one meeting"


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
class Step:
    """A step that ended; times are in milliseconds."""

    start_ms: int
    end_ms: int
    is_counted: bool = True


@dataclass(frozen=True, slots=True)
class ReplayOutcome:
    """The result of a replay.

    Attributes:
        samples_per_s: mean rate over the run.
        spent_ms: milliseconds by what they were spent on, as the authors' simulator counts them.
            They overlap: a step that is lost later is counted as training, too.
        trained_share: share of the run's time that is in steps that count, with the meetings inside
            them.
    """

    samples_per_s: float
    spent_ms: Mapping[str, float]
    trained_share: float

    def share(self, name: str) -> float:
        """The share of a kind of time in the sum of all kinds."""
        return self.spent_ms.get(name, 0.0) / sum(self.spent_ms.values())


class System(Protocol):
    """What tells the compared systems apart."""

    @property
    def samples_per_step(self) -> float:
        """Number of samples of a step."""

    def step_ms(self, num_nodes: int) -> int:
        """Time of a step on so many nodes."""

    def begin_meeting(self, run: "Replay") -> None:
        """Lets all nodes meet, because the job starts or a loss stops it."""

    def on_removed(self, run: "Replay", node: ReplayNode) -> None:
        """Answers the loss of a node, which is no longer among the run's nodes."""

    def on_step_end(self, run: "Replay") -> None:
        """Records the step that ends now, and begins the next one."""


class Replay:
    """A run of a system through a list of changes; it is used once.

    Args:
        stages: number of stages of a pipeline; training stops with fewer nodes.
    """

    def __init__(
        self,
        system: System,
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
        self.step_ms = 0
        self.step_start_ms = 0
        self.steps: list[Step] = []
        self.spent_ms: dict[str, float] = defaultdict(float)
        self._system, self._overlap, self._saves = system, overlap, saves
        self._version = 0  # Number of meetings that have ended; steps of older versions are void.
        self._start_ms: int | None = None
        self._meeting: list[int] = []
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
        counted = [step for step in self.steps if step.is_counted]
        if self._start_ms is None or not counted:
            return ReplayOutcome(0.0, self.spent_ms, 0.0)
        duration_ms = self.steps[-1].end_ms - self._start_ms
        return ReplayOutcome(
            self._system.samples_per_step * len(counted) / (duration_ms / 1000.0),
            self.spent_ms,
            sum(step.end_ms - step.start_ms for step in counted) / duration_ms,
        )

    def meet(self, duration_ms: int) -> None:
        """Lets all nodes that are ready meet for a time, and then train."""
        self.status = Status.MEETING
        self._meeting = [number for number, node in self.nodes.items() if node.is_ready]
        self._push(self.now_ms + duration_ms, _Kind.MEETING_END, duration_ms)

    def record_step(self) -> None:
        """Keeps the step that ends now."""
        self.steps.append(Step(self.step_start_ms, self.now_ms))
        self.step_start_ms = self.now_ms

    def begin_step(self, start_ms: int) -> None:
        """Begins the next step now or later."""
        self.spent_ms["steps"] += self.step_ms
        self.end_step_at(start_ms + self.step_ms)

    def end_step_at(self, end_ms: int) -> None:
        """Lets the present step end then, unless a meeting ends before."""
        self._push(end_ms, _Kind.STEP_END, self._version)

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
            case _Kind.MEETING_END:
                self._on_meeting_end(value)
            case _Kind.STEP_END if value == self._version:
                self._system.on_step_end(self)

    def _on_ready(self, number: int) -> None:
        self.nodes[number].is_ready = True
        if self.status is Status.STOPPED:
            self._system.begin_meeting(self)
        elif self.status is Status.MEETING:
            self._meeting.append(number)
        else:
            self.num_waiting += 1

    def _on_meeting_end(self, duration_ms: int) -> None:
        if any(number not in self.nodes for number in self._meeting):
            self.meet(duration_ms)
            return
        if not self._meeting and self._overlap is Overlap.IS_ONE:
            return
        self._assign_places()
        self._version += 1
        self._meeting = []
        if not self.num_pipelines:
            self.status = Status.STOPPED
            return
        self.status = Status.RUNNING
        self.step_ms = self._system.step_ms(sum(node.is_ready for node in self.nodes.values()))
        if self._start_ms is None:
            self._start_ms = self.step_start_ms = self.now_ms
        self.begin_step(self.now_ms)

    def _assign_places(self) -> None:
        """Fills whole pipelines with the nodes that met, in their order; the others wait."""
        self.num_pipelines = len(self._meeting) // self.stages
        places = [
            (pipeline, stage)
            for pipeline in range(self.num_pipelines)
            for stage in range(self.stages)
        ]
        for index, number in enumerate(self._meeting):
            self.nodes[number].places = places[index : index + 1]
        self.num_waiting = len(self._meeting) - len(places)
