"""Asks a platform for machines in place of those that the job has lost.

A machine whose agent is started again, or whose network comes back, returns by itself. So a lost
machine is asked for only once it has been away for a while; one that was told to leave is asked for
at once. What the platform refuses is asked for again, after longer and longer pauses.

Source: Gemini (SOSP '23), section 6.2 (cloud operator).
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Final

from planaria.coordinator.membership.standby import names_leaving_nodes, nodes_to_replace
from planaria.core.records import ToLauncher
from planaria.nodes.daemon_threads import answer_of_thread
from planaria.nodes.head.remote.machines import Machines
from planaria.nodes.head.remote.platforms import LostMachine, Platform

logger = logging.getLogger(__name__)

# An agent that a scheduler starts again is back within this time (`planaria launch` waits 10 s).
RETURN_S: Final = 30.0
_AGAIN_S: Final = 30.0  # The first pause after a refusal; each one is twice as long.
_AGAIN_S_MAX: Final = 600.0
_CANCEL_TIMEOUT_S: Final = 10.0


class MachineOperator:
    """Asks for a machine in place of each lost one; see CloudOperator.

    Args:
        machines: the machines that have come to the head.
        return_s: seconds for which a lost machine is waited for.

    Attributes:
        note: shows the user a text, and may be replaced once the job has begun.
    """

    def __init__(
        self,
        platform: Platform,
        machines: Machines,
        *,
        note: Callable[[str], None],
        return_s: float = RETURN_S,
    ) -> None:
        self._platform = platform
        self._machines = machines
        self.note = note
        self._return_s = return_s
        self._nodes: set[int] = set()
        self._asking: dict[str, asyncio.Task[None]] = {}  # By address of the lost machine.

    def replace(self, nodes: Collection[int], *, are_lost: bool) -> None:
        """See CloudOperator."""
        for node in sorted(set(nodes) - self._nodes):
            self._nodes.add(node)
            machine = self._machines.machine_of(node)
            if machine is None:
                self.note(
                    f"no machine is asked for in place of that of node {node}: this head never saw "
                    "it, because it was lost with the head before"
                )
                continue
            if machine.facts.host in self._asking:
                continue
            host = machine.facts.host
            lost = LostMachine(machine.facts.name, host, is_leaving=not are_lost)
            task = self._asking[host] = asyncio.create_task(self._ask(lost))
            task.add_done_callback(partial(self._on_answer, host))

    def on_coordinator_message(self, message: ToLauncher) -> None:
        """See CloudOperator."""
        self.replace(nodes_to_replace(message), are_lost=not names_leaving_nodes(message))

    def _on_answer(self, host: str, task: asyncio.Task[None]) -> None:
        self._asking.pop(host, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("no machine could be asked for", exc_info=error)
            self.note(f"no machine could be asked for in place of {host}: {error!r}")

    async def _ask(self, lost: LostMachine) -> None:
        """Asks for a machine until the platform has taken the request, or the lost one is back."""
        if not lost.is_leaving:
            await asyncio.sleep(self._return_s)
        pause_s = _AGAIN_S
        while lost.is_leaving or not self._is_back(lost):
            try:
                ask = partial(self._platform.ask_for_machine, lost)
                text = await answer_of_thread(ask, name="operator")
            except OSError as error:
                self.note(
                    f"no machine can be asked for in place of {lost.name} ({lost.host}): {error}; "
                    f"asking again in {pause_s:.0f} s"
                )
                await asyncio.sleep(pause_s)
                pause_s = min(2.0 * pause_s, _AGAIN_S_MAX)
            else:
                self.note(f"asked for a machine in place of {lost.name} ({lost.host}): {text}")
                return

    def _is_back(self, lost: LostMachine) -> bool:
        """Whether a machine with that name and address can take a node, or runs one of the job."""
        return any(
            (machine.facts.name, machine.facts.host) == (lost.name, lost.host)
            and machine.is_ready
            and not machine.is_leaving
            and (
                # One that has lost too many nodes gets none for an hour.
                machine.may_run(time.monotonic())
                or (machine.node >= 0 and not self._machines.is_gone(machine.node))
            )
            for machine in self._machines.connected
        )

    def close(self) -> None:
        """See CloudOperator."""
        for task in tuple(self._asking.values()):
            task.cancel()

    async def cancel_requests(self) -> None:
        """Takes back what was asked for and not granted; the job has ended."""
        try:
            async with asyncio.timeout(_CANCEL_TIMEOUT_S):
                await answer_of_thread(self._platform.cancel_requests, name="operator")
        except OSError as error:  # TimeoutError is an OSError.
            self.note(f"machines that were asked for may still come: {error}")
