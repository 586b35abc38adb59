"""The tokenizer beside a model's weights, in the files that transformers writes.

Text becomes the model's own tokens by it (data.tokenizer = "model"). And a masked language model
has learned with one token in place of those that are hidden, and would learn anew with another; its
special tokens, such as [CLS] and padding, are never hidden.

    tokenizer_config.json, special_tokens_map.json  the tokens that have a role, such as mask_token
    tokenizer.json                                  the tokenizer; which tokens are special

tokenizer_config.json may have the ids of some tokens, too (added_tokens_decoder). Older directories
have other files in place of tokenizer.json (vocab.txt, ...), which transformers can read.
"""

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import xxhash

from planaria.errors import ConfigError

NUM_BYTE_TOKENS: Final = 256  # Number of tokens where tokens are bytes.
_OLDER_FILES: Final = (
    *("vocab.txt", "vocab.json", "merges.txt", "tokenizer.model", "spiece.model"),
    "sentencepiece.bpe.model",
)
# All that a tokenizer consists of.
TOKENIZER_FILES: Final = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *_OLDER_FILES,
)
_SAVE_TOKENIZER: Final = (
    "save one there by AutoTokenizer.from_pretrained(NAME).save_pretrained(DIRECTORY), or give "
    "token ids (data.kind)"
)
_NO_END: Final = "\n\n"  # Between documents, where a tokenizer has no token for their ends.

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
    if not directory:
        return None
    place, roles = Path(directory), _roles(directory)
    entries = roles.get("added_tokens_decoder", {}).items()
    ids = {entry["content"]: int(number) for number, entry in entries}
    special = {entry["content"] for _, entry in entries if entry.get("special")}
    if (place / "tokenizer.json").is_file() or (not ids and _has_tokenizer(place)):
        tokenizer = model_tokenizer(directory)
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


def model_tokenizer(directory: str) -> Any:
    """The `tokenizers.Tokenizer` in a model's directory; it neither cuts nor pads texts.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    if importlib.util.find_spec("tokenizers") is None:
        remedy = "its tokenizer needs more packages: pip install -e '.[hf]' in planaria's checkout"
        raise ConfigError("model.path", directory, remedy)
    if not _has_tokenizer(Path(directory)):
        raise ConfigError("model.path", directory, f"it has no tokenizer; {_SAVE_TOKENIZER}")
    path = Path(directory, "tokenizer.json")
    try:
        tokenizer = _read_tokenizer(path) if path.is_file() else _convert_tokenizer(directory)
    except Exception as error:  # Neither package has a class of its own for this.
        remedy = f"its tokenizer cannot be read: {error}; {_SAVE_TOKENIZER}"
        raise ConfigError("model.path", directory, remedy) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def tokenizer_digest(directory: str) -> str:
    """The digest of the files of a model's tokenizer.

    Raises:
        ConfigError: one cannot be read.
    """
    digest = xxhash.xxh3_128()
    try:
        for name in TOKENIZER_FILES:
            if (path := Path(directory, name)).is_file():
                digest.update(f"{name}\0{path.stat().st_size}\0".encode())
                digest.update(path.read_bytes())
    except OSError as error:
        remedy = f"its tokenizer cannot be read: {error.strerror}"
        raise ConfigError("model.path", directory, remedy) from error
    return digest.hexdigest()


def end_of_document(directory: str) -> str:
    """What a model's tokenizer has between two documents: a token's text, or an empty line.

    Raises:
        ConfigError: a file of the tokenizer is no JSON.
    """
    roles = _roles(directory)
    tokens = [*_texts(roles.get("eos_token")), *_texts(roles.get("sep_token"))]
    return tokens[0] if tokens else _NO_END


def own_tokenizer_files(learned: str, *, num_tokens: int, num_ids: int) -> dict[str, bytes]:
    """The files, by name, in which transformers reads a tokenizer of planaria's own.

    Args:
        learned: content of the file of a tokenizer that was learned from the text; "": tokens are
            bytes.
        num_tokens: upper bound on the tokens that were to be learned; a short text has fewer.
        num_ids: number of token ids of the model; one more than `num_tokens` is the mask.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(learned) if learned else _byte_tokenizer()
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if num_ids == num_tokens + 1:
        tokenizer = _filled_tokenizer(tokenizer, num_tokens)
        mask = _USUAL_MASKS[0]
        tokenizer.add_special_tokens([mask])
        config["mask_token"] = mask
    return {
        "tokenizer.json": tokenizer.to_str(pretty=True).encode(),
        "tokenizer_config.json": json.dumps(config, indent=2).encode() + b"\n",
    }


def _filled_tokenizer(tokenizer: Any, num_tokens: int) -> Any:
    """A tokenizer with tokens that no text has, so that there are `num_tokens`."""
    from tokenizers import Tokenizer

    content = json.loads(tokenizer.to_str())
    # No merge makes them, and no token of bytes has a space: it is shown as another character.
    unused = range(tokenizer.get_vocab_size(), num_tokens)
    content["model"]["vocab"] |= {f"[unused {number}]": number for number in unused}
    return Tokenizer.from_str(json.dumps(content))


def _byte_tokenizer() -> Any:
    """A tokenizer whose tokens are the bytes of UTF-8.

    Source: Radford et al., GPT-2 (2019): bytes that are no printable character have another one in
    their place.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (byte for byte in range(256) if byte not in shown)
    characters = {byte: chr(byte) for byte in shown}
    characters |= {byte: chr(256 + number) for number, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE({text: byte for byte, text in characters.items()}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _roles(directory: str) -> dict[str, Any]:
    """What the files of a model's tokenizer say of the tokens that have a role."""
    names = ("tokenizer_config.json", "special_tokens_map.json")
    return {k: v for name in names for k, v in json_at(Path(directory, name), directory).items()}


def _has_tokenizer(place: Path) -> bool:
    return any((place / name).is_file() for name in ("tokenizer.json", *_OLDER_FILES))


def _read_tokenizer(path: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))


def _convert_tokenizer(directory: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory, local_files_only=True).backend_tokenizer


def _texts(value: Any) -> list[str]:
    """The texts of the tokens that have a role: one, a record of one, or several of them."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return _texts(value["content"] if "content" in value else list(value.values()))
    return [text for part in value for text in _texts(part)] if isinstance(value, list) else []
