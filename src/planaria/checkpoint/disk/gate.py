"""Where a fault makes a disk or store slow: each request waits at a gate first.

`--inject store=S` slows the gate of the saves down for good, `--inject disk=S` shuts that of the
coordinator's journal for a while. Without such a fault nobody waits.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from planaria.checkpoint.disk.storage import Entry, Storage
from planaria.checkpoint.disk.tiers import Tier


class Gate:
    """Holds up whoever passes; any thread may set it, and any may pass."""

    def __init__(self) -> None:
        self._each_s = 0.0
        self._shut_until_s = 0.0

    def slow(self, seconds: float) -> None:
        """Everybody takes so long to pass from now on."""
        self._each_s = seconds

    def shut(self, seconds: float) -> None:
        """Nobody passes for so long."""
        self._shut_until_s = time.monotonic() + seconds

    def wait_passed(self) -> None:
        """Blocks until the caller has passed."""
        now_s = time.monotonic()
        time.sleep(max(self._each_s, self._shut_until_s - now_s))


@dataclass(frozen=True, slots=True)
class Gated:
    """A storage behind a gate."""

    storage: Storage
    gate: Gate

    def where(self, name: str) -> str:
        return self.storage.where(name)

    def entries(self, version: str) -> dict[str, Entry]:
        self.gate.wait_passed()
        return self.storage.entries(version)

    def read(self, name: str) -> bytes:
        self.gate.wait_passed()
        return self.storage.read(name)

    def write(self, name: str, content: bytes, *, may_write: Callable[[], bool]) -> None:
        self.gate.wait_passed()
        self.storage.write(name, content, may_write=may_write)

    def create(self, name: str, content: bytes) -> bool:
        self.gate.wait_passed()
        return self.storage.create(name, content)

    def remove(self, version: str, names: Sequence[str]) -> None:
        self.gate.wait_passed()
        self.storage.remove(version, names)


def gated(tier: Tier, gate: Gate) -> Tier:
    """The same tier; each of its requests passes the gate first."""
    return replace(tier, storage=Gated(tier.storage, gate))
