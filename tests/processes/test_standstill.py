"""Processes that stand still where nothing closes: the coordinator, or an agent that has never
connected."""

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from helpers.chaos import chaos_job, events_besides_load, only_recovery, run_under_faults
from helpers.jobs import digests
from helpers.stopped_agent import NODE
from planaria.coordinator.membership.missing_members import ARRIVAL_S_MIN
from planaria.core.job import JobConfig
from planaria.job.training_job import SilentDisplay, TrainingResult
from planaria.nodes.forking import Forker
from planaria.nodes.forkserver import ForkServer
from planaria.observe.metrics import IterationRecord

pytestmark = pytest.mark.faults

LEASE_S = 3.0


@pytest.fixture(scope="module")
def peace(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> TrainingResult:
    """The job without anything that stands still."""
    return run_under_faults(small_job(server, tmp_path_factory.mktemp("peace") / "run"), server)


def small_job(server: ForkServer, directory: Path) -> JobConfig:
    config = chaos_job("sequential", directory, server)
    return replace(config, cluster=replace(config.cluster, lease_s=LEASE_S))


class _At(SilentDisplay):
    """Does something once an iteration is committed."""

    def __init__(self, iteration: int, act: Callable[[], None]) -> None:
        self._iteration = iteration
        self._act = act

    def show_iteration(self, record: IterationRecord) -> None:
        if record.iteration == self._iteration:
            self._act()


def test_a_coordinator_that_stands_still_is_replaced_before_nodes_give_it_up(
    server: ForkServer, tmp_path: Path, peace: TrainingResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connections stay open, and no heartbeat is answered: after a lease nodes would write no
    saves, after two they would end."""
    leaders: list[int] = []
    real_spawn = Forker.spawn

    async def spawn(self: Forker, target: str, payload: bytes, fds: Sequence[int]) -> int:
        pid = await real_spawn(self, target, payload, fds)
        if "leader" in target:
            leaders.append(pid)
        return pid

    monkeypatch.setattr(Forker, "spawn", spawn)
    display = _At(2, lambda: os.kill(leaders[0], signal.SIGSTOP))
    result = run_under_faults(small_job(server, tmp_path / "run"), server, display=display)

    assert result.error is None
    assert len(leaders) == 2
    (event,) = events_besides_load(result)
    assert event.kind == "leader"
    assert event.detect_s > LEASE_S / 2
    assert result.report.final.nodes == peace.report.final.nodes
    assert digests(result) == digests(peace)


@pytest.mark.long
def test_a_node_that_hangs_before_it_connects_is_lost_in_the_end(
    server: ForkServer,
    tmp_path: Path,
    peace: TrainingResult,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The others begin without it, and nothing of it is left. It takes a minute."""
    children = set(psutil.Process(server.pid).children())
    real_spawn = Forker.spawn

    async def spawn(self: Forker, target: str, payload: bytes, fds: Sequence[int]) -> int:
        target = target.replace("planaria.nodes.agent:", "helpers.stopped_agent:")
        return await real_spawn(self, target, payload, fds)

    monkeypatch.setattr(Forker, "spawn", spawn)
    result = run_under_faults(small_job(server, tmp_path / "run"), server)

    assert result.error is None
    event = only_recovery(result)
    assert event.nodes == (NODE,)
    assert f"in {ARRIVAL_S_MIN:.0f} s" in event.reason
    assert NODE not in result.report.final.nodes
    assert digests(result) == digests(peace)
    assert set(psutil.Process(server.pid).children()) <= children
    assert not caplog.records  # The launcher warns of a process that is left.
