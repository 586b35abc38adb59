"""Models of transformers come in from a directory and go out to one with the same logits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from helpers.hf_models import FAMILIES, LENGTH, VOCABULARY, chained, ids_of, split_of, whole_of
from helpers.saves import stepped_save
from planaria.checkpoint.disk.outgoing import export_parameters
from planaria.core.job import DataConfig, JobConfig, ModelConfig
from planaria.engine.formats.whole_model import Adapters, export_whole, whole_model


def _logits(directory: Path, config: dict[str, Any]) -> torch.Tensor:
    """The logits of the model that transformers itself reads from a directory."""
    is_masked = config["model_type"] in ("bert", "roberta")
    auto_class = AutoModelForMaskedLM if is_masked else AutoModelForCausalLM
    model = auto_class.from_pretrained(
        directory,
        attn_implementation=config.get("attn_implementation", "eager"),
        experts_implementation="eager",
        dtype=torch.float32,
    )
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(ids_of()).logits
    return logits


FAST = {"gpt2", "gpt_neox", "mixtral"}  # One of each way in which files differ from models.


@pytest.mark.parametrize(
    "family",
    [f if f in FAST else pytest.param(f, marks=pytest.mark.long) for f in FAMILIES],
)
def test_a_family_has_the_bits_of_transformers_before_training_and_after(
    family: str, tmp_path: Path
) -> None:
    """Also where files name its parameters otherwise, stack experts, or have buffers."""
    torch.set_num_threads(1)
    config, ids = FAMILIES[family], ids_of()
    whole = whole_of(config)
    for name, buffer in whole.named_buffers():
        if name in whole.state_dict():
            buffer.copy_(torch.sin(torch.arange(buffer.numel())).reshape(buffer.shape))
    whole.save_pretrained(tmp_path / "model")
    kernels = {key: config[key] for key in ("attn_implementation",) if key in config}
    job = JobConfig(
        model=ModelConfig(config=kernels, path=str(tmp_path / "model")),
        data=DataConfig(sequence_length=LENGTH),
    )

    split = split_of(kernels, path=job.model.path)
    layers = [split.materialise(layer).eval() for layer in range(split.num_layers)]
    with torch.no_grad():
        before = chained(layers, ids)
    tier, manifest = stepped_save(job, split, tmp_path / "saves", vocabulary_size=VOCABULARY)
    for layer, module in enumerate(layers):
        for name, array in tier.read_layer(manifest, layer).items():
            if name.startswith("parameter/"):
                parameter = module.get_parameter(name.removeprefix("parameter/"))
                parameter.data.copy_(torch.from_numpy(array))
    with torch.no_grad():
        after = chained(layers, ids)
    merged = whole_model(tier, manifest, adapters=Adapters.MERGED)
    export_whole(merged, tmp_path / "whole")

    assert torch.equal(_logits(tmp_path / "model", config), before)
    assert torch.equal(_logits(tmp_path / "whole", config), after)
    assert not torch.equal(before, after)
    if family != "deepseek_v3":  # A save has no buffers.
        export_parameters(tier, manifest, tmp_path / "trained")
        assert torch.equal(_logits(tmp_path / "trained", config), after)
