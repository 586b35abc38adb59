"""Weights on disk become parameters by the rules of transformers itself."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.hf_models import FAMILIES, chained, ids_of, split_of, whole_of
from planaria.errors import ConfigError


@pytest.mark.parametrize("family", ["gpt_neox", "mixtral", "qwen3_moe", "deepseek_v3"])
def test_files_may_name_and_lay_out_parameters_otherwise(family: str, tmp_path: Path) -> None:
    """gpt_neox began with a random head, and mixtures of experts were refused."""
    whole = whole_of(FAMILIES[family]).eval()
    whole.save_pretrained(tmp_path, max_shard_size="100KB")
    stored = {name for path in tmp_path.glob("*.safetensors") for name in load_file(path)}
    assert not stored >= {name for name, _ in whole.named_parameters()}

    split = split_of({}, path=str(tmp_path))
    layers = [split.materialise(layer) for layer in range(split.num_layers)]

    for layer in layers:
        for name, parameter in layer.named_parameters():
            assert torch.equal(whole.get_parameter(name), parameter), name
    with torch.no_grad():
        assert torch.equal(whole(ids_of()).logits, chained([x.eval() for x in layers], ids_of()))


def test_buffers_come_from_disk_too(tmp_path: Path) -> None:
    """The routers' correction of DeepSeek-V3 is learned, and is no parameter."""
    whole = whole_of(FAMILIES["deepseek_v3"])
    name = "model.layers.2.mlp.gate.e_score_correction_bias"
    whole.get_buffer(name).copy_(torch.arange(4.0))
    whole.save_pretrained(tmp_path)

    split = split_of({}, path=str(tmp_path))

    for module in (split.materialise(3), split.structure(3)):
        assert module.get_buffer(name).tolist() == [0.0, 1.0, 2.0, 3.0]


def test_experts_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    """A file that was made by hand, or cut."""
    whole_of(FAMILIES["mixtral"]).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in tensors if "experts.1" in name)
    tensors[name] = tensors[name][:-1].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(ConfigError, match="do not fit together"):
        split_of({}, path=str(tmp_path))
