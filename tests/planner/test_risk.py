"""How likely state is lost, beside exact fractions: also where that is hardly ever."""

from collections.abc import Sequence
from fractions import Fraction
from itertools import product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.placement.placement import paper_placement
from planaria.placement.spread import even_limits, optimised_placement, risk
from planaria.placement.survival import Failures, loss_under, survival_under

NODES = 6
RARE = st.floats(-12.0, -0.1).map(lambda digits: 10.0**digits)
KEPT = st.lists(st.frozensets(st.integers(0, NODES - 1), min_size=1), min_size=1, max_size=6)


def exact(failures: Failures, kept: Sequence[frozenset[int]]) -> Fraction:
    """The sum over all fates of nodes and domains in which something is lost."""
    domains = list(failures.domains)
    chances = [Fraction(p) for p in (*failures.node, *failures.domains.values())]
    total = Fraction(0)
    for fates in product((False, True), repeat=len(chances)):
        gone = {node for node in range(len(failures.node)) if fates[node]}
        gone.update(
            *(d for d, down in zip(domains, fates[len(failures.node) :], strict=True) if down)
        )
        if any(holders <= gone for holders in kept):
            total += prod(
                p if is_lost else 1 - p for p, is_lost in zip(chances, fates, strict=True)
            )
    return total


@given(
    KEPT,
    st.lists(RARE, min_size=NODES, max_size=NODES),
    st.lists(RARE, min_size=2, max_size=2),
)
def test_a_risk_has_its_digits_however_small_it_is(
    kept: list[frozenset[int]], node: list[float], together: list[float]
) -> None:
    """Nodes 0 and 3 are a domain, and 1, 2 and 4; node 5 fails by itself only."""
    domains = (frozenset({0, 3}), frozenset({1, 2, 4}))
    failures = Failures(tuple(node), dict(zip(domains, together, strict=True)))
    expected = exact(failures, kept)

    assert loss_under(failures, kept) == pytest.approx(float(expected), rel=1e-13, abs=0.0)
    assert survival_under(failures, kept) == pytest.approx(float(1 - expected), abs=1e-13)


def test_the_risk_of_four_groups_is_not_what_rounding_leaves() -> None:
    """What is left of 1 after their survival is 4.4e-16."""
    failures = Failures((1e-6,) * 12)
    groups = paper_placement(12, 3, "mixed").holders

    assert risk(failures, groups) == pytest.approx(4e-18, rel=1e-12, abs=0.0)


def test_the_least_of_the_smallest_risks_is_found() -> None:
    """Two nodes that fail often are in no group together, whatever a survival is rounded to."""
    failures = Failures((1e-3, 1e-3, *(1e-7,) * 7))

    found = optimised_placement(3, failures=failures, limits=even_limits(9, 3))

    holders = {frozenset(nodes) for nodes in found.holders}
    assert not any({0, 1} <= nodes for nodes in holders)
    expected = float(exact(failures, sorted(holders, key=sorted)))
    assert risk(failures, found.holders) == pytest.approx(expected, rel=1e-12, abs=0.0)
    mixed = paper_placement(9, 3, "mixed").holders
    assert risk(failures, found.holders) < 1e-3 * risk(failures, mixed)
