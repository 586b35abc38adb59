"""A head that does not go on with the run of a lost head leaves its nodes as they were."""

import os
import signal
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import cast

import pytest

from helpers.command import keep_request_sockets_in
from helpers.fake_fork_server import FakeForkServer, Line
from helpers.jobs import leader_spec
from helpers.left_runs import come_back, is_told_the_end, open_left_head
from helpers.recorder_messages import running
from planaria.checkpoint.disk.tiers import tier_of
from planaria.core.kinds import Ending
from planaria.core.machine_messages import JobOver, NodeDropped
from planaria.core.messages import StopRequested
from planaria.core.records import AwaitingMachine, Ended, Leading, ToLauncher, Unrecorded, Warned
from planaria.core.specs import NodeSpec
from planaria.nodes.forkserver import ForkServer
from planaria.nodes.head import job_processes, leader_runner
from planaria.nodes.head.launcher import Launcher, LaunchSpec
from planaria.nodes.head.leader_runner import RESTARTS_MAX
from planaria.nodes.head.process_events import restore_handlers
from planaria.nodes.head.remote import machines, open_head
from planaria.nodes.head.remote.open_head import OpenHead
from planaria.nodes.head.remote.run_record import JournalHold, NodeLog


def test_machines_of_a_run_that_is_kept_are_told_nothing(tmp_path: Path) -> None:
    """They ended their nodes, which alone had the newest state."""
    with open_left_head(tmp_path) as (head, runner):
        with head:
            line = runner.run(come_back(head.leader_sockets.address))

        assert not runner.run(is_told_the_end(line))


def test_machines_of_a_run_that_is_given_up_are_told_its_end(tmp_path: Path) -> None:
    with open_left_head(tmp_path) as (head, runner):
        with head:
            line = runner.run(come_back(head.leader_sockets.address))
            head.begin_run("another run")

        assert runner.run(is_told_the_end(line))


class TakenUp:
    """The launcher of a head that takes a run up, and that says what its coordinators say.

    Attributes:
        lines: connections of its coordinators.
        observer: what is told what they say.
    """

    def __init__(self, head: OpenHead, directory: Path, *says: object) -> None:
        self.lines: list[Line] = []
        self.server = FakeForkServer(self._lead)
        self.observer = _Observer()
        self._says = says
        head.is_taken_up = True
        spec = leader_spec(directory)
        node = NodeSpec(
            job=spec.job, node=0, token=b"", coordinator=("", 0), worker="", cache_directory=""
        )
        self.launcher = Launcher(
            LaunchSpec(node, spec),
            server=cast(ForkServer, self.server),
            observer=self.observer,
            tier=tier_of(spec.job.checkpoint.directory),
            other_journal=lambda: str(directory),
            head=head,
        )

    async def _lead(self, line: Line) -> None:
        self.lines.append(line)
        for message in self._says:
            if callable(message):
                if (answer := message()) is not None:
                    await answer
            else:
                line.say(message)  # type: ignore[arg-type]
        if self._says:
            await line.heard()

    def run(self) -> Ended:
        with restore_handlers():
            return self.launcher.run()


class _Observer:
    """See Observer; it does nothing."""

    def on_message(self, *_: object) -> None:
        """See Observer."""

    def on_fault(self, *_: object, **__: object) -> None:
        """See Observer."""

    on_coordinator_restart = on_grant = on_fault

    def on_stop_request(self, _: str) -> None:
        """See Observer."""

    stop_reason = ""

    def events(self) -> tuple[()]:
        """See Observer."""
        return ()


@pytest.fixture(autouse=True)
def _no_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process is killed, and no socket is left."""
    for module in (leader_runner, job_processes):
        monkeypatch.setattr(module, "kill_group", lambda _: None)
    monkeypatch.setattr(machines, "EXIT_TIMEOUT_S", 0.2)  # Machines without processes do not leave.
    keep_request_sockets_in(tmp_path / "desk", monkeypatch)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_head_that_is_interrupted_before_it_trains_keeps_the_run(
    number: signal.Signals, tmp_path: Path
) -> None:
    """Its coordinator leads already, but has not put the nodes to work again."""
    with open_left_head(tmp_path) as (head, runner):
        job = TakenUp(
            head, tmp_path, Leading(term=2, now_s=0.0), lambda: os.kill(os.getpid(), number)
        )
        with head:
            line = runner.run(come_back(head.leader_sockets.address))
            with pytest.raises(KeyboardInterrupt, match="before training began"):
                job.run()

            assert head.keeps_run
        assert not runner.run(is_told_the_end(line))
        job.server.close()


def test_a_run_that_its_coordinator_ends_is_over(tmp_path: Path) -> None:
    """As when the nodes that live hold too little to go on."""
    ended = Ended(ending=Ending.LOST, reason="layer 1", failure=None, nodes=(), epoch=3)
    with open_left_head(tmp_path) as (head, runner):
        job = TakenUp(head, tmp_path, Leading(term=2, now_s=0.0), ended)
        with head:
            line = runner.run(come_back(head.leader_sockets.address))
            assert job.run() == ended

            assert not head.keeps_run
        assert runner.run(is_told_the_end(line))
        job.server.close()


@pytest.mark.parametrize("says", [(), (Unrecorded(reason="the journal is damaged"),)])
def test_a_run_whose_records_nobody_can_read_is_kept(
    says: tuple[object, ...], tmp_path: Path
) -> None:
    """A coordinator without them would begin anew with the living nodes, or have them save what
    belongs to no iteration."""
    with open_left_head(tmp_path) as (head, runner):
        job = TakenUp(head, tmp_path, *says)
        with head:
            line = runner.run(come_back(head.leader_sockets.address))
            assert job.run().ending == Ending.LOST

            assert head.keeps_run
        assert not runner.run(is_told_the_end(line))
        assert len(job.lines) == (1 if says else RESTARTS_MAX + 1)
        assert all(line.spec.rescue is None for line in job.lines)
        job.server.close()


LOST = Ended(ending=Ending.LOST, reason="nobody came", failure=None, nodes=(), epoch=3)


@pytest.mark.parametrize(
    "last",
    [Unrecorded(reason="another head", is_taken=True), LOST, None],
    ids=["its coordinator says so", "it has lost its nodes", "it goes on"],
)
def test_a_head_whose_run_another_one_has_taken_up_ends_and_leaves_it_alone(
    last: ToLauncher | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was cut off, and trained before. It told the machines that came to it by mistake that the
    job is over, and they killed nodes that trained with the other head."""
    if last is None:  # Else it may have no time to see that by itself.
        monkeypatch.setattr(open_head, "TOUCH_PERIOD_S", 0.01)
    first, second = (JournalHold(tmp_path, name) for name in ("first", "second"))
    first.take()
    with open_left_head(tmp_path) as (head, runner):
        says = (Leading(term=2, now_s=0.0), running(0.0), second.take)
        job = TakenUp(head, tmp_path, *says, *((last,) if last else ()))
        with closing(NodeLog(tmp_path, holder=first.holder)) as head.machines.node_log, head:
            line = runner.run(come_back(head.leader_sockets.address))
            ended = job.run()

            assert head.keeps_run
            assert head.is_taken
        assert not runner.run(is_told_the_end(line))
        assert ended.ending == Ending.LOST
        job.server.close()


@pytest.mark.parametrize("reason", ["", "on_commit of Enough returned True"])
def test_machines_of_a_job_that_has_had_enough_are_told_that_it_is_done(
    reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A callback had ended it: the head ended with 0, and its agents with 3."""
    monkeypatch.setattr(_Observer, "stop_reason", reason)
    requests: list[object] = []

    async def hear_request() -> None:
        if reason:
            requests.append(await job.lines[-1].heard())

    is_early = bool(reason)
    says = (
        Leading(term=2, now_s=0.0),
        running(0.0),
        hear_request,
        Ended(ending=Ending.STOPPED, reason="", failure=None, nodes=(), epoch=3, is_early=is_early),
    )
    with open_left_head(tmp_path) as (head, runner):
        job = TakenUp(head, tmp_path, *says)
        with head:
            line = runner.run(come_back(head.leader_sockets.address))
            job.run()
        runner.run(line.wait_end())
        job.server.close()

    (over,) = [message for message in line.heard if isinstance(message, JobOver)]
    assert over.is_done == is_early
    assert requests == [StopRequested(is_early=True)] * is_early


def test_a_machine_hears_that_its_node_which_waited_to_join_is_lost(tmp_path: Path) -> None:
    """Only nodes that had been members were known to be out of the job, and others kept their
    places."""
    with open_left_head(tmp_path) as (head, runner), head:
        head.machines._leave_s = 0.0
        line = runner.run(come_back(head.leader_sockets.address))
        job = TakenUp(
            head,
            tmp_path,
            Leading(term=2, now_s=0.0),
            running(0.0),
            Warned(text="node 0 cannot join: its lease ran out", gone=(0,)),
            partial(line.wait, NodeDropped),
            Ended(ending=Ending.LOST, reason="", failure=None, nodes=(), epoch=3),
        )
        job.run()
        job.server.close()

    assert NodeDropped(0) in line.heard


def test_machines_hear_whether_the_job_waits_for_any_of_them(tmp_path: Path) -> None:
    """Then those get a node again that have lost too many."""
    is_short: list[bool] = []
    with open_left_head(tmp_path) as (head, _), head:

        def look() -> None:
            is_short.append(head.machines._places.is_short)

        job = TakenUp(
            head,
            tmp_path,
            Leading(term=2, now_s=0.0),
            AwaitingMachine(text="1 node is left", now_s=0.0),
            running(0.0),
            Ended(ending=Ending.LOST, reason="", failure=None, nodes=(), epoch=3),
        )
        job.observer.on_message = lambda *_: look()  # type: ignore[method-assign]
        job.run()
        job.server.close()

    assert is_short == [False, True, False]
