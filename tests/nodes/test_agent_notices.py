"""An agent that watches a source of notices."""

import asyncio
import os
import signal
import socket
from pathlib import Path

import msgspec
import pytest

from planaria.core.job import ClusterConfig, JobConfig
from planaria.core.messages import NoticeTaken, WorkerFailed
from planaria.core.specs import NodeSpec
from planaria.nodes import agent
from planaria.nodes.notices import NoticeSource, fork_watcher

SPEC = NodeSpec(
    job=JobConfig(), node=3, token=b"", coordinator=("", 0), worker="", cache_directory=""
)


def notices_of(spec: NodeSpec) -> list[object]:
    """What an agent with this spec reports until its source has had a notice."""
    watching = agent._Agent(spec, [], -1)
    asyncio.run(asyncio.wait_for(watching._watch_notices(), timeout=60.0))
    return list(watching._state.facts.values())


def with_notice(spec: NodeSpec, source: str) -> NodeSpec:
    """The spec with a source of the job."""
    job = JobConfig(cluster=ClusterConfig(notice=source, notice_s=17.0))
    return msgspec.structs.replace(spec, job=job)


def test_an_agent_reports_the_notice_of_its_own_node(tmp_path: Path) -> None:
    """{node} is the node's number; a file without a text leaves as much time as a SIGTERM."""
    (tmp_path / "leave-3").touch()

    reports = notices_of(with_notice(SPEC, f"{tmp_path}/leave-{{node}}"))

    assert reports == [NoticeTaken(node=3, rank=3, after_s=17.0)]


def test_a_source_of_the_machine_comes_before_the_job_s(tmp_path: Path) -> None:
    """Who starts the agent knows the machine; the job names one source for all."""
    (tmp_path / "machine").write_text("45")
    spec = msgspec.structs.replace(SPEC, notice=str(tmp_path / "machine"))

    assert notices_of(with_notice(spec, "/nowhere/leave"))[0] == NoticeTaken(
        node=3, rank=3, after_s=45.0
    )


@pytest.mark.parametrize(("source", "is_machine_s"), [("leave", True), ("leave-{node}", False)])
def test_an_agent_knows_a_notice_of_its_machine(
    tmp_path: Path, source: str, is_machine_s: bool
) -> None:
    """It ends with another status then, for the machine may not have heard of it."""
    (tmp_path / source.replace("{node}", "3")).touch()
    watching = agent._Agent(with_notice(SPEC, str(tmp_path / source)), [], -1)

    asyncio.run(asyncio.wait_for(watching._watch_notices(), timeout=60.0))

    assert watching._is_noticed == is_machine_s


def test_an_agent_without_a_source_watches_none() -> None:
    """No process is started for nothing."""
    assert notices_of(SPEC) == []


def test_a_watcher_that_is_killed_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by the fault that kills all children of an agent; and where no process can be forked."""
    (tmp_path / "leave").write_text("45")
    tries: list[str] = []

    def fork(source: NoticeSource) -> tuple[int, socket.socket]:
        tries.append("fork")
        if len(tries) == 1:
            raise BlockingIOError("no process")
        if len(tries) > 2:
            return fork_watcher(source)
        sock, other = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        other.close()
        return pid, sock

    monkeypatch.setattr(agent, "fork_watcher", fork)
    monkeypatch.setattr(agent, "_WATCHER_PAUSE_S", 0.0)

    reports = notices_of(with_notice(SPEC, str(tmp_path / "leave")))

    assert reports == [NoticeTaken(node=3, rank=3, after_s=45.0)]
    assert len(tries) == 3


@pytest.mark.parametrize("patience_s", [0.0, 60.0])
def test_a_crash_has_one_of_several_machines_examined(tmp_path: Path, patience_s: float) -> None:
    """Once at a time; on one machine all nodes share its fate, so nothing is examined."""
    check = f"echo run >> {tmp_path}/runs; echo the fan stands; exit 1"
    job = JobConfig(cluster=ClusterConfig(health_check=check, notice_s=17.0))
    spec = msgspec.structs.replace(SPEC, job=job, patience_s=patience_s)
    examining = agent._Agent(spec, [], -1)
    failed = WorkerFailed(node=3, rank=3, traceback="", blame="node")

    async def crash() -> None:
        for blame in ("job", "node", "node"):
            examining._on_worker_message(msgspec.structs.replace(failed, blame=blame))
        if examining._examining is not None:
            await asyncio.wait_for(examining._examining, timeout=60.0)

    asyncio.run(crash())

    notices = [each for each in examining._state.facts.values() if isinstance(each, NoticeTaken)]
    told = NoticeTaken(node=3, rank=3, after_s=17.0, reason="the fan stands")
    assert notices == ([told] if patience_s else [])
    assert not examining._is_leaving  # The job may need it; without a head it looks for one.
    if patience_s:
        assert (tmp_path / "runs").read_text() == "run\n"
