"""A job that loses node after node costs its survivors nothing that stays."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

import psutil
import pytest

from helpers.jobs import digests, tiny_job
from planaria.core.inject import parse_injection
from planaria.core.job import JobConfig
from planaria.job.training_job import Job, SilentDisplay
from planaria.nodes.forkserver import ForkServer
from planaria.observe.metrics import IterationRecord

pytestmark = pytest.mark.faults

NUM_NODES, NUM_LOSSES = 24, 20
SETTLED = 4  # Losses after which every buffer has been as large as it gets.
TURN = 12  # Iterations; on a busy machine a node that joins needs several.
NUM_LOOKS = 6


class Used(NamedTuple):
    """What a process holds on to."""

    threads: int
    descriptors: int
    resident_bytes: int


class _Watching(SilentDisplay):
    """Looks at every process of the job after each iteration."""

    def __init__(self, root: int) -> None:
        self._root = root
        self.used: dict[int, list[Used]] = defaultdict(list)

    def show_iteration(self, record: IterationRecord) -> None:
        del record
        for process in psutil.Process(self._root).children(recursive=True):
            try:
                used = Used(process.num_threads(), process.num_fds(), process.memory_info().rss)
            except psutil.NoSuchProcess:
                continue
            self.used[process.pid].append(used)


def many_nodes(directory: Path) -> JobConfig:
    config = tiny_job(
        "sequential",
        directory,
        iterations=2 * NUM_LOSSES + 2,
        global_batch_size=2 * NUM_NODES,
    )
    return replace(config, cluster=replace(config.cluster, nodes=NUM_NODES))


@pytest.mark.long
@pytest.mark.timeout(400)
def test_twenty_losses_leave_threads_descriptors_and_memory_as_they_were(
    server: ForkServer, tmp_path: Path
) -> None:
    """Of 24 nodes four are left, whose workers recovered twenty times. A look may come in the midst
    of a recovery, which has threads and files of its own, so the least counts of several after four
    losses and of several at the end. The launcher looks late on a busy machine: by then the thread
    that saves, which starts with the first save, may be there."""
    config = many_nodes(tmp_path)
    specs = [f"kill:{NUM_NODES - 1 - n}@{2 * n + 1}" for n in range(NUM_LOSSES)]
    watching = _Watching(server.pid)

    result = Job(config).run(
        injections=tuple(map(parse_injection, specs)), server=server, display=watching
    )

    assert result.error is None
    report = result.report
    assert len(report.final.nodes) == NUM_NODES - NUM_LOSSES
    calm = Job(many_nodes(tmp_path / "calm")).run(server=server)
    assert digests(result) == digests(calm)
    for worker in report.workers:
        if worker.node in report.final.nodes:
            looks = watching.used[worker.pid][2 * SETTLED :]
            first, last = least(looks[:NUM_LOOKS]), least(looks[-NUM_LOOKS:])
            assert last.threads <= first.threads + 1
            assert last.descriptors <= first.descriptors
            assert last.resident_bytes < first.resident_bytes + 16 * 2**20


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_hundred_joins_and_losses_leave_all_as_it_was(server: ForkServer, tmp_path: Path) -> None:
    """Two nodes stay, the others come and go; what the two hold on to, and how long a loss takes,
    is the same at the end as in the beginning."""
    num_turns = 50
    job = tiny_job("sequential", tmp_path, iterations=TURN * num_turns + 8, global_batch_size=8)
    cluster = replace(job.cluster, nodes=4, max_nodes=4, rejoin_delay_s=0.0)
    specs = [
        spec
        for n in range(num_turns)
        for spec in (f"kill:{2 + n}@{TURN * n + 4}", f"join:1@{TURN * n + 5}")
    ]
    watching = _Watching(server.pid)

    result = Job(replace(job, cluster=cluster)).run(
        injections=tuple(map(parse_injection, specs)), server=server, display=watching
    )

    assert result.error is None
    report = result.report
    answered = [event for event in report.events if event.answer]
    kinds = [event.kind for event in report.events]
    assert (kinds.count("kill"), kinds.count("join")) == (num_turns, num_turns), kinds
    calm = Job(replace(job, checkpoint=replace(job.checkpoint, directory=str(tmp_path / "calm"))))
    assert digests(result) == digests(calm.run(server=server))
    for worker in (one for one in report.workers if one.node in (0, 1)):
        looks = watching.used[worker.pid][TURN * SETTLED :]
        # Many, for short iterations are looked at late, when the save at the end has begun; and on
        # a busy machine all at once: none may show the job without its third link.
        begun = looks[: 10 * NUM_LOOKS]
        first, last = least(begun), least(looks[-10 * NUM_LOOKS :])
        assert last.threads <= first.threads + 1
        assert last.descriptors <= max(look.descriptors for look in begun)
        assert last.resident_bytes < first.resident_bytes + 16 * 2**20
    downtimes_s = [event.downtime_s for event in answered if event.kind == "kill"]
    early, late = median(downtimes_s[: num_turns // 2]), median(downtimes_s[num_turns // 2 :])
    assert late < 2 * early, (early, late)


def least(looks: Sequence[Used]) -> Used:
    """Of each the smallest."""
    return Used(*map(min, zip(*looks, strict=True)))
