"""A user's layers and loss are examined on the first microbatch, before training."""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from helpers.jobs import tiny_job
from helpers.preparing import preparation
from helpers.saved_datasets import saved_dataset
from helpers.strategies import layer_profile, model_profile
from planaria.core.job import DataConfig, ModelConfig
from planaria.core.plan import ModelProfile
from planaria.engine import profiler
from planaria.engine.blame import user_traceback
from planaria.engine.prepare import load_data, load_model
from planaria.errors import ConfigError
from planaria.models.first_microbatch import examine_loss
from planaria.models.layers import SplitModel, class_loss_sum
from planaria.models.packing import pack
from planaria.transport.timekeeping import Timekeeper

Loss = Callable[[Any, Any], Tensor]
NUM_SAMPLES = 4


class _NoLayers:
    """The builder of a model of which only the loss is used."""

    layer_names = ("0.Linear",)
    tied = ()

    def materialise(self, layer: int) -> nn.Module:
        raise NotImplementedError(layer)

    def structure(self, layer: int) -> nn.Module:
        raise NotImplementedError(layer)

    def parameter_shapes(self, layer: int) -> dict[str, torch.Size]:
        raise NotImplementedError(layer)


def _examine(loss: Loss, *, output: Any = None, targets: Any = None, size: int = 4) -> None:
    """Examines a loss on four samples of six numbers each, or on what is given."""
    generator = torch.Generator().manual_seed(1)
    shape = (size, 6)
    output = torch.randn(shape, generator=generator) if output is None else output
    targets = torch.randn(shape, generator=generator) if targets is None else targets
    tensors = output if isinstance(output, dict) else {"": output}
    for tensor in tensors.values():
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            tensor.requires_grad_()
    model = SplitModel(_NoLayers(), objective="supervised", loss=loss)
    parts = [part if isinstance(part, Tensor) else pack(part, "test") for part in (output, targets)]
    examine_loss(model, *parts, num_samples=size)


def _profile(target: str, directory: Path) -> ModelProfile:
    job = tiny_job("sequential", directory)
    job = replace(job, model=replace(job.model, target=f"helpers.mistaken_models:{target}"))
    model = load_model(job, cache_directory=directory, profile=None, timekeeper=Timekeeper())
    dataset = load_data(job, objective=model.objective, cache_directory=directory)
    return profiler.profile_model(job, model, dataset)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mean_is_refused(size: int, dtype: torch.dtype) -> None:
    """Gradients would be too small by the number of targets of a microbatch."""
    generator = torch.Generator().manual_seed(2)
    output = torch.randn(size, 6, generator=generator).to(dtype)

    words = r'1\.0\d times that of the samples once.*return the sum.*reduction="sum"'
    with pytest.raises(ConfigError, match=words) as caught:
        _examine(lambda o, t: functional.mse_loss(o, t.to(dtype)), output=output, size=size)
    assert caught.value.field == "model.target"


def test_a_mean_of_several_tensors_is_refused() -> None:
    """A dict from the layers, a tuple of targets with a class that counts for nothing."""
    output = {"logits": torch.randn(4, 5), "kind": "words", "none": None}
    targets = torch.tensor([1, 2, -100, 0]), torch.ones(4, 2)

    with pytest.raises(ConfigError, match="so it is a mean"):
        _examine(
            lambda o, t: functional.cross_entropy(o["logits"], t[0]), output=output, targets=targets
        )


def _in_place(output: Tensor, targets: Tensor) -> Tensor:
    output -= targets
    return output.square().sum()


LET_THROUGH: dict[str, Loss] = {
    "sum": lambda o, t: functional.mse_loss(o, t, reduction="sum"),
    "sum over samples of means": lambda o, t: (o - t).square().mean(1).sum(),
    "mean times the number of samples": lambda o, t: (o - t).square().mean() * len(o),
    "norm": lambda o, t: (o - t).norm(),
    "zero": lambda o, t: 0.0 * functional.mse_loss(o, t),
    "negative": lambda o, t: -functional.mse_loss(o, t),
    "infinite": lambda o, t: functional.mse_loss(o, t) / 0.0,
    "sum with a large constant": lambda o, t: (o - t).square().sum() + 1e6,
    "mean of random numbers": lambda o, t: functional.mse_loss(o, t + 0.1 * torch.randn_like(t)),
    "mean of some samples": lambda o, t: functional.mse_loss(o[:2], t[:2], reduction="sum"),
    "one shape alone": lambda o, t: (o.view(NUM_SAMPLES, 6) - t).square().mean() * NUM_SAMPLES,
    "in place": lambda o, t: _in_place(o.clone(), t),
    "contrastive": lambda o, t: (
        functional.cross_entropy(o @ t.T, torch.arange(len(o))) * torch.tensor(float(len(o)))
    ),
    "of pairs": lambda o, _: (o[::2] - o[1::2]).square().sum(),
}


@pytest.mark.parametrize("name", LET_THROUGH)
def test_what_may_be_a_sum_is_let_through(name: str) -> None:
    """A loss that is wrongly refused cannot be trained at all."""
    _examine(LET_THROUGH[name])


def test_a_loss_that_gets_more_than_rows_of_samples_is_let_through() -> None:
    """A layer may count the samples, by which the loss multiplies a mean."""
    for count in (torch.tensor(4.0), 4):
        output = {"x": torch.randn(4, 6), "count": count}
        _examine(lambda o, t: functional.mse_loss(o["x"], t) * o["count"], output=output)


def test_one_sample_may_be_taken_by_its_index() -> None:
    """Microbatches of one sample, of which a second one is not looked at."""
    _examine(lambda o, t: functional.mse_loss(o[0], t[0], reduction="sum"), size=1)


@pytest.mark.parametrize(
    ("output", "targets", "is_refused", "is_told"),
    [
        ((4, 6), (4,), False, False),
        ((4, 5, 6), (4, 5), False, False),
        ((4, 6, 6), (4, 6), False, True),
        ((4, 6, 5), (4, 5), True, False),
        ((4, 6, 5, 7), (4, 5, 7), True, False),
        ((4, 6, 5, 6), (4, 5, 6), True, False),
        ((4, 6, 5, 6), (4, 6, 5), False, False),
        ((4, 6, 6, 6), (4, 6, 6), False, True),
        ((4, 5, 6, 6), (4, 5, 6), False, False),
        ((4, 5, 6), (20,), False, False),
        ((4, 6, 6), (24,), False, True),
        ((20, 6), (4, 5), False, False),
    ],
    ids=str,
)
def test_classes_are_in_the_last_dimension(
    output: tuple[int, ...],
    targets: tuple[int, ...],
    is_refused: bool,
    is_told: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In the second, where torch has them, they were taken for places if there were as many."""
    scores = torch.randn(output, generator=torch.Generator().manual_seed(1))
    classes = torch.arange(math.prod(targets)).reshape(targets) % 5
    if is_refused:
        with pytest.raises(ConfigError, match=r"x\.movedim\(1, -1\)"):
            _examine(class_loss_sum, output=scores, targets=classes)
        scores = scores.movedim(1, -1)

    assert caplog.text == ""
    _examine(class_loss_sum, output=scores, targets=classes)
    assert ("not the second" in caplog.text) == is_told
    if scores.shape[:-1] == classes.shape:
        expected = functional.cross_entropy(scores.movedim(-1, 1), classes, reduction="sum")
        torch.testing.assert_close(class_loss_sum(scores, classes), expected)


class _Tempered(nn.Module):
    """A loss with a temperature that it would learn."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(2))

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        return ((output - targets) / self.temperature.prod()).square().sum()


def test_a_loss_that_would_train_what_no_layer_has_is_refused() -> None:
    """It kept its initial values, in silence: nobody reduces, steps, saves or moves that."""
    weight = nn.Parameter(torch.ones(5))

    def penalised(output: Tensor, targets: Tensor) -> Tensor:
        return (output - targets).square().sum() + weight.square().sum()

    with pytest.raises(ConfigError, match=r"trained tensors of shape \(2,\) beside what"):
        _examine(_Tempered())
    with pytest.raises(ConfigError, match=r"trained tensors of shape \(5,\)"):
        _examine(penalised)
    weight.requires_grad_(False)
    _examine(penalised)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("with_mean_loss", "loss_function.*float32.*so it is a mean"),
        ("with_detached_loss", "loss_function.*float32.*without a gradient.*detach"),
    ],
)
def test_a_loss_is_examined_before_training(target: str, words: str, tmp_path: Path) -> None:
    """It is told in one line, with what the loss got."""
    with pytest.raises(ConfigError, match=words):
        _profile(target, tmp_path)


@pytest.mark.parametrize(
    ("target", "field", "words"),
    [
        ("with_mean_loss", "model.target", "so it is a mean"),
        ("with_counter", "model (layer 1._Counter)", "a forward must not change the layer's state"),
    ],
)
def test_layers_and_loss_are_examined_with_a_given_profile(
    target: str, field: str, words: str, tmp_path: Path
) -> None:
    """They may have changed since it was measured, or nobody has ever looked at them."""
    job = tiny_job("sequential", tmp_path)
    job = replace(job, model=replace(job.model, target=f"helpers.mistaken_models:{target}"))
    model = load_model(job, cache_directory=tmp_path, profile=None, timekeeper=Timekeeper())
    sizes = [
        4 * sum(shape.numel() for shape in model.parameter_shapes(layer).values())
        for layer in range(model.num_layers)
    ]
    named = zip(model.layer_names, sizes, strict=True)
    layers = tuple(layer_profile(name, 0.01, parameter_bytes=size) for name, size in named)

    prepared = preparation(job, tmp_path, profile=model_profile(layers))

    assert prepared.mistake is not None
    assert prepared.mistake[0] == field
    assert words in prepared.mistake[2]


def test_targets_that_are_the_inputs_are_refused_before_training(tmp_path: Path) -> None:
    """A model that copies what it sees has a loss near 0, and nobody would wonder."""
    target = "helpers.mistaken_models:unshifted"
    data = DataConfig(kind="python", target=target, sequence_length=16)
    job = replace(tiny_job("gpt2", tmp_path), data=data)

    prepared = preparation(job, tmp_path)

    assert prepared.mistake is not None
    assert prepared.mistake[0] == "data.target"
    assert "its targets are its inputs" in prepared.mistake[2]


def test_an_examination_leaves_the_random_generators_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss may draw from any of them."""
    states = []

    def note(*_: object, **__: object) -> None:
        states.append(
            repr((torch.get_rng_state().tolist(), np.random.get_state(), random.getstate()))
        )

    def draw(*_: object, **__: object) -> None:
        note()
        torch.rand(3)
        np.random.rand(3)
        random.random()

    monkeypatch.setattr(profiler, "examine_loss", draw)
    monkeypatch.setattr(profiler, "refuse_changes", note)
    _profile("raises", tmp_path)

    assert states[-1] == states[-2]


@pytest.mark.parametrize("changed", ["output", "targets"])
def test_a_loss_that_changes_what_it_gets_is_found_to_be_a_mean(changed: str) -> None:
    """What it is given a second time is what the layers and the data have returned. After its first
    change the sum of all squares would be 0, of which nothing can be told."""

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        value = functional.mse_loss(output.clone(), targets.clone())
        target, source = (output, targets) if changed == "output" else (targets, output)
        with torch.no_grad():
            target.copy_(source)
        return value

    with pytest.raises(ConfigError, match="so it is a mean"):
        _examine(loss)


def test_a_loss_that_changes_its_targets_is_not_refused(tmp_path: Path) -> None:
    """It is measured several times, and gets in training no target that it has changed before."""
    assert len(_profile("changes_its_targets", tmp_path).layers) == 2


@pytest.mark.parametrize("kind", ["hf", "python"])
def test_own_layers_that_would_learn_to_copy_are_told_before_training(
    kind: str, tmp_path: Path
) -> None:
    """Labels as transformers shifts them itself; a copy may be meant, so it is not refused."""
    rows = [list(range(i, i + 16)) for i in range(50)]
    next_tokens = [[*row[1:], -100] for row in rows]
    data = DataConfig(kind="python", target="helpers.mistaken_models:unshifted")
    if kind == "hf":
        data = saved_dataset(tmp_path, {"input_ids": rows, "labels": rows})
    job = replace(
        tiny_job("gpt2", tmp_path),
        model=ModelConfig(kind="python", target="helpers.mistaken_models:reads_tokens"),
        data=replace(data, sequence_length=16),
    )

    text = "\n".join(preparation(job, tmp_path).notes)

    assert "each target is the input at its place" in text
    assert ("[*input_ids[1:], -100]" if kind == "hf" else "(ids[:-1], ids[1:])") in text
    if kind == "hf":
        shifted = saved_dataset(tmp_path / "2", {"input_ids": rows, "labels": next_tokens})
        job = replace(job, data=replace(shifted, sequence_length=16))
        assert "each target" not in "\n".join(preparation(job, tmp_path).notes)


def test_layers_that_would_never_learn_are_refused(tmp_path: Path) -> None:
    """A layer that detaches its output trained in silence, as did those before it."""
    with pytest.raises(ConfigError, match=r"layer 1\._Detached.*parameters of 0.*, 1.*") as caught:
        _profile("detaches", tmp_path)

    assert caught.value.field == "model.target"
    assert len(_profile("detaches_what_is_frozen", tmp_path).layers) == 3


def test_a_layer_that_changes_its_input_is_told_what_to_do(tmp_path: Path) -> None:
    """Torch names a "leaf Variable", and no layer of the user's has one in its forward. Where it is
    a parameter that a layer changes, torch's words are right."""
    with pytest.raises(ConfigError, match=r"layer 1\.ReLU.*inplace=False") as caught:
        _profile("changes_its_input", tmp_path)

    assert caught.value.field == "model.target"
    with pytest.raises(RuntimeError, match="leaf Variable"):
        _profile("changes_its_weight", tmp_path)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("lists_a_module", r"layer 2\._ListedHead.*of shape \(24, 8\) beside its"),
        ("keeps_a_lambda", r"layer 1\._LambdaHead.*of shape \((5|5, 24)\), \(\d.*beside its"),
    ],
)
def test_a_layer_that_would_train_what_it_does_not_have_is_refused(
    target: str, words: str, tmp_path: Path
) -> None:
    """It kept its initial values, in silence, as what a loss would train."""
    with pytest.raises(ConfigError, match=words) as caught:
        _profile(target, tmp_path)

    assert caught.value.field == "model.target"


@pytest.mark.parametrize("target", ["makes_a_leaf", "ties_in_a_layer"])
def test_a_layer_may_make_leaves_and_tie_parameters(target: str, tmp_path: Path) -> None:
    """What a forward makes anew, such as the places by which a force derives, is not trained."""
    assert _profile(target, tmp_path).layers


@pytest.mark.parametrize("target", ["hooks_a_gradient", "hooks_a_sum"])
def test_a_hook_on_a_parameter_is_refused(target: str, tmp_path: Path) -> None:
    """No copy of the layer had it, and what it kept from training was trained in silence."""
    words = r"layer 1\.Linear.*parameter weight has a hook.*mask it in forward"
    with pytest.raises(ConfigError, match=words) as caught:
        _profile(target, tmp_path)

    assert caught.value.field == "model.target"
    assert len(_profile("hooks_what_is_frozen", tmp_path).layers) == 2


TWO_ARGUMENTS = """\
layer 4._TwoArguments got (float32 [2, 24], float32 [2, 24]); a layer gets one argument: what the \
layer before it returned; a tuple is not unpacked
"""
MISSING_KEY = "layer 2._MissingKey got {state: float32 [2, 24]}\n"
NO_ATTRIBUTE = """\
loss_function(float32 [2, 5], int64 [2]) raised it; it gets the last layer's output and the targets
"""


@pytest.mark.parametrize(
    ("target", "error", "words"),
    [
        ("takes_two_arguments", TypeError, TWO_ARGUMENTS),
        ("misses_a_key", KeyError, MISSING_KEY),
        ("with_loss_of_attribute", AttributeError, NO_ATTRIBUTE),
    ],
)
def test_what_the_users_code_raises_is_told_with_what_it_got(
    target: str, error: type[Exception], words: str, tmp_path: Path
) -> None:
    """Below the user's traceback, which is whole."""
    with pytest.raises(error) as caught:
        _profile(target, tmp_path)

    text = user_traceback(caught.value)
    assert text.endswith(words)
    assert text.count("Traceback") == 1
    assert "planaria/" not in text
