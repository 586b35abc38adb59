"""Jobs that save to an object store, which may be slow, or refuse."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path

import pytest

from helpers.chaos import events_besides_load, recoveries
from helpers.jobs import digests, shaped_plan, tiny_job, with_profile
from helpers.object_store import object_store
from planaria.checkpoint.disk.tiers import tier_of
from planaria.core.inject import parse_injection
from planaria.core.job import JobConfig
from planaria.errors import CheckpointError, InsufficientError
from planaria.job.planning import Planned, fork_server
from planaria.job.training_job import Job, SilentDisplay
from planaria.nodes.forkserver import ForkServer

pytestmark = pytest.mark.faults

ITERATIONS = 6


class _Notes(SilentDisplay):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def _nothing(_method: str, _path: str) -> float:
    return 0.0


@dataclass
class Store:
    """A store, and a fork server whose processes know it.

    Attributes:
        late_s: as `object_store` has it.
    """

    late_s: Callable[[str, str], float] = _nothing
    url: str = ""
    server: ForkServer = field(init=False)


@pytest.fixture(scope="module")
def shared() -> Iterator[Store]:
    store = Store()
    with object_store(lambda method, path: store.late_s(method, path)) as store.url:
        store.server = fork_server(tiny_job("sequential", Path()))
        yield store
        store.server.close()


@pytest.fixture
def store(shared: Store, tmp_path: Path) -> Iterator[Store]:
    """With a place of its own; one that is slow is so for its own test only."""
    mine = replace(shared, url=f"{shared.url}/{tmp_path.name}")
    mine.server, shared.late_s = shared.server, lambda method, path: mine.late_s(method, path)
    yield mine
    shared.late_s = _nothing


def saving(place: str, directory: Path, server: ForkServer) -> JobConfig:
    """Saves every other iteration, from two nodes."""
    job = with_profile(tiny_job("sequential", directory, iterations=ITERATIONS), server)
    return replace(
        job,
        checkpoint=replace(job.checkpoint, directory=place, persist_every=2),
        cluster=replace(job.cluster, nodes=2),
        # On a busy machine a better plan may be found before the end: saves of another epoch.
        resilience=replace(job.resilience, failures_ahead=0),
    )


def test_a_job_goes_on_from_an_object_store(store: Store, tmp_path: Path) -> None:
    """After a stop and, without any live holder of some layers, by itself."""
    server = store.server
    job = saving(f"{store.url}/one", tmp_path, server)
    whole = Job(saving(str(tmp_path / "disk"), tmp_path, server)).train(server=server)
    Job(replace(job, training=replace(job.training, iterations=4))).train(server=server)
    resumed = Job(job).train(resume=True, server=server)
    struck = saving(f"{store.url}/two", tmp_path, server)
    struck = replace(struck, cluster=replace(struck.cluster, standby=1))
    faults = [parse_injection("kill:0,1@5.backward")]
    went_back = Job(struck).train(injections=faults, server=server)

    assert [v.name for v in tier_of(f"{store.url}/one").versions()] == ["6-1", "4-0"]
    assert digests(whole) == digests(resumed) == digests(went_back)
    assert [event.source_tier for event in recoveries(went_back)] == ["disk"]
    assert resumed.report.final.checkpoint == f"{store.url}/one/6-1"


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_job_begins_and_goes_on_where_each_request_takes_long(
    store: Store, tmp_path: Path
) -> None:
    """From the first look at the place of saves on."""
    server = store.server
    job = saving(store.url, tmp_path, server)
    whole = Job(saving(str(tmp_path / "disk"), tmp_path, server)).train(server=server)
    store.late_s = lambda _method, _path: 0.5
    Job(replace(job, training=replace(job.training, iterations=4))).train(server=server)
    resumed = Job(job).train(resume=True, server=server)

    assert digests(whole) == digests(resumed)
    assert resumed.report.final.checkpoint == f"{store.url}/6-1"


def test_a_save_that_a_store_refuses_is_named_and_training_goes_on(
    store: Store, tmp_path: Path
) -> None:
    """Nothing is left of it, and the next one is there."""
    store.late_s = lambda method, path: inf if method == "PUT" and "/2-0/" in path else 0.0
    told = _Notes()

    result = Job(saving(store.url, tmp_path, store.server)).train(display=told, server=store.server)

    assert [version.name for version in tier_of(store.url).versions()] == ["6-0", "4-0"]
    assert result.report.final.iteration == ITERATIONS
    (note,) = [note for note in told.notes if "2-0" in note]
    assert "AccessDenied" in note


def test_saves_that_a_store_does_not_give_are_as_good_as_before_another_time(
    store: Store, tmp_path: Path
) -> None:
    """They were set aside as damaged once, and a resumed job began anew from its seed."""
    job = saving(store.url, tmp_path, store.server)
    job = replace(job, training=replace(job.training, iterations=12))
    struck = replace(job, cluster=replace(job.cluster, max_nodes=3, standby=1))
    store.late_s = lambda method, path: inf if method == "GET" and "/layer-" in path else 0.0
    faults = [parse_injection("kill:0,1@11.backward")]  # Older saves are gone by then.

    result = Job(struck).run(injections=faults, server=store.server)

    assert isinstance(result.error, InsufficientError)
    assert "AccessDenied" in str(result.error)
    saves = [version.name for version in tier_of(store.url).versions() if version.manifest]
    assert saves
    assert not any(name.startswith("0-") for name in saves)
    store.late_s = _nothing
    resumed = Job(job).train(resume=True, server=store.server)
    assert resumed.report.iterations[0].iteration == int(saves[0].partition("-")[0])


@pytest.mark.long
def test_a_save_under_way_is_complete_before_a_flipped_bit_ends_the_job(
    store: Store, tmp_path: Path
) -> None:
    """Of two holders nobody can tell which is right, and the save before is all that is left."""
    job = saving(store.url, tmp_path, store.server)
    plan = shaped_plan((1, 1), job.num_microbatches)
    store.late_s = lambda method, _path: 0.3 if method == "PUT" else 0.0

    result = Job(job).run(plan=plan, injections=[parse_injection("flip:1@2")], server=store.server)

    assert isinstance(result.error, InsufficientError)
    assert "the newest checkpoint is of iteration 2" in str(result.error)


class _Late(_Notes):
    """Every request of the store is late from when training begins."""

    def __init__(self, store: Store, late_s: float) -> None:
        super().__init__()
        self._store = store
        self._late_s = late_s

    def show_training(self) -> None:
        self._store.late_s = lambda _method, _path: self._late_s


class _Refused(_Notes):
    """The store refuses everything until training begins."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store

    def show_plan(self, planned: Planned) -> None:
        del planned
        self._store.late_s = lambda _method, _path: inf

    def show_training(self) -> None:
        self._store.late_s = _nothing


@pytest.mark.parametrize(
    ("late_s", "keep"),
    [
        pytest.param(0.25, 0, marks=pytest.mark.long),
        pytest.param(3.0, 0, marks=(pytest.mark.long, pytest.mark.timeout(600))),
        pytest.param(0.5, 2, marks=pytest.mark.long),
        pytest.param(3.0, 2, marks=(pytest.mark.long, pytest.mark.timeout(300))),
    ],
)
def test_a_store_that_is_slow_costs_newer_saves_and_nothing_else(
    store: Store, tmp_path: Path, late_s: float, keep: int
) -> None:
    """Each request takes as long as ten iterations: the coordinator was killed six times for that,
    and the job ended."""
    job = saving(store.url, tmp_path, store.server)
    lease_s = 1.0 if late_s < 1.0 else 3.0  # The coordinator may be silent for two thirds of it.
    job = replace(
        job,
        training=replace(job.training, iterations=12),
        checkpoint=replace(job.checkpoint, keep=keep),
        cluster=replace(job.cluster, lease_s=lease_s),
    )

    told = _Late(store, late_s)
    result = Job(job).train(display=told, server=store.server)

    store.late_s = _nothing
    newest = tier_of(store.url).newest()
    assert newest is not None
    assert newest.iteration == result.report.final.iteration == 12
    assert result.report.final.parameters_sha256
    assert {event.kind for event in events_besides_load(result)} <= {"save_failed"}
    skipped = [note for note in told.notes if "was still writing" in note]
    assert 1 <= len(skipped) <= 3, told.notes  # Of five: the first, the second, and the fourth.


@pytest.mark.parametrize(
    "every",
    [pytest.param(0, marks=pytest.mark.long, id="at the end"), pytest.param(2, id="all the time")],
)
def test_a_store_that_does_not_answer_is_given_up_in_the_end(
    store: Store, tmp_path: Path, every: int
) -> None:
    """All iterations are trained, and what was not saved is told within a bounded time."""
    job = saving(store.url, tmp_path, store.server)
    job = replace(
        job,
        checkpoint=replace(job.checkpoint, timeout_s=1.0, persist_every=every),
        cluster=replace(job.cluster, lease_s=1.0),
    )

    result = Job(job).run(display=_Late(store, 60.0), server=store.server)

    store.late_s = _nothing
    assert isinstance(result.error, CheckpointError)
    assert "the last save failed: nothing was written to" in str(result.error)
    assert "did not answer within 1 s" in str(result.error)
    assert [record.iteration for record in result.report.iterations] == list(range(ITERATIONS))
    assert {event.kind for event in events_besides_load(result)} <= {"save_failed", "unsaved"}
    assert result.report.final.parameters_sha256 == ""


def test_a_loss_is_answered_while_a_store_does_not_answer(store: Store, tmp_path: Path) -> None:
    """What is live is all that is needed; nobody waits for the save that is being made complete."""
    job = saving(store.url, tmp_path, store.server)
    job = replace(
        job,
        training=replace(job.training, iterations=12),
        resilience=replace(job.resilience, failures_tolerated=1),
        checkpoint=replace(job.checkpoint, timeout_s=7.0),
    )
    is_complete = threading.Event()

    def late_s(method: str, path: str) -> float:
        if "/manifest.json" in path and method == "PUT":
            is_complete.set()
            return 60.0
        return 0.0

    store.late_s = late_s
    faults = [parse_injection("kill:1@4.backward")]
    result = Job(job).run(injections=faults, server=store.server)

    store.late_s = _nothing
    assert is_complete.is_set()
    (answered,) = [event for event in result.report.events if event.kind == "kill"]
    assert answered.downtime_s < 5.0  # Less than the save takes to fail.
    assert result.report.final.iteration == 12
    assert isinstance(result.error, CheckpointError)


def test_a_store_that_refuses_to_list_does_not_end_a_job(store: Store, tmp_path: Path) -> None:
    """The coordinator looks for older saves when it begins; it ended for that six times over."""
    told = _Refused(store)

    Job(saving(store.url, tmp_path, store.server)).train(display=told, server=store.server)

    assert [note for note in told.notes if "older saves cannot be used until" in note]
    assert [version.name for version in tier_of(store.url).versions()] == ["6-0", "4-0"]
