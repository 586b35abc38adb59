"""Predicted beside measured iteration time: a job of sleeping layers, its error within 3%.

First the layers alone, forward and backward in one process, against the seconds of their profile.
The A/A ratio is the median of the run's odd iterations over that of its even ones: what the
machine's noise alone makes of two equal things.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from planaria.core.plan import ModelProfile, on_one_device
from planaria.engine.paced import WIDTH, paced_model
from planaria.library import Job
from planaria.nodes.forkserver import ForkServer
from planaria.observe.metrics import IterationRecord
from planaria.planning import fork_server, read_profile

GOAL = 0.03
EXAMPLE = Path(__file__).parents[1] / "examples" / "paced.toml"


def main() -> int:
    """Prints a line per number of nodes; 1 if any error is above the goal."""
    profile = on_one_device(read_profile(EXAMPLE.with_name("paced-profile.json")))
    worst = abs(_layers_error(profile))
    print(f"layers alone, in one process: error {100 * worst:.2f}%")
    print(f"{'nodes':>5} {'predicted':>10} {'measured':>10} {'error':>7} {'A/A':>6}")
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


def _layers_error(profile: ModelProfile) -> float:
    """How much longer the layers take than their profile says; the median of eight passes."""
    torch.set_num_threads(1)
    model = paced_model(profile, seed=0, jitter=0.0)
    modules = [model.materialise(layer) for layer in range(model.num_layers)]
    seconds = []
    for _ in range(8):
        start_s = time.monotonic()
        hidden = torch.ones(1, WIDTH, requires_grad=True)
        for module in modules:
            hidden = module(hidden)
        hidden.sum().backward()  # type: ignore[no-untyped-call]
        seconds.append(time.monotonic() - start_s)
    predicted_s = sum(layer.forward_s[1] + layer.backward_s(1) for layer in profile.layers)
    return statistics.median(seconds) / predicted_s - 1.0


def _run(nodes: int, server: ForkServer) -> tuple[float, list[IterationRecord]]:
    with tempfile.TemporaryDirectory() as directory:
        overrides = [f"cluster.nodes={nodes}", f'checkpoint.directory="{directory}"']
        report = Job.from_file(EXAMPLE, overrides=overrides).train(server=server).report
    return report.iterations[0].predicted_s, list(report.iterations[1:])


if __name__ == "__main__":
    sys.exit(main())
