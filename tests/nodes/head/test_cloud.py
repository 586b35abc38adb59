"""What is done with a node of this machine in whose place another one is started."""

import asyncio

import msgspec
import pytest

from helpers.recorder_messages import change_message
from helpers.tasks import wait_until
from planaria.core.kinds import ChangeKind
from planaria.core.records import ToLauncher, Warned
from planaria.nodes.head.cloud import LocalOperator


@pytest.mark.parametrize(
    ("message", "given_back"),
    [
        (Warned(text="it is lost", gone=(1,)), [1]),
        (Warned(text="it had no work yet", left=(1,), preempted=(1,)), []),
        (Warned(text="its GPU is lost", unfit=(1,)), []),
        (msgspec.structs.replace(change_message(), kinds={1: ChangeKind.PREEMPT}), []),
    ],
)
def test_only_a_lost_node_is_ended_when_it_is_replaced(
    message: ToLauncher, given_back: list[int]
) -> None:
    """One that leaves may have to serve until its layers are elsewhere."""
    ended: list[int] = []
    started: list[int] = []

    async def hear_twice() -> None:
        operator = LocalOperator(0.01, give_back=ended.append, start_node=started.append)
        operator.on_coordinator_message(message)
        operator.on_coordinator_message(message)
        await wait_until(lambda: bool(started))
        await asyncio.sleep(0.05)
        operator.close()

    asyncio.run(hear_twice())

    assert (ended, started) == (given_back, [1])
