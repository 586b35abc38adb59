"""Curves of a job in TensorBoard and in Weights & Biases.

Both get the same numbers, at the iteration to which they belong: loss, samples per second, peak
memory, loss and metrics of held-out data, the seconds that events cost, and saves.
"""

import importlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from planaria.core.job import JobConfig
from planaria.errors import ConfigError
from planaria.observe.metrics import EvaluationRecord, EventRecord, IterationRecord
from planaria.show.callbacks import Callbacks

logger = logging.getLogger(__name__)


class _Tracker(Callbacks, ABC):
    """Callbacks that record numbers by name and iteration.

    A full disk or a network that is gone costs the rest of the curves, and nothing of training.
    """

    def __init__(self) -> None:
        self._is_broken = False

    @abstractmethod
    def write(self, numbers: Mapping[str, float], iteration: int) -> None:
        """Records numbers that belong to an iteration."""

    @abstractmethod
    def end(self) -> None:
        """Ends the record."""

    def record(self, numbers: Mapping[str, float], iteration: int) -> None:
        """Records numbers that belong to an iteration, unless that has failed before."""
        self._try(lambda: self.write(numbers, iteration))

    def on_end(self) -> None:
        self._try(self.end)

    def _try(self, call: Callable[[], None]) -> None:
        if self._is_broken:
            return
        try:
            call()
        except Exception as error:
            self._is_broken = True
            logger.warning("%s records nothing more: %r", type(self).__name__, error)

    def on_commit(self, record: IterationRecord) -> None:
        rate = record.samples / record.seconds if record.seconds else 0.0
        numbers = {"train/loss": record.loss, "train/samples_per_second": rate}
        self.record(numbers | {"train/peak_bytes": float(record.peak_bytes)}, record.iteration + 1)

    def on_evaluation(self, record: EvaluationRecord) -> None:
        metrics = {f"held_out/{name}": value for name, value in record.metrics.items()}
        self.record({"held_out/loss": record.loss, **metrics}, record.iteration)

    def on_event(self, event: EventRecord) -> None:
        numbers = {f"events/{event.kind}_downtime_s": event.downtime_s or 0.0}
        self.record(numbers, max(0, event.iteration))

    def on_save(self, iteration: int) -> None:
        self.record({"checkpoint/saved": float(iteration)}, iteration)


class TensorBoard(_Tracker):
    """Writes the curves of a job for TensorBoard; needs the package tensorboard.

    Args:
        directory: directory that TensorBoard is to show.

    Raises:
        ConfigError: the package is not installed, or the directory cannot be written to.
    """

    def __init__(self, directory: str) -> None:
        super().__init__()
        with _refuse("--tensorboard", directory, package="tensorboard"):
            module = importlib.import_module("tensorboard.summary")
            self._writer: Any = module.Writer(directory)

    def write(self, numbers: Mapping[str, float], iteration: int) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, iteration)
        self._writer.flush()

    def end(self) -> None:
        self._writer.close()


class WandB(_Tracker):
    """Sends the curves of a job to Weights & Biases; needs the package wandb.

    A run begins there with the first numbers, so that a job that is refused leaves no empty one.

    Args:
        project: name of the project.
        job: job whose keys are shown beside the curves.
        arguments: further arguments of `wandb.init`.

    Raises:
        ConfigError: the package is not installed, or its user is not logged in.
    """

    def __init__(self, project: str, job: JobConfig | None = None, **arguments: Any) -> None:
        super().__init__()
        with _refuse("--wandb", project, package="wandb"):
            self._module: Any = importlib.import_module("wandb")
            if "mode" not in arguments:  # Such as "offline", where nobody need be logged in.
                self._module.login()
        config = {} if job is None else asdict(job)
        name = None if job is None else job.name
        self._arguments = {"project": project, "name": name, "config": config} | arguments
        self._run: Any = None

    def write(self, numbers: Mapping[str, float], iteration: int) -> None:
        if self._run is None:
            self._run = self._module.init(**self._arguments)
            # Else curves would be drawn over the number of calls.
            self._run.define_metric("iteration")
            self._run.define_metric("*", step_metric="iteration")
        # Iterations that are done again go back, so that a step of wandb's own would be refused.
        self._run.log({**numbers, "iteration": iteration})

    def end(self) -> None:
        if self._run is not None:
            self._run.finish()


@contextmanager
def _refuse(option: str, value: str, *, package: str) -> Iterator[None]:
    """Turns what a package raises into a mistake of its option."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(option, value, f"it needs a package: pip install {package}") from error
    except Exception as error:
        text = " ".join(str(error).split()) or repr(error)
        raise ConfigError(option, value, f"cannot begin: {text}") from error
