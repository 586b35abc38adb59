"""What a person sees: short lines that hold together, on a terminal and in a pipe."""

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from helpers.jobs import shaped_plan
from planaria.observe.metrics import FinalRecord, IterationRecord, Report
from planaria.show.live import LiveDisplay, summary

NAMES = ("embedding", *(f"transformer.h.{i}" for i in range(8)), "head")
SHA256 = "ab" * 32


def record(iteration: int) -> IterationRecord:
    return IterationRecord(
        iteration=iteration,
        loss=2.5,
        samples=10,
        sample_digest="",
        seconds=0.5,
        epoch=0,
        predicted_s=0.5,
        peak_bytes=0,
        predicted_peak_bytes=0,
    )


def report() -> Report:
    return Report(
        job={},
        seed=0,
        versions={},
        workers=(),
        iterations=(record(0),),
        events=(),
        checkpoints={},
        ledger={"useful": 1.0, "idle": 0.0, "wall": 2.0},
        final=FinalRecord(
            iteration=1,
            loss=2.5,
            parameters_sha256=SHA256,
            optimizer_sha256=SHA256,
            nodes=(0,),
            epoch=0,
            checkpoint="/a/long/path" * 10,
        ),
    )


def shown(width: int, *, is_terminal: bool) -> str:
    """Everything that a job of two pipelines shows."""
    console = Console(
        file=StringIO(), width=width, force_terminal=is_terminal, force_interactive=is_terminal
    )
    display = LiveDisplay(console)
    display.show_step("importing torch")
    display.show_plan(shaped_plan((2, 3), 10), NAMES, iterations=2, first=0)
    display.note("a note", at_s=0.0)
    display.show_iteration(record(0))
    display.show_next_plan(shaped_plan((1, 3), 10), at_s=0.0)
    display.show_iteration(record(1))
    display.show_printed_line("the job's own words")
    display.stop()
    console.print(summary(report()), soft_wrap=True)
    output = console.file
    assert isinstance(output, StringIO)
    return output.getvalue()


def test_a_run_without_iterations_has_a_summary() -> None:
    """As that of a head that took a job up while its last save was written."""
    console = Console(file=StringIO(), width=80)
    console.print(summary(replace(report(), iterations=())), soft_wrap=True)

    assert isinstance(console.file, StringIO)
    assert f"parameters  {SHA256}" in console.file.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_the_plan_has_a_short_line_for_each_node(width: int) -> None:
    """Its layers by number and by name, what the names share said once."""
    lines = [line.split() for line in shown(width, is_terminal=False).splitlines()]

    assert ["0", "4", "0", "0-4", "embedding", "..", "transformer.h.3"] in lines
    assert ["1", "6", "2", "0-2", "embedding", "..", "transformer.h.1"] in lines
    assert ["3", "3-5", "transformer.h.2", "..", "4"] in lines


def test_a_pipe_gets_plain_unbroken_lines() -> None:
    """Hashes and paths are copied from there, whatever width the console believes in."""
    text = shown(40, is_terminal=False)

    assert "\x1b" not in text
    assert f"parameters  {SHA256}\n" in text
    assert "/a/long/path" * 10 + "\n" in text
    assert "iteration 0  loss 2.5000  20.0 samples/s\n" in text
    assert "importing torch ...\n" in text


def test_hashes_fit_a_terminal_of_80_columns() -> None:
    """A wrapped hash cannot be compared by eye."""
    lines = shown(80, is_terminal=False).splitlines()

    assert all(len(line) <= 80 for line in lines if SHA256 in line)


def test_a_terminal_keeps_what_was_printed_and_shows_where_it_is() -> None:
    """The panel is redrawn; the plan, notes and the job's own words stay above it."""
    text = shown(80, is_terminal=True)

    assert "the job's own words" in text
    assert text.count("transformer.h.3") == 1
    assert "1/2" in text


@pytest.mark.parametrize("is_terminal", [False, True], ids=["pipe", "terminal"])
def test_a_job_that_goes_on_with_other_nodes_says_with_which(is_terminal: bool) -> None:
    """How many are left, and in how large pipelines; the panel counts them from then on."""
    text = shown(80, is_terminal=is_terminal)

    assert "4 nodes go on in pipelines of 1+3" in text
    assert not is_terminal or "samples/s   500 ms (predicted 500)   4 nodes" in text


def test_a_node_that_is_left_alone_goes_on() -> None:
    """One node is no nodes."""
    console = Console(file=StringIO(), width=80, force_terminal=False)
    LiveDisplay(console).show_next_plan(shaped_plan((1,), 2), at_s=0.0)

    assert isinstance(console.file, StringIO)
    assert console.file.getvalue() == "1 node goes on in pipelines of 1\n"
