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
from planaria.core.kinds import ChangeKind, LossKind
from planaria.core.machine_messages import (
    MachineUnfit,
    NodeEnded,
    NodeRequested,
    ToMachine,
)
from planaria.core.records import Members, Recovering, ToLauncher, Warned
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
        self.verdicts: list[str] = []
        self.given_back: list[LostMachine] = []
        self.num_refusals_to_take = 0

    def ask_for_machine(self, lost: LostMachine) -> str:
        self.threads.add(threading.current_thread().name)
        if self.num_refusals:
            self.num_refusals -= 1
            raise OSError("no quota")
        self.lost.append(lost)
        return "done"

    def verdict_on(self, name: str, host: str) -> str:
        self.threads.add(threading.current_thread().name)
        if not self.verdicts:
            raise OSError(f"nothing is known of {name} ({host})")
        return self.verdicts.pop(0)

    def give_back(self, machine: LostMachine) -> str:
        if self.num_refusals_to_take:
            self.num_refusals_to_take -= 1
            raise OSError("it cannot be taken back now")
        self.given_back.append(machine)
        return "it is cordoned"

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
async def test_a_request_counts_from_the_newest_loss_of_its_machine(tmp_path: Path) -> None:
    """Kubernetes must have missed the machine since then; the first loss was over."""
    platform = Asked()
    async with arriving_machines(tmp_path) as head:
        asks = operator(head, platform)
        await lose_machine(head)
        asks.on_coordinator_message(gone(0))
        first_s = time.monotonic()
        asks._nodes.clear()  # As if the machine had been back, with another node.
        asks.on_coordinator_message(gone(0))
        await wait_until(lambda: bool(platform.lost))

        assert len(platform.lost) == 1
        assert platform.lost[0].lost_s > first_s


@runs
async def test_each_of_two_machines_at_one_address_is_asked_for(tmp_path: Path) -> None:
    """One request was made for both, in place of the first that was lost."""
    platform = Asked()
    async with arriving_machines(tmp_path) as head:
        asks = operator(head, platform)
        lines = [await head.join(name) for name in ("first", "second")]
        for node, line in enumerate(lines):
            head.start(node)
            await line.wait(NodeRequested)
        for line in lines:
            line.reset()
        await wait_until(lambda: not head.machines.connected)
        asks.on_coordinator_message(gone(0))
        asks.on_coordinator_message(gone(1))
        await wait_until(lambda: len(platform.lost) == 2)

        assert {lost.name for lost in platform.lost} == {"first", "second"}


@runs
async def test_a_machine_lost_anew_has_time_to_come_back_after_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had been back during the pause, and was asked for the moment that it was lost again."""
    monkeypatch.setattr(machine_operator, "_AGAIN_S", 0.2)
    platform = Asked(num_refusals=1)
    async with arriving_machines(tmp_path) as head:
        asks = operator(head, platform)
        await lose_machine(head)
        asks.on_coordinator_message(gone(0))
        await wait_until(lambda: any("no quota" in note for note in head.notes))
        asks._return_s = NEVER_S
        asks._nodes.clear()
        asks.on_coordinator_message(gone(0))
        await asyncio.sleep(0.5)

        assert not platform.lost


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


# -- what the platform has against a machine -------------------------------------------------------


def crashed(node: int, kind: LossKind = LossKind.CRASH) -> Recovering:
    return Recovering(
        epoch=2, kind=kind, nodes=(node,), iteration=5, reason="it raised", lost_s=0.0
    )


def judging(
    head: ArrivingMachines, platform: Asked, monkeypatch: pytest.MonkeyPatch
) -> tuple[MachineOperator, list[tuple[int, str]]]:
    """An operator that does not pause, and what it tells the coordinator."""
    monkeypatch.setattr(machine_operator, "_VERDICT_PAUSES_S", (0.0, SOON_S))
    monkeypatch.setattr(machine_operator, "_POLL_S", SOON_S)
    told: list[tuple[int, str]] = []
    asks = operator(head, platform, return_s=NEVER_S)
    asks.report_unfit = lambda node, reason: told.append((node, reason))
    return asks, told


@pytest.mark.parametrize("kind", [LossKind.CRASH, LossKind.STALL])
@runs
async def test_a_machine_that_its_platform_calls_bad_is_unfit(
    kind: LossKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may say so some time after the failure. Its agent leaves once its node has, for a machine
    that finds nothing wrong with itself would have got the next node."""
    platform = Asked()
    platform.verdicts = ["", "it is down"]
    async with arriving_machines(tmp_path) as head:
        asks, told = judging(head, platform, monkeypatch)
        first = await run_first_node(head)
        asks.on_coordinator_message(crashed(0, kind))
        await wait_until(lambda: bool(told))
        assert told == [(0, "it is down")]
        asks.on_coordinator_message(Warned(text="it is down", unfit=(0,)))
        await asyncio.sleep(5 * SOON_S)
        assert not platform.given_back  # Its node is still there.
        first.tell(NodeEnded(node=0, status=0))

        assert (await first.wait(MachineUnfit)).reason == "it is down"
        await wait_until(lambda: bool(platform.given_back and platform.lost))
        assert not head.machines.has_room
        host = "127.0.0.1"
        assert platform.given_back == [LostMachine("first", host, is_leaving=False, is_unfit=True)]
        assert platform.lost == [LostMachine("first", host, is_leaving=True, is_unfit=True)]
        note = f"first ({host}) is unfit: it is cordoned"
        await wait_until(lambda: note in head.notes)
        assert platform.threads == {"operator"}


@runs
async def test_a_machine_gets_a_node_again_once_its_platform_has_changed_its_mind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then, whenever its agent is started again, it is told what is wrong."""
    platform = Asked()
    platform.verdicts = ["it is down"]
    async with arriving_machines(tmp_path) as head:
        asks, told = judging(head, platform, monkeypatch)
        first = await run_first_node(head)
        asks.on_coordinator_message(crashed(0))
        await wait_until(lambda: bool(told))
        asks.on_coordinator_message(Warned(text="it is down", unfit=(0,)))
        first.tell(NodeEnded(node=0, status=0))
        await first.wait(MachineUnfit)
        first.reset()
        again = await head.arrive("first")
        again.tell(head.ready())
        assert (await again.wait(MachineUnfit)).reason == "it is down"
        again.reset()
        monkeypatch.setattr(machine_operator, "_VERDICT_S", 0.0)
        later = await head.arrive("first")  # The platform does not answer.
        later.tell(head.ready())
        assert (await later.wait(MachineUnfit)).reason == "it is down"
        later.reset()
        platform.verdicts = [""]
        await head.join("first")

        assert head.machines.has_room


@runs
async def test_no_machine_is_unfit_because_its_platform_has_nothing_against_it_or_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure to answer is told, and no verdict. Nobody is asked of a loss that is no crash."""
    platform = Asked()
    platform.verdicts = [""]
    async with arriving_machines(tmp_path) as head:
        asks, told = judging(head, platform, monkeypatch)
        await run_first_node(head)
        asks.on_coordinator_message(crashed(0, LossKind.COPY))
        await asyncio.sleep(3 * SOON_S)
        assert platform.verdicts == [""]
        asks.on_coordinator_message(crashed(0))
        asks.on_coordinator_message(crashed(0))  # The question is under way.
        silent = "the platform does not say whether first is well: nothing is known of first"
        await wait_until(lambda: any(note.startswith(silent) for note in head.notes))

        assert not told
        assert sum(note.startswith(silent) for note in head.notes) == 1
        assert not any(machine.is_unfit for machine in head.machines.connected)


@runs
async def test_a_verdict_that_is_withdrawn_before_the_node_has_left_counts_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job may need the node for hours. A healthy machine was told nothing of what is wrong, and
    Kubernetes kept from it. It got no node until something else happened."""
    platform = Asked()
    platform.verdicts = ["it is down", ""]
    has_room: list[bool] = []
    async with arriving_machines(tmp_path) as head:
        asks, told = judging(head, platform, monkeypatch)
        first = await run_first_node(head)
        asks.on_coordinator_message(crashed(0))
        await wait_until(lambda: bool(told))
        monkeypatch.setattr(machine_operator, "_VERDICT_S", 0.0)
        asks.on_coordinator_message(Warned(text="it is down", unfit=(0,)))
        head.machines.on_free = lambda: has_room.append(True)
        first.tell(NodeEnded(node=0, status=0))
        await wait_until(lambda: bool(has_room))

        assert head.machines.num_ready == 1
        assert not platform.given_back


@runs
async def test_a_second_crash_has_the_platform_asked_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler knows of it only some time later; it was asked too early for the second one."""
    platform = Asked()
    platform.verdicts = ["", "it is down"]
    async with arriving_machines(tmp_path) as head:
        asks, told = judging(head, platform, monkeypatch)
        monkeypatch.setattr(machine_operator, "_VERDICT_PAUSES_S", (0.0, NEVER_S))
        await run_first_node(head)
        asks.on_coordinator_message(crashed(0))
        await wait_until(lambda: len(platform.verdicts) == 1)
        asks.on_coordinator_message(crashed(0))
        await wait_until(lambda: bool(told))

        assert told == [(0, "it is down")]


@runs
async def test_what_is_refused_is_given_back_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The API server was restarted; the user is told once. The machine has found out itself that
    it is unfit."""
    monkeypatch.setattr(machine_operator, "_AGAIN_S", SOON_S)
    platform = Asked()
    platform.num_refusals_to_take = 3
    async with arriving_machines(tmp_path) as head:
        asks, _ = judging(head, platform, monkeypatch)
        first = await run_first_node(head)
        asks.on_coordinator_message(Warned(text="it is hot", unfit=(0,)))
        first.tell(NodeEnded(node=0, status=0))
        await wait_until(lambda: bool(platform.given_back))

        assert sum("it cannot be taken back now" in note for note in head.notes) == 1


@runs
async def test_a_platform_that_says_nonsense_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was wrong with it was seen by nobody."""

    def answer(_: str, host: str) -> str:
        raise KeyError(host)

    platform = Asked()
    monkeypatch.setattr(platform, "verdict_on", answer)
    async with arriving_machines(tmp_path) as head:
        asks, told = judging(head, platform, monkeypatch)
        await run_first_node(head)
        asks.on_coordinator_message(crashed(0))
        text = "whether the machine of node 0 is fit was not found out: KeyError"
        await wait_until(lambda: any(note.startswith(text) for note in head.notes))

        assert not told
