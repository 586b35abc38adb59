"""What torch has compiled for a rank's layers serves it again after a re-plan."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import reset
from torch._dynamo.testing import CompileCounter

from planaria.core.job import ModelConfig, TrainingConfig
from planaria.engine.prepare import split_model
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
def hold_blocks(graphs: Any) -> RankStage:
    """Some blocks of a model, compiled."""
    del graphs
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
