"""Measures how fast `planaria simulate` is: processor seconds for many nodes and many failures.

A job of Llama 2 7B runs on 1,000 nodes for 100 days, in which 4 of 1,000 nodes fail each day, and
on 32 nodes until about 3,000 have failed; each with the policies `reinstantiate` and `adaptive`. A
lost node is back after an hour. The benchmark prints a line for each: the processor seconds of the
simulated run, the number of losses, the seconds for each of them, the memory of the process so far,
and a checksum of the outcome, which is the same each time.

The goals are 60 s and 300 s at 1,000 nodes, and 10 s and 60 s at 32. Exits 1 above one of them.
`python benchmarks/clusters.py 32 reinstantiate` measures one; `--share 0.1` simulates a tenth of
the time, for a tenth of the goal.
"""

import argparse
import hashlib
import resource
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time
from typing import Final

from planaria.job.scenario_file import load_scenario
from planaria.simulator.economics.compare import play
from planaria.simulator.economics.planaria_system import PlanariaSystem

# Nodes and policy, losses of a node in an hour, simulated hours, and the goal in seconds.
CASES: Final = (
    (32, "reinstantiate", 0.01, 9375.0, 10.0),
    (32, "adaptive", 0.01, 9375.0, 60.0),
    (1000, "reinstantiate", 0.004 / 24, 2400.0, 60.0),
    (1000, "adaptive", 0.004 / 24, 2400.0, 300.0),
)
SCENARIO: Final = """
[cluster]
nodes = {nodes}
profile = "llama2-7b"
[job.resilience]
policy = "{policy}"
failures_tolerated = 1
[failures]
kind = "poisson"
per_node_hour = {per_node_hour!r}
repair_s = 3600.0
[run]
hours = {hours!r}
"""


def main() -> int:
    """Prints a line for each case that was asked for; returns 1 if one is above its goal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("asked", nargs="*", help="numbers of nodes and policies; all by default")
    parser.add_argument("--share", type=float, default=1.0, help="share of the simulated time")
    asked = parser.parse_args()
    print(
        f"{'nodes':>6} {'policy':>14} {'losses':>7} {'seconds':>8} {'goal':>6} {'a loss':>9}",
        end="",
    )
    print(f" {'memory':>7}  outcome")
    is_slow = False
    for nodes, policy, per_node_hour, hours, goal_s in CASES:
        if set(asked.asked) <= {str(nodes), policy}:
            content = SCENARIO.format(
                nodes=nodes, policy=policy, per_node_hour=per_node_hour, hours=hours * asked.share
            )
            is_slow |= _simulate(nodes, policy, content, goal_s=goal_s * asked.share)
    return 1 if is_slow else 0


def _simulate(nodes: int, policy: str, content: str, *, goal_s: float) -> bool:
    """Prints what a scenario takes; returns whether that is above the goal."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "clusters.toml"
        file.write_text(content)
        scenario = load_scenario(file, overrides=[])
    began_s = process_time()
    outcome = play(scenario, PlanariaSystem(), 0)
    took_s = process_time() - began_s
    megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    checksum = hashlib.sha256(repr(outcome).encode()).hexdigest()[:12]
    number = outcome.num_failures
    print(
        f"{nodes:>6} {policy:>14} {number:>7} {took_s:>7.1f}s {goal_s:>5.0f}s"
        f" {1000 * took_s / max(1, number):>6.1f} ms {megabytes:>4} MB  {checksum}",
        flush=True,
    )
    return took_s > goal_s


if __name__ == "__main__":
    sys.exit(main())
