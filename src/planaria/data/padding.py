"""Padding in the rows of a saved data set, and other columns that tokenizers write beside tokens.

`tok(text, padding="max_length")` writes rows of one length with a column attention_mask, 0 where a
token is padding. Padding at the end of a row is cut off, and a microbatch of such rows is padded to
the longest of them: for an encoder of transformers with a mask, which hides it from the others. Any
other padding would be seen by the model as text, and trained on. So would the second of two texts
in a row, which only a column token_type_ids, position_ids or seq_lengths tells from the first, and
tokens that a column such as completion_mask keeps out of the loss.

Columns are read as arrays, a chunk at a time, because a data set may be larger than the memory.
"""

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from planaria.core.job import ModelConfig
from planaria.data.model_tokenizer import json_at
from planaria.errors import ConfigError

ROUTERS_KEY: Final = "model.config.output_router_logits"
MASKS: Final = "attention_mask"
TYPES: Final = "token_type_ids"
POSITIONS: Final = "position_ids"
NO_PADDING: Final = -1  # In place of the id with which rows are padded.
_PADDING: Final = "pad_token_id"  # Key of configs of transformers.
_SEQUENCES: Final = "seq_lengths"  # Lengths of the texts of a row, as trl packs them.
# Types whose causal class of transformers 5.23 has labels at the places of the logits.
_UNSHIFTED: Final = frozenset(
    {
        *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "cpmant", "marian", "mbart"),
        *("mvp", "pegasus", "plbart", "prophetnet", "trocr", "whisper", "xlnet"),
    }
)
# Masks that change no target: MASKS is heeded, and which tokens are special says the tokenizer.
_HARMLESS_MASKS: Final = frozenset({MASKS, "special_tokens_mask"})


def counts_padding(model: ModelConfig) -> bool:
    """Whether the loss of a model depends on padding: the routers' loss is one of all tokens."""
    key = ROUTERS_KEY.rpartition(".")[2]
    return model.kind == "hf" and bool(_config_keys(model).get(key))


def padding_token(model: ModelConfig, *, objective: str, vocabulary_size: int) -> int:
    """The id with which samples of unequal length are padded, hidden by a mask.

    It is NO_PADDING but for encoders of transformers: others get no mask from a data set.

    Args:
        vocabulary_size: upper bound on token ids of the data, exclusive; 0: not known.
    """
    if model.kind != "hf" or objective == "causal":
        return NO_PADDING
    keys = _config_keys(model)
    if _PADDING in keys:
        token = keys[_PADDING]
    else:
        from transformers import CONFIG_MAPPING

        model_type = keys.get("model_type", "")
        is_known = model_type in CONFIG_MAPPING
        token = getattr(CONFIG_MAPPING[model_type](), _PADDING, None) if is_known else None
        bound = keys.get("vocab_size", vocabulary_size)
        if token is not None and 0 < bound <= token:
            token = None
    return token if isinstance(token, int) and token >= 0 else 0


def refuse_unshifted_labels(model: ModelConfig, path: str) -> None:
    """Refuses labels for a causal model that has them at other positions than all others.

    Raises:
        ConfigError: transformers does not shift the labels of this type.
    """
    model_type = _config_keys(model).get("model_type", "")
    if model.kind == "hf" and model_type in _UNSHIFTED:
        remedy = (
            f"transformers does not shift the column labels for {model_type}, as it does for other "
            "causal models, so it is not clear which token a label is for; leave the column out "
            'for the next tokens, or give targets by data.kind = "python": (ids[:-1], targets[1:])'
        )
        raise ConfigError("data.path", path, remedy)


def _config_keys(model: ModelConfig) -> dict[str, Any]:
    """The keys of a model's config, in its directory and in the job."""
    keys = json_at(Path(model.path, "config.json"), model.path) if model.path else {}
    return keys | dict(model.config)


def arrow_modules() -> tuple[Any, Any]:
    """pyarrow and pyarrow.compute, which come with datasets and have no types."""
    return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.compute")


def integer_lists(saved: Any, column: str, path: str) -> Any:
    """A column of a saved data set, as the chunks of its file.

    Raises:
        ConfigError: its rows are not lists of integers.
    """
    arrow, _ = arrow_modules()
    values = saved.data.column(column)
    if _are_lists(values):
        kind = values.type.value_type
        if arrow.types.is_integer(kind) or (column == MASKS and arrow.types.is_boolean(kind)):
            refuse_nulls(values, column, path)
            return values
    remedy = f"its column {column} holds {values.type}; planaria takes lists of integers"
    raise ConfigError("data.path", path, remedy)


def refuse_nulls(values: Any, column: str, path: str) -> None:
    """Refuses a column of a saved data set that lacks values, which would be read as some number.

    Raises:
        ConfigError: a row is null, or has a null in it.
    """
    _, compute = arrow_modules()
    num_nulls = values.null_count
    if _are_lists(values):
        num_nulls += compute.list_flatten(values).null_count
    if num_nulls:
        remedy = f"its column {column} has nulls, {num_nulls} in all; leave out the rows with them"
        raise ConfigError("data.path", path, remedy)


def labels_are_per_token(saved: Any, objective: str, path: str) -> bool:
    """Whether each row of the column labels has as many numbers as the row has tokens.

    A single row may have that by chance, where labels are one number for each class. Objectives
    other than "supervised" have no other labels.
    """
    arrow, compute = arrow_modules()
    labels = saved.data.column("labels")
    if objective != "supervised":
        return True
    if not _are_lists(labels) or arrow.types.is_nested(labels.type.value_type):
        return False
    lengths = np.asarray(compute.list_value_length(integer_lists(saved, "input_ids", path)))
    return np.array_equal(np.asarray(compute.list_value_length(labels)), lengths)


def _are_lists(values: Any) -> bool:
    types = arrow_modules()[0].types
    kinds = types.is_list, types.is_large_list, types.is_fixed_size_list
    return any(is_kind(values.type) for is_kind in kinds)


def refuse_unheeded_columns(columns: Sequence[str], path: str) -> None:
    """Refuses columns by which other trainers see or train on a part of a row alone.

    Raises:
        ConfigError: there is one; it names the column, and what to do.
    """
    for name in columns:
        if name == _SEQUENCES:
            remedy = (
                f"its column {name} cuts rows into texts that do not see each other, and planaria "
                "gives a model whole rows; give rows of one text each, or remove the column if "
                "the texts of a row may see each other"
            )
            raise ConfigError("data.path", path, remedy)
        if name.endswith(("_mask", "_masks")) and name not in _HARMLESS_MASKS:
            remedy = (
                f"planaria does not heed its column {name}; save a column labels, with -100 where "
                "a token is no target, in place of it"
            )
            raise ConfigError("data.path", path, remedy)


def lengths_without_padding(saved: Any, path: str) -> npt.NDArray[np.int32]:
    """Number of tokens of each row that its attention_mask keeps; empty if it keeps all.

    -1 stands for a row in which a 0 comes before a 1.

    Raises:
        ConfigError: a column does not fit input_ids, has token types, or has positions other than
            0, 1, 2, ... in a row.
    """
    _, compute = arrow_modules()
    lengths = np.asarray(compute.list_value_length(integer_lists(saved, "input_ids", path)))
    whole = lengths
    if TYPES in saved.column_names:
        _refuse_types(integer_lists(saved, TYPES, path), path)
    if MASKS in saved.column_names:
        masks = _lists_beside_ids(saved, MASKS, lengths, path)
        kept = [_lengths_of_chunk(chunk, path) for chunk in masks.chunks]
        whole = np.concatenate([*kept, np.empty(0, dtype=np.int32)])
    if POSITIONS in saved.column_names:
        _refuse_positions(_lists_beside_ids(saved, POSITIONS, lengths, path), whole, path)
    return whole if (whole != lengths).any() else np.empty(0, dtype=np.int32)


def refuse_inner_padding(
    kept: npt.NDArray[np.int32], path: str, *, sequence_length: int, may_be_cut: bool
) -> None:
    """Refuses padding that cannot be cut off.

    Args:
        kept: the lengths that `lengths_without_padding` returned.
        may_be_cut: whether samples may differ in length.

    Raises:
        ConfigError: it names the first row with such padding, and what to do.
    """
    is_wrong = kept < (0 if may_be_cut else sequence_length)
    if not is_wrong.any():
        return
    where = f"row {int(is_wrong.argmax())} of its column {MASKS} has a 0"
    if may_be_cut:
        remedy = (
            f"{where} before a 1, and planaria cuts padding off the ends of rows alone; tokenise "
            'with padding_side = "right", or without padding'
        )
    else:
        remedy = (
            f"{where} among its first {sequence_length} tokens, and layers of your own would see "
            "that padding, because they get token ids alone; cut or pack the rows to one length "
            "without padding, give them the mask by a data set and a data.collate of your own, or "
            "remove the column if they may see it"
        )
    raise ConfigError("data.path", path, remedy)


def refuse_unequal_rows(lengths: npt.NDArray[np.int32], path: str) -> None:
    """Refuses rows that would be padded in a microbatch, if the loss would count that.

    Args:
        lengths: length of each row as a sample; empty if all are equal.
    """
    if len(lengths) and lengths.min() < lengths.max():
        remedy = (
            f"the routers would count padding, and the rows of {path} have {lengths.min()} to "
            f"{lengths.max()} tokens; give rows of one length, or set it to false"
        )
        raise ConfigError(ROUTERS_KEY, True, remedy)


def refuse_unhidden_padding(
    dataset: Any, mask_problem: Callable[[], str], *, key: str, path: str
) -> None:
    """Refuses rows of a saved data set that would be padded, if no mask can hide that.

    Args:
        dataset: data set of any kind.
        mask_problem: see `SplitModel`.
        key: key that names the data set.
    """
    lengths = getattr(dataset, "lengths", None)
    if getattr(dataset, "padding", NO_PADDING) == NO_PADDING or lengths is None:
        return
    if len(lengths) and lengths.min() < lengths.max() and (problem := mask_problem()):
        counts = f"its rows have {lengths.min()} to {lengths.max()} tokens, and {problem}"
        raise ConfigError(key, path, counts)


def _lists_beside_ids(saved: Any, column: str, lengths: npt.NDArray[np.int32], path: str) -> Any:
    """A column whose rows have the lengths of those of input_ids, see `integer_lists`."""
    lists = integer_lists(saved, column, path)
    if not np.array_equal(np.asarray(arrow_modules()[1].list_value_length(lists)), lengths):
        remedy = f"a row of its column {column} has not the length of that of input_ids"
        raise ConfigError("data.path", path, remedy)
    return lists


def _lengths_of_chunk(chunk: Any, path: str) -> npt.NDArray[np.int32]:
    """The number of ones of each row of a chunk; -1 if they are not its first tokens."""
    _, compute = arrow_modules()
    ends = np.cumsum(np.asarray(compute.fill_null(compute.list_value_length(chunk), 0)), dtype="i8")
    begins = np.concatenate([[0], ends])[:-1]
    values = np.asarray(chunk.flatten())
    if ((values != 0) & (values != 1)).any():
        remedy = f"its column {MASKS} holds numbers other than 0 and 1; give rows of one text each"
        raise ConfigError("data.path", path, remedy)
    ones_before = np.concatenate([[0], np.cumsum(values, dtype="i8")])
    ones = ones_before[ends] - ones_before[begins]
    are_first = ones_before[begins + ones] - ones_before[begins] == ones
    return np.where(are_first, ones, -1).astype(np.int32)


def _refuse_types(types: Any, path: str) -> None:
    _, compute = arrow_modules()
    if any(compute.min_max(compute.list_flatten(types)).as_py().values()):
        remedy = (
            f"its column {TYPES} holds numbers other than 0, and planaria gives a model input_ids "
            "alone; give rows of one text each, or remove the column if the model needs no types"
        )
        raise ConfigError("data.path", path, remedy)


def _refuse_positions(positions: Any, kept: npt.NDArray[np.int32], path: str) -> None:
    """Refuses rows in which a token that is no padding has another position than its place."""
    _, compute = arrow_modules()
    first = 0
    for chunk in positions.chunks:
        lengths = np.asarray(compute.list_value_length(chunk), dtype=np.int64)
        begins = np.cumsum(lengths) - lengths
        places = np.arange(lengths.sum()) - np.repeat(begins, lengths)
        is_text = places < np.repeat(kept[first : first + len(chunk)], lengths)
        is_wrong = is_text & (np.asarray(chunk.flatten()) != places)
        if is_wrong.any():
            row = first + int(np.searchsorted(begins, is_wrong.argmax(), side="right")) - 1
            remedy = (
                f"row {row} of its column {POSITIONS} is not 0, 1, 2, ..., as where a row has "
                "several texts, and planaria gives a model input_ids alone; give rows of one text "
                "each, or remove the column if the texts of a row may see each other"
            )
            raise ConfigError("data.path", path, remedy)
        first += len(chunk)
