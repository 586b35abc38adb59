"""Passes that turn forwards and backwards into a schedule that can run; and the check that it can.

`place_transfers` adds a send and a receive wherever two hops of a route are on different ranks.
`place_reductions` adds the reduction of each bucket of gradients (buckets.py) after the last
backward that adds to it. `validate` refuses a schedule that breaks a rule, with a table of the
schedule in which the step is marked. Both the validator and the estimator walk a schedule by
`execution_order`: sends never block, receives wait, and a rank hands reductions in bucket order to
a communication thread, so that they never block its computation.

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


def plan_schedule(
    plan: Plan,
    *,
    tied: Sequence[TiedParameters] = (),
    order: ReductionOrder = ReductionOrder.COLOURED,
) -> Schedule:
    """The complete, validated schedule of a plan: what every rank runs in an iteration."""
    schedule = unchecked_schedule(plan, tied=tied, order=order)
    validate(schedule, plan.num_layers)
    return schedule


def unchecked_schedule(
    plan: Plan,
    *,
    tied: Sequence[TiedParameters] = (),
    order: ReductionOrder = ReductionOrder.COLOURED,
) -> Schedule:
    """The schedule that `plan_schedule` returns, not validated, which would take as long again."""
    schedule = place_shadows(place_transfers(routed_1f1b(plan)), plan)
    return place_reductions(schedule, plan, tied=tied, order=order)


def rank_schedule(
    plan: Plan,
    rank: int,
    *,
    tied: Sequence[TiedParameters] = (),
    order: ReductionOrder = ReductionOrder.COLOURED,
) -> Schedule:
    """The schedule that `plan_schedule` returns, with the actions of one rank only.

    It computes the schedule of the pipelines that routes connect, directly or through others, with
    the rank's own; all other pipelines matter only for the buckets. If all ranks get their actions
    from here, these cannot block: forwards and backwards are tried out for all connected pipelines,
    and reductions cannot block each other, because every rank runs them in one order. The rules are
    not checked again, as that would take half of the time that a recovery waits for schedules.

    Raises:
        DeadlockError: the forwards and backwards cannot finish.
    """
    part, microbatches = _connected_part(plan, rank)
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


def num_connected_hops(plan: Plan) -> int:
    """The number of hops from which `rank_schedule` computes a rank's schedule, for the rank with
    the most. O(nodes + microbatches + hops of different routes)."""
    pipeline_of = _pipeline_of(plan)
    neighbours = _neighbours_by_pipeline(plan, pipeline_of)
    hops: Counter[int] = Counter()
    for route in plan.routes:
        hops[pipeline_of[route[0].rank]] += len(route)
    most, remaining = 0, set(neighbours)
    while remaining:
        connected = _connected_pipelines(remaining.pop(), neighbours)
        most = max(most, sum(hops[index] for index in connected))
        remaining -= connected
    return most


def _pipeline_of(plan: Plan) -> dict[int, int]:
    """The pipeline of every rank that has a place."""
    return {
        member: index
        for index, pipeline in enumerate(plan.pipelines)
        for ranks in pipeline.ranks_by_stage()
        for member in ranks
    }


def _neighbours_by_pipeline(plan: Plan, pipeline_of: Mapping[int, int]) -> dict[int, set[int]]:
    """The pipelines with which each pipeline that has work shares a route, itself included."""
    neighbours: dict[int, set[int]] = {}
    for route in {id(route): route for route in plan.routes}.values():  # Hashing routes is slower.
        visited = {pipeline_of[hop.rank] for hop in route}
        for index in visited:
            neighbours.setdefault(index, set()).update(visited)
    return neighbours


def _connected_pipelines(first: int, neighbours: Mapping[int, set[int]]) -> set[int]:
    """All pipelines that share a route with pipeline `first`, directly or through others."""
    connected: set[int] = set()
    pending = {first}
    while pending:
        index = pending.pop()
        connected.add(index)
        pending |= neighbours.get(index, set()) - connected
    return connected


def _connected_part(plan: Plan, rank: int) -> tuple[Plan, list[int]]:
    """The part of the plan with the pipelines that routes join with the rank's own, and the
    microbatches of that part."""
    pipeline_of = _pipeline_of(plan)
    neighbours = _neighbours_by_pipeline(plan, pipeline_of)
    connected = (
        _connected_pipelines(pipeline_of[rank], neighbours) if rank in pipeline_of else set[int]()
    )
    microbatches = [
        m for m, route in enumerate(plan.routes) if pipeline_of[route[0].rank] in connected
    ]
    part = replace(
        plan,
        pipelines=tuple(plan.pipelines[index] for index in sorted(connected)),
        routes=tuple(plan.routes[microbatch] for microbatch in microbatches),
        silent={},
    )
    return part, microbatches


def place_transfers(schedule: Schedule) -> Schedule:
    """The schedule with a receive before, and a send after, each action whose neighbouring hop is
    on another rank."""
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
    """The schedule with its buckets, each reduced as soon as its last gradient is complete.

    A layer with one holder needs no reduction. Neither does a tied parameter if one rank alone
    holds all its layers: that rank adds up the gradients by itself. A rank that holds layers of a
    bucket but computes none of them, such as a silent one, has nothing to wait for and reduces the
    bucket before its other actions.
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
    """The actions of a rank with its reductions, in bucket order, each after its last backward.

    The send of a backward still follows it directly, because the hop before waits for it.
    """
    if not indices:
        return actions
    # From the end, look for the last step that adds to each layer's gradient.
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
    """Yields all actions, each with its rank, in an order in which they can run. O(actions).

    A reduction appears where its rank hands it over. It runs when all ranks of its bucket have
    handed it over and their earlier reductions have ended, so in ascending order of buckets.
    `validate` checks that within a rank each action follows those that it needs.

    Raises:
        DeadlockError: some actions cannot run, because the send for a receive never comes, or a
            rank never joins a reduction or joins it out of order. It is raised after the last
            action that can run.
    """
    slots = slots_of(schedule.routes)
    # The index of a message is 2 * the slot of its receiving hop, + 1 if it is a gradient.
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
    """The buckets of every rank in reverse order: the last entry is the one to reduce next."""
    by_rank: dict[int, list[int]] = {rank: [] for rank in schedule.actions}
    for index in reversed(range(len(schedule.buckets))):
        for rank in schedule.buckets[index].ranks:
            by_rank.setdefault(rank, []).append(index)
    return by_rank


def _refuse_stuck(
    schedule: Schedule, steps: Mapping[int, int], reductions: Mapping[int, Sequence[int]]
) -> None:
    """Raises DeadlockError if a rank did not run all its actions or waits in a reduction that
    others never join.

    Args:
        schedule: schedule that was walked.
        steps: step of every rank that did not run, or the number of its actions.
        reductions: buckets that every rank did not hand over.
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
        ScheduleError: a rule is broken; the message has the table with the step marked.
        DeadlockError: all rules hold, yet the schedule cannot finish.
    """
    check_rules(schedule, num_layers)
    deque(execution_order(schedule), maxlen=0)
