"""Who keeps whose state, as the paper places copies, and better."""

from collections import Counter
from itertools import product
from random import Random

import pytest

from planaria.errors import ConfigError
from planaria.placement.placement import Placement, paper_placement
from planaria.placement.spread import Limits, even_limits, optimised_placement, risk
from planaria.placement.survival import Failures, minimal

# PAPERS 5a: N, k; different sets of copy holders of `mixed`, fewest under even load, fewest of all.
TABLE = [
    (5, 2, 4, 4, 3),
    (7, 2, 5, 5, 4),
    (9, 2, 6, 6, 5),
    (5, 3, 5, 4, 2),
    (7, 3, 5, 5, 3),
    (8, 3, 6, 5, 3),
    (6, 4, 6, 3, 2),
    (7, 4, 7, 5, 2),
]


def sets_of(placement: Placement) -> int:
    return len({frozenset(nodes) for nodes in placement.holders})


def alike(num_nodes: int, node: float = 0.01) -> Failures:
    return Failures((node,) * num_nodes)


def test_groups_and_rings_are_the_papers() -> None:
    """Figure 3: four nodes with two copies; and five, the last three of which are a ring."""
    assert paper_placement(4, 2, "group").holders == ((0, 1), (1, 0), (2, 3), (3, 2))
    assert paper_placement(4, 2, "ring").holders == ((0, 1), (1, 2), (2, 3), (3, 0))
    assert paper_placement(4, 2, "mixed") == paper_placement(4, 2, "group")
    assert paper_placement(5, 2, "mixed").holders == ((0, 1), (1, 0), (2, 3), (3, 4), (4, 2))
    assert paper_placement(3, 1, "mixed").holders == ((0,), (1,), (2,))
    assert paper_placement(5, 4, "mixed") == paper_placement(5, 4, "ring")


@pytest.mark.parametrize(("num_nodes", "copies"), list(product(range(1, 13), range(1, 6))))
def test_every_node_keeps_as_much_as_it_has_kept(num_nodes: int, copies: int) -> None:
    if copies > num_nodes:
        with pytest.raises(ConfigError, match=f"from 1 to the number of nodes, {num_nodes}"):
            paper_placement(num_nodes, copies, "mixed")
        return
    for strategy in ("mixed", "ring"):
        placement = paper_placement(num_nodes, copies, strategy)
        assert placement.num_kept == (copies,) * num_nodes
        assert {len(nodes) for nodes in placement.holders} == {copies}


def test_groups_that_do_not_come_out_even_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="with --strategy group it must divide the 5 nodes; use --strategy mixed"
    ):
        paper_placement(5, 2, "group")


@pytest.mark.parametrize(
    ("num_nodes", "copies", "mixed", "even", "fewest"),
    [TABLE[0], *(pytest.param(*case, marks=pytest.mark.long) for case in TABLE[1:])],
)
def test_the_optimised_placement_has_the_fewest_sets_there_can_be(
    num_nodes: int, copies: int, mixed: int, even: int, fewest: int
) -> None:
    """Under even load, which is found by looking at all, and where a node may keep any number."""
    room = (num_nodes,) * num_nodes
    free = Limits((1,) * num_nodes, room, room)
    failures = alike(num_nodes)

    assert sets_of(paper_placement(num_nodes, copies, "mixed")) == mixed
    at_equal_load = optimised_placement(
        copies, failures=failures, limits=even_limits(num_nodes, copies)
    )
    assert sets_of(at_equal_load) == even
    assert at_equal_load.num_kept == (copies,) * num_nodes
    assert sets_of(optimised_placement(copies, failures=failures, limits=free)) == fewest


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in (0, 2, 3, 4, 5))]
)
def test_it_is_never_worse_than_mixed_and_within_its_limits(seed: int) -> None:
    """Of nodes that fail in ways of their own, some of them together, with more room or less."""
    print(f"seed {seed}")
    rng = Random(seed)
    num_nodes, copies = rng.randint(6, 20), rng.randint(2, 3)
    size = rng.randint(2, 4)
    domains = {
        frozenset(range(first, min(first + size, num_nodes))): rng.choice((0.001, 0.05))
        for first in range(0, num_nodes, size)
    }
    failures = Failures(tuple(rng.choice((0.001, 0.01, 0.1)) for _ in range(num_nodes)), domains)
    more = rng.randint(0, 2)
    limits = Limits(
        (1,) * num_nodes, (copies + more,) * num_nodes, (copies - 1 + more,) * num_nodes
    )

    found = optimised_placement(copies, failures=failures, limits=limits, seed=seed)

    mixed = paper_placement(num_nodes, copies, "mixed")
    assert risk(failures, found.holders) <= risk(failures, mixed.holders)
    assert max(found.num_kept) <= copies + more


def test_copies_leave_the_domain_that_fails_whole() -> None:
    """Four racks of four: a rack that is lost takes no state with it, which `mixed` loses."""
    racks = {frozenset(range(first, first + 4)): 0.01 for first in range(0, 16, 4)}
    failures = Failures((0.001,) * 16, racks)

    found = optimised_placement(2, failures=failures, limits=even_limits(16, 2))

    assert all(len({node // 4 for node in nodes}) == 2 for nodes in found.holders)
    mixed = paper_placement(16, 2, "mixed")
    assert risk(failures, found.holders) < 0.1 * risk(failures, mixed.holders)


def test_unequal_nodes_keep_what_they_have_room_for() -> None:
    """Nodes 0 and 1 have large states, and cannot take each other's; node 5 can take none."""
    state = (4, 4, 1, 1, 1, 1)
    limits = Limits(state, (5, 5, 5, 5, 5, 1), (1, 1, 4, 4, 4, 0))

    found = optimised_placement(2, failures=alike(6), limits=limits)

    kept = Counter[int]()
    for node, (_, holder) in enumerate(found.holders):
        kept[holder] += state[node]
    assert all(kept[node] <= limits.receive[node] for node in range(6))
    assert all(kept[node] + state[node] <= limits.memory[node] for node in range(6))


def test_limits_that_nothing_fits_are_refused_with_what_is_missing() -> None:
    limits = Limits((1,) * 4, (1,) * 4, (1,) * 4)
    with pytest.raises(ConfigError, match="the nodes lack 4 bytes in all"):
        optimised_placement(2, failures=alike(4), limits=limits)


def test_more_copies_than_it_needs_are_one_set() -> None:
    """What is kept by all is lost with all."""
    found = optimised_placement(3, failures=alike(3), limits=even_limits(3, 3))
    assert minimal(found.holders) == (frozenset({0, 1, 2}),)


def test_nodes_that_hardly_ever_fail_have_a_placement() -> None:
    """The probability that all holders of the first walk's states fail is too small for a float."""
    reliable, poor = 1e-200, 0.5
    failures = Failures((reliable, reliable, poor) * 2)

    placement = optimised_placement(3, failures=failures, limits=even_limits(6, 3))

    assert risk(failures, placement.holders) == 0.0
