"""What `planaria agent` refuses before it looks for a head."""

import errno

import pytest

from helpers.command import assert_mistake, command
from planaria.nodes.known_heads import connection_problem


@pytest.mark.parametrize("head", [":7320", "head:0", "head"])
def test_a_head_without_host_or_port_is_refused(head: str) -> None:
    """It was looked for in vain for ten minutes."""
    assert_mistake(command("agent", "--join", head), "--join = ", "HOST:PORT")


@pytest.mark.parametrize("host", ["10.0.0.1:7320", "a..b"])
def test_an_address_for_others_that_nobody_can_look_up_is_refused(host: str) -> None:
    """The agents of other machines died of it when they measured the network."""
    refused = command("agent", "--join", "head:7320", "--advertise", host)

    assert_mistake(refused, "--advertise = ", "without a port")


def test_a_connection_that_breaks_names_the_head() -> None:
    """`[Errno 110] Connection timed out` did not say to whom."""
    broken = connection_problem(OSError(errno.ETIMEDOUT, "Connection timed out"), ("head", 7320))

    assert broken == "the connection to head:7320 broke: Connection timed out"
    assert connection_problem(ConnectionError("refused by it"), ("head", 7320)) == "refused by it"
