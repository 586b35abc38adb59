"""How a job's processes are forked whatever becomes of the fork server and the machine's means."""

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from helpers.fake_fork_server import LOSS, FakeForkServer
from helpers.tasks import TIMEOUT_S, settle, wait_until
from planaria.errors import InsufficientError
from planaria.nodes import forking
from planaria.nodes.forking import RENEWALS_MAX, TRIES_MAX, Forker
from planaria.nodes.forkserver import ForkServer

SHORT = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
NO_OTHER = InsufficientError("no other one can be started (Cannot allocate memory)")


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PAUSE_S", "PAUSE_S_MAX", "SHORTAGE_PAUSE_S"):
        monkeypatch.setattr(forking, name, 0.001)


class Job:
    """What a forker tells, of a job whose coordinator lives.

    Attributes:
        agents: the pid of each node's agent.
    """

    def __init__(self, server: FakeForkServer) -> None:
        self.server = server
        self.agents: dict[int, int] = {}
        self.exits: list[tuple[int, int]] = []
        self.notes: list[str] = []
        self.errors: list[Exception] = []
        self.forker = Forker(
            cast(ForkServer, server),
            on_fork=self.agents.__setitem__,
            on_exit=lambda pid, status: self.exits.append((pid, status)),
            note=self.notes.append,
            meanwhile=lambda: ", and training goes on meanwhile",
            on_error=self.errors.append,
        )

    async def wait_agents(self, *nodes: int) -> None:
        await wait_until(lambda: set(nodes) <= self.agents.keys())


@asynccontextmanager
async def job() -> AsyncIterator[Job]:
    """A job that forks."""
    server = FakeForkServer()
    one = Job(server)
    one.forker.begin()
    async with asyncio.timeout(TIMEOUT_S):
        yield one
    one.forker.close()
    server.close()
    assert not one.errors


def run(test: Callable[[Job], Coroutine[Any, Any, None]]) -> Job:
    """Runs a test inside a job."""

    async def inside() -> Job:
        async with job() as one:
            await test(one)
        return one

    return asyncio.run(inside())


def test_nodes_are_forked_in_turn_and_their_ends_are_told() -> None:
    """Also of one that is killed before anybody has taken note of it."""

    async def test(job: Job) -> None:
        for node in (3, 4):
            job.forker.add(node, b"", ())
        assert job.forker.nodes == (3, 4)
        await job.wait_agents(3, 4)
        assert job.agents[3] < job.agents[4]
        job.server.end(job.agents[4], -9)
        await wait_until(lambda: job.exits == [(job.agents[4], -9)])

    assert run(test).notes == []


def test_a_node_for_which_the_machine_is_short_is_started_later() -> None:
    """Without descriptors the launcher tried for ever in a hot loop."""

    async def test(job: Job) -> None:
        job.server.asks.extend([SHORT, SHORT, SHORT])
        job.forker.add(0, b"", ())
        await job.wait_agents(0)

    (note,) = run(test).notes
    assert note == "node 0 cannot be started now (Too many open files); planaria tries again"


def test_a_job_that_ends_meanwhile_starts_no_node_any_more() -> None:
    """Its lifeline is closed: the number is another file's by then."""

    async def test(job: Job) -> None:
        job.server.is_still = True
        job.forker.add(0, b"", ())
        await wait_until(lambda: job.server.targets == ["agent"])
        job.forker.add(1, b"", ())
        job.forker.stop()
        job.server.is_still = False
        job.server.end(1, 0)
        await wait_until(lambda: job.exits == [(1, 0)])
        await settle()
        assert job.server.targets == ["agent"]

    assert not run(test).agents


def test_a_node_that_is_not_wanted_any_more_is_not_forked() -> None:
    """Its machine was given back while there was no fork server."""

    async def test(job: Job) -> None:
        job.server.lose(LOSS)
        for node in (0, 1):
            job.forker.add(node, b"", ())
        job.forker.drop(0)
        await job.wait_agents(1)

    assert run(test).agents.keys() == {1}


def test_a_lost_server_is_renewed_and_what_waits_is_forked() -> None:
    """It is said once it is so."""

    async def test(job: Job) -> None:
        job.server.lose(LOSS)
        job.forker.add(0, b"", ())
        await job.wait_agents(0)

    assert run(test).notes == [
        f"{LOSS}: another one is started, and training goes on meanwhile",
    ]


def test_a_shortage_of_memory_is_waited_out_while_a_coordinator_lives() -> None:
    """Exactly when the OOM killer took the server no other can be started at once."""

    async def test(job: Job) -> None:
        job.server.renewals.extend([NO_OTHER] * 3 * TRIES_MAX)
        job.server.lose(LOSS)
        job.forker.add(0, b"", ())
        await job.wait_agents(0)

    assert run(test).notes == [
        f"{LOSS}; {NO_OTHER}; planaria tries again",
        f"{LOSS}: another one is started, and training goes on meanwhile",
    ]


def test_a_coordinator_waits_for_a_server_as_long_as_there_may_be_one() -> None:
    """Nodes live, and would be thrown away unsaved; so it is tried again, to save."""

    async def test(job: Job) -> None:
        job.server.renewals.extend([NO_OTHER] * (TRIES_MAX + 1))
        job.server.lose(LOSS)
        assert not await job.forker.wait_ready()
        assert job.server.num_renewals == TRIES_MAX
        assert job.forker.failure == f"{LOSS}; {NO_OTHER}"
        assert await job.forker.wait_ready()

    assert "no node can be started any more" not in "".join(run(test).notes)


def test_a_server_that_never_stays_is_given_up_until_one_is_needed_to_save() -> None:
    """What kills it kills it again; a commit with one that is there says that this one stays."""

    async def test(job: Job) -> None:
        job.server.renewals.extend([LOSS] * RENEWALS_MAX)
        job.server.lose(LOSS)
        await wait_until(lambda: bool(job.forker.failure))
        assert job.server.num_renewals == RENEWALS_MAX
        assert job.forker.failure == f"{LOSS}, like the fork servers before it"
        assert await job.forker.wait_ready()
        job.forker.on_commit()
        job.server.renewals.extend([LOSS] * (RENEWALS_MAX - 1))
        job.server.lose(LOSS)
        assert await job.forker.wait_ready()

    notes = run(test).notes
    assert (
        notes[RENEWALS_MAX]
        == f"{LOSS}, like the fork servers before it: no node can be started any more"
    )
    assert notes.count(notes[0]) == len(notes) - 1


def test_a_server_that_hangs_in_an_import_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's modules may lie on a disk that is gone: it is never ready, and never lost."""
    monkeypatch.setattr(forking, "IMPORT_TIMEOUT_S", 0.01)

    async def test(job: Job) -> None:
        job.server.renewals.extend(["hangs", "hangs"])
        job.server.lose(LOSS)
        assert await job.forker.wait_ready()

    assert run(test).notes[1] == (
        "the fork server stood still and was killed: another one is started, and training goes on "
        "meanwhile"
    )


def test_a_server_that_stands_still_holds_up_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """No signal was handled for 30 s, which is all that a scheduler gives."""
    monkeypatch.setattr(forking, "FORK_TIMEOUT_S", 0.05)
    handled: list[None] = []

    async def test(job: Job) -> None:
        job.server.is_still = True
        asyncio.get_running_loop().call_later(0.01, handled.append, None)
        with pytest.raises(InsufficientError, match="stood still and was killed"):
            await job.forker.spawn("planaria.nodes.head.leader:main", b"", ())
        assert handled
        job.forker.add(0, b"", ())
        await job.wait_agents(0)

    run(test)


def test_what_is_our_mistake_is_told_and_nobody_waits_for_a_server() -> None:
    """Who waits for one is not left waiting for ever."""

    async def test(job: Job) -> None:
        job.server.renewals.append(ZeroDivisionError())
        job.server.lose(LOSS)
        assert not await job.forker.wait_ready()
        assert not await job.forker.wait_ready()
        assert [type(error) for error in job.errors] == [ZeroDivisionError]
        job.errors.clear()

    run(test)


def test_who_waits_for_a_server_has_all_tries() -> None:
    """Whatever was tried while nobody waited."""

    async def test(job: Job) -> None:
        job.server.renewals.extend([NO_OTHER] * (4 * TRIES_MAX))
        job.server.lose(LOSS)
        await wait_until(lambda: job.server.num_renewals > 2 * TRIES_MAX)
        before = job.server.num_renewals

        assert not await job.forker.wait_ready()
        assert job.server.num_renewals - before >= TRIES_MAX - 1

    run(test)
