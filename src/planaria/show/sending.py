"""What copies in memory take of a plan's network, in words and as JSON."""

from collections.abc import Mapping
from typing import Any

from rich.text import Text

from planaria.placement.idle import Sending
from planaria.show.words import bytes_text, counted, seconds_text


def sending_text(sending: Mapping[int, Sending], copies: int) -> Text:
    """Of the node whose copies take longest, which is what a version waits for."""
    if not sending:
        return Text("No copies travel: every node keeps its own, and all hold every layer.")
    node, slowest = _slowest(sending)
    text = Text.assemble(
        (f"{counted(copies, 'copy')} of each layer", "bold"),
        f": of a version node {node} sends {bytes_text(slowest.num_bytes)}, which takes "
        f"{seconds_text(slowest.sends_s)} of the {seconds_text(slowest.idle_s)} in which its "
        "network is idle in an iteration.\n",
    )
    if slowest.iterations == 1:
        return text.append("Every iteration has room for a version.")
    return text.append(
        f"A version takes {slowest.iterations} iterations; if each iteration waited for one, it "
        f"would be {seconds_text(slowest.longer_s)} longer."
    )


def sending_json(sending: Mapping[int, Sending]) -> dict[str, Any] | None:
    """The same; None if no copies travel."""
    if not sending:
        return None
    node, slowest = _slowest(sending)
    return {
        "node": node,
        "bytes": slowest.num_bytes,
        "sends_s": slowest.sends_s,
        "idle_s": slowest.idle_s,
        "iterations": slowest.iterations,
        "longer_s": slowest.longer_s,
    }


def _slowest(sending: Mapping[int, Sending]) -> tuple[int, Sending]:
    """The node, the lowest of equals."""
    node = min(
        sending,
        key=lambda n: (-sending[n].iterations, -sending[n].longer_s, -sending[n].sends_s, n),
    )
    return node, sending[node]
