"""Text as tokens: tokenised once into a file, which every worker maps, and cut into samples.

    {cache}/tokens-{digest}             the tokens, little-endian, 1, 2 or 4 bytes each
    {cache}/tokenizer-{digest}.json     the byte-pair encoding learned from the text, for "bpe"
    {cache}/num-ids-{digest}            one more than the largest token, for "model"

The digest is of the text's source and of the settings, so the content of a name never changes. One
process makes a file, under another name, and then renames it; other processes wait for it.

The inputs of samples do not overlap. "causal": the targets are the inputs shifted by one token.
"masked": 15% of the positions, at least one, are targets; 80% of these inputs are the mask token,
10% a random token, and 10% are unchanged. Ids of a model with a tokenizer of its own have its mask
token, and its special tokens are never targets; text has a mask token after all others.

Source: Devlin et al., BERT (NAACL '19), section 3.1, for masks; Radford et al., GPT-2 (2019),
section 2.2, for byte-level pairs. Differs: the number of masked positions depends on the number of
tokens alone, so the targets of a batch are counted without drawing masks.
"""

import ast
import fcntl
import gc
import importlib.util
import os
import secrets
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import IO, Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from planaria.core.job import DataConfig
from planaria.core.samples import random_words
from planaria.data.model_tokenizer import (
    NUM_BYTE_TOKENS,
    SpecialTokens,
    model_tokenizer,
    special_tokens,
    tokenizer_digest,
)
from planaria.data.padding import NO_PADDING
from planaria.errors import ConfigError

# A target that cross entropy in torch ignores.
IGNORED = -100

# Part of every digest; raise it when a change of the code gives other tokens for the same source.
_FORMAT = "1"
_MODEL_TOKEN_DTYPE: Final[np.dtype[Any]] = np.dtype("<u4")
_PIECE_BYTES = 1 << 20
_PIECES_AT_ONCE = 16
_DOCUMENTS_AT_ONCE: Final = 1 << 12
_DOCSTRING_CHARACTERS_MIN = 80
# Tests contain little prose, and the packages installed beside the library differ by machine.
_NOT_PROSE = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True, slots=True)
class TextSource:
    """A source of text.

    Attributes:
        name: name to show in messages.
        digest: digest that differs if the text differs.
        pieces: function that yields the text from its start, in pieces of any length.
        documents: function that yields the documents of the text, if there may be several.
        end: text that `pieces` has after each document.
    """

    name: str
    digest: str
    pieces: Callable[[], Iterator[bytes]]
    documents: Callable[[], Iterator[str]] | None = None
    end: str = ""


class RowSource(Protocol):
    """Arrays of tokens, by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> np.ndarray: ...


@dataclass(frozen=True, slots=True)
class TokenDataset:
    """Samples for a language model, made from rows of tokens.

    Attributes:
        rows: rows of equal length: sequence_length, or one token more, which is the last target.
        objective: "causal" or "masked".
        num_tokens: number of tokens of the tokenizer.
        lengths: number of tokens of each row, if some have less than sequence_length.
        special: special tokens of the model's own tokenizer; None: the mask token comes after all
            others, and no token is special.
        tokenizer_file: path of the tokenizer that was learned from text; empty: none was.
        padding: see `padding_token` of padding.py.
    """

    rows: RowSource
    objective: str
    sequence_length: int
    num_tokens: int
    lengths: npt.NDArray[np.int32] | None = None
    special: SpecialTokens | None = None
    tokenizer_file: str = ""
    padding: int = NO_PADDING

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def vocabulary_size(self) -> int:
        if self.special is not None:
            return max(self.num_tokens, self.special.mask + 1)
        return num_token_ids(self.num_tokens, self.objective)

    def num_targets(self, samples: npt.NDArray[np.int64]) -> int:
        """Number of targets of samples with these numbers, which are not masked for it."""
        if self.lengths is not None and self.objective == "causal":
            return int(self.lengths[samples].sum()) - len(samples)
        if self.special is not None:
            rows = (np.asarray(self.rows[int(number)]) for number in samples)
            return sum(
                _num_masked(int(np.isin(row, self.special.ids, invert=True).sum())) for row in rows
            )
        if self.lengths is not None:
            return sum(_num_masked(int(length)) for length in self.lengths[samples])
        is_masked = self.objective == "masked"
        per_sample = _num_masked(self.sequence_length) if is_masked else len(self.rows[0]) - 1
        return len(samples) * per_sample

    def sample(self, index: int, *, seed: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, both int64 [sequence_length], or shorter if the row is."""
        tokens = np.asarray(self.rows[index]).astype(np.int64)
        if self.objective == "masked":
            special = self.special or SpecialTokens(self.num_tokens, ())
            inputs, targets = masked_pair(
                tokens, special=special, num_tokens=self.num_tokens, seed=seed
            )
        else:
            length = min(self.sequence_length, len(tokens))
            inputs, targets = causal_pair(tokens, tokens, sequence_length=length)
        return torch.from_numpy(inputs), torch.from_numpy(targets)


def text_dataset(
    source: TextSource,
    data: DataConfig,
    *,
    objective: str,
    cache_directory: Path,
    learned_from: TextSource | None = None,
    model_path: str = "",
) -> TokenDataset:
    """The samples of a text, which is tokenised now if it was not before.

    Args:
        learned_from: text from which a tokenizer learns its tokens; None: the text itself.
        model_path: directory of the model, whose tokenizer the job may ask for.

    Raises:
        ConfigError: the text or the model's tokenizer cannot be read, or the text is too short for
            one sample.
    """
    _check_objective(data, objective)
    tokenizer_file = ""
    try:
        if data.tokenizer == "model":
            path, num_tokens = _model_token_file(source, model_path, cache_directory)
        elif data.tokenizer == "bytes":
            path, num_tokens = _bytes_file(source, cache_directory), tokenizer_size(data)
        else:
            path, learned = _token_file(source, learned_from or source, data, cache_directory)
            num_tokens, tokenizer_file = tokenizer_size(data), str(learned)
    except OSError as error:
        reason = f"{error.strerror} ({error.filename})"
        raise ConfigError(
            "data.path", source.name, f"it cannot be read, or the cache cannot be written: {reason}"
        ) from error
    has_special = data.tokenizer == "model" and objective == "masked"
    samples = packed_dataset(
        _tokens_at(path, _token_dtype(data)),
        source.name,
        data,
        objective=objective,
        num_tokens=num_tokens,
        special=special_tokens(model_path) if has_special else None,
    )
    return replace(samples, tokenizer_file=tokenizer_file)


def packed_dataset(
    tokens: np.ndarray,
    name: str,
    data: DataConfig,
    *,
    objective: str,
    num_tokens: int,
    special: SpecialTokens | None = None,
) -> TokenDataset:
    """The samples of a long row of tokens, int [number of tokens].

    Args:
        name: name of its source, to show in messages.
        num_tokens: number of tokens of the tokenizer.
        special: see `TokenDataset`.

    Raises:
        ConfigError: it is too short for one sample.
    """
    _check_objective(data, objective)
    extra = 1 if objective == "causal" else 0
    num_samples = (len(tokens) - extra) // data.sequence_length
    if num_samples < 1:
        remedy = (
            f"one sample needs {data.sequence_length + extra} tokens and {name} has "
            f"{len(tokens)}; give a longer text or shorter sequences"
        )
        raise ConfigError("data.sequence_length", data.sequence_length, remedy)
    rows = _PackedRows(tokens, data.sequence_length, extra, num_samples)
    return TokenDataset(rows, objective, data.sequence_length, num_tokens, special=special)


def token_file(path: str) -> np.ndarray:
    """The tokens of a file, which is mapped: raw uint16, or the integers of a .npy file.

    Raises:
        ConfigError: the file cannot be read, or has no such tokens.
    """
    try:
        if Path(path).suffix == ".npy":
            tokens: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
        else:
            if Path(path).stat().st_size % 2:
                remedy = "has an odd size; it must hold uint16, or be a .npy file of integers"
                raise ConfigError("data.path", path, remedy)
            tokens = _tokens_at(Path(path), np.dtype("<u2"))
    except (OSError, ValueError) as error:  # ValueError: it is no .npy file.
        raise ConfigError("data.path", path, f"cannot be read: {error}") from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        remedy = f"holds {tokens.dtype} {list(tokens.shape)}; it must be one row of integers"
        raise ConfigError("data.path", path, remedy)
    return tokens


def _tokens_at(path: Path, dtype: np.dtype[Any]) -> np.ndarray:
    """The numbers of a file; an empty one cannot be mapped."""
    num = path.stat().st_size // dtype.itemsize
    return np.memmap(path, dtype=dtype, mode="r", shape=(num,)) if num else np.empty(0, dtype)


def _check_objective(data: DataConfig, objective: str) -> None:
    if objective not in ("causal", "masked"):
        remedy = f"text has no {objective} targets; use another kind of data, which has them"
        raise ConfigError("data.kind", data.kind, remedy)


def tokenizer_size(data: DataConfig) -> int:
    """Number of tokens of a tokenizer of planaria's own, without the mask token."""
    assert data.tokenizer != "model"
    return NUM_BYTE_TOKENS if data.tokenizer == "bytes" else data.vocabulary_size


def num_token_ids(num_tokens: int, objective: str) -> int:
    """Number of token ids in samples: the tokenizer's, and the mask token if masks are used."""
    return num_tokens + 1 if objective == "masked" else num_tokens


def prose_source() -> TextSource:
    """Prose of the Python library: its language reference and its longer docstrings, 2 MB.

    The text is the same for every machine with the same build of Python, and is not downloaded.
    """
    return TextSource("the Python library's prose", _digest("prose", sys.version), _prose)


def file_source(path: str) -> TextSource:
    """The content of a file, in any encoding.

    Raises:
        ConfigError: the file cannot be read.
    """
    content = xxhash.xxh3_128()
    try:
        with open(path, "rb") as file:
            while piece := file.read(_PIECE_BYTES):
                content.update(piece)
    except OSError as error:
        remedy = f"cannot be read: {error.strerror}; name a text file, or leave the key out"
        raise ConfigError("data.path", path, remedy) from error
    return TextSource(path, _digest("file", content.hexdigest()), lambda: _file_pieces(Path(path)))


def make_once(path: Path, make: Callable[[Path], None]) -> Path:
    """Makes the file at `path` if it does not exist; returns the path.

    One process makes it while the others wait for a lock. Without the lock two processes might do
    the work twice, which is harmless because each renames its own file.

    Args:
        make: writes the file's content to the path that it is given.

    Raises:
        OSError: the directory cannot be written.
    """
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{path}.lock", "w") as lock:
        _wait_locked(lock)
        if not path.exists():
            partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
            try:
                make(partial)
                # Without fsync a power failure may leave an empty file under this name.
                with partial.open("rb") as file:
                    os.fsync(file.fileno())
                os.replace(partial, path)
            finally:
                partial.unlink(missing_ok=True)
    return path


def causal_pair(
    tokens: np.ndarray, labels: np.ndarray, *, sequence_length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Inputs, and the next labels as targets; the last target is IGNORED if the row lacks it."""
    targets = np.full(sequence_length, IGNORED, dtype=np.int64)
    following = labels[1 : sequence_length + 1]
    targets[: len(following)] = following
    return tokens[:sequence_length], targets


def masked_pair(
    tokens: np.ndarray, *, special: SpecialTokens, num_tokens: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Inputs with some tokens hidden, and those tokens as targets, both int64 [length].

    Args:
        num_tokens: upper bound on the random tokens, exclusive.
    """
    length = len(tokens)
    order, kind, other = random_words(seed, 3 * length).reshape(3, length)
    places = np.argsort(order, kind="stable")
    places = places[np.isin(tokens[places], special.ids, invert=True)]
    places = places[: _num_masked(len(places))]
    inputs, targets = tokens.copy(), np.full(length, IGNORED, dtype=np.int64)
    targets[places] = tokens[places]
    tenth = kind[places] % 10
    inputs[places[tenth < 8]] = special.mask
    replaced = places[tenth == 8]
    inputs[replaced] = other[replaced] % num_tokens
    return inputs, targets


@dataclass(frozen=True, slots=True)
class _PackedRows:
    """A long row of tokens cut into samples.

    Attributes:
        extra: number of tokens of the next sample that a row has at its end.
    """

    tokens: np.ndarray
    sequence_length: int
    extra: int
    num_samples: int

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int, /) -> np.ndarray:
        assert 0 <= index < self.num_samples
        first = index * self.sequence_length
        return self.tokens[first : first + self.sequence_length + self.extra]


def _num_masked(length: int) -> int:
    return min(length, max(1, (15 * length + 50) // 100))


def _digest(*parts: str) -> str:
    return xxhash.xxh3_128_hexdigest("\0".join((_FORMAT, *parts)).encode())


def _token_dtype(data: DataConfig) -> np.dtype[Any]:
    if data.tokenizer == "model":
        return _MODEL_TOKEN_DTYPE
    size = tokenizer_size(data)
    return np.dtype("u1" if size <= 1 << 8 else "<u2" if size <= 1 << 16 else "<u4")


def _token_file(
    source: TextSource, learned_from: TextSource, data: DataConfig, cache_directory: Path
) -> tuple[Path, Path]:
    """The text as tokens of a tokenizer that learned from a text, and that tokenizer."""
    if importlib.util.find_spec("tokenizers") is None:
        raise ConfigError(
            "data.tokenizer",
            "bpe",
            "it needs more packages: pip install -e '.[hf]' in planaria's checkout; or set it to "
            '"bytes"',
        )
    if data.vocabulary_size < NUM_BYTE_TOKENS:
        remedy = (
            f"the {NUM_BYTE_TOKENS} single bytes are the first tokens; set it to a larger number"
        )
        raise ConfigError("data.vocabulary_size", data.vocabulary_size, remedy)
    from tokenizers import Tokenizer

    digest = _digest(learned_from.digest, "bpe", str(data.vocabulary_size))

    def texts(of: TextSource) -> Iterator[str]:
        # Collecting the text can take longer than tokenising it, so its bytes are kept.
        return _text_pieces(_bytes_file(of, cache_directory), of.name)

    def train(partial: Path) -> None:
        _trained_tokenizer(texts(learned_from), data.vocabulary_size).save(str(partial))

    def encode(partial: Path) -> None:
        tokenizer = Tokenizer.from_file(str(tokenizer_path))
        _write(partial, _encoded_tokens(texts(source), tokenizer, _token_dtype(data)))

    tokenizer_path = make_once(cache_directory / f"tokenizer-{digest}.json", train)
    name = digest if source.digest == learned_from.digest else _digest(source.digest, digest)
    return make_once(cache_directory / f"tokens-{name}", encode), tokenizer_path


def _model_token_file(
    source: TextSource, model_path: str, cache_directory: Path
) -> tuple[Path, int]:
    """The text as tokens of the model's tokenizer, and one more than the largest of them.

    Each document is tokenised by itself, because many tokenizers mark the first word of a text. One
    without a token for the end of a document sees them as a single text, with `end` between them.
    """
    form = () if source.documents is None else ("documents",)
    digest = _digest(source.digest, "model", tokenizer_digest(model_path), *form)

    def encode(partial: Path) -> None:
        tokenizer = model_tokenizer(model_path)
        end = None if source.documents is None else tokenizer.token_to_id(source.end)
        if source.documents is None or end is None:
            texts = _text_pieces(_bytes_file(source, cache_directory), source.name)
            _write(partial, _encoded_tokens(texts, tokenizer, _MODEL_TOKEN_DTYPE))
        else:
            _write(partial, _encoded_documents(source.documents(), end, tokenizer))

    def scan(partial: Path) -> None:
        partial.write_text(str(int(_tokens_at(path, _MODEL_TOKEN_DTYPE).max(initial=0)) + 1))

    path = make_once(cache_directory / f"tokens-{digest}", encode)
    return path, int(make_once(cache_directory / f"num-ids-{digest}", scan).read_text())


def _bytes_file(source: TextSource, cache_directory: Path) -> Path:
    path = cache_directory / f"tokens-{_digest(source.digest, 'bytes')}"
    return make_once(path, lambda partial: _write(partial, source.pieces()))


def _trained_tokenizer(texts: Iterator[str], vocabulary_size: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _encoded_tokens(texts: Iterator[str], tokenizer: Any, dtype: np.dtype[Any]) -> Iterator[bytes]:
    while batch := list(islice(texts, _PIECES_AT_ONCE)):
        for encoding in tokenizer.encode_batch(batch, add_special_tokens=False):
            yield np.array(encoding.ids, dtype=dtype).tobytes()


def _encoded_documents(documents: Iterator[str], end: int, tokenizer: Any) -> Iterator[bytes]:
    """Yields the tokens of some documents after the other, each with the token `end` after it."""
    while batch := _first_documents(documents):
        for encoding in tokenizer.encode_batch(batch, add_special_tokens=False):
            yield np.array([*encoding.ids, end], dtype=_MODEL_TOKEN_DTYPE).tobytes()


def _first_documents(documents: Iterator[str]) -> list[str]:
    """The next documents that are tokenised at once, whose tokens stay in memory until then."""
    batch: list[str] = []
    num_characters = 0
    while num_characters < _PIECES_AT_ONCE * _PIECE_BYTES and len(batch) < _DOCUMENTS_AT_ONCE:
        document = next(documents, None)
        if document is None:
            break
        batch.append(document)
        num_characters += len(document)
    return batch


def _text_pieces(path: Path, name: str) -> Iterator[str]:
    for piece in _file_pieces(path):
        try:
            yield piece.decode()
        except UnicodeDecodeError as error:
            remedy = f'is not UTF-8 ({error.reason}); convert it, or set data.tokenizer = "bytes"'
            raise ConfigError("data.path", name, remedy) from error


def _write(path: Path, pieces: Iterable[bytes]) -> None:
    with path.open("wb") as file:
        file.writelines(pieces)


def _wait_locked(file: IO[str]) -> None:
    """Waits until the file is locked; the kernel frees the lock of a process that dies.

    Returns without the lock after an error: some network file systems have no locks.
    """
    with suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX)


def _file_pieces(path: Path) -> Iterator[bytes]:
    """Yields pieces of 1 MiB plus the rest of a line, so that no word and no character is cut."""
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            yield piece + file.readline()


def _prose() -> Iterator[bytes]:
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield f"{topics[name]}\n\n".encode()
    for directory, directories, files in os.walk(sysconfig.get_path("stdlib")):
        # os.walk visits the directories in this list, in its order.
        directories[:] = sorted(set(directories) - _NOT_PROSE)
        for file in sorted(files):
            if file.endswith(".py"):
                yield from _docstrings(Path(directory, file).read_bytes())


def _docstrings(source: bytes) -> Iterator[bytes]:
    # Expressions are most of a tree and hold no docstrings; skipping them halves the time.
    nodes: list[ast.AST] = [_tree(source)]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            if len(text) > _DOCSTRING_CHARACTERS_MIN:
                yield f"{text}\n\n".encode()
        inside = [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr)]
        nodes += reversed(inside)


def _tree(source: bytes) -> ast.Module:
    """The tree of a module.

    Of all its nodes none is garbage, and looking for some takes a third of the time.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(source)
    finally:
        if collects:
            gc.enable()
