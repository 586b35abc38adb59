"""Layers of the user's own are the user's own model, each built alone."""

import random
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from planaria.core.job import ModelConfig, TrainingConfig
from planaria.engine.prepare import split_model
from planaria.engine.stage import RankStage
from planaria.errors import ConfigError
from planaria.models.layers import (
    SplitModel,
    TiedUse,
    boundary,
    kept_tensors,
    layer_values,
    refuse_changes,
)

_SEED = 7


def _layers() -> list[nn.Module]:
    return [nn.Linear(4, 8), nn.Sequential(nn.ReLU(), nn.LayerNorm(8)), nn.Linear(8, 3)]


def _sequential() -> nn.Sequential:
    return nn.Sequential(*_layers())


def _factories() -> list[Any]:
    return [lambda: nn.Linear(4, 8), nn.ReLU, nn.Linear(8, 3)]


def _with_loss() -> Any:
    return _layers(), nn.MSELoss(reduction="sum")


def _tied() -> list[nn.Module]:
    first, last = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
    last.weight = first.weight
    return [first, nn.Tanh(), last]


def _running() -> list[nn.Module]:
    return [nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4))]


def _half() -> list[nn.Module]:
    return [nn.Linear(4, 4).to(torch.bfloat16)]


def _number() -> int:
    return 3


def _number_inside() -> list[Any]:
    return [nn.Linear(4, 4), 3]


def _failing() -> list[nn.Module]:
    raise RuntimeError("the user's own words")


def _tied_factories() -> list[Any]:
    first = nn.Linear(4, 4)

    def last() -> nn.Module:
        module = nn.Linear(4, 4, bias=False)
        module.weight = first.weight
        return module

    return [lambda: first, nn.Tanh(), last]


class _Features(nn.Module):
    """A buffer that numpy draws."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        features = torch.from_numpy(np.random.randn(4, 4)) + random.random()
        self.register_buffer("features", features)


def _drawn() -> list[nn.Module]:
    return [_Features(), _Features()]


def _drawn_factories() -> list[Any]:
    return [_Features, _Features]


class _Rotary(nn.Module):
    """A table that bfloat16 would spoil, and a linear map, both kept in float32."""

    float32_names = ("inv_freq", "mix")
    inv_freq: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1 / 10_000 ** torch.linspace(0, 1, 4))
        self.register_buffer("scale", torch.rand(4))
        self.register_buffer("number", torch.arange(2**24, 2**24 + 4))
        self.mixed = nn.Linear(4, 4)
        self.mix = self.mixed  # Under a second name.

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.mix(x.float() * self.inv_freq)
        return hidden.to(x.dtype)


def _rotary() -> list[Any]:
    return [lambda: nn.Sequential(nn.Linear(4, 4), _Rotary()), partial(nn.Linear, 4, 3)]


class _OwnTrain(nn.Sequential):
    """Keeps a part in eval mode, as many do."""

    def train(self, mode: bool = True) -> "_OwnTrain":
        super().train(mode)
        self[0].eval()
        return self


def _own_train() -> list[nn.Module]:
    return [_OwnTrain(nn.Dropout(), nn.Linear(4, 4)), nn.Dropout()]


def _keeping(names: object) -> list[nn.Module]:
    layer = nn.Linear(4, 4)
    layer.float32_names = names  # type: ignore[assignment]
    return [layer]


def _misspelt() -> list[nn.Module]:
    return _keeping(["weigh"])


def _one_text() -> list[nn.Module]:
    return _keeping("weight")


@pytest.fixture
def own_module() -> Iterator[str]:
    """The name under which this file can be imported as a user's module."""
    name = "module_of_a_user"
    sys.modules[name] = sys.modules[__name__]
    yield name
    del sys.modules[name]


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _assert_same_bits(expected: nn.Module, actual: nn.Module) -> None:
    before, after = _tensors(expected), _tensors(actual)
    assert list(before) == list(after)
    for name in before:
        assert torch.equal(before[name], after[name]), name


def _own(target: str) -> SplitModel:
    return split_model(
        ModelConfig(kind="python", target=target),
        seed=_SEED,
        vocabulary_size=0,
        sequence_length=0,
    )


@pytest.mark.parametrize("name", ["_layers", "_sequential"])
def test_layers_of_the_user_start_as_in_plain_torch(own_module: str, name: str) -> None:
    """The same seed, the same function: the values and names of the user's own nn.Sequential."""
    split = _own(f"{own_module}:{name}")
    layers = [split.materialise(layer) for layer in range(split.num_layers)]
    torch.manual_seed(_SEED)
    whole = _sequential()
    inputs = torch.randn(5, 4)

    assert split.layer_names == ("0.Linear", "1.Sequential", "2.Linear")
    assert split.objective == "supervised"
    merged = {name: p for layer in layers for name, p in layer.named_parameters()}
    assert list(merged) == [name for name, _ in whole.named_parameters()]
    for parameter_name, parameter in whole.named_parameters():
        assert torch.equal(parameter, merged[parameter_name])
    assert torch.equal(whole(inputs), nn.Sequential(*layers)(inputs))
    for layer, module in enumerate(layers):
        shapes = {name: p.shape for name, p in module.named_parameters()}
        assert shapes == split.parameter_shapes(layer)
        _assert_same_bits(module, split.structure(layer))


def test_functions_of_layers_are_called_for_the_layer_that_is_wanted(
    own_module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer has the same bits without the others, and its shapes need no memory."""
    devices: list[str] = []

    def noticed() -> nn.Module:
        module = nn.Linear(4, 8)
        devices.append(module.weight.device.type)
        return module

    monkeypatch.setattr(sys.modules[__name__], "_factories", lambda: [noticed, nn.ReLU, noticed])
    split = _own(f"{own_module}:_factories")
    one, other = split.materialise(2), split.materialise(2)

    assert devices == ["meta", "meta", "cpu", "cpu"]
    _assert_same_bits(one, other)
    assert split.parameter_shapes(2) == {
        "2.weight": torch.Size([8, 4]),
        "2.bias": torch.Size([8]),
    }
    first = split.materialise(0).get_parameter("0.weight")
    assert not torch.equal(first, one.get_parameter("2.weight"))


@pytest.mark.skipif(torch.accelerator.is_available(), reason="here a GPU's seed is set at once")
def test_without_an_accelerator_a_seed_takes_no_stack(
    own_module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch took three, for devices that never came; that took longer than to draw the layer."""
    monkeypatch.setattr(sys.modules[__name__], "_factories", lambda: [nn.ReLU, nn.ReLU])
    split = _own(f"{own_module}:_factories")
    monkeypatch.setattr("traceback.format_stack", pytest.fail)

    split.materialise(1)


def test_a_loss_beside_the_layers_is_the_loss(own_module: str) -> None:
    """Without one, class numbers have cross entropy and other targets are refused."""
    output, targets = torch.ones(2, 3), torch.zeros(2, 3)

    assert _own(f"{own_module}:_with_loss").loss_sum(output, targets).item() == 6.0
    plain = _own(f"{own_module}:_layers")
    assert plain.loss_sum(output, torch.tensor([1, -100])).item() == pytest.approx(1.0986123)
    with pytest.raises(ConfigError, match=r"\(layers, loss_function\)"):
        plain.loss_sum(output, targets)


def _with_own_loss() -> Any:
    return _layers(), nn.functional.cross_entropy


def _raising_loss(*_: Tensor) -> Tensor:
    raise ValueError("the user's own words")


def _with_raising_loss() -> Any:
    return _layers(), _raising_loss


def test_a_loss_that_fails_is_told_with_the_shapes_that_it_got(own_module: str) -> None:
    """torch says "Expected input batch_size (2) to match target batch_size (6)"."""
    split = _own(f"{own_module}:_with_own_loss")
    output, targets = torch.ones(2, 3), torch.zeros(6, dtype=torch.int64)

    words = r"loss_function\(float32 \[2, 3\], int64 \[6\]\)'.*batch_size.*the last layer's output"
    with pytest.raises(ConfigError, match=words):
        split.loss_sum(output, targets)
    assert split.loss_sum(output, targets[:2]).item() == pytest.approx(1.0986123)
    with pytest.raises(ValueError, match="the user's own words"):
        _own(f"{own_module}:_with_raising_loss").loss_sum(output, targets)


def test_a_parameter_shared_by_layers_is_a_leaf_in_each(own_module: str) -> None:
    """Its uses are one group, whose leaves start equal and get gradients of their own."""
    split = _own(f"{own_module}:_tied")
    first, last = split.materialise(0), split.materialise(2)

    (group,) = split.tied
    assert group.uses == (TiedUse(0, "0.weight"), TiedUse(2, "2.weight"))
    assert torch.equal(first.get_parameter("0.weight"), last.get_parameter("2.weight"))
    torch.autograd.backward(last(torch.ones(1, 4)).sum())
    assert first.get_parameter("0.weight").grad is None


def _normed() -> nn.Module:
    return nn.utils.weight_norm(nn.Linear(4, 4))


def _norms() -> list[Any]:
    return [_normed(), nn.Tanh(), _normed]


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("layer", [0, 2])
def test_a_layer_may_norm_its_weights(own_module: str, layer: int) -> None:
    """Torch does not copy the weight, which a hook computes anew before each forward."""
    module = _own(f"{own_module}:_norms").materialise(layer).get_submodule(str(layer))
    plain = _normed()
    plain.load_state_dict(module.state_dict())

    for _ in range(2):
        outputs = [each(torch.arange(4.0)) for each in (module, plain)]
        assert torch.equal(*outputs)
        for each, output in zip((module, plain), outputs, strict=True):
            torch.autograd.backward(output.square().sum())
            torch.optim.SGD(each.parameters(), 0.1).step()
    _assert_same_bits(plain, module)


class _Stale(nn.Linear):
    """Has computed from its weight what it uses later."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.doubled = 2 * self.weight


def _stale() -> list[Any]:
    return [nn.Tanh(), _Stale]


def test_a_parameter_shared_by_functions_of_layers_is_a_leaf_in_each(own_module: str) -> None:
    """A rank that holds both layers stepped it twice. And a module that a function keeps stays as
    it is, for a job that goes back to its start."""
    split = _own(f"{own_module}:_tied_factories")
    first, last = split.materialise(0), split.materialise(2)
    weight = first.get_parameter("0.weight")

    assert weight is not last.get_parameter("2.weight")
    assert torch.equal(weight, last.get_parameter("2.weight"))
    before = weight.detach().clone()
    weight.data.add_(1.0)
    assert torch.equal(split.materialise(0).get_parameter("0.weight"), before)


@pytest.mark.parametrize("name", ["_drawn", "_drawn_factories"])
def test_what_numpy_and_python_draw_for_a_layer_is_the_same_in_all_processes(
    name: str, own_module: str
) -> None:
    """However many layers a process has built before. Nobody compares buffers, so two pipelines
    trained one layer with two."""
    split = _own(f"{own_module}:{name}")
    before = str(np.random.get_state()), random.getstate()
    alone = split.materialise(1)
    split.materialise(0)

    _assert_same_bits(alone, split.materialise(1))
    assert before == (str(np.random.get_state()), random.getstate())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("_running", "GroupNorm"),
        ("_misspelt", "no parameter or buffer 'weigh'"),
        ("_one_text", "a list of names"),
        ("_half", "float32"),
        ("_stale", "doubled"),
        ("_number", "nn.Sequential"),
        ("_number_inside", "nn.Sequential"),
        ("_missing", "no function '_missing'"),
        ("_layer", "did you mean _layers?"),
    ],
)
def test_what_a_users_function_must_not_return_is_refused(
    own_module: str, name: str, words: str
) -> None:
    """The remedy says what to return, or which norm to use, in place of what was given."""
    with pytest.raises(ConfigError) as caught:
        _own(f"{own_module}:{name}")

    assert words in caught.value.remedy


def test_what_a_users_layer_names_stays_in_float32_in_a_bfloat16_job(own_module: str) -> None:
    """Of a part of a layer, too. Angles of RoPE were off by 0.4 rad within 4096 positions."""
    training = TrainingConfig(learning_rate=0.1, seed=_SEED, dtype="bfloat16")
    stage = RankStage(_own(f"{own_module}:_rotary"), training=training)
    stage.hold([0, 1], states={}, age=0)
    held = stage.layers[0]
    kept, rounded = torch.float32, torch.bfloat16

    assert {
        name.removeprefix("0."): tensor.dtype for name, tensor in _tensors(held.module).items()
    } == {
        **dict.fromkeys(("0.weight", "0.bias", "1.scale"), rounded),
        **dict.fromkeys(("1.mixed.weight", "1.mixed.bias", "1.inv_freq"), kept),
        "1.number": torch.int64,
    }
    assert torch.equal(held.module.get_buffer("0.1.inv_freq"), _Rotary().inv_freq)
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(1)).to(rounded)
    output = stage.forward(0, 2, x, iteration=0, microbatch=0)
    torch.autograd.backward(output.float().square().sum())
    held.gradients.copy_(held.sums)
    held.gradients_of = 0
    held.apply(0, learning_rate=0.1, scale=1.0)
    moved = stage.empty_layer(0)
    moved.load(held.state_views(), age=1)
    _assert_same_bits(held.module, moved.module)


def test_a_layers_own_way_into_train_mode_is_taken(own_module: str) -> None:
    """A backbone stays in eval mode by it, and is built in train mode."""
    model = _own(f"{own_module}:_own_train")
    flags = [[m.training for m in model.materialise(n).children()] for n in range(2)]
    own = model.materialise(0).get_submodule("0").children()

    assert flags == [[True], [True]]
    assert [part.training for part in own] == [False, True]


def test_layers_in_eval_stay_so_and_those_with_parameters_to_train_are_told() -> None:
    """The recipe of a frozen backbone: its dropout was on all the same."""
    model = _own("helpers.user_models:frozen_in_eval")
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(1))

    for layer, is_repeated in ((1, True), (2, True), (3, False)):
        module = model.materialise(layer)
        assert torch.equal(module(x), module(x)) is is_repeated
    (note,) = model.notes
    assert note.startswith(
        "layers that are trained are in eval mode, in which dropout does nothing"
    )
    assert "(2._Residual)" in note


@pytest.mark.parametrize("target", ["", "nothing_like_it", "nothing_like_it:layers"])
def test_a_target_that_cannot_be_imported_is_refused(target: str) -> None:
    """The field that is at fault is model.target."""
    with pytest.raises(ConfigError) as caught:
        _own(target)

    assert caught.value.field == "model.target"


def test_errors_of_the_users_function_pass_unchanged(own_module: str) -> None:
    """Their traceback is what the user needs, not ours."""
    with pytest.raises(RuntimeError, match="the user's own words"):
        _own(f"{own_module}:_failing")


def test_outputs_cross_as_one_contiguous_tensor() -> None:
    """Strides would change the bits of the next layer's products."""
    transposed = torch.arange(6.0).reshape(2, 3).t()

    assert boundary(transposed, "1.Linear").is_contiguous()
    assert torch.equal(transposed, boundary(transposed, "1.Linear"))
    assert boundary((transposed, transposed), "1.LSTM").is_contiguous()
    assert boundary(torch.arange(3), "0.Ids").is_floating_point()  # Else nothing would flow back.
    with pytest.raises(ConfigError, match=r"layer 1.Odd\) = 'object': a layer must return"):
        boundary(object(), "1.Odd")


def test_a_buffer_that_a_forward_changes_is_refused() -> None:
    """What counts batches in some other way than BatchNorm has its trouble too."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.total = nn.Buffer(torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.total.add_(x.detach().mean())
            return x

    module = Counting()
    before = layer_values(module, has_trained=False)
    refuse_changes("0.Counting", before, module)
    module(torch.ones(3))
    with pytest.raises(ConfigError, match="GroupNorm"):
        refuse_changes("0.Counting", before, module)


def test_a_parameter_that_a_forward_changes_is_refused() -> None:
    """Two holders made two of it, and the job ended, naming sound nodes as corrupt; one holder that
    got it back after a loss set it anew."""

    class FromData(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias, self.is_set = nn.Parameter(torch.zeros(3)), False

        def forward(self, x: Tensor) -> Tensor:
            if not self.is_set:
                self.bias.data.copy_(-x.detach())
                self.is_set = True
            return x + self.bias

    module = FromData()
    before = layer_values(module, has_trained=True)
    refuse_changes("0.FromData", before, module)
    module(torch.ones(3))
    with pytest.raises(ConfigError, match="its forward changes its parameter bias"):
        refuse_changes("0.FromData", before, module)


def test_tensors_that_a_forward_keeps_are_found() -> None:
    """An auxiliary loss in an attribute is lost; a norm of weights computes them anew in a hook."""

    def scale(part: nn.Module, _: object) -> None:
        part.scaled = part.get_parameter("weight") * 2.0

    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(3, 2)
            self.aux = torch.zeros(())
            self.seen: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            self.aux = self.gate(x).square().mean()
            self.seen.append(self.gate(x))
            return x

    module = nn.Sequential(nn.Linear(3, 3), Router())
    module[0].register_forward_pre_hook(scale)
    assert kept_tensors(module) == []

    module(torch.ones(1, 3))

    assert kept_tensors(module) == ["1.aux", "1.seen"]


class _Rates(nn.Linear):
    """Takes numbers out of a tensor, as for dropout that grows with the depth."""

    def __init__(self) -> None:
        super().__init__(4, 8)
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]


def _rated() -> list[Any]:
    return [_Rates, _Rates]


def _rated_wrongly() -> list[Any]:
    return [_Rates, _failing]


def test_a_layers_function_may_need_values(own_module: str) -> None:
    """There are none on the meta device. What is wrong there is raised as it is."""
    model = _own(f"{own_module}:_rated")

    assert model.parameter_shapes(1)["1.weight"] == torch.Size([8, 4])
    assert vars(model.materialise(1).get_submodule("1"))["rates"][-1] == pytest.approx(0.1)
    with pytest.raises(RuntimeError, match="the user's own words") as caught:
        _own(f"{own_module}:_rated_wrongly")
    assert caught.value.__context__ is None


_WEIGHTS = dict(nn.Linear(8, 3).state_dict())  # As from a file, without metadata of torch.


def _start(assign: bool) -> nn.Module:
    layer = nn.Linear(8, 3)
    layer.load_state_dict(_WEIGHTS, assign=assign)
    return layer.requires_grad_(False)


def _loaded() -> list[Any]:
    return [partial(nn.Linear, 4, 8), partial(_start, assign=True), partial(_start, assign=False)]


def _noisy() -> nn.Module:
    warnings.warn("mine", UserWarning, stacklevel=1)
    return nn.Linear(8, 3)


def _warning() -> list[Any]:
    return [partial(nn.Linear, 4, 8), _noisy]


def test_a_layers_function_may_load_its_weights_in_silence(own_module: str) -> None:
    """On the meta device torch would warn of each parameter. Other warnings are shown."""
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        model = _own(f"{own_module}:_loaded")
        _own(f"{own_module}:_warning")

    assert [str(each.message) for each in shown] == ["mine"]
    assert [sorted(model.parameter_shapes(layer)) for layer in (1, 2)] == [[], []]
    for layer in (1, 2):
        built = dict(model.materialise(layer).named_parameters())
        assert torch.equal(built[f"{layer}.weight"], _WEIGHTS["weight"])
