"""A machine that can start no thread now says so, and is to be started again."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.fake_fork_server import NO_PID
from helpers.heads import runs
from helpers.offered_machines import offered_machine
from helpers.tasks import settle, wait_until
from planaria.core.job import ClusterConfig, JobConfig
from planaria.core.machine_messages import JobOver, MachineUnfit
from planaria.nodes import machine_files
from planaria.nodes.daemon_threads import answer_of_thread
from planaria.nodes.machine import EXIT_AGAIN, EXIT_DONE

JOB = JobConfig(cluster=ClusterConfig(patience_s=60.0))


def refuse(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Has threads of this name refused from now on, as where a user's processes are limited."""
    start = threading.Thread.start

    def start_others(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_others)


def test_a_thread_that_cannot_be_started_is_a_shortage_of_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Callers expect an OSError, as where no process can be forked."""
    refuse(monkeypatch, "saves")

    with pytest.raises(OSError, match="no thread can be started: can't start new thread"):
        asyncio.run(answer_of_thread(str, name="saves"))


@pytest.mark.parametrize("name", ["facts", "health", "saves", "digests", "notices"])
@runs
async def test_a_machine_that_can_start_no_thread_is_to_be_started_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended with a traceback and code 1, which Kubernetes takes for a machine not to try
    again."""
    job = replace(JOB, cluster=replace(JOB.cluster, notice=str(tmp_path / "leave")))
    refuse(monkeypatch, name)
    async with offered_machine(tmp_path, monkeypatch, job=job) as (made, running):
        if name != "facts":
            line = await made.head.next_line()
            line.tell(made.offer())

        assert await running == EXIT_AGAIN
        assert any("cannot take part: no thread can be started" in note for note in made.notes)


@runs
async def test_a_machine_that_can_start_no_fork_server_is_to_be_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its predecessor's processes may still be there. It was out for the rest of the job."""
    async with offered_machine(tmp_path, monkeypatch, job=JOB) as (made, running):
        made.server_error = OSError("too many processes")
        line = await made.head.next_line()
        line.tell(made.offer())

        assert await running == EXIT_AGAIN
        assert any("no fork server can be started here: too many" in note for note in made.notes)


@runs
async def test_a_machine_that_cannot_be_examined_after_its_node_is_to_be_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head hears why it takes no other node."""
    async with offered_machine(tmp_path, monkeypatch, job=JOB) as (made, running):
        line = await made.join()
        line.tell(made.request(0))
        await wait_until(lambda: "runs node 0" in made.notes)
        await settle()
        refuse(monkeypatch, "health")
        made.server.end(NO_PID + 1, 0)

        assert "no thread can be started" in (await line.wait(MachineUnfit)).reason
        assert await running == EXIT_AGAIN


@runs
async def test_a_machine_without_memory_to_ask_its_saves_is_to_be_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request with a time limit has a thread of its own, and says so of one that is refused."""

    def lack(*_: object) -> str:
        raise MemoryError("s3://saves: can't start new thread")

    async with offered_machine(tmp_path, monkeypatch, job=JOB) as (made, running):
        monkeypatch.setattr(machine_files, "answer_mark", lack)
        line = await made.head.next_line()
        line.tell(made.offer())

        assert "s3://saves" in (await line.wait(MachineUnfit)).reason
        assert await running == EXIT_AGAIN


@runs
async def test_a_machine_that_cannot_take_its_answer_back_ends_as_it_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exit code was lost for a file of a few bytes, which its head removes."""
    async with offered_machine(tmp_path, monkeypatch, job=JOB) as (made, running):
        line = await made.join()
        refuse(monkeypatch, "time limit")
        line.tell(JobOver(is_done=True, text="done"))

        assert await running == EXIT_DONE
