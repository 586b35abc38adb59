"""How a node ends that saves what it holds by itself, because there is no head any more.

Its agent gathers what the workers report, tells the user, and ends the node with an exit status by
which `planaria agent` knows whether anything was saved.

Source: docs/protocol.md, "Nodes without a head".
"""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Sequence
from typing import Final

import psutil

from planaria.core.messages import PartSaved, WorkerFailed
from planaria.nodes.output import flush_own

logger = logging.getLogger(__name__)

STATUS_SAVED: Final = 3  # Exit status of a node's agent when its workers have saved something.
# Exit status of a node's agent that has left because its machine had a notice, to which the machine
# itself may not have come yet: both poll the source.
STATUS_NOTICED: Final = 4


class PartReports:
    """The reports of a node's workers on what they save by themselves.

    Args:
        ranks: ranks of the workers.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._newest = {rank: PartSaved(rank=rank) for rank in ranks}
        self._changed = asyncio.Event()

    def add(self, message: PartSaved | WorkerFailed) -> None:
        """Notes a report."""
        if isinstance(message, WorkerFailed):
            reason = message.raised.message if message.raised is not None else message.traceback
            message = PartSaved(rank=message.rank, is_done=True, reason=reason)
        self._newest[message.rank] = message
        self._changed.set()

    def add_exit(self, rank: int) -> None:
        """Notes that the process of a worker has ended."""
        if not self._newest[rank].is_done:
            self.add(PartSaved(rank=rank, is_done=True, reason="its process ended"))

    async def wait_done(self, *, silent_s_max: float) -> None:
        """Waits until all workers are done, or none has reported anything for so long."""
        with contextlib.suppress(TimeoutError):
            while not all(report.is_done for report in self._newest.values()):
                async with asyncio.timeout(silent_s_max):
                    await self._changed.wait()
                self._changed.clear()

    @property
    def has_saved(self) -> bool:
        """Whether a worker has saved what it held, or has left it to others that hold it."""
        return any(
            report.is_done and not report.reason and report.num_layers + report.num_others
            for report in self._newest.values()
        )

    def text(self, place: str) -> str:
        """Text that says what the workers have saved, and what they have not.

        Args:
            place: place of the saves.
        """
        done = [report for report in self._newest.values() if report.is_done and not report.reason]
        num_layers = sum(report.num_layers for report in done)
        num_others = sum(report.num_others for report in done)
        rest = (
            f"; {num_others} more layers that it holds are saved by other nodes"
            if num_others
            else ""
        )
        iteration = max((report.iteration for report in done), default=-1)
        reasons = {
            report.reason or "it did not answer in time"
            for report in self._newest.values()
            if report.reason or not report.is_done
        }
        texts = []
        if self.has_saved:
            texts.append(
                f"has saved {num_layers} layers of iteration {iteration} by itself in {place}"
                f"{rest}; go on with --resume"
            )
        if reasons:
            texts.append(f"could not save all that it holds: {', '.join(sorted(reasons))}")
        return "; ".join(texts) or "holds no layers, and has saved nothing"


def end_group_with(status: int) -> None:
    """Ends all processes of this one's group, then this one with an exit status."""
    flush_own()
    group = os.getpgid(0)
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if pid != os.getpid() and os.getpgid(pid) == group:
                os.kill(pid, signal.SIGKILL)
    os._exit(status)
