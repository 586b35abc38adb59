"""How often the job fails, and how many nodes fail at once, learned from its own failures.

The time to the next failure is assumed to be exponentially distributed. Its rate has a Gamma
distribution, with a prior mean of one failure an hour. The prior weighs only as much as one minute
of the job's own time: jobs differ by a factor of ten thousand, so the first failure tells more than
the prior. After k failures in a time T the mean rate is

    (1/60 + k) / (1 minute + T)

Older observations count less, because clusters change: a failure that is a seconds old counts
exp(-a / 6 hours), and so does each second of T. Losses within a lease of one another are one
failure, because they have one cause, such as a network switch, and the next such failure is as far
away as that cause. A failure counts each of its nodes once, even if first a worker is lost and then
the whole node. The number of nodes in a failure is assumed to be geometrically distributed, with
this mean, in which the prior counts as one failure:

    (1.5 + nodes) / (1 + k)

Its prior, 1.5, lies between what traces show. Of the 584 faults of InfiniteHBD's 400 servers in 345
days a tenth come at the same instant as another one, while spot instances are taken away 2.1 at a
time (Bamboo's p3 trace).

The record of members keeps four numbers of this and the nodes of the last failure, so that a new
coordinator knows what the one before it learned. Before the first failure there is no such record.
Then the committed iterations, times the predicted duration of one, say for how long the job has
trained without a failure.

Source: conjugate prior of the exponential distribution.
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
    """The history of a job that trains now; unchanged if it has trained before.

    Args:
        trained_s: seconds that the job has trained already, if its history does not say.
    """
    return history if history.since_s else FailureHistory(since_s=now_s - trained_s)


def with_failure(
    history: FailureHistory, now_s: float, *, nodes: Collection[int], lease_s: float
) -> FailureHistory:
    """The history with one more loss now; it is a new failure if the last loss is over a lease ago.

    Args:
        nodes: nodes that were lost, or on which workers were lost.
    """
    is_new = not history.weight or now_s - history.last_s > lease_s
    share = _remaining_weight(now_s - history.last_s)
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
    """The failure rate expected from now on; above 0."""
    up_s = now_s - history.since_s if history.since_s else 0.0
    num_failures = history.weight * _remaining_weight(now_s - history.last_s)
    weighted_s = MEMORY_S * (1.0 - _remaining_weight(up_s))
    return (PRIOR_FAILURES + num_failures) / (PRIOR_S + weighted_s)


def learned_nodes_per_failure(history: FailureHistory, now_s: float) -> float:
    """The expected number of nodes in the next failure; at least 1."""
    share = _remaining_weight(now_s - history.last_s)
    nodes, failures = history.nodes * share, history.weight * share
    return max(1.0, (PRIOR_NODES + nodes) / (1.0 + failures))


def _remaining_weight(ago_s: float) -> float:
    return exp(-max(0.0, ago_s) / MEMORY_S)
