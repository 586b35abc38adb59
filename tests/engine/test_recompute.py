"""What a backward computes again never changes a bit, and keeps less."""

from typing import Literal, get_args

import pytest
import torch
from torch import Tensor

from planaria.core.job import ModelConfig, TrainingConfig
from planaria.core.plan import Recomputation
from planaria.engine.prepare import split_model
from planaria.engine.recompute import _is_kept
from planaria.engine.stage import RankStage

GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 16}
Dtype = Literal["float32", "bfloat16"]
MODES: tuple[Recomputation, ...] = get_args(Recomputation)


def _gradients(attention: str, dtype: Dtype, mode: Recomputation) -> list[Tensor]:
    """The gradient sums of all layers after one microbatch of a GPT-2 with dropout."""
    model = split_model(
        ModelConfig(config={**GPT2, "attn_implementation": attention}),
        vocabulary_size=32,
        sequence_length=16,
        seed=0,
    )
    training = TrainingConfig(activation_checkpointing=mode, seed=3, dtype=dtype)
    stage = RankStage(model, training=training)
    stage.hold(range(model.num_layers), states={}, age=0)
    tokens = torch.arange(32).reshape(2, 16)
    output = stage.forward(0, model.num_layers, tokens, iteration=5, microbatch=2)
    model.loss_sum(output, tokens).backward()  # type: ignore[no-untyped-call]
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
