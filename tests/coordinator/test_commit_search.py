"""No run of a small job, whatever is lost when, ends with parameters of two ages.

Every order of events in commit_world.py is searched: two losses and a new coordinator at any
moment. Members that are recorded first, ranks that leave their reductions before they answer, and
outcomes that outlive their epoch are each left out on purpose, too, and the search finds it.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import is_dataclass

import msgspec
import pytest
import xxhash

from helpers.commit_world import (
    ITERATION,
    Node,
    Protocol,
    Rank,
    RecordOutcome,
    RecordPlan,
    TellOne,
    World,
    first_world,
    moves,
)
from planaria.coordinator.state import JobState
from planaria.core.messages import StartEpoch, Stopped
from planaria.core.records import Decision, Members, Outcome
from planaria.protocol.agent_state import AgentState

pytestmark = pytest.mark.faults

NUM_KEYS_MAX = 100_000


def has_two_ages(world: World) -> bool:
    """A member has applied what another one can apply no more, and both go on."""
    epoch = max(record.epoch for record in world.records if isinstance(record, Members))
    members = next(r.nodes for r in world.records if isinstance(r, Members) and r.epoch == epoch)
    ranks = [world.nodes[n].rank for n in members if world.nodes[n].is_alive]
    ahead = any(rank.age == ITERATION + 1 for rank in ranks)
    behind = any(rank.age != ITERATION + 1 and not rank.is_complete for rank in ranks)
    return ahead and behind


def goes_back(world: World) -> bool:
    """An iteration that was on record as committed, and told, is to be done again."""
    iterations = [record.iteration for record in world.records if isinstance(record, Outcome)]
    return iterations != sorted(iterations)


def key(value: object) -> object:
    """What of a value decides: not its times, and no order of mappings."""
    match value:
        case Mapping():
            return tuple(sorted((k, key(v)) for k, v in value.items()))
        case JobState():
            facts = (value.facts.answers, value.commits.outcome, value.facts.decision)
            present = (tuple(sorted(value.workers)), tuple(sorted(value.facts.ready)))
            return (value.epoch, value.nodes, value.phase.value, *map(key, facts), *present)
        case AgentState():
            return (value.epoch, key(tuple(value.facts.values())))
        case Stopped():
            told = (value.complete, value.vector_iteration)
            return ("stopped", value.rank, value.epoch, *value.ages.values(), *told)
        case StartEpoch():
            return ("start", value.epoch, value.iteration)
        case Outcome():
            return ("outcome", value.epoch, value.iteration)
        case Decision():
            return ("decision", key(value.order))
        case RecordPlan():
            return ("plan", key(value.decision))
        case RecordOutcome():
            return ("record", key(value.outcome))
        case TellOne():
            return ("tell", value.node, key(value.message))
        case Node():
            return tuple(map(key, value))
        case Rank():
            return value
        case tuple():
            return tuple(map(key, value))
    if isinstance(value, msgspec.Struct) or is_dataclass(value):
        return repr(value)
    return value


class Digests:
    """Digests of worlds. A world differs from the one before it in a part or two, so the keys of
    parts are kept: working them out anew for every world took three quarters of a search."""

    def __init__(self) -> None:
        self._keys: dict[int, tuple[object, str]] = {}  # By id; the parts, too, so that ids stay.

    def __call__(self, world: World) -> bytes:
        if len(self._keys) > NUM_KEYS_MAX:
            self._keys.clear()
        parts = (
            *map(self._part, world.nodes),
            self._part(world.state),
            *(self._parts(parts) for parts in (world.pending, world.recorded, world.records)),
            f"{world.losses_left} {world.kills_left}",
        )
        return xxhash.xxh3_128_digest("\n".join(parts).encode())

    def _parts(self, parts: tuple[object, ...]) -> str:
        return "\t".join(map(self._part, parts))

    def _part(self, part: object) -> str:
        known = self._keys.get(id(part))
        if known is None:
            # Most of a node stays as well. No representation has these two characters.
            if isinstance(part, Node) or type(part) is tuple:
                text = f"\1{self._parts(part)}\2"
            else:
                text = repr(key(part))
            known = self._keys[id(part)] = part, text
        return known[1]


def found(protocol: Protocol, *, most: int = 3_000_000) -> tuple[int, list[str]]:
    """How many worlds there are, and how one with two ages comes about, if one does."""
    start, digest = first_world(protocol), Digests()
    seen: dict[bytes, tuple[bytes, str] | None] = {(first := digest(start)): None}
    waiting = deque([(first, start)])
    while waiting:
        before, world = waiting.popleft()
        if has_two_ages(world) or goes_back(world):
            trace = []
            while (origin := seen[before]) is not None:
                before = origin[0]
                trace.append(origin[1])
            return len(seen), trace[::-1]
        for name, after in moves(world, protocol):
            if (known := digest(after)) not in seen:
                seen[known] = (before, name)
                waiting.append((known, after))
        assert len(seen) < most
    return len(seen), []


def test_no_run_with_a_loss_and_a_new_coordinator_ends_with_two_ages() -> None:
    """All orders of one loss and one kill of the coordinator."""
    num_worlds, trace = found(Protocol(num_losses=1))

    assert trace == []
    assert num_worlds > 1_000


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_no_run_with_two_losses_and_a_new_coordinator_ends_with_two_ages() -> None:
    """All orders of two losses and one kill of the coordinator."""
    num_worlds, trace = found(Protocol())

    assert trace == []
    assert num_worlds > 100_000


@pytest.mark.parametrize(
    "protocol",
    [
        Protocol(leaves_first=False, num_losses=1, num_kills=0),
        Protocol(records_members=False, num_losses=1),
        pytest.param(
            Protocol(keeps_outcomes=False), marks=(pytest.mark.long, pytest.mark.timeout(1200))
        ),
    ],
)
def test_the_search_finds_what_each_rule_prevents(protocol: Protocol) -> None:
    """A search that finds nothing proves something only if it can find."""
    _, trace = found(protocol)

    assert trace
