"""The process of a rank: holds layers, runs iterations, commits, applies, saves and recovers.

The compute thread (the main one) runs `_Worker`: it serves one epoch after the other. Other
threads: links, one for reductions, one for saves, one for control. `PeerLostError`, `AbortedError`
and `CorruptedError` end an epoch here and nowhere else; then the worker waits for orders, tells
what it holds, and goes on in the next epoch with the layers that it has.
"""

import faulthandler
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import psutil
import torch

from planaria.checkpoint.tiers import DiskTier
from planaria.core.commit import CommitVector, decode_vector, encode_vector, vector_layout
from planaria.core.messages import (
    Abort,
    Corrupted,
    EpochReady,
    IterationDone,
    PeerUnreachable,
    SaveLayers,
    Shutdown,
    StartEpoch,
    Stopped,
    WorkerFailed,
    WorkerReady,
)
from planaria.core.specs import NodeSpec
from planaria.engine.apply import drop_others, exchange_layers, missing_layers, transfer_peers
from planaria.engine.batches import Batches
from planaria.engine.control import Control
from planaria.engine.executor import Executor
from planaria.engine.faults import flip_bit
from planaria.engine.groups import tree_peers
from planaria.engine.guard import refuse_divergence, sampled_hashes
from planaria.engine.optimizer import learning_rate
from planaria.engine.peak import peak_bytes, reset_peak
from planaria.engine.prepare import load_data, load_model, mistake_of
from planaria.engine.profiler import tied_parameters
from planaria.engine.saver import Saver
from planaria.engine.stage import Stage, State
from planaria.engine.tracebacks import user_traceback
from planaria.errors import (
    AbortedError,
    CheckpointError,
    ConfigError,
    CorruptedError,
    PeerLostError,
)
from planaria.schedule.action import Schedule
from planaria.schedule.lower import lowered
from planaria.transport.links import Links
from planaria.transport.probe import Probe
from planaria.transport.pulse import Pulse

logger = logging.getLogger(__name__)

LINK_TIMEOUT_S = 60.0
_BEATS_PER_LEASE = 6
_CLIP_EPSILON = 1e-6  # As in torch.nn.utils.clip_grad_norm_.


def main(spec: NodeSpec, agent_fd: int, lifeline_fd: int, pulse: Pulse) -> None:
    """A worker's main function, called in a process forked by its agent."""
    # One intra-op thread: a different number changes the bits of some kernels, and emulated
    # nodes share the machine's cores anyway.
    torch.set_num_threads(1)
    # The default of 5 ms lets a busy compute thread hold up a message for as long.
    sys.setswitchinterval(0.0005)
    # Where a worker hung or crashed, for its agent to read.
    faulthandler.register(signal.SIGUSR1, file=pulse.stack_fd, all_threads=True)
    faulthandler.enable(file=pulse.stack_fd, all_threads=True)
    links = Links(spec.rank, token=spec.token)
    beat_s = spec.job.cluster.lease_s / _BEATS_PER_LEASE
    control = Control(agent_fd, lifeline_fd, links=links, pulse=pulse, beat_s=beat_s)
    try:
        _Worker(spec, control, links, pulse).run()
        return
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
    def __init__(self, spec: NodeSpec, control: Control, links: Links, pulse: Pulse) -> None:
        self._spec = spec
        self._job = spec.job
        self._control = control
        self._links = links
        self._pulse = pulse
        self._tier = DiskTier(Path(self._job.checkpoint.directory))
        self._saver = Saver(
            self._tier, rank=spec.rank, send=control.send, may_write=lambda: pulse.is_member
        )
        self._reached = Probe(
            spec.node,
            places=spec.places,
            address=spec.injector,
            token=spec.token,
            faults={"flip": lambda i: flip_bit(self._stage, rank=spec.rank, iteration=i)},
        ).reached
        self._epoch = -1  # The newest that was begun or given up.
        self._saved_epoch = -1
        self._is_recovering = False
        self._vector: tuple[int, CommitVector] | None = None

    def run(self) -> None:
        """Serves one epoch after the other until the job shuts down."""
        cache_directory = Path(self._spec.cache_directory)
        model = load_model(self._job, cache_directory=cache_directory, profile=self._spec.profile)
        self._dataset = load_data(
            self._job, objective=model.objective, cache_directory=cache_directory
        )
        self._stage = Stage(model, training=self._job.training)
        self._layout = vector_layout(self._job, model.num_layers)
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
        while not isinstance(order := self._control.wait_order(), Shutdown):
            self._obey(order)
        self._links.close()

    def _obey(self, order: Abort | StartEpoch | SaveLayers) -> None:
        """Carries out an order; one that came before, or is for this worker's predecessor, not."""
        match order:
            case Abort() if order.epoch >= self._epoch:
                self._epoch = order.epoch
                self._is_recovering = True
                self._answer(order)
            case SaveLayers() if order.epoch == self._epoch > self._saved_epoch:
                self._saved_epoch = order.epoch
                self._settle(order.iteration, order.vector)
                self._write(order.layers.get(self._spec.rank, ()), order.iteration, order.epoch)
            case StartEpoch() if self._is_for_this(order):
                self._epoch = order.epoch
                try:
                    self._serve_epoch(order)
                except AbortedError as loss:
                    logger.info("rank %s: %s", self._spec.rank, loss)
                except CorruptedError as found:
                    logger.info("rank %s: %s", self._spec.rank, found)
                    self._control.send(
                        Corrupted(
                            rank=self._spec.rank,
                            epoch=order.epoch,
                            age=found.age,
                            hashes=found.hashes,
                        )
                    )
                except PeerLostError as loss:
                    logger.info("rank %s: %s", self._spec.rank, loss)
                    self._control.send(
                        PeerUnreachable(
                            rank=self._spec.rank,
                            epoch=order.epoch,
                            peer=loss.rank,
                            reason=str(loss),
                        )
                    )

    def _is_for_this(self, start: StartEpoch) -> bool:
        """Whether this very worker is meant, and has not begun the epoch yet."""
        own = start.addresses.get(self._spec.rank)
        is_new = start.epoch > self._epoch or (
            start.epoch == self._epoch and self._links.epoch < start.epoch
        )
        return is_new and own is not None and tuple(own) == tuple(self._links.address)

    # -- between epochs ---------------------------------------------------------------------------

    def _answer(self, order: Abort) -> None:
        """Says what this rank holds, now that nothing of it changes any more."""
        vector_iteration, vector = -1, b""
        if self._vector is not None:
            vector_iteration, vector = self._vector[0], encode_vector(self._vector[1])
        layers = self._stage.layers
        self._control.send(
            Stopped(
                rank=self._spec.rank,
                epoch=order.epoch,
                ages={layer: held.age for layer, held in layers.items()},
                complete=tuple(n for n, held in layers.items() if held.gradients_of == held.age),
                vector_iteration=vector_iteration,
                vector=vector,
                hashes=sampled_hashes(layers.values(), self._job.resilience),
            )
        )

    def _settle(self, iteration: int, vector: bytes) -> None:
        """Brings the layers to the age at which all go on; drops what does not get there."""
        if vector:
            decoded = decode_vector(vector, self._layout)
            self._vector = (iteration - 1, decoded)
            refuse_divergence(iteration - 1, decoded, self._job.training)
            self._apply(iteration - 1, decoded)
        drop_others(self._stage, age=iteration)

    # -- an epoch ---------------------------------------------------------------------------------

    def _serve_epoch(self, start: StartEpoch) -> None:
        plan, rank = start.plan, self._spec.rank
        self._settle(start.iteration, start.vector)
        if rank not in plan.ranks and rank not in transfer_sources(start):
            return
        begin_s = time.monotonic()
        if self._is_recovering:
            self._reached("regroup", start.iteration)
        peers = transfer_peers(start.rounds, rank)
        schedule = lowered(plan, tied=tied_parameters(self._stage.model))
        if rank in plan.ranks:
            peers |= _peers(schedule, rank, plan.ranks)
        self._links.begin(
            start.epoch, addresses=start.addresses, peers=peers, timeout_s=LINK_TIMEOUT_S
        )
        linked_s = time.monotonic()
        if self._is_recovering:
            self._reached("transfer", start.iteration)
        received_bytes = exchange_layers(
            self._links, self._stage, start.rounds, age=start.iteration, timeout_s=LINK_TIMEOUT_S
        )
        if rank not in plan.ranks:
            return
        own = plan.layers_by_rank()[rank]
        if not start.vector:  # Nothing has been trained yet in this run.
            missing = missing_layers(own, self._stage)
            self._stage.hold(missing, states=self._loaded(start, missing), age=start.iteration)
        assert not missing_layers(own, self._stage)
        if self._is_recovering:
            self._reached("resume", start.iteration)
        self._control.send(
            EpochReady(
                rank=rank,
                epoch=start.epoch,
                layers_materialised=self._stage.num_materialised,
                received_bytes=received_bytes,
                regroup_s=linked_s - begin_s,
                transfer_s=time.monotonic() - linked_s,
            )
        )
        executor = Executor(
            plan,
            schedule,
            stage=self._stage,
            links=self._links,
            layout=self._layout,
            pulse=self._pulse,
            lease_s=self._job.cluster.lease_s,
            resilience=self._job.resilience,
            reached=self._reached,
        )
        try:
            self._train(start, executor)
        finally:
            # Frees its reductions too, whatever ended the epoch.
            self._links.abort("the epoch is over", first_epoch=start.epoch + 1)
            executor.close()

    def _loaded(self, start: StartEpoch, layers: list[int]) -> dict[int, State]:
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
        own = start.plan.layers_by_rank()[self._spec.rank]
        if start.persists:
            executor.compare(iteration)
            self._save(start, iteration)
        end_s = time.monotonic()
        while not ends:
            self._reached("start", iteration)
            reset_peak()
            batches = Batches(self._dataset, training, iteration=iteration)
            vector, spans = executor.run(
                iteration, batches, wants_stop=self._control.stop_requested.is_set
            )
            self._vector = (iteration, vector)
            # All ranks have their layers, so nobody needs what this one has too many.
            self._stage.keep_only(own)
            refuse_divergence(iteration, vector, training)
            self._reached("optimizer", iteration)
            self._apply(iteration, vector)
            self._reached("applied", iteration)
            assert all(held.age == iteration + 1 for held in self._stage.layers.values())
            ends = vector.is_last(iteration, training)
            every = self._job.checkpoint.persist_every
            stall_s = 0.0
            if ends or (every and (iteration + 1) % every == 0):
                executor.compare(iteration + 1)
                stall_s = self._save(start, iteration + 1)
            before_s, end_s = end_s, time.monotonic()
            self._control.send(
                IterationDone(
                    rank=self._spec.rank,
                    epoch=start.epoch,
                    iteration=iteration,
                    loss=vector.loss,
                    num_samples=len(vector.samples),
                    sample_digest=vector.sample_digest,
                    seconds=end_s - before_s,
                    stall_s=stall_s,
                    peak_bytes=max(0, peak_bytes() - self._base_bytes),
                    ends=ends,
                    spans=spans if self._spec.trace else (),
                )
            )
            iteration += 1
        self._saver.wait_written()

    def _apply(self, iteration: int, vector: CommitVector) -> None:
        """Takes the optimizer step of the layers that are ready for it."""
        training = self._job.training
        scale = 1.0
        if training.gradient_clip > 0:
            norm = vector.gradient_norm
            scale = min(1.0, training.gradient_clip / (norm + _CLIP_EPSILON))
        for held in self._stage.layers.values():
            if held.gradients_of == iteration:
                rate = learning_rate(training, iteration)
                held.apply(iteration, learning_rate=rate, scale=scale)

    def _save(self, start: StartEpoch, age: int) -> float:
        """Saves what this rank owns; the seconds that training waited for it."""
        rank = self._spec.rank
        owned = [n for n in self._stage.layers if start.plan.holders(n)[0] == rank]
        return self._write(owned, age, start.epoch)

    def _write(self, layers: Sequence[int], age: int, epoch: int) -> float:
        if not layers:  # It has nothing to write, so nothing to tell.
            return 0.0
        held = {layer: self._stage.layers[layer] for layer in layers}
        return self._saver.save(held, iteration=age, epoch=epoch)


def transfer_sources(start: StartEpoch) -> set[int]:
    """The ranks that others get layers from."""
    return {transfer.source for transfers in start.rounds for transfer in transfers}


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
