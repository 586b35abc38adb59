"""Datasets: what a sample is, and how a microbatch is made of samples.

Everything random in a sample (masks, transforms) comes from a seed that is a function of the
job's seed, the iteration and the sample's number, so every node loads the same sample.

Kinds: "text" is Python's own prose or any file (text.py). "tokens" is a file of token ids, as
nanoGPT's scripts write it: raw uint16, or a .npy file; it is mapped and cut into samples. "hf" is a
directory written by `save_to_disk` of Hugging Face datasets (saved_rows.py). "python" is the user's
own function, which returns an object that has a length and gives (inputs, targets) by index, or
what the user's collate function makes of them.

The targets depend on the objective. "causal": the next token at each position; "masked": the hidden
tokens; "supervised": whatever the model's loss takes. -100 marks a position without a target.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import Tensor

from planaria.core.job import DataConfig, ModelConfig
from planaria.data.model_tokenizer import has_weights, special_tokens
from planaria.data.padding import NO_PADDING, counts_padding, padding_token
from planaria.data.saved_rows import (
    HELD_OUT,
    loaded_from_disk,
    num_ids_once,
    num_row_ids,
    saved_dataset,
)
from planaria.data.text import (
    file_source,
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
        return saved_dataset(
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
    return text_dataset(
        file_source(data.path) if data.path else prose_source(),
        data,
        objective=objective,
        cache_directory=cache_directory,
        model_path=model.path,
    )


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
            return saved_dataset(
                held_out,
                objective=objective,
                cache_directory=cache_directory,
                model=model,
                splits=HELD_OUT,
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
            model_path=model.path,
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
    seed: int,
    objective: str = "causal",
    model: ModelConfig = _FRESH_MODEL,
) -> int:
    """The vocabulary_size of the data's dataset; text is tokenised for the model's tokens alone.

    Args:
        seed: seed of the job, with which the function that builds a "python" dataset always runs:
            what it draws may be kept for other datasets.

    Raises:
        ConfigError: see `load_dataset`.
    """
    if data.kind == "text" and data.tokenizer != "model":
        return num_token_ids(tokenizer_size(data), objective)
    if data.kind == "hf":
        saved, path = loaded_from_disk(data.path)
        columns = set(saved.column_names)
        # Whatever the labels are; what padding is wrong depends on the objective, asked for later.
        if "input_ids" in columns and (objective == "causal" or "labels" in columns):
            return num_row_ids(saved, path, cache_directory)
    return load_dataset(
        data, objective=objective, seed=seed, cache_directory=cache_directory, model=model
    ).vocabulary_size


def has_own_tokens(data: DataConfig) -> bool:
    """Whether the tokens of the data are planaria's own, and not ids or those of the model.

    Raises:
        ConfigError: see `load_dataset`.
    """
    if data.tokenizer == "model":
        return False
    if data.kind == "hf":
        return "input_ids" not in loaded_from_disk(data.path)[0].column_names
    return data.kind == "text"


def own_tokens_text(data: DataConfig, model: ModelConfig) -> str:
    """The warning that a model's weights do not know the tokens of the data; "": they may."""
    if not has_weights(model.path) or not has_own_tokens(data):
        return ""
    return (
        f"model.path = {model.path!r} has weights, and text becomes tokens of planaria's own "
        f"(data.tokenizer = {data.tokenizer!r}), which weights of another tokenizer do not know; "
        'set data.tokenizer = "model" if the directory has that one, or give token ids: a saved '
        'data set with a column input_ids (data.kind = "hf"), or data.kind = "tokens"'
    )


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
        padding: see `padding_token`.
    """

    items: Any
    target: str
    objective: str
    collate: Callable[[list[Any]], Any] | None
    num_samples: int
    may_pad: bool = True
    padding: int = NO_PADDING

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
    dataset = UserDataset(items, target, objective, collate, _num_items(items, target))
    padding = padding_token(model, objective=objective, vocabulary_size=dataset.vocabulary_size)
    return replace(dataset, may_pad=not counts_padding(model), padding=padding)


def _num_items(items: Any, target: str) -> int:
    """The length of the user's object; what its `__len__` raises passes through.

    Raises:
        ConfigError: its `__len__` returns what is no length.
    """
    try:
        return len(items)
    except (OverflowError, TypeError, ValueError) as error:
        trace = error.__traceback__
        if trace is not None and trace.tb_next is not None:
            raise
        remedy = f"the __len__ of the {type(items).__name__} that it returned gives none: {error}"
        raise ConfigError("data.target", target, remedy) from error


def _seed_generators(seed: int) -> None:
    """Seeds the generators of torch (on the CPU), numpy and Python."""
    # torch.manual_seed would also seed the generators of accelerators, which are not restored.
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


def _num_token_ids_in(tokens: np.ndarray, path: str, cache_directory: Path) -> int:
    """One more than the largest of some tokens; 1 if there is none."""

    def ends() -> tuple[int, int]:
        pieces = range(0, len(tokens), _SCANNED_AT_ONCE)
        lowest = (int(tokens[i : i + _SCANNED_AT_ONCE].min()) for i in pieces)
        highest = (int(tokens[i : i + _SCANNED_AT_ONCE].max()) for i in pieces)
        return min(lowest, default=0), max(highest, default=0)

    return num_ids_once(ends, path, cache_directory)
