"""How often the job fails, and how many nodes at once, learned from its own failures.

The time to the next failure is taken as exponential. Its rate has a Gamma distribution, whose mean
is one failure in an hour at first, but which weighs no more than a minute of the job's own time:
jobs differ by a factor of ten thousand, so the first failure tells more than was known before. k
failures in a time T make the mean

    (1/60 + k) / (1 minute + T)

What is long ago counts less, for clusters change: a failure a seconds ago as exp(-a / 6 hours), and
so does each second of the time. Losses within a lease of one another are one failure: they have one
cause, such as a switch, and the next such failure is as far away as that cause. It takes each of
its nodes once, also where first a worker is lost and then the whole node. What a failure takes is
taken as geometric, with a mean as if there had been one failure before:

    (1.5 + nodes) / (1 + k)

That is between what traces show: of the 584 faults of InfiniteHBD's 400 servers in 345 days a tenth
come at the same instant as another one, while spot instances are taken away 2.1 at a time (Bamboo's
p3 trace).

Of this the record of members keeps four numbers and the nodes of the last failure, so a new
coordinator knows what the one before it learned. Before the first failure there is no such record:
what is committed tells, by what an iteration should take, for how long the job was spared.

Source: conjugate prior of the exponential distribution; DESIGN 6 (Policies).
"""

from collections.abc import Collection
from math import exp
from typing import Final

from planaria.core.findings import FailureHistory

PRIOR_S: Final = 60.0
PRIOR_FAILURES: Final = PRIOR_S / 3600.0
PRIOR_NODES: Final = 1.5
MEMORY_S: Final = 6 * 3600.0


def begun_history(
    history: FailureHistory, now_s: float, *, trained_s: float = 0.0
) -> FailureHistory:
    """The history of a job that trains now, for the first time unless it began before.

    Args:
        trained_s: for how long it has trained if nothing is on record.
    """
    return history if history.since_s else FailureHistory(since_s=now_s - trained_s)


def with_failure(
    history: FailureHistory, now_s: float, *, nodes: Collection[int], lease_s: float
) -> FailureHistory:
    """The history with one more loss now, which is a failure if the last is a lease ago.

    Args:
        nodes: that it took, or on which it took workers.
    """
    is_new = not history.weight or now_s - history.last_s > lease_s
    share = _remembered(now_s - history.last_s)
    before = () if is_new else history.struck
    new = set(nodes).difference(before)
    return FailureHistory(
        since_s=history.since_s or now_s,
        weight=history.weight * share + (1.0 if is_new else 0.0),
        last_s=now_s,
        nodes=history.nodes * share + len(new),
        struck=tuple(sorted(new.union(before))),
    )


def learned_failures_per_s(history: FailureHistory, now_s: float) -> float:
    """The rate that is to be expected from now on, above 0."""
    up_s = now_s - history.since_s if history.since_s else 0.0
    num_failures = history.weight * _remembered(now_s - history.last_s)
    weighted_s = MEMORY_S * (1.0 - _remembered(up_s))
    return (PRIOR_FAILURES + num_failures) / (PRIOR_S + weighted_s)


def learned_nodes_per_failure(history: FailureHistory, now_s: float) -> float:
    """How many nodes the next failure is expected to take, at least 1."""
    share = _remembered(now_s - history.last_s)
    nodes, failures = history.nodes * share, history.weight * share
    return max(1.0, (PRIOR_NODES + nodes) / (1.0 + failures))


def _remembered(ago_s: float) -> float:
    return exp(-max(0.0, ago_s) / MEMORY_S)
