"""The file that names the head of a run, which anybody who can write to the saves may damage."""

from contextlib import nullcontext
from pathlib import Path

import msgspec
import numpy as np
import pytest

from helpers.object_store import object_store
from planaria.checkpoint.disk.parts import (
    EpochMark,
    HeadMark,
    PartAnswer,
    RunContents,
    RunPlace,
    newest_run,
    remove_runs,
)
from planaria.checkpoint.disk.storage import ContentInfo, Directory, storage_of
from planaria.checkpoint.disk.tiers import Manifest, tier_of

RUN = "run-000001-a1"
MARK = HeadMark(addresses=(("10.0.0.1", 7320), ("2001:db8::1", 7320), ("head.example", 65535)))


@pytest.fixture
def run(tmp_path: Path) -> RunPlace:
    return RunPlace(Directory(tmp_path), RUN)


def write(run: RunPlace, content: bytes) -> None:
    """Writes the content of the file of a run's head."""
    run.storage.write(f"{RUN}/head", content, may_write=lambda: True)


def test_what_a_head_has_written_is_read_until_another_one_writes(run: RunPlace) -> None:
    assert run.head() is None
    run.write_head(MARK)
    assert run.head() == MARK
    other = HeadMark(addresses=(("10.0.0.2", 7320),))
    run.write_head(other)

    assert run.head() == other
    assert newest_run(run.storage) == RUN
    contents = run.contents()
    assert (contents.mark, contents.damage) == (None, ())


def test_an_object_store_has_it_too() -> None:
    with object_store() as url:
        run = RunPlace(storage_of(url), RUN)
        assert run.head() is None
        run.write_head(MARK)

        assert run.head() == MARK
        assert (newest_run(run.storage), run.storage.versions()) == (RUN, [RUN])
        remove_runs(run.storage)
        assert newest_run(run.storage) == ""


def test_the_newest_run_is_found_without_a_look_into_all_saves(
    run: RunPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All nodes of a lost head look for it. What a head made and never wrote into is no run."""
    run.write_head(MARK)
    (tmp_path / "run-000002-b2").mkdir()
    looked_at: list[str] = []
    entries = Directory.entries

    def noted_entries(storage: Directory, version: str) -> dict[str, ContentInfo]:
        looked_at.append(version)
        return entries(storage, version)

    monkeypatch.setattr(Directory, "entries", noted_entries)

    assert newest_run(run.storage) == RUN
    assert looked_at == ["run-000002-b2", RUN]


def test_what_belongs_to_a_newer_run_stays_when_a_run_has_ended(run: RunPlace) -> None:
    newer = RunPlace(run.storage, "run-000002-b2")
    for each in (RunPlace(run.storage, "run-000000-c3"), run, newer):
        each.write_head(MARK)
    remove_runs(run.storage, through=RUN)

    assert run.storage.versions() == [newer.name]


def test_a_record_that_is_still_being_written_is_not_there_yet(
    run: RunPlace, tmp_path: Path
) -> None:
    """All ranks of a lost head write at about the same time, and read what the others write."""
    run.write_mark(EpochMark(epoch=0, nodes=(0, 1), job={}))
    whole = run.contents()
    for file in ("epoch-00001", "answer-00001", "part-00001"):
        (tmp_path / RUN / f"{file}.0a1b2c3d.partial").write_bytes(b"{")

    assert run.contents() == whole
    remove_runs(run.storage)
    assert not (tmp_path / RUN).exists()  # Also what a rank that was killed did not complete.


def test_of_many_marks_the_newest_is_read_alone(
    run: RunPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank asks before it writes a layer: 1,000 reads of a store took it half a minute."""
    for epoch in range(300):
        run.write_mark(EpochMark(epoch=epoch, nodes=(0, 1) if epoch < 299 else (0,), job={}))
    names, read = list[str](), Directory.read

    def noted_read(storage: Directory, name: str) -> bytes:
        names.append(name)
        return read(storage, name)

    monkeypatch.setattr(Directory, "read", noted_read)

    assert "epoch 299 has begun without node 1" in run.refusal(node=1, epoch=298)
    assert names == [f"{RUN}/epoch-00299"]
    names.clear()
    assert run.contents().mark == run.newest_mark()
    assert len(names) == 2


def test_a_damaged_mark_gives_way_to_the_one_before(run: RunPlace) -> None:
    older = EpochMark(epoch=7, nodes=(0,), job={})
    run.write_mark(older)
    run.storage.write(f"{RUN}/epoch-00008", b"{", may_write=lambda: True)

    assert (run.contents().mark, run.contents().damage) == (older, (f"{RUN}/epoch-00008",))


def test_a_record_that_is_gone_when_it_is_read_counts_as_absent(
    run: RunPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another head may remove what it has made a save of."""
    run.write_answer(PartAnswer(node=1, rank=1, epoch=0, since=-1))
    read = Directory.read

    def removed_first(storage: Directory, name: str) -> bytes:
        (storage.path / name).unlink()
        return read(storage, name)

    monkeypatch.setattr(Directory, "read", removed_first)

    assert run.contents() == RunContents()


@pytest.mark.parametrize("is_store", [False, True])
def test_a_save_that_was_kept_under_the_name_of_a_run_is_none(
    is_store: bool, tmp_path: Path
) -> None:
    """All later saves were refused for the sake of that run, or the kept save was removed."""
    with object_store() if is_store else nullcontext(str(tmp_path)) as place:
        kept = tier_of(f"{place}/run-202506-15")
        file = kept.write_layer(6, 0, 0, {"parameter/w": np.zeros(3)})
        kept.publish(Manifest(iteration=6, epoch=0, job={}, layers=(file,)))
        run = RunPlace(storage_of(place), RUN)
        run.write_head(MARK)

        assert newest_run(run.storage) == RUN
        remove_runs(run.storage)
        assert newest_run(run.storage) == ""
        assert kept.newest() is not None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"\xff",
        b"[" * 4096,
        msgspec.json.encode(MARK)[:-1],
        msgspec.json.encode(MARK) + b" " * 4096,
        b'{"version":2,"addresses":[["10.0.0.1",7320]]}',
        b'{"version":1,"addresses":[]}',
        b'{"version":1,"addresses":[["10.0.0.1",0]]}',
        b'{"version":1,"addresses":[["10.0.0.1",65536]]}',
        b'{"version":1,"addresses":[["10.0.0.1",-1]]}',
        b'{"version":1,"addresses":[["10.0.0.1","7320"]]}',
        b'{"version":1,"addresses":[["",7320]]}',
        b'{"version":1,"addresses":[["a:b",7320]]}',
        b'{"version":1,"addresses":[["a..b",7320]]}',
        b'{"version":1,"addresses":[["' + b"a." * 127 + b'",7320]]}',
        msgspec.json.encode(HeadMark(addresses=(("10.0.0.1", 7320),) * 9)),
    ],
)
def test_a_damaged_or_foreign_file_names_no_head(content: bytes, run: RunPlace) -> None:
    write(run, content)

    assert run.head() is None


def test_as_many_addresses_and_as_long_hosts_as_there_may_be_are_read(run: RunPlace) -> None:
    host = ".".join(["a" * 49] * 5)
    mark = HeadMark(addresses=((host, 65535),) * 8)
    run.write_head(mark)

    assert run.head() == mark
