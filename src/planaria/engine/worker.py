"""The process of a rank: it holds layers, runs iterations, applies their outcome, and saves.

protocol/worker_state.py decides what the worker does and when. The main thread, which computes,
takes these actions here, one after the other. Other threads serve links, reductions, saves and
control. `PeerLostError`, `AbortedError`, `CorruptedError` and `CheckpointError` end an epoch here
and nowhere else. Then the worker waits for orders, tells what it holds, and goes on in the next
epoch with the layers that it has. It does the same after an exception of the job's code: the age of
each layer is still known, except that of a layer whose optimizer step raised, which is dropped.
"""

import logging
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import psutil
from torch import Tensor

from planaria.checkpoint.disk.gate import Gate, behind_gate
from planaria.checkpoint.disk.parts import PartAnswer, RunPlace
from planaria.checkpoint.disk.tiers import tier_of
from planaria.checkpoint.disk.time_limits import with_time_limit
from planaria.checkpoint.memory.wire import copy_peers
from planaria.core.commit import CommitVector, Votes, decode_vector, vector_layout
from planaria.core.messages import (
    EpochReady,
    IterationDone,
    MeasuredSpan,
    Order,
    PartSaved,
    SaveFailed,
    SaveLayers,
    StartEpoch,
    Stopped,
    WorkerReady,
)
from planaria.core.plan import Plan
from planaria.core.samples import held_out_id
from planaria.core.specs import NodeSpec
from planaria.data.batches import check_num_samples
from planaria.data.prefetch import LoaderStart, Prefetch
from planaria.engine.blame import failure_of
from planaria.engine.comm.choice import NcclTrials, open_comm
from planaria.engine.comm.device_comm import DeviceComm
from planaria.engine.control import Control
from planaria.engine.copying import Copying
from planaria.engine.devices import Device
from planaria.engine.entry import provide_layers
from planaria.engine.exchange import keep_only_age, receive_silently
from planaria.engine.iteration.evaluation import Evaluator, load_evaluation
from planaria.engine.iteration.executor import Executor, ExecutorCallbacks, RankContext
from planaria.engine.iteration.groups import iteration_peers
from planaria.engine.iteration.guard import refuse_divergence, sampled_hashes
from planaria.engine.iteration.lateness import ActionTimes
from planaria.engine.iteration.memory_peaks import TensorPeak, memory_peak
from planaria.engine.optimizer import clip_scale, learning_rate, parts_to_step
from planaria.engine.part_writing import save_part
from planaria.engine.prepare import load_data, load_model, storage_of
from planaria.engine.profiler import tied_parameters
from planaria.engine.saver import Saver
from planaria.engine.stage import HeldLayer, RankStage
from planaria.engine.worker_faults import Slowness, faults_by_kind, probe_of
from planaria.errors import AbortedError, CheckpointError
from planaria.protocol import worker_actions as act
from planaria.protocol.agent_lease import meeting_s
from planaria.protocol.worker_state import (
    EPOCH_ERRORS,
    WorkerRules,
    WorkerState,
    WorkerStep,
    on_computed,
    on_epoch_left,
    on_exchanged,
    on_iteration_told,
    on_order,
    on_raised,
    on_save_begun,
    on_settled,
    transfer_peers,
    votes,
)
from planaria.schedule.action import Schedule
from planaria.schedule.buckets import ReductionOrder
from planaria.schedule.lower import rank_schedule
from planaria.transport.links import UNLIMITED_S, Links
from planaria.transport.pulse import LEASE_TIMEOUT_S, Pulse

logger = logging.getLogger(__name__)

_LINK_TIMEOUT_S: Final = 60.0  # Limit for making links.
_LEAVE_S: Final = 1.0  # Limit for a save that is being written when the job ends.


def _ignore_tensors(_: Iterable[Tensor]) -> None:
    """Ignores tensors that are held, in a job without a trace."""


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
        tier = behind_gate(tier, gate) if spec.heeds else tier
        self._timed_tier = with_time_limit(tier, timeout_s=self._job.checkpoint.timeout_s)
        self._storage = storage_of(spec)
        self._saver = Saver(
            tier,
            rank=spec.rank,
            send=control.send,
            may_write=partial(pulse.wait_member, timeout_s=max(LEASE_TIMEOUT_S, spec.patience_s)),
            is_over=control.is_over,
            timeout_s=self._job.checkpoint.timeout_s,
        )
        self._copying = Copying(spec, links, send=control.send, timeout_s=UNLIMITED_S)
        self._slowness = Slowness(links.timekeeper)
        faults = faults_by_kind(self._slowness, lambda: self._stage, rank=spec.rank)
        self._report_step = probe_of(spec, links, gate, faults=faults).report_step
        self._is_leaving = False
        # State of the epoch that is served.
        self._executor: Executor | None = None
        self._evaluator: Evaluator | None = None
        self.loaders: Sequence[Connection] = ()  # Processes that load its samples.
        self._schedule: tuple[Schedule, float] | None = None
        self._trials = NcclTrials()
        self._regroup_begin_s = 0.0
        self._received_bytes = 0
        self._spans: tuple[MeasuredSpan, ...] = ()
        self._iteration_end_s = self._stall_s = 0.0

    def run(self, device: Device) -> None:
        """Loads model and data, then obeys orders until the job shuts down."""
        spec, cache = self._spec, Path(self._spec.cache_directory)
        clock = self._links.timekeeper
        model = load_model(self._job, cache_directory=cache, profile=spec.profile, timekeeper=clock)
        self._dataset = load_data(self._job, objective=model.objective, cache_directory=cache)
        check_num_samples(len(self._dataset), spec.num_samples.data, "data")
        self._prefetch = Prefetch(self.loaders, LoaderStart(spec, model.objective))
        self._evaluation = load_evaluation(
            self._job, self._dataset, spec.num_samples.held_out, model=model, cache_directory=cache
        )
        evaluation = self._job.evaluation
        self._stage = RankStage(
            model,
            training=self._job.training,
            device=device,
            patience=evaluation.patience,
            held_out_id=held_out_id(evaluation.data_name, spec.num_samples.held_out),
        )
        self._tensors = TensorPeak(self._stage)
        self._peak = memory_peak(device)
        self._layout = vector_layout(self._job, model.num_layers)
        self._context = RankContext(
            stage=self._stage,
            links=self._links,
            layout=self._layout,
            pulse=self._pulse,
            times=ActionTimes(self._job),
            resilience=self._job.resilience,
        )
        self._callbacks = ExecutorCallbacks(
            on_step=self._report_step,
            on_action_done=self._copying.on_action_done,
            on_computed=self._slowness.on_computed,
            is_timed=lambda: self._spec.trace or self._slowness.is_slow,
            on_tensors=self._tensors.count_bytes if self._spec.trace else _ignore_tensors,
        )
        self._state = WorkerState(rules=self._rules())
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
        while not self._is_leaving:
            self._obey(self._control.wait_order())

    def _rules(self) -> WorkerRules:
        return WorkerRules(
            rank=self._spec.rank,
            pid=os.getpid(),
            address=self._links.address,
            layout=self._layout,
            training=self._job.training,
            persist_every=self._job.checkpoint.persist_every,
            save_timeout_s=self._job.checkpoint.timeout_s,
            evaluate_every=self._job.evaluation.every,
        )

    def _obey(self, order: Order) -> None:
        """Carries out an order; reports an exception of the code as a failure."""
        try:
            try:
                self._carry_out_order(order)
            except EPOCH_ERRORS as error:
                if self._state.start is None:
                    raise
                self._pulse.become_idle()  # The action that was interrupted is over.
                logger.info("rank %s: %s", self._spec.rank, error)
                self._carry_out(on_epoch_left(self._state, error))
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            self._carry_out(on_raised(self._state))
            failure = failure_of(
                error,
                self._spec,
                epoch=self._state.epoch,
                layers=self._pulse.layers,
                is_noticed=self._control.is_noticed,
            )
            self._pulse.become_idle()
            self._control.send(failure)

    def _carry_out_order(self, order: Order) -> None:
        """Carries out an order; an error that has ended the epoch hides what it has led to."""
        try:
            self._carry_out(on_order(self._state, order))
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            # An abort of NCCL lets a receive end as if all were well, and layers refuse rubbish.
            is_cause = isinstance(error, EPOCH_ERRORS) and not isinstance(error, AbortedError)
            if self._control.comm is not None and not is_cause:
                self._control.comm.check()
            raise

    def _carry_out(self, step: WorkerStep | None) -> None:
        while step is not None:
            self._state, actions = step
            step = None
            for action in actions:
                assert step is None, action  # Only the last action returns a next step.
                step = self._act(action)

    def _act(self, action: act.Action) -> WorkerStep | None:
        """Takes an action; returns the next step if the action has one."""
        match action:
            case act.Leave():
                self._leave(action)
            case act.TellHeld():
                self._answer(action.epoch)
            case act.KeepLayers():
                self._stage.keep_only(action.layers)
            case act.Settle():
                self._settle(action)
                return on_settled(self._state, action)
            case act.WriteLast():
                self._write_last(action.order)
            case act.WritePart():
                self._write_part(action)
            case act.Reach():
                self._reach(action)
            case act.Regroup():
                self._regroup(action.start)
            case act.Exchange():
                return on_exchanged(self._state, self._exchange(action.start))
            case act.BeginEpoch():
                self._begin_epoch(action)
            case _:
                return self._act_in_epoch(action)
        return None

    def _act_in_epoch(self, action: act.Action) -> WorkerStep | None:
        """Takes an action of an epoch that is served; returns the same as `_act`."""
        match action:
            case act.Compare():
                self._current_executor().compare(action.age)
            case act.SaveFirst():
                is_begun = self._save(action.age)
                self._iteration_end_s = self._links.timekeeper.now_s()
                return on_save_begun(self._state, is_begun)
            case act.BeginLast():
                owned, age = self._owned_layers(self._current_start().plan), action.age
                self._saver.begin_last(owned, iteration=age, epoch=self._state.epoch)
            case act.Evaluate():
                assert self._evaluator is not None
                self._copying.on_pause()
                self._iteration_end_s += self._evaluator.run(action.age, self._control.is_stopping)
            case act.Compute():
                vector = self._compute(action.iteration)
                return on_computed(self._state, action.iteration, vector)
            case act.CheckVector():
                refuse_divergence(action.iteration, action.vector, self._job.training)
            case act.ReceiveSilently():
                self._received_bytes = receive_silently(
                    self._links,
                    self._stage,
                    self._current_start().rounds,
                    age=action.iteration,
                    timeout_s=UNLIMITED_S,
                )
            case act.Apply():
                self._apply(action.iteration, action.vector)
            case act.Copy():
                self._copy(action)
            case act.Save():
                begin_s = time.monotonic()
                self._save(action.age)
                self._stall_s += time.monotonic() - begin_s
            case act.TellIteration():
                self._tell_iteration(action)
                return on_iteration_told(self._state, action)
            case act.SaveLast():
                epoch, owned = self._state.epoch, self._owned_layers(self._current_start().plan)
                self._saver.save_last(owned, iteration=action.age, epoch=epoch)
            case act.WaitWritten():
                self._saver.wait_written(action.epoch, timeout_s=action.timeout_s)
            case act.EndEpoch():
                self._end_epoch(action.epoch)
            case act.Complain():
                self._control.send(action.message)
            case _:
                raise AssertionError(action)
        return None

    def _current_start(self) -> StartEpoch:
        assert self._state.start is not None
        return self._state.start

    def _current_executor(self) -> Executor:
        assert self._executor is not None
        return self._executor

    # -- between epochs ---------------------------------------------------------------------------

    def _leave(self, leave: act.Leave) -> None:
        self._is_leaving = True
        if leave.waits:
            self._saver.leave(timeout_s=_LEAVE_S)
            self._links.close()

    def _answer(self, epoch: int) -> None:
        """Tells the coordinator what this rank holds, once the old epoch cannot change it."""
        complete = self._stage.complete_layers()
        self._control.send(
            Stopped(
                rank=self._spec.rank,
                epoch=epoch,
                ages={layer: held.age for layer, held in complete.items()},
                complete=tuple(n for n, held in complete.items() if held.gradients_of == held.age),
                vector_iteration=self._state.vector_iteration,
                vector=self._state.encoded_vector,
                hashes=sampled_hashes(complete.values(), self._job.resilience),
                since=self._state.since,
                copies=self._copying.versions,
            )
        )

    def _settle(self, settle: act.Settle) -> None:
        if isinstance(settle.order, StartEpoch):
            self._regroup_begin_s = self._links.timekeeper.catch_up()
        if settle.drops:
            self._stage.keep_only(())
        if settle.outcome is not None:
            iteration, vector = settle.outcome
            refuse_divergence(iteration, vector, self._job.training)
            self._apply(iteration, vector)
        keep_only_age(self._stage, age=settle.age)

    def _write_last(self, order: SaveLayers) -> None:
        """Saves the layers that the order names for this rank, before the job ends."""
        rank, age = self._spec.rank, order.iteration
        layers = order.layers.get(rank, ())
        try:
            states = self._copying.states(set(layers) - self._stage.layers.keys(), order.copied)
        except CheckpointError as error:
            failed = SaveFailed(rank=rank, epoch=order.epoch, iteration=age, reason=str(error))
            self._control.send(failed)
            return
        self._stage.hold(states, states=states, age=age)
        held = self._stage.layers
        self._saver.save_last({n: held[n] for n in layers}, iteration=age, epoch=order.epoch)

    def _write_part(self, write: act.WritePart) -> None:
        """Saves what this rank holds, by itself; tells the agent if the storage refuses."""
        spec, job = self._spec, self._job
        answer = PartAnswer(
            node=spec.node,
            rank=spec.rank,
            epoch=write.epoch,
            since=write.since,
            vector_iteration=self._state.vector_iteration,
            vector=self._state.encoded_vector,
        )
        try:
            save_part(
                RunPlace(self._timed_tier.storage, spec.parts),
                answer,
                self._stage.complete_layers,
                num_layers=self._stage.model.num_layers,
                num_writers=job.resilience.failures_tolerated + 1,
                devices_per_node=job.cluster.devices_per_node,
                timeout_s=meeting_s(job.cluster.lease_s),
                patience_s=job.checkpoint.timeout_s,
                apply=self._apply_encoded,
                tell=self._control.send,
            )
        except CheckpointError as error:
            self._control.send(PartSaved(rank=spec.rank, is_done=True, reason=str(error)))

    def _apply_encoded(self, iteration: int, data: bytes) -> None:
        vector = decode_vector(data, self._layout)
        refuse_divergence(iteration, vector, self._job.training)
        self._apply(iteration, vector)

    # -- an epoch ---------------------------------------------------------------------------------

    def _reach(self, place: act.Reach) -> None:
        """Announces a place at which a fault may strike; steps of a recovery count only in one."""
        if place.step not in act.RECOVERY_STEPS:
            self._report_step(place.step, place.iteration)
        elif place.recovers_from >= 0:  # The job may have gone back to an earlier iteration.
            self._report_step(place.step, max(place.recovers_from, place.iteration))

    def _regroup(self, start: StartEpoch) -> None:
        """Begins to make the links of an epoch to all peers of this rank in it."""
        plan, rank = start.plan, self._spec.rank
        peers = transfer_peers(start.rounds, rank)
        begin_s = time.thread_time()
        order = ReductionOrder(self._job.resilience.reductions)
        tied = tied_parameters(self._stage.model)
        schedule = rank_schedule(plan, rank, tied=tied, order=order)
        self._schedule = schedule, time.thread_time() - begin_s
        if self._state.takes_part:
            peers |= iteration_peers(schedule, rank, plan.all_ranks)
            peers |= copy_peers(rank, start.copies)
        self._links.enter(start.epoch, addresses=start.addresses, peers=peers)

    def _exchange(self, start: StartEpoch) -> int:
        """Exchanges layers until this rank has its own; returns the epoch's first iteration."""
        # State is sent over each link as soon as it is made, while others are still being made.
        start, self._received_bytes = provide_layers(
            start, self._links, self._stage, self._timed_tier, self._copying, storage=self._storage
        )
        self._links.wait_linked(timeout_s=_LINK_TIMEOUT_S)
        return start.iteration

    def _begin_epoch(self, begin: act.BeginEpoch) -> None:
        """Reports that this rank has its layers and links, and prepares to train."""
        start = begin.start
        assert self._schedule is not None
        schedule, scheduled_s = self._schedule
        begin_s = time.monotonic()
        open_comm(
            self._links,
            self._stage.device,
            start.plan,
            schedule,
            copies=start.copies if self._job.sends_copies_over_devices else (),
            job=self._job,
            hosts=[start.addresses[rank][0] for rank in start.plan.all_ranks],
            trials=self._trials,
            publish=self._publish_comm,
        )
        assert self._control.comm is not None
        self._control.send(
            EpochReady(
                rank=self._spec.rank,
                epoch=start.epoch,
                layers_materialised=self._stage.num_materialised,
                received_bytes=self._received_bytes,
                regroup_s=self._links.linked_s - self._regroup_begin_s,
                scheduled_s=scheduled_s,
                transfer_s=begin_s - self._links.linked_s,
                comm_s=time.monotonic() - begin_s,
                receptions=self._links.take_receptions(),
            )
        )
        self._received_bytes = 0
        self._stage.chosen = start.plan.recomputation_by_rank.get(self._spec.rank, {})
        if self._evaluation is not None:
            self._evaluator = Evaluator(
                self._evaluation, start.plan, context=self._context, comm=self._control.comm
            )
        self._executor = Executor(
            start.plan,
            schedule,
            context=self._context,
            comm=self._control.comm,
            callbacks=self._callbacks,
        )
        self._copying.enter(start, self._stage, self._control.comm, is_planned=begin.is_planned)
        self._iteration_end_s = self._links.timekeeper.now_s()

    def _publish_comm(self, comm: DeviceComm) -> None:
        self._control.comm = comm

    def _end_epoch(self, epoch: int) -> None:
        # This also unblocks reductions, whatever ended the epoch.
        self._links.abort("the epoch is over", first_epoch=epoch + 1)
        executor, self._executor = self._executor, None
        self._evaluator = None
        comm, self._control.comm = self._control.comm, None
        if comm is not None:  # The thread that reduces may wait in it, and not in a link.
            comm.abort("the epoch is over")
        if executor is not None:
            executor.close()
        self._copying.leave()
        if comm is not None:
            comm.close()

    # -- an iteration -----------------------------------------------------------------------------

    def _compute(self, iteration: int) -> CommitVector:
        """Computes an iteration; returns its commit vector once its gradients are complete."""
        self._peak.reset()
        self._copying.on_iteration_begin(iteration)
        plan = self._current_start().plan
        batches = self._prefetch.batches(self._dataset, iteration, plan, self._spec.rank)
        with self._tensors.watch() if self._spec.trace else nullcontext():
            vector, self._spans = self._current_executor().run(
                iteration, batches, votes=lambda: self._votes(iteration)
            )
        return vector

    def _votes(self, iteration: int) -> Votes:
        copied, uncopied = self._copying.votes(iteration)
        return votes(
            self._state,
            self._control.line,
            iteration=iteration,
            now_s=time.monotonic(),
            copied=copied,
            uncopied=uncopied,
            is_writing=self._saver.is_writing,
            early=self._stage.ends_early(iteration),
        )

    def _apply(self, iteration: int, vector: CommitVector) -> None:
        """Takes the optimizer step of each layer with complete gradients of the iteration."""
        scale = clip_scale(self._job.training, vector.gradient_norm)
        rate = learning_rate(self._job.training, iteration)
        complete = self._stage.complete_layers()
        due = sorted(n for n, held in complete.items() if held.gradients_of == iteration)
        for layers in parts_to_step(due, self._copying.is_copied, self._job.training):
            for layer in layers:
                self._copying.wait_copied(layer)
            self._pulse.layers = (layers[0], layers[-1] + 1)
            self._stage.apply(layers, iteration, learning_rate=rate, scale=scale)
            self._pulse.layers = (0, 0)

    def _copy(self, copy: act.Copy) -> None:
        """Lets copies begin, after all layers have been applied."""
        assert all(held.age == copy.age for held in self._stage.layers.values())
        plan = self._current_start().plan
        self._copying.on_iteration_applied(copy.vector, plan, age=copy.age, goes_on=copy.goes_on)
        self._stall_s = self._copying.take_stall_s()

    def _save(self, age: int) -> bool:
        """Begins to save the layers that this rank owns; returns False if the save is skipped."""
        owned = self._owned_layers(self._current_start().plan)
        return self._saver.save(owned, iteration=age, epoch=self._state.epoch)

    def _owned_layers(self, plan: Plan) -> dict[int, HeldLayer]:
        """Layers that this rank saves: those of which it is the first holder."""
        layers, rank = self._stage.layers, self._spec.rank
        return {n: held for n, held in layers.items() if plan.holders(n)[0] == rank}

    def _tell_iteration(self, done: act.TellIteration) -> None:
        """Reports the results of an iteration, and its time and memory."""
        executor, vector, age = self._current_executor(), done.vector, done.iteration + done.ends
        before_s, self._iteration_end_s = self._iteration_end_s, self._links.timekeeper.now_s()
        received_bytes, self._received_bytes = self._received_bytes, 0
        self._control.send(
            IterationDone(
                rank=self._spec.rank,
                epoch=self._state.epoch,
                iteration=done.iteration,
                loss=vector.loss,
                num_samples=vector.num_samples,
                sample_digest=vector.sample_digest,
                seconds=self._iteration_end_s - before_s,
                stall_s=self._stall_s,
                action_s=executor.action_s,
                eager_s=executor.eager_s,
                peak_bytes=max(0, self._peak.num_bytes() - self._peak.base_bytes),
                tensor_bytes=self._tensors.peak_bytes,
                ends=done.ends,
                early=vector.votes.early > 0,
                has_targets=vector.has_targets,
                switches=done.switches,
                received_bytes=received_bytes,
                copied=self._copying.take_done(),
                spans=self._spans if self._spec.trace else (),
                began_s=executor.start_s,
                receptions=self._links.take_receptions(),
                evaluated=self._evaluation.take_results(age) if self._evaluation else (),
            )
        )
