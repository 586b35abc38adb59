"""What can happen to a job, by the names that records and reports give it."""

from enum import StrEnum
from typing import Final


class LossKind(StrEnum):
    """Why an epoch ended without a switch."""

    LOST = "lost"  # Nodes are gone, or cannot reach each other.
    CRASH = "crash"  # A worker ended or raised, and its node lives.
    STALL = "stall"  # A worker stood still, and its node lives.
    COPY = "copy"  # A copy or a save turned out to be spoilt.
    LEADER = "leader"  # The coordinator before this one was changing the members.
    GRANTED = "granted"  # A node that was waited for has come.
    SHORT = "short"  # Too few nodes stay: the job saves, and waits for machines.
    FAILED = "failed"  # The job has failed, and ends once its live layers are saved.


# Reasons for which no node, worker or link was lost.
LOSSLESS: Final = (LossKind.LEADER, LossKind.GRANTED, LossKind.SHORT)


class ChangeKind(StrEnum):
    """Why a node joins, leaves or gets other work while training goes on."""

    JOIN = "join"
    DRAIN = "drain"
    PREEMPT = "preempt"
    SLOW = "slow"
    FAST = "fast"  # A slow node is seen to be fast again, or is tried again.
    REFORM = "reform"  # The plan is just a better one.


LEAVING: Final = (ChangeKind.DRAIN, ChangeKind.PREEMPT)


class Ending(StrEnum):
    """How a job ended."""

    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"
    LOST = "lost"
    UNSAVED = "unsaved"
