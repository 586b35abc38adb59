"""Processes that stand still where nothing closes: an agent before it has ever connected."""

from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from chaos import chaos_job, recoveries, struck
from jobs import digests
from planaria.coordinator.arrivals import ARRIVAL_S_MIN
from planaria.nodes.forkserver import ForkServer
from stopped_agent import NODE


@pytest.mark.long
def test_a_node_that_hangs_before_it_connects_is_lost_in_the_end(
    server: ForkServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The others begin without it, and nothing of it is left. It takes a minute."""
    peace = struck(chaos_job("sequential", tmp_path / "peace", server), server)
    children = set(psutil.Process(server.pid).children())
    real_spawn = ForkServer.spawn

    def spawn(self: ForkServer, target: str, payload: bytes, fds: Sequence[int] = ()) -> int:
        target = target.replace("planaria.nodes.agent:", "stopped_agent:")
        return real_spawn(self, target, payload, fds)

    monkeypatch.setattr(ForkServer, "spawn", spawn)
    result = struck(chaos_job("sequential", tmp_path / "run", server), server)

    assert result.error is None
    (event,) = recoveries(result)
    assert event.nodes == (NODE,)
    assert f"in {ARRIVAL_S_MIN:.0f} s" in event.reason
    assert NODE not in result.report.final.nodes
    assert digests(result) == digests(peace)
    assert set(psutil.Process(server.pid).children()) <= children
    assert not caplog.records  # The launcher warns of a process that is left.
