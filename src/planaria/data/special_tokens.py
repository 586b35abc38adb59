"""The special tokens of a model that begins with weights, as the tokenizer beside them has them.

A masked language model has learned with one token in place of those that are hidden, and would
learn anew with another. Its special tokens, such as [CLS] and padding, are never hidden.

    tokenizer_config.json, special_tokens_map.json  the tokens that have a role, such as mask_token
    tokenizer.json                                  the ids of all tokens, and which are special

tokenizer_config.json may have the ids of some tokens, too (added_tokens_decoder).
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from planaria.errors import ConfigError

_LISTS: Final = ("additional_special_tokens", "extra_special_tokens")
_USUAL_MASKS: Final = ("[MASK]", "<mask>")  # Old files leave the roles to the tokenizer's class.


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The special tokens of a tokenizer.

    Attributes:
        mask: id of the token in place of those that are hidden.
        ids: ids of all special tokens, ascending.
    """

    mask: int
    ids: tuple[int, ...]


def special_tokens(directory: str) -> SpecialTokens | None:
    """The special tokens of a model's directory; None: the model begins without weights.

    Args:
        directory: the directory; "": the model has none.

    Raises:
        ConfigError: there are weights, but no tokenizer with a mask token.
    """
    place = Path(directory)
    if not directory:
        return None
    config = json_at(place / "tokenizer_config.json", directory)
    roles = config | json_at(place / "special_tokens_map.json", directory)
    entries = config.get("added_tokens_decoder", {}).items()
    ids = {entry["content"]: int(number) for number, entry in entries}
    special = {entry["content"] for _, entry in entries if entry.get("special")}
    if (place / "tokenizer.json").is_file():
        tokenizer = _tokenizer_at(place / "tokenizer.json", directory)
        ids |= tokenizer.get_vocab(with_added_tokens=True)
        added = tokenizer.get_added_tokens_decoder().values()
        special |= {token.content for token in added if token.special}
    for role, value in roles.items():
        special |= set(_texts(value) if role.endswith("_token") or role in _LISTS else ())
    masks = _texts(roles.get("mask_token")) or _USUAL_MASKS
    mask = next((ids[text] for text in masks if text in ids), None)
    if mask is not None:
        return SpecialTokens(mask, tuple(sorted({mask, *(ids[t] for t in special if t in ids)})))
    if not has_weights(directory):
        return None
    remedy = (
        "it has weights, but no tokenizer that names the token in place of hidden ones "
        "(mask_token); put its tokenizer.json and tokenizer_config.json there, or give data with "
        "labels"
    )
    raise ConfigError("model.path", directory, remedy)


def has_weights(directory: str) -> bool:
    """Whether there are weights in a model's directory; "": the model has none."""
    return bool(directory) and any(Path(directory).glob("*.safetensors"))


def json_at(path: Path, directory: str) -> dict[str, Any]:
    """The content of a JSON file of a model's directory; empty if there is none.

    Raises:
        ConfigError: it cannot be read.
    """
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text("utf-8")))
    except (OSError, TypeError, ValueError) as error:
        raise ConfigError("model.path", directory, f"{path.name} is no JSON: {error}") from error


def _tokenizer_at(path: Path, directory: str) -> Any:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # The package has no class of its own for this.
        remedy = f"{path.name} cannot be read: {error}"
        raise ConfigError("model.path", directory, remedy) from error


def _texts(value: Any) -> list[str]:
    """The texts of the tokens that have a role: one, a record of one, or several of them."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return _texts(value["content"] if "content" in value else list(value.values()))
    return [text for part in value for text in _texts(part)] if isinstance(value, list) else []
