"""Sends the copies of a user's own training loop between the loop's collectives.

FSDP uses the network while it gathers parameters and scatters gradients, in the same order in every
iteration. So the functions of torch.distributed that do that are wrapped while copies are made:
each call records when it began and when it was over. The begin of an idle span is expressed as a
delay after the n-th collective of the iteration; checkpoint/memory/interleaving.py finds the spans
and the share of them that can be used. Until it has seen enough iterations, copies are sent at
once.

Source: Gemini (SOSP '23), section 5.4.
Differs: Gemini makes no copies in the iterations that it profiles; here the first iteration has a
checkpoint already, and the spans are measured again for as long as the run lasts.
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

from planaria.checkpoint.memory.interleaving import CopyPeers, Interleaving, SpanUse
from planaria.checkpoint.memory.wire import incoming_layers, outgoing_copies
from planaria.core.copies import IdleSpan, LayerCopy
from planaria.core.plan import Link
from planaria.engine.devices import PROCESSOR, Device
from planaria.torchrun.device_times import DeviceTimes
from planaria.torchrun.gathering import backend_of
from planaria.transport.links import Channel, Links, Tag
from planaria.transport.traffic import Use

# The collectives that FSDP uses, under their names in all versions of torch, and those that loops
# use besides.
_NAMES: Final = (
    *("all_gather_single", "all_gather_into_tensor", "all_gather"),
    *("reduce_scatter_single", "reduce_scatter_tensor", "reduce_scatter"),
    *("all_reduce", "broadcast", "all_to_all_single"),
)
_SMALL_BYTES, _LARGE_BYTES = 64, 4 << 20
_NUM_SMALL, _NUM_LARGE = 9, 3
_RECORDED_MAX: Final = 5000  # Collectives of an iteration; the record of more would take too long.
TIMEOUT_S: Final = 60.0


class Collectives:
    """Watches this process's collectives, from its construction until `close`.

    Args:
        on_collective: takes begin and end of each collective, by the monotonic clock; called on any
            thread.
        device: device whose stream waits for collectives, if the host does not; those of which the
            caller gets a handle are not noted then.
    """

    def __init__(
        self, on_collective: Callable[[float, float], None], *, device: Device = PROCESSOR
    ) -> None:
        self._on_collective = on_collective
        # Not `on_collective` itself, which `close` takes away.
        self._times = None if device.is_host else DeviceTimes(device, self._note)
        self._nested = threading.local()  # A collective may call another one, which is not noted.
        self._watched: dict[str, tuple[Any, Any]] = {}
        for name in _NAMES:
            if original := getattr(dist, name, None):
                watched_collective = self._wrapper(original)
                self._watched[name] = original, watched_collective
                setattr(dist, name, watched_collective)

    def close(self) -> None:
        """Stops watching, and restores the functions of torch.distributed."""
        for name, (original, watched_collective) in self._watched.items():
            if (
                getattr(dist, name) is watched_collective
            ):  # Unless someone else has wrapped it since.
                setattr(dist, name, original)
        self._on_collective = _ignore
        if self._times is not None:
            self._times.close()

    def _note(self, start_s: float, end_s: float) -> None:
        self._on_collective(start_s, end_s)

    @contextmanager
    def pause_watching(self) -> Iterator[None]:
        """A context in which this thread's collectives are not watched."""
        before = getattr(self._nested, "any", False)
        self._nested.any = True
        try:
            yield
        finally:
            self._nested.any = before

    def _wrapper(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def watched_collective(*arguments: Any, **keys: Any) -> Any:
            if torch.compiler.is_compiling():  # The code below would break the graph.
                return original(*arguments, **keys)
            if getattr(self._nested, "any", False):
                return original(*arguments, **keys)
            start_s = time.monotonic()
            start = self._times.start() if self._times else None
            with self.pause_watching():
                work = original(*arguments, **keys)
            if self._times and start:
                if work is None:
                    self._times.end(start)
                return work
            try:
                future = work.get_future() if work is not None else None
            except (AttributeError, RuntimeError):  # Gloo's reduce-scatters have no future.
                future = None
            if future is None:
                self._on_collective(start_s, time.monotonic())
            else:
                future.add_done_callback(lambda _: self._on_collective(start_s, time.monotonic()))
            return work

        return watched_collective


def _ignore(_start_s: float, _end_s: float) -> None:
    pass


class BetweenCollectives:
    """Turns for the pieces of copies of a user's own loop; an iteration lasts from save to save.

    In an iteration of very many collectives nothing is measured, and copies are sent at once.

    Args:
        peers: ranks with which copies are exchanged. There is a target, and all targets are on
            other nodes.
        link: latency and bandwidth between nodes.
        iterations: number of iterations over which measurements are averaged.
        device: argument of `Collectives`.
    """

    def __init__(
        self,
        links: Links,
        peers: CopyPeers,
        *,
        link: Link,
        iterations: int,
        device: Device = PROCESSOR,
    ) -> None:
        self._links = links
        # Any rank of another node: a collective uses the links to all nodes.
        self._far = min(peers.targets)
        self._lock = threading.Lock()  # Guards the two numbers below; any thread notes.
        self._iteration = 0
        self._num_recorded = 0
        self._turns = Interleaving(
            links, peers, link=link, idle={}, use=SpanUse(num_iterations=iterations)
        )
        self._collectives = Collectives(self._record, device=device)

    @property
    def pause_watching(self) -> Callable[[], Any]:
        """A context manager in which this thread's collectives are not watched."""
        return self._collectives.pause_watching

    @property
    def spans(self) -> dict[int, tuple[IdleSpan, ...]]:
        """The spans in which pieces are sent, by target; empty before they are measured.

        `after` of a span counts collectives.
        """
        return self._turns.all_spans

    def on_iteration_begin(self, *, begins: bool) -> None:
        """Notes that an iteration begins.

        Args:
            begins: whether a version of copies begins with it.
        """
        if begins:
            self._turns.hold()
        with self._lock:
            self._iteration += 1
            self._num_recorded = 0
        self._turns.on_iteration_begin(self._iteration, must_end=False)
        if not self._turns.all_spans:
            self._turns.rush()

    def rush(self) -> None:
        """Lets the rest of the version be sent at once, since a caller waits for it."""
        self._turns.rush()

    def chunk_bytes(self, most_bytes: int) -> int:
        """The size of the pieces of a version that begins now; at most `most_bytes`."""
        return self._turns.chunk_bytes(most_bytes)

    def deal(self, sizes: Sequence[int]) -> None:
        """Takes note of the pieces that are to be sent, as `Turns.deal` does."""
        self._turns.deal(sizes)

    def wait(self, target: int, num_bytes: int) -> None:
        """Blocks until a piece of so many bytes may be sent; raises as `Turns.wait` does."""
        self._turns.wait(target, num_bytes)

    def close(self) -> None:
        """Stops watching collectives, and ends all calls of `wait` with an AbortedError."""
        self._collectives.close()
        self._turns.close()

    def _record(self, start_s: float, end_s: float) -> None:
        with self._lock:
            tag = Tag(Channel.SCATTER, self._iteration, self._num_recorded)
            self._num_recorded += 1
            if self._num_recorded == _RECORDED_MAX:
                self._turns.on_pause()
                self._turns.rush()
            if self._num_recorded >= _RECORDED_MAX:
                return
        for is_out in (True, False):
            self._links.traffic.note(Use(is_out, self._far, tag, start_s, end_s))
        self._turns.on_action_done()


def between_collectives(
    links: Links,
    nodes: Sequence[str],
    copies: Sequence[LayerCopy],
    *,
    iterations: int,
    device: Device,
    device_type: str,
) -> BetweenCollectives | None:
    """The turns in which a rank sends copies between collectives; None: it sends them at once.

    Args:
        nodes: name of each rank's node, by rank.
        copies: shards with the ranks that keep copies of them.
        iterations: number of iterations over which collectives are measured; 0: copies are sent at
            once.
        device: device on which the model computes.
        device_type: torch's name of the devices whose tensors the loop's collectives take.
    """
    targets = {target for target, _ in outgoing_copies(links.rank, copies)}
    sources = incoming_layers(links.rank, copies).keys()
    # The host does not learn when the collectives of other backends are over; the device does.
    is_timed_here = backend_of(device_type) == "gloo"
    if not iterations or not targets or (device.is_host and not is_timed_here):
        return None
    return BetweenCollectives(
        links,
        CopyPeers(targets, sources, is_far=lambda peer: nodes[peer] != nodes[links.rank]),
        link=measured_link(links, targets=targets, sources=sources),
        iterations=iterations,
        device=PROCESSOR if is_timed_here else device,
    )


def measured_link(links: Links, *, targets: Collection[int], sources: Collection[int]) -> Link:
    """Latency and bandwidth for copies, measured while all ranks send to their copy holders.

    Raises:
        PeerLostError, AbortedError: a peer was lost, or the links were closed.
    """
    seconds: dict[int, list[float]] = {_SMALL_BYTES: [], _LARGE_BYTES: []}
    sizes = [_SMALL_BYTES] * _NUM_SMALL + [_LARGE_BYTES] * _NUM_LARGE
    for index, size in enumerate(sizes):
        payload = np.zeros(size, dtype=np.uint8)
        start_s = time.monotonic()
        for target in targets:
            links.send(target, Tag(Channel.COPY_USE, index, 1), payload)
        for source in sources:
            links.receive(source, Tag(Channel.COPY_USE, index, 1), timeout_s=TIMEOUT_S)
            links.send(source, Tag(Channel.COPY_USE, index, 2), payload[:1])
        for target in targets:
            links.receive(target, Tag(Channel.COPY_USE, index, 2), timeout_s=TIMEOUT_S)
        seconds[size].append(time.monotonic() - start_s)
    small_s, large_s = (median(seconds[size]) for size in (_SMALL_BYTES, _LARGE_BYTES))
    num_bytes = len(targets) * _LARGE_BYTES
    return Link(small_s / 2.0, num_bytes / max(large_s - small_s, 1e-6))
