"""Parses options that describe unequal nodes: NODES=VALUE, such as `3,5-7=0.5`."""

import re
from collections.abc import Sequence
from dataclasses import replace
from math import isfinite
from typing import Final

from planaria.core.plan import NodeKind
from planaria.errors import ConfigError

_MEMORY_BYTES_MAX: Final = 2.0**63
_NODES: Final = re.compile(r"\d{1,9}(-\d{1,9})?(,\d{1,9}(-\d{1,9})?)*")


def parse_node_kinds(
    num_nodes: int, *, speeds: Sequence[str], memories: Sequence[str]
) -> dict[int, NodeKind]:
    """The kind of every node.

    Args:
        speeds, memories: texts NODES=VALUE; if two name a node, the last one counts.

    Raises:
        ConfigError: a text has another form, names a node that does not exist, or has a value out
            of range.
    """
    kinds = dict.fromkeys(range(num_nodes), NodeKind())
    for text in speeds:
        nodes, speed = parse_value("--node-speed", text, num_nodes)
        if speed <= 0:
            raise ConfigError(
                "--node-speed",
                text,
                "a speed must be above 0; the nodes of the profile have speed 1",
            )
        kinds.update({node: replace(kinds[node], speed=speed) for node in nodes})
    for text in memories:
        nodes, num_bytes = parse_value("--node-memory", text, num_nodes)
        if not 1 <= num_bytes < _MEMORY_BYTES_MAX:
            remedy = "a device must have 1 byte or more, and less than 2**63"
            raise ConfigError("--node-memory", text, remedy)
        memory = int(num_bytes)
        kinds.update({node: replace(kinds[node], device_memory_bytes=memory) for node in nodes})
    return kinds


def parse_value(option: str, text: str, num_nodes: int) -> tuple[set[int], float]:
    """The nodes and the value of NODES=VALUE.

    Raises:
        ConfigError: the text has another form, or names a node that does not exist.
    """
    names, _, number = text.replace(" ", "").partition("=")
    try:
        value = float(number)
    except ValueError:
        value = float("nan")
    if not _NODES.fullmatch(names) or not isfinite(value):
        raise ConfigError(option, text, "write NODES=VALUE, as in 3=0.5 or 0-3,7=0.5")
    return parse_nodes(option, names, num_nodes, text=text), value


def parse_nodes(option: str, names: str, num_nodes: int, *, text: str = "") -> set[int]:
    """The nodes of a list such as `3,5-7`.

    Args:
        text: the user's text that contains the list, for the error message; "": the list itself.

    Raises:
        ConfigError: `names` is no such list, or names a node that does not exist.
    """
    text, names = text or names, names.replace(" ", "")
    if not _NODES.fullmatch(names):
        raise ConfigError(option, text, "write nodes as in 3,5-7")
    nodes = set[int]()
    for name in names.split(","):
        first, last = (int(number) for number in (name.split("-") * 2)[:2])
        if not first <= last < num_nodes:
            raise ConfigError(option, text, f"{name} is none of the nodes 0 to {num_nodes - 1}")
        nodes.update(range(first, last + 1))
    return nodes
