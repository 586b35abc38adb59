"""Many faults, at any moment: each run ends with the bits of the run in peace, or resumes."""

import fcntl
import json
import os
import signal
import sys
import time
from collections import Counter, deque
from contextlib import closing
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from helpers.chaos import small_job
from helpers.command import TIMEOUT_S, command, running, wait_for
from helpers.fake_fork_server import NO_PID
from planaria.chaos.runs import Chaos, RunOutcome, _Bound, _RunPlace
from planaria.cli.chaos_command import command_text
from planaria.errors import InsufficientError
from planaria.job.config import load_job
from planaria.job.training_job import Job
from planaria.observe.metrics import REPORT_VERSION

pytestmark = pytest.mark.faults

SMALL = Path(__file__).parents[2] / "examples" / "small.toml"
SEED = 20_261_140
RUNS = 2
KINDS_MIN = 3  # Of faults; one that is placed by seconds may come too late.
PIPE_BYTES = 4096  # Of the smallest.
# The fewest processes that a loss leaves training.
TWO_NODES = ("cluster.nodes=2", "cluster.device_memory_bytes=0")
# The cheapest model, which needs no transformers; one node cannot hold it, two can.
PLAIN = (
    *("model.kind=python", "model.target=helpers.user_models:sequential"),
    *("data.kind=python", "data.target=helpers.user_models:points"),
    *("training.iterations=10", "training.global_batch_size=12", "training.microbatch_size=2"),
    *("cluster.nodes=4", "cluster.device_memory_bytes=100_000"),
)
PROTECTED = (
    *("checkpoint.copies=2", "checkpoint.profile_iterations=0"),
    *("cluster.standby=1", "cluster.grant_s=0.5"),
)


def _note(text: str) -> None:
    """What begins; pytest shows it if the test fails."""
    print(text)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        pytest.param("", PLAIN, id="plain"),
        pytest.param(
            SMALL.read_text(), PROTECTED, marks=pytest.mark.long, id="copies and standby nodes"
        ),
    ],
)
def test_every_run_ends_with_the_same_bits_or_resumes_to_them(
    text: str, overrides: tuple[str, ...], tmp_path: Path
) -> None:
    """`make chaos` goes on for half an hour, with any seed."""
    outcomes: list[RunOutcome] = []
    file = tmp_path / "job.toml"
    file.write_text(text)
    job = Job.from_file(file, overrides=overrides)
    with closing(Chaos(job, seed=SEED, doing=_note).outcomes(minutes=60.0)) as drawn:
        for outcome in islice(drawn, RUNS):
            line = command_text(outcome, job=file, overrides=list(overrides))
            print(line, *outcome.violations, sep="\n  ")
            outcomes.append(outcome)
    fired = Counter[str]()
    for outcome in outcomes:
        fired.update(outcome.injected_faults)

    assert len(outcomes) == RUNS
    assert [outcome.number for outcome in outcomes if outcome.violations] == [], f"seed {SEED}"
    assert len(fired) >= KINDS_MIN, fired


@pytest.mark.long
def test_without_a_fork_server_no_run_is_to_blame() -> None:
    """Somebody has killed it, as a machine does that is short of memory."""
    before = set(psutil.Process().children())

    def kill(text: str) -> None:
        if text.startswith("run 0"):
            for child in set(psutil.Process().children()) - before:
                child.kill()

    outcomes = Chaos(Job.from_file(SMALL), seed=SEED, doing=kill).outcomes(minutes=0.01)
    with pytest.raises(InsufficientError, match="fork server was killed by signal 9"):
        next(outcomes)


@pytest.mark.long
def test_a_job_that_is_never_the_same_is_told_with_what_repeats_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its forward depends on the process; nothing that planaria does can make up for that."""
    monkeypatch.chdir(tmp_path)
    Path("job.py").write_text(
        "import os, torch, planaria\n"
        "from torch import nn\n"
        "from helpers.user_models import points, sequential\n"
        "class Drifting(nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return super().forward(x) + os.getpid() * 1e-3\n"
        "def model():\n"
        "    return nn.Sequential(Drifting(8, 8), *sequential())\n"
        "model_config = planaria.ModelConfig(kind='python', target='job:model')\n"
        "data = planaria.DataConfig(kind='python', target='job:points')\n"
        "job = planaria.Job(planaria.JobConfig(model=model_config, data=data))\n"
    )
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    settings = (
        "cluster.nodes=2",
        "training.iterations=6",
        "training.global_batch_size=8",
        "training.microbatch_size=2",
    )
    result = command(
        *("chaos", "job.py", "--minutes", "0.01", "--seed", "5", "--report", "score.json"),
        *(word for setting in settings for word in ("--set", setting)),
    )

    assert result.exit_code == 1, result.output
    assert "parameters_sha256" in result.output
    assert "planaria train job.py --set cluster.nodes=2" in result.output
    found = json.loads(Path("score.json").read_text())
    assert found["score"]["failures"] == found["score"]["runs"] == 1
    assert json.loads(Path("chaos-5-0.json").read_text())["report"]["version"] == REPORT_VERSION
    assert not Path("checkpoints").exists()


@pytest.mark.long
@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "blocked"])
def test_nobody_has_to_read_what_came_of_it(is_closed: bool, tmp_path: Path) -> None:
    """As with `| head`: the score is written all the same, and no word of a broken pipe is said."""
    settings = (*TWO_NODES, "training.iterations=6")
    words = [sys.executable, "-m", "planaria", "chaos", str(SMALL), "--minutes", "1e-6"]
    words += ["--seed", "5", "--report", "score.json"]
    words += [word for setting in settings for word in ("--set", setting)]
    reader_fd, writer_fd = os.pipe()
    fcntl.fcntl(writer_fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    if is_closed:
        os.close(reader_fd)
    else:
        os.write(writer_fd, bytes(PIPE_BYTES))
    with running(words, directory=tmp_path, output_fd=writer_fd) as chaos:
        os.close(writer_fd)
        wait_for((tmp_path / "score.json").exists, what="the score", timeout_s=200.0)
        if not is_closed:
            os.close(reader_fd)

        assert chaos.wait() == 0, chaos.errors
    assert not chaos.errors
    assert json.loads((tmp_path / "score.json").read_text())["score"]["runs"] == 1


@pytest.mark.long
def test_a_run_that_takes_too_long_is_ended_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No fault makes a job wait for ever, so the bound is set to no time at all."""
    monkeypatch.setattr("planaria.chaos.runs._BOUND_S", -1e6)
    overrides = [f"checkpoint.directory={tmp_path}", "training.iterations=2", *TWO_NODES]
    job = Job.from_file(SMALL, overrides=overrides)

    (outcome,) = Chaos(job, seed=1, doing=_note).outcomes(minutes=1e-6)

    assert any(wrong.startswith("not over after") for wrong in outcome.violations)
    assert not any(wrong.endswith("left over") for wrong in outcome.violations)


def test_a_run_that_takes_too_long_is_interrupted_also_where_its_fork_server_is_gone(
    tmp_path: Path,
) -> None:
    """To look for stacks that are not there ended the thread that interrupts, and the run went on
    for ever."""
    server: Any = SimpleNamespace(pid=NO_PID)
    bound = _Bound(0.01, _RunPlace(tmp_path, (server,), "NAME=value", deque()))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), bound():
            time.sleep(TIMEOUT_S)
    finally:
        signal.signal(signal.SIGINT, before)

    assert bound.is_expired
    assert bound.stacks == []


def test_the_example_is_as_small_as_the_jobs_of_these_tests(tmp_path: Path) -> None:
    """So that what is known of one is known of the other."""
    small, tested = load_job(SMALL), small_job("gpt2", tmp_path)

    for name in ("n_embd", "n_head", "n_layer"):
        assert small.model.config[name] == tested.model.config[name]
    assert small.data == tested.data
