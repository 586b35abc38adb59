"""The rules of a schedule that can be checked without running it.

Every route covers the model once, in order. Every hop has one forward and one backward, on its own
rank. The backward is whole or in two parts; that of a first hop is whole, because the input of the
model has no gradient. Between neighbouring hops on different ranks there are a send and a receive,
and one of each for the gradient. Within a rank an action comes after those of the same rank that it
needs. A bucket has two ranks or more, and is reduced once on each of them, after every backward
there that adds to it; buckets of one round share no rank. An eager forward is on the rank of the
hop before, while that rank still has the output of that hop.

`lower.validate` also checks that sends and receives meet in an order that can finish.
"""

from collections.abc import Collection, Mapping

from planaria.core.plan import Route
from planaria.errors import ScheduleError
from planaria.schedule.action import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    RECEIVE_BACKWARD,
    RECEIVE_FORWARD,
    REDUCE,
    SEND_BACKWARD,
    SEND_FORWARD,
    SHADOW,
    Action,
    Bucket,
    Kind,
    Schedule,
    crossings_of,
    format_table,
    slots_of,
)

_NO_LAYERS: frozenset[int] = frozenset()
_PARTS = (BACKWARD_INPUT, BACKWARD_WEIGHT)
_BY_HOP = tuple(kind for kind in Kind if kind not in (REDUCE, SHADOW, *_PARTS))


def check_rules(schedule: Schedule, num_layers: int) -> None:
    """Checks every rule above. O(actions).

    Raises:
        ScheduleError: a rule is broken; the message has the table with the step marked.
    """
    for microbatch, route in enumerate(schedule.routes):
        if not _covers_model(route, num_layers):
            why = f"the route of microbatch {microbatch} does not cover layers 0 .. {num_layers}"
            raise _error(schedule, why, {})
    round_index, round_ranks = 0, set[int]()
    for index, bucket in enumerate(schedule.buckets):
        if bucket.round_index > round_index:
            round_index, round_ranks = bucket.round_index, set()
        if fault := _bucket_fault(
            bucket, num_layers, round_index=round_index, round_ranks=round_ranks
        ):
            raise _error(schedule, f"bucket {index} {fault}", {})
        round_ranks.update(bucket.ranks)
    checker = _Checker(schedule)
    for rank in sorted(schedule.actions):
        for step, action in enumerate(schedule.actions[rank]):
            if fault := checker.fault(rank, action):
                raise _error(schedule, f"rank {rank}, step {step}: {action} {fault}", {rank: step})
    if missing := checker.missing():
        raise _error(schedule, missing, {})


def _error(schedule: Schedule, why: str, marked: Mapping[int, int]) -> ScheduleError:
    return ScheduleError(f"{why}\n{format_table(schedule, marked)}")


def _covers_model(route: Route, num_layers: int) -> bool:
    end = 0
    for hop in route:
        if hop.first_layer != end or hop.end_layer <= end:
            return False
        end = hop.end_layer
    return end == num_layers


def _bucket_fault(
    bucket: Bucket, num_layers: int, *, round_index: int, round_ranks: Collection[int]
) -> str:
    """What is wrong with a bucket; empty if nothing is.

    Args:
        bucket: bucket to check.
        num_layers: number of layers of the model.
        round_index: highest round so far, this bucket's included.
        round_ranks: ranks of the earlier buckets of that round.
    """
    if len(bucket.ranks) < 2 or list(bucket.ranks) != sorted(set(bucket.ranks)):
        return f"needs two ranks or more, ascending, not {bucket.ranks}"
    if not bucket.layers or not all(0 <= layer < num_layers for layer in bucket.layers):
        return f"holds layers {bucket.layers} of a model of {num_layers}"
    if bucket.round_index < round_index:
        return f"of round {bucket.round_index} follows one of round {round_index}"
    if any(rank in round_ranks for rank in bucket.ranks):
        return f"shares a rank with another bucket of round {round_index}"
    return ""


class _Checker:
    """A check of a schedule, action by action, that remembers the actions seen so far."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._slots = slots_of(schedule.routes)
        self._crossings = crossings_of(schedule.routes)
        self._seen = {kind: bytearray(self._slots[-1]) for kind in Kind}
        self._reduced: set[tuple[int, int]] = set()
        self._reduced_layers: dict[int, frozenset[int]] = {}

    def fault(self, rank: int, action: Action) -> str:
        """What is wrong with a rank's next action; empty if nothing is."""
        kind, microbatch, index = action.kind, action.microbatch, action.hop
        if kind is REDUCE:
            return self._reduction_fault(rank, action.bucket)
        routes = self._schedule.routes
        if not (0 <= microbatch < len(routes) and 0 <= index < len(routes[microbatch])):
            return "is no hop of a route"
        hop = routes[microbatch][index]
        if kind is SHADOW:
            return self._shadow_fault(rank, microbatch, index)
        if hop.rank != rank:
            return f"belongs to rank {hop.rank}"
        before, after = self._crossings[microbatch][index : index + 2]
        if not _has_peer(kind, before, after):
            return "has no other rank to talk to"
        slot = self._slots[microbatch] + index
        if kind in _PARTS and not index:
            return "is a part of a backward that cannot be split"
        others = _PARTS if kind is BACKWARD else (BACKWARD,) if kind in _PARTS else ()
        if self._seen[kind][slot] or any(self._seen[other][slot] for other in others):
            return "stands twice"
        self._seen[kind][slot] = 1
        required = _required_action(
            action, before, after, is_last=index + 1 == len(routes[microbatch])
        )
        if required and not self._has(required[0], slot + required[1]):
            return f"needs {Action(required[0], microbatch, index + required[1])} before it"
        layers = range(hop.first_layer, hop.end_layer)
        adds = kind is BACKWARD or kind is BACKWARD_WEIGHT
        if adds and not self._reduced_layers.get(rank, _NO_LAYERS).isdisjoint(layers):
            return "adds to gradients that are already reduced"
        return ""

    def _shadow_fault(self, rank: int, microbatch: int, index: int) -> str:
        slot = self._slots[microbatch] + index
        if not index or self._schedule.routes[microbatch][index - 1].rank != rank:
            return "belongs to the rank of the hop before"
        if self._seen[SHADOW][slot]:
            return "stands twice"
        self._seen[SHADOW][slot] = 1
        if not self._has(FORWARD, slot - 1):
            return f"needs {Action(FORWARD, microbatch, index - 1)} before it"
        return "has no output to begin with" if self._has(BACKWARD, slot - 1) else ""

    def _has(self, kind: Kind, slot: int) -> bool:
        """Whether an action of this kind was seen; for BACKWARD also if only the gradient of its
        input was."""
        is_split = kind is BACKWARD and self._seen[BACKWARD_INPUT][slot]
        return bool(self._seen[kind][slot] or is_split)

    def _reduction_fault(self, rank: int, index: int) -> str:
        buckets = self._schedule.buckets
        if not 0 <= index < len(buckets) or rank not in buckets[index].ranks:
            return "is no bucket of this rank"
        if (rank, index) in self._reduced:
            return "stands twice"
        self._reduced.add((rank, index))
        self._reduced_layers[rank] = self._reduced_layers.get(rank, _NO_LAYERS) | set(
            buckets[index].layers
        )
        return ""

    def missing(self) -> str:
        """The message about the first action that the schedule lacks; empty if it is complete."""
        for microbatch, route in enumerate(self._schedule.routes):
            crossings = self._crossings[microbatch]
            for index, hop in enumerate(route):
                slot = self._slots[microbatch] + index
                is_split = self._seen[BACKWARD_INPUT][slot]
                if is_split and not self._seen[BACKWARD_WEIGHT][slot]:
                    return f"rank {hop.rank} lacks {Action(BACKWARD_WEIGHT, microbatch, index)}"
                for kind in _BY_HOP:
                    if not self._has(kind, slot) and _has_peer(
                        kind, crossings[index], crossings[index + 1]
                    ):
                        return f"rank {hop.rank} lacks {Action(kind, microbatch, index)}"
        for index, bucket in enumerate(self._schedule.buckets):
            for rank in bucket.ranks:
                if (rank, index) not in self._reduced:
                    return f"rank {rank} lacks {Action(REDUCE, bucket=index)}"
        return ""


def _has_peer(kind: Kind, before: bool, after: bool) -> bool:
    """Whether an action has the peer that it needs; forwards and backwards need none.

    Args:
        kind: kind of the action.
        before: whether the hop before is on another rank.
        after: whether the next hop is on another rank.
    """
    if kind is RECEIVE_FORWARD or kind is SEND_BACKWARD:
        return before
    if kind is SEND_FORWARD or kind is RECEIVE_BACKWARD:
        return after
    return True


def _required_action(
    action: Action, before: bool, after: bool, *, is_last: bool
) -> tuple[Kind, int] | None:
    """The kind and the relative hop of the action that must come before this one on its rank; None
    if there is none."""
    if action.kind is FORWARD:
        if before:
            return RECEIVE_FORWARD, 0
        return (FORWARD, -1) if action.hop else None
    if action.kind is BACKWARD or action.kind is BACKWARD_INPUT:
        if after:
            return RECEIVE_BACKWARD, 0
        return (FORWARD, 0) if is_last else (BACKWARD, 1)
    if action.kind is BACKWARD_WEIGHT:
        return BACKWARD_INPUT, 0
    if action.kind is SEND_FORWARD:
        return FORWARD, 0
    if action.kind is SEND_BACKWARD:
        return BACKWARD, 0
    return None
