"""A head finds what the nodes of a lost one have saved by themselves."""

import asyncio
import socket
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from helpers.heads import CREDENTIALS
from helpers.left_runs import open_left_head
from planaria.checkpoint.disk.parts import EpochMark, PartAnswer, RankPart, RunPlace
from planaria.checkpoint.disk.tiers import Manifest, tier_of
from planaria.core.job import CheckpointConfig, JobConfig
from planaria.core.specs import Prepared
from planaria.errors import CheckpointError, ConfigError, DoneError
from planaria.job import lost_heads
from planaria.job.lost_heads import (
    call_nodes,
    check_no_other_head,
    newest_parts,
    next_parts,
    nodes_that_may_live,
    reachable_addresses,
)
from planaria.job.on_machines import join_text
from planaria.job.places import find_start
from planaria.job.save_facts import fingerprint
from planaria.nodes.head.remote.run_record import NodeLog, RunRecord
from planaria.transport.credentials import make_credentials

RUN = "run-000001-a1"


class Left:
    """A place of saves that a lost head has left.

    Attributes:
        notes: texts that the user is shown.
    """

    def __init__(self, directory: Path) -> None:
        checkpoint = CheckpointConfig(directory=str(directory))
        self.config = replace(JobConfig(), checkpoint=checkpoint)
        self.tier = tier_of(str(directory))
        self.place = RunPlace(self.tier.storage, RUN)
        self.notes: list[str] = []
        self.job = dict(fingerprint(self.config))

    def record(self, journal: Path, *, num_nodes: int) -> RunRecord:
        """The record of the head's run, whose journal says that so many nodes were started."""
        journal.mkdir()
        with closing(NodeLog(journal)) as log:
            for node in range(num_nodes):
                log.add(node)
        name = self.place.name
        return RunRecord(run="a1", job=self.config, prepared=Prepared(), resumed=None, parts=name)

    def mark(self) -> None:
        self.place.write_mark(EpochMark(epoch=0, nodes=(0,), job=self.job))

    def save_part(self, *layers: int, age: int) -> None:
        """Saves some of two layers."""
        self.place.write_answer(PartAnswer(node=0, rank=0, epoch=0, since=-1))
        tensors = {"parameter/w": np.zeros(3, np.float32)}
        files = tuple(
            self.place.write_layer(n, tensors, age=age, rank=0, may_write=lambda: True)
            for n in layers
        )
        part = RankPart(node=0, rank=0, epoch=0, since=-1, num_layers=2, layers=files)
        self.place.write_part(part, may_write=lambda: True)

    def save(self, iteration: int) -> None:
        """Makes an ordinary save of one layer."""
        tensors = {"parameter/w": np.zeros(3, np.float32)}
        layers = (self.tier.write_layer(iteration, 0, 0, tensors),)
        self.tier.publish(Manifest(iteration=iteration, epoch=0, job=self.job, layers=layers))

    def start(self, *, resume: bool = True, may_begin: bool = False) -> int:
        """The iteration from which a head goes on; -1: from the beginning."""
        manifest = find_start(
            self.config, resume=resume, may_begin=may_begin, note=self.notes.append
        ).manifest
        return -1 if manifest is None else manifest.iteration


@pytest.fixture
def left(tmp_path: Path) -> Left:
    made = Left(tmp_path / "saves")
    made.mark()
    return made


def test_a_job_goes_on_from_what_nodes_have_saved_if_that_is_newer(left: Left) -> None:
    left.save(10)
    left.save_part(0, 1, age=17)

    assert left.start() == 17
    assert "made a save of iteration 17" in left.notes[0]


def test_a_scheduler_starts_a_job_again_with_the_command_of_its_first_start(tmp_path: Path) -> None:
    """With --resume alone a job that was lost before its first save would never begin again."""
    left = Left(tmp_path / "saves")
    with pytest.raises(ConfigError, match="leave --resume out"):
        left.start()
    starts = [left.start(may_begin=True)]
    left.save(10)
    starts.append(left.start(may_begin=True))

    assert starts == [-1, 10]


def test_a_job_that_is_done_is_no_mistake_of_the_scheduler_that_starts_it_again(
    left: Left,
) -> None:
    """Its head's machine was lost between the last save and the exit code. Who writes --resume
    himself wants to train on."""
    left.save(left.config.training.iterations)

    with pytest.raises(DoneError, match=r"the save in .* has all"):
        left.start(may_begin=True)
    with pytest.raises(ConfigError, match="set a larger number to train on"):
        left.start()


def test_a_scheduler_begins_no_job_anew_whose_saves_are_all_damaged(tmp_path: Path) -> None:
    """It trained anew from iteration 0, and no line said so. A first save that was not finished is
    no reason to stop."""
    left = Left(tmp_path / "saves")
    left.tier.write_layer(5, 0, 0, {"parameter/w": np.zeros(3, np.float32)})
    assert left.start(may_begin=True) == -1
    left.save(10)
    left.tier.set_aside("10-0")

    with pytest.raises(ConfigError, match=r"10-0: .*; leave --resume-if-saved out to begin anew"):
        left.start(may_begin=True)


def test_a_job_goes_on_from_a_save_that_is_newer_than_what_nodes_have_saved(left: Left) -> None:
    left.save(20)
    left.save_part(0, 1, age=17)

    assert left.start() == 20
    assert left.notes == []


def test_a_job_says_why_it_goes_on_from_an_older_save(left: Left) -> None:
    left.save(10)
    left.save_part(0, age=17)

    assert left.start() == 10
    assert "nobody saved layers 1" in left.notes[0]


def test_a_job_does_not_begin_anew_over_what_nodes_have_saved(left: Left) -> None:
    """It would be removed with the first save."""
    assert left.start(resume=False) == -1
    left.save_part(0, 1, age=17)

    with pytest.raises(ConfigError, match=r"go on from it with --resume \(resume=True in"):
        left.start(resume=False)


def test_a_head_waits_for_nodes_that_are_still_saving(
    left: Left, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would go on from an older save, and what they save would be of no use."""
    left.save(10)
    left.place.write_answer(PartAnswer(node=0, rank=0, epoch=0, since=-1))

    async def sleep(_: float) -> None:
        left.save_part(0, 1, age=17)

    monkeypatch.setattr(asyncio, "sleep", sleep)

    assert left.start() == 17
    assert "waiting for them" in left.notes[0]


def test_a_head_does_not_wait_for_ever_for_nodes_that_were_saving(
    left: Left, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lost_heads, "_SILENT_S", -1e6)
    left.save(10)
    left.place.write_answer(PartAnswer(node=0, rank=0, epoch=0, since=-1))

    assert left.start() == 10


def test_each_run_has_a_higher_number_than_those_before(tmp_path: Path) -> None:
    left = Left(tmp_path / "saves")
    assert newest_parts(left.config) == ""
    assert next_parts(left.config, "ff") == "run-000001-ff"
    left.mark()

    assert newest_parts(left.config) == RUN
    assert next_parts(left.config, "00") == "run-000002-00"


def test_nodes_that_were_evicted_or_have_given_up_do_not_come_back(tmp_path: Path) -> None:
    """The next head would wait for them in vain. One that has just joined is in no mark yet."""
    left, journal = Left(tmp_path / "saves"), tmp_path / "journal"
    record = left.record(journal, num_nodes=5)
    assert nodes_that_may_live(record, journal, note=pytest.fail) == frozenset(range(5))
    left.place.write_mark(EpochMark(epoch=0, nodes=(0, 1, 2), job=left.job))
    left.place.write_mark(EpochMark(epoch=1, nodes=(1, 2, 3), job=left.job))
    left.place.write_answer(PartAnswer(node=2, rank=2, epoch=1, since=-1))

    assert nodes_that_may_live(record, journal, note=pytest.fail) == frozenset((1, 3, 4))


def test_nobody_is_waited_for_once_most_nodes_have_saved_a_whole_state(tmp_path: Path) -> None:
    """Of a node whose machine was lost with the head nobody hears that it does not live."""
    left, journal = Left(tmp_path / "saves"), tmp_path / "journal"
    record = left.record(journal, num_nodes=3)
    left.place.write_mark(EpochMark(epoch=0, nodes=(0, 1, 2), job=left.job))
    left.save_part(0, 1, age=17)
    assert nodes_that_may_live(record, journal, note=pytest.fail) == frozenset((1, 2))
    left.place.write_answer(PartAnswer(node=1, rank=1, epoch=0, since=-1))

    assert nodes_that_may_live(record, journal, note=pytest.fail) == frozenset()
    left.save_part(0, age=17)
    assert nodes_that_may_live(record, journal, note=pytest.fail) == frozenset((2,))


def test_any_node_may_live_where_nobody_can_read_which(tmp_path: Path) -> None:
    """To wait too long is better than to lose what nodes hold."""
    left = Left(tmp_path / "saves")
    record = RunRecord(run="a1", job=left.config, prepared=Prepared(), resumed=None)

    assert nodes_that_may_live(record, tmp_path / "none", note=left.notes.append) is None
    assert "is not known" in left.notes[0]


def test_a_head_writes_where_it_listens_into_the_directory_of_a_run(
    left: Left, tmp_path: Path
) -> None:
    with open_left_head(tmp_path) as (head, runner):
        head.leader_sockets.address = ("[2001:db8::1]", 7320)
        runner.run(call_nodes(head, left.config, run=RUN))

    mark = left.place.head()
    assert mark is not None
    assert mark.addresses == (("2001:db8::1", 7320),)


def test_a_head_goes_on_where_it_cannot_write_where_it_listens(
    left: Left, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The agents may have been given its address."""

    def refuse(*_: object) -> None:
        raise CheckpointError("the disk is full")

    monkeypatch.setattr(RunPlace, "write_head", refuse)
    with open_left_head(tmp_path) as (head, runner):
        runner.run(call_nodes(head, left.config, run=RUN))

    assert "the disk is full: nodes find this head only" in caplog.text


def test_no_head_begins_beside_another_one_of_its_job(left: Left, tmp_path: Path) -> None:
    """A store has no locks: the second head would call nodes that the first one has only lost for
    a moment, and both would save there."""
    with open_left_head(tmp_path) as (first, runner), first:
        runner.run(check_no_other_head(left.config, CREDENTIALS))
        runner.run(call_nodes(first, left.config, run=RUN))
        with pytest.raises(ConfigError, match="a head of this job is at work at 127"):
            runner.run(check_no_other_head(left.config, CREDENTIALS))
        with pytest.raises(ConfigError, match="end it first"):
            runner.run(check_no_other_head(left.config, CREDENTIALS, run=RUN))
        runner.run(check_no_other_head(left.config, make_credentials()))  # It is of other users.

        first.run_place = "run-000001-b2"  # It runs another job now.
        runner.run(check_no_other_head(left.config, CREDENTIALS))
    with asyncio.Runner() as runner:
        runner.run(check_no_other_head(left.config, CREDENTIALS))


def test_a_head_that_listens_everywhere_names_the_addresses_of_its_interfaces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hosts = {
        "lo": ("127.0.0.1", "::1"),
        "down": ("10.0.0.1",),
        "a": ("fe80::1%a", "2001:db8::1", "10.0.0.2"),
        "b": ("169.254.3.4", "10.0.0.3", "10.0.0.4", "10.0.0.5", "10.0.0.6"),
    }

    def entry(host: str) -> SimpleNamespace:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return SimpleNamespace(family=family, address=host)

    stats = {name: SimpleNamespace(isup=name != "down") for name in hosts}
    addresses = {
        name: [SimpleNamespace(family=socket.AF_PACKET, address="02:42"), *map(entry, some)]
        for name, some in hosts.items()
    }
    monkeypatch.setattr(psutil, "net_if_stats", lambda: stats)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)

    expected = tuple((f"10.0.0.{number}", 7320) for number in (2, 3, 4, 5))
    assert reachable_addresses(("0.0.0.0", 7320)) == expected
    assert reachable_addresses(("::", 7320)) == (("2001:db8::1", 7320),)
    addresses.pop("b")
    assert reachable_addresses(("", 7320)) == (("10.0.0.2", 7320), ("2001:db8::1", 7320))

    name = f"{socket.gethostname()}:7320"
    assert join_text(("0.0.0.0", 7320)) == f"planaria agent --join {name} (or 10.0.0.2:7320)"
    addresses.clear()
    assert join_text(("0.0.0.0", 7320)) == f"planaria agent --join {name}"
