"""The table and the picture of predicted beside measured."""

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from planaria.estimator.correction import Comparison, PeakBytes
from planaria.estimator.time import Span, Timeline
from planaria.observe.metrics import (
    ActionRecord,
    EventRecord,
    FinalRecord,
    IterationRecord,
    MemoryRecord,
    Report,
)
from planaria.schedule.action import parse_action
from planaria.show.comparison import comparison_table, off_text
from planaria.show.pictures.gantt import ITERATIONS_MAX, RANKS_MAX, compared_figure

FINAL = FinalRecord(
    iteration=6,
    loss=1.0,
    parameters_sha256="",
    optimizer_sha256="",
    nodes=(),
    epoch=1,
    checkpoint="",
)
LOST = EventRecord(
    kind="lost",
    nodes=(3,),
    iteration=3,
    answer="simple",
    detect_s=1.0,
    downtime_s=2.0,
    predicted_downtime_s=0.8,
)


def iteration(number: int, *, epoch: int, seconds: float, predicted_s: float) -> IterationRecord:
    return IterationRecord(
        iteration=number,
        loss=1.0,
        samples=4,
        sample_digest="",
        seconds=seconds,
        epoch=epoch,
        predicted_s=predicted_s,
        peak_bytes=0,
        predicted_peak_bytes=0,
    )


def action(rank: int, kind: str, measured_s: float, *, epoch: int = 1) -> ActionRecord:
    return ActionRecord(
        epoch=epoch,
        rank=rank,
        kind=kind,
        first_layer=0,
        end_layer=5,
        predicted_s=1.0,
        corrected_s=1.25,
        measured_s=measured_s,
    )


def report(**parts: Any) -> Report:
    empty: dict[str, Any] = {
        "job": {},
        "seed": 0,
        "versions": {},
        "workers": (),
        "iterations": (),
        "events": (),
        "checkpoints": {},
        "ledger": {},
        "final": FINAL,
    }
    return Report(**(empty | parts))


def printed(told: Report, *, width: int) -> str:
    file = io.StringIO()
    Console(file=file, width=width).print(comparison_table(told), soft_wrap=True)
    return file.getvalue()


def rows(told: Report) -> list[list[str]]:
    """The table's lines, words that stand apart."""
    lines = printed(told, width=120).splitlines()[2:]
    return [[word for word in line.split("  ") if word.strip()] for line in lines]


def stripped(told: Report) -> list[list[str]]:
    return [[word.strip() for word in row] for row in rows(told)]


def memory(rank: int, *, tensor_bytes: int) -> MemoryRecord:
    return MemoryRecord(
        epoch=1,
        rank=rank,
        predicted_bytes=1 << 20,
        tensor_bytes=tensor_bytes,
        measured_bytes=8 << 20,
    )


def test_iterations_actions_memory_and_transitions_stand_beside_their_predictions() -> None:
    """An epoch's first iteration does not count; a correction has a column; stages that are cut
    alike are one row; a transition counts from its choice on."""
    told = report(
        iterations=(
            iteration(0, epoch=0, seconds=9.0, predicted_s=2.0),
            iteration(1, epoch=0, seconds=3.0, predicted_s=2.0),
            iteration(2, epoch=0, seconds=3.0, predicted_s=2.5),
            iteration(3, epoch=1, seconds=4.0, predicted_s=4.0),
        ),
        actions=(
            action(0, "F", 9.0, epoch=0),
            action(0, "F", 1.0),
            action(1, "F", 2.0),
            action(0, "B", 1.25),
        ),
        memory=(memory(0, tensor_bytes=3 << 19), memory(1, tensor_bytes=0)),
        events=(LOST,),
    )

    assert stripped(told) == [
        ["iteration of epoch 0", "2.00 s", "2.50 s", "3.00 s", "+20.0%"],
        ["iteration of epoch 1", "4.00 s", "4.00 s", "0.0%"],
        ["backward of layers 0-4", "1.00 s", "1.25 s", "1.25 s", "0.0%"],
        ["forward of layers 0-4", "1.00 s", "1.25 s", "1.50 s", "+20.0%"],
        ["simple at 3", "800.0 ms", "1.00 s", "+25.0%"],
        ["memory of rank 0", "1.0 MiB", "1.5 MiB", "+50.0%"],
        ["memory of rank 1", "1.0 MiB", "resident 8.0 MiB"],
    ]


def test_a_recovery_stands_beside_the_range_that_was_expected_of_it() -> None:
    """From when its loss was noticed, both; and from when its answer was told, as it is priced."""
    killed = replace(
        LOST,
        recovery_s=1.9,
        predicted_recovery_s=1.5,
        predicted_recovery_s_min=0.7,
        predicted_recovery_s_max=2.25,
    )
    told = report(
        events=(killed, replace(killed, recovery_s=4.5), replace(killed, recovery_s=0.35))
    )

    once_told = ["simple at 3, transition", "800.0 ms", "1.00 s", "+25.0%"]
    assert stripped(told) == [
        ["simple at 3", "0.7-2.2 s", "1.90 s", "within"],
        once_told,
        ["simple at 3", "0.7-2.2 s", "4.50 s", "+100.0%"],
        once_told,
        ["simple at 3", "0.7-2.2 s", "350.0 ms", "-50.0%"],
        once_told,
    ]


@pytest.mark.parametrize("width", [80, 40])
def test_no_number_loses_digits_where_lines_are_short(width: int) -> None:
    """A pipe is 80 columns wide; names are in the way there, and take several lines."""
    slow = replace(LOST, answer="reroute-normalised", iteration=20, downtime_s=12.73)
    held = replace(memory(10, tensor_bytes=0), measured_bytes=1023 << 20)
    told = report(
        actions=(replace(action(0, "BW", 1.25), first_layer=100, end_layer=200),),
        memory=(held,),
        events=(slow, replace(slow, iteration=21)),
    )

    shown = printed(told, width=width)

    assert "\N{HORIZONTAL ELLIPSIS}" not in shown
    for text in ("predicted", "corrected", "800.0 ms", "11.73 s", "+1366.2%", "resident 1,023.0 "):
        assert text in shown
    assert [row[0] for row in stripped(told)[1:3]] == [f"{slow.answer} at {n}" for n in (20, 21)]


def test_what_is_as_predicted_is_off_by_nothing() -> None:
    """Neither more nor less."""
    assert off_text(1.0, 1.0) == off_text(1.0, 0.9999) == off_text(1.0, 1.0001) == "0.0%"
    assert off_text(1.0, 1.0006) == "+0.1%"


def test_of_many_stages_those_that_are_furthest_off_are_shown() -> None:
    """A table is to be read."""
    many = tuple(
        replace(action(rank, "F", 1.25 + rank / 100), first_layer=rank, end_layer=rank + 1)
        for rank in range(40)
    )

    found = stripped(report(actions=many))

    assert len(found) == 24
    assert found[0][0] == "forward of layer 39"
    assert {row[0] for row in found} == {f"forward of layer {n}" for n in range(16, 40)}


@pytest.mark.parametrize("has_tensors", [True, False])
def test_of_many_ranks_those_with_the_most_to_tell_are_shown(has_tensors: bool) -> None:
    """The furthest off, or the fullest where nothing can be compared; the others are counted."""
    many = tuple(
        replace(
            memory(rank, tensor_bytes=((1 << 20) + (rank << 14)) * has_tensors),
            measured_bytes=(8 << 20) + (rank << 14),
        )
        for rank in range(40)
    )

    found = [row[0] for row in stripped(report(memory=many))]

    shown = [f"memory of rank {rank}" for rank in range(39, 15, -1)]
    assert found == [*shown, "memory of 16 more ranks is not shown"]
    few = [row[0] for row in stripped(report(memory=many[:24]))]
    assert few == [f"memory of rank {rank}" for rank in range(24)]


def timeline(scale: float, *, num_ranks: int = 2) -> Timeline:
    spans = tuple(
        Span(rank, lane, parse_action(text), scale * start_s, scale * end_s)
        for rank in range(num_ranks)
        for lane, text, start_s, end_s in (
            ("compute", "0F0", 0.0, 0.5),
            ("compute", "0BI0", 0.5, 1.0),
            ("compute", "0BW0", 1.0, 1.25),
            ("reduce", "R0", 1.0, 1.5),
        )
    )
    return Timeline(spans, 1.5 * scale)


def picture(iterations: list[Comparison], *events: EventRecord) -> str:
    return compared_figure("a job", iterations, events, picture="svg").decode()


def test_a_picture_has_the_median_iteration_of_each_prediction_and_the_transitions() -> None:
    """The first of an epoch sets up what the others keep, so it is no example."""
    first, second = timeline(1.0), timeline(2.0)
    measured = [timeline(scale) for scale in (9.0, 1.1, 1.2, 1.3, 2.2)]
    predicted = [first, first, first, first, second]
    compared = [
        Comparison(i, *both) for i, both in enumerate(zip(predicted, measured, strict=True))
    ]

    drawn = picture(compared, LOST, replace(LOST, answer=""))

    assert "Iteration 2<" in drawn
    assert "1.50 s predicted, 1.80 s measured (+20.0%)" in drawn
    assert "Iteration 4<" in drawn
    assert "3.00 s predicted, 3.30 s measured (+10.0%)" in drawn
    assert drawn.count(">Iteration ") == 2
    assert drawn.count("simple at 3") == 1
    assert drawn.count("rank 1<") == 2
    assert drawn == picture(compared, LOST, replace(LOST, answer=""))
    assert drawn.count("gradients") == 2


def test_a_legend_names_what_is_drawn() -> None:
    """Backwards in two parts only where some are; detecting was predicted of nobody."""
    whole = Timeline(
        tuple(span for span in timeline(1.0).spans if "W" not in str(span.action)), 1.5
    )

    assert "gradients" not in picture([Comparison(1, whole, whole)])
    detecting = picture([], LOST).split('style="fill: #9aa5b1"')[0].rsplit("<path", 1)[1]
    assert detecting.count("M ") == 2  # In the legend, and in the lane of what was measured.


def test_what_a_picture_has_no_room_for_is_said() -> None:
    """Predictions by the dozen, and more ranks than can be told apart."""
    many = [
        Comparison(
            i, timeline(1.0, num_ranks=RANKS_MAX + 3), timeline(1.0, num_ranks=RANKS_MAX + 3)
        )
        for i in range(ITERATIONS_MAX + 2)
    ]

    drawn = picture(many)

    assert f"the last {ITERATIONS_MAX} of {ITERATIONS_MAX + 2} predictions" in drawn
    assert drawn.count("3 ranks left out") == ITERATIONS_MAX
    assert f"rank {RANKS_MAX}<" not in drawn


def test_a_picture_has_the_peaks_of_the_newest_iteration_that_it_shows() -> None:
    """Bars and words; where none was counted there is no heading either."""
    first = Comparison(0, timeline(1.0), timeline(1.0), (PeakBytes(0, 1 << 20, 1 << 21),))
    peaks = (PeakBytes(0, 1 << 20, 3 << 19), PeakBytes(3, 1 << 30, 1 << 29))

    drawn = picture([first, Comparison(1, timeline(1.0), timeline(1.0), peaks)])

    assert drawn.count("Peak memory") == 1
    assert "1.0 MiB predicted, 1.5 MiB measured (+50.0%)" in drawn
    assert "1.0 GiB predicted, 512.0 MiB measured (-50.0%)" in drawn
    assert "Peak memory" not in picture([first._replace(peaks=())])


@pytest.mark.parametrize("events", [(), (LOST,)])
def test_a_picture_without_iterations_can_be_drawn(events: tuple[EventRecord, ...]) -> None:
    """A job may end in its first iteration."""
    assert "predicted" in picture([], *events)


@pytest.mark.parametrize(
    ("clock_error_s", "expected"),
    [
        (0.0, ""),
        (0.002, ", measured ranks placed to within 2.0 ms"),
        (None, ", each measured rank from its own begin"),
    ],
)
def test_a_picture_says_how_well_ranks_of_several_machines_are_placed(
    clock_error_s: float | None, expected: str
) -> None:
    """Or a gap between two ranks that is the clocks' own would be looked into."""
    comparison = Comparison(0, timeline(1.0), timeline(1.1), clock_error_s=clock_error_s)

    assert f"measured (+10.0%){expected}<" in picture([comparison])
