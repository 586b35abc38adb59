"""What benchmarks/laptop.py makes of reports, by hand."""

import sys
from dataclasses import replace
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from laptop import Iterations, Recovery, Run, known_runs, run_line, run_of, verdicts
from show.test_comparison import LOST, iteration, report

sys.path.pop()  # Or a script of benchmarks/ would be taken for a folder of tests/.

CLOSE = Iterations(epoch=0, first_s=1.0, newest_s=1.1, measured_s=1.05)
WITHIN = Recovery("merge", least_s=0.1, likely_s=0.2, most_s=0.4, measured_s=0.3)
RUN = Run(iterations=(CLOSE,), recoveries=(WITHIN,), busy=0.0)


def test_an_epoch_is_judged_by_its_median_but_for_its_first_iteration() -> None:
    """Beside what was predicted when it began, and when it ended; one of a single iteration tells
    nothing."""
    told = report(
        iterations=(
            iteration(0, epoch=0, seconds=9.0, predicted_s=2.0),
            iteration(1, epoch=0, seconds=3.0, predicted_s=2.0),
            iteration(2, epoch=0, seconds=3.0, predicted_s=2.5),
            iteration(3, epoch=1, seconds=4.0, predicted_s=4.0),
        ),
        events=(
            replace(LOST, recovery_s=1.9, predicted_recovery_s_max=2.0, predicted_recovery_s=1.0),
            LOST,
        ),
    )

    run = run_of(told, busy=0.5)

    assert run.iterations == (Iterations(epoch=0, first_s=2.0, newest_s=2.5, measured_s=3.0),)
    assert run.recoveries == (Recovery("simple", 0.0, 1.0, 2.0, 1.9),)


def test_each_goal_can_be_missed() -> None:
    """One epoch that is far off, most of them a little, and one recovery of two."""
    far, off = replace(CLOSE, measured_s=1.4), replace(CLOSE, measured_s=1.23)
    late = replace(WITHIN, measured_s=0.5)
    for run, missed in (
        (RUN, []),
        (replace(RUN, iterations=(CLOSE, CLOSE, far)), [0]),
        (replace(RUN, iterations=(off,)), [1]),
        (replace(RUN, recoveries=(WITHIN, late)), [2]),
    ):
        texts, are_met = verdicts([run])

        assert [index for index, text in enumerate(texts) if "MISSED" in text] == missed
        assert are_met == (not missed)
    assert not verdicts([Run((), (), 0.0)])[1]


def test_runs_of_a_file_are_not_done_again(tmp_path: Path) -> None:
    """Those of another version count as never done."""
    path = tmp_path / "results"
    none = known_runs(path)
    other = run_line(RUN).replace('"version": 1', '"version": 0')
    path.write_text(run_line(RUN) + other + run_line(RUN))

    assert none == []
    assert known_runs(path) == [RUN, RUN]
