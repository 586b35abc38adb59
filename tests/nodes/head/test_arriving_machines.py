"""What a head knows of the machines that come to it, whatever becomes of their connections."""

from pathlib import Path

from helpers.arriving_machines import arriving_machines
from helpers.heads import runs
from helpers.tasks import wait_until
from planaria.core.machine_messages import NodeEnded, NodeRequested


@runs
async def test_a_machine_ends_no_node_of_another_one(tmp_path: Path) -> None:
    """One that comes back from an earlier run had a node of the same number."""
    async with arriving_machines(tmp_path) as head:
        first = await head.join("first")
        head.start(0)
        await first.wait(NodeRequested)
        second = await head.arrive("second", run="an earlier run", node=0)
        second.tell(NodeEnded(node=0, status=-9), head.ready())
        await wait_until(lambda: head.machines.num_ready == 1)

        assert list(head.machines.live_nodes) == [0]
        assert head.ends == []
        first.tell(NodeEnded(node=0, status=1))
        await wait_until(lambda: [ended.node for ended in head.ends] == [0])
