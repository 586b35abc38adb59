"""Ranks of this process that copy layers to each other's memory, each a few threads."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest

from helpers.linked_ranks import TIMEOUT_S
from planaria.checkpoint.memory.arena import Arena
from planaria.checkpoint.memory.arena_file import arena_fd
from planaria.checkpoint.memory.filling import Fill, HostCopy, fill_alone, no_device
from planaria.checkpoint.memory.landing import DevicePath
from planaria.checkpoint.memory.stream import Copier, CopyPlan
from planaria.checkpoint.memory.turns import AtOnce, Buffers, FlowControl, Turns
from planaria.checkpoint.memory.version import Bytes, Version
from planaria.checkpoint.memory.wire import State, state_of
from planaria.core.copies import Label, LayerCopy
from planaria.transport.links import Links

# Layers 0 and 1 are held by rank 0, layer 2 by rank 1; rank 2 holds none.
OWN = ((0, 1), (2,), ())
COPIES = (LayerCopy(0, 0, (1, 2)), LayerCopy(1, 0, (2,)), LayerCopy(2, 1, (0,)))
KEPT = {0: {0, 1, 2}, 1: {0, 2}, 2: {0, 1}}


def layer_state(layer: int, age: int, num_bytes: int) -> dict[str, np.ndarray]:
    """Two tensors of a layer, of which the first has this size."""
    rng = np.random.default_rng((layer, age))
    weight = rng.standard_normal((num_bytes // 4, 1)).astype(np.float32)
    return {"parameter/weight": weight, "optimizer/weight/step": np.array(age)}


@dataclass
class CopyingRank:
    """A rank's copier, and what it copies with.

    Attributes:
        layer_bytes: size of the first tensor of each layer.
        abort: ends the epoch of the rank, for a reason.
        failures: reasons for which versions cannot be complete.
    """

    links: Links
    arena: Arena
    copier: Copier
    layer_bytes: int
    abort: Callable[[str], None]
    failures: list[str] = field(default_factory=list)

    def begin(self, age: int) -> None:
        """Begins a version of its layers."""
        own = OWN[self.links.rank]
        self.copier.begin(age, {layer: layer_state(layer, age, self.layer_bytes) for layer in own})

    def kept(self, age: int) -> dict[int, State]:
        """The states of this age that it has a copy of, by layer."""
        label = Label(-1, 0, age)
        layers = [n for n, labels in self.arena.versions().items() if label in labels]
        return {layer: state_of(self.arena.read(layer, label)) for layer in layers}


@contextmanager
def copying_rank(
    links: Links,
    *,
    abort: Callable[[str], None],
    copies: Sequence[LayerCopy],
    buffers: Buffers,
    layer_bytes: int,
    device_path: DevicePath | None = None,
    turns: Turns | None = None,
    fill: Fill = fill_alone,
) -> Iterator[CopyingRank]:
    """A rank that copies; at the end its epoch is aborted."""
    fd = arena_fd()
    try:
        arena, failures = Arena(fd), list[str]()
        own = OWN[links.rank]
        copier = Copier(
            links,
            CopyPlan(own=own, copies=copies, since=-1, epoch=0, complete_label=None),
            host_copy=HostCopy(arena, fill, lambda _: 0, no_device),
            flow=FlowControl(buffers, turns or AtOnce(), TIMEOUT_S),
            on_failure=failures.append,
            device_path=device_path,
        )
        try:
            yield CopyingRank(links, arena, copier, layer_bytes, abort, failures)
        finally:
            abort("the test is over")
            copier.close()
    finally:
        os.close(fd)


def assert_kept(
    ranks: Sequence[CopyingRank], age: int, kept: Mapping[int, set[int]] = KEPT
) -> None:
    """Each rank has what it is to keep of this age, bit for bit."""
    for rank in ranks:
        states = rank.kept(age)
        assert states.keys() == kept[rank.links.rank]
        for layer, arrays in states.items():
            wanted = layer_state(layer, age, rank.layer_bytes)
            assert list(arrays) == list(wanted)
            for name, array in arrays.items():
                assert array.dtype == wanted[name].dtype
                assert np.array_equal(array, wanted[name])


def damage_pieces(monkeypatch: pytest.MonkeyPatch) -> set[tuple[int, int, int]]:
    """Lets every third piece of a layer arrive damaged the first time.

    Returns:
        The pieces that have been damaged so far, each as its version, layer, and index.
    """
    damaged: set[tuple[int, int, int]] = set()
    store_piece = Version.store_piece

    def store_damaged_piece(version: Version, index: int, piece: Bytes, value: int) -> bool:
        key = (id(version), version.layer, index)
        if index % 3 == 0 and key not in damaged:
            damaged.add(key)
            piece = piece.copy()
            piece[len(piece) // 2] ^= 4
        return store_piece(version, index, piece, value)

    monkeypatch.setattr(Version, "store_piece", store_damaged_piece)
    return damaged
