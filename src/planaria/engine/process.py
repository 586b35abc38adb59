"""The main function of a worker: how the process starts, and how it ends when its code raises."""

import faulthandler
import logging
import signal
import sys

import torch

from planaria.core.messages import Abort, NoticeTaken, Shutdown, Stopped
from planaria.core.specs import NodeSpec
from planaria.data.prefetch import fork_loaders
from planaria.engine.blame import failure_of
from planaria.engine.control import Control
from planaria.engine.prepare import device_of, message_bytes_max, pacing_of, pinned_bytes_of
from planaria.engine.worker import Worker
from planaria.transport.connection import LinkProtection
from planaria.transport.frames import LINKS, derive
from planaria.transport.link_tls import link_security
from planaria.transport.links import Links
from planaria.transport.pulse import Pulse

logger = logging.getLogger(__name__)

_BEATS_PER_LEASE = 6


def main(spec: NodeSpec, agent_fd: int, lifeline_fd: int, pulse: Pulse) -> None:
    """A worker's main function, called in a process forked by its agent."""
    # One intra-op thread: another number changes the bits that some kernels compute, and emulated
    # nodes share the machine's cores anyway.
    torch.set_num_threads(1)
    # The default of 5 ms would let a busy compute thread delay a message by up to 5 ms.
    sys.setswitchinterval(0.0005)
    # Python stacks of a worker that hangs or crashes, for its agent to read.
    faulthandler.register(signal.SIGUSR1, file=pulse.stack_fd, all_threads=True)
    faulthandler.enable(file=pulse.stack_fd, all_threads=True)
    descriptors = agent_fd, lifeline_fd
    loaders = fork_loaders(spec.job.data.workers, close=descriptors)  # While there is no thread.
    links = Links(
        spec.rank,
        token=derive(spec.token, LINKS),
        host=spec.host,
        pacing=pacing_of(spec),
        protection=LinkProtection(
            is_checked=spec.checks_links,
            num_bytes_max=message_bytes_max(spec),
            security=link_security(spec.token) if spec.job.cluster.encryption == "on" else None,
            num_ranks=spec.job.cluster.num_ranks_max,
        ),
    )
    beat_s = spec.job.cluster.lease_s / _BEATS_PER_LEASE
    notice = NoticeTaken(node=spec.node, rank=spec.rank, after_s=spec.job.cluster.notice_s)
    try:
        try:  # CUDA may start for longer than a lease, and lets no other thread run meanwhile.
            device = device_of(
                spec.job, rank=spec.device_number, pinned_bytes=pinned_bytes_of(spec)
            )
        finally:  # The first beat has a longer time limit.
            control = Control(
                agent_fd, lifeline_fd, links=links, pulse=pulse, beat_s=beat_s, notice=notice
            )
        worker = Worker(spec, control, links, pulse)
        worker.loaders = loaders
        worker.run(device)
        return
    except (Exception, SystemExit) as error:
        is_noticed = control.is_noticed
        failure = failure_of(error, spec, epoch=-1, layers=(0, 0), is_noticed=is_noticed)
        control.send(failure)
        if failure.blame != "job":  # A new process may succeed.
            return
    _answer_nothing(spec, control)


def _answer_nothing(spec: NodeSpec, control: Control) -> None:
    """Answers each `Abort` that this rank holds nothing, until the job ends.

    The other ranks save what they hold, and must not wait for an answer of this one.
    """
    while not isinstance(order := control.wait_order(), Shutdown):
        logger.info("rank %s has failed and waits to be shut down", spec.rank)
        if isinstance(order, Abort):
            control.send(Stopped(rank=spec.rank, epoch=order.epoch, ages={}, complete=()))
