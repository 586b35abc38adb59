"""Shows how the phases of a recovery grow with the number of nodes: measured, then simulated.

Both use the paced job of examples/, with two microbatches per node and devices of which two hold
the model. The measured jobs lose one node in each of NUM_RUNS runs. Their nodes are processes that
share the cores of this machine, so with more nodes these figures show the protocol less and less.
`simulated` is the same job without its nodes (protocol.py), for the same numbers of nodes and for
larger ones; it leaves out transfers.

The goal: everything but the transfer takes at most TOTAL_S_MAX at the largest number of nodes.
"""

import statistics
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Final

from growth.costs import Costs, measured_costs
from growth.protocol import Phases, simulated_recovery
from planaria.coordinator.job_rules import Rules
from planaria.core.commit import vector_layout
from planaria.core.inject import parse_injection
from planaria.core.job import JobConfig
from planaria.core.messages import Stopped
from planaria.core.plan import ModelProfile, Plan
from planaria.estimator.makespan import stage_seconds
from planaria.job.config import load_job
from planaria.job.planning import fork_server, given_profile
from planaria.job.training_job import Job, SilentDisplay
from planaria.nodes.forkserver import ForkServer
from planaria.nodes.head.leader_spec import REGROUP_S
from planaria.observe.metrics import EventRecord
from planaria.planner.plans import foreseen_plans
from planaria.planner.problem import Problem
from planaria.planner.templates import pipeline_templates, smallest_num_nodes
from planaria.policies.policy import profile_prices
from planaria.policies.reinstantiate import Reinstantiate
from planaria.policies.unequal_nodes import UnequalNodes

EXAMPLE: Final = Path(__file__).parent.parent.parent / "examples" / "paced.toml"
SIMULATED: Final = (128, 512, 1000, 2000, 5000)
KILLED_ITERATION: Final = 2
NUM_RUNS: Final = 2
TOTAL_S_MAX: Final = 2.0
TRIES: Final = 3
DEVICE_MEMORY_BYTES: Final = 5_000  # Two nodes hold the layers of the example, one does not.


def show(numbers: Sequence[int]) -> int:
    """Prints both tables; 1 if the goal is missed."""
    with closing(fork_server(_job(numbers[0], Path()))) as server:
        print("nodes  measured: detect decide regroup transfer  downtime   (seconds, medians)")
        for num_nodes in numbers:
            print(_measured_row(num_nodes, _measured(num_nodes, server)), flush=True)
    costs = measured_costs(Stopped(rank=1, epoch=1, ages=dict.fromkeys(range(6), 1), complete=()))
    print(_told(costs))
    print("nodes  simulated: detect decide regroup  total, without the transfer  (seconds)")
    total_s = 0.0
    for num_nodes in (*numbers, *(number for number in SIMULATED if number > max(numbers))):
        phases = _simulated(num_nodes, costs)
        total_s = phases.total_s
        print(
            f"{num_nodes:5}             {phases.detect_s:5.3f}  {phases.decide_s:5.3f}   "
            f"{phases.regroup_s:5.3f}  {total_s:5.3f}",
            flush=True,
        )
    verdict = "met" if total_s <= TOTAL_S_MAX else "MISSED"
    print(f"everything but the transfer {total_s:.2f} s (goal {TOTAL_S_MAX:.0f} s: {verdict})")
    return int(total_s > TOTAL_S_MAX)


def _told(costs: Costs) -> str:
    figures = (costs.receive_s, costs.send_s, costs.hop_s, costs.link_s)
    receive, send, hop, link = (f"{1e6 * seconds:.0f} us" for seconds in figures)
    return f"coordinator: {receive} to read a message, {send} to send one; hop {hop}; link {link}"


def _job(num_nodes: int, directory: Path) -> JobConfig:
    job = load_job(EXAMPLE)
    return replace(
        job,
        model=replace(job.model, profile=str(EXAMPLE.parent / job.model.profile)),
        training=replace(
            job.training, iterations=KILLED_ITERATION + 3, global_batch_size=2 * num_nodes
        ),
        checkpoint=replace(job.checkpoint, directory=str(directory)),
        cluster=replace(
            job.cluster, nodes=num_nodes, device_memory_bytes=DEVICE_MEMORY_BYTES, lease_s=30.0
        ),
    )


def _measured(num_nodes: int, server: ForkServer) -> list[EventRecord]:
    """Records of the recoveries, one per run."""
    found = []
    for run in range(NUM_RUNS):
        with tempfile.TemporaryDirectory() as directory:
            job = _job(num_nodes, Path(directory) / "checkpoints")
            spec = f"kill:{(1 + run) * num_nodes // 3}@{KILLED_ITERATION}.backward"
            result = Job(job).run(
                injections=(parse_injection(spec),), display=SilentDisplay(), server=server
            )
            if result.error is not None:
                raise result.error
            found.append(next(event for event in result.report.events if event.kind == "kill"))
    return found


def _measured_row(num_nodes: int, events: Sequence[EventRecord]) -> str:
    def median(name: str) -> float:
        return float(statistics.median(getattr(event, name) for event in events))

    return (
        f"{num_nodes:5}            {median('detect_s'):5.3f}  {median('decide_s'):5.3f}   "
        f"{median('regroup_s'):5.3f}    {median('transfer_s'):5.3f}     {median('downtime_s'):5.3f}"
    )


def _simulated(num_nodes: int, costs: Costs) -> Phases:
    """Phases of the fastest of several tries, to leave out the load of other processes."""
    rules, plan, profile = _planned(num_nodes)
    lost = plan.nodes[len(plan.nodes) // 3]
    action_s = max(
        max(stage_seconds(profile, pipeline.template).backward_s) for pipeline in plan.pipelines
    )
    tries = [
        simulated_recovery(rules, plan, lost=lost, action_s=action_s, costs=costs)
        for _ in range(TRIES)
    ]
    return min(tries, key=lambda phases: phases.total_s)


def _planned(num_nodes: int) -> tuple[Rules, Plan, ModelProfile]:
    """Rules of the job, its plan for num_nodes nodes, and the profile of the model."""
    job = _job(num_nodes, Path())
    profile = given_profile(job)
    assert profile is not None
    problem = Problem(
        profile=profile,
        devices_per_node=1,
        num_microbatches=job.num_microbatches,
        failures_tolerated=1,
        is_deterministic=True,
    )
    catalog = foreseen_plans(problem, num_nodes, pipeline_templates(problem, num_nodes))
    num_layers = len(profile.layers)
    rules = Rules(
        job=job,
        policy=UnequalNodes(Reinstantiate(catalog)),
        prices=profile_prices(profile, regroup_s=REGROUP_S),
        n0=smallest_num_nodes(problem),
        max_nodes=num_nodes,
        num_layers=num_layers,
        layout=vector_layout(job, num_layers),
        first_iteration=0,
    )
    return rules, catalog.plans[num_nodes], profile
