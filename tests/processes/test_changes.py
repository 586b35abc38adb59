"""Nodes join and leave while the job trains; nothing is done again and no bit changes."""

import json
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from helpers.chaos import (
    FAMILY,
    baseline_digests,
    chaos_job,
    check_report,
    long_but_the_first,
    recoveries,
    run_under_faults,
)
from helpers.command import PACED, keep_request_sockets_in, wait_for
from helpers.jobs import digests
from planaria.core.job import JobConfig
from planaria.errors import ConfigError, InsufficientError
from planaria.job.training_job import Job, SilentDisplay, TrainingResult
from planaria.nodes.forkserver import ForkServer
from planaria.nodes.head.request_socket import ask
from planaria.nodes.head.requests import Drain, TellEvents
from planaria.observe.metrics import EventRecord, IterationRecord

pytestmark = pytest.mark.faults

ITERATIONS = 60  # More than a node takes to join.


def job(directory: Path, server: ForkServer, *, nodes: int, max_nodes: int = 6) -> JobConfig:
    config = chaos_job(FAMILY, directory, server, nodes=nodes, iterations=ITERATIONS)
    return replace(config, cluster=replace(config.cluster, max_nodes=max_nodes))


@pytest.fixture(scope="module")
def calm(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The digests of the job without any change."""
    directory = tmp_path_factory.mktemp("calm") / "run"
    return digests(run_under_faults(job(directory, server, nodes=4), server))


def check(result: TrainingResult, calm: tuple[str, str]) -> list[EventRecord]:
    """What happened; nothing of it left a trace in the result, and nothing was done twice."""
    assert result.error is None
    assert digests(result) == calm
    check_report(result)
    numbers = [record.iteration for record in result.report.iterations]
    assert numbers == list(range(ITERATIONS))
    return recoveries(result)


def test_nodes_join_and_one_is_taken_away_with_notice(
    server: ForkServer, tmp_path: Path, calm: tuple[str, str]
) -> None:
    """Two nodes more, and then the first one leaves: all its layers are elsewhere by then."""
    config = job(tmp_path / "run", server, nodes=4)
    result = run_under_faults(config, server, "join:2@1", "preempt:0@8")

    *joins, left = check(result, calm)  # In one change or in two, as they come.
    assert {event.kind for event in joins} == {"join"}
    assert sorted(node for event in joins for node in event.nodes) == [4, 5]
    # A change that the notice overtakes has moved layers for the next one.
    assert all(event.redone_samples == 0 and event.received_bytes > 0 for event in joins)
    assert (left.kind, left.nodes, left.redone_samples) == ("preempt", (0,), 0)
    assert result.report.final.nodes == (1, 2, 3, 4, 5)
    workers = {worker.node for worker in result.report.workers}
    assert workers == set(range(6))


def test_a_node_comes_in_the_place_of_one_that_was_killed(
    server: ForkServer, tmp_path: Path, calm: tuple[str, str]
) -> None:
    """The loss is answered at once; the new node comes while training goes on."""
    result = run_under_faults(
        job(tmp_path / "run", server, nodes=4), server, "kill:3@2", "join:1@4"
    )

    lost, joined = check(result, calm)
    assert (lost.kind, joined.kind, joined.nodes) == ("kill", "join", (4,))
    assert result.report.final.nodes == (0, 1, 2, 4)


@pytest.mark.long
@pytest.mark.parametrize(
    "specs",
    [
        ("join:1@2", "kill:4@~0.6"),
        ("join:1@2", "kill:1@~0.7"),
        ("join:1@2", "leader:@~0.65"),
        ("preempt=0.3:1@2",),
        ("join:2@2", "preempt:0@3", "kill:2@9"),
    ],
    ids=" ".join,
)
def test_what_strikes_in_the_middle_of_a_change_is_survived(
    specs: tuple[str, ...], server: ForkServer, tmp_path: Path, calm: tuple[str, str]
) -> None:
    """The seconds are such that the change is under way, more or less."""
    # Of two losses without a node that joins in time, which takes seconds on a busy machine, four
    # nodes survive one.
    nodes = 3 + len([spec for spec in specs if spec.startswith(("preempt", "kill"))])
    config = job(tmp_path / "run", server, nodes=max(4, nodes), max_nodes=7)
    result = run_under_faults(config, server, *specs)

    check(result, calm)
    assert [event for event in result.report.events if not event.fired] == [], specs


def test_a_notice_that_leaves_too_few_saves_and_ends_with_nothing_redone(
    server: ForkServer, tmp_path: Path, calm: tuple[str, str]
) -> None:
    """Two nodes hold the model, one of them is going to be taken away."""
    config = job(tmp_path / "run", server, nodes=4)
    result = run_under_faults(config, server, "kill:2,3@1", "preempt:1@5")

    assert isinstance(result.error, InsufficientError)
    assert "fewer than the n0 = 2" in str(result.error)
    assert result.report.final.iteration >= 6
    assert digests(run_under_faults(config, server, resume=True)) == calm


class Watching(SilentDisplay):
    """Calls back once, when an iteration is committed."""

    def __init__(self, iteration: int, act: Callable[[], object]) -> None:
        self._iteration = iteration
        self._act = act
        self.threads: list[threading.Thread] = []

    def show_iteration(self, record: IterationRecord) -> None:
        if record.iteration == self._iteration:
            self.threads.append(threading.Thread(target=self._act))
            self.threads[-1].start()


def test_a_user_drains_a_node_and_hears_when_it_has_left(
    server: ForkServer, tmp_path: Path, calm: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what cannot be: a node that is not there."""
    keep_request_sockets_in(tmp_path / "desks", monkeypatch)
    config = replace(job(tmp_path / "run", server, nodes=4), name="drained job")
    answers, told = [], []

    def told_events() -> str:
        return ask(TellEvents(), job="", timeout_s=10.0).text

    def drain() -> None:
        answers.append(ask(Drain(9), job="", timeout_s=10.0))
        answers.append(ask(Drain(1), job="drained job", timeout_s=10.0))
        wait_for(lambda: "drained" in told_events(), what="the event")
        told.append(told_events())

    display = Watching(1, drain)
    result = Job(config).run(server=server, display=display)
    for thread in display.threads:
        thread.join()

    (left,) = check(result, calm)
    assert (left.kind, left.nodes, left.redone_samples) == ("drained", (1,), 0)
    assert [answer.is_done for answer in answers] == [False, True]
    assert "there is no node 9" in answers[0].text
    event, degraded = json.loads(told[0])  # As the job told while it ran.
    assert (event["kind"], event["nodes"]) == ("drained", [1])
    assert (degraded["kind"], degraded["reason"][:16]) == ("degraded", "3 nodes are left")
    with pytest.raises(ConfigError, match="no job of yours runs here"):
        ask(Drain(1), job="", timeout_s=1.0)


class Noting(SilentDisplay):
    """Keeps what a person should know."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_a_job_that_nobody_can_ask_trains_and_says_so(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is no directory for its socket it ended before the first iteration."""
    (tmp_path / "file").touch()
    keep_request_sockets_in(tmp_path / "file", monkeypatch)
    display = Noting()

    config = chaos_job(FAMILY, tmp_path / "run", server, nodes=4)
    result = Job(config).run(server=server, display=display)

    assert result.error is None
    assert digests(result) == baseline_digests(server, config.training.iterations)
    assert not recoveries(result)
    (told,) = (note for note in display.notes if "cannot reach this job" in note)
    assert f"{tmp_path / 'file'}: " in told


@pytest.mark.parametrize("number", long_but_the_first([signal.SIGTERM, signal.SIGUSR1]))
def test_a_signal_of_a_scheduler_to_a_node_is_a_notice(
    number: signal.Signals, server: ForkServer, tmp_path: Path, calm: tuple[str, str]
) -> None:
    """SIGTERM on any process of the node, here a worker; SIGUSR1 on its agent, because a worker
    writes its stacks at that signal."""
    config = job(tmp_path / "run", server, nodes=4)

    def send() -> None:
        agents = [p for p in psutil.Process(server.pid).children() if p.children()]
        workers = [worker for agent in agents for worker in agent.children()]
        processes = workers if number == signal.SIGTERM else agents
        os.kill(max(process.pid for process in processes), number)

    result = Job(config).run(server=server, display=Watching(2, send))

    (left,) = check(result, calm)
    assert left.kind == "preempted"
    assert len(result.report.final.nodes) == 3
    wait_for(lambda: not psutil.Process(server.pid).children(), what="all processes gone")


def test_a_node_whose_notice_file_appears_is_planned_out(
    server: ForkServer, tmp_path: Path
) -> None:
    """The node's own file, among those of all nodes; nothing is done twice for it."""
    settings = (
        "model.time_scale=0.05",
        "training.iterations=16",
        "cluster.nodes=4",
        "cluster.device_memory_bytes=0",
        f"checkpoint.directory={tmp_path / 'checkpoints'}",
        f"cluster.notice={tmp_path}/leave-{{node}}",
    )
    display = Watching(2, lambda: (tmp_path / "leave-2").write_text("60"))
    result = Job.from_file(PACED, overrides=settings).run(server=server, display=display)

    assert result.error is None
    (left,) = recoveries(result)
    assert (left.kind, left.nodes, left.redone_samples) == ("preempted", (2,), 0)
    assert 2 not in result.report.final.nodes
    assert [record.iteration for record in result.report.iterations] == list(range(16))
