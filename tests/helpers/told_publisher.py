"""A publisher of saves, and what it says to whom."""

from pathlib import Path

import numpy as np

from planaria.checkpoint.disk.parts import HeadMark, RunPlace
from planaria.checkpoint.disk.tiers import tier_of
from planaria.coordinator.commands import Publish, SaveChecked
from planaria.coordinator.saves import VersionEvent
from planaria.core.messages import SaveFailed
from planaria.core.records import ToLauncher
from planaria.nodes.head.publisher import MarkedRun, Publisher
from planaria.nodes.head.remote.run_record import JournalHold


class ToldPublisher:
    """A publisher, and what it says to whom."""

    def __init__(
        self,
        directory: Path,
        *,
        keep: int = 1,
        run: str = "",
        head: HeadMark | None = None,
        hold: JournalHold | None = None,
    ) -> None:
        self.directory = directory
        self.tier = tier_of(str(directory))
        self.run = RunPlace(self.tier.storage, run) if run else None
        self.events: list[VersionEvent | SaveChecked | SaveFailed] = []
        self.notices: list[ToLauncher] = []
        self.publisher = Publisher(
            self.tier,
            fingerprint={"name": "job"},
            keep=keep,
            run=MarkedRun(self.run, head, hold) if self.run else None,
            queue=self.events.append,
            notify=self.notices.append,
        )

    def publish(self, iteration: int) -> None:
        file = self.tier.write_layer(iteration, 0, 0, {"parameter/w": np.zeros(3, np.float32)})
        if self.publisher.publish(Publish(iteration, 0, (file,))):
            self.publisher.prune(frozenset())

    def damage(self, version: str) -> None:
        """Cuts a layer of a version short."""
        (self.directory / version / "layer-00000.safetensors").write_bytes(b"")
