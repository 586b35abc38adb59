"""The example of a policy of one's own is run as it is shown."""

import runpy
from pathlib import Path

import pytest

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "policy.py")


def test_the_example_answers_beside_ours(capsys: pytest.CaptureFixture[str]) -> None:
    """It keeps the whole pipelines and leaves survivors idle; ours has all of them work."""
    example = runpy.run_path(EXAMPLE)
    dropped, *ours = example["main"]()

    assert dropped.rounds == ()
    assert len(dropped.after.nodes) < 11
    assert {len(answer.after.nodes) for answer in ours} == {11}
    assert all(answer.iteration_s < dropped.iteration_s for answer in ours)
    assert f"drop: {len(dropped.after.nodes)} of 11 nodes work" in capsys.readouterr().out
