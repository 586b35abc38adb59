"""All-reductions over links: gradients among the holders of a layer, the commit vector among all.

`reduce_bucket` is a reduce-scatter and an all-gather by direct exchange: each of the k holders
sums one k-th of the bucket, adding the holders' parts in ascending order of rank, rounds it
once to float32, and sends it to the others. So all holders get the same bits, and a holder
moves 2(k-1)/k of the bucket, as in a ring, in two steps. The sums and the results may be on a
device; the holders add on their processors.

`reduce_vector` sums a small vector over all ranks up and down a binary tree.

Source: docs/protocol.md, "The commit vector". Differs from Gloo's all-reduce: abortable, and
the order of the sum does not depend on timing or on the chunk size.
"""

from collections.abc import Iterable, Sequence
from itertools import chain, pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from planaria.engine.comm.pieces import (
    ArrivingPieces,
    LeavingSums,
    flat_range,
    host_memory,
    pairs_with,
    pieces_on_host,
    receive_pieces,
    send_pieces,
)
from planaria.engine.devices import PROCESSOR, CopyLane, Device
from planaria.schedule.action import Schedule
from planaria.transport.links import Buffer, Channel, Links, Tag

_NUMPY_DTYPES = {torch.float32: np.float32, torch.float64: np.float64}


def reduce_bucket(
    links: Links,
    sums: Sequence[Tensor],
    results: Sequence[Tensor],
    *,
    ranks: Sequence[int],
    iteration: int,
    bucket: int,
    timeout_s: float,
    virtual_bytes: int = 0,
    device: Device = PROCESSOR,
) -> None:
    """Sums flat tensors over `ranks` and writes the rounded sums into `results`.

    Args:
        sums: this rank's parts, one-dimensional, float64 or float32, the same sizes on all ranks.
        results: float32, of the same sizes; sums in float32 may be their own results.
        ranks: the holders, ascending; this rank is one of them.
        virtual_bytes: size that paced links take the results to have; 0: their real size.
        device: device of the sums and the results.
    """
    size = sum(part.numel() for part in sums)
    own = ranks.index(links.rank)
    bounds = [size * i // len(ranks) for i in range(len(ranks) + 1)]
    scatter = Tag(Channel.SCATTER, iteration, bucket)
    gather = Tag(Channel.GATHER, iteration, bucket)
    # Each rank begins with the one after it, so that not all send to the first one at once.
    others = [*range(own + 1, len(ranks)), *range(own)]
    gathered_bytes = virtual_bytes // len(ranks)
    scattered_bytes = gathered_bytes * sums[0].element_size() // results[0].element_size()
    cuts = list(pairwise(bounds))
    leaving = LeavingSums(device)
    outgoing = [leaving.pieces(flat_range(sums, *cut)) for cut in cuts]
    arriving = [
        ArrivingPieces(links, ranks[i], gather, flat_range(results, *cuts[i]), device=device)
        for i in others
    ]
    for i in others:
        send_pieces(links, ranks[i], scatter, outgoing[i], virtual_bytes=scattered_bytes)
    total = torch.zeros(bounds[own + 1] - bounds[own], dtype=sums[0].dtype)
    for rank in ranks:
        if rank == links.rank:
            _add(total, (array for piece in outgoing[own] for array in piece.wait()))
        else:
            _add(total, receive_pieces(links, rank, scatter, total.nbytes, timeout_s=timeout_s))
    segment = total
    if not device.is_host or total.dtype is not torch.float32:
        segment = host_memory(device, total.numel(), torch.float32).copy_(total)
    for i in others:
        pieces = pieces_on_host(device, segment)
        send_pieces(links, ranks[i], gather, pieces, virtual_bytes=gathered_bytes)
    own_results = flat_range(results, *cuts[own])
    marks = [device.copy(pairs_with(segment, own_results), CopyLane.ARRIVING)]
    try:
        for segment_of_another in arriving:
            segment_of_another.begin_fill(timeout_s=timeout_s)
    finally:  # What an error left behind would be written to the sums of the next epoch.
        for mark in chain(marks, *(segment.marks for segment in arriving)):
            mark.wait()


def _add(total: Tensor, parts: Iterable[Buffer]) -> None:
    """Adds the concatenated parts."""
    offset = 0
    for part in parts:
        # Viewed by numpy: torch cannot view an empty tensor as another dtype.
        values = torch.from_numpy(part.view(_NUMPY_DTYPES[total.dtype]))
        total[offset : offset + len(values)] += values
        offset += len(values)
    assert offset == len(total)


def tree_peers(rank: int, ranks: Sequence[int]) -> tuple[int, ...]:
    """The parent (if any) and children of a rank in the binary tree of `reduce_vector`."""
    index = list(ranks).index(rank)
    parent = (ranks[(index - 1) // 2],) if index else ()
    children = tuple(ranks[c] for c in (2 * index + 1, 2 * index + 2) if c < len(ranks))
    return parent + children


def iteration_peers(schedule: Schedule, rank: int, ranks: Sequence[int]) -> set[int]:
    """The ranks with which a rank exchanges messages in an iteration that `ranks` run."""
    peers = set(tree_peers(rank, ranks))
    for route in schedule.routes:
        for before, after in pairwise(route):
            if rank in (before.rank, after.rank):
                peers |= {before.rank, after.rank}
    for bucket in schedule.buckets:
        if rank in bucket.ranks:
            peers |= set(bucket.ranks)
    return peers - {rank}


def reduce_vector(
    links: Links,
    vector: npt.NDArray[np.float64],
    *,
    ranks: Sequence[int],
    iteration: int,
    timeout_s: float,
    channel: Channel = Channel.COMMIT,
) -> npt.NDArray[np.float64]:
    """The sum of a float64 vector over all ranks, the same bits on all of them.

    An entry is exact if one rank alone contributes it and the others give +0, or if it is a sum of
    whole numbers below 2^53.
    """
    up, down = Tag(channel, iteration, 0), Tag(channel, iteration, 1)
    index = list(ranks).index(links.rank)
    peers = tree_peers(links.rank, ranks)
    parent, children = (peers[0], peers[1:]) if index else (-1, peers)
    total = vector
    for child in children:
        received = links.receive(child, up, timeout_s=timeout_s)
        total = total + received.view(np.float64)
    if parent >= 0:
        links.send(parent, up, total)
        total = links.receive(parent, down, timeout_s=timeout_s).view(np.float64)
    for child in children:
        links.send(child, down, total)
    return total
