"""Compares rerouted schedules with optimal ones; the goal is to be at most 5% longer.

For each case of tests/helpers/lost_places.py it takes the plan that `planner/reroute/reroutes.py`
finds, with its time by the estimator, and the optimum of the same problem, which CP-SAT proves
(exact/solver.py). Times are those of forwards and backwards; reductions are the same for both. Then
it draws cases, many of them unusual: stages that differ by a factor of three, or memory for only as
many microbatches as a pipeline without losses needs. They have the same goal where an optimum is
proven in time; `--drawn N` sets their number.

Exits 1 if a case misses the goal, if an optimum is not the one in the tests, or if no optimum of a
drawn case is proven; exits 2 if ortools is not installed.
"""

import argparse
import importlib.util
import sys
import time
from math import inf
from pathlib import Path
from random import Random
from typing import Final

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from helpers.lost_places import CASES, Case, computed_s, drawn_case
from planaria.planner.reroute.reroutes import best_reroute

GOAL: Final = 0.05
ACTIONS_MIN: Final = 24
TIMEOUT_S: Final = 60.0
DRAWN_TIMEOUT_S: Final = 5.0


def main() -> int:
    """Prints a line for each case; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--drawn", type=int, default=100, help="how many cases are drawn")
    num_drawn = parser.parse_args().drawn
    if importlib.util.find_spec("ortools") is None:
        print("skipped: ortools is not installed; pip install -e '.[bench]' -c constraints.txt")
        return 2
    print("pipelines  microbatches  actions  lost            ours  optimum  longer  solved in")
    longest = max(_longer(case) for case in CASES)
    verdict = "met" if longest <= GOAL else "MISSED"
    print(f"longest beyond the optimum: {100 * longest:.1f}% (goal {100 * GOAL:.0f}%: {verdict})")
    longest = max(longest, _longest_drawn(num_drawn))
    return int(longest > GOAL)


def _longer(case: Case) -> float:
    """The share by which our schedule is longer than the optimum; infinite if no optimum is proven
    or it differs from that in the tests."""
    from exact.solver import optimum

    problem, plan = case.problem(), case.plan()
    found = best_reroute(problem, plan)
    assert found is not None
    ours_s = computed_s(problem, found)
    begin_s = time.perf_counter()
    best = optimum(problem, plan, unit_s=1.0, end_max=round(ours_s), timeout_s=TIMEOUT_S)
    took_s = time.perf_counter() - begin_s
    is_right = best.is_proven and best.end == case.optimum_s and case.num_actions >= ACTIONS_MIN
    longer = ours_s / best.end - 1.0
    lost = " ".join(f"{p}.{place}" for p, place in case.lost)
    depths = "+".join(str(len(ends)) for ends in case.ends)
    print(
        f"{depths:<9}  {case.num_microbatches:12}  {case.num_actions:7}  {lost:<12}  "
        f"{ours_s:6.0f}  {best.end:7}  {100 * longer:5.1f}%  {took_s:7.1f} s"
        f"{'' if is_right else f'  NOT as in the tests, {case.optimum_s}, or not proven'}",
        flush=True,
    )
    return longer if is_right else inf


def _longest_drawn(num_drawn: int) -> float:
    """The largest share by which our schedule is longer, over drawn cases whose optimum is proven;
    infinite if there is none."""
    from exact.solver import optimum

    longer = {}
    for seed in range(num_drawn):
        case = drawn_case(Random(seed))
        assert case.num_actions >= ACTIONS_MIN
        problem, plan = case.problem(), case.plan()
        found = best_reroute(problem, plan)
        assert found is not None
        ours_s = computed_s(problem, found)
        end_max = round(ours_s)
        best = optimum(problem, plan, unit_s=1.0, end_max=end_max, timeout_s=DRAWN_TIMEOUT_S)
        if best.is_proven:
            longer[seed] = ours_s / best.end - 1.0
    longest = max(longer.values(), default=inf)
    beyond = [seed for seed, share in longer.items() if share > GOAL]
    print(
        f"drawn: {num_drawn}, of which the optimum of {len(longer)} was proven; ours is longer "
        f"by {100 * sum(longer.values()) / max(1, len(longer)):.1f}% on average, "
        f"{100 * longest:.1f}% at most (goal {100 * GOAL:.0f}%: "
        f"{f'MISSED by seeds {beyond}' if beyond or not longer else 'met'})"
    )
    return longest


if __name__ == "__main__":
    sys.exit(main())
