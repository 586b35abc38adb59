"""What a user is told before a job starts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from helpers.hf_models import FALCON
from helpers.jobs import tiny_job
from helpers.preparing import preparation
from helpers.saved_datasets import saved_dataset
from planaria.core.job import DataConfig, EvaluationConfig, JobConfig, ModelConfig
from planaria.core.plan import ModelProfile

CONFIG = GPT2Config(vocab_size=256, n_layer=2, n_embd=16, n_head=2, n_positions=32)
NOTE = "tokens of planaria's own (data.tokenizer = 'bytes')"


@pytest.fixture
def gpt2_job(tmp_path: Path) -> JobConfig:
    """A job with a text of its own: to gather the library's prose takes seconds."""
    (tmp_path / "words").write_text("the snow fell, and was sold\n" * 60)
    data = DataConfig(path=str(tmp_path / "words"), sequence_length=4)
    return replace(tiny_job("gpt2", tmp_path), data=data)


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> ModelProfile:
    """A profile of GPT-2 on rows of the token 1, for tests that are not about what is measured."""
    directory = tmp_path_factory.mktemp("profile")
    data = saved_dataset(directory, {"input_ids": [[1] * 4] * 40})
    measured = preparation(replace(tiny_job("gpt2", directory), data=data), directory).profile
    assert measured is not None
    return measured


@pytest.mark.parametrize(("column", "is_told"), [("", True), ("text", True), ("input_ids", False)])
def test_text_for_a_model_with_weights_is_told(
    column: str, is_told: bool, gpt2_job: JobConfig, tmp_path: Path
) -> None:
    """Its embeddings stand for the tokens of another tokenizer, and the loss falls all the same."""
    columns: dict[str, list[Any]] = {
        "text": ["some words of a text"] * 30,
        "input_ids": [[1, 2, 3, 4]] * 30,
    }
    data = gpt2_job.data
    if column:
        data = saved_dataset(tmp_path, {column: columns[column]})
    GPT2LMHeadModel(CONFIG).save_pretrained(tmp_path / "model")
    model = ModelConfig(path=str(tmp_path / "model"))
    job = replace(gpt2_job, model=model, data=data)

    told = preparation(job, tmp_path)

    assert told.mistake is None
    assert (NOTE in "\n".join(told.notes)) == told.has_own_tokens == is_told


def test_text_in_the_tokens_of_the_weights_is_told_nothing(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    GPT2LMHeadModel(CONFIG).save_pretrained(tmp_path / "model")
    words = tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    model = ModelConfig(path=str(tmp_path / "model"))
    data = saved_dataset(tmp_path, {"text": ["a b and so on"] * 30})
    data = replace(data, tokenizer="model", sequence_length=4)

    told = preparation(replace(tiny_job("gpt2", tmp_path), model=model, data=data), tmp_path)

    assert told.mistake is None
    assert "tokens" not in "\n".join(told.notes)
    assert not told.has_own_tokens
    assert told.vocabulary_size == 3


def test_an_operator_that_does_not_repeat_itself_is_told_with_the_key(tmp_path: Path) -> None:
    """Torch names a function that no user of planaria calls."""
    model = ModelConfig(kind="python", target="helpers.mistaken_models:repeats_not")
    data = DataConfig(kind="python", target="helpers.user_models:points")

    told = preparation(replace(tiny_job("gpt2", tmp_path), model=model, data=data), tmp_path)

    assert told.mistake is not None
    assert told.mistake[0] == "training.deterministic"
    assert "repeats itself: cumsum_cuda_kernel does not have" in told.mistake[2]


def test_an_error_without_a_text_is_told_with_its_place(tmp_path: Path) -> None:
    model = ModelConfig(kind="python", target="helpers.mistaken_models:unspeakable")
    data = DataConfig(kind="python", target="helpers.user_models:points")

    told = preparation(replace(tiny_job("gpt2", tmp_path), model=model, data=data), tmp_path)

    assert "mistaken_models.py" in told.traceback


def test_a_model_that_begins_anew_learns_any_tokens(gpt2_job: JobConfig, tmp_path: Path) -> None:
    """Also if its config is that of a directory."""
    CONFIG.save_pretrained(tmp_path / "model")
    for path in ("", str(tmp_path / "model")):
        job = replace(gpt2_job, model=ModelConfig(path=path) if path else gpt2_job.model)
        told = preparation(job, tmp_path)

        assert told.mistake is None
        assert told.has_own_tokens
        assert NOTE not in "\n".join(told.notes)


def test_layers_that_refuse_selective_checkpointing_do_so_with_a_given_profile(
    gpt2_job: JobConfig, tmp_path: Path
) -> None:
    """Falcon divides a product in place, which torch does not see: its gradients were wrong."""
    config = {"model_type": "falcon", **FALCON, "attn_implementation": "eager"}
    job = replace(gpt2_job, model=ModelConfig(config=config))
    measured = preparation(job, tmp_path).profile
    training = replace(job.training, activation_checkpointing="selective")

    told = preparation(replace(job, training=training), tmp_path, profile=measured)

    assert measured is not None
    assert "mutated in place" in told.traceback


@pytest.mark.parametrize(
    ("lengths", "padded", "words"),
    [
        ([4] * 20 + [12] * 20, 0, "20 of its 40 rows have more tokens than data.sequence_length"),
        ([4] * 20 + [12] * 20, 0, "so 50.0% of its tokens are left out; set it to 12 "),
        ([10] * 10 + [4] * 30, 0, "so 27.2% of its tokens are left out; set it to 10 "),
        ([4] * 40, 0, ""),
        ([4] * 40, 8, ""),  # What is left out is padding.
        ([2] * 39 + [5], 0, "so 1.2% of its tokens are left out"),
        ([4] * 39 + [5], 0, ""),  # 0.6%
    ],
)
def test_tokens_beyond_the_sequence_length_are_told(
    lengths: list[int], padded: int, words: str, profile: ModelProfile, tmp_path: Path
) -> None:
    """The default of 128 left out nine tenths of rows of 1,280 without a word."""
    columns = {
        "input_ids": [[1] * (length + padded) for length in lengths],
        "attention_mask": [[1] * length + [0] * padded for length in lengths],
    }
    data = saved_dataset(tmp_path, columns)

    job = replace(tiny_job("gpt2", tmp_path), data=data)
    told = preparation(job, tmp_path, profile=profile)

    assert told.mistake is None
    notes = "\n".join(told.notes)
    assert words in notes
    assert ("left out" in notes) == bool(words)
    assert ("data.path" in notes) == bool(words)


def test_tokens_of_held_out_rows_that_are_left_out_are_told(
    profile: ModelProfile, tmp_path: Path
) -> None:
    """The loss that is shown is that of the first tokens alone."""
    short = saved_dataset(tmp_path / "short", {"input_ids": [[1] * 4] * 40})
    long = saved_dataset(tmp_path / "long", {"input_ids": [[1] * 16] * 40})
    job = replace(tiny_job("gpt2", tmp_path), data=short)
    evaluation = EvaluationConfig(every=1, path=long.path)

    told = preparation(replace(job, evaluation=evaluation), tmp_path, profile=profile)
    never = replace(job, evaluation=replace(evaluation, every=0))
    untold = preparation(never, tmp_path, profile=profile)

    assert told.mistake is untold.mistake is None
    (note,) = (note for note in told.notes if "left out" in note)
    assert note.startswith(f"evaluation.path = {long.path!r}: 40 of its 40 rows")
    assert "left out" not in "\n".join(untold.notes)


def test_columns_of_token_ids_that_nothing_is_made_of_are_told(
    profile: ModelProfile, tmp_path: Path
) -> None:
    """A user may expect them to count, as in other trainers."""
    rows: dict[str, list[Any]] = {
        "input_ids": [[1] * 4] * 40,
        "position_ids": [[*range(4)]] * 40,
    }
    few = saved_dataset(tmp_path / "few", rows)
    many = saved_dataset(tmp_path / "many", rows | {"length": [4] * 40, "weight": [0.5] * 40})
    job = replace(tiny_job("gpt2", tmp_path), data=many)
    evaluation = EvaluationConfig(every=1, path=few.path)

    told = preparation(replace(job, evaluation=evaluation), tmp_path, profile=profile)
    job = replace(job, data=few, evaluation=replace(evaluation, path=many.path))
    others = preparation(job, tmp_path, profile=profile)

    assert told.mistake is others.mistake is None
    for key, notes in (("data.path", told.notes), ("evaluation.path", others.notes)):
        (note,) = (note for note in notes if "nothing is done" in note)
        assert note.startswith(f"{key} = {many.path!r}: ")
        assert "its columns length, weight; samples are made of input_ids" in note


def test_text_in_a_saved_data_set_leaves_no_token_out(tmp_path: Path) -> None:
    """It is cut into samples, whatever the lengths of its rows."""
    data = saved_dataset(tmp_path, {"text": ["some words of a text"] * 30})

    told = preparation(replace(tiny_job("gpt2", tmp_path), data=data), tmp_path)

    assert told.mistake is None
    assert "left out" not in "\n".join(told.notes)


@pytest.mark.parametrize("can_be_kept", [True, False])
def test_a_learned_tokenizer_is_kept_beside_the_saves(can_be_kept: bool, tmp_path: Path) -> None:
    """An export needs it, and the cache is one machine's, and may be emptied. A profile keeps
    none, and a place that refuses it ends no job."""
    (tmp_path / "text").write_text("the snow fell, and was sold\n" * 60)
    data = DataConfig(
        path=str(tmp_path / "text"), sequence_length=8, tokenizer="bpe", vocabulary_size=280
    )
    job = replace(tiny_job("gpt2", tmp_path), data=data)
    saves = Path(job.checkpoint.directory)
    first = preparation(job, tmp_path)
    assert not list(saves.glob("tokenizer-*"))
    if not can_be_kept:
        saves.parent.mkdir(parents=True, exist_ok=True)
        saves.write_text("no directory")

    prepared = preparation(job, tmp_path, profile=first.profile, keeps_tokenizer=True)

    assert prepared.mistake is None
    if can_be_kept:
        assert [file.name for file in saves.iterdir()] == [Path(prepared.tokenizer_file).name]
    else:
        assert "could not be kept beside the saves" in "\n".join(prepared.notes)


@pytest.mark.parametrize(
    ("data", "metric", "parts"),
    [
        ("user_models:points", "misspelt", ("armgax", "raised for samples 0 to 1 in")),
        ("user_models:points", "two_numbers", ("must return one number", "samples 0 to 1 in")),
        ("mistaken_models:other_labels", "", ("is out of bounds", "samples 0 to 1 in")),
        ("mistaken_models:other_shapes", "", ("2x7", "raised for samples 0 to 1 in")),
    ],
)
def test_a_mistake_in_an_evaluation_is_told_before_the_job_trains(
    data: str, metric: str, parts: tuple[str, ...], tmp_path: Path
) -> None:
    """It ended the job after `evaluation.every` iterations, which may take hours."""
    metrics = {metric: f"helpers.mistaken_models:{metric}"} if metric else {}
    evaluation = EvaluationConfig(every=5000, target=f"helpers.{data}", metrics=metrics)
    job = replace(tiny_job("sequential", tmp_path), evaluation=evaluation)

    told = preparation(job, tmp_path)

    text = "".join(told.mistake or ()) + told.traceback
    for part in (*parts, "the evaluation that is tried before training"):
        assert part in text
