"""That nodes have the memory for the copies that they are to keep: all ranks find it out."""

from collections import Counter
from collections.abc import Sequence

import torch.distributed as dist

from planaria.checkpoint.memory.room import available_bytes
from planaria.core.copies import LayerCopy
from planaria.errors import ConfigError
from planaria.torchrun.gathering import gathered_as


def check_room_on_all(
    nodes: Sequence[str],
    copies: Sequence[LayerCopy],
    *,
    num_copies: int,
    own_bytes: int,
    arena_bytes: int,
) -> None:
    """Refuses copies for which a node has no memory: of each shard that is kept there a version
    that is whole, and one on its way.

    Args:
        nodes: of all ranks.
        num_copies: as the user has it.
        own_bytes: that this rank copies of its own.
        arena_bytes: that this rank has for copies now.

    Raises:
        ConfigError: on all ranks.
    """
    sizes = gathered_as(int, own_bytes)
    kept = Counter[str]()
    for node, size in zip(nodes, sizes, strict=True):
        kept[node] += size
    for copy in copies:
        for target in copy.targets:
            kept[nodes[target]] += sizes[copy.source]
    here, arenas = nodes[dist.get_rank()], gathered_as(int, arena_bytes)
    there = sum(size for size, node in zip(arenas, nodes, strict=True) if node == here)
    needed, room = 2 * kept[here], available_bytes() + there
    short = "" if needed <= room else f"{here} has {room} bytes, and they take {needed} there"
    for reason in filter(None, gathered_as(str, short)):
        raise ConfigError("copies", num_copies, f"{reason}: make fewer, or use more nodes")
