"""What a head does before its machines come, so that it has time for them afterwards."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.command import PACED, assert_mistake, command
from planaria.job.training_job import HEAD_PRELOAD
from planaria.transport.credentials import write_credentials

RESTORER = Path(__file__).parents[2] / "src" / "planaria" / "restorer"


def test_the_coordinator_of_a_head_imports_nothing_in_its_first_decision() -> None:
    """The restorer imports scipy when it needs it: half a second, or three on a busy machine."""
    needed = {
        node.module
        for path in RESTORER.glob("*.py")
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.ImportFrom) and node.module is not None
    }
    program = f"import sys, {', '.join(HEAD_PRELOAD)}; print(*sys.modules)"

    loaded = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout.split()

    assert "scipy.optimize" in needed
    assert needed <= {*loaded}


def test_a_head_refuses_a_job_that_cannot_be_planned_before_machines_are_told_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machines that connect while it plans would wait in vain."""
    monkeypatch.chdir(tmp_path)
    token = tmp_path / "token"
    write_credentials(token)

    result = command(
        *("train", str(PACED), "--listen", "127.0.0.1:0", "--token-file", str(token)),
        *("--nodes", "9", "--set", "cluster.device_memory_bytes=10"),
    )

    assert_mistake(result, "cluster.device_memory_bytes")
    assert "listening at" not in result.output
