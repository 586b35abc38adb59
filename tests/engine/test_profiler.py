"""The profiler measures what a layer is."""

import copy
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.jobs import tiny_job
from helpers.linked_ranks import num_descriptors
from planaria.core.job import DataConfig, JobConfig
from planaria.core.plan import (
    LayerProfile,
    Link,
    ModelProfile,
    one_device_profile,
    recomputing_profile,
    scaled_profile,
)
from planaria.data.batches import Batches
from planaria.engine import profiler, stage
from planaria.engine.devices import LateDevice, usable_bytes
from planaria.engine.prepare import load_data, load_model
from planaria.errors import ConfigError, PeerLostError
from planaria.estimator.peak_memory import _state_bytes
from planaria.models.layers import SplitModel, TiedGroup
from planaria.models.packing import bring, unpack
from planaria.profiles.profile_json import decode_profile, encode_profile
from planaria.transport.links import Links
from planaria.transport.timekeeping import Timekeeper


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def _profile(job: JobConfig, directory: Path) -> ModelProfile:
    model = load_model(job, cache_directory=directory, profile=None, timekeeper=Timekeeper())
    dataset = load_data(job, objective=model.objective, cache_directory=directory)
    return profiler.profile_model(job, model, dataset)


def test_layers_that_are_alike_are_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight equal blocks between two other layers: three measurements, equal figures."""
    measured = []
    measure = profiler._layer_profile

    def note(job: JobConfig, name: str, *rest: object) -> LayerProfile:
        measured.append(name)
        return measure(job, name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(profiler, "_layer_profile", note)
    profile = _profile(tiny_job("sequential", tmp_path), tmp_path)

    assert measured == ["0.Linear", "1._Residual", "9.Linear"]
    assert {layer.forward_s[1] for layer in profile.layers[2:9]} == {profile.layers[1].forward_s[1]}
    assert [layer.name for layer in profile.layers[:3]] == [
        "0.Linear",
        "1._Residual",
        "2._Residual",
    ]


@pytest.mark.parametrize("further", [{"max_nodes": 4}, {"standby": 2}])
def test_a_limit_on_memory_counts_the_nodes_that_may_join(
    tmp_path: Path, further: dict[str, int]
) -> None:
    """Where nodes share a machine, they share its devices too."""
    job = tiny_job("sequential", tmp_path)
    changes: Any = {"nodes": 2, **further}
    job = replace(job, cluster=replace(job.cluster, **changes))
    model = load_model(job, cache_directory=tmp_path, profile=None, timekeeper=Timekeeper())
    dataset = load_data(job, objective=model.objective, cache_directory=tmp_path)
    device = LateDevice()
    device.memory_bytes = 40 << 30

    profile = profiler.profile_model(job, model, dataset, num_ranks=2, processors=2, device=device)

    assert profile.device_memory_bytes == usable_bytes(device, num_ranks=4)


def test_layers_take_turns_unless_one_fills_any_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is alone finds in the cache what it left there; in a stage the others have it."""
    alike = []
    measure = profiler._layer_profile

    def note(
        job: JobConfig, name: str, held: Sequence[stage.HeldLayer], *rest: Any
    ) -> LayerProfile:
        alike.append(len({id(one.sums) for one in held}))
        return measure(job, name, held, *rest)

    monkeypatch.setattr(profiler, "_layer_profile", note)
    _profile(tiny_job("sequential", tmp_path), tmp_path)
    monkeypatch.setattr(profiler, "CACHE_BYTES", 1)
    _profile(tiny_job("sequential", tmp_path), tmp_path)

    assert alike == [profiler.TURNS] * 3 + [1] * 3


def test_bytes_are_those_of_the_tensors(tmp_path: Path) -> None:
    """float32: 24 x 24 weights and three vectors; a microbatch of two samples of 24 numbers."""
    job = tiny_job("sequential", tmp_path)
    block = _profile(job, tmp_path).layers[1]

    assert block.parameter_bytes == 4 * (24 * 24 + 3 * 24)
    # Two moments, and a step count of 8 bytes for each of the four parameters.
    assert block.optimizer_bytes == 2 * block.parameter_bytes + 4 * 8
    assert block.output_bytes == 4 * 2 * 24


class _Texts:
    """Rows of 5 and of 12 token ids, in turns, with a class each."""

    vocabulary_size = 20

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.arange(12 if index % 2 else 5), index % 2


def texts() -> _Texts:
    """Data of a job, by the name of this function."""
    return _Texts()


def test_bytes_between_layers_are_those_of_the_mask_too(tmp_path: Path) -> None:
    """It travels with the hidden states of a padded microbatch."""
    job = tiny_job("bert", tmp_path, microbatch_size=10)
    classes = {"architectures": ["BertForSequenceClassification"], "num_labels": 2}
    job = replace(
        job,
        model=replace(job.model, config={**job.model.config, **classes}),
        data=DataConfig(kind="python", target=f"{__name__}:texts", sequence_length=16),
    )
    model = load_model(job, cache_directory=tmp_path, profile=None, timekeeper=Timekeeper())
    dataset = load_data(job, objective=model.objective, cache_directory=tmp_path)
    inputs = bring(Batches(dataset, job.training, iteration=0).inputs(0), lambda tensor: tensor)
    sent = model.materialise(0)(inputs)

    profile = profiler.profile_model(job, model, dataset)

    hidden_BLD, mask = unpack(sent)
    assert hidden_BLD.shape == (10, 12, 16)
    assert "5,7" in mask
    assert {layer.output_bytes for layer in profile.layers[:-1]} == {sent.nbytes}
    assert sent.nbytes >= hidden_BLD.nbytes + len(mask)


def test_checkpointing_keeps_the_input_alone_and_pays_a_forward(tmp_path: Path) -> None:
    """What the planner must know of it."""
    job = tiny_job("sequential", tmp_path)
    kept = _profile(job, tmp_path).layers[1]
    recomputing = replace(job, training=replace(job.training, activation_checkpointing=True))
    measured = _profile(recomputing, tmp_path)
    layer, recomputed = measured.layers[1], recomputing_profile(measured, "full").layers[1]

    assert layer.activation_bytes == kept.activation_bytes > 4 * 2 * 24
    assert recomputed.activation_bytes == 4 * 2 * 24
    assert recomputed.backward_bytes == kept.activation_bytes - 4 * 2 * 24
    assert recomputed.backward_input_s[1] > layer.backward_input_s[1]
    assert measured.layers[-1].recomputed == {}  # The engine never computes it again.
    assert decode_profile(encode_profile(measured), source="test") == measured


def test_selective_checkpointing_keeps_matrix_products_and_the_input(tmp_path: Path) -> None:
    """By hand for a block of GPT-2 with eager attention, float32: 2 samples of L tokens."""
    (tmp_path / "words").write_text("the snow fell, and was sold\n" * 60)
    job = tiny_job("gpt2", tmp_path)
    job = replace(
        job,
        data=replace(job.data, path=str(tmp_path / "words")),
        training=replace(job.training, activation_checkpointing="selective"),
    )
    block = _profile(job, tmp_path).layers[1]
    config = job.model.config
    length, width, heads = job.data.sequence_length, config["n_embd"], config["n_head"]

    kept_bytes = block.recomputed["selective"].activation_bytes

    # Input; queries, keys and values; attention; its projection; four and one times the width.
    values = length * width * (1 + 3 + 1 + 1 + 4 + 1)
    values += heads * length * length  # Scores before softmax.
    assert kept_bytes == 4 * 2 * values < block.activation_bytes


def test_a_layer_is_measured_as_a_rank_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Backwards add to its sums, and its optimizer steps: seconds that nobody predicted before."""
    added, stepped = [], []
    add, step = stage._add_gradient, stage.HeldLayer.apply

    def note_sum(sums: Tensor, parameter: Tensor) -> None:
        added.append(parameter.shape)
        add(sums, parameter)

    def note_step(held: stage.HeldLayer, iteration: int, **rest: float) -> None:
        before = [one.detach().clone() for one in held.masters.values()]
        step(held, iteration, **rest)
        stepped.append(all(map(torch.equal, before, held.masters.values())))

    monkeypatch.setattr(stage, "_add_gradient", note_sum)
    monkeypatch.setattr(stage.HeldLayer, "apply", note_step)
    profile = _profile(tiny_job("sequential", tmp_path), tmp_path)

    runs = (profiler.NUM_RUNS + 1) * profiler.TURNS
    assert len(added) == runs * (2 + 4 + 2)  # Parameters of the three kinds of layers.
    assert stepped == [True] * (3 * runs)  # At a learning rate of 0 the layer stays what it is.
    assert all(layer.update_s[1] > 0.0 for layer in profile.layers)


class _Counting(nn.Module):
    """A layer with a buffer that its forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1  # type: ignore[operator, assignment]
        output: Tensor = self.linear(x)
        return output


def test_a_layer_that_changes_a_buffer_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No module class betrays it; its first forward does."""
    job = tiny_job("sequential", tmp_path)
    model = load_model(job, cache_directory=tmp_path, profile=None, timekeeper=Timekeeper())
    dataset = load_data(job, objective=model.objective, cache_directory=tmp_path)
    build: Callable[[SplitModel, int], nn.Module] = SplitModel.materialise
    monkeypatch.setattr(
        SplitModel, "materialise", lambda self, i: _Counting() if i == 0 else build(self, i)
    )

    with pytest.raises(ConfigError, match="GroupNorm"):
        profiler.profile_model(job, model, dataset)


class _InPlace(nn.Module):
    """A layer that adds to the result of its matrix product in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.linear(x)
        return output.add_(x).tanh()


class _InPlaceShaped(_InPlace):
    """The same, but its product is one of three dimensions, as in Falcon's attention.

    torch does not see that.
    """

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.linear(x).unsqueeze(1) @ x.unsqueeze(2)
        scores /= 24
        return x + scores.tanh().squeeze(2)


@pytest.mark.parametrize("kind", [_InPlace, _InPlaceShaped])
def test_a_kind_of_recomputation_that_a_layer_refuses_is_left_out(
    kind: type[nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planner then chooses among the others; a job that asks for that kind is refused."""
    job = tiny_job("sequential", tmp_path, activation_checkpointing="auto")
    model = load_model(job, cache_directory=tmp_path, profile=None, timekeeper=Timekeeper())
    dataset = load_data(job, objective=model.objective, cache_directory=tmp_path)
    build: Callable[[SplitModel, int], nn.Module] = SplitModel.materialise
    monkeypatch.setattr(
        SplitModel, "materialise", lambda self, i: kind() if i == 1 else build(self, i)
    )

    profile = profiler.profile_model(job, model, dataset)
    layers = profile.layers

    assert set(layers[1].recomputed) == {"full"}
    assert set(layers[2].recomputed) == {"selective", "full"}
    asking = replace(job, training=replace(job.training, activation_checkpointing="selective"))
    with pytest.raises(RuntimeError, match="mutated"):
        profiler.profile_model(asking, model, dataset)

    both = layers[2].recomputed  # As a profile of before layers were examined for it may have it.
    given = replace(profile, layers=tuple(replace(each, recomputed=both) for each in layers))
    examined = profiler.examine_layers(job, model, dataset, profile=given)
    assert set(examined.layers[1].recomputed) == {"full"}
    assert examined.layers[2] == given.layers[2]
    with pytest.raises(RuntimeError, match="mutated"):
        profiler.examine_layers(asking, model, dataset, profile=given)
    compiled = replace(job, training=replace(job.training, compile=True))
    examined = profiler.examine_layers(compiled, model, dataset, profile=given)
    assert set(examined.layers[2].recomputed) == {"full"}


def test_a_link_is_measured_over_real_sockets() -> None:
    """Orders of magnitude: loopback takes microseconds to milliseconds and moves megabytes."""
    link = profiler.measured_link()

    assert 1e-6 < link.latency_s < 0.1
    assert link.bandwidth_bytes_per_s > 1e6


def _paced(num_layers: int, forward_s: float) -> ModelProfile:
    layer = LayerProfile(
        name="sleep",
        forward_s={1: forward_s},
        backward_input_s={1: forward_s},
        backward_weight_s={1: forward_s},
        parameter_bytes=0,
        optimizer_bytes=0,
        activation_bytes=0,
        output_bytes=0,
    )
    link = Link(0.0, 1e9)
    return ModelProfile(
        model="sleep",
        microbatch_size=1,
        dtype="float32",
        device="cpu",
        device_memory_bytes=0,
        layers=(layer,) * num_layers,
        links={"intra_node": link, "inter_node": link},
    )


def test_a_job_plans_with_the_figures_for_one_device() -> None:
    """A profile of other hardware may know more than the engine can run."""
    profile = _paced(1, 0.01)
    both = {1: 0.01, 2: 0.006}
    layer = replace(
        profile.layers[0], forward_s=both, backward_input_s=both, backward_weight_s=both
    )

    assert one_device_profile(replace(profile, layers=(layer,))).layers[0].forward_s == {1: 0.01}


def test_scaled_profiles_keep_their_bytes() -> None:
    """model.time_scale makes a job faster, not smaller."""
    profile = replace(_paced(2, 0.01), device_memory_bytes=7)
    faster = scaled_profile(profile, 0.5)

    assert faster.layers[1].forward_s == {1: 0.005}
    assert faster.layers[1].backward_s(1) == pytest.approx(0.01)
    assert faster.device_memory_bytes == 7


class _Layers:
    """A builder of the modules it is given, and of copies if they are wanted again."""

    tied: tuple[TiedGroup, ...] = ()

    def __init__(self, *modules: nn.Module) -> None:
        self._modules = modules
        self._copied = copy.deepcopy(modules)
        self._unused = list(range(len(modules)))
        self.layer_names = tuple(f"{i}.{type(m).__name__}" for i, m in enumerate(modules))

    def materialise(self, layer: int) -> nn.Module:
        if layer not in self._unused:
            return copy.deepcopy(self._copied[layer])
        self._unused.remove(layer)
        return self._modules[layer]

    structure = materialise

    def parameter_shapes(self, layer: int) -> dict[str, torch.Size]:
        return {name: p.shape for name, p in self._modules[layer].named_parameters()}


class _Points:
    """Samples of one shape, with a number as target."""

    vocabulary_size = 0

    def __init__(self, *shape: int) -> None:
        self._shape = shape

    def __len__(self) -> int:
        return 100

    def sample(self, index: int, *, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index + seed % 2)
        return torch.randn(self._shape, generator=generator), torch.zeros(1)


def _profile_of(
    job: JobConfig, *modules: nn.Module, shape: tuple[int, ...], num_ranks: int = 1
) -> ModelProfile:
    """The profile of these modules on samples of a shape, see `_profile_on`."""
    return _profile_on(job, _Points(*shape), *modules, num_ranks=num_ranks)


def _profile_on(
    job: JobConfig, points: _Points, *modules: nn.Module, num_ranks: int
) -> ModelProfile:
    """The profile of these modules; the loss is a plain sum. All ranks share two processors."""
    model = SplitModel(
        _Layers(*modules), objective="supervised", loss=lambda output, _: output.float().sum()
    )
    return profiler.profile_model(job, model, points, num_ranks=num_ranks, processors=2)


class _Slept(nn.Linear):
    """Takes a while in which it needs no processor."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.02)
        return super().forward(x)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_more_ranks_than_processors_are_measured_in_processor_seconds(
    num_ranks: int, tmp_path: Path
) -> None:
    """How ranks take turns is no matter of a layer. With a processor each, it waits as well."""
    job = tiny_job("sequential", tmp_path)
    profile = _profile_of(job, _Slept(24, 24), nn.Linear(24, 1), shape=(24,), num_ranks=num_ranks)

    assert (profile.layers[0].forward_s[1] >= 0.02) == (num_ranks == 2)


class _LoggedPoints(_Points):
    """Points that log which processes read them."""

    def __init__(self, log: Path) -> None:
        super().__init__(24)
        self._log = log

    def sample(self, index: int, *, seed: int) -> tuple[Tensor, Tensor]:
        with self._log.open("a") as file:
            file.write(f"{os.getpid()}\n")
        return super().sample(index, seed=seed)


def test_the_processes_that_compete_read_no_samples(tmp_path: Path) -> None:
    """They share the position in each file that the data set has open: one sought, and another one
    read from there. Correct jobs were refused at random."""
    job, log = tiny_job("sequential", tmp_path), tmp_path / "log"

    _profile_on(job, _LoggedPoints(log), _Slept(24, 24), nn.Linear(24, 1), num_ranks=3)

    assert set(log.read_text().split()) == {str(os.getpid())}


def test_activations_are_what_autograd_keeps(tmp_path: Path) -> None:
    """A linear layer keeps its input, a tanh its output, a relu in place the one tensor that is
    both; parameters and what is freed at once count for nothing. Microbatches of two samples."""
    job = tiny_job("sequential", tmp_path)
    layers = (
        nn.Sequential(nn.Linear(24, 32)),
        nn.Sequential(nn.Linear(32, 32), nn.Tanh()),
        nn.Sequential(nn.Linear(32, 32), nn.ReLU(inplace=True)),
        nn.Linear(32, 1),
    )
    profile = _profile_of(job, *layers, shape=(24,))

    sizes = [layer.activation_bytes for layer in profile.layers]
    assert sizes[:3] == [4 * 2 * 24, 4 * 2 * (32 + 32), 4 * 2 * (32 + 32)]
    assert [layer.output_bytes for layer in profile.layers] == [4 * 2 * 32] * 3 + [0]


def test_layers_of_one_kind_may_differ_in_what_they_put_out(tmp_path: Path) -> None:
    """Equal modules and weights, another stride: the layer after them sees its real input."""
    layers = (
        nn.Conv2d(1, 2, 3, padding=1),
        nn.Conv2d(2, 2, 3, padding=1),
        nn.Conv2d(2, 2, 3, padding=1, stride=2),
        nn.Flatten(),
        nn.Linear(2 * 4 * 4, 1),
    )
    profile = _profile_of(tiny_job("sequential", tmp_path), *layers, shape=(1, 8, 8))

    outputs = [layer.output_bytes for layer in profile.layers]
    assert outputs == [4 * 2 * 128, 4 * 2 * 128, 4 * 2 * 32, 4 * 2 * 32, 0]


class _Scaled(nn.Module):
    """A linear layer with a buffer that never changes and has no short binary form."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", torch.full((8,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.linear(x) * self.scale
        return output


def test_a_buffer_that_bfloat16_rounds_has_not_changed(tmp_path: Path) -> None:
    """The layer is put into bfloat16 before it is measured; that is no batch statistics."""
    job = tiny_job("sequential", tmp_path)
    rounded = replace(job, training=replace(job.training, dtype="bfloat16"))
    profile = _profile_of(rounded, _Scaled(), nn.Linear(8, 1), shape=(8,))

    assert profile.layers[0].output_bytes == 2 * 2 * 8
    assert profile.layers[0].parameter_bytes == 4 * 72


def test_a_changing_buffer_is_found_in_every_layer(tmp_path: Path) -> None:
    """Also in one that looks like a layer which was measured before and does not change its own."""

    class Sometimes(_Counting):
        changes = False

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = super().forward(x) if self.changes else self.linear(x)
            return output

    layers = [Sometimes() for _ in range(4)]
    layers[2].changes = True

    with pytest.raises(ConfigError, match=r"2\.Sometimes"):
        _profile_of(tiny_job("sequential", tmp_path), *layers, shape=(8,))


def test_frozen_parameters_have_no_optimizer_state(tmp_path: Path) -> None:
    """They take memory, and their optimizer none."""
    layers = (nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 1))
    frozen = _profile_of(tiny_job("sequential", tmp_path), *layers, shape=(8,)).layers[0]

    assert (frozen.parameter_bytes, frozen.optimizer_bytes, frozen.frozen_bytes) == (0, 0, 4 * 72)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_layer_is_predicted_to_hold_what_it_holds(
    dtype: str, deterministic: bool, tmp_path: Path
) -> None:
    """In bfloat16 also the parameters that compute, beside those that the optimizer steps."""
    settings = {"dtype": dtype, "deterministic": deterministic, "optimizer": {"name": "SGD"}}
    job = tiny_job("sequential", tmp_path, **settings)
    profile = _profile_of(job, nn.Linear(8, 8), nn.Linear(8, 1), shape=(8,))
    held = stage.HeldLayer(0, nn.Linear(8, 8), training=job.training, tied=())

    sizes = {tensor.data_ptr(): tensor.nbytes for tensor in held.tensors()}
    predicted = _state_bytes(profile.layers[:1], 1, gradient_copies=3 if deterministic else 1)
    assert predicted == sum(sizes.values())


def test_a_frozen_layer_is_no_measure_for_a_trained_one(tmp_path: Path) -> None:
    """Blocks of one shape are measured once, and the first of them may be frozen."""
    layers = (nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8))
    profile = _profile_of(tiny_job("sequential", tmp_path), *layers, nn.Linear(8, 1), shape=(8,))

    sizes = [layer.parameter_bytes for layer in profile.layers]
    assert sizes == [4 * 72, 0, 4 * 72, 4 * 9]


def test_measuring_changes_neither_parameters_nor_gradients(tmp_path: Path) -> None:
    """A caller may train what it has measured."""
    layers = (nn.Linear(8, 8), nn.Linear(8, 1))
    before = [p.detach().clone() for layer in layers for p in layer.parameters()]
    _profile_of(tiny_job("sequential", tmp_path), *layers, shape=(8,))
    after = [p for layer in layers for p in layer.parameters()]

    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert all(parameter.grad is None for parameter in after)


def test_measuring_a_link_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither threads nor descriptors, also where it fails."""
    threads, descriptors = threading.active_count(), num_descriptors()
    profiler.measured_link()
    assert (threads, descriptors) == (threading.active_count(), num_descriptors())

    def unable(*_: object, **__: object) -> None:
        raise PeerLostError(1, "no such luck")

    monkeypatch.setattr(Links, "send", unable)
    with pytest.raises(PeerLostError):
        profiler.measured_link()
    assert (threads, descriptors) == (threading.active_count(), num_descriptors())
