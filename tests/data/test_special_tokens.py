"""Masks of a model that begins with weights are made of the tokens that its tokenizer names."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.saved_datasets import saved_dataset
from planaria.core.job import DataConfig, ModelConfig
from planaria.data.batches import microbatch, num_targets
from planaria.data.datasets import load_dataset, load_held_out, vocabulary_size
from planaria.data.special_tokens import SpecialTokens, special_tokens
from planaria.data.text import IGNORED, TokenDataset
from planaria.errors import ConfigError

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]
ROLES = {name.strip("[]").lower() + "_token": name for name in WORDS[:5]}
SPECIAL = SpecialTokens(4, (0, 1, 2, 3, 4))
ROWS = [[2, *(5 + (i + k) % 8 for k in range(12)), 3, 0, 0] for i in range(40)]


def _model(directory: Path, **files: Any) -> ModelConfig:
    """A directory with weights and some JSON files."""
    directory.mkdir(exist_ok=True)
    (directory / "model.safetensors").touch()
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return ModelConfig(path=str(directory))


def _tokenizer_json(words: list[str], special: list[str]) -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=words[1]))
    tokenizer.add_special_tokens(special)
    return json.loads(tokenizer.to_str())


def test_hidden_tokens_are_words_and_their_place_takes_the_tokenizers_mask(tmp_path: Path) -> None:
    """The model knows no other mask, and would learn where a text ends instead of its words."""
    model = _model(tmp_path / "model", tokenizer=_tokenizer_json(WORDS, WORDS[:5]))
    data = replace(saved_dataset(tmp_path, {"input_ids": ROWS}), sequence_length=16)
    arguments: Any = {"objective": "masked", "cache_directory": tmp_path, "model": model}
    samples = np.arange(len(ROWS))

    for dataset in (
        load_dataset(data, seed=0, **arguments),
        load_held_out(data, data, seed=0, **arguments),
    ):
        inputs, targets = microbatch(dataset, samples, seed=3)
        tokens, is_hidden = torch.tensor(ROWS), targets != IGNORED
        assert torch.equal(targets[is_hidden], tokens[is_hidden])
        assert int(targets[is_hidden].min()) >= 5
        assert is_hidden.sum(1).tolist() == [2] * len(ROWS)  # 15% of 12 words.
        assert num_targets(dataset, samples, seed=3) == 2 * len(ROWS)
        assert 0.6 < float((inputs[is_hidden] == 4).float().mean()) < 0.95
        assert torch.equal(inputs[~is_hidden], tokens[~is_hidden])
        assert dataset.vocabulary_size == vocabulary_size(data, **arguments) == 13


def test_files_of_token_ids_have_the_tokenizers_mask_too(tmp_path: Path) -> None:
    """Its id may be beyond all that the data have. A row of special tokens alone has no target."""
    words = [*WORDS, *(f"w{n}" for n in range(9)), "<m>"]
    roles = {"mask_token": {"content": "<m>"}, "pad_token": "[PAD]"}
    tokenizer = _tokenizer_json(words, ["[CLS]"])
    model = _model(tmp_path / "model", tokenizer=tokenizer, special_tokens_map=roles)
    np.save(tmp_path / "ids.npy", np.array([*[0, 2] * 8, *range(3, 13), *[0] * 6]))
    data = DataConfig(kind="tokens", path=str(tmp_path / "ids.npy"), sequence_length=16)

    dataset = load_dataset(
        data, objective="masked", seed=0, cache_directory=tmp_path / "cache", model=model
    )

    assert special_tokens(model.path) == SpecialTokens(22, (0, 2, 22))
    assert dataset.vocabulary_size == 23
    assert (microbatch(dataset, np.array([0]), seed=1)[1] == IGNORED).all()
    assert num_targets(dataset, np.array([0, 1]), seed=1) == 2  # 15% of 10 tokens.


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": ROLES, "tokenizer": _tokenizer_json(WORDS, [])},
        {"special_tokens_map": ROLES, "tokenizer": _tokenizer_json(WORDS, [])},
        {"tokenizer": _tokenizer_json(WORDS, WORDS[:5])},
        {
            "tokenizer_config": {
                "added_tokens_decoder": {
                    str(number): {"content": word, "special": number < 5}
                    for number, word in enumerate(WORDS[:6])
                }
            }
        },
    ],
    ids=["roles", "map of roles", "marks", "no vocabulary"],
)
def test_special_tokens_stand_in_several_files(tmp_path: Path, files: dict[str, Any]) -> None:
    """What is in them depends on the tokenizer, and on the release that wrote them."""
    assert special_tokens(_model(tmp_path, **files).path) == SPECIAL


def test_special_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    """As it writes them itself, with one more that has no role."""
    transformers = pytest.importorskip("transformers")
    file = tmp_path / "words.json"
    file.write_text(json.dumps(_tokenizer_json(WORDS, [])))
    more = {"additional_special_tokens": ["b"]}
    written = transformers.PreTrainedTokenizerFast(tokenizer_file=str(file), **ROLES, **more)
    written.save_pretrained(tmp_path / "model")

    expected = SpecialTokens(written.mask_token_id, tuple(sorted(written.all_special_ids)))
    assert special_tokens(str(tmp_path / "model")) == expected == SpecialTokens(4, (*range(5), 6))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no tokenizer.*mask_token.*or give data with labels"),
        ({"tokenizer": _tokenizer_json(["a", "b"], [])}, "no tokenizer.*mask_token"),
        ({"tokenizer": {}}, "tokenizer.json cannot be read"),
        ({"tokenizer_config": 7}, "tokenizer_config.json is no JSON"),
    ],
)
def test_weights_without_a_mask_token_are_refused(
    tmp_path: Path, files: dict[str, Any], message: str
) -> None:
    """Unless the data say what is hidden. A model that begins without weights learns any mask."""
    model = _model(tmp_path / "model", **files)
    data = saved_dataset(tmp_path, {"input_ids": ROWS})
    labelled = saved_dataset(tmp_path / "labelled", {"input_ids": ROWS, "labels": ROWS})
    arguments: Any = {"seed": 0, "cache_directory": tmp_path, "model": model}

    with pytest.raises(ConfigError, match=message) as caught:
        load_dataset(data, objective="masked", **arguments)
    assert caught.value.field == "model.path"
    for other, objective in ((labelled, "masked"), (data, "causal")):
        assert len(load_dataset(other, objective=objective, **arguments)) == len(ROWS)
    (tmp_path / "text").write_text("Its own tokens, and its own mask. " * 100)
    text = DataConfig(path=str(tmp_path / "text"))
    assert len(load_dataset(text, objective="masked", **arguments))
    if not files:
        Path(model.path, "model.safetensors").unlink()
        fresh = load_dataset(data, objective="masked", **arguments)
        assert isinstance(fresh, TokenDataset)
        assert fresh.special is None
