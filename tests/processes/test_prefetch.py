"""Processes load samples ahead: the same bits, and a slow data set costs less."""

import os
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from helpers.jobs import digests, tiny_job, train_shape, with_profile
from planaria.core.inject import parse_injection
from planaria.core.job import JobConfig
from planaria.job.training_job import Job
from planaria.nodes.forkserver import ForkServer
from planaria.observe.metrics import IterationRecord
from planaria.show.callbacks import Callbacks


def _job(directory: Path, family: str, workers: int, **training: int) -> JobConfig:
    job = tiny_job(family, directory, **training)
    return replace(job, data=replace(job.data, workers=workers))


class KillsLoaders(Callbacks):
    """Kills the processes that load samples, after the first iteration."""

    def __init__(self) -> None:
        self.num_killed = 0

    def on_commit(self, record: IterationRecord) -> None:
        if record.iteration:
            return
        for process in psutil.Process(os.getpid()).children(recursive=True):
            # A rank is a child of an agent, which is one of the server; loaders are the leaves.
            if not process.children() and len(process.parents()) > self._depth:
                process.kill()
                self.num_killed += 1

    @property
    def _depth(self) -> int:
        """Number of ancestors that a rank has."""
        return len(psutil.Process(os.getpid()).parents()) + 3


@pytest.mark.parametrize("family", ["encoder", pytest.param("gpt2", marks=pytest.mark.long)])
def test_samples_that_are_loaded_ahead_are_the_same(
    family: str, server: ForkServer, tmp_path: Path
) -> None:
    """With padding and a collate function, and of text; also after the loss of a node."""
    alone = train_shape(_job(tmp_path / "alone", family, 0, iterations=4), (1,), server)
    ahead = train_shape(_job(tmp_path / "ahead", family, 2, iterations=4), (1, 2), server)
    job = with_profile(_job(tmp_path / "struck", family, 1, iterations=4), server)
    resilience = replace(job.resilience, failures_tolerated=1)  # Else one node may hold a layer.
    job = replace(job, cluster=replace(job.cluster, nodes=3), resilience=resilience)
    struck = Job(job).train(server=server, injections=[parse_injection("kill:1@2.backward")])

    assert digests(alone) == digests(ahead) == digests(struck)


def test_a_rank_whose_loaders_are_killed_loads_for_itself(
    server: ForkServer, tmp_path: Path
) -> None:
    """Nothing waits for them."""
    alone = train_shape(_job(tmp_path / "alone", "sequential", 0, iterations=6), (1,), server)
    job = with_profile(_job(tmp_path / "killed", "sequential", 1, iterations=6), server)

    killed = Job(job).train(server=server, callbacks=[kills := KillsLoaders()])

    assert kills.num_killed == 1
    assert digests(alone) == digests(killed)
    assert not killed.report.events
