"""Gemini's Figures 7, 8, 13 and 16: iterations of ZeRO-3, and copies in their idle spans.

A model is bytes and floating-point operations; how many layers it has hardly matters. Per layer, a
node receives the parameters that it lacks before the forward, and again before the backward, and
sends the sums of its gradients after it. The next layer's parameters travel while a layer computes.
The network of a node does one of these at a time; inside a node the links are taken to be free. The
backward computes the forward once more (activation checkpointing) and takes three times as long.

What the paper prints: 16 nodes of 8 devices, 512 tokens in a sample, 8 samples on a device, 400
Gb/s (p4d) and 100 Gb/s (p3dn), models of 100e9 and of 10e9 to 40e9 parameters. Assumed, not chosen
to match: devices attain half of their peak, as in planaria's shipped profiles; 96 layers; buffers
of 256 MiB a node. The peaks are those of the data sheets of A100 and V100.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from planaria.core.plan import Link
from planaria.papers.gemini.wasted_time import BYTES_PER_PARAMETER, NUM_NODES
from planaria.papers.rows import How, PublishedRow
from planaria.placement.interleave import PREDICTED_GAMMA, Interval, checkpoint_chunks, idle_spans

_TOKENS_PER_DEVICE: Final = 8 * 512
_NUM_LAYERS: Final = 96
_ATTAINED_SHARE: Final = 0.5
_BUFFER_BYTES: Final = 256 * 2**20
_LATENCY_S: Final = 10e-6
_IMPLIED: Final = "Figure 12 implies 60 to 63.5 s, a sixth of the peak; both stand"
_MODEL: Final = "half of the peak assumed; bytes and operations of ZeRO-3"


@dataclass(frozen=True, slots=True)
class ZeroCluster:
    """Nodes of one kind.

    Attributes:
        flops_per_s: floating-point operations per second of a device, at its peak.
        bytes_per_s: bandwidth of a node's network, each way.
        copy_bytes_per_s: bandwidth from the devices of a node to its memory.
    """

    flops_per_s: float
    bytes_per_s: float
    copy_bytes_per_s: float


P4D: Final = ZeroCluster(312e12, 400e9 / 8, 400e9 / 8)
# The paper says that copies to memory are about as fast as the network (section 5.2).
P3DN: Final = ZeroCluster(125e12, 100e9 / 8, 100e9 / 8)


@dataclass(frozen=True, slots=True)
class ZeroIteration:
    """An iteration without copies.

    Attributes:
        busy: intervals in which a node's network is busy.
    """

    cluster: ZeroCluster
    parameters: float
    end_s: float
    busy: tuple[Interval, ...]

    @property
    def idle_s(self) -> float:
        """Seconds in which the network is idle."""
        return self.end_s - sum(end_s - start_s for start_s, end_s in self.busy)

    @property
    def copy_bytes(self) -> float:
        """Bytes that a node sends for two copies of each state: its own share, once."""
        return self.parameters * BYTES_PER_PARAMETER / NUM_NODES

    @property
    def blocking_s(self) -> float:
        """Seconds of the iteration if copies are sent before it."""
        return self.end_s + self.copy_bytes / self.cluster.bytes_per_s

    def with_copies_s(self, bytes_per_s: float) -> float:
        """Seconds of the iteration with copies in its idle spans, at a bandwidth."""
        spans = idle_spans(self.busy, end_s=self.end_s)
        link = Link(_LATENCY_S, bytes_per_s)
        chunks = checkpoint_chunks(
            [end_s - start_s for start_s, end_s in spans],
            num_bytes=int(self.copy_bytes),
            num_copies=1,
            chunk_bytes=_BUFFER_BYTES,
            link=link,
            gamma=PREDICTED_GAMMA,
        )
        last = len(spans) - 1
        sent_s = [
            spans[last][0] + chunk.after_s + link.seconds(chunk.end_byte - chunk.first_byte)
            for chunk in chunks
            if chunk.span == last
        ]
        return max([self.end_s, *sent_s])


def zero_iteration(cluster: ZeroCluster, parameters: float) -> ZeroIteration:
    """The iteration of a model, layer by layer."""
    layer = parameters / _NUM_LAYERS
    forward_s = 2 * layer * _TOKENS_PER_DEVICE / (cluster.flops_per_s * _ATTAINED_SHARE)
    # Two bytes for a parameter and for a gradient; a node has 1 / 16 of each itself.
    wire_s = 2 * layer * (1 - 1 / NUM_NODES) / cluster.bytes_per_s
    busy: list[Interval] = []
    network_s = compute_s = 0.0

    def send(ready_s: float) -> float:
        nonlocal network_s
        begin_s = max(network_s, ready_s)
        network_s = begin_s + wire_s
        busy.append((begin_s, network_s))
        return network_s

    ready_s = send(0.0)
    for turn in range(2 * _NUM_LAYERS):
        is_backward = turn >= _NUM_LAYERS
        begin_s = max(compute_s, ready_s)
        # The last layer of the forward is the first of the backward and is still there.
        if turn not in (_NUM_LAYERS - 1, 2 * _NUM_LAYERS - 1):
            ready_s = send(begin_s)
        compute_s = begin_s + forward_s * (3 if is_backward else 1)
        if is_backward:
            send(compute_s)
    return ZeroIteration(cluster, parameters, max(compute_s, network_s), tuple(busy))


def figure_7() -> tuple[PublishedRow, ...]:
    """Iterations of the three models of 100e9 parameters on p4d."""
    iteration = zero_iteration(P4D, 100e9)
    return (
        PublishedRow(
            {"quantity": "iteration s"},
            None,
            iteration.end_s,
            How.FIRST_PRINCIPLES,
            f"{_MODEL}; {_IMPLIED}",
        ),
        _slowdown_row({"quantity": "with copies over without"}, iteration),
    )


def figure_8() -> tuple[PublishedRow, ...]:
    """Idle time of the network in these iterations."""
    iteration = zero_iteration(P4D, 100e9)
    return tuple(_idle_rows({}, iteration))


def figure_13() -> tuple[PublishedRow, ...]:
    """The same for smaller models on p3dn."""
    rows = []
    for billions in (10, 20, 40):
        iteration = zero_iteration(P3DN, billions * 1e9)
        keys = {"parameters": f"{billions}B"}
        rows += [
            PublishedRow(
                {**keys, "quantity": "iteration s"},
                None,
                iteration.end_s,
                How.FIRST_PRINCIPLES,
                _MODEL,
            ),
            _slowdown_row({**keys, "quantity": "with copies over without"}, iteration),
            *_idle_rows(keys, iteration),
        ]
    return tuple(rows)


def figure_16() -> tuple[PublishedRow, ...]:
    """Percent by which copies make an iteration of GPT-2 40B on p3dn longer."""
    iteration = zero_iteration(P3DN, 40e9)
    network, copy = iteration.cluster.bytes_per_s, iteration.cluster.copy_bytes_per_s
    # With one buffer a chunk is sent only after the one before is in memory.
    one_buffer = 1 / (1 / network + 1 / copy)
    recorded = "eight paced nodes with Llama-2 7B at 200 Gb/s (docs/LOG.md, 2026-11-23)"
    rows = []
    for mode, published, seconds, on_nodes in (
        ("blocking", 10.1, iteration.blocking_s, 26.1),
        ("no pipelining", 3.5, iteration.with_copies_s(one_buffer), 0.0),
        ("gemini", 0.0, iteration.with_copies_s(network), 0.0),
    ):
        percent = 100 * (seconds / iteration.end_s - 1)
        rows += [
            PublishedRow(
                {"mode": mode, "ours is": "computed"},
                published,
                percent,
                How.FIRST_PRINCIPLES,
                _MODEL,
                tolerance=0.1,
            ),
            PublishedRow(
                {"mode": mode, "ours is": "measured"}, published, on_nodes, How.NODES, recorded
            ),
        ]
    rows.append(
        PublishedRow(
            {"mode": "naive", "ours is": "-"},
            None,
            None,
            How.NOT,
            "the paper runs out of memory: 3.75 GB more on a device that has some 100 MB left; "
            "how much is left is not printed",
        )
    )
    return tuple(rows)


def _slowdown_row(keys: dict[str, str], iteration: ZeroIteration) -> PublishedRow:
    ratio = iteration.with_copies_s(iteration.cluster.bytes_per_s) / iteration.end_s
    return PublishedRow(keys, 1.0, ratio, How.FIRST_PRINCIPLES, "the paper says: no effect")


def _idle_rows(keys: dict[str, str], iteration: ZeroIteration) -> Iterator[PublishedRow]:
    sends_s = iteration.copy_bytes / iteration.cluster.bytes_per_s
    for quantity, seconds in (
        ("idle s without copies", iteration.idle_s),
        ("idle s with copies", iteration.idle_s - sends_s),
    ):
        yield PublishedRow(
            {**keys, "quantity": quantity},
            None,
            seconds,
            How.FIRST_PRINCIPLES,
            "drawn, not printed; the paper says that idle time is left",
        )
