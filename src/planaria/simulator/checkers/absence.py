"""Records which nodes no coordinator could answer.

An agent that nobody answers for two leases (on another machine than the coordinator: for a lease
and its patience) ends itself. That is justified where no coordinator could answer it: there was
none, it stood still, it was cut off, or its disk stood still before the node was admitted.
"""

import math
from typing import Final

from planaria.protocol.agent_lease import reconnect_s
from planaria.simulator.modelled.agent import UNANSWERED
from planaria.simulator.scenario import LEASE_S
from planaria.simulator.simulated_cluster import LAUNCHER, SimulatedCluster

_CHECK_S: Final = 0.05
_ADMITTED_S: Final = 1.0  # Time in which a coordinator whose disk is idle admits a node.
_ANSWERED_S: Final = 0.5  # Time in which an admitted node hears of it.
# Time in which a node is back that was cut off: it tries again and again.
_BACK_S: Final = reconnect_s(LEASE_S, lost_s=math.inf, is_refused=False) + 0.25
# What an agent's wait may fall short of two leases: a tick between heartbeats, the time of
# messages, and wrong clocks.
_SHORT_S: Final = 1.2


class Absence:
    """Records, at regular intervals, which nodes the coordinator could have answered."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster
        self._answerable_s: dict[int, float] = {}
        self._admitted_s: dict[int, float] = {}  # Since when each admitted node is.
        self._cut_s: dict[int, float] = {}  # When each node was last cut off from it.
        self._idle_since_s = 0.0
        cluster.loop.after(_CHECK_S, self._check)

    def _check(self) -> None:
        cluster = self._cluster
        cluster.loop.after(_CHECK_S, self._check)
        leader, now_s = cluster.leader, cluster.loop.now_s
        process = leader.process
        is_there = leader.is_serving and process.is_alive and process.stopped_s < 0.0
        if not is_there or leader.is_writing:
            self._idle_since_s = now_s
        self._cut_s |= {n: now_s for n in cluster.agents if cluster.network.is_cut(n, LAUNCHER)}
        admitted = leader.admitted if is_there else ()
        self._admitted_s = {node: self._admitted_s.get(node, now_s) for node in admitted}
        if not is_there:
            return
        admits = now_s - self._idle_since_s > _ADMITTED_S
        for node, agent in cluster.agents.items():
            is_answered = now_s - self._admitted_s.get(node, now_s) > _ANSWERED_S
            is_back = now_s - self._cut_s.get(node, -math.inf) > _BACK_S
            if agent.process.is_alive and (admits or is_answered) and is_back:
                self._answerable_s[node] = now_s

    def forsaken_nodes(self) -> frozenset[int]:
        """The nodes that ended themselves because no coordinator could answer them."""
        agents = self._cluster.agents.items()
        limit_s = LEASE_S + (self._cluster.job.scenario.patience_s or LEASE_S) - _SHORT_S
        return frozenset(
            node
            for node, agent in agents
            if agent.end_reason == UNANSWERED
            and agent.ended_s - self._answerable_s.get(node, 0.0) > limit_s
        )
