"""The hook of faults that make a disk or store slow, or full: each request passes a gate first.

`--inject store=S` slows the gate of the saves for good, and `--inject refuse=S` has it refuse all
requests for S seconds; `--inject disk=S` shuts the gate of the coordinator's journal for S seconds.
Without such a fault no request waits.
"""

import errno
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from planaria.checkpoint.disk.storage import Content, ContentInfo, Storage
from planaria.checkpoint.disk.tiers import Tier
from planaria.errors import CheckpointError, UnreadableError, UnwritableError


class Gate:
    """Delays or refuses the requests that pass it; any thread may set that, and any may pass."""

    def __init__(self) -> None:
        self._each_s = 0.0
        self._shut_until_s = self._refuses_until_s = 0.0

    def slow(self, seconds: float) -> None:
        """Has every pass take so long from now on."""
        self._each_s = seconds

    def shut(self, seconds: float) -> None:
        """Lets no request pass for so long."""
        self._shut_until_s = time.monotonic() + seconds

    def refuse(self, seconds: float) -> None:
        """Refuses every request for so long."""
        self._refuses_until_s = time.monotonic() + seconds

    def wait_passed(self, error: type[CheckpointError] = UnreadableError) -> None:
        """Blocks until the gate lets the caller pass.

        Raises:
            CheckpointError: it refuses, with an error of the kind given.
        """
        now_s = time.monotonic()
        time.sleep(max(self._each_s, self._shut_until_s - now_s))
        if time.monotonic() < self._refuses_until_s:
            cause = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            raise error(f"the place of saves refuses, as was injected: {cause.strerror}") from cause


@dataclass(frozen=True, slots=True)
class GatedStorage:
    """A storage whose requests pass a gate first."""

    storage: Storage
    gate: Gate

    def where(self, name: str) -> str:
        return self.storage.where(name)

    def entries(self, version: str) -> dict[str, ContentInfo]:
        self.gate.wait_passed()
        return self.storage.entries(version)

    def versions(self) -> list[str]:
        self.gate.wait_passed()
        return self.storage.versions()

    def read(self, name: str) -> bytes:
        self.gate.wait_passed()
        return self.storage.read(name)

    def write(self, name: str, content: Content, *, may_write: Callable[[], bool]) -> None:
        self.gate.wait_passed(UnwritableError)
        self.storage.write(name, content, may_write=may_write)

    def create(self, name: str, content: bytes) -> bool:
        self.gate.wait_passed(UnwritableError)
        return self.storage.create(name, content)

    def remove(self, version: str, names: Sequence[str]) -> None:
        self.gate.wait_passed(UnwritableError)
        self.storage.remove(version, names)


def behind_gate(tier: Tier, gate: Gate) -> Tier:
    """The tier with its storage behind the gate."""
    return replace(tier, storage=GatedStorage(tier.storage, gate))
