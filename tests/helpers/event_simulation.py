"""An iteration, event by event: what `predicted_timeline` must find, from its description alone.

Shares with the package the data only (plans, profiles, schedules): who holds what, what takes how
long and what waits for what is worked out here, and nothing is ordered but by its time.
"""

from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from heapq import heappop, heappush
from itertools import islice

from planaria.core.plan import Link, ModelProfile, Plan, Stage
from planaria.schedule.action import Action, Bucket, Kind, Schedule

Times = dict[tuple[int, str, Action], tuple[float, float]]

# By a send: the receive that it makes possible, and how far away its hop is.
RECEIVES = {
    Kind.SEND_FORWARD: (Kind.RECEIVE_FORWARD, 1),
    Kind.SEND_BACKWARD: (Kind.RECEIVE_BACKWARD, -1),
}

_COMPUTING = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


def simulated_times(
    schedule: Schedule, profile: ModelProfile, *, plan: Plan, reduce_bytes_factor: float
) -> tuple[Times, float]:
    """Start and end of all that a lane of a rank does, and of the iteration."""
    cluster = _Cluster(profile, plan, reduce_bytes_factor)
    iteration = _Iteration(schedule, cluster)
    iteration.run()
    return iteration.times, iteration.now_s + cluster.commit_s()


class _Iteration:
    """Three lanes a rank and the links between ranks, moved by a heap of events."""

    def __init__(self, schedule: Schedule, cluster: "_Cluster") -> None:
        self.now_s = 0.0
        self.times: Times = {}
        self._routes = schedule.routes
        self._buckets = schedule.buckets
        self._cluster = cluster
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        # The first action of a rank is what it computes or waits for.
        self._actions = {rank: deque(actions) for rank, actions in schedule.actions.items()}
        self._arrived: set[Action] = set()
        # The first message of a link is on it, the first bucket of a rank is reduced or waits.
        self._messages: dict[tuple[int, int], deque[Action]] = {}
        self._handed_over: dict[int, deque[int]] = {rank: deque() for rank in schedule.actions}

    def run(self) -> None:
        """Until nothing happens any more."""
        for rank in self._actions:
            self._go_on(rank)
        while self._events:
            self.now_s, _, happen = heappop(self._events)
            happen()
        assert not any(self._actions.values())
        assert not any(self._handed_over.values())

    def _after(self, seconds: float, happen: Callable[[], None]) -> None:
        self._num_events += 1
        heappush(self._events, (self.now_s + seconds, self._num_events, happen))

    def _occupy(self, rank: int, lane: str, action: Action, seconds: float) -> None:
        self.times[rank, lane, action] = (self.now_s, self.now_s + seconds)

    def _go_on(self, rank: int) -> None:
        """The rank's next actions, up to one that takes time or has to wait."""
        actions = self._actions[rank]
        while actions:
            action = actions[0]
            if action.kind in _COMPUTING:
                hop = self._routes[action.microbatch][action.hop]
                layers = range(hop.first_layer, hop.end_layer)
                seconds = self._cluster.compute_s(action.kind, rank, layers)
                self._occupy(rank, "compute", action, seconds)
                self._after(seconds, partial(self._computed, rank))
                return
            if action.kind in (Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD):
                if action not in self._arrived:
                    return
            elif action.kind is Kind.REDUCE:
                self._handed_over[rank].append(action.bucket)
                self._reduce_if_all_there(action.bucket)
            else:
                self._send(rank, action)
            actions.popleft()

    def _computed(self, rank: int) -> None:
        self._actions[rank].popleft()
        self._go_on(rank)

    def _send(self, source: int, send: Action) -> None:
        _, away = RECEIVES[send.kind]
        target = self._routes[send.microbatch][send.hop + away].rank
        messages = self._messages.setdefault((source, target), deque())
        messages.append(send)
        if len(messages) == 1:
            self._transfer(source, target)

    def _transfer(self, source: int, target: int) -> None:
        send = self._messages[source, target][0]
        hop = self._routes[send.microbatch][send.hop]
        output = hop.end_layer if send.kind is Kind.SEND_FORWARD else hop.first_layer
        seconds = self._cluster.transfer_s(source, target, output - 1)
        self._occupy(source, "send", send, seconds)
        self._after(seconds, partial(self._transferred, source, target))

    def _transferred(self, source: int, target: int) -> None:
        messages = self._messages[source, target]
        send = messages.popleft()
        kind, away = RECEIVES[send.kind]
        receive = Action(kind, send.microbatch, send.hop + away)
        latency_s = self._cluster.link((source, target)).latency_s
        self._after(latency_s, partial(self._arrive, target, receive))
        if messages:
            self._transfer(source, target)

    def _arrive(self, rank: int, receive: Action) -> None:
        self._arrived.add(receive)
        if self._actions[rank][0] == receive:
            self._go_on(rank)

    def _reduce_if_all_there(self, index: int) -> None:
        bucket = self._buckets[index]
        lanes = [self._handed_over[rank] for rank in bucket.ranks]
        if all(lane and lane[0] == index for lane in lanes):
            seconds = self._cluster.reduce_s(bucket)
            for rank in bucket.ranks:
                self._occupy(rank, "reduce", Action(Kind.REDUCE, bucket=index), seconds)
            self._after(seconds, partial(self._reduced, bucket))

    def _reduced(self, bucket: Bucket) -> None:
        lanes = [self._handed_over[rank] for rank in bucket.ranks]
        for lane in lanes:
            lane.popleft()
        for index in {lane[0] for lane in lanes if lane}:
            self._reduce_if_all_there(index)


class _Cluster:
    """Who has which stage, and what each thing costs."""

    def __init__(self, profile: ModelProfile, plan: Plan, reduce_bytes_factor: float) -> None:
        self._profile = profile
        self._reduce_bytes_factor = reduce_bytes_factor
        self._nodes: dict[int, int] = {}
        self._speeds: dict[int, float] = {}
        self._stages: dict[int, tuple[tuple[int, ...], Stage]] = {}
        for pipeline in plan.pipelines:
            stages = pipeline.template.stages
            per_node = sum(stage.num_devices for stage in stages) // len(pipeline.nodes)
            devices = [(n, n * per_node + d) for n in pipeline.nodes for d in range(per_node)]
            unused = iter(devices)
            for stage in stages:
                for node, rank in islice(unused, stage.num_devices):
                    self._nodes[rank] = node
                    kinds = dict(zip(pipeline.nodes, pipeline.template.kinds, strict=False))
                    self._speeds[rank] = kinds[node].speed if kinds else 1.0
                    self._stages[rank] = (pipeline.nodes, stage)

    def link(self, ranks: Collection[int]) -> Link:
        nodes = {self._nodes[rank] for rank in ranks}
        return self._profile.links["inter_node" if len(nodes) > 1 else "intra_node"]

    def compute_s(self, kind: Kind, rank: int, layers: Collection[int]) -> float:
        _, stage = self._stages[rank]
        seconds = 0.0
        for layer in (self._profile.layers[index] for index in layers):
            if kind is Kind.FORWARD:
                seconds += layer.forward_s[stage.num_devices]
            if kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
                seconds += layer.backward_input_s[stage.num_devices]
            if kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
                seconds += layer.backward_weight_s[stage.num_devices]
        return seconds / self._speeds[rank]

    def transfer_s(self, source: int, target: int, layer: int) -> float:
        """How long the output of a layer, or its gradient, occupies the link."""
        link = self.link((source, target))
        return self._profile.layers[layer].output_bytes / link.bandwidth_bytes_per_s

    def reduce_s(self, bucket: Bucket) -> float:
        """A reduce-scatter and an all-gather among stages, each of which has it in shares."""
        stages = {self._stages[rank] for rank in bucket.ranks}
        if len(stages) == 1:
            return 0.0
        share_bytes = self._bytes(bucket) / min(stage.num_devices for _, stage in stages)
        sent = self._reduce_bytes_factor * share_bytes * (len(stages) - 1) / len(stages)
        link = self.link(bucket.ranks)
        return 2 * (link.latency_s + sent / link.bandwidth_bytes_per_s)

    def _bytes(self, bucket: Bucket) -> int:
        tied = self._profile.tied
        if bucket.tied >= 0:
            return tied[bucket.tied].parameter_bytes
        num_bytes = 0
        for layer in bucket.layers:
            num_bytes += self._profile.layers[layer].parameter_bytes
            num_bytes -= sum(shared.parameter_bytes for shared in tied if layer in shared.layers)
        return num_bytes

    def commit_s(self) -> float:
        """Up a binary tree of all ranks and down again."""
        depth = 0
        while 2**depth < len(self._nodes):
            depth += 1
        return 2 * depth * self.link(self._nodes).latency_s
