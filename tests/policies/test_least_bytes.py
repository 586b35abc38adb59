"""Whole recoveries move no byte more than any other assignment of nodes to places would.

In an answer whatever lies in a pipeline that stays as it is keeps its place. That costs nothing
where nodes hold what their plan gave them. Let P be the layers of such a place, which its node i
holds, and let another assignment give P to node x, which holds X, and place Q to node i. It moves
|P - X| + |Q - P| bytes for the two of them; with i back at P, x at Q lacks |Q - X| at most, and
Q - X lies in the union of the other two sets. So the brute force tries all nodes at all places.
After a recovery that was cut short nodes may hold more than one plan gave them, and a pipeline
that is whole is left in peace even so: there the brute force leaves it in peace, too.
"""

import random
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from helpers.losses import NUM_LAYERS, example_catalog, plan_of, prices
from planaria.core.cluster import ClusterState, Node, NodesLost, survivors
from planaria.core.plan import Plan, Transition
from planaria.planner.layout.instantiate import instantiations
from planaria.planner.plans import PlanCatalog
from planaria.policies.reinstantiate import GLOBAL, Reinstantiate

SEED = 20_261_121
NUM_JOBS = 120
JOBS = (
    *((3, 1, 1, 1), (4, 1, 1, 1), (5, 2, 1, 1), (6, 2, 1, 1), (6, 1, 2, 1), (7, 1, 1, 1)),
    *((7, 2, 1, 1), (7, 3, 1, 1), (7, 2, 2, 1), (4, 1, 1, 2), (6, 2, 1, 2), (7, 2, 1, 2)),
)  # Nodes, n0, f, devices of a node.


def test_recoveries_move_the_fewest_bytes_that_any_assignment_could() -> None:
    """Losses in a row from any first plan, with layers of any size; all answers."""
    answers: Counter[str] = Counter()
    num_cut_short = num_moving = 0
    for index in range(NUM_JOBS):
        rng = random.Random(f"{SEED} {index}")
        catalog, plan = first_plan(rng)
        layer_bytes = tuple(rng.choice((0, 1, 7, 10**6, 10**10)) for _ in range(NUM_LAYERS))
        cluster = ClusterState(plan.epoch, survivors(plan, (), epoch=plan.epoch).nodes)
        is_as_planned = True
        while True:
            lost = rng.sample(plan.nodes, rng.randint(1, min(2, len(plan.nodes))))
            left = tuple(node for node in cluster.nodes if node.node not in lost)
            cluster = ClusterState(plan.epoch + 1, left)
            found = Reinstantiate(catalog).propose(
                plan,
                cluster,
                NodesLost(tuple(lost), 0),
                replace(prices(catalog), layer_bytes=layer_bytes),
            )
            if not found:
                break
            for transition in found:
                where = f"seed {SEED}, job {index}, epoch {cluster.epoch}, {transition.answer}"
                moved_bytes = sum(t.num_bytes for moved in transition.rounds for t in moved)
                kept = () if is_as_planned else untouched(transition, cluster)
                assert moved_bytes == fewest_bytes(transition, cluster, layer_bytes, kept), where
                answers[transition.answer] += 1
                num_moving += moved_bytes > 0
            num_cut_short += not is_as_planned
            taken = rng.choice(found)
            is_as_planned = rng.random() < 0.7
            cluster = arrived(taken, cluster, rng, is_whole=is_as_planned)
            plan = taken.after
    assert answers.keys() == {"simple", "borrow", "merge", GLOBAL}
    assert min(answers.values()) > NUM_JOBS / 12
    assert num_cut_short > NUM_JOBS / 6
    assert num_moving > NUM_JOBS * 0.8


def first_plan(rng: random.Random) -> tuple[PlanCatalog, Plan]:
    """A plan of any shape that the job allows, its nodes in any order."""
    num_nodes, n0, f, devices_per_node = rng.choice(JOBS)
    catalog = example_catalog(num_nodes, n0=n0, f=f, devices_per_node=devices_per_node)
    if rng.random() < 0.5:
        catalog = replace(catalog, plans={})
    sizes = rng.choice(
        list(instantiations(num_nodes, tuple(catalog.templates), min_pipelines=f + 1))
    )
    return catalog, plan_of(catalog, sizes, rng.sample(range(num_nodes), num_nodes))


def arrived(
    taken: Transition, cluster: ClusterState, rng: random.Random, *, is_whole: bool
) -> ClusterState:
    """What nodes hold after the answer; of a recovery that was cut short, what they held and some
    of what was on its way."""
    if is_whole:
        return survivors(taken.after, (), epoch=taken.after.epoch)
    planned = survivors(taken.after, (), epoch=0).held_by_rank()
    nodes = tuple(
        Node(
            node.node,
            tuple(
                held | {n for n in planned.get(rank, ()) if rng.random() < 0.5}
                for rank, held in enumerate(node.held, start=node.node * len(node.held))
            ),
        )
        for node in cluster.nodes
    )
    return ClusterState(taken.after.epoch, nodes)


def untouched(transition: Transition, cluster: ClusterState) -> set[int]:
    """Nodes of pipelines that a local answer leaves as they are."""
    if transition.answer == GLOBAL:
        return set()
    kept = set(transition.before.pipelines) & set(transition.after.pipelines)
    alive = {node.node for node in cluster.nodes}
    assert all(alive.issuperset(pipeline.nodes) for pipeline in kept)
    return {node for pipeline in kept for node in pipeline.nodes}


def fewest_bytes(
    transition: Transition,
    cluster: ClusterState,
    layer_bytes: tuple[int, ...],
    kept: Collection[int],
) -> int:
    """Over all ways to give nodes to the places of the answer's templates, by trying all."""
    after = transition.after
    per_node = after.pipelines[0].template.devices_per_node
    held, needed = cluster.held_by_rank(), after.layers_by_rank
    order = [node for pipeline in after.pipelines for node in pipeline.nodes]

    def lacked_bytes(node: int, place: int) -> int:
        """What a node would lack where the answer has another one."""
        return sum(
            layer_bytes[layer]
            for device in range(per_node)
            for layer in needed[place * per_node + device]
            if layer not in held[node * per_node + device]
        )

    fixed = sum(lacked_bytes(node, node) for node in kept)
    places = [node for node in order if node not in kept]
    nodes = [node.node for node in cluster.nodes if node.node not in kept]
    if not places:
        return fixed
    costs: NDArray[np.int64] = np.array(
        [[lacked_bytes(node, place) for place in places] for node in nodes], dtype=np.int64
    )
    chosen = np.array(list(permutations(range(len(nodes)), len(places))))
    return fixed + int(costs[chosen, np.arange(len(places))].sum(axis=1).min())
