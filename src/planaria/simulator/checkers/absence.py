"""Nodes that no coordinator could answer: none was there, or it stood still, or its disk did before
it had admitted the node. An agent that nobody answers for two leases ends itself.
"""

from typing import Final

from planaria.simulator.cluster import SimulatedCluster
from planaria.simulator.modelled.agent import UNANSWERED
from planaria.simulator.scenario import LEASE_S

_LOOK_S: Final = 0.05
_ADMITTED_S: Final = 1.0  # In which a coordinator that is there admits a node, if its disk is idle.
_ANSWERED_S: Final = 0.5  # In which a node that has been admitted hears so.
# Of two leases: a tick from a heartbeat to the next, what messages take, and wrong clocks.
_SHORT_S: Final = 1.2


class Absence:
    """Looks every now and then who could have been answered."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster
        self._answerable_s: dict[int, float] = {}
        self._admitted_s: dict[int, float] = {}  # Since when those are that are now.
        self._idle_since_s = 0.0
        cluster.loop.after(_LOOK_S, self._look)

    def _look(self) -> None:
        cluster = self._cluster
        cluster.loop.after(_LOOK_S, self._look)
        leader, now_s = cluster.leader, cluster.loop.now_s
        process = leader.process
        is_there = leader.is_serving and process.is_alive and process.stopped_s < 0.0
        if not is_there or leader.is_writing:
            self._idle_since_s = now_s
        admitted = leader.admitted if is_there else ()
        self._admitted_s = {node: self._admitted_s.get(node, now_s) for node in admitted}
        if not is_there:
            return
        admits = now_s - self._idle_since_s > _ADMITTED_S
        for node, agent in cluster.agents.items():
            is_answered = now_s - self._admitted_s.get(node, now_s) > _ANSWERED_S
            if agent.process.is_alive and (admits or is_answered):
                self._answerable_s[node] = now_s

    def forsaken(self) -> frozenset[int]:
        """The nodes that ended themselves, for nobody could answer them."""
        agents = self._cluster.agents.items()
        return frozenset(
            node
            for node, agent in agents
            if agent.left == UNANSWERED
            and agent.left_s - self._answerable_s.get(node, 0.0) > 2.0 * LEASE_S - _SHORT_S
        )
