"""The record of a run on machines, beside its coordinator's journal.

    journal.run      the job with the user's modules, what was found out about it, and what it began
                     from
    journal.nodes    a number per line: each node that the head has asked a machine for
    holder           the name of the head that has taken the directory last (`JournalHold`)

A head that was killed leaves all, with the journal. A head that takes the run up
(`planaria train --reattach`) knows by them which machines belong to it, and gives no number twice.
While a head runs it sets the time of journal.nodes again and again (`NodeLog.touch`), so that the
next one knows how long its nodes have been without one (`record_age_s`).
"""

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from planaria.checkpoint.disk.tiers import Manifest
from planaria.checkpoint.disk.time_limits import answer_in_time
from planaria.core.job import JobConfig
from planaria.core.machine_messages import SourceFile
from planaria.core.specs import Prepared
from planaria.errors import ConfigError, LateError

logger = logging.getLogger(__name__)

RUN_FILE: Final = "journal.run"
_NODES_FILE: Final = "journal.nodes"
_NOW_FILE: Final = "journal.now"
HOLDER_FILE: Final = "holder"
_WRITE_TIMEOUT_S: Final = 1.0  # A part of a lease, for which the head does nothing else.
TOUCH_PERIOD_S: Final = 10.0
LIVING_LEASES: Final = 2  # Time for nodes to notice that their head is lost, and to wait for it.


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a head needs to take up a run.

    Attributes:
        run: random name of the run.
        job: the job, with the number of nodes with which it began.
        resumed: checkpoint from which the run began; None: it began anew.
        epoch: first epoch of the run.
        parts: the field of this name in NodeSpec.
        digests: the attribute of this name of MachineChecks, when the run began.
        sources: files of the user's modules, by which all its nodes train.
    """

    run: str
    job: JobConfig
    prepared: Prepared
    resumed: Manifest | None
    epoch: int = 0
    parts: str = ""
    digests: Mapping[str, tuple[str, str]] = msgspec.field(default_factory=dict)
    sources: tuple[SourceFile, ...] = ()


def write_run(directory: Path, record: RunRecord, *, holder: str = "") -> None:
    """Writes the record of a run that begins.

    Args:
        holder: random name of the head; "": no other head can take the directory.

    Raises:
        ConfigError: it cannot be written, or another head has taken the directory.
    """
    try:
        if holder and JournalHold(directory, holder).is_lost():
            remedy = "another head of this job has taken that directory meanwhile; end it first"
            raise ConfigError("--state", str(directory), remedy)
        replace_file(directory / RUN_FILE, msgspec.json.encode(record))
    except OSError as error:
        remedy = f"the record of the run cannot be written there ({error.strerror})"
        raise ConfigError("--state", str(directory), remedy) from error


def read_run(directory: Path) -> RunRecord | None:
    """The record of the run that a killed head has left in a directory; None: there is none.

    Raises:
        ConfigError: the record is damaged, or cannot be read.
    """
    path = directory / RUN_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunRecord)
    except FileNotFoundError:
        return None
    except (OSError, RecursionError, ValueError) as error:  # msgspec lets some errors out.
        remedy = f"the record of a run there cannot be read ({error}); remove it to begin anew"
        raise ConfigError("--state", str(path), remedy) from error


def give_up_run(directory: Path) -> None:
    """Removes the record of a run that nobody is to take up from there any more.

    A disk that refuses, or hangs, is only warned of.
    """
    path = directory / RUN_FILE
    try:
        remove = partial(path.unlink, missing_ok=True)
        answer_in_time(remove, where=str(path), timeout_s=_WRITE_TIMEOUT_S)
    except (LateError, MemoryError, OSError) as error:
        logger.warning("%s stays (%s): remove it before another head looks there", path, error)


def record_age_s(directory: Path) -> float:
    """The seconds since a head last was at work with the records in a directory, or a few less.

    The disk's clock counts, whichever machine that is on. 0.0 where the disk does not say.
    """
    now_path = directory / _NOW_FILE
    newest_s = now_s = 0.0
    with contextlib.suppress(OSError):
        newest_s = max(path.stat().st_mtime for path in directory.iterdir() if path != now_path)
        now_path.write_bytes(b"")
        now_s = now_path.stat().st_mtime
        now_path.unlink()
    return max(0.0, now_s - newest_s)


def started_nodes(directory: Path) -> tuple[int, ...]:
    """The numbers of the nodes that the head has started which has left a directory.

    Raises:
        OSError: they cannot be read.
    """
    content = (directory / _NODES_FILE).read_bytes()
    return tuple(int(line) for line in content.split() if line.isdigit())


def has_nodes(directory: Path) -> bool:
    """Whether the head that has left a directory may have started a node."""
    try:
        content = (directory / _NODES_FILE).read_bytes()
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return bool(content)


def may_have_nodes(record: RunRecord, directory: Path) -> bool:
    """Whether nodes of the run that a head has left in a directory may look for a head still."""
    cluster = record.job.cluster
    return record_age_s(directory) < LIVING_LEASES * cluster.lease_s + cluster.patience_s


@dataclass(frozen=True, slots=True)
class JournalHold:
    """The hold that a head has on the directory of its journal, until another head takes it.

    A head that was cut off, or stood still, may go on after another one has taken its run up, and
    not all file systems have locks that would keep either out. So each head writes its name when it
    takes the directory, and reads the name before it does what cannot be undone.

    Attributes:
        holder: random name of the head.
    """

    directory: Path
    holder: str

    def take(self) -> None:
        """Takes the directory from whichever head has it.

        Raises:
            OSError: the disk refuses.
        """
        replace_file(self.directory / HOLDER_FILE, self.holder.encode())

    def is_lost(self) -> bool:
        """Whether another head has taken the directory; not if that, or its holder, was removed.

        Raises:
            OSError: the disk refuses.
        """
        try:  # A client of NFS asks its server when it opens a file, and not for what it lists.
            name = (self.directory / HOLDER_FILE).read_text(errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            return False
        return name != self.holder


class NodeLog:
    """The numbers of the nodes that a head has started.

    Args:
        directory: directory of the journal.
        holder: random name of the head; "": no other head can take the directory.

    Attributes:
        next_node: lowest number that no node has had.

    Raises:
        ConfigError: the file can be neither read nor made.
    """

    def __init__(self, directory: Path, *, holder: str = "") -> None:
        self._path = directory / _NODES_FILE
        self._holder = holder
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        try:
            self._fd = os.open(self._path, flags, 0o600)
            content = os.pread(self._fd, os.fstat(self._fd).st_size, 0)
        except OSError as error:
            remedy = f"the numbers of nodes cannot be kept there ({error.strerror})"
            raise ConfigError("--state", str(directory), remedy) from error
        self._waiting: deque[int] = deque()  # The numbers that are not written yet.
        self._writing = threading.Lock()
        self._nodes = [int(line) for line in content.split() if line.isdigit()]
        # A power loss may have torn the last line.
        self._start = b"" if not content or content.endswith(b"\n") else b"\n"
        self.next_node = max(self._nodes, default=-1) + 1

    def add(self, node: int) -> None:
        """Notes a node before it is started; a disk that refuses, or hangs, is only warned of.

        A power loss of the head's machine may lose the newest numbers, but not the first; a killed
        head loses none that it was not warned of. While a write hangs, nothing waits for another:
        it takes the numbers after it along.
        """
        self._nodes.append(node)
        self.next_node = max(self.next_node, node + 1)
        self._waiting.append(node)
        problem = f"a write has not ended in {_WRITE_TIMEOUT_S:g} s"
        if not self._writing.locked():
            try:
                write = self._write_waiting
                answer_in_time(write, where=str(self._path), timeout_s=_WRITE_TIMEOUT_S)
            except OSError as error:
                problem = error.strerror or str(error)
            except (LateError, MemoryError) as error:
                problem = str(error)
            else:
                return
        logger.warning(
            "%s cannot be written to (%s): if this head is lost, the next one may give the "
            "number of node %s again",
            self._path,
            problem,
            node,
        )

    def _write_waiting(self) -> None:
        with self._writing:
            while self._waiting:
                self._write(b"%d\n" % self._waiting.popleft())

    def _write(self, lines: bytes) -> None:
        os.write(self._fd, self._start + lines)
        self._start = b""
        if len(self._nodes) == 1:  # That there are nodes at all must never be lost.
            os.fsync(self._fd)

    def move(self, directory: Path) -> None:
        """Goes on with a file in another directory, into which all numbers are written.

        The record of the run is there already, and is given up here.

        Raises:
            ConfigError, OSError: the disk there refuses.
        """
        moved = NodeLog(directory)
        moved._nodes = list(self._nodes)
        moved._write(b"".join(b"%d\n" % node for node in self._nodes))
        self.close()
        give_up_run(self._path.parent)
        self._waiting, self._writing = moved._waiting, moved._writing
        self._path, self._fd, self._start = moved._path, moved._fd, b""

    def is_taken(self) -> bool:
        """Whether another head has taken the directory, and with it the run.

        Raises:
            OSError: the disk refuses.
        """
        return bool(self._holder) and JournalHold(self._path.parent, self._holder).is_lost()

    def touch(self) -> None:
        """Notes that a head runs now; call it every TOUCH_PERIOD_S.

        Raises:
            OSError: the disk refuses.
        """
        os.utime(self._path)

    def close(self) -> None:
        """Closes the file, unless a write to it hangs."""
        if not self._writing.locked():
            os.close(self._fd)


def replace_file(path: Path, content: bytes) -> None:
    """Writes a file durably, whole or not at all; who has the one before it open keeps that.

    Raises:
        OSError: the disk refuses.
    """
    new_path = path.with_name(f"{path.name}.new")
    with open(new_path, "wb", opener=_open_private) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    new_path.replace(path)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
