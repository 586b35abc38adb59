"""Sources of preemption notices, against files and HTTP servers of the test's own."""

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from helpers.command import is_alive, wait_for
from helpers.metadata_server import Metadata, in_seconds, metadata_server
from planaria.errors import ConfigError
from planaria.nodes import notices
from planaria.nodes.notices import (
    check_notice_source,
    fork_watcher,
    parse_notice_source,
    wait_notice,
)

SLACK_S = 60.0  # A bound for what a busy machine takes between two lines of a test.


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Metadata]:
    with metadata_server(monkeypatch) as metadata:
        yield metadata


def read_gcp(server: Metadata) -> float | None:
    return parse_notice_source("gcp", metadata_url=server.url).read()


# -- files ----------------------------------------------------------------------------------------


def test_a_file_is_a_notice_once_it_is_there(tmp_path: Path) -> None:
    """An empty one says no time, so the job's own setting counts."""
    path = tmp_path / "leave"
    source = parse_notice_source(str(path), default_s=17.0)

    assert source.read() is None
    path.touch()
    assert source.read() == 17.0


@pytest.mark.parametrize("text", ["45", " 45.0\n", "4.5e1"])
def test_a_file_may_say_how_many_seconds_are_left(text: str, tmp_path: Path) -> None:
    """A newline at its end is no mistake."""
    path = tmp_path / "leave"
    path.write_text(text)

    assert parse_notice_source(str(path)).read() == 45.0


def test_a_deadline_is_compared_with_the_clock_of_the_machine(tmp_path: Path) -> None:
    """In any time zone; a deadline that has passed leaves no time, not a negative one."""
    path = tmp_path / "leave"
    source = parse_notice_source(str(path))
    path.write_text(in_seconds(1000.0))

    after_s = source.read()
    assert after_s is not None
    assert 1000.0 - SLACK_S < after_s <= 1000.0
    path.write_text("2020-01-31T12:00:00+05:30")
    assert source.read() == 0.0


@pytest.mark.parametrize("text", ["soon", "-3", "nan", "inf", "2099-01-31T12:00:00", "\xff"])
def test_a_file_with_another_text_is_still_a_notice(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever made it wants the machine to be left; a time without a zone may mean any."""
    path = tmp_path / "leave"
    path.write_bytes(text.encode("latin-1"))

    assert parse_notice_source(str(path), default_s=17.0).read() == 17.0
    assert "17 s are left" in caplog.text


def test_a_file_that_is_being_written_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell makes it empty and fills it a moment later."""
    path = tmp_path / "leave"
    path.touch()
    monkeypatch.setattr(time, "sleep", lambda _: path.write_text("45"))

    assert parse_notice_source(str(path)).read() == 45.0


def test_a_file_in_a_directory_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    """It would be waited for in vain, for a misspelt name."""
    with pytest.raises(OSError, match="there is no directory"):
        parse_notice_source(str(tmp_path / "run" / "leave")).read()


# -- URLs -----------------------------------------------------------------------------------------


def test_an_answer_with_a_body_is_a_notice(server: Metadata) -> None:
    """No file at that URL, or an empty one, is none. The query belongs to the URL."""
    source = parse_notice_source(f"{server.url}/leave?node=3", default_s=17.0)

    assert source.read() is None
    server.answers["/leave?node=3"] = (204, "")
    assert source.read() is None
    server.answers["/leave?node=3"] = (200, "45")
    assert source.read() == 45.0
    server.answers["/leave?node=3"] = (202, "drain")
    assert source.read() == 17.0


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("http://[fd00:ec2::254]", ("fd00:ec2::254", 80)),
        ("http://[fd00::abcd]", ("fd00::abcd", 80)),
        ("https://[fd00::1]", ("fd00::1", 443)),
        ("http://[fd00::1]:8080", ("fd00::1", 8080)),
        ("http://service", ("service", 80)),
    ],
)
def test_an_address_of_ipv6_needs_no_port(
    host: str, address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What follows its last colon was taken for a port."""
    asked: list[tuple[str, int]] = []

    def refuse(address: tuple[str, int], *_: object) -> NoReturn:
        asked.append(address)
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "create_connection", refuse)
    with pytest.raises(ConnectionRefusedError):
        parse_notice_source(f"{host}/leave").read()

    assert asked == [address]


@pytest.mark.parametrize("status", [301, 403, 500, 503])
def test_another_status_is_an_error_and_no_notice(status: int, server: Metadata) -> None:
    """A service that is restarted must not empty a cluster."""
    server.answers["/leave"] = (status, "45")

    with pytest.raises(OSError, match=f"/leave answered with status {status}"):
        parse_notice_source(f"{server.url}/leave").read()


def test_a_server_that_does_not_answer_is_not_waited_for(
    server: Metadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the connection and says nothing."""
    monkeypatch.setattr(notices, "_HTTP_TIMEOUT_S", 0.05)
    server.is_silent.set()

    with pytest.raises(TimeoutError, match=r"GET http://.*/leave got no answer in 0\.05 s"):
        parse_notice_source(f"{server.url}/leave").read()


def test_what_is_no_http_is_an_error() -> None:
    """As from another program at that port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/leave"

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(OSError, match="was not answered in HTTP"):
            parse_notice_source(url).read()
        thread.join()


# -- Google Compute Engine ------------------------------------------------------------------------

PREEMPTED = "/computeMetadata/v1/instance/preempted"
EVENT = "/computeMetadata/v1/instance/maintenance-event"


@pytest.mark.parametrize(
    ("preempted", "event", "after_s"),
    [
        ("FALSE", "NONE", None),
        ("TRUE", "NONE", 30.0),
        ("FALSE", "MIGRATE_ON_HOST_MAINTENANCE", None),
        ("FALSE", "TERMINATE_ON_HOST_MAINTENANCE", 60.0),
    ],
)
def test_google_says_whether_a_machine_is_taken_away(
    preempted: str, event: str, after_s: float | None, server: Metadata
) -> None:
    """A machine that migrates stays."""
    server.answers = {PREEMPTED: (200, preempted), EVENT: (200, f"{event}\n")}

    assert read_gcp(server) == after_s
    flavors = {headers.get("Metadata-Flavor") for _, _, headers in server.requests}
    assert flavors == {"Google"}


@pytest.mark.parametrize(
    ("status", "text", "error"),
    [(200, "yes", ValueError), (200, "", ValueError), (404, "", OSError), (503, "", OSError)],
)
def test_garbage_is_no_notice_of_google(
    status: int, text: str, error: type[Exception], server: Metadata
) -> None:
    """These keys are there on every machine."""
    server.answers[PREEMPTED] = (status, text)

    with pytest.raises(error, match="preempted"):
        read_gcp(server)


def test_who_answers_for_google_must_be_google(server: Metadata) -> None:
    """As Google asks its users to check, because others may have that address."""
    server.answers[PREEMPTED] = (200, "TRUE")
    server.flavor = "Other"

    with pytest.raises(ValueError, match="was not answered by Google's metadata server"):
        read_gcp(server)


# -- names ----------------------------------------------------------------------------------------


def test_the_environment_names_another_server_of_metadata(
    server: Metadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clouds that imitate one of the two have addresses of their own."""
    monkeypatch.setenv("PLANARIA_METADATA_URL", f"{server.url}/")
    server.answers = {PREEMPTED: (200, "TRUE")}

    assert parse_notice_source("gcp").read() == 30.0


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of what Slurm says of the machine; there is no controller while it is missing."""
    state, program = tmp_path / "state", tmp_path / "scontrol"
    program.write_text(
        f'#!/bin/sh\n[ "$*" = "--oneliner show node n7" ] && cat {state} || '
        '{ echo "no controller" >&2; exit 1; }\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    return state


@pytest.mark.parametrize(
    ("state", "after_s"),
    [
        ("ALLOCATED", None),
        ("MIXED", None),
        ("ALLOCATED+DRAIN", 40.0),
        ("IDLE+DRAIN", 40.0),
        ("DRAINING", 40.0),
        ("DOWN+DRAIN+NOT_RESPONDING", 40.0),
    ],
)
def test_slurm_says_whether_it_drains_the_machine(
    state: str, after_s: float | None, scontrol: Path
) -> None:
    """It interrupts nothing there."""
    scontrol.write_text(f"NodeName=n7 Arch=x86_64 State={state} Owner=N/A Reason=DRAIN later\n")

    assert parse_notice_source("slurm", default_s=40.0).read() == after_s


@pytest.mark.usefixtures("scontrol")
def test_a_controller_that_is_away_is_an_error_and_no_notice() -> None:
    with pytest.raises(OSError, match="no controller"):
        parse_notice_source("slurm").read()


def test_slurm_is_asked_only_in_a_job_of_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    with pytest.raises(ConfigError, match="SLURMD_NODENAME"):
        check_notice_source("slurm")
    with pytest.raises(OSError, match="no job of Slurm runs here"):
        parse_notice_source("slurm").read()


@pytest.mark.parametrize("text", ["", "leave", "EC2", "azure", "ftp://host/leave", "./leave"])
def test_a_text_that_names_no_source_is_refused(text: str) -> None:
    """A relative path means another file on each machine."""
    with pytest.raises(ConfigError, match=r"path of a file, .* ec2, gcp or slurm") as caught:
        parse_notice_source(text, field="cluster.notice")
    assert caught.value.field == "cluster.notice"


@pytest.mark.parametrize("text", ["http://", "http:///x", "http://host:99999/x", "https://h:x/"])
def test_a_url_must_name_a_host_and_a_port_that_can_be(text: str) -> None:
    """Else the first error would come in the middle of a job."""
    with pytest.raises(ConfigError, match="must name a host"):
        parse_notice_source(text)


# -- polling --------------------------------------------------------------------------------------


class Failing:
    """A source that fails twice before it has a notice."""

    pause_s = 0.0

    def __init__(self) -> None:
        self._errors: list[Exception] = [ValueError("garbage"), OSError("no answer")]

    def __str__(self) -> str:
        return "a failing source"

    def read(self) -> float | None:
        if self._errors:
            raise self._errors.pop()
        return 5.0


def test_errors_are_logged_once_and_the_source_is_asked_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A log that grows by a line every two seconds hides all others."""
    caplog.set_level(logging.WARNING)

    assert wait_notice(Failing(), pause_s=0.0) == 5.0
    assert caplog.messages == ["no preemption notice can be read from a failing source: no answer"]


def test_a_watcher_says_the_notice_and_ends(tmp_path: Path) -> None:
    """It lives through the signals that are notices themselves, which may go to all processes."""
    path = tmp_path / "leave"
    pid, sock = fork_watcher(parse_notice_source(str(path)))
    with sock:
        wait_for(lambda: _handles(pid, signal.SIGUSR1), what="it handles the signals")
        for number in (signal.SIGTERM, signal.SIGUSR1):
            os.kill(pid, number)
        path.write_text("45")
        sock.settimeout(SLACK_S)

        assert sock.recv(100) == b"45.000000\n"
        assert sock.recv(100) == b""
    assert os.waitpid(pid, 0)[1] == 0


def _handles(pid: int, number: int) -> bool:
    (line,) = (
        line
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("SigCgt:")
    )
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)


def test_a_watcher_dies_with_its_parent(tmp_path: Path) -> None:
    """Nothing of a node may outlive its agent."""
    source = parse_notice_source(str(tmp_path / "leave"))
    read_fd, write_fd = os.pipe()
    parent = os.fork()
    if parent == 0:
        try:
            pid, _ = fork_watcher(source)
            os.write(write_fd, str(pid).encode())
            signal.pause()
        finally:
            os._exit(1)
    watcher = int(os.read(read_fd, 100))
    os.close(read_fd)
    os.close(write_fd)

    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    wait_for(lambda: not is_alive(watcher), what="the watcher is gone")
