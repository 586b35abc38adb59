"""However a job ends, nothing of it is left, and what ended it is said."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from helpers.command import PACED, Command, listening_ports, running, train_arguments, wait_for
from planaria.checkpoint.disk.tiers import tier_of
from planaria.errors import InsufficientError, TrainingError
from planaria.job.training_job import Job
from planaria.nodes.forkserver import ForkServer
from planaria.nodes.head.process_events import LEAVE_SIGNALS

pytestmark = pytest.mark.faults

SCRIPT_EXAMPLE = PACED.with_name("script.py")
# Iterations of a tenth of a second, or of more than an hour: whoever waits for one is found out,
# also on a machine that is too busy for limits of seconds.
FAST, SLOW = "model.time_scale=0.1", "model.time_scale=4000"
SMALL = (
    FAST,
    "cluster.nodes=3",
    "resilience.failures_tolerated=0",
    "training.global_batch_size=12",
    "checkpoint.directory=checkpoints",
)
ENDLESS = (*SMALL, "training.iterations=1_000_000_000", "checkpoint.persist_every=1")

# What the command says right before each of these moments.
IMPORTING, PREPARING, STARTING = "importing torch", "building the model", "3 nodes are up"
TRAINING, SAVING = "iteration 1 ", "saved iteration 2"


def long(value: object) -> Any:
    """A case between others, which only make chaos runs."""
    return pytest.param(value, marks=pytest.mark.long)


def shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "planaria" in name or "torch" in name}


def assert_nothing_is_left(command: Command, ports: set[int]) -> None:
    # A process that exits gives its memory back, and with it its mark, before its sockets.
    wait_for(
        lambda: not command.processes() and not ports & listening_ports(),
        what="processes and ports are gone",
    )


def newest_iteration(directory: Path) -> int:
    manifest = tier_of(str(directory / "checkpoints")).newest()
    assert manifest is not None
    return manifest.iteration


@pytest.mark.parametrize("moment", [IMPORTING, long(PREPARING), long(STARTING), SAVING])
def test_nothing_outlives_a_killed_launcher(moment: str, tmp_path: Path) -> None:
    """SIGKILL leaves it no last word: the kernel has to end the others. That it does so also while
    they import is in tests/nodes/test_forkserver.py, with an import that never ends."""
    before = shared_memory()
    with running(train_arguments(PACED, *ENDLESS), directory=tmp_path) as command:
        command.wait_output(moment)
        wait_for(lambda: len(command.processes()) > 1, what="it has started others")
        ports = command.ports()
        command.process.kill()

        command.wait()
        assert_nothing_is_left(command, ports)
    assert shared_memory() <= before


def to_the_launcher_alone(command: Command) -> None:
    command.process.send_signal(signal.SIGINT)


def to_the_foreground_group(command: Command) -> None:
    os.killpg(command.process.pid, signal.SIGINT)


def as_a_scheduler_does(command: Command) -> None:
    command.process.terminate()


@pytest.mark.parametrize(
    "interrupt",
    [
        long(to_the_launcher_alone),
        to_the_foreground_group,
        long(as_a_scheduler_does),
    ],
)
def test_ctrl_c_saves_at_the_next_commit_and_resume_goes_on(
    interrupt: Callable[[Command], None], server: ForkServer, tmp_path: Path
) -> None:
    """A terminal signals the whole foreground group, a scheduler sends SIGTERM."""
    settings = (*ENDLESS, "checkpoint.persist_every=0")
    with running(train_arguments(PACED, *settings), directory=tmp_path) as command:
        command.wait_output(TRAINING)
        ports = command.ports()
        interrupt(command)

        assert command.wait() == 130
        assert_nothing_is_left(command, ports)
    saved = newest_iteration(tmp_path)
    assert f"iteration {saved - 1} " in command.output
    assert "go on with --resume" in command.output
    assert not command.errors

    overrides = [
        *SMALL,
        f"training.iterations={saved + 1}",
        f"checkpoint.directory={tmp_path / 'checkpoints'}",
    ]
    result = Job.from_file(PACED, overrides=overrides).train(resume=True, server=server)
    assert [record.iteration for record in result.report.iterations] == [saved]


@pytest.mark.long
@pytest.mark.parametrize("number", LEAVE_SIGNALS)
def test_a_signal_to_all_processes_of_a_job_saves_it(
    number: signal.Signals, tmp_path: Path
) -> None:
    """As some schedulers do: its processes leave that to the launcher, but nodes take SIGTERM for a
    notice that they are all taken away."""
    settings = (*ENDLESS, "checkpoint.persist_every=0")
    with running(train_arguments(PACED, *settings), directory=tmp_path) as command:
        command.wait_output(TRAINING)
        launcher = psutil.Process(command.process.pid)
        for process in [launcher, *launcher.children(recursive=True)]:
            process.send_signal(number)

        assert command.wait() == 130, command.errors
        assert_nothing_is_left(command, set())
    assert "stopped; go on with --resume" in command.output
    assert not command.errors
    assert "another one is started" not in command.output
    assert "the coordinator runs again" not in command.output
    assert newest_iteration(tmp_path) > 0


@pytest.mark.parametrize("moment", [IMPORTING, long(PREPARING), long(STARTING)])
def test_ctrl_c_before_training_ends_at_once(moment: str, tmp_path: Path) -> None:
    """There is nothing to save yet, so nobody waits for an iteration, or for what comes next."""
    settings = (*ENDLESS, SLOW)
    with running(train_arguments(PACED, *settings), directory=tmp_path) as command:
        command.wait_output(moment)
        command.process.send_signal(signal.SIGINT)

        assert command.wait() == 130
        assert_nothing_is_left(command, set())
    assert "training\n" not in command.output
    assert moment != IMPORTING or PREPARING not in command.output
    assert command.errors.startswith("planaria: interrupted")
    assert command.errors.count("\n") == 1
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.long
def test_a_second_ctrl_c_ends_at_once_and_says_what_it_cost(tmp_path: Path) -> None:
    """The first waits for a commit that is an hour away."""
    settings = (*ENDLESS, SLOW, "checkpoint.persist_every=0")
    with running(train_arguments(PACED, *settings), directory=tmp_path) as command:
        command.wait_output("training\n")
        command.process.send_signal(signal.SIGINT)
        command.wait_output("the job stops at the next commit")
        command.process.send_signal(signal.SIGINT)

        assert command.wait() == 130
        assert_nothing_is_left(command, set())
    assert "nothing was saved; there is no checkpoint" in command.errors
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.long
def test_a_killed_fork_server_ends_nothing_and_is_named(tmp_path: Path) -> None:
    """It is a child of the launcher; Ctrl-C saves as if nothing had happened. That a job goes on is
    in test_saved_ends.py, without a command of its own."""
    with running(train_arguments(PACED, *ENDLESS), directory=tmp_path) as command:
        command.wait_output(TRAINING)
        children = psutil.Process(command.process.pid).children()
        (fork_server,) = (one for one in children if "forkserver" in " ".join(one.cmdline()))
        fork_server.kill()
        command.wait_output("the fork server was killed by signal 9: another one is started")
        command.process.send_signal(signal.SIGINT)

        assert command.wait() == 130
        assert_nothing_is_left(command, set())
    assert "go on with --resume" in command.output
    assert not command.errors


SCRIPT = """
import pathlib, planaria
with open("runs", "a") as file:
    file.write("run\\n")
job = planaria.Job.from_file({paced!r}, overrides={overrides!r})
print(job.train().report.final.iteration)
"""


def test_a_script_without_a_main_guard_trains_once(tmp_path: Path) -> None:
    """multiprocessing would run the script again in every process."""
    script = tmp_path / "script.py"
    overrides = [*SMALL, "training.iterations=2"]
    script.write_text(SCRIPT.format(paced=str(PACED), overrides=overrides))

    with running([sys.executable, str(script)], directory=tmp_path) as command:
        assert command.wait() == 0, command.errors
        assert_nothing_is_left(command, set())
    assert command.output.split() == ["2"]
    assert (tmp_path / "runs").read_text() == "run\n"


@pytest.mark.long
def test_the_example_script_trains_as_a_command(tmp_path: Path) -> None:
    """Its model, data and job are in one file that workers import."""
    arguments = train_arguments(SCRIPT_EXAMPLE, "training.iterations=3")
    with running([*arguments, "--nodes", "2"], directory=tmp_path) as command:
        assert command.wait() == 0, command.errors
        assert_nothing_is_left(command, set())
    assert "2 nodes are up" in command.output
    assert "saved iteration 3" in command.output


# More passes in the first iteration than go well, so that none is ever committed.
MANY_MICROBATCHES = ("training.global_batch_size=200", "training.microbatch_size=1")


def dying_job(target: str, directory: Path, *more: str) -> Job:
    """A job of two nodes whose model ends its own process, or its node."""
    overrides = [
        "model.kind=python",
        f"model.target=helpers.mistaken_models:{target}",
        "data.kind=python",
        "data.target=helpers.user_models:points",
        "cluster.nodes=2",
        f"checkpoint.directory={directory / 'checkpoints'}",
        *more,
    ]
    return Job.from_file(empty_job(directory), overrides=overrides)


def test_a_worker_that_dies_again_and_again_ends_the_job(
    server: ForkServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is forked anew twice; what kills it a third time, elsewhere too, will do so for ever."""
    children = set(psutil.Process(server.pid).children())
    job = dying_job("killed", tmp_path, *MANY_MICROBATCHES)

    with pytest.raises(
        TrainingError, match=r"by signal 9 .*the 3rd time in a row; the same happened on node"
    ) as e:
        job.train(server=server)

    assert e.value.blame == "node"
    assert set(psutil.Process(server.pid).children()) <= children
    assert not caplog.records  # The launcher warns of a process that is left.


def test_a_job_all_of_whose_workers_die_does_not_begin_again(
    server: ForkServer, tmp_path: Path
) -> None:
    """Their nodes live, but what they had trained is gone."""
    with pytest.raises(InsufficientError, match=r"holds layer 0, .* was killed by signal 9"):
        dying_job("killed", tmp_path).train(server=server)


def test_a_job_that_loses_all_its_nodes_says_how_they_ended(
    server: ForkServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And leaves something to resume from, though nothing has been trained."""
    children = set(psutil.Process(server.pid).children())

    with pytest.raises(InsufficientError, match=r"killed by signal 9; .* of iteration 0; go on"):
        dying_job("killed_with_its_node", tmp_path).train(server=server)

    assert set(psutil.Process(server.pid).children()) <= children
    assert not caplog.records


def empty_job(directory: Path) -> Path:
    path = directory / "job.toml"
    path.touch()
    return path
