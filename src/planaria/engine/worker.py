"""The process of a rank: holds layers, runs iterations, commits, applies and saves.

The compute thread (the main one) runs `_Worker`. Other threads: links, one for reductions, one
for saves, one for control. `PeerLostError` and `AbortedError` end up here and nowhere else.
"""

import faulthandler
import logging
import math
import os
import signal
import sys
import time
from itertools import pairwise
from pathlib import Path

import psutil
import torch

from planaria.checkpoint.tiers import DiskTier
from planaria.core.messages import (
    EpochReady,
    IterationDone,
    MeasuredSpan,
    NodeSpec,
    Shutdown,
    StartEpoch,
    WorkerFailed,
    WorkerReady,
)
from planaria.engine.batches import Batches
from planaria.engine.control import Control
from planaria.engine.executor import CommitVector, Executor
from planaria.engine.groups import tree_peers
from planaria.engine.optimizer import learning_rate
from planaria.engine.prepare import load_data, load_model, mistake_of
from planaria.engine.profiler import tied_parameters
from planaria.engine.saver import Saver
from planaria.engine.stage import Stage, State
from planaria.engine.tracebacks import user_traceback
from planaria.errors import AbortedError, CheckpointError, ConfigError, PeerLostError
from planaria.schedule.action import Schedule
from planaria.schedule.lower import lowered
from planaria.transport.links import Links

logger = logging.getLogger(__name__)

LINK_TIMEOUT_S = 60.0
_CLIP_EPSILON = 1e-6  # As in torch.nn.utils.clip_grad_norm_.


def main(spec: NodeSpec, agent_fd: int, lifeline_fd: int) -> None:
    """A worker's main function, called in a process forked by its agent."""
    # One intra-op thread: a different number changes the bits of some kernels, and emulated
    # nodes share the machine's cores anyway.
    torch.set_num_threads(1)
    # The default of 5 ms lets a busy compute thread hold up a message for as long.
    sys.setswitchinterval(0.0005)
    # The stacks of a worker that hangs, for whoever sends the signal.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    control = Control(agent_fd, lifeline_fd)
    try:
        _Worker(spec, control).run()
        return
    except (PeerLostError, AbortedError) as loss:
        # The coordinator hears of it from the lost node's agent, and says what follows.
        logger.info("rank %s: %s", spec.rank, loss)
    except ConfigError as error:
        mistake = mistake_of(error)
        text = user_traceback(error)
        control.send(WorkerFailed(node=spec.node, rank=spec.rank, traceback=text, mistake=mistake))
    except (Exception, SystemExit) as error:
        text = user_traceback(error)
        control.send(WorkerFailed(node=spec.node, rank=spec.rank, traceback=text))
    while not isinstance(control.wait_order(), Shutdown):
        logger.info("rank %s has failed and waits to be shut down", spec.rank)


class _Worker:
    def __init__(self, spec: NodeSpec, control: Control) -> None:
        self._spec = spec
        self._job = spec.job
        self._control = control
        self._links = Links(spec.rank, token=spec.token)
        self._tier = DiskTier(Path(self._job.checkpoint.directory))
        self._saver = Saver(self._tier, rank=spec.rank, send=control.send)

    def run(self) -> None:
        """Serves one epoch after the other until the job shuts down."""
        cache_directory = Path(self._spec.cache_directory)
        model = load_model(self._job, cache_directory=cache_directory, profile=self._spec.profile)
        self._dataset = load_data(
            self._job, objective=model.objective, cache_directory=cache_directory
        )
        self._stage = Stage(model, training=self._job.training)
        self._base_bytes = psutil.Process().memory_info().rss
        self._control.send(
            WorkerReady(
                node=self._spec.node,
                rank=self._spec.rank,
                pid=os.getpid(),
                pid_start=psutil.Process().create_time(),
                host=self._links.address[0],
                port=self._links.address[1],
            )
        )
        while isinstance(order := self._control.wait_order(), StartEpoch):
            self._serve_epoch(order)
        self._links.close()

    def _serve_epoch(self, start: StartEpoch) -> None:
        plan = start.plan
        held = plan.layers_by_rank()[self._spec.rank]
        self._stage.hold(held, states=self._loaded(start, held), age=start.iteration)
        schedule = lowered(plan, tied=tied_parameters(self._stage.model))
        self._links.begin(
            start.epoch,
            addresses=start.addresses,
            peers=_peers(schedule, self._spec.rank, plan.ranks),
            timeout_s=LINK_TIMEOUT_S,
        )
        self._control.send(
            EpochReady(
                rank=self._spec.rank,
                epoch=start.epoch,
                layers_materialised=self._stage.num_materialised,
            )
        )
        executor = Executor(plan, schedule, stage=self._stage, links=self._links)
        try:
            self._train(start, executor)
        finally:
            executor.close()

    def _loaded(self, start: StartEpoch, layers: range) -> dict[int, State]:
        if not start.source:
            return {}
        manifest = next(
            version.manifest
            for version in self._tier.versions()
            if version.directory.name == start.source
        )
        if manifest is None:
            raise CheckpointError(f"checkpoint {start.source} is not complete any more")
        try:
            return {layer: self._tier.read_layer(manifest, layer) for layer in layers}
        except CheckpointError as error:
            directory = self._job.checkpoint.directory
            raise ConfigError("checkpoint.directory", directory, str(error)) from error

    def _train(self, start: StartEpoch, executor: Executor) -> None:
        """Runs iterations until the ranks agree that one was the last, then saves."""
        training = self._job.training
        iteration = start.iteration
        ends = iteration >= training.iterations
        end_s = time.monotonic()
        while not ends:
            _reset_peak()
            batches = Batches(self._dataset, training, iteration=iteration)
            vector, spans = executor.run(
                iteration, batches, wants_stop=self._control.stop_requested.is_set
            )
            self._refuse_divergence(iteration, vector)
            self._apply(iteration, vector)
            ends = self._is_last(iteration, vector)
            stall_s = self._save(start, iteration + 1, ends=ends)
            before_s, end_s = end_s, time.monotonic()
            self._report(
                start.epoch,
                iteration,
                vector,
                batches.consumed,
                spans,
                seconds=end_s - before_s,
                stall_s=stall_s,
                ends=ends,
            )
            iteration += 1
        self._saver.wait_written()

    def _refuse_divergence(self, iteration: int, vector: CommitVector) -> None:
        """Ends training before a step would turn every parameter into a NaN.

        All ranks see the same vector, so all end here. The state is not saved: the parameters
        that led here are suspect, and resuming from them would compute the same numbers.

        Raises:
            ConfigError: the loss or the gradient norm is infinite or not a number.
        """
        if math.isfinite(vector.loss) and math.isfinite(vector.gradient_norm):
            return
        raise ConfigError(
            "training.learning_rate",
            self._job.training.learning_rate,
            f"training diverged: iteration {iteration} has loss {vector.loss} and gradient norm "
            f"{vector.gradient_norm}, and was not applied; lower the rate, set "
            "training.gradient_clip, or mend the data, and --resume from the newest checkpoint "
            "(checkpoint.persist_every) if there is one",
        )

    def _apply(self, iteration: int, vector: CommitVector) -> None:
        training = self._job.training
        scale = 1.0
        if training.gradient_clip > 0:
            norm = vector.gradient_norm
            scale = min(1.0, training.gradient_clip / (norm + _CLIP_EPSILON))
        for held in self._stage.layers.values():
            held.apply(iteration, learning_rate=learning_rate(training, iteration), scale=scale)

    def _is_last(self, iteration: int, vector: CommitVector) -> bool:
        """The same on all ranks, for it depends on the commit vector alone."""
        training = self._job.training
        reached = training.target_loss > 0.0 and vector.loss <= training.target_loss
        return iteration + 1 >= training.iterations or reached or vector.stop_votes > 0

    def _save(self, start: StartEpoch, age: int, *, ends: bool) -> float:
        every = self._job.checkpoint.persist_every
        if not ends and (every == 0 or age % every):
            return 0.0
        owned = {
            layer: held
            for layer, held in self._stage.layers.items()
            if start.plan.holders(layer)[0] == self._spec.rank
        }
        if not owned:  # It has nothing to write, so nothing to tell.
            return 0.0
        return self._saver.save(owned, iteration=age, epoch=start.epoch)

    def _report(
        self,
        epoch: int,
        iteration: int,
        vector: CommitVector,
        samples: list[int],
        spans: tuple[MeasuredSpan, ...],
        *,
        seconds: float,
        stall_s: float,
        ends: bool,
    ) -> None:
        self._control.send(
            IterationDone(
                rank=self._spec.rank,
                epoch=epoch,
                iteration=iteration,
                loss=vector.loss,
                samples=tuple(samples),
                seconds=seconds,
                stall_s=stall_s,
                peak_bytes=max(0, _peak_bytes() - self._base_bytes),
                ends=ends,
                spans=spans if self._spec.trace else (),
            )
        )


def _peers(schedule: Schedule, rank: int, ranks: tuple[int, ...]) -> set[int]:
    """Whom this rank exchanges anything with in an iteration."""
    peers = set(tree_peers(rank, ranks))
    for route in schedule.routes:
        for before, after in pairwise(route):
            if rank in (before.rank, after.rank):
                peers |= {before.rank, after.rank}
    for bucket in schedule.buckets:
        if rank in bucket.ranks:
            peers |= set(bucket.ranks)
    return peers - {rank}


def _reset_peak() -> None:
    """Starts the measurement of this process's peak memory anew (Linux)."""
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")


def _peak_bytes() -> int:
    """The most resident memory since `_reset_peak`."""
    with open("/proc/self/status", encoding="ascii") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    raise AssertionError("/proc/self/status has no VmHWM")
