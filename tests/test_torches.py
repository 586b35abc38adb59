"""Which versions of torch are tested, with what, and what is said of them."""

from pathlib import Path

import pytest
from packaging.requirements import Requirement

import torches

LISTING = """torch (2.15.0)
Available versions: 2.15.0, 2.14.1+cpu, 2.14.1, 2.10.0+cpu, 2.10.0, 2.9.0+cpu, 2.8.0+cpu
  INSTALLED: 2.13.0+cpu
"""


def test_cpu_builds_are_the_promised_ones_oldest_first() -> None:
    """By number, not by text: 2.10 is newer than 2.9."""
    builds = torches.cpu_builds(LISTING, Requirement("torch>=2.9"))

    assert builds == ["2.9.0+cpu", "2.10.0+cpu", "2.14.1+cpu"]


def test_an_index_without_cpu_builds_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plain version may be gigabytes for CUDA, so it is installed only where it is named."""
    listing = "Available versions: 2.15.0, 2.9.0\n"
    monkeypatch.setattr(torches, "_listing", lambda: listing)

    assert torches.main([]) == 2
    assert "TORCHES=" in capsys.readouterr().out


def test_a_single_build_is_tested_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is the oldest and the newest."""
    passed = torches.Outcome(tests=9, failed=0, skipped=0, seconds=1.0)
    monkeypatch.setattr(torches, "_listing", lambda: "Available versions: 2.15.0, 2.13.0+cpu\n")
    monkeypatch.setattr(torches, "outcomes", lambda versions: [(v, passed) for v in versions])

    assert torches.main([]) == 0
    assert capsys.readouterr().out.count("2.13.0+cpu") == 1


def test_only_torch_differs_from_the_constraints() -> None:
    """What else differed could be what fails."""
    before = torches.CONSTRAINTS.read_text().splitlines()
    after = torches.pins_with("2.9.0+cpu", torches.CONSTRAINTS.read_text()).splitlines()

    (pin,) = set(after) - set(before)
    assert pin == "torch==2.9.0+cpu"
    assert len(after) == len(before)


def test_one_failure_on_one_version_is_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Errors count as failures, and a run that left no results has failed."""
    suite = '<testsuite tests="9" failures="{}" errors="1" skipped="2" time="3.5"></testsuite>'
    results = tmp_path / "results.xml"
    results.write_text(f"<testsuites>{suite.format(3)}</testsuites>")
    good = torches.Outcome(tests=9, failed=0, skipped=2, seconds=3.5)
    red = torches.outcome_in(results)
    by_version = {"2.9.0+cpu": good, "2.14.1+cpu": red}
    monkeypatch.setattr(torches, "_listing", lambda: LISTING)
    monkeypatch.setattr(
        torches, "outcomes", lambda versions: [(v, by_version[v]) for v in versions]
    )

    assert torches.main([]) == 1
    assert capsys.readouterr().out.split()[-5:] == ["2.14.1+cpu", "9", "4", "2", "4"]
    assert torches.main(["2.9.0+cpu"]) == 0
    assert torches.outcome_in(tmp_path / "none.xml").failed == 1


@pytest.mark.parametrize("name", torches.TESTS)
def test_every_test_that_is_named_exists(name: str) -> None:
    """A test that was renamed would be missing on all versions but this one."""
    path, _, function = name.partition("::")

    assert (torches.ROOT / path).exists()
    assert not function or f"def {function}(" in (torches.ROOT / path).read_text()
