"""A disk that takes long over a manifest: the coordinator beats meanwhile."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.chaos import events_besides_load
from helpers.jobs import tiny_job, with_profile
from helpers.slow_leader import SLOW_S, SLOWER_S
from planaria.checkpoint.disk.tiers import tier_of
from planaria.job.training_job import Job
from planaria.nodes.forking import Forker
from planaria.nodes.forkserver import ForkServer

LEASE_S = 3.0


@pytest.mark.parametrize(
    ("main", "link_s", "keep"),
    [
        ("main", SLOW_S, 0),
        pytest.param("main", SLOW_S, 1, marks=pytest.mark.long),
        pytest.param("slower_main", SLOWER_S, 0, marks=pytest.mark.long),
    ],
)
def test_a_manifest_that_takes_longer_than_a_lease_costs_nothing_else(
    server: ForkServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    main: str,
    link_s: float,
    keep: int,
) -> None:
    """The coordinator was killed for it, again and again, and at the final save, too."""
    assert link_s > LEASE_S
    real_spawn, num_leaders = Forker.spawn, 0

    async def spawn(self: Forker, target: str, payload: bytes, fds: Sequence[int]) -> int:
        nonlocal num_leaders
        num_leaders += "leader" in target
        return await real_spawn(
            self, target.replace("planaria.nodes.head.leader:main", slow_leader), payload, fds
        )

    slow_leader = f"helpers.slow_leader:{main}"

    monkeypatch.setattr(Forker, "spawn", spawn)
    job = with_profile(tiny_job("sequential", tmp_path, iterations=6), server)
    job = replace(
        job,
        checkpoint=replace(job.checkpoint, persist_every=3, keep=keep),
        cluster=replace(job.cluster, nodes=2, lease_s=LEASE_S),
    )

    result = Job(job).train(server=server)

    assert num_leaders == 1
    assert not events_besides_load(result)
    names = [version.name for version in tier_of(job.checkpoint.directory).versions()]
    assert names == ["6-0", "3-0"][: 1 if keep else 2]
