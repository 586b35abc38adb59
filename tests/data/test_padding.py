"""Padding in saved data sets is cut off or refused, never trained on."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers.saved_datasets import load, saved_dataset
from planaria.core.job import DataConfig, ModelConfig
from planaria.data.batches import microbatch, num_targets
from planaria.data.datasets import UserDataset, load_dataset, load_held_out, vocabulary_size
from planaria.data.padding import NO_PADDING, padding_token, refuse_unhidden_padding
from planaria.data.text import IGNORED
from planaria.errors import ConfigError


def _mask(text: str) -> list[list[int]]:
    return [[int(letter) for letter in word] for word in text.split()]


def test_padding_at_the_end_of_saved_rows_is_cut_off(tmp_path: Path) -> None:
    """As `tok(text, padding="max_length")` writes it: a model would learn to predict it, and the
    loss would be divided by it.
    """
    rows = [[1, 2, 3, 9, 9, 9], [5, 6, 9, 9, 9, 9], [1, 2, 3, 4, 5, 6], [7, 9, 9, 8, 9, 9]]
    columns = {"input_ids": rows, "attention_mask": _mask("111000 110000 111111 111100")}
    data = saved_dataset(tmp_path, columns | {"token_type_ids": [[0] * 6] * 4})
    dataset = load(data, tmp_path / "cache")

    inputs, targets = microbatch(dataset, np.array([0, 1]), seed=0)
    assert inputs.tolist() == [[1, 2, 3], [5, 6, 0]]
    assert targets.tolist() == [[2, 3, IGNORED], [6, IGNORED, IGNORED]]
    inputs, targets = microbatch(dataset, np.array([2, 3]), seed=0)
    assert inputs.tolist() == [[1, 2, 3, 4], [7, 9, 9, 8]]
    assert targets.tolist() == [[2, 3, 4, IGNORED], [9, 9, 8, IGNORED]]
    assert num_targets(dataset, np.array([0, 1, 2, 3]), seed=0) == 2 + 1 + 3 + 3

    data = saved_dataset(tmp_path / "labelled", columns | {"labels": rows})
    labelled = load(data, tmp_path / "cache")
    inputs, targets = microbatch(labelled, np.array([1, 0]), seed=0)
    assert inputs.tolist() == [[5, 6, 0], [1, 2, 3]]
    assert targets.tolist() == [[6, IGNORED, IGNORED], [2, 3, IGNORED]]
    assert num_targets(labelled, np.array([0, 1]), seed=0) == 3

    whole = saved_dataset(tmp_path / "whole", {"input_ids": rows, "attention_mask": [[1] * 6] * 4})
    assert getattr(load(whole, tmp_path / "cache"), "lengths", ()) is None
    later = _mask("111100 111111 111111 111110")  # Beyond the four tokens of a sample.
    data = saved_dataset(tmp_path / "later", {"input_ids": rows, "attention_mask": later})
    assert len(load(data, tmp_path / "cache", objective="masked")) == 4


def test_padding_is_looked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank of a job would read the whole column."""
    columns = {"input_ids": [[1, 2, 3, 4]] * 2, "attention_mask": _mask("1110 1100")}
    data = saved_dataset(tmp_path, columns)
    first = load(data, tmp_path / "cache")

    monkeypatch.delattr("planaria.data.saved_rows.lengths_without_padding")
    again = load(data, tmp_path / "cache")

    assert first.sample(1, seed=0)[0].tolist() == again.sample(1, seed=0)[0].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("column", "rows", "objective", "message"),
    [
        ("attention_mask", _mask("1111 0011"), "causal", "row 1 of .*padding_side"),
        ("attention_mask", _mask("1101 1111"), "causal", "row 0 of .*a 0 before a 1"),
        ("attention_mask", _mask("1111 0000"), "causal", "has 0 tokens; drop rows"),
        ("attention_mask", _mask("1111 0111"), "masked", "row 1 of .*padding_side"),
        (
            "attention_mask",
            _mask("1111 0000"),
            "masked",
            "has 0 tokens; drop rows of less than one",
        ),
        ("attention_mask", _mask("1110 1111"), "supervised", "row 0 .* layers of your own would"),
        ("attention_mask", _mask("1111 111"), "causal", "has not the length"),
        ("attention_mask", _mask("1111 1122"), "causal", "other than 0 and 1"),
        ("attention_mask", [1, 1], "causal", "attention_mask holds int8; planaria takes lists"),
        ("token_type_ids", _mask("0000 0011"), "causal", "token_type_ids holds"),
        ("token_type_ids", _mask("0000 0011"), "supervised", "give rows of one text each"),
        ("position_ids", _mask("0123 0101"), "causal", "row 1 of its column position_ids"),
        ("position_ids", _mask("0123 1234"), "masked", "row 1 of its column position_ids"),
        ("position_ids", _mask("0123 012"), "causal", "position_ids has not the length"),
        ("seq_lengths", _mask("22 4"), "causal", "column seq_lengths cuts rows"),
        ("completion_mask", _mask("0011 1111"), "causal", "column completion_mask; save a column"),
        ("assistant_masks", _mask("0011 1111"), "causal", "column assistant_masks; save a column"),
        ("loss_mask", _mask("0011 1111"), "supervised", "column loss_mask; save a column labels"),
    ],
)
def test_padding_that_a_model_would_take_for_text_is_refused(
    tmp_path: Path, column: str, rows: list[Any], objective: str, message: str
) -> None:
    """planaria gives a model the tokens alone; only padding after all text can be cut off."""
    columns = {"input_ids": [[1, 2, 3, 4]] * 2, "labels": [[1] * 4] * 2, column: rows}
    data = saved_dataset(tmp_path, columns)

    with pytest.raises(ConfigError, match=message):
        load(data, tmp_path / "cache", objective=objective)
    assert vocabulary_size(data, cache_directory=tmp_path / "cache", seed=0) == 5


def test_positions_and_masks_that_change_nothing_are_let_through(tmp_path: Path) -> None:
    """Padding has any position, and the special tokens of a masked model are never hidden."""
    columns: dict[str, Any] = {"input_ids": [[1, 2, 3, 4], [5, 6, 9, 9], [1, 2, 3, 4]]}
    columns |= {"attention_mask": _mask("1111 1100 1111"), "special_tokens_mask": [[0] * 4] * 3}
    data = saved_dataset(tmp_path, columns | {"position_ids": _mask("0123 0111 0123")})

    dataset = load(data, tmp_path / "cache")

    assert microbatch(dataset, np.array([0, 1]), seed=0)[0].tolist() == [[1, 2, 3, 4], [5, 6, 0, 0]]


_ROWS = [[1, 2, 3, 9, 9, 9], [5, 6, 9, 9, 9, 9], [1, 2, 3, 4, 5, 6]]
_PADDED = {"input_ids": _ROWS, "attention_mask": _mask("111000 110000 111111")}
_BERT = ModelConfig(config={"model_type": "bert", "pad_token_id": 7})


@pytest.mark.parametrize("is_cut", [False, True])
def test_rows_of_an_encoder_are_padded_beside_a_mask(tmp_path: Path, is_cut: bool) -> None:
    """To the longest of their microbatch, whether they were saved with padding or without. Targets
    are tokens of the row itself, and as many as without padding.
    """
    columns: dict[str, Any] = _PADDED
    if is_cut:
        columns = {"input_ids": [[1, 2, 3], [5, 6], [1, 2, 3, 4, 5, 6]]}
    dataset = load(
        saved_dataset(tmp_path, columns), tmp_path / "cache", objective="masked", model=_BERT
    )

    inputs, targets = microbatch(dataset, np.array([0, 1]), seed=0)
    assert inputs["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert inputs["input_ids"].shape == (2, 3)
    assert inputs["input_ids"][1, 2] == 7
    assert targets[1, 2] == IGNORED
    is_target = targets != IGNORED
    assert is_target.sum(1).tolist() == [1, 1]
    assert torch.equal(torch.tensor([[1, 2, 3], [5, 6, 0]])[is_target], targets[is_target])
    assert num_targets(dataset, np.array([0, 1, 2, 2]), seed=0) == 4
    # Rows of one length need none: the third is cut to the four tokens of a sample.
    assert microbatch(dataset, np.array([2, 2]), seed=0)[0].shape == (2, 4)


@pytest.mark.parametrize(
    ("labels", "expected", "count"),
    [
        ([2, 0, 1], [2, 0, 1], 3),
        (
            [[3, 4, 5, 0, 0, 0], [8, 9, 0, 0, 0, 0], [1] * 6],
            [[3, 4, 5, -100], [8, 9, -100, -100]],
            9,
        ),
        ([[0, 1], [1, 0], [1, 1]], [[0, 1], [1, 0]], 6),
    ],
    ids=["of samples", "of tokens", "of classes"],
)
def test_labels_of_padded_rows_are_padded_if_tokens_have_them(
    tmp_path: Path, labels: list[Any], expected: list[Any], count: int
) -> None:
    """Padding is no target, so the loss is divided by the number of true tokens."""
    data = saved_dataset(tmp_path, _PADDED | {"labels": labels})
    dataset = load(data, tmp_path / "cache", objective="supervised", model=_BERT)
    numbers = np.array([0, 1, 2])

    inputs, targets = microbatch(dataset, numbers, seed=0)
    assert inputs["input_ids"].tolist() == [[1, 2, 3, 7], [5, 6, 7, 7], [1, 2, 3, 4]]
    assert inputs["attention_mask"].tolist() == _mask("1110 1100 1111")
    assert targets.tolist()[: len(expected)] == expected
    assert num_targets(dataset, numbers, seed=0) == count


class _Texts:
    """Rows of unequal length with a class, or with a class for each token."""

    vocabulary_size = 20

    def __init__(self, *, has_classes: bool) -> None:
        self._has_classes = has_classes

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        ids = torch.arange(index + 2)
        return ids, index if self._has_classes else ids % 2


def texts() -> _Texts:
    """Texts with a class each, by the name of this function."""
    return _Texts(has_classes=True)


def tokens() -> _Texts:
    """Texts with a class for each token, by the name of this function."""
    return _Texts(has_classes=False)


def test_own_rows_of_an_encoder_are_padded_beside_a_mask(tmp_path: Path) -> None:
    """Not those for layers of the user's, which get what a collate function makes."""
    numbers = np.array([0, 2])
    sets = [DataConfig(kind="python", target=f"{__name__}:{name}") for name in ("texts", "tokens")]
    of_texts, of_tokens = (
        load(data, tmp_path, objective="supervised", model=_BERT) for data in sets
    )

    inputs, targets = microbatch(of_texts, numbers, seed=0)
    assert inputs["input_ids"].tolist() == [[0, 1, 7, 7], [0, 1, 2, 3]]
    assert inputs["attention_mask"].tolist() == _mask("1100 1111")
    assert targets.tolist() == [0, 2]
    inputs, targets = microbatch(of_tokens, numbers, seed=0)
    assert targets.tolist() == [[0, 1, IGNORED, IGNORED], [0, 1, 0, 1]]
    assert num_targets(of_tokens, numbers, seed=0) == 6
    with pytest.raises(ConfigError, match="different shapes"):
        microbatch(load(sets[0], tmp_path, objective="supervised"), numbers, seed=0)


@pytest.mark.parametrize(
    ("config", "padding"),
    [
        ({"model_type": "roberta"}, 1),
        ({"model_type": "roberta", "pad_token_id": 5}, 5),
        ({"model_type": "roberta", "pad_token_id": None}, 0),
        ({"model_type": "modernbert"}, 0),  # Its own, 50283, is none of the data's tokens.
        ({"model_type": "modernbert", "vocab_size": 50368}, 50283),
    ],
)
def test_padding_has_the_id_that_the_model_has_for_it(config: dict[str, Any], padding: int) -> None:
    """RoBERTa, for one, gives it no position of its own."""
    pytest.importorskip("transformers")
    model = ModelConfig(config=config)

    assert padding_token(model, objective="masked", vocabulary_size=100) == padding
    assert padding_token(model, objective="causal", vocabulary_size=100) == NO_PADDING


def test_padding_has_the_id_of_a_model_whose_vocabulary_nobody_names() -> None:
    """The model has its own then, and 0 may be a word."""
    pytest.importorskip("transformers")
    model = ModelConfig(config={"model_type": "roberta"})

    assert padding_token(model, objective="supervised", vocabulary_size=0) == 1


def test_bytes_beside_padded_rows_are_targets_that_can_count_nothing() -> None:
    """-100 is 156 in a byte, which is trained on. A row without tokens is padding alone."""
    rows = [torch.arange(length) for length in (3, 2, 0)]
    items = [(row, row.to(torch.uint8)) for row in rows]
    dataset = UserDataset(items, "items", "supervised", None, len(items), padding=0)

    _, targets = microbatch(dataset, np.array([0, 1]), seed=0)

    assert targets.tolist() == [[0, 1, 2], [0, 1, -100]]
    with pytest.raises(ConfigError, match=r"sample 2.*no tokens"):
        microbatch(dataset, np.array([0, 2]), seed=0)


def test_rows_to_pad_are_refused_where_no_mask_hides_that(tmp_path: Path) -> None:
    """Before training: the first microbatch may have rows of one length by chance."""
    unequal, equal = (
        load(
            saved_dataset(tmp_path / str(len(rows)), {"input_ids": rows}),
            tmp_path / "cache",
            objective="masked",
        )
        for rows in ([[1, 2], [1, 2, 3], [4]], [[1, 2, 3, 4]])
    )

    def problem() -> str:
        return "it would see it"

    refuse_unhidden_padding(unequal, str, key="data.path", path="rows")
    refuse_unhidden_padding(equal, problem, key="data.path", path="rows")
    with pytest.raises(ConfigError, match="have 1 to 3 tokens, and it would see it") as caught:
        refuse_unhidden_padding(unequal, problem, key="evaluation.path", path="rows")
    assert caught.value.field == "evaluation.path"


@pytest.mark.parametrize("model_type", ["bart", "pegasus"])
def test_labels_that_transformers_does_not_shift_are_refused(
    tmp_path: Path, model_type: str
) -> None:
    """They were shifted here, once more than by the user who has shifted them for this type."""
    rows = [[1, 2, 3, 4]] * 2
    labelled = saved_dataset(tmp_path / "labelled", {"input_ids": rows, "labels": rows})
    plain = saved_dataset(tmp_path / "plain", {"input_ids": rows})
    model = ModelConfig(config={"model_type": model_type, "is_encoder_decoder": False})
    arguments: Any = {"objective": "causal", "seed": 1, "cache_directory": tmp_path}

    targets = load_dataset(plain, model=model, **arguments).sample(0, seed=0)[1]
    assert targets.tolist() == [2, 3, 4, IGNORED]
    assert len(load_dataset(labelled, **arguments)) == 2
    with pytest.raises(ConfigError, match=f"does not shift the column labels for {model_type}"):
        load_dataset(labelled, model=model, **arguments)


class _Rows:
    """Rows of the user's, of which the last is longer."""

    def __init__(self, *lengths: int) -> None:
        self._lengths = lengths

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = torch.arange(self._lengths[index] + 1)
        return row[:-1], row[1:]


def equal_rows() -> _Rows:
    """Data of one length, by the name of this function."""
    return _Rows(4, 4)


def unequal_rows() -> _Rows:
    """Data of two lengths."""
    return _Rows(3, 4)


def _routers(directory: Path, **keys: bool) -> ModelConfig:
    """A model's directory whose config.json asks for the routers' loss."""
    directory.mkdir()
    (directory / "config.json").write_text('{"output_router_logits": true}')
    return ModelConfig(path=str(directory), config=keys)


def test_routers_never_count_padding(tmp_path: Path) -> None:
    """Their loss is a mean over all tokens. Wherever the key stands, whoever made the rows, and in
    held-out rows, too.
    """
    asked = ModelConfig(config={"model_type": "mixtral", "output_router_logits": True})
    equal = saved_dataset(tmp_path / "equal", {"input_ids": [[1, 2, 3]] * 2})
    unequal = saved_dataset(tmp_path / "unequal", {"input_ids": [[1, 2, 3], [1, 2, 3, 4]]})
    own, own_unequal = (
        DataConfig(kind="python", target=f"{__name__}:{name}_rows") for name in ("equal", "unequal")
    )
    base: dict[str, Any] = {"objective": "causal", "seed": 0, "cache_directory": tmp_path}
    for model in (asked, _routers(tmp_path / "model")):
        arguments = base | {"model": model}
        load_dataset(equal, **arguments)
        microbatch(load_dataset(own, **arguments), np.array([0, 1]), seed=0)
        with pytest.raises(ConfigError, match=r"count padding.*unequal.* 3 to 4 tokens") as caught:
            load_dataset(unequal, **arguments)
        assert caught.value.field == "model.config.output_router_logits"
        with pytest.raises(ConfigError, match=r"count padding.*unequal.* 3 to 4 tokens"):
            load_held_out(unequal, equal, **arguments)
        for dataset in (
            load_dataset(own_unequal, **arguments),
            load_held_out(own_unequal, own, **arguments),
        ):
            with pytest.raises(ConfigError, match=r"count padding: sample 1 has \[4\], and"):
                microbatch(dataset, np.array([0, 1]), seed=0)

    for model in (ModelConfig(), _routers(tmp_path / "off", output_router_logits=False)):
        arguments = base | {"model": model}
        load_dataset(unequal, **arguments)
        inputs, _ = microbatch(load_dataset(own_unequal, **arguments), np.array([0, 1]), seed=0)
        assert inputs.tolist() == [[0, 1, 2, 0], [0, 1, 2, 3]]


def test_labels_of_a_row_are_whole_though_they_are_as_many_as_its_tokens(tmp_path: Path) -> None:
    """One of the rows has by chance as many tokens as there are classes."""
    rows = [list(range(length)) for length in (5, 6, 4)]
    labels = [[0, 1, 0, 1, 1], [1, 1, 0, 0, 1], [1] * 5]
    data = saved_dataset(tmp_path, {"input_ids": rows, "labels": labels})
    dataset = load(data, tmp_path / "cache", objective="supervised")

    assert [dataset.sample(k, seed=0)[1].tolist() for k in range(3)] == labels
    assert [len(dataset.sample(k, seed=0)[0]) for k in range(3)] == [4] * 3
