"""Jobs that save to an object store, which may be slow, or refuse."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path

import pytest

from jobs import digests, shaped_plan, tiny_job
from object_store import object_store
from planaria.checkpoint.tiers import tier_of
from planaria.core.inject import parse_injection
from planaria.core.job import JobConfig
from planaria.errors import InsufficientError
from planaria.library import Job, Silent
from planaria.nodes.forkserver import ForkServer
from planaria.planning import fork_server

ITERATIONS = 6


class _Notes(Silent):
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
def store(shared: Store, tmp_path: Path) -> Store:
    """With a place of its own."""
    mine = replace(shared, url=f"{shared.url}/{tmp_path.name}")
    mine.server, shared.late_s = shared.server, lambda method, path: mine.late_s(method, path)
    return mine


def saving(place: str, directory: Path) -> JobConfig:
    """Saves every other iteration, from two nodes."""
    job = tiny_job("sequential", directory, iterations=ITERATIONS)
    return replace(
        job,
        checkpoint=replace(job.checkpoint, directory=place, persist_every=2),
        cluster=replace(job.cluster, nodes=2),
    )


def test_a_job_goes_on_from_an_object_store(store: Store, tmp_path: Path) -> None:
    """After a stop and, without any live holder of some layers, by itself."""
    server, job = store.server, saving(f"{store.url}/one", tmp_path)
    whole = Job(saving(str(tmp_path / "disk"), tmp_path)).train(server=server)
    Job(replace(job, training=replace(job.training, iterations=4))).train(server=server)
    resumed = Job(job).train(resume=True, server=server)
    struck = saving(f"{store.url}/two", tmp_path)
    struck = replace(struck, cluster=replace(struck.cluster, standby=1))
    faults = [parse_injection("kill:0,1@5.backward")]
    went_back = Job(struck).train(injections=faults, server=server)

    assert [v.name for v in tier_of(f"{store.url}/one").versions()] == ["6-1", "4-0"]
    assert digests(whole) == digests(resumed) == digests(went_back)
    assert [e.source_tier for e in went_back.report.events if e.answer] == ["disk"]
    assert resumed.report.final.checkpoint == f"{store.url}/one/6-1"


def test_a_save_that_a_store_refuses_is_named_and_training_goes_on(
    store: Store, tmp_path: Path
) -> None:
    """Nothing is left of it, and the next one is there."""
    store.late_s = lambda method, path: inf if method == "PUT" and "/2-0/" in path else 0.0
    told = _Notes()

    result = Job(saving(store.url, tmp_path)).train(display=told, server=store.server)

    assert [version.name for version in tier_of(store.url).versions()] == ["6-0", "4-0"]
    assert result.report.final.iteration == ITERATIONS
    (note,) = [note for note in told.notes if "2-0" in note]
    assert "AccessDenied" in note


def test_saves_that_a_store_does_not_give_are_as_good_as_before_another_time(
    store: Store, tmp_path: Path
) -> None:
    """They were set aside as damaged once, and a resumed job began anew from its seed."""
    job = saving(store.url, tmp_path)
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


def test_a_save_under_way_is_complete_before_a_flipped_bit_ends_the_job(
    store: Store, tmp_path: Path
) -> None:
    """Of two holders nobody can tell which is right, and the save before is all that is left."""
    job = saving(store.url, tmp_path)
    plan = shaped_plan((1, 1), job.num_microbatches)
    store.late_s = lambda method, _path: 0.3 if method == "PUT" else 0.0

    result = Job(job).run(plan=plan, injections=[parse_injection("flip:1@2")], server=store.server)

    assert isinstance(result.error, InsufficientError)
    assert "the newest checkpoint is of iteration 2" in str(result.error)


@pytest.mark.long
def test_a_slow_store_costs_time_and_nothing_else(store: Store, tmp_path: Path) -> None:
    """Half a second for each layer: more than all iterations take together."""
    store.late_s = lambda method, path: 0.5 if method == "PUT" and "layer-" in path else 0.0

    result = Job(saving(store.url, tmp_path)).train(server=store.server)

    assert [version.name for version in tier_of(store.url).versions()] == ["6-0", "4-0"]
    assert [record.iteration for record in result.report.iterations] == list(range(ITERATIONS))
