"""The text forms of schedules: lines, actions and tables."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.plan_examples import figure_9_plan, plain_plans
from planaria.core.plan import Plan, TiedParameters
from planaria.errors import ScheduleError
from planaria.schedule.action import (
    Action,
    Kind,
    Schedule,
    format_schedule,
    format_table,
    parse_action,
    parse_schedule,
)
from planaria.schedule.lower import plan_schedule


def test_every_kind_of_action_has_its_text() -> None:
    """The text is what errors, traces and tests show, so it must not drift."""
    texts = {
        "0F3": Action(Kind.FORWARD, 3, 0),
        "12B0": Action(Kind.BACKWARD, 0, 12),
        "3BI0": Action(Kind.BACKWARD_INPUT, 0, 3),
        "3BW0": Action(Kind.BACKWARD_WEIGHT, 0, 3),
        "1SF2": Action(Kind.SEND_FORWARD, 2, 1),
        "1RF2": Action(Kind.RECEIVE_FORWARD, 2, 1),
        "1SB2": Action(Kind.SEND_BACKWARD, 2, 1),
        "1RB2": Action(Kind.RECEIVE_BACKWARD, 2, 1),
        "R7": Action(Kind.REDUCE, bucket=7),
    }

    assert list(texts) == [str(action) for action in texts.values()]
    assert list(texts.values()) == [parse_action(text) for text in texts]


@given(plain_plans())
@settings(max_examples=30)
def test_a_schedule_survives_being_printed_and_parsed(plan: Plan) -> None:
    """parse(format(x)) == x, with reductions and tied parameters."""
    schedule = plan_schedule(plan, tied=[TiedParameters((0, plan.num_layers - 1), 8)])

    parsed = parse_schedule(format_schedule(schedule), schedule.routes, schedule.buckets)

    assert schedule == parsed


@pytest.mark.parametrize("text", ["0: 0X3", "0: F3", "0F3", "a: 0F3", "0: 0F3\n0: 0B3", "0: R"])
def test_text_that_is_no_schedule_is_refused(text: str) -> None:
    """A typing mistake in a test or a document must not pass as an empty rank."""
    with pytest.raises(ScheduleError):
        parse_schedule(text, ())


def test_a_table_shows_steps_down_ranks_across_and_the_marked_step() -> None:
    """Letter for letter, as it stands in an error message."""
    schedule = parse_schedule("0: 0F0 0B0 R0\n3: 1RF0", ())

    table = format_table(schedule, {3: 0})

    assert table.splitlines() == [
        "        rank 0  rank 3",
        "step 0  0F0     >>1RF0<<",
        "step 1  0B0",
        "step 2  R0",
    ]


@given(st.integers(0, 199), st.integers(0, 99))
@settings(max_examples=20)
def test_a_large_table_is_cut_around_its_mark(step: int, rank: int) -> None:
    """1,000 ranks would not fit a page; what failed must still be seen, with what is around."""
    actions = tuple(Action(Kind.FORWARD, microbatch, 0) for microbatch in range(200))
    schedule = Schedule((), dict.fromkeys(range(100), actions))

    table = format_table(schedule, {rank: step})

    assert table.count(">>") == 1
    assert f">>0F{step}<<" in table
    assert f"rank {rank}" in table.splitlines()[0]
    assert len(table.splitlines()) <= 20
    assert max(map(len, table.splitlines())) <= 200
    assert "(84 more ranks)" in table


def test_a_whole_schedule_prints_every_action_once() -> None:
    """A table that is small enough is never cut."""
    schedule = plan_schedule(figure_9_plan())

    words = format_table(schedule, {}).split()

    for actions in schedule.actions.values():
        for action in actions:
            assert str(action) in words
