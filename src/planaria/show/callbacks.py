"""Functions of the user's that are called while a job trains.

They are called in a thread of their own, one after the other, in the process that leads the job: a
slow one, such as one that sends numbers over a network, delays no iteration and no recovery.
"""

import logging
import os
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from planaria.core.job import JobConfig
from planaria.errors import ConfigError
from planaria.observe.metrics import EvaluationRecord, EventRecord, IterationRecord
from planaria.user_functions import user_function

_LEAVE_S: Final = 5.0
_END_S: Final = 60.0
_MANY_CALLS: Final = 1000  # A user is told once that so many wait.

logger = logging.getLogger(__name__)


class Callbacks:
    """Functions that are called while a job trains; a subclass overrides those that it needs.

    A function that returns True stops training at the next commit; the job is saved. If one raises,
    the job saves and ends with that exception. All are called in one thread.
    """

    def on_commit(self, record: IterationRecord) -> bool | None:
        """Is called after each iteration; again for one that is done again after a loss."""

    def on_event(self, event: EventRecord) -> bool | None:
        """Is called after a loss, a join or another event, once it is over."""

    def on_evaluation(self, record: EvaluationRecord) -> bool | None:
        """Is called after each evaluation on held-out data."""

    def on_save(self, iteration: int) -> bool | None:
        """Is called once parameters of this number of iterations are complete on disk."""

    def on_end(self) -> None:
        """Is called when the job has ended, in whatever way."""


class CallbackThread:
    """Calls the functions of all callbacks of a job, in the order of what happened."""

    def __init__(self, callbacks: Sequence[Callbacks]) -> None:
        self._callbacks = tuple(callbacks)
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._is_closing = self._is_late = self._has_raised = self._has_left = False
        self._has_trained = False
        self._stopping = ""
        self._thread = threading.Thread(target=self._run, name="callbacks", daemon=True)
        if callbacks:
            self._thread.start()

    @property
    def stop_reason(self) -> str:
        """The reason for which a callback stops training; "": none does."""
        return self._stopping

    def post(self, name: str, *arguments: object) -> None:
        """Has the function of this name called; nothing after the end of the context.

        Raises:
            Exception: a callback has raised it before, while the job trained.
        """
        if self._has_left:
            return
        if not self._has_trained:
            self._raise_error()
        for callbacks in self._callbacks:
            self._calls.put(partial(self._call, callbacks, name, arguments))
        if not self._is_late and self._calls.qsize() > _MANY_CALLS:
            self._is_late = True
            logger.warning("callbacks are slower than training: %s calls wait", _MANY_CALLS)

    def note_commit(self, *, ends: bool) -> None:
        """Notes whether training ends with a commit; what a callback raises after that is only told
        in the end.

        Raises:
            Exception: a callback has raised it before.
        """
        self._raise_error()
        self._has_trained = ends

    def _raise_error(self) -> None:
        if self._error is not None:
            self._has_raised = True
            raise self._error

    def __enter__(self) -> "CallbackThread":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Calls `on_end` of all callbacks, and waits until all calls have been made.

        It waits for a minute, and after an exception for some seconds: what has been trained is
        saved, and no callback may keep its report.
        """
        self._has_left = True
        is_told = kind is not None or self._has_raised
        if not self._callbacks:
            return
        for callbacks in self._callbacks:
            self._calls.put(callbacks.on_end)
        self._calls.put(self._end)
        self._thread.join(_LEAVE_S if is_told else _END_S)
        if self._thread.is_alive():
            logger.warning("callbacks are not done; %s calls are left out", self._calls.qsize())
        if self._error is not None and not is_told:
            logger.warning("a callback raised %r", self._error, exc_info=self._error)

    def _run(self) -> None:
        while not self._is_closing:
            call = self._calls.get()
            try:
                call()
            except Exception as error:
                self._error = self._error or error
            except BaseException as error:  # Such as SystemExit, which would end this thread alone.
                self._error = self._error or RuntimeError(f"a callback raised {error!r}")

    def _call(self, callbacks: Callbacks, name: str, arguments: tuple[object, ...]) -> None:
        if self._error is None and getattr(callbacks, name)(*arguments):
            self._stopping = f"{name} of {type(callbacks).__name__} returned True"

    def _end(self) -> None:
        self._is_closing = True


def callbacks_of(config: JobConfig, *, search_path: Sequence[str]) -> list[Callbacks]:
    """The callbacks that a job's keys ask for.

    Args:
        search_path: directories in which modules that the job names are looked for first.

    Raises:
        ConfigError: one cannot be found, or is something else.
    """
    with suppress(FileNotFoundError):  # The current directory may have been removed.
        search_path = [*search_path, os.getcwd()]
    if config.training.callbacks:
        sys.path[:0] = [path for path in search_path if path not in sys.path]
    instances: list[Callbacks] = []
    for target in config.training.callbacks:
        callbacks = user_function(target, field="training.callbacks")()
        if not isinstance(callbacks, Callbacks):
            name = type(callbacks).__name__
            remedy = f"it returned an object of type {name}; return a planaria.Callbacks"
            raise ConfigError("training.callbacks", target, remedy)
        instances.append(callbacks)
    return instances
