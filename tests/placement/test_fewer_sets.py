"""Copies of a plan's layers, placed to lose less than where `mixed` has them."""

from collections import Counter
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.cpu_time import quickest
from helpers.jobs import NUM_LAYERS, shaped_plan
from planaria.core.copies import LayerCopy
from planaria.core.plan import Plan, plain_plan
from planaria.placement.fewer_sets import optimised_copies
from planaria.placement.layer_copies import keeping_places, layer_copies
from planaria.placement.placement import paper_placement
from planaria.placement.survival import Failures, minimal, survival_under, survivals

EQUAL = (100,) * NUM_LAYERS
UNEQUAL = (300, *(100,) * (NUM_LAYERS - 2), 500)
# By the process's own clock, as a machine may do other things too.
PLACED_S_MAX = 0.06
THOUSAND_S_MAX = 3.0

Racks = tuple[tuple[int, ...], ...]


def of_mixed(
    plan: Plan, *, copies: int, layer_bytes: tuple[int, ...], domains: Racks = ()
) -> tuple[LayerCopy, ...]:
    placement = paper_placement(len(plan.nodes), copies, "mixed")
    return layer_copies(
        plan, copies=copies, placement=placement, layer_bytes=layer_bytes, domains=domains
    )


def racks_of(num_nodes: int, size: int) -> Racks:
    """Of so many nodes each; none if that is 0."""
    firsts = range(0, num_nodes, size) if size else ()
    return tuple(tuple(range(first, min(first + size, num_nodes))) for first in firsts)


def survives(plan: Plan, copies: tuple[LayerCopy, ...], num_lost: int) -> float:
    """That all layers do when so many nodes are lost."""
    num_nodes = len(plan.nodes)
    kept_by = keeping_places(plan, copies)
    return survivals(num_nodes, kept_by)[num_lost] / comb(num_nodes, num_lost)


def most_kept(copies: tuple[LayerCopy, ...], layer_bytes: tuple[int, ...]) -> int:
    kept = Counter[int]()
    for copy in copies:
        for target in copy.targets:
            kept[target] += layer_bytes[copy.layer]
    return max(kept.values(), default=0)


def test_a_pipeline_of_six_survives_as_mixed_does() -> None:
    """Nothing is better for it; wherever least is kept survives two losses in 0.467."""
    plan = shaped_plan((6,), 6)
    for layer_bytes in (EQUAL, UNEQUAL):
        found = optimised_copies(plan, copies=2, layer_bytes=layer_bytes)
        assert survives(plan, found, 2) == pytest.approx(0.8)


def test_two_pipelines_of_four_survive_four_losses_more_often_than_with_mixed() -> None:
    """The example of docs/CHECKPOINTS.md."""
    plan = shaped_plan((4, 4), 8)

    mixed = survives(plan, of_mixed(plan, copies=3, layer_bytes=EQUAL), 4)
    found = survives(plan, optimised_copies(plan, copies=3, layer_bytes=EQUAL), 4)
    assert (mixed, found) == pytest.approx((0.886, 0.971), abs=5e-4)


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.integers(1, 4),
    st.sampled_from((EQUAL, UNEQUAL)),
    st.integers(0, 4),
)
def test_it_is_never_worse_than_mixed_and_keeps_no_more_anywhere(
    shape: list[int], copies: int, layer_bytes: tuple[int, ...], rack: int
) -> None:
    """For every number of lost nodes, and where racks fail with all their nodes."""
    plan = shaped_plan(tuple(shape), 20)
    num_nodes = len(plan.nodes)
    copies, racks = min(copies, num_nodes), racks_of(num_nodes, rack)
    found = optimised_copies(plan, copies=copies, layer_bytes=layer_bytes, domains=racks)

    mixed = of_mixed(plan, copies=copies, layer_bytes=layer_bytes, domains=racks)
    for num_lost in range(num_nodes + 1):
        assert survives(plan, found, num_lost) >= survives(plan, mixed, num_lost)
    failures = Failures((0.01,) * num_nodes, {frozenset(nodes): 0.001 for nodes in racks})
    likely = [survival_under(failures, keeping_places(plan, one)) for one in (found, mixed)]
    assert likely[0] >= likely[1] - 1e-12
    assert most_kept(found, layer_bytes) <= most_kept(mixed, layer_bytes)
    for copy, other in zip(found, mixed, strict=True):
        assert (copy.layer, copy.source) == (other.layer, other.source)
        assert len(set(copy.targets)) == len(copy.targets) == len(other.targets)
        assert not {*copy.targets} & {*plan.holders(copy.layer)}


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(1, 4), st.integers(2, 4))
def test_no_layer_is_in_fewer_racks_than_with_mixed(
    shape: list[int], copies: int, rack: int
) -> None:
    """Which has it in as many as can be."""
    plan = shaped_plan(tuple(shape), 20)
    num_nodes = len(plan.nodes)
    copies, racks = min(copies, num_nodes), racks_of(num_nodes, rack)
    found = optimised_copies(plan, copies=copies, layer_bytes=UNEQUAL, domains=racks)

    mixed = of_mixed(plan, copies=copies, layer_bytes=UNEQUAL, domains=racks)
    for kept_by, other in zip(
        keeping_places(plan, found), keeping_places(plan, mixed), strict=True
    ):
        assert len({node // rack for node in kept_by}) >= len({node // rack for node in other})


def test_racks_leave_it_with_fewer_sets_than_mixed() -> None:
    """Of a pipeline of eight nodes in racks of four, mixed has copies wherever least is kept in
    the other rack; pairs across racks survive two losses more often, and a rack as mixed does."""
    plan, racks = shaped_plan((8,), 8), racks_of(8, 4)
    found = optimised_copies(plan, copies=2, layer_bytes=EQUAL, domains=racks)
    mixed = of_mixed(plan, copies=2, layer_bytes=EQUAL, domains=racks)

    assert all(copy.source // 4 != copy.targets[0] // 4 for copy in found)
    assert survives(plan, found, 2) > survives(plan, mixed, 2)


def test_layers_of_other_holders_are_kept_by_the_same_nodes() -> None:
    """In two pipelines of four nodes, at equal load: two sets, where mixed has eight."""
    plan = shaped_plan((4, 4), 8)
    found = optimised_copies(plan, copies=3, layer_bytes=EQUAL)
    mixed = of_mixed(plan, copies=3, layer_bytes=EQUAL)

    sets = [sorted(nodes) for nodes in minimal(keeping_places(plan, found))]
    assert sets == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert len(minimal(keeping_places(plan, mixed))) == 8
    assert [survives(plan, one, 4) for one in (found, mixed)] == [68 / 70, 62 / 70]


def test_nodes_that_are_gone_count_in_no_rack() -> None:
    """Nodes keep their numbers when others are lost, and racks are told by them."""
    pipelines = shaped_plan((3, 3), 6).pipelines[1:]
    plan, racks = plain_plan(1, pipelines, (6,)), ((0, 1, 2), (3, 4), (5, 9))
    found = optimised_copies(plan, copies=2, layer_bytes=EQUAL, domains=racks)

    assert plan.nodes == (3, 4, 5)
    for copy in found:
        assert {copy.source, *copy.targets} not in ({3, 4}, {4, 3})


@pytest.mark.parametrize(
    ("shape", "seconds"),
    [
        ((8, 8, 8, 8), PLACED_S_MAX),
        ((9, 11, 12), PLACED_S_MAX),
        ((30, 2), PLACED_S_MAX),
        ((10,) * 100, THOUSAND_S_MAX),
        ((7,) * 100 + (6,) * 50, THOUSAND_S_MAX),
    ],
)
def test_copies_are_placed_while_all_wait(shape: tuple[int, ...], seconds: float) -> None:
    """Three times what it takes at most."""
    plan = shaped_plan(shape, sum(shape))
    racks = racks_of(sum(shape), 4)
    _, cpu_s = quickest(
        lambda: optimised_copies(plan, copies=2, layer_bytes=EQUAL, domains=racks), limit_s=seconds
    )

    assert cpu_s < seconds
