"""Runs under faults: their outcomes as JSON."""

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest

from helpers.command import PACED
from planaria.chaos import runs
from planaria.chaos.runs import Chaos, RunOutcome, _Bound, _execute, _RunPlace
from planaria.core.job import JobConfig
from planaria.errors import TrainingError
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
