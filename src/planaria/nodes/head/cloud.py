"""Who gets machines in place of lost ones.

A cloud takes a failed machine back and grants another one, after minutes or never. Here nodes are
processes of one machine, so what is lost is killed if it still stands, and a new process is started
after as long as the job says that a grant takes.

Source: Gemini (SOSP '23), section 6.2 (cloud operator).
"""

import asyncio
from collections.abc import Callable, Collection
from typing import Protocol

from planaria.coordinator.standby import nodes_to_replace
from planaria.core.records import Changed, ToLauncher


class CloudOperator(Protocol):
    """Gets machines."""

    def replace(self, nodes: Collection[int], *, are_lost: bool) -> None:
        """As many other machines are asked for, once for each node. Those of lost nodes go back;
        of others, once they have left."""

    def heard(self, message: ToLauncher) -> None:
        """The coordinator has told something; nodes may be lost by it, or gone."""

    def close(self) -> None:
        """What has not been granted by now is not wanted any more."""


class LocalOperator:
    """Starts a node on this machine for each that is lost.

    Args:
        grant_s: after which a machine is granted; 0: none is asked for.
        give_back: ends what is left of a lost node.
        granted: starts a node in the stead of a lost one.
    """

    def __init__(
        self,
        grant_s: float,
        *,
        give_back: Callable[[int], None],
        granted: Callable[[int], None],
    ) -> None:
        self._grant_s = grant_s
        self._give_back = give_back
        self._granted = granted
        self._timers: dict[int, asyncio.TimerHandle] = {}

    def replace(self, nodes: Collection[int], *, are_lost: bool) -> None:
        """See CloudOperator."""
        if not self._grant_s:
            return
        loop = asyncio.get_running_loop()
        for node in sorted(set(nodes).difference(self._timers)):
            if are_lost:
                self._give_back(node)
            self._timers[node] = loop.call_later(self._grant_s, self._granted, node)

    def heard(self, message: ToLauncher) -> None:
        """See CloudOperator."""
        self.replace(nodes_to_replace(message), are_lost=not isinstance(message, Changed))

    def close(self) -> None:
        """See CloudOperator."""
        for timer in self._timers.values():
            timer.cancel()
