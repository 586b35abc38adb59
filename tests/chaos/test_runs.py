"""Runs under faults: their outcomes as JSON."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal
from unittest.mock import Mock

import msgspec
import pytest

from helpers.command import PACED
from helpers.jobs import tiny_job
from helpers.strategies import MEBIBYTE, layer_profile, model_profile
from planaria.chaos import runs
from planaria.chaos.draw import Draw
from planaria.chaos.runs import (
    Chaos,
    RunOutcome,
    _Bound,
    _execute,
    _possible_kinds,
    _run_config,
    _RunPlace,
)
from planaria.chaos.verdict import BaselineRun
from planaria.core.inject import LOCAL_KINDS
from planaria.core.job import ClusterConfig, JobConfig, ModelConfig, ResilienceConfig
from planaria.core.plan import ModelProfile
from planaria.core.specs import Prepared
from planaria.errors import TrainingError
from planaria.job.planning import num_nodes_max, plan_job, problem_of
from planaria.job.training_job import Job


def test_the_names_in_a_runs_json_stay() -> None:
    """Readers of chaos-SEED-RUN.json know these names, two of which are not those of the fields."""
    outcome = RunOutcome(
        number=0,
        specs=("kill:1@2",),
        settings=(),
        surroundings=(),
        seconds=1.5,
        injected_faults={"kill": 1},
        violations=("not over",),
    )

    assert list(msgspec.to_builtins(outcome).items()) == [
        ("number", 0),
        ("specs", ("kill:1@2",)),
        ("settings", ()),
        ("surroundings", ()),
        ("seconds", 1.5),
        ("fired", {"kill": 1}),
        ("reason", ""),
        ("justification", ""),
        ("undecidable", ""),
        ("is_resumed", False),
        ("wrongs", ("not over",)),
        ("log", ()),
        ("report", None),
    ]


def test_runs_look_for_the_users_modules_where_their_job_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The process that leads a run imports callbacks, too, and not only those it forks."""
    job = Job.from_file(PACED)
    paths: list[Sequence[str]] = []

    def refused(_: JobConfig, search_path: Sequence[str] = ()) -> Job:
        paths.append(search_path)
        raise TrainingError(0, "no run is needed")

    monkeypatch.setattr(runs, "Job", refused)
    place = _RunPlace(tmp_path, (Mock(),), "NAME=value", deque(), job.search_path)
    with pytest.raises(TrainingError):
        Chaos(job, seed=1, doing=lambda _: None)._baseline(place)
    wrongs: list[str] = []
    assert _execute(job.config, _Bound(60.0, place), wrongs, Mock()) is None

    assert paths == [(str(PACED.parent),)] * 2
    assert len(wrongs) == 1


def _profile(*, num_bytes: int, working_bytes: int = 0, num_layers: int = 4) -> ModelProfile:
    """A profile whose last layer has these sizes; the others are small."""
    small = layer_profile("small", 0.01, parameter_bytes=MEBIBYTE)
    last = layer_profile("last", 0.01, parameter_bytes=num_bytes)
    return model_profile((*(small,) * (num_layers - 1), replace(last, working_bytes=working_bytes)))


@pytest.mark.parametrize(
    ("num_bytes", "working_bytes", "guard", "kind", "has_flips"),
    [
        (4 * MEBIBYTE, 0, True, "hf", True),
        (4 * MEBIBYTE, 0, False, "hf", False),
        (4 * MEBIBYTE + 4, 0, True, "hf", False),
        (3 * MEBIBYTE, 2 * MEBIBYTE, True, "hf", False),
        (64 * MEBIBYTE, 0, True, "paced", True),
    ],
)
def test_no_bit_flips_where_the_job_does_not_promise_to_find_it_in_time(
    num_bytes: int, working_bytes: int, guard: bool, kind: Literal["hf", "paced"], has_flips: bool
) -> None:
    """Sound runs were called wrong: of a large layer 4 MiB are compared at a time."""
    resilience = ResilienceConfig(corruption_guard=guard)
    config = JobConfig(model=ModelConfig(kind=kind), resilience=resilience)

    kinds = _possible_kinds(config, _profile(num_bytes=num_bytes, working_bytes=working_bytes))

    assert set(kinds) == set(LOCAL_KINDS) - (set() if has_flips else {"flip"})


@pytest.mark.parametrize(("nodes", "num_joins", "max_nodes"), [(8, 1, 8), (6, 3, 8), (5, 2, 7)])
def test_no_more_nodes_are_to_join_than_there_is_work_for(
    nodes: int, num_joins: int, max_nodes: int, tmp_path: Path
) -> None:
    """Four layers of two microbatches keep eight nodes at work; a ninth was called a mistake."""
    config = replace(
        tiny_job("gpt2", tmp_path, global_batch_size=4), cluster=ClusterConfig(nodes=nodes)
    )
    profile = _profile(num_bytes=MEBIBYTE)
    problem = problem_of(config, profile, processors=0)
    baseline = BaselineRun(
        parameters_sha256="",
        optimizer_sha256="",
        sample_digests={},
        training_s=1.0,
        wall_s=1.0,
        num_needed=1,
        num_nodes_max=num_nodes_max(problem),
        num_layers=4,
    )
    draw = Draw(specs=(f"join:{num_joins}@1",), num_joins=num_joins, persist_every=0)

    run_config = _run_config(config, draw, tmp_path, baseline=baseline)

    assert run_config.cluster.max_nodes == max_nodes
    plan_job(run_config, Prepared(profile=profile))
