"""How a modelled rank writes its layers to disk: beside training, one save at a time.

Source: engine/saver.py, whose order of things it keeps.
"""

from collections.abc import Callable, Mapping
from typing import Final

from planaria.core.messages import Fact, LayerFile, LayersSaved, SaveFailed
from planaria.simulator.loop import Process, Waiting

_WRITE_S: Final = 0.02  # A layer to disk.


class SimulatedSaver:
    """The saves of one rank.

    Args:
        write: what a layer's files are, by iteration and epoch.
        say: takes what the coordinator is to hear.
        may_write: whether its node is a member, as far as it knows.
    """

    def __init__(
        self,
        process: Process,
        rank: int,
        *,
        write: Callable[[int, int, dict[int, int]], None],
        say: Callable[[Fact], None],
        may_write: Callable[[], bool],
    ) -> None:
        self._process = process
        self._rank = rank
        self._write = write
        self._say = say
        self._may_write = may_write
        self._writing: Waiting[None] | None = None

    async def save(self, contents: Mapping[int, int], age: int, epoch: int) -> None:
        """Begins a save, once the one before is written."""
        await self.wait_written()
        self._writing = Waiting()
        self._process.spawn(self._write_out(dict(contents), age, epoch, self._writing))

    async def wait_written(self) -> None:
        """Waits for what is being written."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            await writing

    def failed(self, age: int, epoch: int, reason: str) -> None:
        """A save cannot be made."""
        self._say(SaveFailed(rank=self._rank, epoch=epoch, iteration=age, reason=reason))

    async def _write_out(
        self, contents: dict[int, int], age: int, epoch: int, written: Waiting[None]
    ) -> None:
        await self._process.sleep(_WRITE_S * len(contents))
        if self._may_write():
            self._write(age, epoch, contents)
            files = tuple(LayerFile(n, f"{n}", 1, f"{content}") for n, content in contents.items())
            self._say(LayersSaved(rank=self._rank, epoch=epoch, iteration=age, files=files))
        else:
            self.failed(age, epoch, "its node's lease has run out")
        written.resolve(None)
