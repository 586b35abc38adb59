"""What a job file can ask for, each in a whole job on one node and on three: the same bits."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from helpers.jobs import digests, tiny_job, train_shape
from planaria.checkpoint.disk.outgoing import export_parameters
from planaria.checkpoint.disk.tiers import tier_of
from planaria.core.inject import parse_injection
from planaria.core.job import DataConfig, JobConfig, ModelConfig
from planaria.engine.formats.dcp_export import export_dcp
from planaria.engine.formats.state_import import import_state
from planaria.engine.formats.whole_model import whole_model
from planaria.engine.prepare import split_model
from planaria.job.save_facts import save_facts
from planaria.job.training_job import Job
from planaria.nodes.forkserver import ForkServer


def _both(
    job: JobConfig, server: ForkServer, tmp_path: Path
) -> tuple[tuple[str, str], tuple[str, str]]:
    """The digests of the job on (1,), and on (1, 2), saved below "one" and "other"."""
    one, other = (
        replace(job, checkpoint=replace(job.checkpoint, directory=str(tmp_path / name)))
        for name in ("one", "other")
    )
    return digests(train_shape(one, (1,), server)), digests(train_shape(other, (1, 2), server))


def _long(value: object) -> object:
    return pytest.param(value, marks=pytest.mark.long)


@pytest.mark.parametrize(
    "optimizer",
    [
        _long({"name": "SGD", "momentum": 0.9, "nesterov": True}),
        {"name": "Adafactor"},
        _long({"name": "AdamW", "amsgrad": True, "weight_decay": 0.1}),
    ],
    ids=lambda optimizer: str(optimizer["name"]),
)
def test_optimizers(optimizer: dict[str, Any], server: ForkServer, tmp_path: Path) -> None:
    """Any optimizer of torch with state per parameter, its state saved by its own names."""
    job = tiny_job("sequential", tmp_path, optimizer=optimizer)
    one, other = _both(job, server, tmp_path)

    assert one == other
    tier = tier_of(str(tmp_path / "other"))
    manifest = tier.newest()
    assert manifest is not None
    names = {name.rpartition("/")[2] for name in tier.read_layer(manifest, 4)}
    expected = {
        "SGD": {"momentum_buffer"},
        "Adafactor": {"row_var", "col_var", "step"},
        "AdamW": {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"},
    }
    assert expected[optimizer["name"]] <= names


def test_a_target_loss_ends_the_job(server: ForkServer, tmp_path: Path) -> None:
    """All ranks read the same loss off the commit vector, so all stop after the same iteration."""
    job = tiny_job("sequential", tmp_path, iterations=50, target_loss=1.2)
    result = train_shape(job, (1, 2), server)

    losses = [record.loss for record in result.report.iterations]
    assert losses[-1] <= 1.2 < min(losses[:-1])
    assert result.report.final.iteration == len(losses) < 50
    assert not result.stopped


def test_an_iteration_without_any_target_changes_nothing(
    server: ForkServer, tmp_path: Path
) -> None:
    """Rows may be cut before their labels. That is no divergence, and no target that is reached."""
    job = tiny_job("labelled", tmp_path, target_loss=0.5, optimizer={"name": "SGD"})
    job = replace(job, data=replace(job.data, target="helpers.user_models:unlabelled"))

    result = train_shape(job, (1, 2), server)

    assert [record.loss for record in result.report.iterations] == [0.0] * 3


def test_layers_built_alone(server: ForkServer, tmp_path: Path) -> None:
    """Factories: each layer under a seed of its own, wherever it is built."""
    one, other = _both(tiny_job("factories", tmp_path), server, tmp_path)

    assert one == other


def _saved_llama(directory: Path) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=8,
        num_attention_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(directory)
    return model


@pytest.mark.long
def test_adapters_alone_are_trained_moved_and_saved(server: ForkServer, tmp_path: Path) -> None:
    """Their export is one of peft, with the logits of the layers; the model itself stays."""
    peft = pytest.importorskip("peft")
    _saved_llama(tmp_path / "weights")
    lora = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.1, "target_modules": ["q_proj", "up_proj"]}
    model = ModelConfig(path=str(tmp_path / "weights"), lora=lora)
    job = replace(tiny_job("llama", tmp_path), model=model)

    one, other = _both(job, server, tmp_path)
    struck = replace(
        job,
        cluster=replace(job.cluster, nodes=3),
        resilience=replace(job.resilience, failures_tolerated=1),
        checkpoint=replace(job.checkpoint, directory=str(tmp_path / "struck")),
    )
    struck_result = Job(struck).train(
        server=server, injections=[parse_injection("kill:1@1.backward")]
    )
    assert one == other == digests(struck_result)

    tier = tier_of(str(tmp_path / "other"))
    manifest = tier.newest()
    assert manifest is not None
    states = [tier.read_layer(manifest, layer) for layer in range(len(manifest.layers))]
    assert all("lora_" in name for state in states for name in state)
    assert [len(state) for state in states] == [0, *[4 * 4] * 8, 0]
    export_parameters(tier, manifest, tmp_path / "adapters")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "weights", attn_implementation="eager")
    adapted = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapters")).eval()

    split = split_model(model, seed=0, vocabulary_size=256, sequence_length=16)
    hidden = ids = torch.arange(32).reshape(2, 16)
    for layer, state in enumerate(states):
        module = split.materialise(layer).eval()
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if "lora_" in name:
                    parameter.copy_(torch.as_tensor(state[f"parameter/{name}"]))
            hidden = module(hidden)
    with torch.no_grad():
        assert torch.allclose(adapted(ids).logits, hidden, atol=1e-6)
        with adapted.disable_adapter():
            assert not torch.allclose(adapted(ids).logits, hidden, atol=1e-4)


@pytest.mark.long
def test_weights_from_a_directory(server: ForkServer, tmp_path: Path) -> None:
    """A model saved by transformers is where training starts, on one node and on three."""
    _saved_llama(tmp_path / "weights")
    job = tiny_job("llama", tmp_path)
    given = replace(job, model=ModelConfig(path=str(tmp_path / "weights")))

    one, other = _both(given, server, tmp_path)
    assert one == other
    assert one != digests(train_shape(job, (1,), server))


@pytest.mark.long
def test_a_saved_dataset(server: ForkServer, tmp_path: Path) -> None:
    """Rows of token ids, as `datasets` saves them."""
    import datasets  # For this test alone: it takes as long to import as the command line.

    rows = [{"input_ids": [(7 * i + j * j) % 90 for j in range(17)]} for i in range(60)]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "rows")
    data = DataConfig(kind="hf", path=str(tmp_path / "rows"), sequence_length=16)

    one, other = _both(replace(tiny_job("gpt2", tmp_path), data=data), server, tmp_path)

    assert one == other


@pytest.mark.long
@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_a_text_file_with_a_tokenizer_of_its_own(
    family: str, server: ForkServer, tmp_path: Path
) -> None:
    """Byte pairs learned from the file; for BERT one token more, the mask."""
    path = tmp_path / "text.txt"
    path.write_text(" ".join(f"line {i} of {i * i} words, {i % 7} apart" for i in range(2000)))
    data = DataConfig(path=str(path), sequence_length=16, tokenizer="bpe", vocabulary_size=300)

    one, other = _both(replace(tiny_job(family, tmp_path), data=data), server, tmp_path)

    assert one == other


def test_an_export_is_a_model_of_transformers(server: ForkServer, tmp_path: Path) -> None:
    """from_pretrained builds it, with the parameters that were saved."""
    job = tiny_job("gpt2", tmp_path)
    train_shape(job, (2,), server)
    tier = tier_of(job.checkpoint.directory)
    manifest = tier.newest()
    assert manifest is not None
    export_parameters(tier, manifest, tmp_path / "exported")

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32)
    state = model.state_dict()
    assert type(model).__name__ == "GPT2LMHeadModel"
    for entry in manifest.layers:
        for name, array in tier.read_layer(manifest, entry.layer).items():
            kind, _, rest = name.partition("/")
            if kind == "parameter":
                assert torch.equal(state[rest], torch.from_numpy(array)), rest


def test_a_job_keeps_its_newest_save_under_a_name(server: ForkServer, tmp_path: Path) -> None:
    """And goes on from it to the bits that it would have had."""
    job = tiny_job("sequential", tmp_path, iterations=4)
    job = replace(job, checkpoint=replace(job.checkpoint, persist_every=2))
    whole = train_shape(job, (2,), server)
    first = tiny_job("sequential", tmp_path / "first", iterations=2)
    train_shape(first, (1,), server)
    place = Job(first).save("half")

    again = replace(job, checkpoint=replace(job.checkpoint, directory=str(Path(place).parent)))
    result = train_shape(again, (3,), server, resume=True)
    assert digests(whole) == digests(result)


def test_a_job_goes_on_from_a_state_that_was_imported(server: ForkServer, tmp_path: Path) -> None:
    """As from its own save: out to DCP and in again, it ends with the bits of the whole job."""
    whole = train_shape(tiny_job("sequential", tmp_path, iterations=4), (2,), server)
    first = tiny_job("sequential", tmp_path / "first", iterations=2)
    train_shape(first, (1,), server)
    tier = tier_of(first.checkpoint.directory)
    manifest = tier.newest()
    assert manifest is not None
    export_dcp(whole_model(tier, manifest), tmp_path / "dcp", with_optimizer=True)

    again = tiny_job("sequential", tmp_path / "again", iterations=4)
    imported = import_state(
        again,
        tmp_path / "dcp",
        iteration=-1,
        tier=tier_of(again.checkpoint.directory),
        cache_directory=tmp_path,
        facts=partial(save_facts, again),
    )
    result = train_shape(again, (3,), server, resume=True)

    assert imported.layers == manifest.layers
    assert digests(whole) == digests(result)


def test_a_job_begins_with_parameters_that_were_imported(
    server: ForkServer, tmp_path: Path
) -> None:
    """At iteration 0, with an optimizer that has taken no step."""
    job = tiny_job("sequential", tmp_path, iterations=2)
    whole = train_shape(job, (1,), server)
    split = split_model(job.model, seed=7, vocabulary_size=0, sequence_length=1)
    (tmp_path / "start").mkdir()
    state = {
        name: parameter
        for layer in range(split.num_layers)
        for name, parameter in split.materialise(layer).state_dict().items()
    }
    save_file(state, tmp_path / "start" / "model.safetensors")

    again = tiny_job("sequential", tmp_path / "again", iterations=2)
    import_state(
        again,
        tmp_path / "start",
        iteration=-1,
        tier=tier_of(again.checkpoint.directory),
        cache_directory=tmp_path,
        facts=partial(save_facts, again),
    )
    result = train_shape(again, (2,), server, resume=True)

    assert digests(whole) == digests(result)
