"""The sentence that explains a choice."""

import pytest

from planaria.observe.metrics import EventRecord
from planaria.show.choice import choice_text
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
        "borrow: 1.23 s an iteration after 300.0 ms; reroute would be 1.41 s after 100.0 ms, "
        "layers move for 4.00 s; the next failure is expected in 40 min"
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

    assert choice_text(event) == "reroute: 500.0 ms an iteration after 50.0 ms"


@pytest.mark.parametrize(
    ("seconds", "text"), [(60.0, "60 s"), (1800.0, "30 min"), (25_200.0, "7 h"), (4e6, "1,111 h")]
)
def test_durations_are_told_roughly(seconds: float, text: str) -> None:
    """They are estimates."""
    assert duration_text(seconds) == text
