"""The process of a rank: holds layers, runs iterations, commits, applies, saves and recovers.

The compute thread (the main one) runs `Worker`: it serves one epoch after the other. Other
threads: links, one for reductions, one for saves, one for control. `PeerLostError`, `AbortedError`
and `CorruptedError` end an epoch here and nowhere else; then the worker waits for orders, tells
what it holds, and goes on in the next epoch with the layers that it has. So it does after whatever
the job's code raises: what it holds is of an age that all know, but for a layer whose optimizer
step raised, which is dropped.
"""

import logging
import os
import time
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Final

import msgspec
import psutil
from torch import Tensor

from planaria.checkpoint.disk.gate import Gate, gated
from planaria.checkpoint.disk.patience import patient
from planaria.checkpoint.disk.tiers import tier_of
from planaria.checkpoint.memory.wire import copy_peers
from planaria.core.commit import CommitVector, Votes, decode_vector, encode_vector, vector_layout
from planaria.core.messages import (
    AT_COMMIT,
    Abort,
    CopySpoilt,
    Corrupted,
    EpochReady,
    IterationDone,
    MeasuredSpan,
    Message,
    PeerUnreachable,
    SaveFailed,
    SaveLayers,
    Shutdown,
    StartEpoch,
    WorkerReady,
)
from planaria.core.plan import Plan
from planaria.core.specs import NodeSpec
from planaria.data.batches import Batches
from planaria.engine.apply import (
    answer,
    drop_others,
    receive_silently,
    transfer_peers,
    transfer_sources,
)
from planaria.engine.blame import failure_of
from planaria.engine.control import Control
from planaria.engine.copying import Copying
from planaria.engine.entry import exchanged
from planaria.engine.executor import Executor
from planaria.engine.faults import Slowness, cutter, faults_by_kind
from planaria.engine.groups import iteration_peers
from planaria.engine.guard import refuse_divergence, sampled_hashes
from planaria.engine.memory_peaks import Peak, TensorPeak
from planaria.engine.optimizer import clip_scale, learning_rate
from planaria.engine.prepare import load_data, load_model, storage_of
from planaria.engine.profiler import tied_parameters
from planaria.engine.saver import Saver
from planaria.engine.stage import HeldLayer, Stage
from planaria.errors import (
    AbortedError,
    CheckpointError,
    CorruptedError,
    PeerLostError,
    SpoiltError,
)
from planaria.schedule.action import Schedule
from planaria.schedule.buckets import ReductionOrder
from planaria.schedule.lower import lowered_for
from planaria.transport.links import PATIENT_S, Links
from planaria.transport.probe import Probe
from planaria.transport.pulse import Pulse

logger = logging.getLogger(__name__)

_LINK_TIMEOUT_S: Final = 60.0  # For links to be made.
_LEAVE_S: Final = 1.0  # For a save that is being written when the job has ended.


def _unwatched(_: Iterable[Tensor]) -> None:
    """Nobody asks what is held."""


class Worker:
    """One rank, from its start until the job shuts down."""

    def __init__(self, spec: NodeSpec, control: Control, links: Links, pulse: Pulse) -> None:
        self._spec = spec
        self._job = spec.job
        self._control = control
        self._links = links
        self._pulse = pulse
        gate = Gate()
        tier = tier_of(self._job.checkpoint.directory)
        tier = gated(tier, gate) if spec.heeds else tier
        self._read = patient(tier, timeout_s=self._job.checkpoint.timeout_s)
        self._storage = storage_of(spec)
        self._saver = Saver(
            tier,
            rank=spec.rank,
            send=control.send,
            may_write=pulse.wait_member,
            is_over=control.is_over,
        )
        self._copying = Copying(spec, links, send=control.send, timeout_s=PATIENT_S)
        self._slowness = Slowness(links.timekeeper)
        probe = Probe(
            spec.node,
            places=spec.places,
            address=spec.injector,
            token=spec.token,
            faults=faults_by_kind(self._slowness, lambda: self._stage, rank=spec.rank),
        )
        self._reached = probe.reached
        if spec.heeds:
            cut = cutter(links, devices_per_node=spec.job.cluster.devices_per_node)
            probe.heed(cut=cut, slow={"store": gate.slow})
        self._epoch = -1  # The newest that was begun or given up.
        self._saved_epoch = -1
        self._owes_save = False  # The one with which the epoch was to begin.
        self._stopped_at = -1  # The iteration whose recovery it is, -1 while all is well.
        self._takes_part = False  # In the newest epoch that this rank was told to begin.
        self._switches_at = -1  # Where the ranks agreed that the next epoch begins.
        self._vector: tuple[int, CommitVector] | None = None
        self._since = -1  # The epoch in which all went back to a save.

    def run(self) -> None:
        """Serves one epoch after the other until the job shuts down."""
        cache, profile = Path(self._spec.cache_directory), self._spec.profile
        timekeeper = self._links.timekeeper
        model = load_model(self._job, cache_directory=cache, profile=profile, timekeeper=timekeeper)
        self._dataset = load_data(self._job, objective=model.objective, cache_directory=cache)
        self._stage = Stage(model, training=self._job.training)
        self._tensors = TensorPeak(self._stage)
        self._peak = Peak()
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
            if isinstance(order, Abort) and order.replaced.get(self._spec.rank) == os.getpid():
                return
            self._try(order)
        self._saver.leave(timeout_s=_LEAVE_S)
        self._links.close()

    def _try(self, order: Abort | StartEpoch | SaveLayers) -> None:
        """Carries out an order, or tells what the job's code raised meanwhile."""
        try:
            self._obey(order)
        except (Exception, SystemExit) as error:
            failure = failure_of(
                error,
                self._spec,
                pid=os.getpid(),
                epoch=order.epoch,
                layers=self._pulse.layers,
            )
            self._pulse.rest()
            self._control.send(failure)

    def _obey(self, order: Abort | StartEpoch | SaveLayers) -> None:
        """Carries out an order; one that came before, or is for this worker's predecessor, not."""
        rank, epoch = self._spec.rank, order.epoch
        match order:
            case Abort() if order.epoch >= self._epoch:
                self._epoch, self._owes_save = order.epoch, False
                self._stopped_at = self._vector[0] + 1 if self._vector else 0
                hashes = sampled_hashes(self._stage.whole().values(), self._job.resilience)
                told = answer(self._stage, rank, epoch, self._vector, hashes, since=self._since)
                self._control.send(msgspec.structs.replace(told, copies=self._copying.versions))
            case SaveLayers() if order.epoch == self._epoch > self._saved_epoch:
                self._saved_epoch = order.epoch
                self._settle(order, order.iteration, order.vector)
                self._write_last(order)
            case StartEpoch() if self._is_for_this(order):
                self._epoch = epoch
                try:
                    self._serve_epoch(order)
                except (AbortedError, CheckpointError, CorruptedError, PeerLostError) as error:
                    self._pulse.rest()  # Whatever it was in the middle of.
                    logger.info("rank %s: %s", rank, error)
                    if isinstance(error, CorruptedError):
                        # It may be all that is left: nobody may know who of two is right.
                        self._saver.wait_written(epoch, timeout_s=self._job.checkpoint.timeout_s)
                    if said := complaint(error, rank=rank, epoch=epoch):
                        self._control.send(said)

    def _is_for_this(self, start: StartEpoch) -> bool:
        """Whether this very worker is meant, and has not begun the epoch yet."""
        is_new = start.epoch > self._epoch or start.epoch == self._epoch > self._links.epoch
        is_agreed = self._switches_at >= 0 or not self._takes_part
        return (
            is_new
            and (is_agreed or start.iteration != AT_COMMIT)
            and tuple(start.addresses.get(self._spec.rank, ())) == tuple(self._links.address)
        )

    def _write_last(self, order: SaveLayers) -> None:
        """Saves what this rank is told to, before the job ends."""
        layers, age = order.layers.get(self._spec.rank, ()), order.iteration
        try:
            states = self._copying.states(set(layers) - self._stage.layers.keys(), order.copied)
        except CheckpointError as error:
            failed = SaveFailed(
                rank=self._spec.rank, epoch=order.epoch, iteration=age, reason=str(error)
            )
            self._control.send(failed)
            return
        self._stage.hold(states, states=states, age=age)
        held = self._stage.layers
        self._saver.save_last({n: held[n] for n in layers}, iteration=age, epoch=order.epoch)

    # -- between epochs ---------------------------------------------------------------------------

    def _settle(self, order: StartEpoch | SaveLayers, iteration: int, vector: bytes) -> None:
        """Brings the layers to the age at which all go on; drops what does not get there."""
        if order.since != self._since:
            self._since, self._vector = order.since, None
            self._stage.keep_only(())
        if vector:
            decoded = decode_vector(vector, self._layout)
            self._vector = (iteration - 1, decoded)
            refuse_divergence(iteration - 1, decoded, self._job.training)
            self._apply(iteration - 1, decoded)
        drop_others(self._stage, age=iteration)

    # -- an epoch ---------------------------------------------------------------------------------

    def _serve_epoch(self, start: StartEpoch) -> None:
        plan, rank = start.plan, self._spec.rank
        begin_s = self._links.timekeeper.catch_up()
        is_planned = start.iteration == AT_COMMIT
        start = self._settled(start)
        self._takes_part, self._switches_at = rank in plan.all_ranks, -1
        if not self._takes_part and rank not in transfer_sources(start.rounds):
            return
        self._recovers("regroup", start.iteration)
        peers = transfer_peers(start.rounds, rank)
        schedule, scheduled_s = self._scheduled(plan)
        if self._takes_part:
            peers |= iteration_peers(schedule, rank, plan.all_ranks)
            peers |= copy_peers(rank, start.copies)
        self._links.enter(start.epoch, addresses=start.addresses, peers=peers)
        self._recovers("transfer", start.iteration)
        # State flows over each link as soon as it stands, while others are still being made.
        start, received_bytes = exchanged(
            start, self._links, self._stage, self._read, self._copying, storage=self._storage
        )
        self._links.wait_linked(timeout_s=_LINK_TIMEOUT_S)
        if not self._takes_part:
            return
        self._recovers("resume", start.iteration)
        self._stopped_at = -1
        self._control.send(
            EpochReady(
                rank=rank,
                epoch=start.epoch,
                layers_materialised=self._stage.num_materialised,
                received_bytes=received_bytes,
                regroup_s=self._links.linked_s - begin_s,
                scheduled_s=scheduled_s,
                transfer_s=time.monotonic() - self._links.linked_s,
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
            worked=self._slowness.worked,
            acted=self._copying.acted,
            holds=self._tensors.note if self._spec.trace else _unwatched,
        )
        try:
            self._copying.enter(start, self._stage, is_planned=is_planned)
            self._train(start, executor)
        finally:
            # Frees its reductions too, whatever ended the epoch.
            self._links.abort("the epoch is over", first_epoch=start.epoch + 1)
            executor.close()
            self._copying.leave()

    def _scheduled(self, plan: Plan) -> tuple[Schedule, float]:
        """The schedule of this rank, and the processor seconds that it took."""
        begin_s = time.thread_time()
        order = ReductionOrder(self._job.resilience.reductions)
        tied = tied_parameters(self._stage.model)
        schedule = lowered_for(plan, self._spec.rank, tied=tied, order=order)
        return schedule, time.thread_time() - begin_s

    def _recovers(self, step: str, iteration: int) -> None:
        """A step of a recovery, if it is one; the job may have gone back to the iteration."""
        if self._stopped_at >= 0:
            self._reached(step, max(self._stopped_at, iteration))

    def _settled(self, start: StartEpoch) -> StartEpoch:
        """The order with its iteration, as far as this rank can know it, and its layers so."""
        if start.iteration == AT_COMMIT:
            if self._switches_at < 0:  # It had no part in the epoch before.
                self._since = start.since
                self._stage.keep_only(())
                return start
            assert self._vector is not None
            start = msgspec.structs.replace(
                start, iteration=self._switches_at, vector=encode_vector(self._vector[1])
            )
        self._settle(start, start.iteration, start.vector)
        return start

    def _train(self, start: StartEpoch, executor: Executor) -> None:
        """Runs iterations until the ranks agree that one was the last, then saves."""
        training, iteration = self._job.training, start.iteration
        ends = iteration >= training.iterations
        if start.persists:
            executor.compare(iteration)
            self._owes_save = not self._save(start, iteration)
        end_s = self._links.timekeeper.now_s()
        while not ends:
            self._peak.reset()
            vector, spans = self._computed(start, executor, iteration)
            received_bytes = self._received(start, iteration)
            self._reached("optimizer", iteration)
            self._apply(iteration, vector)
            self._reached("applied", iteration)
            assert all(held.age == iteration + 1 for held in self._stage.layers.values())
            ends = vector.is_last(iteration, training)
            switches = not ends and vector.switches(start.plan)
            goes_on = not ends and not switches
            self._copying.applied(vector, start.plan, age=iteration + 1, goes_on=goes_on)
            stall_s = self._copying.take_stall_s()
            saves = not ends and (vector.saves or self._persists(iteration + 1))
            if ends or saves:
                executor.compare(iteration + 1)
            if saves:
                begin_s = time.monotonic()
                self._save(start, iteration + 1)
                stall_s += time.monotonic() - begin_s
            self._owes_save = vector.votes.unsaved > 0 and not vector.saves
            before_s, end_s = end_s, self._links.timekeeper.now_s()
            self._control.send(
                IterationDone(
                    rank=self._spec.rank,
                    epoch=start.epoch,
                    iteration=iteration,
                    loss=vector.loss,
                    num_samples=vector.num_samples,
                    sample_digest=vector.sample_digest,
                    seconds=end_s - before_s,
                    stall_s=stall_s,
                    action_s=executor.action_s,
                    eager_s=executor.eager_s,
                    peak_bytes=max(0, self._peak.num_bytes() - self._base_bytes),
                    tensor_bytes=self._tensors.peak_bytes,
                    ends=ends,
                    switches=switches,
                    received_bytes=received_bytes,
                    copied=self._copying.take_done(),
                    spans=spans if self._spec.trace else (),
                )
            )
            iteration += 1
            if ends:
                owned = self._owned(start.plan)
                self._saver.save_last(owned, iteration=iteration, epoch=start.epoch)
            if switches:
                self._switches_at = iteration
                return
        self._saver.wait_written(start.epoch)

    def _computed(
        self, start: StartEpoch, executor: Executor, iteration: int
    ) -> tuple[CommitVector, tuple[MeasuredSpan, ...]]:
        """The vector of an iteration, whose gradients are complete then, and what was measured."""
        self._reached("start", iteration)
        self._copying.started(iteration)
        with self._tensors.watched() if self._spec.trace else nullcontext():
            vector, spans = executor.run(
                iteration,
                Batches(self._dataset, self._job.training, iteration=iteration),
                votes=lambda: self._votes(start.epoch, iteration),
            )
        self._vector = (iteration, vector)
        # All ranks have their layers, so nobody needs what this one has too many.
        self._stage.keep_only(start.plan.held_by_rank[self._spec.rank])
        refuse_divergence(iteration, vector, self._job.training)
        return vector, spans

    def _votes(self, epoch: int, iteration: int) -> Votes:
        copied, uncopied = self._copying.votes(iteration)
        stops = self._control.stop_requested.is_set()
        switches, writes = self._control.next_epoch > epoch, self._saver.is_writing
        return Votes(int(stops), int(switches), copied, uncopied, int(self._owes_save), int(writes))

    def _received(self, start: StartEpoch, iteration: int) -> int:
        """Waits for the layers that this rank is to have silently; the bytes that came."""
        if not start.plan.silent or iteration > start.iteration:
            return 0
        links, stage, rounds = self._links, self._stage, start.rounds
        return receive_silently(links, stage, rounds, age=iteration, timeout_s=PATIENT_S)

    def _apply(self, iteration: int, vector: CommitVector) -> None:
        """Takes the optimizer step of the layers that are ready for it."""
        scale = clip_scale(self._job.training, vector.gradient_norm)
        rate = learning_rate(self._job.training, iteration)
        for held in self._stage.whole().values():
            if held.gradients_of == iteration:
                self._copying.wait_copied(held.layer)
                self._pulse.layers = (held.layer, held.layer + 1)
                held.apply(iteration, learning_rate=rate, scale=scale)
                self._pulse.layers = (0, 0)

    def _persists(self, age: int) -> bool:
        """Whether the state of this age is to be saved while training goes on."""
        every = self._job.checkpoint.persist_every
        return every > 0 and age % every == 0

    def _save(self, start: StartEpoch, age: int) -> bool:
        """Saves what this rank owns, if it can begin to."""
        return self._saver.save(self._owned(start.plan), iteration=age, epoch=start.epoch)

    def _owned(self, plan: Plan) -> dict[int, HeldLayer]:
        """The layers that this rank saves."""
        layers, rank = self._stage.layers, self._spec.rank
        return {n: held for n, held in layers.items() if plan.holders(n)[0] == rank}


# -- what a rank says of an epoch that it has left -------------------------------------------------


def complaint(error: Exception, *, rank: int, epoch: int) -> Message | None:
    """What is said of an epoch that this rank has left; nothing where it was told to."""
    match error:
        case CorruptedError():
            return Corrupted(rank=rank, epoch=epoch, age=error.age, hashes=error.hashes)
        case SpoiltError():
            return CopySpoilt(
                rank=rank,
                epoch=epoch,
                reason=str(error),
                source=error.source,
                is_damaged=error.is_damaged,
            )
        case CheckpointError():
            return CopySpoilt(rank=rank, epoch=epoch, reason=str(error))
        case PeerLostError():
            return PeerUnreachable(rank=rank, epoch=epoch, peer=error.rank, reason=str(error))
    return None
