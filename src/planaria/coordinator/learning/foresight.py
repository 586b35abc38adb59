"""How long a recovery is expected to take: from when a loss is noticed until all ranks go on.

That is more than the price by which answers are weighed (overhead.py): once one is chosen, what
came before it is over, whichever it is. To whoever waits for the job all of it is downtime. It has
three parts:

1. Stop. Each rank ends the action that it is in and answers. A loss strikes at any moment, so that
   lasts up to the longest action, beside those of the others where ranks share processors, and half
   of it on average; nothing if all wait for each other.
2. Decide. Answers are priced, and the best is put on record.
3. Go on. What the answer is priced at.

Each part has a least, a likely and a most. The least may all come true together, where nobody is in
an action; that all parts take their most does not, so beyond what is likely their excess counts as
that of independent errors does, by squares. What this job has seen of recoveries widens the range:
if the newest took between r and R times what was likely, so may the next.

Only what is known when the loss is noticed is looked at. A worker that ended and is forked anew
takes seconds more, as does a machine that is waited for: that is learned, not foreseen.
"""

from dataclasses import replace
from math import sqrt
from typing import Final, NamedTuple

import msgspec

from planaria.coordinator.learning.overhead import NUM_NEWEST
from planaria.coordinator.state import JobState, Rules
from planaria.core.plan import ModelProfile
from planaria.estimator.drift import corrected_profile

# Measured on six emulated nodes of two cores, as benchmarks/laptop.py does; see docs/LOG.md.
ANSWERING_S: Final = (0.002, 0.02, 0.08)  # Of the stop, beside the action that is ended.
DECIDE_S: Final = (0.003, 0.025, 0.1)
GO_ON_LEAST: Final = 0.4  # Of its price.
GO_ON_MOST: Final = 3.0
GO_ON_MOST_S: Final = 0.05  # And so much more.


class Range(NamedTuple):
    """Seconds that something is expected to take."""

    least_s: float
    likely_s: float
    most_s: float


def expected_recovery(rules: Rules, state: JobState, price_s: float) -> Range:
    """Of the recovery whose answer is priced so, from when its loss was noticed.

    Args:
        state: its plan is the one that the loss ended.
    """
    longest_s = _longest_action_s(rules, state)
    least_s, likely_s, most_s = ANSWERING_S
    parts = (
        Range(least_s, likely_s + longest_s / 2, most_s + longest_s),
        Range(*DECIDE_S),
        Range(GO_ON_LEAST * price_s, price_s, GO_ON_MOST * price_s + GO_ON_MOST_S),
    )
    likely_s = sum(part.likely_s for part in parts)
    excess_s = sqrt(sum((part.most_s - part.likely_s) ** 2 for part in parts))
    ratios = [took_s / priced_s for priced_s, took_s in state.learning.findings.recoveries_s]
    return Range(
        min(sum(part.least_s for part in parts), likely_s * min(ratios, default=1.0)),
        likely_s,
        max(likely_s + excess_s, likely_s * max(ratios, default=1.0)),
    )


def with_likely(state: JobState, likely_s: float) -> JobState:
    """The state that knows how long its recovery is expected to take."""
    return replace(state, learning=replace(state.learning, recovery_s=likely_s))


def with_recovery(state: JobState, now_s: float) -> JobState:
    """The state once every rank goes on: what the recovery took, if this coordinator foresaw it."""
    learning = state.learning
    if state.loss is None or not learning.recovery_s:
        return state
    took = (learning.recovery_s, now_s - state.loss.lost_s)
    newest = (*learning.findings.recoveries_s, took)[-NUM_NEWEST:]
    findings = msgspec.structs.replace(learning.findings, recoveries_s=newest)
    return replace(state, learning=replace(learning, findings=findings, recovery_s=0.0))


def _longest_action_s(rules: Rules, state: JobState) -> float:
    """Of the ranks of the plan; 0 if nobody knows what layers take."""
    if rules.every is None:
        return 0.0
    problem, factors = rules.every.problem, state.learning.findings.layer_factors
    profile = corrected_profile(problem.profile, factors)
    processors = problem.processors or len(state.plan.ranks)
    shared = max(1.0, len(state.plan.ranks) / processors)
    hops = {(hop.first_layer, hop.end_layer) for route in set(state.plan.routes) for hop in route}
    alone_s = max((_action_s(profile, first, end) for first, end in hops), default=0.0)
    return alone_s * shared / min(state.speeds.values(), default=1.0)


def _action_s(profile: ModelProfile, first_layer: int, end_layer: int) -> float:
    """The longer one of forward and backward, by the fewest devices that there are figures for."""
    layers = profile.layers[first_layer:end_layer]
    counts = [min(layer.forward_s) for layer in layers]
    forward_s = sum(one.forward_s[n] for one, n in zip(layers, counts, strict=True))
    return max(forward_s, sum(one.backward_s(n) for one, n in zip(layers, counts, strict=True)))
