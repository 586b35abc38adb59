"""Who sends what, against every set of nodes that could be the busiest."""

import random
from collections import Counter, defaultdict
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.core.cluster import ClusterState, Node
from planaria.core.plan import (
    NUM_CHUNKS,
    Pipeline,
    PipelineTemplate,
    Plan,
    Stage,
    Transfer,
    plain_plan,
)
from planaria.restorer.sources import (
    WORTH_BYTES,
    balanced_transfers,
    least_sending,
    transfer_rounds,
)

SEED = 20_261_121
NUM_CASES = 300


def case(rng: random.Random) -> tuple[Plan, ClusterState, list[int]]:
    """Up to seven nodes of one or two devices that hold anything, of layers of any size; one node
    holds all."""
    num_layers, per_node, num_nodes = rng.randint(2, 12), rng.choice((1, 1, 2)), rng.randint(2, 7)
    nodes = []
    for node in range(num_nodes):
        share = rng.choice((0.0, 0.2, 0.5, 0.9)) if node else 1.0
        nodes.append(
            Node(
                node,
                tuple(
                    frozenset(layer for layer in range(num_layers) if rng.random() < share)
                    for _ in range(per_node)
                ),
            )
        )
    pipelines = []
    left = rng.sample(range(num_nodes), num_nodes)
    while left:
        size = rng.randint(1, min(len(left), num_layers // per_node or 1))
        devices = size * per_node
        if devices > num_layers:
            break
        ends = [*sorted(rng.sample(range(1, num_layers), devices - 1)), num_layers]
        stages = tuple(Stage(a, b, 1) for a, b in zip((0, *ends), ends, strict=False))
        pipelines.append(Pipeline(PipelineTemplate(stages, size), tuple(left[:size])))
        left = left[size:]
    layer_bytes = [rng.choice((0, 1, 7, 10**6, 10**10)) * NUM_CHUNKS for _ in range(num_layers)]
    plan = plain_plan(1, tuple(pipelines), (1,) * len(pipelines))
    return plan, ClusterState(1, tuple(nodes)), layer_bytes


def lacked(plan: Plan, cluster: ClusterState) -> list[tuple[int, int]]:
    held = cluster.held_by_rank()
    return sorted(
        (layer, rank)
        for rank, layers in plan.layers_by_rank.items()
        for layer in layers
        if layer not in held[rank]
    )


def test_each_part_comes_once_and_the_busiest_node_sends_the_least() -> None:
    """No set of nodes has less to send for each than the layers that only they hold."""
    rng = random.Random(SEED)
    num_shared = 0
    for index in range(NUM_CASES):
        plan, cluster, layer_bytes = case(rng)
        if not plan.pipelines:
            continue
        per_node = plan.pipelines[0].template.devices_per_node
        held = cluster.held_by_rank()
        where = f"seed {SEED}, case {index}"

        moves = balanced_transfers(plan, cluster, layer_bytes=layer_bytes)

        chunks: dict[tuple[int, int], list[int]] = defaultdict(list)
        sent: Counter[int] = Counter()
        for transfer in moves:
            assert transfer.layer in held[transfer.source], where
            chunks[transfer.layer, transfer.target] += range(
                transfer.first_chunk, transfer.end_chunk
            )
            if transfer.source // per_node != transfer.target // per_node:
                sent[transfer.source // per_node] += transfer.num_bytes
        assert sorted(chunks) == lacked(plan, cluster), where
        assert all(
            sorted(chunk_numbers) == list(range(NUM_CHUNKS)) for chunk_numbers in chunks.values()
        ), where
        num_shared += len(moves) > len(chunks)
        needs = []
        for layer, target in lacked(plan, cluster):
            nodes = {rank // per_node for rank, layers in held.items() if layer in layers}
            if target // per_node not in nodes:
                needs.append((sorted(nodes), layer_bytes[layer]))
        expected = brute_force_least(needs)
        found_least, _ = least_sending([tuple(n) for n, _ in needs], [size for _, size in needs])
        assert found_least == pytest.approx(expected, rel=1e-6, abs=1), where
        most_part = max((size for _, size in needs), default=0) / NUM_CHUNKS
        num_helped = sum(len(nodes) for nodes in {tuple(nodes) for nodes, _ in needs})
        more = num_helped * (most_part + WORTH_BYTES)
        assert max(sent.values(), default=0) <= expected * (1 + 1e-6) + more, where
    assert num_shared > 50


def brute_force_least(needs: list[tuple[list[int], int]]) -> float:
    every = sorted({node for nodes, _ in needs for node in nodes})
    return max(
        (
            sum(size for nodes, size in needs if set(nodes) <= set(some)) / count
            for count in range(1, len(every) + 1)
            for some in combinations(every, count)
        ),
        default=0.0,
    )


def test_sources_share_the_sending() -> None:
    """Two whole pipelines feed a third: neither of them sends more than the other, nor where it is
    one layer."""
    plan = plan_of_one_layer()
    nodes = (Node(0, (frozenset(),)), Node(1, (frozenset({0}),)), Node(2, (frozenset({0}),)))

    moved = balanced_transfers(plan, ClusterState(1, nodes), layer_bytes=(10**9,))

    assert [(t.source, t.num_bytes, t.first_chunk, t.end_chunk) for t in moved] == [
        (1, 5 * 10**8, 0, NUM_CHUNKS // 2),
        (2, 5 * 10**8, NUM_CHUNKS // 2, NUM_CHUNKS),
    ]


def test_what_is_little_comes_from_one_node() -> None:
    """A connection more takes longer."""
    plan = plan_of_one_layer()
    nodes = (Node(0, (frozenset(),)), Node(1, (frozenset({0}),)), Node(2, (frozenset({0}),)))

    (moved,) = balanced_transfers(plan, ClusterState(1, nodes), layer_bytes=(WORTH_BYTES,))

    assert (moved.num_bytes, moved.first_chunk, moved.end_chunk) == (WORTH_BYTES, 0, NUM_CHUNKS)


def plan_of_one_layer() -> Plan:
    return plain_plan(1, (Pipeline(PipelineTemplate((Stage(0, 1, 1),), 1), (0,)),), (1,))


@settings(max_examples=80)
@given(st.data())
def test_transfer_rounds_use_each_rank_once_a_round_each_way(data: st.DataObject) -> None:
    """All transfers are there, and fewer rounds than twice what the busiest rank has to do."""
    rank = st.integers(0, 5)
    moves = data.draw(
        st.lists(
            st.builds(Transfer, st.integers(0, 9), rank, rank, st.integers(0, 3)).filter(
                lambda transfer: transfer.source != transfer.target
            ),
            unique_by=lambda transfer: (transfer.layer, transfer.target),
        )
    )

    rounds = transfer_rounds(moves)

    assert sorted(transfer for transfers in rounds for transfer in transfers) == sorted(moves)
    for taken in rounds:
        assert len({transfer.source for transfer in taken}) == len(taken)
        assert len({transfer.target for transfer in taken}) == len(taken)
    sends = Counter(transfer.source for transfer in moves)
    receives = Counter(transfer.target for transfer in moves)
    busiest = max([*sends.values(), *receives.values()], default=1)
    assert len(rounds) < 2 * busiest


def test_transfers_between_different_ranks_run_in_one_round() -> None:
    """A ring of sends has no conflict: a rank sends and receives at the same time."""
    moves = [Transfer(0, node, (node + 1) % 4, 8) for node in range(4)]

    assert transfer_rounds(moves) == (tuple(moves),)


def test_layers_come_from_the_domain_of_their_target_where_it_has_them() -> None:
    """Whole, and from a holder; all other layers come from anywhere."""
    rng = random.Random(SEED)
    num_near = num_far = 0
    for index in range(NUM_CASES):
        plan, cluster, layer_bytes = case(rng)
        if not plan.pipelines:
            continue
        per_node = plan.pipelines[0].template.devices_per_node
        domains = {node.node: rng.choice("ab") for node in cluster.nodes if rng.random() < 0.8}
        held, where = cluster.held_by_rank(), f"seed {SEED}, case {index}"

        moves = balanced_transfers(plan, cluster, layer_bytes=layer_bytes, domains=domains)

        num_chunks: Counter[tuple[int, int]] = Counter()
        for transfer in moves:
            assert transfer.layer in held[transfer.source], where
            num_chunks[transfer.layer, transfer.target] += transfer.end_chunk - transfer.first_chunk
            domain = domains.get(transfer.target // per_node)
            near = [
                rank
                for rank, layers in held.items()
                if transfer.layer in layers and domains.get(rank // per_node) == domain
            ]
            assert not (domains and near) or transfer.source in near, where
            num_near += bool(near)
            num_far += not near
        assert sorted(num_chunks) == lacked(plan, cluster), where
        assert set(num_chunks.values()) <= {NUM_CHUNKS}, where
    assert min(num_near, num_far) > 50
