"""The loss of held-out data, computed by the pipelines between two iterations.

Microbatches take the routes of the plan in turn, forward alone, without dropout. Each rank runs its
hops in the order of microbatches, so no two ranks wait for each other. A rank that sends waits
until its receiver has computed the microbatch before the last one, so that none runs far ahead and
fills the memory of those behind it. In the end all ranks sum the losses, and so know the result.

An evaluation may take longer than a scheduler leaves a job to stop. So the rank with which a route
begins computes no more microbatches once the job is asked to stop, and sends _LEFT_OUT in place of
each; all ranks then know from the sums that there is no result. Where results end training, none is
left out, because a job that goes on later would end with another iteration.

Nothing of it is seen by training: the random generators are restored, no layer changes, and the
time of iterations does not contain it.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from planaria.core.commit import ordered_sum
from planaria.core.job import JobConfig
from planaria.core.messages import Evaluated
from planaria.core.plan import Hop, Plan, Route
from planaria.data.batches import HeldOut, SampleNote, check_num_samples
from planaria.data.datasets import Dataset, keep_generators, load_held_out
from planaria.data.padding import refuse_unhidden_padding
from planaria.data.text import TokenDataset
from planaria.engine.comm.device_comm import DeviceComm
from planaria.engine.iteration.executor import RankContext
from planaria.engine.iteration.groups import reduce_vector
from planaria.engine.iteration.lateness import EpochLimits, Workload
from planaria.engine.stage import RankStage
from planaria.errors import ConfigError
from planaria.models.layers import SplitModel
from planaria.models.packing import bring, changeable_tensor, unpack
from planaria.transport.links import UNLIMITED_S, Channel, Tag
from planaria.user_functions import user_function

Metric = Callable[[Any, Any], Any]

_IN_FLIGHT: Final = 2  # Microbatches that a rank may be ahead of the next one.
_EVALUATE: Final = "evaluate"  # Kind of the actions, for `EpochLimits`.
_LEFT_OUT: Final = torch.zeros((), dtype=torch.int64)  # No output of a layer has no dimensions.


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a job evaluates.

    Attributes:
        metrics: functions that return a sum over the targets of a microbatch, by name.
        key: key that names the held-out data: "evaluation.target" or "evaluation.path".
        name: value of that key.
        ends_training: whether results decide when training ends.
        untold: results that were not taken yet, by the number of iterations before them. They
            outlast an epoch that ends between an evaluation and the report of its iteration.
    """

    held_out: HeldOut
    metrics: Mapping[str, Metric]
    key: str
    name: str
    ends_training: bool = False
    untold: dict[int, Evaluated] = field(default_factory=dict)

    def take_results(self, age: int) -> tuple[Evaluated, ...]:
        """Takes the results up to an age, in order.

        Later ones may be from before all ranks went back, and are found anew.
        """
        ages = sorted(known for known in self.untold if known <= age)
        return tuple(self.untold.pop(known) for known in ages)

    @contextmanager
    def name_samples(self, age: int, index: int) -> Iterator[None]:
        """Has what the body raises say that a microbatch was evaluated, and of which samples."""
        when = f"after {age} iterations" if age else "that is tried before training"
        samples = f"{self.held_out.samples_text(index)} in the evaluation {when}"
        try:
            with SampleNote(lambda: f"raised for {samples}, of {self.key}"):
                yield
        except ConfigError as error:
            if error.field.startswith("evaluation."):
                remedy = f"{error.remedy}; raised for {samples}"
                raise ConfigError(error.field, error.value, remedy) from error
            cause = error.remedy if error.value == self.name else f"{error.value}: {error.remedy}"
            raise ConfigError(self.key, self.name, f"{samples}: {cause}") from error

    def sums(self, output: Tensor, stage: RankStage, *, age: int, index: int) -> list[float]:
        """The loss, the number of targets and the metrics of a microbatch, by name, each summed
        over its targets.

        Args:
            output: output of the last layer, which the stage holds.
        """
        targets = bring(self.held_out.targets(index), stage.device.bring)
        # On the processor these are the targets that are counted. All of the user's functions get
        # copies, because each may change what it gets.
        loss = stage.loss_sum(
            changeable_tensor(output), changeable_tensor(targets), iteration=age, microbatch=index
        )
        numbers = [float(loss), float(self.held_out.num_targets(index))]
        for name, function in sorted(self.metrics.items()):
            predictions = stage.model.predictions(changeable_tensor(output))
            value = function(predictions, unpack(changeable_tensor(targets)))
            try:
                numbers.append(float(value))
            except (TypeError, ValueError, RuntimeError) as error:
                kind = type(value).__name__
                remedy = f"it returned an object of type {kind}, and must return one number"
                raise ConfigError(f"evaluation.metrics.{name}", name, remedy) from error
        return numbers


def load_evaluation(
    job: JobConfig,
    dataset: Dataset,
    num_samples: int = 0,
    *,
    model: SplitModel,
    cache_directory: Path,
) -> Evaluation | None:
    """What the job evaluates; None if nothing.

    Args:
        dataset: the training data.
        num_samples: number of held-out samples that the job began with; 0: not known.

    Raises:
        OSError: there are other held-out samples by now.
        ConfigError: the held-out data cannot be read, or has tokens that the model does not know.
    """
    config = job.evaluation
    if not config.every:
        return None
    key = f"evaluation.{'target' if config.target else 'path'}"
    held_out = load_held_out(
        job.held_out,
        job.data,
        objective=model.objective,
        seed=job.training.seed,
        cache_directory=cache_directory,
        model=job.model,
    )
    if not len(held_out):
        raise ConfigError(key, config.target or config.path, "it is empty")
    refuse_unhidden_padding(held_out, model.mask_problem, key=key, path=config.path)
    known = model.vocabulary_size
    if held_out.vocabulary_size > known > 0:
        remedy = f"has the token id {held_out.vocabulary_size - 1}; the model knows {known} ids"
        raise ConfigError(key, config.target or config.path, remedy)
    if isinstance(held_out, TokenDataset) and isinstance(dataset, TokenDataset):
        held_out = replace(held_out, num_tokens=dataset.num_tokens)  # Of masks.
    metrics: dict[str, Metric] = {
        name: user_function(target, field=f"evaluation.metrics.{name}")
        for name, target in config.metrics.items()
    }
    samples = HeldOut(held_out, job.training, num_samples=config.samples)
    check_num_samples(samples.num_samples, num_samples, key)
    name = config.target or config.path
    return Evaluation(samples, metrics, key, name, ends_training=config.patience > 0)


def try_evaluation(evaluation: Evaluation, stage: RankStage) -> None:
    """Evaluates the first microbatch once, layer by layer, so that mistakes show before training.

    Args:
        stage: stage that holds no layers; it keeps the last one.

    Raises:
        ConfigError: the samples do not fit the loss, or a metric returned no number.
    """
    with torch.no_grad(), keep_generators(), evaluation.name_samples(age=0, index=0):
        hidden = bring(evaluation.held_out.inputs(0), stage.device.bring)
        for layer in range(stage.model.num_layers):
            stage.keep_only(())
            stage.hold((layer,), states={}, age=0)
            with _evaluate_layers(stage):
                hidden = stage.forward(layer, layer + 1, hidden, iteration=0, microbatch=0)
        evaluation.sums(hidden, stage, age=0, index=0)
    evaluation.held_out.clear()


@contextmanager
def _evaluate_layers(stage: RankStage) -> Iterator[None]:
    """Has the layers of a stage do in the body what they do when they are not trained."""
    layers = [held.module for held in stage.layers.values()]
    # The user may have put some parts into eval mode for good.
    in_training = [part for layer in layers for part in layer.modules() if part.training]
    try:
        for layer in layers:
            layer.eval()
        yield
    finally:
        for part in in_training:
            part.training = True


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


class Evaluator:
    """One rank's part of the evaluations of one epoch."""

    def __init__(
        self, evaluation: Evaluation, plan: Plan, *, context: RankContext, comm: DeviceComm
    ) -> None:
        self._evaluation = evaluation
        self._plan = plan
        self._context = context
        self._stage = context.stage
        self._links = context.links
        self._comm = comm
        self._rank = context.links.rank
        self._routes = plan.different_routes
        self._limits = EpochLimits(context.times, context.pulse)
        self._untaken: dict[int, list[Tag]] = {}

    def run(self, age: int, is_stopping: Callable[[], bool]) -> float:
        """Evaluates parameters of this age; returns the seconds, which are no part of an iteration.

        When it returns, all ranks have the result, or have left it out.

        Args:
            is_stopping: function that tells whether the job is asked to stop.
        """
        begin_s = time.monotonic()
        held_out, names = self._evaluation.held_out, sorted(self._evaluation.metrics)
        count = held_out.num_microbatches
        held_out.clear()  # An evaluation before this one may have been broken off.
        sums = np.zeros((3 + len(names), count), dtype=np.float64)
        with torch.no_grad(), keep_generators(), _evaluate_layers(self._stage):
            for index in range(count):
                self._comm.check()
                route = self._routes[index % len(self._routes)]
                self._run_microbatch(route, age, index, sums[:, index], is_stopping)
            for rank in sorted(self._untaken):
                self._wait_taken(rank, at_most=0)
        self._comm.check()  # A receive that was aborted may have ended as if all were well.
        total = reduce_vector(
            self._links,
            sums.reshape(-1),
            ranks=self._plan.all_ranks,
            iteration=age,
            timeout_s=UNLIMITED_S,
            channel=Channel.EVALUATED,
        )
        losses, targets, *others, evaluated = total.reshape(sums.shape).tolist()
        num_targets = sum(targets) or math.nan
        seconds = time.monotonic() - begin_s
        if sum(evaluated) < count:
            self._evaluation.untold[age] = Evaluated(
                iteration=age, loss=None, num_samples=0, num_targets=0, seconds=seconds
            )
            return seconds
        result = Evaluated(
            iteration=age,
            loss=_finite(ordered_sum(losses) / num_targets),
            num_samples=held_out.num_samples,
            num_targets=int(sum(targets)),
            metrics={
                n: _finite(ordered_sum(row) / num_targets)
                for n, row in zip(names, others, strict=True)
            },
            seconds=seconds,
        )
        self._evaluation.untold[age] = result
        self._stage.note_held_out(result.loss, age=age)
        return seconds

    def _run_microbatch(
        self,
        route: Route,
        age: int,
        index: int,
        sums: np.ndarray,
        is_stopping: Callable[[], bool],
    ) -> None:
        """Runs this rank's hops of a microbatch; writes its sums, if it ends on this rank."""
        held_out, hidden = self._evaluation.held_out, None
        for number, hop in enumerate(route):
            if hop.rank != self._rank:
                hidden = None
                continue
            if number and hidden is None:
                tag = Tag(Channel.EVALUATE, age, index, number)
                hidden = self._comm.receive(route[number - 1].rank, tag)
            is_last = number == len(route) - 1
            if hidden is None and not self._evaluation.ends_training and is_stopping():
                hidden = _LEFT_OUT.to(self._stage.device.place)
            if hidden is None or hidden.dim() > 0:
                hidden = self._compute(hop, hidden, age, index, sums if is_last else None)
            if number and route[number - 1].rank != self._rank:
                taken = Tag(Channel.EVALUATE_TAKEN, age, index, number)
                self._links.send(route[number - 1].rank, taken, np.zeros(1, dtype=np.uint8))
            if not is_last and route[number + 1].rank != self._rank:
                self._send(route[number + 1].rank, age, index, number + 1, hidden)
        held_out.clear()

    def _compute(
        self, hop: Hop, hidden: Tensor | None, age: int, index: int, sums: np.ndarray | None
    ) -> Tensor:
        """The output of a hop for a microbatch.

        Args:
            hidden: its input; None: the samples of the microbatch.
            sums: column of the microbatch, written after its last hop; None: this is another hop.
        """
        with self._evaluation.name_samples(age, index):
            if hidden is None or sums is not None:
                self._limits.begin_reading()
                self._evaluation.held_out.keep(index)
        begin_s = time.monotonic()
        self._limits.begin(Workload(_EVALUATE, (hop.first_layer, hop.end_layer)))
        with self._evaluation.name_samples(age, index):
            if hidden is None:
                hidden = bring(self._evaluation.held_out.inputs(index), self._stage.device.bring)
            self._limits.see_input(hidden)
            hidden = self._stage.forward(
                hop.first_layer, hop.end_layer, hidden, iteration=age, microbatch=index
            )
            if sums is not None:
                self._write_sums(hidden, age, index, sums)
            else:
                self._stage.device.finish()
        self._context.pulse.become_idle()
        self._limits.note(time.monotonic() - begin_s)
        return hidden

    def _write_sums(self, output: Tensor, age: int, index: int, sums: np.ndarray) -> None:
        sums[:] = *self._evaluation.sums(output, self._stage, age=age, index=index), 1.0

    def _send(self, target: int, age: int, index: int, hop: int, hidden: Tensor) -> None:
        self._wait_taken(target, at_most=_IN_FLIGHT - 1)
        self._comm.send(target, Tag(Channel.EVALUATE, age, index, hop), hidden, virtual_bytes=0)
        tag = Tag(Channel.EVALUATE_TAKEN, age, index, hop)
        self._untaken.setdefault(target, []).append(tag)

    def _wait_taken(self, target: int, *, at_most: int) -> None:
        """Waits until a rank has computed all but `at_most` of what was sent to it."""
        untaken = self._untaken.get(target, [])
        while len(untaken) > at_most:
            self._links.receive(target, untaken.pop(0), timeout_s=UNLIMITED_S)
