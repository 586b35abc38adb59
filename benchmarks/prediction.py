"""Compares predicted and measured times of iterations and transitions, on real processes and links.

Paced: layers sleep and links are paced. First the layers alone, forward and backward in one
process, are compared with the seconds of their profile. Then jobs train twelve unequal layers on
six to nine nodes, and Llama-2 7B on 8 and 32 nodes: in equal pipelines, for several numbers of
stages (PP) and pipelines (DP), in the layout that the planner chooses, and in the layouts with
which each policy goes on after losses (`--policy`, once or more; default: all but rollback, which
without standby nodes is reinstantiate). Each policy has to meet the goals by itself. Device memory
is not limited in jobs with equal pipelines or under absorb, so that every layout is possible.

Transitions: the same pipelines lose a node in each of four iterations, with all paced times
TRANSITION_SCALE times as long. That is needed because 32 nodes share this machine: a few cores
compute what all of them compute in a recovery, schedules and links, which takes many times as long
as if each node had cores of its own. At the usual pace two equal recoveries differ by as much as
the goal; even with the scale they differ by half of it and more. So each job runs TRANSITION_RUNS
times, and equal answers to the same loss are judged by their median, as iterations are.

Unpaced: each of two nodes is a process that computes a small GPT-2 on cores that it shares with the
other and with the system. A process that runs alone measures the profile, and the job corrects it
while it trains (coordinator/learning/profile_correction.py); the goal is for the iterations after
that.

The error of a paced job is that of the median iteration of an epoch without its first, in which
torch does one-time setup; that of the unpaced job is the mean of its iterations' errors. The time
of a recovery counts from when its answer is told until every rank can go on; that of a change at a
commit is its pause. The A/A ratio is the median of odd iterations over that of even ones, which
shows the machine's noise.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import torch

from planaria.core.inject import parse_injection
from planaria.core.job import POLICIES
from planaria.core.plan import ModelProfile, Pipeline, Plan, one_device_profile, plain_plan
from planaria.core.specs import Prepared
from planaria.job.planning import fork_server, given_profile, plan_job, read_profile
from planaria.job.training_job import Job
from planaria.models.paced import WIDTH, paced_model
from planaria.nodes.forkserver import ForkServer
from planaria.observe.metrics import IterationRecord
from planaria.transport.timekeeping import Timekeeper

MEAN_GOAL, WORST_GOAL = 0.02, 0.05
TRANSITION_GOAL = 0.15
UNPACED_GOAL = 0.10
LAYERS_GOAL = 0.03
EXAMPLE = Path(__file__).parents[1] / "examples" / "paced.toml"
LLAMA = EXAMPLE.with_name("paced-llama.toml")
GPT = EXAMPLE.with_name("gpt2-text.toml")
LAYOUTS = ((4, 2), (4, 8), (8, 4), (16, 2))  # Pairs of stages per pipeline and pipelines.
LOSSES = ((5, 4), (9, 8))  # Pairs of a node and the iteration in which it is lost.
TRANSITION_LOSSES = ((5, 1), (9, 2), (14, 3), (20, 4))
TRANSITION_SCALE = 4.0
TRANSITION_RUNS = 3
PARTS = ("paced", "transitions", "unpaced")
UNPACED_ITERATIONS = 24
UNLIMITED = f"cluster.device_memory_bytes={1 << 50}"


@dataclass
class Errors:
    """The errors of several jobs, as absolute shares of what was predicted."""

    iterations: list[float] = field(default_factory=list)
    transitions: list[float] = field(default_factory=list)


def main() -> int:
    """Prints a line for each measurement; returns 1 if an error is above its goal."""
    arguments = _arguments()
    parts = [part for part in PARTS if arguments.only in ("", part)]
    policies = arguments.policy or [name for name in POLICIES if name != "rollback"]
    is_met = True
    if "paced" in parts:
        is_met &= _paced(policies)
    if "transitions" in parts:
        is_met &= _transitions(policies)
    if "unpaced" in parts:
        is_met &= _unpaced()
    return 0 if is_met else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Predicted beside measured.")
    parser.add_argument("--policy", action="append", help="that answers losses; may be repeated")
    parser.add_argument("--only", choices=PARTS, default="", help="this part alone")
    return parser.parse_args()


def _paced(policies: Sequence[str]) -> bool:
    """Runs paced jobs; returns whether their errors are within the goals."""
    profile = one_device_profile(read_profile(EXAMPLE.with_name("paced-profile.json")))
    alone = abs(_layers_error(profile))
    print(f"layers alone, in one process: error {100 * alone:.2f}%")
    print(f"{'job':<44} {'predicted':>10} {'measured':>10} {'error':>7} {'A/A':>6}")
    server = fork_server(Job.from_file(EXAMPLE).config)
    errors = Errors()
    for nodes in (6, 7, 8, 9):
        _measure(f"{nodes} nodes", EXAMPLE, server, errors, nodes=nodes)
    are_exact = alone <= LAYERS_GOAL and _are_exact("small jobs", errors)
    for policy in policies:
        errors = Errors()
        for num_stages, num_pipelines in LAYOUTS:
            _measure(
                f"Llama, PP {num_stages} x DP {num_pipelines}",
                LLAMA,
                server,
                errors,
                nodes=num_stages * num_pipelines,
                num_stages=num_stages,
                policy=policy,
            )
        _measure("Llama, as planned", LLAMA, server, errors, nodes=32, policy=policy)
        are_exact &= _are_exact(policy, errors)
    server.close()
    return are_exact


def _are_exact(name: str, errors: Errors) -> bool:
    """Prints the errors of iterations; returns whether they are within the goals."""
    mean, worst = statistics.mean(errors.iterations), max(errors.iterations)
    is_met = mean <= MEAN_GOAL and worst <= WORST_GOAL
    print(
        f"{name}: mean error {100 * mean:.2f}% of {len(errors.iterations)}, worst "
        f"{100 * worst:.2f}%: {_verdict(is_met)} the goals of {100 * MEAN_GOAL:.0f}% and "
        f"{100 * WORST_GOAL:.0f}%"
    )
    if errors.transitions:
        print(f"mean error of their transitions {100 * statistics.mean(errors.transitions):.1f}%")
    return is_met


def _transitions(policies: Sequence[str]) -> bool:
    """Runs jobs that lose one node after the other; returns whether the mean error of each policy
    is within the goal."""
    server = fork_server(Job.from_file(LLAMA).config)
    are_met = True
    for policy in policies:
        print(f"{policy:<44} {'predicted':>10} {'measured':>10} {'error':>7} {'of all runs':>17}")
        errors: list[float] = []
        singly: list[float] = []
        for num_stages, num_pipelines in LAYOUTS:
            for label, runs in _recovered(policy, num_stages, num_pipelines, server).items():
                singly += (abs(measured_s / predicted_s - 1.0) for predicted_s, measured_s in runs)
                predicted_s, measured_s = map(statistics.median, zip(*runs, strict=True))
                seconds = [measured_s for _, measured_s in runs]
                note = f" {min(seconds):7.4f} to {max(seconds):.4f}s of {len(runs)}"
                name = f"PP {num_stages} x DP {num_pipelines}: {label}"
                errors.append(_print_row(name, predicted_s, measured_s, note=note))
        mean = statistics.mean(errors)
        is_met = mean <= TRANSITION_GOAL
        are_met &= is_met
        print(
            f"{policy}: mean error of {len(errors)} transitions {100 * mean:.1f}%, worst "
            f"{100 * max(errors):.1f}%: {_verdict(is_met)} the goal of "
            f"{100 * TRANSITION_GOAL:.0f}%; of each run by itself "
            f"{100 * statistics.mean(singly):.1f}%",
            flush=True,
        )
    server.close()
    return are_met


def _recovered(
    policy: str, num_stages: int, num_pipelines: int, server: ForkServer
) -> dict[str, list[tuple[float, float]]]:
    """Runs a job TRANSITION_RUNS times.

    Returns:
        the predicted and measured seconds of each run, by loss and answer.
    """
    nodes = num_stages * num_pipelines
    lost = [(node, at) for node, at in TRANSITION_LOSSES if node < nodes]
    specs = tuple(parse_injection(f"kill:{node}@{at}") for node, at in lost)
    runs = defaultdict(list)
    for _ in range(TRANSITION_RUNS):
        with tempfile.TemporaryDirectory() as directory:
            overrides = [
                f"cluster.nodes={nodes}",
                f"training.iterations={lost[-1][1] + 1}",
                f'checkpoint.directory="{directory}"',
                f'resilience.policy="{policy}"',
                f"model.time_scale={TRANSITION_SCALE}",
                *_saving(policy),
                UNLIMITED,
            ]
            job = Job.from_file(LLAMA, overrides=overrides)
            plan = _equal_plan(job, num_stages)
            events = job.train(server=server, plan=plan, injections=specs).report.events
        num_losses = 0
        for event in events:
            is_loss = event.kind == "kill"
            num_losses += is_loss
            if not is_loss:
                print(f"    {event.kind} of {event.nodes}: {event.reason.splitlines()[0]}")
            if event.answer:
                before = "loss" if is_loss else f"{event.kind} after loss"
                runs[f"{before} {num_losses}, {event.answer}"].append(
                    (event.predicted_downtime_s, event.transition_s)
                )
    return runs


def _saving(policy: str) -> list[str]:
    """The options that a policy needs which goes back to saves: without them it would begin anew
    each time."""
    return ["checkpoint.persist_every=1"] if policy == "morph" else []


def _unpaced() -> bool:
    """Runs a job of two computing processes; returns whether its mean error is within the goal."""
    with tempfile.TemporaryDirectory() as directory:
        overrides = [
            "cluster.nodes=2",
            f"training.iterations={UNPACED_ITERATIONS}",
            f'checkpoint.directory="{directory}"',
            UNLIMITED,
        ]
        report = Job.from_file(GPT, overrides=overrides).train().report
    records = report.iterations[1:]  # The first iteration does one-time setup.
    profiled_s = records[0].predicted_s
    for predicted_s, group in groupby(records, key=_predicted_s):
        of_group = list(group)
        seconds = [record.seconds for record in of_group]
        name = "as profiled" if predicted_s == profiled_s else "as corrected"
        print(
            f"two unpaced processes, {name}: {len(of_group)} iterations, predicted "
            f"{predicted_s:.3f} s, measured {statistics.median(seconds):.3f} s "
            f"({min(seconds):.3f} to {max(seconds):.3f}), mean error "
            f"{100 * _mean_error(of_group):.1f}%",
            flush=True,
        )
    corrected = [record for record in records if record.predicted_s != profiled_s]
    mean = _mean_error(corrected or records)
    is_met = mean <= UNPACED_GOAL
    print(
        f"mean error once corrected {100 * mean:.1f}%: {_verdict(is_met)} the goal of "
        f"{100 * UNPACED_GOAL:.0f}%"
    )
    return is_met


def _mean_error(records: Sequence[IterationRecord]) -> float:
    return statistics.mean(abs(r.seconds / r.predicted_s - 1.0) for r in records)


def _verdict(is_met: bool) -> str:
    return "within" if is_met else "ABOVE"


def _layers_error(profile: ModelProfile) -> float:
    """The share by which the layers take longer than their profile says, a median of 8 passes."""
    torch.set_num_threads(1)
    model = paced_model(profile, seed=0, jitter=0.0, timekeeper=Timekeeper(late_s_max=0.1))
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


def _measure(
    name: str,
    path: Path,
    server: ForkServer,
    errors: Errors,
    *,
    nodes: int,
    num_stages: int = 0,
    policy: str = "",
) -> None:
    """Runs a job, prints a line for each of its epochs and transitions, and adds their errors.

    Args:
        num_stages: number of stages, of a node each, of equal pipelines; 0: the planner's layout.
        policy: policy that answers the losses; empty: the job's own, and no losses.
    """
    with tempfile.TemporaryDirectory() as directory:
        iterations = LOSSES[-1][1] + LOSSES[0][1] if policy else LOSSES[0][1] + 1
        overrides = [
            f"cluster.nodes={nodes}",
            f"training.iterations={iterations}",
            f'checkpoint.directory="{directory}"',
        ]
        if policy:
            overrides += [f'resilience.policy="{policy}"', *_saving(policy)]
        if num_stages or policy == "absorb":  # Absorb needs twice the memory.
            overrides.append(UNLIMITED)
        job = Job.from_file(path, overrides=overrides)
        specs = [f"kill:{node}@{at}" for node, at in LOSSES if policy and node < nodes]
        plan = _equal_plan(job, num_stages) if num_stages else None
        report = job.train(
            server=server, plan=plan, injections=tuple(map(parse_injection, specs))
        ).report
    for event in report.events:
        print(f"    {event.kind} of {event.nodes} at iteration {event.iteration}: {event.reason}")
        if event.answer:
            label = f"    {event.answer}, {policy}"
            errors.transitions.append(
                _print_row(label, event.predicted_downtime_s, event.transition_s)
            )
    groups = [list(group)[1:] for _, group in groupby(report.iterations, key=_epoch)]
    names = (name, *(f"{name}, {policy}" for _ in groups[1:]))
    for label, records in zip(names, groups, strict=True):
        # An epoch with fewer has no ratio; it occurs if this machine really loses a node.
        if len(records) < 2:
            continue
        seconds = [record.seconds for record in records]
        same = statistics.median(seconds[1::2]) / statistics.median(seconds[0::2])
        measured_s = statistics.median(seconds)
        errors.iterations.append(
            _print_row(label, records[0].predicted_s, measured_s, note=f" {same:6.3f}")
        )


def _predicted_s(record: IterationRecord) -> float:
    return record.predicted_s


def _epoch(record: IterationRecord) -> int:
    return record.epoch


def _equal_plan(job: Job, num_stages: int) -> Plan:
    """A plan of pipelines with a number of stages and the planner's partition, and equal shares of
    microbatches."""
    config = job.config
    planned = plan_job(config, Prepared(profile=given_profile(config)))
    num_pipelines = config.cluster.nodes // num_stages
    pipelines = tuple(
        Pipeline(planned.templates[num_stages], tuple(range(first, first + num_stages)))
        for first in range(0, config.cluster.nodes, num_stages)
    )
    share = config.num_microbatches // num_pipelines
    return plain_plan(0, pipelines, (share,) * num_pipelines)


def _print_row(name: str, predicted_s: float, measured_s: float, *, note: str = "") -> float:
    error = measured_s / predicted_s - 1.0
    print(
        f"{name:<44} {predicted_s:9.4f}s {measured_s:9.4f}s {100 * error:+6.2f}%{note}",
        flush=True,
    )
    return abs(error)


if __name__ == "__main__":
    sys.exit(main())
