"""A layer that a rank holds: its sums, its step, its age and its state."""

import weakref
from dataclasses import replace
from itertools import pairwise
from typing import Literal

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from planaria.core.job import ModelConfig, TrainingConfig
from planaria.engine import stage as stage_module
from planaria.engine.optimizer import joint_optimizers
from planaria.engine.prepare import split_model
from planaria.engine.stage import HeldLayer, RankStage
from planaria.errors import ConfigError
from planaria.protocol.worker_state import HeldOutLosses

Dtype = Literal["float32", "bfloat16"]

TRAINING = TrainingConfig(learning_rate=0.1, seed=3)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def _held(dtype: Dtype = "float32", tied: tuple[str, ...] = ()) -> HeldLayer:
    torch.manual_seed(0)
    training = replace(TRAINING, dtype=dtype)
    return HeldLayer(0, nn.Linear(3, 2), training=training, tied=tied)


def _microbatch(held: HeldLayer, seed: int) -> None:
    """One forward and backward, gradients added to sums."""
    _backward(held.module, seed)


def _backward(module: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 3, generator=generator).to(next(module.parameters()).dtype)
    module(x).float().square().sum().backward()


def _gradients(held: HeldLayer, seed: int) -> list[torch.Tensor]:
    """Of a microbatch, by plain torch."""
    plain = nn.Linear(3, 2)
    plain.load_state_dict(held.module.state_dict())
    _backward(plain, seed)
    return [parameter.grad for parameter in plain.parameters() if parameter.grad is not None]


def _iteration(held: HeldLayer, iteration: int) -> None:
    held.clear()
    for microbatch in range(3):
        _microbatch(held, 10 * iteration + microbatch)
    held.gradients.copy_(held.sums)
    for name, sums in held.tied_sums.items():
        held.tied_gradients[name].copy_(sums)
    held.gradients_of = iteration
    held.apply(iteration, learning_rate=0.1, scale=1.0)


def test_a_step_needs_the_reduced_gradients_of_its_own_iteration() -> None:
    """Those of an iteration before it, or half of its own, would move the layer elsewhere."""
    held = _held()
    before = held.state()
    _microbatch(held, 0)
    for gradients_of in (-1, 1):
        held.gradients_of = gradients_of
        with pytest.raises(AssertionError):
            held.apply(0, learning_rate=0.1, scale=1.0)

    assert held.age == 0
    assert all((before[name] == array).all() for name, array in held.state().items())


def test_gradients_that_are_cleared_are_complete_no_more() -> None:
    """A rank would otherwise say that it can apply what it has dropped."""
    held = _held()
    _iteration(held, 0)
    assert held.gradients_of == 0

    held.clear()
    assert held.gradients_of == -1


def test_sums_are_those_of_float64_and_leave_no_gradient_behind() -> None:
    """Each microbatch is added once, the float32 gradients summed in float64."""
    held = _held()
    expected = torch.zeros(8, dtype=torch.float64)
    for microbatch in range(5):
        _microbatch(held, microbatch)
        expected += torch.cat([one.flatten() for one in _gradients(held, microbatch)])

    assert torch.equal(held.sums, expected)
    assert all(parameter.grad is None for parameter in held.module.parameters())
    held.clear()
    assert not held.sums.any()


def test_what_a_backward_has_left_that_ran_out_of_memory_is_dropped() -> None:
    """The gradient of the iteration that is done again was added to it."""
    held = _held()
    for parameter in held.module.parameters():
        parameter.grad = torch.ones_like(parameter)

    held.clear()
    _microbatch(held, 0)

    expected = torch.cat([one.flatten() for one in _gradients(held, 0)])
    assert torch.equal(held.sums, expected.double())


def test_a_step_is_taken_once_for_each_age() -> None:
    """Told twice to apply an iteration, a rank applies it once."""
    held = _held()
    _iteration(held, 0)
    after = held.state()
    held.apply(0, learning_rate=0.1, scale=1.0)

    assert held.age == 1
    assert all((after[name] == array).all() for name, array in held.state().items())
    with pytest.raises(AssertionError):
        held.apply(5, learning_rate=0.1, scale=1.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_layer_that_loads_a_state_goes_on_as_its_source(dtype: Dtype) -> None:
    """Parameters, moments and step: with bfloat16 the float32 masters, not their roundings."""
    source, target = _held(dtype), _held(dtype)
    with torch.no_grad():
        for master in target.masters.values():
            master.zero_()
    _iteration(source, 0)
    _iteration(source, 1)
    target.load(source.state(), age=source.age)
    for held in (source, target):
        _iteration(held, 2)

    theirs = target.state()
    assert all((array == theirs[name]).all() for name, array in source.state().items())
    assert target.age == 3
    for one, other in zip(source.module.parameters(), target.module.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_state_is_a_copy() -> None:
    """A save is written while training goes on."""
    held = _held()
    state = held.state()
    before = {name: array.copy() for name, array in state.items()}
    _iteration(held, 0)

    assert all((before[name] == array).all() for name, array in state.items())


def test_tied_parameters_have_sums_of_their_own() -> None:
    """They are summed over other ranks than the rest of the layer."""
    held = _held(tied=("weight",))
    _microbatch(held, 0)
    weight, bias = (one.flatten().double() for one in _gradients(held, 0))

    assert torch.equal(held.sums, bias)
    assert torch.equal(held.tied_sums["weight"], weight)


def test_gradients_that_were_left_in_the_second_part_of_a_backward_are_added() -> None:
    """They come from nobody's backward (engine/iteration/split_backward.py)."""
    held = _held()
    left = _gradients(held, 0)
    for parameter, gradient in zip(held.module.parameters(), left, strict=True):
        parameter.grad = gradient
    held.accumulate()

    assert torch.equal(held.sums, torch.cat([one.flatten() for one in left]).double())
    assert all(parameter.grad is None for parameter in held.module.parameters())


def test_the_scale_clips_the_step() -> None:
    """SGD: the parameters move by learning rate x scale x gradient."""
    training = TrainingConfig(optimizer={"name": "SGD"})
    held = HeldLayer(0, nn.Linear(2, 1, bias=False), training=training, tied=())
    before = held.masters["weight"].detach().clone()
    held.gradients.fill_(2.0)
    held.gradients_of = 0
    held.apply(0, learning_rate=0.5, scale=0.25)

    assert torch.equal(held.masters["weight"], before - 0.25)


def test_layers_that_are_held_already_are_not_touched() -> None:
    """A survivor's layers stay the very objects they are; only missing ones are built."""
    model = ModelConfig(kind="python", target="helpers.user_models:factories")
    stage = RankStage(
        split_model(model, seed=0, vocabulary_size=0, sequence_length=0), training=TRAINING
    )
    stage.hold([2, 3], states={}, age=4)
    kept = stage.layers[3]
    stage.hold([3, 4], states={}, age=4)

    assert stage.layers[3] is kept
    assert stage.num_materialised == 3
    assert [held.age for held in stage.layers.values()] == [4, 4, 4]


def test_dropout_depends_on_iteration_microbatch_and_layer_alone() -> None:
    """The same triple draws the same, whatever was drawn before; any other draws differently."""
    model = ModelConfig(kind="python", target="helpers.user_models:sequential")
    stage = RankStage(
        split_model(model, seed=0, vocabulary_size=0, sequence_length=0), training=TRAINING
    )
    stage.hold([1, 2], states={}, age=0)
    x = torch.randn(2, 24, generator=torch.Generator().manual_seed(1))

    def output(layer: int, iteration: int, microbatch: int) -> torch.Tensor:
        return stage.forward(layer, layer + 1, x, iteration=iteration, microbatch=microbatch)

    first = output(1, 0, 0)
    others = [output(1, 0, 1), output(1, 1, 0)]
    assert torch.equal(first, output(1, 0, 0))
    assert not any(torch.equal(first, other) for other in others)


def _user_stage(target: str, training: TrainingConfig, *, num_layers: int = 10) -> RankStage:
    model = ModelConfig(kind="python", target=f"helpers.user_models:{target}")
    split = split_model(model, seed=0, vocabulary_size=0, sequence_length=0)
    stage = RankStage(split, training=training)
    stage.hold(range(num_layers), states={}, age=0)
    return stage


def _sums_of_hops(*ends: int) -> list[torch.Tensor]:
    """The gradient sums of a microbatch whose hops, up to these layers, are on different ranks."""
    stage, generator = _user_stage("mixing", TRAINING), torch.Generator().manual_seed(0)
    sources, outputs = [torch.randn(20, 8, generator=generator).requires_grad_()], []
    for first, end in pairwise((0, *ends)):
        output = stage.forward(first, end, sources[-1], iteration=0, microbatch=0)
        outputs.append(output)
        sources.append(output.detach().contiguous().requires_grad_())
    gradient = torch.randn(20, 5, generator=generator)
    for source, output in zip(reversed(sources[:-1]), reversed(outputs), strict=True):
        output.backward(gradient)  # type: ignore[no-untyped-call]
        assert source.grad is not None
        gradient = source.grad.contiguous()
    return [held.sums for held in stage.layers.values()]


@pytest.mark.parametrize("ends", [(3, 6, 10), tuple(range(1, 11))], ids=str)
def test_sums_do_not_depend_on_where_the_model_is_cut(ends: tuple[int, ...]) -> None:
    """A bias gets other bits from a gradient with the strides of a transposed one."""
    assert all(map(torch.equal, _sums_of_hops(10), _sums_of_hops(*ends)))


def test_an_output_has_the_strides_of_one_that_was_sent() -> None:
    """Also of a dimension with one entry, which torch takes for contiguous with any stride."""
    stage = _user_stage("mixing", TRAINING)
    stage.layers[0].module = nn.Identity()
    output = stage.forward(0, 1, torch.ones(20, 1, 8).transpose(0, 1), iteration=0, microbatch=0)

    assert output.stride() == (160, 8, 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_frozen_parameter_stays_as_it_is(dtype: Dtype) -> None:
    """Plain torch skips it; a step with gradient zero would still decay its weights."""
    module = nn.Linear(3, 2)
    module.bias.requires_grad_(False)
    training = replace(TRAINING, dtype=dtype, optimizer={"name": "AdamW", "weight_decay": 0.5})
    held = HeldLayer(0, module, training=training, tied=())
    bias, before = module.bias.detach().clone(), held.state()
    _iteration(held, 0)
    after = held.state()

    assert torch.equal(bias.to(module.bias.dtype), module.bias)
    assert not any("bias" in name for name in after)  # Every rank has it already.
    assert (before["parameter/weight"] != after["parameter/weight"]).any()
    assert {name for name in after if name.startswith("optimizer/")} == {
        f"optimizer/weight/{key}" for key in ("exp_avg", "exp_avg_sq", "step")
    }
    held.load(after, age=1)
    _iteration(held, 1)
    assert torch.equal(bias.to(module.bias.dtype), module.bias)


def test_a_layer_whose_parameters_are_all_frozen_only_grows_older() -> None:
    """It has no optimizer, and an empty state goes from rank to rank like any other."""
    held = HeldLayer(0, nn.Linear(3, 2).requires_grad_(False), training=TRAINING, tied=())
    held.gradients_of = 0
    held.apply(0, learning_rate=0.1, scale=1.0)
    state = held.state()
    other = HeldLayer(0, nn.Linear(3, 2).requires_grad_(False), training=TRAINING, tied=())
    other.load(state, age=held.age)

    assert other.age == 1
    assert state == {} == other.state()
    assert held.sums.numel() == 0


def test_a_save_of_other_trained_parameters_is_refused() -> None:
    """A frozen parameter has the value of the seed; silently it would lose what was trained."""
    held = HeldLayer(0, nn.Linear(3, 2), training=TRAINING, tied=())
    frozen = HeldLayer(0, nn.Linear(3, 2).requires_grad_(False), training=TRAINING, tied=())

    with pytest.raises(ConfigError, match="model = 'weight': it is frozen now"):
        frozen.load(held.state(), age=1)
    with pytest.raises(ConfigError, match="model = 'weight': the save does not have it"):
        held.load(frozen.state(), age=1)
    same = {f"parameter/{n}": p.detach().numpy() for n, p in frozen.parameters.items()}
    frozen.load(same, age=1)  # As saves of older releases have it.


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_a_save_of_a_parameter_that_the_model_lacks_is_refused(
    optimizer: str,
) -> None:
    """Its optimizer state has no place; each epoch would fail on it anew."""
    training = replace(TRAINING, optimizer={"name": optimizer})
    held = HeldLayer(0, nn.Linear(3, 2), training=training, tied=())
    other = HeldLayer(0, nn.Linear(3, 2, bias=False), training=training, tied=())
    _iteration(held, 0)

    with pytest.raises(ConfigError, match="model = 'bias': the save has it, and the model does no"):
        other.load(held.state(), age=1)


def test_a_save_of_parameters_of_another_shape_is_refused() -> None:
    """Numbers were spread over the rows that came, as arithmetic of arrays does."""
    held = _held()
    _iteration(held, 0)
    state = dict(held.state())
    state["parameter/weight"] = state["parameter/weight"][:1]
    with pytest.raises(ConfigError, match=r"'weight': its shape is \(2, 3\), and \(1, 3\) in"):
        held.load(state, age=1)


def test_norms_are_summed_in_float64() -> None:
    """1 + 1e-9 squared 1000 times: float32 sums would lose the small part."""
    held = HeldLayer(0, nn.Linear(1001, 1, bias=False), training=TRAINING, tied=())
    held.gradients.fill_(2.0**-13)
    held.gradients[0] = 1.0

    assert held.squared_norm(["weight"]) == 1.0 + 1000 * 2.0**-26
    assert held.squared_norm([]) == 0.0


@pytest.mark.parametrize(
    ("deterministic", "dtype"), [(True, torch.float64), (False, torch.float32)]
)
def test_only_deterministic_sums_cost_memory_beside_the_gradients(
    deterministic: bool, dtype: torch.dtype
) -> None:
    """Twice theirs; the sums of tied parameters follow. Planner and estimator count on it."""
    training = replace(TRAINING, deterministic=deterministic)
    held = HeldLayer(0, nn.Linear(3, 2), training=training, tied=("weight",))
    pairs = [
        (held.sums, held.gradients),
        (held.tied_sums["weight"], held.tied_gradients["weight"]),
    ]

    for sums, gradients in pairs:
        assert sums.dtype == dtype
        assert gradients.dtype == torch.float32
        assert (sums.data_ptr() == gradients.data_ptr()) is not deterministic


@pytest.mark.parametrize("tied", [(), ("weight",)], ids=["own", "tied"])
def test_the_step_is_that_of_plain_torch(tied: tuple[str, ...]) -> None:
    """AdamW on the same gradients, clipped by the same scale, three times."""
    held = _held(tied=tied)
    plain = nn.Linear(3, 2)
    plain.load_state_dict(held.module.state_dict())
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1, foreach=False)
    for iteration in range(3):
        held.clear()
        for theirs, gradient in zip(plain.parameters(), _gradients(held, iteration), strict=True):
            theirs.grad = gradient * 0.5
        _microbatch(held, iteration)
        held.gradients.copy_(held.sums)
        for name, sums in held.tied_sums.items():
            held.tied_gradients[name].copy_(sums)
        held.gradients_of = iteration
        held.apply(iteration, learning_rate=0.1, scale=0.5)
        optimizer.step()

    for mine, theirs in zip(held.module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_missing_layer_takes_the_state_that_it_is_given() -> None:
    """The others start from the seed; all have the age of the state."""
    model = ModelConfig(kind="python", target="helpers.user_models:factories")
    split = split_model(model, seed=0, vocabulary_size=0, sequence_length=0)
    source, target = RankStage(split, training=TRAINING), RankStage(split, training=TRAINING)
    source.hold([2], states={}, age=0)
    given = {name: array + 1 for name, array in source.layers[2].state().items()}
    target.hold([2, 3], states={2: given}, age=5)

    loaded = target.layers[2].state()
    assert all((array == loaded[name]).all() for name, array in given.items())
    assert [held.age for held in target.layers.values()] == [5, 5]


def test_losses_of_held_out_data_travel_with_the_last_layer() -> None:
    """The newest one counts only with the step after it, so that all states of an age are alike."""
    held, other = _held(), _held()
    held.held_out, other.held_out = (HeldOutLosses(1, held_out_id=7) for _ in range(2))
    for age, loss in enumerate([2.0, 3.0]):
        held.held_out.note(loss, age=age)
        before = held.state()["held_out/losses"].tolist()
        _iteration(held, age)
        assert held.state()["held_out/losses"].tolist() != before

    other.held_out.note(1.0, age=2)  # As of a layer that arrives while training goes on.
    other.load(held.state(), age=2)
    assert other.held_out.counted == (2.0, 1)
    assert not other.held_out.are_worse(2)
    assert other.held_out.are_worse(3)


@pytest.mark.parametrize(("held_out_id", "ends"), [(7, True), (8, False)])
def test_losses_of_other_held_out_data_do_not_end_training(held_out_id: int, ends: bool) -> None:
    """A job that was resumed with harder ones ended, although their loss fell."""
    saved, held = _held(), _held()
    saved.held_out = HeldOutLosses(3, held_out_id=7)
    held.held_out = HeldOutLosses(3, held_out_id=held_out_id)
    saved.held_out.counted = 1.0, 2
    held.load(saved.state(), age=4)
    held.held_out.note(2.0, age=4)

    assert held.held_out.are_worse(4) == ends
    older = {**saved.state(), "held_out/losses": np.array([1.0, 2.0])}
    held.load(older, age=4)
    assert held.held_out.are_worse(4)  # Older saves do not say of which data the losses are.


def test_only_the_last_layer_has_losses_and_only_if_they_may_end_training() -> None:
    """A state from before the job was evaluated has none."""
    model = ModelConfig(kind="python", target="helpers.user_models:factories")
    split = split_model(model, seed=0, vocabulary_size=0, sequence_length=0)
    plain, stage = (
        RankStage(split, training=TRAINING),
        RankStage(split, training=TRAINING, patience=1),
    )
    plain.hold(range(split.num_layers), states={}, age=0)
    states = {layer: held.state() for layer, held in plain.layers.items()}
    stage.hold(range(split.num_layers), states=states, age=4)
    for age, loss in [(4, 1.0), (4, None)]:
        stage.note_held_out(loss, age=age)

    names = {layer: set(held.state()) for layer, held in stage.layers.items()}
    assert [n for n, found in names.items() if "held_out/losses" in found] == [max(names)]
    assert stage.ends_early(4)
    assert not stage.ends_early(5)
    assert not plain.ends_early(4)


def test_a_rank_finds_its_uses_of_a_tied_parameter() -> None:
    """In layer order, and only those that it holds."""
    config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 1, "n_positions": 8}
    model = ModelConfig(config=config)
    split = split_model(model, seed=0, vocabulary_size=11, sequence_length=8)
    (group,) = split.tied
    stage = RankStage(split, training=TRAINING)
    stage.hold([3], states={}, age=0)
    assert [held.layer for held, _ in stage.tied_uses(group)] == [3]

    stage.hold([0, 1], states={}, age=0)
    uses = stage.tied_uses(group)
    assert [held.layer for held, _ in uses] == [0, 3]
    for held, name in uses:
        assert name in held.tied_sums
        assert torch.equal(held.masters[name], uses[0][0].masters[uses[0][1]])


FAST = replace(TRAINING, deterministic=False)


def _fast_stage(num_layers: int) -> RankStage:
    return _user_stage("factories", FAST, num_layers=num_layers)


def _give_gradients(stage: RankStage, iteration: int) -> None:
    generator = torch.Generator().manual_seed(iteration)
    for held in stage.layers.values():
        held.clear()
        held.sums.copy_(torch.randn(held.sums.shape, generator=generator))
        held.gradients_of = iteration


def test_in_fast_mode_autograd_adds_to_the_sums_itself() -> None:
    """Also after a step, and what a delayed weight backward adds."""
    held = HeldLayer(0, nn.Linear(3, 2), training=FAST, tied=())
    _iteration(held, 0)
    held.clear()
    assert not held.sums.any()
    expected = torch.zeros(8)
    for microbatch in range(3):
        _microbatch(held, microbatch)
        expected += torch.cat([one.flatten() for one in _gradients(held, microbatch)])
    held.accumulate()

    assert torch.equal(held.sums, expected)
    for parameter in held.module.parameters():
        assert parameter.grad is not None
        assert parameter.grad.untyped_storage().data_ptr() == held.sums.data_ptr()


def test_layers_that_step_together_get_the_bits_that_each_would_get_alone() -> None:
    """Holders of a layer hold it with different others, and step it with them or alone."""
    together, alone = _fast_stage(3), _fast_stage(3)
    for iteration in range(3):
        _give_gradients(together, iteration)
        _give_gradients(alone, iteration)
        parts = [(0, 1, 2), (0, 2), (0, 1, 2)][iteration]
        together.apply(parts, iteration, learning_rate=0.1, scale=0.5)
        for layer in set(range(3)) - set(parts):
            together.apply([layer], iteration, learning_rate=0.1, scale=0.5)
        for held in alone.layers.values():
            held.apply(iteration, learning_rate=0.1, scale=0.5)

    for layer, held in alone.layers.items():
        assert together.layers[layer].age == 3
        state = together.layers[layer].state()
        assert all((array == state[name]).all() for name, array in held.state().items())


def test_a_state_that_is_loaded_is_the_one_that_steps() -> None:
    """Loading replaces the tensors of a layer that stepped with others before."""
    stage, other = _fast_stage(2), _fast_stage(2)
    for iteration in range(2):
        _give_gradients(other, iteration)
        other.apply([0, 1], iteration, learning_rate=0.1, scale=1.0)
    _give_gradients(stage, 0)
    stage.apply([0, 1], 0, learning_rate=0.1, scale=1.0)
    for layer, held in stage.layers.items():
        held.load(other.layers[layer].state(), age=2)
    for each in (stage, other):
        _give_gradients(each, 2)
        each.apply([0, 1], 2, learning_rate=0.1, scale=1.0)

    for layer, held in other.layers.items():
        state = stage.layers[layer].state()
        assert all((array == state[name]).all() for name, array in held.state().items())


def test_a_layer_that_stepped_with_others_is_freed_when_it_is_dropped() -> None:
    stage = _fast_stage(2)
    _give_gradients(stage, 0)
    stage.apply([0, 1], 0, learning_rate=0.1, scale=1.0)
    dropped = weakref.ref(next(iter(stage.layers[1].masters.values())))
    stage.keep_only([0])

    assert dropped() is None


def test_norms_of_fast_mode_are_those_of_float64_but_for_rounding() -> None:
    """Of more elements than float32 could count one by one."""
    held = HeldLayer(0, nn.Linear(5000, 1000), training=FAST, tied=("bias",))
    held.gradients.fill_(1.0)
    held.gradients[3] = 100.0
    held.tied_gradients["bias"].fill_(2.0)

    assert held.squared_norm(["weight", "bias"]) == pytest.approx(4_999_999 + 1e4 + 4e3, rel=1e-6)
    assert held.squared_norm(["weight"]) == pytest.approx(4_999_999 + 1e4, rel=1e-6)


def test_optimizers_are_joined_anew_only_after_a_layer_was_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every iteration drops the layers that left the plan, mostly none."""
    counts: list[int] = []

    def join(optimizers: list[Optimizer]) -> list[Optimizer]:
        counts.append(len(optimizers))
        return joint_optimizers(optimizers)

    monkeypatch.setattr(stage_module, "joint_optimizers", join)
    stage = _fast_stage(3)
    for iteration, kept in enumerate([range(3), range(3), range(2), range(2)]):
        _give_gradients(stage, iteration)
        stage.keep_only(kept)
        stage.apply(kept, iteration, learning_rate=0.1, scale=1.0)

    assert counts == [3, 2]
