"""Passes that turn forwards and backwards into a schedule that can run; and the check that it can.

`place_transfers` puts a send and a receive wherever two hops of a route lie on different ranks;
`place_reductions` puts the reduction of each bucket of gradients (buckets.py) behind the last
backward that adds to it; `validate` refuses what breaks a rule, with the table of the
schedule and the step marked. `execution_order` is the one walker that both the validator and the
estimator use: sends never block, receives wait, and a rank hands reductions in bucket order to a
communication thread, so that they never hold up its compute.

Source: Oobleck (SOSP '23), section 6.1 for reductions by layer; torch.distributed.pipelining for
passes over action lists and the dry run.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from planaria.core.plan import Plan, Route, TiedParameters
from planaria.errors import DeadlockError
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
    Action,
    Bucket,
    Schedule,
    crossings_of,
    format_table,
    slots_of,
)
from planaria.schedule.buckets import ReductionOrder, buckets_of
from planaria.schedule.redundant import place_shadows
from planaria.schedule.routed import routed_1f1b
from planaria.schedule.rules import check_rules


def lowered(
    plan: Plan,
    *,
    tied: Sequence[TiedParameters] = (),
    order: ReductionOrder = ReductionOrder.COLOURED,
) -> Schedule:
    """The schedule of a plan, whole and valid: what every rank runs in an iteration."""
    schedule = unchecked(plan, tied=tied, order=order)
    validate(schedule, plan.num_layers)
    return schedule


def unchecked(
    plan: Plan,
    *,
    tied: Sequence[TiedParameters] = (),
    order: ReductionOrder = ReductionOrder.COLOURED,
) -> Schedule:
    """As `lowered`, not validated: for searches, which would spend half their time on that."""
    schedule = place_shadows(place_transfers(routed_1f1b(plan)), plan)
    return place_reductions(schedule, plan, tied=tied, order=order)


def lowered_for(
    plan: Plan,
    rank: int,
    *,
    tied: Sequence[TiedParameters] = (),
    order: ReductionOrder = ReductionOrder.COLOURED,
) -> Schedule:
    """As `lowered`, with the actions of one rank only, at the cost of those that it meets.

    A pipeline that no route joins with the rank's own decides nothing for it but its buckets. The
    actions cannot block where all ranks get theirs so: forwards and backwards are tried for all
    that meet, and reductions cannot block each other, for every rank runs them in one order. The
    rules are not checked again: that would be half of what a recovery waits for here.

    Raises:
        DeadlockError: the forwards and backwards cannot finish.
    """
    part, microbatches = _met(plan, rank)
    schedule = place_shadows(place_transfers(routed_1f1b(part)), part)
    deque(execution_order(schedule), maxlen=0)
    actions = tuple(
        action._replace(microbatch=microbatches[action.microbatch])
        for action in schedule.actions.get(rank, ())
    )
    buckets = buckets_of(plan, tied=tied, order=order)
    indices = [index for index, bucket in enumerate(buckets) if rank in bucket.ranks]
    own = _with_reductions(actions, plan.routes, indices, buckets)
    return Schedule(plan.routes, {rank: own}, buckets)


def num_met(plan: Plan) -> int:
    """Hops that a rank's schedule is computed from (`lowered_for`), of the rank with the most.

    O(nodes + microbatches + hops of different routes).
    """
    pipeline_of = _pipeline_of(plan)
    joined = _joined(plan, pipeline_of)
    hops: Counter[int] = Counter()
    for route in plan.routes:
        hops[pipeline_of[route[0].rank]] += len(route)
    most, left = 0, set(joined)
    while left:
        met = _reached(left.pop(), joined)
        most = max(most, sum(hops[index] for index in met))
        left -= met
    return most


def _pipeline_of(plan: Plan) -> dict[int, int]:
    """The pipeline of every rank that has a place."""
    return {
        member: index
        for index, pipeline in enumerate(plan.pipelines)
        for ranks in pipeline.ranks_by_stage()
        for member in ranks
    }


def _joined(plan: Plan, pipeline_of: Mapping[int, int]) -> dict[int, set[int]]:
    """With which pipelines each that has work has a route in common, itself among them."""
    joined: dict[int, set[int]] = {}
    for route in {id(route): route for route in plan.routes}.values():  # To hash it takes longer.
        visited = {pipeline_of[hop.rank] for hop in route}
        for index in visited:
            joined.setdefault(index, set()).update(visited)
    return joined


def _reached(first: int, joined: Mapping[int, set[int]]) -> set[int]:
    """All pipelines that are joined with one, by others too."""
    met: set[int] = set()
    waiting = {first}
    while waiting:
        index = waiting.pop()
        met.add(index)
        waiting |= joined.get(index, set()) - met
    return met


def _met(plan: Plan, rank: int) -> tuple[Plan, list[int]]:
    """The plan with the pipelines that routes join with the rank's own, and its microbatches."""
    pipeline_of = _pipeline_of(plan)
    joined = _joined(plan, pipeline_of)
    met = _reached(pipeline_of[rank], joined) if rank in pipeline_of else set[int]()
    microbatches = [m for m, route in enumerate(plan.routes) if pipeline_of[route[0].rank] in met]
    part = replace(
        plan,
        pipelines=tuple(plan.pipelines[index] for index in sorted(met)),
        routes=tuple(plan.routes[microbatch] for microbatch in microbatches),
        silent={},
    )
    return part, microbatches


def place_transfers(schedule: Schedule) -> Schedule:
    """The schedule with a receive before and a send after each action whose peer is elsewhere."""
    crossings = crossings_of(schedule.routes)
    return replace(
        schedule,
        actions={
            rank: tuple(_with_transfers(actions, crossings))
            for rank, actions in schedule.actions.items()
        },
    )


def _with_transfers(
    actions: Iterable[Action], crossings: Sequence[tuple[bool, ...]]
) -> Iterator[Action]:
    for action in actions:
        microbatch, hop = action.microbatch, action.hop
        before, after = crossings[microbatch][hop : hop + 2]
        if action.kind is FORWARD:
            if before:
                yield Action(RECEIVE_FORWARD, microbatch, hop)
            yield action
            if after:
                yield Action(SEND_FORWARD, microbatch, hop)
        elif action.kind is BACKWARD_WEIGHT:
            yield action
        else:
            is_backward = action.kind is BACKWARD or action.kind is BACKWARD_INPUT
            assert is_backward, f"{action} is neither a forward nor a backward"
            if after:
                yield Action(RECEIVE_BACKWARD, microbatch, hop)
            yield action
            if before:
                yield Action(SEND_BACKWARD, microbatch, hop)


def place_reductions(
    schedule: Schedule,
    plan: Plan,
    *,
    tied: Sequence[TiedParameters] = (),
    order: ReductionOrder = ReductionOrder.COLOURED,
) -> Schedule:
    """The schedule with its buckets, each reduced where its last gradient is complete.

    A layer with one holder needs no reduction, nor does a tied parameter all of whose layers
    one rank holds: that rank has every gradient and adds them up by itself. A rank that holds
    layers of a bucket but computes none of them, silent ones included, reduces first of all: it
    adds nothing.
    """
    buckets = buckets_of(plan, tied=tied, order=order)
    by_rank: dict[int, list[int]] = {rank: [] for rank in plan.all_ranks}
    for index, bucket in enumerate(buckets):
        for rank in bucket.ranks:
            by_rank[rank].append(index)
    actions = {
        rank: _with_reductions(schedule.actions.get(rank, ()), schedule.routes, indices, buckets)
        for rank, indices in by_rank.items()
    }
    return Schedule(schedule.routes, actions, buckets)


def _with_reductions(
    actions: tuple[Action, ...],
    routes: Sequence[Route],
    indices: Sequence[int],
    buckets: Sequence[Bucket],
) -> tuple[Action, ...]:
    """One rank's actions and its reductions, ascending, each behind its last backward.

    What upstream waits for goes first: a backward's send stays right behind it.
    """
    if not indices:
        return actions
    # Backward from the end, to the step behind which each layer's gradient is complete.
    open_layers = {layer for index in indices for layer in buckets[index].layers}
    last_step: dict[int, int] = {}
    for step in range(len(actions) - 1, -1, -1):
        if not open_layers:
            break
        action = actions[step]
        if action.kind in (BACKWARD, BACKWARD_WEIGHT, SEND_BACKWARD):
            hop = routes[action.microbatch][action.hop]
            complete = open_layers.intersection(range(hop.first_layer, hop.end_layer))
            open_layers -= complete
            last_step.update(dict.fromkeys(complete, step))
    placed: list[Action] = []
    done = 0
    for index in indices:
        steps = (last_step.get(layer, -1) + 1 for layer in buckets[index].layers)
        end = max(done, *steps)
        placed += actions[done:end]
        placed.append(Action(REDUCE, bucket=index))
        done = end
    return (*placed, *actions[done:])


def execution_order(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    """All actions, each with its rank, in an order in which they can run. O(actions).

    A reduction appears where its rank hands it over; it runs when all ranks of its bucket have
    done so and their earlier reductions are over, so in ascending order of buckets. That within
    a rank each action follows those of the same rank that it needs is `validate`'s to check.

    Raises:
        DeadlockError: after the last action that can run, if some cannot: a receive whose send
            never comes, a reduction that some rank never joins or takes out of turn.
    """
    slots = slots_of(schedule.routes)
    # A message is named by its receive: 2 * slot of the receiving hop, + 1 for a gradient.
    sent = bytearray(2 * slots[-1] + 2)
    waiting: dict[int, int] = {}
    reductions = _reductions_by_rank(schedule)
    steps = dict.fromkeys(schedule.actions, 0)
    ready = sorted(schedule.actions, reverse=True)
    while ready:
        rank = ready.pop()
        actions = schedule.actions[rank]
        for step in range(steps[rank], len(actions)):
            action = actions[step]
            kind = action.kind
            if kind is REDUCE:
                if reductions[rank][-1:] != [action.bucket]:
                    steps[rank] = step
                    break
                reductions[rank].pop()
            elif kind is RECEIVE_FORWARD or kind is RECEIVE_BACKWARD:
                message = 2 * (slots[action.microbatch] + action.hop)
                message += kind is RECEIVE_BACKWARD
                if not sent[message]:
                    waiting[message] = rank
                    steps[rank] = step
                    break
            elif kind is SEND_FORWARD or kind is SEND_BACKWARD:
                message = 2 * (slots[action.microbatch] + action.hop)
                message += 2 if kind is SEND_FORWARD else -1
                sent[message] = 1
                if message in waiting:
                    ready.append(waiting.pop(message))
            yield rank, action
        else:
            steps[rank] = len(actions)
    _refuse_stuck(schedule, steps, reductions)


def _reductions_by_rank(schedule: Schedule) -> dict[int, list[int]]:
    """The buckets of every rank in reverse: the last one is its next."""
    by_rank: dict[int, list[int]] = {rank: [] for rank in schedule.actions}
    for index in reversed(range(len(schedule.buckets))):
        for rank in schedule.buckets[index].ranks:
            by_rank.setdefault(rank, []).append(index)
    return by_rank


def _refuse_stuck(
    schedule: Schedule, steps: Mapping[int, int], reductions: Mapping[int, Sequence[int]]
) -> None:
    """Raises if a rank did not come to its end or waits in a reduction that others never join.

    Args:
        steps: of every rank the step that it did not get past.
        reductions: of every rank the buckets that it did not hand over.
    """
    marked = {rank: step for rank, step in steps.items() if step < len(schedule.actions[rank])}
    missing = {index for indices in reductions.values() for index in indices}
    for rank in schedule.actions.keys() - marked.keys():
        for step, action in enumerate(schedule.actions[rank]):
            if action.kind is REDUCE and action.bucket in missing:
                marked[rank] = step
                break
    if marked or missing:
        waiting = {rank: str(schedule.actions[rank][marked[rank]]) for rank in sorted(marked)}
        who = ", ".join(f"rank {rank} in {text}" for rank, text in waiting.items())
        table = format_table(schedule, marked)
        raise DeadlockError(f"the schedule cannot finish: {who}\n{table}", waiting)


def validate(schedule: Schedule, num_layers: int) -> None:
    """Checks all rules of a schedule and that it can finish. O(actions).

    Raises:
        ScheduleError: a rule is broken; the message holds the table with the step marked.
        DeadlockError: all rules hold, yet the schedule cannot finish.
    """
    check_rules(schedule, num_layers)
    deque(execution_order(schedule), maxlen=0)
