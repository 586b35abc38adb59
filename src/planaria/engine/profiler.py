"""Measures a job's layers and links on this machine: the ModelProfile that planning needs.

Each kind of layer (same modules, and same shapes of parameters, input and output) is measured once,
in the form in which a rank holds it: its forward, the backward to its input alone, the additional
time for the gradients of its weights and for adding these to the sums, and, once an iteration, its
optimizer step with everything that prepares the step. A few identical layers take turns, because
a layer of a stage finds caches that are full of the other layers' data. The median of a few runs
is taken. Links are measured over loopback, because emulated nodes have no other. On an accelerator
every duration ends when the device has finished, and its copies to the host are measured, too.

If the ranks of a job share the processors of this machine, a layer is measured while other
processes compute it too (contention.py), because ranks share caches, memory and often a core. If
there are more ranks than processors, processor seconds are measured: the estimator models how ranks
take turns.

Source: Oobleck (SOSP '23), section 6 (profiler); Odyssey, section IV.
"""

import logging
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from planaria.core.job import JobConfig, TrainingConfig
from planaria.core.plan import (
    LayerProfile,
    Link,
    ModelProfile,
    Recomputation,
    RecomputationCost,
    TiedParameters,
)
from planaria.data.batches import Batches
from planaria.data.datasets import Dataset, keep_generators
from planaria.engine.contention import Contention
from planaria.engine.devices import PROCESSOR, Accelerator, CopyLane, Device, usable_bytes
from planaria.engine.optimizer import optimizer_factory, optimizer_state
from planaria.engine.recompute import forward_that_keeps, refuse_changed_results, selective_bytes
from planaria.engine.stage import HeldLayer, RankStage
from planaria.errors import PeerLostError
from planaria.models.first_microbatch import (
    examine_loss,
    first_output,
    refuse_foreign,
    refuse_no_gradient,
)
from planaria.models.layers import (
    SplitModel,
    kept_tensors,
    layer_values,
    refuse_changes,
)
from planaria.models.packing import bring, changeable_tensor
from planaria.transport.links import Channel, Links, Tag

logger = logging.getLogger(__name__)

_KEPT_TENSORS: Final = (
    "model (layer %s): its forward leaves tensors with gradients in attributes (%s); no loss sees "
    "them there, because a loss gets the last layer's output alone: return what it needs, such as "
    "the auxiliary loss of a router, beside the hidden states"
)
NUM_RUNS = 5
# Number of layers that take turns, unless one alone exceeds CACHE_BYTES; more change nothing.
TURNS: Final = 3
CACHE_BYTES: Final = 1 << 26
LINK_BYTES = 1 << 22
COPY_BYTES: Final = 1 << 26
# Number of ranks that compete for each processor; more would not change the measurement.
_RANKS_EACH = 2
_LINK_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class _Clock:
    """How durations are measured.

    Attributes:
        contention: the competing processes.
        now_s: clock, in wall or processor seconds.
    """

    contention: Contention
    now_s: Callable[[], float]


@dataclass(frozen=True, slots=True)
class _Microbatch:
    """The microbatch on which layers are measured, on the device.

    Attributes:
        inputs: inputs of the first layer.
        targets: targets of the loss.
        num_targets: number of targets in the global batch.
    """

    inputs: Tensor
    targets: Tensor
    num_targets: int


def profile_model(
    job: JobConfig,
    model: SplitModel,
    dataset: Dataset,
    *,
    num_ranks: int = 1,
    processors: int = 0,
    device: Device = PROCESSOR,
) -> ModelProfile:
    """The profile of a job's model on one device of this machine, and its links.

    Args:
        num_ranks: number of ranks of the job.
        processors: number of processors that all ranks share; 0: each rank has its own.
        device: the device that is measured.

    Raises:
        ConfigError: a layer changes a buffer in its forward, the job's own loss is no sum, or the
            ranks do not fit on the device.
    """
    cluster, is_accelerator = job.cluster, isinstance(device, Accelerator)
    num_here = cluster.num_ranks_max if processors else cluster.devices_per_node
    limit_bytes = cluster.device_memory_bytes or usable_bytes(device, num_ranks=num_here)
    shares = 0 < processors < num_ranks and not is_accelerator
    num_others = min(num_ranks, _RANKS_EACH * processors) - 1 if processors else 0
    # Forked processes would share the position in each file that the data set has open.
    batches = Batches(dataset, job.training, iteration=0)
    inputs, targets = (
        bring(batches.inputs(0), device.bring),
        bring(batches.targets(0), device.bring),
    )
    first = _Microbatch(inputs, targets, batches.num_targets())
    # A process that uses an accelerator cannot be forked.
    with Contention(0 if is_accelerator else num_others) as contention:
        clock = _Clock(contention, time.process_time if shares else _finished_s(device))
        layers = _measured_layers(job, model, first, clock, device)
    link = measured_link()
    links = {"intra_node": link, "inter_node": link}
    if is_accelerator:
        links["device_to_host"] = _measured_copy(device)
    return ModelProfile(
        model=job.name,
        microbatch_size=job.training.microbatch_size,
        dtype=job.training.dtype,
        device=device.name,
        device_memory_bytes=limit_bytes,
        layers=layers,
        links=links,
        tied=tied_parameters(model),
    )


def examine_layers(
    job: JobConfig,
    model: SplitModel,
    dataset: Dataset,
    *,
    profile: ModelProfile,
    device: Device = PROCESSOR,
) -> ModelProfile:
    """Examines layers and loss on the first microbatch as `profile_model` does; measures nothing.

    Returns:
        The profile without kinds of recomputation that the layers of this job refuse.

    Raises:
        ConfigError: see `profile_model`.
        RuntimeError: a layer refuses the kind of recomputation that the job names.
    """
    # Compiling takes minutes, and the layers compute the same without it.
    training = replace(job.training, compile=False)
    stage = RankStage(model, training=training, device=device)
    batches = Batches(dataset, training, iteration=0)
    hidden = bring(batches.inputs(0), device.bring)
    targets = bring(batches.targets(0), device.bring)
    layers = []
    for layer in range(model.num_layers):
        stage.keep_only(())
        stage.hold((layer,), states={}, age=0)
        held, examined = stage.layers[layer], profile.layers[layer]
        output = _examined_output(job, model, held, hidden, targets)
        if layer < model.num_layers - 1:  # The engine never computes the last layer again.
            examined = _examined_recomputation(job.training, held.module, examined, hidden)
        layers.append(examined)
        hidden = output
    return replace(profile, layers=tuple(layers))


def _examined_recomputation(
    training: TrainingConfig, module: nn.Module, profile: LayerProfile, hidden: Tensor
) -> LayerProfile:
    """The profile of a layer without the kinds of recomputation that cannot be chosen for it."""
    modes = _measured_modes(training)
    if training.chooses_recomputation:
        known: dict[str, RecomputationCost] = {
            mode: cost for mode, cost in profile.recomputed.items() if mode in modes
        }
        profile, modes = replace(profile, recomputed=known), tuple(m for m in modes if m in known)
    if "selective" not in modes:
        return profile
    try:
        _refuse_changed_results(module, hidden)
    except RuntimeError as error:
        _leave_out(training, profile.name, "selective", error)
        others = {mode: cost for mode, cost in profile.recomputed.items() if mode != "selective"}
        return replace(profile, recomputed=others)
    return profile


def _finished_s(device: Device) -> Callable[[], float]:
    """A clock that waits until the device has done what it was given."""

    def now_s() -> float:
        device.finish()
        return time.perf_counter()

    return now_s


def _measured_copy(device: Device) -> Link:
    """Latency and bandwidth of copies from a device to its host."""
    seconds: dict[int, float] = {}
    for size in (64, COPY_BYTES):
        source = torch.zeros(size, dtype=torch.uint8, device=device.place)
        target = device.host_like(source)
        runs = []
        for _ in range(NUM_RUNS + 1):
            device.finish()
            start_s = time.perf_counter()
            device.copy([(target, source)], CopyLane.STATE).wait()
            runs.append(time.perf_counter() - start_s)
        seconds[size] = statistics.median(runs[1:])
    return Link(seconds[64], COPY_BYTES / max(seconds[COPY_BYTES] - seconds[64], 1e-6))


def _measured_layers(
    job: JobConfig, model: SplitModel, first: _Microbatch, clock: _Clock, device: Device
) -> tuple[LayerProfile, ...]:
    hidden = first.inputs
    known: dict[str, LayerProfile] = {}
    layers = []
    stages = [RankStage(model, training=job.training, device=device) for _ in range(TURNS)]
    for layer, name in enumerate(model.layer_names):
        is_last = layer == model.num_layers - 1
        for stage in stages:
            stage.keep_only(())
        stages[0].hold((layer,), states={}, age=0)
        held = stages[0].layers[layer]
        module = held.module
        output = _examined_output(job, model, held, hidden, first.targets)
        # Layers with the same parameters may differ in what no parameter shows, such as a stride.
        shapes = f"{tuple(hidden.shape)}/{tuple(output.shape)}"
        key = f"{layer == 0}/{is_last}/{_kind(module)}/{shapes}"
        if key not in known:

            def loss(output: Tensor) -> Tensor:
                # All runs have the same targets, and the loss may change what it gets.
                return model.loss_sum(output, changeable_tensor(first.targets)) / first.num_targets

            if sum(_num_bytes(tensor) for tensor in held.tensors()) < CACHE_BYTES:
                for stage in stages[1:]:
                    stage.hold((layer,), states={}, age=0)
            alike = [stage.layers[layer] for stage in stages if stage.layers]
            known[key] = _layer_profile(job, name, alike, hidden, loss if is_last else None, clock)
        output_bytes = 0 if is_last else _num_bytes(output)
        layers.append(replace(known[key], name=name, output_bytes=output_bytes))
        hidden = output
    return tuple(layers)


def _examined_output(
    job: JobConfig, model: SplitModel, held: HeldLayer, hidden: Tensor, targets: Tensor
) -> Tensor:
    """What a layer makes of the first microbatch, if it and the loss can be trained."""
    name, module = model.layer_names[held.layer], held.module
    before = layer_values(module, has_trained=job.model.kind == "python")
    leaf = _leaf(hidden)
    output = first_output(module, leaf, name=name)
    if job.model.kind == "python":
        refuse_no_gradient(model, held.layer, output)
        refuse_foreign(module, leaf, output, name=name)
    if held.layer == model.num_layers - 1 and job.model.kind == "python":
        with keep_generators():
            examine_loss(model, output, targets, num_samples=job.training.microbatch_size)
    output = output.detach()
    refuse_changes(name, before, module)
    if kept := kept_tensors(module):
        logger.warning(_KEPT_TENSORS, name, ", ".join(kept))
    return output


def tied_parameters(model: SplitModel) -> tuple[TiedParameters, ...]:
    """The model's tied parameters in the form that planner and schedule use."""
    return tuple(
        TiedParameters(
            layers=tuple(dict.fromkeys(use.layer for use in group.uses)),
            parameter_bytes=4
            * model.parameter_shapes(group.uses[0].layer)[group.uses[0].name].numel(),
        )
        for group in model.tied
    )


def measured_link() -> Link:
    """Latency and bandwidth of a link over loopback."""
    ends = [Links(rank, token=b"profile") for rank in (0, 1)]
    sizes = [64] * 50 + [LINK_BYTES] * NUM_RUNS
    answering = threading.Thread(target=_answer, args=(ends[1], ends[0], len(sizes)))
    answering.start()
    try:
        seconds = _round_trips(ends[0], ends[1], sizes)
    finally:
        # Closing also frees the answering end, if it still waits for a message.
        ends[0].close()
        answering.join()
        ends[1].close()
    round_trip_s = statistics.median(seconds[64])
    large_s = statistics.median(seconds[LINK_BYTES])
    return Link(round_trip_s / 2, LINK_BYTES / max(large_s - round_trip_s, 1e-6))


def _begin(own: Links, other: Links) -> None:
    addresses = {links.rank: links.address for links in (own, other)}
    own.begin(0, addresses=addresses, peers=(other.rank,), timeout_s=_LINK_TIMEOUT_S)


def _answer(own: Links, other: Links, num_messages: int) -> None:
    """Answers `num_messages` messages with a few bytes each, or until the other end is gone."""
    try:
        _begin(own, other)
        for index in range(num_messages):
            tag = Tag(Channel.FORWARD, 0, index)
            own.receive(other.rank, tag, timeout_s=_LINK_TIMEOUT_S)
            own.send(other.rank, tag, np.zeros(8, dtype=np.uint8))
    except PeerLostError as error:
        # Both ends are in this process, and the other end raises the error.
        logger.info("only a part of a link was measured: %s", error)


def _round_trips(own: Links, other: Links, sizes: Sequence[int]) -> dict[int, list[float]]:
    """Seconds of each round trip, by number of bytes sent."""
    _begin(own, other)
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    for index, size in enumerate(sizes):
        tag = Tag(Channel.FORWARD, 0, index)
        payload = np.zeros(size, dtype=np.uint8)
        start_s = time.perf_counter()
        own.send(other.rank, tag, payload)
        own.receive(other.rank, tag, timeout_s=_LINK_TIMEOUT_S)
        seconds[size].append(time.perf_counter() - start_s)
    return seconds


@dataclass(frozen=True, slots=True)
class _Seconds:
    forward: float
    backward_input: float
    backward: float


def _kind(module: nn.Module) -> str:
    """Key that is the same for layers that take the same time."""
    parts = sorted(type(part).__name__ for part in module.modules())
    shapes = [(tuple(p.shape), p.requires_grad) for p in module.parameters()]
    return f"{parts}{shapes}"


def _layer_profile(
    job: JobConfig,
    name: str,
    alike: Sequence[HeldLayer],
    hidden: Tensor,
    loss: Callable[[Tensor], Tensor] | None,
    clock: _Clock,
) -> LayerProfile:
    """The profile of one of these identical layers, with output_bytes still 0."""
    modules = [held.module for held in alike]
    module = modules[0]
    activation_bytes = _activation_bytes(module, hidden, loss)
    runs = clock.contention.repeat(
        lambda: _measure_once(modules, hidden, loss, clock.now_s), times=NUM_RUNS
    )
    forward_s = statistics.median(run.forward for run in runs)
    input_s = statistics.median(run.backward_input for run in runs)
    backward_s = statistics.median(run.backward for run in runs)
    weight_s = max(0.0, backward_s - input_s)
    update_s = statistics.median(
        clock.contention.repeat(lambda: _update_s(alike, clock.now_s), times=NUM_RUNS)
    )
    recomputed: dict[str, RecomputationCost] = {}
    # The engine never computes the last layer again.
    for mode in _measured_modes(job.training) if loss is None else ():
        try:
            if mode == "selective" and not job.training.compile:
                _refuse_changed_results(module, hidden)
            runs = clock.contention.repeat(
                partial(_measure_again, modules, hidden, mode, clock.now_s), times=NUM_RUNS
            )
        except RuntimeError as error:
            _leave_out(job.training, name, mode, error)
            continue
        both_s = statistics.median(run.forward + run.backward for run in runs)
        is_full = mode == "full"
        recomputed[mode] = RecomputationCost(
            _num_bytes(hidden) if is_full else selective_bytes(module, _leaf(hidden)),
            {1: max(0.0, both_s - forward_s - backward_s)},
        )
    return LayerProfile(
        name=name,
        forward_s={1: forward_s},
        backward_input_s={1: input_s},
        backward_weight_s={1: weight_s},
        parameter_bytes=sum(4 * p.numel() for p in module.parameters() if p.requires_grad),
        frozen_bytes=sum(_num_bytes(p) for p in module.parameters() if not p.requires_grad),
        working_bytes=_working_bytes(alike[0]),
        optimizer_bytes=_optimizer_bytes(job, module),
        activation_bytes=activation_bytes,
        output_bytes=0,
        update_s={1: update_s},
        recomputed=recomputed,
    )


def _measured_modes(training: TrainingConfig) -> tuple[Recomputation, ...]:
    if training.chooses_recomputation:
        return ("full",) if training.compile else ("selective", "full")
    mode = training.recomputation
    return () if mode == "none" else (mode,)


def _leave_out(
    training: TrainingConfig, name: str, mode: Recomputation, error: RuntimeError
) -> None:
    """Raises an error of a layer that is computed again, unless another kind may be chosen.

    A selective backward refuses a layer that changes the result of a product in place.
    """
    if not training.chooses_recomputation:
        raise error
    logger.info("layer %s cannot be computed again (%s): %s", name, mode, error)


def _leaf(hidden: Tensor) -> Tensor:
    hidden = hidden.detach()
    return hidden.requires_grad_() if hidden.is_floating_point() else hidden


def _forward(module: nn.Module, hidden: Tensor, loss: Callable[[Tensor], Tensor] | None) -> Tensor:
    output: Tensor = module(hidden)
    return output if loss is None else loss(output)


def _working_bytes(held: HeldLayer) -> int:
    """Bytes of the trained parameters that compute and are not stepped themselves."""
    pairs = ((held.parameters[name], master) for name, master in held.masters.items())
    return sum(_num_bytes(parameter) for parameter, master in pairs if parameter is not master)


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _measure_once(
    modules: Sequence[nn.Module],
    hidden: Tensor,
    loss: Callable[[Tensor], Tensor] | None,
    now_s: Callable[[], float],
) -> _Seconds:
    """Mean seconds of one module's forward and backwards, with the modules taking turns."""
    leaves = [_leaf(hidden) for _ in modules]
    start_s = now_s()
    outputs = [_forward(module, leaf, loss) for module, leaf in zip(modules, leaves, strict=True)]
    forward_s = now_s() - start_s
    gradient = torch.ones_like(outputs[0])
    backward_input_s = 0.0
    if leaves[0].requires_grad and outputs[0].requires_grad:
        start_s = now_s()
        for output, leaf in reversed(list(zip(outputs, leaves, strict=True))):
            torch.autograd.grad(output, leaf, gradient, retain_graph=True, allow_unused=True)
        backward_input_s = now_s() - start_s
    backward_s = 0.0
    if outputs[0].requires_grad:
        start_s = now_s()
        for output in reversed(outputs):
            torch.autograd.backward(output, gradient)
        backward_s = now_s() - start_s
    count = len(modules)
    return _Seconds(forward_s / count, backward_input_s / count, backward_s / count)


def _measure_again(
    modules: Sequence[nn.Module],
    hidden: Tensor,
    recomputation: Recomputation,
    now_s: Callable[[], float],
) -> _Seconds:
    """The same as `_measure_once` where backwards compute activations again; backward_input is
    0, because such a backward is never split."""
    start_s = now_s()
    outputs = [
        forward_that_keeps(module, _leaf(hidden), recomputation=recomputation) for module in modules
    ]
    forward_s = now_s() - start_s
    gradient = torch.ones_like(outputs[0])
    start_s = now_s()
    for output in reversed(outputs) if outputs[0].requires_grad else ():
        torch.autograd.backward(output, gradient)
    backward_s = now_s() - start_s
    for parameter in (p for module in modules for p in module.parameters()):
        parameter.grad = None
    return _Seconds(forward_s / len(modules), 0.0, backward_s / len(modules))


def _refuse_changed_results(module: nn.Module, hidden: Tensor) -> None:
    """See `refuse_changed_results`; leaves no gradients."""
    try:
        refuse_changed_results(module, _leaf(hidden))
    finally:
        for parameter in module.parameters():
            parameter.grad = None


def _update_s(alike: Sequence[HeldLayer], now_s: Callable[[], float]) -> float:
    """Seconds of a rank's work for a layer once an iteration, measured at a learning rate of 0."""
    start_s = now_s()
    for held in alike:
        held.gradients_of = held.age
        held.apply(held.age, learning_rate=0.0, scale=1.0)
        held.clear()
    return (now_s() - start_s) / len(alike)


def _activation_bytes(
    module: nn.Module, hidden: Tensor, loss: Callable[[Tensor], Tensor] | None
) -> int:
    """Bytes that autograd keeps for the backward, each storage once, without parameters."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = _forward(module, _leaf(hidden), loss)
    del output
    return sum(kept.values())


def _optimizer_bytes(job: JobConfig, module: nn.Module) -> int:
    """Bytes of the layer's optimizer state, found by a step of float32 parameters like its own."""
    named = {
        name: nn.Parameter(torch.zeros_like(parameter, dtype=torch.float32))
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
    if not named:
        return 0
    optimizer = optimizer_factory(job.training)(named.items())
    for parameter in named.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = optimizer_state(optimizer, named, num_steps=1)
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())
