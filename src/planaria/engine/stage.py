"""The layers that a rank holds: parameters, gradient sums and optimizer of each layer.

A layer stands on its own: it has its own optimizer and its own age (the number of iterations
that it has applied), so it can be sent, saved and applied alone. Gradients of a layer lie in
one flat tensor of sums; those of a tied parameter, which several layers use, lie in a flat
tensor of their own for each use, for they are summed over the holders of all its uses.

Dropout draws from the generator seeded by (seed, iteration, microbatch, layer) when the layer's
forward begins, also when activation checkpointing runs it again, so what it draws does not
depend on who computes the layer.

Source: DESIGN 4.3, 4.4 and 4.6.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from planaria.core.job import TrainingConfig
from planaria.core.samples import mix
from planaria.engine.optimizer import load_optimizer_state, optimizer_factory, optimizer_state
from planaria.models.layers import SplitModel, TiedGroup

State = Mapping[str, npt.NDArray[np.generic]]

NOT_YET = -1  # The age of a silent layer whose state has not come.


class HeldLayer:
    """One layer on this rank.

    A parameter that does not require gradients stays as it is: no weight decay reaches it.

    Attributes:
        age: iterations applied to it, NOT_YET before there is a state to apply them to.
        gradients_of: the iteration whose reduced gradients are complete, -1 while none are.
        masters: the parameters that are stepped, saved and sent, float32; those of the module
            itself unless it computes in bfloat16.
        sums: flat gradient sums of its own parameters, to which a backward adds.
        tied_sums: by parameter name, flat gradient sums of this layer's use of tied parameters.
        gradients: flat float32, the reduced gradients of its own parameters; the same memory as the
            sums unless those are float64.
        tied_gradients: by parameter name, the same for tied ones.
    """

    def __init__(
        self, layer: int, module: nn.Module, *, training: TrainingConfig, tied: Collection[str]
    ) -> None:
        self.layer = layer
        self.age = 0
        self.gradients_of = -1
        self.masters: dict[str, nn.Parameter] = dict(module.named_parameters())
        if training.dtype == "bfloat16":
            self.masters = {
                name: nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
                for name, parameter in self.masters.items()
            }
            module = module.to(torch.bfloat16)
        self.module = module
        self.parameters = dict(module.named_parameters())
        self._trained = {n: master for n, master in self.masters.items() if master.requires_grad}
        self.optimizer = (
            optimizer_factory(training)(self._trained.items()) if self._trained else None
        )
        sum_dtype = torch.float64 if training.deterministic else torch.float32
        self.tied_names = tuple(name for name in self.masters if name in set(tied))
        own = [name for name in self.masters if name not in self.tied_names]
        size = sum(self.masters[name].numel() for name in own)
        self.sums = torch.zeros(size, dtype=sum_dtype)
        self.gradients = _reduced(self.sums)
        self.tied_sums = {n: torch.zeros(self.masters[n].numel(), dtype=sum_dtype) for n in tied}
        self.tied_gradients = {name: _reduced(sums) for name, sums in self.tied_sums.items()}
        self._sum_views = {**_views(self.sums, own, self.masters), **self._shaped(self.tied_sums)}
        self._gradient_views = {
            **_views(self.gradients, own, self.masters),
            **self._shaped(self.tied_gradients),
        }
        for name, parameter in self.parameters.items():
            if parameter.requires_grad:
                # Not a method of this layer, whose memory would wait for the garbage collector.
                hook = partial(_add_gradient, self._sum_views[name])
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _shaped(self, flat: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.view(self.masters[name].shape) for name, tensor in flat.items()}

    def tensors(self) -> Iterator[Tensor]:
        """All that is kept of the layer from iteration to iteration."""
        yield from self.module.parameters()
        yield from self.module.buffers()
        yield from self.masters.values()
        yield from (self.sums, self.gradients)
        yield from (*self.tied_sums.values(), *self.tied_gradients.values())
        if self.optimizer is not None:
            for kept in self.optimizer.state.values():
                yield from (one for one in kept.values() if isinstance(one, Tensor))

    def clear(self) -> None:
        """Sets all gradient sums to +0."""
        self.gradients_of = -1
        self.sums.zero_()
        for sums in self.tied_sums.values():
            sums.zero_()

    def accumulate(self) -> None:
        """Adds gradients that no backward, but somebody else has left, and drops them."""
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                _add_gradient(self._sum_views[name], parameter)

    def squared_norm(self, names: Iterable[str]) -> float:
        """The sum of squares of the reduced gradients of `names`, each summed in float64."""
        total = 0.0
        for name in names:
            total += float(self._gradient_views[name].double().pow_(2).sum())
        return total

    def apply(self, iteration: int, *, learning_rate: float, scale: float) -> None:
        """Takes the optimizer step of an iteration; nothing if it was taken already.

        A layer whose step raises is of no age, and so is neither sent nor saved.
        """
        if self.age != iteration:
            assert self.age == iteration + 1, (self.layer, self.age, iteration)
            return
        assert self.gradients_of == iteration, (self.layer, self.gradients_of, iteration)
        self.age = NOT_YET
        if self.optimizer is not None:
            for name, master in self._trained.items():
                gradient = self._gradient_views[name]
                master.grad = gradient if scale == 1.0 else gradient.mul_(scale)
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.optimizer.step()
            for name, master in self._trained.items():
                master.grad = None
                if self.parameters[name] is not master:
                    self.parameters[name].data.copy_(master.data)
        self.age = iteration + 1

    def state(self) -> dict[str, npt.NDArray[np.generic]]:
        """A copy of the parameters and the optimizer's state, in the disk tier's names."""
        return {name: array.copy() for name, array in self.state_views().items()}

    def state_views(self) -> dict[str, npt.NDArray[np.generic]]:
        """As `state`, where possible without a copy: the next step changes it."""
        tensors = {f"parameter/{name}": master.detach() for name, master in self.masters.items()}
        if self.optimizer is not None:
            named = optimizer_state(self.optimizer, self._trained)
            tensors |= {f"optimizer/{name}": tensor for name, tensor in named.items()}
        return {name: tensor.contiguous().numpy() for name, tensor in tensors.items()}

    def load(self, state: State, *, age: int) -> None:
        """Takes over a state as `state` gave it."""
        with torch.no_grad():
            for name, master in self.masters.items():
                master.copy_(_tensor(state[f"parameter/{name}"]))
                if self.parameters[name] is not master:
                    self.parameters[name].copy_(master)
        if self.optimizer is not None:
            prefix = "optimizer/"
            named = {
                name.removeprefix(prefix): _tensor(array)
                for name, array in state.items()
                if name.startswith(prefix)
            }
            load_optimizer_state(self.optimizer, self._trained, named)
        self.age = age


def _reduced(sums: Tensor) -> Tensor:
    """Where the sums over all holders come: the rank's own if those have as many bits, for of these
    nobody needs a part any more once the sum of it is there."""
    return sums if sums.dtype is torch.float32 else torch.zeros(len(sums), dtype=torch.float32)


def _add_gradient(sums: Tensor, parameter: Tensor) -> None:
    """Adds the gradient of a parameter, as soon as a backward has it, and drops it."""
    assert parameter.grad is not None
    sums.add_(parameter.grad)
    parameter.grad = None


def _tensor(array: npt.NDArray[np.generic]) -> Tensor:
    """The array as a tensor, not copied if torch takes it as it is."""
    return torch.from_numpy(np.require(array, requirements=("A", "C", "W")))


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


class Stage:
    """All layers that a rank holds, and how a hop runs through some of them."""

    def __init__(self, model: SplitModel, *, training: TrainingConfig) -> None:
        self.model = model
        self.training = training
        self.layers: dict[int, HeldLayer] = {}
        self.num_materialised = 0

    def hold(self, layers: Iterable[int], *, states: Mapping[int, State], age: int) -> None:
        """Materialises layers, from `states` where it has them, else from the seed.

        Layers that are held already are not touched.
        """
        for layer in layers:
            if layer in self.layers:
                continue
            if layer in states:
                self.take(self.vessel(layer), states[layer], age=age)
            else:
                held = self._held(layer, self.model.materialise(layer))
                held.age = age
                self._add(held)

    def vessel(self, layer: int) -> HeldLayer:
        """A layer whose state is still to come: it is not held yet."""
        return self._held(layer, self.model.structure(layer))

    def take(self, vessel: HeldLayer, state: State, *, age: int) -> None:
        """Holds a layer from `vessel`, with this state."""
        vessel.load(state, age=age)
        self._add(vessel)

    def _held(self, layer: int, module: nn.Module) -> HeldLayer:
        tied = [u.name for g in self.model.tied for u in g.uses if u.layer == layer]
        return HeldLayer(layer, module, training=self.training, tied=tied)

    def _add(self, held: HeldLayer) -> None:
        assert held.layer not in self.layers
        self.layers[held.layer] = held
        self.num_materialised += 1

    def prepare(self, layers: Iterable[int]) -> None:
        """Makes room for layers whose state is to come; their gradients can come before it."""
        for layer in layers:
            self.layers[layer] = self.vessel(layer)
            self.layers[layer].age = NOT_YET

    def fill(self, layer: int, state: State, *, age: int) -> None:
        """The state of a layer that was prepared is here."""
        assert self.layers[layer].age == NOT_YET
        self.layers[layer].load(state, age=age)
        self.num_materialised += 1

    def whole(self) -> dict[int, HeldLayer]:
        """The layers whose state is here."""
        return {layer: held for layer, held in self.layers.items() if held.age != NOT_YET}

    def keep_only(self, layers: Collection[int]) -> None:
        """Drops all other layers."""
        self.layers = {layer: held for layer, held in self.layers.items() if layer in layers}

    def forward(
        self, first_layer: int, end_layer: int, hidden: Tensor, *, iteration: int, microbatch: int
    ) -> Tensor:
        """The output of layers [first_layer, end_layer) for one microbatch."""
        for layer in range(first_layer, end_layer):
            module = self.layers[layer].module
            seed = mix(self.training.seed, iteration, microbatch, layer)
            if self.training.activation_checkpointing and layer < self.model.num_layers - 1:
                hidden = checkpoint(
                    _seeded_forward,
                    module,
                    hidden,
                    seed,
                    use_reentrant=False,
                    preserve_rng_state=False,
                )
            else:
                hidden = _seeded_forward(module, hidden, seed)
        return hidden

    def parameters(self, first_layer: int, end_layer: int) -> list[nn.Parameter]:
        """Those of the layers that get gradients."""
        held = [self.layers[layer] for layer in range(first_layer, end_layer)]
        return [p for layer in held for p in layer.parameters.values() if p.requires_grad]

    def accumulate(self, first_layer: int, end_layer: int) -> None:
        """Adds what a backward through the layers left to their gradient sums."""
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
        total = uses[0][0].tied_sums[uses[0][1]].clone() if uses else torch.zeros(0)
        for held, name in uses[1:]:
            total += held.tied_sums[name]
        return total, uses

    def counted(self, layer: int) -> list[str]:
        """The names of the layer's parameters without tied ones that an earlier layer counts."""
        later = {use.name for g in self.model.tied for use in g.uses[1:] if use.layer == layer}
        return [name for name in self.layers[layer].masters if name not in later]


def _seeded_forward(module: nn.Module, hidden: Tensor, seed: int) -> Tensor:
    torch.default_generator.manual_seed(seed)
    output: Tensor = module(hidden)
    return output
