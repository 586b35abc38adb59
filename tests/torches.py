"""Runs the engine's fast tests on the oldest and the newest torch that has a CPU build.

    python tests/torches.py                  what the package index lists as CPU builds
    python tests/torches.py 2.9.0 2.15.0     these, in whatever build pip takes

A CPU build is a version with the suffix `+cpu`. The index and further folders of wheels are those
that pip is configured with, its environment variables among it. Each version gets an environment,
`reports/torches/VERSION`: first torch by an exact pin, then all else at the versions of
constraints.txt, from wheels only. An open range would take the newest release, which on Linux may
be a build for CUDA, gigabytes with what it needs. The tests see no accelerator.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.version import Version

ROOT: Final = Path(__file__).resolve().parent.parent
ENVIRONMENTS: Final = ROOT / "reports" / "torches"
CONSTRAINTS: Final = ROOT / "constraints.txt"
_SURVIVE: Final = "tests/processes/test_survive.py::"
TESTS: Final = (
    "tests/engine",
    "tests/models",
    "tests/checkpoint",
    "tests/torchrun",
    "tests/processes/test_bits.py",
    f"{_SURVIVE}test_more_than_f_nodes_may_go_at_once_while_each_layer_has_a_holder",
    f"{_SURVIVE}test_the_fourth_loss_ends_with_a_checkpoint_that_resumes_to_the_same_bits",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the tests did on one torch.

    Attributes:
        tests: number of tests, skipped ones included.
        failed: number of tests that failed or could not begin.
        seconds: wall time of the tests, without the installation.
    """

    tests: int
    failed: int
    skipped: int
    seconds: float


def cpu_builds(listing: str, requirement: Requirement) -> list[str]:
    """The CPU builds in the output of `pip index versions torch`, oldest first."""
    available = re.search(r"^Available versions: (.*)$", listing, re.MULTILINE)
    versions = [Version(text) for text in available[1].split(", ")] if available else []
    builds = [version for version in versions if version.local == "cpu"]
    return [str(version) for version in sorted(builds) if version in requirement.specifier]


def pins_with(version: str, constraints: str) -> str:
    """The text of a constraints file with another version of torch."""
    return re.sub(r"^torch==.*$", f"torch=={version}", constraints, flags=re.MULTILINE)


def outcome_in(results: Path) -> Outcome:
    """What a JUnit file of pytest tells; without a file, one test that could not begin."""
    if not results.exists():
        return Outcome(tests=0, failed=1, skipped=0, seconds=0.0)
    (suite,) = ET.parse(results).getroot().iter("testsuite")
    number = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    return Outcome(
        tests=number["tests"],
        failed=number["failures"] + number["errors"],
        skipped=number["skipped"],
        seconds=float(suite.attrib["time"]),
    )


def _listing() -> str:
    command = [sys.executable, "-m", "pip", "index", "versions", "torch"]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def _promised() -> Requirement:
    """The versions of torch that the package asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = (Requirement(text) for text in project["dependencies"])
    return next(requirement for requirement in requirements if requirement.name == "torch")


def _install(version: str, directory: Path) -> None:
    """Makes an environment with that torch, unless it is there and complete."""
    pins = pins_with(version, CONSTRAINTS.read_text())
    ready, wanted = directory / "ready", pins + (ROOT / "pyproject.toml").read_text()
    if ready.exists() and ready.read_text() == wanted:
        return
    shutil.rmtree(directory, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", directory], check=True)
    (directory / "constraints.txt").write_text(pins)
    # pip compiles bytecode here, which takes minutes on busy cores: the first test that starts a
    # fork server would do it within its time limit.
    options = "--quiet --quiet --disable-pip-version-check --no-input --only-binary=:all: --compile"
    install = [str(directory / "bin" / "python"), "-m", "pip", "install", *options.split()]
    install += ["--constraint", str(directory / "constraints.txt")]
    for packages in (
        (f"torch=={version}",),
        ("hatchling",),
        ("--no-build-isolation", "--editable", f"{ROOT}[hf,plots,store,dev]"),
    ):
        subprocess.run([*install, *packages], check=True)
    ready.write_text(wanted)


def _run_tests(directory: Path) -> Outcome:
    results = directory / "results.xml"
    results.unlink(missing_ok=True)
    options = "--numprocesses 2 --dist loadfile --no-loadscope-reorder -p no:cacheprovider"
    command = [str(directory / "bin" / "python"), "-m", "pytest", *options.split()]
    command += ["-m", "not timed and not long", f"--junitxml={results}", *TESTS]
    surroundings = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT / "src")}
    subprocess.run(command, cwd=ROOT, env=surroundings, check=False)
    return outcome_in(results)


def outcomes(versions: Sequence[str]) -> Iterator[tuple[str, Outcome]]:
    """Installs and tests one version after the other."""
    for version in versions:
        print(f"torch {version}: installs what is missing, then tests", flush=True)
        directory = ENVIRONMENTS / version
        _install(version, directory)
        yield version, _run_tests(directory)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 if all passed, 1 if a test failed, 2 if there is no CPU build to test."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("versions", nargs="*", help="versions of torch, instead of CPU builds")
    versions = list(parser.parse_args(arguments).versions)
    if not versions:
        builds = cpu_builds(_listing(), requirement := _promised())
        if not builds:
            print(f"pip's index lists no CPU build of {requirement}: name versions by TORCHES=")
            return 2
        versions = list(dict.fromkeys((builds[0], builds[-1])))
    rows = list(outcomes(versions))
    print(f"{'torch':<14}{'tests':>8}{'failed':>8}{'skipped':>9}{'seconds':>9}")
    for version, row in rows:
        print(f"{version:<14}{row.tests:>8}{row.failed:>8}{row.skipped:>9}{row.seconds:>9.0f}")
    return 1 if any(row.failed for _, row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
