"""Copies taken under one plan give the same states under any other."""

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from random import Random
from unittest.mock import Mock

import numpy as np
import pytest

from helpers.jobs import NUM_LAYERS, shapes, template, tiny_job
from helpers.linked_ranks import TIMEOUT_S, TOKEN, begin_all, link_ranks, on_all, wait_until
from planaria.checkpoint.disk.tiers import tier_of
from planaria.checkpoint.memory.arena_file import arena_fd
from planaria.core.cluster import ClusterState, Node
from planaria.core.copies import Label
from planaria.core.job import CheckpointConfig
from planaria.core.messages import StartEpoch
from planaria.core.plan import Pipeline, Plan, plain_plan
from planaria.core.specs import NodeSpec
from planaria.engine.comm.host import HostComm
from planaria.engine.copying import Copying
from planaria.engine.entry import provide_layers
from planaria.engine.prepare import split_model
from planaria.engine.stage import RankStage
from planaria.engine.staging import State
from planaria.placement.layer_copies import layer_copies
from planaria.placement.placement import paper_placement
from planaria.restorer.sources import balanced_transfers, transfer_rounds
from planaria.transport.links import Links

pytestmark = pytest.mark.faults

AGE = 5
LABEL = Label(-1, 0, AGE)
NUM_NODES = 9
LAYER_BYTES = (1 << 12,) * NUM_LAYERS


@dataclass
class Rank:
    """A node of one device: its links, and the memory of its copies."""

    links: Links
    spec: NodeSpec
    copying: Copying

    def stage(self, *, seed: int) -> RankStage:
        """That holds nothing yet; what it makes from another seed would be another state."""
        split = split_model(self.spec.job.model, seed=seed, vocabulary_size=0, sequence_length=0)
        return RankStage(split, training=self.spec.job.training)


@contextmanager
def nodes(directory: Path) -> Iterator[list[Rank]]:
    """All nodes there are, linked with each other."""
    job = replace(
        tiny_job("plain_sequential", directory),
        checkpoint=CheckpointConfig(copies=2, buffer_bytes=1000, directory=str(directory)),
    )
    with link_ranks(NUM_NODES) as ranks, ExitStack() as stack:
        found = []
        for links in ranks:
            fd = arena_fd()
            stack.callback(os.close, fd)
            spec = NodeSpec(
                job=job,
                node=links.rank,
                token=TOKEN,
                coordinator=("", 0),
                worker="",
                cache_directory="",
                copies_fd=fd,
            )
            copying = Copying(spec, links, send=print, timeout_s=TIMEOUT_S)
            found.append(Rank(links, spec, copying))
        yield found


def drawn_plan(rng: Random, epoch: int, num_nodes: int) -> Plan:
    """Pipelines of any depths on any nodes."""
    sizes = rng.choice(shapes(num_nodes))
    chosen = rng.sample(range(NUM_NODES), num_nodes)
    firsts = (0, *accumulate(sizes))
    pipelines = tuple(
        Pipeline(template(size), tuple(chosen[first : first + size]))
        for first, size in zip(firsts, sizes, strict=False)
    )
    return plain_plan(epoch, pipelines, (1,) * len(pipelines))


def trained(stage: RankStage, layers: frozenset[int]) -> dict[int, State]:
    """The stage holds these layers, with a state of the optimizer that is not that of a start."""
    stage.hold(layers, states={}, age=AGE)
    for layer, held in stage.layers.items():
        rng = np.random.default_rng(layer)
        state = {
            name: array + rng.random(array.shape).astype(array.dtype)
            for name, array in held.state().items()
        }
        held.load(state, age=AGE)
    return {layer: held.state() for layer, held in stage.layers.items()}


def copied(ranks: list[Rank], plan: Plan) -> dict[int, State]:
    """The state of all layers, once every copy of them is where it is to be."""
    placement = paper_placement(len(plan.nodes), 2, "mixed")
    copies = layer_copies(plan, copies=2, placement=placement, layer_bytes=LAYER_BYTES)
    start = StartEpoch(epoch=0, plan=plan, addresses={}, iteration=AGE, copies=copies)
    members = [rank for rank in ranks if rank.links.rank in plan.nodes]
    states: dict[int, State] = {}
    kept: dict[int, set[int]] = {n: set(layers) for n, layers in plan.held_by_rank.items()}
    for copy in copies:
        for target in copy.targets:
            kept[target].add(copy.layer)
    for rank in members:
        stage = rank.stage(seed=3)
        states |= trained(stage, plan.held_by_rank[rank.links.rank])
        comm = HostComm(rank.links, stage.device)
        rank.copying.enter(start, stage, comm, is_planned=False)
    for rank in members:
        wait_until(partial(_has, rank, kept[rank.links.rank]))
    for rank in members:
        rank.links.abort("the copies are complete", first_epoch=1)
        rank.copying.leave()
    return states


def _has(rank: Rank, layers: set[int]) -> bool:
    return _versions(rank) == layers


def _versions(rank: Rank) -> set[int]:
    return {layer for layer, labels in rank.copying.versions.items() if LABEL in labels}


def left(rng: Random, ranks: list[Rank]) -> Mapping[int, frozenset[int]]:
    """By node, of which layers it has copies; some have lost theirs, but no layer all of them."""
    copies = {rank.links.rank: frozenset(_versions(rank)) for rank in ranks}
    for node in rng.sample(range(NUM_NODES), NUM_NODES):
        rest = [layers for other, layers in copies.items() if other != node]
        if len(frozenset[int]().union(*rest)) == NUM_LAYERS:
            copies[node] = frozenset()
    return copies


def restored(rng: Random, ranks: list[Rank], epoch: int, directory: Path) -> dict[int, RankStage]:
    """By node of another plan, what it holds once all have gone back to the copies."""
    plan, held = drawn_plan(rng, epoch, rng.randint(2, NUM_NODES)), left(rng, ranks)
    members = tuple(Node(node, (held[node],)) for node in range(NUM_NODES))
    moved = balanced_transfers(plan, ClusterState(epoch, members), layer_bytes=LAYER_BYTES)
    start = StartEpoch(
        epoch=epoch,
        plan=plan,
        addresses={},
        iteration=AGE,
        rounds=transfer_rounds(moved),
        since=epoch,
        copied=LABEL,
    )
    stages = [rank.stage(seed=4) for rank in ranks]

    def restore(links: Links) -> None:
        rank, stage, tier = ranks[links.rank], stages[links.rank], tier_of(str(directory))
        provide_layers(start, links, stage, tier, rank.copying, storage=None, timeout_s=TIMEOUT_S)

    begin_all([rank.links for rank in ranks], epoch)
    on_all([rank.links for rank in ranks], restore)
    for node, layers in plan.held_by_rank.items():
        assert stages[node].layers.keys() == layers
    return {node: stages[node] for node in plan.held_by_rank}


@pytest.mark.parametrize(
    ("seed", "num_plans"),
    [(0, 6), *(pytest.param(seed, 20, marks=pytest.mark.long) for seed in range(5))],
)
def test_copies_restore_under_any_other_plan(seed: int, num_plans: int, tmp_path: Path) -> None:
    """On two to nine nodes, of which as few as can be still have copies; the seed tells all."""
    rng = Random(seed)
    with nodes(tmp_path) as ranks:
        states = copied(ranks, drawn_plan(rng, 0, rng.randint(2, NUM_NODES)))
        assert states.keys() == set(range(NUM_LAYERS))
        for epoch in range(1, num_plans + 1):
            for stage in restored(rng, ranks, epoch, tmp_path).values():
                for layer, held in stage.layers.items():
                    assert_equal(held.state(), states[layer])


def test_copies_that_are_being_sent_outlast_the_first_version_of_the_epoch(tmp_path: Path) -> None:
    """Another version is to be kept, but what others still receive must not be overwritten. It is
    dropped once an iteration is applied, which proves that all have their layers."""
    plan = plain_plan(1, (Pipeline(template(1), (0,)),), (1,))
    vector = Mock(**{"has_all_copies.return_value": True, "votes.uncopied": ()})
    with nodes(tmp_path) as ranks:
        rank, *_ = ranks
        copied(ranks, plain_plan(0, (Pipeline(template(2), (0, 1)),), (1,)))
        stage = rank.stage(seed=3)
        trained(stage, plan.held_by_rank[0])
        start = StartEpoch(
            epoch=1, plan=plan, addresses={}, iteration=AGE, since=1, copied=LABEL, kept=None
        )
        begin_all([rank.links for rank in ranks], 1)
        rank.copying.enter(start, stage, HostComm(rank.links, stage.device), is_planned=False)
        assert _versions(rank) == plan.held_by_rank[0]

        wait_until(lambda: rank.copying.votes(AGE) == (1, 0))
        rank.copying.on_iteration_applied(vector, plan, age=AGE + 1, goes_on=True)
        assert not _versions(rank)
        rank.links.abort("the test is over", first_epoch=2)
        rank.copying.leave()


def assert_equal(found: State, expected: State) -> None:
    """Bit for bit, parameters and optimizer."""
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert array.tobytes() == found[name].tobytes(), name
