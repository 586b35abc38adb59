"""What happens to the nodes of a simulated cluster, as an ordered stream of occurrences.

A cluster has nodes 0 to num_nodes - 1, and all of them are there and fast at time 0. A source of
failures gives what happens to them from then on: they are lost and come back, they are told that
they will be lost, they slow down. Nodes that are missing from the start are lost at time 0, before
anything else; no job counts that as a loss.

Every source keeps these rules, and `checked_stream` asserts them:

- times do not fall, and lie in [0, horizon_s];
- a node that is lost is not lost again until it is back, gets no notice, and is not slowed;
- a notice precedes the loss of which it tells: `deadline_s` is the time of that loss;
- a node that comes back is fast, whatever it was before.

A source reads or draws as the stream is consumed, and keeps no more than what it knows of each
node. So memory does not grow with the length of the stream.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from heapq import merge
from itertools import repeat
from random import Random
from typing import Protocol


class OccurrenceKind(StrEnum):
    """What happens to nodes."""

    LOST = "lost"  # They are gone, with all they held in memory.
    BACK = "back"  # They, or others in their places, are there again, with empty memory.
    NOTICE = "notice"  # They are told that they will be lost.
    SLOWED = "slowed"  # They go on at another speed.
    RESTORED = "restored"  # They are as fast as before.


@dataclass(frozen=True, slots=True)
class Occurrence:
    """What happens to some nodes at one time.

    Attributes:
        at_s: seconds since the start of the simulated run.
        nodes: numbers of the nodes, ascending, at least one.
        deadline_s: notice: time at which the nodes will be lost, in seconds since the start; None
            for other kinds.
        speed: slowed: share of the normal speed at which the nodes go on; 1 for other kinds.
        cause: reason that the trace or the generator gives, in a few words; may be empty.
    """

    at_s: float
    kind: OccurrenceKind
    nodes: tuple[int, ...]
    deadline_s: float | None = None
    speed: float = 1.0
    cause: str = ""


class FailureSource(Protocol):
    """Gives what happens to the nodes of a cluster."""

    def occurrences(self, num_nodes: int, *, horizon_s: float, rng: Random) -> Iterator[Occurrence]:
        """What happens to num_nodes nodes from time 0 to horizon_s, in order of time.

        The same arguments and the same state of `rng` give the same stream. The stream draws from
        `rng` as it is consumed, so nothing else may draw from it.
        """


@dataclass(frozen=True, slots=True)
class MergedSource:
    """Several sources at once, each with random numbers of its own.

    A node is lost while any of the sources has it lost. So it is back when the last of them has it
    back, and what else a source says of it meanwhile is left out. The speed of a node is the
    product of those that the sources give it.
    """

    sources: tuple[FailureSource, ...]

    def occurrences(self, num_nodes: int, *, horizon_s: float, rng: Random) -> Iterator[Occurrence]:
        """The occurrences of all sources; implements `FailureSource`."""
        streams = [
            source.occurrences(num_nodes, horizon_s=horizon_s, rng=Random(rng.getrandbits(64)))
            for source in self.sources
        ]
        return merged_streams(streams)


def merged_streams(streams: Sequence[Iterator[Occurrence]]) -> Iterator[Occurrence]:
    """The occurrences of several streams of one cluster, in order of time.

    Nodes and speeds are as `MergedSource` says; at one time an earlier stream goes first.
    """
    num_losses: Counter[int] = Counter()  # Streams that have the node lost.
    speeds: dict[int, dict[int, float]] = {}  # Speed of a slow node by stream.
    numbered = [zip(repeat(index), stream) for index, stream in enumerate(streams)]
    for index, occurrence in merge(*numbered, key=lambda pair: pair[1].at_s):
        match occurrence.kind:
            case OccurrenceKind.LOST:
                nodes = tuple(node for node in occurrence.nodes if not num_losses[node])
                for node in occurrence.nodes:
                    num_losses[node] += 1
                    speeds.pop(node, None)
            case OccurrenceKind.BACK:
                for node in occurrence.nodes:
                    num_losses[node] -= 1
                nodes = tuple(node for node in occurrence.nodes if not num_losses[node])
            case OccurrenceKind.NOTICE:
                nodes = tuple(node for node in occurrence.nodes if not num_losses[node])
            case OccurrenceKind.SLOWED | OccurrenceKind.RESTORED:
                there = [node for node in occurrence.nodes if not num_losses[node]]
                yield from _speed_changes(replace(occurrence, nodes=tuple(there)), index, speeds)
                continue
        if nodes:
            yield replace(occurrence, nodes=nodes)


def _speed_changes(
    occurrence: Occurrence, index: int, speeds: dict[int, dict[int, float]]
) -> Iterator[Occurrence]:
    """The speeds of nodes after a stream slows or restores them; one occurrence for each speed."""
    nodes_by_speed: dict[float, list[int]] = {}
    for node in occurrence.nodes:
        factors = speeds.setdefault(node, {})
        if occurrence.kind is OccurrenceKind.SLOWED:
            factors[index] = occurrence.speed
        elif factors.pop(index, None) is None:
            continue  # It was lost since, and came back fast.
        speed = 1.0
        for factor in factors.values():
            speed *= factor
        if not factors:
            del speeds[node]
        nodes_by_speed.setdefault(speed if factors else 1.0, []).append(node)
    for speed, nodes in nodes_by_speed.items():
        is_slow = any(node in speeds for node in nodes)
        kind = OccurrenceKind.SLOWED if is_slow else OccurrenceKind.RESTORED
        yield replace(occurrence, kind=kind, nodes=tuple(nodes), speed=speed)


def checked_stream(
    stream: Iterator[Occurrence], num_nodes: int, *, horizon_s: float
) -> Iterator[Occurrence]:
    """The same stream; asserts of each occurrence what every source keeps."""
    lost: set[int] = set()
    slow: set[int] = set()
    now_s = 0.0
    for occurrence in stream:
        nodes = set(occurrence.nodes)
        assert now_s <= occurrence.at_s <= horizon_s, occurrence
        assert occurrence.nodes == tuple(sorted(nodes)), occurrence
        assert nodes, occurrence
        assert nodes <= set(range(num_nodes)), occurrence
        now_s = occurrence.at_s
        match occurrence.kind:
            case OccurrenceKind.LOST:
                assert not nodes & lost, occurrence
                lost |= nodes
                slow -= nodes
            case OccurrenceKind.BACK:
                assert nodes <= lost, occurrence
                lost -= nodes
            case OccurrenceKind.NOTICE:
                assert not nodes & lost, occurrence
                assert occurrence.deadline_s is not None, occurrence
                assert occurrence.deadline_s >= now_s, occurrence
            case OccurrenceKind.SLOWED:
                assert not nodes & lost, occurrence
                assert occurrence.speed > 0, occurrence
                slow |= nodes
            case OccurrenceKind.RESTORED:
                assert nodes <= slow, occurrence
                slow -= nodes
        yield occurrence
