"""Jobs that lose nodes: small ones, whose devices are too small for the model, so that n0 = 2."""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from helpers.jobs import digests, tiny_job
from planaria.core.inject import parse_injection
from planaria.core.job import JobConfig, PolicyName
from planaria.core.plan import ModelProfile, Plan
from planaria.core.specs import Prepared
from planaria.job.config import load_job
from planaria.job.planning import given_profile, plan_job
from planaria.job.training_job import Job, TrainingResult
from planaria.nodes.forkserver import ForkServer
from planaria.observe.metrics import EventRecord
from planaria.planner.plans import PlanCatalog, plan_of_templates
from planaria.planner.problem import Problem
from planaria.planner.templates import smallest_num_nodes
from planaria.profiles.profile_json import encode_profile

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt2-text.toml"
SHRUNK = (
    "model.config.n_embd=16",
    "model.config.n_head=2",
    "data.sequence_length=16",
    "training.global_batch_size=12",
    "training.microbatch_size=2",
)
ITERATIONS = 8
SEED = 20_261_121  # Of the cases that are run every time.
N0 = 2
FAMILY = "sequential"  # Of jobs whose model is not what is tested: the cheapest.

_baseline: dict[int, tuple[str, str]] = {}


def small_job(family: str, directory: Path, **training: Any) -> JobConfig:
    """A family's job; GPT-2's is the example, made small."""
    if family != "gpt2":
        return tiny_job(family, directory, **({"global_batch_size": 12} | training))
    job = load_job(EXAMPLE, overrides=SHRUNK)
    checkpoint = replace(job.checkpoint, directory=str(directory / "checkpoints"))
    return replace(job, training=replace(job.training, **training), checkpoint=checkpoint)


@cache
def measured(family: str, server: ForkServer) -> tuple[ModelProfile, int]:
    """The profile of a family's job, and a device memory that makes n0 = 2."""
    with TemporaryDirectory() as directory:
        config = small_job(family, Path(directory))
        profile = Job(config).profile(server=server)
    memory_bytes = 1 << 24
    while True:
        problem = Problem(
            profile=replace(profile, device_memory_bytes=memory_bytes),
            devices_per_node=1,
            num_microbatches=config.num_microbatches,
            failures_tolerated=1,
            is_deterministic=True,
        )
        if smallest_num_nodes(problem) == N0:
            return profile, memory_bytes
        memory_bytes = memory_bytes * 9 // 10


def chaos_job(
    family: str,
    directory: Path,
    server: ForkServer,
    *,
    nodes: int = 6,
    f: int = 1,
    policy: PolicyName = "reinstantiate",
    **training: Any,
) -> JobConfig:
    """A job of eight iterations, with a profile, so that nothing is measured again. Unless another
    policy is named, its answers follow from the plan alone."""
    profiles = directory.parent
    profile, memory_bytes = measured(family, server)
    path = profiles / f"{family}.json"
    path.write_bytes(encode_profile(profile))
    config = small_job(family, directory, **({"iterations": ITERATIONS} | training))
    return replace(
        config,
        model=replace(config.model, profile=str(path)),
        resilience=replace(config.resilience, failures_tolerated=f, policy=policy),
        cluster=replace(config.cluster, nodes=nodes, device_memory_bytes=memory_bytes),
    )


def catalog_for(config: JobConfig) -> PlanCatalog:
    """What the job can be re-formed to."""
    return plan_job(config, Prepared(profile=given_profile(config))).catalog


def sized_plan(config: JobConfig, sizes: tuple[int, ...]) -> Plan:
    """Pipelines of these sizes, of the job's own templates."""
    catalog = catalog_for(config)
    nodes = range(config.cluster.nodes)
    assert sum(sizes) == len(nodes)
    return plan_of_templates(
        catalog.problem, [catalog.templates[size] for size in sizes], nodes, epoch=0
    )


def run_under_faults(
    config: JobConfig,
    server: ForkServer,
    *specs: str,
    sizes: tuple[int, ...] = (),
    **arguments: Any,
) -> TrainingResult:
    """The job, run with faults; pipelines of these sizes may then re-form themselves only."""
    if sizes:
        arguments["plan"] = sized_plan(config, sizes)
        arguments["catalog"] = replace(catalog_for(config), plans={})
    injections = tuple(parse_injection(spec) for spec in specs)
    return Job(config).run(injections=injections, server=server, **arguments)


def baseline_digests(server: ForkServer, iterations: int) -> tuple[str, str]:
    """Those of a job without failures, whoever asks from whatever server; on two nodes, for
    the bits do not depend on their number."""
    if iterations not in _baseline:
        with TemporaryDirectory() as directory:
            run = Path(directory) / "run"
            config = chaos_job(FAMILY, run, server, nodes=N0, f=0, iterations=iterations)
            result = run_under_faults(config, server)
        assert result.error is None
        _baseline[iterations] = digests(result)
    return _baseline[iterations]


def sample_cases(cases: Sequence[tuple[str, ...]], count: int) -> list[Any]:
    """A few of the cases for every run, drawn once; the others are long."""
    chosen = set(random.Random(SEED).sample(range(len(cases)), count))
    return [
        pytest.param(case, marks=() if i in chosen else (pytest.mark.long,), id=" ".join(case))
        for i, case in enumerate(cases)
    ]


def long_but_the_first(cases: Sequence[Any]) -> list[Any]:
    """The first case for every run; the others are long."""
    return [cases[0], *(pytest.param(case, marks=pytest.mark.long) for case in cases[1:])]


def _begins_anew(event: EventRecord, *, batch: int) -> bool:
    """Whether all may have gone back to the copies with which the job began, the newest ones that
    were complete on a busy machine."""
    return event.source_tier == "memory" and event.redone_samples >= event.iteration * batch


def events_besides_load(result: TrainingResult) -> list[EventRecord]:
    """The events, without those that how busy the machine is decides: nodes that it makes slow, and
    better plans than the first answer that are found in time."""
    return [e for e in result.report.events if e.kind not in ("slow", "fast", "reformed")]


def recoveries(result: TrainingResult) -> list[EventRecord]:
    """The events of `events_besides_load` that were answered."""
    return [event for event in events_besides_load(result) if event.answer]


def only_recovery(result: TrainingResult) -> EventRecord:
    """The one event that was answered; if there are others, all are named."""
    found = recoveries(result)
    assert len(found) == 1, [(e.kind, e.nodes, e.iteration, e.answer) for e in found]
    return found[0]


def check_survived(result: TrainingResult, specs: Sequence[str], baseline: tuple[str, str]) -> None:
    """All iterations are done, with the bits of the baseline run; every fault struck."""
    assert result.error is None, f"{specs}: {result.error}"
    assert digests(result) == baseline, specs
    assert len(result.report.iterations) == result.planned.config.training.iterations
    assert [event for event in result.report.events if not event.fired] == [], specs
    check_report(result)


def check_report(result: TrainingResult) -> None:
    """What holds for every job that ended well: bookkeeping that adds up."""
    report = result.report
    numbers = [record.iteration for record in report.iterations]
    assert numbers == list(range(numbers[0], numbers[-1] + 1))
    parts = {name: spent for name, spent in report.ledger.items() if name != "wall"}
    assert abs(sum(parts.values()) - report.ledger["wall"]) < 1e-6
    assert not parts["redo"] or any(event.redone_samples for event in report.events)
    for event in recoveries(result):
        if not event.downtime_s:
            continue
        phases = event.detect_s + event.decide_s + event.regroup_s + event.transfer_s
        assert abs(phases - event.downtime_s) < 1e-6
        if _begins_anew(event, batch=report.job["training"]["global_batch_size"]):
            # Optimizers have no state before their first step, so less may move than was planned.
            assert event.received_bytes <= event.transfer_bytes, event
        else:
            assert event.received_bytes == event.transfer_bytes, event
    for worker in report.workers:
        for before, after in pairwise([w for w in report.workers if w.rank == worker.rank]):
            assert before.pid != after.pid
