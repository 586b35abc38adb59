"""Chooses how the ranks of an epoch exchange tensors: over NCCL where each has a GPU of its own.

All ranks must choose the same. What a rank cannot know alone, which GPUs the ranks on other
machines have, they tell each other over the links.

NCCL may be there and of no use: without enough shared memory in a container, or without a way
between machines. Then no group can be formed, which looks like links that break between live
nodes, so healthy nodes would be left out. So ranks count the epochs in a row in which one of them
has failed to form its groups, and do without NCCL after two, where the job leaves them the choice.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch.distributed as dist
import xxhash

from planaria.core.copies import LayerCopy
from planaria.core.job import JobConfig
from planaria.core.plan import Plan
from planaria.engine.comm.device_comm import DeviceComm
from planaria.engine.comm.host import HostComm
from planaria.engine.comm.nccl import NcclComm, NcclMaker, group_keys
from planaria.engine.devices import LATE, Device
from planaria.engine.iteration.groups import reduce_vector
from planaria.errors import ConfigError, PeerLostError
from planaria.schedule.action import Schedule
from planaria.transport.links import UNLIMITED_S, Channel, Links
from planaria.transport.sockets import is_loopback

logger = logging.getLogger(__name__)

_EXACT_BITS: Final = 52  # Whole numbers of so many bits are exact in float64.
ENCRYPTED: Final = "cluster.encryption is on, and NCCL encrypts nothing"
_LOSS_S: Final = 1.0  # Limit for the end of a link to arrive; the kernel closes those of a process.
_FAILURES_MAX: Final = 2  # One less than the broken epochs that cost a node.


@dataclass(slots=True)
class NcclTrials:
    """The trials of a rank to form groups of NCCL.

    Attributes:
        num_failed: number of epochs in a row in which it, or another one as far as it was told,
            could not form them, though its peers were there.
    """

    num_failed: int = 0


def open_comm(
    links: Links,
    device: Device,
    plan: Plan,
    schedule: Schedule,
    *,
    copies: Sequence[LayerCopy] = (),
    job: JobConfig,
    hosts: Sequence[str],
    trials: NcclTrials,
    publish: Callable[[DeviceComm], None],
) -> None:
    """Opens the comm of an epoch whose links stand; blocks until it can be used.

    Args:
        copies: copies of layers that go from device to device.
        hosts: addresses of all ranks of the epoch.
        trials: trials of this rank so far, to which this one is added.
        publish: takes the comm before anything blocks, so that others can abort it.

    Raises:
        ConfigError: the job asks for NCCL, and ranks of the epoch cannot use it.
        PeerLostError, AbortedError: a peer is gone, or a group could not be formed.
    """
    transport, ranks = job.cluster.transport, plan.all_ranks
    reason = ""
    if transport == "host" or job.cluster.device in ("cpu", LATE) or job.model.kind == "paced":
        reason = "the job says so"
    elif job.cluster.encryption == "on":
        reason = ENCRYPTED
    elif all(map(is_loopback, hosts)):  # All ranks find the same devices here.
        reason = nccl_obstacle(device, num_ranks=len(ranks))
    if not reason:
        reason = _obstacle_elsewhere(links, device, ranks, trials)
    if not reason and transport == "auto" and trials.num_failed >= _FAILURES_MAX:
        reason = f"their groups of NCCL could not be formed {trials.num_failed} times in a row"
    keys = group_keys(schedule, copies)
    if not reason and keys:
        comm = NcclComm(links, device, keys, NcclMaker())
        publish(comm)
        try:
            comm.form()
        except PeerLostError as error:
            _note_failure(links, trials, error)
            raise
        trials.num_failed = 0
        return
    if reason and transport == "nccl":
        raise transport_mistake(reason)
    if reason and device.place.type != "cpu" and transport == "auto" and links.rank == ranks[0]:
        logger.warning("epoch %s: %s", links.epoch, fallback_text(reason))
    publish(HostComm(links, device))


def _note_failure(links: Links, trials: NcclTrials, error: PeerLostError) -> None:
    """Counts an epoch whose groups could not be formed, unless a loss was the reason.

    Raises:
        PeerLostError: another peer than that of the error is lost.
        AbortedError: the epoch is over.
    """
    # NCCL sees that a peer is gone before its link has closed, and does not say which.
    links.wait_for(lambda: bool(links.lost_peers), timeout_s=_LOSS_S)
    links.check_epoch()
    lost = links.lost_peers
    if not lost:
        trials.num_failed += 1
    elif error.rank not in lost:
        peer = min(lost)
        raise PeerLostError(peer, lost[peer]) from error


def nccl_obstacle(device: Device, *, num_ranks: int) -> str:
    """The reason why ranks of this machine cannot use NCCL; "": they can.

    Args:
        num_ranks: number of ranks on this machine.
    """
    if device.place.type != "cuda":
        return f"NCCL needs NVIDIA GPUs, and ranks compute on {device.name}"
    if not dist.is_nccl_available():
        return "this build of torch has no NCCL"
    if num_ranks > device.count:
        return f"{num_ranks} ranks share {device.count} GPU{'s' * (device.count > 1)}"
    return ""


def fallback_text(reason: str) -> str:
    """The line for the user of a job whose transport is chosen for it."""
    return f"tensors go between ranks through the memory of their machines, because {reason}"


def transport_mistake(reason: str) -> ConfigError:
    """The mistake of asking for NCCL where it cannot be used."""
    remedy = f'{reason}; "auto" takes it where each rank has a GPU of its own, "host" never'
    return ConfigError("cluster.transport", "nccl", remedy)


def _obstacle_elsewhere(
    links: Links, device: Device, ranks: Sequence[int], trials: NcclTrials
) -> str:
    """The reason why the ranks cannot use NCCL, the same on all of them; "": they can.

    All ranks have the same trials afterwards.
    """
    vector = np.zeros((2, len(ranks)), dtype=np.float64)
    own = ranks.index(links.rank)
    if not nccl_obstacle(device, num_ranks=1):
        digest = xxhash.xxh3_64_intdigest(device.identity.encode())
        vector[0, own] = max(1, digest >> 64 - _EXACT_BITS)
    vector[1, own] = trials.num_failed
    total = reduce_vector(
        links,
        vector.reshape(-1),
        ranks=ranks,
        iteration=0,
        timeout_s=UNLIMITED_S,
        channel=Channel.GROUP,
    )
    numbers, failures = total.reshape(vector.shape).tolist()
    trials.num_failed = int(max(failures))
    rank_of: dict[float, int] = {}
    for rank, number in zip(ranks, numbers, strict=True):
        if not number:
            return f"rank {rank} has no NVIDIA GPU, or its build of torch no NCCL"
        if number in rank_of:
            return f"ranks {rank_of[number]} and {rank} share a GPU"
        rank_of[number] = rank
    return ""
