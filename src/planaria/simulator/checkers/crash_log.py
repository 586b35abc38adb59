"""The errors in the workers of a simulated job, and what the coordinator should make of them."""

from collections import Counter, deque
from dataclasses import dataclass
from typing import Final

from planaria.coordinator.crashes import CRASHES_MAX
from planaria.core.messages import Blame, Raised

_COMMITS: Final = 4


@dataclass(frozen=True, slots=True)
class CrashFact:
    """An error in a worker: its code raised, or its process ended.

    Attributes:
        at_s: time at which it happened.
        blame: party whose fault it is.
    """

    at_s: float
    node: int
    blame: Blame
    raised: Raised


def _are_alike(fact: Raised, other: Raised) -> bool:
    """Whether two errors have the same type, in a layer that both computed or outside any layer."""
    layers = range(fact.first_layer, fact.end_layer)
    both = set(layers).intersection(range(other.first_layer, other.end_layer))
    is_outside = fact.end_layer == other.end_layer == 0
    return fact.error == other.error and (bool(both) or is_outside)


class CrashLog:
    """The errors in workers, in order.

    Errors count together only if no more than a few commits lie between them. One commit would be
    too few: a coordinator that a slow disk holds up may hear of an error after a later commit.

    Attributes:
        facts: all errors.
        were_alike: whether two nodes had the same error, in a layer that both computed or outside
            any layer, and one of them had it often.
        had_often: nodes that ever had an error often enough to be evicted, with the time of that.
    """

    def __init__(self) -> None:
        self.facts: list[CrashFact] = []
        self.were_alike = False
        self.had_often: dict[int, float] = {}
        self._firsts: deque[int] = deque([0], maxlen=_COMMITS + 1)

    def add(self, fact: CrashFact) -> None:
        """Adds an error."""
        self.facts.append(fact)
        self.had_often = self.frequent_nodes() | self.had_often
        self.were_alike = self.were_alike or self._are_alike()

    def on_commit(self) -> None:
        """Notes that an iteration is committed for the first time."""
        self._firsts.append(len(self.facts))

    @property
    def recent(self) -> list[CrashFact]:
        """The errors since the last few commits, which count together."""
        return self.facts[self._firsts[0] :]

    def frequent_nodes(self) -> dict[int, float]:
        """The nodes that recently had the same error often enough to be evicted, with the time of
        that."""
        counts: Counter[tuple[int, str]] = Counter()
        had_often: dict[int, float] = {}
        for fact in self.recent:
            if fact.blame != "job":
                counts[fact.node, fact.raised.error] += 1
                if counts[fact.node, fact.raised.error] >= CRASHES_MAX:
                    had_often.setdefault(fact.node, fact.at_s)
        return had_often

    def _are_alike(self) -> bool:
        often = self.frequent_nodes()
        facts = [fact for fact in self.recent if fact.blame != "job"]
        return any(
            fact.node in often and other.node != fact.node and _are_alike(fact.raised, other.raised)
            for fact in facts
            for other in facts
        )

    def num_mistakes(self) -> int:
        """The number of errors that were the job's own fault."""
        return sum(fact.blame == "job" for fact in self.facts)

    def has_failed_twice(self) -> bool:
        """Whether there was another error after one for which the job fails."""
        failed_s = [fact.at_s for fact in self.facts if fact.blame == "job"]
        failed_s += self.had_often.values()
        return bool(failed_s) and any(fact.at_s > min(failed_s) for fact in self.recent)
