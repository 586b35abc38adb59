"""The tables of simulated jobs, on terminals of any width."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from helpers.simulated_clusters import small
from planaria.observe.ledger import Category, Ledger
from planaria.observe.recoveries import SourceTier
from planaria.show.simulations import _mean_text, simulation_json, simulation_table, sweep_table
from planaria.simulator.economics.compare import JobOutcome, Outcomes


def outcome_with(*, seed: int) -> JobOutcome:
    """A job that spent some time on everything but redundant work."""
    ledger = {str(category): 1.0 for category in Category} | {"redundant": 0.0, "useful": 5_000.0}
    return JobOutcome(
        seed=seed,
        wall_s=sum(ledger.values()),
        samples=40_000 + seed,
        num_failures=14,
        num_redone=2_000,
        num_restarts=27,
        node_hours=1_529.2,
        ledger=ledger | {"wall": sum(ledger.values())},
        wasted=Ledger(0.0, 0.0).wasted_parts(),
        curve=((0.0, 0),),
        lost_at_s=(),
    )


OUTCOMES: Outcomes = {
    name: [outcome_with(seed=seed) for seed in range(3)]
    for name in ("planaria", "odyssey-oracle", "replicas")
}


def text_of(table: object, *, width: int) -> str:
    """What a terminal shows."""
    console = Console(file=io.StringIO(), width=width)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


@pytest.mark.parametrize("width", [40, 80, 120, 400])
def test_no_number_or_heading_of_the_ledger_is_broken(width: int) -> None:
    """A narrow terminal gets the columns in tables below each other, a wide one in one table."""
    text = text_of(simulation_table(small(), OUTCOMES), width=width)
    ledger = text[text.index("Share of the time") :]
    words = ledger.split()

    spent = [str(category) for category in Category if category is not Category.REDUNDANT]
    assert set("_".join(spent).split("_")) <= set(words)
    assert "redundant" not in words
    assert ledger.count("99.8%") == len(OUTCOMES)
    assert (ledger.count("odyssey-oracle") == 1) == (width >= 120)
    assert all(len(line) <= width for line in ledger.splitlines())


def test_every_heading_is_whole_at_80_columns() -> None:
    """Those of goodput and counts, too."""
    words = text_of(simulation_table(small(), OUTCOMES), width=80).split()

    assert {"samples/s", "interval", "failures", "iterations", "restarts", "million"} <= set(words)


def test_a_share_is_told_from_none() -> None:
    """What took a little has a number, and what took nothing a dash."""
    runs = OUTCOMES["planaria"]
    others = [replace(run, ledger={**run.ledger, "redundant": 100.0}) for run in runs]
    text = text_of(simulation_table(small(), {"planaria": runs, "bamboo": others}), width=400)
    rows = {line.split()[0]: line for line in text.splitlines() if line.strip()}

    assert "-" in rows["planaria"].split()
    assert "-" not in rows["bamboo"].split()
    assert "< 0.1%" in rows["planaria"]


@pytest.mark.parametrize("width", [40, 80])
def test_no_number_of_a_sweep_is_lost_beside_long_names(width: int) -> None:
    """The names are folded, and no letter of them is left out."""
    setting = "cluster.first_key=" + "0123456789" * 9
    text = text_of(sweep_table({f"{setting}-{index}": OUTCOMES for index in (1, 2)}), width=width)

    assert text.count(_mean_text(OUTCOMES["planaria"])) == 2 * len(OUTCOMES)
    names = "".join(line.split()[0] for line in text.splitlines() if line.strip())
    assert f"{setting}-1" in names
    assert f"{setting}-2" in names
    assert all(len(line) <= width for line in text.splitlines())


def test_a_sweep_of_many_systems_is_whole_at_80_columns() -> None:
    """Each system keeps its heading."""
    systems = {f"system-{index}": OUTCOMES["planaria"] for index in range(12)}
    text = text_of(sweep_table({"failures.per_node_hour=0.01": systems}), width=80)

    assert all(f"{name}," in text for name in systems)
    assert text.count("failures.per_node_hour=0.01") > 1
    assert all(len(line) <= 80 for line in text.splitlines())


def test_wasted_time_is_told_by_tier() -> None:
    """A system has columns for the tiers that it recovers from, means over seeds, and a dash where
    another one recovers from a tier and it does not."""
    wasted = Ledger(0.0, 0.0).recover(SourceTier.MEMORY)
    wasted = wasted.spend(Category.TRANSFER, 1_500.0).spend(Category.REDO, 4_000.0)
    runs = [replace(run, wasted=wasted.wasted_parts()) for run in OUTCOMES["planaria"]]
    outcomes = {"planaria": OUTCOMES["planaria"], "gemini": runs}
    text = text_of(simulation_table(small(), outcomes), width=400)
    table = text[text.index("Wasted time by") :]
    rows = {line.split()[0]: line.split()[1:] for line in table.splitlines() if line.strip()}

    assert rows["gemini"] == ["1.0", "2,500.0", "1,500.0", "4,000.0"]
    assert rows["planaria"] == ["-"] * 4
    assert table.count("memory:") == 4
    assert "disk" not in table
    assert simulation_json(small(), outcomes)["systems"]["gemini"]["wasted"]["memory"] == {
        "recoveries": 1.0,
        "redo_s": 2_500.0,
        "transfer_s": 1_500.0,
        "wasted_s": 4_000.0,
    }


def test_without_recoveries_there_is_no_table_of_wasted_time() -> None:
    """It would have no column."""
    assert "Wasted time" not in text_of(simulation_table(small(), OUTCOMES), width=80)
