"""What becomes of the run of a killed head if the head that takes it up does not go on."""

import errno
import os
import signal
import socket
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NoReturn, cast
from unittest.mock import patch

import msgspec
import pytest

from helpers.heads import CREDENTIALS
from helpers.left_runs import (
    LISTENING,
    RUN,
    ReturningMachine,
    come_back,
    leave_run,
    left_job,
    open_left_head,
)
from helpers.machine_lines import arrive
from helpers.tasks import wait_until
from planaria.checkpoint.disk.claim import claim
from planaria.checkpoint.disk.parts import HeadMark, RunPlace
from planaria.checkpoint.disk.storage import Directory
from planaria.checkpoint.disk.tiers import Start
from planaria.core.job import JobConfig
from planaria.core.machine_messages import (
    JobOffered,
    MachineFacts,
    MachineReady,
    NodeEnded,
    SourceFile,
)
from planaria.core.specs import Prepared
from planaria.errors import ConfigError
from planaria.job import on_machines, training_job
from planaria.job.on_machines import (
    LeftRun,
    Listening,
    find_left_run,
    kept_settings_text,
    new_run,
    note_kept,
    open_head,
    take_up,
)
from planaria.job.training_job import Job
from planaria.nodes.forkserver import ForkServer
from planaria.nodes.head.journal_place import journal_place
from planaria.nodes.head.process_events import restore_handlers
from planaria.nodes.head.remote.network_requests import ask_head
from planaria.nodes.head.remote.open_head import OpenHead
from planaria.nodes.head.remote.run_record import (
    RUN_FILE,
    TOUCH_PERIOD_S,
    NodeLog,
    give_up_run,
    read_run,
    record_age_s,
    write_run,
)
from planaria.nodes.head.requests import TellStatus
from planaria.nodes.input_files import PROSE_KEY


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
        if isinstance(error, KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            threading.Event().wait()  # This thread is left behind.
        raise error

    monkeypatch.setattr(training_job, "plan_job", fail)
    with pytest.raises(type(error)):
        Job(job).run(listening=LISTENING, display=machine.display)
    machine.join()

    assert machine.is_told is False
    assert (journal / RUN_FILE).read_bytes() == before
    assert "try again with --reattach" in machine.display.notes[-1]


def test_users_and_machines_are_answered_while_a_head_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan of a large job takes minutes; machines that came then had to try again and again."""
    job, machine = left_job(tmp_path / "saves"), ReturningMachine()
    leave_run(tmp_path / "saves" / ".journal", job)
    answers: list[str] = []

    def ask(*_: object, **__: object) -> NoReturn:
        assert machine.address is not None
        reply = ask_head(machine.address, CREDENTIALS, TellStatus(), timeout_s=60.0)
        answers.append(reply.text)
        raise ConfigError("model.kind", "", "wrong")

    monkeypatch.setattr(training_job, "plan_job", ask)
    with pytest.raises(ConfigError):
        Job(job).run(listening=LISTENING, display=machine.display)
    machine.join()

    assert job.name in answers[0]


LISTENING_ANEW = replace(LISTENING, reattaches=False)


def make_older(directory: Path, age_s: float) -> None:
    """Makes a head have been lost so many seconds ago."""
    then_s = time.time() - age_s
    for path in directory.iterdir():
        os.utime(path, (then_s, then_s))


def left_run(saves: Path) -> LeftRun:
    """A run that has just been left."""
    leave_run(saves / ".journal", left_job(saves))
    record = read_run(saves / ".journal")
    assert record is not None
    return LeftRun(saves / ".journal", record)


def test_a_head_that_waits_for_nodes_of_a_lost_one_writes_where_it_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it waits: they may have been told another address."""
    left = left_run(tmp_path)
    left = replace(left, record=msgspec.structs.replace(left.record, parts="run-000001-a1"))
    place = RunPlace(Directory(tmp_path), left.record.parts)
    marks: list[HeadMark | None] = []
    with open_left_head(tmp_path) as (head, _), head:

        async def wait_living(*_: object, **__: object) -> bool:
            marks.append(place.head())
            return True

        monkeypatch.setattr(head.machines, "wait_living", wait_living)
        assert take_up(head, left, resume=False, note=lambda _: None)

        assert marks == [HeadMark(addresses=(head.leader_sockets.address,))]


def test_fresh_machines_must_have_the_files_by_which_the_run_was_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machines that come back with nodes say nothing of theirs, so those of the first fresh one
    counted."""
    left = left_run(tmp_path)
    digests = {PROSE_KEY: ("n1", "this")}
    left = replace(left, record=msgspec.structs.replace(left.record, digests=digests))
    facts = MachineFacts(name="fresh", host="10.0.0.9")
    with open_left_head(tmp_path) as (head, _), head:

        async def wait_living(*_: object, **__: object) -> bool:
            checks.forget("n1")
            return True

        checks = head.machines.checks
        monkeypatch.setattr(head.machines, "wait_living", wait_living)
        assert take_up(head, left, resume=False, note=lambda _: None)
        ready = MachineReady(run=RUN, answer="", digests={PROSE_KEY: "another"})

        assert "differs from that of n1" in checks.compare("fresh", facts, ready)


@pytest.mark.parametrize("resume", [False, True])
def test_nodes_of_a_lost_head_are_waited_for_as_long_as_they_look_for_one(
    resume: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine notices only later that a head has lost its power. The next head began anew while
    the nodes lived, and these were killed when they came."""
    left, notes = left_run(tmp_path), list[str]()
    monkeypatch.setattr(on_machines, "_TAKE_UP_LEASES", 0)
    monkeypatch.setattr(on_machines, "_TAKE_UP_S", 0.0)
    with open_left_head(tmp_path) as (head, runner), head:
        address = head.leader_sockets.address
        loop = runner.get_loop()

        def note(text: str) -> None:
            notes.append(text)
            loop.call_soon(lambda: lines.append(loop.create_task(come_back(address))))

        lines: list[object] = []
        assert take_up(head, left, resume=resume, note=note)

        assert head.run == RUN
        assert "waiting up to 600 s" in notes[0] or "waiting up to 599 s" in notes[0]


def test_a_head_begins_anew_at_once_where_all_nodes_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their patience is over."""

    async def nobody(*_: object, **__: object) -> bool:
        return False

    left, notes = left_run(tmp_path), list[str]()
    patience_s = left.record.job.cluster.patience_s
    make_older(left.directory, patience_s)
    with open_left_head(tmp_path) as (head, _), head:
        monkeypatch.setattr(head.machines, "wait_living", nobody)

        assert not take_up(head, left, resume=True, note=notes.append)
        assert head.run != RUN
        assert "waiting up to 11 s" in notes[0]


def test_a_head_begins_anew_at_once_when_all_machines_have_come_without_their_nodes(
    tmp_path: Path,
) -> None:
    """It waited out their patience all the same, ten minutes by default."""
    left = left_run(tmp_path)
    with open_left_head(tmp_path) as (head, runner), head:
        loop, address = runner.get_loop(), head.leader_sockets.address
        lines: list[object] = []

        async def come_without_a_node() -> None:
            line = await arrive(address, run=RUN)
            await line.wait(JobOffered)
            line.tell(NodeEnded(node=0, status=-9))
            await line.wait(JobOffered)  # The next run.

        def note(_: str) -> None:
            loop.call_soon(lambda: lines.append(loop.create_task(come_without_a_node())))

        with patch.object(on_machines, "_TAKE_UP_S", 1e6):
            assert not take_up(head, left, resume=True, note=note)
        assert head.run != RUN
        assert head.machines.ends() == ()


def test_a_head_at_work_says_so_in_its_journal(tmp_path: Path) -> None:
    """A job that waits for machines commits nothing for minutes, and then its head may be lost."""
    directory = left_run(tmp_path).directory
    make_older(directory, 1e6)
    before_s = record_age_s(directory)
    with open_left_head(tmp_path) as (head, runner), head:
        log = head.machines.node_log = NodeLog(directory)

        async def begin() -> None:
            head.begin(lambda _: None, lambda: None, on_taken=pytest.fail)
            await wait_until(lambda: record_age_s(directory) < TOUCH_PERIOD_S)

        runner.run(begin())
        log.close()

    assert before_s >= 1e6 - 1.0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize(
    ("place", "is_left"), [("it waits", False), ("it waits", True), ("it plans", True)]
)
def test_a_head_that_is_told_to_leave_before_it_trains_tells_its_machines(
    place: str,
    number: signal.Signals,
    is_left: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was killed by the signal, and they looked for it until the end of their patience."""
    job, machine = left_job(tmp_path / "saves"), ReturningMachine()
    if is_left:
        leave_run(tmp_path / "saves" / ".journal", job)

    def leave(*_: object, **__: object) -> NoReturn:
        os.kill(os.getpid(), number)
        raise AssertionError("it does not leave")

    if place == "it waits":
        machine.display.acts["has come"] = lambda: os.kill(os.getpid(), number)
    else:
        monkeypatch.setattr(training_job, "plan_job", leave)
    listening = replace(LISTENING, reattaches=is_left, nodes_min=2)
    with restore_handlers():
        signal.signal(number, signal.SIG_DFL)  # Tests that run under nohup ignore it.
        with pytest.raises(KeyboardInterrupt):
            Job(job).run(listening=listening, display=machine.display)
        assert signal.getsignal(number) is signal.SIG_DFL
    machine.join()

    assert machine.is_told is not is_left


def find(job: JobConfig, state: str = "", *, resume: bool = False) -> Path | None:
    """The directory of the run that a head takes up, which reattaches or resumes."""
    listening = replace(LISTENING, reattaches=not resume)
    left = find_left_run(job, listening, state=state, resume=resume)
    return None if left is None else left.directory


@pytest.mark.parametrize("resume", [False, True])
def test_a_head_that_is_at_work_is_not_taken_for_a_lost_one(
    resume: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one took its machines up, or waited for them."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    job = left_job(tmp_path / "saves")
    for place in (str(tmp_path / "saves"), "s3://bucket/saves"):
        job = replace(job, checkpoint=replace(job.checkpoint, directory=place))
        with (
            claim(place, job.name, note=pytest.fail),
            journal_place(job, "", note=pytest.fail) as directory,
        ):
            leave_run(Path(directory), job)
            with pytest.raises(ConfigError, match="a head of this job is at work"):
                find(job, resume=resume)


def test_only_a_run_with_the_same_saves_is_taken_up(tmp_path: Path) -> None:
    """The journals of all jobs of one name may be in one directory, and the last one was taken."""
    state, job = tmp_path / "state", left_job(tmp_path / "saves")
    other = replace(job, checkpoint=replace(job.checkpoint, directory="s3://bucket/others"))
    own_directory = state / f"{job.name}-m-00000000"
    leave_run(own_directory, job)
    leave_run(state / f"{job.name}-m-00000001", other)

    assert find(job, str(state)) == own_directory


def test_a_run_is_found_whichever_way_its_saves_are_named(tmp_path: Path) -> None:
    """By another name of their directory its journal was emptied, and nobody could take it up."""
    state, job = tmp_path / "state", left_job(tmp_path / "saves")
    leave_run(tmp_path / "saves" / ".journal", job)
    (tmp_path / "link").symlink_to(tmp_path / "saves")
    for name in (tmp_path / "link", f"{tmp_path}/saves/", f"{tmp_path}/state/../saves"):
        state.mkdir(exist_ok=True)
        renamed = replace(job, checkpoint=replace(job.checkpoint, directory=str(name)))
        with pytest.raises(ConfigError, match="may still hold the newest state"):
            Job(renamed).run()
        assert find(renamed, "") == Path(str(name)) / ".journal"

    stored = replace(job, checkpoint=replace(job.checkpoint, directory="s3://bucket/saves"))
    leave_run(state / f"{job.name}-m-00000000", stored)
    renamed = replace(job, checkpoint=replace(job.checkpoint, directory="s3://bucket/saves/"))
    assert find(renamed, str(state)) == state / f"{job.name}-m-00000000"


def test_a_start_of_another_job_of_that_name_leaves_the_journal_of_a_lost_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two job files may have one stem. It goes once no node of that head can live any more."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    job = left_job(tmp_path / "saves")
    first, second = (
        replace(job, checkpoint=replace(job.checkpoint, directory=f"s3://bucket/{name}"))
        for name in ("first", "second")
    )
    with journal_place(first, "", note=pytest.fail) as made:
        pass
    leave_run(Path(made), first)
    with journal_place(second, "", note=pytest.fail):
        assert find(first, "") == Path(made)
    make_older(Path(made), 1e6)
    with journal_place(second, "", note=pytest.fail):
        assert not Path(made).exists()
    leave_run(Path(made), first)
    with journal_place(first, "", note=pytest.fail):
        assert not Path(made).exists(), "the run of the job itself was given up"


def test_of_several_lost_heads_the_one_whose_nodes_may_live_is_taken_up(tmp_path: Path) -> None:
    """If that may be several, the user says which are given up."""
    state, job = tmp_path / "state", left_job(tmp_path / "saves")
    first, second = (state / f"{job.name}-m-0000000{index}" for index in range(2))
    leave_run(first, job)
    leave_run(second, job)

    with pytest.raises(ConfigError, match="several heads of this job were lost"):
        find(job, str(state))
    make_older(second, 1e6)
    assert find(job, str(state)) == first
    make_older(first, 2e6)
    assert find(job, str(state), resume=True) == second


def test_a_disk_that_does_not_answer_is_told_before_a_run_is_looked_for_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every job looks there for a lost head first: the command stood still, and said nothing."""
    is_over = threading.Event()
    monkeypatch.setattr(on_machines, "left_directories", lambda *_: is_over.wait(60.0))
    job = left_job(tmp_path / "saves")
    job = replace(job, checkpoint=replace(job.checkpoint, timeout_s=0.05))
    with pytest.raises(ConfigError, match=r"did not answer within 0\.05 s"):
        Job(job).run()
    is_over.set()


def test_a_disk_whose_server_begins_anew_is_told_before_a_run_is_looked_for_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command ended with a traceback, as if planaria were at fault."""

    def fail(*_: object) -> NoReturn:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), "saves")

    monkeypatch.setattr(on_machines, "left_directories", fail)
    with pytest.raises(ConfigError, match="check that disk; nothing was trained"):
        Job(left_job(tmp_path / "saves")).run()


def test_a_head_that_had_started_no_node_is_not_missed(tmp_path: Path) -> None:
    """The next one asked for --reattach, and waited in vain then."""
    job = left_job(tmp_path / "saves")
    leave_run(tmp_path / "saves" / ".journal", job, num_nodes=0)

    assert find_left_run(job, LISTENING_ANEW, state="", resume=False) is None


def test_nodes_that_may_live_are_not_given_up_for_a_run_on_one_machine(tmp_path: Path) -> None:
    """A resume here went on from a save, and whatever the nodes held was lost."""
    job = left_job(tmp_path / "saves")
    leave_run(tmp_path / "saves" / ".journal", job)

    with pytest.raises(ConfigError, match="its machines may still hold the newest state"):
        find_left_run(job, None, state="", resume=True)
    make_older(tmp_path / "saves" / ".journal", 1e6)
    assert find_left_run(job, None, state="", resume=True) is None


def test_the_records_of_a_run_go_with_a_journal_that_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head that was killed afterwards left a journal that no other one found, or two of one run,
    of which the user was to choose."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(on_machines, "is_in_use", lambda _: False)  # The head is killed.
    left = left_run(tmp_path / "saves")
    job, record = left.record.job, left.record
    with open_left_head(tmp_path / "saves") as (head, _), ExitStack() as held, head:
        log = head.machines.node_log = NodeLog(left.directory)
        held.callback(log.close)
        begun = training_job._Begun(
            *(job, record.prepared, Start(), str(left.directory)),
            *(cast(ForkServer, None), head, {}, record),
        )
        moved = training_job._other_journal(held, begun, "")

        assert moved != str(left.directory)
        assert read_run(Path(moved)) == record
        assert (Path(moved) / "journal.nodes").read_bytes() == b"0\n"
        assert find(job) == Path(moved)


def test_a_run_that_was_given_up_on_another_machine_is_not_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head that had begun a new run in its place was lost soon, too, and the next one found two
    runs, of which the user was to choose."""
    state, job = tmp_path / "state", left_job(tmp_path / "saves")
    given_up, found = state / f"{job.name}-m1-00000000", list[Path | None]()
    leave_run(given_up, job)
    record = read_run(given_up)
    assert record is not None
    make_older(given_up, record.job.cluster.patience_s)

    def lose_head(*_: object, **__: object) -> NoReturn:
        (directory,) = state.glob("*-m2-*")
        log = NodeLog(directory)
        log.add(0)
        log.close()
        found.extend((directory, find(job, str(state))))
        raise ConfigError("model.kind", "", "wrong")

    monkeypatch.setattr(socket, "gethostname", lambda: "m2")
    for name, value in (("_TAKE_UP_LEASES", 0), ("_TAKE_UP_S", 0.0)):
        monkeypatch.setattr(on_machines, name, value)
    monkeypatch.setattr(on_machines, "is_in_use", lambda _: False)
    monkeypatch.setattr(on_machines, "may_have_nodes", lambda *_: True)
    monkeypatch.setattr(training_job, "new_run", lambda *_, **__: record)
    monkeypatch.setattr(training_job, "plan_job", lose_head)
    with pytest.raises(ConfigError, match="wrong"):
        Job(job).run(listening=LISTENING_ANEW, resume=True, state=str(state))

    assert found[0] == found[1]


def test_a_disk_that_keeps_the_record_of_a_run_that_was_given_up_ends_no_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    directory = left_run(tmp_path).directory
    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", refuse)
        give_up_run(directory)

    assert read_run(directory) is not None
    assert "Read-only file system" in caplog.text


def test_settings_that_a_run_does_not_take_up_are_told(tmp_path: Path) -> None:
    """All but the number of nodes, which is that of the machines with which it began."""
    kept = left_job(tmp_path)
    same = replace(kept, cluster=replace(kept.cluster, nodes=kept.cluster.nodes + 1))
    longer = replace(same, training=replace(kept.training, iterations=1700))

    assert kept_settings_text(same, kept) == ""
    text = kept_settings_text(longer, kept)
    assert f"began: training.iterations = {kept.training.iterations} (not 1700). " in text
    optimizer = {**kept.training.optimizer, "weight_decay": 0.1}
    decayed = replace(kept, training=replace(kept.training, optimizer=optimizer))
    assert "training.optimizer.weight_decay = None (not 0.1). " in kept_settings_text(decayed, kept)
    assert "training.optimizer.weight_decay = 0.1 (not None). " in kept_settings_text(kept, decayed)


def test_machines_that_join_a_run_that_goes_on_get_the_job_with_which_it_began(
    tmp_path: Path,
) -> None:
    """They got the job and the modules as they are now, and trained one run with others that had
    the old ones."""
    (tmp_path / "model.py").write_text("x = 2")
    left = left_run(tmp_path).record
    old = (SourceFile(path="model.py", data=b"x = 1", sha256="0"),)
    left = msgspec.structs.replace(left, sources=old)
    model = replace(left.job.model, target="model:build")
    config = replace(left.job, model=model, training=replace(left.job.training, iterations=1700))
    notes: list[str] = []
    opened = open_head(config, LISTENING, search_path=[str(tmp_path)], left=left, note=notes.append)
    with opened as head:
        line = head.runner.run(arrive(head.leader_sockets.address))
        offers = [head.runner.run(line.wait(JobOffered))]
        note_kept(head, config, left, note=notes.append)
        head.begin_run("next")
        offers.append(head.runner.run(line.wait(JobOffered)))

    assert [(offer.run, offer.job) for offer in offers] == [(RUN, left.job), ("next", config)]
    assert [offer.sources[0].data for offer in offers] == [b"x = 1", b"x = 2"]
    assert any("not those beside the job: model.py. For other" in note for note in notes)
    assert any("training.iterations" in note for note in notes)


def test_files_that_counted_for_a_lost_run_do_not_count_for_the_next(tmp_path: Path) -> None:
    """That run may have had another data.path."""
    job = left_job(tmp_path)
    with open_left_head(tmp_path) as (head, _), head:
        checks = head.machines.checks
        checks.digests, checks.is_planned = {PROSE_KEY: ("n1", "this")}, True
        head.new_offer = msgspec.structs.replace(head.new_offer, job=replace(job, name="next"))
        head.begin_run("next")

        assert (checks.digests, checks.is_planned) == ({}, False)
        assert head.machines.job.name == "next"


def test_a_run_keeps_its_modules_in_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = SourceFile(path="model.py", data=bytes(range(256)), sha256="0")
    left = left_run(tmp_path)

    def gather(_: OpenHead, config: JobConfig, __: Listening) -> tuple[JobConfig, Prepared]:
        return config, left.record.prepared

    monkeypatch.setattr(on_machines, "gather", gather)
    monkeypatch.setattr(on_machines, "find_start", lambda *_, **__: Start())
    with open_left_head(tmp_path, run="a1") as (head, _), head:
        head.machines.offer = msgspec.structs.replace(head.machines.offer, sources=(source,))
        record = new_run(head, left.record.job, LISTENING, print, resume=False, note=pytest.fail)
        write_run(left.directory, record)

        assert record.sources == (source,)
        assert read_run(left.directory) == record
