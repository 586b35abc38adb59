"""Others compute what is measured, and nothing depends on them."""

import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from planaria.engine.contention import Contention


def _lines(path: Path) -> list[str]:
    return path.read_text().split()


def test_others_run_what_is_measured_and_end_with_it(tmp_path: Path) -> None:
    """Each step waits until all three processes have taken it at least once."""
    own, log = os.getpid(), tmp_path / "log"
    log.touch()

    def run(step: int) -> int:
        with log.open("a") as file:
            file.write(f"{step}:{os.getpid()}\n")
        if os.getpid() == own:
            deadline_s = time.monotonic() + 30.0
            while len({one for one in _lines(log) if one.startswith(f"{step}:")}) < 3:
                assert time.monotonic() < deadline_s
        return step

    with Contention(2) as others:
        results = [others.repeat(partial(run, step), times=2) for step in range(4)]

    assert results == [[step, step] for step in range(4)]
    pids = {int(one.split(":")[1]) for one in _lines(log)}
    assert len(pids) == 3
    for pid in pids - {own}:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_nothing_waits_for_others_that_end_or_raise(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One kills itself, one raises; and what they print nobody sees."""
    own = os.getpid()
    mark = tmp_path / "mark"

    def run() -> int:
        os.write(1, b"printed\n")
        if os.getpid() == own:
            return 1
        try:
            mark.mkdir()
        except FileExistsError:
            raise ValueError from None
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    with Contention(2) as others:
        assert others.repeat(run, times=3) == [1, 1, 1]

    assert capfd.readouterr().out.count("printed") == 4


def _raising(others: Contention) -> None:
    with others:
        others.repeat(lambda: 1, times=1)
        raise ValueError("mine")


def test_an_error_of_the_measured_is_raised_once_and_the_others_end() -> None:
    others = Contention(1)
    with pytest.raises(ValueError, match="mine"):
        _raising(others)
    (pid,) = others._others
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_nothing_needs_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise BlockingIOError

    monkeypatch.setattr(os, "fork", refuse)
    with Contention(0) as others:
        assert others.repeat(lambda: 2, times=1) == [2]
    with Contention(3) as others:
        assert others.repeat(lambda: 2, times=1) == [2]


def test_another_that_cannot_begin_ends_and_does_not_go_on_as_a_second_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a copy of the process that measures, and would do all that this does a second time."""
    own, log = os.getpid(), tmp_path / "log"

    def refuse(*_: object) -> None:
        raise AttributeError("prctl")

    monkeypatch.setattr(Contention, "_begin_other", refuse)
    try:
        with Contention(1) as others:
            for pid in others._others:  # It would be killed before it has done anything.
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            assert others.repeat(lambda: 2, times=1) == [2]
    finally:
        with log.open("a") as file:
            file.write(f"{os.getpid()} ")
        if os.getpid() != own:
            os._exit(1)

    assert _lines(log) == [str(own)]
