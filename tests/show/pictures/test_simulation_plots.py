"""The picture of simulated jobs."""

from dataclasses import replace

from helpers.simulated_clusters import outcome, small
from planaria.cli.simulate.simulate_command import SYSTEMS
from planaria.show.pictures.simulation_plots import simulation_figure


def test_every_system_has_its_line_and_bar() -> None:
    """With a colour of its own: its name stands in both legends and at its bar."""
    outcomes = {system.name: [outcome(small())] for system in SYSTEMS}
    text = simulation_figure(small(), outcomes, picture="svg").decode()

    assert {name: text.count(f">{name}<") for name in outcomes} == dict.fromkeys(outcomes, 3)


def test_the_axes_have_whole_numbers() -> None:
    """20,000 hours and 1,234,567 samples, not 2e+04 and 1.235e+06."""
    run = replace(
        outcome(small()), wall_s=72_000_000.0, curve=((0.0, 0), (72_000_000.0, 1_234_567))
    )
    text = simulation_figure(small(), {"planaria": [run]}, picture="svg").decode()

    assert ">20,000 h<" in text
    assert ">1,234,567<" in text
    assert "e+0" not in text


def test_lines_say_that_they_are_of_one_seed() -> None:
    """Bars are means over the seeds, lines are not; with one seed both are the same."""
    run = outcome(small())
    one, two = (
        simulation_figure(small(), {"planaria": [run] * number}, picture="svg").decode()
        for number in (1, 2)
    )

    assert "first seed" not in one
    assert two.count("with the first seed") == 2
