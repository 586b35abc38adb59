"""Layers that sleep for the times that a profile states, on tiny tensors.

A paced job runs the real engine, links and commits with the timing of a cluster that is not
there: many nodes fit on two cores, because a sleeping layer needs none. If the machine is late,
later sleeps are shorter (transport/timekeeping.py). Gradients and updates are real, so all checks
of bits apply to a paced job too.

Each sleep is multiplied by a random lognormal factor of mean 1, so that no two are equal. The
factor is drawn where other layers draw dropout, so it is a function of (seed, iteration,
microbatch, layer) and of forward or backward, whichever rank sleeps and whatever failed before.

Activations and parameters are a few dozen floats. A message of them states the number of bytes that
they have in the profile, and links take as long as those bytes would (transport/pacing.py).
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from planaria.core.plan import LayerProfile, ModelProfile
from planaria.core.samples import mix
from planaria.models.layers import SplitModel, TiedGroup, layer_seed
from planaria.transport.timekeeping import Timekeeper

WIDTH = 16
NUM_SAMPLES = 1 << 20


class _Sleep(torch.autograd.Function):
    """Identity whose backward sleeps for `backward_s`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, timekeeper: Timekeeper, backward_s: float) -> Tensor:
        ctx.timekeeper, ctx.backward_s = timekeeper, backward_s
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.timekeeper.sleep(ctx.backward_s)
        return gradients[0], None, None


class _PacedLayer(nn.Module):
    """x * weight, with one sleep in the gradient of x and another in that of the weight.

    Separate sleeps allow a backward in two parts.
    """

    def __init__(self, profile: LayerProfile, *, timekeeper: Timekeeper, jitter: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH))
        self._forward_s = profile.forward_s[1]
        self._input_s = profile.backward_input_s[1]
        self._weight_s = profile.backward_weight_s[1]
        self._timekeeper = timekeeper
        self._jitter = jitter

    def forward(self, x: Tensor) -> Tensor:
        forward, backward = _factors(self._jitter)
        # If the input needs no gradient (layer 0), the weight's gradient takes the time of both.
        weight_s = self._weight_s + (0.0 if x.requires_grad else self._input_s)
        self._timekeeper.sleep(forward * self._forward_s)
        slept = self._sleepy(x, backward * self._input_s)
        return slept * self._sleepy(self.weight, backward * weight_s)

    def _sleepy(self, tensor: Tensor, backward_s: float) -> Tensor:
        same: Tensor = _Sleep.apply(  # type: ignore[no-untyped-call]
            tensor, self._timekeeper, backward_s
        )
        return same


def _factors(jitter: float) -> list[float]:
    """Two lognormal factors of mean 1, drawn from torch's generator.

    Args:
        jitter: coefficient of variation.
    """
    variance = math.log1p(jitter * jitter)
    normal = torch.randn(2, dtype=torch.float64).tolist()
    return [math.exp(math.sqrt(variance) * value - variance / 2) for value in normal]


class _PacedLayers:
    """Builds the layers of a paced model."""

    def __init__(
        self, profile: ModelProfile, *, seed: int, jitter: float, timekeeper: Timekeeper
    ) -> None:
        self._profile = profile
        self._seed = seed
        self._jitter = jitter
        self._timekeeper = timekeeper
        self.layer_names = tuple(layer.name for layer in profile.layers)
        self.tied: tuple[TiedGroup, ...] = ()

    def materialise(self, layer: int) -> nn.Module:
        """The layer with its initial weights, near 1."""
        module = self.structure(layer)
        generator = torch.Generator().manual_seed(layer_seed(self._seed, layer))
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.uniform_(0.9, 1.1, generator=generator)
        return module

    def structure(self, layer: int) -> nn.Module:
        return _PacedLayer(
            self._profile.layers[layer], timekeeper=self._timekeeper, jitter=self._jitter
        )

    def parameter_shapes(self, layer: int) -> dict[str, torch.Size]:
        assert 0 <= layer < len(self.layer_names)
        return {"weight": torch.Size([WIDTH])}


class PacedData:
    """Samples for a paced model: an input and a target vector, drawn from the sample's number."""

    vocabulary_size = 0

    def __len__(self) -> int:
        return NUM_SAMPLES

    def sample(self, index: int, *, seed: int) -> tuple[Tensor, Tensor]:
        """The sample's input and target, both float32 [WIDTH]; the same for every seed."""
        assert seed >= 0
        generator = torch.Generator().manual_seed(mix(index) >> 1)
        return torch.rand(WIDTH, generator=generator), torch.rand(WIDTH, generator=generator)


def paced_model(
    profile: ModelProfile, *, seed: int, jitter: float, timekeeper: Timekeeper
) -> SplitModel:
    """A model with one sleeping layer for each layer of the profile.

    Args:
        seed: seed of the initial weights.
        jitter: coefficient of variation of the sleeps; 0: each is as long as the profile states.
        timekeeper: clock by which the layers sleep.
    """
    builder = _PacedLayers(profile, seed=seed, jitter=jitter, timekeeper=timekeeper)
    return SplitModel(
        builder, objective="supervised", loss=_squared_error_sum, virtual=profile.layers
    )


def _squared_error_sum(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).square().sum()
