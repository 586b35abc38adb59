"""A storage that does not answer holds nobody up for longer than is said."""

import errno
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest

from planaria.checkpoint.disk.storage import ContentInfo, Directory
from planaria.checkpoint.disk.tiers import Tier, newest_checkpoint_text, tier_of
from planaria.checkpoint.disk.time_limits import context_with_time_limit, with_time_limit
from planaria.errors import CheckpointError, UnreadableError

NO_THREAD = Mock(side_effect=RuntimeError("can't start new thread"))


@pytest.fixture
def is_answered(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No directory is listed until it is set."""
    answered = threading.Event()
    entries = Directory.entries

    def late(storage: Directory, version: str) -> dict[str, ContentInfo]:
        assert answered.wait(20.0)
        return entries(storage, version)

    monkeypatch.setattr(Directory, "entries", late)
    yield answered
    answered.set()


def test_what_is_not_answered_in_time_is_an_error(
    tmp_path: Path, is_answered: threading.Event
) -> None:
    """And what is left on disk is told as not known, not as nothing."""
    tier = with_time_limit(tier_of(str(tmp_path)), timeout_s=0.05)

    with pytest.raises(UnreadableError, match=r"did not answer within 0\.05 s"):
        tier.versions()
    assert "is not known" in newest_checkpoint_text(tier)
    assert not is_answered.is_set()


def test_while_a_request_is_late_the_next_ones_fail_at_once(
    tmp_path: Path, is_answered: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many would be as late, one after the other; they are made again once it is answered."""
    tier = with_time_limit(tier_of(str(tmp_path)), timeout_s=20.0)
    with monkeypatch.context() as patched:
        patched.setattr(tier.storage, "_timeout_s", 0.05)
        with pytest.raises(UnreadableError):
            tier.versions()
    (late,) = [thread for thread in threading.enumerate() if thread.name == "time limit"]

    with pytest.raises(UnreadableError):
        tier.storage.read("1-0/manifest.json")
    assert [thread for thread in threading.enumerate() if thread.name == "time limit"] == [late]
    is_answered.set()
    late.join(20.0)
    assert tier.versions() == ()


def test_a_large_content_may_take_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as its bytes do from a slow disk, once it is known how many there are."""
    (tmp_path / "1-0").mkdir()
    (tmp_path / "1-0" / "large").write_bytes(bytes(100))
    monkeypatch.setattr("planaria.checkpoint.disk.time_limits._READ_BYTES_PER_S_MIN", 5.0)
    may_answer, read = threading.Event(), Directory.read

    def late(storage: Directory, name: str) -> bytes:
        assert may_answer.wait(20.0)
        return read(storage, name)

    monkeypatch.setattr(Directory, "read", late)
    unlisted, listed = (
        with_time_limit(tier_of(str(tmp_path)), timeout_s=20.0).storage for _ in range(2)
    )
    listed.entries("1-0")
    for storage in (unlisted, listed):  # Listing them may take longer.
        monkeypatch.setattr(storage, "_timeout_s", 0.05)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(listed.read, "1-0/large")
        with pytest.raises(UnreadableError):
            unlisted.read("1-0/large")
        may_answer.set()

        assert waiting.result() == bytes(100)


def test_what_a_storage_refuses_is_refused(tmp_path: Path) -> None:
    """By the same error as without any patience."""
    tier: Tier = with_time_limit(tier_of(str(tmp_path)), timeout_s=20.0)

    with pytest.raises(CheckpointError, match="cannot read"):
        tier.storage.read("1-0/manifest.json")


def test_a_request_for_which_the_machine_has_no_thread_is_no_mistake_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A RuntimeError in a worker is blamed on the user's code; a node that is short of something
    counts against the node."""
    tier = with_time_limit(tier_of(str(tmp_path)), timeout_s=20.0)
    monkeypatch.setattr(threading.Thread, "start", NO_THREAD)

    with pytest.raises(MemoryError, match=f"{tmp_path}: can't start new thread"):
        tier.versions()


def test_a_job_that_is_done_ends_well_where_its_files_cannot_be_removed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For want of a thread, or because the disk refuses."""

    @contextmanager
    def refusing() -> Iterator[str]:
        yield "there"
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    there = nullcontext("there")
    with (
        monkeypatch.context() as patched,
        context_with_time_limit(there, where="a disk", timeout_s=20.0),
    ):
        patched.setattr(threading.Thread, "start", NO_THREAD)
    with context_with_time_limit(refusing(), where="a disk", timeout_s=20.0):
        pass

    reasons = ("a disk: can't start new thread", "[Errno 5] Input/output error")
    behind = "files of the ended job may stay there"
    assert caplog.messages == [f"{reason}, so {behind}" for reason in reasons]
