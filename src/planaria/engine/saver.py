"""Writes the layers that a rank owns to the disk tier, off the training path.

The state is copied while training waits (milliseconds), then hashed and written by one thread.
A save that is still being written when the next one starts is waited for: it bounds the memory
at one copy.
"""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from planaria.checkpoint.tiers import Tier
from planaria.core.messages import LayersSaved, Message, SaveFailed
from planaria.engine.stage import HeldLayer, State
from planaria.errors import CheckpointError

SAVE_TIMEOUT_S = 3600.0


class Saver:
    """Saves layers of one rank; says over `send` what came of it.

    Args:
        may_write: whether the node still belongs to the job; asked before anything is written. It
            may wait for a lease that is given again.
    """

    def __init__(
        self,
        tier: Tier,
        *,
        rank: int,
        send: Callable[[Message], None],
        may_write: Callable[[], bool],
    ) -> None:
        self._tier = tier
        self._rank = rank
        self._send = send
        self._may_write = may_write
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="save")
        self._writing: Future[None] | None = None

    def save(self, layers: Mapping[int, HeldLayer], *, iteration: int, epoch: int) -> float:
        """Starts to save layers of age `iteration`, if there are any; returns the seconds that
        training waited."""
        if not layers:  # There is nothing to write, so nothing to tell.
            return 0.0
        start_s = time.monotonic()
        self.wait_written()
        states = {layer: held.state() for layer, held in layers.items()}
        self._writing = self._thread.submit(self._write, states, iteration, epoch)
        return time.monotonic() - start_s

    def wait_written(self) -> None:
        """Blocks until the save that is being written, if any, is done."""
        if self._writing is not None:
            self._writing.result(timeout=SAVE_TIMEOUT_S)

    def _write(self, states: Mapping[int, State], iteration: int, epoch: int) -> None:
        try:
            files = tuple(
                self._tier.write_layer(iteration, epoch, layer, state, may_write=self._may_write)
                for layer, state in states.items()
            )
        except CheckpointError as error:
            self._send(
                SaveFailed(rank=self._rank, epoch=epoch, iteration=iteration, reason=str(error))
            )
            return
        self._send(LayersSaved(rank=self._rank, epoch=epoch, iteration=iteration, files=files))
