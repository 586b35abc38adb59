"""The ledger: every second of wall time in one category, none twice, none missing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.observe.ledger import Category, Ledger

SECONDS = st.floats(0.0, 1e6)
PAIRS = st.permutations(list(Category)).map(lambda order: (order[0], order[1]))


@given(st.floats(0.0, 1e6), st.lists(st.tuples(st.booleans(), PAIRS, SECONDS), max_size=20))
def test_the_parts_sum_to_the_wall_time(
    start_s: float, changes: list[tuple[bool, tuple[Category, Category], float]]
) -> None:
    """After any sequence of changes, and no part is negative."""
    ledger = Ledger(start_s, start_s)
    for is_entry, (source, target), seconds in changes:
        if is_entry:
            ledger = ledger.enter(target, ledger.now_s + seconds)
        else:
            ledger = ledger.move(seconds, source, target)
    parts = ledger.parts()
    wall_s = parts.pop("wall")

    assert sum(parts.values()) == pytest.approx(wall_s, abs=1e-6)
    assert wall_s == ledger.now_s - start_s
    assert min(parts.values()) >= 0.0


def test_seconds_count_for_what_the_job_did_not_for_what_comes_next() -> None:
    """`enter` books the time up to now under the category that it leaves."""
    ledger = Ledger(10.0, 10.0).enter(Category.USEFUL, 13.0).enter(Category.IDLE, 20.0)
    ledger = ledger.move(2.0, Category.USEFUL, Category.CHECKPOINT_STALL)
    parts = {name: seconds for name, seconds in ledger.parts().items() if seconds}

    assert parts == {"startup": 3.0, "useful": 5.0, "checkpoint_stall": 2.0, "wall": 10.0}


def test_no_more_is_moved_than_there_is() -> None:
    """Ranks may report a stall longer than the time that the job has counted."""
    ledger = Ledger(0.0, 0.0, Category.USEFUL).enter(Category.USEFUL, 1.0)
    parts = ledger.move(5.0, Category.USEFUL, Category.CHECKPOINT_STALL).parts()

    assert (parts["useful"], parts["checkpoint_stall"]) == (0.0, 1.0)


def test_parts_have_the_reports_names() -> None:
    """All categories, also those that have no seconds."""
    names = (
        *("useful", "redundant", "redo", "detect", "decide", "regroup"),
        *("transfer", "restart", "checkpoint_stall", "evaluation", "startup", "idle", "wall"),
    )

    assert tuple(Ledger(0.0, 0.0).parts()) == names


def test_time_does_not_run_backwards() -> None:
    """A clock that jumps would make parts negative."""
    with pytest.raises(AssertionError):
        Ledger(5.0, 5.0).enter(Category.USEFUL, 4.0)
