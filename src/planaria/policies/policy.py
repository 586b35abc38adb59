"""What a policy is, what its answers cost, and which of them is the best.

A policy answers an event with transitions, as many as it has ideas, none if it cannot go on. All
are priced alike: the downtime by the bytes that move, the iteration by the policy's estimate. The
best makes the most samples that count before the next failure.

Source: DESIGN 6 (Policies).
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, expm1, inf, lgamma
from typing import Final, Protocol

from planaria.core.cluster import ClusterEvent, ClusterState
from planaria.core.plan import Link, ModelProfile, Plan, Transfer, Transition
from planaria.restorer.cover import trusted_layers
from planaria.restorer.sources import transfer_rounds
from planaria.restorer.strategies import Restoring

_NEGLIGIBLE: Final = 1e-6  # Of all failures.


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What recovery costs.

    Attributes:
        links: by kind: "intra_node" and "inter_node".
        layer_bytes: of each layer's state: parameters and optimizer state.
        regroup_s: of what every recovery needs, whatever moves: links and groups made anew.
    """

    links: Mapping[str, Link]
    layer_bytes: tuple[int, ...]
    regroup_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What is to be expected of the next failure.

    Attributes:
        failures_per_s: of the whole job; 0 if none is expected.
        unsaved_samples: that would be trained again if it took the last copy of a layer.
        nodes_per_failure: that one failure takes at once, on average.
    """

    failures_per_s: float
    unsaved_samples: float = 0.0
    nodes_per_failure: float = 1.0

    def __post_init__(self) -> None:
        assert 0.0 <= self.failures_per_s < inf
        assert 0.0 <= self.unsaved_samples < inf
        assert 1.0 <= self.nodes_per_failure < inf


class Policy(Protocol):
    """A way to answer what happens to the cluster."""

    def propose(
        self, plan: Plan, cluster: ClusterState, event: ClusterEvent, prices: Prices
    ) -> tuple[Transition, ...]:
        """The transitions from the plan that would answer the event; none if this policy has none.

        Args:
            plan: that the job leaves.
            cluster: after the event; its epoch is that of the plans proposed.
        """
        ...


def profile_prices(profile: ModelProfile, *, regroup_s: float) -> Prices:
    """The prices that a profile tells, with a constant for what it does not."""
    return Prices(
        links=profile.links,
        layer_bytes=tuple(
            layer.parameter_bytes + layer.optimizer_bytes for layer in profile.layers
        ),
        regroup_s=regroup_s,
    )


def downtime_s(transfers: Iterable[Transfer], prices: Prices, *, devices_per_node: int) -> float:
    """Regrouping, then the transfers."""
    return prices.regroup_s + transfer_s(transfers, prices, devices_per_node=devices_per_node)


def transfer_s(transfers: Iterable[Transfer], prices: Prices, *, devices_per_node: int) -> float:
    """For how long transfers at the same time keep the busiest link."""
    bytes_on = bytes_by_link(transfers, devices_per_node=devices_per_node)
    return max((prices.links[link[0]].seconds(n) for link, n in bytes_on.items()), default=0.0)


def bytes_by_link(
    transfers: Iterable[Transfer], *, devices_per_node: int
) -> Counter[tuple[str, str, int]]:
    """What each link carries, by its kind, direction and end.

    Between nodes that is what one node sends to others, or what it receives; within a node what one
    device sends or receives there.
    """
    bytes_on: Counter[tuple[str, str, int]] = Counter()
    for transfer in transfers:
        source, target = transfer.source // devices_per_node, transfer.target // devices_per_node
        if source != target:
            bytes_on["inter_node", "from", source] += transfer.num_bytes
            bytes_on["inter_node", "to", target] += transfer.num_bytes
        else:
            bytes_on["intra_node", "from", transfer.source] += transfer.num_bytes
            bytes_on["intra_node", "to", transfer.target] += transfer.num_bytes
    return bytes_on


def moving(
    plan: Plan,
    after: Plan,
    cluster: ClusterState,
    prices: Prices,
    restoring: Restoring,
    *,
    iteration_s: float,
    redone_samples: int,
    policy: str,
    answer: str,
) -> Transition:
    """The way from a plan to another one: layers come from whoever holds them."""
    moved = restoring.sources(after, cluster, layer_bytes=prices.layer_bytes)
    per_node = after.pipelines[0].template.devices_per_node
    return Transition(
        before=plan,
        after=after,
        rounds=transfer_rounds(moved),
        downtime_s=downtime_s(moved, prices, devices_per_node=per_node),
        iteration_s=iteration_s,
        redone_samples=redone_samples,
        policy=policy,
        answer=answer,
    )


def num_exposed(plan: Plan, cluster: ClusterState) -> int:
    """How many layers distrusted nodes alone would hold."""
    distrusted = cluster.distrusted
    if not distrusted:
        return 0
    # Nodes that are gone are no part of the cluster, but have places in pipelines still.
    untrusted = distrusted.union(plan.gone)
    return plan.num_layers - len(trusted_layers(plan.pipelines, untrusted))


def least_exposed(
    transitions: Sequence[Transition], cluster: ClusterState
) -> tuple[Transition, ...]:
    """Those that leave the fewest layers to distrusted nodes alone."""
    exposed = [num_exposed(transition.after, cluster) for transition in transitions]
    fewest = min(exposed, default=0)
    return tuple(one for one, number in zip(transitions, exposed, strict=True) if number == fewest)


def holder_sets(plan: Plan) -> frozenset[frozenset[int]]:
    """The nodes that hold a layer, for each layer; if all of one set are lost, a last copy is.

    O(layers * nodes).
    """
    per_node = plan.pipelines[0].template.devices_per_node
    holders: dict[int, set[int]] = {}
    for rank, layers in plan.held_by_rank.items():
        for layer in layers:
            holders.setdefault(layer, set()).add(rank // per_node)
    return frozenset(map(frozenset, holders.values()))


def share_at_risk(plan: Plan, *, nodes_per_failure: float) -> float:
    """The probability that a failure takes the last copy of some layer, or little more.

    A failure takes k of the N nodes, any k as likely, where k is geometric with the given mean,
    N at most. The h holders of a layer are all among them with probability

        k / N * (k - 1) / (N - 1) * .. * (k - h + 1) / (N - h + 1)

    which is added up for different sets of holders, so what two of them have in common counts
    twice.
    """
    num_whole = sum(not set(pipeline.nodes).intersection(plan.gone) for pipeline in plan.pipelines)
    one_more = 1.0 - 1.0 / nodes_per_failure
    if one_more ** max(0, num_whole - 1) < _NEGLIGIBLE:  # So many copies there are of each layer.
        return 0.0
    sizes = Counter(map(len, holder_sets(plan)))
    num_nodes = len(plan.nodes)
    share, at_least = 0.0, 1.0
    for k in range(1, num_nodes + 1):
        exactly = at_least * (1.0 - one_more) if k < num_nodes else at_least
        struck = sum(
            number * exp(_log_ways(k, size) - _log_ways(num_nodes, size))
            for size, number in sizes.items()
            if size <= k
        )
        share += exactly * min(1.0, struck)
        at_least -= exactly
        if at_least < _NEGLIGIBLE:
            break
    return share


def _log_ways(number: int, taken: int) -> float:
    """The logarithm of number * (number - 1) * .. * (number - taken + 1), of which thousands are as
    quick as two."""
    return lgamma(number + 1) - lgamma(number - taken + 1)


def expected_samples_per_s(
    transition: Transition, *, global_batch_size: int, outlook: Outlook
) -> float:
    """The samples that count until the next failure, as expected, over the time until then.

    That time is exponential with rate L. Nothing counts for t: the downtime, and the time in which
    R samples are done again; then a batch of B counts every iteration. With v = B / iteration_s

        t = downtime_s + R / v
        samples until the next failure = v * integral over T of L * exp(-L * T) * max(0, T - t)
                                       = v * exp(-L * t) / L

    If the next failure takes the last copy of some layer, which it does with probability p
    (`share_at_risk`), the job goes back to its newest save, and U samples, those that are not saved
    by then, are lost. Over 1 / L together:

        v * exp(-L * t) - L * U * p

    If another plan follows, m after the first has begun, what is beyond t + m is worth what that
    one makes and risks, not the first: exp(-L * (t + m)) times their difference is added.

    With L = 0 that is v: the fastest iteration. Where L is high the least t is best.

    Source: DESIGN 6 (Policies); Odyssey, equation 8, for the first term.
    Differs: samples that are redone are time in which nothing counts; last copies have a price.
    """
    samples_per_s = global_batch_size / transition.iteration_s
    begin_s = transition.downtime_s + transition.redone_samples / samples_per_s
    rate = outlook.failures_per_s
    at_risk_per_s = rate * samples_at_risk(transition.after, outlook)
    useful_per_s = samples_per_s * exp(-rate * begin_s) - at_risk_per_s
    then = transition.then
    if then is None:
        return useful_per_s
    end_s = begin_s + then.downtime_s
    until_then = samples_per_s - at_risk_per_s
    then_per_s = global_batch_size / then.iteration_s - rate * samples_at_risk(then.after, outlook)
    return useful_per_s + exp(-rate * end_s) * (then_per_s - until_then)


def expected_unsaved(unsaved: float, to_failure: float, between_saves: float) -> float:
    """What is not saved when the next failure comes, on average, in any unit of time or work.

    The failure comes after T, which is exponential, and saves at each multiple of P: with x unsaved
    now that is the mean of (x + T) mod P, with m the mean of T

        x + m - P * exp(-(P - x) / m) / (1 - exp(-P / m))

    Args:
        unsaved: x, now.
        to_failure: m.
        between_saves: P; inf if nothing is saved.
    """
    if between_saves == inf:
        return max(0.0, unsaved + to_failure)
    unsaved = min(unsaved, between_saves)
    if not to_failure:
        return unsaved
    num_saves = exp((unsaved - between_saves) / to_failure) / -expm1(-between_saves / to_failure)
    return max(0.0, unsaved + to_failure - between_saves * num_saves)


def samples_at_risk(plan: Plan, outlook: Outlook) -> float:
    """U * p: what the next failure makes the job train again under a plan, on average."""
    if not outlook.failures_per_s * outlook.unsaved_samples:
        return 0.0
    share = share_at_risk(plan, nodes_per_failure=outlook.nodes_per_failure)
    return outlook.unsaved_samples * share


def best_transition(
    transitions: Sequence[Transition], *, global_batch_size: int, outlook: Outlook
) -> Transition:
    """The one with the most expected samples; of equals that with the least downtime, the first.

    Args:
        transitions: at least one.
    """
    assert transitions

    def rank(transition: Transition) -> tuple[float, float]:
        expected = expected_samples_per_s(
            transition, global_batch_size=global_batch_size, outlook=outlook
        )
        return -expected, transition.downtime_s

    return min(transitions, key=rank)
