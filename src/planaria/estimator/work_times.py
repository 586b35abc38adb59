"""The time of an iteration from the order of its work alone, for searches that price many plans.

`predicted_timeline` times a schedule: every action, with its transfers and reductions. A search
wants one number of hundreds of plans that have the same pipelines. Here it is computed from the
work of each rank (schedule/routed.py), by the same rules and to the last bit, in a quarter of the
time: no action is made, and what depends on the pipelines alone is computed once.

Not modelled: eager forwards (`Plan.shadows`) and ranks that share processors.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from planaria.core.plan import ModelProfile, Plan, Route
from planaria.estimator.hop_times import ClusterTimes
from planaria.estimator.reductions import Reductions, reduction_starts_s
from planaria.estimator.sharing import LinkUse
from planaria.schedule.action import BACKWARD, BACKWARD_WEIGHT, FORWARD
from planaria.schedule.buckets import ReductionOrder, buckets_of
from planaria.schedule.routed import WORK_KINDS, RoutedWork

_FORWARD, _BACKWARD, _WEIGHT = map(WORK_KINDS.index, (FORWARD, BACKWARD, BACKWARD_WEIGHT))


class _VisitTimes(NamedTuple):
    """The times of one hop, and its messages to hops on other ranks.

    Attributes:
        durations_s: seconds of each kind of work, in the order of WORK_KINDS.
        onward: use of the link to the next hop; None: there is none on another rank.
        back: use of the link to the hop before; None: there is none on another rank.
    """

    durations_s: tuple[float, float, float, float]
    onward: LinkUse | None
    back: LinkUse | None
    layers: range


class WorkTimes:
    """The iteration times of plans that have the same pipelines and hold the same layers.

    Args:
        plan: one of these plans, with any routes.
        order: order of reductions.
        reduce_bytes_factor: bytes that a reduction moves per byte of parameters, see `Reductions`.
    """

    def __init__(
        self,
        profile: ModelProfile,
        plan: Plan,
        *,
        order: ReductionOrder = ReductionOrder.COLOURED,
        reduce_bytes_factor: float = 1.0,
    ) -> None:
        self._cluster = ClusterTimes(profile, plan)
        self._routes: dict[int, tuple[Route, Sequence[_VisitTimes]]] = {}  # By id.
        self._buckets = buckets_of(plan, tied=profile.tied, order=order)
        reductions = Reductions(profile, plan, bytes_factor=reduce_bytes_factor)
        self._reduce_s = [reductions.seconds(bucket) for bucket in self._buckets]
        self._commit_s = reductions.commit_s()
        self._buckets_of_rank: dict[int, list[int]] = {}
        for index, bucket in enumerate(self._buckets):
            for rank in bucket.ranks:
                self._buckets_of_rank.setdefault(rank, []).append(index)

    def iteration_s(self, routes: Sequence[Route], work: RoutedWork) -> float:
        """Seconds of an iteration, as `predicted_timeline` gives them."""
        visits = work.by_visit(routes, self._route_visits, self._routes)
        ends_s = self._ends_s(visits, work)
        handed_over_s = [0.0] * len(self._buckets)
        for rank, indices in self._buckets_of_rank.items():
            own_s, numbers = ends_s.get(rank, []), work.by_rank.get(rank, [])
            layers = {layer for index in indices for layer in self._buckets[index].layers}
            last_s, at_s = _gradient_ends_s(layers, visits, numbers, own_s), 0.0
            for index in indices:  # A rank hands its buckets over in their order.
                at_s = max(at_s, *(last_s.get(x, 0.0) for x in self._buckets[index].layers))
                handed_over_s[index] = max(handed_over_s[index], at_s)
        starts_s = reduction_starts_s(self._buckets, handed_over_s, self._reduce_s)
        reduced_s = [start + each for start, each in zip(starts_s, self._reduce_s, strict=True)]
        computed_s = [own_s[-1] for own_s in ends_s.values() if own_s]
        return max(0.0, *computed_s, *reduced_s) + self._commit_s

    def computed_s(self, routes: Sequence[Route], work: RoutedWork) -> Mapping[int, float]:
        """Seconds until each rank has computed all its work, by rank."""
        ends_s = self._ends_s(work.by_visit(routes, self._route_visits, self._routes), work)
        return {rank: own_s[-1] if own_s else 0.0 for rank, own_s in ends_s.items()}

    def _route_visits(self, route: Route) -> tuple[_VisitTimes, ...]:
        ranks = [hop.rank for hop in route]
        return tuple(
            _VisitTimes(
                (
                    times.forward_s,
                    times.backward_s,
                    times.input_s,
                    times.backward_s - times.input_s,
                ),
                times.onward if ranks[index + 1 : index + 2] not in ([], [hop.rank]) else None,
                times.back if index and ranks[index - 1] != hop.rank else None,
                range(hop.first_layer, hop.end_layer),
            )
            for index, (hop, times) in enumerate(
                zip(route, self._cluster.hop_times(route), strict=True)
            )
        )

    def _ends_s(self, visits: Sequence[_VisitTimes], work: RoutedWork) -> dict[int, list[float]]:
        """The end of each piece of work of each rank, in the rank's order.

        Each rank goes on until a message is missing. A message occupies its link, first come, first
        served.
        """
        ends_s: dict[int, list[float]] = {rank: [] for rank in work.by_rank}
        links_s = [0.0] * self._cluster.num_links
        # Arrival at each visit of its input, and of the gradient of its output; -1: not yet.
        inputs_s, gradients_s = [-1.0] * len(visits), [-1.0] * len(visits)
        waiting: dict[int, int] = {}  # Rank that waits, by the work that its message makes ready.
        ready = sorted(work.by_rank, reverse=True)
        while ready:
            rank = ready.pop()
            own_s, numbers = ends_s[rank], work.by_rank[rank]
            clock_s = own_s[-1] if own_s else 0.0
            for number in numbers[len(own_s) :]:
                index, kind = number >> 2, number & 3
                durations_s, onward, back, _ = visits[index]
                is_forward = kind == _FORWARD
                if kind != _WEIGHT and (back if is_forward else onward) is not None:
                    arrival_s = (inputs_s if is_forward else gradients_s)[index]
                    if arrival_s < 0.0:
                        waiting[2 * index + is_forward] = rank
                        break
                    clock_s = max(clock_s, arrival_s)
                clock_s += durations_s[kind]
                own_s.append(clock_s)
                use = onward if is_forward else back
                if kind == _WEIGHT or use is None:
                    continue
                link, transfer_s, latency_s = use
                links_s[link] = end_s = max(clock_s, links_s[link]) + transfer_s
                target = index + 1 if is_forward else index - 1
                (inputs_s if is_forward else gradients_s)[target] = end_s + latency_s
                waits = waiting.pop(2 * target + is_forward, None)
                if waits is not None:
                    ready.append(waits)
        assert all(len(ends_s[rank]) == len(numbers) for rank, numbers in work.by_rank.items())
        return ends_s


def _gradient_ends_s(
    layers: set[int],
    visits: Sequence[_VisitTimes],
    numbers: Sequence[int],
    ends_s: Sequence[float],
) -> dict[int, float]:
    """The end of the last work of a rank that adds to the gradient of each of these layers, by
    layer; without layers that it does not compute."""
    last_s: dict[int, float] = {}
    for number, end_s in zip(reversed(numbers), reversed(ends_s), strict=True):
        if not layers:
            break
        if number & 3 in (_BACKWARD, _WEIGHT):
            complete = layers.intersection(visits[number >> 2].layers)
            layers -= complete
            last_s.update(dict.fromkeys(complete, end_s))
    return last_s
