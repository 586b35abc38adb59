"""Nodes that differ, as a command is told of them."""

import pytest

from planaria.cli.node_kinds import parse_node_kinds
from planaria.core.plan import NodeKind
from planaria.errors import ConfigError


def test_nodes_are_named_one_by_one_or_in_ranges() -> None:
    """Both options may name a node; of one that is named twice the last holds."""
    found = parse_node_kinds(6, speeds=["1-3, 5=0.5", "5=2"], memories=["0,3=4e9"])

    assert found == {
        0: NodeKind(1.0, 4_000_000_000),
        1: NodeKind(0.5),
        2: NodeKind(0.5),
        3: NodeKind(0.5, 4_000_000_000),
        4: NodeKind(),
        5: NodeKind(2.0),
    }


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("1", "write NODES=VALUE"),
        ("=1", "write NODES=VALUE"),
        ("1=", "write NODES=VALUE"),
        ("1,=2", "write NODES=VALUE"),
        ("-1=2", "write NODES=VALUE"),
        ("1=nan", "write NODES=VALUE"),
        ("1=inf", "write NODES=VALUE"),
        ("1=-2", "above 0"),
        ("1=0", "above 0"),
        ("3-1=2", "3-1 is none of the nodes 0 to 5"),
        ("2-6=2", "2-6 is none of the nodes 0 to 5"),
        ("999999999=2", "none of the nodes"),
    ],
)
def test_what_cannot_be_is_refused(text: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_node_kinds(6, speeds=[text], memories=[])

    assert remedy in caught.value.remedy
    assert caught.value.value == text


@pytest.mark.parametrize("memory", ["0.5", "1e30"])
def test_memory_is_in_whole_bytes_of_which_there_may_be(memory: str) -> None:
    """The larger number ended in a traceback."""
    with pytest.raises(ConfigError, match="1 byte or more"):
        parse_node_kinds(2, speeds=[], memories=[f"0={memory}"])
