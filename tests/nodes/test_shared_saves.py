"""A machine that saves to another place than its head is found out before it trains."""

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.object_store import object_store
from planaria.checkpoint.disk.time_limits import TimeLimitedStorage
from planaria.errors import CheckpointError, ConfigError, LateError, UnwritableError
from planaria.nodes import shared_saves
from planaria.nodes.shared_saves import (
    answer_mark,
    check_answer,
    place_mark,
    remove_answer,
    remove_other_marks,
)


@pytest.fixture(autouse=True)
def _no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """No file system of these tests shows what was there some seconds ago."""
    monkeypatch.setattr(shared_saves, "_CACHED_S", 0.0)


@pytest.fixture(scope="module", params=["directory", "store"])
def place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """A directory or a store that holds nothing."""
    if request.param == "directory":
        yield str(tmp_path_factory.mktemp("saves"))
        return
    with object_store() as url:
        yield url


def names(place: str) -> list[str]:
    """What a directory holds; a store is listed by its own tests."""
    return [str(path) for path in Path(place).rglob("*")] if Path(place).is_dir() else []


def test_one_place_is_known_by_both_and_left_as_it_was(place: str) -> None:
    with place_mark(place) as mark:
        answer = answer_mark(place, mark)
        check_answer(place, mark, answer)
        with pytest.raises(ConfigError):
            check_answer(place, mark, answer)  # It was removed.

    assert names(place) == []


def test_a_machine_that_does_not_see_the_mark_is_told_what_would_do(
    place: str, tmp_path: Path
) -> None:
    """It writes nothing there: the path may be somebody else's."""
    other = f"{place}/other" if "://" in place else str(tmp_path / "never" / "there")

    with place_mark(place) as mark, pytest.raises(ConfigError) as caught:
        answer_mark(other, mark)

    assert caught.value.value == other
    wanted = "endpoint and credentials" if "://" in place else "mount one file system at that path"
    assert wanted in caught.value.remedy
    assert not (tmp_path / "never").exists()


def test_a_head_that_does_not_see_the_answer_refuses_the_machine(place: str) -> None:
    """A machine may see a copy of the head's directory, such as a snapshot."""
    with place_mark(place) as mark, pytest.raises(ConfigError, match="not there for the head"):
        check_answer(place, mark, "0123456789abcdef")


def test_an_answer_leads_nowhere_else(tmp_path: Path) -> None:
    """A machine could have any file of the head compared with a text, and removed."""
    (tmp_path / "secret").write_text("../../secret")

    with place_mark(str(tmp_path / "saves")) as mark, pytest.raises(ConfigError):
        check_answer(str(tmp_path / "saves"), mark, "../../secret")
    assert (tmp_path / "secret").exists()


def test_an_answer_is_removed_by_its_machine_where_the_head_has_not(place: str) -> None:
    with place_mark(place) as mark:
        answer = answer_mark(place, mark)
        remove_answer(place, mark, answer)
        remove_answer(place, mark, answer)

        with pytest.raises(ConfigError):
            check_answer(place, mark, answer)


def test_what_comes_late_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system may show what was there some seconds ago."""
    place, num_looks = str(tmp_path), 0
    listing = TimeLimitedStorage.entries

    def entries(storage: TimeLimitedStorage, version: str) -> object:
        nonlocal num_looks
        num_looks += 1
        return {} if num_looks < 3 else listing(storage, version)

    monkeypatch.setattr(shared_saves, "_CACHED_S", 60.0)
    monkeypatch.setattr(shared_saves, "_RETRY_S", 0.0)
    monkeypatch.setattr(TimeLimitedStorage, "entries", entries)

    with place_mark(place) as mark:
        answer_mark(place, mark)

    assert num_looks >= 3


class Refusals:
    """Has the next `number` writes to any place raise an error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.number = 0
        self.error = CheckpointError("")
        self._write = TimeLimitedStorage.write
        monkeypatch.setattr(shared_saves, "_RETRY_S", 0.0)
        monkeypatch.setattr(TimeLimitedStorage, "write", lambda *a, **o: self._on_write(*a, **o))

    def _on_write(self, storage: TimeLimitedStorage, *args: Any, **options: Any) -> None:
        self.number -= 1
        if self.number >= 0:
            raise self.error
        self._write(storage, *args, **options)


@pytest.fixture
def refusals(monkeypatch: pytest.MonkeyPatch) -> Refusals:
    """There are none yet."""
    return Refusals(monkeypatch)


def test_an_answer_is_written_once_the_place_has_room(
    tmp_path: Path, refusals: Refusals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full for a moment is no other place."""
    place = str(tmp_path)

    with place_mark(place) as mark:
        refusals.number, refusals.error = 2, CheckpointError("no space left on device")
        check_answer(place, mark, answer_mark(place, mark))
        refusals.number = 1_000_000
        monkeypatch.setattr(shared_saves, "_PATIENCE_S", 0.0)
        with pytest.raises(CheckpointError, match="no space left"):
            answer_mark(place, mark)


@pytest.mark.parametrize("number", [None, errno.EIO, errno.ESTALE, errno.ENOSPC])
def test_a_mark_is_written_once_the_place_is_back(
    number: int | None, tmp_path: Path, refusals: Refusals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head that starts again while the file server does ended as if the user had erred."""
    place = str(tmp_path)
    refusals.error = LateError("no answer") if number is None else UnwritableError("refused")
    refusals.error.__cause__ = None if number is None else OSError(number, "refused")

    refusals.number = 2
    with place_mark(place) as mark:
        check_answer(place, mark, answer_mark(place, mark))
    refusals.number = 1_000_000
    monkeypatch.setattr(shared_saves, "_PATIENCE_S", 0.0)
    with pytest.raises(ConfigError, match=r"checkpoint\.directory"), place_mark(place):
        pass


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EACCES, None])
def test_a_mark_is_written_once_its_directory_can_be_looked_at(
    number: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head ended with a traceback, or waited for ever. What stays is told at once."""
    place, real, hanging = tmp_path / "saves", Path.exists, threading.Event()
    failures = [number, number]

    def exists(path: Path) -> bool:
        if path == place and failures:
            failure = failures.pop()
            if failure is not None:
                raise OSError(failure, os.strerror(failure))
            assert hanging.wait(60.0)
        return real(path)

    monkeypatch.setattr(Path, "exists", exists)
    monkeypatch.setattr(shared_saves, "_RETRY_S", 0.0)
    if number is None:
        monkeypatch.setattr(shared_saves, "_TIMEOUT_S", 0.2)

    if number == errno.EACCES:
        with pytest.raises(ConfigError, match="Permission denied"), place_mark(str(place)):
            pass
        return
    with place_mark(str(place)) as mark:
        monkeypatch.setattr(shared_saves, "_TIMEOUT_S", 10.0)
        check_answer(str(place), mark, answer_mark(str(place), mark))
    hanging.set()
    assert not real(place)


def test_the_mark_of_a_head_that_was_killed_is_removed(tmp_path: Path) -> None:
    killed = place_mark(str(tmp_path))
    left = killed.__enter__()

    with place_mark(str(tmp_path)) as mark:
        remove_other_marks(str(tmp_path), mark)
        assert [path.name for path in tmp_path.iterdir()] == [f".planaria-mark-{mark}"]
    assert left != mark


def test_directories_that_were_made_for_a_mark_are_removed(tmp_path: Path) -> None:
    """A job that ends before it saves leaves nothing."""
    with place_mark(str(tmp_path / "new" / "saves")):
        pass

    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_the_users_to_mend(tmp_path: Path) -> None:
    (tmp_path / "saves").write_text("a file")

    with (
        pytest.raises(ConfigError, match=r"checkpoint\.directory"),
        place_mark(str(tmp_path / "saves")),
    ):
        pass
