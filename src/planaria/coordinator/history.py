"""How often the job fails, and how many nodes at once, learned from its own failures.

The time to the next failure is taken as exponential. Its rate has a Gamma distribution, at first as
if there had been one failure in an hour; k failures in a time T make its mean

    (1 + k) / (1 hour + T)

What is long ago counts less, for clusters change: a failure a seconds ago as exp(-a / 6 hours), and
so does each second of the time. Losses within a lease of one another are one failure: they
have one cause, such as a switch, and the next such failure is as far away as that cause. What a
failure takes is taken as geometric; of its mean a prior failure knows, too:

    (1.5 + nodes) / (1 + k)

That is between what traces show: of the 584 faults of InfiniteHBD's 400 servers in 345 days a tenth
come at the same instant as another one, while spot instances are taken away 2.1 at a time (Bamboo's
p3 trace).

Of this the record of members keeps four numbers, so a new coordinator knows what the one before it
learned. What the job was spared before its first failure it does not know; it then expects the next
failure too early.

Source: conjugate prior of the exponential distribution; DESIGN 6 (Policies).
"""

from math import exp
from typing import Final

from planaria.core.records import FailureHistory

PRIOR_FAILURES: Final = 1.0
PRIOR_NODES: Final = 1.5
PRIOR_S: Final = 3600.0
MEMORY_S: Final = 6 * 3600.0


def begun_history(history: FailureHistory, now_s: float) -> FailureHistory:
    """The history of a job that trains now, for the first time unless it began before."""
    return history if history.since_s else FailureHistory(since_s=now_s)


def with_failure(
    history: FailureHistory, now_s: float, *, num_nodes: int, lease_s: float
) -> FailureHistory:
    """The history with one more loss now, which is a failure if the last is a lease ago.

    Args:
        num_nodes: that it took, at least 1.
    """
    is_new = not history.weight or now_s - history.last_s > lease_s
    share = _remembered(now_s - history.last_s)
    return FailureHistory(
        since_s=history.since_s or now_s,
        weight=history.weight * share + (1.0 if is_new else 0.0),
        last_s=now_s,
        nodes=history.nodes * share + num_nodes,
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
    return max(1.0, (PRIOR_NODES + nodes) / (PRIOR_FAILURES + failures))


def _remembered(ago_s: float) -> float:
    return exp(-max(0.0, ago_s) / MEMORY_S)
