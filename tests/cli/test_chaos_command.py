"""`planaria chaos`: what it tells, and how it ends, where it cannot write."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from helpers.command import command
from planaria.chaos.runs import RunOutcome
from planaria.cli import chaos_command
from planaria.core.job import JobConfig

JOB = SimpleNamespace(config=JobConfig())


def outcome(*violations: str) -> RunOutcome:
    return RunOutcome(
        number=0,
        specs=("kill:0@1",),
        settings=(),
        surroundings=(),
        seconds=1.0,
        injected_faults={},
        violations=violations,
    )


@pytest.mark.parametrize(
    ("violations", "raised", "code"),
    [
        ((), None, 1),
        (("iteration 3 used other samples",), None, 1),
        ((), KeyboardInterrupt(), 130),
    ],
)
def test_a_report_that_cannot_be_written_does_not_hide_how_chaos_ended(
    violations: tuple[str, ...],
    raised: BaseException | None,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All ended with exit code 2, as for a wrong option."""

    def outcomes(**_: object) -> Iterator[RunOutcome]:
        yield outcome(*violations)
        Path("report.json").mkdir()  # After the command has looked at it.
        if raised is not None:
            raise raised

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(chaos_command, "named_job", lambda *_: JOB)
    monkeypatch.setattr(chaos_command, "Chaos", lambda *_, **__: SimpleNamespace(outcomes=outcomes))
    Path("job.toml").touch()

    result = command("chaos", "job.toml", "--report", "report.json")

    assert result.exit_code == code, result.output
    assert all(violation in result.stdout for violation in violations)
    assert "seed 0" in result.stdout
    assert "planaria: --report = 'report.json': cannot be written" in result.stderr


def test_chaos_tells_what_it_has_found_also_where_it_cannot_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended with exit code 2 for an option that nobody had given, and the violation was lost."""
    runs = SimpleNamespace(outcomes=lambda **_: [outcome("iteration 3 used other samples")])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(chaos_command, "named_job", lambda *_: JOB)
    monkeypatch.setattr(chaos_command, "Chaos", lambda *_, **__: runs)
    Path("job.toml").touch()
    Path("chaos-0-0.json").mkdir()

    result = command("chaos", "job.toml", "--minutes", "1")

    assert result.exit_code == 1, result.output
    assert "iteration 3 used other samples" in result.output
    assert "--inject kill:0@1" in result.output
    assert "not in chaos-0-0.json: it cannot be written: Is a directory" in result.output
