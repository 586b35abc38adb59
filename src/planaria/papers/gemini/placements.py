"""Gemini's Figures 3 and 9 and its Theorem 1: which copies survive the loss of nodes.

Counts are exact, over all sets of lost nodes. Corollary 1 of the paper is a bound where two groups
or more may be lost as a whole, and falls below 0 for large losses, where it is cut off.
"""

from math import comb
from typing import Final

from planaria.papers.rows import Claim, How, PublishedRow
from planaria.placement.placement import PaperStrategy, paper_probability

_STRATEGIES: Final[tuple[PaperStrategy, ...]] = ("group", "ring")


def figure_3() -> tuple[PublishedRow, ...]:
    """Sets of two lost nodes with which state is lost, and the gap that Theorem 1 allows."""
    cases: tuple[tuple[int, PaperStrategy, float | None], ...] = (
        (4, "group", 2.0),
        (4, "ring", 4.0),
        (5, "mixed", None),
    )
    losing = [
        comb(nodes, 2) * (1 - paper_probability(nodes, 2, strategy, num_lost=2))
        for nodes, strategy, _ in cases
    ]
    rows = [
        PublishedRow(
            {"nodes": nodes, "copies": 2, "placement": strategy, "quantity": "losing pairs"},
            published,
            number,
            How.FIRST_PRINCIPLES,
        )
        for (nodes, strategy, published), number in zip(cases, losing, strict=True)
    ]
    rows.append(
        PublishedRow(
            {"nodes": 4, "copies": 2, "placement": "group, ring", "quantity": "percent fewer"},
            50.0,
            100 * (1 - losing[0] / losing[1]),
            How.FIRST_PRINCIPLES,
            repeats="it follows from the two numbers of pairs",
        )
    )
    return (*rows, *_gap_rows())


def _gap_rows() -> tuple[PublishedRow, ...]:
    """How far mixed placement is from the upper bound when as many nodes as copies are lost."""
    rows = []
    for nodes, copies in ((5, 2), (7, 2), (9, 2), (5, 3), (7, 3), (8, 3), (6, 4), (7, 4)):
        best = 1 - -(-nodes // copies) / comb(nodes, copies)
        mixed = paper_probability(nodes, copies, "mixed", num_lost=copies)
        rows.append(
            PublishedRow(
                {"nodes": nodes, "copies": copies, "placement": "mixed", "quantity": "gap"},
                (2 * copies - 3) / comb(nodes, copies),
                best - mixed,
                How.FIRST_PRINCIPLES,
                "Theorem 1 allows (2k - 3) / C(N, k); the bound need not be reached by any "
                "placement under which all nodes keep as many copies",
                claim=Claim.UNDER,
                repeats="the paper prints the bound's formula, not these numbers",
            )
        )
    return tuple(rows)


def figure_9() -> tuple[PublishedRow, ...]:
    """Probabilities that all state survives in memory, percent."""
    note = "exact count of the sets of lost nodes"
    exact = [
        PublishedRow(
            {"nodes": nodes, "copies": 2, "lost": lost, "placement": strategy},
            93.3 if (nodes, lost, strategy) == (16, 2, "group") else None,
            100 * paper_probability(nodes, 2, strategy, num_lost=lost),
            How.FIRST_PRINCIPLES,
            note,
            tolerance=0.05 / 93.3,
        )
        for nodes in (16, 32, 64)
        for lost in (1, 2, 3)
        for strategy in _STRATEGIES
    ]
    corollary = [
        PublishedRow(
            {"nodes": 16, "copies": 2, "lost": lost, "placement": "group, Corollary 1"},
            100 * max(0.0, 1 - 8 * comb(14, lost - 2) / comb(16, lost)),
            100 * paper_probability(16, 2, "group", num_lost=lost),
            How.FIRST_PRINCIPLES,
            "Corollary 1 is exact below twice as many lost nodes as copies, and a lower bound "
            "beyond; published is what it gives",
            claim=Claim.EQUAL if lost < 4 else Claim.OVER,
            repeats="the paper prints the formula, not these numbers",
        )
        for lost in (2, 3, 4, 5, 6)
    ]
    return (*exact, *corollary)
