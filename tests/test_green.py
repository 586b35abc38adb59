"""The count of green runs in a row, which a red one starts over."""

import subprocess
from pathlib import Path

import pytest

import green

_IDENTITY = ("-c", "user.name=test", "-c", "user.email=test@example.invalid")


def _repository(directory: Path, *, recipe: str) -> Path:
    """A repository whose `make test` is a line of shell."""
    directory.mkdir()
    (directory / "Makefile").write_text(f".venv/ready:\n\ttrue\ntest:\n\t@{recipe}\n")
    git = ("git", *_IDENTITY, "-C", str(directory))
    for command in (("init", "--quiet"), ("add", "."), ("commit", "--quiet", "-m", "one")):
        subprocess.run([*git, *command], check=True)
    return directory


def _main(repository: Path, results: Path, *, runs: int) -> int:
    options = ("--repository", str(repository), "--results", str(results), "--runs", str(runs))
    return green.main(options)


def test_a_sitting_goes_on_from_what_the_file_holds(tmp_path: Path) -> None:
    """Runs of earlier sittings count; enough of them start no other."""
    repository = _repository(tmp_path / "repository", recipe="true")
    results = tmp_path / "kept" / "green.jsonl"

    assert _main(repository, results, runs=2) == 0
    assert _main(repository, results, runs=3) == 0
    assert len(green.read_runs(results)) == 3
    assert _main(repository, results, runs=3) == 0
    assert len(green.read_runs(results)) == 3


def test_a_red_run_is_named_and_starts_the_count_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One failure among green runs is what the count is to find."""
    counter = tmp_path / "counter"
    red = "(echo '= FAILURES ='; echo this is why; echo FAILED a::b; exit 1)"
    recipe = f"echo x >> {counter}; test $$(wc -l < {counter}) -ne 2 || {red}"
    repository = _repository(tmp_path / "repository", recipe=recipe)
    results = tmp_path / "green.jsonl"

    assert _main(repository, results, runs=3) == 1
    printed = capsys.readouterr().out
    assert "this is why" in printed
    assert "red: FAILED a::b" in printed
    assert _main(repository, results, runs=2) == 0
    runs = green.read_runs(results)
    assert [run.status == 0 for run in runs] == [True, False, True, True]
    assert green.num_green(runs, runs[0].commit) == 2


def test_runs_of_other_commits_do_not_count(tmp_path: Path) -> None:
    """The claim is of one commit."""
    repository = _repository(tmp_path / "repository", recipe="true")
    results = tmp_path / "green.jsonl"
    assert _main(repository, results, runs=1) == 0

    (run,) = green.read_runs(results)

    assert green.num_green([run], run.commit) == 1
    assert green.num_green([run], "0" * 40) == 0
