"""Sets of pipelines, against every set there is."""

import random
from itertools import combinations_with_replacement, islice, product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.cpu_time import quickest
from planaria.planner.layout.instantiate import (
    PipelineRange,
    SizeSearch,
    first_gap,
    instantiations,
    numbers_of_pipelines,
)
from planaria.planner.problem import Counts, Seconds

SEED = 20_261_121
MANY_NODES_S = 1.5  # Three times what it takes.


@settings(max_examples=60)
@given(st.integers(0, 9), st.sets(st.integers(1, 6)), st.integers(1, 4))
def test_instantiations_are_all_multisets(
    num_nodes: int, sizes: set[int], min_pipelines: int
) -> None:
    """Equation 5 of Oobleck finds each feasible set once."""
    expected = sorted(
        multiset
        for count in range(min_pipelines, num_nodes + 1)
        for multiset in combinations_with_replacement(sorted(sizes), count)
        if sum(multiset) == num_nodes
    )

    found = instantiations(num_nodes, tuple(sizes), min_pipelines=min_pipelines)

    assert expected == sorted(found)


def test_instantiations_of_oobleck_figure_4() -> None:
    """13 nodes in templates of 2, 3 and 4: the two sets that section 4.2.1 names are there."""
    found = set(instantiations(13, (2, 3, 4), min_pipelines=2))

    assert {(2, 3, 4, 4), (3, 3, 3, 4)} <= found


def test_a_set_may_have_more_pipelines_than_python_has_frames() -> None:
    """A plan for 1,000 nodes that each hold the model was refused with a RecursionError."""
    found = islice(instantiations(5_000, range(1, 3_000), min_pipelines=2), 2)

    assert [len(sizes) for sizes in found] == [5_000, 4_999]


def test_the_first_gap_is_that_of_exhaustive_search() -> None:
    """For n0 <= 6, f <= 3 and N <= 40, also where some sizes between have no template; by Oobleck's
    first condition (4.1.1) there is none from (f + 2) n0 - 1 nodes on."""
    rng = random.Random(SEED)
    for n0 in range(1, 7):
        for f in range(4):
            for num_nodes in range((f + 1) * n0, 41):
                every = range(n0, num_nodes - f * n0 + 1)
                some = [size for size in every if size == n0 or rng.random() < 0.5]
                for sizes in (every, some):
                    numbers = numbers_of_pipelines(num_nodes + 3 * n0, sizes)
                    works = [number >> (f + 1) > 0 for number in numbers]
                    if not works[num_nodes]:
                        continue
                    found = first_gap(num_nodes, sizes, min_pipelines=f + 1)

                    case = (n0, f, num_nodes, sizes)
                    if all(works[num_nodes:]):
                        assert not found, case
                    else:
                        first = works.index(False, num_nodes)
                        assert found == range(first, works.index(True, first)), case
                    if sizes is every and num_nodes >= (f + 2) * n0 - 1:
                        assert not found, case


def test_no_node_idles_while_f_failures_are_tolerated() -> None:
    """Oobleck, appendix A, for all N <= 64, f <= 4 and n0 <= 6: every N' from N down to (f + 1) n0
    is a sum of f + 1 template sizes or more."""
    for n0 in range(1, 7):
        for f in range(5):
            for num_nodes in range((f + 1) * n0, 65):
                sizes = range(n0, num_nodes - f * n0 + 1)
                numbers = numbers_of_pipelines(num_nodes, sizes)
                for survivors in range((f + 1) * n0, num_nodes + 1):
                    assert numbers[survivors] >> (f + 1), (n0, f, num_nodes, survivors)


def makespans(rng: random.Random, sizes: list[int], most: int) -> dict[int, Seconds]:
    """Times that never fall, with many equal ones: whole seconds."""
    return {
        size: np.cumsum([float(rng.randint(0, 3)) for _ in range(most)]) + rng.randint(1, 6)
        for size in sizes
    }


def slowest_s(
    sizes: tuple[int, ...], makespans_s: dict[int, Seconds], num_microbatches: int
) -> float:
    """With microbatches dealt one by one to whoever would end first with it."""
    counts = [1] * len(sizes)
    for _ in range(num_microbatches - len(sizes)):
        ends = [makespans_s[size][count] for size, count in zip(sizes, counts, strict=True)]
        counts[int(np.argmin(ends))] += 1
    return max(float(makespans_s[s][n - 1]) for s, n in zip(sizes, counts, strict=True))


def test_the_fastest_set_is_that_of_exhaustive_search() -> None:
    """With so many pipelines, up to so many, or no limit; also which of equals: the smallest first.
    A limit below which the time must be is met, or there is none."""
    rng = random.Random(SEED)
    num_none = 0
    for index in range(400):
        num_nodes, most, fewest = rng.randint(1, 12), rng.randint(1, 12), rng.randint(1, 4)
        sizes = sorted(rng.sample(range(1, 8), rng.randint(1, 5)))
        times_s = makespans(rng, sizes, most)
        is_free = num_nodes // sizes[0] <= most and rng.random() < 0.5
        limit = most if is_free else min(most, fewest + rng.choice((0, 1, 3)))
        if fewest > limit:
            continue
        everything = {
            multiset: slowest_s(multiset, times_s, most)
            for multiset in instantiations(num_nodes, sizes, min_pipelines=fewest)
            if len(multiset) <= limit
        }
        below_s = rng.choice((np.inf, min(everything.values(), default=1.0) + rng.randint(0, 1)))

        search = SizeSearch(
            (num_nodes,),
            {(size,): table for size, table in times_s.items()},
            num_microbatches=most,
            pipelines=PipelineRange(fewest, None if is_free else limit),
        )
        found = search.fastest((num_nodes,), below_s=below_s)

        expected = min(((s, m) for m, s in everything.items() if s < below_s), default=None)
        num_none += expected is None
        sets = None if found is None else (found[0], tuple(size for (size,) in found[1]))
        assert expected == sets, f"seed {SEED}, case {index}"
    assert 20 < num_none < 300


def test_what_was_found_for_some_nodes_changes_nothing_for_others() -> None:
    """One search, asked for parts of its nodes in any order and below any limit, answers as a new
    one does; of one kind of nodes, and of two."""
    rng = random.Random(SEED)
    for index in range(150):
        num_kinds, most = rng.randint(1, 2), rng.randint(4, 12)
        nodes: Counts = tuple(rng.randint(2, 8 if num_kinds == 1 else 3) for _ in range(num_kinds))
        parts = list(product(*(range(count + 1) for count in nodes)))[1:]
        sizes = rng.sample(parts, rng.randint(1, min(5, len(parts))))
        times_s = dict(
            zip(sizes, makespans(rng, list(range(len(sizes))), most).values(), strict=True)
        )
        limit = rng.choice((None, 4)) if sum(nodes) <= most else 4
        pipelines = PipelineRange(rng.randint(1, 3), limit)

        search = SizeSearch(nodes, times_s, num_microbatches=most, pipelines=pipelines)
        for _ in range(8):
            part, below_s = rng.choice(parts), rng.choice((np.inf, float(rng.randint(5, 25))))
            new = SizeSearch(part, times_s, num_microbatches=most, pipelines=pipelines)

            expected = new.fastest(part, below_s=below_s)
            assert expected == search.fastest(part, below_s=below_s), f"seed {SEED}, case {index}"


def test_a_thousand_nodes_are_answered_while_one_waits() -> None:
    """More sets than could be listed; the answer uses all nodes, and deals all microbatches."""
    sizes = range(4, 65)
    times_s: dict[Counts, Seconds] = {
        (size,): (np.arange(1.0, 4001.0) + size - 1) * (64 / size) * (1 + 0.1 * (64 % size > 0))
        for size in sizes
    }

    pipelines = PipelineRange(5, None)
    found, cpu_s = quickest(
        lambda: SizeSearch((1000,), times_s, num_microbatches=4000, pipelines=pipelines).fastest(
            (1000,)
        ),
        limit_s=MANY_NODES_S,
    )

    assert cpu_s < MANY_NODES_S
    assert found is not None
    assert sum(size for (size,) in found[1]) == 1000
    assert len(found[1]) >= 5
