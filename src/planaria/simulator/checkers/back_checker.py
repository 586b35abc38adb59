"""What a job could continue from, as seen from outside: saves, copies in memory, and granted
machines."""

from collections.abc import Iterable

from planaria.core.copies import Label
from planaria.core.records import Origin
from planaria.simulator.fault_injection import FaultInjection
from planaria.simulator.scenario import LEASE_S
from planaria.simulator.simulated_cluster import SimulatedCluster


def newest_save(cluster: SimulatedCluster) -> int:
    """The number of iterations in the newest save that is not known to be damaged; 0: no save."""
    spoilt = cluster.set_aside | cluster.leader.spoilt
    return max(
        (save.iteration for save in cluster.published if save.source not in spoilt), default=0
    )


def newest_known_save(cluster: SimulatedCluster, *, source: str = "") -> int:
    """The number of iterations in the newest usable save known to the coordinator; 0: no save.

    Args:
        source: source on record of the members' training, which a new coordinator knows that cannot
            look for saves.
    """
    leader = cluster.leader
    if not leader.may_miss_saves:
        return newest_save(cluster)
    known_sources = {*leader.known_since_s, source} - cluster.set_aside - leader.spoilt
    return max(
        (save.iteration for save in cluster.published if save.source in known_sources), default=0
    )


def newest_copy(cluster: SimulatedCluster, members: Iterable[int], origin: Origin) -> int:
    """The age of the newest version of which members keep copies of all layers; 0: none.

    Args:
        origin: origin on which the members' training is built; copies of others do not count, but
            for those that lead to the copies that it went back to.
    """
    before = origin.copied
    layers: dict[Label, set[int]] = {}
    for node in members:
        for memory in cluster.agents[node].memories:
            for layer, label in memory.contents:
                layers.setdefault(label, set()).add(layer)
    return max(
        (
            label.age
            for label, copied_layers in layers.items()
            if len(copied_layers) == cluster.job.scenario.num_layers
            and (
                label.since == origin.epoch
                or (before and label.since == before.since and label.age <= before.age)
            )
        ),
        default=0,
    )


def unused_grants(cluster: SimulatedCluster, faults: FaultInjection) -> set[int]:
    """The nodes on granted machines that have been there for a lease and that no fault struck;
    empty until a lease after the last fault."""
    long_ago_s = cluster.loop.now_s - LEASE_S
    if faults.end_s > long_ago_s:
        return set()
    struck = {node for _, _, node in faults.injected}
    return {node for node, at_s in cluster.granted_s.items() if at_s < long_ago_s} - struck
