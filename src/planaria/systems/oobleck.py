"""Oobleck: pipelines of precomputed templates are formed anew after a loss, without a restart.

A loss costs the iteration in flight and the time in which pipelines are formed and missing layers
are copied. Nodes that come cost that time too, but no iteration. While the nodes are fewer
than (f + 1) * n0 the job stands still: Oobleck saves, exits, and is started anew once enough are
there. If a loss takes the last copy of a layer, the job starts anew from its newest save.

Source: Oobleck (SOSP '23), sections 3.4 and 5. That time is `costs.regroup_s`, as for planaria, and
that in which the state of the largest node moves between two nodes. Its authors measured 2 to 10 s,
by model, with iterations of 10 to 190 s (papers/oobleck has both); here neither is taken.
Differs: the plan for so many nodes is the planner's best one, not the result of Oobleck's three
steps, and is ranked by the exact schedule.
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

from planaria.core.plan import Plan
from planaria.observe.ledger import Category
from planaria.systems.modelled_job import ModelledJob, Pace, Phase, save_stall_s, saves_of_job
from planaria.systems.system import Setting


@dataclass(frozen=True, slots=True)
class Oobleck:
    """Oobleck; implements `System`."""

    @property
    def name(self) -> str:
        """See `System`."""
        return "oobleck"

    def begin(self, setting: Setting, *, absent: Collection[int] = ()) -> ModelledJob:
        """A job that begins; see `System`."""
        return ModelledJob(setting, _Reconfiguration(setting), saves_of_job(setting), absent=absent)


class _Reconfiguration:
    """Forms pipelines anew; implements `Behaviour`."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        n0 = min(setting.catalog.templates)
        self._min_nodes = (setting.job.resilience.failures_tolerated + 1) * n0
        self._plan: Plan | None = None
        self._member_of: dict[int, int] = {}  # The member at each node of the plan that is left.

    def begin(self, job: ModelledJob) -> None:
        """See `Behaviour`."""
        if not job.absent or len(job.members) >= self._min_nodes:
            self._take_plan(job, 0.0)

    def on_lost(self, job: ModelledJob, nodes: tuple[int, ...], now_s: float) -> None:
        """See `Behaviour`."""
        self._member_of = {at: node for at, node in self._member_of.items() if node not in nodes}
        is_complete = self._has_all_layers() and not job.start_left_s(now_s)
        job.interrupt(now_s)
        if not is_complete:
            job.go_back_to_save()
        if len(job.members) < self._min_nodes:
            self._stop(job, now_s)
        elif is_complete:
            self._reconfigure(job, now_s, (Category.DETECT, self._setting.costs.detect_s))
        else:
            self._restart(job, now_s)

    def on_joined(self, job: ModelledJob, nodes: tuple[int, ...], now_s: float) -> None:
        """See `Behaviour`."""
        del nodes
        if job.is_training:
            job.at_commit(partial(self._reconfigure, job))
        elif not job.is_waiting:
            self._reconfigure(job, now_s)
        elif len(job.members) >= self._min_nodes:
            self._restart(job, now_s)

    def on_notice(self, job: ModelledJob, nodes: tuple[int, ...], deadline_s: float) -> None:
        """See `Behaviour`."""

    def _has_all_layers(self) -> bool:
        """Whether the nodes that are left of the plan hold every layer."""
        if self._plan is None:
            return False
        per_node = self._setting.job.cluster.devices_per_node
        held = {
            layer
            for rank, layers in self._plan.held_by_rank.items()
            if rank // per_node in self._member_of
            for layer in layers
        }
        return len(held) == self._plan.num_layers

    def _stop(self, job: ModelledJob, now_s: float) -> None:
        """Saves what is not saved, and exits."""
        save_s = job.saves.write_s if job.account.num_iterations > job.saves.newest else 0.0
        job.saves.begin(job.account.num_iterations, now_s, write_s=save_s)
        job.end()
        job.wait(now_s, (Category.CHECKPOINT_STALL, save_s))

    def _restart(self, job: ModelledJob, now_s: float) -> None:
        """Starts the job anew from its newest save."""
        load_s = job.load_s(self._take_plan(job, now_s))
        restart = (Category.RESTART, self._setting.costs.restart_s)
        job.start_again(now_s, restart, (Category.TRANSFER, load_s))

    def _reconfigure(self, job: ModelledJob, now_s: float, *phases: Phase) -> None:
        """Forms the pipelines anew and copies layers."""
        setting = self._setting
        job.pause(now_s)
        num_bytes = self._take_plan(job, now_s)
        regroup = (Category.REGROUP, setting.costs.regroup_s)
        link = setting.catalog.problem.profile.links["inter_node"]
        job.go_on(now_s, *phases, regroup, (Category.TRANSFER, link.seconds(num_bytes)))

    def _take_plan(self, job: ModelledJob, now_s: float) -> int:
        """Has the job train by the plan for the nodes that are there; bytes of its largest node."""
        setting = self._setting
        members = sorted(job.members)
        plan = self._plan = setting.catalog.plans[min(len(members), setting.num_nodes)]
        self._member_of = dict(zip(plan.nodes, members, strict=False))
        templates = [pipeline.template for pipeline in plan.pipelines]
        pace = Pace(
            iteration_s=setting.catalog.distribution(templates)[0],
            nodes=frozenset(self._member_of.values()),
            stall_s=save_stall_s(setting),
        )
        job.train_at(pace, now_s)
        return setting.node_bytes(templates)
