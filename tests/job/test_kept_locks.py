"""The lock of a head whose machine has died, which the file server keeps for a while."""

from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

import pytest

from helpers.left_runs import LISTENING, NoteDisplay, leave_run, left_job
from planaria.checkpoint.disk import claim as claim_module
from planaria.checkpoint.disk.claim import claim
from planaria.checkpoint.disk.storage import may_pass
from planaria.errors import ConfigError, DoneError
from planaria.job import places
from planaria.job.on_machines import LeftRun
from planaria.job.places import wait_released
from planaria.job.training_job import Job


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ExitStack:
    """The lock of the saves, as a head on another machine has it."""
    monkeypatch.setattr(places, "_RELEASE_PAUSE_S", 0.01)
    held = ExitStack()
    with monkeypatch.context() as patched:
        patched.setattr(claim_module, "clock_name", lambda: "that of another machine")
        held.enter_context(claim(str(tmp_path / "saves"), "a job", note=pytest.fail))
    return held


def test_a_head_waits_for_the_lock_of_one_whose_machine_has_died(
    lock: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was taken for one at work, and the next head ended for good (exit code 2)."""
    job, found = left_job(tmp_path / "saves"), list[LeftRun | None]()
    display = NoteDisplay(lambda _: None)
    leave_run(tmp_path / "saves" / ".journal", job)
    display.acts["waiting up to 120 s for its lock"] = lock.close

    def end(*facts: object) -> NoReturn:
        left_run = facts[-1]
        assert left_run is None or isinstance(left_run, LeftRun)
        found.append(left_run)
        raise DoneError("it goes on")

    monkeypatch.setattr(Job, "_begin_on_machines", end)
    with pytest.raises(DoneError):
        Job(job).run(listening=LISTENING, display=display)

    assert [run.directory for run in found if run] == [tmp_path / "saves" / ".journal"]
    (note,) = [note for note in display.notes if "waiting up to" in note]
    assert note.startswith("job 'a job' (process ")


def test_a_head_that_has_waited_for_a_lock_in_vain_is_to_be_started_again(
    lock: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file servers keep it for longer."""
    monkeypatch.setattr(places, "_RELEASE_S", 0.0)
    with lock, pytest.raises(ConfigError, match=r"job 'a job' .* saves there") as caught:
        wait_released(left_job(tmp_path / "saves"), note=pytest.fail)

    assert may_pass(caught.value)


def test_the_lock_of_a_job_on_the_same_machine_is_not_waited_for(tmp_path: Path) -> None:
    """The kernel releases it when that job ends, however that ends."""
    with claim(str(tmp_path / "saves"), "a job", note=pytest.fail):
        wait_released(left_job(tmp_path / "saves"), note=pytest.fail)
    wait_released(left_job(tmp_path / "saves"), note=pytest.fail)
