"""What stands around the training ends no job unsaved: the fork server, the journal's disk, the
temporary directory, the coordinator. What is saved resumes to the bits of a run in peace."""

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from helpers import crashing_leader
from helpers.acting_display import At
from helpers.chaos import (
    FAMILY,
    ITERATIONS,
    N0,
    baseline_digests,
    chaos_job,
    check_survived,
    events_besides_load,
    long_but_the_first,
    recoveries,
    run_under_faults,
)
from helpers.jobs import digests, tiny_job
from planaria.errors import InsufficientError
from planaria.job import training_job as library
from planaria.job.planning import PRELOAD, Planned
from planaria.job.training_job import Job, SilentDisplay, TrainingResult
from planaria.nodes.forking import Forker
from planaria.nodes.forkserver import ForkServer
from planaria.nodes.head.process_events import LEAVE_SIGNALS
from planaria.observe.metrics import IterationRecord

pytestmark = pytest.mark.faults

# Iterations of a job that stops before its end, on any machine: nodes go on while there is no
# coordinator. It is resumed to the next multiple of the second number.
MANY, STEP = 1200, 20


@pytest.fixture(scope="module")
def crashing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While there is such a file coordinators end at once."""
    return tmp_path_factory.mktemp("crashing") / "crashing"


@pytest.fixture(scope="module")
def own_server(crashing: Path) -> Iterator[ForkServer]:
    """Killed by these tests, so it is not that of all others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CRASHING", str(crashing))
        running = ForkServer(PRELOAD, path=[str(Path(crashing_leader.__file__).parents[1])])
    running.wait_ready()
    yield running
    running.close()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk of its own."""
    directory = tmp_path / "disk"
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(directory)]
    if os.geteuid() != 0 or subprocess.run(command, check=False).returncode != 0:
        pytest.skip("mounting is not allowed here")
    yield directory
    subprocess.run(["umount", "-l", str(directory)], check=False)


def fill(directory: Path) -> None:
    """No byte more can be written there."""
    (directory / "fill").mkdir(exist_ok=True)
    with suppress(OSError), (directory / "fill" / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))
    with suppress(OSError), (directory / "fill" / "filler-2").open("wb", buffering=0) as file:
        while True:
            file.write(b"!")


def assert_resumes_to_the_same_bits(
    result: TrainingResult, server: ForkServer, directory: Path
) -> None:
    """It was saved at the commit at which it stopped, and lost nothing; on two nodes, which have
    less to do and end with the same bits."""
    config = result.planned.config
    config = replace(
        config,
        cluster=replace(config.cluster, nodes=N0),
        resilience=replace(config.resilience, failures_tolerated=0),
    )
    done = len(result.report.iterations)
    assert result.report.final.checkpoint, result.error
    assert result.report.final.parameters_sha256, result.error
    assert 0 < done < MANY
    end = (done // STEP + 1) * STEP
    config = replace(config, training=replace(config.training, iterations=end))
    resumed = Job(config).train(resume=True, server=server)
    assert [record.iteration for record in resumed.report.iterations] == list(range(done, end))
    assert digests(resumed) == baseline_digests(server, end)
    assert not (directory / "checkpoints" / ".journal").exists()


# -- the fork server ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "specs",
    long_but_the_first(
        [
            ("forkserver:@2", "kill:1@4", "leader:@5"),
            ("forkserver:@2", "kill:1@4", "leader:@5", "forkserver:@6"),
            ("forkserver:@3",),
            ("forkserver:@2", "kill:1@4.reduce"),
            ("forkserver:@3", "leader:@3"),
            ("forkserver:@2", "join:1@3"),
        ]
    ),
)
def test_a_job_whose_fork_server_is_killed_ends_with_the_same_bits(
    specs: tuple[str, ...], own_server: ForkServer, tmp_path: Path
) -> None:
    """The nodes live on, and a new one forks what comes next."""
    config = chaos_job(FAMILY, tmp_path / "run", own_server, nodes=4)
    config = replace(config, cluster=replace(config.cluster, max_nodes=5))
    before = own_server.pid
    display = At({})

    result = run_under_faults(config, own_server, *specs, display=display)

    own_server.exits()
    assert own_server.pid != before
    told = "the fork server was killed by signal 9: another one is started"
    assert any(told in note for note in display.notes), display.notes
    check_survived(result, specs, baseline_digests(own_server, ITERATIONS))
    assert ("kill" in {event.kind for event in recoveries(result)}) == any(
        spec.startswith("kill") for spec in specs
    )
    if own_server.loss:  # As the last of a run may be: nobody needed another one.
        own_server.renew()
    own_server.wait_ready()


@pytest.mark.long
def test_a_fork_server_that_never_stays_ends_a_job_only_when_it_is_needed(
    own_server: ForkServer,
    tmp_path: Path,
    leaders: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without it no coordinator can be started, not even one that only saves; that is said."""
    config = chaos_job(FAMILY, tmp_path / "run", own_server, nodes=4, iterations=MANY)
    monkeypatch.setattr(own_server, "_preload", ["no.such.module", "leaving"])
    monkeypatch.setattr(own_server, "_path", [str(tmp_path), *own_server._path])
    (tmp_path / "leaving.py").write_text("raise SystemExit(9)")
    acts: dict[int, Callable[[], object]] = {4: lambda: os.kill(own_server.pid, signal.SIGKILL)}

    class Killing(At):
        def note(self, text: str) -> None:
            super().note(text)
            if "no node can be started any more" in text and not acts:
                os.kill(leaders[-1], signal.SIGKILL)

    result = Job(config).run(server=own_server, display=Killing(acts))
    monkeypatch.undo()
    own_server.renew()
    own_server.wait_ready()

    assert isinstance(result.error, InsufficientError)
    assert "no process could be started to save; there is no checkpoint" in str(result.error)
    assert len(result.report.iterations) > 4


# -- the journal ----------------------------------------------------------------------------------


def test_a_full_disk_of_the_journal_ends_the_job_saved(
    own_server: ForkServer, tmp_path: Path, disk: Path
) -> None:
    """The saves are on another one. No later run takes this one's journal for its own."""
    config = chaos_job(FAMILY, tmp_path / "run", own_server, nodes=N0, f=0, iterations=MANY)
    display = At({4: lambda: fill(disk)})

    result = Job(config).run(server=own_server, state=str(disk), display=display)

    assert isinstance(result.error, InsufficientError)
    assert f"cannot use {disk}" in str(result.error)
    assert "No space left on device" in str(result.error)
    assert "go on from it with --resume" in str(result.error)
    assert any("the job saves and ends" in note for note in display.notes)
    assert_resumes_to_the_same_bits(result, own_server, tmp_path / "run")


def test_a_full_disk_of_journal_and_saves_is_said_to_have_saved_nothing(
    own_server: ForkServer, tmp_path: Path, disk: Path
) -> None:
    """One disk for both, as is usual. Nobody makes room for most of `checkpoint.timeout_s`."""
    config = chaos_job(FAMILY, tmp_path / "run", own_server, nodes=N0, f=0, iterations=MANY)
    saves = str(disk / "checkpoints")
    checkpoint = replace(config.checkpoint, directory=saves, timeout_s=4.0)
    config = replace(config, checkpoint=checkpoint)

    result = Job(config).run(server=own_server, display=At({4: lambda: fill(disk)}))

    assert isinstance(result.error, InsufficientError)
    assert f"cannot use {saves}/.journal/journal: No space left on device" in str(result.error)
    assert "the live layers were not saved: cannot write" in str(result.error)
    assert "there is no checkpoint" in str(result.error)


class Full(At):
    """Its disk is full before the first record."""

    def __init__(self, disk: Path) -> None:
        super().__init__({})
        self._disk = disk

    def show_plan(self, _: Planned) -> None:
        fill(self._disk)


def test_a_disk_that_takes_no_record_at_all_ends_a_job_that_has_lost_nothing(
    own_server: ForkServer, tmp_path: Path, disk: Path
) -> None:
    """The user named the place, so there is no other."""
    config = chaos_job(FAMILY, tmp_path / "run", own_server, nodes=N0, f=0, iterations=MANY)

    result = Job(config).run(server=own_server, state=str(disk), display=Full(disk))

    assert isinstance(result.error, InsufficientError)
    assert f"cannot use {disk}" in str(result.error)
    assert "nothing was trained, and nothing is lost; there is no checkpoint" in str(result.error)
    assert not result.report.iterations
    assert [path.name for path in disk.iterdir()] == ["fill"]


def test_a_journal_that_takes_no_record_beside_the_saves_is_kept_elsewhere(
    own_server: ForkServer, tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody was told of anything yet. The job trains, and saves once there is space again."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    config = chaos_job(FAMILY, tmp_path / "run", own_server, nodes=N0, f=0)
    saves = str(disk / "checkpoints")
    config = replace(config, checkpoint=replace(config.checkpoint, directory=saves))
    display = Full(disk)
    display.acts[1] = lambda: shutil.rmtree(disk / "fill")

    result = Job(config).run(server=own_server, display=display)

    assert result.error is None
    assert digests(result) == baseline_digests(own_server, ITERATIONS)
    assert not events_besides_load(result)
    (note,) = [note for note in display.notes if "are kept in" in note]
    assert "No space left on device" in note
    assert not list((tmp_path / "state" / "planaria").iterdir())


# -- the coordinator ------------------------------------------------------------------------------


@pytest.fixture
def leaders(monkeypatch: pytest.MonkeyPatch, crashing: Path) -> Iterator[list[int]]:
    """The pids of coordinators, of crashing_leader.py, in the order in which they are started."""
    started: list[int] = []
    real_spawn = Forker.spawn

    async def spawn(self: Forker, target: str, payload: bytes, fds: Sequence[int]) -> int:
        is_leader = "leader" in target
        pid = await real_spawn(
            self, "helpers.crashing_leader:main" if is_leader else target, payload, fds
        )
        if is_leader:
            started.append(pid)
        return pid

    monkeypatch.setattr(Forker, "spawn", spawn)
    yield started
    for path in (crashing, rescues(crashing)):
        path.unlink(missing_ok=True)


def rescues(crashing: Path) -> Path:
    """While there is such a file those coordinators end at once, too, that only save."""
    return crashing.with_name("crashing-rescues")


def end_for_ever(leaders: list[int], crashing: Path) -> Callable[[], None]:
    """Kills the coordinator, and all after it."""

    def act() -> None:
        crashing.touch()
        os.kill(leaders[-1], signal.SIGKILL)

    return act


def test_a_coordinator_that_always_ends_ends_the_job_saved(
    own_server: ForkServer, tmp_path: Path, leaders: list[int], crashing: Path
) -> None:
    """One that needs no plans asks the nodes what they hold, and has them save it."""
    config = chaos_job(FAMILY, tmp_path / "run", own_server, nodes=4, iterations=MANY)
    display = At({4: end_for_ever(leaders, crashing)})

    result = Job(config).run(server=own_server, display=display)

    assert isinstance(result.error, InsufficientError)
    assert "ended 6 times without a commit" in str(result.error)
    assert "go on from it with --resume" in str(result.error)
    crashing.unlink()
    assert_resumes_to_the_same_bits(result, own_server, tmp_path / "run")


@pytest.mark.long
def test_a_node_that_is_killed_meanwhile_costs_no_save(
    own_server: ForkServer, tmp_path: Path, leaders: list[int], crashing: Path
) -> None:
    """As after any loss, others hold what it held."""
    config = chaos_job(FAMILY, tmp_path / "run", own_server, nodes=4, iterations=MANY)
    end = end_for_ever(leaders, crashing)

    def act() -> None:
        agents = set(psutil.Process(own_server.pid).children())
        agents -= {psutil.Process(leaders[-1])}
        end()
        os.killpg(min(agent.pid for agent in agents), signal.SIGKILL)

    result = Job(config).run(server=own_server, display=At({4: act}))

    assert isinstance(result.error, InsufficientError)
    crashing.unlink()
    assert_resumes_to_the_same_bits(result, own_server, tmp_path / "run")


def test_where_no_coordinator_lives_the_job_says_that_nothing_was_saved(
    own_server: ForkServer, tmp_path: Path, leaders: list[int], crashing: Path
) -> None:
    """Not even one that only saves."""
    config = chaos_job(FAMILY, tmp_path / "run", own_server, nodes=4, iterations=MANY)
    children = set(psutil.Process(own_server.pid).children())
    rescues(crashing).touch()

    result = Job(config).run(server=own_server, display=At({4: end_for_ever(leaders, crashing)}))

    assert isinstance(result.error, InsufficientError)
    assert "3 more coordinators ended before they had saved it; there is no checkpoint" in str(
        result.error
    )
    assert set(psutil.Process(own_server.pid).children()) <= children


@pytest.mark.long
def test_a_coordinator_that_dies_without_records_is_followed_by_one_that_saves(
    own_server: ForkServer, tmp_path: Path, disk: Path, leaders: list[int]
) -> None:
    """What was decided since the disk was full is nowhere but with the nodes."""
    config = chaos_job(FAMILY, tmp_path / "run", own_server, nodes=4, iterations=MANY)

    class Killing(At):
        def note(self, text: str) -> None:
            super().note(text)
            if "the job saves and ends" in text:
                os.kill(leaders[-1], signal.SIGKILL)

    result = Job(config).run(
        server=own_server, state=str(disk), display=Killing({4: lambda: fill(disk)})
    )

    assert len(leaders) >= 2
    assert isinstance(result.error, InsufficientError)
    assert "No space left on device" in str(result.error)
    assert_resumes_to_the_same_bits(result, own_server, tmp_path / "run")


def test_a_journal_that_somebody_removes_ends_the_job_saved(
    own_server: ForkServer, tmp_path: Path, leaders: list[int]
) -> None:
    """The next coordinator would begin the job anew, and the nodes would take it for an old one."""
    config = chaos_job(FAMILY, tmp_path / "run", own_server, nodes=4, iterations=MANY)

    def act() -> None:
        shutil.rmtree(tmp_path / "run" / "checkpoints" / ".journal")
        os.kill(leaders[-1], signal.SIGKILL)

    result = Job(config).run(server=own_server, display=At({4: act}))

    assert isinstance(result.error, InsufficientError)
    assert "somebody has removed the journal" in str(result.error)
    assert_resumes_to_the_same_bits(result, own_server, tmp_path / "run")


@pytest.mark.long
def test_what_a_display_raises_ends_the_job_saved(own_server: ForkServer, tmp_path: Path) -> None:
    """It is the caller's mistake, and no reason to lose what was trained."""
    config = chaos_job(FAMILY, tmp_path / "run", own_server, nodes=4, iterations=MANY)

    def act() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Job(config).train(server=own_server, display=At({4: act}))

    config = replace(config, training=replace(config.training, iterations=3 * STEP))
    resumed = Job(config).train(resume=True, server=own_server)
    assert digests(resumed) == baseline_digests(own_server, 3 * STEP)


def test_a_report_is_interrupted_by_ctrl_c_alone_which_loses_nothing(
    own_server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was said to be interrupted before training began, and by a repeated SIGTERM, too."""
    config = tiny_job("sequential", tmp_path, iterations=1)
    before = [signal.getsignal(number) for number in LEAVE_SIGNALS]

    def report_of(*_: object) -> None:
        assert {signal.getsignal(number) for number in LEAVE_SIGNALS} == {signal.SIG_IGN}
        raise KeyboardInterrupt

    monkeypatch.setattr(library, "report_of", report_of)
    with pytest.raises(KeyboardInterrupt, match=r"after training had ended; .* of iteration 1; go"):
        Job(config).run(server=own_server)

    assert [signal.getsignal(number) for number in LEAVE_SIGNALS] == before
    assert not (tmp_path / ".job.lock").exists()


# -- a stop that is asked for meanwhile -----------------------------------------------------------


class Stopping(SilentDisplay):
    """Sends this process SIGTERM when something is said, once."""

    def __init__(self, said: str) -> None:
        self._said = said
        self._is_sent = False

    def show_training(self) -> None:
        self.note("training")

    def note(self, text: str) -> None:
        if self._said in text and not self._is_sent:
            self._is_sent = True
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    "moment",
    long_but_the_first(
        [
            ("injecting leader", ("kill:1@3", "leader:@3.decide")),
            ("training", ()),
            ("injecting leader", ("leader:@3",)),
            ("injecting kill", ("kill:1@3.backward",)),
            ("lost: node 1", ("kill:1@3.backward",)),
            ("another one is started", ("forkserver:@3",)),
            ("injecting leader", ("forkserver:@2", "leader:@3")),
        ]
    ),
)
def test_a_stop_that_is_asked_for_at_any_moment_saves_and_resumes(
    moment: tuple[str, tuple[str, ...]], own_server: ForkServer, tmp_path: Path
) -> None:
    """Before the first commit, in a recovery, without a coordinator, without a fork server."""
    config = chaos_job(FAMILY, tmp_path / "run", own_server, nodes=4, iterations=MANY)

    said, specs = moment
    result = run_under_faults(config, own_server, *specs, display=Stopping(said))

    assert result.stopped
    assert result.error is None
    own_server.exits()
    if own_server.loss:
        own_server.renew()
    assert_resumes_to_the_same_bits(result, own_server, tmp_path / "run")


@pytest.mark.long
def test_a_stop_that_is_asked_for_while_the_job_has_to_end_changes_nothing(
    own_server: ForkServer, tmp_path: Path, disk: Path
) -> None:
    """It is saved once, and the reason is the disk."""
    config = chaos_job(FAMILY, tmp_path / "run", own_server, nodes=4, iterations=MANY)

    class Filling(Stopping):
        def show_iteration(self, record: IterationRecord) -> None:
            if record.iteration == 4:
                fill(disk)

    display = Filling("the job saves and ends")
    result = Job(config).run(server=own_server, state=str(disk), display=display)

    assert isinstance(result.error, InsufficientError)
    assert_resumes_to_the_same_bits(result, own_server, tmp_path / "run")


@pytest.mark.long
def test_a_stop_that_is_asked_for_while_no_coordinator_stays_changes_nothing(
    own_server: ForkServer, tmp_path: Path, leaders: list[int], crashing: Path
) -> None:
    """The one that only saves does what was asked for anyway."""
    config = chaos_job(FAMILY, tmp_path / "run", own_server, nodes=4, iterations=MANY)
    end = end_for_ever(leaders, crashing)

    def act() -> None:
        end()
        os.kill(os.getpid(), signal.SIGTERM)

    result = Job(config).run(server=own_server, display=At({4: act}))

    assert isinstance(result.error, InsufficientError)
    crashing.unlink()
    assert_resumes_to_the_same_bits(result, own_server, tmp_path / "run")
