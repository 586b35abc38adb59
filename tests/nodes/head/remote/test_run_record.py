"""The records of a run: the numbers of its nodes, on disks that are full or have lost power."""

import errno
import os
import threading
from pathlib import Path

import msgspec
import pytest

from helpers.command import wait_for
from helpers.left_runs import leave_run, left_job
from planaria.errors import ConfigError
from planaria.nodes.head.remote import run_record
from planaria.nodes.head.remote.run_record import (
    RUN_FILE,
    JournalHold,
    NodeLog,
    has_nodes,
    read_run,
    started_nodes,
    write_run,
)


def log_of(directory: Path, *nodes: int) -> NodeLog:
    log = NodeLog(directory)
    for node in nodes:
        log.add(node)
    return log


def test_no_number_is_given_twice(tmp_path: Path) -> None:
    assert not has_nodes(tmp_path)
    log_of(tmp_path, 0, 1, 5).close()

    assert NodeLog(tmp_path).next_node == 6
    assert has_nodes(tmp_path)


@pytest.mark.parametrize("torn", [b"\x00\x00", b"1", b"\xff3 x"])
def test_a_file_that_a_power_loss_has_torn_is_read_as_far_as_it_goes(
    torn: bytes, tmp_path: Path
) -> None:
    """It raised, and the run could not be taken up."""
    log_of(tmp_path, 0, 1).close()
    with (tmp_path / "journal.nodes").open("ab") as file:
        file.write(torn)

    log = NodeLog(tmp_path)
    assert log.next_node == 2
    log.add(7)
    log.close()
    assert NodeLog(tmp_path).next_node == 8


def test_a_head_writes_no_record_over_that_of_another_one(tmp_path: Path) -> None:
    """It stood still while it waited for machines; the other one took the directory meanwhile."""
    job = left_job(tmp_path / "saves")
    leave_run(tmp_path, job)
    record = read_run(tmp_path)
    assert record is not None
    late = msgspec.structs.replace(record, run="late")
    JournalHold(tmp_path, "another").take()

    with pytest.raises(ConfigError, match="another head of this job has taken that directory"):
        write_run(tmp_path, late, holder="late")
    assert read_run(tmp_path) == record
    write_run(tmp_path, late, holder="another")
    assert read_run(tmp_path) == late


@pytest.mark.parametrize("content", [b"", b'{"run":"\xff"}', b'{"x":' + b"[" * 100_000])
def test_a_damaged_record_of_a_run_is_named(content: bytes, tmp_path: Path) -> None:
    """With what would do; some damage was a traceback."""
    (tmp_path / RUN_FILE).write_bytes(content)

    with pytest.raises(ConfigError, match=r"cannot be read .* remove it to begin anew"):
        read_run(tmp_path)


def test_a_full_disk_ends_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It only costs that numbers are given twice if the head is lost."""

    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    log = log_of(tmp_path, 0)
    with monkeypatch.context() as full:
        full.setattr(os, "write", refuse)
        log.add(1)

    assert log.next_node == 2
    assert "No space left on device" in caplog.text


def test_a_disk_that_hangs_holds_up_no_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its event loop stood still for as long, so that it heard no node."""
    hanging, real_write = threading.Event(), os.write

    def write(fd: int, data: bytes) -> int:
        assert hanging.wait(60.0)
        return real_write(fd, data)

    log = log_of(tmp_path, 0)
    monkeypatch.setattr(run_record, "_WRITE_TIMEOUT_S", 0.01)
    monkeypatch.setattr(os, "write", write)
    log.add(1)
    log.add(2)
    assert log.next_node == 3
    assert "number of node 2 again" in caplog.text
    hanging.set()
    wait_for(lambda: started_nodes(tmp_path) == (0, 1, 2), what="the numbers")
    log.close()


def test_the_numbers_go_with_a_journal_that_moves(tmp_path: Path) -> None:
    """The next head would find a journal without them, and take none of its nodes up."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    log = log_of(first, 0, 1)
    log.move(second)
    log.add(2)
    log.touch()
    log.close()

    assert (second / "journal.nodes").read_bytes() == b"0\n1\n2\n"
    assert (first / "journal.nodes").read_bytes() == b"0\n1\n"
