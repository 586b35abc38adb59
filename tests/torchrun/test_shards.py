"""State of a loop of one's own, cut and put together in other ways."""

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import MultiStepLR, ReduceLROnPlateau, StepLR

from planaria.errors import CheckpointError, ConfigError
from planaria.torchrun.shards import HEAD, Stateful, TrainingState


def held(seed: int, width: int = 4) -> TrainingState:
    """A small model whose optimizer has taken a step."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1), betas=(0.8, 0.9))
    model(torch.randn(5, 3)).square().sum().backward()
    optimizer.step()
    return TrainingState(model, optimizer, {})


def test_a_state_is_taken_over_whole() -> None:
    """Parameters, buffers, moments, steps and rates; what was there before is gone."""
    source, target = held(1), held(2)
    shard, state = source.shard(0, 1)
    assert source.is_replicated
    shards, states = {0: shard}, {0: {name: array.copy() for name, array in state.items()}}
    assert target.needed_shards(shards, rather=frozenset()) == {0}

    target.load(target.assemble(shards, states), shard)

    again, found = target.shard(0, 1)
    assert again.beside == shard.beside
    assert found.keys() == state.keys()
    for name in state.keys() - {HEAD}:
        assert np.array_equal(found[name], state[name]), name
    assert target.optimizer.param_groups[0]["betas"] == (0.8, 0.9)


def test_a_forward_after_a_save_changes_nothing_of_it() -> None:
    """It changes buffers, before the optimizer's step that waits for the copy; the rest is bytes of
    the model itself until then."""
    source = held(1)
    _, state = source.shard(0, 1)
    before = {name: array.copy() for name, array in state.items()}

    source.model(torch.randn(5, 3))
    with torch.no_grad():
        source.model[0].weight.zero_()  # type: ignore[index]

    changed = {name for name, array in state.items() if not np.array_equal(array, before[name])}
    assert changed == {"parameter/0.weight"}
    assert {"buffer/1.running_mean", "buffer/1.num_batches_tracked"} < state.keys()


def test_a_version_of_another_model_is_refused_and_changes_nothing() -> None:
    """Naming the first tensor that differs."""
    source, target = held(1), held(2, width=5)
    shard, state = source.shard(0, 1)
    before = {name: array.copy() for name, array in target.shard(0, 1)[1].items()}

    with pytest.raises(CheckpointError, match=r"parameter/0\.weight has shape \(5, 3\) now"):
        target.needed_shards({0: shard}, rather=frozenset())
    with pytest.raises(CheckpointError):
        target.assemble({0: shard}, {0: state})
    after = target.shard(0, 1)[1]
    assert all(np.array_equal(after[name], array) for name, array in before.items())


@pytest.mark.parametrize(("saved", "own"), [("half", "bfloat16"), ("float", "bfloat16")])
def test_another_dtype_is_another_model(saved: str, own: str) -> None:
    """Whether or not its bytes would fit."""
    shard, _ = TrainingState(*whole_of(saved), {}).shard(0, 1)
    target = TrainingState(*whole_of(own), {})

    with pytest.raises(CheckpointError, match=r"parameter/weight has type bfloat16 now, and had"):
        target.needed_shards({0: shard}, rather=frozenset())


def whole_of(dtype: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of such numbers, and an optimizer that has taken no step."""
    model: nn.Module = getattr(nn.Linear(3, 3), dtype)()
    return model, torch.optim.AdamW(model.parameters())


def test_what_was_not_saved_beside_is_named() -> None:
    """As when a scheduler was added since."""
    source = held(1)
    shard, _ = source.shard(0, 1)
    scheduler = StepLR(source.optimizer, step_size=2)
    target = TrainingState(source.model, source.optimizer, {"scheduler": scheduler})
    with pytest.raises(CheckpointError, match="nothing was saved of scheduler"):
        target.needed_shards({0: shard}, rather=frozenset())


def test_schedulers_go_on_as_if_nothing_had_been() -> None:
    """Also those whose state has keys that are numbers, counts, and the worst of all losses."""

    def scheduled() -> tuple[TrainingState, MultiStepLR, ReduceLROnPlateau]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0)
        steps, plateau = MultiStepLR(optimizer, [3, 3, 6]), ReduceLROnPlateau(optimizer)
        optimizer.step()
        others: dict[str, Stateful] = {"steps": steps, "plateau": plateau}
        return TrainingState(nn.Linear(2, 2), optimizer, others), steps, plateau

    source, steps, plateau = scheduled()
    steps.step()
    shard, state = source.shard(0, 1)
    target, taken, waiting = scheduled()
    target.load_others(shard.beside)
    target.load(target.assemble({0: shard}, {0: state}), shard)
    for _ in range(6):
        steps.step()
        taken.step()

        assert source.optimizer.param_groups[0]["lr"] == target.optimizer.param_groups[0]["lr"]
    assert target.optimizer.param_groups[0]["lr"] < 0.002
    assert waiting.best == plateau.best == float("inf")
    waiting.step(1.0)


@pytest.mark.parametrize("saved", [0.25, torch.tensor(0.25)])
@pytest.mark.parametrize("own", [0.5, torch.tensor(0.5)])
def test_rates_may_be_tensors(saved: float | Tensor, own: float | Tensor) -> None:
    """One that is there takes the value over: a compiled step knows no other."""
    source, target = held(1), held(2)
    own = own.clone() if isinstance(own, Tensor) else own
    source.optimizer.param_groups[0]["lr"] = saved
    target.optimizer.param_groups[0]["lr"] = own
    shard, state = source.shard(0, 1)

    target.load(target.assemble({0: shard}, {0: state}), shard)

    rate = target.optimizer.param_groups[0]["lr"]
    assert float(rate) == 0.25
    assert rate is own or not isinstance(own, Tensor)


def test_other_param_groups_are_refused_before_anything_changes() -> None:
    """Of the same parameters."""
    source, target = held(1), held(2)
    groups = [{"params": [parameter]} for parameter in target.model.parameters()]
    target = TrainingState(target.model, torch.optim.AdamW(groups), {})
    shard, _ = source.shard(0, 1)

    with pytest.raises(CheckpointError, match=r"have \[1, 1, 1, 1\] parameters now, and had \[4\]"):
        target.needed_shards({0: shard}, rather=frozenset())


@pytest.mark.parametrize("flag", ["fused", "capturable", "neither"])
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adafactor])
def test_an_optimizer_s_state_is_on_the_device_where_torch_has_it(
    make: Callable[[Iterable[Tensor]], torch.optim.Optimizer], flag: str
) -> None:
    """Whether it is of the parameter's shape or not; a step is with its parameter only for kernels
    that read it there. Other devices than the host's are played by meta."""
    model = nn.Linear(3, 4)
    optimizer = make(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.param_groups[0][flag] = True
    shard, state = TrainingState(model, optimizer, {}).shard(0, 1)
    model = nn.Linear(3, 4, device="meta")
    target = TrainingState(model, make(model.parameters()), {})
    oracle = make(model.parameters())
    oracle.load_state_dict(optimizer.state_dict())

    target.load(target.assemble({0: shard}, {0: state}), shard)

    found = devices(target.optimizer)
    assert found == devices(oracle)
    assert {one["step"] for one in found} == {"cpu" if flag == "neither" else "meta"}
    assert len(found) == 2


def devices(optimizer: torch.optim.Optimizer) -> list[dict[str, str]]:
    """Of each parameter's state, by key."""
    return [
        {key: value.device.type for key, value in values.items()}
        for values in optimizer.state.values()
    ]


class Cached(nn.Module):
    """Two names of a buffer, and one that grows with what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(2, 2)
        self.first, self.second = nn.Module(), nn.Module()
        mean = torch.zeros(2)
        self.first.register_buffer("mean", mean, persistent=False)
        self.second.register_buffer("mean", mean)
        self.register_buffer("positions", torch.arange(2), persistent=False)


def test_buffers_are_those_of_a_state_dict() -> None:
    """One that is not persistent may have any shape, and stays as it is here."""
    model = Cached()
    shard, state = TrainingState(model, torch.optim.AdamW(model.parameters()), {}).shard(0, 1)
    model = Cached()
    model.positions = torch.arange(5)
    target = TrainingState(model, torch.optim.AdamW(model.parameters()), {})

    target.load(target.assemble({0: shard}, {0: state}), shard)

    buffers = {name.removeprefix("buffer/") for name in state if name.startswith("buffer/")}
    assert buffers == {"second.mean"}
    assert buffers < model.state_dict().keys()
    assert model.positions.tolist() == [0, 1, 2, 3, 4]


class Counted(nn.Module):
    """A layer that counts its calls, which is in its state_dict and in no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.calls: object = 0

    def get_extra_state(self) -> dict[str, object]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, object]) -> None:
        if state["calls"] == 13:
            raise ValueError("an unlucky number")
        self.calls = state["calls"]


def counted(calls: object) -> tuple[nn.Sequential, TrainingState]:
    model = nn.Sequential(Counted(), nn.Linear(2, 2), Counted())
    last = model[2]
    assert isinstance(last, Counted)
    last.calls = calls
    return model, TrainingState(model, torch.optim.SGD(model.parameters()), {})


def test_extra_states_of_modules_are_saved_and_restored() -> None:
    """They are in a state_dict of the model, too."""
    _, source = counted(7)
    (target_model, target), (_, bare) = counted(0), counted(0)
    shard, _ = source.shard(0, 1)

    assert target.needed_shards({0: shard}, rather=frozenset()) == {0}
    target.load_others(shard.beside)

    assert target_model[2].calls == 7
    assert target_model[0].calls == 0
    plain = TrainingState(nn.Linear(2, 2), bare.optimizer, {})
    without, _ = plain.shard(0, 1)
    with pytest.raises(CheckpointError, match=r"nothing was saved of model\.get_extra_state"):
        target.needed_shards({0: without}, rather=frozenset())
    unlucky, _ = counted(13)[1].shard(0, 1)
    with pytest.raises(CheckpointError, match="does not accept"):
        target.load_others(unlucky.beside)


def test_extra_states_that_could_not_be_read_back_are_refused() -> None:
    """As other values are."""
    _, source = counted(Cached())

    with pytest.raises(ConfigError) as caught:
        source.readable_values()
    assert caught.value.field == "others.model.get_extra_state.2.calls"


def test_a_restore_takes_no_memory_for_a_second_state_of_the_optimizer() -> None:
    """A device may have none, and the model would be restored in part; compiled steps know no other
    tensors, either."""
    source, target = held(1), held(2)
    shard, state = source.shard(0, 1)
    before = {
        (parameter, key): value
        for parameter, values in target.optimizer.state.items()
        for key, value in values.items()
    }
    odd = target.optimizer.state[next(target.model.parameters())]
    odd["exp_avg"] = odd["exp_avg"].double()

    target.load(target.assemble({0: shard}, {0: state}), shard)

    for (parameter, key), value in before.items():
        now = target.optimizer.state[parameter][key]
        is_odd = parameter is next(target.model.parameters()) and key == "exp_avg"
        assert (now is value) is not is_odd
        assert now.dtype == value.dtype
    again, found = target.shard(0, 1)
    assert again.beside == shard.beside
    assert all(np.array_equal(found[name], state[name]) for name in state.keys() - {HEAD})
    assert target.optimizer.state.keys() == set(target.model.parameters())


def test_state_that_two_parameters_share_is_not_shared_after_a_restore() -> None:
    """Each had a tensor of its own when it was saved."""
    source, target = held(1), held(2)
    first, second, *_ = target.model.parameters()
    target.optimizer.state[second]["step"] = target.optimizer.state[first]["step"]
    _, other, *_ = source.model.parameters()
    source.optimizer.state[other]["step"] = torch.tensor(5.0)
    shard, state = source.shard(0, 1)

    target.load(target.assemble({0: shard}, {0: state}), shard)

    steps = [float(target.optimizer.state[parameter]["step"]) for parameter in (first, second)]
    assert steps == [1.0, 5.0]


def test_a_sharded_state_of_the_optimizer_is_filled_in_place(tmp_path: Path) -> None:
    """With the values of the version, and cut as it was."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = nn.Linear(3, 4)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        held_state = TrainingState(model, optimizer, {})
        shard, views = held_state.shard(0, 1)
        state = {name: array.copy() for name, array in views.items()}
        before = [dict(values) for values in optimizer.state.values()]
        optimizer.step()

        held_state.load(held_state.assemble({0: shard}, {0: state}), shard)

        after = [dict(values) for values in optimizer.state.values()]
        for old, new in zip(before, after, strict=True):
            assert all(new[key] is old[key] for key in old)
            assert isinstance(new["exp_avg"], DTensor)
        found = held_state.shard(0, 1)[1]
        assert all(np.array_equal(found[name], state[name]) for name in state.keys() - {HEAD})
    finally:
        dist.destroy_process_group()
