"""What a node does to itself it does where it is named, and only where it is to be."""

import asyncio
import contextlib
import os
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import msgspec
import pytest

from helpers.heads import CREDENTIALS
from helpers.tasks import wait_until
from planaria.core.inject import Injection, parse_injection
from planaria.core.machine_messages import FaultRequested
from planaria.nodes.faults.injector import Injector, Targets, node_places
from planaria.nodes.faults.node_faults import LocalFaults, MachineFaults
from planaria.transport.acceptor import Acceptor, Handshakes, Purpose, listen
from planaria.transport.credentials import Credentials, make_credentials
from planaria.transport.frames import Role, shake_hands
from planaria.transport.probe import LISTENING, Probe, StepReached

TOKEN = b"the job's token"


async def _flips(spec: str, calls: list[tuple[int, str, int]]) -> tuple[list[tuple[int, int]], int]:
    """Who flips in which iteration, if nodes reach these steps; how often the fault fired."""
    injections = [parse_injection(spec)]
    fired: list[Injection] = []
    flipped: list[tuple[int, int]] = []

    def note(node: int, iteration: int, _: float) -> None:
        flipped.append((node, iteration))

    injector = Injector(
        injections,
        Targets(nodes=LocalFaults({0: 0, 1: 0, 2: 0}), leader=lambda: 0, server=lambda: 0),
        token=TOKEN,
        join=lambda _: None,
        on_fire=fired.append,
    )
    address = await injector.listen()
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1) as pool:
        for node, step, iteration in calls:
            probe = Probe(
                node,
                places=node_places(injections, node),
                address=address,
                token=TOKEN,
                faults={"flip": partial(note, node)},
            )
            await loop.run_in_executor(pool, probe.report_step, step, iteration)
    injector.close()
    return flipped, len(fired)


def test_each_named_node_flips_once_right_after_the_commit() -> None:
    """Its second worker does not, nor does a node that is not named; no other step is meant."""
    calls = [(node, step, 5) for step in ("commit", "optimizer") for node in range(3)]
    calls += [(node, "applied", iteration) for iteration in (4, 5, 5, 6) for node in range(3)]

    assert asyncio.run(_flips("flip:0,2@5", calls)) == ([(0, 5), (2, 5)], 1)


def test_a_place_that_never_comes_flips_nothing() -> None:
    """Its fault is told as not fired."""
    calls = [(0, "applied", iteration) for iteration in range(3)]

    assert asyncio.run(_flips("flip:0@5", calls)) == ([], 0)


def test_every_worker_of_a_slow_node_is_told_and_told_when_it_ends() -> None:
    """Whenever its workers get there; no other node is."""
    specs = ["slow=2:1@4", "slow=1.5:1@6", "slow=1:1@9"]
    calls = [(node, iteration) for iteration in (3, 4, 4, 5, 6, 9) for node in range(3)]

    assert asyncio.run(_slow_nodes(specs, calls)) == [
        (1, 4, 2.0),
        (1, 4, 2.0),
        (1, 6, 1.5),
        (1, 9, 1.0),
    ]


def test_a_recovery_begins_at_the_iteration_that_was_reached_before_the_loss() -> None:
    """Processes that are forked anew know alone to which iteration the job goes back, which may be
    an earlier one: a second loss in the recovery from one at iteration 5 was never injected."""
    specs = ["crash:0@5.forward", "crash:0@5.resume", "crash:0@6.resume"]
    calls = [("resume", 4), ("forward", 5), ("resume", 4)]

    assert asyncio.run(_fired_faults(specs, calls)) == specs[:2]


async def _fired_faults(
    specs: list[str], calls: list[tuple[str, int]], *, leader: int = 0
) -> list[str]:
    """The faults that fire if the workers of node 0 reach these steps."""
    injections = [parse_injection(spec) for spec in specs]
    fired: list[Injection] = []
    injector = Injector(
        injections,
        Targets(nodes=LocalFaults({}), leader=lambda: leader, server=lambda: 0),
        token=TOKEN,
        join=lambda _: None,
        on_fire=fired.append,
    )
    address = await injector.listen()
    places = node_places(injections, 0)
    probe = Probe(0, places=places, address=address, token=TOKEN, faults={})
    for step, iteration in calls:
        await asyncio.get_running_loop().run_in_executor(None, probe.report_step, step, iteration)
    injector.close()
    return [injection.spec for injection in fired]


def test_a_head_is_killed_last_and_with_all_its_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Faults of the same place strike before. A process that is not there, as 0, is no group."""
    killed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, _: killed.append(pid))
    specs, calls = ["head:@5.reduce", "kill:9@5.reduce"], [("reduce", 5)]

    assert asyncio.run(_fired_faults(specs, calls, leader=11)) == specs[::-1]
    assert killed == [11, os.getpid()]


def test_nothing_strikes_once_the_job_has_ended() -> None:
    """Its nodes are leaving then, and none could come; the fault is told as not fired."""
    assert asyncio.run(_num_joins(ends=False)) == ([2], [])
    assert asyncio.run(_num_joins(ends=True)) == ([], ["join"])


async def _num_joins(*, ends: bool) -> tuple[list[int], list[str]]:
    """How many nodes come 10 ms after training starts, and what is left waiting."""
    joined: list[int] = []
    came = asyncio.Event()

    def join(count: int) -> None:
        joined.append(count)
        came.set()

    injector = Injector(
        [parse_injection("join:2@~0.01")],
        Targets(nodes=LocalFaults({}), leader=lambda: 0, server=lambda: 0),
        token=TOKEN,
        join=join,
        on_fire=lambda _: None,
    )
    await injector.listen()
    injector.on_training_start()
    if ends:
        injector.on_job_end()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(came.wait(), timeout=0.1 if ends else 10.0)
    return joined, [injection.kind for injection in injector.close()]


def test_a_line_that_is_reset_is_forgotten() -> None:
    """As those of nodes that are killed: what is told was written to all of them ever after."""
    assert not asyncio.run(_lines_after_a_reset())


@pytest.mark.parametrize("line", [b"{}\n", b"[" * 5000 + b"\n", b"\xff\n", b"x" * (1 << 18)])
def test_a_probe_that_breaks_the_protocol_is_closed(
    line: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Also one whose line never ends."""
    assert asyncio.run(_answer_to(line)) == b""
    assert len(caplog.records) == 1
    assert "refused a connection" in caplog.text


def test_a_step_on_another_machine_waits_until_that_machine_has_injected_the_fault() -> None:
    """What kills the node must strike before its step goes on."""
    assert asyncio.run(_fault_of_a_machine(CREDENTIALS)) == [("kill", 1), "struck", "answered"]


def test_a_stranger_cannot_reach_a_step_for_a_machine(caplog: pytest.LogCaptureFixture) -> None:
    """Its fault does not strike, and the stranger goes on."""
    assert asyncio.run(_fault_of_a_machine(make_credentials())) == ["answered"]
    assert "another token file" in caplog.text


async def _fault_of_a_machine(credentials: Credentials) -> list[object]:
    """What happens, in its order, if a worker with these credentials reaches the step of a kill."""
    happened: list[object] = []

    def tell(node: int, fault: FaultRequested) -> None:
        happened.append((fault.kind, node))
        loop.call_later(0.2, strike, node)

    def strike(node: int) -> None:
        happened.append("struck")
        faults.on_injected(node)

    loop = asyncio.get_running_loop()
    faults = MachineFaults({0, 1}, tell)
    injections = [parse_injection("kill:1@5.reduce")]
    injector = Injector(
        injections,
        Targets(nodes=faults, leader=lambda: 0, server=lambda: 0),
        token=TOKEN,
        handshakes=Handshakes(CREDENTIALS),
        join=lambda _: None,
        on_fire=lambda _: None,
    )
    await injector.listen()
    sockets, address = listen("127.0.0.1:0")
    acceptor = Acceptor(sockets, {Purpose.PROBE: injector.accept})
    acceptor.start()
    probe = Probe(
        1,
        places=node_places(injections, 1),
        address=address,
        token=b"",
        credentials=credentials,
        faults={},
    )
    await loop.run_in_executor(None, probe.report_step, "reduce", 5)
    happened.append("answered")
    injector.close()
    acceptor.close()
    return happened


async def _answer_to(line: bytes) -> bytes:
    injector = Injector(
        [],
        Targets(nodes=LocalFaults({}), leader=lambda: 0, server=lambda: 0),
        token=TOKEN,
        join=lambda _: None,
        on_fire=lambda _: None,
    )
    reader, writer = await asyncio.open_connection(*await injector.listen())
    await shake_hands(reader, writer, token=TOKEN, role=Role.CONNECT, identity=3)
    writer.write(line)
    with contextlib.suppress(ConnectionError):  # It is reset if not all was read.
        assert not await reader.read()
    writer.transport.abort()
    injector.close()
    return b""


async def _lines_after_a_reset() -> list[asyncio.StreamWriter]:
    injector = Injector(
        [],
        Targets(nodes=LocalFaults({}), leader=lambda: 0, server=lambda: 0),
        token=TOKEN,
        join=lambda _: None,
        on_fire=lambda _: None,
    )
    reader, writer = await asyncio.open_connection(*await injector.listen())
    await shake_hands(reader, writer, token=TOKEN, role=Role.CONNECT, identity=3)
    writer.write(msgspec.json.encode(StepReached(LISTENING, -1)) + b"\n")
    await wait_until(lambda: bool(injector._connections.get(3)))

    # Closed so, a connection is reset.
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()

    await wait_until(lambda: not injector._connections[3])
    injector.close()
    return injector._connections[3]


async def _slow_nodes(
    specs: list[str], calls: list[tuple[int, int]]
) -> list[tuple[int, int, float]]:
    """Which node is how slow from which iteration on, if nodes start these."""
    injections = [parse_injection(spec) for spec in specs]
    slowed: list[tuple[int, int, float]] = []
    injector = Injector(
        injections,
        Targets(nodes=LocalFaults({0: 0, 1: 0, 2: 0}), leader=lambda: 0, server=lambda: 0),
        token=TOKEN,
        join=lambda _: None,
        on_fire=lambda _: None,
    )
    address = await injector.listen()
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1) as pool:
        for node, iteration in calls:

            def note(iteration: int, factor: float, node: int = node) -> None:
                slowed.append((node, iteration, factor))

            probe = Probe(
                node,
                places=node_places(injections, node),
                address=address,
                token=TOKEN,
                faults={"slow": note},
            )
            await loop.run_in_executor(pool, probe.report_step, "start", iteration)
    injector.close()
    return slowed
