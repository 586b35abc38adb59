"""Datasets: saved ones, the user's own, microbatches of them, and what mistakes are told."""

import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers.saved_datasets import load, saved_dataset
from planaria.core.job import DataConfig
from planaria.data.batches import microbatch, num_targets
from planaria.data.datasets import (
    Dataset,
    keep_generators,
    load_dataset,
    load_held_out,
    vocabulary_size,
)
from planaria.errors import ConfigError
from planaria.user_functions import user_function

torch.set_num_threads(1)

IGNORED = -100


def text_file(directory: Path, content: bytes) -> str:
    path = directory / "text"
    path.write_bytes(content)
    return str(path)


def test_microbatches_are_stacked_int64_and_contiguous(tmp_path: Path) -> None:
    """Layout changes bits: what the first layer gets is always laid out the same."""
    data = DataConfig(path=text_file(tmp_path, b"abcdefghi" * 9), sequence_length=8)

    inputs, targets = microbatch(load(data, tmp_path / "cache"), np.array([1, 0]), seed=0)

    assert inputs.shape == targets.shape == (2, 8)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.is_contiguous()
    assert bytes(inputs[1].tolist()) == b"abcdefgh"


def test_saved_token_rows_are_cut_and_shifted(tmp_path: Path) -> None:
    """The last position has no next token; the vocabulary is what the ids need."""
    data = saved_dataset(tmp_path, {"input_ids": [[1, 2, 3, 4, 9], [5, 6, 7, 8, 9]]}, split="train")
    dataset = load(data, tmp_path / "cache")

    inputs, targets = microbatch(dataset, np.array([1, 0]), seed=0)

    assert inputs.tolist() == [[5, 6, 7, 8], [1, 2, 3, 4]]
    assert targets.tolist() == [[6, 7, 8, IGNORED], [2, 3, 4, IGNORED]]
    assert num_targets(dataset, np.array([1, 0]), seed=0) == 6
    assert dataset.vocabulary_size == 10
    assert vocabulary_size(data, cache_directory=tmp_path / "cache", seed=0) == 10


def test_saved_rows_that_are_short_are_padded_in_their_microbatch(tmp_path: Path) -> None:
    """With targets that count nothing; what counts is known without loading the rows."""
    rows = [[1, 2, 3], [5, 6], [1, 2, 3, 4, 5], [7, 8]]
    data = saved_dataset(tmp_path, {"input_ids": rows})
    dataset = load(data, tmp_path / "cache")

    inputs, targets = microbatch(dataset, np.array([0, 1]), seed=0)
    assert inputs.tolist() == [[1, 2, 3], [5, 6, 0]]
    assert targets.tolist() == [[2, 3, IGNORED], [6, IGNORED, IGNORED]]
    inputs, targets = microbatch(dataset, np.array([1, 2]), seed=0)
    assert inputs.tolist() == [[5, 6, 0, 0], [1, 2, 3, 4]]
    assert microbatch(dataset, np.array([1, 3]), seed=0)[0].tolist() == [[5, 6], [7, 8]]
    assert num_targets(dataset, np.array([0, 1, 2, 3]), seed=0) == 2 + 1 + 3 + 1

    labels = [[1, IGNORED, 3], [5, 6], [1, 2, 3, 4, 5], [7, 8]]
    data = saved_dataset(tmp_path / "labelled", {"input_ids": rows, "labels": labels})
    labelled = load(data, tmp_path / "cache")
    targets = microbatch(labelled, np.array([0, 2]), seed=0)[1]
    assert targets.tolist() == [[IGNORED, 3, IGNORED, IGNORED], [2, 3, 4, IGNORED]]
    assert num_targets(labelled, np.array([0, 2]), seed=0) == 4


def test_saved_token_rows_are_masked_with_a_token_of_their_own(tmp_path: Path) -> None:
    """Without labels the masks are drawn, and the mask token is one past the largest id."""
    data = saved_dataset(tmp_path, {"input_ids": [[1, 2, 3, 4], [5, 6, 7, 8]]})
    dataset = load(data, tmp_path / "cache", objective="masked")

    targets = microbatch(dataset, np.array([0, 1]), seed=0)[1]

    assert dataset.vocabulary_size == 10
    assert num_targets(dataset, np.array([0, 1]), seed=0) == 2 == int((targets != IGNORED).sum())


def test_saved_labels_are_the_targets(tmp_path: Path) -> None:
    """Under their own token in the file, as in Hugging Face; moved only where the model predicts
    the next one.
    """
    columns = {
        "input_ids": [[1, 2, 3, 4], [5, 6, 7, 8]],
        "labels": [[IGNORED, 2, IGNORED, 4], [5, IGNORED, 7, 8]],
    }
    data = saved_dataset(tmp_path, columns)
    samples = np.array([0, 1])
    causal = load(data, tmp_path / "cache")
    hidden = load(data, tmp_path / "cache", objective="masked")

    assert microbatch(hidden, samples, seed=0)[1].tolist() == columns["labels"]
    assert num_targets(hidden, samples, seed=0) == 5
    shifted = [[2, IGNORED, 4, IGNORED], [IGNORED, 7, 8, IGNORED]]
    assert microbatch(causal, samples, seed=0)[1].tolist() == shifted
    assert num_targets(causal, samples, seed=0) == 4


def test_saved_classes_are_supervised_targets(tmp_path: Path) -> None:
    """One label a row: a sentence classifier."""
    data = saved_dataset(tmp_path, {"input_ids": [[1, 2, 3, 4]] * 3, "labels": [2, 0, 1]})
    dataset = load(data, tmp_path / "cache", objective="supervised")

    targets = microbatch(dataset, np.array([2, 0]), seed=0)[1]

    assert targets.tolist() == [1, 2]
    assert targets.dtype == torch.int64
    assert vocabulary_size(data, cache_directory=tmp_path / "cache", seed=0) == 5
    assert num_targets(dataset, np.array([2, 0]), seed=0) == 2


def test_held_out_saved_text_has_the_tokens_of_the_training_text(tmp_path: Path) -> None:
    """A tokenizer that learned from it would give other numbers to the same words."""
    pytest.importorskip("tokenizers")
    data = saved_dataset(tmp_path / "training", {"text": ["the quick brown fox " * 40] * 9})
    other = saved_dataset(tmp_path / "other", {"text": ["zebras zip and zag " * 40] * 9})
    data = replace(data, tokenizer="bpe", vocabulary_size=300)
    cache = tmp_path / "cache"

    load_held_out(
        replace(data, path=other.path), data, objective="causal", seed=0, cache_directory=cache
    )
    load(data, cache)

    assert len(list(cache.glob("tokenizer-*.json"))) == 1


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
@pytest.mark.parametrize(
    ("taken", "remedy"),
    [("text", "column input_ids of that tokenizer"), ("input_ids", "column text alone")],
)
def test_held_out_texts_beside_token_ids_are_refused(
    tmp_path: Path, taken: str, remedy: str, tokenizer: Literal["bytes", "bpe"]
) -> None:
    """The same text has other tokens there, so that its loss would mean nothing."""
    values: dict[str, list[Any]] = {"text": ["the fox " * 40] * 3, "input_ids": [[1] * 200] * 3}
    paths = {name: saved_dataset(tmp_path / name, {name: values[name]}).path for name in values}
    (other,) = values.keys() - {taken}
    training = DataConfig(kind="hf", path=paths[other], sequence_length=4, tokenizer=tokenizer)
    held_out = replace(training, path=paths[taken])

    with pytest.raises(ConfigError, match=f"{paths[other]}.*{remedy}") as caught:
        load_held_out(
            held_out, training, objective="causal", seed=0, cache_directory=tmp_path / "cache"
        )

    assert (caught.value.field, caught.value.value) == ("evaluation.path", paths[taken])


@pytest.mark.parametrize("column", ["input_ids", "text"])
def test_held_out_data_are_a_split_of_their_own(tmp_path: Path, column: str) -> None:
    """Where one directory has them beside the training data, which they were taken from."""
    datasets = pytest.importorskip("datasets")
    rows = dict(zip(("test", "train", "validation"), range(5, 8), strict=True))

    def saved(name: str, *splits: str) -> DataConfig:
        values: dict[str, list[Any]] = {split: [[rows[split]] * 5] * 3 for split in splits}
        if column == "text":
            values = {split: [str(rows[split]) * 20] * 3 for split in splits}
        columns = {s: datasets.Dataset.from_dict({column: v}) for s, v in values.items()}
        datasets.DatasetDict(columns).save_to_disk(tmp_path / name)
        return DataConfig(kind="hf", path=str(tmp_path / name), sequence_length=4)

    def first(dataset: Dataset) -> int:
        token = int(dataset.sample(0, seed=0)[0][0])
        return token if column == "input_ids" else int(chr(token))

    arguments: Any = {"objective": "causal", "seed": 0, "cache_directory": tmp_path / "cache"}
    whole = saved("whole", "test", "train", "validation")
    training = load_dataset(whole, **arguments)
    held_out = load_held_out(whole, whole, **arguments)
    assert (first(training), first(held_out)) == (6, 7)
    if column == "input_ids":
        assert (training.vocabulary_size, held_out.vocabulary_size) == (7, 8)
    tested = saved("tested", "test", "train")
    assert first(load_held_out(tested, tested, **arguments)) == 5

    alone = saved("alone", "train")
    with pytest.raises(ConfigError, match="splits train, and none is validation or test") as caught:
        load_held_out(alone, alone, **arguments)
    assert caught.value.field == "evaluation.path"
    named = replace(alone, path=f"{alone.path}/train")
    assert first(load_held_out(named, alone, **arguments)) == 6


def test_a_tokenizer_for_rows_of_token_ids_is_refused(tmp_path: Path) -> None:
    """They are taken as they are, so it would mean nothing; a column text may stand beside them."""
    rows: dict[str, list[Any]] = {"input_ids": [[1, 2, 3, 4]] * 3}
    for columns in (rows, rows | {"text": ["some words of a text"] * 3}):
        saved = saved_dataset(tmp_path, columns)
        data = replace(saved, tokenizer="bpe", vocabulary_size=300)
        with pytest.raises(ConfigError, match=f"{saved.path} has a column input_ids") as caught:
            load(data, tmp_path / "cache")

        assert (caught.value.field, caught.value.value) == ("data.tokenizer", "bpe")
        assert len(load(saved, tmp_path / "cache")) == 3


def test_a_label_for_each_token_is_cut_like_the_tokens(tmp_path: Path) -> None:
    """For classifiers of tokens; a label of a row stays."""
    columns = {"input_ids": [[1, 2, 3, 4, 5], [6, 7, 8, 9]], "labels": [[0, 1, 0, 1, 1], [1] * 4]}
    dataset = load(saved_dataset(tmp_path, columns), tmp_path / "cache", objective="supervised")

    targets = microbatch(dataset, np.array([0, 1]), seed=0)[1]

    assert targets.tolist() == [[0, 1, 0, 1], [1] * 4]


def test_saved_text_is_tokenised_and_packed(tmp_path: Path) -> None:
    """Rows in order, an empty line between them, cut into samples without padding."""
    data = saved_dataset(tmp_path, {"text": ["abc", "defg"], "n": [1, 2]})
    dataset = load(data, tmp_path / "cache")

    samples = [bytes(dataset.sample(k, seed=0)[0].tolist()) for k in range(len(dataset))]

    assert b"".join(samples) == b"abc\n\ndef"
    assert dataset.vocabulary_size == 256


@pytest.mark.parametrize(
    ("columns", "split", "objective", "field", "message"),
    [
        ({"words": ["a"]}, "", "causal", "data.path", "columns words; planaria takes"),
        ({"text": ["a"] * 9}, "test", "causal", "data.path", "splits test"),
        ({"input_ids": [[1, 2, 3], [1]]}, "", "causal", "data.sequence_length", "has 1 tokens"),
        ({"input_ids": ["a b c d"]}, "", "causal", "data.path", "holds string"),
        ({"input_ids": [[1.5] * 4]}, "", "causal", "data.path", "lists of integers"),
        ({"input_ids": [[-1, 2, 3, 4]]}, "", "causal", "data.path", "ids start at 0"),
        ({"input_ids": [[1] * 4], "labels": [[1]]}, "", "causal", "data.sequence_length", "labels"),
        (
            {"input_ids": [[1] * 4], "labels": [[1] * 3]},
            "",
            "causal",
            "data.path",
            "labels has not",
        ),
        ({"input_ids": [[1] * 4]}, "", "supervised", "data.path", "needs labels"),
        ({"input_ids": [[1] * 4], "labels": ["x"]}, "", "supervised", "data.path", "takes numbers"),
        ({"text": ["a"]}, "", "causal", "data.sequence_length", "needs 5 tokens.*has 3"),
        ({"text": ["a"] * 9}, "", "supervised", "data.kind", "no supervised targets"),
        ({"text": ["a", None] * 9}, "", "causal", "data.path", "row 1 .* null, as 9 of 18 are"),
    ],
)
def test_saved_datasets_that_do_not_fit_are_refused(
    tmp_path: Path,
    columns: dict[str, list[Any]],
    split: str,
    objective: str,
    field: str,
    message: str,
) -> None:
    """The message names what was found and what would do."""
    data = saved_dataset(tmp_path, columns, split=split)

    with pytest.raises(ConfigError, match=message) as caught:
        load(data, tmp_path / "cache", objective=objective)

    assert caught.value.field == field


@pytest.mark.parametrize(
    ("data", "field", "message"),
    [
        (DataConfig(path="none/here.txt"), "data.path", "No such file"),
        (DataConfig(path="."), "data.path", "directory"),
        (DataConfig(kind="hf", path="none/here"), "data.path", "save_to_disk"),
        (DataConfig(kind="python", target="nowhere:make"), "data.target", "no module 'nowhere'"),
        (DataConfig(kind="python", target="json"), "data.target", "module:function"),
        (DataConfig(kind="python", target="json:nothing"), "data.target", "no function"),
    ],
    ids=str,
)
def test_data_that_is_not_there_is_refused(
    tmp_path: Path, data: DataConfig, field: str, message: str
) -> None:
    """Before anything is started, by the key to change."""
    with pytest.raises(ConfigError, match=message) as caught:
        load(data, tmp_path)

    assert caught.value.field == field


@pytest.mark.parametrize(
    ("library", "data", "field"),
    [
        ("datasets", DataConfig(kind="hf", path="."), "data.kind"),
        ("tokenizers", DataConfig(tokenizer="bpe", path=__file__), "data.tokenizer"),
    ],
)
def test_a_missing_extra_is_told_with_its_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str, data: DataConfig, field: str
) -> None:
    """The core installs neither library."""

    def find_spec(name: str) -> None:
        assert name == library

    monkeypatch.setattr("importlib.util.find_spec", find_spec)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[hf\]'") as caught:
        load(data, tmp_path)

    assert caught.value.field == field


class Noisy:
    """A user's dataset that draws from every generator that users draw from."""

    vocabulary_size = 12

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.rand(2) + float(np.random.rand()) + random.random()
        return noise + 10 * index, torch.tensor([float(index), 0.0, 0.0])


def user_module(monkeypatch: pytest.MonkeyPatch, make: Callable[[], object]) -> DataConfig:
    module = ModuleType("user_data")
    module.make = make  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "user_data", module)
    return DataConfig(kind="python", target="user_data:make")


def generator_states() -> list[str]:
    return [
        str(torch.get_rng_state().tolist()),
        repr(np.random.get_state()),
        str(random.getstate()),
    ]


def test_random_transforms_are_a_function_of_seed_and_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the process drew before, and without a trace in what it draws after."""
    dataset = load(user_module(monkeypatch, Noisy), tmp_path, objective="supervised")
    samples = np.array([4, 1])
    before = generator_states()
    with keep_generators():
        first = microbatch(dataset, samples, seed=6)[0]
    after = generator_states()
    torch.rand(3)
    np.random.rand(3)
    random.random()

    again = microbatch(dataset, samples, seed=6)[0]

    assert torch.equal(first, again)
    assert not torch.equal(first, microbatch(dataset, samples, seed=7)[0])
    assert not torch.equal(first[0] - 40, first[1] - 10)
    assert before == after
    assert vocabulary_size(user_module(monkeypatch, Noisy), cache_directory=tmp_path, seed=0) == 12


def test_a_dataset_is_built_under_the_jobs_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random data drawn when it is built must be the same in every worker."""

    def make() -> list[tuple[Tensor, Tensor]]:
        return [(torch.rand(3), torch.rand(1)) for _ in range(4)]

    data = user_module(monkeypatch, make)
    first, again = (load(data, tmp_path, objective="supervised").sample(2, seed=0) for _ in "ab")

    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ([torch.zeros(3), torch.zeros(3)], 6),
        ([torch.tensor(1), torch.tensor(IGNORED)], 2),
        ([1, 2], 2),
        ([np.array([1, IGNORED, 2]), np.array([IGNORED, IGNORED, 4])], 3),
    ],
    ids=["elements", "classes", "integers", "rows with gaps"],
)
def test_num_targets_is_what_a_mean_loss_divides_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, targets: list[Any], expected: int
) -> None:
    """Elements of a regression, samples of a classification, positions that are not ignored."""
    items = [(torch.zeros(2), target) for target in targets]
    dataset = load(user_module(monkeypatch, lambda: items), tmp_path, objective="supervised")

    assert num_targets(dataset, np.array([0, 1]), seed=0) == expected


def test_samples_may_be_tuples_and_dicts_of_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each tensor of theirs is stacked. A tuple of numbers is a tensor, as it always was."""
    items = [({"x": torch.full((2,), i), "y": (np.zeros(3), i)}, (0.5, i)) for i in range(4)]
    dataset = load(user_module(monkeypatch, lambda: items), tmp_path, objective="supervised")

    inputs, targets = microbatch(dataset, np.array([1, 3]), seed=0)
    assert inputs["x"].tolist() == [[1, 1], [3, 3]]
    assert inputs["y"][0].shape == (2, 3)
    assert inputs["y"][1].tolist() == [1, 3]
    assert targets.tolist() == [[0.5, 1.0], [0.5, 3.0]]
    assert num_targets(dataset, np.array([1, 3]), seed=0) == 4

    others = [(torch.zeros(1), {"mask": torch.zeros(2), "class": i}) for i in range(4)]
    dataset = load(user_module(monkeypatch, lambda: others), tmp_path, objective="supervised")
    assert microbatch(dataset, np.array([1, 2]), seed=0)[1]["class"].tolist() == [1, 2]
    assert num_targets(dataset, np.array([1, 2]), seed=0) == 2


def _padded(items: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Inputs with a random number in each row, so that bits depend on the generator's seed."""
    rows = [torch.tensor(item) for item in items]
    targets = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=IGNORED)
    return torch.rand(len(items), 2), targets


_num_collated: list[int] = []


def _counted(items: list[list[int]]) -> tuple[Tensor, dict[str, Tensor]]:
    _num_collated.append(len(items))
    return torch.zeros(len(items)), {"class": torch.zeros(len(items))}


def _flat(items: list[list[int]]) -> tuple[Tensor, Tensor]:
    """All tokens of a microbatch in one row; its first sample may have one alone."""
    tokens = torch.tensor([token for item in items for token in item])
    return tokens, tokens


def test_a_function_of_the_user_collates_a_microbatch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets the items as the data set gives them. What it returns is what counts."""
    data = user_module(monkeypatch, lambda: [[1] * (1 + i) for i in range(6)])
    monkeypatch.setattr(sys.modules["user_data"], "collate", _padded, raising=False)
    data = replace(data, collate="user_data:collate")
    dataset = load(data, tmp_path, objective="supervised")

    inputs, targets = microbatch(dataset, np.array([1, 4]), seed=3)
    assert targets.tolist() == [[1, 1, IGNORED, IGNORED, IGNORED], [1] * 5]
    assert num_targets(dataset, np.array([1, 4, 0, 2]), seed=3, microbatch_size=2) == 7 + 4
    torch.rand(3)
    assert torch.equal(inputs, microbatch(dataset, np.array([1, 4]), seed=3)[0])
    assert not torch.equal(inputs, microbatch(dataset, np.array([1, 4]), seed=4)[0])

    monkeypatch.setattr(sys.modules["user_data"], "collate", _counted)
    counted = load(data, tmp_path, objective="supervised")
    _num_collated.clear()
    assert num_targets(counted, np.arange(6), seed=3, microbatch_size=2) == 6
    assert len(_num_collated) == 1  # One is enough to know that each sample counts.

    monkeypatch.setattr(sys.modules["user_data"], "collate", _flat)
    flat = load(data, tmp_path, objective="supervised")
    assert num_targets(flat, np.array([0, 3, 5]), seed=3, microbatch_size=1) == 1 + 4 + 6

    monkeypatch.setattr(sys.modules["user_data"], "collate", len)
    with pytest.raises(ConfigError, match=r"data.collate = 'len': its value is of type int"):
        microbatch(load(data, tmp_path, objective="supervised"), np.array([1, 4]), seed=3)


@pytest.mark.parametrize(
    ("items", "objective", "message"),
    [
        (7, "supervised", "returned an object of type int, which has no __len__"),
        ([torch.zeros(2)], "supervised", r"return \(inputs, targets\)"),
        ([("text", torch.zeros(1))], "supervised", "not a tensor"),
        ([(torch.zeros(2), torch.zeros(2))], "causal", "token ids of type int64.*float32"),
        ([(torch.zeros(2), 1), (torch.zeros(3), 1)], "supervised", "different shapes.*collate"),
        ([({"a": 1}, 1), ({"b": 1}, 1)], "supervised", "different parts"),
        ([({"a": 1}, 1), (torch.zeros(1), 1)], "supervised", "different parts"),
    ],
)
def test_user_datasets_that_return_something_else_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    items: object,
    objective: str,
    message: str,
) -> None:
    """The message names the sample and its fault instead of failing inside the model."""
    data = user_module(monkeypatch, lambda: items)

    with pytest.raises(ConfigError, match=message):
        microbatch(
            load(data, tmp_path, objective=objective),
            np.arange(len(items) if isinstance(items, list) else 1),
            seed=0,
        )


def test_what_user_code_raises_passes_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the user's bug, shown with the user's traceback; generators are restored."""

    def make() -> object:
        torch.rand(5)
        raise ZeroDivisionError("mine")

    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError, match="mine"):
        load(user_module(monkeypatch, make), tmp_path)
    assert torch.equal(before, torch.get_rng_state())

    (tmp_path / "user_broken.py").write_text("import surely_not_installed\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="surely_not_installed"):
        user_function("user_broken:make", field="data.target")


# -- files of token ids ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bin", "uint32", "int64"])
def test_a_file_of_token_ids_is_cut_into_samples(tmp_path: Path, dtype: str) -> None:
    """As nanoGPT's scripts write it, or with larger ids, as numpy does. The largest id counts."""
    ids = np.arange(100)
    ids[40] = 50_256
    if dtype == "bin":
        path = tmp_path / "train.bin"
        ids.astype("<u2").tofile(path)
    else:
        path = tmp_path / "train.npy"
        np.save(path, ids.astype(dtype))
    data = DataConfig(kind="tokens", path=str(path), sequence_length=8)

    dataset = load(data, tmp_path / "cache")

    assert len(dataset) == 12  # The last sample needs the first token of the next as a target.
    inputs, targets = dataset.sample(5, seed=0)
    assert inputs.tolist() == [50_256, *range(41, 48)]
    assert targets.tolist() == list(range(41, 49))
    assert vocabulary_size(data, cache_directory=tmp_path / "cache", seed=0) == 50_257
    assert num_targets(dataset, np.array([0, 1]), seed=0) == 16
    masked = load(data, tmp_path / "cache", objective="masked")
    assert masked.vocabulary_size == 50_258


def test_another_file_under_the_same_name_is_scanned_again(tmp_path: Path) -> None:
    """The cache kept the largest id of the first."""
    path = tmp_path / "train.bin"
    data = DataConfig(kind="tokens", path=str(path), sequence_length=4)
    for largest, length in ((7, 20), (9, 24)):
        np.full(length, largest, dtype="<u2").tofile(path)
        assert vocabulary_size(data, cache_directory=tmp_path / "cache", seed=0) == largest + 1


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("t.bin", b"123", "has an odd size"),
        ("t.bin", b"12" * 8, "one sample needs 9 tokens"),
        ("t.bin", b"", "one sample needs 9 tokens"),
        ("t.npy", b"no array", "cannot be read"),
        ("t.npy", np.zeros((4, 4), dtype=np.int64), r"holds int64 \[4, 4\]"),
        ("t.npy", np.zeros(40), "holds float64"),
        ("t.npy", np.full(40, -3), "holds the id -3"),
        ("t.npy", np.array([{}]), "cannot be read"),
        ("none.bin", None, "cannot be read"),
    ],
)
def test_what_is_no_file_of_token_ids_is_a_mistake(
    tmp_path: Path, name: str, content: bytes | np.ndarray | None, told: str
) -> None:
    """A pickle in a .npy file is not loaded: it could run anything."""
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        np.save(path, content)
    data = DataConfig(kind="tokens", path=str(path), sequence_length=8)

    with pytest.raises(ConfigError, match=told):
        load(data, tmp_path / "cache")
