"""Makes the report of a run from its records and from the predictions of its plans, and the error
that ended it."""

import hashlib
import importlib.metadata
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from math import inf
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from planaria.checkpoint.disk.tiers import Manifest, Tier, newest_checkpoint_text
from planaria.core.kinds import Ending
from planaria.core.messages import MeasuredSpan
from planaria.core.records import Ended, Warned
from planaria.errors import (
    CheckpointError,
    InsufficientError,
    PlanariaError,
    TrainingError,
)
from planaria.estimator.correction import Comparison, PeakBytes
from planaria.estimator.time import Span, Timeline
from planaria.job.planning import Planned, mistake_error
from planaria.job.predictions import Prediction, prediction
from planaria.nodes.head.launcher import Launcher
from planaria.nodes.head.process_events import restore_handlers
from planaria.observe.measurements import EpochMeasurements
from planaria.observe.metrics import (
    ActionRecord,
    FinalRecord,
    IterationRecord,
    MemoryRecord,
    Report,
)
from planaria.observe.recorder import Recorder
from planaria.planner.problem import Problem
from planaria.profiles.profile_json import encode_profile
from planaria.schedule.action import parse_action
from planaria.show.job_observer import JobObserver

_SLOW_S: Final = 3.0  # Time after which the user is told that the last save is still being read.


def report_of(
    planned: Planned, tier: Tier, recorder: Recorder, observer: JobObserver, ended: Ended
) -> Report:
    """The report of a run that has ended.

    Args:
        tier: tier of saves that answers in time or raises.
    """
    config = planned.config
    now_s = time.monotonic()
    has_bytes = _tells_bytes(planned)
    ledger = recorder.ledger.enter(recorder.ledger.category, now_s)
    records = [
        epoch_records(planned.problem, epoch, measured, has_bytes=has_bytes)
        for epoch, measured in recorder.measurements.epochs.items()
    ]
    first = {planned.plan.epoch: msgspec.json.encode(planned.plan)}
    plans = dict(sorted((recorder.plans.json_by_epoch() | first).items()))
    prepared_profile = planned.prepared.profile
    assert prepared_profile is not None
    return Report(
        job=asdict(config),
        seed=config.training.seed,
        versions=job_versions(),
        workers=recorder.workers(),
        iterations=tuple(recorder.iterations),
        events=recorder.events(),
        evaluations=tuple(recorder.evaluations.values()),
        checkpoints=observer.checkpoints(
            every=config.checkpoint.persist_every, is_resumed=planned.resumed is not None
        ),
        ledger=ledger.parts(),
        wasted=ledger.wasted_parts(),
        final=final_record(planned, tier, recorder.iterations, observer, ended),
        plan=msgspec.to_builtins(planned.plan),
        plans={epoch: msgspec.Raw(plan) for epoch, plan in plans.items()},
        profile=msgspec.json.decode(encode_profile(prepared_profile)),
        processors=planned.problem.processors,
        first_iteration=planned.resumed.iteration if planned.resumed else 0,
        actions=tuple(record for actions, _ in records for record in actions),
        memory=tuple(record for _, memory in records for record in memory),
    )


def _tells_bytes(planned: Planned) -> bool:
    """Whether the profile says the model's bytes; a paced job's has those of another model."""
    return planned.config.model.kind != "paced"


def epoch_records(
    problem: Problem, epoch: int, measured: EpochMeasurements, *, has_bytes: bool
) -> tuple[tuple[ActionRecord, ...], tuple[MemoryRecord, ...]]:
    """The report's records of what ranks measured in an epoch, beside what was predicted.

    Args:
        has_bytes: whether the profile has the bytes of the job's model; without them there are no
            records of memory.
    """
    seconds, peak_bytes = measured.seconds(), measured.peak_bytes()
    if not seconds and not peak_bytes:
        return (), ()
    # A prediction of a large plan takes seconds, so it serves for all records.
    predicted = corrected = prediction(problem, measured.plan)
    _, newest = measured.corrections[-1]
    if newest and seconds:
        corrected = prediction(problem, measured.plan, layer_factors=newest)
    actions = tuple(_actions(epoch, measured, predicted=predicted, corrected=corrected))
    if not has_bytes:
        return actions, ()
    return actions, tuple(_memory(epoch, peak_bytes, predicted))


def _actions(
    epoch: int, measured: EpochMeasurements, *, predicted: Prediction, corrected: Prediction
) -> Iterator[ActionRecord]:
    """The measured seconds of each rank and kind of action in an epoch, beside predicted ones."""
    predicted_s, corrected_s = _action_s(predicted), _action_s(corrected)
    layers_by_rank = measured.plan.layers_by_rank
    for (rank, kind), measured_s in measured.seconds().items():
        yield ActionRecord(
            epoch=epoch,
            rank=rank,
            kind=kind,
            first_layer=layers_by_rank[rank].start,
            end_layer=layers_by_rank[rank].stop,
            predicted_s=predicted_s[rank, kind],
            corrected_s=corrected_s[rank, kind],
            measured_s=measured_s,
        )


def _action_s(predicted: Prediction) -> dict[tuple[int, str], float]:
    """The predicted seconds that a rank computes in an iteration, by (rank, kind of action)."""
    seconds: defaultdict[tuple[int, str], float] = defaultdict(float)
    for span in predicted.timeline.spans:
        if span.lane == "compute":
            seconds[span.rank, span.action.kind.value] += span.end_s - span.start_s
    return seconds


def _memory(
    epoch: int, peak_bytes: Mapping[int, tuple[int, int]], predicted: Prediction
) -> Iterator[MemoryRecord]:
    """The measured peak memory of each rank in an epoch, beside the predicted one."""
    for rank, (tensor_bytes, measured_bytes) in peak_bytes.items():
        if rank in predicted.peak_bytes:  # Other ranks are only silent members.
            yield MemoryRecord(
                epoch=epoch,
                rank=rank,
                predicted_bytes=predicted.peak_bytes[rank],
                tensor_bytes=tensor_bytes,
                measured_bytes=measured_bytes,
            )


def compared_iterations(planned: Planned, recorder: Recorder) -> Iterator[Comparison]:
    """The traced iterations with their predictions; the clock starts with the first rank.

    Those of epochs that are forgotten are left out (observe/measurements.py).
    """
    predictions: dict[tuple[int, tuple[float, ...]], Prediction] = {}
    for record in recorder.iterations:
        of_epoch = recorder.measurements.epochs.get(record.epoch)
        if record.iteration not in recorder.traces or of_epoch is None:
            continue
        by_rank, tensor_bytes = recorder.traces[record.iteration]
        factors = of_epoch.layer_factors(record.iteration)
        key = (record.epoch, factors)
        if key not in predictions:
            predictions[key] = prediction(planned.problem, of_epoch.plan, layer_factors=factors)
        yield Comparison(
            record.iteration,
            predictions[key].timeline,
            _measured_timeline(by_rank, record.seconds),
            tuple(_peaks(predictions[key], tensor_bytes)) if _tells_bytes(planned) else (),
            record.clock_error_s,
        )


def _peaks(predicted: Prediction, tensor_bytes: Mapping[int, int]) -> Iterator[PeakBytes]:
    for rank, num_bytes in sorted(predicted.peak_bytes.items()):
        if rank in tensor_bytes:
            yield PeakBytes(rank, num_bytes, tensor_bytes[rank])


def _measured_timeline(
    by_rank: dict[int, tuple[MeasuredSpan, ...]], iteration_s: float
) -> Timeline:
    spans = (
        Span(rank, span.lane, parse_action(span.action), span.start_s, span.end_s)
        for rank, of_rank in sorted(by_rank.items())
        for span in of_rank
    )
    return Timeline(tuple(spans), iteration_s)


def final_record(
    planned: Planned,
    tier: Tier,
    records: Sequence[IterationRecord],
    observer: JobObserver,
    ended: Ended,
) -> FinalRecord:
    """The state in which the job ended; it has hashes only if its last iteration was saved."""
    first = planned.resumed.iteration if planned.resumed else 0
    iteration = records[-1].iteration + 1 if records else first
    manifest, parameters, optimizer = None, "", ""
    try:
        manifest = tier.newest()
        if manifest is not None and not records:  # A head before this one may have trained all.
            iteration = manifest.iteration
        if manifest is not None and manifest.layers and manifest.iteration == iteration:
            parameters, optimizer = digests(
                tier,
                manifest,
                parameters=planned.prepared.parameters,
                progress=_noting_once(len(manifest.layers), observer),
            )
    except CheckpointError as error:
        observer.on_message(Warned(text=f"the report has no hashes of the last save: {error}"))
    return FinalRecord(
        iteration=iteration,
        loss=records[-1].loss if records else float("nan"),  # null in JSON
        parameters_sha256=parameters,
        optimizer_sha256=optimizer,
        nodes=ended.nodes,
        epoch=ended.epoch,
        checkpoint=tier.where(manifest.iteration, manifest.epoch) if manifest else "",
    )


def _noting_once(num_layers: int, observer: JobObserver) -> Callable[[int], None]:
    """A function that tells the user once if the last save takes long to read."""
    note_s = time.monotonic() + _SLOW_S

    def progress(num_read: int) -> None:
        nonlocal note_s
        if time.monotonic() >= note_s and num_read < num_layers:
            text = (
                f"the job reads its last save for the hashes: {num_read} of {num_layers} "
                "layers so far"
            )
            observer.on_message(Warned(text=text))
            note_s = inf

    return progress


def job_versions() -> dict[str, str]:
    """Versions of what a job ran with, by package; "" if it is run from its source."""
    versions = {"python": platform.python_version()}
    for name in ("planaria", "torch", "numpy"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = ""
    return versions


# -- the digests that two runs are compared by: one over all parameters, one over optimizer state --
# `parameters_sha256` covers the parameters in layer order, and within a layer in the model's order
# of names; tied parameters count once; bytes are little-endian. `optimizer_sha256` covers, in the
# same order, the state tensors of each parameter, sorted by name, with the step as int64.


def digests(
    tier: Tier,
    manifest: Manifest,
    *,
    parameters: Sequence[Sequence[str]],
    progress: Callable[[int], None] = lambda _num_read: None,
) -> tuple[str, str]:
    """The pair (parameters_sha256, optimizer_sha256) of a checkpoint.

    Args:
        parameters: names of each layer's parameters, without later uses of tied ones.
        progress: function that is told, after each layer, how many layers have been read.

    Raises:
        CheckpointError: a file of the checkpoint is missing or damaged.
    """
    of_parameters, of_optimizer = hashlib.sha256(), hashlib.sha256()
    for layer, names in enumerate(parameters):
        tensors = tier.read_layer(manifest, layer)
        for name in names:
            of_parameters.update(_bytes(tensors[f"parameter/{name}"]))
            prefix = f"optimizer/{name}/"
            for key in sorted(key for key in tensors if key.startswith(prefix)):
                of_optimizer.update(_bytes(tensors[key]))
        progress(layer + 1)
    return of_parameters.hexdigest(), of_optimizer.hexdigest()


def _bytes(array: npt.NDArray[np.generic]) -> bytes:
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def failure_of(ended: Ended, tier: Tier) -> PlanariaError | None:
    """The error that ended a job early, with what the job has saved; None if nothing did."""
    match Ending(ended.ending):
        case Ending.FAILED:
            assert ended.failure is not None
            if ended.failure.mistake is not None:
                field, value, remedy = ended.failure.mistake
                return mistake_error((field, value, f"{remedy}; {newest_checkpoint_text(tier)}"))
            return TrainingError(
                ended.failure.rank,
                ended.failure.traceback,
                checkpoint_text=newest_checkpoint_text(tier),
                blame=ended.failure.blame,
            )
        case Ending.LOST:
            return InsufficientError(f"{ended.reason}; {newest_checkpoint_text(tier)}")
        case Ending.UNSAVED:
            return CheckpointError(
                f"the last save failed: {ended.reason}; {newest_checkpoint_text(tier)}"
            )
        case Ending.FINISHED | Ending.STOPPED:
            return None


@contextmanager
def explain_interrupts(launcher: Launcher, tier: Tier) -> Iterator[None]:
    """Makes an interrupt after training say that nothing is lost by it.

    Only Ctrl-C interrupts the work after training, the report of all that is saved, which takes
    minutes for a large model.
    """
    with restore_handlers():
        try:
            yield
        except KeyboardInterrupt as error:
            if error.args or not launcher.has_ended:
                raise
            text = f"interrupted after training had ended; {newest_checkpoint_text(tier)}"
            raise KeyboardInterrupt(text) from error


@contextmanager
def prefer_error(error: Exception | None) -> Iterator[None]:
    """Raises an error that came first, if there is one, in place of one that is raised here."""
    try:
        yield
    except Exception as later:
        if error is None:
            raise
        raise error from later
