"""Faults drawn from a seed: all kinds and places, the same again for the same seed."""

from collections import Counter
from dataclasses import replace
from random import Random

from planaria.chaos.draw import (
    FAULTS_MAX,
    OUTPUTS,
    TEMPORARIES,
    Draw,
    DrawLimits,
    Surroundings,
    draw_run,
)
from planaria.core.inject import (
    AFTER_COMMIT,
    ITERATION_STEPS,
    LOCAL_KINDS,
    RECOVERY_STEPS,
    check_injections,
    parse_injection,
)

WORLD = DrawLimits(num_nodes=6, num_needed=2, iterations=20, training_s=3.0, lease_s=3.0)
DRAWS = [draw_run(WORLD, Random(f"7:{number}")) for number in range(600)]


def test_a_seed_draws_the_same_again() -> None:
    """A run that failed can be repeated, as far as seconds can."""
    assert [draw_run(WORLD, Random(f"7:{number}")) for number in range(600)] == DRAWS
    assert [draw_run(WORLD, Random(f"8:{number}")) for number in range(600)] != DRAWS


def test_every_draw_can_be_injected() -> None:
    """It names only nodes that there may be, and at most one flip; who joins has plans."""
    for draw in DRAWS:
        injections = [parse_injection(spec) for spec in draw.specs]
        check_injections(injections, num_nodes=WORLD.num_nodes)
        assert 1 <= len(injections) <= FAULTS_MAX
        assert sum(injection.num_nodes for injection in injections) == draw.num_joins
        assert sum(injection.kind == "flip" for injection in injections) <= 1


def test_all_kinds_and_steps_are_drawn_and_half_of_the_places_are_seconds() -> None:
    """But for flips and slow nodes, whose place is an iteration."""
    injections = [parse_injection(spec) for draw in DRAWS for spec in draw.specs]
    steps = Counter(i.place.step for i in injections if i.place.at_s < 0)
    timed = [i for i in injections if i.place.at_s >= 0]
    placed = [i for i in injections if i.place.at_s < 0 and i.kind not in ("flip", "slow")]

    assert {injection.kind for injection in injections} == set(LOCAL_KINDS)
    assert steps.keys() == {*ITERATION_STEPS, *RECOVERY_STEPS, AFTER_COMMIT}
    assert 0.8 < len(timed) / len(placed) < 1.25
    assert all(i.place.at_s <= 1.2 * WORLD.training_s + 0.01 for i in timed)


def test_some_strike_together_and_most_leave_enough_nodes() -> None:
    """Else most runs would end early, and tell little."""

    def num_lost(draw: Draw) -> int:
        lasting = ("kill", "hang", "preempt", "cut", "flip")
        injections = [parse_injection(spec) for spec in draw.specs]
        return len({n for i in injections if i.kind in lasting for n in i.nodes})

    together = [d for d in DRAWS if len({s.split("@")[1] for s in d.specs}) < len(d.specs)]
    hopeless = [d for d in DRAWS if num_lost(d) > WORLD.num_nodes - WORLD.num_needed]

    assert len(together) > len(DRAWS) / 5
    assert 0 < len(hopeless) < len(DRAWS) / 5


def test_only_kinds_that_are_asked_for_are_drawn() -> None:
    """A job on other nodes may not be able to have all."""
    world = DrawLimits(
        num_nodes=2,
        num_needed=1,
        iterations=1,
        training_s=0.1,
        lease_s=1.0,
        kinds=("kill", "leader"),
    )
    specs = [spec for number in range(50) for spec in draw_run(world, Random(number)).specs]

    assert {parse_injection(spec).kind for spec in specs} == {"kill", "leader"}


def test_some_runs_have_surroundings_of_no_use_and_most_have_none() -> None:
    """All kinds of them; what closes does so in an iteration that there is."""
    surroundings = [draw.surroundings for draw in DRAWS]
    outputs = Counter((s.output, s.closes_at >= 0) for s in surroundings)

    assert {s.temporary for s in surroundings} == {"", *TEMPORARIES}
    assert {s.output for s in surroundings} == {"", *OUTPUTS}
    assert all(outputs[output, closes] > 20 for output in OUTPUTS for closes in (False, True))
    assert all(
        s.output and s.closes_at < WORLD.iterations for s in surroundings if s.closes_at >= 0
    )
    assert len(DRAWS) / 2 < sum(s == Surroundings() for s in surroundings) < len(DRAWS)


def test_a_temporary_directory_is_only_as_this_machine_can_make_it() -> None:
    """A full one takes the right to mount."""
    for temporaries in ((), ("missing",)):
        world = replace(WORLD, temporaries=temporaries)
        found = {draw_run(world, Random(number)).surroundings.temporary for number in range(200)}
        assert found == {"", *temporaries}


def test_surroundings_are_told_in_words() -> None:
    """Behind the faults, where a run is told."""
    closed = Surroundings(temporary="full", output="terminal", closes_at=5)
    draw = Draw(specs=("kill:1@3",), num_joins=0, persist_every=0, surroundings=closed)

    assert draw.words == ("kill:1@3", "temporary=full", "terminal=closed@5")
    assert Surroundings(output="pipe").words == ("pipe=blocked",)
    assert Surroundings().words == ()
