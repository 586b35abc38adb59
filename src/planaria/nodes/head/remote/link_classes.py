"""Classes of links between the machines of a job, and the measurement of one link of each.

Two nodes of one machine need no network. Machines of one failure domain are near to each other,
others are far. A machine that names no domain is near to all that name none.
"""

from collections.abc import Callable, Sequence
from enum import StrEnum
from itertools import combinations

from planaria.core.machine_messages import MachineFacts
from planaria.core.plan import Link
from planaria.nodes.head.remote.machine_handle import MachineHandle, measured_path


class LinkClass(StrEnum):
    """A class of links; the value is its name in a profile."""

    MACHINE = "intra_node"
    NEAR = "inter_node"
    FAR = "inter_domain"


def link_class(machine: MachineFacts, other: MachineFacts) -> LinkClass:
    """The class of the link between two machines, or two agents of one machine."""
    if machine.host == other.host:
        return LinkClass.MACHINE
    return LinkClass.NEAR if machine.domain == other.domain else LinkClass.FAR


def first_pairs(machines: Sequence[MachineFacts]) -> dict[LinkClass, tuple[int, int]]:
    """The first two machines of each class of links that there is between machines, by index."""
    pairs: dict[LinkClass, tuple[int, int]] = {}
    for index, other in combinations(range(len(machines)), 2):
        kind = link_class(machines[index], machines[other])
        if kind is not LinkClass.MACHINE and kind not in pairs:
            pairs[kind] = index, other
    return pairs


async def measured_links(
    machines: Sequence[MachineHandle], *, note: Callable[[str], None]
) -> dict[LinkClass, Link]:
    """The link between the first two machines of each class; it takes about half a second each.

    A class whose machines cannot reach one another is left out, and the user is told.

    Args:
        note: shows the user a text.
    """
    links: dict[LinkClass, Link] = {}
    for kind, pair in first_pairs([machine.facts for machine in machines]).items():
        server, client = (machines[index] for index in pair)
        measured = await measured_path(client.name, client.measure, server)
        if measured.link is None:
            note(
                f"{client.name} ({client.facts.host}) could not measure its link to {server.name}: "
                f"{measured.reason}; open all TCP ports between the machines, or have "
                f"{server.name} name another address with --advertise"
            )
            continue
        links[kind] = measured.link
        note(
            f"between {client.name} and {server.name}: {measured.link.latency_s * 1e3:.2f} ms, "
            f"{measured.link.bandwidth_bytes_per_s * 8e-9:.2f} Gbit/s"
        )
    return links
