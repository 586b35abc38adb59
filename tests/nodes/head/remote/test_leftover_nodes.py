"""Nodes that are out of the job and do not end by themselves: the head has them killed."""

from pathlib import Path

import pytest

from helpers.arriving_machines import arriving_machines
from helpers.heads import runs
from helpers.tasks import settle, wait_until
from planaria.core.machine_messages import NodeDropped, NodeEnded, NodeRequested
from planaria.core.records import Members


@pytest.mark.parametrize("is_member", [True, False])
@runs
async def test_a_node_that_hangs_and_is_out_of_the_job_is_killed(
    tmp_path: Path, is_member: bool
) -> None:
    """Nobody did, and its machine, which is in good health, got no other node to the end of the
    job."""
    async with arriving_machines(tmp_path, num_max=1) as head:
        head.machines._leave_s = 0.0
        line = await head.join()
        head.start(0)
        await line.wait(NodeRequested)
        if is_member:
            head.machines.on_members(Members(epoch=1, term=0, nodes=(), gone=(0,)))
        else:
            head.machines.on_candidates_lost((0,))
        assert await line.wait(NodeDropped) == NodeDropped(0)
        line.tell(NodeEnded(node=0, status=-9))
        await wait_until(lambda: head.machines.has_room)

        assert "node 0 on m is out of the job but does not end; it is killed" in head.notes
        assert list(head.machines.exit_statuses()) == []  # It did not end by itself.


@runs
async def test_a_node_that_hangs_is_killed_when_its_machine_is_back(tmp_path: Path) -> None:
    """Its machine was cut off when it could have been told. That it was killed was told then, also
    of each machine that had lost its power, and not when it was."""
    async with arriving_machines(tmp_path) as head:
        head.machines._leave_s = 0.0
        line = await head.join()
        head.start(0)
        line.reset()
        await wait_until(lambda: not head.machines.is_reachable(0))
        head.machines.on_members(Members(epoch=1, term=0, nodes=(), gone=(0,)))
        await settle()
        assert not any("is killed" in note for note in head.notes)
        line = await head.arrive(run="run", node=0)

        assert await line.wait(NodeDropped) == NodeDropped(0)
        told = "node 0 on m is out of the job but does not end; it is killed"
        assert head.notes.count(told) == 1


@runs
async def test_a_node_that_leaves_or_is_taken_back_is_not_killed(tmp_path: Path) -> None:
    """A coordinator that is started again may take a node back that the one before had lost."""
    async with arriving_machines(tmp_path) as head:
        head.machines._leave_s = 0.0
        lines = [await head.join(f"m{node}") for node in range(2)]
        for node, line in enumerate(lines):
            head.start(node)
            await line.wait(NodeRequested)
        lines[0].tell(NodeEnded(node=0, status=0))
        await wait_until(lambda: bool(head.ends))
        head.machines.on_candidates_lost((0, 1))
        head.machines.on_members(Members(epoch=1, term=1, nodes=(1,)))
        await settle()

        assert not any("does not end" in note for note in head.notes)
