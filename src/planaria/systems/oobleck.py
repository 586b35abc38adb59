"""Oobleck: pipelines of precomputed templates are formed anew after a loss, without a restart.

A loss costs the iteration in flight and a constant time in which pipelines are formed and missing
layers are copied. Nodes that come cost that time too, but no iteration. While the nodes are fewer
than (f + 1) * n0 the job stands still: Oobleck saves, exits, and is started anew once enough are
there. If a loss takes the last copy of a layer, the job starts anew from its newest save.

Source: Oobleck (SOSP '23), sections 3.4 and 5. The constant was measured by its authors
(SymbioticLab/Oobleck, branch sosp23-artifact, tools/simulator, MIT) on nodes of one A40; for other
models it is `costs.regroup_s` and the time in which the largest stage moves between two nodes.
Differs: the plan for so many nodes is the planner's best one, not the result of Oobleck's three
steps, and is ranked by the exact schedule.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from planaria.core.plan import Plan
from planaria.observe.ledger import Category
from planaria.systems.system import Setting
from planaria.systems.virtual_job import VirtualRun

RECONFIGURATION_S: Final[Mapping[str, float]] = {  # By the name of the shipped profile.
    "bert-large": 2.0,
    "gpt2": 2.0,
    "gpt3-350m": 3.0,
    "gpt3-2.7b": 6.0,
    "gpt3-6.7b": 10.0,
}


@dataclass(frozen=True, slots=True)
class Oobleck:
    """Oobleck; implements `System`."""

    @property
    def name(self) -> str:
        """See `System`."""
        return "oobleck"

    def begin(self, setting: Setting) -> "OobleckRun":
        """See `System`."""
        return OobleckRun(setting)


class OobleckRun(VirtualRun):
    """One job; implements `SystemRun`."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting, save_every=setting.job.checkpoint.persist_every)
        self._is_stopped = False
        self._machine_of: dict[int, int] = {}
        self._plan: Plan | None = None
        self._take_plan()

    def lose(self, nodes: tuple[int, ...], now_s: float) -> None:
        """See `SystemRun`."""
        self._remove(nodes, now_s)
        has_all_layers = self._has_all_layers()
        if self._is_stopped or self._is_short():
            self._stop(is_saved=has_all_layers)
        elif not has_all_layers:
            self._job.go_back()
            self._restart()
        else:
            self._job.pause(Category.DETECT, self._setting.costs.detect_s)
            self._reconfigure()

    def take_back(self, nodes: tuple[int, ...], now_s: float) -> None:
        """See `SystemRun`."""
        self._add(nodes, now_s)
        if self._is_stopped:
            if not self._is_short():
                self._is_stopped = False
                self._restart()
        elif self._job.is_pausing:
            self._job.pause(Category.REGROUP, 0.0, self._reconfigure)
        else:
            self._job.at_commit(self._reconfigure)

    def give_notice(self, nodes: tuple[int, ...], now_s: float, *, deadline_s: float) -> None:
        """Oobleck does nothing before a loss; see `SystemRun`."""
        del nodes, deadline_s
        self.run_until(now_s)

    def _is_short(self) -> bool:
        """Whether the nodes are too few for f + 1 pipelines."""
        f = self._setting.job.resilience.failures_tolerated
        n0 = min(self._setting.catalog.templates)
        return len(self._machines.there) < (f + 1) * n0

    def _has_all_layers(self) -> bool:
        """Whether the nodes that are left of the plan hold every layer."""
        if self._plan is None:
            return False
        there = set(self._machines.there)
        held: set[int] = set()
        for pipeline in self._plan.pipelines:
            for stage, node in zip(
                pipeline.template.stages,
                (
                    ranks[0] // pipeline.template.devices_per_node
                    for ranks in pipeline.ranks_by_stage()
                ),
                strict=True,
            ):
                if self._machine_of[node] in there:
                    held.update(range(stage.first_layer, stage.end_layer))
        return len(held) == self._plan.num_layers

    def _stop(self, *, is_saved: bool) -> None:
        """Saves what there is, and exits; without a copy of every layer the newest save remains."""
        if self._is_stopped:
            return
        self._is_stopped, self._plan = True, None
        self._job.train_by(0.0, save_s=0.0)
        if is_saved:
            self._job.save_now()
        else:
            self._job.go_back()

    def _restart(self) -> None:
        """Starts the job anew from its newest save."""
        costs = self._setting.costs
        self.account.num_restarts += 1
        rank_bytes = self._take_plan()
        self._job.pause(Category.RESTART, costs.restart_s + rank_bytes / costs.save_bytes_per_s)

    def _reconfigure(self) -> None:
        """Forms the pipelines anew and copies layers."""
        rank_bytes, setting = self._take_plan(), self._setting
        constant_s = RECONFIGURATION_S.get(setting.model)
        if constant_s is None:
            self._job.pause(Category.REGROUP, setting.costs.regroup_s)
            constant_s = setting.catalog.problem.profile.links["inter_node"].seconds(rank_bytes)
        self._job.pause(Category.TRANSFER, constant_s)

    def _take_plan(self) -> int:
        """Has the job train by the plan for the nodes that are there; bytes of its largest rank."""
        setting, there = self._setting, self._machines.there
        catalog, layer_bytes = setting.catalog, setting.layer_bytes
        plan = self._plan = catalog.plans[min(len(there), setting.num_nodes)]
        self._machine_of = dict(zip(plan.nodes, there, strict=False))
        templates = [pipeline.template for pipeline in plan.pipelines]
        rank_bytes = max(
            sum(layer_bytes[stage.first_layer : stage.end_layer])
            for template in dict.fromkeys(templates)
            for stage in template.stages
        )
        self._job.train_by(
            catalog.distribution(templates)[0],
            save_s=setting.costs.save_stall_s,
            idle=1.0 - len(plan.nodes) / len(there),
        )
        self._job.slow_down(self._machines.slowness)
        return rank_bytes
