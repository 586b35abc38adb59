"""How many microbatches each pipeline gets.

`fastest_distribution` gives each microbatch to the pipeline that would end first with it. A
pipeline never ends earlier with one more, so end times are used in ascending order, and the last
one is as early as possible. So the result is exact for the time of the slowest pipeline, warmup and
cooldown included.

`levelled_distribution` is Oobleck's, and is exact as well: it minimises the sum of
(N_i * T_i - M)^2, where M is the mean of the N_i * T_i. For a given M each pipeline has a term of
its own, convex in N_i. So it is best to add, one by one, the microbatch that increases the sum
least; one more than n increases it by T_i^2 * (2 n + 1) - 2 * M * T_i. As M grows, slower pipelines
become cheaper, and microbatches move to them one by one. For a given distribution the sum is lowest
if M is its mean, so the answer is among the distributions that occur as M grows.

Source: Oobleck (SOSP '23), section 4.2.2, equation 6.
Differs: N_b * T ignores warmup and cooldown of a pipeline. Plans are made with the first function;
the second serves for comparison (paper_sets.py). The constraint of equation 6 sums over templates
where it means pipelines.
"""

from collections.abc import Sequence
from heapq import heapify, heapreplace
from math import sqrt
from statistics import fmean, pstdev
from typing import Final

from planaria.planner.problem import Problem, Seconds, batch_error

_ROUNDING: Final = 1e-9


def fastest_distribution(times_s: Sequence[Seconds], num_microbatches: int) -> tuple[int, ...]:
    """The number of microbatches of each pipeline, at least one, with which the last pipeline ends
    earliest.

    Args:
        times_s: end times of each pipeline; entry n - 1 is for n microbatches. They never fall.
        num_microbatches: number of microbatches to distribute, at least that of pipelines.
    """
    counts = [1] * len(times_s)
    if num_microbatches == len(counts):
        return tuple(counts)
    ends_s = [(float(times[1]), index) for index, times in enumerate(times_s)]
    heapify(ends_s)
    for _ in range(num_microbatches - len(counts)):
        _, index = ends_s[0]
        counts[index] += 1
        # A pipeline that has all microbatches gets no other, so its next end time does not matter.
        next_count = min(counts[index] + 1, num_microbatches)
        heapreplace(ends_s, (float(times_s[index][next_count - 1]), index))
    return tuple(counts)


def levelled_distribution(seconds: Sequence[float], num_microbatches: int) -> tuple[int, ...]:
    """The number of microbatches N_i of each pipeline, at least one, for which the products
    N_i * T_i differ least (equation 6).

    Args:
        seconds: T_i, seconds of one microbatch in each pipeline; above 0.
        num_microbatches: number of microbatches to distribute, at least that of pipelines.
    """
    rates = [1 / microbatch_s for microbatch_s in seconds]
    center_s = num_microbatches / sum(rates)
    best = _cheapest(seconds, num_microbatches, center_s)
    # Let r_i = 1 / T_i be the rates, and N_i * T_i = M + d_i the products of the answer. The sum of
    # the d_i is 0, so M differs from the middle by the sum of d_i * (r_i - mean of the rates),
    # divided by the sum of the rates. The sum of the d_i^2 is not above that of `best`. So by
    # Cauchy and Schwarz M differs from the middle by no more than
    spread_s = sqrt(_unevenness(seconds, best) / len(seconds)) * pstdev(rates) / fmean(rates)
    spread_s += _ROUNDING * center_s
    counts = list(_cheapest(seconds, num_microbatches, center_s - spread_s))
    while True:
        best = min(best, tuple(counts), key=lambda distribution: _unevenness(seconds, distribution))
        # One pipeline stands for all that have the same seconds and as many microbatches.
        alike = {pair: i for i, pair in enumerate(zip(seconds, counts, strict=True))}.values()
        moves = [
            (_crossing_mean_s(seconds, counts, source, target), source, target)
            for source in alike
            for target in alike
            if counts[source] > 1 and seconds[source] < seconds[target]
        ]
        if not moves or min(moves)[0] > center_s + spread_s:
            return best
        _, source, target = min(moves)
        counts[source] -= 1
        counts[target] += 1


def check_microbatches(problem: Problem, num_pipelines: int) -> None:
    """Refuses fewer microbatches than pipelines.

    Raises:
        InfeasibleError: there are fewer; the message names the nearest global batch that works.
    """
    if problem.num_microbatches < num_pipelines:
        why = f"each of {num_pipelines} pipelines needs a microbatch"
        raise batch_error(problem, num_pipelines, why=why)


def _cheapest(seconds: Sequence[float], num_microbatches: int, mean_s: float) -> tuple[int, ...]:
    """The distribution with the lowest sum of (N_i * T_i - mean_s)^2."""
    counts = [1] * len(seconds)
    costs = [(_cost(microbatch_s, 1, mean_s), index) for index, microbatch_s in enumerate(seconds)]
    heapify(costs)
    for _ in range(num_microbatches - len(counts)):
        _, index = costs[0]
        counts[index] += 1
        heapreplace(costs, (_cost(seconds[index], counts[index], mean_s), index))
    return tuple(counts)


def _cost(microbatch_s: float, count: int, mean_s: float) -> float:
    """What one microbatch more than `count` adds to a pipeline's term."""
    return microbatch_s * microbatch_s * (2 * count + 1) - 2 * mean_s * microbatch_s


def _crossing_mean_s(
    seconds: Sequence[float], counts: Sequence[int], source: int, target: int
) -> float:
    """The mean above which the sum gets lower if a microbatch moves from source to target, the
    slower pipeline."""
    taken_s = seconds[source] ** 2 * (2 * counts[source] - 1)
    given_s = seconds[target] ** 2 * (2 * counts[target] + 1)
    return (given_s - taken_s) / (2 * (seconds[target] - seconds[source]))


def _unevenness(seconds: Sequence[float], counts: Sequence[int]) -> float:
    """The sum of squared distances of the products from their mean (equation 6)."""
    products_s = [microbatch_s * count for microbatch_s, count in zip(seconds, counts, strict=True)]
    mean_s = sum(products_s) / len(products_s)
    return sum((product_s - mean_s) ** 2 for product_s in products_s)
