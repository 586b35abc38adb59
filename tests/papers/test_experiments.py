"""All experiments: every row has what a reader needs, and the page says what is printed."""

import re
import time
from pathlib import Path

import pytest

from helpers.published import rows_of
from planaria.errors import ConfigError
from planaria.papers.experiments import EXPERIMENTS, named_experiment
from planaria.papers.rows import Claim, How, PublishedRow

PAGE = Path(__file__).parents[2] / "docs" / "PAPERS.md"
COMPUTED = sorted(EXPERIMENTS.keys() - {"oobleck-table-3"})  # It measures, which takes seconds.
COMPUTED_S_MAX = 120.0


@pytest.mark.parametrize("name", COMPUTED)
def test_what_does_not_come_back_has_a_reason(name: str) -> None:
    """For a reader it is worth as much as a number."""
    assert rows_of(name)
    for row in rows_of(name):
        if row.ours is None:
            assert row.how is How.NOT, row
        if row.how is How.NOT or (row.published is not None and not row.has_come_back):
            assert row.note, row


@pytest.mark.timed
def test_all_computed_and_simulated_rows_take_less_than_two_minutes() -> None:
    """In seconds of a processor: nobody looks at numbers that take as long as a run."""
    start_s = time.process_time()
    num_rows = sum(len(EXPERIMENTS[name].rows()) for name in COMPUTED)

    assert num_rows > 300
    assert time.process_time() - start_s < COMPUTED_S_MAX


@pytest.mark.parametrize("name", COMPUTED)
def test_keys_name_a_row(name: str) -> None:
    """A script finds a row by them; all rows of an experiment have the same."""
    keys = [tuple(row.keys.items()) for row in rows_of(name)]

    assert len(set(keys)) == len(keys)
    assert len({tuple(row.keys) for row in rows_of(name)}) == 1


def test_the_page_has_the_counts_that_the_command_prints() -> None:
    """`planaria reproduce` prints them; a page of yesterday's numbers misleads."""
    line = r"^\| `([a-z0-9-]+)` \| (.*) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|"
    table = re.findall(line, PAGE.read_text(), re.M)

    assert [name for name, *_ in table] == list(EXPERIMENTS)
    for name, title, num_printed, num_back, num_own, num_own_back in table:
        assert title == EXPERIMENTS[name].title
        if name in COMPUTED:
            assert int(num_printed) == sum(row.is_comparable for row in rows_of(name)), name
            assert int(num_back) == sum(row.has_come_back for row in rows_of(name)), name
            own = [row for row in rows_of(name) if row.is_own]
            assert int(num_own) == len(own), name
            assert int(num_own_back) == sum(row.has_come_back for row in own), name
    totals = [sum(map(int, column)) for column in list(zip(*table, strict=True))[2:]]
    sentence = r"Of (\d+) rows that could come back (\d+) do; of the (\d+) of their own (\d+) do"
    (said,) = re.findall(sentence, " ".join(PAGE.read_text().split()))
    assert totals == list(map(int, said))


@pytest.mark.parametrize(
    ("claim", "ours", "has_come_back"),
    [
        (Claim.EQUAL, 10.1, True),
        (Claim.EQUAL, 10.2, False),
        (Claim.OVER, 13.0, True),
        (Claim.OVER, 9.9, False),
        (Claim.UNDER, 7.0, True),
        (Claim.UNDER, 10.1, False),
    ],
)
def test_a_number_has_come_back_in_the_sense_in_which_it_is_claimed(
    claim: Claim, ours: float, has_come_back: bool
) -> None:
    """Within 1%, or on the right side of a bound; never if it is of another machine."""
    row = PublishedRow({"of": "a"}, 10.0, ours, How.SIMULATED, claim=claim)
    measured = PublishedRow({"of": "a"}, 10.0, ours, How.NODES, claim=claim)

    assert row.has_come_back is has_come_back
    assert not measured.has_come_back


@pytest.mark.parametrize(
    ("claim", "note"), [(Claim.EQUAL, "counts as back within 5%"), (Claim.OVER, "")]
)
def test_only_a_number_that_is_to_be_equal_names_its_tolerance(claim: Claim, note: str) -> None:
    """A bound is kept or not."""
    row = PublishedRow({"of": "a"}, 10.0, 9.9, How.SIMULATED, tolerance=0.05, claim=claim)

    assert row.full_note == note


def test_a_number_that_follows_from_others_is_no_result_of_its_own() -> None:
    """It comes back, but says nothing; its note says why."""
    row = PublishedRow({"of": "a"}, 10.0, 10.0, How.INPUT, "a sum", repeats="it stands in b")

    assert row.has_come_back
    assert not row.is_own
    assert row.full_note == "a sum; no result of its own: it stands in b"


def test_table_4_repeats_the_systems_of_table_2() -> None:
    """Only Varuna without the overhead of saves is new in it."""
    own = {(row.keys["system"], row.is_own) for row in rows_of("oobleck-table-4")}

    assert own == {("varuna", False), ("oobleck", False), ("varuna-no-checkpoint", True)}


def test_a_name_that_is_unknown_is_a_mistake() -> None:
    """It names the known ones."""
    with pytest.raises(ConfigError, match="gemini-mt-nlg"):
        named_experiment("gemini-figure-99")
