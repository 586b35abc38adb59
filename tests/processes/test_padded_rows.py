"""Rows of unequal length train an encoder of transformers as a plain loop with masks does."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers.jobs import CONFIGS, digests, tiny_job, train_shape
from helpers.oracle import microbatches_of, train
from planaria.checkpoint.disk.tiers import tier_of
from planaria.core.inject import parse_injection
from planaria.core.job import DataConfig, EvaluationConfig, JobConfig, ModelConfig
from planaria.engine.optimizer import learning_rate
from planaria.engine.prepare import load_data, load_model
from planaria.job.planning import cache_directory
from planaria.job.training_job import TrainingResult
from planaria.models.hf_model import hf_config, meta_model
from planaria.models.layers import cross_entropy_sum
from planaria.nodes.forkserver import ForkServer
from planaria.transport.timekeeping import Timekeeper

_ROBERTA = {
    **CONFIGS["bert"],
    "model_type": "roberta",
    "num_labels": 3,
    "architectures": ["RobertaForSequenceClassification"],
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def _job(directory: Path) -> JobConfig:
    """A classifier of texts of 2 to 16 tokens; half of the rows are saved with padding."""
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    lengths = [2 + (5 * i) % 15 for i in range(60)]
    rows = [[2 + (7 * i + j * j) % 90 for j in range(length)] for i, length in enumerate(lengths)]
    padding = [(16 - len(row)) * (i % 2) for i, row in enumerate(rows)]
    columns = {
        "input_ids": [row + [1] * count for row, count in zip(rows, padding, strict=True)],
        "attention_mask": [
            [1] * len(row) + [0] * count for row, count in zip(rows, padding, strict=True)
        ],
        "labels": [sum(row) % 3 for row in rows],
    }
    datasets.Dataset.from_dict(columns).save_to_disk(directory / "rows")
    job = tiny_job("bert", directory, iterations=4, learning_rate=1e-3)
    return replace(
        job,
        model=ModelConfig(config=_ROBERTA),
        data=DataConfig(kind="hf", path=str(directory / "rows"), sequence_length=16, workers=1),
        evaluation=EvaluationConfig(every=2, path=str(directory / "rows"), samples=7),
    )


def _train_struck(job: JobConfig, server: ForkServer) -> TrainingResult:
    """The job on a node and on two stages, of which one is killed."""
    job = replace(job, resilience=replace(job.resilience, failures_tolerated=1))
    return train_shape(job, (1, 2), server, injections=[parse_injection("kill:1@2.backward")])


def test_padded_rows_train_as_in_a_plain_loop_with_masks(
    server: ForkServer, tmp_path: Path
) -> None:
    """Over stages, and after a loss; beside the class of transformers, which gets each microbatch
    with its attention_mask.
    """
    torch.set_num_threads(1)
    job, cache = _job(tmp_path), Path(cache_directory())
    split = load_model(job, cache_directory=cache, profile=None, timekeeper=Timekeeper())
    dataset = load_data(job, objective=split.objective, cache_directory=cache)
    config = hf_config(job.model, vocabulary_size=dataset.vocabulary_size, sequence_length=16)
    whole = type(meta_model(config, is_deterministic=True)[0])(config).train()
    with torch.no_grad():
        for layer in range(split.num_layers):
            for name, parameter in split.materialise(layer).named_parameters():
                whole.get_parameter(name).copy_(parameter)
    expected = train(
        whole,
        microbatches_of(job, dataset),
        loss_sum=cross_entropy_sum,
        learning_rates=[learning_rate(job.training, iteration) for iteration in range(4)],
        gradient_clip=job.training.gradient_clip,
    )

    result = _train_struck(job, server)

    assert [event.nodes for event in result.report.events] == [(1,)]
    losses = [record.loss for record in result.report.iterations]
    assert list(expected.losses) == pytest.approx(losses, rel=1e-5)
    tier = tier_of(job.checkpoint.directory)
    manifest = tier.newest()
    assert manifest is not None
    for layer in range(split.num_layers):
        state = tier.read_layer(manifest, layer)
        names = list(split.parameter_shapes(layer))
        theirs = torch.cat([expected.parameters[name].flatten() for name in names])
        ours = torch.cat([torch.from_numpy(state[f"parameter/{n}"]).flatten() for n in names])
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm(), layer


@pytest.mark.long
def test_padded_rows_have_the_same_bits_anywhere(server: ForkServer, tmp_path: Path) -> None:
    """On one node, and over stages of which one is killed; held-out rows are padded, too."""
    alone, struck = (_job(tmp_path / name) for name in ("alone", "struck"))
    alone_result, struck_result = train_shape(alone, (1,), server), _train_struck(struck, server)

    assert digests(alone_result) == digests(struck_result)
    losses = [[e.loss for e in r.report.evaluations] for r in (alone_result, struck_result)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 2
