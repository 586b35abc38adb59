"""The network between two machines, measured in less than a second."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from planaria.core.machine_messages import LINK_BUDGET_S
from planaria.transport import link_measurement
from planaria.transport.link_measurement import (
    SECRET_BYTES,
    measure_link,
    serve_measurement,
)

SECRET = bytes(range(SECRET_BYTES))


@contextmanager
def serving() -> Iterator[tuple[str, int]]:
    """The address of a machine that serves the measurement, until it has."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    thread = threading.Thread(target=serve_measurement, args=(listener, SECRET))
    thread.start()
    yield address
    thread.join()


def slow_server(listener: socket.socket, *, bytes_per_s: float) -> None:
    """Acknowledges messages as a network of this bandwidth would let it."""
    peer, _ = listener.accept()
    with listener, peer, peer.makefile("rb") as stream:
        stream.read(SECRET_BYTES)
        while head := stream.read(8):
            num_bytes = int.from_bytes(head, "big")
            stream.read(num_bytes)
            time.sleep(num_bytes / bytes_per_s)
            peer.sendall(b"!")


def test_loopback_is_measured() -> None:
    with serving() as address:
        link = measure_link(address, SECRET)

    assert 0.0 < link.latency_s < 1.0
    assert link.bandwidth_bytes_per_s > 1e6


def test_a_slow_network_is_measured_with_few_bytes() -> None:
    """A message that doubles once more would take longer than all the time that there is."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    thread = threading.Thread(target=slow_server, args=(listener,), kwargs={"bytes_per_s": 1e6})
    thread.start()
    begin_s = time.monotonic()
    link = measure_link(address, SECRET)
    took_s = time.monotonic() - begin_s
    thread.join()

    assert 1e5 < link.bandwidth_bytes_per_s < 2e6
    # A busy machine makes it longer, but not by the factor that another message would.
    assert took_s < LINK_BUDGET_S + 5.0


def test_a_stranger_is_sent_away_and_the_peer_is_still_served() -> None:
    with serving() as address:
        with pytest.raises(ConnectionError, match=f"127.0.0.1:{address[1]} cannot be reached"):
            measure_link(address, bytes(SECRET_BYTES))

        assert measure_link(address, SECRET).bandwidth_bytes_per_s > 0.0


def test_a_stranger_that_sends_a_byte_now_and_then_is_sent_away_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It kept the peer waiting for a minute, which gave up."""
    num_read = 0

    def receive(_: int) -> bytes:
        nonlocal num_read
        num_read += 1
        return b"x"

    monkeypatch.setattr(link_measurement, "time", SimpleNamespace(monotonic=lambda: num_read * 1.5))
    stranger: Any = SimpleNamespace(
        recv=receive, settimeout=lambda _: None, setsockopt=lambda *_: None
    )

    assert not link_measurement._acknowledge_all(stranger, SECRET)
    assert num_read == 2


def test_a_machine_that_nobody_can_reach_is_named() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    listener.close()

    with pytest.raises(ConnectionError, match=f"127.0.0.1:{address[1]} cannot be reached"):
        measure_link(address, SECRET)


def test_a_machine_whose_address_can_be_no_name_is_named() -> None:
    """It is what somebody has given its agent; the agents that measured the link died of it."""
    with pytest.raises(ConnectionError, match=r"a\.\.b:70 cannot be reached"):
        measure_link(("a..b", 70), SECRET)


def test_a_link_whose_latency_alone_is_measured_carries_next_to_nothing() -> None:
    """So that a job that trains is not disturbed."""
    with serving() as address:
        link = measure_link(address, SECRET, budget_s=0.0)

    assert link.latency_s > 0.0
    assert link.bandwidth_bytes_per_s == 0.0
