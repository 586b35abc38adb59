"""The coordinator's hand on the disk: a save is complete, or nothing of it is left."""

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from helpers.refused_reads import refused_reads
from helpers.told_publisher import ToldPublisher
from planaria.checkpoint.disk.parts import EpochMark, HeadMark, RunPlace
from planaria.checkpoint.disk.tiers import Tier, tier_of
from planaria.checkpoint.disk.time_limits import discard
from planaria.coordinator.commands import (
    Pruned,
    Publish,
    Published,
    SaveChecked,
    SavesListed,
)
from planaria.core.messages import SaveFailed
from planaria.core.records import Saved, Warned
from planaria.errors import CheckpointError
from planaria.nodes.head.remote.run_record import HOLDER_FILE, JournalHold


def refuse(*_: object, **__: object) -> None:
    raise CheckpointError("the disk refuses")


def test_a_save_is_published_and_older_ones_are_removed(tmp_path: Path) -> None:
    """And said to the coordinator and to the launcher."""
    told = ToldPublisher(tmp_path)
    told.publish(1)
    told.publish(2)

    assert told.events == [Published(1, 0), Published(2, 0), Pruned("1-0")]
    assert told.notices == [Saved(iteration=1, epoch=0), Saved(iteration=2, epoch=0)]
    assert [version.iteration for version in told.tier.versions()] == [2]


def test_a_run_saves_nothing_any_more_once_a_newer_one_has_begun(tmp_path: Path) -> None:
    """Its head was cut off when another was started; the two would remove each other's saves."""
    told, newer = (ToldPublisher(tmp_path, run=name) for name in ("run-000001-a1", "run-000002-a2"))
    told.publisher.mark_epoch(0, (0, 1))
    told.publish(1)
    newer.publisher.mark_epoch(0, (0, 1))
    told.publish(2)

    failed = told.events[-1]
    assert isinstance(failed, SaveFailed)
    assert "a newer run of this job saves in" in failed.reason
    told.publisher.discard(2, 0)
    assert list(discard(told.tier, [(2, 0)], run="run-000001-a1")) == []
    assert told.tier.storage.entries("2-0")  # They may be the newer run's.
    newer.publish(2)
    assert newer.events == [Published(2, 0), Pruned("1-0")]


def test_a_head_whose_run_another_one_has_taken_up_writes_and_removes_nothing(
    tmp_path: Path,
) -> None:
    """It was cut off, and lost all nodes. It wrote over the marks of that head, so that no node
    saved anything when that one was lost; and where it listened itself, as if it went on."""
    mark = HeadMark(addresses=(("10.0.0.1", 7320),))
    holds = [JournalHold(tmp_path / "journal", name) for name in ("first", "second")]
    first, second = (
        ToldPublisher(tmp_path / "saves", run="run-000001-a1", head=mark, hold=hold)
        for hold in holds
    )
    holds[0].directory.mkdir()
    holds[0].take()
    assert first.publisher.mark_epoch(0, (0, 1))
    holds[1].take()
    assert first.run is not None
    first.run.write_head(there := HeadMark(addresses=(("10.0.0.2", 7320),)))
    assert not first.publisher.mark_epoch(1, ())
    first.publish(2)
    first.publisher.prune(frozenset())
    first.publisher.discard(2, 0)
    first.publisher.publish_start(0)

    assert [epoch.nodes for epoch in first.run.marks()] == [(0, 1)]
    assert first.run.head() == there
    (failed,) = first.events
    assert isinstance(failed, SaveFailed)
    assert failed.reason == "another head has taken this run up, and saves for it"
    assert first.tier.storage.entries("2-0")  # They may be the other head's.
    assert second.publisher.mark_epoch(1, (1,))
    second.publish(2)
    assert second.events == [Published(2, 0)]


def test_a_head_that_cannot_read_whose_run_it_is_publishes_and_marks_no_epoch(
    tmp_path: Path,
) -> None:
    """The disk of the journal refuses, and that must cost no save; who begins an epoch then may be
    another head."""
    hold = JournalHold(tmp_path / "journal", "first")
    told = ToldPublisher(tmp_path / "saves", run="run-000001-a1", hold=hold)
    (hold.directory / HOLDER_FILE).mkdir(parents=True)  # It cannot be read as a file.
    told.publish(2)

    assert told.events == [Published(2, 0)]
    assert not told.publisher.mark_epoch(0, (0, 1))
    assert told.run is not None
    assert told.run.marks() == ()


def test_a_head_writes_where_it_listens_once_an_epoch_of_its_run_is_marked(
    tmp_path: Path,
) -> None:
    """A run without an epoch would hide what nodes of the one before it save. And another head may
    have written there while this one was cut off from its nodes, which are lost to it then."""
    mark = HeadMark(addresses=(("10.0.0.1", 7320),))
    told = ToldPublisher(tmp_path, run="run-000001-a1", head=mark)
    assert told.run is not None
    assert told.run.storage.versions() == []
    for epoch in (0, 1):
        told.publisher.mark_epoch(epoch, (0, 1))
        assert told.run.head() == mark
        told.run.write_head(HeadMark(addresses=(("10.0.0.2", 7320),)))


def test_epochs_are_marked_for_nodes_that_lose_their_head(tmp_path: Path) -> None:
    """The first save of a run makes what nodes of earlier runs have left useless."""
    before, told = (
        ToldPublisher(tmp_path, run=name) for name in ("run-000001-a1", "run-000002-a2")
    )
    before.publisher.mark_epoch(0, (0, 1))
    told.publisher.mark_epoch(0, (0, 1))
    told.publisher.mark_epoch(1, (1,))
    assert before.run is not None
    assert told.run is not None
    assert before.run.marks() != ()
    told.publish(1)

    marks = told.run.marks()
    assert [(mark.epoch, mark.nodes) for mark in marks] == [(0, (0, 1)), (1, (1,))]
    assert marks[0].job == {"name": "job"}
    assert before.run.marks() == ()


def test_a_mark_that_cannot_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = ToldPublisher(tmp_path, run="run-000001-a1")
    monkeypatch.setattr(RunPlace, "write_mark", refuse)
    told.publisher.mark_epoch(0, (0, 1))

    text = "if the head is lost, nodes cannot save: the disk refuses"
    assert told.notices == [Warned(text=text)]


def test_publishing_again_after_a_restart_changes_nothing(tmp_path: Path) -> None:
    """The coordinator before may have ended right after it published."""
    told = ToldPublisher(tmp_path)
    told.publish(1)
    manifest = told.tier.newest()
    assert manifest is not None

    told.publisher.publish(Publish(1, 0, manifest.layers))

    assert told.events == [Published(1, 0)] * 2


def test_a_version_that_another_job_published_is_not_told_as_saved(tmp_path: Path) -> None:
    """In a store nothing keeps two jobs apart, and their versions have the same names."""
    first, second = ToldPublisher(tmp_path), ToldPublisher(tmp_path)
    file = second.tier.write_layer(1, 0, 0, {"parameter/w": np.ones(3, np.float32)})
    first.publish(1)

    second.publisher.publish(Publish(1, 0, (file,)))
    (failed,) = second.events
    assert isinstance(failed, SaveFailed)
    assert f"{tmp_path / '1-0'} belongs to another job" in failed.reason
    second.publisher.discard(1, 0)
    newest = first.tier.newest()
    assert newest is not None
    assert first.tier.read_layer(newest, 0)["parameter/w"].tolist() == [0.0] * 3
    (refused,) = second.notices
    assert isinstance(refused, Warned)
    assert "its version is complete" in refused.text


def test_a_manifest_that_cannot_be_written_is_a_save_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every layer is on disk then, and still nothing that a reader would look at."""
    told = ToldPublisher(tmp_path)
    monkeypatch.setattr(Tier, "publish", refuse)
    told.publish(1)
    (failed,) = told.events
    told.publisher.discard(1, 0)

    assert isinstance(failed, SaveFailed)
    assert failed.reason == "the disk refuses"
    assert not told.notices
    assert not told.tier.versions()


def test_old_checkpoints_that_cannot_be_removed_do_not_spoil_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save is good; that the disk fills up is a thing to say."""
    told = ToldPublisher(tmp_path)
    monkeypatch.setattr(Tier, "each_pruned", refuse)
    told.publish(1)

    assert told.events == [Published(1, 0)]
    assert told.notices[1] == Warned(text="old checkpoints stay: the disk refuses")


def test_what_is_removed_is_told_also_where_something_else_cannot_be(tmp_path: Path) -> None:
    """Nobody goes back to a save that is gone; and what lost heads have left goes, too."""
    older = RunPlace(tier_of(str(tmp_path)).storage, "run-000001-a1")
    older.write_mark(EpochMark(epoch=1, nodes=(0,), job={}))
    told = ToldPublisher(tmp_path, keep=0, run="run-000002-b2")
    for iteration in (1, 2, 3):
        told.publish(iteration)
    older.write_mark(EpochMark(epoch=1, nodes=(0,), job={}))
    (tmp_path / "2-0" / "notes").mkdir()
    last = ToldPublisher(tmp_path, keep=1, run="run-000002-b2")
    last.publish(4)

    assert last.events == [Published(4, 0), Pruned("1-0"), Pruned("3-0")]
    (warned,) = [notice for notice in last.notices if isinstance(notice, Warned)]
    assert "old checkpoints stay: cannot remove " in warned.text
    assert not (tmp_path / older.name).exists()


def test_what_nobody_completed_is_removed_where_all_saves_are_kept(tmp_path: Path) -> None:
    """A rank may have written a layer of it after another had failed to, and all was removed."""
    told = ToldPublisher(tmp_path, keep=0)
    told.publish(1)
    told.tier.write_layer(2, 0, 0, {"parameter/w": np.zeros(3, np.float32)})
    told.publish(3)

    assert [version.name for version in told.tier.versions()] == ["3-0", "1-0"]


def test_a_job_that_saved_nothing_leaves_its_start_behind(tmp_path: Path) -> None:
    """Its seed tells everything; but a checkpoint that there is stays the newest."""
    told = ToldPublisher(tmp_path)
    told.publisher.publish_start(3)
    start = told.tier.newest()
    told.publish(5)
    told.publisher.publish_start(4)

    assert start is not None
    assert (start.iteration, start.epoch, start.layers) == (0, 3, ())
    newest = told.tier.newest()
    assert newest is not None
    assert newest.iteration == 5


def test_a_job_whose_saves_are_all_damaged_does_not_begin_anew_when_it_is_resumed(
    tmp_path: Path,
) -> None:
    """A person has to look at them first."""
    told = ToldPublisher(tmp_path)
    told.publish(4)
    told.damage("4-0")
    told.publisher.check_save("4-0", 0)
    told.publisher.publish_start(1)

    assert told.tier.newest() is None


def test_a_damaged_save_is_out_of_use_but_stays(tmp_path: Path) -> None:
    """Else it would be kept as the newest, and the good one that follows be removed."""
    told = ToldPublisher(tmp_path)
    told.publish(4)
    told.damage("4-0")
    told.publisher.check_save("4-0", 0)
    told.publish(3)
    told.publisher.check_save("4-0", 0)

    assert told.events.count(SaveChecked("4-0", is_sound=False)) == 2
    newest = told.tier.newest()
    assert newest is not None
    assert newest.iteration == 3
    assert (tmp_path / "4-0" / "damaged.json").exists()
    texts = [notice.text for notice in told.notices if isinstance(notice, Warned)]
    assert texts == [f"{tmp_path / '4-0'} is damaged, and not used any more"] * 2


@pytest.mark.parametrize("layer", [-1, 0])
def test_a_save_that_one_node_cannot_read_and_the_head_can_stays_in_use(
    layer: int, tmp_path: Path
) -> None:
    """It may have lost its mount of the saves, and would have one after the other set aside."""
    told = ToldPublisher(tmp_path)
    told.publish(4)
    told.publisher.check_save("4-0", layer)

    assert told.events[-1] == SaveChecked("4-0", is_sound=True)
    assert told.notices == [Saved(iteration=4, epoch=0)]
    newest = told.tier.newest()
    assert newest is not None
    assert newest.iteration == 4


def test_a_save_without_a_layer_that_is_asked_for_is_not_set_aside(tmp_path: Path) -> None:
    """A resumed job had a model of more layers, and all good saves were called damaged."""
    told = ToldPublisher(tmp_path)
    told.publish(4)
    told.publisher.check_save("4-0", 1)

    assert told.events[-1] == SaveChecked("4-0", is_sound=False)
    assert not (tmp_path / "4-0" / "damaged.json").exists()
    assert told.tier.newest() is not None


def test_a_save_that_the_head_cannot_read_either_now_is_not_set_aside(
    tmp_path: Path,
) -> None:
    """It may be whole, and of use another time."""
    told = ToldPublisher(tmp_path)
    told.publish(4)
    with refused_reads(tmp_path / "4-0" / "layer-00000.safetensors"):
        told.publisher.check_save("4-0", 0)

    assert told.events[-1] == SaveChecked("4-0", is_sound=False)
    notice = told.notices[-1]
    assert isinstance(notice, Warned)
    assert f"{tmp_path / '4-0'} is not used as long as it cannot be read" in notice.text
    assert told.tier.newest() is not None


def test_a_save_that_the_head_can_read_after_some_tries_stays_in_use(tmp_path: Path) -> None:
    """The store refused everything for two seconds, and a job that had to go back dropped one save
    after the other, and ended."""
    told, refusals = ToldPublisher(tmp_path), list[str]()
    told.publish(4)

    with ExitStack() as refusing:
        refusing.enter_context(refused_reads(tmp_path / "4-0"))

        def tries_again(error: CheckpointError) -> bool:
            refusals.append(str(error))
            if len(refusals) == 3:
                refusing.close()
            return True

        told.publisher.check_save("4-0", 0, tries_again=tries_again)

    assert told.events[-1] == SaveChecked("4-0", is_sound=True)
    assert len(refusals) == 3
    assert told.notices == [Saved(iteration=4, epoch=0)]


def test_all_saves_are_told_but_the_one_that_a_run_began_with(tmp_path: Path) -> None:
    """Older ones are of use where that one is damaged; one without layers is not."""
    told = ToldPublisher(tmp_path, keep=0)
    told.publisher.publish_start(0)
    for iteration in (1, 2, 3):
        told.publish(iteration)
    del told.events[:]
    told.publisher.tell_saves(source="2-0")

    assert told.events == [Published(3, 0), Published(1, 0), SavesListed()]


def test_that_the_save_is_gone_that_a_run_began_with_is_told(tmp_path: Path) -> None:
    """The coordinator before may have removed it, and the next one knows of it from the launcher
    alone."""
    told = ToldPublisher(tmp_path)
    told.publish(2)
    told.publish(3)
    del told.events[:]
    told.publisher.tell_saves(source="2-0")

    assert told.events == [Published(3, 0), Pruned("2-0"), SavesListed()]
