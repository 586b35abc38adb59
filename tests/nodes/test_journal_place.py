"""A run's journal is its own: in the right place, empty at first, and gone in the end."""

import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from jobs import tiny_job
from planaria.checkpoint.tiers import tier_of
from planaria.core.job import JobConfig
from planaria.errors import ConfigError
from planaria.nodes.desk import desk_directories
from planaria.nodes.journal_place import journal_place


def saving_to(place: str) -> JobConfig:
    job = tiny_job("sequential", Path())
    return replace(job, checkpoint=replace(job.checkpoint, directory=place))


def leave_journal(directory: Path) -> None:
    """As a launcher does that is killed."""
    directory.mkdir(parents=True)
    for name in ("archive", "journal", "journal.partial", "lock"):
        (directory / name).write_text("of another run")


def test_a_journal_is_beside_the_saves_and_is_none_of_them(tmp_path: Path) -> None:
    """What a run has left that was killed is not taken for this one's."""
    saves, notes = tmp_path / "saves", list[str]()
    leave_journal(saves / ".journal")

    with journal_place(saving_to(str(saves)), "", note=notes.append) as found:
        assert found == str(saves / ".journal")
        assert not list(Path(found).iterdir())
        for name in ("archive", "journal"):
            (Path(found) / name).touch()
        assert tier_of(str(saves)).storage.entries("") == {}

    assert not list(saves.iterdir())
    assert not notes


@pytest.mark.parametrize("state", ["", "state"])
def test_a_disk_that_hangs_does_not_keep_a_job_from_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """What is not removed goes with the next run."""
    monkeypatch.setattr("planaria.nodes.journal_place.LOOK_TIMEOUT_S", 0.05)
    may_answer = threading.Event()
    unlink = Path.unlink

    def late(path: Path, missing_ok: bool = False) -> None:
        assert may_answer.wait(20.0)
        unlink(path, missing_ok)

    saves, place = str(tmp_path / "saves"), str(tmp_path / state) if state else ""
    with monkeypatch.context() as patched:
        with journal_place(saving_to(saves), place, note=pytest.fail) as found:
            (Path(found) / "journal").touch()
            patched.setattr(Path, "unlink", late)
        assert (Path(found) / "journal").exists()
        (tidying,) = [one for one in threading.enumerate() if one.name == "patience"]
        may_answer.set()
        tidying.join(20.0)
    assert not Path(found).exists()


def test_the_journal_of_saves_in_a_store_is_in_the_users_state_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two jobs of one name have two; one that a killed launcher has left goes."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    left = tmp_path / "planaria" / "sequential-0123abcd"
    leave_journal(left)
    killed_at_once = tmp_path / "planaria" / "sequential-89abcdef"
    killed_at_once.mkdir()
    job = saving_to("s3://bucket/saves")

    with journal_place(job, "", note=pytest.fail) as first:
        (Path(first) / "journal").touch()
        (Path(first) / "archive").touch()
        with journal_place(job, "", note=pytest.fail) as second:
            assert first != second
            assert Path(first).is_dir()
            assert {Path(first).parent, Path(second).parent} == {tmp_path / "planaria"}
            assert not left.exists()
            assert not killed_at_once.exists()

    assert not list((tmp_path / "planaria").iterdir())


def test_the_user_says_where_the_journal_is(tmp_path: Path) -> None:
    """What else is there stays."""
    (tmp_path / "mine").touch()

    with journal_place(
        saving_to(str(tmp_path / "saves")), str(tmp_path), note=pytest.fail
    ) as found:
        assert Path(found).parent == tmp_path

    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_place_that_cannot_be_written_to_is_the_users_mistake(tmp_path: Path) -> None:
    """Before anything is trained."""
    (tmp_path / "file").touch()

    with (
        pytest.raises(ConfigError, match=r"--state.*cannot be written to"),
        journal_place(saving_to(str(tmp_path)), str(tmp_path / "file"), note=pytest.fail),
    ):
        pytest.fail("it was written to")


def test_saves_beside_which_nothing_can_be_kept_leave_the_state_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a file system without locks; it is said."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / ".journal").touch()
    notes: list[str] = []

    with journal_place(saving_to(str(tmp_path)), "", note=notes.append) as found:
        assert Path(found).parent == tmp_path / "state" / "planaria"

    assert len(notes) == 1


def test_without_a_home_the_user_is_asked_for_a_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container whose user is a mere number: no directory `~` is made where it runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", str)

    with (
        pytest.raises(ConfigError, match=r"--state.*no home of yours is known"),
        journal_place(saving_to("s3://bucket/saves"), "", note=pytest.fail),
    ):
        pytest.fail("there is no place")

    assert not list(tmp_path.iterdir())
    assert all(path.is_absolute() for path in desk_directories())


def test_a_relative_state_directory_of_the_environment_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As its specification has it; a job that is asked from elsewhere could not be found there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", "state")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path.replace("~", f"{tmp_path}/home"))

    with journal_place(saving_to("s3://bucket/saves"), "", note=pytest.fail) as found:
        assert Path(found).parent == tmp_path / "home" / ".local" / "state" / "planaria"


def test_a_disk_that_hangs_does_not_hold_up_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal is of no use any more by then, and goes with the next run."""
    monkeypatch.setattr("planaria.nodes.journal_place.LOOK_TIMEOUT_S", 0.01)
    may_end, unlink = threading.Event(), Path.unlink

    def hang(path: Path, *, missing_ok: bool = False) -> None:
        assert may_end.wait(20.0)
        unlink(path, missing_ok=missing_ok)

    with journal_place(saving_to(str(tmp_path / "saves")), "", note=pytest.fail) as found:
        (Path(found) / "journal").touch()
        monkeypatch.setattr(Path, "unlink", hang)
    assert Path(found).exists()

    may_end.set()
    for thread in threading.enumerate():
        if thread.name == "patience":
            thread.join(20.0)
    assert not Path(found).exists()
