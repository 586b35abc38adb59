"""Writes the layers that a rank owns to the disk tier, off the training path.

The state is copied while training waits (milliseconds), then hashed and written by one thread.
The memory is bounded at one copy: a save that is due while the one before is still being written
waits for it a second at most, then it is not made, and that is told. Only the job's last one waits
as long as its epoch lasts. What is left of a save when its epoch is over is not written.

The thread ends with the process, whatever it waits for: a disk or store may never answer.
"""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

from planaria.checkpoint.disk.tiers import Tier
from planaria.core.messages import LayersSaved, Message, SaveFailed
from planaria.engine.blame import is_of_memory
from planaria.engine.stage import HeldLayer, State
from planaria.errors import CheckpointError

WAIT_S: Final = 1.0  # That a save may take without being in the way of the next.
_LOOK_S: Final = 0.02  # From one look whether the epoch is over to the next.


class Saver:
    """Saves layers of one rank; says over `send` what came of it.

    Args:
        may_write: whether the node still belongs to the job; asked before anything is written. It
            may wait for a lease that is given again.
        is_over: whether nobody wants any more what is saved in an epoch.
    """

    def __init__(
        self,
        tier: Tier,
        *,
        rank: int,
        send: Callable[[Message], None],
        may_write: Callable[[], bool],
        is_over: Callable[[int], bool],
    ) -> None:
        self._tier = tier
        self._rank = rank
        self._send = send
        self._may_write = may_write
        self._is_over = is_over
        self._is_written = threading.Event()
        self._is_written.set()
        self._error: Exception | None = None
        self._iteration, self._begin_s = -1, 0.0

    @property
    def is_writing(self) -> bool:
        """Whether another save could not begin now."""
        return not self._is_written.is_set()

    def save(self, layers: Mapping[int, HeldLayer], *, iteration: int, epoch: int) -> bool:
        """Starts to save layers of age `iteration`, if there are any; False if the save before is
        in the way."""
        if not layers:  # There is nothing to write, so nothing to tell.
            return True
        if self.wait_written(epoch, timeout_s=self._begin_s + WAIT_S - time.monotonic()):
            self._attempt(layers, iteration, epoch)
            return True
        reason = (
            f"rank {self._rank} was still writing that of iteration {self._iteration}, "
            f"for {time.monotonic() - self._begin_s:.1f} s"
        )
        self._failed(iteration, epoch, reason, is_skipped=True)
        return False

    def save_last(self, layers: Mapping[int, HeldLayer], *, iteration: int, epoch: int) -> None:
        """Saves layers of age `iteration`, once what is being written is; blocks until that is
        done, or the epoch is over.

        What it has no memory for it raises: holders of the same layers may have some.
        """
        if layers and self.wait_written(epoch):
            self._begin(layers, iteration, epoch, is_told=_is_refusal)
            self.wait_written(epoch)

    def leave(self, *, timeout_s: float) -> None:
        """Gives a save that is being written time to end; what comes of it counts no more."""
        self._is_written.wait(timeout_s)

    def wait_written(self, epoch: int, *, timeout_s: float = float("inf")) -> bool:
        """Blocks until the save that is being written, if any, is done; False if that takes too
        long, or the epoch in which it is waited for is over."""
        deadline_s = time.monotonic() + timeout_s
        while not self._is_written.wait(max(0.0, min(_LOOK_S, deadline_s - time.monotonic()))):
            if self._is_over(epoch) or time.monotonic() >= deadline_s:
                return False
        error, self._error = self._error, None
        if error is not None:
            raise error
        return True

    def _attempt(self, layers: Mapping[int, HeldLayer], iteration: int, epoch: int) -> None:
        """Begins a save without which training goes on."""
        try:
            self._begin(layers, iteration, epoch, is_told=_is_refusal_or_of_memory)
        except Exception as error:
            if not is_of_memory(error):
                raise
            self._failed(iteration, epoch, self._text(error), is_skipped=False)

    def _begin(
        self,
        layers: Mapping[int, HeldLayer],
        iteration: int,
        epoch: int,
        *,
        is_told: Callable[[Exception], bool],
    ) -> None:
        """Copies the layers and starts to write them.

        Args:
            is_told: whether what writing raises is a failure of the save; all else is raised by
                who waits for it.
        """
        states = {layer: held.state() for layer, held in layers.items()}

        def write() -> None:
            try:
                self._write_layers(states, iteration, epoch)
            except Exception as error:
                if is_told(error):
                    self._failed(iteration, epoch, self._text(error), is_skipped=False)
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
            raise MemoryError(str(error)) from error  # For a thread, or for one more of them.

    def _text(self, error: Exception) -> str:
        """What is told of a save that failed."""
        if _is_refusal(error):
            return str(error)
        return f"rank {self._rank} has no memory for a copy of what it saves: {error!r}"

    def _write_layers(self, states: Mapping[int, State], iteration: int, epoch: int) -> None:
        """Tells after each layer what is written so far: whoever waits sees that it gets on."""
        files = []
        for layer, state in states.items():
            if self._is_over(epoch):  # Another save may wait for its turn.
                return
            file = self._tier.write_layer(iteration, epoch, layer, state, may_write=self._may_write)
            files.append(file)
            self._send(
                LayersSaved(rank=self._rank, epoch=epoch, iteration=iteration, files=tuple(files))
            )

    def _failed(self, iteration: int, epoch: int, reason: str, *, is_skipped: bool) -> None:
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
