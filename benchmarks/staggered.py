"""Computes an upper bound on what ReCycle's staggered optimizer could save.

If each stage steps as soon as its own gradients are summed, bubbles at the end of an iteration and
at the start of the next one overlap. At best, consecutive iterations then run like one long
iteration. The time that each of them adds is half of the difference between an iteration with
three times the microbatches and one with the job's. A layer takes 1 s for a forward and for each
part of a backward, messages take no time, and the memory of ranks is not limited. Printed are

    now      time of an iteration as it is, with steps after the commit of all ranks
    endless  time that an iteration adds to an endless one
    gain     upper bound on how much shorter iterations would be

Its costs are described in docs/decisions/0005-steps-behind-the-commit.md. This has no goal.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from helpers.lost_places import EQUAL, Lost, grid, problem_of
from planaria.planner.reroute.reroutes import best_reroute

# Number of pipelines, places of each, microbatches of each, and the places that are lost.
CASES: Final[tuple[tuple[int, int, int, Lost], ...]] = (
    (4, 4, 8, ()),
    (4, 4, 8, ((0, 1),)),
    (4, 4, 8, ((0, 0), (1, 1), (2, 2), (3, 3))),
    (8, 4, 8, ((0, 1),)),
    (4, 4, 32, ()),
    (4, 4, 32, ((0, 0), (1, 1), (2, 2), (3, 3))),
    (4, 8, 16, tuple((i % 4, i) for i in range(8))),
)


def main() -> int:
    """Prints a line for each case."""
    print(
        f"{'PP x DP, microbatches, lost':<30} {'backward':<8} {'now':>6} {'endless':>8} {'gain':>6}"
    )
    for num_pipelines, num_places, each, lost in CASES:
        for splits in (False, True):
            once, thrice = (
                _iteration_s(num_pipelines, num_places, times * each, lost, splits=splits)
                for times in (1, 3)
            )
            endless = (thrice - once) / 2
            name = f"{num_places} x {num_pipelines}, {each} each, {len(lost)} lost"
            print(
                f"{name:<30} {'split' if splits else 'whole':<8} {once:6.1f} {endless:8.1f} "
                f"{100 * (1 - endless / once):5.1f}%"
            )
    return 0


def _iteration_s(
    num_pipelines: int, num_places: int, each: int, lost: Lost, *, splits: bool
) -> float:
    problem = problem_of((EQUAL,) * num_places, each * num_pipelines)
    found = best_reroute(
        replace(problem, splits_backward=splits), grid(num_pipelines, num_places, lost)
    )
    assert found is not None
    return found.iteration_s


if __name__ == "__main__":
    sys.exit(main())
