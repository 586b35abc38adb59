"""What stands between agents and the coordinator ends without a word."""

import asyncio
import logging
import socket

import pytest

from planaria.nodes.faults.relay import Relay


def test_one_that_waits_for_a_cut_to_end_is_let_go_in_silence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The job is over before the network is whole again."""
    caplog.set_level(logging.DEBUG)

    async def run() -> None:
        relay = Relay()
        with socket.create_server(("127.0.0.1", 0)) as coordinator:
            place = relay.start_listener(0, coordinator.getsockname()[:2])
            relay.cut(0, 0.0)
            _, writer = await asyncio.open_connection(*place)
            waits = relay._is_connected[0]
            while not waits._waiters:
                await asyncio.sleep(0.001)
            relay.close()
            writer.close()

    asyncio.run(run())

    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == []
