"""`make sim` as it is called: its processes are spawned, and have to find what they run."""

import subprocess
import sys


def test_runs_are_shared_by_processes() -> None:
    command = [sys.executable, "-m", "planaria.simulator", "--runs", "4", "--processes", "2"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)

    assert ended.stdout.startswith("4 runs from seed 0: ")
