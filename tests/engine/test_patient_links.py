"""Ranks that wait for a peer: for as long as its link stands and nobody aborts, and they say so."""

import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from helpers.jobs import NUM_LAYERS, shaped_plan, tiny_job
from helpers.linked_ranks import TIMEOUT_S, in_threads, link_ranks, tag
from planaria.checkpoint.disk.tiers import tier_of
from planaria.core.commit import Votes, vector_layout
from planaria.core.job import JobConfig
from planaria.core.messages import AT_COMMIT, StartEpoch
from planaria.core.plan import Transfer
from planaria.core.specs import NodeSpec
from planaria.data.batches import Batches
from planaria.engine.comm.host import HostComm
from planaria.engine.copying import Copying
from planaria.engine.devices import PROCESSOR
from planaria.engine.entry import provide_layers
from planaria.engine.iteration.executor import Executor, ExecutorCallbacks, RankContext
from planaria.engine.iteration.lateness import ActionTimes
from planaria.engine.prepare import load_model
from planaria.engine.stage import RankStage
from planaria.errors import AbortedError
from planaria.models.paced import PacedData
from planaria.schedule.lower import rank_schedule
from planaria.transport.links import UNLIMITED_S, Links, Tag
from planaria.transport.pulse import Pulse

HOURS_S = 10_000.0


def assert_waits_for_ever(call: Callable[[], object], links: Links) -> None:
    """It is neither over nor has it lost a peer after hours; an order frees it."""
    has_looked = threading.Event()
    has_any, now_s = links.has_any, time.monotonic

    def noted(wanted: Mapping[int, Tag]) -> bool:
        has_looked.set()
        return has_any(wanted)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(links, "has_any", noted)
        with in_threads(call) as (waiting,):
            assert has_looked.wait(TIMEOUT_S)
            with links._changed:  # Who has looked waits by now.
                for module, name in ((threading, "_time"), (time, "monotonic")):
                    patched.setattr(module, name, lambda: now_s() + HOURS_S)
                has_looked.clear()
                links._changed.notify_all()
            assert has_looked.wait(TIMEOUT_S)
            with links._changed:  # Who has looked waits again, or has given up.
                links.abort("a member is lost", first_epoch=1)
            with pytest.raises(AbortedError):
                waiting.result(timeout=TIMEOUT_S)


def test_an_executor_waits_for_a_peer_that_takes_hours() -> None:
    """It may still load its layers, or compute: whether it lives its lease and its pulse tell."""
    config = tiny_job("sequential", Path(), iterations=1)
    plan = shaped_plan((2,), config.num_microbatches)
    with link_ranks(2) as (_, links):
        stage = stage_of(config, links)
        stage.hold(plan.held_by_rank[1], states={}, age=0)
        executor = Executor(
            plan,
            rank_schedule(plan, 1),
            context=RankContext(
                stage=stage,
                links=links,
                layout=vector_layout(config, NUM_LAYERS),
                pulse=Pulse(),
                times=ActionTimes(config),
                resilience=config.resilience,
            ),
            comm=HostComm(links, PROCESSOR),
            callbacks=ExecutorCallbacks(
                on_step=lambda *_: None,
                on_action_done=lambda: None,
                on_computed=lambda _: None,
                is_timed=lambda: False,
                on_tensors=lambda _: None,
            ),
        )
        batches = Batches(PacedData(), config.training, iteration=0)
        run = partial(executor.run, 0, batches, votes=lambda: Votes(0, 0, 0, 0))
        assert_waits_for_ever(run, links)
        executor.close()


def stage_of(config: JobConfig, links: Links) -> RankStage:
    model = load_model(config, cache_directory=Path(), profile=None, timekeeper=links.timekeeper)
    return RankStage(model, training=config.training)


def test_a_rank_that_joins_waits_for_an_iteration_that_takes_hours(tmp_path: Path) -> None:
    """Its peers go over to the epoch in which it is at the end of an iteration of theirs."""
    config = tiny_job("sequential", tmp_path)
    plan = replace(shaped_plan((1,), config.num_microbatches), silent={1: (1,)})
    start = StartEpoch(
        epoch=0,
        plan=plan,
        addresses={},
        iteration=AT_COMMIT,
        rounds=((Transfer(1, 0, 1, 0),),),
    )
    spec = NodeSpec(
        job=config, node=1, token=b"", coordinator=("", 0), worker="", cache_directory=""
    )
    with link_ranks(2) as (_, links):
        stage = stage_of(config, links)
        copying = Copying(spec, links, send=print, timeout_s=TIMEOUT_S)
        tier = tier_of(config.checkpoint.directory)
        call = partial(provide_layers, start, links, stage, tier, copying, storage=None)
        assert_waits_for_ever(call, links)


def test_a_rank_that_has_waited_for_long_says_for_whom(caplog: pytest.LogCaptureFixture) -> None:
    """Once, and again when it has waited for twice as long."""
    with link_ranks(3) as (_, links, _), caplog.at_level(logging.WARNING):
        call = partial(links.receive_any, {0: tag(0), 2: tag(0)}, timeout_s=UNLIMITED_S)
        assert_waits_for_ever(call, links)

    (record,) = caplog.records
    assert "rank 1 has waited for ranks [0, 2] for 10000 s" in record.message


def test_the_kernel_looks_after_links_on_which_nothing_comes() -> None:
    """Nobody else ends a wait for a machine that is gone without a word."""
    with link_ranks(2) as ranks:
        for links in ranks:
            (link,) = links._peers.values()
            probes = [
                link.sock.getsockopt(socket.IPPROTO_TCP, option)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            ]
            assert link.sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert probes[0] + probes[1] * probes[2] <= 120
            unanswered_ms = link.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            assert unanswered_ms == 120_000  # Of what was sent: it is not probed meanwhile.
