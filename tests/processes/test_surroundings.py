"""What surrounds a run of `planaria chaos`: it trains on to the same bits, or saves and resumes."""

import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from planaria.chaos import runs as chaos
from planaria.chaos.draw import TEMPORARIES, Draw, DrawLimits, Surroundings
from planaria.chaos.runs import Chaos, RunOutcome, _RunDisplay
from planaria.chaos.surroundings import UnreadOutput, possible_temporaries, temporary_directory
from planaria.job.training_job import Job

pytestmark = pytest.mark.faults

SETTINGS = (
    "model.kind=python",
    "model.target=helpers.user_models:sequential",
    "data.kind=python",
    "data.target=helpers.user_models:points",
    "training.iterations=6",
    "training.global_batch_size=12",
    "training.microbatch_size=2",
    "resilience.failures_tolerated=1",
    "cluster.nodes=4",
    "cluster.device_memory_bytes=100_000",  # One node cannot hold the model, two can.
)
FAULT = "kill:1@3"
CLOSED_AT = 1


class Runs:
    """One job, and runs of it that lose a node in such surroundings as a test asks for."""

    def __init__(self, directory: Path) -> None:
        self._surroundings = Surroundings()
        file = directory / "job.toml"
        file.touch()
        self._outcomes = Chaos(
            Job.from_file(file, overrides=SETTINGS), seed=0, doing=lambda _: None
        ).outcomes(minutes=60.0)

    def draw_run(self, *_: DrawLimits | Random) -> Draw:
        return Draw(specs=(FAULT,), num_joins=0, persist_every=0, surroundings=self._surroundings)

    def outcome(self, surroundings: Surroundings) -> RunOutcome:
        """What the next run came to."""
        self._surroundings = surroundings
        found = next(self._outcomes)
        assert found.surroundings == surroundings.words
        assert found.violations == (), found.log
        return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    made = Runs(tmp_path_factory.mktemp("runs"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chaos, "draw_run", made.draw_run)
        yield made
    made._outcomes.close()


@pytest.mark.long  # Each has a fork server of its own.
@pytest.mark.parametrize("kind", TEMPORARIES)
def test_a_temporary_directory_of_no_use_costs_nothing(
    kind: str, runs: Runs, tmp_path: Path
) -> None:
    """The job's processes have it."""
    if kind not in possible_temporaries(tmp_path):
        pytest.skip("mounting is not allowed here")
    found = runs.outcome(Surroundings(temporary=kind))

    assert not found.reason
    assert found.injected_faults == {"kill": 1}


@pytest.mark.parametrize("kind", TEMPORARIES)
def test_nothing_can_be_kept_in_such_a_temporary_directory(kind: str, tmp_path: Path) -> None:
    """And afterwards all is as it was."""
    if kind not in possible_temporaries(tmp_path):
        pytest.skip("mounting is not allowed here")
    before = dict(os.environ)
    with temporary_directory(kind, tmp_path), pytest.raises(OSError, match="Errno"):
        Path(os.environ["TMPDIR"], "file").write_bytes(bytes(1 << 16))

    assert dict(os.environ) == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("output", ["pipe", "terminal"])
def test_a_run_is_shown_where_nobody_reads_and_is_blocked_at_once(output: str) -> None:
    """Else it would not matter that nobody does: a pipe takes 64 KiB, and a run prints a few."""
    unread = UnreadOutput(Surroundings(output=output))
    with unread():
        assert not select.select([], [unread._stream], [], 0.0)[1]
        _RunDisplay(unread).note("something happens")
        text = b""
        while b"something happens" not in text:
            text = text[-100:] + os.read(unread.reader_fd, 4096)


@pytest.mark.parametrize("output", ["pipe", "terminal"])
def test_output_that_nobody_reads_costs_nothing(output: str, runs: Runs) -> None:
    """It blocks whoever writes to it, until the run is over."""
    found = runs.outcome(Surroundings(output=output))

    assert not found.reason
    assert found.injected_faults == {"kill": 1}


def test_a_pipe_that_closes_costs_nothing(runs: Runs) -> None:
    """As with `| head`."""
    found = runs.outcome(Surroundings(output="pipe", closes_at=CLOSED_AT))

    assert not found.reason
    assert found.injected_faults == {"kill": 1}


def test_a_terminal_that_closes_stops_a_run_which_is_resumed(runs: Runs) -> None:
    """SIGHUP saves it; the next run is told of its terminal as this one was."""
    before = signal.signal(signal.SIGHUP, signal.default_int_handler)
    try:
        found = runs.outcome(Surroundings(output="terminal", closes_at=CLOSED_AT))
        assert signal.getsignal(signal.SIGHUP) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGHUP, before)

    assert found.reason == "stopped"
    assert found.justification == "its terminal was closed (SIGHUP)"
    assert found.is_resumed
    assert found.report is not None
    assert len(found.report.iterations) > CLOSED_AT


def test_under_nohup_a_terminal_that_closes_costs_nothing(runs: Runs) -> None:
    """A job that is to ignore SIGHUP trains on."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        found = runs.outcome(Surroundings(output="terminal", closes_at=CLOSED_AT))
    finally:
        signal.signal(signal.SIGHUP, before)

    assert not found.reason
    assert found.injected_faults == {"kill": 1}
