"""A job that asks for the paper's schedule of copies has its ranks send by it."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from helpers.jobs import NUM_LAYERS, shaped_plan, tiny_job
from helpers.linked_ranks import TIMEOUT_S, TOKEN, link_ranks, wait_until
from helpers.strategies import layer_profile, model_profile
from planaria.checkpoint.memory.arena_file import arena_fd
from planaria.core.copies import IdleSpan, IdleSpans, Label, LayerCopy
from planaria.core.job import CheckpointConfig
from planaria.core.messages import StartEpoch
from planaria.core.specs import NodeSpec
from planaria.engine.comm.host import HostComm
from planaria.engine.copying import Copying
from planaria.engine.prepare import split_model
from planaria.engine.stage import RankStage

pytestmark = pytest.mark.faults

NUM_NODES = 3
PLAN = shaped_plan((NUM_NODES,), 2)
COPIES = tuple(
    LayerCopy(layer, source, tuple(n for n in range(NUM_NODES) if n != source))
    for layer in range(NUM_LAYERS)
    for source in PLAN.holders(layer)
)
# Spans of which none has room for any chunk, the last one before the second pass is done.
SPANS = (IdleSpan(0, 0.0, 1e-9), IdleSpan(1, 0.0, 1e-9))
START = StartEpoch(
    epoch=0,
    plan=PLAN,
    addresses={},
    iteration=0,
    copies=COPIES,
    idle=tuple(
        IdleSpans(source, target, SPANS)
        for source in range(NUM_NODES)
        for target in range(NUM_NODES)
        if source != target
    ),
)


@contextmanager
def copying(directory: Path) -> Iterator[list[Copying]]:
    """Three nodes, each of which keeps all layers in the end."""
    checkpoint = CheckpointConfig(
        copies=3, buffer_bytes=2000, schedule="paper", directory=str(directory)
    )
    job = replace(tiny_job("plain_sequential", directory), checkpoint=checkpoint)
    layers = tuple(layer_profile(f"layer {n}", 0.01) for n in range(NUM_LAYERS))
    with link_ranks(NUM_NODES) as ranks, ExitStack() as stack:
        found = []
        for links in ranks:
            fd = arena_fd()
            stack.callback(os.close, fd)
            spec = NodeSpec(
                job=job,
                node=links.rank,
                token=TOKEN,
                coordinator=("", 0),
                worker="",
                cache_directory="",
                copies_fd=fd,
                profile=model_profile(layers),
            )
            one = Copying(spec, links, send=print, timeout_s=TIMEOUT_S)
            split = split_model(job.model, seed=3, vocabulary_size=0, sequence_length=0)
            stage = RankStage(split, training=job.training)
            stage.hold(PLAN.held_by_rank[links.rank], states={}, age=0)
            one.enter(START, stage, HostComm(links, stage.device), is_planned=False)
            found.append(one)
        yield found
        for links, one in zip(ranks, found, strict=True):
            links.abort("the test is over", first_epoch=1)
            one.leave()


def is_whole(copying: Copying) -> bool:
    """Whether a node keeps a copy of each layer."""
    return sum(Label(-1, 0, 0) in labels for labels in copying.versions.values()) == NUM_LAYERS


def test_a_version_is_sent_in_one_iteration_whatever_room_it_has(tmp_path: Path) -> None:
    """Both copies of it, many chunks, in the last span; nothing says that it must end."""
    with copying(tmp_path) as nodes:
        for one in nodes:
            one.on_iteration_begin(0)
        assert not any(map(is_whole, nodes))
        for one in nodes:
            one.on_action_done()
        for one in nodes:
            wait_until(partial(is_whole, one))
