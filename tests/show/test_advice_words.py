"""The answer what pays most, in words."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from planaria.job.scenario_file import scenario_from_tables
from planaria.show.advice_words import advice_json, advice_text
from planaria.simulator.economics.advice import Advice, Choice, SparesPay
from planaria.simulator.economics.compare import ClusterScenario, Interval, JobOutcome
from planaria.simulator.economics.question import Question, Recommendation

LEADER = Choice(system="planaria", policy="reinstantiate", failures_tolerated=1)
MORPH = Choice(system="planaria", policy="morph", failures_tolerated=1)
SPARE = Choice(system="planaria", policy="reinstantiate", failures_tolerated=1, num_spares=1)
STATIC = Choice(system="static", num_spares=2, save_min=15)
REFUSED = Choice(system="planaria", policy="absorb", failures_tolerated=2, num_spares=4)


@cache
def scenario() -> ClusterScenario:
    """GPT-2 on 4 nodes."""
    return scenario_from_tables(
        {"cluster": {"nodes": 4, "profile": "gpt2"}}, name="words", directory=Path()
    )


def outcome(samples: int) -> JobOutcome:
    """An hour of 4 nodes."""
    return JobOutcome(
        seed=0,
        wall_s=3600.0,
        samples=samples,
        num_failures=1,
        num_redone=0,
        num_restarts=0,
        node_hours=4.0,
        ledger={},
        wasted={},
        curve=(),
        lost_at_s=(),
    )


def text(
    gains: Mapping[Choice, Interval | None], *, price: float = 2.0, pay: SparesPay | None = None
) -> str:
    """The answer on a terminal of 80 columns."""
    console = Console(width=80, record=True, file=StringIO())
    console.print(advice_text(recommendation(gains, price=price, pay=pay)))
    return console.export_text()


def recommendation(
    gains: Mapping[Choice, Interval | None], *, price: float = 2.0, pay: SparesPay | None = None
) -> Recommendation:
    """The advice that has these gains over others."""
    given = {LEADER: Interval(0.0, 0.0, 0.0), **gains}
    advice = Advice(
        leader=LEADER,
        outcomes={choice: (outcome(360_000), outcome(360_000)) for choice in given},
        gains=given,
        reasons={REFUSED: "too few nodes; values that work: 12"},
        spares_pay=pay,
    )
    return Recommendation(
        question=Question(
            model="gpt2",
            nodes=4,
            devices_per_node=1,
            failures={"kind": "poisson", "per_node_hour": 1 / 32, "repair_s": 1800.0},
            price=price,
            hours=1.0,
            batch=0,
        ),
        scenario=scenario(),
        advice=advice,
        left_out={"adaptive": "it searches long"},
        num_seeds=2,
        persist_every=895,
    )


def flat(words: str) -> str:
    """The words without line breaks."""
    return " ".join(words.split())


def test_a_clear_winner_is_named_with_its_gain() -> None:
    """Over the next best policy, restarts, and other values of the same choice."""
    said = flat(
        text(
            {
                MORPH: Interval(0.12, 0.10, 0.14),
                SPARE: Interval(0.05, 0.04, 0.06),
                STATIC: Interval(0.3, 0.2, 0.4),
            }
        )
    )

    assert "Use policy reinstantiate with f = 1, no spares, a save every 30 min: 100 sam" in said
    assert "$22.22 per million samples." in said
    assert "12.0% (10.0% to 14.0%) more than policy morph, the next best." in said
    assert "30.0% (20.0% to 40.0%) more than restarts under torchrun on a static cluster" in said
    assert "spares matters: 5.0% (4.0% to 6.0%) more as advised than with 1 spare." in said
    assert "tell it apart" not in said


def test_what_split_backwards_give_is_said_and_has_a_row() -> None:
    """The other systems of the table have whole ones; so it is no neighbour of the advice."""
    given = {replace(LEADER, whole_backwards=True): Interval(0.12, 0.10, 0.14)}
    words = text(given)

    said = flat(words)
    assert "12.0% (10.0% to 14.0%) more than policy reinstantiate with whole backwards, as" in said
    assert sum(line.startswith(" whole backwards ") for line in words.splitlines()) == 1
    assert "The number of spares could not be varied." in said
    content = advice_json(recommendation(given))
    assert [choice["whole_backwards"] for choice in content["choices"]] == [False, True]


def test_a_difference_within_the_noise_makes_no_winner() -> None:
    """The first sentence says so."""
    said = flat(text({MORPH: Interval(0.02, -0.01, 0.05), SPARE: Interval(0.0, -0.1, 0.1)}))

    assert "These runs do not tell it apart from policy morph." in said
    assert "show no difference from policy morph, the next best (-1.0% to 5.0%)" in said
    assert "spares makes no difference that these runs show (1 spare)" in said


def test_choices_with_the_same_runs_are_one_row_and_no_winner_is_made_of_them() -> None:
    """Nothing was read back, so the time between saves did nothing."""
    same = Interval(0.0, 0.0, 0.0)
    saves = {replace(LEADER, save_min=minutes): same for minutes in (5, 240)}
    words = text({MORPH: same, **saves})
    said = flat(words)

    assert "a save every 5 or 240 min" in said
    assert sum(line.startswith(" a save every") for line in words.splitlines()) == 1
    assert "Each run trains as much with policy morph, the next best." in said
    assert "since none went back to an older state" in said


def test_what_trains_nothing_is_said_without_a_gain() -> None:
    """Nothing can be divided by it."""
    said = flat(text({MORPH: None, SPARE: None}))

    assert "Some runs train nothing with policy morph, the next best." in said
    assert "The number of spares matters: with 1 spare some runs train nothing." in said


@pytest.mark.parametrize(
    ("pay", "sentence"),
    [
        (
            SparesPay(policy="morph", multiple=4, multiple_max=4, num_spares=2),
            "2 spares with policy morph would pay at 4 times the failure rate, a loss every 2 h",
        ),
        (
            SparesPay(policy="morph", multiple=0, multiple_max=32, num_spares=0),
            "that was tried shows that spares pay with policy morph, up to a loss every 15 min.",
        ),
    ],
)
def test_the_rate_at_which_spares_pay_is_said(pay: SparesPay, sentence: str) -> None:
    """Or that they pay at none that was tried."""
    assert sentence in flat(text({MORPH: Interval(0.1, 0.05, 0.2)}, pay=pay))


def test_what_was_not_played_has_its_reason_and_the_end_is_a_part_of_a_job_file() -> None:
    """Policies that were left out for their time, too; and no line is cut."""
    said = text({MORPH: Interval(0.1, 0.05, 0.2)}, price=0.0)

    assert "Not played: absorb with f = 2 and 4 spares: too few nodes." in said
    assert "Not played: adaptive was left out: it searches long." in said
    assert "persist_every = 895 # Iterations: 30 min." in said
    assert "global_batch_size = 512" in said  # Else 895 iterations are not 30 min.
    assert "$" not in said
    assert max(map(len, said.splitlines())) <= 80
    assert "\N{HORIZONTAL ELLIPSIS}" not in said


def test_the_json_has_no_gain_for_the_advised_choice() -> None:
    """Only what it gains over others."""
    content = advice_json(recommendation({MORPH: Interval(0.1, 0.05, 0.2)}))

    gains = {choice["policy"]: choice["advice_gains"] for choice in content["choices"]}
    assert gains == {"reinstantiate": None, "morph": {"mean": 0.1, "low": 0.05, "high": 0.2}}
    assert content["advised"]["policy"] == "reinstantiate"
    assert content["job"]["checkpoint"] == {"persist_every": 895, "copies": 0}
