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
from typing import Final, NamedTuple, Protocol

from planaria.core.cluster import ClusterEvent, ClusterState
from planaria.core.plan import Link, ModelProfile, Plan, Transfer, Transition
from planaria.restorer.cover import trusted_layers
from planaria.restorer.sources import transfer_rounds
from planaria.restorer.strategies import Restoring
from planaria.schedule.lower import num_met

_NEGLIGIBLE: Final = 1e-6  # Of all failures.
_FIXED_HOPS: Final = 64  # As long as these take takes a schedule of none; measured.


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What recovery costs.

    Attributes:
        links: by kind: "intra_node" and "inter_node".
        layer_bytes: of each layer's state: parameters and optimizer state.
        regroup_s: of what every recovery needs, whatever moves: links and groups made anew.
        hop_s: of a plan's schedules, for each hop that the largest is computed from.
    """

    links: Mapping[str, Link]
    layer_bytes: tuple[int, ...]
    regroup_s: float
    hop_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What is to be expected of the next failure.

    Attributes:
        failures_per_s: of the whole job; 0 if none is expected.
        unsaved_samples: now, those that would be trained again if it took the last copy of a layer.
        between_saves: samples from one save to the next; inf if nothing is saved.
        lost_max: samples that are trained again at most: of copies in memory, or inf.
        remaining_samples: that the job has still to train; inf if it has no end.
        nodes_per_failure: that one failure takes at once, on average.
    """

    failures_per_s: float
    unsaved_samples: float = 0.0
    between_saves: float = inf
    lost_max: float = 0.0
    remaining_samples: float = inf
    nodes_per_failure: float = 1.0

    def __post_init__(self) -> None:
        assert 0.0 <= self.failures_per_s < inf
        assert 0.0 <= self.unsaved_samples < inf
        assert min(self.between_saves, self.remaining_samples) > 0.0
        assert self.lost_max >= 0.0
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


def scheduling_s(plan: Plan, hop_s: float) -> float:
    """What schedules take where an epoch begins with this plan, before any rank trains."""
    return hop_s * (_FIXED_HOPS + num_met(plan)) if hop_s else 0.0


def downtime_s(transfers: Iterable[Transfer], prices: Prices, *, devices_per_node: int) -> float:
    """Regrouping but for the schedules, then the transfers."""
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
    twice: for pipelines of 1 and 7 nodes, and two nodes a failure, that is half as much again.
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
    """The samples that count until the next failure or the end of the job, as expected, over the
    time until then.

    The failure comes after T, exponential with rate L. Nothing counts for t: the downtime, and the
    time in which R samples are done again; then a batch of B counts every iteration. With
    v = B / iteration_s, without an end and over 1 / L

        t = downtime_s + R / v
        samples until the next failure = v * integral over T of L * exp(-L * T) * max(0, T - t)
                                       = v * exp(-L * t) / L

    Where the job ends at e, what would come after that is subtracted, and the time is

        (1 - exp(-L * e)) / L

    If another plan follows, m after the first has begun, what is beyond t + m is made at its pace.
    What the failure takes back on average is subtracted: `samples_at_risk`.

    With L = 0 that is v, or all samples that remain over the time that they take. Where L is high
    the least t is best.

    Source: DESIGN 6 (Policies); Odyssey, equation 8, for the first term.
    Differs: samples that are redone are time in which nothing counts; last copies have a price; a
    job that ends soon has little to gain by a plan that takes long to begin.
    """
    phases = _phases(transition, global_batch_size, outlook.remaining_samples)
    rate, end_s = outlook.failures_per_s, phases[-1].ends_s
    if not rate:
        has_end = end_s < inf
        return outlook.remaining_samples / end_s if has_end else phases[-1].samples_per_s
    useful = sum(
        one.samples_per_s * exp(-rate * one.begins_s) * -expm1(-rate * (one.ends_s - one.begins_s))
        for one in phases
    )
    at_risk = samples_at_risk(transition, global_batch_size=global_batch_size, outlook=outlook)
    return (useful - rate * at_risk) / -expm1(-rate * end_s)


class _Phase(NamedTuple):
    """A time in which samples are made by a plan.

    Attributes:
        made: samples before.
    """

    plan: Plan
    samples_per_s: float
    begins_s: float
    ends_s: float
    made: float


def _phases(transition: Transition, global_batch_size: int, remaining: float) -> list[_Phase]:
    """One for each plan by which the job trains until its end, at least one."""
    samples_per_s = global_batch_size / transition.iteration_s
    begins_s = transition.downtime_s + transition.redone_samples / samples_per_s
    then = transition.then
    lasts_s, ends_s = then.downtime_s if then else inf, begins_s + remaining / samples_per_s
    first = _Phase(transition.after, samples_per_s, begins_s, min(begins_s + lasts_s, ends_s), 0.0)
    if then is None or first.ends_s == ends_s:
        return [first]
    made = lasts_s * samples_per_s
    samples_per_s = global_batch_size / then.iteration_s
    ends_s = first.ends_s + (remaining - made) / samples_per_s
    return [first, _Phase(then.after, samples_per_s, first.ends_s, ends_s, made)]


def samples_at_risk(transition: Transition, *, global_batch_size: int, outlook: Outlook) -> float:
    """What the next failure makes the job train again, on average; nothing if the job has ended.

    A failure at T takes the last copy of some layer with probability p (`share_at_risk`) of the
    plan by which the job trains then. It goes back to its newest save, so all that is not saved by
    T is trained again: x, what is unsaved now, until the plan begins at t, and what that one made
    besides after that, less what is saved meanwhile. With E(y, v) the mean of that if training
    begins with y unsaved (`expected_unsaved`), for exponential T forgets how long it was

        p * (x * (1 - exp(-L * t)) + exp(-L * t) * E(x, v))

    From t' on, where another plan follows or the job ends, with y unsaved, that plan's is
    exp(-L * t') * E(y, v') in the stead of exp(-L * t') * E(y, v), each times its p.

    Where two saves have not come, as on a full disk, no other is expected to.
    """
    rate = outlook.failures_per_s
    if not rate * outlook.lost_max:
        return 0.0
    is_saving = outlook.unsaved_samples < 2 * outlook.between_saves
    between_saves = outlook.between_saves if is_saving else inf

    def unsaved_from(at_s: float, made: float, samples_per_s: float) -> float:
        if at_s == inf:
            return 0.0
        unsaved = (outlook.unsaved_samples + made) % between_saves
        mean = expected_unsaved(unsaved, samples_per_s / rate, between_saves)
        return exp(-rate * at_s) * min(mean, outlook.lost_max)

    phases = _phases(transition, global_batch_size, outlook.remaining_samples)
    shares = [
        share_at_risk(one.plan, nodes_per_failure=outlook.nodes_per_failure) for one in phases
    ]
    now = min(outlook.unsaved_samples, outlook.lost_max)
    lost = shares[0] * now * -expm1(-rate * phases[0].begins_s)
    for share, (_, samples_per_s, begins_s, ends_s, made) in zip(shares, phases, strict=True):
        by_end = made + samples_per_s * (ends_s - begins_s)
        lost += share * unsaved_from(begins_s, made, samples_per_s)
        lost -= share * unsaved_from(ends_s, by_end, samples_per_s)
    return lost


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
