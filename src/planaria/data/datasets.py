"""Datasets: what a sample is, and how a microbatch is made of samples.

Everything random in a sample (masks, transforms) comes from a seed that is a function of the
job's seed, the iteration and the sample's number, so every node loads the same sample.

Kinds: "text" is Python's own prose or any file (text.py). "tokens" is a file of token ids, as
nanoGPT's scripts write it: raw uint16, or a .npy file; it is mapped and cut into samples. "hf" is a
directory written by `save_to_disk` of Hugging Face datasets, with a column input_ids (and perhaps
labels; padding.py says what further columns do) or a column text. "python" is the user's own
function, which returns an object that has a length and gives (inputs, targets) by index, or what
the user's collate function makes of them.

The targets depend on the objective. "causal": the next token at each position; "masked": the hidden
tokens; "supervised": whatever the model's loss takes. -100 marks a position without a target.
"""

import importlib
import importlib.util
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from planaria.core.job import DataConfig, ModelConfig
from planaria.data.padding import (
    MASKS,
    TYPES,
    arrow_modules,
    counts_padding,
    integer_lists,
    lengths_without_padding,
    refuse_inner_padding,
    refuse_unequal_rows,
)
from planaria.data.special_tokens import special_tokens
from planaria.data.text import (
    TextSource,
    TokenDataset,
    causal_pair,
    file_source,
    make_once,
    num_token_ids,
    packed_dataset,
    prose_source,
    text_dataset,
    token_file,
    tokenizer_size,
)
from planaria.errors import ConfigError
from planaria.user_functions import user_function

_SCANNED_AT_ONCE = 1 << 24  # Tokens; a mapped file may be larger than the memory.
_FRESH_MODEL: Final = ModelConfig()


class Dataset(Protocol):
    """Samples by number.

    Attributes:
        vocabulary_size: upper bound on token ids, exclusive; 0: samples have no token ids.
    """

    @property
    def vocabulary_size(self) -> int: ...

    def __len__(self) -> int: ...

    def sample(self, index: int, *, seed: int) -> tuple[Any, Any]:
        """Inputs and targets of one sample; the same for the same index and seed.

        They are tensors, or tuples and dicts of tensors. It may seed the generators of torch, numpy
        and Python.
        """


def load_dataset(
    data: DataConfig,
    *,
    objective: str,
    seed: int,
    cache_directory: Path,
    model: ModelConfig = _FRESH_MODEL,
) -> Dataset:
    """The job's data; one process makes the tokens and keeps them in cache_directory for all.

    Args:
        objective: "causal", "masked" or "supervised".
        seed: seed with which the function that builds a "python" dataset runs.
        model: the job's model, by which padding may be refused, and whose directory may have a
            tokenizer with the mask token.

    Raises:
        ConfigError: the data cannot be read, or does not fit the objective or the sequence length.
    """
    assert objective in ("causal", "masked", "supervised")
    if data.kind == "python":
        return _user_dataset(data, objective=objective, seed=seed, model=model)
    if data.kind == "hf":
        return _saved_dataset(
            data, objective=objective, cache_directory=cache_directory, model=model
        )
    if data.kind == "tokens":
        tokens = token_file(data.path)
        return packed_dataset(
            tokens,
            data.path,
            data,
            objective=objective,
            num_tokens=_num_token_ids_in(tokens, data.path, cache_directory),
            special=special_tokens(model.path) if objective == "masked" else None,
        )
    source = file_source(data.path) if data.path else prose_source()
    return text_dataset(source, data, objective=objective, cache_directory=cache_directory)


def load_held_out(
    held_out: DataConfig,
    training: DataConfig,
    *,
    objective: str,
    seed: int,
    cache_directory: Path,
    model: ModelConfig = _FRESH_MODEL,
) -> Dataset:
    """The data of evaluations, with the tokens of the training data.

    Raises:
        ConfigError: see `load_dataset`; it names the keys of the evaluation.
    """
    try:
        if held_out.kind == "hf":
            return _saved_dataset(
                held_out,
                objective=objective,
                cache_directory=cache_directory,
                model=model,
                learned_from=training.path,
            )
        if held_out.kind != "text":
            return load_dataset(
                held_out,
                objective=objective,
                seed=seed,
                cache_directory=cache_directory,
                model=model,
            )
        return text_dataset(
            file_source(held_out.path),
            held_out,
            objective=objective,
            cache_directory=cache_directory,
            learned_from=file_source(training.path) if training.path else prose_source(),
        )
    except ConfigError as error:
        field = error.field
        if field in ("data.path", "data.target"):
            field = field.replace("data.", "evaluation.")
        raise ConfigError(field, error.value, error.remedy) from error


def vocabulary_size(
    data: DataConfig,
    *,
    cache_directory: Path,
    objective: str = "causal",
    model: ModelConfig = _FRESH_MODEL,
) -> int:
    """The vocabulary_size of the data's dataset; text is not tokenised for it.

    Raises:
        ConfigError: see `load_dataset`.
    """
    if data.kind == "text":
        return num_token_ids(tokenizer_size(data), objective)
    if data.kind == "hf":
        saved = _loaded_from_disk(data.path)
        columns = set(saved.column_names)
        # Whatever the labels are; what padding is wrong depends on the objective, asked for later.
        if "input_ids" in columns and (objective == "causal" or "labels" in columns):
            return _num_ids(saved, data.path, cache_directory)
    return load_dataset(
        data, objective=objective, seed=0, cache_directory=cache_directory, model=model
    ).vocabulary_size


@contextmanager
def keep_generators() -> Iterator[None]:
    """Restores the generators of torch (on the CPU), numpy and Python at the end of the body.

    Samples are loaded within it. One serves many samples, because it takes 0.1 to 0.3 ms.
    """
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])


@dataclass(frozen=True, slots=True)
class UserDataset:
    """The user's indexable object; random numbers that it draws come from the sample's seed.

    Attributes:
        collate: the user's function, which takes a list of what `items` gives by index and returns
            the inputs and targets of a microbatch; None: they are stacked.
        num_samples: length of the object when it was made; it may change meanwhile, and the numbers
            of all iterations' samples depend on it.
        may_pad: whether rows of unequal length may be padded in their microbatch.
    """

    items: Any
    target: str
    objective: str
    collate: Callable[[list[Any]], Any] | None
    num_samples: int
    may_pad: bool = True

    def __len__(self) -> int:
        return self.num_samples

    @property
    def vocabulary_size(self) -> int:
        """The object's own vocabulary_size, if it has one, else 0."""
        return int(getattr(self.items, "vocabulary_size", 0))

    def item(self, index: int, *, seed: int) -> Any:
        """What the user's object gives for a number."""
        _seed_generators(seed)
        return self.items[index]

    def sample(self, index: int, *, seed: int) -> tuple[Any, Any]:
        return self.pair(self.item(index, seed=seed), f"sample {index}", "data.target", self.target)

    def collate_items(self, items: list[Any], *, seed: int) -> tuple[Any, Any]:
        """Inputs and targets of a microbatch, as the user's `collate` makes them."""
        assert self.collate is not None
        _seed_generators(seed)
        name = getattr(self.collate, "__name__", "collate")
        return self.pair(self.collate(items), "its value", "data.collate", name)

    def pair(self, item: object, what: str, field: str, name: str) -> tuple[Any, Any]:
        """Inputs and targets as tensors, or tuples and dicts of tensors.

        Raises:
            ConfigError: naming `field`: the item is something else.
        """
        if not isinstance(item, tuple | list) or len(item) != 2:
            remedy = f"{what} is of type {type(item).__name__}; return (inputs, targets)"
            raise ConfigError(field, name, remedy)
        try:
            inputs, targets = _tensors(item[0]), _tensors(item[1])
        except (TypeError, ValueError, RuntimeError) as error:
            remedy = f"{what} has a part that is not a tensor ({error}); return tensors"
            raise ConfigError(field, name, remedy) from error
        if self.objective != "supervised" and getattr(targets, "dtype", None) != torch.int64:
            dtype = getattr(targets, "dtype", type(targets).__name__)
            remedy = f"a {self.objective} model needs token ids of type int64 as targets; {what} "
            raise ConfigError(field, name, f"{remedy} has {dtype}")
        return inputs, targets


def _tensors(value: object) -> Any:
    """The value as a tensor; dicts, and tuples with arrays in them, stay what they are."""
    if isinstance(value, dict):
        return {key: _tensors(part) for key, part in value.items()}
    parts = value if isinstance(value, tuple) else ()
    if any(isinstance(part, Tensor | np.ndarray | dict | tuple) for part in parts):
        return tuple(map(_tensors, parts))
    return torch.as_tensor(value)


@dataclass(frozen=True, slots=True)
class _LabelledRows:
    """Rows of a saved dataset with labels: any labels ("supervised"), or one for each token.

    In Hugging Face datasets the label of a token has the token's own position. For "causal" labels
    are shifted by one here, because a target in planaria is what the model predicts at a position.

    Attributes:
        lengths: number of tokens of each row, if some have less than sequence_length; else empty.
    """

    rows: Any
    objective: str
    sequence_length: int
    vocabulary_size: int
    lengths: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.rows)

    def sample(self, index: int, *, seed: int) -> tuple[Tensor, Tensor]:
        assert seed >= 0
        row = self.rows[index]
        length = int(self.lengths[index]) if len(self.lengths) else self.sequence_length
        whole = np.asarray(row["input_ids"]).astype(np.int64)
        tokens = whole[:length]
        # A copy, because the arrays of datasets may be read-only, which torch does not support.
        labels = np.array(row["labels"])
        if labels.shape == whole.shape:  # One for each token.
            labels = labels[:length]
        if self.objective == "causal":
            labels = labels[:length].astype(np.int64)
            tokens, labels = causal_pair(tokens, labels, sequence_length=len(tokens))
        elif self.objective == "masked":
            labels = labels[:length].astype(np.int64)
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


def _user_dataset(
    data: DataConfig, *, objective: str, seed: int, model: ModelConfig
) -> UserDataset:
    target = data.target
    function = user_function(target, field="data.target")
    collate: Callable[..., Any] | None = None
    if data.collate:
        collate = user_function(data.collate, field="data.collate")
    with keep_generators():
        _seed_generators(seed)
        items = function()
    for method in ("__len__", "__getitem__"):
        if not hasattr(items, method):
            remedy = f"it returned an object of type {type(items).__name__}, which has no {method}"
            raise ConfigError("data.target", target, remedy)
    may_pad = not counts_padding(model)
    return UserDataset(items, target, objective, collate, len(items), may_pad)


def _seed_generators(seed: int) -> None:
    """Seeds the generators of torch (on the CPU), numpy and Python."""
    # torch.manual_seed would also seed the generators of accelerators, which are not restored.
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


def _saved_dataset(
    data: DataConfig,
    *,
    objective: str,
    cache_directory: Path,
    model: ModelConfig,
    learned_from: str = "",
) -> Dataset:
    """The data set of a directory; a tokenizer learns from the one named `learned_from`."""
    saved = _loaded_from_disk(data.path)
    columns = saved.column_names
    if "input_ids" not in columns and "text" not in columns:
        remedy = f"it has the columns {', '.join(columns)}; planaria takes input_ids or text"
        raise ConfigError("data.path", data.path, remedy)
    if "input_ids" not in columns:
        source, other = _saved_text(data.path, saved), None
        if learned_from:
            other = _saved_text(learned_from, _loaded_from_disk(learned_from))
        return text_dataset(
            source,
            data,
            objective=objective,
            cache_directory=cache_directory,
            learned_from=other,
        )
    names = [name for name in ("input_ids", "labels") if name in columns]
    if objective == "supervised" and "labels" not in names:
        remedy = f"it has the columns {', '.join(columns)}; a supervised model needs labels"
        raise ConfigError("data.path", data.path, remedy)
    checked = names if objective != "supervised" else ["input_ids"]
    kept = _kept_lengths(saved, data, objective, cache_directory)
    lengths = {name: _checked_lengths(saved, name, data, objective, kept) for name in checked}
    row_lengths = lengths["input_ids"]
    if not all(np.array_equal(some, row_lengths) for some in lengths.values()):
        remedy = "a row of its column labels has not the length of that of input_ids"
        raise ConfigError("data.path", data.path, remedy)
    if counts_padding(model):
        refuse_unequal_rows(row_lengths, data.path)
    num_ids = _num_ids(saved, data.path, cache_directory)
    rows = saved.with_format("numpy", columns=names)
    if "labels" in names:
        _check_labels(rows, data.path)
        return _LabelledRows(rows, objective, data.sequence_length, num_ids, row_lengths)
    token_rows = _TokenRows(rows, data.sequence_length, row_lengths)
    return TokenDataset(
        token_rows,
        objective,
        data.sequence_length,
        num_ids,
        lengths=row_lengths if len(row_lengths) else None,
        special=special_tokens(model.path) if objective == "masked" else None,
    )


def _saved_text(path: str, saved: Any) -> TextSource:
    """The texts of a saved data set.

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
    return TextSource(path, _saved_digest(path), partial(_row_texts, saved))


def _loaded_from_disk(path: str) -> Any:
    """The saved `datasets.Dataset`; the split "train" if the directory has several splits."""
    if importlib.util.find_spec("datasets") is None:
        raise ConfigError("data.kind", "hf", "it needs more packages: pip install 'planaria[hf]'")
    import datasets

    try:
        saved = datasets.load_from_disk(path)
    except (OSError, ValueError, KeyError) as error:
        remedy = f"{error}; give a directory that save_to_disk of datasets wrote"
        raise ConfigError("data.path", path, remedy) from error
    if not isinstance(saved, datasets.DatasetDict):
        return saved
    if "train" not in saved:
        remedy = f"it has the splits {', '.join(saved)}; give the directory of one of them"
        raise ConfigError("data.path", path, remedy)
    return saved["train"]


def _kept_lengths(
    saved: Any, data: DataConfig, objective: str, cache_directory: Path
) -> npt.NDArray[np.int32]:
    """Number of tokens of each row without padding; empty if there is none.

    Raises:
        ConfigError: see `lengths_without_padding` and `refuse_inner_padding`.
    """
    if not {MASKS, TYPES} & set(saved.column_names):
        return np.empty(0, dtype=np.int32)

    def scan(partial_path: Path) -> None:
        partial_path.write_bytes(lengths_without_padding(saved, data.path).tobytes())

    path = _scan_once("kept-lengths", scan, data.path, cache_directory)
    kept = np.fromfile(path, dtype=np.int32)
    refuse_inner_padding(kept, data.path, objective=objective, sequence_length=data.sequence_length)
    return kept


def _checked_lengths(
    saved: Any, column: str, data: DataConfig, objective: str, kept: npt.NDArray[np.int32]
) -> npt.NDArray[np.int32]:
    """Lengths of a column's rows as samples; empty if none is shorter than others.

    Args:
        kept: number of tokens of each row without padding; empty if there is none.

    Raises:
        ConfigError: the rows are not lists of integers, or are too short. Padding at the end of a
            row changes nothing where each token sees only those before it.
    """
    _, compute = arrow_modules()
    lengths = compute.list_value_length(integer_lists(saved, column, data.path))
    shortest = compute.min(lengths).as_py() or 0
    if len(kept):
        lengths = np.minimum(np.asarray(lengths), kept)
        shortest = int(lengths.min())
    if shortest >= data.sequence_length:
        return np.empty(0, dtype=np.int32)
    if objective == "causal" and shortest > 1:
        return np.minimum(np.asarray(lengths, dtype=np.int32), data.sequence_length)
    remedy = f"the shortest row of {column} in {data.path} has {shortest} tokens; "
    if objective == "causal":
        remedy += "drop rows of less than two"
    else:
        remedy += f"pack the rows to one length, or set it to {shortest}"
    raise ConfigError("data.sequence_length", data.sequence_length, remedy)


def _check_labels(rows: Any, path: str) -> None:
    """Refuses labels of which the first row makes no tensor: text, or lists of unequal lengths."""
    labels = np.asarray(rows[0]["labels"])
    if labels.dtype.kind not in "biuf":
        remedy = f"its column labels holds {labels.dtype}; planaria takes numbers"
        raise ConfigError("data.path", path, remedy)


def _num_ids(saved: Any, path: str, cache_directory: Path) -> int:
    """One more than the largest number in input_ids."""
    values = integer_lists(saved, "input_ids", path)

    def ends() -> tuple[int, int]:
        _, compute = arrow_modules()
        found = compute.min_max(compute.list_flatten(values)).as_py()
        return found["min"], found["max"]

    return _num_ids_once(ends, path, cache_directory)


def _num_token_ids_in(tokens: np.ndarray, path: str, cache_directory: Path) -> int:
    """One more than the largest of some tokens; 1 if there is none."""

    def ends() -> tuple[int, int]:
        pieces = range(0, len(tokens), _SCANNED_AT_ONCE)
        lowest = (int(tokens[i : i + _SCANNED_AT_ONCE].min()) for i in pieces)
        highest = (int(tokens[i : i + _SCANNED_AT_ONCE].max()) for i in pieces)
        return min(lowest, default=0), max(highest, default=0)

    return _num_ids_once(ends, path, cache_directory)


def _num_ids_once(ends: Callable[[], tuple[int, int]], path: str, cache_directory: Path) -> int:
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


def _row_texts(saved: Any) -> Iterator[bytes]:
    for row in saved.select_columns(["text"]):
        yield f"{row['text']}\n\n".encode()
