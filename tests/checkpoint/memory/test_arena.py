"""Copies of layers in memory that outlives a process."""

import os
import signal
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from helpers.linked_ranks import TIMEOUT_S, in_threads, wait_until
from planaria.checkpoint.memory.arena import Arena
from planaria.checkpoint.memory.arena_file import arena_fd
from planaria.checkpoint.memory.version import Version, hash_of
from planaria.core.copies import Label
from planaria.errors import CheckpointError

HEAD = b'{"tensors": 2}'
OLD, NEW = Label(-1, 0, 4), Label(-1, 0, 5)


def never() -> bool:
    return False


@pytest.fixture
def fd() -> Iterator[int]:
    """An arena's file."""
    opened = arena_fd()
    yield opened
    os.close(opened)


def written(arena: Arena, layer: int, label: Label, *, num_bytes: int = 10_000) -> Version:
    """A version of random bytes, whole."""
    content = np.random.default_rng(layer).integers(0, 256, num_bytes, dtype=np.uint8)
    version = arena.begin(layer, label, head=HEAD, num_bytes=num_bytes, piece_bytes=4096)
    version.tensors[:] = content[len(HEAD) :]
    version.hash_pieces()
    arena.finish(version)
    return version


def test_what_is_whole_outlives_the_process(fd: int) -> None:
    """The next process of the rank finds it, with its head."""
    first = Arena(fd)
    content = written(first, 3, OLD).tensors.copy()

    found = Arena(fd)

    assert found.versions() == {3: (OLD,)}
    version = found.read(3, OLD)
    assert version.head == HEAD
    assert (version.tensors == content).all()


def test_a_process_that_is_killed_while_it_writes_leaves_nothing_of_it(fd: int) -> None:
    """Neither a version nor memory; the older version is whole."""
    written(Arena(fd), 3, OLD)
    before = Arena(fd).num_bytes
    pages = os.fstat(fd).st_blocks
    pid = os.fork()
    if pid == 0:
        arena = Arena(fd)
        arena.begin(3, NEW, head=HEAD, num_bytes=1_000_000, piece_bytes=4096).tensors[:] = 7
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert os.fstat(fd).st_blocks > pages

    arena = Arena(fd)

    assert arena.versions() == {3: (OLD,)}
    assert arena.num_bytes == before
    assert os.fstat(fd).st_blocks == pages
    arena.read(3, OLD)


def test_what_was_complete_is_known_to_later_processes(fd: int) -> None:
    """Also where a version was torn once; what takes its place in the table is another one."""
    arena = Arena(fd)
    written(arena, 3, OLD)
    arena.begin(3, NEW, head=HEAD, num_bytes=10_000, piece_bytes=4096)
    arena.note_complete(OLD)
    arena.note_complete(NEW)  # It is not whole.
    assert arena.complete_labels() == {OLD}

    assert [Arena(fd).complete_labels() for _ in range(2)] == [{OLD}] * 2

    later = Arena(fd)
    assert later.share(3, NEW, like=OLD)
    later.keep_only({NEW}, layers=(3,))
    written(later, 3, OLD)
    assert later.complete_labels() == Arena(fd).complete_labels() == frozenset()


def test_what_is_dropped_makes_room_for_the_next_version(fd: int) -> None:
    """Of each layer there are two versions at most, in the same memory for ever."""
    arena = Arena(fd)
    sizes = set()
    for age in range(6):
        written(arena, 0, Label(-1, 0, age))
        arena.keep_only({Label(-1, 0, age)}, layers=(0,))
        sizes.add((arena.num_bytes, os.fstat(fd).st_size) if age > 1 else (0, 0))

    assert len(sizes - {(0, 0)}) == 1
    assert arena.versions() == {0: (Label(-1, 0, 5),)}


def test_memory_that_was_reserved_is_what_versions_are_written_to(fd: int) -> None:
    """Two of each layer, head and hashes included; what is too small is given back."""
    arena = Arena(fd)
    arena.reserve({0: 10_000, 1: 10_000, 2: 100}, is_over=never)
    reserved = arena.num_bytes
    for label in (OLD, NEW):
        for layer in range(2):
            written(arena, layer, label)
    assert arena.num_bytes == reserved

    written(arena, 2, OLD)
    small, large = 4096, 12_288
    assert arena.num_bytes == reserved - 2 * small + large


def test_nothing_is_reserved_for_a_layer_without_state(fd: int) -> None:
    """As one whose parameters are all frozen; the layers after it are reserved all the same."""
    arena = Arena(fd)
    arena.reserve({0: 0, 1: 10_000}, is_over=never)
    reserved = arena.num_bytes
    for label in (OLD, NEW):
        written(arena, 1, label)

    assert arena.num_bytes == reserved > 0


def test_a_first_version_without_optimizer_state_leaves_the_reserved_memory_as_it_is(
    fd: int,
) -> None:
    """It is a third of the later ones; their memory was given back for it and made once more."""
    arena = Arena(fd)
    arena.reserve({0: 100_000}, is_over=never)
    reserved, size = arena.num_bytes, os.fstat(fd).st_size
    for label, num_bytes in ((OLD, 30_000), (NEW, 100_000), (Label(-1, 0, 6), 100_000)):
        written(arena, 0, label, num_bytes=num_bytes)
        arena.keep_only({label}, layers=(0,))

    assert (arena.num_bytes, os.fstat(fd).st_size) == (reserved, size)


def test_a_version_takes_memory_that_is_being_reserved_and_waits_only_for_its_own(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For all layers one first; a layer that has made its own meanwhile gets one more."""
    monkeypatch.setattr("planaria.checkpoint.memory.arena._PIECE_BYTES", 4096)
    arena, goes_on, has_begun = Arena(fd), threading.Event(), threading.Event()

    def wait() -> bool:
        has_begun.set()
        assert goes_on.wait(TIMEOUT_S)
        return False

    with in_threads(lambda: arena.reserve({0: 10_000, 1: 10_000}, is_over=wait)) as (reserving,):
        assert has_begun.wait(TIMEOUT_S)
        with in_threads(lambda: written(arena, 0, OLD)) as (writing,):
            wait_until(lambda: bool(arena._changed._waiters))  # type: ignore[attr-defined]
            written(arena, 1, OLD)
            assert not writing.done()
            goes_on.set()
            writing.result(timeout=TIMEOUT_S)
        reserving.result(timeout=TIMEOUT_S)
    reserved = arena.num_bytes
    for layer in range(2):
        written(arena, layer, NEW)

    assert arena.num_bytes == reserved
    assert arena.versions() == {0: (OLD, NEW), 1: (OLD, NEW)}


def test_what_is_reserved_no_more_is_given_back(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The epoch is over, or there is not enough memory."""
    monkeypatch.setattr("planaria.checkpoint.memory.arena._PIECE_BYTES", 4096)
    looks, arena = iter([False, False, True]), Arena(fd)
    pages = os.fstat(fd).st_blocks
    arena.reserve({0: 1 << 20}, is_over=looks.__next__)
    assert os.fstat(fd).st_blocks == pages

    rest = iter([1 << 30, 1 << 30, 0])
    monkeypatch.setattr("planaria.checkpoint.memory.arena.available_bytes", rest.__next__)
    with pytest.raises(CheckpointError):
        arena.reserve({0: 1 << 20}, is_over=never)
    assert os.fstat(fd).st_blocks == pages
    assert not arena.num_bytes


def test_what_there_is_no_memory_for_is_not_reserved(fd: int) -> None:
    """It is refused when it is needed."""
    with pytest.raises(CheckpointError, match="there is no memory for a copy of layer 0"):
        Arena(fd).reserve({0: 1 << 50}, is_over=never)


def test_memory_of_layers_that_are_kept_no_more_is_given_back(fd: int) -> None:
    """Other layers keep theirs."""
    arena = Arena(fd)
    for layer in (0, 1):
        written(arena, layer, OLD, num_bytes=4_000_000)
    pages = os.fstat(fd).st_blocks
    content = arena.read(1, OLD).tensors.copy()

    arena.keep_only({NEW}, layers=(1,))
    assert os.fstat(fd).st_blocks < 0.6 * pages
    written(arena, 1, NEW, num_bytes=4_000_000)

    assert arena.versions() == {1: (NEW,)}
    assert (arena.read(1, NEW).tensors == content).all()


def test_a_version_of_the_same_label_is_written_anew(fd: int) -> None:
    """As when what was sent again is different."""
    arena = Arena(fd)
    written(arena, 0, OLD, num_bytes=5_000)
    written(arena, 0, OLD, num_bytes=9_000)

    assert len(arena.read(0, OLD).tensors) == 9_000 - len(HEAD)


def test_labels_tell_apart_states_of_one_age(fd: int) -> None:
    """One from before all went back counts no more."""
    arena = Arena(fd)
    written(arena, 0, Label(-1, 0, 4))
    written(arena, 0, Label(2, 2, 4))

    assert arena.versions() == {0: (Label(-1, 0, 4), Label(2, 2, 4))}
    with pytest.raises(CheckpointError, match="not there"):
        arena.read(0, Label(2, 3, 4))


def test_versions_that_are_the_same_share_memory_until_the_last_is_dropped(fd: int) -> None:
    arena = Arena(fd)
    version = written(arena, 0, OLD)
    taken, content = arena.num_bytes, version.content.copy()
    assert arena.share(0, NEW, like=OLD)
    assert not arena.share(1, NEW, like=OLD)

    assert arena.num_bytes == taken
    assert Arena(fd).versions() == {0: (OLD, NEW)}
    arena.keep_only({NEW}, layers=())
    assert (arena.read(0, NEW).content == content).all()
    arena.keep_only((), layers=())
    assert arena.num_bytes == 0


def test_a_version_that_is_shared_with_itself_keeps_its_memory(fd: int) -> None:
    """The next version would be written over it."""
    arena = Arena(fd)
    version = written(arena, 0, OLD)

    assert arena.share(0, OLD, like=OLD)

    written(arena, 0, NEW).content[:] = 0
    assert version.is_intact()
    assert arena.versions() == {0: (OLD, NEW)}


def test_memory_of_another_size_is_given_back(fd: int) -> None:
    """A layer takes what its versions take, however often its size changes."""
    arena = Arena(fd)
    for number in range(1, 12):
        label = Label(-1, 0, number)
        version = written(arena, 0, label, num_bytes=100_000 * number)
        arena.keep_only({label}, layers={0})

    assert arena.num_bytes < 2.5 * len(version.content)
    num_blocks = os.fstat(fd).st_blocks
    assert 512 * num_blocks < 2.5 * len(version.content) + (1 << 18)


def test_versions_are_alike_only_if_all_their_bytes_are(fd: int) -> None:
    arena = Arena(fd)
    version = written(arena, 0, OLD)
    other = written(arena, 0, NEW)
    assert version.has_same_pieces(other)
    other.content[-1] ^= 1
    other.hash_pieces()

    assert not version.has_same_pieces(other)


@pytest.mark.parametrize("position", [0, 5_000, 9_999])
def test_a_flipped_bit_is_found(fd: int, position: int) -> None:
    """Wherever it is, the head included."""
    arena = Arena(fd)
    version = written(arena, 0, OLD)
    version.content[position] ^= 1

    with pytest.raises(CheckpointError, match="layer 0 of iteration 4"):
        arena.read(0, OLD)


def test_all_spoilt_copies_that_are_read_at_once_are_found_at_once(fd: int) -> None:
    """Each cost a recovery of its own: over a minute where records took seconds each."""
    arena = Arena(fd)
    for layer in range(4):
        version = written(arena, layer, OLD)
        if layer in (1, 2):
            version.content[9] ^= 1

    with pytest.raises(CheckpointError, match=r"layer 1 of iteration 4 .*; and 1 more with it"):
        arena.read_all(OLD, layers=range(3))
    assert set(arena.versions()) == {0, 3}
    assert set(arena.read_all(OLD, layers=range(3))) == {0}


def test_a_flipped_bit_of_a_hash_is_found(fd: int) -> None:
    """The hashes are hashed, too."""
    arena = Arena(fd)
    version = written(arena, 0, OLD)
    version.hash_pieces()
    version.store_piece(1, version.piece(2)[:100].copy(), 0)
    arena.read(0, OLD)
    version.piece(1)[:] = 1
    version.hash_pieces()

    with pytest.raises(CheckpointError, match="changed since it was written"):
        arena.read(0, OLD)


def test_a_piece_is_taken_only_as_it_was_sent(fd: int) -> None:
    """Neither another length nor other bytes."""
    arena = Arena(fd)
    version = arena.begin(0, OLD, head=HEAD, num_bytes=10_000, piece_bytes=4096)
    piece = np.full(4096, 9, dtype=np.uint8)
    value = hash_of(piece)

    assert not version.store_piece(0, piece, value ^ 1)
    assert not version.store_piece(2, piece, value)
    assert version.store_piece(1, piece, value)
    assert (version.piece(1) == 9).all()


def test_more_versions_than_the_table_has_room_for_are_refused(fd: int) -> None:
    """And those that there are stay."""
    arena = Arena(fd)
    for layer in range(2048):
        written(arena, layer, OLD, num_bytes=64)
    with pytest.raises(CheckpointError, match="a rank can keep at most 2048 copies of layers"):
        written(arena, 2048, OLD, num_bytes=64)
    assert sorted(arena.versions()) == list(range(2048))


def test_without_memory_the_version_is_refused(fd: int) -> None:
    """With what it takes, and nothing is left of it."""
    arena = Arena(fd)
    written(arena, 0, OLD)
    before = os.fstat(fd)

    with pytest.raises(CheckpointError, match=r"no memory .* layer 1: it takes \d+ bytes"):
        arena.begin(1, OLD, head=HEAD, num_bytes=1 << 50, piece_bytes=1 << 20)

    assert os.fstat(fd).st_size == before.st_size
    assert arena.versions() == {0: (OLD,)}
