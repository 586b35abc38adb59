"""The process that looks for answers ahead, and what the coordinator has of it."""

import asyncio
import os
import signal
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import msgspec
import psutil

from helpers.jobs import NUM_LAYERS, tiny_job
from helpers.strategies import equal_problem
from planaria.core.cluster import NodesLost, survivors
from planaria.core.job import ResilienceConfig
from planaria.nodes.forkserver import ForkServer
from planaria.nodes.head.leader_spec import LeaderSpec, catalog_of, rules_of
from planaria.nodes.head.searcher import Searcher
from planaria.planner.plans import foreseen_plans
from planaria.planner.templates import pipeline_templates
from planaria.policies.ahead import ForeseenAnswers
from planaria.policies.named import named_policy

PATH = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
THIS = Path(__file__).stem
NUM_NODES = 6
TIMEOUT_S = 60.0


class Seen(msgspec.Struct):
    """What a coordinator saw of its searcher.

    Attributes:
        found: epochs for which better plans were looked for.
        known: answers by the node that is lost, as they were found ahead.
        proposed: those of the policy itself.
        epochs: of the plans known.
        found_alone: as `found`, once the process was killed.
        nice: of the process, and of its group where the kernel has such.
        is_gone: no process is left.
    """

    found: list[int] = []
    known: dict[int, list[str]] = {}
    proposed: dict[int, list[str]] = {}
    epochs: list[int] = []
    found_alone: list[int] = []
    nice: list[int] = []
    is_gone: bool = False


def leader_spec(directory: Path) -> LeaderSpec:
    """Six nodes under a policy that looks ahead."""
    problem = equal_problem(num_layers=NUM_LAYERS, num_microbatches=12)
    catalog = foreseen_plans(problem, NUM_NODES, pipeline_templates(problem, NUM_NODES))
    job = tiny_job("sequential", directory)
    return LeaderSpec(
        job=replace(job, resilience=ResilienceConfig(policy="adaptive", failures_ahead=1)),
        plan=catalog.plans[NUM_NODES],
        predicted_s=1.0,
        problem=problem,
        templates=dict(catalog.templates),
        plans=dict(catalog.plans),
        first_iteration=0,
        source="",
        fingerprint={},
        directory=str(directory / "store"),
        token=b"token",
    )


def coordinate(payload: bytes, result_fd: int) -> None:
    """In a process of its own, which has no threads."""
    seen = asyncio.run(_coordinate(msgspec.json.decode(payload, type=LeaderSpec)))
    seen.is_gone = not any(child.is_running() for child in psutil.Process().children())
    os.write(result_fd, msgspec.json.encode(seen))


async def _coordinate(spec: LeaderSpec) -> Seen:
    seen, known = Seen(), ForeseenAnswers()
    rules = rules_of(spec, known)
    policy = named_policy(spec.job, catalog_of(spec))
    searcher = Searcher(spec, known, on_found=seen.found.append)
    await searcher.open()
    hearing = asyncio.create_task(searcher.receive_answers())
    for epoch in (0, 7):  # The first is of no use any more.
        plan = replace(spec.plan, epoch=epoch)
        searcher.request(plan, (), lambda: rules.prices)
        searcher.request(plan, (), lambda: rules.prices)
    end_s = time.monotonic() + TIMEOUT_S
    for node in plan.nodes:
        cluster, event = survivors(plan, (node,), epoch=8), NodesLost((node,), 3)
        while (found := known.answers(plan, cluster, event, rules.prices)) is None:
            assert time.monotonic() < end_s, f"nothing is known of a loss of node {node}"
            await asyncio.sleep(0.01)
        seen.known[node] = [transition.answer for transition in found]
        seen.epochs += [transition.after.epoch for transition in found]
        proposed = policy.propose(plan, cluster, event, rules.prices)
        seen.proposed[node] = [transition.answer for transition in proposed]
    (process,) = psutil.Process().children()
    seen.nice = [process.nice()]
    group = Path(f"/proc/{process.pid}/autogroup")
    if group.exists():
        seen.nice.append(int(group.read_text().split()[-1]))
    process.send_signal(signal.SIGKILL)
    process.wait()
    await asyncio.sleep(0.01)
    while len(seen.found) < 2:
        assert time.monotonic() < end_s, "nobody notices that the process is gone"
        await asyncio.sleep(0.01)
    searcher.request(replace(plan, epoch=9), (), lambda: rules.prices)
    seen.found_alone = seen.found[1:]
    hearing.cancel()
    return seen


def test_answers_are_those_of_the_policy_and_are_there_before_a_loss(tmp_path: Path) -> None:
    """Of the newest plan only. When the process is killed the coordinator goes on without it."""
    payload = msgspec.json.encode(leader_spec(tmp_path))
    with closing(ForkServer([THIS], path=PATH)) as server:
        seen = msgspec.json.decode(server.call(f"{THIS}:coordinate", payload), type=Seen)
    assert set(seen.known) == set(range(NUM_NODES))
    for node, answers in seen.known.items():
        assert set(answers) >= set(seen.proposed[node])
    assert set(seen.epochs) == {8}
    assert seen.found[0] == 7
    assert seen.found_alone == [7, 9]
    # A process adds to what its parent has.
    assert seen.nice[0] == min(19, os.nice(0) + 10)
    assert seen.nice[1:] in ([], [10])
    assert seen.is_gone
