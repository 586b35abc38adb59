"""ReCycle's table: rerouting beside a greedy list schedule of its idea, and in what memory."""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

import pytest

from helpers.cases import every_nth
from helpers.lost_places import GREEDY, Lost, grid, unit_problem
from helpers.strategies import MEBIBYTE
from planaria.core.plan import NodeKind, Plan
from planaria.planner.reroute.reroutes import best_reroute

# Of rows of it what ours takes at most with less memory: what is enough without losses, that by the
# factor of the work that survivors have, and memory for one microbatch more.
LESS_MEMORY = (
    (1, 38, 36, 36),
    (2, 39, 36, 37),
    (3, 39, 38, 38),
    (4, 34, 32, 32),
    (5, 80, 79, 79),
    (6, 135, 134, 134),
)


def with_room(plan: Plan, rooms: Sequence[int]) -> Plan:
    """The plan with memory for so many microbatches at the places of each pipeline."""
    kinds = tuple(NodeKind(device_memory_bytes=room * MEBIBYTE) for room in rooms)
    template = replace(plan.pipelines[0].template, kinds=kinds)
    pipelines = tuple(replace(pipeline, template=template) for pipeline in plan.pipelines)
    return replace(plan, pipelines=pipelines)


@pytest.mark.parametrize(
    ("num_pipelines", "num_places", "each", "lost", "units"), every_nth(5, GREEDY)
)
def test_no_slower_than_a_greedy_schedule_of_recycle(
    num_pipelines: int, num_places: int, each: int, lost: Lost, units: tuple[int, int, int]
) -> None:
    """The table does not say what its limited memory is. Here a place keeps S - i microbatches, as
    its row without losses does, and after losses two more, but at most twice as many: with one more
    not all rows can be had by anybody, as the next test proves. Whole backwards and split ones have
    the same memory; the last column is with ample memory.
    """
    plan = grid(num_pipelines, num_places, lost)
    left = range(num_places, 0, -1)
    limited = with_room(plan, [s + (min(2, s) if lost else 0) for s in left])
    split = unit_problem(num_places, each * num_pipelines)
    whole = replace(split, splits_backward=False)

    found = [best_reroute(whole, limited), best_reroute(split, limited), best_reroute(split, plan)]

    assert all(one.iteration_s <= most for one, most in zip(found, units, strict=True) if one)
    assert all(found)


@pytest.mark.parametrize(("row", "fault_free", "shared", "one_more"), every_nth(3, LESS_MEMORY))
def test_with_less_memory_some_rows_of_recycles_table_cannot_be_had(
    row: int, fault_free: int, shared: int, one_more: int
) -> None:
    """Whoever has lost nothing keeps S - i microbatches at place i; a row is had where ours is no
    slower than its column for split backwards.

    With that memory after losses rows 3 and 6 are had, 1 and 4 cannot be (35 and 31 units, where 36
    and 33 are the least); 2 and 5 are missed (39 for 37, 80 for 79), and whether they can be had is
    not known. With more by the factor of the work that survivors have, rounded up, row 4 cannot be
    had (32 are the least), and row 1 is missed: 36, and CP-SAT finds 35. With one more the same.
    """
    num_pipelines, num_places, each, lost, (_, split_units, _) = GREEDY[row]
    problem = unit_problem(num_places, each * num_pipelines)
    plan = grid(num_pipelines, num_places, lost)
    num_holders = [num_pipelines - sum(place == i for _, place in lost) for i in range(num_places)]
    left = range(num_places, 0, -1)
    scaled = [ceil(s * num_pipelines / n) for s, n in zip(left, num_holders, strict=True)]
    cannot: set[tuple[int, str]] = set()

    for name, rooms, most in (
        ("fault-free", list(left), fault_free),
        ("shared", scaled, shared),
        ("one more", [s + 1 for s in left], one_more),
    ):
        found = best_reroute(problem, with_room(plan, rooms))
        least = least_units(each * num_pipelines, num_holders, rooms)
        assert found is not None
        assert least <= found.iteration_s <= most
        if least > split_units:
            cannot.add((row, name))

    of_rows = {
        1: {(1, "fault-free")},
        4: {(4, "fault-free"), (4, "shared"), (4, "one more")},
    }
    assert cannot == of_rows.get(row, set())


def least_units(num_microbatches: int, num_holders: Sequence[int], rooms: Sequence[int]) -> int:
    """No schedule with split backwards ends earlier.

    Place i of S begins after i units. The first gradient comes to it 2 * (S - i) - 1 units after
    that, and until then it can only do as many forwards as it has room for. One of its holders has
    its share of the microbatches, rounded up, of 3 units each.
    """
    num_places = len(num_holders)
    return max(
        i + max(0, 2 * (num_places - i) - 1 - room) + 3 * ceil(num_microbatches / holders)
        for i, (holders, room) in enumerate(zip(num_holders, rooms, strict=True))
    )
