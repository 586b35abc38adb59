"""What a transition costs."""

from dataclasses import replace

import pytest

from helpers.jobs import shaped_plan
from helpers.strategies import MEBIBYTE, layer_profile, model_profile
from planaria.core.cluster import ClusterState, Node
from planaria.core.plan import Link, Transfer, Transition
from planaria.policies.building import (
    downtime_s,
    fastest_transfers,
    transfer_s,
    with_near_sources,
)
from planaria.policies.policy import Prices, profile_prices
from planaria.policies.renaming import Renaming, TransferTimes
from planaria.restorer.strategies import LEAST_BYTES

PRICES = Prices(
    links={"intra_node": Link(0.0, 1000.0), "inter_node": Link(0.5, 100.0)},
    layer_bytes=(100, 200),
    regroup_s=3.0,
)


def test_downtime_is_regrouping_and_what_the_busiest_link_needs() -> None:
    """Ranks 0 and 1 share a node of two devices: their link is the fast one."""
    within = Transfer(1, 0, 1, 200)  # 0.2 s in a node, 2.5 s between nodes.
    transfers = (Transfer(0, 0, 2, 100), Transfer(1, 2, 4, 200), within)

    assert downtime_s(transfers, PRICES, devices_per_node=2) == pytest.approx(3.0 + 2.5)
    # Node 0 sends 300 bytes, and so does node 2 receive and send.
    assert downtime_s(transfers, PRICES, devices_per_node=1) == pytest.approx(3.0 + 3.5)
    assert downtime_s((within,), PRICES, devices_per_node=2) == pytest.approx(3.0 + 0.2)
    assert downtime_s((), PRICES, devices_per_node=1) == 3.0


def test_layers_come_from_other_failure_domains_over_their_links() -> None:
    """Most pipelines lie within one, so whoever holds a lost layer is in another."""
    links = {**PRICES.links, "inter_domain": Link(0.5, 10.0)}
    far = replace(PRICES, links=links)
    transfer = Transfer(0, 0, 1, 100)

    assert downtime_s((transfer,), far, devices_per_node=1) == pytest.approx(3.0 + 10.5)
    assert downtime_s((transfer,), far, devices_per_node=2) == pytest.approx(3.0 + 0.1)


def test_each_transfer_takes_the_link_between_its_two_nodes() -> None:
    """Nodes 0 and 1 are in one domain, node 2 in another; what node 0 sends near and far shares its
    direction out."""
    links = {**PRICES.links, "inter_domain": Link(0.5, 10.0)}
    prices = replace(PRICES, links=links, domains={0: "left", 1: "left", 2: "right"})
    near, far = Transfer(0, 0, 1, 100), Transfer(0, 0, 2, 100)

    assert downtime_s((near,), prices, devices_per_node=1) == pytest.approx(3.0 + 1.5)
    assert downtime_s((far,), prices, devices_per_node=1) == pytest.approx(3.0 + 10.5)
    assert downtime_s((near, far), prices, devices_per_node=1) == pytest.approx(3.0 + 12.0)
    apart = Transfer(0, 1, 0, 100)
    assert downtime_s((apart, far), prices, devices_per_node=1) == pytest.approx(3.0 + 10.5)


@pytest.mark.parametrize(("far_bytes_per_s", "sources"), [(10.0, [1]), (200.0, [1, 2])])
def test_layers_come_from_near_holders_if_that_is_faster(
    far_bytes_per_s: float, sources: list[int]
) -> None:
    """Node 1 is near and node 2 far; where its link is no slower, both send."""
    plan, size = shaped_plan((1, 1, 1), 6), 1 << 24
    links = {
        kind: Link(0.0, 1e6 * bytes_per_s)
        for kind, bytes_per_s in (("inter_node", 100.0), ("inter_domain", far_bytes_per_s))
    }
    domains = {0: "left", 1: "left", 2: "right"}
    prices = replace(PRICES, links=links, layer_bytes=(size,) * plan.num_layers, domains=domains)
    held = (frozenset(range(plan.num_layers)),)
    cluster = ClusterState(1, (Node(0, (frozenset(),)), Node(1, held), Node(2, held)))

    moved = fastest_transfers(plan, cluster, prices, LEAST_BYTES)

    assert sorted({transfer.source for transfer in moved}) == sources


def test_an_answer_that_is_renamed_is_priced_by_its_own_pairs() -> None:
    """The same layers move between two nodes of a domain, and between nodes of two."""
    links = {**PRICES.links, "inter_domain": Link(0.5, 10.0)}
    prices = replace(PRICES, links=links, domains={0: "left", 1: "left", 2: "right"})
    plan = shaped_plan((1, 1), 6)
    after = replace(plan, epoch=1)
    transition = Transition(
        before=plan,
        after=after,
        rounds=((Transfer(0, 0, 1, 100),),),
        downtime_s=4.5,
        iteration_s=1.0,
        redone_samples=0,
        policy="any",
        answer="any",
    )
    times = TransferTimes()

    def renamed_s(node_of: dict[int, int]) -> float:
        renaming = Renaming(plan, node_of, epoch=1, times=times)
        return renaming.transition(transition, redone_samples=0, prices=prices).downtime_s

    assert renamed_s({0: 1, 1: 0}) == pytest.approx(3.0 + 1.5)
    assert renamed_s({0: 1, 1: 2}) == pytest.approx(3.0 + 10.5)


@pytest.mark.parametrize(("far_bytes_per_s", "source"), [(10.0, 1), (1e4, 2)])
def test_an_answer_for_other_nodes_takes_near_holders_if_that_is_faster(
    far_bytes_per_s: float, source: int
) -> None:
    """It was found where domains did not matter. Its price follows."""
    plan = shaped_plan((1, 1, 1), 6)
    links = {"inter_node": Link(0.0, 100.0), "inter_domain": Link(0.0, far_bytes_per_s)}
    prices = replace(PRICES, links=links, domains={0: "left", 1: "left", 2: "right"})
    held = (frozenset(range(plan.num_layers)),)
    cluster = ClusterState(1, (Node(0, (frozenset(),)), Node(1, held), Node(2, held)))
    moved = (Transfer(0, 2, 0, 300, 0, 1), Transfer(0, 2, 0, 300, 1, 2), Transfer(1, 1, 0, 100))
    found = Transition(
        before=plan,
        after=replace(plan, epoch=1),
        rounds=(moved,),
        downtime_s=3.0 + transfer_s(moved, prices, devices_per_node=1),
        iteration_s=1.0,
        redone_samples=0,
        policy="any",
        answer="any",
    )

    near = with_near_sources(found, cluster, prices)

    assert {x.source for transfers in near.rounds for x in transfers if not x.layer} == {source}
    transfers = [transfer for transfers in near.rounds for transfer in transfers]
    assert {(x.layer, x.target, x.first_chunk) for x in transfers} == {
        (x.layer, x.target, x.first_chunk) for x in moved
    }
    seconds = transfer_s(transfers, prices, devices_per_node=1)
    assert near.downtime_s == pytest.approx(3.0 + seconds)
    assert seconds <= transfer_s(moved, prices, devices_per_node=1)


def test_prices_count_parameters_and_optimizer_state() -> None:
    """A layer without its optimizer state could not go on with the same bits."""
    layers = (layer_profile("a", 0.1), layer_profile("b", 0.1, parameter_bytes=MEBIBYTE))
    profile = model_profile(layers)

    prices = profile_prices(profile, regroup_s=0.25)

    assert prices.layer_bytes == (12 * MEBIBYTE, 3 * MEBIBYTE)
    assert (prices.links, prices.regroup_s) == (profile.links, 0.25)
