"""Replica groups, as torchft has them: a lost node takes its group out until it is back.

1. Each pipeline is a replica group, a job of its own that sums gradients with the others. Before
   each step the groups that are there form a quorum.
2. A lost node stops its group. The others lose the step in flight, and go on without that group
   after the lighthouse has missed its heartbeats. They keep their own microbatches, so a step has
   fewer samples.
3. Once all nodes of the group have started again it gets the state from one of the others, for
   which all wait, and is in the quorum ("live recovery from a healthy peer", README.md).
4. Without any group, all start again from the newest save as soon as one group is complete.

Source: torchft (pytorch/torchft): the quorum of each step, recovery from one peer, and the
lighthouse's heartbeat_timeout_ms of 5,000 (a SIGKILL stalled training for 5.0 to 5.1 s).
Differs: the account counts global batches, so an iteration takes several steps while groups are
missing; a job in torchft counts steps. What a step of the account has in excess of a batch counts
for the next one. Groups are pipelines, all with the same stages; torchft leaves open what a group
is. What a new group starts is in `node_start_s`, as for every system's node that comes; processes
of its other nodes start beside that. Where no group is left the job starts again: `restart_s`.
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Final

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
from planaria.systems.system import Setting

HEARTBEAT_TIMEOUT_S: Final = 5.0
_GROUPS_MIN: Final = 2  # With fewer there would be nothing left after a loss.


@dataclass(frozen=True, slots=True)
class Replicas:
    """Replica groups with a quorum for each step; implements `System`."""

    @property
    def name(self) -> str:
        """See `System`."""
        return "replicas"

    def begin(self, setting: Setting, *, absent: Collection[int] = ()) -> ModelledJob:
        """A job that begins; see `System`."""
        grid = fastest_equal_pipelines(setting, setting.num_nodes, min_pipelines=_GROUPS_MIN)
        assert grid is not None
        return ModelledJob(setting, _Groups(setting, grid), saves_of_job(setting), absent=absent)


class _Groups:
    """The replica groups of a job; implements `Behaviour`."""

    def __init__(self, setting: Setting, grid: EqualPipelines) -> None:
        self._setting, self._grid = setting, grid
        self._places = Places(grid.num_places, range(setting.num_nodes))
        self._quorum = set(range(grid.num_pipelines))
        self._starting: dict[int, int] = {}  # Numbers of starts of groups that start.
        self._num_starts = 0
        self._place_bytes = max(bytes_by_place(setting, grid.plan(setting)))
        link = setting.catalog.problem.profile.links["inter_node"]
        self._fetch_s = link.seconds(self._place_bytes)
        self._num_steps = 1.0  # Number of steps that have the samples of an iteration.
        self._trains_since_s = 0.0

    def begin(self, job: ModelledJob) -> None:
        """See `Behaviour`."""
        self._places.drop(job.absent)
        self._places.fill(tuple(job.members))
        self._quorum -= {place // self._grid.depth for place in self._places.empty}
        self._trains_since_s = self._setting.costs.startup_s
        if self._quorum:
            self._train(job, 0.0)

    def on_lost(self, job: ModelledJob, nodes: tuple[int, ...], now_s: float) -> None:
        """See `Behaviour`."""
        lost = {place // self._grid.depth for place in self._places.drop(nodes)}
        self._starting = {g: start for g, start in self._starting.items() if g not in lost}
        is_stopped = bool(lost & self._quorum)
        self._quorum -= lost
        self._fill(job, now_s + self._setting.costs.node_start_s)
        if not is_stopped:
            return
        step_s = job.iteration_s / self._num_steps  # With the speeds that nodes have.
        lost_s = max(0.0, now_s - self._trains_since_s) % step_s
        job.interrupt(now_s, lost_s=lost_s)
        if self._quorum:
            detect = (Category.DETECT, HEARTBEAT_TIMEOUT_S)
            left_s = job.start_left_s(now_s)  # For which others still get their states.
            self._form_quorum(job, now_s, detect, move_s=left_s)
        else:
            job.go_back_to_save()
            job.wait(now_s, (Category.DETECT, HEARTBEAT_TIMEOUT_S))

    def on_joined(self, job: ModelledJob, nodes: tuple[int, ...], now_s: float) -> None:
        """See `Behaviour`."""
        del nodes
        self._fill(job, now_s)  # Its processes have started.

    def on_notice(self, job: ModelledJob, nodes: tuple[int, ...], deadline_s: float) -> None:
        """See `Behaviour`."""

    def _fill(self, job: ModelledJob, starts_at_s: float) -> None:
        """Fills places, and has the groups that are complete by that join at a time."""
        self._places.fill(tuple(job.members))
        empty = {place // self._grid.depth for place in self._places.empty}
        present = set(range(self._grid.num_pipelines)).difference(empty, self._quorum)
        for group in sorted(present.difference(self._starting)):
            self._num_starts += 1
            self._starting[group] = self._num_starts
            start = partial(self._join, job, group, self._num_starts)
            job.post(starts_at_s, start)

    def _join(self, job: ModelledJob, group: int, start: int, now_s: float) -> None:
        """Takes a group into the quorum, unless it was lost while it started."""
        if self._starting.get(group) != start:
            return
        del self._starting[group]
        self._quorum.add(group)
        if job.is_waiting:
            restart = (Category.RESTART, self._setting.costs.restart_s)
            self._form_quorum(job, now_s, restart, move_s=job.load_s(self._place_bytes))
        else:
            job.pause(now_s)
            self._form_quorum(job, now_s, move_s=self._fetch_s)

    def _form_quorum(self, job: ModelledJob, now_s: float, *phases: Phase, move_s: float) -> None:
        """Goes on with the groups that there are, once all of them have their states."""
        self._train(job, now_s)
        move = (Category.TRANSFER, move_s)
        if phases and phases[0][0] is Category.DETECT and not move_s:
            job.go_on(now_s, *phases, move)
        else:
            job.start_again(now_s, *phases, move)
        self._trains_since_s = job.trains_at_s

    def _train(self, job: ModelledJob, now_s: float) -> None:
        microbatches = [self._grid.microbatches[group] for group in sorted(self._quorum)]
        row = (self._grid.template,) * len(microbatches)
        step_s = self._setting.catalog.times.iteration_s(row, microbatches)
        self._num_steps = sum(self._grid.microbatches) / sum(microbatches)
        nodes = [
            node
            for place, node in enumerate(self._places.nodes)
            if node is not None and place // self._grid.depth in self._quorum
        ]
        pace = Pace(
            iteration_s=step_s * self._num_steps,
            nodes=frozenset(nodes),
            stall_s=save_stall_s(self._setting),
        )
        job.train_at(pace, now_s)
