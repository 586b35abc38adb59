"""Finds out whether a machine saves to the place to which the head of its job saves.

All nodes of a job write their parts of a save to one place, and each may read all of it. A path may
name another directory on each machine, and a URL another store. So the head writes a mark there
that each machine must read, and each machine writes an answer that the head must read:

    {place}/.planaria-mark-{mark}/head          the mark of a head
    {place}/.planaria-mark-{mark}/{answer}      the answer of a machine

Both are removed. A place that stalls or refuses for a while costs newer saves, and no machine: it
is asked again for a minute. All functions here may block for so long; they are called in threads.
"""

import logging
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from planaria.checkpoint.disk.storage import Storage, is_url, may_pass, storage_of
from planaria.checkpoint.disk.time_limits import TimeLimitedStorage, answer_in_time
from planaria.errors import CheckpointError, ConfigError, UnreadableError

logger = logging.getLogger(__name__)

_PREFIX: Final = ".planaria-mark-"
_HEAD: Final = "head"
_FIELD: Final = "checkpoint.directory"
_TIMEOUT_S: Final = 10.0  # Time limit of a request.
_PATIENCE_S: Final = 60.0  # Time in which a place that does not answer, or refuses, may recover.
_CACHED_S: Final = 5.0  # A client of NFS may show what was there some seconds ago.
_RETRY_S: Final = 0.2

Answer = TypeVar("Answer")


@contextmanager
def place_mark(place: str) -> Iterator[str]:
    """The mark that the head writes to a place, for the length of the context.

    Directories that are made for it are removed, too, if nothing else is in them.

    Args:
        place: directory, or URL of an object store.

    Raises:
        ConfigError: nothing can be written there, also in a minute where that may pass.
    """
    mark, made = secrets.token_hex(8), list[Path]()
    try:
        try:
            if not is_url(place):
                made = _patient_answer(partial(_missing, Path(place)), may_pass=may_pass)
            _write(place, f"{_PREFIX}{mark}/{_HEAD}", mark, may_pass=may_pass)
        except CheckpointError as error:
            raise ConfigError(_FIELD, place, str(error)) from error
        yield mark
    finally:
        _remove_all(place, f"{_PREFIX}{mark}")
        with suppress(OSError):  # Something was saved there.
            for directory in made:
                directory.rmdir()


def remove_other_marks(place: str, mark: str) -> None:
    """Removes what killed heads have left in a directory.

    Args:
        mark: mark of the only head that lives, since no other job saves there.
    """
    if not is_url(place):
        for left in Path(place).glob(f"{_PREFIX}*"):
            if left.name != f"{_PREFIX}{mark}":
                shutil.rmtree(left, ignore_errors=True)


def answer_mark(place: str, mark: str) -> str:
    """The answer that this machine writes to the place of a head, once it has read the mark there.

    Raises:
        ConfigError: the mark is not there.
        CheckpointError: the place does not answer, or refuses, and has not recovered in a minute.
    """
    directory = f"{_PREFIX}{mark}"
    if not _has(place, f"{directory}/{_HEAD}", mark):
        raise ConfigError(_FIELD, place, _stranger_text(place, "what the head wrote is not here"))
    answer = secrets.token_hex(8)
    _write(place, f"{directory}/{answer}", answer, may_pass=lambda _: True)
    return answer


def check_answer(place: str, mark: str, answer: str) -> None:
    """Reads and removes the answer of a machine at the place of this head.

    Raises:
        ConfigError: the answer is not there.
        CheckpointError: see answer_mark.
    """
    if not _has(place, f"{_PREFIX}{mark}/{answer}", answer):
        why = "what the machine wrote is not there for the head"
        raise ConfigError(_FIELD, place, _stranger_text(place, why))
    remove_answer(place, mark, answer)


def remove_answer(place: str, mark: str, answer: str) -> None:
    """Removes an answer of this machine, if it is still there; a failure is only logged."""
    directory = f"{_PREFIX}{mark}"
    try:
        _storage(place).remove(directory, [f"{directory}/{answer}"])
    except (CheckpointError, MemoryError) as error:  # MemoryError: no thread can be started.
        logger.warning("%s", error)


def _remove_all(place: str, directory: str) -> None:
    try:
        storage = _storage(place)
        storage.remove(directory, sorted(storage.entries(directory)))
    except (CheckpointError, MemoryError) as error:  # MemoryError: no thread can be started.
        logger.warning("%s", error)


def _storage(place: str) -> Storage:
    return TimeLimitedStorage(storage_of(place), timeout_s=_TIMEOUT_S)


def _write(
    place: str, name: str, text: str, *, may_pass: Callable[[CheckpointError], bool]
) -> None:
    """Writes a text to a place, perhaps after a while.

    Raises:
        CheckpointError: the place refuses for longer than a minute, or for a reason that stays.
    """
    storage = _storage(place)
    _patient_answer(
        lambda: storage.write(name, text.encode(), may_write=lambda: True), may_pass=may_pass
    )


def _missing(path: Path) -> list[Path]:
    """The directories of a path that do not exist, the innermost first.

    Raises:
        UnreadableError: the disk does not answer, or refuses.
    """

    def look() -> list[Path]:
        return [each for each in (path, *path.parents) if not each.exists()]

    try:
        return answer_in_time(look, where=str(path), timeout_s=_TIMEOUT_S)
    except OSError as error:
        raise UnreadableError(f"{path} cannot be read: {error.strerror}") from error


def _patient_answer(
    request: Callable[[], Answer], *, may_pass: Callable[[CheckpointError], bool]
) -> Answer:
    """The answer to a request, perhaps after a while.

    Raises:
        CheckpointError: the place refuses for longer than a minute, or for a reason that stays.
    """
    end_s, level = time.monotonic() + _PATIENCE_S, logging.WARNING
    while True:
        try:
            return request()
        except CheckpointError as error:
            if time.monotonic() > end_s or not may_pass(error):
                raise
            logger.log(level, "%s; it is tried again for up to %g s", error, _PATIENCE_S)
        level = logging.INFO  # Once is enough for the user.
        time.sleep(_RETRY_S)


def _has(place: str, name: str, text: str) -> bool:
    """Whether a place lists and holds a text, perhaps after a while.

    Raises:
        CheckpointError: the place does not answer, or refuses, and has not recovered in a minute.
    """
    storage, begin_s = _storage(place), time.monotonic()
    answers_since_s = begin_s
    while True:
        try:
            # A name that a machine gives is among those that exist, so it leads nowhere else.
            is_there = name in storage.entries(name.partition("/")[0])
            if is_there and storage.read(name) == text.encode():
                return True
        except CheckpointError:
            answers_since_s = time.monotonic()
            if answers_since_s > begin_s + _PATIENCE_S:
                raise
        if time.monotonic() > answers_since_s + _CACHED_S:
            return False
        time.sleep(_RETRY_S)


def _stranger_text(place: str, why: str) -> str:
    if is_url(place):
        return f"{why}; give all machines the same endpoint and credentials of that store"
    return (
        f"{why}, so machines do not share that directory; mount one file system at that path on "
        "all machines, or name an object store, such as s3://bucket/prefix"
    )
