"""A whole model from a save: adapters merged as peft merges them, and what was frozen."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from helpers.hf_models import FAMILIES, LENGTH, VOCABULARY, ids_of, whole_of
from helpers.saves import stepped_save
from planaria.checkpoint.disk.outgoing import export_parameters
from planaria.checkpoint.disk.tiers import Manifest, Tier
from planaria.core.job import DataConfig, JobConfig, ModelConfig
from planaria.engine.formats.whole_model import Adapters, export_whole, whole_model
from planaria.engine.prepare import split_model
from planaria.errors import CheckpointError, ConfigError


def _adapted_save(
    family: str, directory: Path, targets: Sequence[str], **lora: Any
) -> tuple[Tier, Manifest]:
    """A save of adapters that took steps; the model is in {directory}/model."""
    whole_of(FAMILIES[family]).save_pretrained(directory / "model")
    arguments = {"r": 4, "lora_alpha": 12, "target_modules": list(targets)}
    model = ModelConfig(path=str(directory / "model"), lora=arguments | lora)
    job = JobConfig(model=model, data=DataConfig(sequence_length=LENGTH))
    split = split_model(model, seed=0, vocabulary_size=VOCABULARY, sequence_length=LENGTH)
    return stepped_save(job, split, directory / "saves", vocabulary_size=VOCABULARY)


def _read(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()


@torch.no_grad()
def _logits(model: Any) -> torch.Tensor:
    logits: torch.Tensor = model(ids_of()).logits
    return logits


@pytest.mark.parametrize(
    ("family", "targets", "lora"),
    [
        ("llama", ["q_proj", "up_proj"], {}),
        ("gpt2", ["c_attn"], {"fan_in_fan_out": True, "use_rslora": True}),
        ("qwen3", ["o_proj", "lm_head"], {"alpha_pattern": {"o_proj": 3}}),
    ],
)
def test_a_merged_model_has_the_bits_of_peft(
    family: str, targets: list[str], lora: dict[str, Any], tmp_path: Path
) -> None:
    """Of models that lay weights out in two ways; a head is no embedding any more."""
    peft = pytest.importorskip("peft")
    tier, manifest = _adapted_save(family, tmp_path, targets, **lora)

    export_parameters(tier, manifest, tmp_path / "adapters")
    model = whole_model(tier, manifest, adapters=Adapters.MERGED)
    names = export_whole(model, tmp_path / "merged")

    base = _read(tmp_path / "model")
    plain = _logits(base)
    adapted = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapters"))
    expected = _logits(adapted)
    merged = _logits(_read(tmp_path / "merged"))
    assert torch.allclose(merged, expected, atol=1e-4)
    assert not torch.allclose(plain, expected, atol=1e-3)
    if "lm_head" in targets:  # Here peft changes the embedding, too, and so the function.
        config = json.loads((tmp_path / "merged" / "config.json").read_text())
        assert config["tie_word_embeddings"] is False
    else:
        assert torch.equal(merged, _logits(adapted.merge_and_unload()))
    assert not any("adapter" in name for name in names)
    assert "generation_config.json" in names


@pytest.mark.parametrize(
    ("family", "targets", "lora"),
    [
        ("bert", "all-linear", {}),
        ("roberta", ["query", "dense"], {}),
        ("roberta", ["query", "dense"], {"exclude_modules": ["attention.output.dense"]}),
        ("roberta", "all-linear", {"exclude_modules": r".*\.1\..*"}),
    ],
)
def test_peft_reads_the_adapters_and_the_head_of_a_classifier(
    family: str, targets: list[str] | str, lora: dict[str, Any], tmp_path: Path
) -> None:
    """A head that is trained itself gets no adapters: peft did not find its weights."""
    peft = pytest.importorskip("peft")
    kind = "SequenceClassification"
    name = {"bert": f"BertFor{kind}", "roberta": f"RobertaFor{kind}"}[family]
    config = FAMILIES[family] | {"architectures": [name], "num_labels": 3, "vocab_size": VOCABULARY}
    own_class = getattr(transformers, name)
    own_class(own_class.config_class(**config)).save_pretrained(tmp_path / "model")
    arguments = {"r": 2, "target_modules": targets} | lora
    model = ModelConfig(path=str(tmp_path / "model"), lora=arguments)
    job = JobConfig(model=model, data=DataConfig(sequence_length=LENGTH))
    split = split_model(model, seed=0, vocabulary_size=VOCABULARY, sequence_length=LENGTH)
    tier, manifest = stepped_save(job, split, tmp_path / "saves", vocabulary_size=VOCABULARY)

    export_parameters(tier, manifest, tmp_path / "adapters")
    whole = whole_model(tier, manifest, adapters=Adapters.MERGED)
    export_whole(whole, tmp_path / "merged")

    bare = own_class.from_pretrained(tmp_path / "model", attn_implementation="eager").eval()
    plain = _logits(bare)
    adapted = peft.PeftModel.from_pretrained(bare, str(tmp_path / "adapters")).eval()
    merged = own_class.from_pretrained(tmp_path / "merged", attn_implementation="eager").eval()
    assert torch.allclose(_logits(merged), _logits(adapted), atol=1e-6)
    assert not torch.allclose(plain, _logits(adapted), atol=1e-4)
    trained = [name for layer in range(6) for name in split.parameter_shapes(layer)]
    assert not any("lora_" in name for name in trained if name.startswith("classifier."))
    if "exclude_modules" in lora:
        kept = ".attention.output.dense." if isinstance(targets, list) else ".layer.1."
        assert not any(kept in name for name in trained)
        assert any(".output.dense." in name for name in trained)


def test_a_save_of_a_directory_that_moved_is_exported_with_its_new_place(tmp_path: Path) -> None:
    """A LoRA job may be exported on another machine than the one that it was trained on."""
    pytest.importorskip("peft")
    tier, manifest = _adapted_save("llama", tmp_path, ["q_proj"])
    export_whole(whole_model(tier, manifest, adapters=Adapters.MERGED), tmp_path / "first")
    (tmp_path / "model").rename(tmp_path / "moved")

    with pytest.raises(ConfigError, match="--model-path"):
        whole_model(tier, manifest)
    with pytest.raises(ConfigError, match="--model-path"):  # The system does not even look there.
        whole_model(tier, manifest, model_path="moved" * 100)
    moved = str(tmp_path / "moved")
    model = whole_model(tier, manifest, adapters=Adapters.MERGED, model_path=moved)
    export_whole(model, tmp_path / "second")

    files = (tmp_path / name / "model.safetensors" for name in ("first", "second"))
    first, second = map(load_file, files)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_layers_of_ones_own_are_exported_with_what_was_frozen(tmp_path: Path) -> None:
    """And with their buffers: it is the state_dict of what the function returns."""
    config = ModelConfig(kind="python", target="helpers.user_models:partly_frozen")
    job = JobConfig(model=config, data=DataConfig(kind="python"))
    split = split_model(config, seed=0, vocabulary_size=0, sequence_length=1)
    tier, manifest = stepped_save(job, split, tmp_path / "saves")

    export_whole(whole_model(tier, manifest, adapters=Adapters.MERGED), tmp_path / "whole")

    module = torch.nn.Sequential(*(split.materialise(layer) for layer in range(2)))
    state = load_file(tmp_path / "whole" / "model.safetensors")
    assert len(state) == len(module.state_dict())
    trained = {
        name.removeprefix("parameter/"): torch.from_numpy(array)
        for layer in range(2)
        for name, array in tier.read_layer(manifest, layer).items()
        if name.startswith("parameter/")
    }
    assert 0 < len(trained) < len(state)
    for layer in module:
        for name, tensor in layer.state_dict().items():
            assert torch.equal(state[name], trained.get(name, tensor)), name


@pytest.mark.parametrize("target", ["frozen_blocks", "frozen_factories"])
def test_files_of_frozen_layers_have_a_bounded_size(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frozen layers counted nothing, so that the whole model was one file, which was made in
    memory."""
    config = ModelConfig(kind="python", target=f"helpers.user_models:{target}")
    job = JobConfig(model=config, data=DataConfig(kind="python"))
    split = split_model(config, seed=0, vocabulary_size=0, sequence_length=1)
    tier, manifest = stepped_save(job, split, tmp_path / "saves")
    model = whole_model(tier, manifest, adapters=Adapters.MERGED)
    export_whole(model, tmp_path / "one")

    largest = max(
        sum(tensor.nbytes for tensor in model.tensors(layer).values())
        for layer in range(split.num_layers)
    )
    monkeypatch.setattr("planaria.checkpoint.disk.outgoing.SHARD_BYTES", 2 * largest)
    export_whole(model, tmp_path / "several")

    files = {path: load_file(path) for path in (tmp_path / "several").glob("*.safetensors")}
    sizes = [sum(tensor.nbytes for tensor in tensors.values()) for tensors in files.values()]
    assert max(sizes) <= 2 * largest
    assert len(files) == 4  # Three of two blocks each, and one of the last layer.
    whole = load_file(tmp_path / "one" / "model.safetensors")
    parts = {name: tensor for tensors in files.values() for name, tensor in tensors.items()}
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_frozen_parameters_of_transformers_count_for_the_size_of_files(tmp_path: Path) -> None:
    """As of adapters that stay beside the weights."""
    pytest.importorskip("peft")
    tier, manifest = _adapted_save("llama", tmp_path, ["q_proj"])
    model = whole_model(tier, manifest)

    for layer in range(model.split.num_layers):
        num_bytes = sum(tensor.nbytes for tensor in model.tensors(layer).values())
        assert model.split.whole_bytes(layer) == num_bytes > 0


@pytest.mark.parametrize("family", ["roberta", "bert"])
@pytest.mark.parametrize("has_learned_tokens", [True, False])
def test_a_save_is_exported_with_the_padding_of_its_job(
    tmp_path: Path, family: str, *, has_learned_tokens: bool
) -> None:
    """Older planarias let a token of text be padding; RoBERTa had one embedding less then."""
    model = ModelConfig(config=FAMILIES[family])
    data = DataConfig(tokenizer="bpe", sequence_length=LENGTH)
    split = split_model(
        model,
        seed=0,
        vocabulary_size=VOCABULARY,
        sequence_length=LENGTH,
        has_learned_tokens=has_learned_tokens,
    )
    job = JobConfig(model=model, data=data)
    tier, manifest = stepped_save(job, split, tmp_path / "saves", vocabulary_size=VOCABULARY)

    whole = whole_model(tier, manifest, adapters=Adapters.MERGED)
    export_whole(whole, tmp_path / "whole")

    assert whole.split.config == split.config
    theirs = AutoModelForMaskedLM.from_pretrained(tmp_path / "whole")
    ours = [name for layer in range(split.num_layers) for name in whole.tensors(layer)]
    assert set(dict(theirs.named_parameters())) <= set(ours)


def test_a_save_without_the_facts_of_its_model_is_refused(tmp_path: Path) -> None:
    """Older releases did not write them; a save of another model is refused, too."""
    tier, manifest = _plain_save(tmp_path)
    job = {key: value for key, value in manifest.job.items() if key != "model_facts"}
    with pytest.raises(ConfigError, match="an older planaria made this save"):
        whole_model(tier, replace(manifest, job=job))

    shorter = replace(manifest, layers=manifest.layers[:-1])
    with pytest.raises(CheckpointError, match="has 5 layers, and its model has 6"):
        whole_model(tier, shorter)
    text = json.dumps(dict(manifest.job)).replace('"n_embd": 64', '"n_embd": 32')
    other = whole_model(tier, replace(manifest, job=json.loads(text)))
    with pytest.raises(CheckpointError, match=r"has a \(128, 64\) parameter transformer.wte"):
        other.tensors(0)


def _plain_save(directory: Path) -> tuple[Tier, Manifest]:
    model = ModelConfig(config=FAMILIES["gpt2"])
    job = JobConfig(model=model, data=DataConfig(sequence_length=LENGTH))
    split = split_model(model, seed=0, vocabulary_size=VOCABULARY, sequence_length=LENGTH)
    return stepped_save(job, split, directory / "saves", vocabulary_size=VOCABULARY)
