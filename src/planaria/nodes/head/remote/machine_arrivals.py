"""Waits for the machines of a job: until they have come, and until they can run nodes.

A machine that has come reads the files of the job first, to have them compared with those of the
others. That may take hours, and if the head ends meanwhile, the next one has it done anew. So the
time for which a head waits for machines runs only while too few are there.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Final

from planaria.errors import InsufficientError
from planaria.nodes.head.remote.machine_handle import MachineHandle

_NOTE_S: Final = 60.0  # Pause between looks at who is not ready.


class MachineArrivals:
    """Waits for the machines of one job.

    Args:
        machines: all machines, in the order of their arrival; changes during the job.
        note: shows the user a text.

    Attributes:
        is_waiting: whether the job waits for machines, so that nothing that they do disturbs it.
        unfit_reason: why the machine that was refused last cannot take part; "": none was.
    """

    def __init__(self, machines: Mapping[str, MachineHandle], note: Callable[[str], None]) -> None:
        self.is_waiting = False
        self.unfit_reason = ""
        self._machines, self._note = machines, note
        self._changed = asyncio.Condition()

    async def tell_change(self) -> None:
        """Has those that wait look again."""
        async with self._changed:
            self._changed.notify_all()

    async def wait_for(self, condition: Callable[[], bool], *, timeout_s: float) -> bool:
        """Waits until a condition holds; returns whether it does."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(condition)
        return condition()

    async def wait_ready(self, num_machines: int, *, timeout_s: float) -> None:
        """Waits until so many machines can run nodes.

        Args:
            timeout_s: seconds in which fewer than that may be there, whether they are ready or not.

        Raises:
            InsufficientError: fewer have come in time.
        """
        loop, left_s = asyncio.get_running_loop(), timeout_s
        self.is_waiting = True
        try:
            while self._num_ready < num_machines:
                start_s = loop.time()
                if not await self.wait_for(
                    lambda: self._num_here >= num_machines, timeout_s=left_s
                ):
                    raise InsufficientError(self._shortage(num_machines, timeout_s))
                left_s -= loop.time() - start_s
                await self._wait_unready(num_machines)
        finally:
            self.is_waiting = False

    async def _wait_unready(self, num_machines: int) -> None:
        """Waits until so many machines are ready, or fewer are there."""

        def is_over() -> bool:
            return self._num_ready >= num_machines or self._num_here < num_machines

        shown = ""
        while not await self.wait_for(is_over, timeout_s=_NOTE_S):
            text = f"{self._num_here} of {num_machines} machines have come{self._unready_text}"
            if text != shown:
                self._note(text)
            shown = text

    def _shortage(self, num_machines: int, timeout_s: float) -> str:
        remedy = "start planaria agent --join on each, or name fewer with --nodes"
        return (
            f"{self._num_here} of {num_machines} machines have come in {timeout_s:.0f} s"
            f"{self._unready_text}; nothing was trained; {self.unfit_reason or remedy}"
        )

    @property
    def _unready_text(self) -> str:
        if not (num_unready := self._num_here - self._num_ready):
            return ""
        return f", of which {num_unready} are not ready yet (each reads the job's files first)"

    @property
    def _num_ready(self) -> int:
        return sum(machine.is_free for machine in self._machines.values())

    @property
    def _num_here(self) -> int:
        """The number of machines that can run nodes now, or once they are ready."""
        return sum(machine.may_be_free for machine in self._machines.values())
