"""Versions that outlive all memory: written behind it, and read where no memory has any."""

import errno
import logging
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
import torch.distributed as dist
from torch import nn

from helpers.linked_ranks import wait_until
from planaria.checkpoint.disk import storage
from planaria.checkpoint.disk.storage import Content, Directory
from planaria.errors import CheckpointError, ConfigError, UnreadableError
from planaria.torchrun import group_copies, restores
from planaria.torchrun.gathering import true_on_all
from planaria.torchrun.group_copies import GroupCopies
from planaria.torchrun.memory_checkpointer import MemoryCheckpointer
from planaria.torchrun.persisting import PersistentTier, Readiness
from planaria.torchrun.restores import Restores
from planaria.torchrun.shards import TrainingState

Make = Callable[..., MemoryCheckpointer]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes that of a single rank, as on a machine that has nothing in memory."""
    made: list[MemoryCheckpointer] = []
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)

    def one(**options: Any) -> MemoryCheckpointer:
        model = nn.Linear(4, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        where = {"persist_directory": str(tmp_path / "saves"), "persist_every": 2}
        where["directory"] = str(tmp_path / f"place{len(made)}")
        made.append(MemoryCheckpointer(model, optimizer, **{**where, **options}))
        return made[-1]

    yield one
    for each in made:
        each.close()
    dist.destroy_process_group()


def train(saver: MemoryCheckpointer, *iterations: Any) -> None:
    """Each sets all weights to its number; its version is complete then."""
    for iteration in iterations:
        weight(saver).data.fill_(float(iteration))
        assert saver.save(iteration)
        saver.wait_ended()


def weight(saver: MemoryCheckpointer) -> nn.Parameter:
    return next(saver._group._state.model.parameters())


def saves(tmp_path: Path) -> list[int]:
    """The iterations of complete saves, ascending."""
    manifests = (tmp_path / "saves").glob("*-*/manifest.json")
    return sorted(int(path.parent.name.partition("-")[0]) for path in manifests)


def test_every_second_version_is_written_and_outlives_memory(make: Make, tmp_path: Path) -> None:
    """And `persist` writes the newest one at once."""
    saver = make()
    train(saver, 1, 2, 3)
    wait_until(lambda: saves(tmp_path) == [2])
    assert saver.persist()
    assert saves(tmp_path) == [2, 3]
    saver.close()  # With it all that memory had.

    other = make()

    assert other.restore() == 3
    assert weight(other).tolist() == [[3.0] * 4]
    assert other.persist()  # It is there already.
    assert saves(tmp_path) == [2, 3]


def test_iterations_may_be_whole_numbers_of_any_type(make: Make, tmp_path: Path) -> None:
    """Those of numpy were saved in memory alone, and a restore in the same run failed."""
    saver = make()
    first: Any = np.int64(1)
    train(saver, first, torch.tensor(2))
    assert saver.persist()
    assert saves(tmp_path) == [2]
    assert saver.restore() == 2

    wrong: Any
    for wrong in (2.5, "3", None):
        with pytest.raises(ConfigError, match="must be a whole number") as caught:
            saver.save(wrong)
        assert (caught.value.field, caught.value.value) == ("iteration", wrong)


def test_a_script_may_make_its_tensors_on_a_device_by_default(make: Make) -> None:
    """What lies on the host all the same was made there, too, and the first save failed."""
    first, second = make(), make()
    torch.set_default_device("meta")  # As "cuda" on a machine that has one.
    try:
        train(first, 1)
        assert first.restore() == 1
        assert first.persist()
        assert second.restore() == 1  # From the disk.
        train(second, 2)
        assert second.restore() == 2
    finally:
        torch.set_default_device(None)

    assert weight(second).tolist() == [[2.0] * 4]


def test_what_was_restored_is_written_though_no_iteration_follows(
    make: Make, tmp_path: Path
) -> None:
    """A job whose ranks died after its last iteration ends with it."""
    first = make(directory=str(tmp_path / "place"))
    train(first, 1)
    first._memory._slot.close()  # As if the rank were dead.
    first.close()
    other = make(directory=str(tmp_path / "place"))
    assert other.restore() == 1
    assert saves(tmp_path) == []

    assert other.persist()
    assert saves(tmp_path) == [1]


@pytest.mark.parametrize("is_restored", [True, False])
def test_a_version_that_a_lost_rank_was_to_publish_is_published_after_a_reform(
    is_restored: bool, make: Make, tmp_path: Path
) -> None:
    """Ranks whose part had ended took it for saved, and `persist` returned True."""
    saver = make()
    train(saver, 1)
    copier, tier = saver._group._copier, saver._tier
    assert copier is not None
    assert tier is not None
    tier._begun = tier._saved = copier.complete()  # As on a rank that has written its shard.
    saver._group.end()
    saver._group.links.close()
    model = nn.Linear(4, 1, bias=False)
    saver.use(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    if is_restored:
        assert saver.restore() == 1

    assert saver.persist()
    assert saves(tmp_path) == [1]


def test_no_rank_waits_in_a_collective_for_what_takes_another_one_long(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group of a script may give up before a disk that hangs does, or before a rank that needs
    more shards than others has received them; links do not."""
    calls: list[str] = []

    def watch(place: object, name: str, kind: str) -> None:
        original = getattr(place, name)

        def watched(*arguments: Any) -> Any:
            answer = original(*arguments)
            calls.append(kind)
            return answer

        monkeypatch.setattr(place, name, watched)

    for owner, name in (
        *((PersistentTier, name) for name in ("saves", "bring", "wait")),
        *((Restores, name) for name in ("_checked_versions", "_exchange_shards")),
        (TrainingState, "assemble"),
    ):
        watch(owner, name, f"long: {name}")
    watch(Readiness, "do_with_all", "ready")
    for module in (group_copies, restores):
        watch(module, "gather_records", "collective")
    watch(group_copies, "true_on_all", "collective")
    saver = make()
    train(saver, 1)
    assert saver.persist()
    saver.close()
    calls.append("closed")
    other = make()
    assert other.restore() == 1
    assert other.persist()
    train(other, 2)
    watch(GroupCopies, "wait_ended", "long: wait_ended")
    assert other.restore() == 2

    after = {late for call, late in pairwise(calls) if call.startswith("long")}
    assert {"long: saves", "long: bring", "long: wait", "long: wait_ended"} <= {*calls}
    assert {"long: _checked_versions", "long: _exchange_shards", "long: assemble"} <= {*calls}
    assert "collective" not in after


def test_nothing_to_write_is_told(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert not make().persist()
    assert "saves nothing: no version is complete" in caplog.text


def test_a_version_is_not_published_without_all_its_shards(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Fewer ranks may be left than have saved it."""
    saver = make()
    train(saver, 1)
    copier, arena, tier = saver._group._copier, saver._memory.arena, saver._tier
    assert copier is not None
    assert copier._label is not None
    assert tier is not None
    label = copier._label._replace(since=2)
    assert arena.share(0, label, like=copier._label)

    tier.write(saver._group.links, (arena,), label, writers={0: 0})
    tier.wait()

    assert not tier.has_saved(label)
    assert saves(tmp_path) == []
    assert "memory has 1 of its 2 shards" in caplog.text


def test_a_save_begins_when_the_one_before_is_over(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank's part in that failed at once, and both would use the same tag."""
    may_write, are_writing = threading.Event(), list[bool]()
    write, begin, wait = Directory.write, PersistentTier.write, PersistentTier.wait

    def wait_and_write(*arguments: Any, **keys: Any) -> None:
        may_write.wait(60.0)
        write(*arguments, **keys)

    def note_and_begin(tier: PersistentTier, *arguments: Any, **keys: Any) -> None:
        are_writing.append(tier.is_writing)
        begin(tier, *arguments, **keys)

    def let_write_and_wait(tier: PersistentTier, *arguments: float) -> None:
        if tier.is_writing:
            may_write.set()
        wait(tier, *arguments)

    def false_for_the_first(*flags: bool) -> list[bool]:
        return [False] if flags[1:] == () and len(are_writing) == 1 else true_on_all(*flags)

    monkeypatch.setattr(Directory, "write", wait_and_write)
    monkeypatch.setattr(PersistentTier, "write", note_and_begin)
    monkeypatch.setattr(PersistentTier, "wait", let_write_and_wait)
    monkeypatch.setattr(group_copies, "true_on_all", false_for_the_first)
    saver = make(persist_every=1)
    train(saver, 1)

    saver.persist()

    assert are_writing == [False, False]


def test_files_hold_tensors_that_others_can_read(make: Make, tmp_path: Path) -> None:
    saver = make()
    train(saver, 1)
    assert saver.persist()

    (path,) = (tmp_path / "saves").glob("1-*/*.safetensors")
    tensors = safetensors.numpy.load_file(path)

    assert np.array_equal(tensors["parameter/weight"], np.full((1, 4), 1.0, np.float32))


def test_the_newest_run_s_versions_are_kept_and_read_first(make: Make, tmp_path: Path) -> None:
    """Another run had come further before it was given up."""
    first = make(keep=2)
    train(first, 8)
    assert first.persist()
    first.close()
    second = make(keep=2)
    train(second, 2, 3)  # It has not restored anything.
    assert second.persist()
    train(second, 4)
    assert second.persist()
    second.close()

    assert saves(tmp_path) == [3, 4]
    assert make().restore() == 4


@pytest.mark.parametrize("restores", [True, False])
def test_a_run_s_saves_are_the_newest_though_an_earlier_one_s_clock_was_ahead(
    restores: bool, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would be pruned as soon as they were there."""
    with monkeypatch.context() as patch:
        patch.setattr("planaria.torchrun.group_copies.time.time_ns", lambda: 1 << 61)
        first = make(keep=1)
    train(first, 3)
    assert first.persist()
    first.close()  # With it all that memory had.
    second = make(keep=1)
    if restores:
        assert second.restore() == 3
    train(second, 4)
    assert second.persist()
    second.close()

    assert saves(tmp_path) == [4]
    assert make().restore() == 4


def test_a_version_that_memory_has_is_not_read_from_disk(make: Make, tmp_path: Path) -> None:
    saver = make()
    train(saver, 1)
    assert saver.persist()
    train(saver, 2)
    for path in (tmp_path / "saves").glob("*-*/*.safetensors"):
        path.write_bytes(b"damaged")
    weight(saver).data.zero_()

    assert saver.restore() == 2
    assert weight(saver).tolist() == [[2.0] * 4]


def test_a_damaged_version_gives_way_to_the_one_before(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saver = make()
    for iteration in (1, 2):
        train(saver, iteration)
        assert saver.persist()
    saver.close()
    (path,) = (tmp_path / "saves").glob("2-*/*.safetensors")
    path.write_bytes(path.read_bytes()[:-1] + b"?")

    with caplog.at_level(logging.WARNING):
        assert make().restore() == 1
    assert "does not hold what was written to it" in caplog.text


def test_saves_of_which_none_can_be_used_are_not_taken_for_a_new_beginning(
    make: Make, tmp_path: Path
) -> None:
    """It would train from the start, and write over what somebody could still mend."""
    saver = make()
    train(saver, 1)
    assert saver.persist()
    saver.close()
    (path,) = (tmp_path / "saves").glob("1-*/*.safetensors")
    path.write_bytes(b"damaged")

    with pytest.raises(CheckpointError, match="name another persist_directory"):
        make().restore()


def test_a_place_that_cannot_be_listed_is_not_taken_for_an_empty_one(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_directory: Directory) -> list[str]:
        raise CheckpointError("no answer")

    monkeypatch.setattr(Directory, "versions", fail)

    with pytest.raises(CheckpointError, match="can be used: no answer; mend that"):
        make().restore()


@pytest.mark.parametrize("file", ["manifest.json", "layer-00000.safetensors"])
def test_a_save_that_cannot_be_read_now_gives_way_to_none(
    file: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training would go on from the older one, in a newer epoch, and prune the newer one."""
    saver = make(persist_every=1)
    for iteration in (1, 2):
        train(saver, iteration)
        assert saver.persist()
    saver.close()
    read, failures = Directory.read, [UnreadableError("cannot read it: stale file handle")]

    def fail_once(directory: Directory, name: str) -> bytes:
        if failures and name.startswith("2-") and name.endswith(file):
            raise failures.pop()
        return read(directory, name)

    monkeypatch.setattr(Directory, "read", fail_once)
    other = make(persist_every=1)

    with pytest.raises(CheckpointError, match="may be complete, and cannot be read now"):
        other.restore()
    assert other.restore() == 2


def test_what_memory_has_does_not_wait_for_an_older_save_that_cannot_be_read(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_directory: Directory, name: str) -> bytes:
        raise UnreadableError(f"cannot read {name}: stale file handle")

    saver = make(persist_every=1)
    train(saver, 1)
    assert saver.persist()
    train(saver, 2)
    monkeypatch.setattr(Directory, "read", fail)

    assert saver.restore() == 2


def test_saves_that_could_not_be_listed_are_counted_when_they_can(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Their epochs may be above this run's, whose saves would be pruned at once."""

    def fail(_directory: Directory) -> list[str]:
        raise UnreadableError("no answer")

    with monkeypatch.context() as patch:
        patch.setattr("planaria.torchrun.group_copies.time.time_ns", lambda: 1 << 61)
        first = make(keep=1)
    train(first, 3)
    assert first.persist()
    first.close()  # With it all that memory had.
    second = make(keep=1, persist_directory="", directory=str(tmp_path / "place"))
    train(second, 4)
    second._memory._slot.close()  # As if the rank were dead.
    second.close()
    third = make(keep=1, directory=str(tmp_path / "place"))
    with monkeypatch.context() as patch:
        patch.setattr(Directory, "versions", fail)
        assert third.restore() == 4
    assert "there may be newer saves than what memory had: no answer" in caplog.text
    train(third, 5)
    assert third.persist()

    assert saves(tmp_path) == [5]


def test_training_waits_for_no_disk(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is being written stays as it is in memory, however many versions come after it."""
    may_write = threading.Event()
    write = Directory.write

    def wait_and_write(
        directory: Directory, name: str, content: Content, *, may_write_it: Callable[[], bool]
    ) -> None:
        may_write.wait(60.0)
        write(directory, name, content, may_write=may_write_it)

    monkeypatch.setattr(
        Directory,
        "write",
        lambda storage, name, content, may_write: wait_and_write(
            storage, name, content, may_write_it=may_write
        ),
    )
    saver = make()
    train(saver, *range(1, 10))
    assert saves(tmp_path) == []
    may_write.set()

    assert saver.persist()
    assert saves(tmp_path) == [2, 9]
    (path,) = (tmp_path / "saves").glob("2-*/*.safetensors")
    assert set(safetensors.numpy.load_file(path)["parameter/weight"].flat) == {2.0}


def test_only_what_a_rank_writes_stays_in_memory_until_it_is_written(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies for other nodes would take memory three times, and there may be room for two."""
    may_write, write_shards = threading.Event(), PersistentTier._write_shards

    def wait_and_write(*arguments: Any) -> Any:
        may_write.wait(60.0)
        return write_shards(*arguments)

    monkeypatch.setattr(PersistentTier, "_write_shards", wait_and_write)
    saver = make()
    train(saver, 1)
    copier, arena, tier = saver._group._copier, saver._memory.arena, saver._tier
    assert copier is not None
    assert copier._label is not None
    assert tier is not None
    label = copier._label
    kept = arena.begin(1, label, head=b"", num_bytes=100, piece_bytes=100)  # For another rank.
    kept.hash_pieces()
    arena.finish(kept)
    tier.write(saver._group.links, (arena,), label, writers={0: 0})
    arena.keep_only((), layers=(0, 1))
    before = arena.versions()
    may_write.set()
    tier.wait()
    arena.keep_only((), layers=(0, 1))

    assert before == {0: (label,)}
    assert tier.has_saved(label)
    assert arena.versions() == {}


def test_a_save_that_fails_is_told_and_training_goes_on(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "saves").write_text("no directory")
    saver = make()

    with caplog.at_level(logging.WARNING):
        train(saver, 1, 2, 3)
        assert not saver.persist()
    assert "iteration 2 is not saved" in caplog.text
    train(saver, 4)


def test_a_save_that_fails_once_is_made_up_for_by_the_next_version(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one that is due may be hours away."""

    def fail(*_: object, **__: object) -> None:
        raise CheckpointError("no answer")

    saver = make(persist_every=4)
    with monkeypatch.context() as patch:
        patch.setattr(Directory, "write", fail)
        train(saver, 4, 5)
        assert saver._tier is not None
        saver._tier.wait()
    assert saves(tmp_path) == []

    train(saver, 6)
    saver._tier.wait()

    assert saves(tmp_path) == [5]
    train(saver, 7)
    saver._tier.wait()
    assert saves(tmp_path) == [5]


def test_a_save_that_is_there_though_its_answer_was_lost_counts_the_second_time(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is complete must not change, so it could never be written again."""
    errors, sync = [OSError(errno.EIO, "no answer")], storage._sync_directory

    def fail_once(directory: Path) -> None:
        if errors and (directory / "manifest.json").exists():
            raise errors.pop()
        sync(directory)

    monkeypatch.setattr(storage, "_sync_directory", fail_once)
    saver = make()
    train(saver, 1)

    assert [saver.persist(), saver.persist()] == [False, True]
    assert saves(tmp_path) == [1]


def test_an_error_of_any_type_is_the_reason_of_a_save_that_fails(
    make: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank waits for it without a limit."""

    def fail(*_: object, **__: object) -> None:
        raise MemoryError("of 8 GB")

    monkeypatch.setattr(Directory, "write", fail)
    saver = make()
    train(saver, 1)

    assert not saver.persist()
    assert "iteration 1 is not saved: MemoryError: of 8 GB" in caplog.text


def test_a_save_counts_though_older_ones_cannot_be_removed(
    make: Make,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise CheckpointError("no answer")

    monkeypatch.setattr(Directory, "remove", fail)
    saver = make(keep=1)
    for iteration in (1, 2):
        train(saver, iteration)
        assert saver.persist()

    assert saves(tmp_path) == [1, 2]
    assert "are not removed: no answer" in caplog.text


def test_nothing_is_persisted_without_a_place(make: Make) -> None:
    with pytest.raises(ConfigError, match="name a directory or the URL of a store"):
        make(persist_directory="").persist()
