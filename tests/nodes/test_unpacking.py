"""The user's modules on a machine that joins: where they are written, and what is refused."""

import fcntl
import os
import signal
import socket
import tempfile
from hashlib import sha256
from pathlib import Path

import pytest

from planaria.core.machine_messages import SOURCES_BYTES_MAX, SourceFile
from planaria.nodes.machine_files import modules_directory, unpack_sources


def source(path: str, data: bytes = b"x = 1\n") -> SourceFile:
    return SourceFile(path=path, data=data, sha256=sha256(data).hexdigest())


def test_modules_are_written_as_they_were(tmp_path: Path) -> None:
    """Packages keep their directories."""
    sources = (source("models.py"), source("pack/inner/layers.py", b"y = 2\n"))

    assert unpack_sources(sources, tmp_path, has_code=False) == ""
    assert (tmp_path / "models.py").read_bytes() == b"x = 1\n"
    assert (tmp_path / "pack" / "inner" / "layers.py").read_bytes() == b"y = 2\n"


@pytest.mark.parametrize("path", ["../x.py", "/x.py", "a/../../x.py", "a\0.py"])
@pytest.mark.parametrize("has_code", [False, True])
def test_a_path_that_leaves_the_directory_is_refused(
    path: str, has_code: bool, tmp_path: Path
) -> None:
    """A head may run code anyway, but not by a mistake in a name."""
    reason = unpack_sources((source(path),), tmp_path / "modules", has_code=has_code)

    assert "the head sent a module with the path" in reason
    assert list(tmp_path.iterdir()) == []


def test_modules_that_are_too_large_are_refused_before_any_is_written(tmp_path: Path) -> None:
    """The head has the same bound, but may be another program."""
    half = bytes(SOURCES_BYTES_MAX // 2)
    sources = (source("a.py", half), source("b.py", half), source("c.py"))

    assert "more than 16 MiB" in unpack_sources(sources, tmp_path, has_code=False)
    assert list(tmp_path.iterdir()) == []


def test_without_code_the_same_files_must_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written; what is missing or differs is named."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "same.py").write_bytes(b"x = 1\n")
    (tmp_path / "other.py").write_bytes(b"x = 2\n")

    assert unpack_sources((source("same.py"),), tmp_path / "no", has_code=True) == ""
    other = unpack_sources((source("other.py"),), tmp_path / "no", has_code=True)
    missing = unpack_sources((source("missing.py"),), tmp_path / "no", has_code=True)
    assert "other.py differs from the head's other.py" in other
    assert "there is no missing.py" in missing


def test_the_modules_of_a_killed_agent_are_removed_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of an agent that lives stay, and so do those that it is about to lock."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    read_fd, write_fd = os.pipe()
    killed = os.fork()
    if killed == 0:
        with modules_directory() as directory:
            (directory / "models.py").touch()
            os.write(write_fd, b"!")
            signal.pause()
        os._exit(1)
    assert os.read(read_fd, 1) == b"!"
    os.close(read_fd)
    os.close(write_fd)
    (left,) = tmp_path.iterdir()
    with modules_directory() as living:
        os.kill(killed, signal.SIGKILL)
        os.waitpid(killed, 0)
        with modules_directory():
            assert left.exists()  # It is young.
        for directory in (left, living):
            os.utime(directory, (0, 0))
        with modules_directory() as next_one:
            assert set(tmp_path.iterdir()) == {living, next_one}

    assert not list(tmp_path.iterdir())


def test_the_modules_of_another_machine_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machines may share a temporary directory whose locks each of them has for itself."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    monkeypatch.setattr(socket, "gethostname", lambda: "machine-1")
    with modules_directory() as living:
        os.utime(living, (0, 0))
        monkeypatch.setattr(socket, "gethostname", lambda: "machine-11")
        with modules_directory():
            assert living.exists()
