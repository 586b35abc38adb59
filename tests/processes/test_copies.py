"""Copies in memory: no live node holds a layer any more, and the job goes on with the same bits."""

import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from helpers.chaos import (
    FAMILY,
    baseline_digests,
    chaos_job,
    check_survived,
    long_but_the_first,
    only_recovery,
    recoveries,
    run_under_faults,
)
from helpers.jobs import digests
from planaria.core.job import JobConfig, PolicyName
from planaria.core.specs import Prepared
from planaria.errors import InsufficientError
from planaria.job import checks
from planaria.job.planning import given_profile, plan_job
from planaria.job.resources import copies_bytes
from planaria.job.training_job import SilentDisplay, TrainingResult
from planaria.nodes.forkserver import ForkServer
from planaria.observe.metrics import IterationRecord
from planaria.placement.layer_copies import layer_copies
from planaria.placement.placement import paper_placement

pytestmark = pytest.mark.faults

ITERATIONS = 10
PAGES_BYTES, TABLE_BYTES = 8192, 1 << 18
BACK_WITHIN_S = 3.0
MARGIN = 3.0  # The goal is measured by `make bench`; other tests may run beside this one.

Run = Callable[..., TrainingResult]


@pytest.fixture
def job(server: ForkServer, tmp_path: Path) -> JobConfig:
    """Six nodes, n0 = 2, two copies."""
    config = chaos_job(FAMILY, tmp_path / "run", server, policy="adaptive", iterations=ITERATIONS)
    checkpoint = replace(config.checkpoint, copies=2, profile_iterations=0)
    return replace(config, checkpoint=checkpoint)


@pytest.fixture
def holders(job: JobConfig) -> tuple[int, ...]:
    """The nodes that hold the first layer."""
    return plan_job(job, Prepared(profile=given_profile(job))).plan.holders(0)


@pytest.fixture
def run(server: ForkServer, job: JobConfig) -> Run:
    """Runs the job with faults, to the bits of the baseline run."""

    def run(
        *specs: str, every: Any = "auto", display: SilentDisplay | None = None
    ) -> TrainingResult:
        config = replace(job, checkpoint=replace(job.checkpoint, every=every))
        result = run_under_faults(config, server, *specs, display=display)
        check_survived(result, specs, baseline_digests(server, ITERATIONS))
        return result

    return run


def test_copies_change_nothing(run: Run) -> None:
    """They are made, and nobody needs them; the report tells what they took."""
    result = run()

    assert not recoveries(result)
    table = result.report.checkpoints["memory"]
    assert table["every"] >= 1.0
    assert 0.0 < table["checkpoint_s"] < table["expected_wasted_s"]
    assert table["idle_used_s"] > 0.0
    assert table["idle_left_s"] > 0.0


STEPS = ("backward", "start", "forward", "reduce", "commit", "optimizer")


@pytest.mark.parametrize("step", long_but_the_first(STEPS))
def test_all_live_holders_of_a_layer_are_lost(
    step: str, run: Run, holders: tuple[int, ...], job: JobConfig
) -> None:
    """The others go back to the newest version, two iterations at most where there is to be one of
    each iteration."""
    result = run(f"kill:{','.join(map(str, holders))}@5.{step}", every=1)

    event = only_recovery(result)
    assert event.source_tier == "memory"
    assert event.redone_samples <= 2 * job.training.global_batch_size
    wasted, ledger = result.report.wasted["memory"], result.report.ledger
    assert wasted["recoveries"] == 1.0
    assert wasted["redo_s"] == pytest.approx(ledger["redo"])
    assert wasted["transfer_s"] == pytest.approx(ledger["transfer"])


@pytest.mark.long
@pytest.mark.parametrize("place", ["late", "cpu"])
@pytest.mark.parametrize("fault", ["kill", "crash"])
def test_copies_that_go_from_device_to_device(
    fault: str,
    place: str,
    server: ForkServer,
    job: JobConfig,
    holders: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Holders of a layer are lost while their copies are on their way in small chunks, and others
    while they are copied anew."""
    monkeypatch.setitem(checks._MINIMUM, "checkpoint.buffer_bytes", 1)  # Layers are small, too.
    monkeypatch.setattr(checks, "_PIECE_BYTES_MIN", 1)
    checkpoint = replace(job.checkpoint, path="device", every=1, buffer_bytes=4000, num_buffers=2)
    config = replace(job, checkpoint=checkpoint)
    memory_bytes = job.cluster.device_memory_bytes + config.chunk_buffers_bytes
    config = replace(
        config, cluster=replace(job.cluster, device=place, device_memory_bytes=memory_bytes)
    )
    lost, every = ",".join(map(str, holders)), ",".join(map(str, range(6)))
    specs = {"kill": [f"kill:{lost}@4.backward"], "crash": [f"crash:{every}@5.forward"]}[fault]
    result = run_under_faults(config, server, *specs)

    check_survived(result, specs, baseline_digests(server, ITERATIONS))
    assert only_recovery(result).source_tier == "memory"
    assert result.report.checkpoints["memory"]["idle_used_s"] > 0.0


POLICIES = ("morph", "reinstantiate", "reroute", "repartition")


@pytest.mark.long
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_goes_on_from_copies(
    policy: PolicyName, server: ForkServer, job: JobConfig, holders: tuple[int, ...]
) -> None:
    """Twice, the second time on the nodes that are left."""
    config = replace(job, resilience=replace(job.resilience, policy=policy))
    lost = ",".join(map(str, holders))
    result = run_under_faults(
        config, server, f"kill:{lost}@4.forward", "crash:0,1,2,3,4,5@7.backward"
    )

    assert result.error is None
    assert digests(result) == baseline_digests(server, ITERATIONS)
    assert [event.source_tier for event in recoveries(result)] == ["memory", "memory"]


def test_the_workers_of_all_nodes_die_at_once(run: Run) -> None:
    """Nobody holds anything any more; the copies are in the memory of their agents."""
    result = run("crash:0,1,2,3,4,5@5.forward")

    event = only_recovery(result)
    assert (event.source_tier, event.nodes) == ("memory", (0, 1, 2, 3, 4, 5))
    assert event.downtime_s < MARGIN * BACK_WITHIN_S


@pytest.mark.long
def test_nodes_of_several_devices_keep_copies(server: ForkServer, job: JobConfig) -> None:
    """Each rank of a node has an arena, and sends to one of another node."""
    config = replace(job, cluster=replace(job.cluster, nodes=3, devices_per_node=2))
    result = run_under_faults(config, server, "crash:0,1,2@5.forward")

    event = only_recovery(result)
    assert event.source_tier == "memory"
    assert digests(result) == baseline_digests(server, ITERATIONS)


@pytest.mark.long
def test_they_are_lost_again_before_a_new_version_is_complete(run: Run) -> None:
    """The version that all went back to is kept until then."""
    result = run("crash:0,1,2,3,4,5@5.forward", "crash:0,1,2,3,4,5@5.resume")

    events = recoveries(result)
    assert {event.source_tier for event in events} == {"memory"}


@pytest.mark.long
def test_copies_are_made_anew_for_those_who_are_left(run: Run, holders: tuple[int, ...]) -> None:
    """Of three nodes another is lost, which is the only one to hold some layers, and then all
    workers."""
    spare = min({0, 1, 2, 3, 4, 5}.difference(holders))
    lost = ",".join(map(str, holders))
    result = run(f"kill:{lost}@3.forward", f"kill:{spare}@6.backward", "crash:5@8.forward")

    assert [event.kind for event in recoveries(result)] == ["kill", "kill", "crash"]


@pytest.mark.long
def test_the_coordinator_is_killed_meanwhile(run: Run, holders: tuple[int, ...]) -> None:
    """The one after it finds on record that all go back, or decides so itself."""
    lost = ",".join(map(str, holders))
    result = run(f"kill:{lost}@5.backward", "leader:@5.regroup", "leader:@5.decide")

    (event,) = [event for event in recoveries(result) if event.kind == "kill"]
    assert event.source_tier == "memory"


MODES = ("unpipelined", "naive", "blocking")


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_whenever_copies_go(
    mode: Any, server: ForkServer, job: JobConfig, holders: tuple[int, ...]
) -> None:
    """Of each mode the same."""
    config = replace(job, checkpoint=replace(job.checkpoint, mode=mode))
    result = run_under_faults(config, server, f"kill:{','.join(map(str, holders))}@5.backward")

    event = only_recovery(result)
    assert event.source_tier == "memory"
    assert digests(result) == baseline_digests(server, ITERATIONS)


@pytest.mark.long
@pytest.mark.parametrize(("copies", "every"), [(3, 1), (2, "auto"), (3, 4)])
def test_copies_that_are_dealt_beforehand(
    copies: int, every: Any, server: ForkServer, job: JobConfig, holders: tuple[int, ...]
) -> None:
    """By Gemini's Algorithm 2, to one remote copy or to two; before the loss and after it."""
    checkpoint = replace(job.checkpoint, copies=copies, every=every, schedule="paper")
    specs = f"kill:{','.join(map(str, holders))}@6.backward", "crash:3@8.forward"
    result = run_under_faults(replace(job, checkpoint=checkpoint), server, *specs)

    check_survived(result, specs, baseline_digests(server, ITERATIONS))
    assert recoveries(result)[0].source_tier == "memory"
    assert result.report.checkpoints["memory"]["idle_used_s"] > 0.0


@pytest.fixture
def watching(job: JobConfig) -> JobConfig:
    """With copies from the third iteration on."""
    return replace(job, checkpoint=replace(job.checkpoint, profile_iterations=3))


def test_at_first_the_network_is_watched(
    server: ForkServer, watching: JobConfig, holders: tuple[int, ...]
) -> None:
    """So long there are no copies, which is said."""
    lost, display = ",".join(map(str, holders)), _Notes()
    result = run_under_faults(watching, server, f"kill:{lost}@2.backward", display=display)

    assert isinstance(result.error, InsufficientError)
    assert any("there are no copies in memory before iteration 3" in note for note in display.notes)


@pytest.mark.long
def test_then_copies_go_where_there_was_nothing(
    server: ForkServer, watching: JobConfig, holders: tuple[int, ...]
) -> None:
    """And are there when they are needed."""
    result = run_under_faults(watching, server, f"kill:{','.join(map(str, holders))}@7.backward")

    event = only_recovery(result)
    assert event.source_tier == "memory"
    assert digests(result) == baseline_digests(server, ITERATIONS)


@pytest.mark.long
def test_a_version_every_so_many_iterations(run: Run, holders: tuple[int, ...]) -> None:
    """Back to the fourth iteration's start."""
    result = run(f"kill:{','.join(map(str, holders))}@6.backward", every=4)

    event = only_recovery(result)
    assert event.redone_samples == 3 * 12


class _Notes(SilentDisplay):
    """What is said."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def _arenas(server: ForkServer) -> Iterator[Path]:
    """The files of all arenas of a job, several times each."""
    for process in psutil.Process(server.pid).children(recursive=True):
        entries: list[Path] = []
        with suppress(OSError):  # The process has ended meanwhile.
            entries += Path(f"/proc/{process.pid}/fd").iterdir()
        for entry in entries:
            with suppress(OSError):  # It was closed meanwhile.
                if "memfd:planaria-copies" in os.readlink(entry):
                    yield entry


class _Scales(SilentDisplay):
    """Weighs the memory of all arenas after each iteration.

    Attributes:
        most_bytes: of all together; num_arenas: that there were.
    """

    def __init__(self, server: ForkServer) -> None:
        self._server = server
        self.most_bytes, self.num_arenas = 0, 0

    def show_iteration(self, record: IterationRecord) -> None:
        del record
        files = {}
        for entry in _arenas(self._server):
            with suppress(OSError):  # It was closed meanwhile.
                stat = entry.stat()
                files[stat.st_ino] = 512 * stat.st_blocks
        taken_bytes = sum(files.values())
        self.most_bytes = max(self.most_bytes, taken_bytes)
        self.num_arenas = max(self.num_arenas, len(files))


def test_copies_take_no_more_memory_than_was_asked_for_up_front(
    server: ForkServer, run: Run, job: JobConfig
) -> None:
    """But for the table of each arena, and for what is left of a version's last page."""
    scales = _Scales(server)
    result = run("crash:0,1,2,3,4,5@5.forward", display=scales)

    planned = result.planned
    num_kept = sum(map(len, planned.plan.held_by_rank.values())) + planned.plan.num_layers
    most_bytes = copies_bytes(planned) - 6 * job.checkpoint.buffer_bytes
    assert scales.num_arenas == 6
    assert most_bytes / 2 < scales.most_bytes
    assert scales.most_bytes <= most_bytes + 2 * num_kept * PAGES_BYTES + 6 * TABLE_BYTES


class _Flipper(_Notes):
    """Flips bits of all copies that one rank keeps, after an iteration."""

    def __init__(self, server: ForkServer, iteration: int) -> None:
        super().__init__()
        self._server = server
        self._iteration = iteration
        self.num_flipped = 0

    def show_iteration(self, record: IterationRecord) -> None:
        if record.iteration != self._iteration or self.num_flipped:
            return
        for entry in _arenas(self._server):
            if not self.num_flipped:
                self._flip(entry)

    def _flip(self, entry: Path) -> None:
        """Everything behind the table that is not a hole."""
        with entry.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            for offset in range(1 << 18, len(memory), 1000):
                if memory[offset]:
                    memory[offset] ^= 8
                    self.num_flipped += 1


@pytest.mark.long
def test_copies_that_have_rotted_are_not_used(server: ForkServer, run: Run) -> None:
    """The node whose memory it is says so, and others give what it has lost."""
    flipper = _Flipper(server, 4)
    result = run("crash:0,1,2,3,4,5@6.forward", every=4, display=flipper)

    assert flipper.num_flipped
    events = recoveries(result)
    assert events[-1].source_tier == "memory"
    assert any("has changed since it was written; it is not used" in note for note in flipper.notes)


def test_a_whole_placement_group_is_lost(server: ForkServer, job: JobConfig) -> None:
    """Those who hold a layer, and who keeps its copy: on from the newest save, which is said."""
    checkpoint = replace(job.checkpoint, persist_every=2)
    config = replace(job, checkpoint=checkpoint, cluster=replace(job.cluster, nodes=8))
    planned = plan_job(config, Prepared(profile=given_profile(config)))
    placement = paper_placement(8, 2, "mixed")
    layer_bytes = (1,) * planned.plan.num_layers
    (copy, *_) = layer_copies(planned.plan, copies=2, placement=placement, layer_bytes=layer_bytes)
    lost = sorted({*planned.plan.holders(0), *copy.targets})
    result = run_under_faults(config, server, f"kill:{','.join(map(str, lost))}@7.backward")

    event = only_recovery(result)
    assert event.source_tier == "disk"
    assert digests(result) == baseline_digests(server, ITERATIONS)


def test_without_copies_of_a_layer_the_job_ends(
    server: ForkServer, job: JobConfig, holders: tuple[int, ...]
) -> None:
    """As it does if the job has none at all."""
    lost = ",".join(map(str, holders))
    config = replace(job, checkpoint=replace(job.checkpoint, copies=1))
    result = run_under_faults(config, server, f"kill:{lost}@5.backward")

    assert isinstance(result.error, InsufficientError)
    assert "no live node holds layer 0" in str(result.error)
