"""Parts of a save: what ranks write by themselves when their head does not come back.

Each run of a job on machines has a directory of its own at the place of saves. Readers of saves do
not look there:

    {place}/run-000002-4f1c/epoch-00003                          mark of the head: an epoch began
                           /answer-00001-e3-s-1-v16-a17-l4-7-c   what a rank knows, written first
                           /layer-00004-17-00001.safetensors     layer 4 of age 17, by rank 1
                           /part-00001                           the files of rank 1, written last
                           /head                                 where a head listens

The number of a run is higher than those of the runs before it. A rank writes only while its run is
the newest, and while no head has marked an epoch without its node. assembly.py makes a save of the
parts. The name of an answer tells what others need of it, so that thousands of ranks list the
directory and read one answer each, with the newest vector (AnswerName).

The file `head` names the head that runs the job, or the one that waits for nodes of a lost head.
Nodes and agents that have lost their head look there for the next one (nodes/known_heads.py). Who
listens at such an address must still prove that it has the token file.

Source: docs/protocol.md, "Nodes without a head".
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import numpy as np
import xxhash

from planaria.checkpoint.disk.storage import (
    PARTIAL,
    VERSION_NAME,
    Content,
    ContentInfo,
    Storage,
    digest_of,
)
from planaria.checkpoint.disk.tiers import safetensors_content, tensors_in
from planaria.core.messages import LayerFile
from planaria.errors import CheckpointError, UnreadableError
from planaria.transport.sockets import Address, can_be_host

_NUM_ADDRESSES_MAX: Final = 8
_HOST_CHARACTERS_MAX: Final = 253  # The longest name that DNS has.
_HEAD_BYTES_MAX: Final = 4096
_ANSWER_FILE: Final = re.compile(
    r"answer-(\d{5,})-e(-?\d+)-s(-?\d+)-v(-?\d+)-a(-?\d+)-l(\d+)-(\d+)(-c)?", re.ASCII
)
RUN_NAME: Final = re.compile(r"run-(\d{6})-([0-9a-f]+)", re.ASCII)


class EpochMark(msgspec.Struct, frozen=True, kw_only=True):
    """The mark of the head that an epoch has begun.

    Attributes:
        version: version of the mark's format.
        nodes: members of the epoch.
        job: facts that identify the job, as in a manifest.
    """

    version: int = 1
    epoch: int
    nodes: tuple[int, ...]
    job: dict[str, Any]


class PartAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank says to the others before it writes its part; like `Stopped` to a coordinator.

    Attributes:
        epoch: newest epoch that the rank has heard of; it has left it for good.
        since: epoch in which the job last went back, as far as the rank knows.
        vector_iteration: iteration of `vector`; -1: the rank has no vector.
        vector: newest commit vector that the rank holds; empty: none.
        layers: the first layer that the rank holds, and the one after its last; (0, 0): it holds
            none, or not all between, or not all of one age and state.
        age: number of iterations applied to these layers.
        is_complete: whether the rank has all gradients of these layers of one more iteration.
    """

    node: int
    rank: int
    epoch: int
    since: int
    vector_iteration: int = -1
    vector: bytes = b""
    layers: tuple[int, int] = (0, 0)
    age: int = -1
    is_complete: bool = False


class AnswerName(NamedTuple):
    """What the name of an answer tells; see PartAnswer."""

    rank: int
    epoch: int
    since: int
    vector_iteration: int
    age: int
    first_layer: int
    end_layer: int
    is_complete: bool

    def holds(self, layer: int, *, age: int, are_all: bool) -> bool:
        """Whether the rank surely holds a layer of an age once it has applied the newest vector.

        Args:
            are_all: whether all answers are known; else it may learn of a vector that is not.
        """
        has_vector = self.is_complete and self.vector_iteration == self.age
        is_settled = has_vector or not self.is_complete or are_all
        is_there = self.first_layer <= layer < self.end_layer
        return is_there and is_settled and self.age + has_vector == age


class PartLayer(msgspec.Struct, frozen=True, kw_only=True):
    """A layer in a part.

    Attributes:
        age: number of iterations applied to the layer.
    """

    age: int
    file: LayerFile


class RankPart(msgspec.Struct, frozen=True, kw_only=True):
    """All that a rank has written.

    Attributes:
        version: version of the part's format.
        epoch, since: the same as in the rank's answer.
        num_layers: number of layers of the model.
    """

    version: int = 1
    node: int
    rank: int
    epoch: int
    since: int
    num_layers: int
    layers: tuple[PartLayer, ...]


class HeadMark(msgspec.Struct, frozen=True, kw_only=True):
    """Where a head of the run listens.

    Attributes:
        version: version of the mark's format.
        addresses: hosts and ports, at most 8; the one to try first is the first.
    """

    version: int = 1
    addresses: tuple[Address, ...]


Record = TypeVar("Record", EpochMark, HeadMark, PartAnswer, RankPart)


@dataclass(frozen=True, slots=True)
class RunContents:
    """What lies in the directory of a run.

    Attributes:
        mark: newest mark of its heads; None: there is none.
        damage: names of what could not be decoded; of marks those that are newer.
    """

    mark: EpochMark | None = None
    answers: tuple[PartAnswer, ...] = ()
    parts: tuple[RankPart, ...] = ()
    damage: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RunPlace:
    """The directory of a run. All methods raise a CheckpointError if the storage refuses.

    Attributes:
        name: name of the directory.
    """

    storage: Storage
    name: str

    @property
    def where(self) -> str:
        """The directory, as people name it."""
        return self.storage.where(self.name)

    def write_mark(self, mark: EpochMark) -> None:
        """Marks that an epoch has begun; for the head."""
        self._write(f"epoch-{mark.epoch:05d}", msgspec.json.encode(mark), _always)

    def write_head(self, mark: HeadMark) -> None:
        """Tells nodes that have lost their head where to look for one."""
        assert _can_be_mark(mark), mark
        self._write("head", msgspec.json.encode(mark), _always)

    def head(self) -> HeadMark | None:
        """Where a head has written that it listens; None: it has not, or that is damaged."""
        name = f"{self.name}/head"
        file = self.storage.entries(self.name).get(name)
        if file is None or file.num_bytes > _HEAD_BYTES_MAX:
            return None
        content = _content(self.storage, name)
        mark = None if content is None else _record_of(content, HeadMark)
        return mark if mark is not None and _can_be_mark(mark) else None

    def refusal(self, *, node: int, epoch: int) -> str:
        """Why a node of an epoch must write nothing here; "": it may."""
        newest = newest_run(self.storage)
        if newest > self.name:
            return f"another run of the job has begun ({newest})"
        if newest != self.name:
            return f"its head has written nothing to {self.where}, or the run has ended"
        mark = self.newest_mark()
        if mark is not None and mark.epoch > epoch and node not in mark.nodes:
            return f"epoch {mark.epoch} has begun without node {node}"
        return ""

    def write_answer(self, answer: PartAnswer) -> None:
        """Tells the other ranks what this one holds."""
        self._write(_answer_file(answer_name(answer)), msgspec.json.encode(answer), _always)

    def answer_names(self) -> tuple[AnswerName, ...]:
        """What the ranks have answered, as far as the names of the answers tell it."""
        prefix = f"{self.name}/"
        matches = (_ANSWER_FILE.fullmatch(n.removeprefix(prefix)) for n in self._names("answer"))
        return tuple(_name_in(match) for match in matches if match)

    def answer(self, name: AnswerName) -> PartAnswer | None:
        """An answer; None: it is damaged, or gone."""
        content = _content(self.storage, f"{self.name}/{_answer_file(name)}")
        return None if content is None else _record_of(content, PartAnswer)

    def write_layer(
        self,
        layer: int,
        tensors: dict[str, np.ndarray],
        *,
        age: int,
        rank: int,
        may_write: Callable[[], bool],
    ) -> PartLayer:
        """Writes a layer of a part.

        Args:
            may_write: whether the rank may still write here.
        """
        file, content = layer_file_name(layer, age=age, rank=rank), safetensors_content(tensors)
        digest = digest_of(content)
        self._write(file, content, may_write)
        return PartLayer(age=age, file=LayerFile(layer, file, *digest))

    def write_part(self, part: RankPart, *, may_write: Callable[[], bool]) -> None:
        """Makes a part complete; all its layers must be written."""
        self._write(f"part-{part.rank:05d}", msgspec.json.encode(part), may_write)

    def read_layer(self, file: LayerFile) -> dict[str, np.ndarray]:
        """The tensors in a layer's file.

        Raises:
            CheckpointError: it is not what was written; an UnreadableError if it might be read
                another time.
        """
        name = f"{self.name}/{file.file}"
        where, content = self.storage.where(name), self.storage.read(name)
        if xxhash.xxh3_128_hexdigest(content) != file.xxh3_128:
            raise CheckpointError(f"{where} does not hold what was written to it")
        return tensors_in(where, content)

    def marks(self) -> tuple[EpochMark, ...]:
        """The marks of the heads, the oldest epoch first; reads them one by one."""
        marks, _ = self._records("epoch", EpochMark)
        return tuple(sorted(marks, key=lambda mark: mark.epoch))

    def newest_mark(self) -> EpochMark | None:
        """The mark of the newest epoch that is not damaged; reads no older ones.

        A job of weeks may have thousands, and ranks ask before each write.
        """
        return self._newest_mark()[0]

    def contents(self) -> RunContents:
        """All records in the directory."""
        mark, damaged_marks = self._newest_mark()
        answers, damaged_answers = self._records("answer", PartAnswer)
        parts, damaged_parts = self._records("part", RankPart)
        damage = (*damaged_marks, *damaged_answers, *damaged_parts)
        return RunContents(mark, answers, parts, damage)

    def _newest_mark(self) -> tuple[EpochMark | None, tuple[str, ...]]:
        """The newest mark that is not damaged, and the names of newer ones, which are."""
        damage: list[str] = []
        # A number of more than five digits comes too early in the alphabet.
        for name in sorted(self._names("epoch"), key=lambda n: (len(n), n), reverse=True):
            content = _content(self.storage, name)
            if content is None:
                continue
            if (mark := _record_of(content, EpochMark)) is not None:
                return mark, tuple(damage)
            damage.append(name)
        return None, tuple(damage)

    def _records(
        self, kind: str, record: type[Record]
    ) -> tuple[tuple[Record, ...], tuple[str, ...]]:
        """The records of a kind, and the names of those that are damaged."""
        records, damage = [], []
        for name in sorted(self._names(kind)):
            content = _content(self.storage, name)
            if content is None:
                continue
            if (value := _record_of(content, record)) is None:
                damage.append(name)
            else:
                records.append(value)
        return tuple(records), tuple(damage)

    def _names(self, kind: str) -> list[str]:
        """The names of the records of a kind, in any order."""
        prefix = f"{self.name}/{kind}-"
        return [n for n in _whole_files(self.storage, self.name) if n.startswith(prefix)]

    def _write(self, file: str, content: Content, may_write: Callable[[], bool]) -> None:
        self.storage.write(f"{self.name}/{file}", content, may_write=may_write)


def answer_name(answer: PartAnswer) -> AnswerName:
    """What the name of the answer tells."""
    return AnswerName(
        answer.rank,
        answer.epoch,
        answer.since,
        answer.vector_iteration,
        answer.age,
        *answer.layers,
        answer.is_complete,
    )


def _name_in(match: re.Match[str]) -> AnswerName:
    rank, epoch, since, vector, age, first, end = map(int, match.groups()[:-1])
    return AnswerName(rank, epoch, since, vector, age, first, end, bool(match[8]))


def _answer_file(name: AnswerName) -> str:
    rank, epoch, since, vector, age, first, end, is_complete = name
    state = f"a{age}-l{first}-{end}{'-c' if is_complete else ''}"
    return f"answer-{rank:05d}-e{epoch}-s{since}-v{vector}-{state}"


def layer_file_name(layer: int, *, age: int, rank: int) -> str:
    """The name of the file of a layer in a part."""
    return f"layer-{layer:05d}-{age}-{rank:05d}.safetensors"


def newest_run(storage: Storage) -> str:
    """The name of the directory of the newest run; "": there is none."""
    for name in sorted(_run_names(storage), reverse=True):
        files = _whole_files(storage, name)
        if files and not _has_versions(name, files):
            return name
    return ""


def newer_run(storage: Storage, run: str) -> str:
    """The name of a run that has begun after another one, whose saves count; "": there is none.

    Args:
        run: name of the other one; "": it has no directory, and none begins after it.
    """
    newest = newest_run(storage) if run else ""
    return newest if newest > run else ""


def next_run(storage: Storage, run: str) -> str:
    """The name of the directory of a run that begins.

    Args:
        run: random name of the run, in hexadecimal digits.
    """
    match = RUN_NAME.fullmatch(newest_run(storage))
    name = f"run-{int(match[1]) + 1 if match else 1:06d}-{run}"
    assert RUN_NAME.fullmatch(name), name
    return name


def remove_runs(storage: Storage, *, before: str = "", through: str = "") -> None:
    """Removes the directories of runs, their marks last; all of them if no limit is given.

    Args:
        before: name of the run whose predecessors are removed.
        through: name of the run that is removed with its predecessors.
    """
    for name in sorted(_run_names(storage)):
        if (not before or name < before) and (not through or name <= through):
            names = sorted(storage.entries(name), key=lambda n: (n.startswith(f"{name}/epoch"), n))
            if not _has_versions(name, names):
                storage.remove(name, names)


def _has_versions(name: str, entries: Iterable[str]) -> bool:
    """Whether a directory is no run's: it is a save that was kept under such a name."""
    files = (entry.removeprefix(f"{name}/").partition("/")[0] for entry in entries)
    return any(VERSION_NAME.fullmatch(file) for file in files)


def _whole_files(storage: Storage, name: str) -> dict[str, ContentInfo]:
    """The contents of a run's directory, without those that somebody is still writing."""
    return {n: info for n, info in storage.entries(name).items() if not n.endswith(PARTIAL)}


def _content(storage: Storage, name: str) -> bytes | None:
    """The content of a file; None: it was removed meanwhile."""
    try:
        return storage.read(name)
    except UnreadableError:
        raise
    except CheckpointError:
        return None


def _record_of(content: bytes, record: type[Record]) -> Record | None:
    """A record; None: it is damaged, or of another format."""
    try:
        value = msgspec.json.decode(content, type=record)
    except (RecursionError, ValueError):
        return None
    return None if getattr(value, "version", 1) != 1 else value


def _run_names(storage: Storage) -> set[str]:
    return {name for name in storage.versions() if RUN_NAME.fullmatch(name)}


def _can_be_mark(mark: HeadMark) -> bool:
    """Whether the addresses are so many as there may be, and each can be one."""
    return 0 < len(mark.addresses) <= _NUM_ADDRESSES_MAX and all(
        len(host) <= _HOST_CHARACTERS_MAX and can_be_host(host) and 0 < port < 1 << 16
        for host, port in mark.addresses
    )


def _always() -> bool:
    return True
