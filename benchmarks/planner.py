"""Measures the planner's time and the quality of its plans, and compares them with the paper's.

    python benchmarks/planner.py            all parts
    python benchmarks/planner.py times      one of: times, large, command, regret, ranks, unequal,
                                            plans, every

times    time of one template for 8 - 24 nodes of 1 - 8 devices and 24 - 96 layers, with each
         objective, beside Table 3 of Oobleck (SOSP '23). Each of our times is the longer one of two
         profiles, with equal and with random layers.
large    time and optimality gap of a template of 1,000 layers on 64 nodes of 8 devices.
command  time of the process `planaria plan` with templates of all sizes.
regret   how much slower than the best of all partitions is the one that the paper's objective
         chooses, and the one that ours does, in small problems, by number of microbatches.
ranks    time to predict an iteration of 1,000 ranks with 128 microbatches from its schedule, the
         best of three.
unequal  some nodes have half the speed: the iteration time of a plan that takes all nodes for
         equal, of ours, and of the same work without bubbles, transfers and reductions.
plans    time of the plan for 1,000 nodes from given templates: pipelines, microbatches and nodes,
         the best of three; and time of the templates.
every    time of the plans for every number of nodes up to 512, which a job makes once, also with
         a quarter as many microbatches as nodes; of looking up one of the plans, and of the
         policy's answers to the loss of a node.

Exits 1 if a goal is missed.
"""

import random
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from helpers.exhaustive import all_shapes, makespans_s, small_problem, template_of
from planaria.core.cluster import NodesLost, survivors
from planaria.core.plan import (
    NodeKind,
    Pipeline,
    PipelineTemplate,
    Stage,
    plain_plan,
)
from planaria.estimator.makespan import makespan_s, stage_seconds
from planaria.estimator.time import predicted_timeline
from planaria.papers.oobleck.planning_latency import (
    LAYERS,
    TABLE_3_S,
    planning_problem,
    random_profile,
)
from planaria.planner.layout.unequal import UnequalPlanner
from planaria.planner.partition.paper import paper_partition
from planaria.planner.plans import (
    PlanCatalog,
    best_plan,
    pipeline_microbatches,
    plan_catalog,
    plan_iteration_s,
)
from planaria.planner.problem import Problem, stage_costs
from planaria.planner.templates import pipeline_template, pipeline_templates, ranked_template
from planaria.policies.policy import profile_prices
from planaria.policies.reinstantiate import Reinstantiate
from planaria.profiles.profile_json import encode_profile
from planaria.schedule.lower import plan_schedule

CELL_S_MAX: Final = 1.0
LARGE_S_MAX: Final = 10.0
COMMAND_S_MAX: Final = {32: 3.0, 96: 6.0}
RANKS_S_MAX: Final = 2.0
PLAN_NODES: Final = 1000
PLAN_S_MAX: Final = 1.0
EVERY_NODES: Final = 512
EVERY_S_MAX: Final = 15.0
LOOKUP_S_MAX: Final = 1e-3
SEED: Final = 20_261_121
NUM_SMALL: Final = 60
REGRET_MAX: Final = 0.03


def times() -> Iterator[str]:
    """Prints our times beside Table 3 of the paper; yields the goals that are missed."""
    print("one template, seconds: ours | ours with the paper's objective | the paper's")
    print("nodes devices " + "".join(f"{n:>10} layers       " for n in LAYERS))
    for (nodes, devices), published_s in TABLE_3_S.items():
        cells = []
        for num_layers, paper_s in zip(LAYERS, published_s, strict=True):
            spent_s = [0.0, 0.0]
            for spread in (0.0, 1.0):
                problem = planning_problem(num_layers, nodes, devices, spread=spread)
                start_s = time.perf_counter()
                pipeline_template(problem, nodes)
                middle_s = time.perf_counter()
                paper_partition(stage_costs(problem), nodes)
                end_s = time.perf_counter()
                spent_s[0] = max(spent_s[0], middle_s - start_s)
                spent_s[1] = max(spent_s[1], end_s - middle_s)
            cells.append(f"{spent_s[0]:6.2f} |{spent_s[1]:6.2f} |{paper_s:8.2f}")
            if max(spent_s) > CELL_S_MAX:
                where = f"{nodes} nodes x {devices} devices x {num_layers} layers"
                yield f"{where}: {max(spent_s):.2f} s"
        print(f"{nodes:5d} {devices:7d} " + "".join(cells), flush=True)


def large() -> Iterator[str]:
    """Prints the time and gap of a problem larger than any that papers report; yields the goal if
    it is missed."""
    problem = planning_problem(1000, 64, 8, spread=1.0)
    start_s = time.perf_counter()
    found = ranked_template(problem, 64)
    spent_s = time.perf_counter() - start_s
    assert found is not None
    print(
        f"1000 layers x 64 nodes x 8 devices: {spent_s:.1f} s, at most {100 * found.gap:.2f}% "
        f"slower than the best, {len(found.template.stages)} stages"
    )
    if spent_s > LARGE_S_MAX:
        yield f"the large problem: {spent_s:.1f} s"


def command() -> Iterator[str]:
    """Prints the time that a user waits for the command; yields the goals that are missed."""
    for num_layers, limit_s in COMMAND_S_MAX.items():
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "profile.json"
            path.write_bytes(encode_profile(random_profile(num_layers, 8, spread=1.0)))
            arguments = ("--nodes", "24", "--devices-per-node", "8", "--json")
            line = [sys.executable, "-m", "planaria", "plan", str(path), *arguments]
            start_s = time.perf_counter()
            subprocess.run(line, check=True, stdout=subprocess.DEVNULL)
            spent_s = time.perf_counter() - start_s
        where = f"24 nodes x 8 devices x {num_layers} layers"
        print(f"planaria plan, {where}: {spent_s:.2f} s", flush=True)
        if spent_s > limit_s:
            yield f"the command with {num_layers} layers: {spent_s:.2f} s"


def regret() -> Iterator[str]:
    """Prints how much slower chosen partitions are than the best; yields goals that are missed."""
    print(f"slower than the best partition, mean and worst of {NUM_SMALL} problems (seed {SEED})")
    print("microbatches   the paper's objective   ours")
    for num_microbatches in (2, 4, 8, 16, 32, 64, 128, 512):
        rng = random.Random(SEED)
        paper: list[float] = []
        ours: list[float] = []
        while len(ours) < NUM_SMALL:
            limited, num_nodes = small_problem(rng)
            problem = replace(
                limited,
                profile=replace(limited.profile, device_memory_bytes=0),
                num_microbatches=num_microbatches,
            )
            shapes = all_shapes(problem, num_nodes)
            if not shapes:
                continue
            best_s = float(makespans_s(problem, shapes, num_nodes).min())
            by_paper = paper_partition(stage_costs(problem), num_nodes)
            template = pipeline_template(problem, num_nodes)
            assert by_paper is not None
            assert template is not None
            for regrets, one in ((paper, template_of(by_paper[1], num_nodes)), (ours, template)):
                seconds = makespan_s(stage_seconds(problem.profile, one), num_microbatches)
                regrets.append(seconds / best_s - 1)
        print(f"{num_microbatches:8d} {_share(paper):>25} {_share(ours):>18}", flush=True)
        if max(ours) > REGRET_MAX:
            yield f"{num_microbatches} microbatches: {100 * max(ours):.1f}% slower than the best"


def unequal() -> Iterator[str]:
    """Prints the gain of planning for unequal nodes; yields the goals that are missed."""
    print("iteration of a plan that takes all nodes for equal, of ours, and of the work alone")
    for nodes, devices, num_slow in ((4, 1, 1), (8, 1, 2), (16, 1, 4), (24, 8, 1)):
        problem = replace(planning_problem(32, nodes, devices, spread=1.0), failures_tolerated=1)
        kinds = {node: NodeKind(0.5 if node < num_slow else 1.0) for node in range(nodes)}
        templates = pipeline_templates(problem, nodes)
        ignorant = best_plan(problem, range(nodes), templates, epoch=0)
        start_s = time.perf_counter()
        planner = UnequalPlanner(problem, kinds)
        plan = planner.plan(range(nodes), min_pipelines=2, epoch=0)
        spent_s = time.perf_counter() - start_s
        pipelines = [
            replace(one, template=replace(one.template, kinds=tuple(kinds[n] for n in one.nodes)))
            for one in ignorant.pipelines
        ]
        by_pipeline = pipeline_microbatches(ignorant)
        ignorant_s = plan_iteration_s(plain_plan(0, tuple(pipelines), by_pipeline), planner.times)
        ours_s = plan_iteration_s(plan, planner.times)
        work_s = sum(layer.forward_s[1] + layer.backward_s(1) for layer in problem.profile.layers)
        speed = devices * sum(kind.speed for kind in kinds.values())
        least_s = problem.num_microbatches * work_s / speed
        print(
            f"{nodes} nodes x {devices} devices, {num_slow} at half speed: {ignorant_s:.3f} s, "
            f"{ours_s:.3f} s, {least_s:.3f} s; planned in {spent_s:.2f} s",
            flush=True,
        )
        if ours_s > ignorant_s:
            yield f"{nodes} unequal nodes: slower than a plan that takes them for equal"


def _share(regrets: list[float]) -> str:
    return f"{100 * statistics.fmean(regrets):.2f}%  {100 * max(regrets):.1f}%"


def ranks() -> Iterator[str]:
    """Prints the time to price a plan of a large job; yields the goal if it is missed."""
    profile = random_profile(1000, 1, spread=1.0)
    template = PipelineTemplate(tuple(Stage(n, n + 1, 1) for n in range(1000)), 1000)
    plan = plain_plan(0, (Pipeline(template, tuple(range(1000))),), (128,))
    start_s = time.perf_counter()
    schedule = plan_schedule(plan)
    lowered_s = time.perf_counter() - start_s
    runs_s = []
    for _ in range(3):
        start_s = time.perf_counter()
        predicted_timeline(schedule, profile, plan=plan)
        runs_s.append(time.perf_counter() - start_s)
    spent_s = min(runs_s)
    print(
        f"1000 ranks x 128 microbatches: {spent_s:.2f} s (slowest of 3: {max(runs_s):.2f} s), "
        f"and {lowered_s:.1f} s to make the schedule"
    )
    if spent_s > RANKS_S_MAX:
        yield f"the iteration of 1000 ranks: {spent_s:.2f} s"


def plans() -> Iterator[str]:
    """Prints the time to plan for a large cluster; yields the goals that are missed."""
    for memory_bytes in (0, 14_000_000_000):
        problem = _clustered(PLAN_NODES, memory_bytes)
        start_s = time.perf_counter()
        templates = pipeline_templates(problem, PLAN_NODES)
        made_s = time.perf_counter() - start_s
        runs_s = []
        for _ in range(3):
            start_s = time.perf_counter()
            plan = best_plan(problem, range(PLAN_NODES), templates, epoch=0)
            runs_s.append(time.perf_counter() - start_s)
        what = f"a plan for {PLAN_NODES} nodes, n0 = {min(templates)}"
        print(
            f"{what}: {min(runs_s):.2f} s (slowest of 3: {max(runs_s):.2f} s), "
            f"{len(plan.pipelines)} pipelines; {made_s:.1f} s to make {len(templates)} templates"
        )
        if min(runs_s) > PLAN_S_MAX:
            yield f"{what}: {min(runs_s):.2f} s"


def every() -> Iterator[str]:
    """Prints the time to prepare all plans at a job's start; yields the goals that are missed."""
    problem = _clustered(EVERY_NODES, 0)
    templates = pipeline_templates(problem, EVERY_NODES)
    for num_microbatches in (EVERY_NODES // 4, problem.num_microbatches):
        problem = replace(problem, num_microbatches=num_microbatches)
        start_s = time.perf_counter()
        found = plan_catalog(problem, EVERY_NODES, templates)
        spent_s = time.perf_counter() - start_s
        what = f"{len(found.plans)} plans with {num_microbatches} microbatches"
        print(
            f"{what}, for every number of {EVERY_NODES} nodes: {spent_s:.1f} s, "
            f"{1000 * spent_s / len(found.plans):.0f} ms each"
        )
        if spent_s > EVERY_S_MAX:
            yield f"{what}: {spent_s:.1f} s"
    lookup_s = min(timeit.repeat(lambda: found.plans.get(EVERY_NODES - 1), number=1000)) / 1000
    print(f"the plan for {EVERY_NODES - 1} nodes is found in {1e6 * lookup_s:.2f} us")
    if lookup_s > LOOKUP_S_MAX:
        yield f"a lookup: {1e3 * lookup_s:.2f} ms"
    _print_answer(found)


def _print_answer(found: PlanCatalog) -> None:
    """Prints the time of the policy's answers to the loss of a node, without and with prepared
    plans."""
    plan, profile = found.plans[EVERY_NODES], found.problem.profile
    prices = profile_prices(profile, regroup_s=0.0)
    cluster, event = survivors(plan, (3,), epoch=1), NodesLost((3,), 0)
    for known in (replace(found, plans={}), found):
        runs_s = []
        for _ in range(3):  # The first one also imports.
            start_s = time.perf_counter()
            transitions = Reinstantiate(known).propose(plan, cluster, event, prices)
            runs_s.append(time.perf_counter() - start_s)
        answers = " and ".join(transition.answer for transition in transitions)
        print(f"the policy's answers to the loss of a node ({answers}): {min(runs_s):.3f} s")


def _clustered(num_nodes: int, device_memory_bytes: int) -> Problem:
    """A problem of 32 unequal layers on nodes of one device, which tolerates two failures."""
    problem = planning_problem(32, num_nodes, 1, spread=1.0)
    profile = replace(problem.profile, device_memory_bytes=device_memory_bytes)
    return replace(problem, profile=profile, failures_tolerated=2)


PARTS: Final = {
    "times": times,
    "large": large,
    "command": command,
    "regret": regret,
    "ranks": ranks,
    "unequal": unequal,
    "plans": plans,
    "every": every,
}


def main(names: list[str]) -> int:
    """Runs the parts; returns the exit code."""
    missed = [goal for name in names or PARTS for goal in PARTS[name]()]
    for goal in missed:
        print(f"MISSED {goal}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
