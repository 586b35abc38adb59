"""When copies of a loop of one's own go: between its collectives.

FSDP takes the network while it gathers parameters and scatters gradients, which it does in the same
order in every iteration. So the functions of torch.distributed that do that are watched while there
are copies: each notes when it began and when it was over. A span is known by how many collectives
are over when it begins; what spans there are, and what of them can be used, is found out by
checkpoint/memory/interleaving.py. Until it has seen enough iterations copies go at once.

Source: Gemini (SOSP '23), section 5.4.
Differs: Gemini makes no copies in the iterations that it watches; here there is a checkpoint after
the first one, and the spans are found anew again and again.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from statistics import median
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist

from planaria.checkpoint.memory.interleaving import Interleaving
from planaria.checkpoint.memory.wire import sent_by, sent_to
from planaria.core.copies import IdleSpan, LayerCopy
from planaria.core.plan import Link
from planaria.torchrun.gathering import backend_of
from planaria.transport.links import Channel, Links, Tag
from planaria.transport.traffic import Use

# Those that FSDP uses, by whichever name, and that loops use for the rest.
_NAMES: Final = (
    *("all_gather_single", "all_gather_into_tensor", "all_gather"),
    *("reduce_scatter_single", "reduce_scatter_tensor", "reduce_scatter"),
    *("all_reduce", "broadcast", "all_to_all_single"),
)
_SMALL_BYTES, _LARGE_BYTES = 64, 4 << 20
_NUM_SMALL, _NUM_LARGE = 9, 3
TIMEOUT_S: Final = 60.0


class Collectives:
    """Watches this process's collectives, from its making until `close`.

    Args:
        noted: is told when one began and when it was over, by the monotonic clock, on any thread.
    """

    def __init__(self, noted: Callable[[float, float], None]) -> None:
        self._noted = noted
        self._within = threading.local()  # One may call another one.
        self._watched: dict[str, tuple[Any, Any]] = {}
        for name in _NAMES:
            if original := getattr(dist, name, None):
                watched = self._watching(original)
                self._watched[name] = original, watched
                setattr(dist, name, watched)

    def close(self) -> None:
        """Watches no more."""
        for name, (original, watched) in self._watched.items():
            if getattr(dist, name) is watched:  # Nobody else has come since.
                setattr(dist, name, original)
        self._noted = _unheard

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Those of this thread are none of the loop's."""
        before = getattr(self._within, "any", False)
        self._within.any = True
        try:
            yield
        finally:
            self._within.any = before

    def _watching(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def watched(*arguments: Any, **keys: Any) -> Any:
            if torch.compiler.is_compiling():  # What follows would break the graph.
                return original(*arguments, **keys)
            if getattr(self._within, "any", False):
                return original(*arguments, **keys)
            begun_s = time.monotonic()
            with self.unwatched():
                work = original(*arguments, **keys)
            try:
                future = work.get_future() if work is not None else None
            except (AttributeError, RuntimeError):  # Gloo's scattered sums have none.
                future = None
            if future is None:
                self._noted(begun_s, time.monotonic())
            else:
                future.add_done_callback(lambda _: self._noted(begun_s, time.monotonic()))
            return work

        return watched


def _unheard(_begun_s: float, _ended_s: float) -> None:
    pass


class BetweenCollectives:
    """Turns for pieces of copies, for a loop whose iterations are the times between two saves.

    Args:
        far: the ranks of other nodes.
        targets, sources: whom copies go to, and come from.
        iterations: of which the mean is taken.
    """

    def __init__(
        self,
        links: Links,
        *,
        link: Link,
        far: Collection[int],
        targets: Collection[int],
        sources: Collection[int],
        iterations: int,
    ) -> None:
        self._links = links
        self._far = min(far)  # A collective takes the ways to all of them.
        self._iteration = 0
        self._num_noted = 0
        self._turns = Interleaving(
            links,
            link=link,
            idle={},
            gamma=None,
            iterations=iterations,
            targets=targets,
            sources=sources,
            is_far=lambda peer: peer in far,
        )
        self._collectives = Collectives(self._note)

    @property
    def unwatched(self) -> Callable[[], Any]:
        """A context in which collectives are none of the loop's."""
        return self._collectives.unwatched

    @property
    def spans(self) -> dict[int, tuple[IdleSpan, ...]]:
        """By target those in which pieces go, `after` so many collectives; empty at first."""
        return self._turns.all_spans

    def started(self, *, begins: bool) -> None:
        """An iteration begins, and maybe a version with it, whose pieces may go from now on."""
        if begins:
            self._turns.hold()
        self._iteration += 1
        self._num_noted = 0
        self._turns.started(self._iteration, must_end=False)
        if not self._turns.all_spans:
            self._turns.rush()

    def rush(self) -> None:
        """What is left of the version goes at once: somebody waits for it."""
        self._turns.rush()

    def chunk_bytes(self, most_bytes: int) -> int:
        """See Turns."""
        return self._turns.chunk_bytes(most_bytes)

    def wait(self, target: int, num_bytes: int) -> None:
        """See Turns."""
        self._turns.wait(target, num_bytes)

    def close(self) -> None:
        """Frees who waits, and watches no more."""
        self._collectives.close()
        self._turns.close()

    def _note(self, begun_s: float, ended_s: float) -> None:
        tag = Tag(Channel.SCATTER, self._iteration, self._num_noted)
        self._num_noted += 1
        for is_out in (True, False):
            self._links.traffic.note(Use(is_out, self._far, tag, begun_s, ended_s))
        self._turns.acted()


def between_collectives(
    links: Links,
    nodes: Sequence[str],
    copies: Sequence[LayerCopy],
    *,
    iterations: int,
    device_type: str,
) -> BetweenCollectives | None:
    """When a rank sends copies, None if at once.

    Args:
        nodes: of each rank its node.
        iterations: in which collectives are watched; 0: copies go at once.
        device_type: of what the loop's collectives are of.
    """
    far = {rank for rank, node in enumerate(nodes) if node != nodes[links.rank]}
    targets = {target for target, _ in sent_by(links.rank, copies)}
    sources = sent_to(links.rank, copies).keys()
    # Of others nobody on the host knows when they are over.
    is_timed = backend_of(device_type) == "gloo"
    if not iterations or not targets or not is_timed:
        return None
    return BetweenCollectives(
        links,
        link=measured_link(links, targets=targets, sources=sources),
        far=far,
        targets=targets,
        sources=sources,
        iterations=iterations,
    )


def measured_link(links: Links, *, targets: Collection[int], sources: Collection[int]) -> Link:
    """What copies take, as measured while all ranks send to those who keep theirs.

    Raises:
        PeerLostError, AbortedError: a peer is gone.
    """
    seconds: dict[int, list[float]] = {_SMALL_BYTES: [], _LARGE_BYTES: []}
    sizes = [_SMALL_BYTES] * _NUM_SMALL + [_LARGE_BYTES] * _NUM_LARGE
    for index, size in enumerate(sizes):
        payload = np.zeros(size, dtype=np.uint8)
        begun_s = time.monotonic()
        for target in targets:
            links.send(target, Tag(Channel.COPY_USE, index, 1), payload)
        for source in sources:
            links.receive(source, Tag(Channel.COPY_USE, index, 1), timeout_s=TIMEOUT_S)
            links.send(source, Tag(Channel.COPY_USE, index, 2), payload[:1])
        for target in targets:
            links.receive(target, Tag(Channel.COPY_USE, index, 2), timeout_s=TIMEOUT_S)
        seconds[size].append(time.monotonic() - begun_s)
    small_s, large_s = (median(seconds[size]) for size in (_SMALL_BYTES, _LARGE_BYTES))
    num_bytes = len(targets) * _LARGE_BYTES
    return Link(small_s / 2.0, num_bytes / max(large_s - small_s, 1e-6))
