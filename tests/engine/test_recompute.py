"""What a backward computes again never changes a bit, and keeps less."""

from collections.abc import Callable
from typing import Any, Literal, get_args

import pytest
import torch
from torch import Tensor

from planaria.core.job import ModelConfig, TrainingConfig
from planaria.core.plan import Recomputation
from planaria.engine import stage as stage_module
from planaria.engine.prepare import split_model
from planaria.engine.recompute import _is_kept
from planaria.engine.stage import RankStage
from planaria.models import hf_arguments

GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 16}
OPT = {
    "model_type": "opt",
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "ffn_dim": 32,
    "word_embed_proj_dim": 8,
    "enable_bias": False,
}
TOKENS = torch.arange(32).reshape(2, 16)
Dtype = Literal["float32", "bfloat16"]
MODES: tuple[Recomputation, ...] = get_args(Recomputation)


def _stage(
    attention: str,
    dtype: Dtype,
    mode: Literal["auto", "none", "selective", "full"],
    config: dict[str, Any] = GPT2,
) -> RankStage:
    """All layers of a model with dropout."""
    model = split_model(
        ModelConfig(config={**config, "attn_implementation": attention}),
        vocabulary_size=32,
        sequence_length=16,
        seed=0,
    )
    training = TrainingConfig(activation_checkpointing=mode, seed=3, dtype=dtype)
    stage = RankStage(model, training=training)
    stage.hold(range(model.num_layers), states={}, age=0)
    return stage


def _gradients(
    attention: str, dtype: Dtype, mode: Recomputation, config: dict[str, Any] = GPT2
) -> list[Tensor]:
    """The gradient sums of all layers after one microbatch."""
    stage = _stage(attention, dtype, mode, config)
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


def test_a_model_that_multiplies_before_its_blocks_has_the_same_bits_in_every_mode() -> None:
    """The model's own forward runs for the blocks' arguments in the first forward of a block alone.

    So its products must not count among those of the block.
    """
    torch.set_num_threads(1)
    expected, *others = (_gradients("eager", "float32", mode, OPT) for mode in MODES)

    for gradients in others:
        assert all(map(torch.equal, expected, gradients))


def test_a_backward_may_find_the_arguments_of_its_blocks_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Microbatches of other lengths have run since; the model's own forward runs once more."""
    monkeypatch.setattr(hf_arguments, "_ARGUMENTS_BYTES", 1)
    torch.set_num_threads(1)
    sums: list[list[Tensor]] = []
    for mode in MODES:
        stage = _stage("eager", "float32", mode)
        outputs = [
            stage.forward(0, stage.model.num_layers, tokens, iteration=5, microbatch=2)
            for tokens in (TOKENS, TOKENS[:, :12], TOKENS[:, :8])
        ]
        stage.model.loss_sum(outputs[0], TOKENS).backward()  # type: ignore[no-untyped-call]
        sums.append([held.sums for held in stage.layers.values()])

    for gradients in sums[1:]:
        assert all(map(torch.equal, sums[0], gradients))


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
