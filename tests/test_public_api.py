"""What users write stays as it is: the public names and the command line.

A change here is a change of the interface; it belongs in CHANGELOG.md too.
"""

import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import planaria
from planaria.cli.main import app

NAMES = [
    "Callbacks",
    "CheckpointConfig",
    "CheckpointError",
    "ClusterConfig",
    "ConfigError",
    "DataConfig",
    "EvaluationConfig",
    "EvaluationRecord",
    "EventRecord",
    "InsufficientError",
    "IterationRecord",
    "Job",
    "JobConfig",
    "MemoryCheckpointer",
    "ModelConfig",
    "PlanariaError",
    "RandomGenerators",
    "Report",
    "ResilienceConfig",
    "TensorBoard",
    "TrainingConfig",
    "TrainingError",
    "TrainingResult",
    "WandB",
    "__version__",
]
COMMANDS = {
    "train": {
        "job",
        "--nodes",
        "--devices-per-node",
        "--report",
        "--timeline",
        "--resume",
        "--resume-if-saved",
        "--inject",
        "--state",
        "--listen",
        "--reattach",
        "--wait-nodes",
        "--token-file",
        "--operator",
        "--advertise",
        "--tensorboard",
        "--wandb",
        "--set",
    },
    "agent": {
        *(
            "--join",
            "--token-file",
            "--advertise",
            "--interface",
            "--domain",
            "--notice",
            "--no-code",
            "--stay",
        ),
    },
    "chaos": {"job", "--minutes", "--seed", "--report", "--set"},
    "checkpoint export": {
        *("directory", "--output", "-o", "--version", "--model-path", "--format", "--merge"),
        "--optimizer",
    },
    "checkpoint import": {"job", "source", "--iteration", "--set"},
    "checkpoint ls": {"directory", "--json"},
    "checkpoint prune": {"directory", "--keep"},
    "checkpoint save": {"directory", "--name", "--head", "--token-file"},
    "checkpoint verify": {"directory", "--version", "--json"},
    "doctor": {"head", "--bandwidth", "--token-file", "--json"},
    "drain": {"node", "--head", "--token-file", "--job", "--timeout"},
    "events": {"report", "--head", "--token-file", "--job", "--json"},
    "launch": {
        *("job", "--on", "--nodes", "--dry-run", "--name", "--output", "-o", "--set"),
        *("--devices-per-node", "--token-file", "--port", "--domain", "--interface"),
        *("--partition", "--time", "--image", "--namespace", "--volume", "--hosts"),
        *("--cpus", "--memory"),
    },
    "placement": {
        "--nodes",
        "--copies",
        "--lost",
        "--strategy",
        "--domain",
        "--node-failure",
        "--probability",
        "--domain-failure",
        "--memory",
        "--receive",
        "--json",
        "--plot",
    },
    "run": {
        "job",
        *("--nnodes", "--nproc-per-node", "--rdzv-endpoint", "--node-rank"),
        *("--token-file", "--notice", "--domain", "--report", "--resume", "--resume-if-saved"),
        *("--advertise", "--interface", "--operator", "--state", "--set"),
    },
    "profile": {"job", "-o", "--output", "--set"},
    "plan": {
        "profile",
        "--recompute",
        "--nodes",
        "--max-nodes",
        "--devices-per-node",
        "-f",
        "--microbatches",
        "--objective",
        "--json",
        "--node-speed",
        "--node-memory",
        "--copies",
        "--plot",
    },
    "reproduce": {"name", "--json", "--plot"},
    "simulate": {
        *(
            "scenario",
            "--systems",
            "--seeds",
            "--sweep",
            "--json",
            "--plot",
            "--processes",
            "--calibrate",
            "--replay",
            "--without-inputs",
            "--policy",
            "--set",
        ),
        *("--model", "--nodes", "--devices-per-node", "--failure-rate", "--repair", "--notice"),
        *("--price", "--hours", "--batch", "--policies"),
    },
    "status": {"head", "--token-file", "--job", "--json"},
    "token": {"file", "--check"},
}


def test_the_public_names_are_these_and_all_can_be_imported() -> None:
    """They are imported on first use, so a wrong module would not show before."""
    assert planaria.__all__ == NAMES
    assert all(getattr(planaria, name).__module__.startswith("planaria") for name in NAMES[:-1])


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    """As of any module; hasattr and pickling rely on it."""
    with pytest.raises(AttributeError, match="'planaria' has no attribute 'nothing'"):
        planaria.nothing  # noqa: B018


def test_the_command_line_is_this() -> None:
    """Every command with its arguments and options."""
    assert dict(_commands(typer.main.get_command(app))) == COMMANDS


@pytest.mark.parametrize("name", ["", "checkpoint", *COMMANDS])
def test_help_reads_well_at_80_columns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No bracket is doubled, nothing is cut off, and no line of a paragraph ends too early."""
    monkeypatch.setenv("COLUMNS", "80")
    result = CliRunner().invoke(app, [*name.split(), "--help"])

    assert result.exit_code == 0
    assert "[[" not in result.output
    assert "\N{HORIZONTAL ELLIPSIS}" not in result.output
    lines = [line.strip() for line in result.output.splitlines()]
    for line, after in pairwise(lines):
        if line[:1].isalpha() and after[:1].isalpha():  # Neither is part of a box.
            assert len(f" {line} {after.split()[0]} ") > 80, line


def _commands(command: Any, name: str = "") -> Iterator[tuple[str, set[str]]]:
    """A command's words; of a group those of its commands."""
    if hasattr(command, "commands"):
        for one, below in command.commands.items():
            yield from _commands(below, f"{name} {one}".strip())
        return
    yield (
        name,
        {
            word
            for parameter in command.params
            for word in (
                parameter.opts if parameter.param_type_name == "option" else [parameter.name]
            )
        },
    )


def test_importing_planaria_and_its_commands_imports_nothing_slow() -> None:
    """A typing mistake is told in a second, and the launcher needs no torch at all."""
    code = (
        "import sys, planaria, planaria.cli.main; planaria.Job; "
        "slow = {'torch', 'transformers', 'matplotlib', 'scipy'}; "
        "print(*slow.intersection(name.split('.')[0] for name in sys.modules))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)

    assert ended.stdout.split() == []
