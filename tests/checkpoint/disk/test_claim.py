"""One job at a time saves in a directory, and none is kept out by one that is gone."""

import errno
import fcntl
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import Mock

import pytest

from planaria.checkpoint.disk.claim import claim
from planaria.checkpoint.disk.tiers import Manifest, tier_of
from planaria.errors import CheckpointError, ConfigError

HOLDER = """
import sys, time
from planaria.checkpoint.disk.claim import claim
with claim(sys.argv[1], "the first", note=print):
    print("there", flush=True)
    time.sleep(600)
"""


def refuse_notes(text: str) -> None:
    raise AssertionError(text)


def test_another_process_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    """By SIGKILL, which leaves no time to clean up; who it was is said."""
    place = tmp_path / "saves"
    arguments = [sys.executable, "-c", HOLDER, str(place)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "there\n"
        with (
            pytest.raises(ConfigError, match=rf"job 'the first' \(process {holder.pid} on "),
            claim(str(place), "the second", note=refuse_notes),
        ):
            pass
        assert tier_of(str(place)).versions() == ()
        holder.kill()
    with claim(str(place), "the second", note=refuse_notes):
        assert "the second" in (place / ".job.lock").read_text()
    assert place.is_dir()
    assert not list(place.iterdir())


def test_a_directory_that_is_made_for_saves_stays_when_the_machine_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With each above it: what is synced below a name that is lost is lost with it."""
    synced: list[str] = []
    sync = os.fsync

    def noted(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    with claim(str(tmp_path / "jobs" / "saves"), "a job", note=refuse_notes):
        assert synced == [str(tmp_path), str(tmp_path / "jobs")]


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_hard_links_is_refused_before_training(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each save there would fail at its last step. A disk that is only full may have space then."""
    link = Mock(side_effect=OSError(number, os.strerror(number)))
    monkeypatch.setattr(os, "link", link)
    with (
        pytest.raises(ConfigError, match=rf"no hard links \({os.strerror(number)}\)"),
        claim(str(tmp_path / "saves"), "a job", note=refuse_notes),
    ):
        pass
    assert not (tmp_path / "saves").exists()
    with pytest.raises(CheckpointError, match="to a file system with hard links"):
        tier_of(str(tmp_path)).publish(Manifest(iteration=0, epoch=0, job={}, layers=()))

    link.side_effect = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with claim(str(tmp_path / "saves"), "a job", note=refuse_notes):
        pass
    assert not (tmp_path / "saves").exists()


def test_a_second_job_of_the_same_process_is_refused(tmp_path: Path) -> None:
    """Also by another name of the directory; what is below it is another place."""
    (tmp_path / "saves").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "saves")
    with claim(str(tmp_path / "saves"), "one", note=refuse_notes):
        with claim(str(tmp_path / "saves" / "best"), "two", note=refuse_notes):
            pass
        with (
            pytest.raises(ConfigError, match="wait until it has ended, or name another directory"),
            claim(str(tmp_path / "link"), "three", note=refuse_notes),
        ):
            pass
    assert not list((tmp_path / "saves").iterdir())


def test_directories_that_nobody_saved_to_are_gone_in_the_end(tmp_path: Path) -> None:
    """A job that is refused for another reason leaves nothing behind."""
    with claim(str(tmp_path / "a" / "b"), "job", note=refuse_notes):
        assert (tmp_path / "a" / "b").is_dir()
    assert not (tmp_path / "a").exists()

    with claim(str(tmp_path / "a" / "b"), "job", note=refuse_notes):
        (tmp_path / "a" / "b" / "4-0").mkdir()
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["4-0"]


def test_a_directory_that_is_not_writable_any_more_costs_the_job_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its disk may have become read-only while it trained: what it has to tell is told, and its
    process keeps no lock."""

    def refuse(path: Path, missing_ok: bool = False) -> None:
        del missing_ok
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", refuse)
        with claim(str(tmp_path), "one", note=refuse_notes):
            pass
    assert (tmp_path / ".job.lock").exists()

    with claim(str(tmp_path), "two", note=refuse_notes):
        pass
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    """Where it would be, not for the bytes that are free there."""
    (tmp_path / "file").touch()
    for place, why in (
        ("/proc/nope", "/proc/nope cannot be written to"),
        (str(tmp_path / "file" / "below"), "file is not a directory"),
    ):
        with (
            pytest.raises(ConfigError, match=why),
            claim(place, "job", note=refuse_notes),
        ):
            pass


def test_a_disk_that_fails_without_the_name_of_a_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sync knows a descriptor alone; "None" cannot be written to, the user was told."""
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO))))
    with (
        pytest.raises(ConfigError, match=f"{tmp_path}/saves cannot be written to: Input/output"),
        claim(str(tmp_path / "saves"), "job", note=refuse_notes),
    ):
        pass


def test_a_file_system_without_locks_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its user has to see to it; the job runs."""

    def flock(_descriptor: int, _how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    notes: list[str] = []
    with ExitStack() as second:
        with claim(str(tmp_path), "one", note=notes.append):
            second.enter_context(claim(str(tmp_path), "two", note=notes.append))
        # The first one may have been cut off when the second was started; that one goes on.
        assert "job 'two'" in (tmp_path / ".job.lock").read_text()
    assert not list(tmp_path.iterdir())
    assert len(notes) == 2
    assert f"{tmp_path} cannot be locked" in notes[0]


def test_a_store_is_not_claimed() -> None:
    """Nothing is written to it."""
    with claim("s3://nowhere/jobs", "job", note=refuse_notes):
        assert not Path("s3:").exists()
