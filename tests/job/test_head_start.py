"""What a head does before its machines come, so that it has time for them afterwards."""

import ast
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.command import PACED, assert_mistake, command
from helpers.left_runs import LISTENING, left_job
from planaria.job import on_machines
from planaria.job.on_machines import open_head
from planaria.job.training_job import HEAD_PRELOAD
from planaria.nodes.head.remote.platforms import LostMachine, Platform
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


class NoPlatform:
    """A platform that nobody asks."""

    def ask_for_machine(self, lost: LostMachine) -> str:
        raise AssertionError(f"nothing is lost, and not {lost}")

    def cancel_requests(self) -> None:
        """Nothing was asked for."""


def test_machines_that_are_asked_for_find_the_head_where_its_user_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own addresses come after that; behind NAT others reach none of them."""
    known: list[str] = []

    def note_heads(_: str, *, heads: Sequence[str], **__: str) -> Platform:
        known.extend(heads)
        return NoPlatform()

    monkeypatch.setattr(on_machines, "open_platform", note_heads)
    place = "head.example.com:29400"
    listening = replace(LISTENING, operator="./ask", advertised=place)
    job = left_job(tmp_path / "saves")
    with open_head(job, listening, search_path=(), run="", note=lambda _: None) as head:
        host, port = head.leader_sockets.address

    assert known == [place, f"{host}:{port}"]
