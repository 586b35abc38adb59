"""Counts of losses that lose nothing, beside all of them looked at one by one."""

from itertools import combinations
from math import comb, prod

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.placement import survival
from planaria.placement.placement import paper_placement, paper_probability
from planaria.placement.survival import (
    Estimate,
    Failures,
    minimal,
    survival_by_lost,
    survival_under,
    survivals,
)

SIZES = [(n, k) for n in range(1, 15) for k in range(1, min(n, 5) + 1)]


def mask(nodes: object) -> int:
    assert isinstance(nodes, tuple | frozenset)
    return sum(1 << node for node in nodes)


def looked_at(num_nodes: int, kept_by: object) -> tuple[int, ...]:
    """By the number of lost nodes, how many of all losses lose nothing."""
    assert isinstance(kept_by, tuple)
    lost: npt.NDArray[np.int64] = np.arange(1 << num_nodes)
    alive = np.ones(len(lost), dtype=bool)
    for one in {mask(nodes) for nodes in kept_by}:
        alive &= lost & one != one
    numbers = np.array([bin(one).count("1") for one in lost])
    return tuple(int(alive[numbers == number].sum()) for number in range(num_nodes + 1))


@pytest.mark.parametrize(("num_nodes", "copies"), SIZES)
def test_each_strategy_survives_as_often_as_all_losses_say(num_nodes: int, copies: int) -> None:
    """Both the closed forms and the count, for all numbers of lost nodes."""
    for strategy in ("mixed", "group", "ring"):
        if strategy == "group" and num_nodes % copies:
            continue
        holders = paper_placement(num_nodes, copies, strategy).holders
        expected = looked_at(num_nodes, holders)

        assert survivals(num_nodes, holders) == expected
        for lost, number in enumerate(expected):
            closed = paper_probability(num_nodes, copies, strategy, num_lost=lost)
            assert closed == pytest.approx(number / comb(num_nodes, lost), abs=1e-12)


KEPT = st.lists(st.frozensets(st.integers(0, 7), min_size=1, max_size=5), min_size=1, max_size=9)


@given(KEPT)
def test_any_placement_survives_as_often_as_all_losses_say(kept: list[frozenset[int]]) -> None:
    assert survivals(8, kept) == looked_at(8, tuple(kept))


@given(KEPT, st.integers(0, 8))
def test_few_lost_nodes_are_counted_without_the_others(
    kept: list[frozenset[int]], most_lost: int
) -> None:
    found = survivals(8, kept, most_lost=most_lost)

    assert found == looked_at(8, tuple(kept))[: most_lost + 1]


@given(
    KEPT,
    st.lists(st.floats(0.0, 1.0), min_size=8, max_size=8),
    st.lists(st.floats(0.0, 1.0), min_size=2, max_size=2),
)
def test_nodes_that_fail_together_are_weighed_as_all_their_fates_say(
    kept: list[frozenset[int]], node: list[float], together: list[float]
) -> None:
    """Nodes 0, 3, 6 are a domain, and 1, 2; all others fail by themselves only."""
    domains = (frozenset({0, 3, 6}), frozenset({1, 2}))
    failures = Failures(tuple(node), dict(zip(domains, together, strict=True)))
    expected = 0.0
    for down in range(4):
        gone = frozenset[int]().union(*(domains[i] for i in range(2) if down >> i & 1))
        weight = prod(p if down >> i & 1 else 1.0 - p for i, p in enumerate(together))
        for number in range(9):
            for alone in combinations(range(8), number):
                lost = gone.union(alone)
                if not any(holders <= lost for holders in kept):
                    expected += weight * prod(
                        p if i in alone else 1.0 - p for i, p in enumerate(node)
                    )

    assert survival_under(failures, kept) == pytest.approx(expected, abs=1e-9)


def test_sixteen_nodes_survive_as_the_paper_says() -> None:
    """Gemini, figure 9: two copies and two lost nodes; a group, and the ring that it beats."""
    assert paper_probability(16, 2, "group", num_lost=2) == pytest.approx(0.9333, abs=5e-5)
    assert paper_probability(16, 2, "ring", num_lost=2) == pytest.approx(0.8667, abs=5e-5)
    mixed = [paper_probability(16, 3, "mixed", num_lost=lost) for lost in range(2, 7)]
    assert mixed == pytest.approx([1.0, 0.9857, 0.9445, 0.8654, 0.7418], abs=5e-5)


def corollary(num_nodes: int, copies: int, lost: int) -> float:
    groups = num_nodes // copies
    return 1 - groups * comb(num_nodes - copies, lost - copies) / comb(num_nodes, lost)


@pytest.mark.parametrize("lost", range(2, 8))
def test_corollary_1_is_exact_below_two_groups_and_a_bound_beyond(lost: int) -> None:
    """With seven of sixteen nodes lost it is below 0."""
    exact = paper_probability(16, 2, "group", num_lost=lost)

    if lost < 4:
        assert exact == pytest.approx(corollary(16, 2, lost))
    else:
        assert exact > corollary(16, 2, lost)
    assert (corollary(16, 2, lost) < 0.0) == (lost == 7)


def test_theorem_1_holds_for_as_many_lost_nodes_as_copies_only() -> None:
    """Of four nodes all may keep a copy at node 0: it loses more often than groups if two are
    lost, and less often if three are. The same with six."""
    star = tuple(frozenset({0, node or 1}) for node in range(4))
    groups = paper_placement(4, 2, "group").holders
    assert survivals(4, star)[2:4] == (3, 1)
    assert survivals(4, groups)[2:4] == (4, 0)


@pytest.mark.parametrize(("num_nodes", "copies"), [(n, k) for n, k in SIZES if n % k])
def test_mixed_is_as_near_to_the_bound_as_theorem_1_says(num_nodes: int, copies: int) -> None:
    """At most 2k - 3 more different sets of copy holders than the bound's ceil(N / k)."""
    sets = minimal(paper_placement(num_nodes, copies, "mixed").holders)
    gap = len(sets) - -(-num_nodes // copies)

    assert gap == num_nodes % copies + copies - 2
    assert gap <= 2 * copies - 3


def test_a_thousand_nodes_are_counted() -> None:
    """In the closed form, and where nodes are grouped in another way."""
    pairs = tuple((node, node ^ 512) for node in range(1024))

    found = survival_by_lost(1024, pairs, most_lost=8, rng=np.random.default_rng(0))

    for num_lost, estimate in enumerate(found):
        assert estimate.error == 0.0
        closed = paper_probability(1024, 2, "group", num_lost=num_lost)
        assert estimate.probability == pytest.approx(closed, abs=1e-12)


def test_what_cannot_be_counted_is_drawn_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within five standard errors of the exact value, and told to have one as soon as as many are
    lost as keep a piece."""
    holders = paper_placement(12, 3, "ring").holders
    exact = [paper_probability(12, 3, "ring", num_lost=lost) for lost in range(12)]
    monkeypatch.setattr(survival, "STATES_MAX", 1)

    drawn = survival_by_lost(12, holders, most_lost=11, rng=np.random.default_rng(0))

    assert drawn[:3] == (Estimate(1.0),) * 3
    for estimate, expected in zip(drawn[3:], exact[3:], strict=True):
        assert 0.0 < estimate.error < 0.01
        assert abs(estimate.probability - expected) < 5.0 * estimate.error
