"""Nodes that reach the head but not one another: who has to go, and what is never given up."""

from collections.abc import Callable, Collection
from itertools import combinations, pairwise

import pytest

from helpers.coordinated import FIRST, LEASE_S, NOW_S, of_type, small_rules
from helpers.fake_cluster import FakeCluster
from helpers.jobs import NUM_LAYERS, shaped_plan
from planaria.coordinator.broken_links import BROKEN_LINKS_MAX
from planaria.coordinator.commands import End, Publish, Tick
from planaria.core.kinds import Ending
from planaria.core.messages import PeerUnreachable
from planaria.core.plan import Plan

RULES = small_rules()
WAIT_S = RULES.job.cluster.wait_s
# Ranks 0 and 2 hold layers 0 to 4, ranks 1 and 3 the others.
PLAN = shaped_plan((2, 2), 6)

Pair = tuple[int, int]


def linked(plan: Plan) -> set[Pair]:
    """The pairs of ranks that exchange activations or sums of gradients."""
    pairs = {
        (min(a.rank, b.rank), max(a.rank, b.rank))
        for route in plan.routes
        for a, b in pairwise(route)
    }
    held = plan.layers_by_rank
    return pairs | {(a, b) for a, b in combinations(sorted(held), 2) if {*held[a]} & {*held[b]}}


class CutCluster:
    """A cluster that has trained two iterations, and in whose network pairs of nodes are cut."""

    def __init__(self, *cut: Pair, plan: Plan = PLAN) -> None:
        self.cluster = FakeCluster(RULES, plan)
        self.cluster.begin()
        for iteration in range(FIRST, FIRST + 2):
            self.cluster.train(iteration)
        self.cut = {*cut}
        self.now_s = NOW_S
        self._broken: set[Pair] = set()
        for number, node in self.cluster.nodes.items():
            node.is_linked = self._link_check(number)

    @property
    def nodes(self) -> tuple[int, ...]:
        return self.cluster.state.nodes

    @property
    def ending(self) -> End | None:
        ends = of_type(self.cluster.commands, End)
        return ends[-1] if ends else None

    def _link_check(self, node: int) -> Callable[[Plan], bool]:
        """Notes the links of a node that cannot be made, and returns whether there are none."""

        def check(plan: Plan) -> bool:
            broken = {pair for pair in linked(plan) & self.cut if node in pair}
            self._broken |= broken
            return not broken

        return check

    def breaks(self) -> bool:
        """Ends the epoch if links are broken; returns whether there are any.

        Those of a cut that has healed break until they are made anew.
        """
        broken = self._broken | (linked(self.cluster.state.plan) & self.cut)
        self._broken = set()
        self.complain(*sorted(broken))
        return bool(broken)

    def complain(self, *pairs: Pair) -> None:
        """Both ranks of each pair complain of the other one, and a lease passes."""
        epoch = self.cluster.state.epoch
        for a, b in pairs:
            for rank, peer in ((a, b), (b, a)):
                reason = f"lost rank {peer}"
                complaint = PeerUnreachable(rank=rank, epoch=epoch, peer=peer, reason=reason)
                self.cluster.hear(complaint, now_s=self.now_s)
        self.now_s += 1.1 * LEASE_S
        self.cluster.hear(Tick(), now_s=self.now_s)

    def break_until_none_breaks(self) -> int:
        """The number of epochs that ended; at most twenty."""
        return next(number for number in range(20) if not self.breaks())


def sides(*nodes: int) -> Collection[Pair]:
    """The pairs that a cut between these nodes and the others parts."""
    others = {*PLAN.nodes} - {*nodes}
    return {(min(a, b), max(a, b)) for a in nodes for b in others}


def test_links_that_break_once_cost_no_node() -> None:
    """They are made anew."""
    network = CutCluster((0, 2))
    network.breaks()
    network.cut = set()

    assert network.break_until_none_breaks() == 1
    assert network.nodes == PLAN.nodes
    network.cluster.train(FIRST + 2)
    assert network.cluster.state.troubles.unlinked == frozenset()


def test_iterations_that_an_outcome_commits_forgive_no_broken_link() -> None:
    """Links may break each time after ranks have got the vector: all would recover for ever."""
    network, end = CutCluster(), FIRST + 2 + BROKEN_LINKS_MAX
    for iteration in range(FIRST + 2, end):
        for number in (0, 2, 3):
            network.cluster.hear(*network.cluster.nodes[number].trains(iteration))
        network.complain((0, 1), (1, 2), (1, 3))

    assert network.cluster.state.commits.next_iteration == end
    assert network.nodes == (0, 2, 3)


@pytest.mark.parametrize("nodes", [(0, 1), (2, 3)])
def test_of_two_sides_that_both_hold_all_layers_one_goes_on(nodes: tuple[int, ...]) -> None:
    """Whoever goes first, the next one to go is on the same side: it reaches nobody any more."""
    network = CutCluster(*sides(*nodes))

    assert network.break_until_none_breaks() == BROKEN_LINKS_MAX + 1
    assert network.nodes in ((0, 1), (2, 3))
    network.cluster.train(FIRST + 2)
    assert network.ending is None


def test_a_node_that_reaches_nobody_goes() -> None:
    """Whatever its number."""
    network = CutCluster(*sides(1))

    assert network.break_until_none_breaks() == BROKEN_LINKS_MAX
    assert network.nodes == (0, 2, 3)


def test_the_complaints_of_all_epochs_count() -> None:
    """A rank complains of the first link that breaks, and in each epoch that may be another one."""
    network = CutCluster()
    for pair in ((0, 1), (1, 2), (1, 3)):
        network.complain(pair)

    assert network.nodes == (0, 2, 3)


def test_nodes_that_wait_come_in_after_a_commit() -> None:
    """They may be cut off, too: one that comes from the machine of a lost node is."""
    network = CutCluster(*sides(3))
    network.breaks()
    network.cluster.join(4)
    while network.breaks():
        assert 4 not in network.nodes

    assert network.nodes == (0, 1, 2)
    network.cluster.train(FIRST + 2)
    network.cluster.lose(2)
    assert network.nodes == (0, 1, 4)


@pytest.mark.parametrize("num_failures", [0, 1])
def test_a_machine_that_failed_before_is_left_out_at_once(num_failures: int) -> None:
    """Each time that it comes back it would stop the others for three epochs."""
    network = CutCluster()
    network.cluster.join(4)
    network.cluster.lose(3)
    network.cluster.set_failures({"machine-4": (num_failures, network.now_s)})
    network.complain((2, 4))

    assert network.nodes == ((0, 1, 2) if num_failures else (0, 1, 2, 4))


def test_no_node_goes_without_which_too_few_are_left() -> None:
    """Each of the two holds all layers, but n0 = 2."""
    network = CutCluster((0, 1), plan=shaped_plan((1, 1), 6))
    for _ in range(10):
        network.breaks()

    assert network.nodes == (0, 1)
    assert network.ending is None


def test_the_only_holder_of_a_layer_stays_until_the_cut_heals() -> None:
    """Each side lacks layers of the other, so without either all would be lost."""
    network = CutCluster(*sides(0, 2))
    for _ in range(10):
        assert network.breaks()
    held = [network.cluster.nodes[node].layers for node in network.nodes]
    assert {layer for layers in held for layer in layers} == {*range(NUM_LAYERS)}
    assert network.ending is None

    network.cut = set()
    assert network.break_until_none_breaks() == 1
    network.cluster.train(FIRST + 2)
    assert network.cluster.state.commits.next_iteration == FIRST + 3


def test_layers_that_a_node_has_received_for_a_new_plan_count() -> None:
    """Node 1 was the only holder of some, but node 2 has reached it."""
    network = CutCluster(*combinations(PLAN.nodes, 2))
    network.cluster.lose(3)
    network.complain((0, 1))
    network.cut = {(0, 1)}
    for _ in range(BROKEN_LINKS_MAX - 1):
        network.complain((0, 1))

    assert network.nodes == (0, 2)


def test_where_the_cut_does_not_heal_in_time_the_live_layers_are_saved() -> None:
    """No rank needs another one for that."""
    network = CutCluster(*sides(0, 2))
    while network.ending is None and network.now_s < NOW_S + 2 * WAIT_S:
        network.breaks()

    assert network.now_s > NOW_S + WAIT_S
    assert network.ending is not None
    assert network.ending.ending is Ending.LOST
    assert "none of them can be left out" in network.ending.reason
    assert [save.iteration for save in of_type(network.cluster.commands, Publish)] == [FIRST + 2]
