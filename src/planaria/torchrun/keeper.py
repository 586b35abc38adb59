"""The process that owns a machine's copies for scripts that keep their own training loop.

One for each directory, started by the first rank that asks for it, in a session of its own: it
outlives the ranks, and what starts them again. It makes a file in memory (arena.py) for each slot,
which is a rank's place on the machine, and hands it to whoever asks over a socket in that
directory. It ends when it is told to, or when nobody has been connected for a while. Those who hold
slots of one that was killed, or whose socket was removed, hand the files to another one.
"""

import fcntl
import json
import os
import secrets
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from planaria.checkpoint.memory.arena import arena_fd
from planaria.errors import CheckpointError

START_TIMEOUT_S: Final = 60.0
_LINE_BYTES: Final = 1 << 12
FREE_TIMEOUT_S: Final = 10.0
_GIVEN, _HELD = b".", b"!"
_ID_BYTES: Final = 8
_CREDENTIALS: Final = struct.Struct("=3i")  # Of process, user and group.
_PAUSE_S: Final = 0.05
_FDS_MAX: Final = 200  # Of one message.
_LOOK_S: Final = 60.0  # So often one that is alone sees whether its socket can be found.


@dataclass(frozen=True, slots=True)
class _Place:
    """A slot of a directory's keeper; see `attach`."""

    directory: Path
    slot: int
    num_slots: int
    idle_s: float


class Kept:
    """A slot of a keeper, held by this process.

    Attributes:
        fd: of the slot's arena.
        further_fds: of arenas that nobody holds now, for this process to read.
        keeper_id: drawn by the keeper that there was at first: machines may have one name.
    """

    def __init__(self, place: _Place) -> None:
        self._place = place
        self._sock, self._file, self.keeper_id, fds = _attached(place, ())
        self.fd, *self.further_fds = fds
        os.register_at_fork(after_in_child=partial(_leave, weakref.ref(self)))

    @property
    def is_gone(self) -> bool:
        """Whether the keeper has ended, or its socket is not there for those who come next: copies
        are there for as long as this process is."""
        file = _socket_file(self._place.directory)
        if file is None or file != self._file:
            return True
        try:
            return not self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except OSError as error:
            return not isinstance(error, BlockingIOError)  # It says nothing by itself.

    def renew(self) -> None:
        """Hands the slot's memory to a keeper that is there, for the one before is gone.

        Raises:
            CheckpointError: as `attach` does.
        """
        self._sock.close()
        self._sock, self._file, _, again = _attached(self._place, (self.fd, *self.further_fds))
        _close(again)

    def end(self) -> None:
        """Ends the keeper, and with it all copies on this machine."""
        with suppress(OSError):
            self._sock.sendall(b'{"ends": true}\n')
            while self._sock.recv(_LINE_BYTES):
                continue
        self.close()

    def close(self) -> None:
        """Leaves the keeper, which keeps what there is."""
        self._sock.close()


def _leave(reference: "weakref.ref[Kept]") -> None:
    """Has a fork not hold the slot, which it would after the process's death."""
    if kept := reference():
        kept.close()


def attach(directory: Path, slot: int, *, num_slots: int, idle_s: float) -> Kept:
    """A slot of the directory's keeper, which is started if there is none.

    Args:
        num_slots: that are held now. There may have been more; each of those is for one to read.
        idle_s: for how long it stays when nobody is connected, whatever it was asked for before;
            inf: for ever.

    Raises:
        CheckpointError: it does not start, another process holds the slot, or another user the
            directory.
    """
    return Kept(_Place(directory.absolute(), slot, num_slots, idle_s))


def _attached(place: _Place, given: Sequence[int]) -> tuple[socket.socket, "_File", str, list[int]]:
    """A keeper, its socket's file and its id. It has arenas of the slot from now on, those that are
    given if any are."""
    directory = place.directory
    wish = {"slot": place.slot, "of": place.num_slots, "idle_s": place.idle_s}
    asked = json.dumps(wish).encode() + b"\n"
    deadline_s = time.monotonic() + FREE_TIMEOUT_S
    sock, file = _found(directory, place.idle_s)
    while True:
        said, fds = _answer(sock, asked, given)
        if said[:1] == _GIVEN and fds:
            return sock, file, said[1:].hex(), fds
        if time.monotonic() > deadline_s:
            break
        time.sleep(0.05)  # Who held it and was killed may be there a moment.
        if said[:1] != _HELD:  # It was about to end when this one connected.
            sock.close()
            sock, file = _found(directory, place.idle_s)
    sock.close()
    if said[:1] == _HELD:
        what = f"place {place.slot} of the copies in {directory} is held by process"
        remedy = "give each job a name of its own, and each rank of a machine its own LOCAL_RANK"
        raise CheckpointError(f"{what} {said[1:].decode()}: {remedy}")
    raise CheckpointError(f"the process that owns copies in {directory} has ended")


def _found(directory: Path, idle_s: float) -> tuple[socket.socket, "_File"]:
    """A directory's keeper, which is started if there is none, and its socket's file."""
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        for path in (directory, directory.parent):
            if path.stat().st_uid not in (0, os.getuid()):
                raise CheckpointError(f"{path} is another user's: name another directory")
        with _locked(directory):
            sock = _connected(directory) or _started(directory, idle_s)
            return sock, _socket_file(directory)
    except OSError as error:
        raise CheckpointError(f"{directory} is of no use for copies: {error}") from error


def _answer(sock: socket.socket, asked: bytes, given: Sequence[int]) -> tuple[bytes, list[int]]:
    """What a keeper says; nothing if it has ended."""
    try:
        socket.send_fds(sock, [asked], given)
        said, fds, *_ = socket.recv_fds(sock, _LINE_BYTES, _FDS_MAX)
    except OSError:
        return b"", []
    return said, fds


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """One process at a time may find that there is no keeper."""
    with (directory / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _connected(directory: Path) -> socket.socket | None:
    sock = socket.socket(socket.AF_UNIX)
    try:
        with _short(directory) as path:
            sock.connect(path)
    except (FileNotFoundError, ConnectionRefusedError):
        sock.close()
        return None
    if not _is_trusted(sock):
        sock.close()
        what = f"the process that owns copies in {directory} is another user's"
        raise CheckpointError(f"{what}: name another directory")
    return sock


def _started(directory: Path, idle_s: float) -> socket.socket:
    log = directory / "keeper.log"
    with log.open("ab") as output:
        command = [sys.executable, "-m", "planaria.torchrun.keeper", str(directory), str(idle_s)]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s and process.poll() is None:
        if sock := _connected(directory):
            return sock
        time.sleep(0.01)
    raise CheckpointError(f"the process that is to own copies did not start: see {log}")


# Device and inode, which the kernel gives to no other file while a keeper has its socket; or none.
_File = tuple[int, int] | None


def _socket_file(directory: Path) -> _File:
    """What is there under the name of the socket."""
    try:
        found = (directory / "socket").stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


@contextmanager
def _short(directory: Path) -> Iterator[str]:
    """The path of the socket, which may have 100 bytes at most, however long the directory's is."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/socket"
    finally:
        os.close(descriptor)


@dataclass(slots=True)
class _Keeping:
    """What a keeper has, and what it was asked for.

    Attributes:
        idle_s: as who came last wants it.
        slots: arenas by slot.
        held: by client, the slot that it has alone.
        is_over: somebody wants it to end.
        is_short: of what it takes to answer who connects, and that is told.
    """

    idle_s: float
    slots: dict[int, int] = field(default_factory=dict)
    held: dict[socket.socket, int] = field(default_factory=dict)
    is_over: bool = False
    is_short: bool = False
    keeper_id: bytes = field(default_factory=lambda: secrets.token_bytes(_ID_BYTES))


def serve(directory: Path, idle_s: float) -> None:
    """Keeps slots until it is told to end, or nobody has been connected for so long, or nobody is
    and nobody can be."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    (directory / "socket").unlink(missing_ok=True)  # Of one that was killed.
    keeping = _Keeping(idle_s)
    with socket.socket(socket.AF_UNIX) as listener, selectors.DefaultSelector() as selector:
        with _short(directory) as path:
            listener.bind(path)
        file = _socket_file(directory)
        listener.listen(1024)
        selector.register(listener, selectors.EVENT_READ)
        busy_s = time.monotonic()
        while True:
            is_alone = len(selector.get_map()) == 1
            if is_alone and _socket_file(directory) != file:
                return
            ready = selector.select(timeout=min(keeping.idle_s, _LOOK_S) if is_alone else None)
            if ready:
                busy_s = time.monotonic()
            elif is_alone and time.monotonic() >= busy_s + keeping.idle_s:
                return
            for key, _ in ready:
                if key.fileobj is listener:
                    if accepted := _accepted(listener, keeping):
                        selector.register(accepted, selectors.EVENT_READ)
                    continue
                client = key.fileobj
                assert isinstance(client, socket.socket)
                if not _answered(client, keeping):
                    keeping.held.pop(client, None)
                    selector.unregister(client)
                    client.close()
                    if keeping.is_over:
                        return


def _accepted(listener: socket.socket, keeping: _Keeping) -> socket.socket | None:
    """Who has connected; None if that is another user, or there is nothing to talk to it with."""
    try:
        client, _ = listener.accept()
    except OSError as error:  # No descriptors, say. To end would lose all copies.
        if not keeping.is_short:
            sys.stderr.write(f"a client has to wait: {error}\n")
        keeping.is_short = True
        time.sleep(_PAUSE_S)
        return None
    keeping.is_short = False
    if _is_trusted(client):
        return client
    sys.stderr.write(f"process {_peer_of(client)[0]}, of another user, was refused\n")
    client.close()
    return None


def _answered(client: socket.socket, keeping: _Keeping) -> bool:
    """Answers a client; False if it has left, or there is nothing more to say to it."""
    slots, held = keeping.slots, keeping.held
    try:
        line, given, *_ = socket.recv_fds(client, _LINE_BYTES, _FDS_MAX)
        if not line:
            return False
        asked = json.loads(line)
        if asked.get("ends"):
            keeping.is_over = True
            return False
        slot, num_slots = int(asked["slot"]), int(asked["of"])
        if holder := next((one for one, its in held.items() if its == slot), None):
            _close(given)
            client.sendall(_HELD + str(_peer_of(holder)[0]).encode())
            return True
        held[client] = slot
        keeping.idle_s = float(asked["idle_s"])
        for index, fd in enumerate(given):
            number = slot + index * num_slots  # Of those that the same process reads.
            _close([slots[number]] if number in slots else [])
            slots[number] = fd
        if slot not in slots:
            slots[slot] = arena_fd()
        free = sorted(slots.keys() - {*held.values()})
        further = [slots[n] for n in free if n >= num_slots and n % num_slots == slot]
        socket.send_fds(client, [_GIVEN + keeping.keeper_id], [slots[slot], *further][:_FDS_MAX])
    except (OSError, ValueError, KeyError) as error:
        sys.stderr.write(f"a client said nothing of use: {error}\n")
        return False
    return True


def _is_trusted(sock: socket.socket) -> bool:
    """Whether the other end is of this user, or of root, who can read all anyway."""
    return _peer_of(sock)[1] in (0, os.getuid())


def _peer_of(sock: socket.socket) -> tuple[int, int]:
    """Process and user of the other end, as the kernel knows them."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(raw)
    return pid, user


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), float(sys.argv[2]))
