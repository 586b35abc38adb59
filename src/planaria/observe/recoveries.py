"""Wasted time by tier: what a job lost to recoveries, by the place that kept the state with which
it went on.

A recovery lasts from when training stops until it goes on. All that is redone meanwhile, and all
that the job waits for layers, belongs to one tier, however often nodes are lost until training goes
on: to the one with the oldest state. So the parts of all tiers add up to the ledger's `redo` and
`transfer`.

Source: Gemini (SOSP '23), equation 1: a failure wastes what is computed again, and the time to
retrieve the state.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final


class SourceTier(StrEnum):
    """The place that kept the state with which a job goes on, from the newest state to the oldest.

    Attributes:
        LIVE: layers that other nodes train with; no committed iteration is undone.
        MEMORY: copies in the memory of nodes.
        DISK: saves on disk or in a store.
        START: none; the job begins from its start.
    """

    LIVE = "live"
    MEMORY = "memory"
    DISK = "disk"
    START = "start"


_NEWEST_FIRST: Final = tuple(SourceTier)


@dataclass(frozen=True, slots=True)
class Wasted:
    """What recoveries from one tier cost.

    Attributes:
        redo_s: seconds of iterations, and of parts of iterations, that are computed again.
        transfer_s: seconds in which the job waited for layers.
    """

    num_recoveries: int = 0
    redo_s: float = 0.0
    transfer_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Recoveries:
    """The recoveries of a job so far.

    Attributes:
        tier: tier of the recovery in progress; None: there is none.
        redo_s, transfer_s: seconds of the ledger that are in `wasted`.
    """

    wasted: dict[SourceTier, Wasted] = field(default_factory=dict)
    tier: SourceTier | None = None
    redo_s: float = 0.0
    transfer_s: float = 0.0

    def recover(self, tier: SourceTier) -> "Recoveries":
        """Begins a recovery, or has the one in progress go back as far as this tier, too."""
        if self.tier is tier:
            return self
        oldest = max(self.tier or tier, tier, key=_NEWEST_FIRST.index)
        return Recoveries(self.wasted, oldest, self.redo_s, self.transfer_s)

    def close(self, redo_s: float, transfer_s: float) -> "Recoveries":
        """Ends the recovery in progress, if there is one.

        Seconds since the one before are those of its tier. Without one, nodes that came waited for
        layers from others.

        Args:
            redo_s, transfer_s: seconds of the ledger so far.
        """
        # Sums of the ledger are rounded, so what did not grow may have shrunk.
        redo_s, transfer_s = max(redo_s, self.redo_s), max(transfer_s, self.transfer_s)
        if self.tier is None and (redo_s, transfer_s) == (self.redo_s, self.transfer_s):
            return self
        tier = self.tier or SourceTier.LIVE
        before = self.wasted.get(tier, Wasted())
        after = Wasted(
            before.num_recoveries + (self.tier is not None),
            before.redo_s + redo_s - self.redo_s,
            before.transfer_s + transfer_s - self.transfer_s,
        )
        return Recoveries(self.wasted | {tier: after}, None, redo_s, transfer_s)

    def parts(self) -> dict[str, dict[str, float]]:
        """The table `wasted` of the report: for each tier, the number of `recoveries`, their
        `redo_s` and `transfer_s`, and the sum of these two as `wasted_s`."""
        parts = {}
        for tier in _NEWEST_FIRST:
            of = self.wasted.get(tier, Wasted())
            parts[str(tier)] = {
                "recoveries": float(of.num_recoveries),
                "redo_s": of.redo_s,
                "transfer_s": of.transfer_s,
                "wasted_s": of.redo_s + of.transfer_s,
            }
        return parts
