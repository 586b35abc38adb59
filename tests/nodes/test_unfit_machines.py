"""A machine whose examination says that it is unfit for a node."""

from dataclasses import replace
from pathlib import Path

import pytest

from helpers.fake_fork_server import NO_PID
from helpers.heads import runs
from helpers.offered_machines import offered_machine
from helpers.tasks import settle, wait_until
from planaria.core.job import ClusterConfig, JobConfig
from planaria.core.machine_messages import (
    MachineLeaving,
    MachineUnfit,
    NodeEnded,
)
from planaria.nodes.machine import EXIT_AGAIN

JOB = JobConfig(cluster=ClusterConfig(patience_s=60.0))


@runs
async def test_an_unfit_machine_takes_no_node_and_is_to_be_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head is told what is wrong; another try may find it mended."""
    check = "echo the fan stands; exit 1"
    job = replace(JOB, cluster=replace(JOB.cluster, health_check=check))
    async with offered_machine(tmp_path, monkeypatch, job=job) as (made, running):
        line = await made.head.next_line()
        line.tell(made.offer())
        unfit = await line.wait(MachineUnfit)

        assert unfit.reason == "the fan stands"
        assert await running == EXIT_AGAIN
        assert "this machine cannot take part: the fan stands" in made.notes


@runs
async def test_a_machine_is_examined_again_when_its_node_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have broken since; then it takes no other node."""
    runs_file = tmp_path / "runs"
    check = f"test ! -e {tmp_path}/broken; code=$?; echo >> {runs_file}; exit $code"
    job = replace(JOB, cluster=replace(JOB.cluster, health_check=check))
    async with offered_machine(tmp_path, monkeypatch, job=job) as (made, running):
        line = await made.run_node()
        made.server.end(NO_PID + 1, -9)
        await line.wait(NodeEnded)
        # One run was before the node, and this one is after it.
        await wait_until(lambda: runs_file.read_text() == "\n\n")
        assert not running.done()
        (tmp_path / "broken").touch()
        line.tell(made.request(1))
        await wait_until(lambda: "runs node 1" in made.notes)
        await settle()
        made.server.end(NO_PID + 2, -9)
        unfit = await line.wait(MachineUnfit)

        assert unfit.reason == "cluster.health_check ended with 1"
        assert await running == EXIT_AGAIN


@runs
async def test_a_node_that_was_asked_for_before_the_examination_leaves_in_peace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head was quicker; the node was killed, and what it had trained was done again."""
    check = f"until [ -e {tmp_path}/go ]; do sleep 0.01; done; ! [ -e {tmp_path}/broken ]"
    job = replace(JOB, cluster=replace(JOB.cluster, health_check=check))
    (tmp_path / "go").touch()
    async with offered_machine(tmp_path, monkeypatch, job=job) as (made, running):
        line = await made.run_node()
        (tmp_path / "go").unlink()
        (tmp_path / "broken").touch()
        made.server.end(NO_PID + 1, -9)
        await line.wait(NodeEnded)
        line.tell(made.request(1))
        await wait_until(lambda: "runs node 1" in made.notes)
        await settle()
        (tmp_path / "go").touch()
        await line.wait(MachineLeaving)
        assert not made.server.kills
        assert not running.done()
        made.server.end(NO_PID + 2, 0)

        assert await running == EXIT_AGAIN
