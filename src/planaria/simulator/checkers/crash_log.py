"""What went wrong in the workers of a simulated job, as it happened: what the coordinator should
have heard of, and made of it.
"""

from collections import Counter, deque
from dataclasses import dataclass
from typing import Final

from planaria.coordinator.crashes import CRASHES_MAX
from planaria.core.messages import Blame, Raised

_COMMITS: Final = 4


@dataclass(frozen=True, slots=True)
class CrashFact:
    """The code in a worker raised, or its process ended, at `at_s`; `blame` says whose fault it
    is."""

    at_s: float
    node: int
    blame: Blame
    raised: Raised


def _are_alike(mine: Raised, other: Raised) -> bool:
    """Whether it is one error, in layers that both computed or outside of all."""
    layers = range(mine.first_layer, mine.end_layer)
    both = set(layers).intersection(range(other.first_layer, other.end_layer))
    is_outside = mine.end_layer == other.end_layer == 0
    return mine.error == other.error and (bool(both) or is_outside)


class CrashLog:
    """Facts, but for those from before the last few commits: a coordinator that a slow disk holds
    up may hear of what was before a commit behind it.

    Attributes:
        facts: all.
        were_alike: two nodes had the same error in layers that both computed, one of them often.
        had_often: the nodes that ever had an error as often as evicts a node, since when each.
    """

    def __init__(self) -> None:
        self.facts: list[CrashFact] = []
        self.were_alike = False
        self.had_often: dict[int, float] = {}
        self._firsts: deque[int] = deque([0], maxlen=_COMMITS + 1)

    def add(self, fact: CrashFact) -> None:
        """Something has gone wrong."""
        self.facts.append(fact)
        self.had_often = self.often() | self.had_often
        self.were_alike = self.were_alike or self._are_alike()

    def committed(self) -> None:
        """An iteration is committed, for the first time."""
        self._firsts.append(len(self.facts))

    @property
    def recent(self) -> list[CrashFact]:
        """Those that may count together."""
        return self.facts[self._firsts[0] :]

    def often(self) -> dict[int, float]:
        """The nodes that had the same error as often as evicts a node, since when each."""
        counts: Counter[tuple[int, str]] = Counter()
        found: dict[int, float] = {}
        for fact in self.recent:
            if fact.blame != "job":
                counts[fact.node, fact.raised.error] += 1
                if counts[fact.node, fact.raised.error] >= CRASHES_MAX:
                    found.setdefault(fact.node, fact.at_s)
        return found

    def _are_alike(self) -> bool:
        often = self.often()
        facts = [fact for fact in self.recent if fact.blame != "job"]
        return any(
            mine.node in often and other.node != mine.node and _are_alike(mine.raised, other.raised)
            for mine in facts
            for other in facts
        )

    def mistakes(self) -> int:
        """How often the job's own code raised."""
        return sum(fact.blame == "job" for fact in self.facts)

    def has_failed_twice(self) -> bool:
        """Whether the code raised, or a worker ended, again when the job had failed."""
        failed_s = [fact.at_s for fact in self.facts if fact.blame == "job"]
        failed_s += self.had_often.values()
        return bool(failed_s) and any(fact.at_s > min(failed_s) for fact in self.recent)
