"""What an answer costs, and which one is the best."""

from math import inf

import pytest

from planaria.core.plan import (
    Link,
    Pipeline,
    PipelineTemplate,
    Stage,
    Transfer,
    Transition,
    plain_plan,
)
from planaria.policies.policy import (
    Prices,
    best_transition,
    downtime_s,
    expected_samples_per_s,
    profile_prices,
)
from strategies import MEBIBYTE, layer_profile, model_profile

PRICES = Prices(
    links={"intra_node": Link(0.0, 1000.0), "inter_node": Link(0.5, 100.0)},
    layer_bytes=(100, 200),
    regroup_s=3.0,
)


def transition(
    *, downtime_s: float, iteration_s: float, redone_samples: int = 0, answer: str = "local"
) -> Transition:
    pipeline = Pipeline(PipelineTemplate((Stage(0, 2, 1),), 1), (0,))
    return Transition(
        before=plain_plan(0, (pipeline,), (2,)),
        after=plain_plan(1, (pipeline,), (2,)),
        rounds=(),
        downtime_s=downtime_s,
        iteration_s=iteration_s,
        redone_samples=redone_samples,
        policy="any",
        answer=answer,
    )


def test_downtime_is_regrouping_and_what_the_busiest_link_needs() -> None:
    """Ranks 0 and 1 share a node of two devices: their link is the fast one."""
    within = Transfer(1, 0, 1, 200)  # 0.2 s in a node, 2.5 s between nodes.
    transfers = (Transfer(0, 0, 2, 100), Transfer(1, 2, 4, 200), within)

    assert downtime_s(transfers, PRICES, devices_per_node=2) == pytest.approx(3.0 + 2.5)
    # Node 0 sends 300 bytes, and so does node 2 receive and send.
    assert downtime_s(transfers, PRICES, devices_per_node=1) == pytest.approx(3.0 + 3.5)
    assert downtime_s((within,), PRICES, devices_per_node=2) == pytest.approx(3.0 + 0.2)
    assert downtime_s((), PRICES, devices_per_node=1) == 3.0


def test_prices_count_parameters_and_optimizer_state() -> None:
    """A layer without its optimizer state could not go on with the same bits."""
    layers = (layer_profile("a", 0.1), layer_profile("b", 0.1, parameter_bytes=MEBIBYTE))
    profile = model_profile(layers)

    prices = profile_prices(profile, regroup_s=0.25)

    assert prices.layer_bytes == (12 * MEBIBYTE, 3 * MEBIBYTE)
    assert (prices.links, prices.regroup_s) == (profile.links, 0.25)


@pytest.mark.parametrize(
    ("time_to_failure_s", "expected"),
    [
        (100.0, (8 / 2.0 * (100 - 10) - 4) / 100),
        (10.0, -4 / 10),
        (1.0, -4 / 1),
        (inf, 8 / 2.0),
    ],
)
def test_expected_samples_are_those_made_after_the_downtime_but_for_the_redone(
    time_to_failure_s: float, expected: float
) -> None:
    """A batch of 8 every 2 s after 10 s, of which 4 samples do not count."""
    priced = transition(downtime_s=10.0, iteration_s=2.0, redone_samples=4)

    goodput = expected_samples_per_s(
        priced, global_batch_size=8, time_to_failure_s=time_to_failure_s
    )

    assert goodput == pytest.approx(expected)


@pytest.mark.parametrize(
    ("time_to_failure_s", "answer"),
    [(0.5, "quick"), (12.0, "quick"), (30.0, "fast"), (inf, "fast")],
)
def test_best_transition_weighs_downtime_against_speed(
    time_to_failure_s: float, answer: str
) -> None:
    """(T - 1) / 3 samples against (T - 10) / 2: from T = 28 on the longer downtime pays."""
    quick = transition(downtime_s=1.0, iteration_s=3.0, answer="quick")
    fast = transition(downtime_s=10.0, iteration_s=2.0, answer="fast")

    for candidates in ((quick, fast), (fast, quick)):
        best = best_transition(candidates, global_batch_size=8, time_to_failure_s=time_to_failure_s)
        assert best.answer == answer


def test_of_equal_transitions_the_first_is_taken() -> None:
    """Every coordinator must take the same one; a policy names its least disruptive first."""
    one, other = (transition(downtime_s=1.0, iteration_s=1.0, answer=a) for a in ("b", "a"))

    assert best_transition((one, other), global_batch_size=8, time_to_failure_s=60.0) is one


def test_a_transition_that_changes_the_global_batch_cannot_be_made() -> None:
    """Whoever is left computes all of it."""
    right = transition(downtime_s=1.0, iteration_s=1.0)
    less = plain_plan(1, right.after.pipelines, (1,))

    with pytest.raises(AssertionError):
        Transition(
            before=right.before,
            after=less,
            rounds=(),
            downtime_s=1.0,
            iteration_s=1.0,
            redone_samples=0,
            policy="any",
            answer="any",
        )
