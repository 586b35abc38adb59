"""What a head does before its machines come, so that it has time for them afterwards."""

import ast
import errno
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from helpers.command import PACED, assert_mistake, command
from helpers.left_runs import LISTENING, ReturningMachine, left_job
from planaria.checkpoint.disk.parts import EpochMark, RunPlace
from planaria.checkpoint.disk.tiers import Manifest, tier_of
from planaria.core.job import JobConfig
from planaria.errors import ConfigError, DoneError, LateError, UnwritableError
from planaria.job import on_machines
from planaria.job.config import load_job
from planaria.job.on_machines import open_head
from planaria.job.save_facts import fingerprint
from planaria.job.training_job import HEAD_PRELOAD, Job
from planaria.nodes.head.process_events import wait_until
from planaria.nodes.head.remote.open_head import OpenHead
from planaria.nodes.head.remote.platforms import LostMachine, Platform
from planaria.nodes.machine import EXIT_AGAIN
from planaria.transport.credentials import write_credentials

RESTORER = Path(__file__).parents[2] / "src" / "planaria" / "restorer"


def test_the_coordinator_of_a_head_imports_nothing_in_its_first_decision() -> None:
    """The restorer imports scipy when it needs it: half a second, or three on a busy machine."""
    needed = {
        node.module
        for path in RESTORER.glob("*.py")
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.ImportFrom) and node.module is not None
    }
    program = f"import sys, {', '.join(HEAD_PRELOAD)}; print(*sys.modules)"

    loaded = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout.split()

    assert "scipy.optimize" in needed
    assert needed <= {*loaded}


def test_a_head_refuses_a_job_that_cannot_be_planned_before_machines_are_told_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machines that connect while it plans would wait in vain."""
    monkeypatch.chdir(tmp_path)
    token = tmp_path / "token"
    write_credentials(token)

    result = command(
        *("train", str(PACED), "--listen", "127.0.0.1:0", "--token-file", str(token)),
        *("--nodes", "9", "--set", "cluster.device_memory_bytes=10"),
    )

    assert_mistake(result, "cluster.device_memory_bytes")
    assert "listening at" not in result.output


@pytest.mark.parametrize(
    ("number", "code"), [(None, 75), (errno.ESTALE, 75), (errno.EIO, 75), (errno.EACCES, 2)]
)
def test_a_head_whose_place_of_saves_is_away_is_to_be_started_again(
    number: int | None, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file server began anew while a lost head was started again: that ended the job for good, as
    the user's mistake. What a person has to mend still does."""
    token, saves = tmp_path / "token", tmp_path / "saves"
    write_credentials(token)
    saves.mkdir()
    real = Path.iterdir

    def refuse(path: Path) -> Iterator[Path]:
        if path == saves and number is None:
            raise LateError("no answer")
        if path == saves and number is not None:
            raise OSError(number, os.strerror(number), str(path))
        return real(path)

    monkeypatch.setattr(Path, "iterdir", refuse)
    options = ("--listen", "127.0.0.1:0", "--token-file", str(token), "--resume-if-saved")
    result = command("train", str(PACED), *options, "--set", f"checkpoint.directory={saves}")

    assert (result.exit_code, EXIT_AGAIN) == (code, 75)
    assert "planaria: checkpoint.directory = " in result.stderr


@pytest.mark.parametrize("is_away", [False, True])
def test_machines_wait_for_a_head_that_is_started_again_as_its_place_of_saves_was_away(
    is_away: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were told that the job was over, and no scheduler started all of them again."""
    machine = ReturningMachine()

    def fail(head: OpenHead, *_: object) -> NoReturn:
        has_come = wait_until(lambda: bool(head.machines.connected), timeout_s=60.0)
        head.runner.run(has_come)
        cause = LateError("no answer") if is_away else UnwritableError("read-only")
        raise ConfigError("checkpoint.directory", "saves", str(cause)) from cause

    monkeypatch.setattr(on_machines, "gather", fail)
    listening = replace(LISTENING, reattaches=False)
    with pytest.raises(ConfigError):
        Job(left_job(tmp_path / "saves")).run(listening=listening, display=machine.display)
    machine.join()

    assert machine.is_told is not is_away


class NoPlatform:
    """A platform that nobody asks."""

    def ask_for_machine(self, lost: LostMachine) -> str:
        raise AssertionError(f"nothing is lost, and not {lost}")

    def verdict_on(self, name: str, host: str) -> str:
        raise AssertionError(f"nothing has failed on {name} ({host})")

    def give_back(self, machine: LostMachine) -> str:
        raise AssertionError(f"{machine} is not unfit")

    def cancel_requests(self) -> None:
        """Nothing was asked for."""


def save_all_iterations(config: JobConfig) -> None:
    """Makes the last save of a job."""
    tier, iteration = tier_of(config.checkpoint.directory), config.training.iterations
    layers = (tier.write_layer(iteration, 0, 0, {"parameter/w": np.zeros(3, np.float32)}),)
    job = dict(fingerprint(config))
    tier.publish(Manifest(iteration=iteration, epoch=0, job=job, layers=layers))


def test_a_job_that_is_done_ends_with_0_when_it_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head's machine was lost between the last save and the exit code: a launcher reported a
    trained job as a mistake, and on Kubernetes ended it as failed."""
    monkeypatch.setattr(on_machines, "_DONE_S", 0.0)
    token, saves = tmp_path / "token", f"checkpoint.directory={tmp_path / 'saves'}"
    write_credentials(token)
    save_all_iterations(load_job(PACED, overrides=[saves]))
    options = ("--listen", "127.0.0.1:0", "--token-file", str(token), "--set", saves)

    again = command("train", str(PACED), *options, "--resume-if-saved")
    by_hand = command("train", str(PACED), *options, "--resume")

    assert (again.exit_code, by_hand.exit_code) == (0, 2)
    assert "the job is done" in again.stderr
    assert_mistake(by_hand, "training.iterations")


@pytest.mark.parametrize("has_parts", [False, True])
def test_machines_of_a_job_that_is_done_are_told_so(tmp_path: Path, has_parts: bool) -> None:
    """Also where nodes of the lost head may have saved by themselves: that can be no newer, and no
    machine need be ready to train."""
    job, machine = left_job(tmp_path / "saves"), ReturningMachine()
    save_all_iterations(job)
    if has_parts:
        place = RunPlace(tier_of(job.checkpoint.directory).storage, "run-000001-a1")
        place.write_mark(EpochMark(epoch=0, nodes=(0,), job=dict(fingerprint(job))))
    listening = replace(LISTENING, reattaches=False, may_begin=True)
    with pytest.raises(DoneError):
        Job(job).run(resume=True, listening=listening, display=machine.display)
    machine.join()

    assert machine.is_done


def test_machines_that_are_asked_for_find_the_head_where_its_user_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own addresses come after that; behind NAT others reach none of them."""
    known: list[str] = []

    def note_heads(_: str, *, heads: Sequence[str], **__: str) -> Platform:
        known.extend(heads)
        return NoPlatform()

    monkeypatch.setattr(on_machines, "open_platform", note_heads)
    place = "head.example.com:29400"
    listening = replace(LISTENING, operator="./ask", advertised=place)
    job = left_job(tmp_path / "saves")
    with open_head(job, listening, search_path=(), left=None, note=lambda _: None) as head:
        host, port = head.leader_sockets.address

    assert known == [place, f"{host}:{port}"]
