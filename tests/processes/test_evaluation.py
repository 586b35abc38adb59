"""Held-out data are evaluated while a job trains, and nothing of it is seen in the result."""

import itertools
import math
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from helpers.jobs import digests, shaped_plan, tiny_job, train_shape, with_profile
from helpers.left_runs import NoteDisplay
from helpers.linked_ranks import wait_until
from helpers.user_models import points, sequential
from planaria.checkpoint.disk.tiers import tier_of
from planaria.core.inject import parse_injection
from planaria.core.job import EvaluationConfig, JobConfig
from planaria.job.training_job import Job, TrainingResult
from planaria.nodes.forkserver import ForkServer
from planaria.observe.metrics import EvaluationRecord, EventRecord, IterationRecord
from planaria.show.callbacks import Callbacks

ITERATIONS = 5
SAMPLES = 31  # The last microbatch has one.
EVALUATION = EvaluationConfig(
    every=2,
    target="helpers.user_models:points",
    samples=SAMPLES,
    metrics={"accuracy": "processes.test_evaluation:accuracy"},
)


_NUM_CALLS = itertools.count()


def accuracy(output: Tensor, targets: Tensor) -> Tensor:
    """The number of right answers; kills its process once if the strike file says so.

    It does not in its first call: the process that looks at the job makes one.
    """
    path = os.environ.get("STRIKE_FILE", "")
    if next(_NUM_CALLS) and path and os.path.exists(path):
        os.unlink(path)
        os.kill(os.getpid(), signal.SIGKILL)
    return (output.argmax(-1) == targets).sum()


class Noted(Callbacks):
    """Notes all calls; stops training at an evaluation after so many iterations."""

    def __init__(self, stops_at: int = -1) -> None:
        self.calls: list[tuple[str, int]] = []
        self.has_ended = False
        self._stops_at = stops_at

    def on_commit(self, record: IterationRecord) -> None:
        self.calls.append(("commit", record.iteration))

    def on_event(self, event: EventRecord) -> None:
        self.calls.append((event.kind, event.iteration))

    def on_evaluation(self, record: EvaluationRecord) -> bool:
        self.calls.append(("evaluation", record.iteration))
        return record.iteration == self._stops_at

    def on_save(self, iteration: int) -> None:
        self.calls.append(("save", iteration))

    def on_end(self) -> None:
        self.has_ended = True


def _job(directory: Path, server: ForkServer, nodes: int = 3) -> JobConfig:
    job = with_profile(tiny_job("sequential", directory, iterations=ITERATIONS), server)
    # Else a node may be the only one that holds a layer.
    resilience = replace(job.resilience, failures_tolerated=min(1, nodes - 1))
    return replace(job, cluster=replace(job.cluster, nodes=nodes), resilience=resilience)


def _plainly_evaluated(job: JobConfig) -> tuple[float, float]:
    """Loss and accuracy of the newest save, in plain torch."""
    model, tier = sequential(), tier_of(job.checkpoint.directory)
    manifest = tier.newest()
    assert manifest is not None
    named = dict(model.named_parameters())
    with torch.no_grad():
        for layer in range(len(model)):
            state = tier.read_layer(manifest, layer)
            for name, parameter in named.items():
                if f"parameter/{name}" in state:
                    parameter.copy_(torch.as_tensor(state[f"parameter/{name}"]))
        samples = [points()[index] for index in range(SAMPLES)]
        inputs, targets = (torch.stack(part) for part in zip(*samples, strict=True))
        output = model.eval()(inputs)
    loss = nn.functional.cross_entropy(output, targets)
    return loss.item(), (output.argmax(-1) == targets).float().mean().item()


def test_an_evaluation_changes_no_bit_and_gives_the_numbers_of_plain_torch(
    server: ForkServer, tmp_path: Path
) -> None:
    """Without dropout, over two unequal pipelines; the last iteration has one, too."""
    torch.set_num_threads(1)
    plain = train_shape(_job(tmp_path / "plain", server), (1, 2), server)
    job = replace(_job(tmp_path / "evaluated", server), evaluation=EVALUATION)
    noted = Noted()
    evaluated = Job(job).train(
        plan=shaped_plan((1, 2), job.num_microbatches), server=server, callbacks=[noted]
    )

    assert digests(plain) == digests(evaluated)
    records = evaluated.report.evaluations
    assert [record.iteration for record in records] == [2, 4, ITERATIONS]
    assert {(record.samples, record.targets) for record in records} == {(SAMPLES, SAMPLES)}
    expected = _plainly_evaluated(job)
    assert (records[-1].loss, records[-1].metrics["accuracy"]) == pytest.approx(expected, rel=1e-5)
    assert evaluated.report.ledger["evaluation"] > 0.0 == plain.report.ledger["evaluation"]
    assert noted.has_ended
    told = [call for call in noted.calls if call[0] in ("commit", "evaluation")]
    commits = [("commit", iteration) for iteration in range(ITERATIONS)]
    assert told == [
        *(*commits[:3], ("evaluation", 2), *commits[3:5]),
        *(("evaluation", 4), ("evaluation", ITERATIONS)),
    ]
    assert ("save", ITERATIONS) in noted.calls


@pytest.mark.long
def test_a_rank_that_is_killed_in_an_evaluation_costs_nothing_of_it(
    server: ForkServer, strike_file: Path, tmp_path: Path
) -> None:
    """It is done again after the recovery, with the same numbers; and a node is killed later."""
    job = replace(_job(tmp_path / "whole", server), evaluation=EVALUATION)
    whole = Job(job).train(server=server).report
    strike_file.touch()
    job = replace(_job(tmp_path / "killed", server), evaluation=EVALUATION)
    killed = Job(job).train(server=server, injections=[parse_injection("kill:1@3")]).report

    assert not strike_file.exists()
    assert {"crash", "kill"} <= {event.kind for event in killed.events}
    assert whole.final.parameters_sha256 == killed.final.parameters_sha256
    numbers = [
        [(record.iteration, record.loss, record.metrics) for record in report.evaluations]
        for report in (whole, killed)
    ]
    assert numbers[0] == numbers[1]
    assert len(numbers[0]) == 3


def test_the_last_evaluation_is_missed_in_words(
    server: ForkServer, strike_file: Path, tmp_path: Path
) -> None:
    """All layers have had their last step by then, and no epoch begins for an evaluation alone."""
    config = replace(EVALUATION, every=ITERATIONS)
    strike_file.touch()
    display = NoteDisplay(lambda _: None)
    job = Job(replace(_job(tmp_path, server), evaluation=config))
    report = job.run(server=server, display=display).report

    assert not strike_file.exists()
    assert report.final.iteration == ITERATIONS
    assert not report.evaluations
    (text,) = [text for text in display.notes if "held-out" in text]
    assert f"not evaluated after {ITERATIONS} iterations: a node was lost" in text


def saved_by_then(output: Tensor, _: Tensor) -> int:
    """A metric that waits for a save to be complete, in the directory that the strike file names.

    As `accuracy`, it does nothing in its first call.
    """
    path = Path(os.environ["STRIKE_FILE"])
    if next(_NUM_CALLS) and path.exists():
        saves = Path(path.read_text())
        wait_until(lambda: any(saves.glob("*/manifest.json")))
    return len(output)


def test_the_last_save_is_complete_while_held_out_data_are_evaluated(
    server: ForkServer, strike_file: Path, tmp_path: Path
) -> None:
    """That may take long, and whoever ends the job meanwhile may not wait for it."""
    metrics = {"saved": "processes.test_evaluation:saved_by_then"}
    config = replace(EVALUATION, every=ITERATIONS, metrics=metrics)
    job = replace(_job(tmp_path, server, nodes=2), evaluation=config)
    strike_file.write_text(job.checkpoint.directory)

    report = Job(job).train(server=server).report

    (record,) = report.evaluations
    assert record.metrics["saved"] == 1.0
    assert report.final.iteration == ITERATIONS
    assert not report.events


def slow(output: Tensor, _: Tensor) -> int:
    """A metric that takes long, and notes its calls but the first in the strike file."""
    if next(_NUM_CALLS):
        with Path(os.environ["STRIKE_FILE"]).open("a") as file:
            file.write("x")
        time.sleep(0.5)
    return len(output)


@pytest.mark.parametrize("patience", [0, pytest.param(3, marks=pytest.mark.long)])
def test_a_stop_breaks_an_evaluation_off_unless_it_may_end_training(
    patience: int, server: ForkServer, strike_file: Path, tmp_path: Path
) -> None:
    """A scheduler waits for so long and no longer, and all since the newest save was lost. Its
    microbatches are left out on all ranks of a pipeline."""
    metrics = {"slow": "processes.test_evaluation:slow"}
    config = replace(EVALUATION, metrics=metrics, patience=patience)
    job = replace(_job(tmp_path, server, nodes=2), evaluation=config)
    plan = shaped_plan((2,), job.num_microbatches)

    def stop() -> None:
        wait_until(strike_file.exists)
        os.kill(os.getpid(), signal.SIGINT)

    stopping = threading.Thread(target=stop)
    stopping.start()
    result = Job(job).run(server=server, plan=plan)
    stopping.join()

    num_noted, num_all = len(strike_file.read_text()), math.ceil(SAMPLES / 2) - 1
    assert _stopped(result) == (3, True)
    assert [record.iteration for record in result.report.evaluations] == [2] * bool(patience)
    assert num_noted == num_all if patience else num_noted < num_all
    assert result.report.final.checkpoint.endswith("3-0")
    assert result.report.ledger["evaluation"] > 0.5


def odd(output: Tensor, _: Tensor) -> float:
    """A metric that is not a number."""
    return float("nan") * float(output.sum())


def test_a_number_that_is_none_costs_nothing(server: ForkServer, tmp_path: Path) -> None:
    """JSON cannot say it: the agents took the message for a forged one, and killed all workers."""
    evaluation = replace(EVALUATION, metrics={"odd": "processes.test_evaluation:odd"})
    job = replace(_job(tmp_path, server, nodes=2), evaluation=evaluation)

    report = Job(job).train(server=server).report

    assert not report.events
    assert len(report.evaluations) == 3
    assert all(math.isnan(record.metrics["odd"]) for record in report.evaluations)


def _stopped(result: TrainingResult) -> tuple[int, bool]:
    return result.report.final.iteration, result.stopped


def test_training_ends_early_and_is_saved(server: ForkServer, tmp_path: Path) -> None:
    """If a callback says so; it is no run that was interrupted."""
    evaluation = replace(EVALUATION, metrics={}, every=1)
    job = replace(_job(tmp_path / "called", server, nodes=1), evaluation=evaluation)
    job = replace(job, training=replace(job.training, iterations=400))

    result = Job(job).train(server=server, callbacks=[noted := Noted(stops_at=2)])

    iteration, stopped = _stopped(result)
    assert 3 <= iteration < 400
    assert not stopped
    (event,) = (event for event in result.report.events if event.kind == "early")
    assert "on_evaluation of Noted returned True" in event.reason
    assert ("save", iteration) in noted.calls
    assert result.report.evaluations[-1].iteration < iteration


class _Raising(Callbacks):
    """Raises after the second iteration."""

    def on_commit(self, record: IterationRecord) -> None:
        if record.iteration == 1:
            raise ZeroDivisionError("mine")


def test_what_a_callback_raises_costs_no_report(server: ForkServer, tmp_path: Path) -> None:
    """Nor the timelines: the job is saved, and the command writes both before it raises."""
    job = _job(tmp_path / "raising", server, nodes=1)
    job = replace(job, training=replace(job.training, iterations=400))

    result = Job(job).run(server=server, callbacks=[_Raising()], trace=True)

    assert repr(result.error) == "ZeroDivisionError('mine')"
    assert 2 <= len(result.report.iterations) == result.report.final.iteration < 400
    assert result.report.final.parameters_sha256
    assert len(result.compared) == len(result.report.iterations)
    (event,) = (event for event in result.report.events if event.kind == "lost")
    assert "the launcher raised ZeroDivisionError('mine')" in event.reason


class _Wrong:
    """The training data with other labels, so that the loss rises."""

    def __len__(self) -> int:
        return len(points())

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, target = points()[index]
        return inputs, (target + 1) % 5


def wrong_points() -> _Wrong:
    return _Wrong()


def _impatient(directory: Path, server: ForkServer) -> JobConfig:
    evaluation = EvaluationConfig(
        every=2,
        target="processes.test_evaluation:wrong_points",
        samples=SAMPLES,
        patience=2,
        metrics={"accuracy": "processes.test_evaluation:accuracy"},
    )
    job = replace(_job(directory, server), evaluation=evaluation)
    checkpoint = replace(job.checkpoint, persist_every=3)
    training = replace(job.training, iterations=400, learning_rate=0.01)
    return replace(job, training=training, checkpoint=checkpoint)


def _end(result: TrainingResult) -> tuple[object, ...]:
    """What must not depend on what was lost, and what the user is told of the end."""
    report = result.report
    told = [event.reason for event in report.events if event.kind == "early"]
    final, numbers = report.final, _numbers(report.evaluations)
    return final.iteration, final.parameters_sha256, numbers, result.stopped, *told


def _numbers(records: Sequence[EvaluationRecord]) -> tuple[tuple[int, float], ...]:
    return tuple((record.iteration, record.loss) for record in records)


def test_patience_ends_training_after_the_same_iteration_whatever_is_lost(
    server: ForkServer, strike_file: Path, tmp_path: Path
) -> None:
    """Also of a job that was killed as a whole, and goes on from a save between evaluations."""
    result = Job(_impatient(tmp_path / "whole", server)).train(server=server)
    strike_file.touch()  # A rank is killed in the first evaluation.
    killed = Job(_impatient(tmp_path / "killed", server)).train(
        server=server, injections=[parse_injection("kill:1@6")]
    )
    job = _impatient(tmp_path / "resumed", server)
    training = replace(job.training, iterations=5)
    Job(replace(job, training=training)).train(server=server)
    resumed = Job(job).train(server=server, resume=True)

    first, second, *_ = result.report.evaluations
    iteration, _, _, stopped, *told = whole = _end(result)
    assert (iteration, stopped) == (7, False)
    assert told == ["training has ended: the loss of held-out data is not lower any more"]
    assert first.loss < second.loss
    assert not strike_file.exists()
    assert {"crash", "kill"} <= {event.kind for event in killed.report.events}
    assert _end(killed) == whole
    later = [record for record in result.report.evaluations if record.iteration > 5]
    assert _end(resumed) == (*whole[:2], _numbers(later), *whole[3:])
