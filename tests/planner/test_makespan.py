"""The makespan of a pipeline, against closed forms and two other ways to get it."""

from heapq import heappop, heappush

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.strategies import equal_problem, problems
from planaria.core.plan import Pipeline, plain_plan
from planaria.estimator.makespan import (
    StageSeconds,
    action_ends,
    makespan_s,
    makespans_of_each,
    stage_seconds,
    stage_table,
)
from planaria.estimator.time import predicted_timeline
from planaria.planner.problem import Problem
from planaria.planner.templates import pipeline_template
from planaria.schedule.action import FORWARD
from planaria.schedule.lower import plan_schedule

SECONDS = st.integers(1, 9).map(float)
DELAYS = st.integers(0, 4).map(float)


@st.composite
def stages(draw: st.DrawFn) -> StageSeconds:
    """One to five stages of whole seconds, whose sums are exact."""
    num_stages = draw(st.integers(1, 5))

    def some(seconds: st.SearchStrategy[float], count: int) -> tuple[float, ...]:
        return tuple(draw(st.lists(seconds, min_size=count, max_size=count)))

    return StageSeconds(
        forward_s=some(SECONDS, num_stages),
        backward_s=some(SECONDS, num_stages),
        transfer_s=some(DELAYS, num_stages - 1),
        latency_s=some(DELAYS, num_stages - 1),
    )


def simulated_s(seconds: StageSeconds, num_microbatches: int) -> float:
    """1F1B as an event simulation: warmup, then alternate; arrivals wake the stages."""
    num_stages = len(seconds.forward_s)
    todo: list[list[tuple[str, int]]] = []
    for i in range(num_stages):
        warmup = min(num_microbatches, num_stages - 1 - i)
        order = [("F", m) for m in range(warmup)]
        for m in range(warmup, num_microbatches):
            order += [("F", m), ("B", m - warmup)]
        order += [("B", m) for m in range(num_microbatches - warmup, num_microbatches)]
        todo.append(order[::-1])
    arrived = {("F", 0, m) for m in range(num_microbatches)}
    link_s: dict[tuple[str, int], float] = {}
    busy = [False] * num_stages
    events: list[tuple[float, int, str, str, int]] = []
    now_s = 0.0

    def start(i: int) -> None:
        if busy[i] or not todo[i] or (todo[i][-1][0], i, todo[i][-1][1]) not in arrived:
            return
        kind, m = todo[i].pop()
        busy[i] = True
        lasts_s = seconds.forward_s[i] if kind == "F" else seconds.backward_s[i]
        heappush(events, (now_s + lasts_s, i, "end", kind, m))

    def send(i: int, kind: str, m: int) -> None:
        target = i + 1 if kind == "F" else i - 1
        if kind == "F" and i == num_stages - 1:
            arrived.add(("B", i, m))
        elif target >= 0:
            link = min(i, target)
            leaves_s = max(now_s, link_s.get((kind, link), 0.0)) + seconds.transfer_s[link]
            link_s[kind, link] = leaves_s
            heappush(events, (leaves_s + seconds.latency_s[link], target, "arrival", kind, m))

    start(0)
    while events:
        now_s, i, what, kind, m = heappop(events)
        if what == "end":
            busy[i] = False
            send(i, kind, m)
        else:
            arrived.add((kind, i, m))
        start(i)
    assert not any(todo)
    return now_s


@settings(max_examples=80)
@given(stages(), st.integers(1, 9))
def test_makespan_equals_an_event_simulation(seconds: StageSeconds, num_microbatches: int) -> None:
    """The recurrence knows no events; the simulation knows no recurrence."""
    assert simulated_s(seconds, num_microbatches) == makespan_s(seconds, num_microbatches)


@settings(max_examples=40)
@given(problems(max_devices_per_node=2))
def test_makespan_equals_the_timeline_of_the_schedule(problem: Problem) -> None:
    """One truth about time: a planner that prices otherwise than the estimator picks wrongly."""
    template = pipeline_template(problem, 1)
    if template is None:
        return
    pipeline = Pipeline(template, (3,))
    plan = plain_plan(0, (pipeline,), (problem.num_microbatches,))

    timeline = predicted_timeline(plan_schedule(plan), problem.profile, plan=plan)

    expected = max(span.end_s for span in timeline.spans if span.lane == "compute")
    seconds = stage_seconds(problem.profile, template)
    assert expected == pytest.approx(makespan_s(seconds, problem.num_microbatches), rel=1e-12)
    ends = action_ends(seconds, problem.num_microbatches)
    for _, lane, action, _, end_s in timeline.spans:
        if lane == "compute":
            ends_s = ends.forward_s if action.kind is FORWARD else ends.backward_s
            assert end_s == pytest.approx(ends_s[action.hop, action.microbatch], rel=1e-12)


@pytest.mark.parametrize("num_microbatches", [1, 2, 5, 12])
@pytest.mark.parametrize("num_stages", [1, 2, 5])
def test_equal_stages_take_microbatches_plus_stages_minus_one(
    num_stages: int, num_microbatches: int
) -> None:
    """Without transfers the pipeline fills and drains once: (N_b + S - 1)(F + B)."""
    none = (0.0,) * (num_stages - 1)
    seconds = StageSeconds((2.0,) * num_stages, (4.0,) * num_stages, none, none)

    assert (num_microbatches + num_stages - 1) * 6.0 == makespan_s(seconds, num_microbatches)


def test_transfer_counts_in_every_round_trip_of_two_stages() -> None:
    """Drawn by hand, with F = B = 1 and one second of latency each way.

    0: F0@0 F1@1 B0@5 B1@7
    1: F0@2 B0@3 F1@4 B1@5
    """
    seconds = StageSeconds((1.0, 1.0), (1.0, 1.0), (0.0,), (1.0,))

    assert (makespan_s(seconds, 1), makespan_s(seconds, 2)) == (6.0, 8.0)


@settings(max_examples=60)
@given(st.lists(stages(), min_size=1, max_size=5), st.integers(1, 9))
def test_pipelines_of_one_table_do_not_mix(pipelines: list[StageSeconds], most: int) -> None:
    """Neither a slow neighbour nor a longer one changes a pipeline's makespan."""
    table = stage_table(pipelines)

    expected = [simulated_s(seconds, most) for seconds in pipelines]
    assert expected == makespans_of_each(table, most).tolist()


def test_stage_seconds_use_the_slow_link_between_nodes_only() -> None:
    """Stages of one node talk over its own links; the boundary between nodes costs more."""
    problem = equal_problem()
    template = pipeline_template(problem, 3)
    assert template is not None

    assert stage_seconds(problem.profile, template).latency_s == (1e-4, 1e-4)
