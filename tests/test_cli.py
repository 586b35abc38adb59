"""The parts of the command line that start no process."""

import re
from pathlib import Path

import pytest

import planaria
from command import PACED, assert_mistake, command, train


@pytest.fixture(autouse=True)
def _in_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_version_and_help_are_there() -> None:
    """A bare `planaria` says what there is; as any wrong use, it ends with 2."""
    assert command("--version").output == f"planaria {planaria.__version__}\n"
    assert "train" in command().output
    assert command().exit_code == 2


def test_a_script_without_a_job_is_refused_and_one_that_raises_shows_its_own_frames() -> None:
    """A script is run before anything else is known."""
    Path("empty.py").touch()
    Path("raises.py").write_text("def fail():\n    return 1 / 0\n\nfail()\n")

    assert_mistake(train(Path("missing.py")), "script = 'missing.py'", "no such file")
    assert_mistake(train(Path("empty.py")), "script = 'empty.py'", "job = planaria.Job(")
    result = train(Path("raises.py"))
    assert result.exit_code == 1
    assert re.findall(r'File "(.*?)", line', result.stderr) == ["raises.py", "raises.py"]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--nodes", "0"),
        ("--nodes", "-1"),
        ("--nodes", "1000000000000"),
        ("--devices-per-node", "0"),
        ("--microbatches", "0"),
        ("--microbatches", "1000000000000"),
        ("-f", "-1"),
        ("-f", "1000000000000"),
    ],
)
def test_plan_refuses_absurd_sizes_at_once(option: str, value: str) -> None:
    """Planning with them would not end."""
    given = ["--nodes", "5"] if option != "--nodes" else []

    result = command("plan", str(PACED.with_name("paced-profile.json")), *given, option, value)

    assert_mistake(result, value if option != "-f" else "")
