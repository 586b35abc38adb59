"""Writes the layers that a rank owns to the disk tier, off the training path.

The state is copied while training waits (milliseconds), then hashed and written by one thread.
The memory is bounded at one copy: a save that is due while the one before is still being written
waits for it a second at most, then it is not made, and that is told. Only the job's last one waits
as long as nobody calls it off.

The thread ends with the process, whatever it waits for: a disk or store may never answer.
"""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

from planaria.checkpoint.tiers import Tier
from planaria.core.messages import LayersSaved, Message, SaveFailed
from planaria.engine.stage import HeldLayer, State
from planaria.errors import CheckpointError

WAIT_S: Final = 1.0  # That a save may take without being in the way of the next.
_LOOK_S: Final = 0.02  # From one look for an order to the next.


class Saver:
    """Saves layers of one rank; says over `send` what came of it.

    Args:
        may_write: whether the node still belongs to the job; asked before anything is written. It
            may wait for a lease that is given again.
        is_called_off: whether an order waits that ends what this rank does, so that nobody waits
            for a save any more.
    """

    def __init__(
        self,
        tier: Tier,
        *,
        rank: int,
        send: Callable[[Message], None],
        may_write: Callable[[], bool],
        is_called_off: Callable[[], bool],
    ) -> None:
        self._tier = tier
        self._rank = rank
        self._send = send
        self._may_write = may_write
        self._is_called_off = is_called_off
        self._is_written = threading.Event()
        self._is_written.set()
        self._error: Exception | None = None
        self._iteration, self._begin_s = -1, 0.0

    def save(self, layers: Mapping[int, HeldLayer], *, iteration: int, epoch: int) -> float:
        """Starts to save layers of age `iteration`, if there are any and the save before is not in
        the way; returns the seconds that training waited."""
        if not layers:  # There is nothing to write, so nothing to tell.
            return 0.0
        start_s = time.monotonic()
        if self.wait_written(timeout_s=self._begin_s + WAIT_S - start_s):
            self._begin(layers, iteration, epoch)
        else:
            reason = (
                f"rank {self._rank} was still writing that of iteration {self._iteration}, "
                f"for {time.monotonic() - self._begin_s:.1f} s"
            )
            self._failed(iteration, epoch, reason, is_skipped=True)
        return time.monotonic() - start_s

    def save_last(self, layers: Mapping[int, HeldLayer], *, iteration: int, epoch: int) -> None:
        """Saves layers of age `iteration`, once what is being written is; blocks until that is
        done, or called off."""
        if layers and self.wait_written():
            self._begin(layers, iteration, epoch)
            self.wait_written()

    def wait_written(self, *, timeout_s: float = float("inf")) -> bool:
        """Blocks until the save that is being written, if any, is done; False if it is called off,
        or takes too long."""
        deadline_s = time.monotonic() + timeout_s
        while not self._is_written.wait(max(0.0, min(_LOOK_S, deadline_s - time.monotonic()))):
            if self._is_called_off() or time.monotonic() >= deadline_s:
                return False
        error, self._error = self._error, None
        if error is not None:
            raise error
        return True

    def _begin(self, layers: Mapping[int, HeldLayer], iteration: int, epoch: int) -> None:
        states = {layer: held.state() for layer, held in layers.items()}
        self._iteration, self._begin_s = iteration, time.monotonic()
        self._is_written.clear()
        threading.Thread(
            target=self._write, args=(states, iteration, epoch), name="save", daemon=True
        ).start()

    def _write(self, states: Mapping[int, State], iteration: int, epoch: int) -> None:
        try:
            self._write_layers(states, iteration, epoch)
        except CheckpointError as error:
            self._failed(iteration, epoch, str(error), is_skipped=False)
        except Exception as error:  # Ours, and raised where somebody hears of it.
            self._error = error
        finally:
            self._is_written.set()

    def _write_layers(self, states: Mapping[int, State], iteration: int, epoch: int) -> None:
        """Tells after each layer what is written so far: whoever waits sees that it gets on."""
        files = []
        for layer, state in states.items():
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
