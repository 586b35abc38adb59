"""What a backward computes again never changes a bit, and keeps less."""

from collections.abc import Callable
from typing import Literal, get_args

import pytest
import torch
from torch import Tensor

from planaria.core.job import ModelConfig, TrainingConfig
from planaria.core.plan import Recomputation
from planaria.engine import stage as stage_module
from planaria.engine.prepare import split_model
from planaria.engine.recompute import _is_kept
from planaria.engine.stage import RankStage

GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 16}
TOKENS = torch.arange(32).reshape(2, 16)
Dtype = Literal["float32", "bfloat16"]
MODES: tuple[Recomputation, ...] = get_args(Recomputation)


def _stage(
    attention: str, dtype: Dtype, mode: Literal["auto", "none", "selective", "full"]
) -> RankStage:
    """All layers of a GPT-2 with dropout."""
    model = split_model(
        ModelConfig(config={**GPT2, "attn_implementation": attention}),
        vocabulary_size=32,
        sequence_length=16,
        seed=0,
    )
    training = TrainingConfig(activation_checkpointing=mode, seed=3, dtype=dtype)
    stage = RankStage(model, training=training)
    stage.hold(range(model.num_layers), states={}, age=0)
    return stage


def _gradients(attention: str, dtype: Dtype, mode: Recomputation) -> list[Tensor]:
    """The gradient sums of all layers after one microbatch."""
    stage = _stage(attention, dtype, mode)
    output = stage.forward(0, stage.model.num_layers, TOKENS, iteration=5, microbatch=2)
    stage.model.loss_sum(output, TOKENS).backward()  # type: ignore[no-untyped-call]
    return [held.sums for held in stage.layers.values()]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_gradients_are_the_same_bits_in_every_mode(attention: str, dtype: Dtype) -> None:
    """Dropout in attention, after it and after the MLP: each draws again what it drew."""
    torch.set_num_threads(1)
    expected, *others = (_gradients(attention, dtype, mode) for mode in MODES)

    assert all(sums.any() for sums in expected if len(sums))
    for gradients in others:
        assert all(map(torch.equal, expected, gradients))


def test_a_stage_obeys_what_the_plan_says_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last layer never computes again, and layers without an entry do as the job says."""
    modes: list[Recomputation] = []

    def note(
        function: Callable[..., Tensor], *arguments: object, recomputation: Recomputation
    ) -> Tensor:
        modes.append(recomputation)
        return function(*arguments)

    monkeypatch.setattr(stage_module, "forward_that_keeps", note)
    stage = _stage("eager", "float32", "auto")
    stage.chosen = {1: "full", 2: "selective", 3: "full"}
    stage.forward(0, 4, TOKENS, iteration=0, microbatch=0)

    assert modes == ["none", "full", "selective", "none"]


def test_attention_that_draws_random_numbers_is_computed_again() -> None:
    """If its result was kept, the dropout after it would draw the numbers that it drew."""
    attention = torch.ops.aten._scaled_dot_product_flash_attention.default
    queries = torch.zeros(1)
    arguments = (queries, queries, queries)

    assert _is_kept(attention, arguments, {})
    assert _is_kept(attention, arguments, {"dropout_p": 0.0})
    assert not _is_kept(attention, arguments, {"dropout_p": 0.1})
    assert not _is_kept(attention, (*arguments, 0.1), {})
    assert not _is_kept(torch.ops.aten.gelu.default, (queries,), {})
