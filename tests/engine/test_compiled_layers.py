"""What torch has compiled for a rank's layers serves it again after a re-plan."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import reset
from torch._dynamo.testing import CompileCounter

from planaria.core.job import ClusterConfig, JobConfig, ModelConfig, TrainingConfig
from planaria.engine.iteration.split_backward import input_gradient
from planaria.engine.prepare import device_of, split_model
from planaria.engine.stage import RankStage

GPT2 = {"model_type": "gpt2", "n_layer": 6, "n_embd": 16, "n_head": 2, "n_positions": 16}
BEFORE, KEPT, AFTER = range(1, 4), range(2, 4), range(2, 6)


@pytest.fixture(name="graphs")
def count_graphs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Counts the graphs that torch compiles, and runs them as they are."""
    counter: Any = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    reset()  # What other tests have compiled.
    yield counter
    reset()


@pytest.fixture(name="stage")
def hold_compiled_blocks(graphs: Any) -> RankStage:
    """Some blocks of a model, compiled."""
    del graphs
    return hold_blocks()


def hold_blocks() -> RankStage:
    """Some blocks of a model, compiled by what `torch.compile` is now."""
    model = split_model(ModelConfig(config=GPT2), seed=0, vocabulary_size=32, sequence_length=16)
    training = TrainingConfig(compile=True, deterministic=False)
    stage = RankStage(model, training=training)
    stage.hold(BEFORE, states={}, age=0)
    return stage


def train(stage: RankStage, layers: range) -> None:
    """A forward and a backward of layers for one microbatch."""
    hidden = torch.ones(2, 16, 16, requires_grad=True)
    output = stage.forward(layers.start, layers.stop, hidden, iteration=0, microbatch=0)
    total: Tensor = output.sum()
    total.backward()  # type: ignore[no-untyped-call]


def test_a_replan_compiles_nothing_of_what_a_rank_keeps_or_gets_of_the_same_shape(
    stage: RankStage, graphs: Any
) -> None:
    """A recovery of a fraction of a second would take seconds to minutes for each layer."""
    train(stage, BEFORE)
    num_compiled = graphs.frame_count
    stage.keep_only(KEPT)
    train(stage, KEPT)
    num_kept = graphs.frame_count
    stage.hold(AFTER, states={}, age=0)
    train(stage, AFTER)

    assert num_compiled >= 1
    assert num_kept == num_compiled
    assert graphs.frame_count == num_compiled


def test_another_shape_is_compiled(stage: RankStage, graphs: Any) -> None:
    """What the test above counts is what it seems to be."""
    train(stage, BEFORE)
    num_compiled = graphs.frame_count
    hidden = torch.ones(3, 16, 16, requires_grad=True)
    stage.forward(1, 2, hidden, iteration=0, microbatch=0)

    assert graphs.frame_count > num_compiled


@pytest.fixture(name="_compiled_backwards")
def compile_backwards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compiles backwards, too, as quickly as can be; they may reuse memory, as by default."""
    monkeypatch.setattr("torch._functorch.config.donated_buffer", True)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    reset()
    yield
    reset()


@pytest.mark.usefixtures("_compiled_backwards")
def test_a_backward_may_be_split_after_a_whole_one() -> None:
    """As with layers that the user compiles. A first backward that is whole may be compiled to
    reuse the memory of activations, and then refuses to run where these are kept."""
    device_of(JobConfig(cluster=ClusterConfig(device="cpu")), rank=0)
    stage = hold_blocks()
    train(stage, BEFORE)
    parameters = list(stage.layers[1].module.parameters())
    expected = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    hidden = torch.ones(2, 16, 16, requires_grad=True)
    output = stage.forward(BEFORE.start, BEFORE.stop, hidden, iteration=0, microbatch=0)
    _, rest = input_gradient(output.sum(), None, hidden, parameters)
    rest.run()

    for before, parameter in zip(expected, parameters, strict=True):
        assert before is not None
        assert parameter.grad is not None
        assert torch.equal(before, parameter.grad)
