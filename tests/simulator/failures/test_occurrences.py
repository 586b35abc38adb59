"""Streams of what happens to nodes, and how several become one."""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import pytest

from planaria.simulator.failures.occurrences import (
    FailureSource,
    MergedSource,
    Occurrence,
    OccurrenceKind,
    checked_stream,
    merged_streams,
)

LOST, BACK, NOTICE = OccurrenceKind.LOST, OccurrenceKind.BACK, OccurrenceKind.NOTICE
SLOWED, RESTORED = OccurrenceKind.SLOWED, OccurrenceKind.RESTORED


def happening(at_s: float, kind: OccurrenceKind, *nodes: int, speed: float = 1.0) -> Occurrence:
    return Occurrence(at_s, kind, nodes, speed=speed)


@dataclass(frozen=True, slots=True)
class Flapping:
    """A source that loses one node again and again, at times that it draws."""

    node: int
    num_losses: int

    def occurrences(self, num_nodes: int, *, horizon_s: float, rng: Random) -> Iterator[Occurrence]:
        assert self.node < num_nodes
        at_s = 0.0
        for _ in range(self.num_losses):
            for kind in (LOST, BACK):
                at_s += rng.uniform(0, horizon_s / self.num_losses / 2)
                yield happening(at_s, kind, self.node)


def test_a_node_lost_by_two_streams_is_lost_once_and_back_once() -> None:
    """The cluster has one node of that number; it is there when no stream has it lost."""
    first = [happening(1, LOST, 0, 1), happening(5, BACK, 0, 1)]
    second = [happening(2, LOST, 1, 2), happening(9, BACK, 1, 2)]

    assert list(merged_streams([iter(first), iter(second)])) == [
        happening(1, LOST, 0, 1),
        happening(2, LOST, 2),
        happening(5, BACK, 0),
        happening(9, BACK, 1, 2),
    ]


def test_a_lost_node_gets_no_notice_and_no_other_speed() -> None:
    """Nobody is there to be told or to be slow; and who comes back is fast."""
    first = [happening(2, LOST, 0), happening(4, BACK, 0)]
    second = [
        happening(1, SLOWED, 0, speed=0.5),
        Occurrence(3, NOTICE, (0,), deadline_s=3.5),
        happening(3, SLOWED, 0, speed=0.4),
        happening(5, RESTORED, 0),
    ]

    assert list(merged_streams([iter(first), iter(second)])) == [
        happening(1, SLOWED, 0, speed=0.5),
        happening(2, LOST, 0),
        happening(4, BACK, 0),
    ]


def test_speeds_of_two_streams_are_multiplied() -> None:
    """A node that is slow for two reasons is fast when both are gone."""
    first = [happening(1, SLOWED, 0, 1, speed=0.5), happening(4, RESTORED, 0, 1)]
    second = [happening(2, SLOWED, 0, speed=0.5), happening(5, RESTORED, 0)]

    assert list(merged_streams([iter(first), iter(second)])) == [
        happening(1, SLOWED, 0, 1, speed=0.5),
        happening(2, SLOWED, 0, speed=0.25),
        happening(4, SLOWED, 0, speed=0.5),
        happening(4, RESTORED, 1),
        happening(5, RESTORED, 0),
    ]


def test_merged_sources_draw_apart() -> None:
    """What one source draws does not depend on how much another one does."""

    def of_node_0(*others: FailureSource) -> list[Occurrence]:
        source = MergedSource((Flapping(0, 9), *others))
        stream = source.occurrences(2, horizon_s=100, rng=Random(5))
        return [one for one in checked_stream(stream, 2, horizon_s=100) if one.nodes == (0,)]

    assert len(of_node_0()) == 18
    assert of_node_0() == of_node_0(Flapping(1, 3)) == of_node_0(Flapping(1, 20))


@pytest.mark.parametrize(
    "stream",
    [
        [happening(2, LOST, 0), happening(1, LOST, 1)],
        [happening(2, LOST, 0), happening(3, LOST, 0)],
        [happening(2, BACK, 0)],
        [happening(11, LOST, 0)],
        [happening(1, LOST, 9)],
        [happening(1, LOST, 1, 0)],
        [happening(1, LOST)],
        [happening(1, LOST, 0), Occurrence(2, NOTICE, (0,), deadline_s=3)],
        [Occurrence(2, NOTICE, (0,), deadline_s=1)],
        [Occurrence(2, NOTICE, (0,))],
        [happening(1, LOST, 0), happening(2, SLOWED, 0, speed=0.5)],
        [happening(1, RESTORED, 0)],
        [happening(1, SLOWED, 0, speed=0)],
    ],
)
def test_a_stream_that_breaks_a_rule_is_caught(stream: list[Occurrence]) -> None:
    """The tests of all sources lean on this check."""
    with pytest.raises(AssertionError):
        list(checked_stream(iter(stream), 9, horizon_s=10))
