"""Where a job can be asked: a directory of the user's alone, or none, and never the job's end."""

import asyncio
import os
import select
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from planaria.errors import ConfigError
from planaria.nodes.head import request_socket
from planaria.nodes.head.request_socket import ask, serve_requests
from planaria.nodes.head.requests import Request, RequestReply, TellEvents
from planaria.torchrun.arguments import runtime_directory

SOMEBODY = 12345


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """XDG_RUNTIME_DIR; all directories for desks lie in the test's own."""
    path = tmp_path / "runtime"
    path.mkdir(mode=0o700)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(path))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "more" / "state"))
    everywhere = request_socket.socket_directories

    def inside() -> tuple[Path, ...]:
        return tuple(path for path in everywhere() if tmp_path in path.parents)

    monkeypatch.setattr(request_socket, "socket_directories", inside)
    return path


def job_answer(job: str = "job", *, by: str = "", prepare: Callable[[], object] = bool) -> str:
    """What a job of this name answers, or the note that nobody can ask it.

    Args:
        by: the name that is asked for.
        prepare: runs between the socket's opening and the question.
    """
    notes: list[str] = []

    async def answer(_: Request) -> RequestReply:
        return RequestReply(is_done=True, text=f"heard by {job!a}")

    async def run() -> str:
        async with serve_requests(job, answer, note=notes.append):
            prepare()
            if notes:
                return notes[0]
            return (await asyncio.to_thread(ask, TellEvents(), job=by, timeout_s=10.0)).text

    return asyncio.run(run())


def sockets(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*.sock"))


def test_a_job_is_asked_in_the_runtime_directory(runtime: Path) -> None:
    """And nothing of it is left there but the directory, which is the user's alone."""
    found: list[Path] = []

    assert job_answer(prepare=lambda: found.extend(sockets(runtime))) == "heard by 'job'"
    assert [path.parent for path in found] == [runtime / "planaria"]
    assert stat.S_IMODE(found[0].parent.stat().st_mode) == 0o700
    assert not sockets(runtime)


def missing(runtime: Path) -> None:
    runtime.rmdir()


def closed(runtime: Path) -> None:
    """Root enters any directory, so it is no directory at all."""
    (runtime / "planaria").touch()


def group_writable(runtime: Path) -> None:
    (runtime / "planaria").mkdir()
    (runtime / "planaria").chmod(0o770)


def a_link(runtime: Path) -> None:
    (runtime / "elsewhere").mkdir(mode=0o700)
    (runtime / "planaria").symlink_to("elsewhere")


def somebody_elses(runtime: Path) -> None:
    if os.getuid():
        pytest.skip("only root can give a directory away")
    (runtime / "planaria").mkdir(mode=0o755)
    os.chown(runtime / "planaria", SOMEBODY, SOMEBODY)


UNFIT = [missing, closed, group_writable, a_link, somebody_elses]


@pytest.mark.parametrize("spoil", UNFIT)
def test_a_job_is_asked_elsewhere_where_a_directory_will_not_do(
    spoil: Callable[[Path], None], runtime: Path
) -> None:
    """It ended the job. Nothing is put into a directory of others, and its mode stays."""
    spoil(runtime)
    before = [path.lstat().st_mode for path in runtime.rglob("*")]
    found: list[Path] = []

    assert job_answer(prepare=lambda: found.extend(sockets(runtime.parent))) == "heard by 'job'"
    assert [path.parent.parent.name for path in found] == ["tmp"]
    assert [path.lstat().st_mode for path in runtime.rglob("*")] == before


def test_the_last_resort_is_the_users_state_directory(
    runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made with all that is missing above it."""
    runtime.rmdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "none"))
    found: list[Path] = []

    assert job_answer(prepare=lambda: found.extend(sockets(tmp_path / "more"))) == "heard by 'job'"
    assert [path.parent.parent.name for path in found] == ["planaria"]


def test_a_job_without_a_directory_goes_on_and_says_what_would_help(
    runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each directory is named with what is wrong."""
    runtime.rmdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "none"))
    (tmp_path / "more").touch()

    told = job_answer()

    assert "planaria status, drain and events cannot reach this job, which trains on" in told
    assert f"{runtime}/planaria: No such file or directory" in told
    assert "Not a directory" in told
    assert "set XDG_RUNTIME_DIR to" in told


def test_a_directory_of_the_users_that_others_may_read_is_closed_to_them(runtime: Path) -> None:
    """As MemoryCheckpointer made it once."""
    directory = runtime / "planaria"
    directory.mkdir()
    directory.chmod(0o755)

    assert job_answer() == "heard by 'job'"
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_the_checkpointers_directory_is_the_users_alone(runtime: Path) -> None:
    """Both put theirs into the same one."""
    assert runtime_directory() == runtime / "planaria"
    assert stat.S_IMODE((runtime / "planaria").stat().st_mode) == 0o700


@pytest.mark.parametrize("spoil", [group_writable, somebody_elses])
def test_a_desk_that_others_may_have_put_there_is_not_asked(
    spoil: Callable[[Path], None], runtime: Path
) -> None:
    """It listens, but whoever it is may be anybody; the directory is named."""
    spoil(runtime)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(runtime / "planaria" / "job-7.sock"))
        listening.listen()
        with pytest.raises(ConfigError, match=f"runs here; {runtime}/planaria cannot be read"):
            ask(TellEvents(), job="", timeout_s=1.0)


def test_paths_of_any_length_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of a socket has at most 107 bytes."""
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))

    assert job_answer() == "heard by 'job'"


@pytest.mark.parametrize("job", ["\u7814\u7a76" * 20, "a" * 200, "a/b \0\udcff", "", "."])
def test_names_of_any_length_and_letters_will_do(job: str) -> None:
    """Forty letters of Chinese are 120 bytes."""
    assert job_answer(job, by=job) == f"heard by {job!a}"


def test_long_names_that_begin_alike_are_told_apart() -> None:
    """Their end is cut off."""
    with pytest.raises(ConfigError, match="no such job of yours runs"):
        job_answer("a" * 199 + "b", by="a" * 199 + "c")


def test_of_killed_launchers_nothing_is_left_and_a_busy_one_keeps_its_socket(
    runtime: Path,
) -> None:
    """A launcher that is stopped does not take anybody in once a few wait."""
    directory = runtime / "planaria"
    directory.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as busy, socket.socket(socket.AF_UNIX) as waiting:
        busy.bind(str(directory / "busy-7.sock"))
        busy.listen(0)
        waiting.connect(str(directory / "busy-7.sock"))
        with socket.socket(socket.AF_UNIX) as killed:
            killed.bind(str(directory / "killed-8.sock"))

        assert job_answer() == "heard by 'job'"
        assert sockets(directory) == [directory / "busy-7.sock"]


def test_a_launcher_removes_what_killed_ones_have_left(runtime: Path) -> None:
    """Nobody may ever ask; a directory had the sockets of all that were killed since the machine
    started. Its own is there only once it listens."""
    directory = runtime / "planaria"
    directory.mkdir(mode=0o700)
    for pid in range(3):
        with socket.socket(socket.AF_UNIX) as killed:
            killed.bind(str(directory / f"killed-{pid}.sock"))
    found: list[list[str]] = []

    job_answer(by=f"job-{os.getpid()}", prepare=lambda: found.append(os.listdir(directory)))

    assert found == [[f"job-{os.getpid()}.sock"]]
    assert os.listdir(directory) == []


def test_a_launcher_keeps_the_sockets_of_another_machine(
    runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machines may share a temporary directory, and those that listen elsewhere look dead here."""
    runtime.rmdir()
    found: list[Path] = []

    def leave_socket() -> None:
        found.extend(sockets(tmp_path / "tmp"))
        found[0].rename(found[0].with_name("other-7.sock"))

    monkeypatch.setattr(socket, "gethostname", lambda: "machine-1")
    job_answer(prepare=leave_socket)
    monkeypatch.setattr(socket, "gethostname", lambda: "machine-2")
    job_answer()

    assert [path.name for path in sockets(tmp_path / "tmp")] == ["other-7.sock"]


def test_jobs_of_one_name_are_told_apart_by_their_processes(runtime: Path) -> None:
    """Nobody could ask either of them."""
    directory = runtime / "planaria"
    own = f"small-{os.getpid()}"

    def add_others() -> None:
        for name in ("paced-1", "small-1"):
            other = socket.socket(socket.AF_UNIX)
            others.append(other)
            other.bind(str(directory / f"{name}.sock"))
            other.listen()

    others: list[socket.socket] = []
    for by, told in (("", f"paced, small-1, {own}"), ("small", f"small-1, {own}")):
        with pytest.raises(ConfigError, match=f"say with --job which of {told}"):
            job_answer("small", by=by, prepare=add_others)
        for path in directory.glob("*-1.sock"):
            path.unlink()

    assert job_answer("small", by=own, prepare=add_others) == "heard by 'small'"
    for other in others:
        other.close()


def asked_of(act: Callable[[socket.socket], None], runtime: Path) -> str:
    """The answer of a job that acts on its listener once somebody has found that it is served."""
    (runtime / "planaria").mkdir(mode=0o700)

    def serve() -> None:
        listener.accept()[0].close()
        select.select([listener], [], [], 60.0)
        act(listener)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(runtime / "planaria" / "job-1.sock"))
        listener.listen()
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            return ask(TellEvents(), job="job", timeout_s=60.0).text
        finally:
            thread.join()


def reply_with(data: bytes) -> Callable[[socket.socket], None]:
    """Reads the request and answers with these bytes."""

    def act(listener: socket.socket) -> None:
        with listener.accept()[0] as connection:
            connection.makefile("rb").readline()
            connection.sendall(data)

    return act


@pytest.mark.parametrize("act", [socket.socket.close, reply_with(b""), reply_with(b'{"text": "h')])
def test_a_job_that_ends_while_it_is_asked_has_ended(
    act: Callable[[socket.socket], None], runtime: Path
) -> None:
    """It was a traceback if the question was on its way, or half of the answer."""
    assert asked_of(act, runtime) == "the job has ended"


def test_a_job_that_is_gone_when_it_is_asked_has_ended(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look whether it is served and the question."""
    (runtime / "planaria").mkdir(mode=0o700)
    (runtime / "planaria" / "job-1.sock").touch()
    monkeypatch.setattr(request_socket, "_is_served", lambda *_: True)

    assert ask(TellEvents(), job="job", timeout_s=60.0).text == "the job has ended"


def test_an_answer_of_another_version_is_no_traceback(runtime: Path) -> None:
    """Over the network it was none."""
    with pytest.raises(ConfigError, match="the job has another version of planaria"):
        asked_of(reply_with(b'{"words": 1}\n'), runtime)
