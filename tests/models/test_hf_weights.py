"""Weights on disk become parameters by the rules of transformers itself."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig

from helpers.hf_models import (
    FAMILIES,
    LENGTH,
    SEED,
    VOCABULARY,
    chained,
    ids_of,
    split_of,
    whole_of,
)
from planaria.core.job import ModelConfig
from planaria.engine.prepare import split_model
from planaria.errors import ConfigError
from planaria.models.hf_model import hf_config, keys_on_disk


@pytest.mark.parametrize("family", ["gpt_neox", "mixtral", "qwen3_moe", "deepseek_v3"])
def test_files_may_name_and_lay_out_parameters_otherwise(family: str, tmp_path: Path) -> None:
    """gpt_neox began with a random head, and mixtures of experts were refused."""
    whole = whole_of(FAMILIES[family]).eval()
    whole.save_pretrained(tmp_path, max_shard_size="100KB")
    stored = {name for path in tmp_path.glob("*.safetensors") for name in load_file(path)}
    assert not stored >= {name for name, _ in whole.named_parameters()}

    split = split_of({}, path=str(tmp_path))
    layers = [split.materialise(layer) for layer in range(split.num_layers)]

    assert split.notes == ()
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


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
def test_codes_in_place_of_weights_are_refused(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """They were read as the weights, without the scales beside them."""
    whole_of(FAMILIES[family]).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(n for n, tensor in tensors.items() if tensor.dim() > 1 and ".0." in n)
    tensors[name] = tensors[name].to(dtype)
    tensors[f"{name}_scale_inv"] = torch.ones(1, 1)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(ConfigError, match=rf"quantised \({re.escape(name)} is of dtype .8"):
        split_of({}, path=str(tmp_path))


def test_a_quantised_checkpoint_is_refused_by_its_config(tmp_path: Path) -> None:
    """Its other tensors would be missing, or have odd shapes. A config alone names no codes."""
    whole_of(FAMILIES["gpt2"]).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (tmp_path / "config.json").write_text(json.dumps(config))

    with pytest.raises(ConfigError, match=r"fp8.*dequantise them.*save_pretrained"):
        split_of({}, path=str(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    assert "quantization_config" not in split_of({}, path=str(tmp_path)).config


def test_tensors_that_no_parameter_takes_are_told(tmp_path: Path) -> None:
    """A model with fewer layers than the files leaves out the others, and drops nothing else."""
    whole_of(FAMILIES["gpt2"]).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["transformer.h.0.attn.bias"] = torch.ones(1, 1, 4, 4)  # Older releases kept a mask.
    tensors["transformer.h.0.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})

    assert split_of({}, path=str(tmp_path)).notes == ()
    (note,) = split_of({"n_layer": 3}, path=str(tmp_path)).notes
    assert "no parameter of GPT2LMHeadModel takes" in note
    assert "transformer.h.3.attn.c_attn.weight, " in note
    # One of the twelve has a name like that of the mask.
    assert note.endswith("and 6 more")


@pytest.mark.parametrize("is_base", [False, True])
def test_a_head_that_the_job_replaces_is_not_told(is_base: bool, tmp_path: Path) -> None:
    """The files are of a class with another head, or with none, but with blocks of no use."""
    whole = whole_of(FAMILIES["bert"])
    (whole.base_model if is_base else whole).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    base = "" if is_base else "bert."
    tensors |= {f"{base}pooler.dense.extra": torch.ones(2), "cls.seq_relationship": torch.ones(2)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = {"architectures": ["BertForTokenClassification"], "num_labels": 3}

    path = str(tmp_path)
    notes = split_of(config, path=path).notes
    fewer = split_of(config | {"num_hidden_layers": 3}, path=path).notes
    assert not notes if is_base else "bert.pooler" in notes[0]
    assert "cls" not in "".join(notes)
    assert len(fewer) == 1
    assert f"{base}encoder.layer.3." in fewer[0]
    if not is_base:
        assert "cls.seq_relationship" in split_of({}, path=path).notes[0]


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    """As a pointer that git-lfs left; it ended in a traceback that names no file."""
    whole_of(FAMILIES["gpt2"]).save_pretrained(tmp_path, max_shard_size="100KB")
    shard = min(tmp_path.glob("model-*.safetensors"))
    shard.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(ConfigError, match=f"{shard.name} cannot be read") as caught:
        split_of({}, path=str(tmp_path))
    assert caught.value.field == "model.path"

    (tmp_path / "model.safetensors.index.json").write_text("version https")
    with pytest.raises(ConfigError, match=r"model\.safetensors\.index\.json cannot be read"):
        split_of({}, path=str(tmp_path))


def test_a_directory_without_weights_is_told_and_gives_adapters_no_base(tmp_path: Path) -> None:
    """Training began from random values without a word, also that of adapters alone."""
    whole_of(FAMILIES["qwen3"]).config.save_pretrained(tmp_path)
    path = str(tmp_path)
    (note,) = split_of({}, path=path).notes
    assert note.startswith(f"model.path = {path!r} has no weights")

    pytest.importorskip("peft")
    model = ModelConfig(path=path, lora={"r": 2, "target_modules": ["q_proj"]})
    with pytest.raises(ConfigError, match=r"model\.path = .* has no weights .* model\.lora"):
        split_model(model, seed=SEED, vocabulary_size=VOCABULARY, sequence_length=LENGTH)


@pytest.mark.parametrize(
    "name",
    ["pytorch_model.bin", "tf_model.h5", "flax_model.msgpack", "q4.gguf", "consolidated.00.pth"],
)
def test_weights_of_another_form_are_refused(name: str, tmp_path: Path) -> None:
    """Of what transformers and others write only safetensors are read."""
    whole_of(FAMILIES["gpt2"]).config.save_pretrained(tmp_path)
    (tmp_path / name).write_bytes(b"weights")

    with pytest.raises(ConfigError, match=rf"its weights are in {name}.*save_pretrained"):
        split_of({}, path=str(tmp_path))


def test_weights_of_which_the_model_takes_none_are_refused(tmp_path: Path) -> None:
    """As those of another model, or of an adapter alone."""
    whole_of(FAMILIES["gpt2"]).config.save_pretrained(tmp_path)
    tensors = {"base_model.model.h.0.lora_A.weight": torch.ones(2, 2)}
    save_file(tensors, tmp_path / "adapter_model.safetensors", metadata={"format": "pt"})

    with pytest.raises(ConfigError, match=r"GPT2LMHeadModel takes none .*base_model\.model\.h\.0"):
        split_of({}, path=str(tmp_path))


def test_one_file_comes_before_the_index_of_an_older_save(tmp_path: Path) -> None:
    """As in transformers, which leaves the index where it saves a smaller model over a sharded one.
    Other weights were taken, or none found."""
    whole = whole_of(FAMILIES["gpt2"])
    whole.save_pretrained(tmp_path, max_shard_size="100KB")
    shards = {path: path.read_bytes() for path in tmp_path.glob("model*")}
    assert len(shards) > 2
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.add_(1.0)
    whole.save_pretrained(tmp_path)
    for path, content in shards.items():
        path.write_bytes(content)

    layer = split_of({}, path=str(tmp_path)).materialise(0)

    for name, parameter in layer.named_parameters():
        assert torch.equal(whole.get_parameter(name), parameter), name


def test_numbers_that_json_lacks_are_read_as_transformers_writes_them(tmp_path: Path) -> None:
    """It writes infinity as {"__float__": "Infinity"}; config.json of a model was refused."""
    config = CONFIG_MAPPING["mamba2"](
        num_hidden_layers=2,
        hidden_size=32,
        vocab_size=VOCABULARY,
        state_size=8,
        num_heads=4,
        head_dim=16,
        n_groups=1,
        time_step_limit=(0.0, math.inf),
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert '"__float__": "Infinity"' in (tmp_path / "config.json").read_text()

    split = split_of({}, path=str(tmp_path))
    read = _config_at(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(split.config))  # As an export has it.
    again = _config_at(tmp_path)

    assert split.notes == ()
    assert tuple(read.time_step_limit) == tuple(again.time_step_limit) == (0.0, math.inf)


def _config_at(directory: Path) -> Any:
    model = ModelConfig(path=str(directory))
    return hf_config(model, vocabulary_size=VOCABULARY, sequence_length=LENGTH)


def test_numbers_that_json_lacks_are_read_in_lists_and_tables(tmp_path: Path) -> None:
    """All that are read by transformers, and nothing else that looks like them."""
    text = """{
        "number": {"__float__": "Infinity"}, "plain": Infinity, "one": {"a": 1.5, "b": null},
        "list": [1, [{"__float__": "-Infinity"}], {"deep": {"__float__": "NaN"}}],
        "others": [{"__float__": "7"}, {"__float__": "NaN", "b": 1}, {"__float__": 3}, "Infinity"]
    }"""
    (tmp_path / "config.json").write_text(text)

    keys = keys_on_disk(str(tmp_path))

    assert keys["number"] == keys["plain"] == math.inf
    assert keys["list"][1] == [-math.inf]
    assert math.isnan(keys["list"][2]["deep"])
    assert keys["others"] == json.loads(text)["others"]
    expected, _ = PreTrainedConfig.get_config_dict(tmp_path)
    assert repr(keys) == repr({key: expected[key] for key in keys})
