"""Rows of a published table or figure, each beside what planaria has for it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final


class How(Enum):
    """Ways in which our number of a row came about."""

    INPUT = "published input"
    FIRST_PRINCIPLES = "first principles"
    SIMULATED = "simulated"
    NODES = "run on CPU nodes"
    NOT = "not reproducible"


class Claim(Enum):
    """Sense in which a paper states a number."""

    EQUAL = "equal"
    OVER = "over"
    UNDER = "under"


_TOLERANCE: Final = 0.01
_ROUNDING: Final = 1e-9  # Bounds that are reached exactly count as kept.

ARITHMETIC: Final = "arithmetic on printed numbers"  # Why a row is no result of its own.

Key = str | int | float


@dataclass(frozen=True, slots=True)
class PublishedRow:
    """A published number beside ours.

    Attributes:
        keys: columns that name the row, such as model and system.
        published: number as printed; None if the paper prints none.
        ours: our number, not rounded; None if there is none.
        how: way in which ours came about.
        note: reason why ours is missing or differs, and every constant that was chosen to match.
        tolerance: largest difference with which the number has come back, as a share of it.
        claim: sense of the published number; "over 13x" has come back if ours is 13 or more.
        repeats: reason why the row is no result of its own even if it comes back, such as
            arithmetic on other printed numbers; "" if it is one.
    """

    keys: Mapping[str, Key]
    published: float | None
    ours: float | None
    how: How
    note: str = ""
    tolerance: float = _TOLERANCE
    claim: Claim = Claim.EQUAL
    repeats: str = ""

    @property
    def ratio(self) -> float | None:
        """Our number over the published one; None if there is no such ratio."""
        return self.ours / self.published if self.ours is not None and self.published else None

    @property
    def is_comparable(self) -> bool:
        """Whether the published number could come back; one of another machine cannot."""
        return self.published is not None and self.how is not How.NODES

    @property
    def is_own(self) -> bool:
        """Whether the published number could come back as a result of its own."""
        return self.is_comparable and not self.repeats

    @property
    def full_note(self) -> str:
        """The note, the tolerance if it is wider than usual, and why the row is none of its own."""
        parts = [self.note]
        is_bound = self.claim is not Claim.EQUAL  # A bound has no tolerance.
        if self.tolerance > _TOLERANCE and self.published is not None and not is_bound:
            parts.append(f"counts as back within {100 * self.tolerance:.0f}%")
        if self.repeats:
            parts.append(f"no result of its own: {self.repeats}")
        return "; ".join(filter(None, parts))

    @property
    def how_text(self) -> str:
        """The way, and the note behind it."""
        return f"{self.how.value}: {self.full_note}" if self.full_note else self.how.value

    @property
    def has_come_back(self) -> bool:
        """Whether our number is the published one."""
        if not self.is_comparable or self.ours is None or self.how is How.NOT:
            return False
        assert self.published is not None
        margin = _ROUNDING * abs(self.published)
        if self.claim is Claim.OVER:
            return self.ours >= self.published - margin
        if self.claim is Claim.UNDER:
            return self.ours <= self.published + margin
        return abs(self.ours - self.published) <= self.tolerance * abs(self.published) + margin


@dataclass(frozen=True, slots=True)
class Experiment:
    """A table or figure of a paper.

    Attributes:
        name: name on the command line.
        title: title in words.
        source: paper and the place in it.
        unit: unit of the numbers.
        rows: function that computes the rows.
        note: facts that hold for all rows.
    """

    name: str
    title: str
    source: str
    unit: str
    rows: Callable[[], tuple[PublishedRow, ...]]
    note: str = ""


OOBLECK: Final = "Oobleck (SOSP '23)"
GEMINI: Final = "Gemini (SOSP '23)"
ODYSSEY: Final = "Odyssey (arXiv 2508.21613)"
