"""Oobleck's Figures 1 and 11: what the time of each system is spent on.

Shares are those of the authors' counts (`systems.py`), which overlap, so a second quantity says how
much of the run's time is in iterations that count in the end.
"""

from collections.abc import Iterator, Mapping
from typing import Final

from planaria.papers.oobleck.replay import ReplayOutcome
from planaria.papers.oobleck.throughput import controlled_outcome
from planaria.papers.rows import Claim, How, Key, PublishedRow

# Bamboo's share of an iteration that is no redundant work, by frequency (bamboo_simulator.py, where
# the one for 6 h is in a comment).
_USEFUL_SHARE: Final = {"6h": 0.2785, "10m": 0.1971}
# Percent for BERT-Large at 10 min, from the example output in the README of tools/simulator.
_README: Final[Mapping[str, Mapping[str, float]]] = {
    "bamboo": {
        "effective": 14.978,
        "redundant": 61.013,
        "rebalance": 8.976,
        "restart": 0.295,
        "fallback": 14.738,
    },
    "varuna": {"effective": 54.446, "save": 4.042, "restart": 6.703, "fallback": 34.809},
    "oobleck": {"effective": 95.516, "reconfigure": 0.311, "fallback": 4.173},
}
_RUNS: Final = (
    *(("BERT-Large", system) for system in ("bamboo", "varuna", "oobleck")),
    *(("GPT-3 6.7b", system) for system in ("varuna", "oobleck")),
)


def figure_1() -> tuple[PublishedRow, ...]:
    """Effective time of Bamboo and Varuna."""
    return tuple(
        PublishedRow(
            {"model": model, "system": system, "frequency": frequency},
            _published_percent(model, system, frequency, "effective"),
            shares["effective"],
            How.SIMULATED,
            _note(model, system, frequency),
            repeats="it stands in Figure 11",
        )
        for model, system, frequency, shares in _all_shares()
        if system != "oobleck"
    )


def figure_11() -> tuple[PublishedRow, ...]:
    """All parts of the time of each system, and the three bounds that the text gives."""
    rows = []
    for model, system, frequency, shares in _all_shares():
        keys: dict[str, Key] = {"model": model, "system": system, "frequency": frequency}
        for part, share in shares.items():
            published = _published_percent(model, system, frequency, part)
            note = _note(model, system, frequency)
            rows.append(PublishedRow({**keys, "part": part}, published, share, How.SIMULATED, note))
        counted = 100 * controlled_outcome(system, model, frequency).trained_share
        note = "iterations that count in the end, with the regroupings inside them, over the time"
        rows.append(PublishedRow({**keys, "part": "kept"}, None, counted, How.SIMULATED, note))
    return (*rows, *_bounds())


def _bounds() -> Iterator[PublishedRow]:
    """What section 7.4.2 says in words."""
    least = min(
        shares["effective"] for _, system, _, shares in _all_shares() if system == "oobleck"
    )
    least_varuna = min(
        shares["effective"] for _, system, _, shares in _all_shares() if system == "varuna"
    )
    least_redundant = min(
        shares["redundant"] for _, system, _, shares in _all_shares() if system == "bamboo"
    )
    for system, part, published, ours, claim in (
        ("oobleck", "effective, least", 75.0, least, Claim.OVER),
        ("varuna", "not effective, most", 75.0, 100 - least_varuna, Claim.UNDER),
        ("bamboo", "redundant, least", 50.0, least_redundant, Claim.OVER),
    ):
        yield PublishedRow(
            {"model": "all", "system": system, "frequency": "all", "part": part},
            published,
            ours,
            How.SIMULATED,
            "the text says at least 75%, up to 75%, and more than 50%",
            claim=claim,
        )


def _all_shares() -> Iterator[tuple[str, str, str, Mapping[str, float]]]:
    for model, system in _RUNS:
        for frequency, useful_share in _USEFUL_SHARE.items():
            outcome = controlled_outcome(system, model, frequency)
            yield model, system, frequency, _shares(system, outcome, useful_share)


def _shares(system: str, outcome: ReplayOutcome, useful_share: float) -> dict[str, float]:
    """Percent of the counted time by part."""
    shares = {part: 100 * outcome.share(part) for part, ms in outcome.spent_ms.items() if ms}
    iterations = shares.pop("iterations")
    if system != "bamboo":
        return {"effective": iterations, **shares}
    return {
        "effective": iterations * useful_share,
        "redundant": iterations * (1 - useful_share),
        **shares,
    }


def _published_percent(model: str, system: str, frequency: str, part: str) -> float | None:
    is_example = (model, frequency) == ("BERT-Large", "10m")
    return _README[system].get(part) if is_example else None


def _note(model: str, system: str, frequency: str) -> str:
    if (model, frequency) == ("BERT-Large", "10m"):
        return "published in the artifact's README; the paper only draws it"
    if (system, frequency) == ("bamboo", "6h"):
        return "drawn only; the share of redundant work is the one in a comment of the artifact"
    return "the paper draws this number and does not print it"
