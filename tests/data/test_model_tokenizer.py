"""A model that begins with weights knows the tokens of the tokenizer beside them."""

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
from planaria.data.model_tokenizer import (
    SpecialTokens,
    end_of_document,
    own_tokenizer_files,
    special_tokens,
)
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
        assert dataset.vocabulary_size == vocabulary_size(data, seed=0, **arguments) == 13


@pytest.mark.parametrize("objective", ["causal", "masked"])
def test_text_becomes_the_tokens_of_transformers(tmp_path: Path, objective: str) -> None:
    """Whole, also if the tokenizer is used to cut and pad; none is learned, for held-out text too.

    A masked model gets the tokenizer's mask.
    """
    content = _tokenizer_json(WORDS, WORDS[:5])
    content |= {"pre_tokenizer": {"type": "Whitespace"}}
    cut = {"max_length": 4, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    padded: dict[str, Any] = {"strategy": {"Fixed": 8}, "direction": "Right", "pad_id": 0}
    padded |= {"pad_to_multiple_of": None, "pad_type_id": 0, "pad_token": "[PAD]"}
    model = _model(tmp_path / "model", tokenizer=content | {"truncation": cut, "padding": padded})
    for name in ("text", "held out"):
        (tmp_path / name).write_text(f"a b c d e f g h [SEP] {'g h a ' * 80}\n" * 7)
    data = DataConfig(path=str(tmp_path / "text"), sequence_length=16, tokenizer="model")
    arguments: Any = {"objective": objective, "cache_directory": tmp_path, "model": model}

    dataset = load_dataset(data, seed=0, **arguments)
    held_out = load_held_out(
        replace(data, path=str(tmp_path / "held out")), data, seed=0, **arguments
    )

    tokens = 7 * [*range(5, 13), 3, *(80 * [11, 12, 5])]
    assert len(dataset) == len(held_out) == len(tokens) // 16
    assert dataset.vocabulary_size == vocabulary_size(data, seed=0, **arguments) == 13
    for number in range(len(dataset)):
        inputs, targets = dataset.sample(number, seed=1)
        expected = torch.tensor(tokens[16 * number : 16 * number + 17])
        if objective == "causal":
            assert torch.equal(inputs, expected[:16])
            assert torch.equal(targets, expected[1:])
        else:
            is_hidden = targets != IGNORED
            assert torch.equal(targets[is_hidden], expected[:16][is_hidden])
            assert torch.equal(inputs[~is_hidden], expected[:16][~is_hidden])
        assert torch.equal(held_out.sample(number, seed=1)[0], inputs)
    assert not list(tmp_path.glob("tokenizer-*"))


def test_rows_of_text_end_with_the_tokenizers_end_of_a_text(tmp_path: Path) -> None:
    """So a sample with parts of two rows shows where one ends."""
    content = _tokenizer_json(WORDS, WORDS[:5]) | {"pre_tokenizer": {"type": "Whitespace"}}
    model = _model(tmp_path / "model", tokenizer=content, tokenizer_config={"eos_token": "[SEP]"})
    data = saved_dataset(tmp_path, {"text": ["a b c", "d"] * 20})
    data = replace(data, sequence_length=6, tokenizer="model")

    dataset = load_dataset(data, objective="causal", seed=0, cache_directory=tmp_path, model=model)

    assert dataset.sample(0, seed=0)[0].tolist() == [5, 6, 7, 3, 8, 3]
    assert end_of_document(_model(tmp_path / "other", tokenizer=content).path) == "\n\n"


@pytest.mark.parametrize("kind", ["metaspace", "byte level"])
def test_each_row_of_text_has_the_tokens_of_a_text_of_its_own(tmp_path: Path, kind: str) -> None:
    """Tokenizers of the Llama family mark a text's first word as a word; rows after the first had
    tokens that the weights have seen only inside of words. Other tokenizers see no difference.
    """
    tokenizers = pytest.importorskip("tokenizers")
    models, pre_tokenizers = tokenizers.models, tokenizers.pre_tokenizers
    characters = [*"abc", "\u2581", "\u0120", "\u010a", "\u0133"]
    vocabulary = {text: number for number, text in enumerate(characters)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    if kind == "metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["</s>"])
    (end,) = tokenizer.encode("</s>").ids
    files = {"tokenizer": json.loads(tokenizer.to_str()), "tokenizer_config": {"eos_token": "</s>"}}
    rows = ["ab c", "b a", "", " c", "a\n\nb"] * 4000
    data = replace(saved_dataset(tmp_path, {"text": rows}), sequence_length=8, tokenizer="model")
    model = _model(tmp_path / "model", **files)

    dataset = load_dataset(data, objective="causal", seed=0, cache_directory=tmp_path, model=model)

    expected = [token for row in rows for token in (*tokenizer.encode(row).ids, end)]
    samples = torch.cat([dataset.sample(number, seed=0)[0] for number in range(len(dataset))])
    assert samples.tolist() == expected[: 8 * len(dataset)]
    assert len(dataset) == (len(expected) - 1) // 8
    joined = tokenizer.encode("</s>".join([*rows, ""])).ids
    assert (joined == expected) == (kind == "byte level")


def test_another_tokenizer_makes_other_tokens(tmp_path: Path) -> None:
    """Tokens in the cache are those of one tokenizer, whatever its directory is called."""
    (tmp_path / "text").write_text("a b c d " * 20)
    data = DataConfig(path=str(tmp_path / "text"), sequence_length=4, tokenizer="model")
    inputs = []
    for words in (WORDS, WORDS[::-1]):
        content = _tokenizer_json(words, []) | {"pre_tokenizer": {"type": "Whitespace"}}
        model = _model(tmp_path / "model", tokenizer=content)
        arguments: Any = {"cache_directory": tmp_path / "cache", "model": model}
        dataset = load_dataset(data, objective="causal", seed=0, **arguments)
        inputs.append(dataset.sample(0, seed=0)[0].tolist())

    assert inputs == [[5, 6, 7, 8], [7, 6, 5, 4]]


def test_a_vocabulary_of_older_releases_is_read(tmp_path: Path) -> None:
    """A directory of BERT may have vocab.txt alone."""
    pytest.importorskip("transformers")
    model = _model(tmp_path / "model", config={"model_type": "bert"})
    Path(model.path, "vocab.txt").write_text("\n".join([*WORDS[:5], "the", "cat", "##s"]))
    (tmp_path / "text").write_text("The cats the cat\n" * 9)
    data = DataConfig(path=str(tmp_path / "text"), sequence_length=5, tokenizer="model")

    dataset = load_dataset(data, objective="causal", seed=0, cache_directory=tmp_path, model=model)

    assert dataset.sample(0, seed=0)[0].tolist() == [5, 6, 7, 5, 6]
    assert special_tokens(model.path) == SPECIAL


@pytest.mark.parametrize(
    ("files", "message"),
    [({}, "it has no tokenizer; save one there"), ({"tokenizer": {}}, "tokenizer cannot be read")],
)
def test_text_for_a_model_without_a_tokenizer_is_refused(
    tmp_path: Path, files: dict[str, Any], message: str
) -> None:
    model = _model(tmp_path / "model", **files)
    (tmp_path / "text").write_text("a b c d " * 20)
    data = DataConfig(path=str(tmp_path / "text"), sequence_length=4, tokenizer="model")

    with pytest.raises(ConfigError, match=message) as caught:
        load_dataset(data, objective="causal", seed=0, cache_directory=tmp_path, model=model)

    assert caught.value.field == "model.path"


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
        ({"tokenizer": {}}, "tokenizer cannot be read"),
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


def test_a_tokenizer_that_learned_one_token_too_few_has_no_mask() -> None:
    """Of a causal model, which has no masks; one was put in for the token that was not learned."""
    pytest.importorskip("tokenizers")
    learned = own_tokenizer_files("", num_tokens=256, num_ids=256)["tokenizer.json"].decode()

    files = own_tokenizer_files(learned, num_tokens=257, num_ids=257)

    assert "mask_token" not in json.loads(files["tokenizer_config.json"])
    assert json.loads(files["tokenizer.json"]) == json.loads(learned)
