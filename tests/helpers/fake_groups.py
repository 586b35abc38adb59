"""Process groups in one process: fakes whose results come late, and those of Gloo."""

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from planaria.engine.comm.nccl import Group, LinkStore


class Fabric:
    """Makes groups whose ranks find each other by the names of their stores.

    As on a device, an operation does nothing to its tensors before it is waited for, and waits for
    its peers then. An abort ends the waits with an error.

    Attributes:
        num_aborted: the number of groups in each call that has aborted some.
        on_make: is called before a group is made.
        on_abort: is called before groups are aborted.
        on_ask: is called before it is told whether an operation is over.
        is_silent: whether an abort ends waits as if the operations had been carried out.
    """

    def __init__(self) -> None:
        self.num_aborted: list[int] = []
        self.on_make: Callable[[str], None] = lambda _: None
        self.on_abort: Callable[[], None] = lambda: None
        self.on_ask: Callable[[], None] = lambda: None
        self.is_silent = False
        self.changed = threading.Condition()
        self.posted: dict[tuple[str, str, int, int], Tensor] = {}

    def make(self, store: Store, rank: int, size: int) -> Group:
        """See `GroupMaker`."""
        assert isinstance(store, LinkStore)
        self.on_make(store.name)
        return FakeGroup(self, store.name, rank, size)

    def abort_all(self, groups: Sequence[Group]) -> None:
        """See `GroupMaker`."""
        self.on_abort()
        self.num_aborted.append(len(groups))
        for group in groups:
            group.abort()


class FakeGroup:
    """A rank's end of a group."""

    def __init__(self, fabric: Fabric, name: str, rank: int, size: int) -> None:
        self._fabric = fabric
        self._name = name
        self._rank = rank
        self._size = size
        self._num_posted = dict.fromkeys(("point", "all", "gather"), 0)
        self.is_aborted = False

    def send(self, tensors: list[Tensor], target: int, tag: int) -> "FakeWork":
        """See `Group`."""
        assert (self._rank, target, tag) == (0, 1, 0)
        self._post("point", tensors[0])
        return FakeWork(lambda: None, self._fabric)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> "FakeWork":
        """See `Group`."""
        assert (self._rank, source, tag) == (1, 0, 0)
        number = self._number("point")
        return FakeWork(lambda: self._fill([tensors[0]], [0], "point", number), self._fabric)

    def alltoall_base(
        self, targets: Tensor, sources: Tensor, sizes: list[int], source_sizes: list[int]
    ) -> "FakeWork":
        """See `Group`."""
        assert not sizes
        assert not source_sizes
        number = self._post("all", sources)
        parts, own = targets.chunk(self._size), self._rank

        def own_part(tensor: Tensor) -> Tensor:
            return tensor.chunk(self._size)[own]

        ranks = range(self._size)
        return FakeWork(lambda: self._fill(parts, ranks, "all", number, own_part), self._fabric)

    def _allgather_base(self, targets: Tensor, source: Tensor) -> "FakeWork":
        number = self._post("gather", source)
        parts, ranks = targets.chunk(self._size), range(self._size)
        return FakeWork(lambda: self._fill(parts, ranks, "gather", number), self._fabric)

    def abort(self) -> None:
        """See `Group`."""
        with self._fabric.changed:
            self.is_aborted = True
            self._fabric.changed.notify_all()

    def _number(self, kind: str) -> int:
        if self.is_aborted and not self._fabric.is_silent:
            raise RuntimeError("NCCL communicator was aborted")
        self._num_posted[kind] += 1
        return self._num_posted[kind]

    def _post(self, kind: str, tensor: Tensor) -> int:
        number = self._number(kind)
        with self._fabric.changed:
            self._fabric.posted[self._name, kind, number, self._rank] = tensor
            self._fabric.changed.notify_all()
        return number

    def _fill(
        self,
        targets: Sequence[Tensor],
        ranks: Sequence[int],
        kind: str,
        number: int,
        part: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ) -> None:
        keys = [(self._name, kind, number, rank) for rank in ranks]
        posted = self._fabric.posted
        with self._fabric.changed:
            self._fabric.changed.wait_for(
                lambda: self.is_aborted or all(key in posted for key in keys)
            )
            if self.is_aborted:
                if self._fabric.is_silent:
                    return
                raise RuntimeError("NCCL communicator was aborted")
            for target, key in zip(targets, keys, strict=True):
                target.copy_(part(posted[key]))


class FakeWork:
    """An operation that is carried out when it is waited for."""

    def __init__(self, carry_out: Callable[[], None], fabric: Fabric) -> None:
        self._carry_out = carry_out
        self._fabric = fabric

    def wait(self) -> None:
        """See `Work`."""
        self._carry_out()

    def is_completed(self) -> bool:
        """See `Work`."""
        self._fabric.on_ask()
        return False


class GlooMaker:
    """Makes groups of Gloo, which has the interface of NCCL's, and no abort that frees a wait."""

    def make(self, store: Store, rank: int, size: int) -> Group:
        """See `GroupMaker`."""
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(interface="lo")]
        options._timeout = timedelta(seconds=20)
        group: Group = gloo(store, rank, size, options)
        return group

    def abort_all(self, groups: Sequence[Group]) -> None:
        """See `GroupMaker`."""
