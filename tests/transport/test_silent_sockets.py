"""A connection to a machine that has lost its power breaks in the time that is asked for."""

import socket

import pytest

from planaria.transport.sockets import break_when_silent


@pytest.mark.parametrize("silent_s", [0.5, 3.0, 120.0])
def test_a_connection_breaks_in_the_time_asked_for(silent_s: float) -> None:
    """Whether bytes are on their way, which the user timeout bounds, or none are, which the probes
    find out."""
    with socket.socket() as sock:
        break_when_silent(sock, silent_s=silent_s)

        idle_s, probe_s, user_timeout_ms = (
            sock.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_USER_TIMEOUT)
        )
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert user_timeout_ms == silent_s * 1000
        assert idle_s + probe_s <= max(2.0, silent_s)
