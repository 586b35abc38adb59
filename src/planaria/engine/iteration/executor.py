"""Runs one iteration of a schedule on this rank, up to and including the commit vector.

The compute thread runs the rank's actions in order. Sends never block, receives wait for the
message, and reductions are handed to one communication thread, which runs this rank's buckets in
ascending order: a bucket that is ready early waits for the buckets before it, so that no two ranks
wait for each other. When its own reductions are done, each rank enters the sum of the commit
vector: squared gradient norms by layer, losses and samples by microbatch, and votes. A rank that
holds the sum knows that every gradient is complete everywhere (docs/protocol.md, "The commit
vector", C2), and that all holders of a layer computed with the same parameters: sums of
parameter hashes travel with the vector (core/agreement.py), and if they show a difference no rank
gets a vector.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from planaria.core.agreement import disagreeing_layers, hash_entries
from planaria.core.commit import CommitVector, VectorLayout, Votes, commit_vector
from planaria.core.job import ResilienceConfig
from planaria.core.messages import MeasuredSpan
from planaria.core.plan import Hop, Plan
from planaria.data.batches import Batches
from planaria.data.datasets import keep_generators
from planaria.engine.comm.device_comm import DeviceComm
from planaria.engine.devices import Mark, Moment
from planaria.engine.iteration.groups import reduce_vector
from planaria.engine.iteration.guard import sampled_hashes
from planaria.engine.iteration.lateness import ActionTimes, EpochLimits, Workload
from planaria.engine.iteration.split_backward import WeightGradients, input_gradient
from planaria.engine.stage import HeldLayer, RankStage
from planaria.errors import AbortedError, CorruptedError
from planaria.models.packing import bring
from planaria.schedule.action import Action, Kind, Schedule
from planaria.transport.links import UNLIMITED_S, Channel, Links, Tag
from planaria.transport.pulse import Pulse

# Steps of an iteration at which a fault can be injected, by the action that is about to begin.
_BACKWARDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT)
_STEPS = {Kind.FORWARD: "forward", Kind.REDUCE: "reduce"} | dict.fromkeys(_BACKWARDS, "backward")

_COMPUTING = (Kind.FORWARD, *_BACKWARDS, Kind.BACKWARD_WEIGHT)
_WAITING = (Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """The parts and settings of a rank that its iterations use, the same in all epochs.

    Attributes:
        stage: the layers that the rank holds.
        layout: layout of the commit vector.
        pulse: the worker's pulse, which is told by when each action should end.
        times: times of its actions so far.
        resilience: says whether parameter hashes are compared.
    """

    stage: RankStage
    links: Links
    layout: VectorLayout
    pulse: Pulse
    times: ActionTimes
    resilience: ResilienceConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorCallbacks:
    """The functions that an executor calls while it runs an iteration.

    Attributes:
        on_step: takes the step and the iteration, at each step at which a fault can be injected.
        on_action_done: is called after each forward and backward, before `on_computed`.
        on_computed: takes the seconds of each forward and backward, or part of one; may slow the
            rank.
        is_timed: tells whether the seconds of each action are needed when it has run. If not, those
            of a device are read when the iteration ends, and `on_computed` is not called.
        on_tensors: takes the tensors kept for later actions, at each moment at which the rank's
            memory in use may be at its peak of the iteration.
    """

    on_step: Callable[[str, int], None]
    on_action_done: Callable[[], None]
    on_computed: Callable[[float], None]
    is_timed: Callable[[], bool]
    on_tensors: Callable[[Iterable[Tensor]], None]


class Executor:
    """One rank's part of the iterations of one epoch.

    Attributes:
        action_s: seconds of the newest iteration's forwards and backwards, by kind.
        eager_s: seconds of the newest iteration's eager forwards of shadowed layers.
        start_s: moment at which the newest iteration began, by the clock of paced work.
    """

    def __init__(
        self,
        plan: Plan,
        schedule: Schedule,
        *,
        context: RankContext,
        comm: DeviceComm,
        callbacks: ExecutorCallbacks,
    ) -> None:
        self.action_s: dict[str, float] = {}
        self.start_s = 0.0
        self.eager_s = 0.0
        self._plan = plan
        self._schedule = schedule
        self._stage = context.stage
        self._links = context.links
        self._comm = comm
        self._now_s = context.links.timekeeper.now_s
        self._layout = context.layout
        self._pulse = context.pulse
        self._limits = EpochLimits(context.times, context.pulse)
        self._resilience = context.resilience
        self._callbacks = callbacks
        self._rank = context.links.rank
        layers_by_rank = plan.held_by_rank
        self._own_indices = layers_by_rank[self._rank]
        num_holders = Counter(layer for layers in layers_by_rank.values() for layer in layers)
        self._shared = [layer for layer in sorted(self._own_indices) if num_holders[layer] > 1]
        self._actions = schedule.actions[self._rank]
        self._buckets = [i for i, b in enumerate(schedule.buckets) if self._rank in b.ranks]
        self._communication = ThreadPoolExecutor(1, thread_name_prefix="reduce")
        self._handlers: dict[Kind, Callable[[Action], None]] = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.BACKWARD_INPUT: self._backward_input,
            Kind.SHADOW: self._shadow,
            Kind.BACKWARD_WEIGHT: self._backward_weight,
            Kind.SEND_FORWARD: self._send_forward,
            Kind.RECEIVE_FORWARD: self._receive_forward,
            Kind.SEND_BACKWARD: self._send_backward,
            Kind.RECEIVE_BACKWARD: self._receive_backward,
            Kind.REDUCE: self._reduce,
        }

    def close(self) -> None:
        """Ends the communication thread; whatever it waits for must have ended or been aborted."""
        self._communication.shutdown(wait=True, cancel_futures=True)
        self._drop_tensors()
        # The handlers refer to the executor, so only the garbage collector would free it and the
        # comm. It may run in any thread, the one that beats too, and groups take long to free.
        # So does the error of a reduction, by its frames, and keeps layers that are dropped.
        self._handlers.clear()
        self._submitted: list[Future[float]] = []
        del self._comm

    def _drop_tensors(self) -> None:
        self._inputs: dict[tuple[int, int], Tensor] = {}
        self._outputs: dict[tuple[int, int], Tensor] = {}
        self._output_gradients: dict[tuple[int, int], Tensor] = {}
        self._weight_gradients: dict[tuple[int, int], WeightGradients] = {}

    def run(
        self,
        iteration: int,
        batches: Batches,
        *,
        votes: Callable[[], Votes],
    ) -> tuple[CommitVector, tuple[MeasuredSpan, ...]]:
        """Computes all gradients of an iteration; returns the commit vector and the measured spans.

        Raises:
            CorruptedError: holders of a layer differ, so the gradients are cleared.
        """
        self._iteration = iteration
        self._batches = batches
        self._drop_tensors()
        self._losses: dict[int, Tensor] = {}
        self._ready: set[int] = set()
        self._submitted = []
        self._spans: list[MeasuredSpan] = []
        self.start_s = self._now_s()
        self.action_s, self.eager_s = {}, 0.0
        self._moments: list[tuple[Kind, Moment, Moment]] = []
        self._shapes: dict[tuple[int, int], tuple[int, ...]] = {}  # Of the inputs of hops.
        self._limits.begin_iteration()
        self._is_timed = self._callbacks.is_timed()
        for held in self._own_layers():
            held.clear()
        with keep_generators():
            self._run_actions(iteration)
        self._finish_computing()
        self._limits.note_iteration(self._now_s() - self.start_s)
        self._wait_sums()
        self._comm.check()  # A receive that was aborted may have ended as if all were well.
        finish_unshared(
            self._stage, self._schedule, buckets=self._buckets, layers=self._own_indices
        )
        for held in self._own_layers():
            held.gradients_of = iteration
        self._callbacks.on_step("commit", iteration)
        is_untargeted = bool(self._losses) and self._batches.num_targets() == 0
        vector = self._commit(votes()._replace(untargeted=int(is_untargeted)))
        return vector, tuple(self._spans)

    def _run_actions(self, iteration: int) -> None:
        reached_steps: set[str] = set()
        for action in self._actions:
            self._comm.check()
            step = _STEPS.get(action.kind)
            if step and step not in reached_steps:
                reached_steps.add(step)
                self._callbacks.on_step(step, iteration)
            self._run_action(action)

    def _wait_sums(self) -> None:
        """Waits for the reductions of this rank; one that raises does so in its own layers."""
        assert len(self._submitted) == len(self._buckets)
        for number, bucket in enumerate(self._buckets):
            try:
                self._links.timekeeper.reach(_result(self._submitted[number]))
            except Exception:
                layers = self._own_indices.intersection(self._schedule.buckets[bucket].layers)
                self._pulse.layers = (min(layers), max(layers) + 1)
                raise

    def _own_layers(self) -> list[HeldLayer]:
        """The layers that the plan gives to this rank, silent ones included.

        The stage may still hold other layers.
        """
        return [self._stage.layers[layer] for layer in sorted(self._own_indices)]

    def _run_action(self, action: Action) -> None:
        """Runs one action; the agent sees if it is late, unless it waits for another rank."""
        start_s = self._now_s()
        if action.kind is Kind.FORWARD:
            self._load_samples(action)
        begin_s = self._now_s()  # The store of the samples may stand still, which has no limit.
        if action.kind not in _WAITING:
            self._limits.begin(self._workload(action), is_queued=bool(self._moments))
        begin = self._moment(action)
        self._handlers[action.kind](action)
        end = self._moment(action)
        if begin is not None and end is not None:
            self._moments.append((action.kind, begin, end))
        elif action.kind in (*_COMPUTING, Kind.SHADOW):
            self._stage.device.finish()
        elif action.kind in _WAITING and self._is_timed and self._comm.waits_on_device:
            self._limits.begin_device(waits=True)
            self._stage.device.finish()  # Else the wait would count as the next action's.
        self._pulse.layers = (0, 0)
        if action.kind in _COMPUTING:
            self._callbacks.on_tensors(self._kept_tensors())
            self._callbacks.on_action_done()
        if end is None and action.kind in _COMPUTING:
            self._callbacks.on_computed(self._now_s() - start_s)
        end_s = self._now_s()  # What slows the rank counts as its computation.
        if end is None:
            self._count_seconds(action.kind, end_s - start_s)
        self._pulse.begin_wait()
        if action.kind not in _WAITING:
            self._limits.note(end_s - begin_s)
        if action.kind is not Kind.REDUCE:
            self._record("compute", action, start_s, end_s)

    def _workload(self, action: Action) -> Workload:
        """What is known of an action before it begins; only a forward learns the shape itself."""
        if action.kind not in _COMPUTING and action.kind is not Kind.SHADOW:
            return Workload(action.kind)
        hop = self._schedule.routes[action.microbatch][action.hop]
        shape = self._shapes.get((action.microbatch, action.hop), ())
        return Workload(action.kind, (hop.first_layer, hop.end_layer), shape)

    def _moment(self, action: Action) -> Moment | None:
        """A moment of the device, for an action whose time is read when the iteration ends.

        So the device is given the next action while it computes this one.
        """
        is_computing = action.kind in _COMPUTING or action.kind is Kind.SHADOW
        return self._stage.device.moment() if is_computing and not self._is_timed else None

    def _count_seconds(self, kind: Kind, seconds: float) -> None:
        if kind in _COMPUTING:
            self.action_s[kind.value] = self.action_s.get(kind.value, 0.0) + seconds
        elif kind is Kind.SHADOW:
            self.eager_s += seconds

    def _finish_computing(self) -> None:
        """Waits until the device has computed all actions, and counts their seconds."""
        if not self._moments:
            return
        for _, begin, end in self._moments if self._comm.waits_on_device else ():
            # From the end of the action before, the device has waited for other ranks alone.
            self._limits.begin_device(waits=True)
            begin.wait()
            self._limits.begin_device(waits=False)
            end.wait()
        self._limits.begin_device(waits=False)
        self._stage.device.finish()
        self._pulse.begin_wait()
        all_seconds = [end.seconds_since(begin) for _, begin, end in self._moments]
        for (kind, _, _), seconds in zip(self._moments, all_seconds, strict=True):
            self._count_seconds(kind, seconds)
        self._limits.note_device(max(all_seconds))
        self._moments.clear()

    def _kept_tensors(self) -> Iterator[Tensor]:
        """The tensors kept for later actions, without those that autograd keeps itself."""
        yield from self._outputs.values()
        yield from self._output_gradients.values()
        for source in self._inputs.values():
            yield source
            if source.grad is not None:
                yield source.grad
        for weight_gradients in self._weight_gradients.values():
            yield from weight_gradients.gradients()

    def _record(self, lane: str, action: Action, start_s: float, end_s: float) -> None:
        span = MeasuredSpan(lane, str(action), start_s - self.start_s, end_s - self.start_s)
        self._spans.append(span)

    # -- actions --------------------------------------------------------------------------------

    def _load_samples(self, action: Action) -> None:
        """Waits for the samples that a forward needs."""
        is_last = action.hop == len(self._schedule.routes[action.microbatch]) - 1
        if not (action.hop == 0 or is_last):
            return
        self._limits.begin_reading()
        self._batches.keep(action.microbatch)
        if is_last:
            self._batches.num_targets()

    def _forward(self, action: Action) -> None:
        route = self._schedule.routes[action.microbatch]
        hop = route[action.hop]
        key = (action.microbatch, action.hop)
        if action.hop == 0:
            hidden = bring(self._batches.inputs(action.microbatch), self._stage.device.bring)
        elif key in self._inputs:
            hidden = self._inputs[key]
        else:  # The previous hop was on this rank too.
            before = self._outputs[action.microbatch, action.hop - 1]
            hidden = self._inputs[key] = before.detach().requires_grad_()
        self._shapes[key] = tuple(hidden.shape)
        hidden = self._run_layers(hop, hidden, action.microbatch)
        if action.hop == len(route) - 1:
            targets = bring(self._batches.targets(action.microbatch), self._stage.device.bring)
            with self._batches.name_samples(action.microbatch):
                hidden = self._stage.loss_sum(
                    hidden, targets, iteration=self._iteration, microbatch=action.microbatch
                )
            hidden = hidden / max(1, self._batches.num_targets())  # Of none, the loss is 0.
            self._losses[action.microbatch] = hidden.detach()
        self._outputs[key] = hidden

    def _shadow(self, action: Action) -> None:
        """Runs the forward of another rank's next hop on this rank's output; drops the result."""
        hop = self._schedule.routes[action.microbatch][action.hop]
        with torch.no_grad():
            self._run_layers(
                hop, self._outputs[action.microbatch, action.hop - 1], action.microbatch
            )

    def _run_layers(self, hop: Hop, hidden: Tensor, microbatch: int) -> Tensor:
        self._limits.see_input(hidden)
        first, end, number = hop.first_layer, hop.end_layer, self._iteration
        with self._batches.name_samples(microbatch):
            return self._stage.forward(first, end, hidden, iteration=number, microbatch=microbatch)

    def _backward(self, action: Action) -> None:
        key = (action.microbatch, action.hop)
        torch.autograd.backward(self._outputs.pop(key), self._output_gradients.pop(key, None))
        self._pass_input_gradient(action)

    def _backward_input(self, action: Action) -> None:
        hop = self._schedule.routes[action.microbatch][action.hop]
        key = (action.microbatch, action.hop)
        source = self._inputs[key]
        source.grad, self._weight_gradients[key] = input_gradient(
            self._outputs.pop(key),
            self._output_gradients.pop(key, None),
            source,
            self._stage.parameters(hop.first_layer, hop.end_layer),
        )
        self._pass_input_gradient(action)

    def _backward_weight(self, action: Action) -> None:
        hop = self._schedule.routes[action.microbatch][action.hop]
        self._weight_gradients.pop((action.microbatch, action.hop)).run()
        self._callbacks.on_tensors(self._kept_tensors())
        self._stage.accumulate(hop.first_layer, hop.end_layer)

    def _pass_input_gradient(self, action: Action) -> None:
        """Gives the gradient of a hop's input to the previous hop, if that was on this rank too."""
        before = (action.microbatch, action.hop - 1)
        if before in self._outputs:
            gradient = _gradient_of(self._inputs.pop((action.microbatch, action.hop)))
            self._output_gradients[before] = gradient

    def _send_forward(self, action: Action) -> None:
        target = self._schedule.routes[action.microbatch][action.hop + 1]
        output = self._outputs[action.microbatch, action.hop]
        tag = Tag(Channel.FORWARD, self._iteration, action.microbatch, action.hop + 1)
        self._send(target.rank, tag, output, layer=target.first_layer - 1)

    def _receive_forward(self, action: Action) -> None:
        source = self._schedule.routes[action.microbatch][action.hop - 1].rank
        tag = Tag(Channel.FORWARD, self._iteration, action.microbatch, action.hop)
        hidden = self._comm.receive(source, tag)
        self._inputs[action.microbatch, action.hop] = hidden.requires_grad_()

    def _send_backward(self, action: Action) -> None:
        target = self._schedule.routes[action.microbatch][action.hop - 1]
        gradient = _gradient_of(self._inputs.pop((action.microbatch, action.hop)))
        tag = Tag(Channel.BACKWARD, self._iteration, action.microbatch, action.hop - 1)
        self._send(target.rank, tag, gradient, layer=target.end_layer - 1)

    def _receive_backward(self, action: Action) -> None:
        source = self._schedule.routes[action.microbatch][action.hop + 1].rank
        tag = Tag(Channel.BACKWARD, self._iteration, action.microbatch, action.hop)
        gradient = self._comm.receive(source, tag)
        self._output_gradients[action.microbatch, action.hop] = gradient

    def _reduce(self, action: Action) -> None:
        self._ready.add(action.bucket)
        while len(self._submitted) < len(self._buckets):
            bucket = self._buckets[len(self._submitted)]
            if bucket not in self._ready:
                return
            ready_s = self._now_s()
            computed = self._stage.device.mark()
            self._submitted.append(
                self._communication.submit(self._run_bucket, bucket, ready_s, computed)
            )

    # -- reductions -----------------------------------------------------------------------------

    def _run_bucket(self, bucket: int, ready_s: float, computed: Mark) -> float:
        """Reduces a bucket that was ready at `ready_s`; returns the time at which it is done.

        Args:
            computed: the point at which the device has computed the bucket. It may have been given
                later actions by now, which the reduction does not wait for.
        """
        self._links.timekeeper.reach(ready_s)
        start_s = self._now_s()
        device, last = self._stage.device, computed
        try:
            with device.beside("reduce"):
                computed.order()
                try:
                    self._sum_bucket(bucket)
                finally:
                    last = device.mark()
        finally:
            last.order()
        self._record("reduce", Action(Kind.REDUCE, bucket=bucket), start_s, self._now_s())
        return self._now_s()

    def _sum_bucket(self, bucket: int) -> None:
        entry = self._schedule.buckets[bucket]
        if entry.tied >= 0:
            self._sum_tied(entry.tied, bucket, entry.ranks)
        else:
            held = [self._stage.layers[layer] for layer in entry.layers]
            self._comm.sum_over(
                entry.ranks,
                [layer.sums for layer in held],
                [layer.gradients for layer in held],
                iteration=self._iteration,
                bucket=bucket,
                virtual_bytes=self._stage.model.virtual_parameter_bytes(entry.layers),
            )

    def _sum_tied(self, group_index: int, bucket: int, ranks: Sequence[int]) -> None:
        total, uses = self._stage.tied_sum(self._stage.model.tied[group_index], self._own_indices)
        result = torch.empty_like(total, dtype=torch.float32)
        self._comm.sum_over(
            ranks,
            [total],
            [result],
            iteration=self._iteration,
            bucket=bucket,
            virtual_bytes=0,
        )
        for held, name in uses:
            held.tied_gradients[name].copy_(result)

    # -- the commit -----------------------------------------------------------------------------

    def _commit(self, votes: Votes) -> CommitVector:
        layout, size = self._layout, self._batches.microbatch_size
        vector = np.zeros(layout.size, dtype=np.float64)
        for held in self._own_layers():
            if self._plan.holders(held.layer)[0] == self._rank:
                vector[held.layer] = held.squared_norm(self._stage.norm_parameters(held.layer))
        for microbatch, loss in self._losses.items():
            vector[layout.losses + microbatch] = float(loss)
        for microbatch, samples in self._batches.consumed.items():
            first = layout.samples + microbatch * size
            vector[first : first + size] = samples
        vector[-len(votes) :] = votes
        total = self._sum_if_agreed(vector, self._iteration, Channel.COMMIT)
        return commit_vector(total, layout)

    def compare(self, age: int) -> None:
        """Checks that all holders of each layer have the same parameters at this age.

        Raises:
            CorruptedError: they differ, so none of them may be saved.
        """
        self._sum_if_agreed(np.zeros(0, dtype=np.float64), age, Channel.COMPARE)

    def _sum_if_agreed(
        self, vector: npt.NDArray[np.float64], age: int, channel: Channel
    ) -> npt.NDArray[np.float64]:
        """The sum of the vector over all ranks, once their parameters of this age agree.

        Raises:
            CorruptedError: holders of a layer differ; the gradients are cleared.
        """
        shared = [self._stage.layers[layer] for layer in self._shared]
        current = [held for held in shared if held.age == age]
        hashes = sampled_hashes(current, self._resilience)
        try:
            total = reduce_vector(
                self._links,
                np.concatenate([vector, hash_entries(hashes, self._layout.num_layers)]),
                ranks=self._plan.all_ranks,
                iteration=age,
                timeout_s=UNLIMITED_S,
                channel=channel,
            )
        except AbortedError:
            self._comm.check()  # An error of its threads ends the epoch, too, and says more.
            raise
        if layers := disagreeing_layers(total[len(vector) :]):
            for held in self._own_layers():
                held.clear()
            own = {layer: hashes[layer] for layer in layers if layer in hashes}
            raise CorruptedError(age, own, layers)
        return total[: len(vector)]

    def _send(self, target: int, tag: Tag, tensor: Tensor, *, layer: int) -> None:
        """Sends the output of a layer, or the gradient of that output."""
        virtual_bytes = self._stage.model.virtual_output_bytes(layer)
        self._comm.send(target, tag, tensor, virtual_bytes=virtual_bytes)


def _result(reduction: "Future[float]") -> float:
    try:
        return reduction.result(timeout=UNLIMITED_S)
    finally:  # An error refers to this frame, which must not refer to the error.
        del reduction


def _gradient_of(source: Tensor) -> Tensor:
    """The gradient of a hop's input; zeros if nothing that was differentiated depends on it."""
    return torch.zeros_like(source) if source.grad is None else source.grad


# -- gradients that are complete without a reduction, because only one rank holds their layers -----


def finish_unshared(
    stage: RankStage, schedule: Schedule, *, buckets: Collection[int], layers: Collection[int]
) -> None:
    """Rounds the gradient sums that are in no bucket to float32.

    Args:
        buckets: indices of the buckets that this rank takes part in.
        layers: the layers that the plan gives to this rank.
    """
    reduced = {
        (schedule.buckets[b].tied, layer) for b in buckets for layer in schedule.buckets[b].layers
    }
    for layer in sorted(layers):
        held = stage.layers[layer]
        if (-1, layer) not in reduced:
            held.gradients.copy_(held.sums)
    for index, group in enumerate(stage.model.tied):
        if all((index, use.layer) not in reduced for use in group.uses):
            total, uses = stage.tied_sum(group, layers)
            for held, name in uses:
                held.tied_gradients[name].copy_(total)
