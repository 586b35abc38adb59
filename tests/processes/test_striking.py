"""What the code in a worker raises counts against the job or against its node, in a real job."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from helpers.chaos import long_but_the_first
from helpers.jobs import tiny_job, with_profile
from helpers.striking_models import Strike, living_helpers
from planaria.errors import ConfigError, TrainingError
from planaria.job.training_job import Job, SilentDisplay, TrainingResult
from planaria.nodes.forkserver import ForkServer
from planaria.observe.metrics import EventRecord, IterationRecord

ITERATIONS = 6


class _Striking(SilentDisplay):
    """Has something go wrong once two iterations are committed."""

    def __init__(self, path: Path, strike: Strike) -> None:
        self._path = path
        self._strike = strike

    def show_iteration(self, record: IterationRecord) -> None:
        if record.iteration == 1:
            new = self._path.with_suffix(".new")
            new.write_bytes(msgspec.json.encode(self._strike))
            new.replace(self._path)


def job(
    directory: Path,
    server: ForkServer,
    *,
    num_nodes: int = 3,
    failures_tolerated: int = 1,
    data: str = "helpers.striking_models:points",
) -> Job:
    config = tiny_job("sequential", directory, iterations=ITERATIONS)
    config = replace(
        config,
        model=replace(config.model, target="helpers.striking_models:sequential"),
        data=replace(config.data, target=data),
        resilience=replace(config.resilience, failures_tolerated=failures_tolerated),
        cluster=replace(config.cluster, nodes=num_nodes),
    )
    return Job(with_profile(config, server))


@pytest.fixture(scope="module")
def calm(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> TrainingResult:
    """The job in peace."""
    return job(tmp_path_factory.mktemp("calm"), server).train(server=server)


def crashes(result: TrainingResult) -> list[EventRecord]:
    return [event for event in result.report.events if event.error]


def assert_as_calm(result: TrainingResult, calm: TrainingResult) -> None:
    assert result.error is None
    assert result.report.final.parameters_sha256 == calm.report.final.parameters_sha256
    assert result.report.final.optimizer_sha256 == calm.report.final.optimizer_sha256


@pytest.mark.parametrize("what", long_but_the_first(["memory", "allocation"]))
def test_a_node_that_runs_out_of_memory_once_ends_nothing(
    what: str, server: ForkServer, strike_file: Path, tmp_path: Path, calm: TrainingResult
) -> None:
    """As Python tells it, and as torch does where the kernel refuses."""
    strike = msgspec.convert({"what": what, "times": 1}, Strike)
    result = job(tmp_path, server).run(server=server, display=_Striking(strike_file, strike))

    assert_as_calm(result, calm)
    (event,) = crashes(result)
    assert (event.kind, event.error) == (
        "crash",
        "MemoryError" if what == "memory" else "RuntimeError",
    )
    assert 4 in event.layers
    assert len(result.report.final.nodes) == 3


def test_data_that_one_node_cannot_read_evict_it(
    server: ForkServer, strike_file: Path, tmp_path: Path, calm: TrainingResult
) -> None:
    """After three times; the others train what is left, with the same bits."""
    strike = Strike(what="unreadable", place="data")
    result = job(tmp_path, server).run(server=server, display=_Striking(strike_file, strike))

    assert_as_calm(result, calm)
    *first, last = crashes(result)
    # An iteration that was under way may be committed behind the first, and forgives it.
    assert [event.kind for event in first] in (["crash"] * 2, ["crash"] * 3)
    assert last.kind == "lost"
    assert (last.error, last.message) == ("OSError", "[Errno 5] Input/output error: 'data.bin'")
    assert "the 3rd time in a row" in last.reason
    assert set(result.report.final.nodes) == {0, 1, 2} - set(last.nodes)


def test_a_worker_that_sees_other_data_than_the_job_began_with_trains_nothing(
    server: ForkServer, strike_file: Path, tmp_path: Path, calm: TrainingResult
) -> None:
    """Its numbers would be those of other samples. Those that live keep to the length that was."""
    strike = Strike(what="memory", times=1)
    growing = job(tmp_path, server, data="helpers.striking_models:growing_points")
    result = growing.run(server=server, display=_Striking(strike_file, strike))

    assert_as_calm(result, calm)
    event = crashes(result)[-1]
    assert event.error == "OSError"
    assert "there are 501 samples here, and the job began with 500" in event.message
    assert set(result.report.final.nodes) == {0, 1, 2} - set(event.nodes)


def test_a_node_with_bus_errors_is_evicted(
    server: ForkServer, strike_file: Path, tmp_path: Path, calm: TrainingResult
) -> None:
    """Its memory or a mapped file is at fault, nobody's code."""
    strike = Strike(what="bus")
    result = job(tmp_path, server).run(server=server, display=_Striking(strike_file, strike))

    assert_as_calm(result, calm)
    events = crashes(result)
    assert [(event.kind, event.error) for event in events] == [
        ("crash", "SIGBUS"),
        ("crash", "SIGBUS"),
        ("lost", "SIGBUS"),
    ]
    assert all(4 in event.layers for event in events)
    assert len(result.report.final.nodes) == 2


class _Counting(SilentDisplay):
    """Has a node struck, and counts the helpers there when all is trained."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._striking = _Striking(path, Strike(what="bus", times=1))
        self.num_helpers = 0

    def show_iteration(self, record: IterationRecord) -> None:
        self._striking.show_iteration(record)
        if record.iteration == ITERATIONS - 1:
            self.num_helpers = len(living_helpers(self._path))


def test_what_a_crashed_worker_has_forked_ends_with_it(
    server: ForkServer, strike_file: Path, tmp_path: Path, calm: TrainingResult
) -> None:
    """Each crash left processes of the data set behind, with their memory, until the job ended."""
    display = _Counting(strike_file)
    data = "helpers.striking_models:forking_points"
    result = job(tmp_path, server, data=data).run(server=server, display=display)

    assert_as_calm(result, calm)
    assert [event.error for event in crashes(result)] == ["SIGBUS"]
    assert display.num_helpers == 1


@pytest.mark.parametrize(
    ("what", "place", "error"),
    [
        ("unreadable", "data", "OSError"),
        pytest.param("mistake", "model", "ValueError", marks=pytest.mark.long),
    ],
)
def test_what_raises_everywhere_ends_the_job_saved(
    what: str,
    place: str,
    error: str,
    server: ForkServer,
    strike_file: Path,
    tmp_path: Path,
    calm: TrainingResult,
) -> None:
    """With the traceback; mended, the job goes on where it was, and ends with the same bits."""
    told = {"what": what, "place": place, "is_everywhere": True}
    strike = msgspec.convert(told, Strike)
    struck = job(tmp_path, server)
    result = struck.run(server=server, display=_Striking(strike_file, strike))

    assert isinstance(result.error, TrainingError)
    assert f"\n{error}: " in result.error.traceback
    done = len(result.report.iterations)
    assert f"of iteration {done}; go on from it with --resume" in result.error.checkpoint_text
    event = crashes(result)[-1]
    assert (event.kind, event.error) == ("failed", error)

    strike_file.unlink()
    assert_as_calm(struck.run(server=server, resume=True), calm)


@pytest.mark.parametrize(("num_nodes", "failures_tolerated"), [(1, 0), (3, 1)])
def test_a_malformed_sample_in_the_middle_of_training_costs_nothing_that_was_trained(
    num_nodes: int,
    failures_tolerated: int,
    server: ForkServer,
    strike_file: Path,
    tmp_path: Path,
    calm: TrainingResult,
) -> None:
    """It is told as a mistake to mend; what is live is saved first, also what the rank that raised
    holds alone, and the job goes on from it."""
    spoilt = job(
        tmp_path,
        server,
        num_nodes=num_nodes,
        failures_tolerated=failures_tolerated,
        data="helpers.striking_models:spoilt_points",
    )
    display = _Striking(strike_file, Strike(what="mistake", times=0))
    result = spoilt.run(server=server, display=display)

    assert isinstance(result.error, ConfigError)
    done = len(result.report.iterations)
    assert done >= 2
    assert "is of type tuple; return (inputs, targets); " in str(result.error)
    assert f"of iteration {done}; go on from it with --resume" in str(result.error)

    strike_file.unlink()
    assert_as_calm(spoilt.run(server=server, resume=True), calm)
