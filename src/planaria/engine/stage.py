"""The layers that a rank holds: parameters, gradient sums and optimizer of each layer.

Layers are independent: each has its own optimizer and its own age (the number of iterations that
were applied to it), so a layer can be sent, saved and stepped alone. The gradients of a layer are
summed in one flat tensor. Those of a tied parameter, which several layers use, have a flat tensor
of their own for each use, because they are summed over the holders of all its uses.

In fast mode the sums of float32 parameters are their `.grad`, so autograd adds to them itself. In
deterministic mode, and in bfloat16, hooks add each gradient to its sums. A parameter that the model
keeps in float32 in a bfloat16 job (a router's weights) is its own master.

The last layer keeps how the losses of held-out data went, if they may end training. So the ranks
that hold it agree on the iteration in which they end it, whatever was lost before.

State and sums are on the rank's device. Initial weights are drawn on the processor and moved, so
that a seed means the same everywhere.

When a layer's forward begins, the random generators are seeded with (seed, iteration, microbatch,
layer), also when activation checkpointing runs the forward again. So dropout draws the same
values whichever rank computes the layer.

Source: docs/protocol.md, "The commit vector" (C4) and "Joins".
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from planaria.core.commit import ordered_sum
from planaria.core.job import TrainingConfig
from planaria.core.plan import Recomputation
from planaria.core.samples import mix
from planaria.data.batches import row_major
from planaria.engine.devices import PROCESSOR, Device
from planaria.engine.optimizer import (
    join_state,
    joint_optimizers,
    load_optimizer_state,
    optimizer_factory,
    optimizer_state,
    squared_norm,
    squared_norm_of_rows,
    take_step,
)
from planaria.engine.recompute import forward_that_keeps
from planaria.engine.staging import State, StateMirror, as_tensor
from planaria.errors import ConfigError
from planaria.models.layers import SplitModel, TiedGroup
from planaria.models.packing import is_packed
from planaria.protocol.worker_state import HeldOutLosses

_HELD_OUT = "held_out/losses"  # Name of `HeldOutLosses` in a layer's state.
NOT_YET = -1  # Age of a layer without a valid state: not arrived yet, or its step did not finish.


class HeldLayer:
    """One layer on this rank.

    A parameter that does not require gradients never changes. It is no part of the layer's state:
    every rank has its value from the seed or from disk.

    Attributes:
        age: number of iterations applied to the layer; NOT_YET: it has no valid state.
        gradients_of: the iteration whose reduced gradients are complete; -1: none.
        held_out: the losses of held-out data; None: they do not end training, or another layer has
            them.
        masters: the float32 parameters that are stepped, saved and sent, by name; the module's own
            where these are in float32.
        parameters: all parameters of the module, by name, those that never change among them.
        sums: flat gradient sums of the parameters that are not tied; a backward adds to them.
        tied_sums: flat gradient sums of this layer's use of each tied parameter, by name.
        gradients: flat float32 reduced gradients of the parameters that are not tied; the same
            memory as `sums` unless those are float64.
        tied_gradients: flat float32 reduced gradients of each tied parameter, by name.
    """

    def __init__(
        self,
        layer: int,
        module: nn.Module,
        *,
        training: TrainingConfig,
        tied: Collection[str],
        float32: Collection[str] = (),
        device: Device = PROCESSOR,
    ) -> None:
        """Holds a layer.

        Args:
            module: the layer in float32, which is changed in place.
            tied: names of parameters that other layers use, too.
            float32: names of parameters and buffers that stay in float32 in a bfloat16 job.
        """
        self.layer = layer
        self.age = 0
        self.gradients_of = -1
        self.held_out: HeldOutLosses | None = None
        self._mirror = StateMirror(device)
        self._num_steps = 0  # Of the optimizer, which counts them itself, but on the device.
        module = module.to(device.place)
        self.masters = {n: p for n, p in module.named_parameters() if p.requires_grad}
        if training.dtype == "bfloat16":
            self.masters |= {
                name: nn.Parameter(parameter.detach().clone())
                for name, parameter in self.masters.items()
                if name not in float32
            }
            _cast_to_bfloat16(module, float32)
        if training.compile:
            module.compile(dynamic=False)
        self.module = module
        self.parameters = dict(module.named_parameters())
        self.optimizer = optimizer_factory(training)(self.masters.items()) if self.masters else None
        sum_dtype = torch.float64 if training.deterministic else torch.float32
        self.tied_names = tuple(name for name in self.masters if name in set(tied))
        own = [name for name in self.masters if name not in self.tied_names]
        size = sum(self.masters[name].numel() for name in own)
        self.sums = torch.zeros(size, dtype=sum_dtype, device=device.place)
        self.gradients = _gradient_buffer(self.sums)
        self.tied_sums = {
            name: torch.zeros(self.masters[name].numel(), dtype=sum_dtype, device=device.place)
            for name in self.tied_names
        }
        self.tied_gradients = {n: _gradient_buffer(s) for n, s in self.tied_sums.items()}
        self._sum_views = {
            **_views(self.sums, own, self.masters),
            **self._shaped_views(self.tied_sums),
        }
        self._gradient_views = {
            **_views(self.gradients, own, self.masters),
            **self._shaped_views(self.tied_gradients),
        }
        self._sums_are_grad = not training.deterministic and training.dtype == "float32"
        self._attach_sums()
        self._hook_sums()

    def _hook_sums(self) -> None:
        """Has hooks add gradients to the sums, where autograd does not."""
        for name, parameter in self.parameters.items():
            if parameter.requires_grad and not self._sums_are_grad:
                # A bound method would make a cycle, so that only the garbage collector would free
                # the layer's memory.
                hook = partial(_add_gradient, self._sum_views[name])
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _attach_sums(self) -> None:
        """Lets autograd add to the sums, in fast mode."""
        if self._sums_are_grad:
            for name, master in self.masters.items():
                master.grad = self._sum_views[name]

    def _shaped_views(self, flat: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.view(self.masters[name].shape) for name, tensor in flat.items()}

    def tensors(self) -> Iterator[Tensor]:
        """All tensors of the layer that are kept from iteration to iteration."""
        yield from self.module.parameters()
        yield from self.module.buffers()
        yield from self.masters.values()
        yield from (self.sums, self.gradients)
        yield from (*self.tied_sums.values(), *self.tied_gradients.values())
        if self.optimizer is not None:
            for state in self.optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor))

    def clear(self) -> None:
        """Sets all gradient sums to +0."""
        self.gradients_of = -1
        self._attach_sums()
        self.sums.zero_()
        for sums in self.tied_sums.values():
            sums.zero_()
        for parameter in () if self._sums_are_grad else self.parameters.values():
            parameter.grad = None  # A backward that ran out of memory may have left some.

    def accumulate(self) -> None:
        """Adds the gradients that `WeightGradients.run` left in `.grad` to the sums; drops them.

        Those of a whole backward are added by autograd or by hooks.
        """
        for name, parameter in () if self._sums_are_grad else self.parameters.items():
            if parameter.grad is not None:
                _add_gradient(self._sum_views[name], parameter)

    def squared_norm(self, names: Iterable[str]) -> float:
        """The sum of squares of the reduced gradients of the named parameters, in float64.

        In fast mode rows of the flat gradients are summed in float32.

        Args:
            names: all parameters that are not tied, and any tied ones.
        """
        if self._sums_are_grad and self.gradients.is_cpu:
            tied = [self.tied_gradients[name] for name in names if name in self.tied_names]
            squares = [squared_norm_of_rows(flat) for flat in (self.gradients, *tied)]
        else:
            squares = [squared_norm(self._gradient_views[name]) for name in names]
        return ordered_sum(torch.stack(squares).tolist() if squares else ())

    def apply(self, iteration: int, *, learning_rate: float, scale: float) -> None:
        """Takes the optimizer step of an iteration; does nothing if it was taken already.

        If the step raises, the layer's age stays NOT_YET, so it is neither sent nor saved.
        """
        if self.begin_step(iteration, scale=scale):
            if self.optimizer is not None:
                take_step(self.optimizer, learning_rate)
            self.end_step(iteration)

    def begin_step(self, iteration: int, *, scale: float) -> bool:
        """Gives the optimizer the gradients of an iteration; returns False if it had its step.

        The layer's age is NOT_YET until `end_step`.
        """
        if self.age != iteration:
            assert self.age == iteration + 1, (self.layer, self.age, iteration)
            return False
        assert self.gradients_of == iteration, (self.layer, self.gradients_of, iteration)
        self.age = NOT_YET
        self._mirror.order()
        if scale != 1.0:
            for flat in (self.gradients, *self.tied_gradients.values()):
                flat.mul_(scale)
        for name, master in self.masters.items():
            master.grad = self._gradient_views[name]
        return True

    def end_step(self, iteration: int) -> None:
        """Notes that the optimizer has taken the step of an iteration."""
        self._num_steps += bool(self.masters)
        for name, master in self.masters.items():
            master.grad = None
            if self.parameters[name] is not master:
                self.parameters[name].data.copy_(master.data)
        self._attach_sums()
        if self.held_out is not None:
            self.held_out.count(iteration)
        self.age = iteration + 1

    def state(self) -> State:
        """A copy of the parameters and the optimizer's state, by their names in the disk tier.

        On a device it may still be under way; a reader waits for it, and so does the next step.
        """
        return self._mirror.copy(self._state_tensors())

    def state_views(self) -> State:
        """The same as `state`, but valid only until the layer's next step.

        They are views of the tensors, or of their mirror on the host, for which a reader waits.
        """
        return self._mirror.state(self._state_tensors(), age=self.age)

    def mirror_buffers(self, *, num_bytes: int) -> list[Tensor]:
        """Buffers like those of the mirror of a state of this size; none on the host."""
        return self._mirror.buffers(self.masters.values(), num_bytes=num_bytes)

    def state_bytes(self) -> int:
        """Size of the state."""
        return sum(tensor.nbytes for tensor in self._state_tensors().values())

    def _state_tensors(self) -> dict[str, Tensor]:
        tensors = {f"parameter/{name}": master.detach() for name, master in self.masters.items()}
        if self.optimizer is not None:
            named = optimizer_state(self.optimizer, self.masters, num_steps=self._num_steps)
            tensors |= {f"optimizer/{name}": tensor for name, tensor in named.items()}
        if self.held_out is not None:
            tensors[_HELD_OUT] = torch.tensor(self.held_out.state(), dtype=torch.float64)
        return {name: tensor.contiguous() for name, tensor in tensors.items()}

    def load(self, state: State, *, age: int) -> None:
        """Loads a state that `state` returned.

        Raises:
            ConfigError: other parameters were trained when the state was made.
        """
        self._mirror.forget()
        self._refuse_other_parameters(state)
        with torch.no_grad():
            for name, master in self.masters.items():
                master.copy_(as_tensor(state[f"parameter/{name}"]))
                if self.parameters[name] is not master:
                    self.parameters[name].copy_(master)
        if self.optimizer is not None:
            prefix = "optimizer/"
            named = {
                name.removeprefix(prefix): as_tensor(array)
                for name, array in state.items()
                if name.startswith(prefix)
            }
            self._num_steps = load_optimizer_state(self.optimizer, self.masters, named)
        if self.held_out is not None and _HELD_OUT in state:  # Else the job had none then.
            self.held_out.load(state[_HELD_OUT].tolist())
        self.age = age

    def _refuse_other_parameters(self, state: State) -> None:
        """Refuses a state without a trained parameter, or with another shape of one, or with
        another value of a frozen one, or with one that the model lacks."""
        for name, parameter in self.parameters.items():
            saved = state.get(f"parameter/{name}")
            if saved is None and name in self.masters:
                remedy = (
                    "the save does not have it: it was frozen then, or the model is another one; "
                    "begin a new job"
                )
                raise ConfigError("model", name, remedy)
            if saved is None:
                continue
            if tuple(saved.shape) != tuple(parameter.shape):
                remedy = (
                    f"its shape is {tuple(parameter.shape)}, and {tuple(saved.shape)} in the save; "
                    "give the model that was saved, or begin a new job"
                )
                raise ConfigError("model", name, remedy)
            if name in self.masters:
                continue
            value = as_tensor(saved).to(parameter.dtype)
            if not torch.equal(value, parameter.detach().cpu()):
                remedy = (
                    "it is frozen now, and the save has another value than the seed or model.path "
                    "gives; export the save, and begin a new job with it as model.path"
                )
                raise ConfigError("model", name, remedy)
        saved_names = {n.removeprefix("parameter/") for n in state if n.startswith("parameter/")}
        if more := sorted(saved_names - self.parameters.keys()):
            remedy = (
                "the save has it, and the model does not; give the model that was saved, or begin "
                "a new job"
            )
            raise ConfigError("model", more[0], remedy)


def _cast_to_bfloat16(module: nn.Module, float32: Collection[str]) -> None:
    """Casts all floats of a module but those of the tensors with these names."""
    named = (*module.named_parameters(), *module.named_buffers())
    kept = {id(tensor) for name, tensor in named if name in float32}

    def cast(tensor: Tensor) -> Tensor:
        is_kept = id(tensor) in kept or not tensor.is_floating_point()
        return tensor if is_kept else tensor.to(torch.bfloat16)

    module._apply(cast)  # type: ignore[no-untyped-call]


def _gradient_buffer(sums: Tensor) -> Tensor:
    """Tensor for the reduced gradients: `sums` itself if that is float32, else a new one.

    `sums` can be overwritten: no rank needs a part of it once that part's total has arrived.
    """
    return sums if sums.dtype is torch.float32 else torch.zeros_like(sums, dtype=torch.float32)


def _add_gradient(sums: Tensor, parameter: Tensor) -> None:
    """Adds the gradient of a parameter to its sums, and drops it."""
    assert parameter.grad is not None
    sums.add_(parameter.grad)
    parameter.grad = None


def _views(
    flat: Tensor, names: Sequence[str], parameters: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    views = {}
    offset = 0
    for name in names:
        parameter = parameters[name]
        views[name] = flat[offset : offset + parameter.numel()].view(parameter.shape)
        offset += parameter.numel()
    return views


def _as_if_sent(output: Tensor) -> Tensor:
    """The output of a layer with the strides that it and its gradient have from another rank.

    The bits of some operators depend on strides, and those within a rank on where the plan cuts.
    """
    if is_packed(output):  # Its parts have the strides of new tensors already.
        return output
    output = row_major(output)
    if output.grad_fn is not None:  # Else it is a leaf: a parameter, or the hop's input.
        output.register_hook(row_major)  # type: ignore[no-untyped-call]
    return output


class RankStage:
    """All layers that a rank holds, and how a hop runs through some of them.

    Args:
        patience: evaluations after which training ends, see `HeldOutLosses`; 0: it does not.
        held_out_id: see `HeldOutLosses`.

    Attributes:
        chosen: recomputation by layer, where the plan says it.
    """

    def __init__(
        self,
        model: SplitModel,
        *,
        training: TrainingConfig,
        device: Device = PROCESSOR,
        patience: int = 0,
        held_out_id: int = 0,
    ) -> None:
        self.device = device
        self._patience = patience
        self._held_out_id = held_out_id
        self.model = model
        self.training = training
        self.layers: dict[int, HeldLayer] = {}
        self.num_materialised = 0
        # Optimizers that step several layers together, and the layers' own that they stand for.
        self._joined: tuple[list[Optimizer], list[Optimizer]] = [], []
        self.chosen: Mapping[int, Recomputation] = {}
        names = model.float32_names if training.dtype == "bfloat16" else frozenset
        self._float32: frozenset[str] = names()

    def hold(self, layers: Iterable[int], *, states: Mapping[int, State], age: int) -> None:
        """Materialises layers, from `states` if it has them, else from the seed.

        Does nothing for layers that are held already.
        """
        for layer in layers:
            if layer in self.layers:
                continue
            if layer in states:
                self.hold_loaded(self.empty_layer(layer), states[layer], age=age)
            else:
                held = self._new_layer(layer, self.model.materialise(layer))
                held.age = age
                self._add(held)

    def empty_layer(self, layer: int) -> HeldLayer:
        """A new layer without a state; the stage does not hold it yet."""
        return self._new_layer(layer, self.model.structure(layer))

    def hold_loaded(self, held: HeldLayer, state: State, *, age: int) -> None:
        """Loads a state into a layer from `empty_layer`, and holds the layer from then on."""
        held.load(state, age=age)
        self._add(held)

    def _new_layer(self, layer: int, module: nn.Module) -> HeldLayer:
        tied = [u.name for g in self.model.tied for u in g.uses if u.layer == layer]
        held = HeldLayer(
            layer,
            module,
            training=self.training,
            tied=tied,
            float32=self._float32,
            device=self.device,
        )
        if self._patience and layer == self.model.num_layers - 1:
            held.held_out = HeldOutLosses(self._patience, held_out_id=self._held_out_id)
        return held

    def _add(self, held: HeldLayer) -> None:
        assert held.layer not in self.layers
        self.layers[held.layer] = held
        self.num_materialised += 1

    def prepare(self, layers: Iterable[int]) -> None:
        """Holds layers whose states arrive later; they can take part in reductions before that."""
        for layer in layers:
            self.layers[layer] = self.empty_layer(layer)
            self.layers[layer].age = NOT_YET

    def fill(self, layer: int, state: State, *, age: int) -> None:
        """Loads the state of a layer that was prepared."""
        assert self.layers[layer].age == NOT_YET
        self.layers[layer].load(state, age=age)
        self.num_materialised += 1

    def complete_layers(self) -> dict[int, HeldLayer]:
        """The layers that have a valid state."""
        return {layer: held for layer, held in self.layers.items() if held.age != NOT_YET}

    def keep_only(self, layers: Collection[int]) -> None:
        """Drops all layers that are not in `layers`."""
        num_before = len(self.layers)
        self.layers = {layer: held for layer, held in self.layers.items() if layer in layers}
        if len(self.layers) < num_before:
            self._joined = [], []  # Else it would keep the parameters of layers that are dropped.

    def apply(
        self, layers: Iterable[int], iteration: int, *, learning_rate: float, scale: float
    ) -> None:
        """Takes the optimizer steps of layers that have not taken those of this iteration.

        In fast mode all layers take one step together. If a step raises, the age of all layers that
        are part of it stays NOT_YET, so they are neither sent nor saved.
        """
        if self.training.deterministic:
            for layer in layers:
                self.layers[layer].apply(iteration, learning_rate=learning_rate, scale=scale)
            return
        due = [
            held
            for held in (self.layers[layer] for layer in layers)
            if held.begin_step(iteration, scale=scale)
        ]
        optimizers = [held.optimizer for held in due if held.optimizer is not None]
        if optimizers != self._joined[1]:
            self._joined = joint_optimizers(optimizers), optimizers
        join_state(*self._joined)
        for optimizer in self._joined[0]:
            take_step(optimizer, learning_rate)
        for held in due:
            held.end_step(iteration)

    def forward(
        self, first_layer: int, end_layer: int, hidden: Tensor, *, iteration: int, microbatch: int
    ) -> Tensor:
        """The output of layers [first_layer, end_layer) for one microbatch."""
        for layer in range(first_layer, end_layer):
            module = self.layers[layer].module
            seed = mix(self.training.seed, iteration, microbatch, layer)
            hidden = forward_that_keeps(
                self._seeded_forward, module, hidden, seed, recomputation=self._recomputation(layer)
            )
            if self.training.deterministic and layer + 1 < self.model.num_layers:
                hidden = _as_if_sent(hidden)
            if torch.is_grad_enabled() and not hidden.requires_grad:
                # No trained parameter is before it. What another rank gets requires a gradient, so
                # this does as well: else the bits might depend on the plan.
                hidden = hidden.detach().requires_grad_()
        return hidden

    def loss_sum(
        self, output: Tensor, targets: Tensor, *, iteration: int, microbatch: int
    ) -> Tensor:
        """The loss of a microbatch, see `SplitModel.loss_sum`; a loss may draw random numbers."""
        num_layers = self.model.num_layers
        self.device.seed(mix(self.training.seed, iteration, microbatch, num_layers))
        return self.model.loss_sum(output, targets)

    def note_held_out(self, loss: float | None, *, age: int) -> None:
        """Notes the loss of held-out data for layers of this age, see `HeldOutLosses`."""
        for held in self.layers.values():
            if held.held_out is not None:
                held.held_out.note(loss, age=age)

    def ends_early(self, iteration: int) -> bool:
        """Whether the rank knows that losses of held-out data end training with this iteration."""
        known = [held.held_out for held in self.layers.values() if held.held_out is not None]
        return any(losses.are_worse(iteration) for losses in known)

    def _recomputation(self, layer: int) -> Recomputation:
        # The loss follows the last layer at once, so that nothing would be gained there.
        is_last = layer == self.model.num_layers - 1
        return "none" if is_last else self.chosen.get(layer, self.training.recomputation)

    def _seeded_forward(self, module: nn.Module, hidden: Tensor, seed: int) -> Tensor:
        self.device.seed(seed)
        output: Tensor = module(hidden)
        return output

    def parameters(self, first_layer: int, end_layer: int) -> list[nn.Parameter]:
        """The parameters of layers [first_layer, end_layer) that require gradients."""
        held = [self.layers[layer] for layer in range(first_layer, end_layer)]
        return [p for layer in held for p in layer.parameters.values() if p.requires_grad]

    def accumulate(self, first_layer: int, end_layer: int) -> None:
        """Adds the gradients that `WeightGradients.run` left in the layers to their sums."""
        for layer in range(first_layer, end_layer):
            self.layers[layer].accumulate()

    def tied_uses(self, group: TiedGroup) -> list[tuple[HeldLayer, str]]:
        """This rank's uses of a tied parameter, in layer order."""
        return [(self.layers[u.layer], u.name) for u in group.uses if u.layer in self.layers]

    def tied_sum(
        self, group: TiedGroup, layers: Collection[int]
    ) -> tuple[Tensor, list[tuple[HeldLayer, str]]]:
        """The sum over the uses of a tied parameter in these layers, and those uses."""
        uses = [use for use in self.tied_uses(group) if use[0].layer in layers]
        total = (
            uses[0][0].tied_sums[uses[0][1]].clone()
            if uses
            else torch.zeros(0, device=self.device.place)
        )
        for held, name in uses[1:]:
            total += held.tied_sums[name]
        return total, uses

    def norm_parameters(self, layer: int) -> list[str]:
        """Names of the layer's parameters, without tied ones that an earlier use counts."""
        later = {use.name for g in self.model.tied for use in g.uses[1:] if use.layer == layer}
        return [name for name in self.layers[layer].masters if name not in later]
