"""Schedules: the actions that every rank runs in an iteration, in order, as data.

A schedule has four readers: the executor runs it, the estimator times it, the validator checks it
and the plots draw it. An action says what is done, not who does it: its rank is the one whose list
it is in, and the peer follows from the route of the microbatch.

Text: an action is `{hop}{kind}{microbatch}`, so `0F3` is the forward of microbatch 3 at hop 0 of
its route and `1SB2` sends the gradient of microbatch 2 from hop 1 back to hop 0. A backward is
whole, `1B2`, or split into the gradient of its input, `1BI2`, and, some time later, that of its
weights, `1BW2`. A reduction is `R{bucket}`. An eager forward of hop 1 on the rank of the hop before
it (redundant.py) is `1E3`. A schedule has one line per rank: `0: 0F0 0F1 0B0 0B1 R0`.

Source: the text form follows torch.distributed.pipelining's `_Action`.
Differs: the number in front is the hop of the microbatch's own route, not a stage of the job,
because microbatches of heterogeneous or rerouted pipelines visit stages with different boundaries.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple

from planaria.core.plan import Route
from planaria.errors import ScheduleError


class Kind(StrEnum):
    """The kinds of actions; the value of a member is its text."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "BI"
    BACKWARD_WEIGHT = "BW"
    SEND_FORWARD = "SF"
    RECEIVE_FORWARD = "RF"
    SEND_BACKWARD = "SB"
    RECEIVE_BACKWARD = "RB"
    SHADOW = "E"
    REDUCE = "R"


# In Python 3.11 Kind.FORWARD takes 0.25 us, a global name 0.02 us, and with 1,000 ranks kinds are
# compared some millions of times.
FORWARD = Kind.FORWARD
BACKWARD = Kind.BACKWARD
BACKWARD_INPUT = Kind.BACKWARD_INPUT
BACKWARD_WEIGHT = Kind.BACKWARD_WEIGHT
SEND_FORWARD = Kind.SEND_FORWARD
RECEIVE_FORWARD = Kind.RECEIVE_FORWARD
SEND_BACKWARD = Kind.SEND_BACKWARD
RECEIVE_BACKWARD = Kind.RECEIVE_BACKWARD
SHADOW = Kind.SHADOW
REDUCE = Kind.REDUCE


class Action(NamedTuple):
    """One step of a rank.

    It is a named tuple, not a dataclass, because 1,000 ranks with 128 microbatches have 770,000 of
    them, and a frozen dataclass takes over twice as long to make.

    Attributes:
        kind: kind of work that the action does.
        microbatch: index into the schedule's routes; -1 for a reduction.
        hop: index into the route of the microbatch; -1 for a reduction.
        bucket: index into the schedule's buckets; -1 for all but a reduction.
    """

    kind: Kind
    microbatch: int = -1
    hop: int = -1
    bucket: int = -1

    def __str__(self) -> str:
        if self.kind is REDUCE:
            return f"R{self.bucket}"
        return f"{self.hop}{self.kind.value}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that the same ranks sum in one reduction.

    Attributes:
        layers: layers whose gradients must be complete before, ascending.
        ranks: ranks that sum them, ascending, at least two.
        tied: index of the tied parameter that this bucket sums; -1: the layers' own parameters.
        round_index: index of its round; buckets of one round share no rank, so they run in
            parallel.
    """

    layers: tuple[int, ...]
    ranks: tuple[int, ...]
    tied: int = -1
    round_index: int = 0


@dataclass(frozen=True, slots=True)
class Schedule:
    """The actions of all ranks in one iteration.

    Attributes:
        routes: route of every microbatch of the job, as in the plan.
        actions: actions of each rank, keyed by rank, in the order in which the rank runs them.
        buckets: buckets that are reduced, in the global order of the reductions.
    """

    routes: tuple[Route, ...]
    actions: Mapping[int, tuple[Action, ...]]
    buckets: tuple[Bucket, ...] = ()


def slots_of(routes: Sequence[Route]) -> list[int]:
    """The index of each microbatch's first hop in the list of all hops of all routes.

    There is one more entry, the length of that list.
    """
    slots = [0]
    for route in routes:
        slots.append(slots[-1] + len(route))
    return slots


def crossings_of(routes: Sequence[Route]) -> list[tuple[bool, ...]]:
    """Whether hops i - 1 and i of a route are on different ranks, for i = 0 .. len(route), by
    microbatch.

    Entries 0 and len(route), for which one of the hops does not exist, are False.
    """
    by_route: dict[Route, tuple[bool, ...]] = {}
    for route in set(routes):
        crossings = [source.rank != target.rank for source, target in pairwise(route)]
        by_route[route] = (False, *crossings, False)
    return [by_route[route] for route in routes]


_ACTION = re.compile(r"(\d+)(F|B|BI|BW|SF|RF|SB|RB|E)(\d+)")
_REDUCE = re.compile(r"R(\d+)")

# A table of at most this many steps, and of at most this many ranks, is printed whole.
_STEPS_WHOLE = 40
_RANKS_WHOLE = 16
_STEPS_AROUND = 6


def parse_action(text: str) -> Action:
    """The action that prints as `text`.

    Raises:
        ScheduleError: the text is no action.
    """
    if match := _ACTION.fullmatch(text):
        hop, kind, microbatch = match.groups()
        return Action(Kind(kind), int(microbatch), int(hop))
    if match := _REDUCE.fullmatch(text):
        return Action(REDUCE, bucket=int(match.group(1)))
    raise ScheduleError(f"{text!r} is no action; actions look like 0F3, 1SB2 or R0")


def format_schedule(schedule: Schedule) -> str:
    """The schedule as text, one line per rank, ranks ascending."""
    return "\n".join(
        f"{rank}: {' '.join(map(str, schedule.actions[rank]))}".rstrip()
        for rank in sorted(schedule.actions)
    )


def parse_schedule(
    text: str, routes: tuple[Route, ...], buckets: tuple[Bucket, ...] = ()
) -> Schedule:
    """The schedule that prints as `text`; empty lines and indentation do not matter.

    Raises:
        ScheduleError: a line has no rank, a rank has two lines, or a word is no action.
    """
    actions: dict[int, tuple[Action, ...]] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        rank, colon, words = line.partition(":")
        if not colon or not rank.isdecimal() or int(rank) in actions:
            raise ScheduleError(f"{line!r} is not the one line of a rank, as in 0: 0F0 0B0")
        actions[int(rank)] = tuple(map(parse_action, words.split()))
    return Schedule(routes, actions, buckets)


def format_table(schedule: Schedule, marked: Mapping[int, int]) -> str:
    """The schedule as a table, steps down and ranks across.

    The marked step of a rank is printed as `>>0RF3<<`. A table that is too long or too wide for a
    page is cut to the steps around the marks; a line of dots stands for the steps left out.

    Args:
        schedule: schedule to print.
        marked: step to mark, keyed by rank; a step past the rank's last one marks nothing.
    """
    ranks = _shown_ranks(schedule, marked)
    num_steps = max((len(schedule.actions[rank]) for rank in ranks), default=0)
    rows = [["", *(f"rank {rank}" for rank in ranks)]]
    shown = _shown_steps(num_steps, marked.values())
    for before, step in pairwise((-1, *shown)):
        if step != before + 1:
            rows.append(["..."])
        rows.append([f"step {step}", *(_cell(schedule, rank, step, marked) for rank in ranks)])
    if num_steps and shown[-1] != num_steps - 1:
        rows.append(["..."])
    if len(ranks) < len(schedule.actions):
        rows.append([f"({len(schedule.actions) - len(ranks)} more ranks)"])
    return _aligned_text(rows)


def _shown_ranks(schedule: Schedule, marked: Collection[int]) -> list[int]:
    ranks = sorted(schedule.actions)
    if len(ranks) <= _RANKS_WHOLE:
        return ranks
    first = [rank for rank in ranks if rank in marked]
    rest = [rank for rank in ranks if rank not in marked]
    return sorted((first + rest)[:_RANKS_WHOLE])


def _shown_steps(num_steps: int, marked_steps: Collection[int]) -> list[int]:
    if num_steps <= _STEPS_WHOLE:
        return list(range(num_steps))
    around = marked_steps or (0,)
    return sorted(
        {
            step
            for mark in around
            for step in range(mark - _STEPS_AROUND, mark + _STEPS_AROUND + 1)
            if 0 <= step < num_steps
        }
        or range(_STEPS_WHOLE)
    )


def _cell(schedule: Schedule, rank: int, step: int, marked: Mapping[int, int]) -> str:
    actions = schedule.actions[rank]
    text = str(actions[step]) if step < len(actions) else ""
    return f">>{text}<<" if text and marked.get(rank) == step else text


def _aligned_text(rows: Sequence[Sequence[str]]) -> str:
    """The rows as lines with aligned columns; a row of one cell may be wider than its column."""
    full = [row for row in rows if len(row) > 1]
    widths = [max(map(len, column)) for column in zip(*full, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)).rstrip()
        for row in rows
    )
