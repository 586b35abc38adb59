"""Runs under faults: their outcomes as JSON."""

import msgspec

from planaria.chaos.runs import RunOutcome


def test_the_names_in_a_runs_json_stay() -> None:
    """Readers of chaos-SEED-RUN.json know these names, two of which are not those of the fields."""
    outcome = RunOutcome(
        number=0,
        specs=("kill:1@2",),
        settings=(),
        surroundings=(),
        seconds=1.5,
        injected_faults={"kill": 1},
        violations=("not over",),
    )

    assert list(msgspec.to_builtins(outcome).items()) == [
        ("number", 0),
        ("specs", ("kill:1@2",)),
        ("settings", ()),
        ("surroundings", ()),
        ("seconds", 1.5),
        ("fired", {"kill": 1}),
        ("reason", ""),
        ("justification", ""),
        ("undecidable", ""),
        ("is_resumed", False),
        ("wrongs", ("not over",)),
        ("log", ()),
        ("report", None),
    ]
