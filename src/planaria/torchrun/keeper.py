"""The keeper: the process that owns a node's copies for scripts with their own training loop.

There is one keeper for each directory. The first rank that asks for it starts it in a session of
its own, so it outlives the ranks and the program that restarts them. A slot is a rank's place on
the node (LOCAL_RANK). The keeper makes a file in memory (arena_file.py) for each slot, and hands
its descriptor to the rank that asks over a socket in that directory. It ends when it is told to, or
when nobody has been connected for a while. If a keeper was killed or its socket was removed, the
ranks that hold its slots hand their files to another keeper. A rank that lives can adopt the slots
of ranks that have died.
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
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from planaria.checkpoint.memory.arena_file import arena_fd
from planaria.errors import CheckpointError

START_TIMEOUT_S: Final = 60.0
_LINE_BYTES: Final = 1 << 12
FREE_TIMEOUT_S: Final = 10.0
_GRANTED, _TAKEN = b".", b"!"
_ID_BYTES: Final = 8
_CREDENTIALS: Final = struct.Struct("=3i")  # The ids of process, user and group.
_PAUSE_S: Final = 0.05
_FDS_MAX: Final = 200  # Per message.
_CHECK_S: Final = 60.0  # A keeper without clients checks so often that its socket still exists.


@dataclass(frozen=True, slots=True)
class _SlotRequest:
    """A slot of a directory's keeper; `attach` explains the fields."""

    directory: Path
    slot: int
    num_slots: int
    idle_s: float


class KeeperSlot:
    """A slot of a keeper, held by this process.

    Attributes:
        fd: descriptor of the slot's arena.
        further_fds: descriptors of arenas of slots that nobody else holds, for this one to read.
        keeper_id: random id of the first keeper, in hex; it identifies the node, since several
            machines may have the same host name.
    """

    def __init__(self, slot_request: _SlotRequest) -> None:
        self._slot_request = slot_request
        self._sock, self._file, self.keeper_id, fds = _take_slot(slot_request, ())
        self.fd, *self.further_fds = fds
        os.register_at_fork(after_in_child=partial(_leave, weakref.ref(self)))

    @property
    def is_gone(self) -> bool:
        """Whether the keeper has ended, or its socket is not in the directory any more.

        Then the copies only last for as long as this process, unless `renew` is called.
        """
        file = _socket_file(self._slot_request.directory)
        if file is None or file != self._file:
            return True
        return _has_left(self._sock)  # A keeper that lives sends nothing unasked.

    def renew(self) -> None:
        """Hands the slot's memory to another keeper, which is started if there is none.

        Raises:
            CheckpointError: the keeper does not start; see `attach`.
        """
        self._sock.close()
        self._sock, self._file, _, again = _take_slot(
            self._slot_request, (self.fd, *self.further_fds)
        )
        _close(again)

    def adopt(self) -> list[int]:
        """Takes all slots that nobody holds now, too; returns the descriptors of their arenas.

        Empty if there is none, or the keeper is gone.
        """
        _, fds = _ask(self._sock, b'{"adopts": true}\n', ())
        self.further_fds += fds
        return fds

    def end(self) -> None:
        """Ends the keeper, and with it all copies that it owns."""
        with suppress(OSError):
            self._sock.sendall(b'{"ends": true}\n')
            while self._sock.recv(_LINE_BYTES):
                continue
        self.close()

    def close(self) -> None:
        """Releases the slot; the keeper keeps its copies."""
        self._sock.close()


def _leave(reference: "weakref.ref[KeeperSlot]") -> None:
    """Closes a forked child's connection, which would hold the slot after its parent's death."""
    if kept := reference():
        kept.close()


def _has_left(sock: socket.socket) -> bool:
    """Whether the other end has closed its connection, and nothing of it is left to read."""
    try:
        return not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except OSError as error:
        return not isinstance(error, BlockingIOError)


def attach(directory: Path, slot: int, *, num_slots: int, idle_s: float) -> KeeperSlot:
    """Takes a slot of the directory's keeper, which is started if there is none.

    Args:
        slot: index of the slot, from 0.
        num_slots: number of slots in use on the node now. If there were more before, process
            `slot` gets the arenas of the old slots that are congruent to it modulo num_slots, to
            read them.
        idle_s: seconds that the keeper stays when nobody is connected; it replaces what earlier
            processes asked for; inf: for ever.

    Raises:
        CheckpointError: the keeper does not start, another process holds the slot, or the directory
            belongs to another user.
    """
    return KeeperSlot(_SlotRequest(directory.absolute(), slot, num_slots, idle_s))


def _take_slot(
    slot_request: _SlotRequest, fds_given: Sequence[int]
) -> tuple[socket.socket, "_File", str, list[int]]:
    """Takes a slot of a keeper.

    Args:
        fds_given: descriptors of the slot's arenas that the keeper gets; empty: it has them, or
            makes the slot's own.

    Returns:
        The connection, the socket's file, the keeper's id in hex, and descriptors of the slot's
        arena and of further ones.
    """
    directory = slot_request.directory
    wish = {"slot": slot_request.slot, "of": slot_request.num_slots, "idle_s": slot_request.idle_s}
    request = json.dumps(wish).encode() + b"\n"
    deadline_s = time.monotonic() + FREE_TIMEOUT_S
    sock, file = _find_or_start(directory, slot_request.idle_s)
    while True:
        answer, fds = _ask(sock, request, fds_given)
        if answer[:1] == _GRANTED and fds:
            return sock, file, answer[1:].hex(), fds
        if time.monotonic() > deadline_s:
            break
        time.sleep(0.05)  # A killed process may hold the slot for a moment longer.
        if answer[:1] != _TAKEN:  # The keeper was about to end when this process connected.
            sock.close()
            sock, file = _find_or_start(directory, slot_request.idle_s)
    sock.close()
    if answer[:1] == _TAKEN:
        what = f"place {slot_request.slot} of the copies in {directory} is used by process"
        remedy = "give each job a name of its own, and each rank of a machine its own LOCAL_RANK"
        raise CheckpointError(f"{what} {answer[1:].decode()}: {remedy}")
    raise CheckpointError(f"the process that owns copies in {directory} has ended")


def _find_or_start(directory: Path, idle_s: float) -> tuple[socket.socket, "_File"]:
    """A connection to a directory's keeper, with its socket's file; starts one if there is none."""
    try:
        directory.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        directory.mkdir(exist_ok=True, mode=0o700)
        # Whoever owns one of these can put another directory in the place of what is in it.
        for path in (directory, *directory.parents[:2]):
            if path.stat().st_uid not in (0, os.getuid()):
                raise CheckpointError(f"{path} belongs to another user; name another directory")
        with _lock_directory(directory):
            sock = _connect(directory) or _start_keeper(directory, idle_s)
            return sock, _socket_file(directory)
    except OSError as error:
        raise CheckpointError(f"{directory} cannot hold copies: {error}") from error


def _ask(sock: socket.socket, request: bytes, fds_given: Sequence[int]) -> tuple[bytes, list[int]]:
    """A keeper's answer and the descriptors with it; both empty if the keeper has ended."""
    try:
        socket.send_fds(sock, [request], fds_given)
        answer, fds, *_ = socket.recv_fds(sock, _LINE_BYTES, _FDS_MAX)
    except OSError:
        return b"", []
    return answer, fds


@contextmanager
def _lock_directory(directory: Path) -> Iterator[None]:
    """A context for one process at a time, so that only one of them starts a keeper."""
    with (directory / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _connect(directory: Path) -> socket.socket | None:
    with ExitStack() as failing:
        sock = failing.enter_context(socket.socket(socket.AF_UNIX))
        try:
            with _short_path(directory) as path:
                sock.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            return None
        if not _is_trusted(sock):
            what = f"the process that owns copies in {directory} belongs to another user"
            raise CheckpointError(f"{what}; name another directory")
        failing.pop_all()
    return sock


def _start_keeper(directory: Path, idle_s: float) -> socket.socket:
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
        if sock := _connect(directory):
            return sock
        time.sleep(0.01)
    raise CheckpointError(f"the process that is to own the copies did not start; see {log}")


# The device and inode of a socket, which no other file has while a keeper has it open; or None.
_File = tuple[int, int] | None


def _socket_file(directory: Path) -> _File:
    """The file that has the socket's name in the directory; None if there is none."""
    try:
        status = (directory / "socket").stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


@contextmanager
def _short_path(directory: Path) -> Iterator[str]:
    """A path of the socket that is short however long the directory's path is.

    The kernel allows some 100 bytes for the path of a socket.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/socket"
    finally:
        os.close(descriptor)


@dataclass(slots=True)
class _KeeperState:
    """The state of a keeper.

    Attributes:
        idle_s: time without clients after which it ends; set by the newest client.
        slots: descriptor of each slot's arena, by slot.
        held: slots that each client holds, by client: its own, and those that it reads.
        is_over: whether a client has asked it to end.
        is_short: whether it lacks the resources to accept a client; that was logged then.
        keeper_id: random id of this keeper.
    """

    idle_s: float
    slots: dict[int, int] = field(default_factory=dict)
    held: dict[socket.socket, set[int]] = field(default_factory=dict)
    is_over: bool = False
    is_short: bool = False
    keeper_id: bytes = field(default_factory=lambda: secrets.token_bytes(_ID_BYTES))


def serve(directory: Path, idle_s: float) -> None:
    """Runs a keeper until a client ends it or it is of no more use.

    It is of no use once nobody has been connected for `idle_s`, or nobody is connected and its
    socket is not in the directory any more.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    (directory / "socket").unlink(missing_ok=True)  # A killed keeper has left it.
    state = _KeeperState(idle_s)
    with socket.socket(socket.AF_UNIX) as listener, selectors.DefaultSelector() as selector:
        with _short_path(directory) as path:
            listener.bind(path)
        file = _socket_file(directory)
        listener.listen(1024)
        selector.register(listener, selectors.EVENT_READ)
        busy_s = time.monotonic()
        while True:
            is_alone = len(selector.get_map()) == 1
            if is_alone and _socket_file(directory) != file:
                return
            ready = selector.select(timeout=min(state.idle_s, _CHECK_S) if is_alone else None)
            if ready:
                busy_s = time.monotonic()
            elif is_alone and time.monotonic() >= busy_s + state.idle_s:
                return
            for key, _ in ready:
                if key.fileobj is listener:
                    if new_client := _accept(listener, state):
                        selector.register(new_client, selectors.EVENT_READ)
                    continue
                client = key.fileobj
                assert isinstance(client, socket.socket)
                if not _answer_client(client, state):
                    state.held.pop(client, None)
                    selector.unregister(client)
                    client.close()
                    if state.is_over:
                        return


def _accept(listener: socket.socket, state: _KeeperState) -> socket.socket | None:
    """The client that has connected; None if it is another user's, or cannot be accepted now."""
    try:
        client, _ = listener.accept()
    except OSError as error:  # No descriptors, say. If the keeper ended, all copies would be lost.
        if not state.is_short:
            sys.stderr.write(f"a client has to wait: {error}\n")
        state.is_short = True
        time.sleep(_PAUSE_S)
        return None
    state.is_short = False
    if _is_trusted(client):
        return client
    sys.stderr.write(f"process {_peer_of(client)[0]}, of another user, was refused\n")
    client.close()
    return None


def _answer_client(client: socket.socket, state: _KeeperState) -> bool:
    """Answers a client; returns False if the connection is to be closed."""
    slots, held = state.slots, state.held
    with ExitStack() as unused:
        try:
            line, fds_given, *_ = socket.recv_fds(client, _LINE_BYTES, _FDS_MAX)
            unused.callback(_close, fds_given)
            if not line:
                return False
            wish = _wish(line)
            if wish == "ends":
                state.is_over = True
                return False
            if isinstance(wish, str):
                _give_unheld(client, state)
                return True
            slot, num_slots, idle_s = wish
            if holder := next((peer for peer, theirs in held.items() if slot in theirs), None):
                client.sendall(_TAKEN + str(_peer_of(holder)[0]).encode())
                return True
            held[client] = {slot}
            state.idle_s = idle_s
            unused.pop_all()
            for index, fd in enumerate(fds_given):
                # A client holds its own slot, and reads every num_slots-th one after it.
                number = slot + index * num_slots
                _close([slots[number]] if number in slots else [])
                slots[number] = fd
            if slot not in slots:
                slots[slot] = arena_fd()
            free = sorted(slots.keys() - set().union(*held.values()))
            further = [n for n in free if n >= num_slots and n % num_slots == slot]
            further = further[: _FDS_MAX - 1]
            held[client].update(further)
            fds = [slots[n] for n in (slot, *further)]
            socket.send_fds(client, [_GRANTED + state.keeper_id], fds)
        except (OSError, OverflowError, RecursionError, ValueError) as error:
            sys.stderr.write(f"a client sent an unusable request: {error}\n")
            return False
    return True


def _give_unheld(client: socket.socket, state: _KeeperState) -> None:
    """Gives a client all slots that nobody holds; it holds them from now on."""
    # The end of a client that was killed may not have been noticed yet.
    theirs = [slots for peer, slots in state.held.items() if not _has_left(peer)]
    unheld = sorted(state.slots.keys() - set().union(*theirs))[:_FDS_MAX]
    state.held.setdefault(client, set()).update(unheld)
    socket.send_fds(client, [_GRANTED], [state.slots[slot] for slot in unheld])


def _wish(line: bytes) -> tuple[int, int, float] | str:
    """Slot, number of slots and idle_s of a client that asks for a slot; or what else it does.

    That is "ends", for the keeper, or "adopts", for all slots that nobody holds.

    Raises:
        ValueError: the line is not a request.
        OverflowError, RecursionError: its numbers are too large, or it is nested too deeply.
    """
    match json.loads(line):
        case {"ends": True}:
            return "ends"
        case {"adopts": True}:
            return "adopts"
        case {"slot": int(slot), "of": int(num_slots), "idle_s": int() | float() as idle_s} if (
            slot >= 0 and num_slots >= 1 and idle_s >= 0  # NaN is not.
        ):
            return slot, num_slots, float(idle_s)
    raise ValueError(f"{line!r} is not a request")


def _is_trusted(sock: socket.socket) -> bool:
    """Whether the other end belongs to this user, or to root, who can read everything anyway."""
    return _peer_of(sock)[1] in (0, os.getuid())


def _peer_of(sock: socket.socket) -> tuple[int, int]:
    """The ids of the other end's process and user, from the kernel."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(raw)
    return pid, user


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), float(sys.argv[2]))
