"""What a job finds out about itself: how often it fails, and how long things take in it.

It is on record with the members of each epoch (records.py), so that a new coordinator knows it.
"""

import msgspec


class FailureHistory(msgspec.Struct, frozen=True, kw_only=True):
    """How often a job has failed; see coordinator/learning/history.py.

    Attributes:
        since_s: when it first trained, 0 if it has not yet.
        weight: of its failures when the last one was, older ones count less.
        last_s: when the last one was.
        nodes: that they took, weighed like them.
        struck: those that the last one took.
    """

    since_s: float = 0.0
    weight: float = 0.0
    last_s: float = 0.0
    nodes: float = 0.0
    struck: tuple[int, ...] = ()


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """How far seconds, and bytes, are from what a job's profile says, as found in the job.

    Attributes:
        layer_factors: by layer, how many times the profile's seconds; empty: as it says. See
            coordinator/learning/drift.py.
        more_bytes: by layer, what a device holds of it beside what the profile says; empty: none.
            See coordinator/learning/memory.py.
        beside_s: that an iteration takes beside the forwards and backwards of layers.
        hop_s: processor seconds that a schedule took, for each hop that it was computed from, in
            the newest epoch. See coordinator/learning/overhead.py.
        overheads_s: of the newest recoveries, what they took beside schedules and moving layers,
            the newest last.
        transfers_s: of the newest recoveries in which layers moved, what that was to take by the
            profile's links, and what it took.
        recoveries_s: of the newest recoveries, what they were expected to take from when their loss
            was noticed, and what they took. See coordinator/learning/foresight.py.
        pauses_s: of the newest switches, for how long ranks did not train, beside schedules.
        speeds: of nodes that are slow, as they are seen to be; others have 1. See
            coordinator/learning/slowness.py.
        idle: slow nodes that had no work: how often they were tried again, and since when they
            have none, 0 if they have some.
    """

    layer_factors: tuple[float, ...] = ()
    more_bytes: tuple[int, ...] = ()
    beside_s: float = 0.0
    hop_s: float = 0.0
    overheads_s: tuple[float, ...] = ()
    transfers_s: tuple[tuple[float, float], ...] = ()
    recoveries_s: tuple[tuple[float, float], ...] = ()
    pauses_s: tuple[float, ...] = ()
    speeds: dict[int, float] = {}
    idle: dict[int, tuple[int, float]] = {}
