"""Bamboo: each node computes its neighbour's forwards, too, and takes over when that one is lost.

1. Each node keeps the layers of its neighbour besides its own, and computes their forwards in
   bubbles, as far as these hold them: while nothing is lost, too.
2. If a node is lost, its neighbour computes both stages, in a pipeline with one node less. What is
   left of the iteration in flight takes half as long again.
3. If the neighbour is lost, too, or computes two stages already, all nodes regroup and start anew
   from the newest save.
4. After an iteration nodes change places if enough of them wait to relieve those with two stages,
   if more than 5% of the nodes are in pairs of stages, or if another pipeline fits.

Pipelines have at least one and a half times as many nodes as without redundancy, because each holds
twice the layers. Of those with up to three times as many the fastest is taken, for some leave nodes
over; else the first that fits. Where none fits, or nodes have several devices, no iteration is
trained.

Source: Bamboo (NSDI '23), sections 4 and 5; uclasystem/bamboo, project_pactum/simulation, for the
rendezvous: 20 s for transformers when nodes change places, 30 s for a start, none for a neighbour
that takes over; for the factor 1.5 and the rule of 5%.
Differs: the first node's layers are kept by the second one, not by the last, so that each node
computes consecutive layers. What a node computes forward for its neighbour is not kept until it is
needed. Nodes that are lost are given and replaced by the scenario; zones are not modelled. Of plans
with more than 16,384 hops only eight pipelines of each kind are simulated.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, inf
from typing import Final

from planaria.core.plan import PipelineTemplate, plain_plan
from planaria.estimator.makespan import stage_seconds
from planaria.observe.ledger import Category
from planaria.observe.recoveries import SourceTier
from planaria.planner.reroute.reroutes import price_plan
from planaria.planner.reroute.shadows import with_shadows
from planaria.planner.times import pipelines_of
from planaria.systems.equal_pipelines import fastest_equal_pipelines
from planaria.systems.modelled_job import (
    ModelledJob,
    Pace,
    Phase,
    Places,
    save_stall_s,
    saves_of_job,
)
from planaria.systems.rerouting import HOPS_MAX
from planaria.systems.system import Setting

GLOBAL_RENDEZVOUS_S: Final = 30.0
LOCAL_RENDEZVOUS_S: Final = 20.0
FALLBACK_SLOWDOWN: Final = 1.5  # Of the iteration in which a neighbour takes over.
OVERLOAD_MAX: Final = 0.05  # Share of nodes in pairs of stages from which nodes change places.
DEPTH_FACTOR: Final = 1.5
_PIPELINES_PRICED: Final = 8  # Pipelines of each kind that are simulated in large plans.


@dataclass(frozen=True, slots=True)
class Bamboo:
    """Redundant computation; implements `System`."""

    @property
    def name(self) -> str:
        """See `System`."""
        return "bamboo"

    def begin(self, setting: Setting, *, absent: Collection[int] = ()) -> ModelledJob:
        """A job that begins; see `System`."""
        return ModelledJob(setting, _Redundant(setting), saves_of_job(setting), absent=absent)


class RedundantTimes:
    """The seconds of an iteration with redundant forwards, by which places others have taken over.

    Attributes:
        depth: number of nodes of a pipeline; 0 if no pipeline has memory for redundancy.
    """

    def __init__(self, setting: Setting) -> None:
        problem = setting.catalog.problem
        self._setting = setting
        self._problem = replace(problem, splits_backward=False)
        self._known: dict[tuple[int, tuple[tuple[int, ...], ...]], float] = {}
        plain = fastest_equal_pipelines(setting, setting.num_nodes)
        self.depth = 0
        if plain is None or problem.devices_per_node > 1:
            return
        first = max(2, ceil(DEPTH_FACTOR * plain.depth))
        depths = [d for d in setting.catalog.templates if first <= d <= setting.num_nodes]
        seconds: dict[int, float] = {}
        for self.depth in sorted(depths):
            if seconds and self.depth > 2 * first:
                break
            iteration_s = self.iteration_s(((),) * (setting.num_nodes // self.depth))
            if iteration_s < inf:
                seconds[self.depth] = iteration_s
        self.depth = min(seconds, key=seconds.__getitem__, default=0)

    @property
    def redundant_share(self) -> float:
        """Share of the redundant forwards in all computation."""
        template = self._setting.catalog.templates[self.depth]
        seconds = stage_seconds(self._problem.profile, template)
        forward_s, backward_s = sum(seconds.forward_s), sum(seconds.backward_s)
        return forward_s / (2.0 * forward_s + backward_s)

    def iteration_s(self, taken: Sequence[Sequence[int]]) -> float:
        """Seconds of an iteration; infinite if a node has no memory for that.

        Args:
            taken: positions that neighbours have taken over, of each pipeline.
        """
        sorted_taken = tuple(sorted(tuple(sorted(positions)) for positions in taken))
        key = (self.depth, sorted_taken)
        if key not in self._known:
            self._known[key] = self._measure(sorted_taken)
        return self._known[key]

    def _measure(self, taken: tuple[tuple[int, ...], ...]) -> float:
        whole = self._setting.catalog.templates[self.depth]
        num_microbatches = self._problem.num_microbatches
        if len(taken) > num_microbatches:
            return inf
        share, remainder = divmod(num_microbatches, len(taken))
        counts = tuple(share + (index < remainder) for index in range(len(taken)))
        if num_microbatches * self.depth > HOPS_MAX:  # Some pipelines of each kind stand for all.
            kinds = [kind for kind in dict.fromkeys(taken) for _ in range(_PIPELINES_PRICED)]
            taken, counts = tuple(kinds), (counts[0],) * len(kinds)
        templates = [_shorter_template(whole, positions) for positions in taken]
        pipelines = pipelines_of(templates, range(sum(t.num_nodes for t in templates)))
        plan = plain_plan(0, pipelines, counts)
        # A node with two stages may lack memory for its neighbour's layers besides.
        problem = replace(self._problem, num_microbatches=sum(counts))
        for option in (with_shadows(plan), plan) if any(taken) else (with_shadows(plan),):
            priced = price_plan(problem, option)
            if priced is not None:
                return priced.iteration_s
        return inf


def keeper_of(position: int) -> int:
    """The position of the node that keeps the layers of a position."""
    return position - 1 if position else 1


def _shorter_template(template: PipelineTemplate, positions: Sequence[int]) -> PipelineTemplate:
    """The template of a pipeline in which neighbours have taken over some positions."""
    keepers = {keeper_of(position): position for position in positions}
    stages = []
    for position, stage in enumerate(template.stages):
        if position in positions:
            continue
        other = template.stages[keepers.get(position, position)]
        stages.append(
            replace(
                stage,
                first_layer=min(stage.first_layer, other.first_layer),
                end_layer=max(stage.end_layer, other.end_layer),
                recomputation=(),
            )
        )
    return PipelineTemplate(tuple(stages), len(stages))


class _Redundant:
    """Lets neighbours take over; implements `Behaviour`."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._times = RedundantTimes(setting)
        self._places = Places(0, ())
        self._num_pipelines = 0
        self._taken: set[int] = set()  # Places that neighbours have taken over.
        self._place_bytes = 0

    def begin(self, job: ModelledJob) -> None:
        """See `Behaviour`."""
        self._place(job)
        if self._num_pipelines:
            self._train(job, 0.0)

    def on_lost(self, job: ModelledJob, nodes: tuple[int, ...], now_s: float) -> None:
        """See `Behaviour`."""
        emptied = self._places.drop(nodes)
        if not emptied:
            return
        detect = (Category.DETECT, self._setting.costs.detect_s)
        is_loading = job.start_left_s(now_s) > 0.0  # Nobody has a neighbour's layers yet.
        is_taken_over = not (job.is_waiting or is_loading) and self._take_over(emptied)
        left_s = job.iteration_left_s(now_s)
        if is_taken_over and self._times.iteration_s(self._taken_by_pipeline) < inf:
            job.pause(now_s)
            job.recover(SourceTier.LIVE)
            self._train(job, now_s)
            again_s = (FALLBACK_SLOWDOWN - 1.0) * left_s
            job.go_on(now_s, detect, (Category.REDO, again_s))
            self._change_places_later(job)
            return
        job.interrupt(now_s)
        job.go_back_to_save()
        self._regroup(job, now_s, detect, loads_save=True)

    def on_joined(self, job: ModelledJob, nodes: tuple[int, ...], now_s: float) -> None:
        """See `Behaviour`."""
        del nodes
        if not job.is_waiting and self._num_pipelines:
            self._change_places_later(job)
        elif self._times.depth and len(job.members) >= self._times.depth:
            self._regroup(job, now_s, loads_save=True)

    def on_notice(self, job: ModelledJob, nodes: tuple[int, ...], deadline_s: float) -> None:
        """See `Behaviour`."""

    def _take_over(self, emptied: tuple[int, ...]) -> bool:
        """Has neighbours take over places; whether all of them can."""
        depth = self._times.depth
        for place in emptied:
            start, position = place - place % depth, place % depth
            keeper = start + keeper_of(position)
            busy = {start + keeper_of(taken % depth) for taken in self._in_pipeline(start)}
            if place in busy or keeper in busy or self._places.nodes[keeper] is None:
                return False
            self._taken.add(place)
        return True

    def _in_pipeline(self, start: int) -> list[int]:
        """The places that are taken over in the pipeline that starts at a place."""
        return [place for place in self._taken if start <= place < start + self._times.depth]

    @property
    def _taken_by_pipeline(self) -> list[list[int]]:
        depth = self._times.depth
        starts = range(0, depth * self._num_pipelines, depth)
        return [[place % depth for place in self._in_pipeline(start)] for start in starts]

    def _change_places_later(self, job: ModelledJob) -> None:
        """Has nodes change places after the iteration in flight, if that is due."""
        num_double = len(self._taken)
        num_active = len(self._places.at_work)
        num_waiting = len(job.members) - num_active
        is_enough = 0 < num_double <= num_waiting
        is_risky = 2 * num_double / num_active > OVERLOAD_MAX
        num_possible = min(
            len(job.members) // self._times.depth, self._setting.catalog.problem.num_microbatches
        )
        if is_enough or is_risky or num_possible > self._num_pipelines:
            job.at_commit(partial(self._change_places, job))

    def _change_places(self, job: ModelledJob, now_s: float) -> None:
        job.pause(now_s)
        self._regroup(job, now_s, loads_save=False)

    def _regroup(self, job: ModelledJob, now_s: float, *phases: Phase, loads_save: bool) -> None:
        """Gives places anew to all nodes, if they fill a pipeline; they load the newest save, or
        get their layers from others."""
        self._place(job)
        if not self._num_pipelines:
            job.wait(now_s, *phases)
            return
        self._train(job, now_s)
        rendezvous_s = GLOBAL_RENDEZVOUS_S if loads_save else LOCAL_RENDEZVOUS_S
        regroup = (Category.REGROUP, rendezvous_s)
        link = self._setting.catalog.problem.profile.links["inter_node"]
        number = self._place_bytes
        if loads_save:
            job.start_again(now_s, *phases, regroup, (Category.TRANSFER, job.load_s(number)))
        else:
            move = (Category.TRANSFER, link.seconds(number))
            job.go_on(now_s, *phases, regroup, move)

    def _place(self, job: ModelledJob) -> None:
        """Fills whole pipelines with nodes, in order; the others wait."""
        depth, setting = self._times.depth, self._setting
        problem = setting.catalog.problem
        self._num_pipelines = (
            min(len(job.members) // depth, problem.num_microbatches) if depth else 0
        )
        num_places = depth * self._num_pipelines
        self._taken.clear()
        self._places = Places(num_places, sorted(job.members)[:num_places])
        if num_places:
            template = setting.catalog.templates[depth]
            layer_bytes = setting.layer_bytes
            stage_bytes = [
                sum(layer_bytes[stage.first_layer : stage.end_layer]) for stage in template.stages
            ]
            held = [
                own + kept for own, kept in zip(stage_bytes, [*stage_bytes[1:], 0], strict=True)
            ]
            held[keeper_of(0)] += stage_bytes[0]
            self._place_bytes = max(held)

    def _train(self, job: ModelledJob, now_s: float) -> None:
        pace = Pace(
            iteration_s=self._times.iteration_s(self._taken_by_pipeline),
            nodes=self._places.at_work,
            stall_s=save_stall_s(self._setting),
            redundant_share=self._times.redundant_share,
        )
        job.train_at(pace, now_s)
