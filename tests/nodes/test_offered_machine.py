"""What a machine does with its node when its head is lost, comes back or begins anew."""

from pathlib import Path

import pytest

from helpers.heads import runs
from helpers.offered_machines import offered_machine
from helpers.tasks import wait_until
from planaria.core.job import ClusterConfig, JobConfig
from planaria.core.machine_messages import MachineArrived, NodeEnded

JOB = JobConfig(cluster=ClusterConfig(patience_s=60.0))


@runs
async def test_patience_counts_from_the_loss_of_the_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that was reset counted from the first try, and took the node with it."""
    async with offered_machine(tmp_path, monkeypatch, job=JOB) as (machine, running):
        line = await machine.join()
        line.tell(machine.request(0))
        await wait_until(lambda: "runs node 0" in machine.notes)
        machine.clock.ahead_s += 2 * JOB.cluster.patience_s
        line.reset()
        line = await machine.head.next_line()

        arrived = await line.wait(MachineArrived)
        assert (arrived.run, arrived.node) == ("run", 0)
        assert not machine.server.kills
        assert not running.done()


@runs
async def test_the_end_of_a_node_of_another_run_is_not_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new run has a node of the same number, on another machine."""
    async with offered_machine(tmp_path, monkeypatch, job=JOB) as (machine, _):
        line = await machine.join()
        line.tell(machine.request(0))
        await wait_until(lambda: "runs node 0" in machine.notes)
        line.reset()
        line = await machine.join("another run")

        assert machine.server.kills
        assert not any(isinstance(message, NodeEnded) for message in line.heard)
