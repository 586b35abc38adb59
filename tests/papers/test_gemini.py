"""Gemini's arithmetic comes back."""

import pytest

from helpers.published import rows_of
from planaria.papers.gemini.zero_timelines import P4D, zero_iteration


def test_saving_mt_nlg_takes_42_minutes_and_a_failure_wastes_105() -> None:
    """Ours are 42.4 and 106.0, as 530e9 parameters of 12 bytes do not divide evenly."""
    save, wasted = rows_of("gemini-mt-nlg")

    assert (save.published, wasted.published) == (42.0, 105.0)
    assert save.ours == pytest.approx(42.4)
    assert wasted.ours == pytest.approx(106.0)
    assert save.has_come_back
    assert wasted.has_come_back


def test_two_copies_survive_two_lost_nodes_of_16_with_93_percent() -> None:
    """The number of the paper, and the ring's, which it only draws."""
    rows = {tuple(row.keys.values()): row for row in rows_of("gemini-figure-9")}

    group, ring = rows[16, 2, 2, "group"], rows[16, 2, 2, "ring"]
    assert group.published == 93.3
    assert group.has_come_back
    assert ring.ours == pytest.approx(86.7, abs=0.05)


def test_over_13_times_needs_the_81_seconds_of_a_save() -> None:
    """And with them the frequency is no longer 8 times HighFreq's; both are printed."""
    ratios = {
        (row.keys["system"], row.keys["failure"]): row.ours
        for row in rows_of("gemini-figure-10")
        if row.published == 13.0
    }
    frequency = {row.keys["system"]: row.ours for row in rows_of("gemini-figure-12")}

    assert ratios["gemini, highfreq", "hardware"] == pytest.approx(12.7, abs=0.05)
    assert ratios["gemini, highfreq", "software"] == pytest.approx(12.9, abs=0.05)
    assert ratios["gemini, highfreq and 81 s", "hardware"] == pytest.approx(13.1, abs=0.05)
    assert ratios["gemini, highfreq and 81 s", "software"] == pytest.approx(13.3, abs=0.05)
    assert frequency["highfreq"] == pytest.approx(7.7, abs=0.05)
    assert frequency["highfreq and 81 s"] == pytest.approx(9.05, abs=0.01)


def test_a_thousand_nodes_train_91_percent_of_the_time_if_no_node_is_replaced() -> None:
    """85.9% if each failure takes the 12 minutes of a replacement."""
    rows = {
        (row.keys["nodes"], row.keys["failures a day"], row.keys["quantity"]): row
        for row in rows_of("gemini-figure-15")
    }

    assert rows[16, 0.0, "highfreq loses"].has_come_back
    assert rows[1000, 15.0, "gemini, 7 min"].ours == pytest.approx(91.1, abs=0.05)
    assert rows[1000, 15.0, "gemini, 12 min"].ours == pytest.approx(85.9, abs=0.05)
    assert not rows[1000, 15.0, "gemini, 12 min"].has_come_back
    assert rows[1000, 15.0, "gemini more, saved after 561 s"].has_come_back


def test_copies_fit_into_the_idle_spans_of_zero_iterations() -> None:
    """As the paper says of all its models; and some idle time is left."""
    for name in ("gemini-figure-7", "gemini-figure-13"):
        ratios = [row for row in rows_of(name) if row.published == 1.0]
        assert ratios
        assert all(row.has_come_back for row in ratios)
    for name in ("gemini-figure-8", "gemini-figure-13"):
        left = [row.ours for row in rows_of(name) if row.keys["quantity"] == "idle s with copies"]
        assert left
        assert all(seconds is not None and seconds > 0 for seconds in left)


def test_copies_that_block_cost_a_tenth_of_an_iteration() -> None:
    """10.1% as printed, from bytes and operations alone; one buffer costs more than published."""
    rows = {tuple(row.keys.values()): row for row in rows_of("gemini-figure-16")}

    assert rows["blocking", "computed"].published == 10.1
    assert rows["blocking", "computed"].ours == pytest.approx(11.0, abs=0.1)
    assert rows["no pipelining", "computed"].ours == pytest.approx(5.9, abs=0.1)
    assert not rows["no pipelining", "computed"].has_come_back
    assert rows["gemini", "computed"].ours == 0.0


def test_the_network_is_busy_for_every_byte() -> None:
    """Two gathers and a scatter of each layer, but for the layers that are still there."""
    iteration = zero_iteration(P4D, 100e9)
    wire_s = 2 * 100e9 / 96 * (15 / 16) / 50e9

    assert len(iteration.busy) == 3 * 96 - 1
    assert iteration.idle_s == pytest.approx(iteration.end_s - (3 * 96 - 1) * wire_s)


def test_the_shape_of_gpt_2_100b_has_other_parameters_than_100e9() -> None:
    """Named as what does not come back."""
    shape, checkpoint = rows_of("gemini-table-2")

    assert shape.ours == pytest.approx(174.0, abs=0.1)
    assert not shape.has_come_back
    assert checkpoint.has_come_back


def test_a_ring_loses_state_twice_as_often_as_groups() -> None:
    """Figure 3: two of six pairs against four."""
    rows = rows_of("gemini-figure-3")

    assert [row.published for row in rows if row.published and row.published > 1] == [2, 4, 50]
    assert all(row.has_come_back for row in rows if row.published is not None)


def test_corollary_1_is_exact_for_few_lost_nodes_and_a_bound_beyond() -> None:
    """At six of 16 it says 0, where 22% survive."""
    rows = {tuple(row.keys.values()): row for row in rows_of("gemini-figure-9")}
    last = rows[16, 2, 6, "group, Corollary 1"]

    assert rows[16, 2, 3, "group, Corollary 1"].has_come_back
    assert last.published == 0.0
    assert last.ours == pytest.approx(22.4, abs=0.05)
