"""A save as torch.distributed.checkpoint reads it, into models and optimizers of plain torch."""

import errno
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from helpers.hf_models import FAMILIES, LENGTH, VOCABULARY, whole_of
from helpers.saves import stepped_save
from helpers.user_models import partly_frozen
from planaria.checkpoint.disk.tiers import Manifest, Tier
from planaria.core.job import DataConfig, JobConfig, ModelConfig, TrainingConfig
from planaria.engine.formats.dcp_export import export_dcp
from planaria.engine.formats.whole_model import Adapters, whole_model
from planaria.engine.prepare import split_model
from planaria.errors import CheckpointError, ConfigError

ADAMW = {"name": "AdamW", "weight_decay": 0.1, "betas": [0.8, 0.9], "eps": 1e-6}
RATES = {"learning_rate": 0.02, "schedule": {"name": "linear", "warmup_iterations": 10}}


TRAINING = TrainingConfig(optimizer=ADAMW, **RATES)  # type: ignore[arg-type]


def _saved(
    model: ModelConfig, directory: Path, *, training: TrainingConfig = TRAINING
) -> tuple[Tier, Manifest]:
    job = JobConfig(model=model, data=DataConfig(sequence_length=LENGTH), training=training)
    split = split_model(model, seed=0, vocabulary_size=VOCABULARY, sequence_length=LENGTH)
    return stepped_save(job, split, directory / "saves", vocabulary_size=VOCABULARY)


def _load(directory: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Loads a directory as its users do."""
    state: dict[str, Any] = {
        "model": module.state_dict(),
        "optim": get_optimizer_state_dict(module, optimizer),
        "iteration": torch.tensor(0),
    }
    load(state, checkpoint_id=directory, no_dist=True)
    module.load_state_dict(state["model"])
    set_optimizer_state_dict(module, optimizer, state["optim"])
    return state


def _assert_loaded(
    module: nn.Module, optimizer: torch.optim.Optimizer, tier: Tier, manifest: Manifest
) -> None:
    state: dict[str, Any] = {}
    for layer in range(len(manifest.layers)):
        state |= tier.read_layer(manifest, layer)
    named = dict(module.named_parameters(remove_duplicate=False))
    for path, array in state.items():
        kind, _, name = path.partition("/")
        found: torch.Tensor = named[name] if kind == "parameter" else torch.empty(0)
        if kind == "optimizer":
            name, _, key = name.rpartition("/")
            found = optimizer.state[named[name]][key]
        assert torch.equal(found.detach().double(), torch.from_numpy(array).double()), path


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3", "bert", "mixtral"])
def test_a_model_of_transformers_and_its_optimizer_load_an_export(
    family: str, tmp_path: Path
) -> None:
    """By torch.distributed.checkpoint.load, with parameters that are tied or have two names."""
    tier, manifest = _saved(ModelConfig(config=FAMILIES[family]), tmp_path)

    names = export_dcp(whole_model(tier, manifest), tmp_path / "dcp", with_optimizer=True)

    auto_class = AutoModelForMaskedLM if family == "bert" else AutoModelForCausalLM
    config = AutoConfig.for_model(**dict(manifest.job["config"]))
    model = auto_class.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters())
    state = _load(tmp_path / "dcp", model, optimizer)
    _assert_loaded(model, optimizer, tier, manifest)
    assert ".metadata" in names
    assert state["iteration"] == 2
    (group,) = optimizer.param_groups
    assert (group["weight_decay"], group["betas"], group["eps"]) == (0.1, (0.8, 0.9), 1e-6)
    assert group["lr"] == pytest.approx(0.02 * 3 / 10)
    assert group["fused"] is None
    assert group["foreach"] is None


def test_an_export_has_the_groups_of_which_matrices_alone_decay(tmp_path: Path) -> None:
    """Whoever trains on in plain torch decays the same parameters."""
    model = ModelConfig(config=FAMILIES["gpt2"])
    training = TrainingConfig(optimizer=ADAMW, decay="matrices", **RATES)  # type: ignore[arg-type]
    tier, manifest = _saved(model, tmp_path, training=training)

    export_dcp(whole_model(tier, manifest), tmp_path / "dcp", with_optimizer=True)

    config = AutoConfig.for_model(**dict(manifest.job["config"]))
    whole = AutoModelForCausalLM.from_config(config)
    parts = [[p for p in whole.parameters() if (p.dim() >= 2) is large] for large in (True, False)]
    optimizer = torch.optim.AdamW([{"params": part} for part in parts])
    _load(tmp_path / "dcp", whole, optimizer)
    _assert_loaded(whole, optimizer, tier, manifest)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert [group["betas"] for group in optimizer.param_groups] == [(0.8, 0.9)] * 2
    assert [group["lr"] for group in optimizer.param_groups] == [pytest.approx(0.006)] * 2


def test_layers_of_ones_own_load_an_export_with_what_was_frozen(tmp_path: Path) -> None:
    """The buffer, too; and an optimizer that was given the names of its parameters."""
    model = ModelConfig(kind="python", target="helpers.user_models:partly_frozen")
    tier, manifest = _saved(model, tmp_path)

    export_dcp(whole_model(tier, manifest), tmp_path / "dcp", with_optimizer=True)

    torch.manual_seed(0)  # The seed of the job, which gives the frozen weight.
    expected, module = partly_frozen(), partly_frozen()
    module[1].get_buffer("scale").zero_()
    optimizer = torch.optim.AdamW(module.named_parameters())
    _load(tmp_path / "dcp", module, optimizer)
    _assert_loaded(module, optimizer, tier, manifest)
    assert torch.equal(module.get_parameter("0.weight"), expected.get_parameter("0.weight"))
    assert module[1].get_buffer("scale").tolist() == [2.0, 2.0, 2.0]


def test_an_export_without_the_optimizer_has_the_model_alone(tmp_path: Path) -> None:
    """As inference needs it; its directory must be a new one."""
    tier, manifest = _saved(ModelConfig(config=FAMILIES["gpt2"]), tmp_path)

    export_dcp(whole_model(tier, manifest), tmp_path / "dcp", with_optimizer=False)

    entries = FileSystemReader(tmp_path / "dcp").read_metadata().state_dict_metadata
    assert {name.partition(".")[0] for name in entries} == {"model"}
    with pytest.raises(ConfigError, match="is not empty"):
        export_dcp(whole_model(tier, manifest), tmp_path / "dcp", with_optimizer=False)


def test_adapters_are_merged_or_have_an_optimizer(tmp_path: Path) -> None:
    """A merged model has no parameters that an optimizer stepped."""
    pytest.importorskip("peft")
    whole_of(FAMILIES["llama"]).save_pretrained(tmp_path / "model")
    lora = {"r": 4, "target_modules": ["q_proj"]}
    tier, manifest = _saved(ModelConfig(path=str(tmp_path / "model"), lora=lora), tmp_path)
    merged = whole_model(tier, manifest, adapters=Adapters.MERGED)

    with pytest.raises(ConfigError, match="--merge"):
        export_dcp(merged, tmp_path / "dcp", with_optimizer=True)
    export_dcp(merged, tmp_path / "dcp", with_optimizer=False)

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    before = model.get_parameter("model.layers.0.self_attn.q_proj.weight").clone()
    state = {"model": model.state_dict()}
    load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    after = state["model"]["model.layers.0.self_attn.q_proj.weight"]
    assert (before - after).abs().max() > 1e-4


def test_one_layer_at_a_time_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In their order: a layer is read to learn its sizes, and again when it is written."""
    tier, manifest = _saved(ModelConfig(config=FAMILIES["gpt2"]), tmp_path)
    reads = []
    read_layer = Tier.read_layer

    def noted(tier: Tier, manifest: Manifest, layer: int) -> dict[str, Any]:
        reads.append(layer)
        return read_layer(tier, manifest, layer)

    monkeypatch.setattr(Tier, "read_layer", noted)
    export_dcp(whole_model(tier, manifest), tmp_path / "dcp", with_optimizer=False)

    assert reads == 2 * list(range(6))


def test_a_disk_that_refuses_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch raises of it is no Exception at all."""
    tier, manifest = _saved(ModelConfig(config=FAMILIES["gpt2"]), tmp_path)
    model = whole_model(tier, manifest)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(FileSystemWriter, "write_data", refuse)
    with pytest.raises(CheckpointError, match=r"cannot write .*No space left on device"):
        export_dcp(model, tmp_path / "dcp", with_optimizer=False)


def test_an_export_that_is_interrupted_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C was told as "cannot write" without a reason, and the exit code was that of an
    error."""
    tier, manifest = _saved(ModelConfig(config=FAMILIES["gpt2"]), tmp_path)
    model = whole_model(tier, manifest)
    monkeypatch.setattr(FileSystemWriter, "write_data", Mock(side_effect=KeyboardInterrupt))

    with pytest.raises(KeyboardInterrupt):
        export_dcp(model, tmp_path / "dcp", with_optimizer=False)
