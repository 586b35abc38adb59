"""The picture of simulated jobs."""

from helpers.simulated_clusters import outcome, small
from planaria.cli.simulate.simulate_command import SYSTEMS
from planaria.show.pictures.simulation_plots import simulation_figure


def test_every_system_has_its_line_and_bar() -> None:
    """With a colour of its own: its name stands in both legends and at its bar."""
    outcomes = {system.name: [outcome(small())] for system in SYSTEMS}
    text = simulation_figure(small(), outcomes, picture="svg").decode()

    assert {name: text.count(f">{name}<") for name in outcomes} == dict.fromkeys(outcomes, 3)
