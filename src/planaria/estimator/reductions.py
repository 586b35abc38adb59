"""The time of gradient reductions, and of the commit vector that ends an iteration.

A reduction among k stages is a reduce-scatter and an all-gather: it lasts 2 * latency +
2 (k - 1) / k * bytes / bandwidth. A stage of several devices shards its gradients, and each device
sums its share with those of the other stages; the stage with the fewest devices is the slowest.
Reductions run in the order of their buckets: one starts when all its ranks have handed it over and
have finished the buckets before it. The commit vector goes up and down a binary tree, which takes
2 * ceil(log2(ranks)) latencies.

Source: Oobleck (SOSP '23), section 6.1; Odyssey, section IV-B, for rounds.
Not modelled: links that share a wire, and messages that slow reductions down. Communication among
a stage's own devices is part of the times of its layers.
"""

from collections.abc import Collection, Sequence
from itertools import accumulate
from math import ceil, log2

from planaria.core.plan import Link, ModelProfile, PipelineTemplate, Plan, link_between_pipelines
from planaria.schedule.action import Bucket


class Reductions:
    """The times of a model's reductions among the pipelines of a plan.

    Args:
        bytes_factor: bytes that move per byte of parameters. It is 1.5 if float32 gradients are
            summed in float64: 8 bytes per parameter are scattered, 4 gathered.
    """

    def __init__(self, profile: ModelProfile, plan: Plan, *, bytes_factor: float) -> None:
        self._profile = profile
        self._bytes_factor = bytes_factor
        self._devices_per_node = plan.devices_per_node
        self._num_pipelines = len(plan.pipelines)
        self._own_bytes = _own_bytes(profile)
        at_work = plan.layers_by_rank
        self._num_devices = {
            rank: stage.num_devices
            for pipeline in plan.pipelines
            for stage, ranks in zip(
                pipeline.template.stages, pipeline.ranks_by_stage(), strict=True
            )
            for rank in ranks
            if rank in at_work
        }

    def seconds(self, bucket: Bucket) -> float:
        """Seconds of a bucket's reduction, once all its ranks are ready."""
        if bucket.tied >= 0:
            num_bytes = self._profile.tied[bucket.tied].parameter_bytes
        else:
            num_bytes = sum(self._own_bytes[layer] for layer in bucket.layers)
        devices = [self._num_devices[rank] for rank in bucket.ranks]
        return _seconds(
            self._link(bucket.ranks),
            num_stages=round(sum(1 / count for count in devices)),
            num_bytes=self._bytes_factor * num_bytes / min(devices),
        )

    def commit_s(self) -> float:
        """Seconds of the commit vector among all ranks."""
        link = self._link(self._num_devices.keys())
        return 2 * ceil(log2(len(self._num_devices))) * link.latency_s

    def _link(self, ranks: Collection[int]) -> Link:
        nodes = {rank // self._devices_per_node for rank in ranks}
        return _link(self._profile, num_nodes=len(nodes), num_pipelines=self._num_pipelines)


def reduction_starts_s(
    buckets: Sequence[Bucket], handed_over_s: Sequence[float], reduce_s: Sequence[float]
) -> list[float]:
    """Start of each bucket's reduction: its ranks are ready and have finished earlier buckets.

    Args:
        handed_over_s: time at which the last rank of each bucket has its gradients.
        reduce_s: time that the reduction of each bucket lasts.
    """
    free_s: dict[int, float] = {}
    starts_s = []
    for bucket, ready_s, duration_s in zip(buckets, handed_over_s, reduce_s, strict=True):
        start_s = max(ready_s, *(free_s.get(rank, 0.0) for rank in bucket.ranks))
        starts_s.append(start_s)
        free_s.update(dict.fromkeys(bucket.ranks, start_s + duration_s))
    return starts_s


def equal_reduce_s(
    profile: ModelProfile, template: PipelineTemplate, *, num_pipelines: int, bytes_factor: float
) -> tuple[float, ...]:
    """Seconds of the reductions of each stage, if all pipelines have this template.

    If some pipelines have other templates, reductions are not faster, with one exception: tied
    parameters have fewer stages to sum if one stage of a pipeline holds all their layers.
    """
    own_bytes = _own_bytes(profile)
    per_node = template.devices_per_node
    firsts = list(accumulate((stage.num_devices for stage in template.stages), initial=0))

    def sum_s(stages: Sequence[int], num_bytes: float) -> float:
        nodes = {firsts[index] // per_node for index in stages}
        num_devices = min(template.stages[index].num_devices for index in stages)
        return _seconds(
            # Pipelines have nodes of their own.
            _link(profile, num_nodes=num_pipelines * len(nodes), num_pipelines=num_pipelines),
            num_stages=num_pipelines * len(stages),
            num_bytes=bytes_factor * num_bytes / num_devices,
        )

    seconds = [
        sum_s([index], sum(own_bytes[stage.first_layer : stage.end_layer]))
        for index, stage in enumerate(template.stages)
    ]
    for tied in profile.tied:
        holders = [
            index
            for index, stage in enumerate(template.stages)
            if any(stage.first_layer <= layer < stage.end_layer for layer in tied.layers)
        ]
        duration_s = sum_s(holders, tied.parameter_bytes)
        for index in holders:
            seconds[index] += duration_s
    return tuple(seconds)


def _seconds(link: Link, *, num_stages: int, num_bytes: float) -> float:
    """Seconds of a reduction among stages, 0 if there is only one."""
    if num_stages == 1:
        return 0.0
    share = (num_stages - 1) / num_stages
    return 2 * link.latency_s + 2 * share * num_bytes / link.bandwidth_bytes_per_s


def _own_bytes(profile: ModelProfile) -> list[int]:
    """Parameter bytes by layer, without the parameters that it shares with another layer."""
    own_bytes = [layer.parameter_bytes for layer in profile.layers]
    for tied in profile.tied:
        for layer in set(tied.layers):
            own_bytes[layer] = max(0, own_bytes[layer] - tied.parameter_bytes)
    return own_bytes


def _link(profile: ModelProfile, *, num_nodes: int, num_pipelines: int) -> Link:
    """The link over which stages on so many nodes, of so many pipelines, sum their gradients."""
    if num_nodes == 1:
        return profile.links["intra_node"]
    is_between = num_pipelines > 1
    return link_between_pipelines(profile.links) if is_between else profile.links["inter_node"]
