"""Writes the layers that a rank owns to the disk tier, off the training path.

The state is copied while training waits (milliseconds), then hashed and written by one thread. At
most one copy is in memory: if a save is due while the one before is still being written, it waits
until that one has taken `WAIT_S`; after that it is skipped, and the coordinator is told. Only the
job's last save waits as long as its epoch lasts, and tries again what the disk or store refuses for
a while, for no other save follows. When the epoch is over, the rest of a save is not written.

The thread is a daemon, so that it ends with the process: a disk or store may never answer.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from planaria.checkpoint.disk.storage import may_pass
from planaria.checkpoint.disk.tiers import Tier
from planaria.core.messages import LayerFile, LayersSaved, Message, SaveFailed
from planaria.engine.blame import is_of_memory
from planaria.engine.stage import HeldLayer
from planaria.engine.staging import State
from planaria.errors import CheckpointError

logger = logging.getLogger(__name__)

WAIT_S: Final = 1.0  # If a save takes longer, a save that is due meanwhile is skipped.
_PAUSE_S: Final = 2.0  # Pause before each other try of the last save.
# So it is told why before the coordinator, which waits for the last save, gives it up.
_PATIENCE_SHARE: Final = 0.9
_LOOK_S: Final = 0.02  # Interval at which waiting looks whether the epoch is over.


class Saver:
    """Saves layers of one rank and reports the outcome over `send`.

    Args:
        may_write: tells whether the node still belongs to the job; called before each write. It
            may block until the node's lease is renewed.
        is_over: tells whether saves of an epoch are of no use any more.
        timeout_s: longest time that the job waits for a last save of which nothing is written.
    """

    def __init__(
        self,
        tier: Tier,
        *,
        rank: int,
        send: Callable[[Message], None],
        may_write: Callable[[], bool],
        is_over: Callable[[int], bool],
        timeout_s: float,
    ) -> None:
        self._tier = tier
        self._rank = rank
        self._send = send
        self._may_write = may_write
        self._is_over = is_over
        self._patience_s = _PATIENCE_SHARE * timeout_s
        self._is_written = threading.Event()
        self._is_written.set()
        self._error: Exception | None = None
        self._iteration, self._begin_s = -1, 0.0
        self._last = -1, -1  # Iteration and epoch of the job's last save.

    @property
    def is_writing(self) -> bool:
        """Whether a save is being written, so that another one could not begin now."""
        return not self._is_written.is_set()

    def save(self, layers: Mapping[int, HeldLayer], *, iteration: int, epoch: int) -> bool:
        """Starts to save layers of age `iteration`; False if it is skipped for the one before."""
        if not layers:  # There is nothing to write, so nothing to report.
            return True
        if self.wait_written(epoch, timeout_s=self._begin_s + WAIT_S - time.monotonic()):
            self._attempt(layers, iteration, epoch)
            return True
        reason = (
            f"rank {self._rank} was still writing the save of iteration {self._iteration}, "
            f"which it began {time.monotonic() - self._begin_s:.1f} s before"
        )
        self._report_failure(iteration, epoch, reason, is_skipped=True)
        return False

    def begin_last(self, layers: Mapping[int, HeldLayer], *, iteration: int, epoch: int) -> None:
        """Begins what `save_last` waits for, unless another save takes long; then that begins it.

        Nothing may change the layers until `save_last` has returned or the epoch is over.
        """
        timeout_s = self._begin_s + WAIT_S - time.monotonic()
        if layers and self.wait_written(epoch, timeout_s=timeout_s):
            self._begin_last(layers, iteration, epoch)

    def save_last(self, layers: Mapping[int, HeldLayer], *, iteration: int, epoch: int) -> None:
        """Saves layers of age `iteration` after the save in progress, if any.

        Blocks until the layers are written or the epoch is over. Then the layers may change, so a
        layer that is being written by then is not reported. Lack of memory is raised, not
        reported as a failed save: other holders of the layers may have the memory.
        """
        if not layers or not self.wait_written(epoch) or self._last == (iteration, epoch):
            return
        self._begin_last(layers, iteration, epoch)
        self.wait_written(epoch)

    def _begin_last(self, layers: Mapping[int, HeldLayer], iteration: int, epoch: int) -> None:
        # Nothing changes the layers meanwhile, so they need no copy.
        states = {layer: held.state_views() for layer, held in layers.items()}
        self._begin(
            states,
            iteration,
            epoch,
            is_reported=_is_refusal,
            is_unchanged=lambda: not self._is_over(epoch),
            patience_s=self._patience_s,
        )
        self._last = iteration, epoch

    def leave(self, *, timeout_s: float) -> None:
        """Waits up to `timeout_s` for the save in progress; ignores its outcome."""
        self._is_written.wait(timeout_s)

    def wait_written(self, epoch: int, *, timeout_s: float = float("inf")) -> bool:
        """Blocks until no save is being written; False if the time or the epoch ends before that.

        Raises what the save raised, if that was not reported as a failed save.

        Args:
            epoch: the epoch of the caller.
        """
        deadline_s = time.monotonic() + timeout_s
        while not self._is_written.wait(max(0.0, min(_LOOK_S, deadline_s - time.monotonic()))):
            if self._is_over(epoch) or time.monotonic() >= deadline_s:
                return False
        error, self._error = self._error, None
        if error is not None:
            raise error
        return True

    def _attempt(self, layers: Mapping[int, HeldLayer], iteration: int, epoch: int) -> None:
        """Begins a save; if there is no memory for it, reports that and lets training go on."""
        try:
            states = {layer: held.state() for layer, held in layers.items()}
            self._begin(
                states,
                iteration,
                epoch,
                is_reported=_is_refusal_or_of_memory,
                is_unchanged=lambda: True,
                patience_s=0.0,
            )
        except Exception as error:
            if not is_of_memory(error):
                raise
            self._report_failure(iteration, epoch, self._text(error), is_skipped=False)

    def _begin(
        self,
        states: Mapping[int, State],
        iteration: int,
        epoch: int,
        *,
        is_reported: Callable[[Exception], bool],
        is_unchanged: Callable[[], bool],
        patience_s: float,
    ) -> None:
        """Starts to write the states of layers.

        Args:
            is_reported: tells whether an error of writing is reported as a failed save;
                `wait_written` raises any other error.
            is_unchanged: tells whether nothing can have changed the states until now.
            patience_s: time for which a layer that is refused is tried again.
        """

        def write() -> None:
            try:
                self._write_layers(states, iteration, epoch, is_unchanged, patience_s)
            except Exception as error:
                if is_reported(error):
                    self._report_failure(iteration, epoch, self._text(error), is_skipped=False)
                else:
                    self._error = error
            finally:
                self._is_written.set()

        self._iteration, self._begin_s = iteration, time.monotonic()
        self._is_written.clear()
        try:
            threading.Thread(target=write, name="save", daemon=True).start()
        except RuntimeError as error:
            self._is_written.set()
            raise MemoryError(str(error)) from error  # Python could not start a thread.

    def _text(self, error: Exception) -> str:
        """The reason to report for a save that failed."""
        if _is_refusal(error):
            return str(error)
        return f"rank {self._rank} has no memory for a copy of what it saves: {error!r}"

    def _write_layers(
        self,
        states: Mapping[int, State],
        iteration: int,
        epoch: int,
        is_unchanged: Callable[[], bool],
        patience_s: float,
    ) -> None:
        """Writes the layers; after each one, reports all files so far, to show the progress."""
        files = []
        for layer, state in states.items():
            tier, may_write = self._tier, self._may_write
            write = partial(tier.write_layer, iteration, epoch, layer, state, may_write=may_write)
            file = self._written_file(write, epoch, patience_s)
            if file is None or not is_unchanged():  # The file may have bytes of two ages.
                return
            files.append(file)
            self._send(
                LayersSaved(rank=self._rank, epoch=epoch, iteration=iteration, files=tuple(files))
            )

    def _written_file(
        self, write: Callable[[], LayerFile], epoch: int, patience_s: float
    ) -> LayerFile | None:
        """The file of a layer; None if the epoch is over before it is written.

        Another save may wait for its turn then. A refusal that may pass is tried again.
        """
        end_s, is_told = time.monotonic() + patience_s, False
        while not self._is_over(epoch):
            try:
                return write()
            except CheckpointError as error:
                if not may_pass(error) or time.monotonic() + _PAUSE_S >= end_s:
                    raise
                if not is_told:
                    logger.warning("rank %s tries again: %s", self._rank, error)
                is_told = True
            self._wait(epoch, _PAUSE_S)
        return None

    def _wait(self, epoch: int, timeout_s: float) -> None:
        """Waits until the time or the epoch is over."""
        end_s = time.monotonic() + timeout_s
        while time.monotonic() < end_s and not self._is_over(epoch):
            time.sleep(_LOOK_S)

    def _report_failure(self, iteration: int, epoch: int, reason: str, *, is_skipped: bool) -> None:
        self._send(
            SaveFailed(
                rank=self._rank,
                epoch=epoch,
                iteration=iteration,
                reason=reason,
                is_skipped=is_skipped,
            )
        )


def _is_refusal(error: Exception) -> bool:
    return isinstance(error, CheckpointError)


def _is_refusal_or_of_memory(error: Exception) -> bool:
    return _is_refusal(error) or is_of_memory(error)
