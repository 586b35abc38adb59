"""The light agents of benchmarks/agents.py, with a real head."""

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from agents import Loss, Run, are_goals_met
from light.head import Head
from light.nodes import LightNodes

sys.path.pop()  # Or a script of benchmarks/ would be taken for a folder of tests/.

NUM_NODES = 7
TIMEOUT_S = 60.0


@pytest.mark.long
def test_light_agents_train_with_a_real_head_and_go_on_after_a_loss(tmp_path: Path) -> None:
    """They are admitted, commit iterations, and begin the epoch that answers the loss."""
    head = Head(tmp_path, num_nodes=NUM_NODES)
    try:
        asyncio.run(_train_and_lose(head, tmp_path))
    finally:
        head.close()

    assert "lost: node 1: its connection closed" in head.output


async def _train_and_lose(head: Head, directory: Path) -> None:
    nodes = LightNodes(head.address(timeout_s=TIMEOUT_S), head.credentials, cache=directory)
    nodes.add_machines(NUM_NODES)

    def num_seen(kind: str, *, first: int = 0) -> int:
        return len({sight.node for sight in nodes.sights[first:] if sight.kind == kind})

    await _wait(head, lambda: num_seen("IterationDone") == NUM_NODES)
    await _wait(head, lambda: nodes.is_held)
    first = len(nodes.sights)
    nodes.kill(1)
    await _wait(head, lambda: num_seen("StartEpoch", first=first) == NUM_NODES - 1)
    first = len(nodes.sights)
    await _wait(head, lambda: num_seen("IterationDone", first=first) == NUM_NODES - 1)
    await nodes.close()


async def _wait(head: Head, condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + TIMEOUT_S
    while not condition():
        head.check()
        assert time.monotonic() < end_s, head.output
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("machines_s", "decide_s", "rest", "is_met"),
    [
        (2.0, 0.05, 0.1, True),
        (3.5, 0.05, 0.1, False),
        (2.0, 0.15, 0.1, False),
        (2.0, 0.05, 0.3, False),
    ],
)
def test_each_goal_is_judged_by_its_own_median(
    machines_s: float, decide_s: float, rest: float, *, is_met: bool
) -> None:
    """Planning does not count as joining, nor what this machine takes for all others."""
    loss = Loss(detect_s=0.1, decide_s=decide_s, told_s=0.3, cpu_s=0.1)
    run = Run(
        num_nodes=200,
        machines_s=machines_s,
        nodes_s=2.0,
        planned_s=9.0,
        join_cpu_s=2.0,
        rest=rest,
        search=0.5,
        agents=0.2,
        losses=(loss,),
        load=1.0,
    )

    assert are_goals_met([run]) is is_met
