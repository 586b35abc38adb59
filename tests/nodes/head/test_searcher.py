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
from helpers.strategies import equal_problem, layer_profile
from planaria.coordinator.learning.learned import Learning
from planaria.coordinator.learning.memory_estimates import fitted_rules
from planaria.core.cluster import NodesLost, survivors
from planaria.core.findings import Findings
from planaria.core.job import ResilienceConfig
from planaria.estimator.peak_memory import single_stage_bytes
from planaria.nodes.forkserver import ForkServer
from planaria.nodes.head.leader_spec import LeaderSpec, catalog_of, outlines_of, rules_of
from planaria.nodes.head.searcher import Searcher
from planaria.planner.plans import foreseen_plans
from planaria.planner.templates import pipeline_templates
from planaria.policies.ahead import ForeseenAnswers
from planaria.policies.memory_checked import has_room
from planaria.policies.named import named_policy

PATH = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
THIS = Path(__file__).stem
NUM_NODES = 6
TIMEOUT_S = 60.0
LAYER_BYTES = single_stage_bytes(
    (layer_profile("layer", 0.01),), num_devices=1, num_in_flight=1, gradient_copies=1
)


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
        fits: whether each answer has room, by policy and answer.
        fitting: whether each answer fits, by policy and answer.
    """

    found: list[int] = []
    known: dict[int, list[str]] = {}
    proposed: dict[int, list[str]] = {}
    epochs: list[int] = []
    found_alone: list[int] = []
    nice: list[int] = []
    is_gone: bool = False
    fits: dict[str, bool] = {}
    fitting: dict[str, bool] = {}


def leader_spec(directory: Path, *, device_memory_bytes: int = 0) -> LeaderSpec:
    """Six nodes under a policy that looks ahead."""
    problem = equal_problem(
        num_layers=NUM_LAYERS, num_microbatches=12, device_memory_bytes=device_memory_bytes
    )
    catalog = foreseen_plans(problem, NUM_NODES, pipeline_templates(problem, NUM_NODES))
    job = tiny_job("sequential", directory)
    job = replace(job, cluster=replace(job.cluster, nodes=NUM_NODES))
    return LeaderSpec(
        job=replace(job, resilience=ResilienceConfig(policy="adaptive", failures_ahead=1)),
        plan=catalog.plans[NUM_NODES],
        predicted_s=1.0,
        problem=problem,
        templates=dict(catalog.templates),
        outlines=outlines_of(catalog),
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
        searcher.request(plan, Learning(), lambda: rules.prices)
        searcher.request(plan, Learning(), lambda: rules.prices)
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
    searcher.request(replace(plan, epoch=9), Learning(), lambda: rules.prices)
    seen.found_alone = seen.found[1:]
    hearing.cancel()
    return seen


def coordinate_fitted(payload: bytes, result_fd: int) -> None:
    """In a process of its own: the estimates of all layers are raised while a plan is in use."""
    seen = asyncio.run(_coordinate_fitted(msgspec.json.decode(payload, type=LeaderSpec)))
    os.write(result_fd, msgspec.json.encode(seen))


async def _coordinate_fitted(spec: LeaderSpec) -> Seen:
    seen, known = Seen(), ForeseenAnswers()
    rules = rules_of(spec, known)
    findings = Findings(more_bytes=(3 * LAYER_BYTES // 10,) * NUM_LAYERS)
    fitted = fitted_rules(rules, findings, NUM_NODES)
    assert fitted is not None
    assert fitted.catalog is not None
    plan = fitted.catalog.plans[NUM_NODES]
    searcher = Searcher(spec, known, on_found=seen.found.append)
    await searcher.open()
    hearing = asyncio.create_task(searcher.receive_answers())
    searcher.request(plan, Learning(), lambda: rules.prices)
    searcher.request(plan, Learning(findings=findings, fitted=fitted), lambda: rules.prices)
    cluster, event = survivors(plan, (0,), epoch=8), NodesLost((0,), 3)
    end_s = time.monotonic() + TIMEOUT_S
    while (found := known.answers(plan, cluster, event, rules.prices)) is None:
        assert time.monotonic() < end_s, "nothing is known of a loss of node 0"
        await asyncio.sleep(0.01)
    for transition in found:
        answer = f"{transition.policy}: {transition.answer}"
        seen.fits[answer] = has_room(fitted.catalog.problem, transition.after)
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


def test_answers_fit_the_memory_that_was_estimated_last(tmp_path: Path) -> None:
    """They were looked for by the estimates of the job's start, for the rest of the job. Six layers
    fitted into a device, and five still did for it; in truth four do."""
    spec = leader_spec(tmp_path, device_memory_bytes=6 * LAYER_BYTES)
    with closing(ForkServer([THIS], path=PATH)) as server:
        payload = msgspec.json.encode(spec)
        seen = msgspec.json.decode(server.call(f"{THIS}:coordinate_fitted", payload), type=Seen)
    assert seen.fits
    assert all(seen.fits.values()), seen.fits
