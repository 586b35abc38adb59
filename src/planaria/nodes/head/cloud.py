"""Requests machines in place of lost ones.

A cloud takes a failed machine back and grants another one, after minutes or never. Here nodes are
processes of one machine, so a lost node is killed if it still runs, and a new node is started after
the time that a grant takes according to the job file (`cluster.grant_s`).

Source: Gemini (SOSP '23), section 6.2 (cloud operator).
"""

import asyncio
from collections.abc import Callable, Collection
from typing import Protocol

from planaria.coordinator.membership.standby import names_leaving_nodes, nodes_to_replace
from planaria.core.records import ToLauncher


class CloudOperator(Protocol):
    """Requests machines."""

    def replace(self, nodes: Collection[int], *, are_lost: bool) -> None:
        """Requests one machine for each node, unless one was requested for that node before.

        Args:
            are_lost: whether the nodes are lost, so that their machines are given back at once;
                else that happens once they have left.
        """

    def on_coordinator_message(self, message: ToLauncher) -> None:
        """Replaces the nodes that are lost or taken away according to the coordinator's message."""

    def close(self) -> None:
        """Cancels all requests that were not granted by now."""


class LocalOperator:
    """Starts a node on this machine in place of each lost one.

    Args:
        grant_s: seconds from a request until its machine is granted; 0: none is requested.
        give_back: ends all processes of a lost node.
        start_node: starts a node in place of the node given.
    """

    def __init__(
        self,
        grant_s: float,
        *,
        give_back: Callable[[int], None],
        start_node: Callable[[int], None],
    ) -> None:
        self._grant_s = grant_s
        self._give_back = give_back
        self._start_node = start_node
        self._timers: dict[int, asyncio.TimerHandle] = {}

    def replace(self, nodes: Collection[int], *, are_lost: bool) -> None:
        """See CloudOperator."""
        if not self._grant_s:
            return
        loop = asyncio.get_running_loop()
        for node in sorted(set(nodes).difference(self._timers)):
            if are_lost:
                self._give_back(node)
            self._timers[node] = loop.call_later(self._grant_s, self._start_node, node)

    def on_coordinator_message(self, message: ToLauncher) -> None:
        """See CloudOperator."""
        self.replace(nodes_to_replace(message), are_lost=not names_leaving_nodes(message))

    def close(self) -> None:
        """See CloudOperator."""
        for timer in self._timers.values():
            timer.cancel()
