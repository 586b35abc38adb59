"""Predicted beside measured iteration time: a job of sleeping layers, its error within 3%.

The A/A ratio is the median of the run's odd iterations over that of its even ones: what the
machine's noise alone makes of two equal things.
"""

import statistics
import sys
import tempfile
from pathlib import Path

from planaria.library import Job
from planaria.nodes.forkserver import ForkServer
from planaria.observe.metrics import IterationRecord
from planaria.planning import fork_server

GOAL = 0.03
EXAMPLE = Path(__file__).parents[1] / "examples" / "paced.toml"


def main() -> int:
    """Prints a line per number of nodes; 1 if any error is above the goal."""
    print(f"{'nodes':>5} {'predicted':>10} {'measured':>10} {'error':>7} {'A/A':>6}")
    worst = 0.0
    server = fork_server(Job.from_file(EXAMPLE).config)
    for nodes in (6, 7, 8, 9):
        predicted_s, measured = _run(nodes, server)
        seconds = [record.seconds for record in measured]
        error = statistics.median(seconds) / predicted_s - 1.0
        same = statistics.median(seconds[1::2]) / statistics.median(seconds[0::2])
        print(
            f"{nodes:5d} {predicted_s:9.4f}s {statistics.median(seconds):9.4f}s "
            f"{100 * error:+6.2f}% {same:6.3f}"
        )
        worst = max(worst, abs(error))
    server.close()
    verdict = "within" if worst <= GOAL else "ABOVE"
    print(f"worst error {100 * worst:.2f}%: {verdict} the goal of {100 * GOAL:.0f}%")
    return 0 if worst <= GOAL else 1


def _run(nodes: int, server: ForkServer) -> tuple[float, list[IterationRecord]]:
    with tempfile.TemporaryDirectory() as directory:
        overrides = [f"cluster.nodes={nodes}", f'checkpoint.directory="{directory}"']
        report = Job.from_file(EXAMPLE, overrides=overrides).train(server=server).report
    return report.iterations[0].predicted_s, list(report.iterations[1:])


if __name__ == "__main__":
    sys.exit(main())
