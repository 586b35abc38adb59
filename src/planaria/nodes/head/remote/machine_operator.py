"""Asks a platform for machines in place of those that the job has lost.

A machine whose agent is started again, or whose network comes back, returns by itself. So a lost
machine is asked for only once it has been away for a while; one that was told to leave is asked for
at once. What the platform refuses is asked for again, after longer and longer pauses.

When the job recovers from a failure in a worker whose node lives, the platform is asked for its
verdict on the machine. If there is one, the machine is unfit: its node leaves in peace, what was
raised there counts no more against the job, and it gets no node until the platform has changed its
mind.

Source: Gemini (SOSP '23), section 6.2 (cloud operator).
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from planaria.coordinator.membership.standby import names_leaving_nodes, nodes_to_replace
from planaria.core.kinds import LossKind
from planaria.core.machine_messages import MachineUnfit
from planaria.core.records import Recovering, ToLauncher, Warned
from planaria.errors import ConfigError
from planaria.nodes.daemon_threads import answer_of_thread
from planaria.nodes.head.remote.kubernetes_platform import KubernetesPlatform
from planaria.nodes.head.remote.machine_handle import MachineHandle
from planaria.nodes.head.remote.machines import Machines
from planaria.nodes.head.remote.platforms import OPTION, CommandPlatform, LostMachine, Platform
from planaria.nodes.head.remote.slurm_platform import SlurmPlatform

logger = logging.getLogger(__name__)

# An agent that a scheduler starts again is back within this time (`planaria launch` waits 10 s).
RETURN_S: Final = 30.0
_AGAIN_S: Final = 30.0  # The first pause after a refusal; each one is twice as long.
_AGAIN_S_MAX: Final = 600.0
_CANCEL_TIMEOUT_S: Final = 10.0
# Pauses before the platform is asked of a machine where a worker failed. Schedulers notice that a
# machine is out of order within half a minute to a minute.
_VERDICT_PAUSES_S: Final = (0.0, 75.0)
_VERDICT_S: Final = 60.0  # Time for which an answer counts.
_POLL_S: Final = 1.0


def open_platform(
    text: str,
    *,
    heads: Sequence[str],
    token_file: str,
    environment: Mapping[str, str] = os.environ,
) -> Platform:
    """The platform that a text names: "slurm", "kubernetes" or a command.

    Args:
        heads: HOST:PORT at which new machines find the head.
        token_file: path of the token file on each machine.
        environment: variables of this process.

    Raises:
        ConfigError: this machine is not one of that platform, or lacks the platform's program. Or
            no machine could find the head.
    """
    if text == "kubernetes":  # Its pods know the head by the name of their service.
        return KubernetesPlatform(environment)
    if not text.strip():
        raise ConfigError(OPTION, text, "must be slurm, kubernetes, or a command")
    if not heads:
        remedy = (
            "no network interface of this machine has an address at which another one could find "
            "the head; name one, or a name that others resolve: --listen ADDR:PORT"
        )
        raise ConfigError(OPTION, text, remedy)
    if text == "slurm":
        return SlurmPlatform(heads, token_file=token_file, environment=environment)
    return CommandPlatform(text, head=heads[0], environment=environment)


_Key = tuple[str, str]  # Name and address of a lost machine.
# Works on the machine of a node.
_Work = Callable[[int, MachineHandle], Coroutine[Any, Any, None]]


class MachineOperator:
    """Asks for a machine in place of each lost one; see CloudOperator.

    Args:
        machines: the machines that have come to the head.
        return_s: seconds for which a lost machine is waited for.

    Attributes:
        note: shows the user a text, and may be replaced once the job has begun.
        report_unfit: tells the coordinator that the machine of a node is unfit, and why; replaced
            likewise.
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
        self.report_unfit: Callable[[int, str], None] = lambda _, __: None
        self._return_s = return_s
        self._nodes: set[int] = set()
        self._unfit: set[int] = set()  # Nodes whose machines are unfit.
        self._asking: dict[_Key, asyncio.Task[None]] = {}
        self._lost: dict[_Key, LostMachine] = {}  # The newest loss of each of these machines.
        self._working: dict[tuple[str, int], asyncio.Task[None]] = {}
        # The platform's verdicts on machines, by name, and when it gave them.
        self._verdicts: dict[str, tuple[str, float]] = {}
        machines.ask_verdict = self._standing_verdict

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
            lost = self._lost_machine(machine, node, is_leaving=not are_lost)
            key = (lost.name, lost.host)
            if not self._lost.setdefault(key, lost).is_leaving:
                self._lost[key] = lost
            if key not in self._asking:
                task = self._asking[key] = asyncio.create_task(self._ask(key))
                task.add_done_callback(partial(self._on_answer, key))

    def on_coordinator_message(self, message: ToLauncher) -> None:
        """See CloudOperator."""
        unfit = message.unfit if isinstance(message, Warned) else ()
        self._unfit.update(unfit)
        self.replace(nodes_to_replace(message), are_lost=not names_leaving_nodes(message))
        for node in unfit:
            self._start(node, self._give_back)
        if isinstance(message, Recovering) and message.kind in (LossKind.CRASH, LossKind.STALL):
            for node in message.nodes:
                self._start(node, self._judge, restarts=True)

    def _lost_machine(self, machine: MachineHandle, node: int, *, is_leaving: bool) -> LostMachine:
        facts, is_unfit = machine.facts, node in self._unfit
        return LostMachine(
            *(facts.name, facts.host),
            is_leaving=is_leaving,
            is_unfit=is_unfit,
            lost_s=time.monotonic(),
        )

    def _on_answer(self, key: _Key, task: asyncio.Task[None]) -> None:
        self._asking.pop(key, None)
        lost = self._lost.pop(key)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("no machine could be asked for", exc_info=error)
            self.note(f"no machine could be asked for in place of {lost.host}: {error!r}")

    async def _ask(self, key: _Key) -> None:
        """Asks for a machine until the platform has taken the request, or the lost one is back."""
        pauses_s = _pauses_s()
        while True:
            lost = self._lost[key]  # It may be lost once more meanwhile.
            left_s = lost.lost_s + self._return_s - time.monotonic()
            if not lost.is_leaving and left_s > 0.0:
                await asyncio.sleep(left_s)
                continue
            if not lost.is_leaving and self._is_back(lost):
                return
            try:
                ask = partial(self._platform.ask_for_machine, lost)
                text = await answer_of_thread(ask, name="operator")
            except OSError as error:
                pause_s = next(pauses_s)
                self.note(
                    f"no machine can be asked for in place of {lost.name} ({lost.host}): {error}; "
                    f"asking again in {pause_s:.0f} s"
                )
                await asyncio.sleep(pause_s)
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

    # -- unfit machines ---------------------------------------------------------------------------

    def _start(self, node: int, work: _Work, *, restarts: bool = False) -> None:
        """Starts a work on the machine of a node, unless the same is under way.

        Args:
            restarts: whether it begins anew then.
        """
        machine, key = self._machines.machine_of(node), (work.__name__, node)
        if machine is None:
            return
        if running := self._working.get(key):
            if not restarts:
                return
            running.cancel()
        task = self._working[key] = asyncio.create_task(work(node, machine))
        task.add_done_callback(partial(self._on_end, key))

    def _on_end(self, key: tuple[str, int], task: asyncio.Task[None]) -> None:
        if self._working.get(key) is task:
            del self._working[key]
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the machine of node %s could not be judged", key[1], exc_info=error)
            self.note(f"whether the machine of node {key[1]} is fit was not found out: {error!r}")

    def _is_out(self, node: int) -> bool:
        """Whether a node is out of the job, or has ended."""
        return node not in self._machines.live_nodes or self._machines.is_gone(node)

    async def _judge(self, node: int, machine: MachineHandle) -> None:
        """Asks the platform for its verdict on a machine; if there is one, has the node leave."""
        for pause_s in _VERDICT_PAUSES_S:
            await asyncio.sleep(pause_s)
            if self._is_out(node):
                return
            try:
                verdict = await self._ask_verdict(machine)
            except OSError as error:
                self.note(f"the platform does not say whether {machine.name} is well: {error}")
                continue
            if verdict:
                self.report_unfit(node, verdict)
                self._start(node, self._give_back)
                return

    async def _ask_verdict(self, machine: MachineHandle) -> str:
        """The platform's verdict on a machine; "": there is none.

        Raises:
            OSError: it does not answer.
        """
        facts = machine.facts
        ask = partial(self._platform.verdict_on, facts.name, facts.host)
        text = await answer_of_thread(ask, name="operator")
        self._verdicts.pop(facts.name, None)
        if text:
            self._verdicts[facts.name] = (text, time.monotonic())
        machine.is_unfit = bool(text)
        return text

    async def _standing_verdict(self, machine: MachineHandle) -> str:
        """The verdict on a machine without a node, if one was given and still holds; "": none."""
        text, given_s = self._verdicts.get(machine.facts.name, ("", 0.0))
        was_unfit = machine.is_unfit
        if text and time.monotonic() - given_s > _VERDICT_S:
            try:
                text = await self._ask_verdict(machine)
            except OSError as error:
                logger.warning("the verdict on %s still counts: %s", machine.name, error)
        machine.is_unfit = bool(text)
        if was_unfit and not machine.is_unfit:
            self._machines.look_for_room()
        return text

    async def _give_back(self, node: int, machine: MachineHandle) -> None:
        """Has the platform take an unfit machine back, once its node is out of the job.

        What the platform refuses is asked for again, and what a person is to do is told once.
        """
        while not self._is_out(node):
            await asyncio.sleep(_POLL_S)
        if machine.is_unfit:  # Its agent does not know of it.
            if not (verdict := await self._standing_verdict(machine)):
                return
            machine.tell(MachineUnfit(verdict))
        lost, last_text = self._lost_machine(machine, node, is_leaving=False), ""
        for pause_s in _pauses_s():
            try:
                give = partial(self._platform.give_back, lost)
                text, is_over = await answer_of_thread(give, name="operator"), True
            except OSError as error:
                text, is_over = str(error), False
            if text and text != last_text:
                self.note(f"{lost.name} ({lost.host}) is unfit: {text}")
            if is_over:
                return
            last_text = text
            await asyncio.sleep(pause_s)

    def close(self) -> None:
        """See CloudOperator."""
        for task in (*self._asking.values(), *self._working.values()):
            task.cancel()

    async def cancel_requests(self) -> None:
        """Takes back what was asked for and not granted; the job has ended."""
        try:
            async with asyncio.timeout(_CANCEL_TIMEOUT_S):
                await answer_of_thread(self._platform.cancel_requests, name="operator")
        except OSError as error:  # TimeoutError is an OSError.
            self.note(f"machines that were asked for may still come: {error}")


def _pauses_s() -> Iterator[float]:
    """The pauses after refusals, without end."""
    pause_s = _AGAIN_S
    while True:
        yield pause_s
        pause_s = min(2.0 * pause_s, _AGAIN_S_MAX)
