"""What `planaria agent` refuses before it looks for a head."""

import pytest

from helpers.command import assert_mistake, command


@pytest.mark.parametrize("head", [":7320", "head:0", "head"])
def test_a_head_without_host_or_port_is_refused(head: str) -> None:
    """It was looked for in vain for ten minutes."""
    assert_mistake(command("agent", "--join", head), "--join = ", "HOST:PORT")


@pytest.mark.parametrize("host", ["10.0.0.1:7320", "a..b"])
def test_an_address_for_others_that_nobody_can_look_up_is_refused(host: str) -> None:
    """The agents of other machines died of it when they measured the network."""
    refused = command("agent", "--join", "head:7320", "--advertise", host)

    assert_mistake(refused, "--advertise = ", "without a port")
