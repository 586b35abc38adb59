"""The files of machines, which a head compares before it lets them take part."""

import asyncio
import threading
from pathlib import Path

import msgspec
import pytest

from helpers.arriving_machines import ArrivingMachines, arriving_machines
from helpers.heads import runs
from helpers.machine_lines import MachineLine
from helpers.tasks import TIMEOUT_S, wait_until
from planaria.core.machine_messages import (
    JobPrepared,
    MachineRefused,
    PrepareRequested,
    ToMachine,
)
from planaria.core.specs import Prepared, PrepareRequest
from planaria.nodes.head.remote import machine_checks


@pytest.mark.parametrize("is_refused", [False, True])
@runs
async def test_the_files_of_a_machine_that_takes_no_part_do_not_count(
    tmp_path: Path, is_refused: bool
) -> None:
    """All others were refused until the head was started again."""
    async with arriving_machines(tmp_path) as head:
        await head.join("far", host="10.0.0.1")
        wrong = await head.arrive("wrong", host="127.0.0.1" if is_refused else "10.0.0.2")
        wrong.tell(msgspec.structs.replace(head.ready(), digests={"data.kind": "another"}))
        if is_refused:
            await wrong.wait(MachineRefused)
        else:
            await wait_until(lambda: head.machines.num_ready == 2)
            wrong.reset()
            await wait_until(lambda: head.machines.num_ready == 1)
        right = await head.arrive("right", host="10.0.0.3")
        right.tell(msgspec.structs.replace(head.ready(), digests={"data.kind": "this"}))

        await wait_until(lambda: head.machines.num_ready == 2)


@runs
async def test_a_machine_that_goes_leaves_the_files_to_those_that_were_compared_with_it(
    tmp_path: Path,
) -> None:
    """Those of the next one counted, and nobody compared the others again: they trained on two data
    sets, and the first was refused for good when it was back."""
    async with arriving_machines(tmp_path) as head:
        first, _ = [await join_with(head, name, "this") for name in ("first", "second")]
        first.reset()
        await wait_until(lambda: head.machines.num_ready == 1)
        third = await arrive_with(head, "third", "another")

        assert "differs from that of second" in (await third.wait(MachineRefused)).reason
        await join_with(head, "first", "this")


@runs
async def test_the_files_of_a_machine_that_goes_while_it_is_compared_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All others were refused until the head was started again."""
    asked, goes_on = threading.Event(), threading.Event()

    def check(*_: object) -> None:
        asked.set()
        assert goes_on.wait(TIMEOUT_S)

    async with arriving_machines(tmp_path) as head:
        await head.join("right")
        monkeypatch.setattr(machine_checks, "check_answer", check)
        wrong = await arrive_with(head, "wrong", "another")
        await wait_until(asked.is_set)
        wrong.reset()
        await wait_until(lambda: len(head.machines.connected) == 1)
        goes_on.set()

        await join_with(head, "other", "this")


async def arrive_with(head: ArrivingMachines, name: str, digest: str) -> MachineLine[ToMachine]:
    """A machine that has told the digest of its files."""
    line = await head.arrive(name)
    line.tell(msgspec.structs.replace(head.ready(), digests={"data.kind": digest}))
    return line


async def join_with(head: ArrivingMachines, name: str, digest: str) -> MachineLine[ToMachine]:
    """One that is ready then."""
    num_ready = head.machines.num_ready
    line = await arrive_with(head, name, digest)
    await wait_until(lambda: head.machines.num_ready == num_ready + 1)
    return line


@runs
async def test_the_files_by_which_a_job_is_planned_count_to_its_end(tmp_path: Path) -> None:
    """The machine that had them may be gone, but others train on the same samples."""
    async with arriving_machines(tmp_path) as head:
        first = await head.arrive("first")
        first.tell(msgspec.structs.replace(head.ready(), digests={"data.kind": "this"}))
        await wait_until(lambda: head.machines.num_ready == 1)
        request = PrepareRequest(job=head.machines.job, cache_directory="")
        asking = asyncio.create_task(head.machines.prepare(request))
        question = await first.wait(PrepareRequested)
        first.tell(JobPrepared(Prepared(), "", question.number))
        await asking
        first.reset()
        await wait_until(lambda: head.machines.num_ready == 0)
        other = await head.arrive("other")
        other.tell(msgspec.structs.replace(head.ready(), digests={"data.kind": "another"}))

        assert "differs from that of first" in (await other.wait(MachineRefused)).reason
