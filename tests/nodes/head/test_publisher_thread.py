"""The thread in which saves are published: nobody waits for the disk longer than he has to."""

import errno
import functools
import os
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from helpers.command import wait_for
from helpers.refused_reads import refused_reads
from helpers.told_publisher import ToldPublisher
from planaria.checkpoint.disk.parts import RunPlace, remove_runs
from planaria.checkpoint.disk.tiers import Manifest, SavedVersion, Tier
from planaria.coordinator.commands import (
    Discard,
    Pruned,
    Publish,
    Published,
    SavesListed,
)
from planaria.coordinator.saves import SLOW_S
from planaria.core.messages import SaveFailed
from planaria.core.records import Unsaved, Warned
from planaria.errors import CheckpointError
from planaria.nodes.head.publisher import PublisherThread, Unfinished


def refuse(*_: object, **__: object) -> None:
    raise CheckpointError("the disk refuses")


class _Threaded(ToldPublisher):
    """A publisher in a thread, on a disk that does not answer until it is to."""

    def __init__(self, directory: Path, patch: pytest.MonkeyPatch) -> None:
        super().__init__(directory, run="run-000001-a1")
        self.may_answer = threading.Event()
        self.may_remove = threading.Event()
        self.published = threading.Event()
        self.errors: queue.SimpleQueue[Exception] = queue.SimpleQueue()
        self.now_s = 100.0
        self.num_looks = 0  # How often the thread asked for the time.
        publish = Tier.publish

        def late(tier: Tier, manifest: Manifest) -> None:
            assert self.may_answer.wait(20.0)
            publish(tier, manifest)
            self.published.set()

        patch.setattr(Tier, "publish", late)
        self.thread = PublisherThread(
            self.publisher,
            where=str(directory),
            notify=self.notices.append,
            on_error=self.errors.put,
            now_s=self._look,
        )

    def _look(self) -> float:
        self.num_looks += 1
        return self.now_s

    def ask(self, iteration: int) -> None:
        """Has a save published that is whole."""
        file = self.tier.write_layer(iteration, 0, 0, {"parameter/w": np.zeros(3, np.float32)})
        self.thread.publish(Publish(iteration, 0, (file,)))

    def wait_done(self) -> None:
        assert self.thread.finish(timeout_s=20.0, removal_timeout_s=20.0) is Unfinished.NOTHING


@pytest.fixture
def threaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Threaded]:
    made = _Threaded(tmp_path, monkeypatch)
    yield made
    made.may_answer.set()


def test_nobody_waits_for_the_disk_and_what_is_asked_for_happens_in_order(
    threaded: _Threaded,
) -> None:
    """That a save failed is told at once; what is left of it is removed when its turn comes."""
    threaded.thread.tell_saves(source="")
    threaded.ask(1)
    threaded.tier.write_layer(2, 0, 0, {"parameter/w": np.zeros(3, np.float32)})
    threaded.thread.discard(Discard(2, 0, "the disk refuses"))
    threaded.ask(3)

    assert threaded.notices == [Unsaved(iteration=2, epoch=0, reason="the disk refuses")]
    assert [version.name for version in threaded.tier.versions()] == ["3-0", "2-0", "1-0"]
    threaded.may_answer.set()
    threaded.wait_done()
    assert threaded.events == [SavesListed(), Published(1, 0), Published(3, 0), Pruned("1-0")]
    assert [version.name for version in threaded.tier.versions()] == ["3-0"]


def test_a_failed_save_is_removed_once_for_all_who_ask_before_its_turn(
    threaded: _Threaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each late report of a layer asks; what is written during the removal has its own."""
    begun, removed = threading.Event(), []

    def discard(tier: Tier, iteration: int, epoch: int) -> None:
        del tier
        removed.append((iteration, epoch))
        begun.set()
        assert threaded.may_remove.wait(20.0)

    monkeypatch.setattr(Tier, "discard", discard)
    threaded.ask(1)
    for _ in range(100):
        threaded.thread.discard(Discard(2, 0, ""))
    threaded.thread.discard(Discard(2, 1, ""))
    threaded.may_answer.set()
    assert begun.wait(20.0)
    threaded.thread.discard(Discard(2, 0, ""))
    threaded.may_remove.set()
    threaded.wait_done()

    assert removed == [(2, 0), (2, 1), (2, 0)]


PUBLISHER = "planaria.nodes.head.publisher"


def test_a_save_that_the_disk_refuses_for_a_moment_is_published_after_all(
    threaded: _Threaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All its layers are on disk. A list or the manifest was refused, and all of it was removed."""
    monkeypatch.setattr(f"{PUBLISHER}._NEXT_TRY_S", 0.01)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    link, listed = Mock(side_effect=[full, full, None], wraps=os.link), Path.iterdir
    lists = iter([OSError(errno.EIO, os.strerror(errno.EIO))])

    def list_or_refuse(path: Path) -> Iterator[Path]:
        for error in lists:
            raise error
        return listed(path)

    def link_or_refuse(source: Path, target: Path) -> None:
        link(source, target)
        Path(target).write_bytes(Path(source).read_bytes())

    threaded.ask(1)
    monkeypatch.setattr(Path, "iterdir", list_or_refuse)
    monkeypatch.setattr(os, "link", link_or_refuse)
    threaded.may_answer.set()
    threaded.wait_done()

    assert threaded.events == [Published(1, 0)]
    assert link.call_count == 3


@pytest.mark.parametrize("is_last", [False, True])
def test_a_refused_save_is_tried_again_for_as_long_as_the_job_waits_for_it(
    threaded: _Threaded, monkeypatch: pytest.MonkeyPatch, *, is_last: bool
) -> None:
    """While training goes on, only for a moment: a loss may have to know of it. What takes long is
    told meanwhile, and at last why."""
    monkeypatch.setattr(f"{PUBLISHER}._NEXT_TRY_S", 0.01)
    patience_s = 0.9 * 600.0 if is_last else SLOW_S
    link = Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    monkeypatch.setattr(os, "link", link)
    if is_last:
        threaded.thread.end_training(timeout_s=600.0, removal_timeout_s=600.0)
    threaded.may_answer.set()
    threaded.now_s = 0.0
    threaded.ask(1)
    threaded.now_s = patience_s - 0.1
    wait_for(lambda: link.call_count > 2, what="more tries")
    threaded.thread.tick()
    texts = [notice.text for notice in threaded.notices if isinstance(notice, Warned)]
    assert ["refuses (cannot write" in text for text in texts] == [True] * is_last
    assert not threaded.events
    threaded.now_s = patience_s
    wait_for(lambda: threaded.events != [], what="the end of tries")

    (failed,) = threaded.events
    assert isinstance(failed, SaveFailed)
    assert "No space left on device; free some space there" in failed.reason


def test_a_refused_save_is_given_up_soon_once_training_goes_on_after_a_last_save(
    threaded: _Threaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too few nodes were left, and the job saved; then others came. A recovery that had to know of
    the save waited for it for minutes."""
    monkeypatch.setattr(f"{PUBLISHER}._NEXT_TRY_S", 0.01)
    link = Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    monkeypatch.setattr(os, "link", link)
    threaded.thread.end_training(timeout_s=600.0, removal_timeout_s=600.0)
    threaded.thread.continue_training()
    threaded.may_answer.set()
    threaded.now_s = 0.0
    threaded.ask(1)
    threaded.now_s = SLOW_S
    wait_for(lambda: threaded.events != [], what="the end of tries")

    (failed,) = threaded.events
    assert isinstance(failed, SaveFailed)


def test_a_disk_that_does_not_answer_holds_up_the_end_for_a_while_only(
    threaded: _Threaded,
) -> None:
    """A save under way is worth more than what is only to be removed."""
    threaded.ask(1)
    finished = functools.partial(threaded.thread.finish, timeout_s=5.0, removal_timeout_s=0.0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(finished)
        threaded.now_s += 4.9
        num_looks = threaded.num_looks
        wait_for(  # Of three looks, one is behind a wait.
            lambda: waiting.done() or threaded.num_looks >= num_looks + 3, what="looks at the time"
        )
        assert not waiting.done()
        threaded.now_s += 0.2
        assert waiting.result(20.0) is Unfinished.SAVES


def test_removals_alone_are_waited_for_less_and_are_no_lost_save(
    threaded: _Threaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that takes half a second for each request does answer."""
    monkeypatch.setattr(Tier, "each_pruned", lambda *_, **__: threaded.may_remove.wait(20.0) and ())
    threaded.may_answer.set()
    threaded.ask(1)
    assert threaded.published.wait(20.0)
    finished = functools.partial(threaded.thread.finish, timeout_s=20.0, removal_timeout_s=5.0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(finished)
        wait_for(lambda: threaded.thread._patience_s is not None, what="it is waited for")
        threaded.now_s += 5.1
        assert waiting.result(20.0) is Unfinished.REMOVALS
    threaded.may_remove.set()


def test_where_only_a_listing_is_late_nothing_is_left_to_remove(
    threaded: _Threaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody needs it after the end; the user was sent to remove what is not there."""
    may_list = threading.Event()

    def late(_: Tier) -> Iterator[SavedVersion]:
        assert may_list.wait(20.0)
        return iter(())

    monkeypatch.setattr(Tier, "each_version", late)
    threaded.thread.tell_saves(source="")

    assert threaded.thread.finish(timeout_s=5.0, removal_timeout_s=0.0) is Unfinished.NOTHING
    threaded.thread.discard(Discard(2, 0, ""))
    assert threaded.thread.finish(timeout_s=5.0, removal_timeout_s=0.0) is Unfinished.REMOVALS
    may_list.set()


def test_a_publisher_that_has_failed_holds_up_no_end(
    threaded: _Threaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was waited for as if a disk were slow, and the disk was blamed."""
    monkeypatch.setattr(Tier, "set_aside", Mock(side_effect=RuntimeError("ours")))
    threaded.thread.check_save("1-0", 0)
    assert str(threaded.errors.get(timeout=20.0)) == "ours"

    assert threaded.thread.finish(timeout_s=1e9, removal_timeout_s=1e9) is Unfinished.NOTHING


def test_a_disk_that_is_slow_after_training_holds_up_the_end_and_that_is_said(
    threaded: _Threaded,
) -> None:
    """Training does not go on then."""
    threaded.ask(1)
    threaded.thread.end_training(timeout_s=600.0, removal_timeout_s=10.0)
    threaded.now_s += 11.0
    threaded.thread.tick()

    (slow,) = threaded.notices
    assert isinstance(slow, Warned)
    assert "complete; the job waits for it, 600 s at most" in slow.text


def test_that_a_disk_is_slow_is_told_less_and_less_often(threaded: _Threaded) -> None:
    """Once it takes ten seconds, then each time that it takes twice as long as was told."""
    threaded.ask(1)
    told_s = []
    for _ in range(3600):
        threaded.now_s += 1.0
        num_told = len(threaded.notices)
        threaded.thread.tick()
        if len(threaded.notices) > num_told:
            told_s.append(threaded.now_s - 100.0)

    assert told_s == [10.0 * 2**n for n in range(9)]
    (first, *_) = threaded.notices
    assert isinstance(first, Warned)
    assert (
        "is slow: it has taken 10 s so far to make the save of iteration 1 complete" in first.text
    )


def test_a_disk_that_was_slow_before_is_told_of_again_once_the_job_waits_for_it(
    threaded: _Threaded,
) -> None:
    """Training went on when it was slow for longer; now the user waits, and should know why."""
    threaded.ask(1)
    threaded.now_s += 100.0
    threaded.thread.tick()
    threaded.may_answer.set()
    wait_for(lambda: not threaded.thread._requests, what="the first save is complete")
    threaded.may_answer.clear()
    del threaded.notices[:]
    threaded.ask(2)
    threaded.thread.end_training(timeout_s=600.0, removal_timeout_s=10.0)
    threaded.now_s += 11.0
    for _ in range(2):
        threaded.thread.tick()
        threaded.thread.end_training(timeout_s=600.0, removal_timeout_s=10.0)

    (slow,) = threaded.notices
    assert isinstance(slow, Warned)
    assert "complete; the job waits for it, 600 s at most" in slow.text


def test_saves_that_could_not_be_listed_are_asked_for_again(
    threaded: _Threaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store may refuse for a while; the older saves are as good as before then."""
    threaded.may_answer.set()
    threaded.publish(1)
    del threaded.events[:], threaded.notices[:]
    with monkeypatch.context() as patch:
        patch.setattr(Tier, "each_version", refuse)
        threaded.thread.tell_saves(source="")
        threaded.wait_done()
    threaded.thread.tick()
    threaded.wait_done()
    assert threaded.events == []
    threaded.now_s += 60.0
    threaded.thread.tick()
    threaded.wait_done()

    assert threaded.events == [Published(1, 0), SavesListed()]
    assert len(threaded.notices) == 1


def test_an_epoch_that_could_not_be_marked_is_marked_again(
    threaded: _Threaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that lose their head save nothing in a run without a mark. Only the newest counts, and
    how many were written before does not."""
    assert threaded.run is not None
    for _ in range(9):
        threaded.thread.mark_epoch(0, (0,))
        threaded.wait_done()
    remove_runs(threaded.tier.storage)
    with monkeypatch.context() as patch:
        patch.setattr(RunPlace, "write_mark", refuse)
        for epoch in (0, 1):
            threaded.thread.mark_epoch(epoch, (0, 1))
            threaded.wait_done()
        threaded.thread.tick()
        threaded.wait_done()
        assert len(threaded.notices) == 2
        threaded.now_s += 60.0
        threaded.thread.tick()
        threaded.wait_done()
    assert len(threaded.notices) == 3
    assert threaded.run.marks() == ()
    for _ in range(2):
        threaded.now_s += 60.0
        threaded.thread.tick()
        threaded.wait_done()

    assert [mark.epoch for mark in threaded.run.marks()] == [1]
    assert len(threaded.notices) == 3
    assert threaded.run.refusal(node=0, epoch=1) == ""


def test_a_save_that_could_not_be_read_is_asked_for_again(
    threaded: _Threaded, tmp_path: Path
) -> None:
    """Else it is never gone back to, though only its manifest was refused, and only once."""
    threaded.may_answer.set()
    threaded.publish(1)
    del threaded.events[:], threaded.notices[:]
    with refused_reads(tmp_path / "1-0"):
        threaded.thread.tell_saves(source="")
        threaded.wait_done()
    assert threaded.events == [SavesListed()]
    (warned,) = threaded.notices
    assert isinstance(warned, Warned)
    assert "1-0/manifest.json: Input/output error" in warned.text
    threaded.now_s += 60.0
    threaded.thread.tick()
    threaded.wait_done()

    assert threaded.events == [SavesListed(), Published(1, 0), SavesListed()]
    assert len(threaded.notices) == 1


def test_a_mistake_in_the_thread_reaches_the_coordinator(
    threaded: _Threaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is no failure of the disk is ours, and must not be lost in a thread."""
    error = RuntimeError("ours")
    monkeypatch.setattr(Tier, "set_aside", Mock(side_effect=error))
    threaded.thread.check_save("1-0", 0)

    assert threaded.errors.get(timeout=20.0) is error
