"""Whom the process that owns copies talks to, and in whose directories it is."""

import os
import resource
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from helpers.keepers import keepers
from helpers.linked_ranks import TIMEOUT_S, wait_until
from planaria.errors import CheckpointError
from planaria.torchrun import keeper
from planaria.torchrun.keeper import attach

STRANGER = 12345  # A user's number.
ASKED = b'{"slot": 0, "of": 1, "idle_s": 60.0}\n'


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """Where keepers of the test have their sockets; they end with it."""
    (tmp_path / "place").mkdir()
    yield tmp_path / "place"
    for process in keepers(tmp_path):
        process.kill()


def told_to_stranger(place: Path) -> bytes:
    """What a keeper says to another user's process, which needs root to be made."""
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        os.chdir(place)
        os.setgroups([])
        os.setuid(STRANGER)
        said = b""
        with socket.socket(socket.AF_UNIX) as sock, suppress(ConnectionError):
            sock.settimeout(TIMEOUT_S)
            sock.connect("socket")
            os.write(theirs, b"connected; ")
            sock.sendall(ASKED)
            said = sock.recv(100)
        os.write(theirs, said)
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_a_keeper_gives_nothing_to_another_user(place: Path) -> None:
    """Copies are all of a model, and whoever holds their memory can write to it."""
    kept = attach(place, 0, num_slots=1, idle_s=60.0)
    kept.close()
    place.chmod(0o755)
    (place / "socket").chmod(0o777)

    assert told_to_stranger(place) == b"connected; "
    attach(place, 0, num_slots=1, idle_s=60.0).end()
    assert "of another user, was refused" in (place / "keeper.log").read_text()


def test_a_keeper_of_another_user_is_not_used(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would have whatever is copied."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place / "socket"))
        listener.listen()
        monkeypatch.setattr(keeper, "_peer_of", lambda _: (1, STRANGER))
        with pytest.raises(
            CheckpointError, match="belongs to another user; name another directory"
        ):
            attach(place, 0, num_slots=1, idle_s=60.0)


@pytest.mark.parametrize("level", range(3), ids=["machine", "job", "jobs"])
def test_a_directory_of_another_user_is_refused(
    level: int, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever owns it, or one of the two that it is in, may put a socket of theirs there."""
    own = place / "machine"
    own.mkdir()
    theirs = (own, place, place.parent)[level]
    if os.getuid() == 0:
        os.chown(theirs, STRANGER, -1)
    else:
        monkeypatch.setattr(os, "getuid", lambda: STRANGER)
    with pytest.raises(CheckpointError, match="belongs to another user; name another directory"):
        attach(own, 0, num_slots=1, idle_s=60.0)

    assert not (own / "socket").exists()
    if os.getuid() == 0:
        os.chown(theirs, 0, -1)


def test_a_process_adopts_what_others_leave_and_holds_it_then(place: Path) -> None:
    """Each of them is given to a single process, for only one may use an arena at a time."""
    first, second, dead = (attach(place, slot, num_slots=3, idle_s=60.0) for slot in range(3))
    os.pwrite(dead.fd, b"here", 128)
    assert first.adopt() == []
    dead.close()

    (fd,) = first.adopt()

    assert os.pread(fd, 4, 128) == b"here"
    assert first.adopt() == second.adopt() == []
    first.close()
    assert [os.pread(fd, 4, 128) for fd in second.adopt()] == [bytes(4), b"here"]
    second.close()
    again = attach(place, 2, num_slots=3, idle_s=60.0)
    assert os.pread(again.fd, 4, 128) == b"here"
    again.end()


def test_what_was_adopted_goes_to_the_next_keeper_with_the_rest(place: Path) -> None:
    """A restart of the script may still need it."""
    first, dead = (attach(place, slot, num_slots=2, idle_s=60.0) for slot in range(2))
    os.pwrite(dead.fd, b"here", 128)
    dead.close()
    first.adopt()
    (process,) = keepers(place)
    process.kill()
    process.wait(timeout=TIMEOUT_S)
    first.renew()
    assert first.adopt() == []
    first.close()

    again = attach(place, 0, num_slots=2, idle_s=60.0)

    assert [os.pread(fd, 4, 128) for fd in again.further_fds] == [b"here"]
    again.end()


def test_a_keeper_without_descriptors_keeps_what_it_has(place: Path) -> None:
    """It would lose all copies if it ended; who connects waits until there are some."""
    first = attach(place, 0, num_slots=2, idle_s=60.0)
    os.pwrite(first.fd, b"here", 128)
    (process,) = keepers(place)
    limits = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (process.num_fds(), limits[1]))
    with socket.socket(socket.AF_UNIX) as waiting:
        waiting.connect(str(place / "socket"))
        wait_until(lambda: "has to wait" in (place / "keeper.log").read_text())
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, limits)
        other = attach(place, 1, num_slots=2, idle_s=60.0)
    other.close()
    first.close()

    again = attach(place, 0, num_slots=2, idle_s=60.0)
    assert os.pread(again.fd, 4, 128) == b"here"
    again.end()


@pytest.mark.parametrize(
    "request_line",
    [
        b"no JSON\n",
        b"[]\n",
        b'{"slot": 0}\n',
        b'{"slot": null, "of": 1, "idle_s": 60.0}\n',
        b'{"slot": 0, "of": 0, "idle_s": 60.0}\n',
        b'{"slot": 1, "of": 2, "idle_s": "long"}\n',
        b'{"slot": 1, "of": 2, "idle_s": NaN}\n',
        b'{"slot": 1, "of": 2, "idle_s": -1}\n',
        b'{"slot": 1, "of": 2, "idle_s": 1%s}\n' % (b"0" * 400),
        b"[" * 4000 + b"\n",
    ],
)
def test_a_malformed_request_costs_a_keeper_nothing(request_line: bytes, place: Path) -> None:
    """Its copies stay, and it closes the descriptors that came with the request."""
    first = attach(place, 0, num_slots=2, idle_s=60.0)
    os.pwrite(first.fd, b"here", 128)
    first.close()
    (process,) = keepers(place)
    before = process.num_fds()

    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(TIMEOUT_S)
        sock.connect(str(place / "socket"))
        socket.send_fds(sock, [request_line], [first.fd, first.fd])
        assert sock.recv(100) == b""

    again = attach(place, 0, num_slots=2, idle_s=60.0)
    assert os.pread(again.fd, 4, 128) == b"here"
    again.close()
    wait_until(lambda: process.num_fds() <= before)
    assert "a client sent an unusable request" in (place / "keeper.log").read_text()


def test_a_keeper_that_cannot_be_reached_costs_its_rank_no_socket(place: Path) -> None:
    """A rank tries again with each version that it saves."""
    (place / "socket").symlink_to("socket")
    before = len(os.listdir("/proc/self/fd"))

    with pytest.raises(CheckpointError, match="cannot hold copies") as error:
        attach(place, 0, num_slots=1, idle_s=60.0)

    # The error keeps the frames, and would keep the socket.
    assert before == len(os.listdir("/proc/self/fd")), error
