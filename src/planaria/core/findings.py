"""What a job learns about itself: how often it fails, and how long things take in it.

These facts are recorded with the members of each epoch (records.py), so that a new coordinator
knows them.
"""

import msgspec


class FailureHistory(msgspec.Struct, frozen=True, kw_only=True):
    """How often a job has failed; see coordinator/learning/history.py.

    Attributes:
        since_s: time at which the job first trained; 0: it has not yet.
        weight: weighted number of its failures at last_s; older failures weigh less.
        last_s: time of the last loss.
        nodes: weighted number of nodes that these failures took, with the same weights.
        struck: nodes that the last failure took.
    """

    since_s: float = 0.0
    weight: float = 0.0
    last_s: float = 0.0
    nodes: float = 0.0
    struck: tuple[int, ...] = ()


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """How far seconds and bytes in the job are from what its profile says.

    Attributes:
        layer_factors: factor on the profile's seconds, by layer; empty: as the profile says. See
            coordinator/learning/profile_correction.py.
        more_bytes: bytes that a device holds of the layer beyond what the profile says, by layer;
            empty: none. See coordinator/learning/memory_estimates.py.
        beside_s: seconds that an iteration takes in addition to the forwards and backwards of
            layers.
        hop_s: processor seconds that computing a schedule took per hop, in the newest epoch. See
            coordinator/learning/overhead.py.
        overheads_s: seconds that the newest recoveries took in addition to schedules and moving
            layers, the newest last.
        transfers_s: (predicted, measured) seconds of moving layers in the newest recoveries in
            which layers moved; the prediction is by the links as they were known then.
        links: newest measured bytes per second of each kind of link between machines, the newest
            last; empty: as the profile says. See coordinator/learning/link_speeds.py.
        recoveries_s: (predicted, measured) seconds of the newest recoveries, counted from when the
            loss was noticed. See coordinator/learning/foresight.py.
        pauses_s: seconds in which ranks did not train during the newest switches, without
            schedules.
        speeds: observed speed of each slow node, by node; all others have speed 1. See
            coordinator/learning/slowness.py.
        idle: (number of retries, time since which it has no work) of each slow node that had no
            work, by node; the time is 0 if the node has work.
    """

    layer_factors: tuple[float, ...] = ()
    more_bytes: tuple[int, ...] = ()
    beside_s: float = 0.0
    hop_s: float = 0.0
    overheads_s: tuple[float, ...] = ()
    transfers_s: tuple[tuple[float, float], ...] = ()
    links: dict[str, tuple[float, ...]] = {}
    recoveries_s: tuple[tuple[float, float], ...] = ()
    pauses_s: tuple[float, ...] = ()
    speeds: dict[int, float] = {}
    idle: dict[int, tuple[int, float]] = {}
