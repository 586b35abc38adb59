"""A directory that never answers, as one of a file server does that is gone: nobody waits for it
longer than was said, and what hangs is named."""

import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.command import PACED, assert_mistake, command, wait_for
from helpers.jobs import tiny_job
from planaria.checkpoint.disk import claim, time_limits
from planaria.errors import ConfigError, InsufficientError
from planaria.job import places as job_places
from planaria.job import training_job as library
from planaria.job.training_job import Job, SilentDisplay
from planaria.nodes.forkserver import ForkServer
from planaria.nodes.head import journal_place
from planaria.nodes.machine import EXIT_AGAIN

TIMEOUT_S = 2.5  # A busy machine answers by then what does not hang.
SHORT_S = 0.3  # Where nothing but what hangs is waited for.


@contextmanager
def hanging(path: Path) -> Iterator[None]:
    """Whoever reads the file waits until the test is over."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    try:
        yield
    finally:
        os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))


def resume(directory: Path) -> tuple[str, ...]:
    settings = (f"checkpoint.directory={directory}", f"checkpoint.timeout_s={TIMEOUT_S}")
    return ("train", str(PACED), "--resume", *(w for s in settings for w in ("--set", s)))


def test_a_resume_says_which_file_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not taken for one that is not there: that would make the job begin anew."""
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / "saves"
    manifest = directory / "7-0" / "manifest.json"
    manifest.parent.mkdir(parents=True)
    with hanging(manifest):
        result = command(*resume(directory))
        anew = command(*(word for word in resume(directory) if word != "--resume"))

    told = f"{manifest} did not answer within {TIMEOUT_S} s (checkpoint.timeout_s)"
    for one in (result, anew):
        assert_mistake(one, told, code=EXIT_AGAIN)


@pytest.mark.parametrize("module", [claim, journal_place])
def test_a_resume_says_that_a_directory_does_not_answer(
    module: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is the first to touch it."""
    monkeypatch.chdir(tmp_path)
    is_over = threading.Event()
    directory = tmp_path / "saves"
    real: Callable[..., object]
    name = "_lock_file" if module is claim else "_check_writable"
    real = getattr(module, name)

    def late(*arguments: object) -> object:
        assert is_over.wait(20.0)
        return real(*arguments)

    monkeypatch.setattr(module, name, late)
    result = command(*(word for word in resume(directory) if word != "--resume"))
    is_over.set()

    told = f"{directory} did not answer within {TIMEOUT_S} s"
    assert_mistake(result, told, "nothing was trained", code=EXIT_AGAIN)


@pytest.mark.parametrize("state", ["", "state"])
def test_a_directory_that_hangs_in_the_end_is_its_jobs_until_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """The job ends; what is left to remove there cannot be another job's journal."""
    monkeypatch.setattr(time_limits, "LOOK_TIMEOUT_S", SHORT_S)
    may_answer, unlink = threading.Event(), Path.unlink

    def late(path: Path, missing_ok: bool = False) -> None:
        assert threading.current_thread().name != "time limit" or may_answer.wait(20.0)
        unlink(path, missing_ok)

    job = tiny_job("sequential", tmp_path)
    saves, place = job.checkpoint.directory, str(tmp_path / state) if state else ""

    def places() -> AbstractContextManager[str]:
        return job_places.places(job, place, pytest.fail)

    with monkeypatch.context() as patched:
        with time_limits.context_with_time_limit(places(), where=saves, timeout_s=20.0) as journal:
            (Path(journal) / "journal").touch()
            patched.setattr(Path, "unlink", late)
        assert (Path(journal) / "journal").exists()
        with pytest.raises(ConfigError, match=r"job 'sequential'.* saves there"), places():
            pass
        may_answer.set()
        wait_for(lambda: not Path(saves).exists(), what="its files are removed")
    assert not Path(journal).exists()
    with places():
        pass


def test_the_launcher_does_not_wait_long_for_another_directory_for_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hears of no node meanwhile, however long saves may take."""
    monkeypatch.setattr(job_places, "LOOK_TIMEOUT_S", SHORT_S)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    is_over, prove = threading.Event(), journal_place._check_writable

    def late(directory: Path) -> None:
        assert is_over.wait(20.0)
        prove(directory)

    monkeypatch.setattr(journal_place, "_check_writable", late)
    job = tiny_job("sequential", tmp_path)
    journal = str(Path(job.checkpoint.directory) / ".journal")
    with ExitStack() as held:
        assert job_places.other_journal(held, job, journal, state="") == ""
    is_over.set()


def test_the_journal_stays_where_the_user_wants_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where that is the directory of the saves: no other one is looked for."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    job = tiny_job("sequential", tmp_path)
    saves = job.checkpoint.directory
    with ExitStack() as held:
        journal = held.enter_context(job_places.places(job, saves, pytest.fail))
        assert job_places.other_journal(held, job, journal, state=saves) == ""
        assert job_places.other_journal(held, job, journal, state="") != ""


def test_layers_that_nobody_gives_end_a_resume_that_says_so(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank waits for its own, and all of them at the same time; the save is still there."""
    job = tiny_job("sequential", tmp_path, iterations=2)
    Job(job).train(server=server)
    job = replace(
        job,
        training=replace(job.training, iterations=3),
        checkpoint=replace(job.checkpoint, timeout_s=1.0),
    )
    monkeypatch.setattr(library, "_WORKER", "helpers.hanging_reader:main")

    result = Job(job).run(resume=True, server=server)

    assert isinstance(result.error, InsufficientError)
    assert re.search(r"2-0/layer-0000\d\.safetensors did not answer", str(result.error))
    assert "of iteration 2; go on from it with --resume" in str(result.error)


class HangingSoon(SilentDisplay):
    """The last save cannot be read any more once it is complete."""

    def __init__(self, manifest: Path) -> None:
        self._manifest = manifest
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)
        if "saved iteration 2" in text:
            self._manifest.rename(self._manifest.with_name("before"))
            os.mkfifo(self._manifest)


def test_the_last_look_at_a_directory_ends_in_time(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job is done, and only the report has less to tell."""
    monkeypatch.setattr(time_limits, "LOOK_TIMEOUT_S", TIMEOUT_S)
    job = tiny_job("sequential", tmp_path, iterations=2)
    # Less than the 10 s for which the coordinator waits to remove what is needed no more.
    job = replace(job, checkpoint=replace(job.checkpoint, timeout_s=5.0))
    manifest = Path(job.checkpoint.directory) / "2-0" / "manifest.json"
    display = HangingSoon(manifest)

    result = Job(job).run(server=server, display=display)
    os.close(os.open(manifest, os.O_RDWR | os.O_NONBLOCK))

    assert result.error is None
    assert len(result.report.iterations) == 2
    assert any(f"{manifest} did not answer within {TIMEOUT_S} s" in note for note in display.notes)
