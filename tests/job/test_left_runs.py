"""What becomes of the run of a killed head if the head that takes it up does not go on."""

from pathlib import Path
from typing import NoReturn

import pytest

from helpers.left_runs import LISTENING, ReturningMachine, leave_run, left_job
from planaria.errors import ConfigError
from planaria.job import training_job
from planaria.job.training_job import Job
from planaria.nodes.head.run_record import RUN_FILE


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ConfigError("model.kind", "", "wrong")])
def test_a_head_that_ends_while_it_takes_a_run_up_leaves_all_as_it_was(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal was removed and the agents were told that the job is over: what only the nodes
    held was lost."""
    job, machine = left_job(tmp_path / "saves"), ReturningMachine()
    journal = tmp_path / "saves" / ".journal"
    leave_run(journal, job)
    before = (journal / RUN_FILE).read_bytes()

    def fail(*_: object, **__: object) -> NoReturn:
        raise error

    monkeypatch.setattr(training_job, "plan_job", fail)
    with pytest.raises(type(error)):
        Job(job).run(listening=LISTENING, display=machine.display)
    machine.join()

    assert machine.is_told is False
    assert (journal / RUN_FILE).read_bytes() == before
    assert "try again with --reattach" in machine.display.notes[-1]
