"""Compares recoveries of planaria, torchft and torchrun from the loss of a process.

All train the small GPT-2 of peers/small_gpt.py in the same run, in six processes of this machine
with one thread each, over gloo or planaria's own links. One process is killed with SIGKILL when it
starts an iteration: the best moment for torchft, whose lighthouse leaves out a replica that has not
joined yet. If a replica dies after it has joined, its neighbours in the ring notice, the others
wait for gloo's timeout of 60 s, and those that noticed exit because their quorum has a timeout of
60 s as well. That sometimes happens here too (see "kills"); `python benchmarks/recovery.py
backward` kills in the backward on purpose.

    planaria   three pipelines of two nodes; the coordinator re-forms them from the five left
    torchft    six replicas in DDP, lighthouse and managers at the defaults of their programs
    torchrun   six ranks in DDP, --max-restarts, a checkpoint every 10 iterations

Times are from just before the SIGKILL:

    detect     until a survivor (torchrun: it or the agent) knows; planaria: until all have left
               the old epoch, which is later
    downtime   until the first iteration after the kill is complete on all ranks that then work
    regained   until the iteration that was in flight is complete: it includes what is redone
    redone     iterations computed again, wholly or in part, the one in flight included
    idle       processes that live but have no part in later iterations
    kills      number of kills after which the job went on within two minutes, of all kills; the
               rest of the row covers only these, and logs of the others go to standard error
    goodput    1 - (regained - one iteration) / 60 s: the useful share of time if a process is
               lost every minute; work redone counts as lost, lost capacity does not

The goals compare medians of the downtime. The A/A ratio is that of planaria's odd kills over its
even ones. Exits 1 if a goal is missed, and 2 if torchft is not installed.

`python benchmarks/recovery.py --nodes 4,8,16,32` instead shows how the phases of planaria's
recovery grow with the number of nodes, measured for these and simulated up to thousands
(growth/table.py).
"""

import argparse
import importlib.util
import math
import os
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from growth.table import show
from peers.measuring import (
    KILLED_ITERATION,
    NUM_WORKERS,
    Recovery,
    torchft_recovery,
    torchrun_recovery,
)
from peers.small_gpt import GLOBAL_BATCH_SIZE, LEARNING_RATE, MICROBATCH_SIZE
from peers.watching import peer_environment
from planaria.core.inject import parse_injection
from planaria.core.job import (
    CheckpointConfig,
    ClusterConfig,
    DataConfig,
    JobConfig,
    ModelConfig,
    ResilienceConfig,
    TrainingConfig,
)
from planaria.core.plan import ModelProfile
from planaria.job.planning import fork_server
from planaria.job.training_job import Job, SilentDisplay
from planaria.nodes.forkserver import ForkServer
from planaria.planner.problem import Problem
from planaria.planner.templates import smallest_num_nodes
from planaria.profiles.profile_json import encode_profile

NUM_KILLS = {"planaria": 20, "torchft": 3, "torchrun": 3}
GOALS = {"torchft": 3.0, "torchrun": 10.0}
REFORMED_S_MAX = 1.0  # Upper bound on the median of planaria's downtime_s; half would be good.
MINUTE_S = 60.0
# Time that the lighthouse waits for a replica that sends heartbeats but does not join: the default
# of the torchft_lighthouse program. (A LighthouseServer made in Python has 100 ms.)
JOIN_TIMEOUT_MS = 60_000
N0 = 2
HERE = str(Path(__file__).parent)


def main(step: str) -> int:
    """Measures all systems and prints the table; returns the exit code."""
    if importlib.util.find_spec("torchft") is None:
        print("skipped: torchft is not installed; pip install -e '.[bench]' -c constraints.txt")
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.environ["RUST_LOG"] = "error"  # For the lighthouse, which lives in this process.
    reformed_s: list[float] = []
    with tempfile.TemporaryDirectory() as directory:
        recoveries = _recoveries(Path(directory), step, reformed_s)
    print(f"{'':<9}kills  detect downtime regained iteration redone idle goodput")
    for name, measured in recoveries.items():
        print(_row(name, measured))
    ours = recoveries["planaria"]
    same = _median(ours[1::2], _downtime_s) / _median(ours[0::2], _downtime_s)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[1]:.1f} in the last five minutes")
    print(f"A/A: planaria's downtime over its own {same:.2f}")
    median_s = statistics.median(reformed_s)
    missed = int(median_s > REFORMED_S_MAX)
    print(
        f"planaria's downtime_s, loss to first forward, median of {len(reformed_s)}: "
        f"{median_s:.3f} s (goal {REFORMED_S_MAX:.0f} s: {'MISSED' if missed else 'met'})"
    )
    for name, goal in GOALS.items():
        # Kills without a recovery are left out: why there was none is not measured here.
        ratio = _median(recoveries[name], _downtime_s) / _median(ours, _downtime_s)
        verdict = "met" if ratio >= goal else "MISSED"
        missed += verdict == "MISSED"
        print(f"{name}'s downtime over planaria's {ratio:.1f} (goal {goal:.0f}: {verdict})")
    return 1 if missed else 0


def _recoveries(directory: Path, step: str, reformed_s: list[float]) -> dict[str, list[Recovery]]:
    """The recoveries of every system, measured in turns so that other load affects all alike."""
    environment = peer_environment(directory / "bytecode")
    config = _job(directory / "checkpoints")
    recoveries: dict[str, list[Recovery]] = {name: [] for name in NUM_KILLS}
    with closing(fork_server(config, search_path=[HERE])) as server:
        config = _with_two_nodes_a_pipeline(config, server, directory)
        runs: dict[str, Callable[[int], Recovery]] = {
            "planaria": lambda victim: _planaria_recovery(victim, config, server, step, reformed_s),
            "torchft": lambda victim: torchft_recovery(
                victim, environment, step=step, join_timeout_ms=JOIN_TIMEOUT_MS
            ),
            "torchrun": lambda victim: torchrun_recovery(victim, environment, step=step),
        }
        for turn in range(max(NUM_KILLS.values())):
            for name, run in runs.items():
                if turn < NUM_KILLS[name]:
                    # A job resets the handler of SIGTERM to its default.
                    signal.signal(signal.SIGTERM, signal.default_int_handler)
                    recoveries[name].append(run(turn % NUM_WORKERS))
                    print(f"  {_row(name, recoveries[name][-1:])}", flush=True)
    return recoveries


def _job(checkpoints: Path) -> JobConfig:
    return JobConfig(
        name="recovery",
        model=ModelConfig(kind="python", target="peers.small_gpt:layers"),
        data=DataConfig(kind="python", target="peers.small_gpt:Tokens"),
        training=TrainingConfig(
            iterations=KILLED_ITERATION + 5,
            global_batch_size=GLOBAL_BATCH_SIZE,
            microbatch_size=MICROBATCH_SIZE,
            learning_rate=LEARNING_RATE,
        ),
        resilience=ResilienceConfig(failures_tolerated=1),
        checkpoint=CheckpointConfig(directory=str(checkpoints)),
        cluster=ClusterConfig(nodes=NUM_WORKERS),
    )


def _with_two_nodes_a_pipeline(config: JobConfig, server: ForkServer, directory: Path) -> JobConfig:
    """The job with a profile, measured once, and so little device memory that a pipeline needs two
    nodes."""
    profile = Job(config, search_path=[HERE]).profile(server=server)
    memory_bytes = 1 << 30
    while _n0(profile, config, memory_bytes) < N0:
        memory_bytes = memory_bytes * 19 // 20
    path = directory / "profile.json"
    path.write_bytes(encode_profile(profile))
    return replace(
        config,
        model=replace(config.model, profile=str(path)),
        cluster=replace(config.cluster, device_memory_bytes=memory_bytes),
    )


def _n0(profile: ModelProfile, config: JobConfig, memory_bytes: int) -> int:
    problem = Problem(
        profile=replace(profile, device_memory_bytes=memory_bytes),
        devices_per_node=1,
        num_microbatches=config.num_microbatches,
        failures_tolerated=1,
        is_deterministic=True,
    )
    return smallest_num_nodes(problem)


def _planaria_recovery(
    victim: int, config: JobConfig, server: ForkServer, step: str, reformed_s: list[float]
) -> Recovery:
    """The recovery from one kill; appends its downtime_s, which does not include the iteration that
    is done again, to reformed_s."""
    shutil.rmtree(config.checkpoint.directory, ignore_errors=True)
    injection = parse_injection(f"kill:{victim}@{KILLED_ITERATION}.{step}")
    job = Job(config, search_path=[HERE])
    result = job.run(injections=(injection,), display=SilentDisplay(), server=server)
    if result.stopped:
        raise KeyboardInterrupt
    if result.error is not None:
        raise result.error
    report = result.report
    event = next(event for event in report.events if event.kind == "kill")
    reformed_s.append(event.downtime_s)
    print(
        f"    re-formed ({event.answer}) in {event.downtime_s:.3f} s: detect {event.detect_s:.3f}, "
        f"decide {event.decide_s:.3f}, regroup {event.regroup_s:.3f}, "
        f"transfer {event.transfer_s:.3f}"
    )
    downtime_s = event.downtime_s + report.iterations[KILLED_ITERATION].seconds
    working = {worker.node for worker in report.workers if worker.last_epoch == report.final.epoch}
    return Recovery(
        detect_s=event.detect_s,
        downtime_s=downtime_s,
        regained_s=downtime_s,
        iteration_s=statistics.median(r.seconds for r in report.iterations[:KILLED_ITERATION]),
        redone_iterations=event.redone_samples / GLOBAL_BATCH_SIZE,
        num_idle=len(report.final.nodes) - len(working),
    )


def _downtime_s(recovery: Recovery) -> float:
    return recovery.downtime_s


def _median(recoveries: Sequence[Recovery], value: Callable[[Recovery], float]) -> float:
    """The median over recovered kills; NaN, which meets no goal, if there are none."""
    values = [value(recovery) for recovery in recoveries if recovery.is_over]
    return statistics.median(values) if values else math.nan


def _row(name: str, recoveries: Sequence[Recovery]) -> str:
    lost_s = _median(recoveries, lambda recovery: recovery.lost_s)
    return (
        f"{name:<9}{sum(r.is_over for r in recoveries):2d}/{len(recoveries):<2d} "
        f"{_median(recoveries, lambda recovery: recovery.detect_s):6.3f}s "
        f"{_median(recoveries, _downtime_s):7.3f}s "
        f"{_median(recoveries, lambda recovery: recovery.regained_s):7.3f}s "
        f"{_median(recoveries, lambda recovery: recovery.iteration_s):8.3f}s "
        f"{_median(recoveries, lambda recovery: recovery.redone_iterations):6.1f} "
        f"{_median(recoveries, lambda recovery: recovery.num_idle):4.0f} "
        f"{100 * max(0.0, 1.0 - lost_s / MINUTE_S):6.1f}%"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("step", nargs="?", default="start", help="of the iteration: when to kill")
    parser.add_argument("--nodes", help="as in 4,8,16,32: how planaria's phases grow instead")
    arguments = parser.parse_args()
    if arguments.nodes:
        sys.exit(show([int(number) for number in arguments.nodes.split(",")]))
    sys.exit(main(arguments.step))
