"""`planaria checkpoint`: what is saved, whether it is whole, and what may go."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast
from unittest.mock import Mock

import numpy as np
import pytest
import tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)
from typer.testing import CliRunner

from helpers.saved_datasets import saved_dataset
from helpers.saves import stepped_save
from planaria.checkpoint.disk.storage import Directory
from planaria.checkpoint.disk.tiers import Manifest, Tier, tier_of
from planaria.cli.checkpoint_command import _tokenizer_note
from planaria.cli.main import app
from planaria.core.job import DataConfig, ModelConfig
from planaria.data.datasets import load_dataset
from planaria.data.text import TokenDataset
from planaria.engine.prepare import split_model
from planaria.job.config import load_job

LAYERS = 3


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Versions of 10, 20 and 30 iterations, and one of 5 that nobody completed."""
    tier = tier_of(str(tmp_path / "saves"))
    for iteration in (10, 20, 30):
        files = tuple(
            tier.write_layer(iteration, 1, layer, {"parameter/w": np.full(9, iteration + layer)})
            for layer in range(LAYERS)
        )
        tier.publish(Manifest(iteration=iteration, epoch=1, job={}, layers=files))
    tier.write_layer(5, 0, 0, {"parameter/w": np.zeros(9)})
    return tmp_path / "saves"


def told(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["checkpoint", *words])
    assert result.exit_code == code, result.output
    return result.output


def test_versions_are_listed_the_newest_first(directory: Path) -> None:
    """With why one is not complete."""
    lines = [line.split() for line in told("ls", str(directory)).splitlines()]
    assert [line[0] for line in lines if line and "-" in line[0]][-4:] == [
        "30-1",
        "20-1",
        "10-1",
        "5-0",
    ]

    listed = json.loads(told("ls", str(directory), "--json"))
    assert [(one["iteration"], one["is_complete"]) for one in listed] == [
        (30, True),
        (20, True),
        (10, True),
        (5, False),
    ]
    assert listed[0]["num_layers"] == LAYERS
    assert listed[0]["num_bytes"] > LAYERS * 9 * 8
    assert "no manifest" in listed[3]["reason"]


def test_a_table_in_a_pipe_is_as_wide_as_its_cells(directory: Path) -> None:
    """It was wrapped at 80 columns, with a row in several lines."""
    lines = told("ls", str(directory)).splitlines()

    (incomplete,) = [line for line in lines if line.strip().startswith("5-0")]
    assert "not complete: it has no manifest" in " ".join(incomplete.split())


def test_a_path_in_a_table_is_no_style(directory: Path) -> None:
    """A directory in brackets vanished from the reason why a version cannot be read."""
    bracketed = directory.rename(directory.with_name("[a]"))
    manifest = bracketed / "30-1" / "manifest.json"
    manifest.unlink()
    manifest.mkdir()

    assert str(manifest) in told("ls", str(bracketed))


def test_a_version_that_is_kept_under_a_name_is_listed(directory: Path) -> None:
    """After the others; what nodes without a head have left is none."""
    told("save", "--name", "tonight", str(directory))
    (directory / "run-000001-a").mkdir()
    (directory / "notes").mkdir()
    lines = told("ls", str(directory)).strip().splitlines()

    assert lines[-1].split()[:2] == ["tonight", "30"]
    assert lines[-1].rstrip().endswith("kept")
    *others, kept = json.loads(told("ls", str(directory), "--json"))
    assert len(others) == 4
    assert (kept["kept_as"], kept["version"], kept["num_layers"]) == ("tonight", "30-1", LAYERS)
    assert told("ls", str(directory / "tonight")).rstrip().endswith("complete, kept")


def test_a_flipped_bit_is_found_and_named(directory: Path) -> None:
    """In the version and the layer that it is in."""
    assert json.loads(told("verify", str(directory), "--json")) == {
        "30-1": [],
        "20-1": [],
        "10-1": [],
        "5-0": ["not complete: it has no manifest, so its save was never completed"],
    }
    path = directory / "20-1" / "layer-00002.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 4
    path.write_bytes(content)

    output = told("verify", str(directory), code=1)
    assert "30-1: undamaged" in output
    assert f"20-1: {path} does not hold what was written" in output.replace("\n", "")
    assert "a job cannot go on from 1 of 3 versions" in output
    assert "5-0: not complete: it has no manifest" in output
    assert told("verify", str(directory), "--version", "30-1").strip() == "30-1: undamaged"


def test_saves_that_are_kept_under_a_name_are_verified_too(directory: Path) -> None:
    """They are what is archived, and a damaged one was not looked at: all was undamaged."""
    told("save", "--name", "tonight", str(directory))
    path = directory / "tonight" / "30-1" / "layer-00002.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 4
    path.write_bytes(content)

    output = told("verify", str(directory), code=1).replace("\n", "")
    assert f"tonight/30-1: {path} does not hold what was written" in output
    for version in ("tonight", "tonight/30-1"):
        assert "tonight/30-1: " in told("verify", str(directory), "--version", version, code=1)


@pytest.mark.parametrize("file", ["layer-00000.safetensors", "manifest.json"])
def test_a_kept_save_is_verified_though_a_job_has_begun_another_one_beside_it(
    file: str, directory: Path
) -> None:
    """The newest version under the name was taken for the kept one."""
    told("save", "--name", "gold", str(directory))
    gold = tier_of(str(directory / "gold"))
    gold.write_layer(40, 2, 0, {"parameter/w": np.zeros(9)})
    assert "gold/30-1: undamaged" in told("verify", str(directory), "--version", "gold")
    path = directory / "gold" / "30-1" / file
    path.write_bytes(path.read_bytes()[:-1] + b"?")

    output = told("verify", str(directory), code=1)
    assert "gold/40-2: not complete: it has no manifest" in output
    assert "a job cannot go on from 1 of 4 versions" in output


def test_a_version_that_a_job_removes_meanwhile_is_not_damaged(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To read all of them takes minutes, and a job that runs there prunes."""
    read, removed = Directory.read, list[str]()

    def prune_and_read(storage: Directory, name: str) -> bytes:
        if "layer" in name and not removed:
            removed.append("")
            removed.extend(tier_of(str(directory)).prune(1))
        return read(storage, name)

    monkeypatch.setattr(Directory, "read", prune_and_read)

    output = told("verify", str(directory))
    assert removed == ["", "5-0", "10-1", "20-1"]
    assert "30-1: undamaged" in output
    assert "20-1: was removed meanwhile" in output
    assert "10-1: was removed meanwhile" in output


def test_a_version_that_is_removed_while_it_is_listed_is_not_damaged(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, removed = Directory.read, list[str]()

    def prune_and_read(storage: Directory, name: str) -> bytes:
        if name == "20-1/manifest.json" and not removed:
            removed.append("")
            removed.extend(tier_of(str(directory)).prune(1))
        return read(storage, name)

    monkeypatch.setattr(Directory, "read", prune_and_read)

    assert "20-1: was removed meanwhile" in told("verify", str(directory))


def test_a_version_that_is_asked_for_and_not_complete_is_damaged(directory: Path) -> None:
    """Nobody could go on from it."""
    output = told("verify", str(directory), "--version", "5-0", code=1)
    assert "5-0: not complete: it has no manifest" in output


@pytest.fixture
def leftovers(tmp_path: Path) -> Path:
    """Two versions that nobody completed."""
    tier = tier_of(str(tmp_path / "leftovers"))
    for iteration in (5, 6):
        tier.write_layer(iteration, 0, 0, {"parameter/w": np.zeros(9)})
    return tmp_path / "leftovers"


def test_a_directory_of_incomplete_versions_is_not_whole(leftovers: Path) -> None:
    """A script that goes on from it only if it is has to be told."""
    output = told("verify", str(leftovers), code=1)
    assert "6-0: not complete: it has no manifest" in output
    assert "5-0: not complete: it has no manifest" in output
    assert f"{leftovers} holds no complete version" in output
    assert '"5-0": [' in told("verify", str(leftovers), "--json", code=1)


def test_what_needs_a_complete_version_says_that_there_is_none(
    leftovers: Path, tmp_path: Path
) -> None:
    """Not that an empty name is wrong, nor that there is as much as is to be kept."""
    output = str(tmp_path / "exported")
    for words in (("export", "-o", output), ("save", "--name", "best")):
        found = told(*words, str(leftovers), code=2)
        assert f"DIRECTORY = '{leftovers}': holds no complete version" in found
        assert "try again then" in found
    found = told("export", str(leftovers), "--version", "5-0", "-o", output, code=2)
    assert "--version = '5-0': there is no complete version" in found
    assert f"nothing to remove: {leftovers} holds no complete version" in told(
        "prune", str(leftovers)
    )


def test_a_published_version_that_lacks_a_file_is_damaged(directory: Path) -> None:
    """Another one that is whole does not make up for it; one that was set aside was told before."""
    (directory / "20-1" / "layer-00002.safetensors").unlink()
    output = told("verify", str(directory), code=1)
    assert "20-1: not complete: layer-00002.safetensors is missing" in output
    assert "a job cannot go on from 1 of 3 versions" in output

    tier_of(str(directory)).set_aside("20-1")
    output = told("verify", str(directory))
    assert "20-1: not complete: it was damaged, and set aside" in output


def test_old_versions_are_removed(directory: Path) -> None:
    """And those that were never completed; then there is nothing more to do."""
    output = told("prune", str(directory), "--keep", "1")
    assert output.count("removed /") == 3
    assert [one.name for one in tier_of(str(directory)).versions()] == ["30-1"]
    assert "no more versions than it should keep" in told("prune", str(directory), "--keep", "1")


def test_a_damaged_version_does_not_count_among_those_that_stay(directory: Path) -> None:
    """Its manifest and its sizes are right, and the only sound version was removed for it."""
    file = directory / "30-1" / "layer-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    output = told("prune", str(directory), "--keep", "1")

    assert f"{directory / '30-1'} does not count, and stays: {file} does not hold what" in output
    assert output.count("removed /") == 2
    assert [one.name for one in tier_of(str(directory)).versions()] == ["30-1", "20-1"]


def test_versions_are_not_read_where_no_complete_one_goes(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may have terabytes."""
    monkeypatch.setattr(Tier, "read_layer", Mock(side_effect=AssertionError))

    assert told("prune", str(directory), "--keep", "3").count("removed /") == 1


def test_incomplete_versions_that_are_newer_than_all_others_are_named(directory: Path) -> None:
    """Each may be a save that a disk refused, or one that is being written."""
    tier_of(str(directory)).write_layer(40, 1, 0, {"parameter/w": np.zeros(9)})
    for output in (told("prune", str(directory)), told("prune", str(directory))):
        assert f"{directory / '40-1'} stays: it is not complete" in output
        assert "a job may be writing it; if none is, remove it" in output

    assert [one.name for one in tier_of(str(directory)).versions()] == ["40-1", "30-1", "20-1"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("ls", "nowhere"), "there is no version of a job in it"),
        (("verify", "nowhere"), "there is no version of a job in it"),
        (("prune", "nowhere"), "there is no version of a job in it"),
    ],
)
def test_a_directory_without_versions_is_named(words: tuple[str, ...], message: str) -> None:
    """It may be that of another job."""
    assert message in told(*words, code=2)


def test_a_directory_of_jobs_names_those_that_have_versions(directory: Path) -> None:
    """Jobs of several examples save side by side."""
    (directory.parent / "empty").mkdir()
    output = told("ls", str(directory.parent), code=2)
    assert f"in it, but in {directory}" in output.replace("\n", "")


def test_a_version_that_is_not_there_is_named(directory: Path) -> None:
    """With where to look."""
    output = told("verify", str(directory), "--version", "7-7", code=2)
    assert "planaria checkpoint ls lists them" in output


@pytest.mark.parametrize("output", [".", "./", "", "../here"])
def test_an_export_may_go_to_the_directory_one_is_in(
    directory: Path, output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which has no name of its own in the path that was given."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    told("export", str(directory), "-o", output)
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["model.safetensors"]
    assert "is not empty" in told("export", str(directory), "-o", output, code=2)
    assert "cannot be reached: File name" in told("export", str(directory), "-o", "x" * 300, code=2)


def _language_model(directory: Path) -> None:
    """A GPT-2 with a tokenizer of words and with settings for generation."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "one": 1, "two": 2}))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    tokenizer.save_pretrained(directory)
    GPT2LMHeadModel(GPT2Config(vocab_size=256, **SHAPE)).save_pretrained(directory)
    GenerationConfig(max_new_tokens=7, eos_token_id=2).save_pretrained(directory)


SHAPE: dict[str, Any] = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 32}
MODEL = ModelConfig(config={"model_type": "gpt2", **SHAPE})
JOB = """
[model]
path = "{path}"
[data]
sequence_length = 8
[training]
optimizer = {{ name = "AdamW", weight_decay = 0.1 }}
[checkpoint]
directory = "{directory}"
"""


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with job.toml, with the save of that job in saves, and its model in model."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    _language_model(tmp_path / "model")
    for name in ("saves", "others"):
        file = tmp_path / ("job.toml" if name == "saves" else "other.toml")
        file.write_text(JOB.format(path=tmp_path / "model", directory=tmp_path / name))
    config = load_job(tmp_path / "job.toml")
    split = split_model(config.model, seed=0, vocabulary_size=256, sequence_length=8)
    stepped_save(config, split, tmp_path / "saves", vocabulary_size=256)
    return tmp_path


def test_an_export_is_ready_to_generate(tuned: Path) -> None:
    """With the tokenizer and the settings of the model that training began with."""
    output = told("export", str(tuned / "saves"), "-o", str(tuned / "out"))

    text = "one two three"
    ids = AutoTokenizer.from_pretrained(tuned / "out")(text)["input_ids"]
    assert ids == AutoTokenizer.from_pretrained(tuned / "model")(text)["input_ids"] == [1, 2, 0]
    settings = GenerationConfig.from_pretrained(tuned / "out")
    assert (settings.max_new_tokens, settings.eos_token_id) == (7, 2)
    assert AutoModelForCausalLM.from_pretrained(tuned / "out").generation_config.eos_token_id == 2
    assert "the job was trained on tokens of its own (data.tokenizer = 'bytes')" in output

    (tuned / "model").rename(tuned / "moved")
    assert "its tokenizer is not in the export" in told(
        "export", str(tuned / "saves"), "-o", str(tuned / "without")
    )
    moved = ("--model-path", str(tuned / "moved"))
    told("export", str(tuned / "saves"), "-o", str(tuned / "with"), *moved)
    assert (tuned / "with" / "tokenizer.json").is_file()


@pytest.mark.parametrize(
    ("column", "is_told"), [({"text": ["one two"]}, True), ({"input_ids": [[1, 2]]}, False)]
)
def test_an_export_says_if_a_saved_data_set_was_text(
    column: dict[str, list[Any]], is_told: bool, tuned: Path
) -> None:
    """Its kind is "hf" in either case."""
    data = saved_dataset(tuned, column)
    config = replace(load_job(tuned / "job.toml"), data=data)
    split = split_model(config.model, seed=0, vocabulary_size=256, sequence_length=8)
    stepped_save(config, split, tuned / "of_rows", vocabulary_size=256)

    output = told("export", str(tuned / "of_rows"), "-o", str(tuned / "out"))

    assert ("trained on tokens of its own (data.tokenizer = 'bytes')" in output) == is_told


@pytest.mark.parametrize("objective", ["causal", "masked"])
@pytest.mark.parametrize(("tokenizer", "num_tokens"), [("bytes", 256), ("bpe", 280), ("bpe", 999)])
def test_an_export_of_a_model_of_text_has_its_tokenizer(
    tokenizer: str, num_tokens: int, objective: str, tuned: Path
) -> None:
    """So transformers can read and generate text with it, whatever Unicode it holds. Of this text
    no 999 tokens are learned: the mask, which comes after them all the same, was left out."""
    (tuned / "text").write_text("the snow \u96ea fell, \x00 and na\u00efve \u20ac sold\n" * 60)
    size: Any = {"vocabulary_size": num_tokens} if tokenizer == "bpe" else {}
    path, kind = str(tuned / "text"), cast(Literal["bytes", "bpe"], tokenizer)
    data = DataConfig(path=path, sequence_length=8, tokenizer=kind, **size)
    config = replace(load_job(tuned / "job.toml"), data=data, model=MODEL)
    samples = load_dataset(data, objective=objective, seed=0, cache_directory=tuned / "cache")
    assert isinstance(samples, TokenDataset)
    num_ids = samples.vocabulary_size
    split = split_model(MODEL, seed=0, vocabulary_size=num_ids, sequence_length=8)
    stepped_save(
        config,
        split,
        tuned / "of_text",
        vocabulary_size=num_ids,
        tokenizer_file=samples.tokenizer_file,
    )

    output = told("export", str(tuned / "of_text"), "-o", str(tuned / "out"))

    written = AutoTokenizer.from_pretrained(tuned / "out")
    text = (tuned / "text").read_text()
    ids = written(text)["input_ids"]
    assert written.decode(ids) == text
    assert len(ids) == len(text.encode()) or tokenizer == "bpe"
    whole = load_dataset(data, objective="causal", seed=0, cache_directory=tuned / "cache")
    for number in (0, len(whole) - 1):
        assert whole.sample(number, seed=0)[0].tolist() == ids[8 * number : 8 * number + 8]
    assert written.mask_token_id == (num_tokens if objective == "masked" else None)
    assert str(tuned / "out" / "tokenizer.json") in output.replace("\n", "")
    assert "the tokenizer that" not in output


def test_a_directory_of_a_model_that_cannot_be_entered_is_not_here() -> None:
    """It was a traceback. Root enters any directory, so its name is too long to be looked at."""
    manifest = Manifest(iteration=1, epoch=1, job={}, layers=())
    note = _tokenizer_note(manifest, "model" * 100, (), is_written=False)

    assert "is not here, so its tokenizer is not in the export" in note


def test_an_export_says_where_a_learned_tokenizer_is(tuned: Path) -> None:
    """The cache is another machine's, or was emptied."""
    data = DataConfig(tokenizer="bpe", vocabulary_size=280, sequence_length=8)
    config = replace(load_job(tuned / "job.toml"), data=data, model=MODEL)
    split = split_model(MODEL, seed=0, vocabulary_size=280, sequence_length=8)
    stepped_save(
        config, split, tuned / "of_text", vocabulary_size=280, tokenizer_file="/gone/learned.json"
    )

    output = told("export", str(tuned / "of_text"), "-o", str(tuned / "out"))

    assert "is not in the export, for it is not beside the saves: it is in the cache" in output
    assert "/gone/learned.json" in output
    assert not (tuned / "out" / "tokenizer.json").exists()


def test_an_export_finds_a_learned_tokenizer_beside_the_saves(tuned: Path) -> None:
    """It was in the cache of the machine that measured the layers alone, which may be gone."""
    (tuned / "text").write_text("the snow fell, and was sold\n" * 60)
    data = DataConfig(
        path=str(tuned / "text"), sequence_length=8, tokenizer="bpe", vocabulary_size=280
    )
    config = replace(load_job(tuned / "job.toml"), data=data, model=MODEL)
    samples = load_dataset(data, objective="causal", seed=0, cache_directory=tuned / "cache")
    assert isinstance(samples, TokenDataset)
    split = split_model(MODEL, seed=0, vocabulary_size=280, sequence_length=8)
    stepped_save(
        config,
        split,
        tuned / "of_text",
        vocabulary_size=280,
        tokenizer_file=samples.tokenizer_file,
    )
    learned = Path(samples.tokenizer_file)
    learned.rename(tuned / "of_text" / learned.name)
    told("save", "--name", "best", str(tuned / "of_text"))  # A copy without it, once.

    for number, place in enumerate((tuned / "of_text", tuned / "of_text" / "best")):
        told("export", str(place), "-o", str(tuned / f"out{number}"))

        written = AutoTokenizer.from_pretrained(tuned / f"out{number}")
        assert written.decode(written("snow fell")["input_ids"]) == "snow fell"


def test_an_export_of_a_save_that_names_no_learned_tokenizer_says_that_there_is_none(
    tuned: Path,
) -> None:
    """It was imported: the note ended with empty parentheses."""
    data = DataConfig(tokenizer="bpe", vocabulary_size=280, sequence_length=8)
    config = replace(load_job(tuned / "job.toml"), data=data, model=MODEL)
    split = split_model(MODEL, seed=0, vocabulary_size=280, sequence_length=8)
    stepped_save(config, split, tuned / "of_text", vocabulary_size=280)

    output = told("export", str(tuned / "of_text"), "-o", str(tuned / "out"))

    assert "is not in the export, for the save does not name it" in output


def test_a_save_goes_out_to_dcp_and_comes_in_again(tuned: Path) -> None:
    """The save of a job that goes on from it has the hashes of the first."""
    options = ("--format", "dcp", "--optimizer")
    output = told("export", str(tuned / "saves"), "-o", str(tuned / "dcp"), *options)
    assert str(tuned / "dcp" / ".metadata") in output.replace("\n", "")

    output = told("import", str(tuned / "other.toml"), str(tuned / "dcp"))
    assert str(tuned / "others" / "2-0") in output
    first, second = (tier_of(str(tuned / name)).newest() for name in ("saves", "others"))
    assert first is not None
    assert second is not None
    assert first.layers == second.layers

    output = told("import", str(tuned / "other.toml"), str(tuned / "dcp"), code=2)
    assert "it holds version 2-0 already; name another directory" in output
    assert not (tuned / "others" / ".job.lock").exists()


def test_the_options_of_one_format_are_refused_with_the_other(tuned: Path) -> None:
    """safetensors files have no place for the optimizer; a whole model has one."""
    words = ("export", str(tuned / "saves"), "-o", str(tuned / "out"))
    assert "only --format dcp" in told(*words, "--optimizer", code=2)

    told(*words, "--merge")
    assert (tuned / "out" / "config.json").is_file()
    assert (tuned / "out" / "tokenizer.json").is_file()
