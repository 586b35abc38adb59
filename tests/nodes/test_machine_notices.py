"""A machine that is told to leave, while no head has taken it or in one of its jobs."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from helpers.command import wait_for
from helpers.fake_fork_server import NO_PID
from helpers.heads import runs
from helpers.offered_machines import offered_machine
from helpers.tasks import settle, wait_until
from planaria.core.job import ClusterConfig, JobConfig
from planaria.core.machine_messages import JobOver, MachineLeaving, MachineReady, NodeEnded
from planaria.nodes import machine_node
from planaria.nodes.head.process_events import restore_handlers
from planaria.nodes.machine import EXIT_LEFT, run_machine
from planaria.nodes.machine_spec import MachineSpec
from planaria.nodes.part_reports import STATUS_NOTICED
from planaria.transport.credentials import Credentials, make_credentials


@pytest.fixture(scope="module")
def credentials() -> Credentials:
    return make_credentials()


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """The test's own handlers are there again after a machine that ran in this process."""
    with restore_handlers():
        yield


def exit_code(credentials: Credentials, *, notice: str, act: Callable[[], object]) -> int:
    """The exit code of a machine, if `act` is called once it looks for its head in vain."""
    notes: list[str] = []
    spec = MachineSpec(
        heads=(("127.0.0.1", 9),),
        credentials=credentials,
        host="",
        domain="",
        notice=notice,
        has_code=False,
        stays=False,
        cache_directory="",
        server=lambda *_: pytest.fail("there is no job"),
        note=notes.append,
    )

    def wait_and_act() -> None:
        wait_for(lambda: bool(notes), what="a first try")
        act()

    thread = threading.Thread(target=wait_and_act)
    thread.start()
    code = run_machine(spec)
    thread.join()
    return code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_ends_a_machine_without_a_node(
    number: signal.Signals, credentials: Credentials
) -> None:
    """It leaves in peace, and a scheduler need not start it again."""
    code = exit_code(credentials, notice="", act=lambda: os.kill(os.getpid(), number))

    assert code == 0


def test_a_notice_ends_a_machine_without_a_node(credentials: Credentials, tmp_path: Path) -> None:
    """A head that took it would give it a node that is lost at once. The exit code has whoever
    starts machines start another one, which after a 0 need not be."""
    path = tmp_path / "leave"

    assert exit_code(credentials, notice=str(path), act=path.touch) == EXIT_LEFT


def _num_watches() -> int:
    return sum(thread.name == "notices" for thread in threading.enumerate())


@runs
async def test_a_machine_that_stays_heeds_the_notices_of_its_present_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It polled the source of its first job for good, and no other; without a node, as a spare, it
    heard nothing of its second job's."""
    before = _num_watches()
    job = JobConfig(cluster=ClusterConfig(patience_s=60.0, notice=str(tmp_path / "first")))
    async with offered_machine(tmp_path, monkeypatch, job=job, stays=True) as (made, running):
        line = await made.join()
        line.tell(JobOver(is_done=True, text="the job is finished"))
        line = await made.head.next_line()
        cluster = replace(job.cluster, notice=str(tmp_path / "second"))
        offer = made.offer("another run")
        line.tell(msgspec.structs.replace(offer, job=replace(offer.job, cluster=cluster)))
        await line.wait(MachineReady)
        await wait_until(lambda: _num_watches() == before + 1)
        (tmp_path / "second").touch()

        assert await running == EXIT_LEFT
    await wait_until(lambda: _num_watches() == before)


@runs
async def test_a_machine_whose_node_has_left_for_its_notice_offers_itself_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node had polled their source first; the head gave the machine another node at once."""
    job = JobConfig(cluster=ClusterConfig(patience_s=60.0, notice=str(tmp_path / "leave")))
    async with offered_machine(tmp_path, monkeypatch, job=job) as (made, running):
        line = await made.join()
        line.tell(made.request(0))
        await wait_until(lambda: "agent" in made.server.targets)
        await settle()
        made.server.end(NO_PID + 1, STATUS_NOTICED)

        await line.wait(MachineLeaving)  # Before the end of its node, so that it is not free.
        assert await line.wait(NodeEnded) == NodeEnded(node=0, status=STATUS_NOTICED)
        assert await running == EXIT_LEFT


@runs
async def test_a_machine_that_has_ended_polls_no_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads of machines that had ended read their files for as long as the process lived."""
    before = _num_watches()
    job = JobConfig(cluster=ClusterConfig(patience_s=60.0, notice=str(tmp_path / "leave")))
    async with offered_machine(tmp_path, monkeypatch, job=job) as (made, _):
        await made.join()
        assert _num_watches() == before + 1
    await wait_until(lambda: _num_watches() == before)


@runs
async def test_a_signal_reaches_a_node_that_has_not_heard_of_the_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine has seen a notice that was taken back before its node looked. It ignored the
    signal, and the node was killed."""
    told: list[int] = []
    monkeypatch.setattr(machine_node.MachineNode, "notify", lambda node: told.append(node.number))
    job = JobConfig(cluster=ClusterConfig(patience_s=60.0, notice=str(tmp_path / "leave")))
    async with offered_machine(tmp_path, monkeypatch, job=job) as (made, _):
        line = await made.join()
        line.tell(made.request(3))
        await wait_until(lambda: "runs node 3" in made.notes)
        (tmp_path / "leave").touch()
        await line.wait(MachineLeaving)
        assert told == []
        os.kill(os.getpid(), signal.SIGTERM)

        await wait_until(lambda: told == [3])
