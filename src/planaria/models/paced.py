"""Layers that sleep for the time that a profile says, on tiny tensors.

A paced job runs the real engine, links and commits with the timing of a cluster that is not
there: many nodes fit on two cores, for a sleeping layer needs none. What the machine is late by,
the sleeps that follow make up for (transport/timekeeping.py). Gradients and updates are
real, so all checks of bits hold for it too.

No sleep is exactly as long as the next of its kind: each is multiplied by a lognormal number of
mean 1. It is drawn where other layers draw dropout, so it is a function of (seed, iteration,
microbatch, layer) and of the direction, whatever rank sleeps and whatever failed before.

Activations and parameters are a few dozen floats. What sends them says how many bytes of the
profile's they stand for, and links take their time for those (transport/pacing.py).
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
    """x as it is, whose gradient takes its time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, timekeeper: Timekeeper, backward_s: float) -> Tensor:
        ctx.timekeeper, ctx.backward_s = timekeeper, backward_s
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.timekeeper.sleep(ctx.backward_s)
        return gradients[0], None, None


class _PacedLayer(nn.Module):
    """x * weight; the gradient of x sleeps on its way, that of the weight on its own."""

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
        # Where the input needs no gradient, as the data, that of the weight takes all the time.
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
    """Two lognormal numbers of mean 1 and this coefficient of variation, from torch's generator."""
    variance = math.log1p(jitter * jitter)
    normal = torch.randn(2, dtype=torch.float64).tolist()
    return [math.exp(math.sqrt(variance) * value - variance / 2) for value in normal]


class _PacedLayers:
    """The builder of a paced model."""

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
        """The layer with its first weights, near 1."""
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
    """Samples for a paced model: a vector and a target, drawn from the sample's number."""

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
    """A model of one sleeping layer for each of the profile's.

    Args:
        seed: of the first weights.
        jitter: the coefficient of variation of its sleeps; 0: each is as long as the profile says.
        timekeeper: by which it sleeps.
    """
    builder = _PacedLayers(profile, seed=seed, jitter=jitter, timekeeper=timekeeper)
    return SplitModel(
        builder, objective="supervised", loss=_squared_error_sum, virtual=profile.layers
    )


def _squared_error_sum(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).square().sum()
