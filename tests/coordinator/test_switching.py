"""What a change is weighed as: all that goes on until its plan begins."""

from dataclasses import replace

import pytest

from jobs import shaped_plan
from planaria.coordinator.switching import meanwhile
from planaria.core.plan import Link, Transfer, Transition
from planaria.policies.policy import Outlook, Prices, expected_samples_per_s

PLAN = shaped_plan((1, 1), 6)
PRICES = Prices(links={"inter_node": Link(0.0, 100.0)}, layer_bytes=(100, 400, 100), regroup_s=9.0)
STAY = Transition(
    before=PLAN,
    after=replace(PLAN, epoch=1),
    rounds=(),
    downtime_s=0.0,
    iteration_s=2.0,
    redone_samples=0,
    policy="any",
    answer="stay",
)
CHANGE = replace(STAY, answer="change", iteration_s=1.0, downtime_s=0.5)
WAVES = ((Transfer(0, 0, 1, 100),), (Transfer(1, 0, 1, 400),))


def test_waves_move_while_iterations_are_trained_as_before() -> None:
    """Two iterations of two seconds; the second waits two seconds for four hundred bytes."""
    weighed = meanwhile(STAY, CHANGE, WAVES, prices=PRICES)

    assert (weighed.after, weighed.iteration_s) == (STAY.after, 2.0)
    assert weighed.downtime_s == 0.5 + 2.0
    assert weighed.then == replace(CHANGE, downtime_s=4.0)


@pytest.mark.parametrize(("to_failure_s", "pays"), [(2.0, False), (200.0, True)])
def test_what_moves_longer_than_it_is_to_the_next_failure_gains_nothing(
    to_failure_s: float, *, pays: bool
) -> None:
    """Twice as fast, but the job is paused for 2.5 s before."""
    outlook = Outlook(failures_per_s=1.0 / to_failure_s)
    weighed = meanwhile(STAY, CHANGE, WAVES, prices=PRICES)

    change, stay = (
        expected_samples_per_s(one, global_batch_size=6, outlook=outlook) for one in (weighed, STAY)
    )

    assert (change > stay) == pays


def test_without_layers_to_move_the_plan_begins_at_the_next_commit() -> None:
    """All that it costs is the switch."""
    weighed = meanwhile(STAY, CHANGE, (), prices=PRICES)

    outlook = Outlook(failures_per_s=0.01)
    scores = (
        expected_samples_per_s(one, global_batch_size=6, outlook=outlook)
        for one in (weighed, CHANGE)
    )
    assert next(scores) == pytest.approx(next(scores))
