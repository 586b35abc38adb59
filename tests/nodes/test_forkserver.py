"""The fork server: what it forks, what it tells of it, and that it never stays behind."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from helpers.command import is_alive, wait_for
from planaria.errors import InsufficientError
from planaria.nodes.forkserver import UNKNOWN, ForkServer
from planaria.nodes.head.process_events import LEAVE_SIGNALS

# The server finds the functions that its children run through its path.
PATH = [str(Path(__file__).parents[1])]
FORKED = "helpers.forked_functions"


@pytest.fixture
def small() -> Iterator[ForkServer]:
    """A server that imports nothing but this module."""
    running = ForkServer([FORKED], path=PATH)
    yield running
    running.close()


def test_a_call_returns_what_its_child_writes_however_long(small: ForkServer) -> None:
    """A payload larger than any socket buffer travels, too."""
    payload = bytes(range(256)) * 20_000

    assert small.call(f"{FORKED}:echo", payload) == payload[::-1]


@pytest.mark.parametrize(
    ("target", "how"), [("say_nothing", "ended with status 7"), ("die", "was killed by signal 9")]
)
def test_a_child_without_a_result_is_told_with_its_end(
    target: str, how: str, small: ForkServer
) -> None:
    """As where memory runs out, and the server goes on."""
    with pytest.raises(InsufficientError, match=f"{FORKED}:{target} {how}"):
        small.call(f"{FORKED}:{target}", b"")

    assert small.call(f"{FORKED}:echo", b"ab") == b"ba"


def test_a_child_never_collects_what_was_imported(small: ForkServer) -> None:
    """It would copy the pages that all share, and stand still for 0.1 s."""
    assert int(small.call(f"{FORKED}:count_frozen", b"")) > 1000


def test_garbage_is_collected_in_children_but_not_while_modules_are_imported(
    small: ForkServer,
) -> None:
    """Collections would be a sixth of the seconds that imports of torch and transformers take."""
    assert small.call(f"{FORKED}:tell_collections", b"") == b"imported: False, forked: True"


def test_the_users_module_may_ask_for_a_gpu_when_it_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch asks CUDA otherwise, and then finds no GPU in forked processes, without a word."""
    name = "PYTORCH_NVML_BASED_CUDA_CHECK"
    for given, seen in ((None, b"1"), ("0", b"0")):
        with monkeypatch.context() as patch:
            patch.delenv(name, raising=False)
            if given is not None:
                patch.setenv(name, given)
            server = ForkServer([FORKED], path=PATH)
        try:
            assert server.call(f"{FORKED}:tell_variable", name.encode()) == seen
        finally:
            server.close()


def test_what_tells_a_job_to_leave_ends_neither_a_server_nor_what_it_forks(
    small: ForkServer, tmp_path: Path
) -> None:
    """A scheduler sends it to all processes of a job, and the launcher alone answers."""
    pid = small.spawn(f"{FORKED}:wait_for_end", bytes(tmp_path / "pid"))
    wait_for((tmp_path / "pid").exists, what="the child runs")

    for number in (signal.SIGINT, *LEAVE_SIGNALS):
        os.kill(pid, number)
        os.kill(small.pid, number)

    assert small.call(f"{FORKED}:echo", b"ab") == b"ba"
    assert small.exits() == []
    os.kill(pid, signal.SIGKILL)


def test_a_signal_has_a_server_and_what_it_forks_print_where_they_are(tmp_path: Path) -> None:
    """For a job that hangs: each process prints the stacks of its threads, and goes on."""
    lines: list[str] = []
    server = ForkServer([FORKED], path=PATH, output=lines.append)
    try:
        pid = server.spawn(f"{FORKED}:wait_for_end", bytes(tmp_path / "pid"))
        wait_for((tmp_path / "pid").exists, what="the child runs")
        os.kill(pid, signal.SIGRTMIN)
        wait_for(lambda: any("in wait_for_end" in line for line in lines), what="its stack")
        os.kill(server.pid, signal.SIGRTMIN)
        wait_for(lambda: any("in serve" in line for line in lines[1:]), what="the server's")

        assert server.call(f"{FORKED}:echo", b"ab") == b"ba"
        assert server.exits() == []
        os.kill(pid, signal.SIGKILL)
    finally:
        server.close()


def test_a_process_that_the_users_code_starts_can_be_told_to_leave(small: ForkServer) -> None:
    """Who ignores a signal hands that on: `multiprocessing` would wait for its own for ever."""
    assert small.call(f"{FORKED}:end_another", b"") == str(-signal.SIGTERM).encode()


def test_a_call_does_not_wait_for_a_process_that_its_child_leaves_behind(
    small: ForkServer,
) -> None:
    """As a pool of the user's data set: it held the pipe to the caller open, which read on."""
    start_s = time.monotonic()

    pid = int(small.call(f"{FORKED}:leave_another", b""))

    assert time.monotonic() - start_s < 15.0  # The process lives for 20 s, and is killed.
    wait_for(lambda: not is_alive(pid), what="it is killed")


def test_a_call_that_is_interrupted_leaves_no_process_behind(
    small: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C comes while the job is examined: what the user's code had forked lived on."""

    def interrupted(*_: object) -> int:
        wait_for((tmp_path / "pid").exists, what="a process of the child runs")
        raise KeyboardInterrupt

    monkeypatch.setattr(ForkServer, "_wait_exit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        small.call(f"{FORKED}:leave_another_and_wait", bytes(tmp_path / "pid"))

    pid = int((tmp_path / "pid").read_text())
    wait_for(lambda: not is_alive(pid), what="it is killed")


def test_exits_tell_pid_and_status_once(small: ForkServer, tmp_path: Path) -> None:
    """An agent that ends before it has connected is known from here alone."""
    pid = small.spawn(f"{FORKED}:wait_for_end", bytes(tmp_path / "pid"))
    wait_for((tmp_path / "pid").exists, what="the child runs")
    os.kill(pid, signal.SIGKILL)
    exits: list[tuple[int, int]] = []

    def is_told() -> bool:
        exits.extend(small.exits())
        return bool(exits)

    wait_for(is_told, what="its exit is told")
    assert exits == [(pid, -signal.SIGKILL)]
    assert small.exits() == []


def test_a_child_that_nobody_waited_for_to_the_end_is_ended(
    small: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C comes when the server has forked it and nobody has heard of it yet: it has run nothing
    then, and leaves."""
    first, second = tmp_path / "first", tmp_path / "second"
    children: list[psutil.Process] = []

    def interrupted(server: ForkServer, **_: object) -> dict[str, int]:
        def is_forked() -> bool:
            children[:] = psutil.Process(server.pid).children()
            return bool(children)

        wait_for(is_forked, what="the child is there")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ForkServer, "_wait_reply", interrupted)
        with pytest.raises(KeyboardInterrupt):
            small.spawn(f"{FORKED}:wait_for_end", bytes(first))
    pid = small.spawn(f"{FORKED}:wait_for_end", bytes(second))

    wait_for(lambda: not children[0].is_running(), what="it has left")
    assert not first.exists()
    assert small.exits() == []
    wait_for(second.exists, what="the other child runs")
    assert pid == int(second.read_text())
    os.kill(pid, signal.SIGKILL)


def test_a_missing_module_is_skipped_and_a_broken_one_ends_the_server(tmp_path: Path) -> None:
    """The first fails where it is used, with a better message; the second would fail everywhere."""
    (tmp_path / "broken.py").write_text("import there_is_no_such_module")
    fine = ForkServer(["there_is_no_such_module"])
    broken = ForkServer(["broken"], path=[str(tmp_path)], output=lambda _: None)

    fine.wait_ready()
    with pytest.raises(InsufficientError, match="the fork server ended with status 1"):
        broken.wait_ready()
    fine.close()
    broken.close()


ASK: dict[str, Callable[[ForkServer], object]] = {
    "spawn": lambda server: server.spawn(f"{FORKED}:wait_for_end", b""),
    "call": lambda server: server.call(f"{FORKED}:echo", b""),
}


@pytest.mark.parametrize("question", ASK)
def test_a_killed_server_is_told_by_whatever_is_asked_of_it_next(question: str) -> None:
    """Nobody waits for an answer that cannot come."""
    server = ForkServer([])
    server.wait_ready()
    os.kill(server.pid, signal.SIGKILL)
    process = psutil.Process(server.pid)
    wait_for(lambda: process.status() == psutil.STATUS_ZOMBIE, what="it is dead")

    with pytest.raises(InsufficientError, match="the fork server was killed by signal 9"):
        ASK[question](server)

    server.close()


def test_a_server_that_was_killed_can_be_renewed_and_still_tells_of_its_children(
    tmp_path: Path,
) -> None:
    """They live on; nobody is there to wait for them, so it is not known how they end."""
    server = ForkServer([FORKED], path=PATH)
    pids = []
    for name in ("first", "second"):
        pids.append(server.spawn(f"{FORKED}:wait_for_end", bytes(tmp_path / name)))
        wait_for((tmp_path / name).exists, what="the child runs")
    told: list[tuple[int, int]] = []

    def is_told(number: int) -> bool:
        told.extend(server.exits())
        return len(told) == number

    os.kill(server.pid, signal.SIGKILL)
    wait_for(lambda: is_told(0) and bool(server.loss), what="its loss is seen")
    os.kill(pids[0], signal.SIGKILL)
    wait_for(lambda: is_told(1), what="the end of a child is told without a server")
    server.renew()
    assert server.call(f"{FORKED}:echo", b"ab") == b"ba"
    assert server.is_ready
    os.kill(pids[1], signal.SIGKILL)
    wait_for(lambda: is_told(2), what="the end of a child is told by the next server")
    pids.append(server.spawn(f"{FORKED}:die", b"", (0,)))
    wait_for(lambda: is_told(3), what="the end of its own child is told")
    server.close()

    assert told == [(pids[0], UNKNOWN), (pids[1], UNKNOWN), (pids[2], -signal.SIGKILL)]


def test_a_child_for_which_no_descriptor_is_left_runs_nothing(
    small: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel drops the descriptor of an answer then: nobody could tell when the child ends."""
    real_recv_fds = socket.recv_fds

    def recv_without_fds(*args: int) -> tuple[bytes, list[int], int, object]:
        data, fds, flags, address = real_recv_fds(*args)  # type: ignore[arg-type]
        for descriptor in fds:
            os.close(descriptor)
        return data, [], flags, address

    small.wait_ready()
    with monkeypatch.context() as patch:
        patch.setattr(socket, "recv_fds", recv_without_fds)
        with pytest.raises(OSError, match="Too many open files"):
            small.spawn(f"{FORKED}:wait_for_end", bytes(tmp_path / "pid"))

    wait_for(lambda: not psutil.Process(small.pid).children(), what="the child has left")
    assert not (tmp_path / "pid").exists()
    assert small.call(f"{FORKED}:echo", b"ab") == b"ba"
    assert small.exits() == []


SCARCE = """
import errno, os
real_fork = os.fork
def fork():
    os.fork = real_fork
    raise BlockingIOError(errno.EAGAIN, "no process")
os.fork = fork
"""


def test_a_server_that_cannot_fork_now_says_so_and_lives(tmp_path: Path) -> None:
    """A machine without processes or memory for one more has them again a moment later."""
    (tmp_path / "scarce.py").write_text(SCARCE)
    server = ForkServer(["scarce", FORKED], path=[str(tmp_path), *PATH])

    with pytest.raises(OSError, match=os.strerror(errno.EAGAIN)):
        server.spawn(f"{FORKED}:die", b"")

    assert server.call(f"{FORKED}:echo", b"ab") == b"ba"
    server.close()


def refuse(error: Exception) -> Callable[..., object]:
    def refused(*_: object, **__: object) -> object:
        raise error

    return refused


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("subprocess.Popen.__init__", OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))),
        ("threading.Thread.start", RuntimeError("can't start new thread")),
        ("socket.socketpair", OSError(errno.EMFILE, os.strerror(errno.EMFILE))),
    ],
)
def test_a_server_that_cannot_be_renewed_leaks_nothing_and_can_be_later(
    place: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where memory is short it is tried again and again."""
    server = ForkServer([FORKED], path=PATH)
    server.wait_ready()
    server.kill()
    before = len(os.listdir("/proc/self/fd"))

    with monkeypatch.context() as patch:
        patch.setattr(place, refuse(error))
        with pytest.raises(InsufficientError, match="no other one can be started"):
            server.renew()

    assert server.loss == "the fork server stood still and was killed"
    wait_for(lambda: len(os.listdir("/proc/self/fd")) <= before, what="all is closed again")
    server.renew()
    assert server.call(f"{FORKED}:echo", b"ab") == b"ba"
    server.close()


def test_who_asks_a_server_that_stands_still_waits_for_nothing(
    small: ForkServer, tmp_path: Path
) -> None:
    """It is killed when that took too long, and its request is lost with it."""
    small.wait_ready()
    os.kill(small.pid, signal.SIGSTOP)

    number = small.ask(f"{FORKED}:wait_for_end", bytes(tmp_path / "pid"))
    assert small.answer(number) is None
    small.kill()

    with pytest.raises(InsufficientError, match="the fork server stood still and was killed"):
        small.answer(number)
    small.renew()
    with pytest.raises(InsufficientError, match="the fork server that was asked is gone"):
        small.answer(number)
    assert small.call(f"{FORKED}:echo", b"ab") == b"ba"
    assert not (tmp_path / "pid").exists()


def test_a_child_whose_answer_is_forgotten_runs_nothing(small: ForkServer, tmp_path: Path) -> None:
    """A launcher that ends meanwhile does not know of it."""
    small.wait_ready()
    number = small.ask(f"{FORKED}:wait_for_end", bytes(tmp_path / "pid"))
    wait_for(lambda: bool(psutil.Process(small.pid).children()), what="it is forked")
    assert small.exits() == []

    small.forget(number)

    wait_for(lambda: not psutil.Process(small.pid).children(), what="it has left")
    assert small.exits() == []
    assert not (tmp_path / "pid").exists()


def test_nothing_is_written_to_a_temporary_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be full, or gone, while a job trains."""
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", list)
    monkeypatch.setattr(tempfile, "tempdir", None)
    server = ForkServer([FORKED], path=PATH)

    assert server.call(f"{FORKED}:echo", b"ab") == b"ba"
    server.close()


def test_closing_does_not_wait_for_an_import(tmp_path: Path) -> None:
    """Ctrl-C while torch is imported takes no seconds."""
    (tmp_path / "endless.py").write_text("import signal\nwhile True: signal.pause()")
    server = ForkServer(["endless"], path=[str(tmp_path)])
    process = psutil.Process(server.pid)

    server.close()

    assert not process.is_running()


def test_a_server_that_no_signal_ends_is_left_behind_and_all_else_is_closed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It reads from a disk that is gone; the job's end and its report were lost with it."""
    before = len(os.listdir("/proc/self/fd"))
    server = ForkServer([FORKED], path=PATH)
    server.wait_ready()

    with monkeypatch.context() as patch:
        patch.setattr(server._process, "wait", refuse(subprocess.TimeoutExpired("", 10.0)))
        server.close()

    assert "the fork server is still there after it was killed" in caplog.text
    wait_for(lambda: len(os.listdir("/proc/self/fd")) <= before, what="all is closed")
    server._process.wait(timeout=10)


def test_output_comes_line_by_line_where_it_is_asked_for() -> None:
    """So that a live display is not written over."""
    lines: list[str] = []
    server = ForkServer([FORKED], path=PATH, output=lines.append)

    assert server.call(f"{FORKED}:talk", b"") == b"done"
    server.close()

    assert sorted(lines) == ["first line", "second line", "third line"]


def test_what_a_process_has_printed_is_not_lost_when_it_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor late: a line comes when it is printed, as it does in a terminal."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    lines: list[str] = []
    server = ForkServer([FORKED], path=PATH, output=lines.append)

    with pytest.raises(InsufficientError, match="was killed by signal 9"):
        server.call(f"{FORKED}:talk_and_die", b"")
    server.close()

    assert lines == ["its last line"]


STARTER = """
import os, signal, sys
from planaria.nodes.forkserver import ForkServer
server = ForkServer(["endless"], path=[sys.argv[1]])
print(server.pid, flush=True)
signal.pause()
"""


def test_the_server_ends_with_who_started_it_even_while_it_imports(tmp_path: Path) -> None:
    """A handler in Python, or a look at the socket, would come after the import."""
    (tmp_path / "endless.py").write_text("while True: pass")
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, str(tmp_path)], stdout=subprocess.PIPE
    )
    assert starter.stdout is not None
    server = psutil.Process(int(starter.stdout.readline()))

    starter.kill()
    starter.wait(timeout=10)

    wait_for(
        lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE,
        what="the server has left",
    )
    starter.stdout.close()


def test_the_server_outlives_the_thread_that_started_it() -> None:
    """The kernel's death signal of a parent is that of a thread, which would end it too soon."""
    servers: list[ForkServer] = []
    thread = threading.Thread(target=lambda: servers.append(ForkServer([FORKED], path=PATH)))
    thread.start()
    thread.join()

    assert json.loads(servers[0].call(f"{FORKED}:echo", b"21")) == 12
    servers[0].close()


def test_a_module_that_starts_a_thread_is_named(tmp_path: Path) -> None:
    """A fork may hang because of it, so whoever reads the warning must know what to leave out."""
    (tmp_path / "starts_threads.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"
    )
    lines: list[str] = []
    server = ForkServer(["json", "starts_threads"], path=[str(tmp_path)], output=lines.append)
    try:
        wait_for(lambda: any("starts_threads started" in line for line in lines), what="warning")
    finally:
        server.close()
    assert not any("json started" in line for line in lines)
