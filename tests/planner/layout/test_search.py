"""The search for layouts: against all layouts of small clusters, in its ranges, step by step."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, islice, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.plan_examples import timed_s
from helpers.strategies import MEBIBYTE, layer_profile, model_profile
from planaria.core.plan import PipelineTemplate, Stage, one_device_profile, plain_plan
from planaria.estimator.peak_memory import bytes_by_rank, peak_bytes
from planaria.planner.layout.depths import Ranges, by_share
from planaria.planner.layout.search import Layout, LayoutSearches, SearchResults, layouts
from planaria.planner.problem import Problem
from planaria.planner.reroute.reroutes import with_split_backwards
from planaria.planner.times import pipelines_of
from planaria.profiles.shipped import shipped_profiles

EVERYWHERE = Ranges(dp=100, pp=100)
TOLERANCE = 1.05  # Of thousands a few are 1% off.


def cut(*ends: int) -> PipelineTemplate:
    """A stage for each node, with the layers up to these."""
    stages = (Stage(u, v, 1) for u, v in zip((0, *ends), ends, strict=False))
    return PipelineTemplate(tuple(stages), len(ends))


def found(
    problem: Problem,
    num_nodes: int,
    *,
    present: Sequence[PipelineTemplate],
    ranges: Ranges = EVERYWHERE,
) -> tuple[Layout, ...]:
    """What the whole search finds."""
    return [(), *layouts(problem, num_nodes, present=present, ranges=ranges)][-1]


def price_s(problem: Problem, layout: Layout) -> float:
    """The layout's iteration, its schedule built and run for all pipelines together."""
    pipelines = pipelines_of(layout.templates, range(sum(t.num_nodes for t in layout.templates)))
    plan = plain_plan(0, pipelines, layout.microbatches)
    if layout.splits_backward:
        plan = with_split_backwards(problem, plan)
    return timed_s(problem, plan)


@st.composite
def small_problems(draw: st.DrawFn, *, splits_backward: bool) -> tuple[Problem, int]:
    """Four or five unequal layers, two to four nodes, memory that may bind; nodes that are left."""
    layers = tuple(
        layer_profile(
            f"layer {i}",
            draw(st.sampled_from((0.01, 0.013, 0.03))),
            activation_bytes=draw(st.integers(0, 2)) * MEBIBYTE,
            output_bytes=draw(st.sampled_from((0, 8 * MEBIBYTE))),
        )
        for i in range(draw(st.integers(4, 5)))
    )
    memory_bytes = draw(st.sampled_from((0, 0, 45, 60, 90))) * MEBIBYTE
    problem = Problem(
        profile=model_profile(layers, device_memory_bytes=memory_bytes),
        devices_per_node=1,
        num_microbatches=draw(st.integers(4, 7)),
        failures_tolerated=0,
        splits_backward=splits_backward,
    )
    return problem, draw(st.integers(2, 4))


def all_layouts(problem: Problem, num_nodes: int) -> Iterator[Layout]:
    """Every set of depths, every cut of each pipeline, every way to deal; within memory for all
    microbatches of the job."""
    num_layers, most = len(problem.profile.layers), problem.num_microbatches
    limit = problem.profile.device_memory_bytes
    cuts = {
        depth: [
            template
            for ends in combinations(range(1, num_layers), depth - 1)
            for template in [cut(*ends, num_layers)]
            if not limit or max(peaks(problem, template, most)) <= limit
        ]
        for depth in range(1, num_nodes + 1)
    }
    for number in range(1, num_nodes + 1):
        for depths in product(range(1, num_nodes + 1), repeat=number):
            if sum(depths) != num_nodes or list(depths) != sorted(depths):
                continue
            for templates in product(*(cuts[depth] for depth in depths)):
                for counts in product(range(1, most + 1), repeat=number):
                    if sum(counts) == most:
                        yield Layout(templates, counts, False, 0.0, 0)


def peaks(problem: Problem, template: PipelineTemplate, num_microbatches: int) -> tuple[int, ...]:
    return peak_bytes(
        problem.profile,
        template,
        num_microbatches=num_microbatches,
        gradient_copies=problem.gradient_copies,
    )


def check_is_best(problem: Problem, num_nodes: int) -> None:
    """All layouts of both classes, or of that with whole backwards, are priced."""
    front = found(problem, num_nodes, present=())
    classes = (False, True) if problem.splits_backward else (False,)
    every = [
        replace(layout, splits_backward=is_split)
        for layout in all_layouts(problem, num_nodes)
        for is_split in classes
    ]
    prices_s = [(price_s(problem, one), one) for one in every if fits(problem, one)]
    best_s, best = min(prices_s, key=lambda priced: priced[0], default=(0.0, None))

    assert bool(front) == bool(prices_s)
    assert not front or front[0].iteration_s <= TOLERANCE * best_s, best


def fits(problem: Problem, layout: Layout) -> bool:
    """Whether each device has memory for a microbatch with split backwards."""
    pipelines = pipelines_of(layout.templates, range(sum(t.num_nodes for t in layout.templates)))
    plan = with_split_backwards(problem, plain_plan(0, pipelines, layout.microbatches))
    return not layout.splits_backward or min(plan.in_flight.values()) > 0


@settings(max_examples=20)
@given(small_problems(splits_backward=False))
def test_no_layout_with_whole_backwards_is_faster_by_a_twentieth(case: tuple[Problem, int]) -> None:
    """All depths, cuts and batches of small clusters are priced by their schedules."""
    check_is_best(*case)


@settings(max_examples=10)
@given(small_problems(splits_backward=True))
def test_no_layout_with_split_backwards_is_faster_by_a_twentieth(case: tuple[Problem, int]) -> None:
    """Of both classes the search takes the faster one."""
    check_is_best(*case)


def test_pipelines_are_cut_alike_where_that_saves_reductions() -> None:
    """Two pipelines of two nodes; the one with fewer microbatches would be cut otherwise alone."""
    seconds = (0.03, 0.01, 0.01, 0.013)
    layers = tuple(
        layer_profile(f"layer {i}", s, activation_bytes=0, output_bytes=i // 3 * 8 * MEBIBYTE)
        for i, s in enumerate(seconds)
    )
    problem = Problem(
        profile=model_profile(layers, device_memory_bytes=60 * MEBIBYTE),
        devices_per_node=1,
        num_microbatches=5,
        failures_tolerated=0,
        splits_backward=True,
    )

    fastest, *_ = found(problem, 4, present=())

    assert fastest.templates == (cut(1, 4), cut(1, 4))


LLAMA = one_device_profile(next(one for one in shipped_profiles() if one.model == "llama2-7b"))


def llama(num_microbatches: int, *, num_blocks: int = 32, f: int = 1) -> Problem:
    """Llama-2 7B, or so many of its blocks, on devices of 64 GB."""
    first, *blocks, last = LLAMA.layers
    layers = (first, *blocks[:num_blocks], last)
    profile = replace(LLAMA, layers=layers, device_memory_bytes=64 * 10**9, tied=())
    return Problem(
        profile=profile,
        devices_per_node=1,
        num_microbatches=num_microbatches,
        failures_tolerated=f,
    )


@pytest.fixture(scope="module")
def fifteen() -> tuple[Problem, list[PipelineTemplate], list[tuple[Layout, ...]]]:
    """What the search finds where 4 pipelines of 4 lose a node, step by step."""
    problem = llama(32)
    present = [cut(9, 18, 26, 34)] * 4
    return problem, present, list(layouts(problem, 15, present=present, ranges=Ranges()))


def test_each_layout_is_whole_and_priced_by_its_schedule(
    fifteen: tuple[Problem, list[PipelineTemplate], list[tuple[Layout, ...]]],
) -> None:
    """All nodes work, each pipeline has a microbatch, and devices hold what Eq. 14 says they do."""
    problem, present, fronts = fifteen
    limit = problem.profile.device_memory_bytes
    assert len(fronts[-1]) > 1
    for layout in fronts[-1]:
        assert sum(template.num_nodes for template in layout.templates) == 15
        assert sum(layout.microbatches) == 32
        assert min(layout.microbatches) >= 1
        assert layout.iteration_s == pytest.approx(price_s(problem, layout), rel=1e-9)
        assert layout.num_kept == min(4, layout.templates.count(present[0]))
        for template, count in zip(layout.templates, layout.microbatches, strict=True):
            assert max(peaks(problem, template, count)) <= limit
        pipelines = pipelines_of(layout.templates, range(15))
        plan = plain_plan(0, pipelines, layout.microbatches)
        plan = with_split_backwards(problem, plan)
        held = bytes_by_rank(problem.profile, plan, gradient_copies=1)
        for rank, most in plan.in_flight.items():
            assert held[rank].state_bytes + most * held[rank].microbatch_bytes <= limit


def test_a_search_has_an_answer_soon_and_never_a_worse_one(
    fifteen: tuple[Problem, list[PipelineTemplate], list[tuple[Layout, ...]]],
) -> None:
    """It may be stopped at any step."""
    _, _, fronts = fifteen
    times_s = [front[0].iteration_s for front in fronts if front]
    kept = [max(layout.num_kept for layout in front) for front in fronts if front]

    assert len(fronts) - len(times_s) < 10
    assert times_s == sorted(times_s, reverse=True)
    assert times_s[20] <= 1.1 * times_s[-1]
    assert kept == sorted(kept)
    for front in fronts:
        assert [x.iteration_s for x in front] == sorted(x.iteration_s for x in front)
        assert [x.num_kept for x in front] == sorted({x.num_kept for x in front})


def test_where_one_pipeline_is_the_fastest_the_best_of_more_is_found_too() -> None:
    """Links are so slow that reductions take longest, and no failure is to be tolerated; but it may
    be worth something that every layer has a second holder."""
    problem = llama(16)
    slow = replace(problem.profile.links["inter_node"], bandwidth_bytes_per_s=1e9)
    profile = replace(problem.profile, links={**problem.profile.links, "inter_node": slow})
    problem = replace(problem, profile=profile, failures_tolerated=0)

    front = found(problem, 6, present=())
    safe, *_ = found(replace(problem, failures_tolerated=1), 6, present=())

    assert [layout.is_doubled for layout in front] == [False, True]
    assert front[1] == safe


def test_layouts_keep_to_the_ranges(
    fifteen: tuple[Problem, list[PipelineTemplate], list[tuple[Layout, ...]]],
) -> None:
    """And the fastest within them is as good as any, here."""
    problem, present, fronts = fifteen
    for layout in {layout for front in fronts for layout in front}:
        number = len(layout.templates)
        depths = [template.num_nodes for template in layout.templates]
        assert 2 <= number <= 6
        assert 15 // number - 2 <= min(depths)
        assert max(depths) <= -(-15 // number) + 2

    narrow = found(problem, 15, present=present, ranges=Ranges(dp=0, pp=0))
    assert {len(layout.templates) for layout in narrow} == {4}
    assert {t.num_nodes for layout in narrow for t in layout.templates} == {3, 4}


def test_the_present_pipelines_are_searched_first_however_uneven_they_are() -> None:
    """Nothing moves where they only split their backwards; no even spread has these depths."""
    problem = llama(64)
    present = [cut(2, *range(4, 35, 2)), cut(17, 34)]
    steps = layouts(problem, 19, present=present, ranges=Ranges())
    kept = next(x for front in steps for x in front if x.splits_backward and x.num_kept == 2)

    assert sorted(template.num_nodes for template in kept.templates) == [2, 17]
    assert kept.iteration_s == pytest.approx(price_s(problem, kept), rel=1e-9)
    fewer = found(problem, 18, present=present)
    assert all(sum(t.num_nodes for t in layout.templates) == 18 for layout in fewer)


def test_a_search_goes_on_where_it_was_left() -> None:
    """In parts it finds what it finds at once."""
    problem, present = llama(16), [cut(9, 18, 26, 34)] * 2
    parts, at_once = (LayoutSearches(Ranges(), SearchResults(problem)) for _ in range(2))
    assert parts.front(7, present) == ()

    list(islice(parts.steps(7, present), 5))
    first = parts.front(7, present)
    list(parts.steps(7, present))
    list(at_once.steps(7, present))

    assert first
    assert parts.front(7, present) == at_once.front(7, present)
    assert parts.front(7, present)[0].iteration_s < first[0].iteration_s


def test_searches_that_share_results_take_the_steps_that_each_takes_alone() -> None:
    """In turns, a few steps each; every front is that of a search which knows nothing."""
    problem = llama(16)
    questions = [
        (7, [cut(9, 18, 26, 34)] * 2),
        (7, [cut(12, 23, 34)] * 2),
        (6, [cut(9, 18, 26, 34)] * 2),
        (7, [cut(8, 17, 26, 34), cut(12, 23, 34)]),
    ]
    results = SearchResults(problem)
    shared = LayoutSearches(Ranges(dp=1, pp=1), results)
    others = LayoutSearches(Ranges(dp=1, pp=1), results)
    alone = [layouts(problem, n, present=p, ranges=Ranges(dp=1, pp=1)) for n, p in questions]
    num_steps = 0

    for num_steps_of_turn in (1, 5, 20, 1 << 20):
        for (num_nodes, present), search in zip(questions, alone, strict=True):
            for _ in islice(shared.steps(num_nodes, present), num_steps_of_turn):
                num_steps += 1
                assert shared.front(num_nodes, present) == next(search)

    assert num_steps > 100
    for num_nodes, present in questions:
        assert sum(1 for _ in others.steps(num_nodes, present)) > 5
        assert others.front(num_nodes, present) == shared.front(num_nodes, present)
    assert all(next(search, None) is None for search in alone)


def test_the_search_finds_the_layout_of_odysseys_figure_12() -> None:
    """DP 4 with PP 2 loses a node: pipelines of 2, 2 and 3, and no device holds more than before.
    20 blocks, for all 32 do not fit on two devices of 64 GB."""
    problem = llama(64, num_blocks=20)
    present = [cut(11, 22)] * 4
    before = peaks(problem, present[0], 16)

    best = found(problem, 7, present=present, ranges=Ranges())[0]

    assert [template.num_nodes for template in best.templates] == [2, 2, 3]
    assert sum(best.microbatches) == 64
    for template, count in zip(best.templates, best.microbatches, strict=True):
        assert max(peaks(problem, template, count)) <= max(before)
        assert max(peaks(problem, template, count)) <= 64 * 10**9


def test_microbatches_are_dealt_by_the_share_of_nodes() -> None:
    """The rest goes to who lacks most; no pipeline is left without."""
    assert by_share((2, 2, 3), 64) == (18, 18, 28)
    assert by_share((3, 4, 4, 4), 32) == (6, 9, 9, 8)
    assert by_share((1, 1, 30), 4) == (1, 1, 2)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=9), st.integers(0, 60))
def test_no_pipeline_is_left_without_a_microbatch(depths: list[int], more: int) -> None:
    """However few there are, and all are dealt."""
    counts = by_share(depths, len(depths) + more)

    assert sum(counts) == len(depths) + more
    assert min(counts) >= 1


def test_layers_that_take_no_time_have_a_layout() -> None:
    """A profile may say 0 s of all of them."""
    layers = tuple(layer_profile(f"layer {i}", 0.0) for i in range(4))
    problem = Problem(
        profile=model_profile(layers), devices_per_node=1, num_microbatches=4, failures_tolerated=1
    )

    (*_, front) = layouts(problem, 4, present=[cut(2, 4)] * 2, ranges=Ranges())

    assert sum(template.num_nodes for template in front[0].templates) == 4


def test_nodes_that_hold_no_model_have_no_layout() -> None:
    """Fewer than n0, or fewer than f + 1 times as many: as many pipelines as there can be."""
    problem = llama(16)

    assert found(problem, 2, present=[cut(12, 23, 34)]) == ()
    assert {len(one.templates) for one in found(problem, 5, present=[cut(12, 23, 34)])} == {1}
