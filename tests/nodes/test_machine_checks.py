"""A machine that would train on other data, or save elsewhere, is refused before it gets a node.

The head and the machines are those of the commands, on this test's event loop; only their fork
servers have no processes.
"""

import asyncio
import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from helpers.heads import runs
from helpers.joined_machines import cluster
from helpers.tasks import TIMEOUT_S, settle, wait_until
from planaria.checkpoint.disk.time_limits import TimeLimitedStorage
from planaria.core.job import DataConfig, JobConfig
from planaria.errors import ConfigError, InsufficientError, LateError
from planaria.nodes import examination, machine_files, shared_saves
from planaria.nodes.head.remote import machine_arrivals, machine_checks
from planaria.nodes.input_files import input_digests
from planaria.nodes.machine import EXIT_AGAIN, EXIT_UNFINISHED

TEXT = "some text"


def answer_without_asking(place: str, mark: str) -> str:
    """An answer that a machine writes without reading the mark of the head."""
    answer = "0123456789abcdef"
    (Path(place) / f".planaria-mark-{mark}" / answer).write_text(answer)
    return answer


@contextmanager
def blocked_digests() -> Iterator[Callable[[], None]]:
    """A context in which machines read their files until the function is called."""
    may_end = threading.Event()

    def read(*_: object, **__: object) -> dict[str, str]:
        may_end.wait(TIMEOUT_S)
        return {}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine_files, "input_digests", read)
        try:
            yield may_end.set
        finally:
            may_end.set()


def text_job(tmp_path: Path) -> JobConfig:
    (tmp_path / "text.txt").write_text(TEXT)
    return JobConfig(data=DataConfig(path=str(tmp_path / "text.txt")))


@runs
async def test_machines_with_the_same_files_take_part(tmp_path: Path) -> None:
    """Also one that comes when the job is under way; nothing of the checks is left."""
    async with cluster(tmp_path, text_job(tmp_path)) as made:
        made.join()
        await made.wait_ready(1)
        made.join()
        await made.wait_ready(2)

    assert not (tmp_path / "saves").exists()


@runs
async def test_machines_with_different_pythons_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sum of floats in the user's code has other bits from 3.12 on, but in no patch version."""
    versions = {"python": "3.11.7", "torch": "2.13.0"}
    monkeypatch.setattr(examination, "versions_of_this_machine", lambda: versions)
    async with cluster(tmp_path, text_job(tmp_path)) as made:
        for number, version in enumerate(("3.11.7", "3.11.9", "3.12.1"), start=1):
            versions = {**versions, "python": version}
            made.join()
            await made.wait_ready(number)

        (note,) = [note for note in made.notes if "may round" in note]
    assert "Python '3.12'" in note
    assert "'3.11'" in note


@runs
async def test_other_data_than_the_heads_is_refused_with_both_digests(tmp_path: Path) -> None:
    """The user reads at the machine and at the head which file differs, from whose, and what to
    do."""
    job = text_job(tmp_path)
    async with cluster(tmp_path, job) as made:
        made.join()
        await made.wait_ready(1)
        Path(job.data.path).write_text("another text")
        odd = made.join()

        with pytest.raises(ConfigError) as caught:
            await odd
        assert made.machines.num_ready == 1

    reason = caught.value.remedy
    assert f"data.path = {job.data.path!r}" in reason
    assert "of the head" in reason
    assert reason.count(" on ") == 2
    assert "copy the same files" in reason
    assert any(" cannot take part: data.path" in note for note in made.notes)


@runs
async def test_the_first_machines_files_count_where_the_head_has_none(tmp_path: Path) -> None:
    """The head needs no data."""
    job = text_job(tmp_path)
    async with cluster(tmp_path, job) as made:
        path = Path(job.data.path)

        def written_first(*args: JobConfig, **keys: object) -> dict[str, str]:
            path.write_text(contents.pop())
            digests = input_digests(*args, **keys)  # type: ignore[arg-type]
            path.unlink()
            return digests

        contents = ["another text", TEXT]
        path.unlink()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(machine_files, "input_digests", written_first)
            made.join()
            await made.wait_ready(1)
            with pytest.raises(ConfigError, match="differ from those of"):
                await made.join()


@runs
async def test_the_first_machines_files_count_where_the_head_may_not_read_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the user of the head may not enter the directory of the data, each machine was
    refused."""
    digest = {"data.path": "0123456789abcdef"}

    def refuse(path: Path) -> bool:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    async with cluster(tmp_path, text_job(tmp_path)) as made:
        monkeypatch.setattr(machine_files, "input_digests", lambda *_, **__: digest)
        monkeypatch.setattr(Path, "is_file", refuse)
        made.join()
        await made.wait_ready(1)


@runs
async def test_missing_data_is_refused_by_the_machine(tmp_path: Path) -> None:
    job = text_job(tmp_path)
    async with cluster(tmp_path, job) as made:
        Path(job.data.path).unlink()

        with pytest.raises(ConfigError, match="this machine has no such files"):
            await made.join()
        assert any("has no such files" in note for note in made.notes)


@runs
async def test_a_machine_that_saves_elsewhere_is_refused(tmp_path: Path) -> None:
    """By itself if it does not see the head's mark, by the head if that does not see the answer."""
    answer_mark = shared_saves.answer_mark
    async with cluster(tmp_path, text_job(tmp_path)) as made:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shared_saves, "_CACHED_S", 0.0)
            patch.setattr(
                machine_files,
                "answer_mark",
                lambda _, mark: answer_mark(str(tmp_path / "elsewhere"), mark),
            )
            with pytest.raises(ConfigError, match="what the head wrote is not here"):
                await made.join()
            patch.setattr(machine_files, "answer_mark", lambda _place, _mark: "nowhere")
            with pytest.raises(ConfigError, match="not there for the head"):
                await made.join()
        made.join()
        await made.wait_ready(1)


@runs
async def test_a_place_of_saves_that_stalls_is_asked_again_before_a_machine_is_turned_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it had not answered for ten seconds, each machine that came was refused for good. It
    may come again after a minute of it, whether the machine or the head has waited."""
    listing, writing = TimeLimitedStorage.entries, TimeLimitedStorage.write
    num_late = 3

    def late(act: Callable[..., object], *args: object, **options: object) -> object:
        nonlocal num_late
        num_late -= 1
        if num_late >= 0:
            raise LateError("the place of saves did not answer")
        return act(*args, **options)

    monkeypatch.setattr(shared_saves, "_RETRY_S", 0.0)
    monkeypatch.setattr(TimeLimitedStorage, "entries", lambda *args: late(listing, *args))
    monkeypatch.setattr(TimeLimitedStorage, "write", lambda *a, **o: late(writing, *a, **o))
    num_late = 0
    async with cluster(tmp_path, text_job(tmp_path)) as made:
        num_late = 3
        made.join()
        await made.wait_ready(1)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shared_saves, "_PATIENCE_S", 0.0)
            num_late = 1_000_000
            assert await made.join() == EXIT_AGAIN
            num_late = 1
            patch.setattr(machine_files, "answer_mark", answer_without_asking)
            made.join()
            await made.wait_ready(2)


@runs
async def test_a_head_without_memory_for_a_look_refuses_no_machine_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request with a time limit needs a thread, and the head may have none for a moment."""
    checking, num_refusals = shared_saves.check_answer, 1

    def check(*args: str) -> None:
        nonlocal num_refusals
        num_refusals -= 1
        if num_refusals >= 0:
            raise MemoryError("can't start new thread")
        checking(*args)

    monkeypatch.setattr(machine_checks, "check_answer", check)
    async with cluster(tmp_path, text_job(tmp_path)) as made:
        made.join()
        await made.wait_ready(1)


@runs
async def test_reading_goes_on_while_the_head_says_that_the_job_is_over(
    tmp_path: Path,
) -> None:
    """A machine that reads for hours hears its head all the while."""
    job = text_job(tmp_path)
    async with cluster(tmp_path, job) as made:
        is_over = asyncio.Event()
        loop = asyncio.get_running_loop()

        def hangs(*_: object, **__: object) -> dict[str, str]:
            asyncio.run_coroutine_threadsafe(is_over.wait(), loop).result()
            return {}

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(machine_files, "input_digests", hangs)
            end = made.join()
            while not made.told:
                await asyncio.sleep(0.01)
            await made.machines.end_all(None)

            assert await end == EXIT_UNFINISHED
        is_over.set()


@runs
async def test_a_head_waits_for_machines_that_read_their_files_however_long_that_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended after ten minutes, and the next one had them read from the first byte."""
    monkeypatch.setattr(machine_arrivals, "_NOTE_S", 0.0)
    with blocked_digests() as go_on:
        async with cluster(tmp_path, text_job(tmp_path)) as made:
            end = made.join()
            await wait_until(lambda: bool(made.machines.connected))
            waiting = asyncio.create_task(made.machines.wait_ready(1, timeout_s=0.0))
            told = "1 of 1 machines have come, of which 1 are not ready yet"
            await wait_until(lambda: any(note.startswith(told) for note in made.notes))
            with pytest.raises(InsufficientError, match="1 of 2 machines have come in 0 s, of"):
                await made.machines.wait_ready(2, timeout_s=0.0)
            go_on()
            await waiting

            assert made.machines.num_ready == 1
            assert not end.done()


@runs
async def test_a_head_waits_no_longer_for_a_machine_that_has_gone_while_it_read(
    tmp_path: Path,
) -> None:
    """The time goes on then."""
    with blocked_digests() as go_on:
        async with cluster(tmp_path, text_job(tmp_path)) as made:
            made.join()
            await wait_until(lambda: bool(made.machines.connected))
            waiting = asyncio.create_task(made.machines.wait_ready(1, timeout_s=0.0))
            await settle()
            assert not waiting.done()
            made.ends[0].cancel()

            with pytest.raises(InsufficientError, match="0 of 1 machines have come in 0 s; no"):
                await waiting
            go_on()
