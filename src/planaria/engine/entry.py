"""Provides the layers with which a rank begins an epoch, from whichever source has them.

The rank holds a layer already, or receives it from a peer that holds it or keeps a copy, or reads
it from its own copies in memory or from the disk tier, or makes it from the seed.
"""

from collections.abc import Sequence

import msgspec

from planaria.checkpoint.disk.tiers import Tier
from planaria.core.messages import AT_COMMIT, StartEpoch
from planaria.core.plan import Link
from planaria.engine.copying import Copying
from planaria.engine.exchange import (
    exchange_layers,
    missing_layers,
    receive_age,
    send_silently,
    wait_received,
)
from planaria.engine.stage import RankStage
from planaria.engine.staging import State
from planaria.errors import CheckpointError, SpoiltError
from planaria.transport.links import UNLIMITED_S, Links


def provide_layers(
    start: StartEpoch,
    links: Links,
    stage: RankStage,
    tier: Tier,
    copying: Copying,
    *,
    storage: Link | None,
    timeout_s: float = UNLIMITED_S,
) -> tuple[StartEpoch, int]:
    """Provides this rank's layers; returns the order with its iteration, and the bytes received.

    Layers that the rank is to hold silently are only prepared; their states arrive later.

    Args:
        storage: link over which a paced job reads saves; None: reading takes as long as it takes.

    Raises:
        PeerLostError, AbortedError: a peer is gone.
        CheckpointError: a copy in memory or a version on disk differs from what was written.
    """
    rounds, plan, rank = start.rounds, start.plan, links.rank
    takes_part = rank in plan.all_ranks
    if not plan.silent:
        age = start.iteration
        sent = {t.layer for transfers in rounds for t in transfers if t.source == rank}
        own = sorted(plan.held_by_rank.get(rank, ()))
        copies = copying.states({*sent, *own}.difference(stage.layers), start.copied)
        size = exchange_layers(links, stage, rounds, age=age, timeout_s=timeout_s, copies=copies)
        if not takes_part:
            wait_received(links, rounds)
            return start, size
        if not start.vector:  # The job starts, resumes, or goes back to a save or to copies.
            missing = missing_layers(own, stage)
            states = copies if start.copied else layers_on_disk(tier, start.source, missing)
            if states and storage is not None and not start.copied:
                num_bytes = sum(map(stage.model.virtual_state_bytes, missing))
                links.timekeeper.sleep(storage.seconds(num_bytes))
            assert not start.copied or not set(missing) - copies.keys()
            stage.hold(missing, states=states, age=age)
        assert not missing_layers(own, stage)
        return start, size
    if start.iteration == AT_COMMIT:
        age = receive_age(links, rounds, timeout_s=timeout_s)
        start = msgspec.structs.replace(start, iteration=age)
    send_silently(links, stage, rounds, age=start.iteration)
    stage.prepare(missing_layers(plan.held_by_rank[rank], stage))
    return start, 0


def layers_on_disk(tier: Tier, source: str, layers: Sequence[int]) -> dict[int, State]:
    """The states of layers in version `source` of the disk tier; empty if `source` is "".

    A version from which nothing is needed is not read: it may be gone.

    Raises:
        SpoiltError: the version cannot be read.
    """
    if not source or not layers:
        return {}
    states: dict[int, State] = {}
    layer = -1
    try:
        manifest = tier.manifest(source)
        for layer in layers:
            states[layer] = tier.read_layer(manifest, layer)
    except CheckpointError as error:
        raise SpoiltError(source, str(error), layer=layer) from error
    return states
