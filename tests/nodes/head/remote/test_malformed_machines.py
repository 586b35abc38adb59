"""Machines that break the protocol: they are cut off, and the others never hear of it."""

import asyncio
import logging
import random
import struct
from pathlib import Path

import pytest

from helpers.heads import CREDENTIALS, runs
from helpers.random_json import damaged_body, random_body
from helpers.tasks import TIMEOUT_S, wait_until
from planaria.core.job import CheckpointConfig, JobConfig
from planaria.core.machine_messages import (
    PROTOCOL,
    FromMachine,
    JobOffered,
    MachineArrived,
    MachineFacts,
    MachineReady,
)
from planaria.nodes.head.remote.machine_checks import MachineChecks
from planaria.nodes.head.remote.machines import Machines
from planaria.transport.acceptor import Acceptor, Purpose, connect, listen
from planaria.transport.frames import FROM_NODE_BYTES_MAX, frame

ARRIVED = MachineArrived(protocol=PROTOCOL, facts=MachineFacts(name="m", host="127.0.0.1"))


@runs
async def test_machines_that_break_the_protocol_are_cut_off_and_others_are_taken(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Before they have said who they are, and after; the log counts them."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    job = JobConfig(checkpoint=CheckpointConfig(directory=str(tmp_path)))
    (tmp_path / ".planaria-mark-mark").mkdir()
    (tmp_path / ".planaria-mark-mark" / "answer").write_text("answer")
    checks = MachineChecks(job, "mark", cache_directory=str(tmp_path), note=lambda _: None)
    offer = JobOffered(run="run", job=job, mark="mark")
    machines = Machines(offer, CREDENTIALS, num_max=9, checks=checks, note=lambda _: None)
    listeners, address = listen("127.0.0.1:0")
    acceptor = Acceptor(listeners, {Purpose.MACHINE: machines.accept})
    acceptor.start()
    with caplog.at_level(logging.WARNING):
        for number in range(40):
            reader, writer = await connect(
                address, Purpose.MACHINE, CREDENTIALS, timeout_s=TIMEOUT_S
            )
            if number % 2:
                writer.write(frame(ARRIVED))
            body = damaged_body(random_body(FromMachine, rng), rng)
            writer.write(struct.pack("!I", len(body)) + body)
            writer.write(struct.pack("!I", FROM_NODE_BYTES_MAX + 1))
            with pytest.raises(asyncio.IncompleteReadError):
                await reader.readexactly(1 << 20)
            writer.close()
    _, writer = await connect(address, Purpose.MACHINE, CREDENTIALS, timeout_s=TIMEOUT_S)
    writer.write(frame(ARRIVED) + frame(MachineReady(run="run", answer="answer")))
    await wait_until(lambda: machines.num_ready == 1)
    await machines.end_all(None)
    writer.close()
    acceptor.close()

    assert len(caplog.records) == 5
    assert "refused a connection: that of a machine: " in caplog.text
