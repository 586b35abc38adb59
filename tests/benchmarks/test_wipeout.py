"""What benchmarks/wipeout.py refuses."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import wipeout

sys.path.pop()  # Or a script of benchmarks/ would be taken for a folder of tests/.


def test_without_a_loss_there_is_nothing_to_measure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It trained, and failed as it looked for the longest of no times."""
    monkeypatch.setattr(sys, "argv", ["wipeout.py", "--losses", "0"])

    with pytest.raises(SystemExit, match="2"):
        wipeout.main()

    assert "--losses 0: ask for 1 or more" in capsys.readouterr().err
