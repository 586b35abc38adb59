"""What a measurement of a link finds is what the network between two machines can do."""

import pytest

from helpers.host_networks import needs_namespaces
from helpers.hosts import Hosts

pytestmark = [pytest.mark.hosts, needs_namespaces]

BYTES_PER_S = 5_000_000
SERVE = """
import socket, sys
from planaria.transport.link_measurement import serve_measurement
listener = socket.create_server((sys.argv[1], 5000))
print("listens")
serve_measurement(listener, bytes(32))
"""
MEASURE = """
import sys
from planaria.transport.link_measurement import measure_link
print(measure_link((sys.argv[1], 5000), bytes(32)).bandwidth_bytes_per_s)
"""


def test_a_limited_link_is_measured_as_it_is_limited() -> None:
    with Hosts(2) as hosts:
        for host in hosts:
            host.set_rate(BYTES_PER_S)
        server = hosts[0].start("python", "-c", SERVE, hosts[0].address)
        server.wait_for_line("listens")
        measured = float(hosts[1].run("python", "-c", MEASURE, hosts[0].address))

    assert 0.5 * BYTES_PER_S < measured < 1.3 * BYTES_PER_S
