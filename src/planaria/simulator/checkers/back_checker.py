"""What a job could go on with, as seen from outside: what is saved, what nodes keep in memory, and
machines that were granted."""

from collections.abc import Iterable

from planaria.core.copies import Label
from planaria.core.records import Origin
from planaria.simulator.cluster import SimulatedCluster
from planaria.simulator.faults import Faults
from planaria.simulator.scenario import LEASE_S


def newest_saved(cluster: SimulatedCluster) -> int:
    """Iterations in the newest save of which nobody knows that it is damaged; 0 without any."""
    spoilt = cluster.set_aside | cluster.leader.spoilt
    return max((one.iteration for one in cluster.published if one.source not in spoilt), default=0)


def newest_told(cluster: SimulatedCluster) -> int:
    """As `newest_saved`, of those of which the coordinator can know."""
    leader = cluster.leader
    if not leader.is_in_the_dark:
        return newest_saved(cluster)
    known = leader.told.keys() - cluster.set_aside - leader.spoilt
    return max((one.iteration for one in cluster.published if one.source in known), default=0)


def newest_copied(cluster: SimulatedCluster, members: Iterable[int], origin: Origin) -> int:
    """Of the versions of which members keep all layers the newest, by its age; 0 without any.

    Args:
        origin: on which what these members have trained is built.
    """
    layers: dict[Label, set[int]] = {}
    for node in members:
        for memory in cluster.agents[node].memories:
            for layer, label in memory.contents:
                layers.setdefault(label, set()).add(layer)
    return max(
        (
            label.age
            for label, those in layers.items()
            if len(those) == cluster.job.scenario.num_layers
            and (label.since == origin.epoch or label == origin.copied)
        ),
        default=0,
    )


def unused_grants(cluster: SimulatedCluster, faults: Faults) -> set[int]:
    """Nodes on machines that were granted, which have been there for a lease, and nothing strikes
    any more."""
    long_ago_s = cluster.loop.now_s - LEASE_S
    if faults.over_s > long_ago_s:
        return set()
    struck = {node for _, _, node in faults.struck}
    return {node for node, at_s in cluster.granted_s.items() if at_s < long_ago_s} - struck
