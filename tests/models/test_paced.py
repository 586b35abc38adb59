"""Paced layers take their time on average, and their gradients are real."""

import statistics
import time
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from helpers.strategies import layer_profile, model_profile
from planaria.engine.iteration.split_backward import input_gradient
from planaria.models.layers import SplitModel
from planaria.models.paced import WIDTH, PacedData, paced_model
from planaria.transport.timekeeping import Timekeeper

LATE_S = 0.1


def model(*forward_s: float, jitter: float = 0.0) -> SplitModel:
    """Sleeping layers whose backward takes twice their forward."""
    layers = tuple(layer_profile(f"layer {i}", value) for i, value in enumerate(forward_s))
    return paced_model(model_profile(layers), seed=3, jitter=jitter, timekeeper=Timekeeper(LATE_S))


def test_a_model_takes_the_profiles_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers have one timekeeper, forward and backward, so 120 late sleeps are late as one. By
    the machine's clock it takes no less; benchmarks/prediction.py asserts that it takes no more
    than 3% more where the machine is idle."""
    start_s = time.monotonic()
    _train(model(*[0.2 / 40 / 3] * 40))
    seconds = time.monotonic() - start_s
    slept: list[float] = []
    monkeypatch.setattr(Timekeeper, "sleep", lambda _, seconds: slept.append(seconds))

    _train(model(*[0.2 / 40 / 3] * 40))

    assert seconds >= 0.2 - 1e-6
    assert len(slept) == 120
    assert sum(slept) == pytest.approx(0.2)


def _train(layers: SplitModel) -> None:
    """One microbatch, forward and backward."""
    hidden = torch.ones(1, WIDTH, requires_grad=True)
    for layer in range(layers.num_layers):
        hidden = layers.materialise(layer)(hidden)
    hidden.sum().backward()  # type: ignore[no-untyped-call]


def test_forward_and_backward_take_their_own_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the layer's profile, each where it belongs; the backward is input and weight."""
    slept: list[float] = []
    monkeypatch.setattr(Timekeeper, "sleep", lambda _, seconds: slept.append(seconds))
    layers = model(1.0, 5.0)
    hidden = torch.ones(1, WIDTH)
    for layer in range(2):
        hidden = layers.materialise(layer)(hidden)
    hidden.sum().backward()  # type: ignore[no-untyped-call]

    assert slept == [1.0, 5.0, 5.0, 5.0, 2.0]


def test_the_parts_of_a_split_backward_take_their_own_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All inputs first, and nothing of a weight until its part."""
    slept: list[float] = []
    monkeypatch.setattr(Timekeeper, "sleep", lambda _, seconds: slept.append(seconds))
    layers = model(1.0, 5.0)
    hidden = source = torch.ones(1, WIDTH, requires_grad=True)
    modules = [layers.materialise(layer) for layer in range(2)]
    for module in modules:
        hidden = module(hidden)
    parameters = [parameter for module in modules for parameter in module.parameters()]

    _, rest = input_gradient(hidden.sum(), None, source, parameters)

    assert slept == [1.0, 5.0, 5.0, 1.0]
    rest.run()
    assert sorted(slept[4:]) == [1.0, 5.0]


def test_sleeps_vary_by_the_jitter_and_last_what_the_profile_says_on_average(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over 4,000 sleeps of each direction; a lognormal number is never below 0."""
    jitter, count = 0.5, 4000
    forward_s, backward_s = _slept(monkeypatch, range(count), jitter=jitter)

    for seconds, mean_s in ((forward_s, 0.01), (backward_s, 0.02)):
        assert min(seconds) > 0
        assert statistics.mean(seconds) == pytest.approx(mean_s, rel=4 * jitter / count**0.5)
        assert statistics.stdev(seconds) / mean_s == pytest.approx(jitter, rel=0.1)
    assert abs(statistics.correlation(forward_s, backward_s)) < 0.1


def test_jitter_is_that_of_the_seed_of_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever sleeps, in whatever order: Stage seeds a forward by iteration, microbatch and layer.
    Without jitter every sleep is the profile's."""
    seeds = [5, 9, 1]
    before = _slept(monkeypatch, seeds, jitter=0.03)
    after = _slept(monkeypatch, reversed(seeds), jitter=0.03)

    assert [list(reversed(seconds)) for seconds in after] == before
    assert len({*before[0], *before[1]}) == 6
    assert _slept(monkeypatch, seeds, jitter=0.0) == [[0.01] * 3, [0.02] * 3]


def _slept(
    monkeypatch: pytest.MonkeyPatch, seeds: Iterable[int], *, jitter: float
) -> list[list[float]]:
    """The seconds of the forwards and backwards of a layer of 0.01 s, whose forwards are seeded."""
    slept: list[float] = []
    monkeypatch.setattr(Timekeeper, "sleep", lambda _, seconds: slept.append(seconds))
    layer = model(0.01, jitter=jitter).materialise(0)
    for seed in seeds:
        torch.default_generator.manual_seed(seed)
        output = layer(torch.ones(1, WIDTH))
        torch.default_generator.manual_seed(0)
        output.sum().backward()
    return [slept[0::2], slept[1::2]]


def test_gradients_are_those_of_the_product() -> None:
    """Held against autograd's own."""
    layer = model(0.0).materialise(0)
    weight = next(layer.parameters())
    x = torch.rand(3, WIDTH, requires_grad=True)
    layer(x).square().sum().backward()
    other_x, other_weight = (t.detach().clone().requires_grad_() for t in (x, weight))
    (other_x * other_weight).square().sum().backward()  # type: ignore[no-untyped-call]

    torch.testing.assert_close(x.grad, other_x.grad)
    torch.testing.assert_close(weight.grad, other_weight.grad)


def test_first_weights_depend_on_seed_and_layer_alone() -> None:
    """Whoever builds the layer, in whatever order; near 1, so that no product vanishes."""
    weights = [next(model(0.0, 0.0).materialise(layer).parameters()) for layer in (1, 0, 1)]

    assert torch.equal(weights[0], weights[2])
    assert not torch.equal(weights[0], weights[1])
    assert all(
        0.9 <= float(weight.min()) <= float(weight.max()) <= 1.1
        for weight in map(Tensor.detach, weights)
    )


def test_a_sample_is_a_function_of_its_number() -> None:
    """Input and target differ, and so do samples."""
    first, again, other = (PacedData().sample(index, seed=0) for index in (7, 7, 8))

    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], other[0])
