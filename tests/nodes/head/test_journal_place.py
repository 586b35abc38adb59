"""A run's journal is its own: in the right place, empty at first, and gone in the end."""

import errno
import fcntl
import os
import socket
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.jobs import tiny_job
from planaria.checkpoint.disk.tiers import tier_of
from planaria.core.job import JobConfig
from planaria.errors import ConfigError
from planaria.nodes.head.journal_place import journal_place
from planaria.nodes.head.remote.run_record import HOLDER_FILE
from planaria.nodes.head.request_socket import socket_directories


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
        assert [path.name for path in Path(found).iterdir()] == [HOLDER_FILE]
        for name in ("archive", "journal"):
            (Path(found) / name).touch()
        assert tier_of(str(saves)).storage.entries("") == {}

    assert not list(saves.iterdir())
    assert not notes


@pytest.mark.parametrize("is_taken_up", [False, True])
def test_the_journal_of_a_head_that_has_taken_another_ones_place_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_taken_up: bool
) -> None:
    """The other one was cut off, and the disk that they share has no locks. At its end it removed
    the journal of the job that went on. Nor does it reach that with a file that it has open."""
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    job = saving_to(str(tmp_path / "saves"))
    with ExitStack() as first, ExitStack() as second:
        found = Path(first.enter_context(journal_place(job, "", note=pytest.fail)))
        written = first.enter_context((found / "journal").open("w"))
        written.write("of both")
        written.flush()
        taken_up = str(found) if is_taken_up else ""
        second.enter_context(journal_place(job, "", note=pytest.fail, taken_up=taken_up))
        assert (found / "journal").exists() == is_taken_up
        (found / "archive").touch()
        written.write(", and more")
        first.close()

        if is_taken_up:
            assert (found / "journal").read_text() == "of both"
        assert (found / "archive").exists()
        second.close()
        assert not found.exists()


def test_the_journal_of_saves_in_a_store_is_in_the_users_state_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two jobs of one name have two; one that a killed launcher has left goes."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(socket, "gethostname", lambda: "machine-1")
    left = tmp_path / "planaria" / "sequential-machine_1-0123abcd"
    leave_journal(left)
    killed_at_once = tmp_path / "planaria" / "sequential-machine_1-89abcdef"
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


def test_the_journal_of_another_machine_stays_in_a_home_that_both_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel of one knows nothing of the other's locks."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    job = saving_to("s3://bucket/saves")

    with journal_place(job, "", note=pytest.fail) as first:
        (Path(first) / "journal").touch()
        with monkeypatch.context() as other:
            other.setattr(fcntl, "flock", lambda _descriptor, _how: None)
            other.setattr(socket, "gethostname", lambda: "another")
            with journal_place(job, "", note=pytest.fail) as second:
                assert Path(second).parent == Path(first).parent

        assert (Path(first) / "journal").exists()


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


def test_a_directory_that_cannot_be_locked_is_not_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each try of the user's would leave one more."""
    flock = fcntl.flock

    def refuse(descriptor: int, how: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")) != tmp_path:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", refuse)
    with (
        pytest.raises(ConfigError, match=r"--state.*No locks available"),
        journal_place(saving_to("s3://bucket/saves"), str(tmp_path), note=pytest.fail),
    ):
        pytest.fail("it was locked")

    assert not list(tmp_path.iterdir())


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
        pytest.raises(ConfigError, match=r"--state.*because you have no home directory"),
        journal_place(saving_to("s3://bucket/saves"), "", note=pytest.fail),
    ):
        pytest.fail("there is no place")

    assert not list(tmp_path.iterdir())
    assert all(path.is_absolute() for path in socket_directories())


def test_a_relative_state_directory_of_the_environment_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As its specification has it; a job that is asked from elsewhere could not be found there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", "state")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path.replace("~", f"{tmp_path}/home"))

    with journal_place(saving_to("s3://bucket/saves"), "", note=pytest.fail) as found:
        assert Path(found).parent == tmp_path / "home" / ".local" / "state" / "planaria"
