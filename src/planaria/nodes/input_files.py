"""Digests of the files that a job reads, by which its machines are compared.

Every node reads the job's data and its model's weights from its own machine. With other files there
it would train on other samples, silently. So each machine tells the digest of what it has, and the
head compares them. The profile of a job is not compared, because it travels with the job.

    {cache}/inputs/{digest of path, size and times}     digest of the contents of a file

Files may have terabytes, so the digest of each is kept in the cache. A file that was changed within
the last two seconds is not kept there: another change might leave its size and time as they are.
"""

import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import xxhash

from planaria.core.job import JobConfig
from planaria.data.model_tokenizer import TOKENIZER_FILES
from planaria.errors import ConfigError

PROSE_KEY: Final = "data.kind"  # Key that a job has whose text is that of Python's own library.

_READ_BYTES: Final = 16 << 20
_NOTED_BYTES: Final = 1 << 30  # Reading this takes seconds, so the user is told.
_NOTE_S: Final = 30.0
_RECENT_NS: Final = 2_000_000_000
_MODEL_FILES: Final = ("config.json", "*.safetensors", "*.safetensors.index.json")
# Files that the package datasets keeps beside a dataset, and that are no part of it.
_NO_DATA: Final = "cache-"


def input_digests(
    job: JobConfig, *, cache_directory: Path, note: Callable[[str], None]
) -> dict[str, str]:
    """The digest of each input of a job on this machine, by the key of the job that names it.

    Raises:
        ConfigError: an input is missing here, or cannot be read.
    """
    digests = {
        key: input_digest(job, key, cache_directory=cache_directory, note=note)
        for key in input_paths(job)
    }
    if job.model.kind != "paced" and job.data.kind == "text" and not job.data.path:
        digests[PROSE_KEY] = sys.version
    return digests


def input_digest(
    job: JobConfig, key: str, *, cache_directory: Path, note: Callable[[str], None]
) -> str:
    """The digest of the files that a key of a job names; those that are not cached are read now.

    Args:
        key: one of `input_paths`.
        note: shows the user a text; called in the thread of the caller.

    Raises:
        ConfigError: they are missing here, or cannot be read.
    """
    path = input_paths(job)[key]
    try:
        files = _files(job, key, path)
        return _Reader(cache_directory / "inputs", note).digest(path, files)
    except OSError as error:
        name = str(error.filename or path).encode(errors="backslashreplace").decode()
        remedy = f"{name} cannot be read here: {error.strerror}"
        raise ConfigError(key, str(path), remedy) from error


def input_paths(job: JobConfig) -> dict[str, Path]:
    """The files and directories that a job reads on every machine, by the key that names them."""
    paths = {}
    if job.data.path and job.data.kind != "python" and job.model.kind != "paced":
        paths["data.path"] = Path(job.data.path)
    if job.evaluation.path:
        paths["evaluation.path"] = Path(job.evaluation.path)
    if job.model.path and job.model.kind == "hf":
        paths["model.path"] = Path(job.model.path)
    return paths


def _files(job: JobConfig, key: str, path: Path) -> list[Path]:
    """The files of an input, in the order of their names.

    Raises:
        ConfigError: there are none.
        OSError: it cannot be looked whether there are any.
    """
    if key == "model.path":
        # Which tokens of ids from elsewhere are hidden depends on the tokenizer, too.
        has_ids = job.data.kind in ("hf", "tokens") or job.data.tokenizer == "model"
        patterns = (*_MODEL_FILES, *(TOKENIZER_FILES if has_ids else ()))
        files = [file for pattern in patterns for file in path.glob(pattern)]
    elif job.data.kind == "hf":
        files = [file for file in path.rglob("*") if _is_data(file.relative_to(path))]
    else:
        files = [path]
    files = sorted(file for file in set(files) if file.is_file())
    if not files:
        remedy = (
            "this machine has no such files; copy them here, to the same path, or mount a file "
            "system there that all machines share"
        )
        raise ConfigError(key, str(path), remedy)
    return files


def _is_data(path: Path) -> bool:
    is_hidden = any(part.startswith(".") for part in path.parts)
    return not is_hidden and not path.name.startswith(_NO_DATA)


class _Reader:
    """Reads files and keeps the digests of their contents.

    Args:
        cache: directory of the digests.
        note: shows the user a text.
    """

    def __init__(self, cache: Path, note: Callable[[str], None]) -> None:
        self._cache = cache
        self._note = note
        self._path = Path()
        self._num_bytes = self._num_read = 0
        self._noted_s = 0.0

    def digest(self, path: Path, files: Sequence[Path]) -> str:
        """The digest of the names, sizes and contents of an input's files.

        Raises:
            OSError: a file cannot be read.
        """
        whole = xxhash.xxh3_128()
        cached = {file: self._kept_digest(file) for file in files}
        self._begin(path, sum(file.stat().st_size for file in files if not cached[file]))
        for file in files:
            size, content = file.stat().st_size, cached[file] or self._content(file)
            whole.update(os.fsencode(f"{file.relative_to(path.parent)}\0{size}\0{content}\n"))
        return whole.hexdigest()

    def _begin(self, path: Path, num_bytes: int) -> None:
        self._path, self._num_bytes, self._num_read = path, num_bytes, 0
        self._noted_s = time.monotonic()
        if num_bytes >= _NOTED_BYTES:
            size = f"{num_bytes / 1e9:.1f} GB"
            self._note(f"reads {path} ({size}) once, to compare it with the other machines'")

    def _content(self, file: Path) -> str:
        """The digest of a file's contents, which is read now."""
        digest, before = xxhash.xxh3_128(), file.stat()
        for piece in _pieces(file):
            digest.update(piece)
            self._count(len(piece))
        with suppress(OSError):  # Without a cache the file is read again for the next job.
            if _is_settled(before, file.stat()):
                self._keep(_cache_name(file, before), digest.hexdigest())
        return digest.hexdigest()

    def _count(self, num_bytes: int) -> None:
        self._num_read += num_bytes
        if time.monotonic() - self._noted_s > _NOTE_S:
            self._noted_s = time.monotonic()
            self._note(f"has read {100 * self._num_read // self._num_bytes}% of {self._path}")

    def _kept_digest(self, file: Path) -> str:
        """The digest of a file's contents that the cache has; "": it has none."""
        name = _cache_name(file, file.stat())
        try:
            return (self._cache / name).read_text(encoding="ascii")
        except (OSError, ValueError):
            return ""

    def _keep(self, name: str, digest: str) -> None:
        self._cache.mkdir(parents=True, exist_ok=True)
        partial = self._cache / f"{name}.{secrets.token_hex(4)}.partial"
        partial.write_text(digest, encoding="ascii")
        os.replace(partial, self._cache / name)


def _pieces(file: Path) -> Iterator[bytes]:
    with file.open("rb") as content:
        while piece := content.read(_READ_BYTES):
            yield piece


def _is_settled(before: os.stat_result, after: os.stat_result) -> bool:
    """Whether a file was the same all the while, and another change would show in its times."""
    is_same = (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns)
    return is_same and time.time_ns() - after.st_mtime_ns > _RECENT_NS


def _cache_name(file: Path, status: os.stat_result) -> str:
    # Machines may share a cache. Files of each machine's own are told apart by when they came into
    # being there: a copy keeps its time of modification alone. One that all share is the same.
    times = f"{status.st_mtime_ns}\0{status.st_ctime_ns}"
    text = f"{file.absolute()}\0{status.st_size}\0{times}"
    return xxhash.xxh3_128_hexdigest(os.fsencode(text))
