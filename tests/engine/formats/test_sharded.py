"""A save goes to a model that FSDP shards, and comes back from its checkpoint, bit for bit."""

import multiprocessing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from helpers.hf_models import FAMILIES, LENGTH
from helpers.saves import stepped_save
from planaria.checkpoint.disk.tiers import tier_of
from planaria.core.job import DataConfig, JobConfig, ModelConfig
from planaria.engine.formats.dcp_export import export_dcp
from planaria.engine.formats.state_import import import_state
from planaria.engine.formats.whole_model import whole_model
from planaria.engine.prepare import split_model
from planaria.job.save_facts import save_facts

RANKS = 2
BYTES = 256  # The token ids of data.tokenizer = "bytes".


def _load_and_save(rank: int, directory: Path, config: dict[str, Any]) -> None:
    """Loads {directory}/out into a sharded model and its optimizer, and saves {directory}/back."""
    store = f"file://{directory}/rendezvous"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())

    def state() -> dict[str, Any]:
        held = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
        return dict(zip(("model", "optim"), held, strict=True))

    read = state()
    load(read, checkpoint_id=directory / "out")
    set_model_state_dict(model, read["model"])
    set_optimizer_state_dict(model, optimizer, read["optim"])
    save(state(), checkpoint_id=directory / "back")
    distributed.destroy_process_group()


@pytest.mark.long
def test_a_save_comes_back_from_a_sharded_model(tmp_path: Path) -> None:
    """Each of two ranks writes its half of every tensor; the hashes of all layers are the same."""
    model = ModelConfig(config=FAMILIES["llama"])
    job = JobConfig(model=model, data=DataConfig(sequence_length=LENGTH))
    split = split_model(model, seed=0, vocabulary_size=BYTES, sequence_length=LENGTH)
    tier, manifest = stepped_save(job, split, tmp_path / "saves", vocabulary_size=BYTES)

    export_dcp(whole_model(tier, manifest), tmp_path / "out", with_optimizer=True)
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=_load_and_save, args=(rank, tmp_path, dict(split.config)))
        for rank in range(RANKS)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=100)
    assert [process.exitcode for process in ranks] == [0] * RANKS
    imported = import_state(
        job,
        tmp_path / "back",
        iteration=-1,
        tier=tier_of(str(tmp_path / "again")),
        cache_directory=tmp_path / "cache",
        facts=partial(save_facts, job),
    )

    assert imported.layers == manifest.layers
    assert imported.iteration == manifest.iteration
