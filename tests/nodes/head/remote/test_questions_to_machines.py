"""A head may ask a machine several things at once, and gets each answer where it asked."""

import asyncio
from pathlib import Path

import pytest

from helpers.arriving_machines import arriving_machines
from helpers.heads import runs
from helpers.strategies import equal_problem
from helpers.tasks import settle, wait_until
from planaria.core.machine_messages import (
    JobPrepared,
    LinkMeasured,
    LinkMeasureRequested,
    LinkServed,
    LinkServeRequested,
    MachineRefused,
    PrepareRequested,
)
from planaria.core.plan import Link
from planaria.core.specs import Prepared, PrepareRequest
from planaria.nodes.head.remote import machine_handle


@runs
async def test_answers_that_cross_reach_who_asked(tmp_path: Path) -> None:
    """As those to `planaria doctor` do while a machine measures the job's layers."""
    async with arriving_machines(tmp_path) as head:
        line = await head.join()
        (machine,) = head.machines.connected
        request = PrepareRequest(job=head.machines.job, cache_directory="")
        preparing = asyncio.create_task(machine.ask(PrepareRequested(request), JobPrepared))
        prepare = await line.wait(PrepareRequested)
        serving = asyncio.create_task(machine.ask(LinkServeRequested(b"one"), LinkServed))
        again = asyncio.create_task(machine.ask(LinkServeRequested(b"two"), LinkServed))
        first, second = await line.wait(LinkServeRequested), await line.wait(LinkServeRequested)
        line.tell(
            LinkServed(2, second.number),
            JobPrepared(None, "killed", prepare.number),
            LinkServed(1, first.number),
        )

        assert await serving == LinkServed(1, first.number)
        assert await again == LinkServed(2, second.number)
        assert await preparing == JobPrepared(None, "killed", prepare.number)


@runs
async def test_a_question_ends_with_the_connection_even_if_the_machine_is_back_at_once(
    tmp_path: Path,
) -> None:
    """The new process knows nothing of the question, and would never answer it."""
    async with arriving_machines(tmp_path) as head:
        line = await head.join(machine_id="a")
        (machine,) = head.machines.connected
        asking = asyncio.create_task(machine.ask(LinkServeRequested(b"one"), LinkServed))
        await line.wait(LinkServeRequested)
        back = await head.arrive(run="run", machine_id="a")

        assert await asking is None
        assert head.machines.connected == (machine,)
        del back


@runs
async def test_a_machine_that_comes_back_while_it_measures_is_compared_anew(
    tmp_path: Path,
) -> None:
    """It counted as ready, without having measured, before it was."""
    async with arriving_machines(tmp_path) as head:
        request = PrepareRequest(job=head.machines.job, cache_directory="")
        prepared = Prepared(profile=equal_problem().profile)
        head.machines.kinds.begin(request, prepared, {})
        line = await head.arrive(machine_id="a")
        line.tell(head.ready())
        await line.wait(PrepareRequested)
        back = await head.arrive(run="run", machine_id="a")
        await settle()

        assert head.machines.num_ready == 0
        back.tell(head.ready())
        number = (await back.wait(PrepareRequested)).number
        back.tell(JobPrepared(prepared, number=number))
        await wait_until(lambda: head.machines.num_ready == 1)


@runs
async def test_an_answer_that_nobody_waits_for_is_ignored(tmp_path: Path) -> None:
    """It comes after the time for it, or was made up."""
    async with arriving_machines(tmp_path) as head:
        line = await head.join()
        (machine,) = head.machines.connected
        question = LinkMeasureRequested(address=("127.0.0.1", 1), secret=b"")
        asking = asyncio.create_task(machine.ask(question, LinkMeasured))
        number = (await line.wait(LinkMeasureRequested)).number
        link = Link(1.0, 1.0)
        line.tell(*(LinkMeasured(link=link, number=n) for n in (number + 7, number, number)))

        assert await asking == LinkMeasured(link=link, number=number)
        await wait_until(lambda: head.machines.num_ready == 1)


@runs
async def test_a_machine_that_hangs_while_it_examines_the_job_gives_way_to_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job waited for it for ever."""
    monkeypatch.setattr(machine_handle, "PREPARE_TIMEOUT_S", 0.05)
    prepared = Prepared(profile=equal_problem().profile)
    async with arriving_machines(tmp_path) as head:
        hung, other = await head.join("hung"), await head.join("other")
        request = PrepareRequest(job=head.machines.job, cache_directory="")
        preparing = asyncio.create_task(head.machines.prepare(request))
        assert "without an answer" in (await hung.wait(MachineRefused)).reason
        monkeypatch.setattr(machine_handle, "PREPARE_TIMEOUT_S", 1e6)
        number = (await other.wait(PrepareRequested)).number
        other.tell(JobPrepared(prepared, number=number))

        assert list((await preparing).values()) == [prepared]
        assert any("hung cannot take part" in note for note in head.notes)


@runs
async def test_a_later_machine_that_hangs_while_it_measures_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was neither ready nor refused."""
    monkeypatch.setattr(machine_handle, "PREPARE_TIMEOUT_S", 0.05)
    async with arriving_machines(tmp_path) as head:
        request = PrepareRequest(job=head.machines.job, cache_directory="")
        head.machines.kinds.begin(request, Prepared(profile=equal_problem().profile), {})

        assert "without an answer" in (await head.refusal("m", host="127.0.0.1")).reason


@runs
async def test_a_machine_that_the_head_fails_to_compare_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was neither ready nor refused, and waited until the end of the job."""

    async def fail(*_: object) -> str:
        raise RuntimeError("a fault of the head")

    async with arriving_machines(tmp_path) as head:
        monkeypatch.setattr(head.machines.checks, "problem", fail)
        refused = await head.refusal("m", host="127.0.0.1")

        assert "RuntimeError('a fault of the head')" in refused.reason
        assert any("m cannot take part" in note for note in head.notes)


@runs
async def test_a_head_that_failed_to_read_its_own_files_reads_them_for_the_next_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One error of the disk kept all machines out."""
    tries: list[int] = []

    async def read() -> None:
        tries.append(len(tries))
        if len(tries) == 1:
            raise OSError("the disk does not answer")

    async with arriving_machines(tmp_path) as head:
        monkeypatch.setattr(head.machines.checks, "_read_own", read)
        await head.refusal("first", host="127.0.0.1")
        await head.join("second")

        assert tries == [0, 1]
