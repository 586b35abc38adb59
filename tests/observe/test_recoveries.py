"""Wasted time by tier: seconds of `redo` and `transfer` in one tier, none twice, none missing."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from planaria.observe.ledger import Category, Ledger
from planaria.observe.recoveries import SourceTier

STEPS = st.one_of(
    st.tuples(st.sampled_from(list(Category)), st.floats(0.0, 1e6)),
    st.sampled_from(list(SourceTier)),
    st.none(),
)


@example([(Category.REDO, 1e-190), (Category.USEFUL, 1.0), None, (Category.REDO, 0.0)])
@given(st.lists(STEPS, max_size=30))
def test_the_tiers_sum_to_what_was_redone_and_waited_for(
    steps: list[tuple[Category, float] | SourceTier | None],
) -> None:
    """Whatever the job does between recoveries, and in them."""
    ledger = Ledger(0.0, 0.0)
    for step in steps:
        match step:
            case None:
                ledger = ledger.close_recovery()
            case SourceTier():
                ledger = ledger.recover(step)
            case category, seconds:
                ledger = ledger.spend(category, ledger.now_s + seconds)
    spent, wasted = ledger.parts(), ledger.wasted_parts()

    assert tuple(wasted) == ("live", "memory", "disk", "start")
    assert sum(of["redo_s"] for of in wasted.values()) == pytest.approx(spent["redo"], abs=1e-6)
    assert sum(of["transfer_s"] for of in wasted.values()) == pytest.approx(
        spent["transfer"], abs=1e-6
    )
    assert all(of["wasted_s"] == of["redo_s"] + of["transfer_s"] for of in wasted.values())
    assert min(min(of.values()) for of in wasted.values()) >= 0.0


def test_a_recovery_has_the_tier_with_the_oldest_state() -> None:
    """It goes back to copies, a loss breaks it off, and then it goes back to a save: one recovery,
    which the save made as long as it was."""
    ledger = Ledger(0.0, 0.0).spend(Category.USEFUL, 10.0).move(3.0, Category.USEFUL, Category.REDO)
    ledger = ledger.recover(SourceTier.MEMORY).spend(Category.TRANSFER, 12.0)
    ledger = ledger.recover(SourceTier.DISK).move(4.0, Category.USEFUL, Category.REDO)
    ledger = ledger.recover(SourceTier.LIVE).spend(Category.TRANSFER, 17.0).close_recovery()
    wasted = ledger.recover(SourceTier.MEMORY).wasted_parts()

    assert wasted["disk"] == {
        "recoveries": 1.0,
        "redo_s": 7.0,
        "transfer_s": 7.0,
        "wasted_s": 14.0,
    }
    assert wasted["memory"]["recoveries"] == 1.0
    assert wasted["memory"]["wasted_s"] == wasted["live"]["recoveries"] == 0.0


def test_nodes_that_come_wait_for_live_layers_and_recover_from_nothing() -> None:
    """Their seconds count; no recovery does."""
    ledger = Ledger(0.0, 0.0).recover(SourceTier.DISK).close_recovery()
    ledger = ledger.spend(Category.TRANSFER, 2.0).close_recovery()
    wasted = ledger.wasted_parts()

    assert (wasted["live"]["recoveries"], wasted["live"]["transfer_s"]) == (0.0, 2.0)
    assert (wasted["disk"]["recoveries"], wasted["disk"]["transfer_s"]) == (1.0, 0.0)
