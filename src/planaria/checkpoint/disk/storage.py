"""Storage of versions: the files of a directory, or the objects below a prefix of an object store.

Both hold named contents, "{version}/{file}". A content exists completely or not at all, and
survives the loss of the machine.

An object store is named by its URL (s3://, gs://, az://). Credentials and endpoint are found where
that store's own tools look for them: AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL and so on.
"""

import errno
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Protocol

import xxhash

from planaria.errors import (
    CheckpointError,
    ConfigError,
    LateError,
    PlanariaError,
    UnreadableError,
    UnwritableError,
)

# A request that a store has not answered within 60 s, with all that it sends, fails. So a content
# is read in pieces. The endpoint that the user sets decides whether TLS is used.
_CLIENT_OPTIONS: Final = {"connect_timeout": "10s", "timeout": "60s", "allow_http": True}
_RETRY_CONFIG: Final = {"max_retries": 4, "retry_timeout": timedelta(seconds=60)}
_PIECE_BYTES: Final = 16 << 20
_PIECES_AT_ONCE: Final = 4
_PUT_BYTES: Final = 5 << 20  # Stores take no smaller parts of a content,
_PUTS_MAX: Final = 10_000  # and no more parts of one.

VERSION_NAME: Final = re.compile(r"(0|[1-9]\d*)-(0|[1-9]\d*)", re.ASCII)
PARTIAL: Final = ".partial"  # How the names of files end that are still being written.

_SAVES: Final = "checkpoint.directory"  # The key that names the place of saves.

# The error in a server's XML answer.
_ERROR_FIELDS: Final = re.compile(r"<(?:Code|Message)>([^<]*)<")

# What a disk refuses for a while only; whatever else it refuses is the user's to mend.
_PASSING: Final = frozenset({errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOSPC, errno.EDQUOT})
# A client of a store has tried again what may pass: no connection, or an answer such as 503. It
# takes 501 for that as well, the answer of a store that does not know conditions of requests.
_PASSING_TEXT: Final = re.compile(r"after [0-9]+ retries\b(?!.*\b501 )")

# What is written: one run of bytes, or several end to end.
Content = bytes | tuple[memoryview, ...]


@dataclass(frozen=True, slots=True)
class ContentInfo:
    """Size of a content, and when it was written, in seconds since 1970."""

    num_bytes: int
    modified_s: float


class Storage(Protocol):
    """Named contents.

    All methods raise a CheckpointError if the storage refuses; that is an UnreadableError if the
    same read might succeed another time.
    """

    def where(self, name: str) -> str:
        """The place of a content, as people name it; name "": the place of all versions."""
        ...

    def entries(self, version: str) -> dict[str, ContentInfo]:
        """The contents of a version that exist, by name; version "": those of all versions.

        Then contents with other names than versions have (VERSION_NAME) may be left out.
        """
        ...

    def versions(self) -> list[str]:
        """The names of the versions and of all else there, in any order; some may be empty."""
        ...

    def read(self, name: str) -> bytes: ...

    def write(self, name: str, content: Content, *, may_write: Callable[[], bool]) -> None:
        """Writes a content, in place of an older one of its name if there is one.

        Args:
            may_write: whether the writer still belongs to the job; asked just before the write.
        """
        ...

    def create(self, name: str, content: bytes) -> bool:
        """Writes a content under a new name; returns False if another content has that name.

        The other content stays. An equal one counts as written by this call, since a request whose
        answer was lost is made again.
        """
        ...

    def remove(self, version: str, names: Sequence[str]) -> None:
        """Removes those of the named contents of a version that exist.

        The removal of the first one is durable before the others are removed.
        """
        ...


def parts_of(content: Content) -> tuple[bytes | memoryview, ...]:
    """The runs of bytes of a content."""
    return (content,) if isinstance(content, bytes) else content


def digest_of(content: Content) -> tuple[int, str]:
    """The number of bytes of a content, and their xxh3_128 in hexadecimal."""
    hasher = xxhash.xxh3_128()
    for part in parts_of(content):
        hasher.update(part)
    return sum(map(len, parts_of(content))), hasher.hexdigest()


def may_pass(error: BaseException) -> bool:
    """Whether a place may take or give later what it refuses now, although nobody mends it.

    Args:
        error: an error of the place, or one that was raised because of such an error.
    """
    if isinstance(error, LateError):
        return True
    if isinstance(error, OSError):
        return error.errno in _PASSING
    if isinstance(error, PlanariaError):
        return error.__cause__ is not None and may_pass(error.__cause__)
    return _PASSING_TEXT.search(str(error)) is not None


def storage_of(place: str) -> Storage:
    """The storage at a directory or a URL.

    Raises:
        ConfigError: the URL names no store that can be used.
    """
    return Objects(place) if is_url(place) else Directory(Path(place))


def is_url(place: str) -> bool:
    """Whether a place is the URL of an object store; otherwise it is a directory."""
    return "://" in place


def is_same_place(place: str, other: str) -> bool:
    """Whether two names mean the same directory, or the same prefix of an object store."""
    if is_url(place) or is_url(other):
        return place.rstrip("/") == other.rstrip("/")
    try:
        return os.path.samefile(place, other)
    except OSError:  # One of them does not exist, or not now.
        return os.path.realpath(place) == os.path.realpath(other)


def absolute(place: str) -> str:
    """The same place in a form that does not depend on the working directory, nor on "~"."""
    return place if is_url(place) else str(absolute_path(Path(os.path.expanduser(place))))


def absolute_path(path: Path) -> Path:
    """The path as an absolute one.

    Raises:
        ConfigError: the path is relative, and the working directory does not exist any more.
    """
    try:
        return path.absolute()
    except FileNotFoundError as error:
        remedy = (
            f"{path} is relative to the current directory, which no longer exists; change "
            "to another directory, or use absolute paths"
        )
        raise ConfigError("", str(path), remedy) from error


@dataclass(frozen=True, slots=True)
class Directory:
    """Contents as files; each version is a directory, which is made by the first write to it.

    Attributes:
        setting: key or option that names the directory, for errors.
    """

    path: Path
    setting: str = _SAVES

    def where(self, name: str) -> str:
        return str(self.path / name)

    def entries(self, version: str) -> dict[str, ContentInfo]:
        contents = {}
        # Others have directories here, too, which they may keep to themselves.
        versions = [version] if version else filter(VERSION_NAME.fullmatch, self.versions())
        for directory in versions:
            for path in _files(self.path / directory):
                if entry := _content_info(path):
                    contents[f"{directory}/{path.name}"] = entry
        return contents

    def versions(self) -> list[str]:
        return [path.name for path in _files(self.path) if not path.name.startswith(".")]

    def read(self, name: str) -> bytes:
        try:
            return (self.path / name).read_bytes()
        except OSError as error:
            kind = CheckpointError if isinstance(error, FileNotFoundError) else UnreadableError
            raise kind(f"cannot read {self.path / name}: {error.strerror}") from error

    def write(self, name: str, content: Content, *, may_write: Callable[[], bool]) -> None:
        def place(partial: Path, path: Path) -> None:
            check_member(str(path), may_write)
            os.replace(partial, path)

        try:
            self._write_durably(name, content, place)
        except OSError as error:
            raise self._write_error(name, error) from error

    def create(self, name: str, content: bytes) -> bool:
        path = self.path / name
        try:
            try:
                self._write_durably(name, content, os.link)
            except FileExistsError:
                if self.read(name) != content:
                    return False
                # The process that placed the file may have ended before it synced the directory.
                _sync_directory(path.parent)
            _sync_directory(self.path)
        except OSError as error:
            raise self._write_error(name, error) from error
        return True

    def _write_durably(
        self, name: str, content: Content, place: Callable[[Path, Path], None]
    ) -> None:
        """Writes a content to a partial file durably, then has `place` move that to its name."""
        path = self.path / name
        partial = _partial_path(path)
        make_directory(path.parent)
        try:
            _write_synced(partial, content)
            place(partial, path)
        finally:
            partial.unlink(missing_ok=True)
        _sync_directory(path.parent)

    def _write_error(self, name: str, error: OSError) -> UnwritableError:
        remedy = _REMEDIES.get(error.errno or 0, "set {setting} to a healthy disk")
        more = " (older versions are intact)" if self.setting == _SAVES else ""
        return UnwritableError(
            f"cannot write {self.path / name}: {error.strerror}; "
            f"{remedy.format(setting=self.setting)}{more}"
        )

    def remove(self, version: str, names: Sequence[str]) -> None:
        directory = self.path / version
        try:
            if not directory.exists():
                return
            for number, name in enumerate(names):
                (self.path / name).unlink(missing_ok=True)
                if not number:
                    _sync_directory(directory)
            if not any(directory.iterdir()):  # Also if no write to it has ever succeeded.
                directory.rmdir()
        except OSError as error:
            path = error.filename or directory
            raise CheckpointError(f"cannot remove {path}: {error.strerror}") from error


class Objects:
    """Contents as the objects of an object store, through obstore (extra "store")."""

    def __init__(self, url: str) -> None:
        try:
            import obstore
            from obstore.exceptions import BaseError
            from obstore.store import from_url
        except ImportError as error:
            what = "object stores need the package obstore"
            remedy = f"{what}: pip install -e '.[store]' in planaria's checkout"
            raise ConfigError("checkpoint.directory", url, remedy) from error
        self._url = url.rstrip("/")
        self._obstore: Any = obstore
        self._errors = (BaseError, OSError)  # A missing object raises a FileNotFoundError.
        try:
            self._store: Any = from_url(
                self._url, client_options=_CLIENT_OPTIONS, retry_config=_RETRY_CONFIG
            )
        except (BaseError, ValueError) as error:
            raise ConfigError("checkpoint.directory", url, _error_text(error)) from error

    def where(self, name: str) -> str:
        return f"{self._url}/{name}" if name else self._url

    def entries(self, version: str) -> dict[str, ContentInfo]:
        prefix = f"{version}/" if version else None
        try:
            parts = self._obstore.list(self._store, prefix=prefix)
            objects = [entry for part in parts for entry in part]
        except self._errors as error:
            raise UnreadableError(
                f"cannot list {self.where(version)}: {_error_text(error)}"
            ) from error
        return {
            entry["path"]: ContentInfo(entry["size"], entry["last_modified"].timestamp())
            for entry in objects
        }

    def versions(self) -> list[str]:
        try:
            names: list[str] = self._obstore.list_with_delimiter(self._store)["common_prefixes"]
        except self._errors as error:
            raise UnreadableError(f"cannot list {self._url}: {_error_text(error)}") from error
        return names

    def read(self, name: str) -> bytes:
        try:
            answer = self._obstore.get(self._store, name)
            if answer.meta["size"] <= _PIECE_BYTES:
                return bytes(answer.bytes())
            size, e_tag = answer.meta["size"], answer.meta["e_tag"]
            del answer  # Its connection is closed: what it would send is asked for in pieces.
            return self._read_pieces(name, size, e_tag)
        except self._errors as error:
            kind = CheckpointError if isinstance(error, FileNotFoundError) else UnreadableError
            raise kind(f"cannot read {self.where(name)}: {_error_text(error)}") from error

    def _read_pieces(self, name: str, size: int, e_tag: str | None) -> bytes:
        """Reads a content in pieces, some at once; all are of the content that has this tag."""
        firsts = range(0, size, _PIECE_BYTES)
        pieces: list[Any] = [b""] * len(firsts)
        waiting, lock = iter(enumerate(firsts)), threading.Lock()
        errors: list[BaseException] = []

        def read_some() -> None:
            try:
                while not errors:
                    with lock:
                        number, first = next(waiting)
                    options: dict[str, Any] = {"range": (first, min(first + _PIECE_BYTES, size))}
                    if e_tag is not None:
                        options["if_match"] = e_tag
                    answer = self._obstore.get(self._store, name, options=options)
                    pieces[number] = answer.bytes()
            except StopIteration:
                return
            except BaseException as error:
                errors.append(error)

        # Daemons: a store that answers no more must not hold up the end of the process.
        helpers = [
            threading.Thread(target=read_some, name="store", daemon=True)
            for _ in range(min(_PIECES_AT_ONCE, len(firsts)) - 1)
        ]
        started = []
        with suppress(RuntimeError):  # The machine allows no more threads.
            for helper in helpers:
                helper.start()
                started.append(helper)
        read_some()
        for helper in started:
            if not errors:
                helper.join()
        if errors:
            raise errors[0]
        return b"".join(pieces)

    def write(self, name: str, content: Content, *, may_write: Callable[[], bool]) -> None:
        check_member(self.where(name), may_write)
        parts = parts_of(content)
        num_bytes = sum(map(len, parts))
        put_bytes = max(_PUT_BYTES, -(-num_bytes // _PUTS_MAX))
        is_small = num_bytes <= put_bytes  # It goes as one request.
        source = b"".join(parts) if is_small else _pieces(parts, put_bytes)
        try:
            self._obstore.put(self._store, name, source, chunk_size=put_bytes)
        except self._errors as error:
            raise self._write_error(name, error) from error

    def create(self, name: str, content: bytes) -> bool:
        try:
            self._obstore.put(self._store, name, content, mode="create")
        except self._obstore.exceptions.AlreadyExistsError:
            return self.read(name) == content
        except self._errors as error:
            # The store may have created the object although its answer was lost.
            with suppress(CheckpointError):
                if self.read(name) == content:
                    return True
            raise self._write_error(name, error) from error
        return True

    def remove(self, version: str, names: Sequence[str]) -> None:
        try:
            for some in filter(None, (list(names[:1]), list(names[1:]))):
                self._delete(some)
        except self._errors as error:
            raise CheckpointError(
                f"cannot remove {self.where(version)}: {_error_text(error)}"
            ) from error

    def _delete(self, names: list[str]) -> None:
        try:
            self._obstore.delete(self._store, names)
        except FileNotFoundError:  # Some stores stop at the first object that does not exist.
            for name in names:
                with suppress(FileNotFoundError):
                    self._obstore.delete(self._store, name)

    def _write_error(self, name: str, error: Exception) -> UnwritableError:
        return UnwritableError(
            f"cannot write {self.where(name)}: {_error_text(error)}; repair the store, or "
            "set checkpoint.directory to another one (older versions are intact)"
        )


def check_member(where: str, may_write: Callable[[], bool]) -> None:
    """Raises a CheckpointError if the writer does not belong to the job any more."""
    if not may_write():
        raise CheckpointError(f"{where} is not written: the node's lease has run out")


def _pieces(parts: Sequence[bytes | memoryview], piece_bytes: int) -> Iterator[memoryview]:
    """Views of all bytes, in order and in small pieces: obstore has copies of several at once."""
    for part in parts:
        view = memoryview(part)
        for first in range(0, len(view), piece_bytes):
            yield view[first : first + piece_bytes]


def _error_text(error: Exception) -> str:
    """The text of a store's error, without the details that only help the store's authors."""
    text = str(error).partition("Debug source:")[0]
    first = next(iter(text.splitlines()), type(error).__name__).rstrip(" .:")
    details = "".join(f", {field}" for field in _ERROR_FIELDS.findall(text))
    return f"{first}{details}"


def _files(directory: Path) -> list[Path]:
    """The entries of a directory; none if it is no directory, or was removed meanwhile."""
    try:
        return list(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UnreadableError(f"cannot read {directory}: {error.strerror}") from error


def _content_info(path: Path) -> ContentInfo | None:
    """The entry of a file; None if it was removed meanwhile."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UnreadableError(f"cannot read {path}: {error.strerror}") from error
    return ContentInfo(stat.st_size, stat.st_mtime)


def _partial_path(path: Path) -> Path:
    """A random name beside path; a process id is no unique name on a disk that machines share."""
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}{PARTIAL}")


def make_directory(path: Path) -> None:
    """Makes a directory and its missing parents durably: they survive the loss of the machine."""
    missing = [directory for directory in (path, *path.parents) if not directory.exists()]
    for directory in reversed(missing):
        directory.mkdir(exist_ok=True)
        with suppress(PermissionError):  # A directory may be writable without being readable.
            _sync_directory(directory.parent)


def _write_synced(path: Path, content: Content) -> None:
    with path.open("wb") as file:
        for part in parts_of(content):
            file.write(part)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(directory: Path) -> None:
    """Makes new names in a directory durable, which syncing the files alone does not."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# What file systems without hard links answer.
NO_LINKS: Final = frozenset({errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP})
_REMEDIES: Final[Mapping[int, str]] = {
    **dict.fromkeys(NO_LINKS, "set {setting} to a file system with hard links"),
    errno.ENOSPC: "free some space there, or set {setting} to a larger disk",
    errno.EDQUOT: "free some of the quota, or set {setting} to another disk",
    errno.EACCES: "make it writable, or set {setting} to a writable place",
    errno.EROFS: "it is read-only; set {setting} to a writable place",
}
