"""Which ranks keep copies of which layers."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from helpers.jobs import shaped_plan
from planaria.core.copies import LayerCopy
from planaria.core.plan import Plan
from planaria.placement.layer_copies import layer_copies, shard_copies
from planaria.placement.placement import paper_placement

BYTES = (300, 100, 100, 100, 100, 100, 100, 100, 100, 500)


def copied(plan: Plan, copies: int) -> tuple[LayerCopy, ...]:
    """Placed as Gemini does."""
    copies = min(copies, len(plan.nodes))
    placement = paper_placement(len(plan.nodes), copies, "mixed")
    return layer_copies(plan, copies=copies, placement=placement, layer_bytes=BYTES)


def test_in_one_pipeline_nodes_keep_each_others_layers() -> None:
    """Groups of two, as where nobody has a replica."""
    plan = shaped_plan((4,), 6)
    neighbour = {0: 1, 1: 0, 2: 3, 3: 2}

    for copy in copied(plan, 2):
        assert (copy.source,) == plan.holders(copy.layer)
        assert copy.targets == (neighbour[copy.source],)


def test_a_copy_is_not_where_the_layer_is_anyway() -> None:
    """Ranks 0 and 2 hold the lower half, so a copy of it is on one of the others."""
    for copy in copied(shaped_plan((2, 2), 6), 2):
        assert {copy.source, *copy.targets} <= {0, 1, 2, 3}
        assert copy.source % 2 == (copy.layer >= 5)
        assert all(target % 2 != copy.source % 2 for target in copy.targets)
        assert len(copy.targets) == 1


def test_where_all_nodes_hold_a_layer_there_is_nobody_to_send_it_to() -> None:
    """All of them keep a copy of their own."""
    assert all(not copy.targets for copy in copied(shaped_plan((1, 1, 1), 6), 3))


shapes = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@given(shapes, st.integers(1, 5))
def test_each_layer_has_as_many_copies_as_it_can_have(shape: list[int], copies: int) -> None:
    """Sent by one of its holders, to other nodes, none of which holds it."""
    plan = shaped_plan(tuple(shape), 12)
    found = copied(plan, copies)

    assert [copy.layer for copy in found] == list(range(10))
    for copy in found:
        holders = set(plan.holders(copy.layer))
        assert copy.source in holders
        assert not holders.intersection(copy.targets)
        assert len(set(copy.targets)) == len(copy.targets)
        assert len(copy.targets) == min(copies - 1, len(plan.nodes) - len(holders))


@given(shapes)
def test_holders_of_the_same_layers_send_about_as_much(shape: list[int]) -> None:
    """No one more than the largest layer ahead of another."""
    plan = shaped_plan(tuple(shape), 12)
    sent = Counter[int]()
    for copy in copied(plan, 2):
        sent[copy.source] += BYTES[copy.layer] * len(copy.targets)

    for rank, layers in plan.layers_by_rank.items():
        for other, others in plan.layers_by_rank.items():
            if layers == others:
                assert abs(sent[rank] - sent[other]) <= max(BYTES[layer] for layer in layers)


def test_copies_are_not_in_the_domain_of_a_holder() -> None:
    """Groups of two would be in one rack each; so each neighbour's copies go to another rack."""
    racks = ((0, 1), (2, 3))
    placement = paper_placement(4, 2, "mixed")
    plan = shaped_plan((4,), 6)
    for copy in layer_copies(plan, copies=2, placement=placement, layer_bytes=BYTES, domains=racks):
        assert {copy.source // 2, *(target // 2 for target in copy.targets)} == {0, 1}


@given(shapes, st.integers(1, 4), st.integers(1, 3))
def test_copies_share_no_domain_where_there_are_enough(
    shape: list[int], copies: int, rack: int
) -> None:
    """All those that are sent, and the holders; and there are as many as without domains."""
    plan = shaped_plan(tuple(shape), 12)
    num_nodes = len(plan.nodes)
    domain_of = {node: node // rack for node in plan.nodes}
    racks = [[n for n in plan.nodes if n // rack == index] for index in set(domain_of.values())]
    placement = paper_placement(num_nodes, min(copies, num_nodes), "mixed")
    found = layer_copies(plan, copies=copies, placement=placement, layer_bytes=BYTES, domains=racks)
    for copy in found:
        taken = {domain_of[node] for node in plan.holders(copy.layer)}
        free = len(racks) - len(taken)
        others = [domain_of[target] for target in copy.targets if domain_of[target] not in taken]
        assert len(set(others)) == min(free, len(copy.targets))
        assert len(copy.targets) == min(copies - 1, num_nodes - len(plan.holders(copy.layer)))


def test_copies_that_a_domain_keeps_from_their_place_are_where_least_is_kept() -> None:
    """Of a pipeline of eight nodes in two racks: none of a rack the largest layer ahead."""
    plan, racks = shaped_plan((8,), 8), (range(4), range(4, 8))
    kept = Counter[int]()
    placement = paper_placement(8, 2, "mixed")
    for copy in layer_copies(plan, copies=2, placement=placement, layer_bytes=BYTES, domains=racks):
        for target in copy.targets:
            kept[target] += BYTES[copy.layer]

    for rack in racks:
        assert max(kept[node] for node in rack) - min(kept[node] for node in rack) <= max(BYTES)
    assert set(kept) == set(range(8))


ranks_of_nodes = st.lists(st.sampled_from("abcd"), min_size=1, max_size=8)


@given(ranks_of_nodes, st.integers(1, 5))
def test_a_shard_is_kept_on_as_many_nodes_as_is_asked_for(nodes: list[str], copies: int) -> None:
    """Also where nodes have different numbers of ranks, in any order."""
    num_nodes = len({*nodes})
    placement = paper_placement(num_nodes, min(copies, num_nodes), "mixed")
    found = shard_copies(nodes, placement)

    assert [(copy.layer, copy.source) for copy in found] == [(n, n) for n in range(len(nodes))]
    for copy in found:
        kept_on = [nodes[rank] for rank in (copy.source, *copy.targets)]
        assert len(set(kept_on)) == len(kept_on) == min(copies, len(set(nodes)))


def test_shards_of_a_node_go_to_as_many_ranks_of_the_next() -> None:
    """So that all take part in sending and in keeping."""
    found = shard_copies(["a", "a", "b", "b", "c", "c"], paper_placement(3, 2, "ring"))

    assert [copy.targets for copy in found] == [(2,), (3,), (4,), (5,), (0,), (1,)]
