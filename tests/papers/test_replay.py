"""The replays of Oobleck, Varuna and Bamboo: what a loss costs each of them.

Nodes take 45 s until they are ready; Oobleck regroups in 2 s here, so its first iteration begins
after 47 s. An iteration has 10 samples and takes 10 s, on any number of nodes.
"""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.papers.oobleck.replay import (
    Change,
    FailedSaves,
    Overlap,
    Replay,
    ReplayedSystem,
    ReplayOutcome,
    Status,
)
from planaria.papers.oobleck.systems import BambooSystem, OobleckSystem, Rates, VarunaSystem

RATES = Rates(10.0, (1.0,) * 16)
ADDED = tuple((0, "add", node) for node in range(1, 31))


def varuna(*, has_free_saves: bool = False) -> VarunaSystem:
    """It restarts in 20 s, and saves in 5 s after each second iteration."""
    return VarunaSystem(
        RATES, {0: 20_000}, 5_000, iterations_per_save=2, has_free_saves=has_free_saves
    )


def replay(
    system: ReplayedSystem, *changes: Change, end_ms: int = 1_000_000
) -> tuple[Replay, ReplayOutcome]:
    """A run of 30 nodes through changes; the last line of its list is at the end."""
    run = Replay(system)
    return run, run.outcome((*ADDED, *changes, (end_ms, "remove", 30)))


def test_without_losses_a_system_trains_all_the_time() -> None:
    """One sample a second; the last iteration is not ended."""
    run, outcome = replay(OobleckSystem(RATES, 2_000))

    assert run.iterations[0].start_ms == 47_000
    assert outcome.samples_per_s == pytest.approx(1.0)
    assert outcome.trained_share == pytest.approx(1.0)


def test_oobleck_loses_the_present_iteration_and_the_time_to_regroup() -> None:
    """A loss 3 s into an iteration: the one after it takes 3 + 2 + 10 s."""
    run, _ = replay(OobleckSystem(RATES, 2_000), (100_000, "remove", 1))

    long = [one for one in run.iterations if one.end_ms - one.start_ms != 10_000]
    assert [(one.start_ms, one.end_ms) for one in long] == [(97_000, 112_000)]
    assert all(one.is_counted for one in run.iterations)


def test_varuna_goes_back_to_its_last_save() -> None:
    """It begins at 60 s, and saves after two iterations: 80 to 85, 105 to 110, .."""
    run, outcome = replay(varuna(), (128_000, "remove", 1), end_ms=200_000)

    lost = [(one.start_ms, one.end_ms) for one in run.iterations if not one.is_counted]
    assert lost == [(110_000, 120_000)]
    assert outcome.spent_ms["fallback"] == 10_000


def test_varuna_saves_after_the_first_iteration_that_follows_a_loss() -> None:
    """So that a second loss does not take it as well. It may end while nodes regroup."""
    run, _ = replay(varuna(), (128_000, "remove", 1), (160_000, "remove", 2), end_ms=300_000)

    after = [one for one in run.iterations if one.start_ms >= 120_000]
    assert after[0].end_ms == 130_000
    assert after[0].is_counted


def test_free_saves_take_no_time() -> None:
    """Iterations follow each other without a gap."""
    run, _ = replay(varuna(has_free_saves=True))

    ends = [one.end_ms for one in run.iterations[:-1]]
    assert ends == [one.start_ms for one in run.iterations[1:]]


def test_a_save_in_which_a_node_is_lost_fails() -> None:
    """And takes the iterations that it was to save; the authors let it fail for twice its time."""
    system = varuna()
    run = Replay(system, saves=FailedSaves.AS_MEANT)
    run.outcome((*ADDED, (83_000, "remove", 1), (400_000, "remove", 2)))

    assert [one.is_counted for one in run.iterations[:2]] == [False, False]


@pytest.mark.parametrize(("second", "num_restarts"), [(8, 0), (4, 1), (2, 1)])
def test_bamboo_absorbs_two_losses_unless_they_are_neighbours(
    second: int, num_restarts: int
) -> None:
    """Stage 2's node takes over the lost stage 3: now neither it nor stage 4 can be lost."""
    places = _places()
    lost = (80_000, "remove", places[0, 3]), (80_500, "remove", places[0, second])
    _, outcome = replay(BambooSystem(RATES, 7_000), *lost, end_ms=90_000)

    assert outcome.spent_ms["restart"] == 30_000 * (1 + num_restarts)


def test_bamboo_takes_longer_for_the_iteration_in_which_a_node_is_lost() -> None:
    """Half as long again from the loss on: 75 to 85 s becomes 87.5 s."""
    lost = (80_000, "remove", _places()[0, 3])
    run, _ = replay(BambooSystem(RATES, 7_000), lost, end_ms=100_000)

    assert [one.end_ms for one in run.iterations] == [87_500]


def test_nodes_that_are_lost_together_stop_the_job_until_the_next_change() -> None:
    """As in the authors' simulator; with one regrouping for both the job goes on."""
    lost = (100_000, "remove", 1), (100_000, "remove", 2)
    stopped, outcome = replay(OobleckSystem(RATES, 2_000), *lost, end_ms=500_000)
    run = Replay(OobleckSystem(RATES, 2_000), overlap=Overlap.IS_ONE)
    mended = run.outcome((*ADDED, *lost, (500_000, "remove", 30)))

    assert stopped.status is Status.STOPPED
    assert stopped.iterations[-1].end_ms < 110_000
    assert run.iterations[-1].end_ms > 480_000
    assert mended.samples_per_s > 0.9 * outcome.samples_per_s


@settings(max_examples=20, deadline=None)
@given(
    losses=st.lists(
        st.tuples(st.integers(50_000, 400_000), st.integers(1, 30)),
        unique_by=lambda loss: loss[1],
        max_size=15,
    ),
    name=st.sampled_from(("oobleck", "varuna", "varuna-free", "bamboo")),
)
def test_no_iteration_counts_twice_and_no_rate_is_above_that_without_losses(
    losses: Sequence[tuple[int, int]], name: str
) -> None:
    """Whatever is lost when: iterations follow each other, and only some of them count."""
    systems: dict[str, ReplayedSystem] = {
        "oobleck": OobleckSystem(RATES, 2_000),
        "varuna": varuna(),
        "varuna-free": varuna(has_free_saves=True),
        "bamboo": BambooSystem(RATES, 7_000),
    }
    changes = sorted((at_ms, "remove", node) for at_ms, node in losses)
    run = Replay(systems[name])
    outcome = run.outcome((*ADDED, *changes, (400_001, "add", 99)))

    starts = [one.start_ms for one in run.iterations]
    ends = [one.end_ms for one in run.iterations]
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
    assert all(start < end for start, end in zip(starts, ends, strict=True))
    assert 0.0 <= outcome.samples_per_s <= 1.0 + 1e-9
    assert 0.0 <= outcome.trained_share <= 1.0 + 1e-9


def _places() -> dict[tuple[int, int], int]:
    """The node in each place of Bamboo's first pipelines."""
    run, _ = replay(BambooSystem(RATES, 7_000), end_ms=76_000)
    return {place: number for number, node in run.nodes.items() for place in node.places}
