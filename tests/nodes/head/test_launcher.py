"""What a launcher does when something goes wrong around it; its processes are the test's."""

import asyncio
import errno
import logging
import os
import signal
import socket
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from helpers.command import keep_request_sockets_in
from helpers.fake_fork_server import LOSS, NO_PID, FakeForkServer, Lead, Line
from helpers.jobs import leader_spec, shaped_plan
from helpers.tasks import wait_until
from planaria.checkpoint.disk.tiers import tier_of
from planaria.core.kinds import Ending, LossKind
from planaria.core.messages import DrainRequested, StopRequested
from planaria.core.plan import Plan
from planaria.core.records import (
    Ended,
    Leading,
    Members,
    Recorded,
    Recovering,
    Running,
    ToLauncher,
    Warned,
)
from planaria.core.specs import NodeSpec
from planaria.nodes import forking
from planaria.nodes.forking import RENEWALS_MAX
from planaria.nodes.forkserver import ForkServer
from planaria.nodes.head import job_processes, leader_runner, requests
from planaria.nodes.head.launcher import Launcher, LaunchSpec
from planaria.nodes.head.leader_runner import SHORT_TRIES_MAX
from planaria.nodes.head.process_events import LEAVE_SIGNALS, restore_handlers
from planaria.nodes.head.request_socket import ask
from planaria.nodes.head.requests import Drain, RequestReply
from planaria.observe.metrics import EventRecord

AGAIN = OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))


class Observer:
    """See Observer; it does what the test says when it is told something.

    Attributes:
        notes: the warnings.
        acts: what is done, once, when a name or text is told that begins so.
    """

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.acts: dict[str, Callable[[], object]] = {}

    def _told(self, what: str) -> None:
        for beginning in [one for one in self.acts if what.startswith(one)]:
            self.acts.pop(beginning)()

    def on_message(self, message: ToLauncher) -> None:
        if isinstance(message, Warned):
            self.notes.append(message.text)
            self._told(message.text)
        self._told(type(message).__name__)

    def on_fault(self, *_: object, **__: object) -> None:
        self._told("fired")

    def on_coordinator_restart(self, **_: object) -> None:
        self._told("restarted")

    def on_grant(self, *_: object, **__: object) -> None:
        self._told("granted")

    def on_stop_request(self, _: str) -> None:
        self._told("stopping")

    stop_reason = ""

    def events(self) -> tuple[EventRecord, ...]:
        return ()


def fail() -> None:
    raise ZeroDivisionError


def end_message(ending: str, reason: str = "") -> Ended:
    return Ended(ending=Ending(ending), reason=reason, failure=None, nodes=(0,), epoch=0)


def running(line: Line) -> Running:
    """A job of one node begins to train."""
    return Running(
        epoch=0,
        plan=line.spec.plan,
        members=(0,),
        workers={},
        materialised={},
        received_bytes=0,
        regroup_s=0.0,
        transfer_s=0.0,
        now_s=0.0,
        predicted_s=0.5,
    )


class Launched:
    """A job, of one node unless its plan is another one.

    Attributes:
        lines: of the coordinators, in their order.
    """

    def __init__(self, lead: Lead, directory: Path, plan: Plan | None = None) -> None:
        self.observer = Observer()
        self.lines: list[Line] = []

        async def led(line: Line) -> None:
            self.lines.append(line)
            line.say(Leading(term=len(self.lines), now_s=0.0))
            await lead(line)

        self.server = FakeForkServer(led)
        spec = leader_spec(directory)
        if plan is not None:
            spec = msgspec.structs.replace(spec, plan=plan)
        node = NodeSpec(
            job=spec.job, node=0, token=b"", coordinator=("", 0), worker="", cache_directory=""
        )
        self._launcher = Launcher(
            LaunchSpec(node, spec),
            server=cast(ForkServer, self.server),
            observer=self.observer,
            tier=tier_of(spec.job.checkpoint.directory),
        )

    def run(self) -> Ended:
        with restore_handlers():
            ended = self._launcher.run()
        if self._launcher.error is not None:
            raise self._launcher.error
        return ended

    def run_in_notebook(self) -> Ended:
        """The same in a thread whose loop runs."""

        async def cell() -> Ended:
            return self.run()

        return asyncio.run(cell())


Launch = Callable[..., Launched]


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launch]:
    """Makes a job whose coordinators do what is given; no process is ever killed."""
    made: list[Launched] = []

    def kill_group(pid: int) -> None:
        made[-1].server.kill_group(pid)

    for module in (leader_runner, forking, job_processes):
        monkeypatch.setattr(module, "kill_group", kill_group)
    for module in (leader_runner, forking):
        monkeypatch.setattr(module, "SHORTAGE_PAUSE_S", 0.001)
    monkeypatch.setattr(forking, "PAUSE_S", 0.001)
    keep_request_sockets_in(tmp_path / "desk", monkeypatch)

    def launched(lead: Lead, plan: Plan | None = None) -> Launched:
        made.append(Launched(lead, tmp_path, plan))
        return made[-1]

    yield launched
    for one in made:
        assert all(pid > 0 for pid in one.server.kills)
        one.server.close()


async def save(line: Line) -> None:
    """Ends as soon as it is to save."""
    if line.spec.rescue is not None:
        line.say(end_message("lost", line.spec.rescue.reason))
    await line.heard()


async def finish(line: Line) -> None:
    line.say(running(line))
    line.say(end_message("finished"))
    await line.heard()


def test_what_is_raised_before_there_is_a_coordinator_kills_no_group_of_the_user(
    launch: Launch,
) -> None:
    """0 is the caller's own process group."""
    job = launch(save)
    job.server.lose(LOSS)
    job.observer.acts["the fork server"] = fail

    with pytest.raises(ZeroDivisionError):
        job.run()


def test_a_coordinator_that_breaks_the_protocol_is_replaced(
    launch: Launch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its memory may be damaged; the next one has its records."""

    async def lead(line: Line) -> None:
        if len(job.lines) > 1:
            await finish(line)
        else:
            line.say_bytes(b"\x00\x00\x00\x02{}")
            await line.heard()

    job = launch(lead)

    assert job.run().ending == "finished"
    assert len(job.lines) == 2
    assert "the coordinator breaks the protocol and is killed" in caplog.text
    assert len(job.server.kills) > 0


def test_nodes_that_cannot_be_forked_hold_up_no_end(launch: Launch) -> None:
    """The agents that there were lived on: the launcher ended with the error of a closed lifeline,
    and had killed nobody."""

    async def end_short(line: Line) -> None:
        job.server.asks.extend([short] * 1000)
        await finish(line)

    short = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    job = launch(end_short, shaped_plan((1, 1), 10))
    job.server.asks.extend([None, short])

    assert job.run().ending == "finished"
    assert job.server.targets[0] == "agent"
    assert NO_PID + 1 in job.server.kills


def test_a_coordinator_for_which_the_machine_is_short_is_started_later(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It ended the job."""
    job = launch(finish)
    real_socketpair, refusals = socket.socketpair, deque([errno.EMFILE] * 3)

    def socketpair(*arguments: Any) -> Any:
        if refusals and job.server.targets == ["agent"]:
            raise OSError(refusals[0], os.strerror(refusals.popleft()))
        return real_socketpair(*arguments)

    monkeypatch.setattr(socket, "socketpair", socketpair)

    with caplog.at_level(logging.WARNING):
        assert job.run().ending == "finished"
    assert "could not be started (Too many open files)" in caplog.text


@pytest.mark.parametrize("told", ["stopping", "Running", "restarted"])
def test_what_an_observer_raises_ends_the_job_saved(told: str, launch: Launch) -> None:
    """Whatever it is told, in the loop's callbacks, too: a stop that was asked for was lost then,
    and the next Ctrl-C ended the job unsaved."""

    async def lead(line: Line) -> None:
        if line.spec.rescue is None and (len(job.lines) > 1 or told != "restarted"):
            line.say(running(line))
            while await line.heard() is not None:
                pass
        elif line.spec.rescue is not None:
            await save(line)

    job = launch(lead)
    job.observer.acts[told] = fail
    if told == "stopping":
        job.observer.acts["Running"] = lambda: os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(ZeroDivisionError):
        job.run()

    assert job.lines[-1].spec.rescue is not None


async def stop(line: Line) -> None:
    """Trains until it is to stop, and a little longer."""
    line.say(running(line))
    assert isinstance(await line.heard(), StopRequested)
    line.say(Warned(text="saving"))
    line.say(Warned(text="saved"))
    line.say(end_message("stopped"))
    await line.heard()


def test_a_node_that_is_lost_cannot_be_drained(launch: Launch) -> None:
    """The end of one on a machine without power is never known, and the user waited for it."""
    replies: list[RequestReply] = []

    async def lead(line: Line) -> None:
        line.say(running(line))
        line.say(Warned(text="node 0 cannot join", gone=(0,)))
        await wait_until(lambda: len(job.observer.notes) > 0)
        replies.append(await asyncio.to_thread(ask, Drain(0), job="", timeout_s=10.0))
        line.say(end_message("finished"))
        await line.heard()

    job = launch(lead)

    assert job.run().ending == "finished"
    assert not replies[0].is_done
    assert replies[0].text.startswith("there is no node 0")


LOST = Recovering(
    epoch=1, kind=LossKind.LOST, nodes=(0,), iteration=0, reason="its lease ran out", lost_s=0.0
)


@pytest.mark.parametrize(
    ("news", "answer"),
    [
        (LOST, "node 0 was lost before it had left: its lease ran out"),
        (Warned(text="its lease ran out", gone=(0,)), "was lost before it had left: its lease"),
        (Warned(text="it leaves", left=(0,)), "node 0 has left"),
        (Recorded(members=Members(epoch=1, term=1, nodes=(1,), gone=(0,))), "node 0 has left"),
    ],
)
def test_a_drain_is_answered_though_the_end_of_the_node_is_never_known(
    news: ToLauncher, answer: str, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its machine lost its power meanwhile, and the user waited for ten minutes."""
    monkeypatch.setattr(requests, "_END_TIMEOUT_S", 0.001)
    replies: list[RequestReply] = []

    async def lead(line: Line) -> None:
        line.say(running(line))
        for _ in range(2):  # The second one is sent when all is known.
            asking = asyncio.create_task(asyncio.to_thread(ask, Drain(0), job="", timeout_s=10.0))
            if not replies:
                assert await line.heard() == DrainRequested(node=0)
                line.say(news)
            replies.append(await asking)
        line.say(end_message("finished"))
        await line.heard()

    job = launch(lead)

    assert job.run().ending == "finished"
    assert replies[0].is_done
    assert answer in replies[0].text
    assert replies[1].text.startswith(("node 0 has left", "there is no node 0"))


@pytest.mark.parametrize("number", LEAVE_SIGNALS)
def test_whatever_tells_a_process_to_leave_saves_also_when_it_comes_again(
    number: signal.Signals, launch: Launch
) -> None:
    """A scheduler's grace began with a signal that ended the job unsaved, and a second SIGTERM
    counted as a second Ctrl-C. The first Ctrl-C after it is a first one."""
    job = launch(stop)
    job.observer.acts["Running"] = lambda: os.kill(os.getpid(), number)
    job.observer.acts["saving"] = lambda: os.kill(os.getpid(), number)
    job.observer.acts["saved"] = lambda: os.kill(os.getpid(), signal.SIGINT)

    with restore_handlers():
        signal.signal(number, signal.SIG_DFL)  # Tests that run under nohup ignore it.
        assert job.run().ending == "stopped"
    assert len(job.lines) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_job_in_a_notebook_ends_and_is_stopped_as_any_other(
    number: signal.Signals, launch: Launch
) -> None:
    """It planned for half a minute, and could not begin where a loop ran already."""
    assert launch(finish).run_in_notebook().ending == "finished"
    job, before = launch(stop), signal.getsignal(number)
    job.observer.acts["Running"] = lambda: os.kill(os.getpid(), number)

    assert job.run_in_notebook().ending == "stopped"
    assert signal.getsignal(number) == before


def test_what_is_raised_in_a_notebook_is_raised_there(launch: Launch) -> None:
    job = launch(save)
    job.observer.acts["the fork server"] = fail
    job.server.lose(LOSS)

    with pytest.raises(ZeroDivisionError):
        job.run_in_notebook()


@pytest.mark.parametrize("run", [Launched.run, Launched.run_in_notebook])
def test_a_second_ctrl_c_ends_the_job_at_once(
    run: Callable[[Launched], Ended], launch: Launch
) -> None:
    """And says what it cost. The system may give the signal to any thread: here to one that runs no
    handlers, if there is one."""

    async def hold(line: Line) -> None:
        line.say(running(line))
        while await line.heard() is not None:
            pass

    job = launch(hold)
    interrupt = partial(signal.raise_signal, signal.SIGINT)
    job.observer.acts |= {"Running": interrupt, "stopping": interrupt}

    with pytest.raises(KeyboardInterrupt, match="interrupted again, so nothing was saved"):
        run(job)


def test_where_no_fork_server_stays_the_words_are_true(launch: Launch) -> None:
    """Training does not go on without a coordinator, and the coordinator has not ended as the fork
    server has."""

    async def die(line: Line) -> None:
        line.say(running(line))
        job.server.renewals.extend([LOSS] * 2 * RENEWALS_MAX)
        job.server.lose(LOSS)

    job = launch(die)

    reason = job.run().reason

    no_coordinator = f"no coordinator could be started: {LOSS}, like the fork servers before it"
    assert reason == f"{no_coordinator}; no process could be started to save"
    assert job.observer.notes == [
        *[f"{LOSS}: another one is started"] * RENEWALS_MAX,
        f"{no_coordinator}; the job saves and ends",
        *[f"{LOSS}: another one is started, to save the live layers"] * RENEWALS_MAX,
    ]


def test_a_shortage_of_processes_loses_no_live_state(launch: Launch) -> None:
    """It is waited for: a coordinator that could not be started has not ended."""

    async def lead(line: Line) -> None:
        if len(job.lines) == 1:
            line.say(running(line))
            job.server.asks.extend([AGAIN] * 20)
        elif line.spec.rescue is None:
            await finish(line)
        else:
            await save(line)

    job = launch(lead)

    assert job.run().ending == "finished"


def test_a_shortage_that_stays_is_said_and_what_is_live_is_saved(launch: Launch) -> None:
    """Once it is over, within a minute more."""

    async def lead(line: Line) -> None:
        if len(job.lines) > 1:
            await save(line)
            return
        line.say(running(line))
        job.server.asks.extend([AGAIN] * (2 * SHORT_TRIES_MAX - 1))

    job = launch(lead)

    reason = f"no coordinator could be started: {os.strerror(errno.EAGAIN)}"
    assert job.run().reason == reason
    assert job.observer.notes == [f"{reason}; the job saves and ends"]


def test_what_an_observer_raises_in_a_shortage_ends_the_job_saved(launch: Launch) -> None:
    """The tries until then were none to save."""

    async def interrupt() -> None:
        await wait_until(lambda: len(job.server.asks) < SHORT_TRIES_MAX / 2)
        os.kill(os.getpid(), signal.SIGINT)

    async def lead(line: Line) -> None:
        if line.spec.rescue is None:
            line.say(running(line))
            job.server.asks.extend([AGAIN] * SHORT_TRIES_MAX)
            tasks.append(asyncio.create_task(interrupt()))
        else:
            await save(line)

    tasks: list[asyncio.Task[None]] = []
    job = launch(lead)
    job.observer.acts["stopping"] = fail

    with pytest.raises(ZeroDivisionError):
        job.run()

    assert job.lines[-1].spec.rescue is not None


def test_fork_servers_that_were_lost_long_ago_end_no_job(launch: Launch) -> None:
    """When its coordinator ends another server can be started by then."""

    async def lead(line: Line) -> None:
        if len(job.lines) > 1:
            await (save if line.spec.rescue else finish)(line)
            return
        line.say(running(line))
        job.server.renewals.extend([LOSS] * RENEWALS_MAX)
        job.server.lose(LOSS)
        await wait_until(lambda: any("can be started" in note for note in job.observer.notes))

    job = launch(lead)

    assert job.run().ending == "finished"
