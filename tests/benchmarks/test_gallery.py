"""The gallery: cells that are kept and run anew, and the page that is made of them."""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from gallery import done_lines
from gallery_cells import (
    CASES,
    PLANARIA,
    VERSION,
    Case,
    Cell,
    ExperimentCell,
    append_line,
    cells,
    line_of,
    missing_cells,
    read_lines,
    runs_by_case,
)
from gallery_page import page, write_page
from planaria.simulator.failures.occurrences import OccurrenceKind

sys.path.pop()  # Or a script of benchmarks/ would be taken for a folder of tests/.

ROOT = Path(__file__).parents[2]
CASE = Case("gpt2", 4, "preset spot-p3", 0.5)
SEED = 20_261_130


def line(
    system: str, rates: Sequence[float], *, case: Case = CASE, first: int = 0, digest: str = "a"
) -> dict[str, Any]:
    """A finished cell of a case whose first plan trains 200 samples/s."""
    seeds = [first, first + len(rates)]
    return {
        "version": VERSION,
        "key": json.dumps([str(case), system, *seeds]),
        "case": asdict(case),
        "system": system,
        "seeds": seeds,
        "first_samples_per_s": 200.0,
        "samples_per_s": list(rates),
        "losses": [2] * len(rates),
        "processor_s": 1.0,
        "commit": "1234abcd",
        "digest": digest,
    }


def test_finished_cells_are_kept_and_stale_ones_run_again(tmp_path: Path) -> None:
    """A second run does what is missing; a cell of other code is missing."""
    results = tmp_path / "gallery.jsonl"
    done, missing = (Cell(CASE, "oobleck", range(first, first + 2)) for first in (0, 2))
    (one,) = done_lines([done], end_s=time.monotonic() + 600.0, num_processes=1)
    append_line(results, one)

    assert one["samples_per_s"] == pytest.approx(line_of(done)["samples_per_s"], abs=0.0)
    assert missing_cells([done, missing], read_lines(results)) == [missing]

    append_line(results, {**one, "digest": "of other code"})
    assert missing_cells([done, missing], read_lines(results)) == [done, missing]


def test_a_file_that_was_cut_in_its_last_line_lacks_only_that(tmp_path: Path) -> None:
    """Whoever stops the script loses one cell."""
    results = tmp_path / "gallery.jsonl"
    for system in ("oobleck", "varuna"):
        append_line(results, line(system, [100.0, 104.0]))
    results.write_text(results.read_text()[:-20])

    assert [one["system"] for one in read_lines(results).values()] == ["oobleck"]


def test_a_cell_that_ran_again_comes_after_stale_ones_of_other_seeds(tmp_path: Path) -> None:
    """A script that was stopped had written it behind them; the page took the stale ones."""
    results = tmp_path / "gallery.jsonl"
    first, more = line("oobleck", [100.0, 104.0]), line("oobleck", [1.0, 2.0])
    for one in (first, {**more, "key": "more", "seeds": [2, 4]}, {**first, "digest": "new"}):
        append_line(results, one)

    (systems,) = runs_by_case(list(read_lines(results).values())).values()

    assert systems["oobleck"].samples_per_s == {0: 100.0, 1: 104.0}


def test_no_cell_begins_when_the_time_is_over() -> None:
    """The budget is for all processes together."""
    wanted = [Cell(CASE, "oobleck", range(2))]

    assert not list(done_lines(wanted, end_s=time.monotonic() - 1.0, num_processes=2))


def test_every_system_runs_on_every_trace_with_a_hundred_seeds() -> None:
    """And a run that ends early has some seeds of all of them."""
    all_cells = [cell for cell in cells(100) if isinstance(cell, Cell)]
    seeds = {
        (case, system): [
            seed
            for cell in all_cells
            if cell.case == case and cell.entrant == system
            for seed in cell.seeds
        ]
        for case in CASES
        for system in (PLANARIA, "oobleck", "odyssey-oracle", "replicas")
    }
    num_pairs = len({(cell.case, cell.entrant) for cell in all_cells})

    assert all(some == list(range(100)) for some in seeds.values())
    assert len({(cell.case, cell.entrant) for cell in all_cells[:num_pairs]}) == num_pairs


def test_spot_machines_are_taken_with_notice_and_without() -> None:
    """Traces hold no notices; lines from before there were any still count."""
    told = replace(CASE, notice_s=120.0)
    happens = [
        list(
            case.scenario("adaptive").failures.occurrences(4, horizon_s=36_000.0, rng=Random(SEED))
        )
        for case in (CASE, told)
    ]
    notices = [[x for x in some if x.kind is OccurrenceKind.NOTICE] for some in happens]

    assert not notices[0]
    assert notices[1]
    assert [x for x in happens[1] if x not in notices[1]] == happens[0]
    assert str(told) == "preset spot-p3, told 120 s before, gpt2 on 4 nodes, 0.5 h"
    assert "notice_s" not in CASE.table
    assert Case(**told.table) == told
    for case in CASES:
        if case.notice_s:
            assert replace(case, notice_s=0.0) in CASES


def test_the_code_of_a_system_is_part_of_its_cells_digest() -> None:
    """A change of one published system leaves the cells of the others."""
    oobleck, again, varuna = (
        Cell(CASE, system, seeds).digest
        for system, seeds in (("oobleck", range(2)), ("oobleck", range(9)), ("varuna", range(2)))
    )

    assert oobleck == again
    assert oobleck != varuna
    assert oobleck != Cell(Case("gpt3-2.7b", 4, "preset opt", 1.0), "oobleck", range(2)).digest


def test_the_page_begins_with_what_planaria_loses() -> None:
    """Differences are paired by seed, in percent of what the first plan trains."""
    other = Case("gpt2", 4, "preset opt", 0.5)
    lines = [
        line(PLANARIA, [100.0, 120.0, 80.0]),
        line("oobleck", [90.0, 110.0, 70.0, 10.0]),
        line("varuna", [110.0, 131.0, 89.0]),
        line("recycle", [60.0, 150.0, 95.0]),
        line(PLANARIA, [100.0, 120.0], case=other),
        line("oobleck", [104.0, 124.0], case=other),
    ]

    text = page(lines)
    sections = text.split("\n## ")
    assert "with 100 seeds each, these pairs would take 0.1." in sections[0]
    assert sections[1].startswith("What planaria loses")
    assert "`planaria` is behind in 2 of 4 comparisons, and in 1 more" in sections[1]
    assert "A comparison has 2 to 3 seeds." in sections[1]
    rows = [row for row in sections[1].splitlines() if "+-" in row]
    assert rows[:2] == [
        f"| -5.00 +-1.24 | varuna | {CASE} | 3 |",
        f"| -2.00 +-0.00 | oobleck | {other} | 2 |",
    ]
    assert "recycle" in rows[2]
    assert f"| {CASE} | 2.0 | 50.0 | varuna 55.0 | -5.00 +-1.24 | 3 |" in text
    assert "| oobleck | 35.00 +-34.37 | +5.00 +-0.00 | 4 |" in text


def test_runs_of_older_code_do_not_mix_with_newer_ones() -> None:
    """A mean over both would be of no code."""
    lines = [
        line("oobleck", [100.0, 100.0], first=0, digest="old"),
        line("oobleck", [120.0, 120.0], first=2, digest="new"),
    ]

    assert runs_by_case(lines)[CASE]["oobleck"].samples_per_s == {2: 120.0, 3: 120.0}


def test_a_page_of_cells_that_ran_shows_them_with_their_pictures(tmp_path: Path) -> None:
    """Two systems, and a published table with the rows that the command prints."""
    written = [
        line_of(Cell(CASE, "planaria, reinstantiate", range(2))),
        line_of(Cell(CASE, "oobleck", range(2))),
        line_of(ExperimentCell("oobleck-table-2")),
    ]
    lines = json.loads(json.dumps(written))

    write_page(tmp_path / "RESULTS.md", lines)
    text = (tmp_path / "RESULTS.md").read_text()

    assert "| GPT-3 6.7b, varuna, 10m | 0.260 | 0.255 | 0.981 | simulated |" in text
    for picture in ("goodput.svg", "oobleck-table-2.svg"):
        assert f"](results/{picture})" in text
        assert (tmp_path / "results" / picture).read_bytes().startswith(b"<?xml")


def test_the_checked_in_page_is_that_of_the_checked_in_results() -> None:
    """No number on it is typed by hand."""
    lines = list(read_lines(ROOT / "benchmarks" / "results" / "gallery.jsonl").values())
    text = (ROOT / "docs" / "RESULTS.md").read_text("utf-8")

    assert lines
    assert text == page(lines), "write it anew: benchmarks/gallery.py --minutes 0, see make results"
    for picture in text.split("](results/")[1:]:
        assert (ROOT / "docs" / "results" / picture.partition(")")[0]).is_file()
