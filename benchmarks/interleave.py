"""Measures what copies in memory cost training, by when they are sent: Gemini's ablation (Fig. 16).

Llama-2 7B trains on eight paced nodes in two pipelines of four stages. After every iteration a copy
of each layer goes to a node that does not hold it, in time for the next commit
(`checkpoint.every = 1`), and through a device of its receiver (`checkpoint.path = "device"`), as in
the paper. Jobs without copies and with copies in each mode take turns in one run; the A/A ratios
compare jobs of one kind. "paper" is mode "interleaved" with `checkpoint.schedule = "paper"`:
Gemini's Algorithm 2. Both schedules also run with `checkpoint.every = "auto"`, where no commit
waits; then the number of iterations from one version to the next tells them apart. The first half
has the profile's links of 200 Gb/s, of which a pipeline leaves more than nine tenths idle. The
second has links of an eighth of that, where copies need nearly all of the idle time and one buffer
is not enough.

The paper reports for GPT-2 40B on 16 p3dn with ZeRO-3, whose network is busy: blocking 10.1% of an
iteration, without pipelining 3.5%, naive out of memory, interleaved next to nothing. Here a host
has enough memory for naive copies, so they are printed.

The goal is that, with the profile's links, the median with interleaved copies is within 1% of that
without copies. CPU steal makes single iterations longer; its share is printed.
"""

import argparse
import math
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from planaria.core.plan import Pipeline, Plan, plain_plan
from planaria.core.specs import Prepared
from planaria.job.planning import fork_server, given_profile, plan_job
from planaria.job.training_job import Job
from planaria.nodes.forkserver import ForkServer
from planaria.profiles.profile_json import encode_profile

GOAL = 0.01
LLAMA = Path(__file__).parents[1] / "examples" / "paced-llama.toml"
NUM_NODES, NUM_STAGES = 8, 4
MODES = (
    *("none", "blocking", "naive", "unpipelined", "interleaved", "paper", "interleaved", "paper"),
    *("interleaved auto", "paper auto", "interleaved auto", "paper auto", "none"),
)
SLOWER = (1, 8)  # Factors by which links are slower than in the profile.


def main() -> int:
    """Prints a line for each job; returns 1 if interleaved copies cost more than the goal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=8, help="of each job, the first unused")
    parser.add_argument("--rounds", type=int, default=1, help="of all modes")
    parser.add_argument(
        "--modes", type=_modes, default=MODES, help="some of them, with commas; the first is none"
    )
    arguments = parser.parse_args()
    server = fork_server(Job.from_file(LLAMA).config)
    is_met = True
    for slower in SLOWER:
        modes = arguments.modes * arguments.rounds
        is_met &= _compare(server, slower, arguments.iterations, modes)
    server.close()
    return 0 if is_met else 1


def _modes(text: str) -> tuple[str, ...]:
    modes = tuple(text.split(","))
    if modes[0] != "none" or not set(modes) <= set(MODES):
        raise argparse.ArgumentTypeError(f"must be some of {', '.join(MODES)}; none comes first")
    return modes


def _compare(server: ForkServer, slower: int, iterations: int, modes: Sequence[str]) -> bool:
    """Runs and prints these modes with links that are slower by a factor.

    Returns:
        whether the goal is met; True if `slower` is not 1, which has no goal.
    """
    print(f"links of {200 / slower:.0f} Gb/s")
    print(
        f"{'copies':<17} {'median':>9} {'cost':>7} {'least':>8} {'most':>8} {'version':>8} "
        f"{'sending':>8} {'stolen':>7}"
    )
    turns: dict[str, list[list[float]]] = {}
    for mode in modes:
        stolen_s = _stolen_s()
        found, copies = _measure(server, mode, slower, iterations)
        share = (_stolen_s() - stolen_s) / sum(found)
        turns.setdefault(mode, []).append(found)
        cost = statistics.median(found) / statistics.median(turns["none"][0]) - 1.0
        print(
            f"{mode:<17} {statistics.median(found):8.4f}s {100 * cost:+6.2f}% {min(found):7.3f}s "
            f"{max(found):7.3f}s {copies.get('every', math.nan):8.2f} "
            f"{copies.get('idle_used_s', 0.0):7.3f}s {100 * share:6.1f}%",
            flush=True,
        )
    base_s = _median_s(turns["none"])
    costs = {mode: _median_s(of) / base_s - 1.0 for mode, of in turns.items()}
    same = {mode: _median_s(of[::2]) / _median_s(of[1::2]) for mode, of in turns.items() if of[1:]}
    told = ", ".join(f"{mode} {100 * cost:+.2f}%" for mode, cost in costs.items() if mode != "none")
    ratios = ", ".join(f"{mode} {ratio:.4f}" for mode, ratio in same.items())
    print(f"{told}; A/A {ratios or 'of none'}", flush=True)
    is_within = costs.get("interleaved", 0.0) <= GOAL
    if "interleaved" in costs:
        verdict = "within" if is_within else "ABOVE" if slower == 1 else "above"
        print(f"interleaved {verdict} {100 * GOAL:.0f}%\n", flush=True)
    return is_within or slower > 1


def _median_s(turns: Sequence[Sequence[float]]) -> float:
    """The median of all iterations of some jobs."""
    return statistics.median(seconds for turn in turns for seconds in turn)


def _measure(
    server: ForkServer, mode: str, slower: int, iterations: int
) -> tuple[list[float], Mapping[str, float]]:
    """The seconds of each iteration of a job except the first, and its report on copies.

    The report's entry "every" is the number of iterations from one version to the next, and
    "idle_used_s" the seconds for which a rank sends copies in an iteration.
    """
    kind, _, every = mode.partition(" ")
    with tempfile.TemporaryDirectory() as directory:
        profile = given_profile(Job.from_file(LLAMA).config)
        assert profile is not None
        link = profile.links["inter_node"]
        slow = replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / slower)
        profile = replace(profile, links={**profile.links, "inter_node": slow})
        path = Path(directory, "profile.json")
        path.write_bytes(encode_profile(profile))
        overrides = [
            f"cluster.nodes={NUM_NODES}",
            f"cluster.device_memory_bytes={1 << 50}",
            f"training.iterations={iterations}",
            "training.global_batch_size=32",
            'resilience.policy="reinstantiate"',  # It does not change the plan during the run.
            f'model.profile="{path}"',
            f'checkpoint.directory="{directory}/saves"',
        ]
        if kind != "none":
            overrides += [
                "checkpoint.copies=2",
                f"checkpoint.every={every or 1}",
                f'checkpoint.mode="{"interleaved" if kind == "paper" else kind}"',
                f'checkpoint.schedule="{"paper" if kind == "paper" else "measured"}"',
                'checkpoint.path="device"',
                f"checkpoint.buffer_bytes={1 << 30}",
                "checkpoint.profile_iterations=0",
            ]
        job = Job.from_file(LLAMA, overrides=overrides)
        report = job.train(server=server, plan=_plan(job)).report
    for event in report.events:
        print(f"    {event.kind} of {event.nodes} at iteration {event.iteration}: {event.reason}")
    return [record.seconds for record in report.iterations[1:]], report.checkpoints["memory"]


def _plan(job: Job) -> Plan:
    """A plan of equal pipelines with the planner's partition."""
    planned = plan_job(job.config, Prepared(profile=given_profile(job.config)))
    template = planned.templates[NUM_STAGES]
    pipelines = tuple(
        Pipeline(template, tuple(range(first, first + NUM_STAGES)))
        for first in range(0, NUM_NODES, NUM_STAGES)
    )
    share = job.config.num_microbatches // len(pipelines)
    return plain_plan(0, pipelines, (share,) * len(pipelines))


def _stolen_s() -> float:
    """CPU steal of this machine so far, seconds of cores; 0.0 if it is not counted."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
        return int(fields[8]) / 100.0
    except (OSError, IndexError):
        return 0.0


if __name__ == "__main__":
    sys.exit(main())
