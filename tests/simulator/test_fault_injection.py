"""Whom drawn faults strike."""

from random import Random
from types import SimpleNamespace
from typing import cast

import pytest

from planaria.simulator.fault_draws import AT_PLACE, AT_PREVIOUS_PLACE, Fault, FaultKind
from planaria.simulator.fault_injection import FaultInjection
from planaria.simulator.loop import Loop
from planaria.simulator.network import Network
from planaria.simulator.simulated_cluster import LAUNCHER, SimulatedCluster


def cluster_of(num_nodes: int) -> SimpleNamespace:
    """What a cut needs of a cluster."""
    loop = Loop()
    return SimpleNamespace(
        loop=loop,
        network=Network(loop, Random(0)),
        agents={node: SimpleNamespace(workers=[None]) for node in range(num_nodes)},
        place_callbacks=[],
        ended=None,
        disk=SimpleNamespace(model=SimpleNamespace(write_s=0.0)),
        log_event=lambda *_: None,
    )


@pytest.mark.parametrize(
    ("node", "at"),
    [(2, 2), (AT_PLACE, 2), (AT_PREVIOUS_PLACE, 2), (AT_PLACE, LAUNCHER), (2, LAUNCHER)],
)
def test_a_cut_always_parts_two_nodes(node: int, at: int) -> None:
    """Also where the node at the fault's place is the other one of the cut, or is the coordinator;
    it cut nobody then, or a node from the coordinator."""
    cluster = cluster_of(4)
    first = Fault(
        kind=FaultKind.SLOW,
        node=AT_PLACE,
        other=0,
        duration_s=1.0,
        breaks=False,
        place="a",
        count=1,
    )
    cut = Fault(
        kind=FaultKind.CUT, node=node, other=2, duration_s=1.0, breaks=False, place="b", count=1
    )
    FaultInjection(cast("SimulatedCluster", cluster), (first, cut))
    for place in ("a", "b"):
        for on_place in tuple(cluster.place_callbacks):
            on_place(place, at)
    cluster.loop.run(until_s=0.5, is_over=lambda: False)

    parted = [
        (a, b) for a in range(LAUNCHER, 4) for b in range(a + 1, 4) if cluster.network.is_cut(a, b)
    ]
    assert len(parted) == 1
    assert 2 in parted[0]
    assert LAUNCHER not in parted[0]
