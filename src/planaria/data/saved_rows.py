"""Saved data sets: the rows of a directory that `save_to_disk` of Hugging Face datasets wrote.

The rows have a column input_ids, of which each row is a sample, and perhaps labels; padding.py says
what further columns do. Or they have a column text, which is tokenised and cut as any text.
"""

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from planaria.core.job import DataConfig, ModelConfig
from planaria.data.model_tokenizer import end_of_document, special_tokens
from planaria.data.padding import (
    MASKS,
    NO_PADDING,
    POSITIONS,
    TYPES,
    arrow_modules,
    counts_padding,
    integer_lists,
    labels_are_per_token,
    lengths_without_padding,
    padding_token,
    refuse_inner_padding,
    refuse_nulls,
    refuse_unequal_rows,
    refuse_unheeded_columns,
    refuse_unshifted_labels,
)
from planaria.data.text import TextSource, TokenDataset, causal_pair, make_once, text_dataset
from planaria.errors import ConfigError

# Splits of a directory that has several, the best first.
TRAINING: Final = ("train",)
HELD_OUT: Final = ("validation", "test")
_NO_END: Final = "\n\n"  # Between texts.
_SAMPLES: Final = ("input_ids", "labels")  # Columns that samples are made of.
# Share of the tokens that may be left out unsaid. Rows of whole samples may have a target more.
_UNSAID_SHARE: Final = 0.01


@dataclass(frozen=True, slots=True)
class LabelledRows:
    """Rows of a saved dataset with labels: any labels ("supervised"), or one for each token.

    In Hugging Face datasets the label of a token has the token's own position. For "causal" labels
    are shifted by one here, because a target in planaria is what the model predicts at a position.

    Attributes:
        lengths: number of tokens of each row, if some have less than sequence_length; else empty.
        are_per_token: whether a row has a label for each token, which are cut like these.
        padding: see `padding_token`.
    """

    rows: Any
    objective: str
    sequence_length: int
    vocabulary_size: int
    lengths: npt.NDArray[np.int32]
    are_per_token: bool
    padding: int = NO_PADDING

    def __len__(self) -> int:
        return len(self.rows)

    def sample(self, index: int, *, seed: int) -> tuple[Tensor, Tensor]:
        assert seed >= 0
        row = self.rows[index]
        length = int(self.lengths[index]) if len(self.lengths) else self.sequence_length
        tokens = np.asarray(row["input_ids"]).astype(np.int64)[:length]
        # A copy, because the arrays of datasets may be read-only, which torch does not support.
        labels = np.array(row["labels"])
        if self.are_per_token:
            labels = labels[:length]
        if self.objective != "supervised":
            labels = labels.astype(np.int64)
        if self.objective == "causal":
            tokens, labels = causal_pair(tokens, labels, sequence_length=len(tokens))
        return torch.from_numpy(tokens), torch.as_tensor(labels)


@dataclass(frozen=True, slots=True)
class _TokenRows:
    """The rows of column input_ids, each cut to `length` tokens, or to its own of `lengths`."""

    rows: Any
    length: int
    lengths: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int, /) -> np.ndarray:
        length = int(self.lengths[index]) if len(self.lengths) else self.length
        return np.asarray(self.rows[index]["input_ids"])[:length]


def saved_dataset(
    data: DataConfig,
    *,
    objective: str,
    cache_directory: Path,
    model: ModelConfig,
    splits: Sequence[str] = TRAINING,
    learned_from: str = "",
) -> LabelledRows | TokenDataset:
    """The data set of a directory; a tokenizer learns from the one named `learned_from`.

    Args:
        splits: see `loaded_from_disk`.

    Raises:
        ConfigError: it cannot be read, or does not fit the objective, the model or the length; or
            it has token ids, and the job names a tokenizer; or see `_training_text`.
    """
    saved, path = loaded_from_disk(data.path, splits)
    data = replace(data, path=path)
    columns = _known_columns(saved, path)
    has_other = learned_from and data.tokenizer != "model"
    other = _training_text(saved, path, learned_from) if has_other else None
    if "input_ids" not in columns:
        end = end_of_document(model.path) if data.tokenizer == "model" else _NO_END
        return text_dataset(
            _saved_text(path, saved, end),
            data,
            objective=objective,
            cache_directory=cache_directory,
            learned_from=other,
            model_path=model.path,
        )
    _refuse_tokenizer(data)
    names = _checked_columns(columns, data, objective)
    if objective == "causal" and "labels" in names:
        refuse_unshifted_labels(model, path)
    num_ids = num_row_ids(saved, data.path, cache_directory)
    padding = padding_token(model, objective=objective, vocabulary_size=num_ids)
    checked = names if objective != "supervised" else ["input_ids"]
    kept = _kept_lengths(saved, data, cache_directory)
    row_lengths = _sample_lengths(
        saved, checked, data, objective=objective, padding=padding, kept=kept
    )
    if counts_padding(model):
        refuse_unequal_rows(row_lengths, data.path)
    rows, length = saved.with_format("numpy", columns=names), data.sequence_length
    if "labels" in names:
        _check_labels(rows, data.path)
        per_token = labels_are_per_token(saved, objective, data.path)
        return LabelledRows(rows, objective, length, num_ids, row_lengths, per_token, padding)
    return TokenDataset(
        _TokenRows(rows, length, row_lengths),
        objective,
        length,
        num_ids,
        lengths=row_lengths if len(row_lengths) else None,
        special=special_tokens(model.path) if objective == "masked" else None,
        padding=padding,
    )


def left_out_text(
    data: DataConfig,
    *,
    cache_directory: Path,
    splits: Sequence[str] = TRAINING,
    key: str = "data.path",
) -> str:
    """The note that tokens beyond `sequence_length` are left out; "": none are, or hardly any.

    Args:
        data: data of a job that can be loaded (`saved_dataset`), or other than a saved data set.
        splits: see `loaded_from_disk`.
        key: key that names the data set.
    """
    if data.kind != "hf":
        return ""
    saved, path = loaded_from_disk(data.path, splits)
    if "input_ids" not in saved.column_names:
        return ""
    kept = _kept_lengths(saved, replace(data, path=path), cache_directory)
    lengths = _row_lengths(saved, "input_ids", path, kept).astype(np.int64)
    length = data.sequence_length
    share = np.maximum(lengths - length, 0).sum() / lengths.sum()
    if share < _UNSAID_SHARE:
        return ""
    return (
        f"{key} = {data.path!r}: {(lengths > length).sum()} of its {len(lengths)} rows have more "
        f"tokens than data.sequence_length = {length}, so {int(1000 * share) / 10}% of its tokens "
        f"are left out; set it to {lengths.max()} for whole rows, or save rows that are cut into "
        "several"
    )


def unused_columns_text(
    data: DataConfig, *, splits: Sequence[str] = TRAINING, key: str = "data.path"
) -> str:
    """The note that rows of token ids have columns of which planaria makes nothing; "": none.

    Args:
        data, splits, key: see `left_out_text`.
    """
    if data.kind != "hf":
        return ""
    columns = loaded_from_disk(data.path, splits)[0].column_names
    unused = [name for name in columns if name not in (*_SAMPLES, MASKS, TYPES, POSITIONS)]
    if "input_ids" not in columns or not unused:
        return ""
    used = " and ".join(name for name in _SAMPLES if name in columns)
    return (
        f"{key} = {data.path!r}: nothing is done with its columns {', '.join(unused)}; samples "
        f"are made of {used}"
    )


def _known_columns(saved: Any, path: str) -> list[str]:
    """The columns of a data set, among which are token ids or texts."""
    columns: list[str] = saved.column_names
    if "input_ids" not in columns and "text" not in columns:
        remedy = f"it has the columns {', '.join(columns)}; planaria takes input_ids or text"
        raise ConfigError("data.path", path, remedy)
    return columns


def _checked_columns(columns: Sequence[str], data: DataConfig, objective: str) -> list[str]:
    """The columns that samples are made of, of a data set with token ids."""
    refuse_unheeded_columns(columns, data.path)
    names = [name for name in _SAMPLES if name in columns]
    if objective == "supervised" and "labels" not in names:
        remedy = f"it has the columns {', '.join(columns)}; a supervised model needs labels"
        raise ConfigError("data.path", data.path, remedy)
    return names


def _training_text(held_out: Any, path: str, training_path: str) -> TextSource | None:
    """The texts of the training data; None if both data sets have token ids.

    Raises:
        ConfigError: one has texts and the other token ids, which are those of another tokenizer.
    """
    training, training_path = loaded_from_disk(training_path, TRAINING)
    has_ids = "input_ids" in held_out.column_names
    if has_ids == ("input_ids" in training.column_names):
        return None if has_ids else _saved_text(training_path, training)
    remedy = (
        f"it has texts, and the training data in {training_path} have input_ids, which are tokens "
        "of another tokenizer; save it with a column input_ids of that tokenizer"
    )
    if has_ids:
        remedy = (
            f"it has a column input_ids, and the training data in {training_path} are texts, which "
            "get tokens of planaria's own; save it with a column text alone"
        )
    raise ConfigError("data.path", path, remedy)


def _refuse_tokenizer(data: DataConfig) -> None:
    """Refuses a tokenizer for rows of token ids."""
    if data.tokenizer != DataConfig().tokenizer:
        remedy = (
            f"{data.path} has a column input_ids, whose ids are taken as they are, and the key has "
            "a meaning only for text; leave it out, or save the texts without that column"
        )
        raise ConfigError("data.tokenizer", data.tokenizer, remedy)


def _saved_text(path: str, saved: Any, end: str = _NO_END) -> TextSource:
    """The texts of a saved data set, with `end` after each.

    Raises:
        ConfigError: one is null, which has no text.
    """
    _, compute = arrow_modules()
    texts = saved.data.column("text")
    if texts.null_count:
        row = compute.index(compute.is_null(texts), True).as_py()
        remedy = (
            f"row {row} of its column text is null, as {texts.null_count} of {len(texts)} are; "
            'save it without them: saved.filter(lambda row: row["text"] is not None)'
        )
        raise ConfigError("data.path", path, remedy)
    digest = _saved_digest(path) + (end if end.strip() else "")
    return TextSource(
        path, digest, partial(_ended_texts, saved, end), partial(_row_texts, saved), end
    )


def loaded_from_disk(path: str, splits: Sequence[str] = TRAINING) -> tuple[Any, str]:
    """The saved `datasets.Dataset`, and the directory that holds it alone.

    Args:
        splits: names of splits; if the directory has several, the first of these is taken.

    Raises:
        ConfigError: there is no data set, or it has none of the splits.
    """
    if importlib.util.find_spec("datasets") is None:
        remedy = "it needs more packages: pip install -e '.[hf]' in planaria's checkout"
        raise ConfigError("data.kind", "hf", remedy)
    import datasets

    try:
        saved = datasets.load_from_disk(path)
    except (OSError, ValueError, KeyError) as error:
        remedy = f"{error}; give a directory that save_to_disk of datasets wrote"
        raise ConfigError("data.path", path, remedy) from error
    if not isinstance(saved, datasets.DatasetDict):
        return saved, path
    for split in splits:
        if split in saved:
            return saved[split], str(Path(path, split))
    remedy = (
        f"it has the splits {', '.join(saved)}, and none is {' or '.join(splits)}; give the "
        "directory of one of them"
    )
    raise ConfigError("data.path", path, remedy)


def _kept_lengths(saved: Any, data: DataConfig, cache_directory: Path) -> npt.NDArray[np.int32]:
    """Number of tokens of each row without padding; empty if there is none.

    Raises:
        ConfigError: see `lengths_without_padding`.
    """
    if not {MASKS, TYPES, POSITIONS} & set(saved.column_names):
        return np.empty(0, dtype=np.int32)

    def scan(partial_path: Path) -> None:
        partial_path.write_bytes(lengths_without_padding(saved, data.path).tobytes())

    path = _scan_once("unpadded-lengths", scan, data.path, cache_directory)
    return np.fromfile(path, dtype=np.int32)


def _num_least(data: DataConfig, objective: str, padding: int) -> int:
    """Number of tokens that a row must have: a causal model's has a token and the next one."""
    if objective == "causal":
        return 2
    return data.sequence_length if padding == NO_PADDING else 1


def _sample_lengths(
    saved: Any,
    columns: Sequence[str],
    data: DataConfig,
    *,
    objective: str,
    padding: int,
    kept: npt.NDArray[np.int32],
) -> npt.NDArray[np.int32]:
    """Number of tokens of each row as a sample; empty if none is shorter than others.

    Args:
        columns: columns with a number for each token.
        padding: see `padding_token`.
        kept: number of tokens of each row without padding; empty if there is none.

    Raises:
        ConfigError: the columns are not lists of integers, are too short or differ in length, or
            see `refuse_inner_padding`.
    """
    # Else each token sees those behind it, and no mask hides what is padded.
    may_be_cut = objective == "causal" or padding != NO_PADDING
    refuse_inner_padding(
        kept, data.path, sequence_length=data.sequence_length, may_be_cut=may_be_cut
    )
    num_least = _num_least(data, objective, padding)
    lengths, *others = (_checked_lengths(saved, name, data, num_least, kept) for name in columns)
    if not all(np.array_equal(lengths, some) for some in others):
        remedy = "a row of its column labels has not the length of that of input_ids"
        raise ConfigError("data.path", data.path, remedy)
    return lengths


def _checked_lengths(
    saved: Any, column: str, data: DataConfig, num_least: int, kept: npt.NDArray[np.int32]
) -> npt.NDArray[np.int32]:
    """Lengths of a column's rows as samples, see `_sample_lengths`."""
    lengths = _row_lengths(saved, column, data.path, kept)
    shortest = int(lengths.min()) if len(lengths) else 0
    if shortest >= data.sequence_length:
        return np.empty(0, dtype=np.int32)
    if shortest >= num_least:
        return np.minimum(lengths, data.sequence_length)
    remedy = f"the shortest row of {column} in {data.path} has {shortest} tokens; "
    if num_least < data.sequence_length:
        remedy += f"drop rows of less than {'two' if num_least == 2 else 'one'}"
    else:
        remedy += f"pack the rows to one length, or set it to {shortest}"
    raise ConfigError("data.sequence_length", data.sequence_length, remedy)


def _row_lengths(
    saved: Any, column: str, path: str, kept: npt.NDArray[np.int32]
) -> npt.NDArray[np.int32]:
    """Number of tokens of each row without padding; see `_checked_lengths` for `kept`."""
    _, compute = arrow_modules()
    lists = integer_lists(saved, column, path)
    lengths = np.asarray(compute.list_value_length(lists), dtype=np.int32)
    return np.minimum(lengths, kept) if len(kept) else lengths


def _check_labels(rows: Any, path: str) -> None:
    """Refuses labels with nulls, and those of which the first row makes no tensor: text, or lists
    of unequal lengths."""
    refuse_nulls(rows.data.column("labels"), "labels", path)
    labels = np.asarray(rows[0]["labels"])
    if labels.dtype.kind not in "biuf":
        remedy = f"its column labels holds {labels.dtype}; planaria takes numbers"
        raise ConfigError("data.path", path, remedy)


def num_row_ids(saved: Any, path: str, cache_directory: Path) -> int:
    """One more than the largest number in the column input_ids.

    Raises:
        ConfigError: there is no row, or see `integer_lists`.
    """
    if not len(saved):
        raise ConfigError("data.path", path, "it has no rows")
    values = integer_lists(saved, "input_ids", path)

    def ends() -> tuple[int, int]:
        _, compute = arrow_modules()
        bounds = compute.min_max(compute.list_flatten(values)).as_py()
        return bounds["min"], bounds["max"]

    return num_ids_once(ends, path, cache_directory)


def num_ids_once(ends: Callable[[], tuple[int, int]], path: str, cache_directory: Path) -> int:
    """One more than the largest token id in a dataset; the cache keeps the scan's result.

    Args:
        ends: function that scans the dataset for its smallest and its largest id.
    """

    def scan(partial_path: Path) -> None:
        smallest, largest = ends()
        if smallest < 0:
            raise ConfigError("data.path", path, f"it holds the id {smallest}; ids start at 0")
        partial_path.write_text(str(largest + 1))

    return int(_scan_once("num-ids", scan, path, cache_directory).read_text())


def _scan_once(name: str, scan: Callable[[Path], None], path: str, cache_directory: Path) -> Path:
    """The file in the cache with what a scan of the data set at `path` gave, made now or before.

    Args:
        name: name of what it gives.
        scan: function that scans the data set, and writes the file.
    """
    try:
        return make_once(cache_directory / f"{name}-{_saved_digest(path)}", scan)
    except OSError as error:
        reason = f"{error.strerror} ({error.filename})"
        raise ConfigError(
            "data.path", path, f"it cannot be read, or the cache cannot be written: {reason}"
        ) from error


def _saved_digest(path: str) -> str:
    """Digest of a dataset's JSON descriptions, and of its files' names, sizes and times.

    The content of the files is left out because it may be terabytes; datasets itself distinguishes
    versions by the descriptions.
    """
    digest = xxhash.xxh3_128()
    files = sorted(Path(path).rglob("*")) or [Path(path)]
    for file in files:
        if file.suffix == ".json":
            digest.update(file.read_bytes())
        elif file.is_file():
            status = file.stat()
            name = file.absolute() if file == Path(path) else file.relative_to(path)
            digest.update(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return digest.hexdigest()


def _ended_texts(saved: Any, end: str) -> Iterator[bytes]:
    for text in _row_texts(saved):
        yield f"{text}{end}".encode()


def _row_texts(saved: Any) -> Iterator[str]:
    for row in saved.select_columns(["text"]):
        yield row["text"]
