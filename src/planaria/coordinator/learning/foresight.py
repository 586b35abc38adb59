"""Predicts the duration of a recovery, from when a loss is noticed until all ranks go on.

That is more than the price by which answers are weighed (overhead.py), because the time before an
answer is chosen is the same for all answers. For the user all of it is downtime. It has three
parts:

1. Stop. Each rank finishes its current action and answers. A loss strikes at any moment, so this
   takes at most as long as the longest action, and half of that on average; it takes no time if all
   ranks wait for each other. If ranks share processors, actions are slowed by those of the others.
2. Decide. Answers are priced, and the best is recorded.
3. Go on. This takes the price of the answer.

Each part has a minimum, a likely value and a maximum. All minima may occur together, when no rank
is in an action. All maxima do not, so the excesses over the likely values are added like
independent errors, by squares. The job's own recoveries widen the range: if the newest ones took
between r and R times their likely value, so may the next.

Only facts that are known when the loss is noticed are used. A worker that is forked anew takes
seconds more, and so does a machine that is waited for; this is learned, not predicted.
"""

from math import sqrt
from typing import Final, NamedTuple

import msgspec

from planaria.coordinator.frozen import replace
from planaria.coordinator.job_rules import Rules
from planaria.coordinator.learning.overhead import NUM_NEWEST
from planaria.coordinator.state import JobState
from planaria.core.plan import ModelProfile
from planaria.estimator.correction import corrected_profile

# These were measured on six emulated nodes of two cores, as benchmarks/laptop.py does; see
# docs/LOG.md. Triples are (minimum, likely, maximum).
ANSWERING_S: Final = (0.002, 0.02, 0.08)  # Stop, without the action that each rank finishes.
DECIDE_S: Final = (0.003, 0.025, 0.1)
GO_ON_LEAST: Final = 0.4  # Share of the price.
GO_ON_MOST: Final = 3.0  # Multiple of the price, plus the seconds below.
GO_ON_MOST_S: Final = 0.05


class DurationRange(NamedTuple):
    """The range of an expected duration."""

    least_s: float
    likely_s: float
    most_s: float


def expected_recovery(rules: Rules, state: JobState, price_s: float) -> DurationRange:
    """The expected duration of a recovery, from the time at which its loss was noticed.

    Args:
        state: state with the plan that the loss ended.
        price_s: price of the answer that was chosen.
    """
    longest_s = _longest_action_s(rules, state)
    least_s, likely_s, most_s = ANSWERING_S
    parts = (
        DurationRange(least_s, likely_s + longest_s / 2, most_s + longest_s),
        DurationRange(*DECIDE_S),
        DurationRange(GO_ON_LEAST * price_s, price_s, GO_ON_MOST * price_s + GO_ON_MOST_S),
    )
    likely_s = sum(part.likely_s for part in parts)
    excess_s = sqrt(sum((part.most_s - part.likely_s) ** 2 for part in parts))
    ratios = [took_s / priced_s for priced_s, took_s in state.learning.findings.recoveries_s]
    return DurationRange(
        min(sum(part.least_s for part in parts), likely_s * min(ratios, default=1.0)),
        likely_s,
        max(likely_s + excess_s, likely_s * max(ratios, default=1.0)),
    )


def with_likely(state: JobState, likely_s: float) -> JobState:
    """The state that knows the likely duration of its recovery."""
    return replace(state, learning=replace(state.learning, recovery_s=likely_s))


def with_recovery(state: JobState, now_s: float) -> JobState:
    """The state that knows what a recovery took, now that every rank goes on.

    Unchanged if this coordinator did not predict that recovery.
    """
    learning = state.learning
    if state.facts.loss is None or not learning.recovery_s:
        return state
    took = (learning.recovery_s, now_s - state.facts.loss.lost_s)
    newest = (*learning.findings.recoveries_s, took)[-NUM_NEWEST:]
    findings = msgspec.structs.replace(learning.findings, recoveries_s=newest)
    return replace(state, learning=replace(learning, findings=findings, recovery_s=0.0))


def _longest_action_s(rules: Rules, state: JobState) -> float:
    """The longest action of any rank of the plan; 0 if the seconds of layers are not known."""
    if rules.catalog is None:
        return 0.0
    problem, factors = rules.catalog.problem, state.learning.findings.layer_factors
    profile = corrected_profile(problem.profile, factors)
    processors = problem.processors or len(state.plan.ranks)
    shared = max(1.0, len(state.plan.ranks) / processors)
    hops = {(hop.first_layer, hop.end_layer) for route in set(state.plan.routes) for hop in route}
    alone_s = max((_action_s(profile, first, end) for first, end in hops), default=0.0)
    return alone_s * shared / min(state.speeds.values(), default=1.0)


def _action_s(profile: ModelProfile, first_layer: int, end_layer: int) -> float:
    """The longer of a stage's forward and backward, on the fewest devices that were profiled."""
    layers = profile.layers[first_layer:end_layer]
    counts = [min(layer.forward_s) for layer in layers]
    forward_s = sum(layer.forward_s[n] for layer, n in zip(layers, counts, strict=True))
    return max(forward_s, sum(layer.backward_s(n) for layer, n in zip(layers, counts, strict=True)))
