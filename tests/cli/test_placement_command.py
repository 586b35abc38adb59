"""The command `planaria placement`."""

import json
from typing import Any

import pytest

from helpers.command import assert_mistake, command


def found(*options: str) -> dict[str, Any]:
    """What it prints as JSON, of six nodes with two copies."""
    arguments = ("placement", "--nodes", "6", "--copies", "2", "--json", *options)
    result: dict[str, Any] = json.loads(command(*arguments).stdout)
    return result


def test_mixed_is_told_with_what_survives() -> None:
    """Pairs: of 15 losses of two nodes three lose something."""
    told = found()

    assert told["holders"] == [[0, 1], [1, 0], [2, 3], [3, 2], [4, 5], [5, 4]]
    assert told["recovery_probability"] == pytest.approx(0.8)
    assert told["risks"]["mixed"] == pytest.approx(1.0 - (1.0 - 0.01**2) ** 3)


def test_nodes_that_fail_often_are_in_no_pair_together() -> None:
    """Where mixed has nodes 0 and 1 keep each other's states."""
    told = found("--strategy", "optimised", "--probability", "0-1=0.2")

    assert all({0, 1} != set(nodes) for nodes in told["holders"])
    assert told["risks"]["optimised"] < 0.2 * told["risks"]["mixed"]


def test_of_a_node_that_is_named_twice_the_last_probability_holds() -> None:
    """The other nodes have the one of all."""
    told = found("--node-failure", "0.1", "--probability", "0-5=0.5", "--probability", "1-5=0.1")

    pair = 0.1 * 0.1
    assert told["risks"]["mixed"] == pytest.approx(1.0 - (1.0 - 0.05) * (1.0 - pair) ** 2)


def test_a_node_receives_no_more_than_it_can() -> None:
    """With memory for all, five nodes are best kept by one; that receives two at most."""
    options = ("--strategy", "optimised", "--memory", "6", "--node-failure", "0.1")
    for receive in (1, 2, 5):
        received = [0] * 6
        for nodes in found(*options, "--receive", str(receive))["holders"]:
            for node in nodes[1:]:
                received[node] += 1
        assert max(received) <= receive


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (("--probability", "9=0.1"), ("--probability = '9=0.1'", "none of the nodes 0 to 5")),
        (("--probability", "0=1.5"), ("--probability = '0=1.5'", "above 0 and below 1")),
        (("--probability", "0.5"), ("--probability = '0.5'", "write NODES=VALUE")),
        (("--node-failure", "0"), ("--node-failure = 0.0", "above 0 and below 1")),
        (("--domain-failure", "1"), ("--domain-failure = 1.0", "above 0 and below 1")),
        (("--domain", "0-1", "--domain", "1,2"), ("--domain = '1,2'", "node 1 is in another")),
        (("--receive", "1"), ("--receive = 1", "works only with --strategy optimised")),
        (("--memory", "3"), ("--memory = 3", "works only with --strategy optimised")),
        (("--receive", "0", "--strategy", "optimised"), ("copies = 2", "keep and receive")),
        (("--receive", "-1", "--strategy", "optimised"), ("--receive = -1", "at least 0")),
        (("--memory", "1", "--strategy", "optimised"), ("--memory = 1", "lack room for 6 states")),
        (("--memory", "0", "--strategy", "optimised"), ("--memory = 0", "must be at least 1")),
        (("--memory", "-3", "--strategy", "optimised"), ("--memory = -3", "must be at least 1")),
    ],
)
def test_what_cannot_be_is_refused(options: tuple[str, ...], parts: tuple[str, ...]) -> None:
    """In a line that says what would do."""
    assert_mistake(command("placement", "--nodes", "6", "--copies", "2", *options), *parts)
