"""ReCycle: microbatches of lost nodes go to their peers, and no parameter moves.

1. Adaptive pipelining: the peers of a lost node, at the same stage of the other pipelines, compute
   its microbatches in turn.
2. Decoupled backward: gradients of weights are computed later, in bubbles.
3. Staggered optimizer: no stage waits for the others between iterations (modelled; planaria has no
   such step).
4. Failure normalisation: survivors move to empty places, so that each stage lacks about as many
   nodes as the others, relative to its work. A node that moves gets its layers from a peer.
5. A node that comes takes an empty place, and gets its layers from a peer. If all nodes of a stage
   are lost, the job starts anew from its newest save with equal pipelines on the nodes there are.

The parts 2 to 4 can be switched off.

Source: ReCycle (SOSP '24), adaptive pipelining, decoupled backward propagation, staggered optimizer
and failure normalization.
Differs: no integer program orders the actions; they run in the order of 1F1B around the empty
places, with split backwards where that is faster and memory allows. What the paper runs while
nothing is lost is not known here: the parts 2 and 3 are taken to help then, too. The pipelines are
those that are the fastest with 1F1B. The place at which the next node lacks least is chosen one by
one, which is exact for the stage that takes longest. The paper prints no seconds for a loss: those
of `[costs]` are taken. Where nodes wait because no place is empty, and larger pipelines with them
would be faster, the job saves after the next iteration and starts anew with those; the paper's jobs
have a fixed number of places. Plans of more than 16,384 hops are not simulated: an iteration is
longer by what the busiest stage gets.
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from math import inf

from planaria.observe.ledger import Category
from planaria.systems.equal_pipelines import EqualPipelines, fastest_equal_pipelines
from planaria.systems.modelled_job import (
    ModelledJob,
    Pace,
    Phase,
    Places,
    bytes_by_place,
    save_stall_s,
    saves_of_job,
)
from planaria.systems.rerouting import ReroutedTimes
from planaria.systems.system import Setting

_PIPELINES_MIN = 2  # With fewer there would be no peer.
_GAIN_MIN = 1e-3  # Relative gain for which a job starts anew with larger pipelines.


@dataclass(frozen=True, slots=True, kw_only=True)
class ReCycle:
    """Rerouting of microbatches; implements `System`.

    Attributes:
        decouples_backward: whether gradients of weights may be computed later.
        staggers_optimizer: whether stages go on without waiting for the others.
        normalises: whether survivors move to empty places.
    """

    decouples_backward: bool = True
    staggers_optimizer: bool = True
    normalises: bool = True

    @property
    def name(self) -> str:
        """See `System`."""
        return "recycle"

    def begin(self, setting: Setting, *, absent: Collection[int] = ()) -> ModelledJob:
        """A job that begins; see `System`."""
        return ModelledJob(setting, _Rerouting(setting, self), saves_of_job(setting), absent=absent)


class _Rerouting:
    """Goes around lost nodes; implements `Behaviour`."""

    def __init__(self, setting: Setting, system: ReCycle) -> None:
        self._setting, self._system = setting, system
        self._times_of: dict[EqualPipelines, ReroutedTimes] = {}
        self._has_started = True  # Whether there are nodes enough for pipelines.
        self._fetch_s, self._place_bytes = 0.0, 0
        pipelines = fastest_equal_pipelines(
            setting, setting.num_nodes, min_pipelines=_PIPELINES_MIN
        )
        assert pipelines is not None
        self._place(pipelines, range(setting.num_nodes))

    def begin(self, job: ModelledJob) -> None:
        """Goes around nodes that are not there, or has pipelines without them if these are faster;
        see `Behaviour`."""
        if job.absent:
            self._places.drop(job.absent)
            self._places.fill(tuple(job.members))
            if self._system.normalises:
                self._normalise()
            fewer, around_s = self._fastest(len(job.members)), inf
            if max(self._num_lost) < self._pipelines.num_pipelines:
                around_s = self._times.iteration_s(self._num_lost)
            if fewer is not None and self._times_for(fewer).without_losses_s < around_s:
                self._place(fewer, sorted(job.members))
            elif around_s == inf:
                self._has_started = False
                return
        self._train(job, 0.0)

    def on_lost(self, job: ModelledJob, nodes: tuple[int, ...], now_s: float) -> None:
        """See `Behaviour`."""
        if not self._places.drop(nodes) and not job.is_waiting:
            return
        costs, is_starting = self._setting.costs, job.start_left_s(now_s) > 0.0
        job.interrupt(now_s)
        detect = (Category.DETECT, costs.detect_s)
        holds = self._has_started and not is_starting
        if holds and max(self._num_lost) < self._pipelines.num_pipelines:
            num_moved = len(self._places.fill(tuple(job.members)))
            if self._system.normalises:
                num_moved += self._normalise()
            if self._times.iteration_s(self._num_lost) < inf:
                decide = (Category.DECIDE, costs.decide_s)
                regroup = (Category.REGROUP, costs.regroup_s)
                self._go_on(job, now_s, (detect, decide, regroup), num_moved=num_moved)
                job.at_commit(partial(self._grow, job))  # The loss may have undone such a plan.
                return
        job.go_back_to_save()
        self._start_anew(job, now_s, detect)

    def on_joined(self, job: ModelledJob, nodes: tuple[int, ...], now_s: float) -> None:
        """See `Behaviour`."""
        del nodes
        if job.is_waiting:
            self._start_anew(job, now_s)
            return
        if num_moved := len(self._places.fill(tuple(job.members))):
            if self._system.normalises:
                num_moved += self._normalise()
            job.pause(now_s)
            regroup = (Category.REGROUP, self._setting.costs.regroup_s)
            self._go_on(job, now_s, (regroup,), num_moved=num_moved)
        job.at_commit(partial(self._grow, job))

    def _grow(self, job: ModelledJob, now_s: float) -> None:
        """Saves and starts anew with larger pipelines, if nodes wait with whom these are faster."""
        if len(job.members) <= self._pipelines.num_places:
            return
        larger = self._fastest(len(job.members))
        assert larger is not None
        present_s = self._times.iteration_s(self._num_lost)
        if self._times_for(larger).without_losses_s < present_s * (1.0 - _GAIN_MIN):
            job.pause(now_s)
            # Until it is complete, the nodes have in memory what is saved.
            job.saves.begin(job.account.num_iterations, now_s, write_s=0.0)
            job.end()
            self._start_anew(job, now_s, (Category.CHECKPOINT_STALL, job.saves.write_s))

    def on_notice(self, job: ModelledJob, nodes: tuple[int, ...], deadline_s: float) -> None:
        """See `Behaviour`."""

    @property
    def _num_lost(self) -> list[int]:
        """The number of empty places at each position of a pipeline."""
        counts = [0] * self._pipelines.depth
        for place in self._places.empty:
            counts[place % self._pipelines.depth] += 1
        return counts

    def _normalise(self) -> int:
        """Has survivors move to empty places, where that makes iterations shorter; returns the
        number of moves."""
        num_lost, target = self._num_lost, self._even_losses(len(self._places.empty))
        if target is None or self._times.iteration_s(target) >= self._times.iteration_s(num_lost):
            return 0
        num_moves, depth = 0, self._pipelines.depth
        for position, wanted in enumerate(target):
            holes = [p for p in self._places.empty if p % depth == position]
            for hole in holes[: max(0, num_lost[position] - wanted)]:
                self._places.move(self._surplus_place(target), hole)
                num_moves += 1
        return num_moves

    def _surplus_place(self, target: list[int]) -> int:
        """The first place with a node at a position that may lack more nodes than it does."""
        num_lost, depth = self._num_lost, self._pipelines.depth
        return next(
            place
            for place, node in enumerate(self._places.nodes)
            if node is not None and num_lost[place % depth] < target[place % depth]
        )

    def _even_losses(self, num_lost: int) -> list[int] | None:
        """How many nodes each position should lack so that the busiest is the least busy; None if
        the nodes are too few."""
        number, node_s = self._pipelines.num_pipelines, self._times.node_s
        counts = [0] * len(node_s)
        for _ in range(num_lost):
            possible = [p for p, count in enumerate(counts) if count < number - 1]
            if not possible:
                return None
            counts[min(possible, key=lambda p: node_s[p] / (number - counts[p] - 1))] += 1
        return counts

    def _go_on(
        self, job: ModelledJob, now_s: float, phases: tuple[Phase, ...], *, num_moved: int
    ) -> None:
        """Trains around the lost nodes once nodes that moved have their layers."""
        fetch_s = self._fetch_s if num_moved else 0.0
        self._train(job, now_s)
        job.go_on(now_s, *phases, (Category.TRANSFER, fetch_s))

    def _start_anew(self, job: ModelledJob, now_s: float, *phases: Phase) -> None:
        """Starts anew on the nodes that there are, if they are enough."""
        pipelines = self._fastest(len(job.members))
        self._has_started = pipelines is not None
        if pipelines is None:
            job.wait(now_s, *phases)
            return
        self._place(pipelines, sorted(job.members))
        self._train(job, now_s)
        restart = (Category.RESTART, self._setting.costs.restart_s)
        load = (Category.TRANSFER, job.load_s(self._place_bytes))
        job.start_again(now_s, *phases, restart, load)

    def _fastest(self, num_nodes: int) -> EqualPipelines | None:
        return fastest_equal_pipelines(self._setting, num_nodes, min_pipelines=_PIPELINES_MIN)

    def _place(self, pipelines: EqualPipelines, nodes: range | list[int]) -> None:
        setting = self._setting
        self._pipelines = pipelines
        self._places = Places(pipelines.num_places, nodes)
        self._has_started = True
        self._times = self._times_for(pipelines)
        self._place_bytes = max(bytes_by_place(setting, pipelines.plan(setting)))
        link = setting.catalog.problem.profile.links["inter_node"]
        self._fetch_s = link.seconds(self._place_bytes)

    def _times_for(self, pipelines: EqualPipelines) -> ReroutedTimes:
        if pipelines not in self._times_of:
            self._times_of[pipelines] = ReroutedTimes(
                self._setting,
                pipelines,
                decouples=self._system.decouples_backward,
                staggers=self._system.staggers_optimizer,
            )
        return self._times_of[pipelines]

    def _train(self, job: ModelledJob, now_s: float) -> None:
        pace = Pace(
            iteration_s=self._times.iteration_s(self._num_lost),
            nodes=self._places.at_work,
            stall_s=save_stall_s(self._setting),
        )
        job.train_at(pace, now_s)
