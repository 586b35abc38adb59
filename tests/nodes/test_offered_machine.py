"""What a machine does with its node when its head is lost, comes back or begins anew."""

import asyncio
import errno
import os
import signal
import socket
import threading
from pathlib import Path
from typing import Any, NoReturn

import pytest

from helpers.fake_fork_server import NO_PID
from helpers.heads import head, runs
from helpers.machine_lines import fake_head
from helpers.offered_machines import offered_machine
from helpers.tasks import TIMEOUT_S, is_readable, settle, wait_until
from planaria.checkpoint.disk.parts import HeadMark, RunPlace
from planaria.checkpoint.disk.storage import Directory
from planaria.core.job import ClusterConfig, JobConfig
from planaria.core.machine_messages import (
    ExaminationRequested,
    JobOver,
    JobPrepared,
    LinkMeasured,
    LinkMeasureRequested,
    LinkServed,
    LinkServeRequested,
    MachineArrived,
    MachineExamined,
    MachineReady,
    MachineUnfit,
    NodeEnded,
    PrepareRequested,
)
from planaria.core.specs import PrepareRequest
from planaria.errors import ConfigError
from planaria.nodes import forking, known_heads, machine, machine_files, machine_node
from planaria.nodes.forking import RENEWALS_MAX
from planaria.nodes.machine import EXIT_AGAIN, EXIT_UNFINISHED
from planaria.nodes.part_reports import STATUS_SAVED
from planaria.transport.credentials import make_credentials
from planaria.transport.head_search import connect_first

JOB = JobConfig(cluster=ClusterConfig(patience_s=60.0))


@runs
async def test_patience_counts_from_the_loss_of_the_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that was reset counted from the first try, and took the node with it."""
    async with offered_machine(tmp_path, monkeypatch, job=JOB) as (made, running):
        line = await made.join()
        line.tell(made.request(0))
        await wait_until(lambda: "runs node 0" in made.notes)
        made.clock.ahead_s += 2 * JOB.cluster.patience_s
        line.reset()
        line = await made.head.next_line()

        arrived = await line.wait(MachineArrived)
        assert (arrived.run, arrived.node) == ("run", 0)
        assert not made.server.kills
        assert not running.done()


@runs
async def test_a_machine_without_a_head_waits_for_its_node_which_saves_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node gives the head up a lease later, and then writes: the machine killed it before."""
    assert await _code_without_head(tmp_path, monkeypatch, STATUS_SAVED) == 3


@runs
async def test_a_machine_without_a_head_is_to_be_started_again_if_its_node_has_saved_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await _code_without_head(tmp_path, monkeypatch, -9) == 75


@runs
async def test_a_machine_that_is_told_to_leave_without_a_head_has_not_left_in_peace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its node saves what it holds. It ended with 0, as if the job needed it no more."""
    async with offered_machine(tmp_path, monkeypatch, job=JOB) as (made, running):
        line = await made.join()
        line.tell(made.request(0))
        await wait_until(lambda: "runs node 0" in made.notes)
        await settle()
        os.kill(os.getpid(), signal.SIGTERM)
        await wait_until(lambda: "node 0 leaves the job" in made.notes)
        made.server.end(NO_PID + 1, STATUS_SAVED)

        assert await running == EXIT_UNFINISHED


async def _code_without_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int) -> int:
    """The exit code of a machine whose node ends with a status when there is no head any more."""
    monkeypatch.setattr(machine, "_RETRY_S", 0.0)
    async with offered_machine(tmp_path, monkeypatch, job=JOB) as (made, running):
        line = await made.join()
        line.tell(made.request(0))
        await wait_until(lambda: "runs node 0" in made.notes)
        await settle()
        made.head.close()
        line.reset()
        await wait_until(lambda: any("trying again" in note for note in made.notes))
        made.clock.ahead_s += 2 * JOB.cluster.patience_s
        await settle()
        assert not running.done()
        assert not made.server.kills
        made.server.end(NO_PID + 1, status)
        return await running


@runs
async def test_a_machine_finds_a_head_at_an_address_that_it_was_not_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads it at the place of saves of the job that it has taken."""
    monkeypatch.setattr(known_heads, "LOOK_PERIOD_S", 0.0)
    async with offered_machine(tmp_path, monkeypatch, job=JOB) as (made, _), fake_head() as other:
        line = await made.join()
        line.tell(made.request(0))
        await wait_until(lambda: "runs node 0" in made.notes)
        place = RunPlace(Directory(tmp_path / "saves"), "run-000001-a1")
        place.write_head(HeadMark(addresses=(other.address,)))
        made.head.close()
        line.reset()
        line = await other.next_line()

        arrived = await line.wait(MachineArrived)
        assert (arrived.run, arrived.node) == ("run", 0)


@runs
async def test_a_machine_passes_over_addresses_at_which_is_no_head_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One with another token file ended it, and each that was silent cost it ten seconds."""
    monkeypatch.setattr(machine, "_CONNECT_TIMEOUT_S", 1e6)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with (
            head(make_credentials()) as other,
            offered_machine(
                tmp_path,
                monkeypatch,
                job=JOB,
                other_heads=(silent.getsockname(), other.address),
            ) as (made, _),
        ):
            await made.join()


@runs
async def test_a_machine_whose_job_is_over_looks_for_the_next_one_at_all_addresses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head of the job that is over may still answer, and first."""
    monkeypatch.setattr(machine, "_RETRY_S", 0.0)
    async with (
        fake_head() as other,
        offered_machine(
            tmp_path, monkeypatch, job=JOB, stays=True, other_heads=(other.address,)
        ) as (made, _),
    ):
        line = await other.next_line()
        line.tell(made.offer())
        await line.wait(MachineReady)
        line.tell(JobOver(is_done=True, text="done"))
        line = await other.next_line()
        line.tell(made.offer())
        await made.join("another run")


@runs
async def test_the_end_of_a_node_of_another_run_is_not_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new run has a node of the same number, on another machine."""
    async with offered_machine(tmp_path, monkeypatch, job=JOB) as (made, _):
        line = await made.join()
        line.tell(made.request(0))
        await wait_until(lambda: "runs node 0" in made.notes)
        line.reset()
        line = await made.join("another run")

        assert made.server.kills
        assert not any(isinstance(message, NodeEnded) for message in line.heard)


@runs
async def test_a_machine_that_is_told_to_leave_while_it_connects_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It connected, and stayed until the end of the job without a node."""
    monkeypatch.setattr(machine, "_CONNECT_TIMEOUT_S", 1e6)
    async with offered_machine(tmp_path, monkeypatch, job=JOB) as (made, running):
        line = await made.head.next_line()
        line.close()
        made.head.close()
        with socket.create_server(made.head.address) as listener:
            listener.setblocking(False)
            sock, _ = await asyncio.get_running_loop().sock_accept(listener)
            os.kill(os.getpid(), signal.SIGTERM)

            assert await running == 0
            sock.close()


@runs
async def test_the_first_interrupt_after_a_notice_kills_no_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The notice was taken for a first interrupt, and the node lost what it would have saved."""
    async with offered_machine(tmp_path, monkeypatch, job=JOB) as (made, running):
        line = await made.join()
        line.tell(made.request(0))
        await wait_until(lambda: "runs node 0" in made.notes)
        os.kill(os.getpid(), signal.SIGTERM)
        await wait_until(lambda: "node 0 leaves the job" in made.notes)
        os.kill(os.getpid(), signal.SIGINT)
        await settle()

        assert not running.done()
        assert not made.server.kills


@runs
async def test_a_driver_that_hangs_holds_up_no_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What devices there are was read on the event loop, for each connection."""
    asked, answers = threading.Event(), threading.Event()

    def hang(*_: object) -> NoReturn:
        asked.set()
        answers.wait(TIMEOUT_S)
        raise OSError("the driver is gone")

    monkeypatch.setattr(machine, "facts_of_this_machine", hang)
    async with offered_machine(tmp_path, monkeypatch, job=JOB) as (_, running):
        await wait_until(asked.is_set)
        os.kill(os.getpid(), signal.SIGTERM)

        assert await running == 0
    answers.set()


@runs
async def test_a_machine_that_is_told_to_leave_during_the_import_of_torch_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which may take minutes from a slow disk."""
    async with offered_machine(tmp_path, monkeypatch, job=JOB) as (made, running):
        line = await made.head.next_line()
        made.are_servers_ready = False
        line.tell(made.offer())
        await wait_until(lambda: bool(made.servers))
        os.kill(os.getpid(), signal.SIGTERM)

        assert await running == 0


@runs
async def test_the_head_hears_of_the_end_of_a_node_with_which_its_machine_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with offered_machine(tmp_path, monkeypatch, job=JOB) as (made, running):
        line = await made.join()
        made.server.is_still = True
        line.tell(made.request(0))
        await wait_until(lambda: "agent" in made.server.targets)
        os.kill(os.getpid(), signal.SIGTERM)

        assert (await line.wait(NodeEnded)).node == 0
        assert await running == 0


@runs
async def test_a_machine_whose_disk_is_full_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the head and to its user; it ended with a traceback, or crashed when it came back."""

    def refuse(*_: object, **__: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "models.py")

    monkeypatch.setattr(machine, "unpack_sources", refuse)
    async with offered_machine(tmp_path, monkeypatch, job=JOB) as (made, running):
        line = await made.head.next_line()
        line.tell(made.offer())

        reason = (await line.wait(MachineUnfit)).reason
        assert "No space left on device: 'models.py'; make room" in reason
        assert await running == EXIT_AGAIN


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EACCES])
@runs
async def test_a_machine_may_come_again_if_its_files_may_be_read_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A file server that was started anew while they were read ended the machine for good."""

    def refuse(*_: object, **__: object) -> dict[str, str]:
        error = OSError(number, os.strerror(number), "data.bin")
        raise ConfigError("data.path", "data.bin", f"it cannot be read here: {error}") from error

    monkeypatch.setattr(machine_files, "input_digests", refuse)
    async with offered_machine(tmp_path, monkeypatch, job=JOB) as (made, running):
        line = await made.head.next_line()
        line.tell(made.offer())

        assert os.strerror(number) in (await line.wait(MachineUnfit)).reason
        if number == errno.ESTALE:
            assert await running == EXIT_AGAIN
        else:
            with pytest.raises(ConfigError, match=os.strerror(number)):
                await running


@runs
async def test_a_machine_that_can_fork_nothing_is_to_be_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stayed there, idle, and its user was not told why."""
    monkeypatch.setattr(forking, "PAUSE_S", 0.0)
    monkeypatch.setattr(machine_node, "_LOOK_PERIOD_S", 0.0)
    async with offered_machine(tmp_path, monkeypatch, job=JOB) as (made, running):
        line = await made.join()
        made.server.renewals.extend(["hangs", *["it is gone"] * 3 * RENEWALS_MAX])
        made.server.lose("it is gone")
        line.tell(made.request(0))
        await wait_until(lambda: made.server.num_renewals == 1)
        made.server.lose("it is gone")

        assert (await line.wait(NodeEnded)).node == 0
        assert "it is gone" in (await line.wait(MachineUnfit)).reason
        assert await running == 75
        assert any("cannot take part: it is gone" in note for note in made.notes)


@runs
async def test_a_node_goes_on_where_no_other_can_be_forked_when_its_head_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine asked for a fork server at each connection, and killed the node without one."""
    monkeypatch.setattr(forking, "PAUSE_S", 0.0)
    async with offered_machine(tmp_path, monkeypatch, job=JOB) as (made, running):
        line = await made.run_node()
        made.server.renewals.extend(["it is gone"] * 3 * RENEWALS_MAX)
        made.server.lose("it is gone")
        await wait_until(lambda: any("can be started any more" in note for note in made.notes))
        line.reset()
        line = await made.join()

        assert not made.server.kills
        assert not running.done()
        made.server.end(NO_PID + 1, 0)
        assert (await line.wait(NodeEnded)).node == 0


@runs
async def test_what_a_machine_finds_for_an_earlier_run_is_not_told_in_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head would plan the next run by it; and two measurements disturb one another."""
    asked: list[asyncio.Future[bytes]] = []

    async def prepare(*_: object) -> bytes:
        asked.append(asyncio.get_running_loop().create_future())
        return await asked[-1]

    monkeypatch.setattr(machine_node.MachineNode, "prepare", prepare)
    async with offered_machine(tmp_path, monkeypatch, job=JOB) as (made, _):
        line = await made.join()
        line.tell(PrepareRequested(PrepareRequest(job=JOB, cache_directory="")))
        await wait_until(lambda: len(asked) == 1)
        line.reset()
        line = await made.join("another run")

        assert asked[0].cancelled()
        line.tell(PrepareRequested(PrepareRequest(job=JOB, cache_directory="")))
        await wait_until(lambda: len(asked) == 2)
        asked[1].set_result(b"")
        await line.wait(JobPrepared)


@runs
async def test_a_machine_hears_within_a_lease_that_its_head_has_lost_its_power(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its node looked for the next head, but the machine did not for minutes, and that head waits
    for machines."""
    asked_s: list[float] = []
    monkeypatch.setattr(
        machine, "break_when_silent", lambda _sock, silent_s: asked_s.append(silent_s)
    )
    async with offered_machine(tmp_path, monkeypatch, job=JOB) as (made, _):
        await made.join()

        assert asked_s == [JOB.cluster.lease_s]


@runs
async def test_a_machine_leaves_a_stopped_head_that_its_node_has_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel of such a head keeps the connection for ever, and the machine waited for it."""
    monkeypatch.setattr(machine, "_RETRY_S", 0.0)
    async with offered_machine(tmp_path, monkeypatch, job=JOB) as (made, running):
        line = await made.run_node()
        os.eventfd_write(made.server.fds[1], 1)
        await line.wait_end()
        made.head.close()
        made.server.end(NO_PID + 1, STATUS_SAVED)

        assert await running == EXIT_UNFINISHED


@runs
async def test_a_node_that_gives_its_head_up_for_another_leaves_the_machine_with_that_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with offered_machine(tmp_path, monkeypatch, job=JOB) as (made, _):
        line = await made.run_node(parts="run-000001-00")
        given_up_fd = made.server.fds[1]
        line.reset()
        line = await made.head.next_line()
        line.tell(made.offer("another run"))
        await settle()
        os.eventfd_write(given_up_fd, 1)
        await settle()
        made.server.end(NO_PID + 1, STATUS_SAVED)

        await line.wait(MachineReady)


@pytest.mark.parametrize("is_heard", [True, False])
@runs
async def test_a_node_of_a_lost_run_saves_though_the_next_head_ends_before_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_heard: bool
) -> None:
    """It was killed after ten seconds, with the newest state, when that head was interrupted."""
    monkeypatch.setattr(machine_node, "_LEAVE_TIMEOUT_S", 0.0)
    async with offered_machine(tmp_path, monkeypatch, job=JOB) as (made, running):
        line = await made.run_node(parts="run-000001-00")
        line.reset()
        line = await made.head.next_line()
        line.tell(made.offer("another run"))
        if is_heard:
            await wait_until(lambda: is_readable(made.server.fds[2]))
        line.tell(JobOver(is_done=False, text="the head ended the job"))
        await line.wait_end()
        await wait_until(lambda: is_readable(made.server.fds[2]))
        await settle()

        assert not made.server.kills
        assert not running.done()
        made.server.end(NO_PID + 1, STATUS_SAVED)
        assert await running == EXIT_UNFINISHED


@runs
async def test_a_machine_that_stays_takes_no_job_that_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It came back before the head had closed its port, and waited for that head in vain, at the
    end of its patience with exit code 75."""
    async with offered_machine(tmp_path, monkeypatch, job=JOB, stays=True) as (made, running):
        line = await made.join()
        line.tell(JobOver(is_done=True, text="the job is finished"))
        line = await made.head.next_line()
        line.tell(made.offer())
        await line.wait_end()
        made.clock.ahead_s += 2 * JOB.cluster.patience_s
        await made.join("another run")

        assert not running.done()


@runs
async def test_a_machine_that_stays_waits_without_end_for_the_next_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its node has ended by then. It ended with exit code 75."""
    async with offered_machine(tmp_path, monkeypatch, job=JOB, stays=True) as (made, running):
        line = await made.join()
        line.tell(made.request(0))
        await wait_until(lambda: "runs node 0" in made.notes)
        line.reset()
        for _ in range(3):
            made.clock.ahead_s += 2 * JOB.cluster.patience_s
            (await made.head.next_line()).reset()
        line = await made.join("another run")

        assert not running.done()
        assert made.server.kills


@runs
async def test_a_question_that_cannot_be_answered_ends_no_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error while `planaria doctor` looked at a machine ended its agent, and its node."""

    def fail(*_: object, **__: object) -> NoReturn:
        raise RuntimeError("no such file")

    for name in ("checks_of_this_machine", "serve_link", "measured_link"):
        monkeypatch.setattr(machine, name, fail)
    async with offered_machine(tmp_path, monkeypatch, job=JOB) as (made, running):
        line = await made.join()
        line.tell(made.request(0))
        await wait_until(lambda: "runs node 0" in made.notes)
        line.tell(ExaminationRequested(1))
        (check,) = (await line.wait(MachineExamined)).checks
        line.tell(LinkServeRequested(b"", 2))
        served = await line.wait(LinkServed)
        line.tell(LinkMeasureRequested(address=("", 0), secret=b"", number=3))
        measured = await line.wait(LinkMeasured)

        assert (check.value, check.verdict) == ("RuntimeError('no such file')", "warning")
        assert served == LinkServed(0, 2)
        reason = "it raised RuntimeError('no such file')"
        assert measured == LinkMeasured(reason=reason, number=3)
        assert not running.done()
        assert not made.server.kills


@runs
async def test_a_node_that_has_given_its_head_up_is_not_offered_to_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That head took it for a living one and waited for it, while it saved and ended."""
    monkeypatch.setattr(machine, "_RETRY_S", 0.0)
    async with offered_machine(tmp_path, monkeypatch, job=JOB) as (made, running):
        line = await made.join()
        line.tell(made.request(0))
        await wait_until(lambda: "agent" in made.server.targets)
        await settle()
        os.eventfd_write(made.server.fds[1], 1)
        await line.wait_end()
        await wait_until(lambda: any("trying again" in note for note in made.notes))
        await settle()
        made.server.end(NO_PID + 1, STATUS_SAVED)
        line = await made.head.next_line()

        assert (await line.wait(MachineArrived)).node == -1
        line.tell(made.offer())
        assert (await line.wait(NodeEnded)) == NodeEnded(node=0, status=STATUS_SAVED)
        assert not running.done()


@runs
async def test_a_node_that_gives_its_head_up_while_its_machine_connects_is_not_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was looked at before the connection was made alone, which may take ten seconds."""
    monkeypatch.setattr(machine, "_RETRY_S", 0.0)
    async with offered_machine(tmp_path, monkeypatch, job=JOB) as (made, _):
        line = await made.run_node()
        given_up_fd = made.server.fds[1]

        async def connect(*args: Any, **options: Any) -> Any:
            connection = await connect_first(*args, **options)
            os.eventfd_write(given_up_fd, 1)
            await settle()
            return connection

        monkeypatch.setattr(machine, "connect_first", connect)
        line.reset()
        line = await made.head.next_line()
        await line.wait_end()
        assert line.heard == []
        made.server.end(NO_PID + 1, STATUS_SAVED)
        line = await made.head.next_line()

        assert (await line.wait(MachineArrived)).node == -1
