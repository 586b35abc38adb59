"""What a change is weighed as: all that goes on until its plan begins."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.jobs import shaped_plan, template
from helpers.losses import even_template
from planaria.coordinator.switching import KnownWaves, followed_answers, weighed_changes
from planaria.core.plan import Link, Pipeline, Transfer, Transition, plain_plan
from planaria.policies.building import transfer_s
from planaria.policies.policy import Prices
from planaria.policies.value import Outlook, expected_samples_per_s

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
    keeps_plan=True,
)
SWITCH = replace(STAY, answer="change", iteration_s=1.0, keeps_plan=False)
CHANGE = replace(SWITCH, rounds=((Transfer(0, 0, 1, 100),), (Transfer(1, 0, 1, 400),)))


def weighed(*changes: Transition) -> tuple[Transition, ...]:
    """Of the changes, with a quarter of a second for each switch."""
    waves = KnownWaves(leaving=(), prices=PRICES)
    return weighed_changes(changes, iteration_s=2.0, waves=waves, switch_s=lambda _plan: 0.25)


def test_waves_move_while_iterations_are_trained_as_before() -> None:
    """Two waves; the second waits two seconds for four hundred bytes. Before each switch the plan
    as it is trains an iteration, and one while a wave moves."""
    (change,) = weighed(CHANGE)

    assert (change.after, change.iteration_s) == (STAY.after, 2.0)
    assert change.downtime_s == 3 * 0.25 + 2.0
    assert change.then == replace(CHANGE, downtime_s=5 * 2.0)


@pytest.mark.parametrize(("to_failure_s", "pays"), [(2.0, False), (200.0, True)])
def test_what_moves_longer_than_it_is_to_the_next_failure_gains_nothing(
    to_failure_s: float, *, pays: bool
) -> None:
    """Twice as fast, but the job is paused for 2.75 s before."""
    change, stay = scores(weighed(CHANGE, STAY), to_failure_s)

    assert (change > stay) == pays


def test_without_layers_to_move_the_plan_begins_at_the_next_commit() -> None:
    """All that it costs is the switch, and an iteration by the plan as it is."""
    (change,) = weighed(SWITCH)

    assert change.downtime_s == 0.25
    assert change.then == replace(SWITCH, downtime_s=2.0)


def test_to_stay_costs_nothing() -> None:
    """Whatever the policy says of it; and others wait for its iterations, not for those told."""
    stay = replace(STAY, iteration_s=4.0, downtime_s=9.0)

    assert weighed(CHANGE, stay)[1] == replace(stay, downtime_s=0.0)
    assert weighed(CHANGE, stay)[0].downtime_s == 3 * 0.25


def test_waves_pause_for_the_plan_as_it_is_and_the_last_switch_for_the_new_one() -> None:
    """A second a pipeline: two waves by two of them, and then one is left."""
    change = replace(CHANGE, after=replace(shaped_plan((2,), 6), epoch=1))
    (as_that,) = weighed_changes(
        (change,),
        iteration_s=2.0,
        waves=KnownWaves(leaving=(), prices=PRICES),
        switch_s=lambda plan: float(len(plan.pipelines)),
    )

    assert as_that.downtime_s == 2 * 2.0 + 1.0 + 2.0


def test_what_follows_an_answer_is_weighed_as_that_change_will_be() -> None:
    """As above: two waves of two seconds, a pause for each switch and for what they lack."""
    quick = replace(STAY, answer="quick", downtime_s=0.5, then=CHANGE, keeps_plan=False)
    (followed, alone) = followed_answers(
        (quick, replace(quick, then=None)), prices=PRICES, switch_s=lambda _plan: 0.25
    )

    assert followed.downtime_s == 0.5 + weighed(CHANGE)[0].downtime_s
    assert followed.then == weighed(CHANGE)[0].then
    assert alone == replace(quick, then=None)


def test_waves_keep_the_one_link_of_a_node_for_no_longer_than_an_iteration() -> None:
    """Two devices of a node send 150 bytes each to another node, where 200 would fit; what one
    sends to the other takes another link."""
    plan = plain_plan(0, (Pipeline(even_template(2, 2), (0, 1)),), (6,))
    links = {"inter_node": Link(0.0, 100.0), "intra_node": Link(0.0, 100.0)}
    moved = (Transfer(0, 0, 2, 150), Transfer(1, 1, 3, 150), Transfer(1, 1, 0, 150))
    change = replace(SWITCH, before=plan, after=replace(plan, epoch=1), rounds=(moved,))

    waves = KnownWaves(leaving=(), prices=replace(PRICES, links=links)).of(change, iteration_s=2.0)

    assert [len(wave) for wave in waves] == [2, 1]


def test_waves_count_near_and_far_links_of_a_node_as_one() -> None:
    """Each alone would fit into an iteration; the node that sends both has one direction out."""
    plan = plain_plan(0, (Pipeline(even_template(3), (0, 1, 2)),), (6,))
    links = {"inter_node": Link(0.0, 100.0), "inter_domain": Link(0.0, 100.0)}
    domains = {0: "left", 1: "left", 2: "right"}
    prices = replace(PRICES, links=links, domains=domains)
    moved = (Transfer(0, 0, 1, 150), Transfer(0, 0, 2, 150))
    change = replace(SWITCH, before=plan, after=replace(plan, epoch=1), rounds=(moved,))

    waves = KnownWaves(leaving=(), prices=prices).of(change, iteration_s=2.0)

    assert [len(wave) for wave in waves] == [1, 1]


def test_nodes_of_a_pipeline_get_their_layers_in_the_same_waves() -> None:
    """Their links are disjoint. As only the last wave was open, 24 nodes that joined together took
    25 waves, though three of four layers of each fit into the first."""
    whole = template(24, num_layers=96)
    pipelines = [Pipeline(whole, tuple(range(first, first + 24))) for first in (0, 24)]
    plan = plain_plan(0, (pipelines[0],), (6,))
    stages = enumerate(whole.stages)
    moved = tuple(
        Transfer(layer, node, 24 + node, 600)
        for node, stage in stages
        for layer in range(stage.first_layer, stage.end_layer)
    )
    change = replace(
        SWITCH, before=plan, after=plain_plan(1, (*pipelines,), (3, 3)), rounds=(moved,)
    )

    waves = KnownWaves(leaving=(), prices=PRICES).of(change, iteration_s=20.0)

    assert [len(wave) for wave in waves] == [72, 24]


def test_layers_on_disjoint_links_that_each_take_longer_than_an_iteration_come_together() -> None:
    """Each was a wave of its own, and all waited for one after the other."""
    moved = (Transfer(0, 0, 2, 400), Transfer(1, 1, 3, 400), Transfer(2, 0, 2, 100))
    plan = shaped_plan((1, 1, 1, 1), 6)
    change = replace(SWITCH, before=plan, after=replace(plan, epoch=1), rounds=(moved,))

    waves = KnownWaves(leaving=(), prices=PRICES).of(change, iteration_s=2.0)

    assert waves == (moved[:2], moved[2:])


def test_a_layer_that_takes_longer_than_an_iteration_shares_its_wave_with_shorter_ones() -> None:
    """But none waits behind it on the same link: that would make the pause longer."""
    moved = (Transfer(0, 0, 2, 100), Transfer(1, 0, 2, 400), Transfer(2, 1, 3, 300))
    plan = shaped_plan((1, 1, 1, 1), 6)
    change = replace(SWITCH, before=plan, after=replace(plan, epoch=1), rounds=(moved,))

    waves = KnownWaves(leaving=(), prices=PRICES).of(change, iteration_s=2.0)

    assert waves == ((moved[1], moved[2]), (moved[0],))


def test_layers_with_the_fewest_holders_that_stay_come_first() -> None:
    """Whatever their sizes: a node that leaves may be gone early, and takes what only it holds."""
    plan = shaped_plan((2, 1), 6)
    first, last = (min(plan.layers_by_rank[rank]) for rank in (0, 1))
    moved = (Transfer(first, 0, 1, 400), Transfer(last, 2, 0, 100))
    change = replace(SWITCH, before=plan, after=replace(plan, epoch=1), rounds=(moved,))

    for leaving in (0, 1):
        waves = KnownWaves(leaving=(leaving,), prices=PRICES).of(change, iteration_s=2.0)

        assert waves[0][0].layer == (first, last)[leaving]


@given(
    st.dictionaries(
        st.tuples(st.integers(0, 9), st.integers(4, 7)),
        st.dictionaries(st.integers(0, 3), st.integers(1, 300), min_size=1),
        min_size=1,
    ),
    st.floats(0.1, 20.0),
)
def test_no_layer_would_have_room_in_a_wave_before_its_own(
    needs: dict[tuple[int, int], dict[int, int]], iteration_s: float
) -> None:
    """And no wave takes longer than an iteration, unless a layer of it does alone."""
    links = {"inter_node": Link(0.0, 100.0), "inter_domain": Link(0.1, 30.0)}
    prices = replace(PRICES, links=links, domains={n: "ab"[n % 2] for n in range(8)})
    plan = shaped_plan((2, 2, 2, 2), 6)
    moved = tuple(
        Transfer(layer, source, target, num_bytes)
        for (layer, target), parts in needs.items()
        for source, num_bytes in parts.items()
    )
    change = replace(SWITCH, before=plan, after=replace(plan, epoch=1), rounds=(moved,))

    waves = KnownWaves(leaving=(), prices=prices).of(change, iteration_s=iteration_s)

    assert sorted(transfer for wave in waves for transfer in wave) == sorted(moved)
    limits_s: list[float] = []
    for wave in waves:
        whole = {(transfer.layer, transfer.target) for transfer in wave}
        for layer, target in whole:
            parts = [t for t in moved if (t.layer, t.target) == (layer, target)]
            for before, limit_s in zip(waves, limits_s, strict=False):
                assert transfer_s((*before, *parts), prices, devices_per_node=1) > limit_s
        alone_s = [
            transfer_s([t for t in wave if (t.layer, t.target) == need], prices, devices_per_node=1)
            for need in whole
        ]
        limits_s.append(max(iteration_s, *alone_s))
        assert transfer_s(wave, prices, devices_per_node=1) <= limits_s[-1]


def test_of_no_changes_none_is_weighed() -> None:
    """As where nothing is proposed."""
    assert weighed() == ()


def scores(transitions: tuple[Transition, ...], to_failure_s: float) -> list[float]:
    """What is expected of each, in samples a second."""
    outlook = Outlook(failures_per_s=1.0 / to_failure_s)
    return [
        expected_samples_per_s(one, global_batch_size=6, outlook=outlook) for one in transitions
    ]
