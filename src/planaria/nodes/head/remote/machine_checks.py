"""What a head compares of the machines of its job, before any of them gets a node.

The files that the job reads must be the same everywhere: those of the head count, or those of the
first machine where the head has none. And all machines must save to the same place.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from planaria.core.job import JobConfig
from planaria.core.machine_messages import MachineFacts, MachineReady
from planaria.errors import ConfigError
from planaria.nodes.daemon_threads import answer_of_thread
from planaria.nodes.input_files import PROSE_KEY, input_digest, input_paths
from planaria.nodes.shared_saves import check_answer

logger = logging.getLogger(__name__)


class MachineChecks:
    """The checks of one job.

    Args:
        job: job as it is offered to machines.
        mark: mark of the head at the place where the job saves.
        cache_directory: directory in which digests are kept between jobs.
        note: shows the user a text.

    Attributes:
        mark: mark of the head.
        is_planned: whether the job is planned, by the files that count then to its end.
        memory_bytes_min: memory for which the job is planned, of each machine; 0: any will do.
        digests: the digest that counts, after the name of who gave it, by key of the files.
    """

    def __init__(
        self, job: JobConfig, mark: str, *, cache_directory: str, note: Callable[[str], None]
    ) -> None:
        self.mark = mark
        self.is_planned = False
        self.memory_bytes_min = 0
        self._first: tuple[str, MachineFacts] | None = None  # The first machine that was fit.
        self._differing: set[str] = set()  # What the user knows to differ between machines.
        self._job = job
        self._cache = Path(cache_directory)
        self._note = note
        self._reading: asyncio.Task[None] | None = None
        self.digests: dict[str, tuple[str, str]] = {}
        self._compared: dict[str, Mapping[str, str]] = {}  # The digests of each machine.

    async def problem(self, ready: MachineReady) -> str:
        """Why a machine that says that it is ready cannot be compared, and what to do; "": it can.

        Raises:
            CheckpointError: the place of saves does not answer, or refuses.
            MemoryError: no thread could be started to ask it.
            OSError: no thread can be started.
        """
        check = partial(check_answer, self._job.checkpoint.directory, self.mark, ready.answer)
        try:
            await answer_of_thread(check, name="check of saves")
        except ConfigError as error:
            return str(error)
        if self._reading is None or _has_failed(self._reading):
            self._reading = asyncio.create_task(self._read_own())
        await asyncio.shield(self._reading)
        return ""

    def compare(self, machine: str, facts: MachineFacts, ready: MachineReady) -> str:
        """Compares a machine with the others, which are compared with it from now on.

        Returns:
            Why it cannot take part, and what to do; "": it can.
        """
        if not self.is_enough(facts):
            return (
                f"it has {facts.memory_bytes:_} bytes of memory, and the job is planned for "
                f"machines with {self.memory_bytes_min:_} or more; take a larger machine, or start "
                "the job with a smaller cluster.device_memory_bytes"
            )
        self.forget(machine)  # It may be back, with other files.
        for key, digest in ready.digests.items():
            other, expected = self.digests.setdefault(key, (machine, digest))
            if digest != expected:
                return self._difference(key, (machine, digest), (other, expected))
        self._compared[machine] = ready.digests
        self._compare_with_first(machine, facts)
        return ""

    def is_enough(self, facts: MachineFacts) -> bool:
        """Whether a machine has the memory for which the job is planned."""
        return facts.memory_bytes >= self.memory_bytes_min

    def begin(self, job: JobConfig) -> None:
        """Lets no files count that did so far, because another run begins."""
        self._job, self.is_planned, self.digests = job, False, {}
        self._compared.clear()
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def forget(self, machine: str) -> None:
        """Lets the files of a machine count no more, because it is gone or refused.

        If they counted, those of the others that were compared with it do, which are the same.
        Those by which the job is planned count to its end.
        """
        self._compared.pop(machine, None)
        if self.is_planned:
            return
        for key in [key for key, (name, _) in self.digests.items() if name == machine]:
            del self.digests[key]
            for other, digests in self._compared.items():
                if key in digests:
                    self.digests.setdefault(key, (other, digests[key]))

    def _compare_with_first(self, machine: str, facts: MachineFacts) -> None:
        """Warns once of each fact that makes the bits of machines differ."""
        if self._first is None:
            self._first = machine, facts
        other, others_facts = self._first
        for what, here, there in (
            ("processor", facts.processor, others_facts.processor),
            ("device", _models(facts), _models(others_facts)),
            ("torch", facts.versions.get("torch"), others_facts.versions.get("torch")),
            ("Python", _python(facts), _python(others_facts)),
        ):
            if here != there and what not in self._differing:
                self._differing.add(what)
                self._note(
                    f"{machine} has {what} {here!r} and {other} has {there!r}, which may round "
                    f"in other ways, so the result depends on which computes what{self._remedy()}"
                )

    def _remedy(self) -> str:
        if not self._job.resilience.corruption_guard:
            return ""
        return (
            "; set resilience.corruption_guard = false, or holders of a layer that compare it take "
            "that for damage"
        )

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
                # Of a run that is taken up, those count by which it was planned.
                self.digests.setdefault(key, ("the head", digest))

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


def _python(facts: MachineFacts) -> str:
    """The version of Python without that of the patch: from 3.12 on sums of floats differ."""
    return ".".join(facts.versions.get("python", "").split(".")[:2])


def _has_failed(task: asyncio.Task[None]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def _models(facts: MachineFacts) -> str:
    """The models of a machine's accelerators, each once."""
    return ", ".join(dict.fromkeys(facts.devices))
