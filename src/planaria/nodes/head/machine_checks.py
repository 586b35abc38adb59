"""What a head compares of the machines of its job, before any of them gets a node.

The files that the job reads must be the same everywhere: those of the head count, or those of the
first machine where the head has none. And all machines must save to the same place.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from planaria.core.job import JobConfig
from planaria.core.machine_messages import MachineReady
from planaria.errors import ConfigError
from planaria.nodes.daemon_threads import answer_of_thread
from planaria.nodes.input_files import PROSE_KEY, input_digest, input_paths
from planaria.nodes.shared_saves import check_answer

logger = logging.getLogger(__name__)


class MachineChecks:
    """The checks of one job.

    Args:
        mark: mark of the head at the place where the job saves.
        cache_directory: directory in which digests are kept between jobs.
        note: shows the user a text.

    Attributes:
        mark: mark of the head.
    """

    def __init__(
        self, job: JobConfig, mark: str, *, cache_directory: str, note: Callable[[str], None]
    ) -> None:
        self.mark = mark
        self._job = job
        self._cache = Path(cache_directory)
        self._note = note
        self._reading: asyncio.Task[None] | None = None
        # The machine that gave the digest that counts, and that digest, by key.
        self._digests: dict[str, tuple[str, str]] = {}

    async def problem(self, machine: str, ready: MachineReady) -> str:
        """Why a machine cannot take part, and what to do; "": it can."""
        check = partial(check_answer, self._job.checkpoint.directory, self.mark, ready.answer)
        try:
            await answer_of_thread(check, name="check of saves")
        except ConfigError as error:
            return str(error)
        if self._reading is None:
            self._reading = asyncio.create_task(self._read_own())
        await asyncio.shield(self._reading)
        for key, digest in ready.digests.items():
            other, expected = self._digests.setdefault(key, (machine, digest))
            if digest != expected:
                return self._difference(key, (machine, digest), (other, expected))
        return ""

    async def _read_own(self) -> None:
        """Finds out the digests of the head's own files, as far as it has any.

        The head reads no data, so its Python may be another one.
        """
        for key in input_paths(self._job):
            read = partial(
                input_digest, self._job, key, cache_directory=self._cache, note=self._note
            )
            try:
                digest = await answer_of_thread(read, name="digest")
            except ConfigError as error:
                logger.info("the first machine's files count: %s", error)
            else:
                self._digests[key] = ("the head", digest)

    def _difference(self, key: str, here: tuple[str, str], there: tuple[str, str]) -> str:
        (machine, digest), (other, expected) = here, there
        digests = f"({digest!r} on {machine}, {expected!r} on {other})"
        if key == PROSE_KEY:
            return (
                f"its Python differs from that of {other} {digests}, and data.path is empty, so "
                "the data is the text of Python's own library; install the same Python, or name a "
                "file in data.path"
            )
        return (
            f"{key} = {str(input_paths(self._job)[key])!r}: the files there differ from those of "
            f"{other} {digests}; copy the same files to all machines, or mount a file system there "
            "that they share"
        )
