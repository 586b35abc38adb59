"""Where nodes and agents that have lost their head look for one, and in which order."""

import asyncio
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import msgspec
import pytest

from helpers.heads import CREDENTIALS, runs
from helpers.machine_lines import FakeHead, fake_head
from helpers.offered_machines import node_spec, offered_machine
from helpers.tasks import TIMEOUT_S, settle, wait_until
from planaria.checkpoint.disk.parts import HeadMark, RunPlace
from planaria.checkpoint.disk.storage import Directory
from planaria.core.job import CheckpointConfig, JobConfig
from planaria.core.machine_messages import MachineArrived, MachineReady, NodeRequested
from planaria.errors import CheckpointError
from planaria.nodes import child_answers, machine
from planaria.nodes.child_answers import answer_of_child
from planaria.nodes.known_heads import (
    LOOK_PERIOD_S,
    KnownHeads,
    Look,
    endpoints_by_child,
    look_by_child,
    look_by_thread,
)
from planaria.transport.acceptor import Purpose, connect
from planaria.transport.sockets import Address, address_text

GIVEN = (("10.0.0.1", 7320), ("10.0.0.2", 7320))
NEW = (("10.0.0.3", 7320), ("10.0.0.4", 7320))
PLACE = "saves"


class Written:
    """The addresses that heads have written at the place of saves.

    Attributes:
        addresses: those that a look finds; None: the place refuses.
        places: the places that were looked at.
        now_s: time of the clock, in seconds.
    """

    def __init__(self) -> None:
        self.addresses: tuple[Address, ...] | None = ()
        self.places: list[str] = []
        self.now_s = 100.0

    async def look(self, place: str) -> tuple[Address, ...]:
        self.places.append(place)
        if self.addresses is None:
            raise CheckpointError("the place refuses")
        return self.addresses

    def heads(self, place: str = PLACE) -> KnownHeads:
        return KnownHeads(GIVEN, self.look, place=place, clock_s=lambda: self.now_s)


async def tries(heads: KnownHeads) -> tuple[Address, ...]:
    """The addresses that are tried next, where a look is over before the next try."""
    addresses = heads.next_addresses()
    await asyncio.sleep(0.0)
    return addresses


@runs
async def test_all_given_addresses_are_tried_the_one_that_was_kept_first() -> None:
    heads = Written().heads()
    assert await tries(heads) == GIVEN
    assert await tries(heads) == GIVEN
    heads.keep(GIVEN[1])
    assert await tries(heads) == (GIVEN[1], GIVEN[0])
    assert heads.num_addresses == 2


@runs
async def test_an_address_that_answers_in_vain_is_left_out_until_others_were_tried() -> None:
    """A head of another job may answer first each time, and the right one would not be found."""
    heads = Written().heads()
    heads.leave_out(GIVEN[0])
    assert await tries(heads) == GIVEN[1:]
    assert await tries(heads) == GIVEN  # The other did not answer.

    for address in GIVEN:
        heads.leave_out(address)
    assert await tries(heads) == GIVEN

    heads.leave_out(GIVEN[0])
    heads.keep(GIVEN[0])
    assert await tries(heads) == GIVEN


@runs
async def test_new_addresses_are_tried_first_together_with_the_given_ones() -> None:
    written = Written()
    heads = written.heads()
    written.now_s += LOOK_PERIOD_S
    written.addresses = (*NEW, GIVEN[1])
    assert await tries(heads) == GIVEN  # The look has begun with it.

    assert await tries(heads) == (*NEW, GIVEN[1], GIVEN[0])
    assert heads.num_addresses == 4
    heads.keep(GIVEN[0])
    written.now_s += LOOK_PERIOD_S
    await tries(heads)
    assert await tries(heads) == (GIVEN[0], *NEW, GIVEN[1])  # They are not new any more.


@runs
async def test_addresses_of_an_older_head_give_way_and_the_given_ones_never_do() -> None:
    written = Written()
    heads = written.heads()
    for addresses, expected in (
        (NEW[:1], {*GIVEN, NEW[0]}),
        (NEW[1:], {*GIVEN, NEW[1]}),
        ((), {*GIVEN, NEW[1]}),  # Nothing can be read any more.
        (None, {*GIVEN, NEW[1]}),
        (tuple((f"10.0.1.{n}", 7320) for n in range(8)), None),
    ):
        written.addresses = addresses
        written.now_s += LOOK_PERIOD_S
        await tries(heads)
        if expected is not None:
            assert set(await tries(heads)) == expected

    assert heads.num_addresses == len(GIVEN) + 4  # Nodes in hundreds try them all.
    for act in (heads.leave_out, heads.keep):
        act(NEW[1])  # It has answered although another head has written since.
    assert set(GIVEN) <= set(await tries(heads))


@runs
async def test_a_place_is_looked_at_every_five_seconds_at_most() -> None:
    """A head is lost by hundreds of nodes at once. A look that hangs is the only one."""
    written = Written()
    heads = written.heads()
    await tries(heads)  # A head was there a moment ago.
    assert written.places == []
    for num_looks in (1, 2):
        written.now_s += LOOK_PERIOD_S
        await tries(heads)
        assert written.places == [PLACE] * num_looks

    hanging = asyncio.Event()
    num_hanging = 0

    async def hang(_: str) -> tuple[Address, ...]:
        nonlocal num_hanging
        num_hanging += 1
        await hanging.wait()
        return NEW

    heads = KnownHeads(GIVEN, hang, place=PLACE, clock_s=lambda: written.now_s)
    for _ in range(3):
        written.now_s += LOOK_PERIOD_S
        await tries(heads)
    assert num_hanging == 1
    hanging.set()
    await wait_until(lambda: heads.num_addresses == 4)


@runs
async def test_nothing_is_looked_at_where_no_place_is_known() -> None:
    written = Written()
    written.addresses = NEW
    heads = written.heads(place="")
    written.now_s += LOOK_PERIOD_S
    await tries(heads)
    assert heads.num_addresses == 2
    heads.look_at(PLACE)
    await tries(heads)
    assert heads.num_addresses == 4


@runs
async def test_a_machine_that_stays_forgets_where_heads_of_the_last_job_were() -> None:
    """Also what a look finds that ends after the job."""
    hanging = asyncio.Event()
    written = Written()

    async def hang(_: str) -> tuple[Address, ...]:
        await hanging.wait()
        return NEW

    heads = KnownHeads(GIVEN, hang, place=PLACE, clock_s=lambda: written.now_s)
    hanging.set()
    written.now_s += LOOK_PERIOD_S
    await tries(heads)
    assert heads.num_addresses == 4
    hanging.clear()
    written.now_s += LOOK_PERIOD_S
    await tries(heads)
    heads.look_at("")
    assert heads.num_addresses == 2
    hanging.set()
    await settle()
    assert heads.num_addresses == 2


@pytest.mark.parametrize("look", [look_by_thread(), look_by_child], ids=["thread", "child"])
def test_the_newest_run_s_head_is_read_by_a_thread_or_a_child_process(
    look: Look, tmp_path: Path
) -> None:
    async def read() -> tuple[Address, ...]:
        return await look(str(tmp_path))

    assert asyncio.run(read()) == ()
    storage = Directory(tmp_path)
    RunPlace(storage, "run-000001-a1").write_head(HeadMark(addresses=GIVEN))
    RunPlace(storage, "run-000002-b2").write_head(HeadMark(addresses=NEW))
    assert asyncio.run(read()) == NEW

    storage.write("run-000003-c3/head", b"no mark", may_write=lambda: True)
    assert asyncio.run(read()) == ()


def test_an_agent_ends_while_a_child_that_was_killed_lives_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one does that waits for a disk: the kernel kills it only when the disk has answered."""
    forks: list[tuple[int, socket.socket]] = []

    def fork(_: object) -> tuple[int, socket.socket]:
        sock, far = socket.socketpair()
        process = subprocess.Popen(["sleep", "3600"])
        processes.append(process)
        forks.append((process.pid, far))
        return process.pid, sock

    async def cancel() -> None:
        asking = asyncio.create_task(answer_of_child(lambda: b"", timeout_s=3600.0))
        await wait_until(lambda: bool(forks))
        await settle()
        asking.cancel()
        await asyncio.wait((asking,), timeout=20.0)
        assert asking.cancelled()

    def never(_: int) -> asyncio.Future[int]:
        return asyncio.get_running_loop().create_future()

    processes: list[subprocess.Popen[bytes]] = []
    monkeypatch.setattr(child_answers, "fork_answer", fork)
    monkeypatch.setattr(child_answers, "_exit_status", never)
    asyncio.run(cancel())
    forks[0][1].close()

    assert processes[0].wait(timeout=60.0) == -signal.SIGKILL


def test_a_child_process_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk may never answer. No process is left behind."""
    pids: list[int] = []
    fork = child_answers.fork_answer

    def noted_fork(answer: object) -> object:
        forked = fork(answer)  # type: ignore[arg-type]
        pids.append(forked[0])
        return forked

    def hang() -> bytes:
        time.sleep(3600.0)
        return b"late"

    monkeypatch.setattr(child_answers, "fork_answer", noted_fork)

    assert asyncio.run(answer_of_child(hang, timeout_s=0.2)) == b""
    assert len(pids) == 1
    assert not Path(f"/proc/{pids[0]}").exists()


@runs
async def test_an_agent_looks_a_name_up_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """It forks workers, and a resolver that does not answer keeps its thread for half a minute."""

    def refuse(_: object) -> None:
        raise AssertionError("a thread is started")

    monkeypatch.setattr(threading.Thread, "start", refuse)

    assert (socket.AF_INET, ("127.0.0.1", 7)) in await endpoints_by_child(("localhost", 7))
    assert await endpoints_by_child(("10.0.0.1", 7)) == [(socket.AF_INET, ("10.0.0.1", 7))]
    for name in ("no.invalid", "a..b"):
        with pytest.raises(ConnectionError, match=r"the name does not resolve \(.+\); name the"):
            await connect(
                (name, 1),
                Purpose.NODE,
                CREDENTIALS,
                timeout_s=TIMEOUT_S,
                resolve=endpoints_by_child,
            )


@runs
async def test_a_machine_keeps_its_node_from_the_head_of_another_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own head was away for a moment, and the other one answered: the machine ended the node,
    which could have waited for minutes."""
    for name in ("_RETRY_S", "_OTHER_JOB_PAUSE_S"):
        monkeypatch.setattr(machine, name, 0.0)
    job = JobConfig()
    async with (
        fake_head() as own,
        offered_machine(tmp_path, monkeypatch, job=job, other_heads=(own.address,)) as (made, _),
    ):
        line = await own.next_line()
        line.tell(made.offer())
        await line.wait(MachineReady)
        spec = msgspec.structs.replace(node_spec(job, 0), parts="run-000001-00")
        line.tell(NodeRequested(spec))
        await wait_until(lambda: "runs node 0" in made.notes)
        await settle()
        own.close()
        line.reset()
        line = await made.head.next_line()
        other = JobConfig(name="other", checkpoint=CheckpointConfig(directory="other saves"))
        line.tell(msgspec.structs.replace(made.offer("another run"), job=other))
        await line.wait_end()
        back = FakeHead(address_text(own.address))
        line = await back.next_line()

        arrived = await line.wait(MachineArrived)
        assert (arrived.run, arrived.node) == ("run", 0)
        assert not made.server.kills
        assert any("has another job, 'other', and node 0 lives" in note for note in made.notes)
        back.close()
