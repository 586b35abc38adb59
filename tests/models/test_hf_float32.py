"""Tensors that transformers keeps in float32 in a bfloat16 model stay so in a bfloat16 job."""

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers.hf_models import FAMILIES, GROUPED, ids_of, split_of, whole_of
from planaria.core.job import TrainingConfig
from planaria.engine.stage import RankStage

# Of each, a tensor that is kept: a buffer and a parameter that the class lists, and a parameter
# that its module makes in float32.
_FAMILIES: dict[str, tuple[dict[str, Any], str]] = {
    "deepseek_v3": (FAMILIES["deepseek_v3"], "model.layers.2.mlp.gate.e_score_correction_bias"),
    "ernie4_5_moe": (
        {
            "model_type": "ernie4_5_moe",
            **GROUPED,
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 16,
        },
        "model.layers.2.mlp.gate.weight",
    ),
    "hunyuan_v1_moe": (
        {
            "model_type": "hunyuan_v1_moe",
            **GROUPED,
            "head_dim": 16,
            "num_experts": 4,
            "moe_topk": 2,
        },
        "model.layers.2.mlp.gate.wg.weight",
    ),
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def _save(family: str, directory: Path) -> None:
    whole = whole_of(_FAMILIES[family][0])
    for name, buffer in whole.named_buffers():
        if name.endswith("correction_bias"):  # In bfloat16 all would be 8, and choose nothing.
            buffer.copy_(8 + 0.001 * torch.arange(buffer.numel()).view(buffer.shape))
    whole.save_pretrained(directory)


def _stage(directory: Path, dtype: Literal["float32", "bfloat16"]) -> RankStage:
    split = split_of({}, path=str(directory))
    stage = RankStage(split, training=TrainingConfig(learning_rate=0.1, seed=3, dtype=dtype))
    stage.hold(range(split.num_layers), states={}, age=0)
    return stage


@pytest.mark.parametrize("family", _FAMILIES)
def test_a_layer_in_bfloat16_has_the_dtypes_and_bits_of_transformers(
    family: str, tmp_path: Path
) -> None:
    """With a router's correction in bfloat16, tokens went to other experts."""
    _save(family, tmp_path)
    kernels = {"attn_implementation": "eager", "experts_implementation": "eager"}
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, **kernels)
    stage = _stage(tmp_path, "bfloat16")
    ids_BL = ids_of(8)

    logits = stage.forward(0, len(stage.layers), ids_BL, iteration=0, microbatch=0)
    assert torch.equal(whole.train()(ids_BL).logits, logits)
    theirs = {name: tensor.dtype for name, tensor in whole.state_dict().items()}
    assert theirs[_FAMILIES[family][1]] is torch.float32
    modules = [held.module for held in stage.layers.values()]
    ours = {name: t.dtype for module in modules for name, t in module.state_dict().items()}
    assert ours == theirs


def test_a_parameter_that_stays_in_float32_is_its_own_master(tmp_path: Path) -> None:
    """It is stepped, saved and loaded as in a float32 job."""
    _save("ernie4_5_moe", tmp_path)
    stage, name = _stage(tmp_path, "bfloat16"), _FAMILIES["ernie4_5_moe"][1]
    held = stage.layers[3]

    assert held.masters[name] is held.parameters[name]
    assert {type(p) for p in held.masters.values()} == {torch.nn.Parameter}
    assert {p.dtype for p in held.masters.values()} == {torch.float32}
    assert {p.dtype for n, p in held.parameters.items() if n not in stage._float32} == {
        torch.bfloat16
    }
    before = held.parameters[name].detach().clone()
    output = stage.forward(0, len(stage.layers), ids_of(), iteration=0, microbatch=0)
    torch.autograd.backward(output.float().square().sum())
    assert torch.count_nonzero(held.sums)
    held.gradients.copy_(held.sums)
    held.gradients_of = 0
    held.apply(0, learning_rate=0.1, scale=1.0)
    assert not torch.equal(before, held.parameters[name])
    other = stage.empty_layer(3)
    other.load(held.state(), age=1)
    for key, parameter in held.parameters.items():
        assert torch.equal(parameter, other.parameters[key]), key
