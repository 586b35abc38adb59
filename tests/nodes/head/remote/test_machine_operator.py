"""When a machine is asked for in place of a lost one, and when not."""

import asyncio
import threading
import time
from pathlib import Path
from typing import Final

import msgspec
import pytest

from helpers.arriving_machines import ArrivingMachines, arriving_machines
from helpers.heads import runs
from helpers.machine_lines import MachineLine
from helpers.recorder_messages import change_message
from helpers.tasks import wait_until
from planaria.core.kinds import ChangeKind
from planaria.core.machine_messages import NodeEnded, NodeRequested, ToMachine
from planaria.core.records import Members, ToLauncher, Warned
from planaria.nodes.head.remote import machine_operator
from planaria.nodes.head.remote.machine_operator import MachineOperator
from planaria.nodes.head.remote.platforms import LostMachine

SOON_S: Final = 0.01
NEVER_S: Final = 3600.0


class Asked:
    """A platform that notes what it is asked for, and refuses it at first."""

    def __init__(self, *, num_refusals: int = 0) -> None:
        self.lost: list[LostMachine] = []
        self.num_refusals = num_refusals
        self.is_cancelled = False
        self.threads: set[str] = set()

    def ask_for_machine(self, lost: LostMachine) -> str:
        self.threads.add(threading.current_thread().name)
        if self.num_refusals:
            self.num_refusals -= 1
            raise OSError("no quota")
        self.lost.append(lost)
        return "done"

    def cancel_requests(self) -> None:
        self.is_cancelled = True
        raise OSError("it does not answer")


def operator(
    head: ArrivingMachines, platform: Asked, *, return_s: float = SOON_S
) -> MachineOperator:
    return MachineOperator(platform, head.machines, note=head.notes.append, return_s=return_s)


async def lose_machine(head: ArrivingMachines, *, host: str = "127.0.0.1") -> None:
    """A machine comes, gets node 0, and is away."""
    line = await head.join("first", host=host)
    head.start(0)
    await line.wait(NodeRequested)
    line.reset()
    await wait_until(lambda: not head.machines.connected)


async def run_first_node(head: ArrivingMachines) -> MachineLine[ToMachine]:
    """The connection of a machine that runs node 0."""
    first = await head.join("first")
    head.start(0)
    await first.wait(NodeRequested)
    return first


def gone(node: int) -> Warned:
    return Warned(text="it is gone", gone=(node,))


@runs
async def test_a_machine_that_stays_away_is_asked_for_once(tmp_path: Path) -> None:
    """However often its loss is told, and off the loop of the head."""
    platform = Asked()
    async with arriving_machines(tmp_path) as head:
        asks = operator(head, platform)
        await lose_machine(head, host="127.0.0.5")
        asks.on_coordinator_message(gone(0))
        await wait_until(lambda: bool(platform.lost))
        asks.on_coordinator_message(gone(0))
        asks.on_coordinator_message(gone(7))  # Of no machine.
        await asyncio.sleep(5 * SOON_S)

        assert platform.lost == [LostMachine("first", "127.0.0.5", is_leaving=False)]
        assert platform.threads == {"operator"}
        assert any("that of node 7: this head never saw it" in note for note in head.notes)
        assert head.notes.count("asked for a machine in place of first (127.0.0.5): done") == 1


@runs
async def test_a_machine_that_comes_back_is_not_asked_for(tmp_path: Path) -> None:
    """Its node alone was lost, or its agent was started again."""
    platform = Asked()
    async with arriving_machines(tmp_path) as head:
        await run_first_node(head)
        operator(head, platform).on_coordinator_message(gone(0))
        await asyncio.sleep(5 * SOON_S)

        assert not platform.lost


@runs
async def test_another_machine_is_asked_for_if_a_lost_node_hangs_for_good(tmp_path: Path) -> None:
    """Its machine counted as back, though it could take no other node."""
    platform = Asked()
    async with arriving_machines(tmp_path) as head:
        await run_first_node(head)
        head.machines.on_members(Members(epoch=1, term=0, nodes=(), gone=(0,)))
        operator(head, platform).on_coordinator_message(gone(0))
        await wait_until(lambda: bool(platform.lost))

        assert [lost.name for lost in platform.lost] == ["first"]


@runs
async def test_another_machine_is_asked_for_if_one_lost_too_many_nodes(tmp_path: Path) -> None:
    """It is there, but gets none for an hour; the job ran one machine short for as long."""
    platform = Asked()
    async with arriving_machines(tmp_path) as head:
        first = await run_first_node(head)
        (machine,) = head.machines.connected
        machine.ended_s += [time.monotonic()] * 6
        first.tell(NodeEnded(node=0, status=1))
        await wait_until(lambda: machine.node < 0)
        operator(head, platform).on_coordinator_message(gone(0))
        await wait_until(lambda: bool(platform.lost))

        assert [lost.name for lost in platform.lost] == ["first"]


@pytest.mark.parametrize(
    "message",
    [
        Warned(text="its GPU is lost", unfit=(0,)),
        Warned(text="it had no work yet", left=(0,), preempted=(0,)),
        # The coordinator may know of it before the machine says so.
        msgspec.structs.replace(
            change_message(), kinds={0: ChangeKind.PREEMPT, 1: ChangeKind.JOIN}
        ),
    ],
)
@runs
async def test_a_machine_that_leaves_or_is_unfit_is_asked_for_at_once(
    tmp_path: Path, message: ToLauncher
) -> None:
    """It will not come back, and may be there for minutes."""
    platform = Asked()
    async with arriving_machines(tmp_path) as head:
        first = await head.join("first")
        asks = operator(head, platform, return_s=NEVER_S)
        head.start(0)
        await first.wait(NodeRequested)
        asks.on_coordinator_message(message)
        await wait_until(lambda: bool(platform.lost))

        assert platform.lost[0].is_leaving


@runs
async def test_what_is_refused_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user is told each time; there may be room later."""
    monkeypatch.setattr(machine_operator, "_AGAIN_S", SOON_S)
    platform = Asked(num_refusals=2)
    async with arriving_machines(tmp_path) as head:
        asks = operator(head, platform)
        await lose_machine(head)
        asks.on_coordinator_message(gone(0))
        await wait_until(lambda: bool(platform.lost))

        refusals = [note for note in head.notes if "no quota" in note]
        assert len(refusals) == 2
        assert "in place of first (127.0.0.1)" in refusals[0]


@runs
async def test_at_the_end_nothing_more_is_asked_for(tmp_path: Path) -> None:
    """What was asked for before is taken back, if the platform answers."""
    platform = Asked()
    async with arriving_machines(tmp_path) as head:
        asks = operator(head, platform)
        await lose_machine(head)
        asks.on_coordinator_message(gone(0))
        asks.close()
        await asks.cancel_requests()
        await asyncio.sleep(5 * SOON_S)

        assert platform.is_cancelled
        assert not platform.lost
        assert head.notes[-1] == "machines that were asked for may still come: it does not answer"
