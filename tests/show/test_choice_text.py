"""The sentence that explains a choice."""

import pytest

from planaria.observe.metrics import EventRecord
from planaria.show.choice_text import choice_text
from planaria.show.words import duration_text


def priced(
    policy: str, answer: str, iteration_s: float, downtime_s: float, moving_s: float = 0.0
) -> dict[str, object]:
    prices = {"iteration_s": iteration_s, "downtime_s": downtime_s, "moving_s": moving_s}
    return {"policy": policy, "answer": answer, **prices, "score": 1.0}


def test_a_choice_is_told_with_what_it_was_chosen_from() -> None:
    """The prices that decided, and the time that they were weighed by."""
    event = EventRecord(
        kind="lost",
        nodes=(3,),
        iteration=5,
        policy="reinstantiate",
        answer="borrow",
        candidates=(
            priced("reinstantiate", "borrow", 1.23, 0.3),
            priced("reroute", "reroute", 1.41, 0.1, moving_s=4.0),
        ),
        time_to_failure_s=2400.0,
    )

    assert choice_text(event) == (
        "borrow: an iteration takes 1.23 s after a pause of 300.0 ms; reroute would take 1.41 s "
        "after 100.0 ms, layers move for 4.00 s; the next failure is expected in 40 min"
    )


def test_an_answer_without_another_needs_no_reason() -> None:
    """There was nothing to weigh."""
    only = (priced("reroute", "reroute", 0.5, 0.05),)
    event = EventRecord(
        kind="kill",
        nodes=(3,),
        iteration=5,
        policy="reroute",
        answer="reroute",
        candidates=only,
        time_to_failure_s=60.0,
    )

    assert choice_text(event) == "reroute: an iteration takes 500.0 ms after a pause of 50.0 ms"


def test_what_a_failure_costs_is_told_where_that_differs() -> None:
    """It may be the reason to take the slowest."""
    event = EventRecord(
        kind="join",
        nodes=(7,),
        iteration=0,
        policy="repartition",
        answer="keeping",
        candidates=(
            priced("repartition", "whole", 0.0086, 0.0713) | {"samples_at_risk": 812.4},
            priced("repartition", "keeping", 0.0093, 0.0713, 0.5) | {"samples_at_risk": 0.04},
        ),
        time_to_failure_s=3600.0,
    )

    assert choice_text(event) == (
        "keeping: an iteration takes 9.3 ms after a pause of 71.3 ms, layers move for 500.0 ms, "
        "0 samples at risk; whole would take 8.6 ms after 71.3 ms, 812 samples at risk; "
        "the next failure is expected in 60 min; "
        "the samples at risk are what a failure costs on average, because it may destroy the last "
        "copy of a layer"
    )


def test_of_an_answer_that_another_plan_follows_both_are_told() -> None:
    """The pause between them is part of its price; what is at risk is so under either."""
    event = EventRecord(
        kind="kill",
        nodes=(3,),
        iteration=5,
        policy="reroute",
        answer="reroute, then merge",
        candidates=(
            priced("reroute", "reroute, then merge", 1.5, 0.1, 3.0)
            | {"then_s": 1.25, "pause_s": 0.2, "samples_at_risk": 96.0},
            priced("reroute", "reroute", 1.5, 0.1) | {"samples_at_risk": 3.44},
        ),
    )

    assert choice_text(event) == (
        "reroute, then merge: an iteration takes 1.50 s after a pause of 100.0 ms, "
        "layers move for 3.00 s, then "
        "1.25 s after a pause of 200.0 ms, 96 samples at risk; "
        "reroute would take 1.50 s after 100.0 ms, 3.4 samples at risk; "
        "the samples at risk are what a failure costs on average, because it may destroy the last "
        "copy of a layer"
    )


def test_an_equal_risk_decides_nothing() -> None:
    """So it is left out."""
    candidates = tuple(
        priced("reroute", answer, 1.5, 0.1) | {"samples_at_risk": 3.0} for answer in ("a", "b")
    )
    event = EventRecord(
        kind="kill",
        nodes=(3,),
        iteration=5,
        policy="reroute",
        answer="a",
        candidates=candidates,
    )

    assert (
        choice_text(event)
        == "a: an iteration takes 1.50 s after a pause of 100.0 ms; b would take 1.50 s after "
        "100.0 ms"
    )


@pytest.mark.parametrize(
    ("seconds", "text"), [(60.0, "60 s"), (1800.0, "30 min"), (25_200.0, "7 h"), (4e6, "1,111 h")]
)
def test_durations_are_told_roughly(seconds: float, text: str) -> None:
    """They are estimates."""
    assert duration_text(seconds) == text
