"""A state in the format of another tool becomes a save, bit for bit."""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save

from helpers import user_models
from helpers.hf_models import FAMILIES, LENGTH, whole_of
from helpers.saves import stepped_save
from helpers.user_models import partly_frozen
from planaria.checkpoint.disk.tiers import Manifest, Tier, tier_of
from planaria.core.job import DataConfig, JobConfig, ModelConfig, TrainingConfig
from planaria.engine.formats.dcp_export import export_dcp
from planaria.engine.formats.state_import import import_state
from planaria.engine.formats.whole_model import whole_model
from planaria.engine.prepare import split_model
from planaria.errors import ConfigError
from planaria.job.save_facts import save_facts

BYTES = 256  # The token ids of data.tokenizer = "bytes".
OWN = ModelConfig(kind="python", target="helpers.user_models:partly_frozen")
POINTS = DataConfig(kind="python", target="helpers.user_models:points")


def _job(model: ModelConfig, optimizer: Mapping[str, Any], data: DataConfig) -> JobConfig:
    return JobConfig(model=model, data=data, training=TrainingConfig(optimizer=optimizer))


def _import(
    job: JobConfig, source: Path, directory: Path, *, iteration: int = -1
) -> tuple[Tier, Manifest]:
    tier = tier_of(str(directory / "imported"))
    returned = import_state(
        job,
        source,
        iteration=iteration,
        tier=tier,
        cache_directory=directory / "cache",
        facts=partial(save_facts, job),
    )
    manifest = tier.newest()
    assert manifest is not None
    assert manifest.layers == returned.layers
    return tier, manifest


@pytest.mark.parametrize(
    "optimizer",
    [
        {"name": "AdamW", "amsgrad": True},
        {"name": "SGD", "momentum": 0.9},
        {"name": "Adafactor"},
        {"name": "SGD"},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["gpt2", pytest.param("bert", marks=pytest.mark.long)])
def test_a_save_that_went_out_comes_in_with_the_same_hashes(
    family: str, optimizer: dict[str, Any], tmp_path: Path
) -> None:
    """Of every layer, the optimizer's state and its steps with it, and where the job is."""
    config = FAMILIES[family]
    job = _job(ModelConfig(config=config), optimizer, DataConfig(sequence_length=LENGTH))
    size = BYTES + (family == "bert")  # A masked model has one token id more, the mask.
    split = split_model(job.model, seed=0, vocabulary_size=size, sequence_length=LENGTH)
    tier, manifest = stepped_save(job, split, tmp_path / "saves", vocabulary_size=size)

    export_dcp(whole_model(tier, manifest), tmp_path / "dcp", with_optimizer=True)
    _, imported = _import(job, tmp_path / "dcp", tmp_path)

    assert imported.layers == manifest.layers
    assert imported.iteration == manifest.iteration
    assert imported.job == manifest.job


def test_adapters_come_in_with_the_same_hashes(tmp_path: Path) -> None:
    """What was frozen is in the export, and is none of the save; it must be that of model.path."""
    pytest.importorskip("peft")
    whole_of(FAMILIES["llama"]).save_pretrained(tmp_path / "model")
    lora = {"r": 4, "target_modules": ["q_proj"]}
    model = ModelConfig(path=str(tmp_path / "model"), lora=lora)
    job = _job(model, {"name": "AdamW"}, POINTS)
    split = split_model(model, seed=0, vocabulary_size=0, sequence_length=LENGTH)
    tier, manifest = stepped_save(job, split, tmp_path / "saves")
    export_dcp(whole_model(tier, manifest), tmp_path / "dcp", with_optimizer=True)

    _, imported = _import(job, tmp_path / "dcp", tmp_path)
    assert imported.layers == manifest.layers

    whole_of({**FAMILIES["llama"], "initializer_range": 0.5}).save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match="is not what model"):
        _import(job, tmp_path / "dcp", tmp_path / "other")
    assert tier_of(str(tmp_path / "other" / "imported")).versions() == ()


def _stepped() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """A model of plain torch and its optimizer after three steps."""
    torch.manual_seed(0)
    module = partly_frozen()
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad])
    for _ in range(3):
        module(torch.ones(2, 8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return module, optimizer


@pytest.mark.parametrize("names", ["nested", "bare"])
def test_a_checkpoint_of_plain_torch_is_a_save(names: str, tmp_path: Path) -> None:
    """As DCP's own examples write it; the job has done as many iterations as steps were taken."""
    module, optimizer = _stepped()
    optimizer_state: dict[str, Any] = dict(get_optimizer_state_dict(module, optimizer))
    state: dict[str, Any] = {"model": module.state_dict(), "optim": optimizer_state}
    if names == "bare":
        state = {**module.state_dict(), **optimizer_state}
    save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)

    tier, manifest = _import(_job(OWN, {"name": "AdamW"}, POINTS), tmp_path / "dcp", tmp_path)

    assert manifest.iteration == 3
    for layer in range(2):
        found = tier.read_layer(manifest, layer)
        for name, parameter in module[layer].named_parameters():
            if not parameter.requires_grad:
                assert f"parameter/{layer}.{name}" not in found
                continue
            expected = parameter.detach().numpy()
            assert np.array_equal(found[f"parameter/{layer}.{name}"], expected)
            kept = optimizer.state[parameter]
            assert found[f"optimizer/{layer}.{name}/step"] == 3
            assert np.array_equal(found[f"optimizer/{layer}.{name}/exp_avg"], kept["exp_avg"])


def test_parameters_alone_begin_a_job(tmp_path: Path) -> None:
    """Of DCP and of safetensors files, in bfloat16 too: with no iterations done, or as many."""
    module, _ = _stepped()
    state = {name: tensor.bfloat16() for name, tensor in module.state_dict().items()}
    state["0.weight"] = module.state_dict()["0.weight"]
    save({"model": state}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    (tmp_path / "files").mkdir()
    save_file(state, tmp_path / "files" / "model.safetensors")
    job = _job(OWN, {"name": "AdamW"}, POINTS)

    tier, one = _import(job, tmp_path / "dcp", tmp_path / "one")
    _, two = _import(job, tmp_path / "files", tmp_path / "two", iteration=7)

    assert (one.iteration, two.iteration) == (0, 7)
    assert one.layers == two.layers
    saved = tier.read_layer(one, 1)
    assert set(saved) == {"parameter/1.weight", "parameter/1.bias"}
    assert np.array_equal(saved["parameter/1.weight"], state["1.weight"].float())


def _changed(state: dict[str, Any], change: str) -> None:
    model, optimizer = state["model"], state["optim"]["state"]
    if change == "lacks":
        del model["1.bias"]
    elif change == "shape":
        model["1.bias"] = torch.zeros(9)
    elif change == "frozen":
        model["0.weight"] = model["0.weight"] + 1
    elif change == "buffer":
        model["1.scale"] = model["1.scale"] + 1
    elif change == "steps":
        optimizer["1.bias"]["step"] = torch.tensor(8.0)
    else:
        del optimizer["1.bias"]["exp_avg_sq"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "lacks",
            r"no parameter 1\.bias \(it has model\.0\.bias and model\..*\); .* LAYER_NUMBER\.NAME",
        ),
        ("shape", r"its 1.bias is \(9,\), and that of the job's model \(5,\)"),
        ("frozen", r"its 0\.weight is not what the function of model\.target gives"),
        ("buffer", r"its 1\.scale is not what the function of model\.target gives"),
        ("steps", "its parameters were stepped 3 to 8 times"),
        ("optimizer", r"keeps exp_avg, exp_avg_sq, step of 1\.bias, and .* has exp_avg, step"),
    ],
)
def test_a_state_of_something_else_is_refused(change: str, message: str, tmp_path: Path) -> None:
    """Before anything is saved, or leaving nothing."""
    module, optimizer = _stepped()
    state = {"model": module.state_dict(), "optim": get_optimizer_state_dict(module, optimizer)}
    _changed(state, change)
    save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)

    with pytest.raises(ConfigError, match=message):
        _import(_job(OWN, {"name": "AdamW"}, POINTS), tmp_path / "dcp", tmp_path)
    assert tier_of(str(tmp_path / "imported")).versions() == ()


def test_a_state_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    """Its tensors would be kept by names that the job's optimizer never reads."""
    module, optimizer = _stepped()
    state = {"model": module.state_dict(), "optim": get_optimizer_state_dict(module, optimizer)}
    save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)

    with pytest.raises(ConfigError, match=r"training\.optimizer"):
        _import(_job(OWN, {"name": "SGD"}, POINTS), tmp_path / "dcp", tmp_path)
    paced = replace(_job(OWN, {"name": "SGD"}, POINTS), model=ModelConfig(kind="paced"))
    with pytest.raises(ConfigError, match="no state to import"):
        _import(paced, tmp_path / "dcp", tmp_path)


def _tied_save(directory: Path) -> tuple[JobConfig, Manifest, dict[str, Tensor]]:
    """A job of a model with tied embeddings, a save of it, and the save's tensors by the names of
    other tools."""
    model = ModelConfig(config=FAMILIES["gpt2"])
    job = _job(model, {"name": "AdamW"}, DataConfig(sequence_length=LENGTH))
    split = split_model(model, seed=0, vocabulary_size=BYTES, sequence_length=LENGTH)
    tier, manifest = stepped_save(job, split, directory / "saves", vocabulary_size=BYTES)
    tensors: dict[str, Tensor] = {}
    for layer in range(split.num_layers):
        for name, array in tier.read_layer(manifest, layer).items():
            kind, _, rest = name.partition("/")
            key = rest if kind == "parameter" else f"optimizer.state.{rest.replace('/', '.')}"
            tensors[key] = torch.from_numpy(array)
    return job, manifest, tensors


@pytest.mark.parametrize("left_out", ["lm_head", "transformer.wte", "neither"])
def test_a_tied_parameter_may_have_one_name(left_out: str, tmp_path: Path) -> None:
    """Optimizers of torch know it by its first name."""
    job, manifest, tensors = _tied_save(tmp_path)
    kept = {name: tensor for name, tensor in tensors.items() if left_out not in name}
    save(kept, checkpoint_id=tmp_path / "dcp", no_dist=True)

    _, imported = _import(job, tmp_path / "dcp", tmp_path)

    assert imported.layers == manifest.layers


@pytest.mark.parametrize("form", ["{}.weight", "optimizer.state.{}.weight.exp_avg"])
def test_two_values_of_a_tied_parameter_are_refused(form: str, tmp_path: Path) -> None:
    """Each of its layers got its own, and the job trained them apart for good."""
    job, _, tensors = _tied_save(tmp_path)
    first, other = form.format("transformer.wte"), form.format("lm_head")
    tensors[other].view(-1)[-1].mul_(1 + 2e-7)
    assert not torch.equal(tensors[other], tensors[first])
    save(tensors, checkpoint_id=tmp_path / "dcp", no_dist=True)

    with pytest.raises(ConfigError, match=re.escape(f"its {first} and {other} differ")):
        _import(job, tmp_path / "dcp", tmp_path)
    assert tier_of(str(tmp_path / "imported")).versions() == ()


def test_a_tied_parameter_with_a_nan_is_taken(tmp_path: Path) -> None:
    """The same bits under both names are one value, whatever they stand for."""
    job, _, tensors = _tied_save(tmp_path)
    for name in ("transformer.wte.weight", "lm_head.weight"):
        tensors[name][0, 0] = torch.nan
    save(tensors, checkpoint_id=tmp_path / "dcp", no_dist=True)

    tier, imported = _import(job, tmp_path / "dcp", tmp_path)

    assert np.isnan(tier.read_layer(imported, 0)["parameter/transformer.wte.weight"][0, 0])


@pytest.mark.parametrize("target", ["tied_within", "tied_and_frozen"])
def test_two_values_of_a_parameter_that_one_layer_uses_twice_are_refused(
    target: str, tmp_path: Path
) -> None:
    """The second was left out."""
    model = ModelConfig(kind="python", target=f"helpers.user_models:{target}")
    job = _job(model, {"name": "AdamW"}, POINTS)
    torch.manual_seed(0)
    state = getattr(user_models, target)().state_dict()
    assert torch.equal(state["0.first.weight"], state["0.last.weight"])
    save(state, checkpoint_id=tmp_path / "equal", no_dist=True)
    state["0.last.weight"] = state["0.last.weight"] + 1
    save(state, checkpoint_id=tmp_path / "unequal", no_dist=True)

    _, imported = _import(job, tmp_path / "equal", tmp_path / "taken")

    assert imported.iteration == 0
    with pytest.raises(ConfigError, match=r"0\.last\.weight"):
        _import(job, tmp_path / "unequal", tmp_path)
    assert tier_of(str(tmp_path / "imported")).versions() == ()
