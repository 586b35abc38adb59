"""The value of a transition, and the choice of the best one.

The best transition trains the most samples that count until the next failure, per second.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import exp, expm1, inf, lgamma
from typing import Final, NamedTuple

from planaria.core.plan import Plan, Transition

_NEGLIGIBLE: Final = 1e-6  # The share of all failures that may be neglected.


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """The expectations about the next failure and the end of the job.

    Attributes:
        failures_per_s: failure rate of the whole job; 0 if no failure is expected.
        unsaved_samples: samples that would be trained again if a failure now took the last copy of
            a layer.
        between_saves: samples from one save to the next; inf if nothing is saved.
        lost_max: upper bound on the samples that are trained again, set by copies in memory; inf
            if there is none.
        remaining_samples: samples that the job has still to train; inf if it has no end.
        nodes_per_failure: mean number of nodes that one failure takes at once.
    """

    failures_per_s: float
    unsaved_samples: float = 0.0
    between_saves: float = inf
    lost_max: float = inf
    remaining_samples: float = inf
    nodes_per_failure: float = 1.0

    def __post_init__(self) -> None:
        assert 0.0 <= self.failures_per_s < inf
        assert 0.0 <= self.unsaved_samples < inf
        assert min(self.between_saves, self.remaining_samples) > 0.0
        assert self.lost_max >= 0.0
        assert 1.0 <= self.nodes_per_failure < inf


def best_transition(
    transitions: Sequence[Transition], *, global_batch_size: int, outlook: Outlook
) -> Transition:
    """The transition with the most expected samples per second.

    Of equals it is the one with the least downtime, and of those the first.

    Args:
        transitions: transitions to choose from, at least one.
        global_batch_size: samples of one iteration.
        outlook: expectations about the next failure.
    """
    assert transitions

    def rank(transition: Transition) -> tuple[float, float]:
        expected = expected_samples_per_s(
            transition, global_batch_size=global_batch_size, outlook=outlook
        )
        return -expected, transition.downtime_s

    return min(transitions, key=rank)


def expected_samples_per_s(
    transition: Transition, *, global_batch_size: int, outlook: Outlook
) -> float:
    """The expected samples that count until the next failure or the end of the job, divided by the
    expected time until then.

    The failure comes after the time T, exponential with rate L. No sample counts during t, which is
    the downtime and the time in which R samples are trained again; after that each iteration adds a
    batch of B samples. With v = B / iteration_s, for a job without end,

        t = downtime_s + R / v
        samples until the next failure = v * integral over T of L * exp(-L * T) * max(0, T - t)
                                       = v * exp(-L * t) / L

    and the expected time is 1 / L. If the job ends at e, the samples after e are subtracted, and
    the expected time is

        (1 - exp(-L * e)) / L

    If another plan follows, at m after the first one has begun, the samples after t + m are trained
    at its rate. The samples that the failure takes back on average (`samples_at_risk`) are
    subtracted.

    With L = 0 the result is v, or the remaining samples divided by the time that they take. If L is
    high, the transition with the least t is best.

    Source: Odyssey, equation 8, for the first term.
    Differs: redone samples are time in which nothing counts; the loss of a last copy has a price; a
    job that ends soon has little to gain from a plan that takes long to begin.
    """
    phases = _phases(transition, global_batch_size, outlook.remaining_samples)
    rate, end_s = outlook.failures_per_s, phases[-1].ends_s
    if not rate:
        has_end = end_s < inf
        return outlook.remaining_samples / end_s if has_end else phases[-1].samples_per_s
    useful = sum(
        phase.samples_per_s
        * exp(-rate * phase.begins_s)
        * -expm1(-rate * (phase.ends_s - phase.begins_s))
        for phase in phases
    )
    at_risk = samples_at_risk(transition, global_batch_size=global_batch_size, outlook=outlook)
    return (useful - rate * at_risk) / -expm1(-rate * end_s)


class _Phase(NamedTuple):
    """A span of time in which the job trains by one plan.

    Attributes:
        plan: plan of the phase.
        samples_per_s: samples that it trains per second.
        begins_s: seconds from the decision to its first sample that counts.
        ends_s: seconds from the decision to its end; inf if it has none.
        trained: samples that count before it begins.
    """

    plan: Plan
    samples_per_s: float
    begins_s: float
    ends_s: float
    trained: float


def _phases(transition: Transition, global_batch_size: int, remaining: float) -> list[_Phase]:
    """The phases, one for each plan by which the job trains until its end; at least one."""
    samples_per_s = global_batch_size / transition.iteration_s
    begins_s = transition.downtime_s + transition.redone_samples / samples_per_s
    then = transition.then
    lasts_s, ends_s = then.downtime_s if then else inf, begins_s + remaining / samples_per_s
    first = _Phase(transition.after, samples_per_s, begins_s, min(begins_s + lasts_s, ends_s), 0.0)
    if then is None or first.ends_s == ends_s:
        return [first]
    trained = lasts_s * samples_per_s
    samples_per_s = global_batch_size / then.iteration_s
    ends_s = first.ends_s + (remaining - trained) / samples_per_s
    return [first, _Phase(then.after, samples_per_s, first.ends_s, ends_s, trained)]


def samples_at_risk(transition: Transition, *, global_batch_size: int, outlook: Outlook) -> float:
    """The expected samples that the next failure makes the job train again; a failure after the end
    of the job costs none.

    A failure at the time T takes the last copy of some layer with the probability p
    (`share_at_risk`) of the plan by which the job trains then. The job then goes back to its newest
    save and trains again what is not saved at T. Until the plan begins at t, that is x, the samples
    that are unsaved now. Later it is x and what the plan has trained by T, less what was saved by
    then. Let E(y, v) be the mean of that if training begins with y unsaved samples
    (`mean_unsaved`). Since an exponential T has no memory, the result is

        p * (x * (1 - exp(-L * t)) + exp(-L * t) * E(x, v))

    If another plan follows at t', when y samples are unsaved, p * exp(-L * t') * E(y, v) is
    subtracted and p' * exp(-L * t') * E(y, v') is added. If the job ends at t', the former is
    subtracted only.

    If two saves in a row are missing, the next one is expected once as many samples again are
    trained as are unsaved now. A slow disk soon has a save; on a full one, the save that is
    expected gets further away as training goes on.
    """
    rate = outlook.failures_per_s
    if not (rate and outlook.lost_max):
        return 0.0
    is_late = outlook.unsaved_samples >= 2 * outlook.between_saves
    between_saves = 2 * outlook.unsaved_samples if is_late else outlook.between_saves

    def samples_lost(at_s: float, trained: float, samples_per_s: float) -> float:
        if at_s == inf:
            return 0.0
        unsaved = (outlook.unsaved_samples + trained) % between_saves
        mean = mean_unsaved(unsaved, samples_per_s / rate, between_saves)
        return exp(-rate * at_s) * min(mean, outlook.lost_max)

    phases = _phases(transition, global_batch_size, outlook.remaining_samples)
    shares = [
        share_at_risk(phase.plan, nodes_per_failure=outlook.nodes_per_failure) for phase in phases
    ]
    now = min(outlook.unsaved_samples, outlook.lost_max)
    lost = shares[0] * now * -expm1(-rate * phases[0].begins_s)
    for share, (_, samples_per_s, begins_s, ends_s, trained) in zip(shares, phases, strict=True):
        by_end = trained + samples_per_s * (ends_s - begins_s)
        lost += share * samples_lost(begins_s, trained, samples_per_s)
        lost -= share * samples_lost(ends_s, by_end, samples_per_s)
    return lost


def mean_unsaved(unsaved: float, to_failure: float, between_saves: float) -> float:
    """The expected work that is unsaved when the next failure comes, in any unit of time or work.

    The failure comes after T, which is exponential with mean m. A save happens at each multiple of
    P. With x unsaved now, the result is the mean of (x + T) mod P, which is

        x + m - P * exp(-(P - x) / m) / (1 - exp(-P / m))

    Args:
        unsaved: x, the work that is unsaved now.
        to_failure: m, the mean work until the failure.
        between_saves: P, the work from one save to the next; inf if nothing is saved.
    """
    if between_saves == inf:
        return max(0.0, unsaved + to_failure)
    unsaved = min(unsaved, between_saves)
    if not to_failure:
        return unsaved
    num_saves = exp((unsaved - between_saves) / to_failure) / -expm1(-between_saves / to_failure)
    return max(0.0, unsaved + to_failure - between_saves * num_saves)


def share_at_risk(plan: Plan, *, nodes_per_failure: float) -> float:
    """An upper bound, up to _NEGLIGIBLE, on the probability that a failure takes the last copy of
    some layer.

    A failure takes k of the N nodes, each set of k nodes with the same probability, where k is
    geometric with the given mean and at most N. The h holders of a layer are all among them with
    probability

        k / N * (k - 1) / (N - 1) * .. * (k - h + 1) / (N - h + 1)

    These probabilities are added up over the different sets of holders, so a failure that takes two
    sets counts twice: with pipelines of 1 and 7 nodes and two nodes per failure, the bound is 1.5
    times the probability.
    """
    gone = set(plan.gone)
    num_whole = sum(gone.isdisjoint(pipeline.nodes) for pipeline in plan.pipelines)
    p_one_more = 1.0 - 1.0 / nodes_per_failure
    # Each whole pipeline holds all layers.
    if p_one_more ** max(0, num_whole - 1) < _NEGLIGIBLE:
        return 0.0
    sizes = Counter(map(len, plan.holder_sets))
    return _share_struck(tuple(sorted(sizes.items())), len(plan.nodes), p_one_more)


@lru_cache(maxsize=1024)  # The answers to a loss have few different numbers of holders.
def _share_struck(sizes: tuple[tuple[int, int], ...], num_nodes: int, p_one_more: float) -> float:
    """The bound of `share_at_risk`.

    Args:
        sizes: pairs of a number of holders and how many sets of holders are so large.
    """
    share, at_least = 0.0, 1.0
    for k in range(1, num_nodes + 1):
        exactly = at_least * (1.0 - p_one_more) if k < num_nodes else at_least
        struck = sum(
            number * exp(_log_falling_factorial(k, size) - _log_falling_factorial(num_nodes, size))
            for size, number in sizes
            if size <= k
        )
        share += exactly * min(1.0, struck)
        at_least -= exactly
        if at_least < _NEGLIGIBLE:
            break
    return share


def _log_falling_factorial(number: int, num_factors: int) -> float:
    """The logarithm of number * (number - 1) * .., of num_factors factors, in constant time."""
    return lgamma(number + 1) - lgamma(number - num_factors + 1)
