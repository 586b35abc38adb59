"""Oobleck's Figure 10 and Appendix C: samples per second on spot machines that come and go.

The lists of changes are those with which the authors' simulator makes the figure (branch
sosp23-artifact, tools/simulator/traces/scaled, MIT); they lie with the recorded traces of
simulator/failures. Both were scaled to 15 to 30 nodes. They come from Bamboo's traces of EC2 P3
and, though the paper calls the second one GCP a2-highgpu-1g, of EC2 G4dn: it has the 99 times of
Bamboo's g4dn-trace.csv.
"""

from functools import cache
from itertools import pairwise
from statistics import mean
from typing import Final

from planaria.papers.oobleck.measured import MODELS, RATES
from planaria.papers.oobleck.replay import Change, FailedSaves, Overlap
from planaria.papers.oobleck.throughput import outcome
from planaria.papers.rows import How, Key, PublishedRow
from planaria.simulator.failures.occurrences import OccurrenceKind
from planaria.simulator.failures.trace_files import shipped_trace

_TRACES: Final = {"EC2 P3": "oobleck-ec2-p3", "GCP (is EC2 G4dn)": "oobleck-ec2-g4dn"}
# With the smaller models Varuna saves within the notice of a spot machine; with the larger ones a
# save takes longer than the notice (section 7.3; eval_gcp_ec2.py and varuna_simulator.py).
_SAVED_BY_NOTICE: Final = ("BERT-Large", "GPT-2", "GPT-3 Medium")
_DRAWN: Final = "replay of the artifact's trace; the paper draws this number and does not print it"
# There an early save that failed makes a list of the artifact's grow, so its own numbers differ.
_OTHERS: Final = {
    ("varuna", "GPT-3 2.7b", "GCP (is EC2 G4dn)"): "0.9149",
    ("varuna", "GPT-3 6.7b", "GCP (is EC2 G4dn)"): "0.0",
}


def figure_10() -> tuple[PublishedRow, ...]:
    """Mean rates over each trace, what the traces are, and the largest ratio."""
    return (*_gap_rows(), *_rate_rows(), *_ratio_rows())


@cache
def spot_changes(trace: str) -> tuple[Change, ...]:
    """The changes of a trace, in order."""
    return tuple(
        (
            round(1000 * event.at_s),
            "add" if event.kind is OccurrenceKind.BACK else "remove",
            int(event.node.removeprefix("node")),
        )
        for event in shipped_trace(_TRACES[trace]).events
    )


def _gap_rows() -> tuple[PublishedRow, ...]:
    """Mean minutes between preemptions; those of one time count once (section 7.3)."""
    rows = []
    for (trace, published), note in zip(
        (("EC2 P3", 7.7), ("GCP (is EC2 G4dn)", 10.3)),
        ("", "the trace has the times of Bamboo's EC2 G4dn trace; the paper calls it GCP"),
        strict=True,
    ):
        times_ms = sorted({at for at, change, _ in spot_changes(trace) if change == "remove"})
        minutes = mean(b - a for a, b in pairwise(times_ms)) / 60_000
        keys: dict[str, Key] = {"model": "-", "system": "-", "trace": trace}
        rows.append(
            PublishedRow(
                {**keys, "quantity": "minutes between preemptions"},
                published,
                minutes,
                How.INPUT,
                note,
            )
        )
    return tuple(rows)


def _rate_rows() -> tuple[PublishedRow, ...]:
    return tuple(
        PublishedRow(
            {"model": model, "system": system, "trace": trace, "quantity": "samples/s"},
            None,
            _rate(system, model, trace),
            How.SIMULATED,
            _note_of(system, model, trace),
        )
        for trace in _TRACES
        for model in MODELS
        for system in ("bamboo", "varuna", "oobleck")
        if (system, model) in RATES
    )


def _note_of(system: str, model: str, trace: str) -> str:
    """The note of a row: whether the artifact comes to the same number."""
    other = _OTHERS.get((system, model, trace))
    if other is None:
        return _DRAWN
    return f"{_DRAWN}; the artifact has {other}: after a save that failed early a list of it grows"


def _ratio_rows() -> tuple[PublishedRow, ...]:
    """9.1x as published, and without what only the authors' simulator has."""
    rows: list[PublishedRow] = []
    for note, overlap, saves in (
        ("ratio of numbers not rounded", Overlap.AS_PUBLISHED, FailedSaves.AS_PUBLISHED),
        (
            "as above, but nodes that are lost together stop no system until the next change",
            Overlap.IS_ONE,
            FailedSaves.AS_PUBLISHED,
        ),
        (
            "as above, and a save of Varuna fails only if a node is lost in it",
            Overlap.IS_ONE,
            FailedSaves.AS_MEANT,
        ),
    ):
        oobleck, varuna = (
            _rate(system, "GPT-3 2.7b", "EC2 P3", overlap=overlap, saves=saves)
            for system in ("oobleck", "varuna")
        )
        is_first = not rows
        rows.append(
            PublishedRow(
                {
                    "model": "GPT-3 2.7b",
                    "system": "oobleck over varuna",
                    "trace": "EC2 P3",
                    "quantity": "times" if is_first else f"times, variant {len(rows)}",
                },
                9.1 if is_first else None,
                oobleck / varuna,
                How.SIMULATED,
                note,
            )
        )
    return tuple(rows)


def _rate(
    system: str,
    model: str,
    trace: str,
    *,
    overlap: Overlap = Overlap.AS_PUBLISHED,
    saves: FailedSaves = FailedSaves.AS_PUBLISHED,
) -> float:
    return outcome(
        system,
        model,
        spot_changes(trace),
        has_notices=model in _SAVED_BY_NOTICE,
        overlap=overlap,
        saves=saves,
    ).samples_per_s
