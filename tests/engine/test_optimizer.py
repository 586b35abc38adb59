"""Optimizers by name, their state as named tensors, and the learning rate."""

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from planaria.core.job import ModelConfig, TrainingConfig
from planaria.engine.optimizer import (
    can_fuse,
    learning_rate,
    load_optimizer_state,
    optimizer_factory,
    optimizer_state,
    parts_to_step,
)
from planaria.engine.prepare import split_model
from planaria.engine.stage import RankStage
from planaria.errors import CheckpointError, ConfigError

torch.set_num_threads(1)

REFUSED = {"Optimizer", "LBFGS", "SparseAdam"}
ACCEPTED = sorted(
    name
    for name, value in vars(torch.optim).items()
    if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and name not in REFUSED
)
SETTINGS: list[dict[str, Any]] = [
    *({"name": name} for name in ACCEPTED),
    {"name": "SGD", "momentum": 0.9, "nesterov": True},
    {"name": "Adam", "amsgrad": True, "betas": [0.8, 0.99]},
    {"name": "RMSprop", "momentum": 0.9, "centered": True},
    {"name": "Adagrad", "initial_accumulator_value": 0.5},
]


def training(optimizer: dict[str, Any], **keys: Any) -> TrainingConfig:
    return TrainingConfig(optimizer=optimizer, learning_rate=0.01, **keys)


def layer(name: str, *, dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    """Parameters of a layer; Muon takes matrices only."""
    generator = torch.Generator().manual_seed(3)
    shapes = {"weight": (4, 3), "head.weight": (2, 4)}
    if name.lower() != "muon":
        shapes["bias"] = (4,)  # type: ignore[assignment]
    return {
        key: nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for key, shape in shapes.items()
    }


def step(optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters.values():
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = gradient.to(parameter.dtype)
    optimizer.step()


def copied(parameters: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(value.detach().clone()) for name, value in parameters.items()}


def put(source: dict[str, nn.Parameter], target: dict[str, nn.Parameter]) -> None:
    with torch.no_grad():
        for name, value in source.items():
            target[name].copy_(value)


def assert_same_bits(expected: dict[str, Any], actual: dict[str, Any]) -> None:
    assert expected.keys() == actual.keys()
    for name, value in expected.items():
        assert value.dtype == actual[name].dtype, name
        assert torch.equal(value, actual[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("settings_", SETTINGS, ids=str)
def test_training_goes_on_with_the_same_bits(settings_: dict[str, Any], dtype: torch.dtype) -> None:
    """Three steps, the state moved to new parameters through named tensors, three more."""
    factory = optimizer_factory(training(settings_))
    stayed = layer(settings_["name"], dtype=dtype)
    optimizer = factory(stayed.items())
    for seed in range(3):
        step(optimizer, stayed, seed)
    named = optimizer_state(optimizer, stayed, num_steps=3)
    state = {key: value.clone() for key, value in named.items()}
    moved = copied(stayed)
    restored = factory(moved.items())
    step(restored, moved, 99)  # What it holds before must not shine through.
    put(stayed, moved)

    num_steps = load_optimizer_state(restored, moved, state)

    assert num_steps == (3 if any(key.endswith("/step") for key in state) else 0)
    assert_same_bits(state, optimizer_state(restored, moved, num_steps=3))
    for parameter, twin in zip(stayed.values(), moved.values(), strict=True):
        assert_same_bits(dict(optimizer.state[parameter]), dict(restored.state[twin]))
    for seed in range(3, 6):
        step(optimizer, stayed, seed)
        step(restored, moved, seed)
    assert_same_bits(dict(stayed), dict(moved))
    states = [
        optimizer_state(each, parameters, num_steps=6)
        for each, parameters in ((optimizer, stayed), (restored, moved))
    ]
    assert_same_bits(*states)


@pytest.mark.parametrize("name", ACCEPTED)
def test_every_optimizer_moves_its_parameters(name: str) -> None:
    """An accepted class that did nothing would pass every comparison."""
    parameters = layer(name)
    before = copied(parameters)

    step(optimizer_factory(training({"name": name}))(parameters.items()), parameters, 0)

    assert all(not torch.equal(before[key], parameters[key]) for key in parameters)


def test_state_has_the_names_that_files_hold() -> None:
    """Names and element types are on disk and on the wire: they must not drift."""
    parameters = layer("AdamW")
    optimizer = optimizer_factory(training({"name": "AdamW"}))(parameters.items())
    for seed in range(2):
        step(optimizer, parameters, seed)

    state = optimizer_state(optimizer, parameters, num_steps=2)

    names = ("exp_avg", "exp_avg_sq", "step")
    assert sorted(state) == sorted(f"{p}/{name}" for p in parameters for name in names)
    assert state["bias/exp_avg"].shape == parameters["bias"].shape
    assert state["head.weight/step"].dtype == torch.int64
    assert state["head.weight/step"].item() == 2
    assert state["head.weight/step"].shape == ()


@pytest.mark.parametrize("name", ACCEPTED)
def test_state_is_empty_before_the_first_step_and_loads_so(name: str) -> None:
    """Going back to the seed: an optimizer that has stepped is as new again, Adagrad too."""
    factory = optimizer_factory(training({"name": name}))
    parameters = layer(name)
    optimizer = factory(parameters.items())
    assert optimizer_state(optimizer, parameters, num_steps=0) == {}
    start = copied(parameters)
    step(optimizer, parameters, 0)
    first = copied(parameters)

    load_optimizer_state(optimizer, parameters, {})
    put(start, parameters)

    assert optimizer_state(optimizer, parameters, num_steps=0) == {}
    new = factory(parameters.items())
    for parameter in parameters.values():
        assert_same_bits(dict(new.state.get(parameter, {})), dict(optimizer.state[parameter]))
    step(optimizer, parameters, 0)
    assert_same_bits(dict(first), dict(parameters))


def test_state_of_another_layer_is_refused() -> None:
    """A checkpoint of a model with other names must not be half loaded."""
    parameters = layer("AdamW")
    optimizer = optimizer_factory(training({"name": "AdamW"}))(parameters.items())

    with pytest.raises(
        CheckpointError, match=r"'other/exp_avg' fits none of the parameters.*weight"
    ):
        load_optimizer_state(optimizer, parameters, {"other/exp_avg": torch.zeros(4)})


def test_loaded_state_is_a_copy() -> None:
    """The tensors may lie in a buffer that the next message overwrites."""
    parameters = layer("SGD")
    optimizer = optimizer_factory(training({"name": "SGD", "momentum": 0.9}))(parameters.items())
    state = {"weight/momentum_buffer": torch.ones(4, 3)}
    load_optimizer_state(optimizer, parameters, state)

    state["weight/momentum_buffer"].zero_()

    held: Tensor = optimizer.state[parameters["weight"]]["momentum_buffer"]
    assert held.eq(1).all()


def test_loaded_state_of_a_parameter_that_is_a_number_lies_on_its_device() -> None:
    """A kernel that steps it has no way to the host; steps themselves are counted there."""
    factory = optimizer_factory(training({"name": "AdamW"}))
    numbers = {"temperature": nn.Parameter(torch.tensor(0.5))}
    optimizer = factory(numbers.items())
    step(optimizer, numbers, 0)
    state = optimizer_state(optimizer, numbers, num_steps=1)

    elsewhere = {"temperature": nn.Parameter(torch.empty((), device="meta"))}
    loaded = factory(elsewhere.items())
    load_optimizer_state(loaded, elsewhere, state)

    held = loaded.state[elsewhere["temperature"]]
    places = {key: value.device.type for key, value in held.items()}
    assert places == {"step": "cpu", "exp_avg": "meta", "exp_avg_sq": "meta"}


def test_matrices_alone_decay_if_the_job_says_so() -> None:
    """nanoGPT, and transformers much the same, leave gains and biases alone. Names stay."""
    adamw = {"name": "AdamW", "weight_decay": 0.5}
    states = []
    for decay in ("all", "matrices"):
        parameters = layer("AdamW")
        optimizer = optimizer_factory(training(adamw, decay=decay))(parameters.items())
        before = copied(parameters)
        for parameter in parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()

        still = {name for name in parameters if torch.equal(before[name], parameters[name])}
        assert still == ({"bias"} if decay == "matrices" else set())
        states.append(optimizer_state(optimizer, parameters, num_steps=1))
    assert_same_bits(*states)


@pytest.mark.parametrize("shape", [(3,), (3, 2)])
def test_a_layer_of_one_kind_has_one_group(shape: tuple[int, ...]) -> None:
    """A group without parameters would be stepped for nothing, and some classes refuse it."""
    factory = optimizer_factory(training({"name": "AdamW"}, decay="matrices"))

    (group,) = factory([("only", nn.Parameter(torch.zeros(shape)))]).param_groups
    assert group["weight_decay"] == (0.01 if len(shape) == 2 else 0.0)


def test_a_class_that_knows_no_weight_decay_has_none_for_matrices() -> None:
    """The job would seem to decay them."""
    with pytest.raises(ConfigError, match="Rprop has no weight_decay") as caught:
        optimizer_factory(training({"name": "Rprop"}, decay="matrices"))

    assert caught.value.field == "training.decay"


def test_one_implementation_is_pinned_and_names_ignore_case() -> None:
    """The foreach and fused kernels may round differently on another node."""
    parameters = layer("adamw")

    optimizer = optimizer_factory(training({"name": "adamw", "betas": [0.5, 0.6]}))(
        parameters.items()
    )

    group = optimizer.param_groups[0]
    assert type(optimizer) is torch.optim.AdamW
    assert (group["foreach"], group["fused"]) == (False, False)
    assert group["betas"] == (0.5, 0.6)
    assert group["lr"] == 0.01


def test_fast_mode_does_without_a_kernel_that_torch_refuses_on_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch 2.9 to 2.11 have one for Adagrad on processors, and say that there is none for CUDA
    when the first step is taken."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("`fused=True` requires all the params to be of supported devices: cpu")

    module = importlib.import_module("torch.optim.adagrad")
    monkeypatch.setattr(module, "_device_dtype_check_for_fused", refuse)
    can_fuse.cache_clear()
    parameters = layer("adagrad")
    factory = optimizer_factory(training({"name": "Adagrad"}, deterministic=False))
    optimizer = factory(parameters.items())
    step(optimizer, parameters, seed=1)
    can_fuse.cache_clear()

    assert not optimizer.param_groups[0]["fused"]


def test_fast_mode_steps_in_one_kernel_where_memory_has_one_layout() -> None:
    """A fused kernel would take the elements of a transposed parameter for those of others."""
    factory = optimizer_factory(training({"name": "AdamW"}, deterministic=False))
    plain, transposed = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(3, 2).T)

    assert factory([("weight", plain)]).param_groups[0]["fused"]
    assert not factory([("weight", transposed)]).param_groups[0]["fused"]


@pytest.mark.parametrize(
    ("settings_", "field", "message"),
    [
        ({"name": "AdmW"}, "training.optimizer.name", "did you mean Adam"),
        ({}, "training.optimizer.name", "the choices are ASGD"),
        ({"name": "LBFGS"}, "training.optimizer.name", "several times a step"),
        ({"name": "sparseadam"}, "training.optimizer.name", "sparse gradients"),
        ({"name": "Optimizer"}, "training.optimizer.name", "did you mean|the choices are"),
        ({"name": "AdamW", "beta": 1}, "training.optimizer.beta", "did you mean betas"),
        ({"name": "AdamW", "momentum": 1}, "training.optimizer.momentum", "no such argument"),
        ({"name": "AdamW", "lr": 1.0}, "training.optimizer.lr", r"training\.learning_rate"),
        ({"name": "AdamW", "fused": True}, "training.optimizer.fused", "leave it out"),
        ({"name": "AdamW", "foreach": False}, "training.optimizer.foreach", "leave it out"),
        ({"name": "Adam", "capturable": True}, "training.optimizer.capturable", "CUDA graphs"),
        ({"name": "SGD", "differentiable": True}, "training.optimizer.differentiable", "step"),
        ({"name": "AdamW", "betas": [2.0, 0.9]}, "training.optimizer", "Invalid beta"),
        ({"name": "AdamW", "eps": "small"}, "training.optimizer", "torch refuses it"),
        ({"name": "SGD", "nesterov": True}, "training.optimizer", "Nesterov"),
    ],
    ids=str,
)
def test_wrong_optimizers_are_refused_by_key(
    settings_: dict[str, Any], field: str, message: str
) -> None:
    """At start, with the key and the way out, not in a worker after an hour."""
    with pytest.raises(ConfigError, match=message) as caught:
        optimizer_factory(training(settings_))

    assert caught.value.field == field


def test_numbers_with_which_no_step_can_be_taken_are_refused() -> None:
    """They are no numbers of single precision; the profile's first step ended in a traceback."""
    beyond = replace(training({"name": "AdamW"}), learning_rate=1e300)
    with pytest.raises(ConfigError, match=r"learning rate 1e\+300: .*overflow"):
        optimizer_factory(beyond)


def test_parameters_that_a_class_refuses_are_the_users_mistake() -> None:
    """Muon orthogonalises matrices and has no rule for a bias."""
    factory = optimizer_factory(training({"name": "Muon"}))

    with pytest.raises(ConfigError, match="2D"):
        factory(layer("AdamW").items())


def test_learning_rates_are_the_published_curves() -> None:
    """Warmup in equal steps; a line and a half cosine that end after the last iteration."""
    warmup = {"warmup_iterations": 2, "final_fraction": 0.2}

    def curve(name: str, **schedule: Any) -> list[float]:
        config = TrainingConfig(
            iterations=6, learning_rate=1.0, schedule={"name": name, **schedule}
        )
        return [learning_rate(config, iteration) for iteration in range(8)]

    assert curve("constant") == [1.0] * 8
    assert curve("constant", **warmup) == [0.5] + [1.0] * 7
    assert curve("linear", **warmup) == pytest.approx([0.5, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2])
    cosine = [0.5, 1, 1, 0.2 + 0.8 * 0.8535534, 0.6, 0.2 + 0.8 * 0.1464466, 0.2, 0.2]
    assert curve("cosine", **warmup) == pytest.approx(cosine)


@settings(max_examples=60)
@given(
    name=st.sampled_from(["constant", "linear", "cosine"]),
    iterations=st.integers(1, 50),
    warmup=st.integers(0, 60),
    final=st.floats(0, 1),
)
def test_learning_rate_rises_then_never_rises_again(
    name: str, iterations: int, warmup: int, final: float
) -> None:
    """Also where the warmup is longer than training; never above the highest, never below 0."""
    schedule = {"name": name, "warmup_iterations": warmup, "final_fraction": final}
    config = TrainingConfig(iterations=iterations, learning_rate=0.25, schedule=schedule)

    rates = [learning_rate(config, iteration) for iteration in range(warmup + iterations + 5)]

    assert all(0 <= rate <= 0.25 for rate in rates)
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    assert rates[warmup] == 0.25


@pytest.mark.parametrize(
    ("schedule", "field", "message"),
    [
        ({"name": "cosin"}, "training.schedule.name", "did you mean cosine"),
        ({"warmup": 5}, "training.schedule.warmup", "did you mean warmup_iterations"),
        ({"warmup_iterations": -1}, "training.schedule.warmup_iterations", "0 or more"),
        ({"warmup_iterations": 0.5}, "training.schedule.warmup_iterations", "whole number"),
        ({"final_fraction": 1.5}, "training.schedule.final_fraction", "between 0 and 1"),
        ({"final_fraction": "x"}, "training.schedule.final_fraction", "between 0 and 1"),
    ],
    ids=str,
)
def test_wrong_schedules_are_refused_by_key(
    schedule: dict[str, Any], field: str, message: str
) -> None:
    """A misspelt key would silently train without a warmup."""
    with pytest.raises(ConfigError, match=message) as caught:
        learning_rate(TrainingConfig(schedule=schedule), 0)

    assert caught.value.field == field


def test_layers_that_a_copy_holds_back_hold_back_no_others() -> None:
    """In fast mode the others step together, and first."""
    fast = TrainingConfig(deterministic=False)

    assert parts_to_step(range(5), {0, 2, 4}.__contains__, fast) == [[0, 2, 4], [1], [3]]
    assert parts_to_step([3], lambda _: False, fast) == [[3]]
    assert parts_to_step(range(2), lambda _: True, TrainingConfig()) == [[0], [1]]


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_step_is_that_of_plain_torch_with_the_groups_of_nanogpt(deterministic: bool) -> None:
    """Three iterations, with a layer loaded in between and one dropped."""
    adamw = {"name": "AdamW", "weight_decay": 0.3}
    training = TrainingConfig(
        learning_rate=0.1, seed=3, deterministic=deterministic, optimizer=adamw, decay="matrices"
    )
    model = ModelConfig(kind="python", target="helpers.user_models:factories")
    split = split_model(model, seed=0, vocabulary_size=0, sequence_length=0)
    stage = RankStage(split, training=training)
    stage.hold(range(3), states={}, age=0)
    plain = {
        (layer, name): nn.Parameter(parameter.detach().clone())
        for layer, held in stage.layers.items()
        for name, parameter in held.masters.items()
    }
    groups = [
        {"params": [p for p in plain.values() if p.dim() >= 2], "weight_decay": 0.3},
        {"params": [p for p in plain.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    assert all(group["params"] for group in groups)
    fused = {"fused": not deterministic, "foreach": False}
    optimizer = torch.optim.AdamW(groups, lr=0.1, **fused)  # type: ignore[arg-type]
    for iteration in range(3):
        if iteration == 2:
            state = stage.layers[1].state()
            stage.keep_only([0, 2])
            stage.hold([1], states={1: state}, age=2)
        generator = torch.Generator().manual_seed(iteration)
        for layer, held in stage.layers.items():
            held.clear()
            for name, master in held.masters.items():
                gradient = torch.randn(master.shape, generator=generator)
                held._gradient_views[name].copy_(gradient)
                plain[layer, name].grad = gradient
            held.gradients_of = iteration
        stage.apply(range(3), iteration, learning_rate=0.1, scale=1.0)
        optimizer.step()

    for (layer, name), parameter in plain.items():
        assert torch.equal(parameter, stage.layers[layer].masters[name]), (layer, name)
