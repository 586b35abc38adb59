"""The interface of a system that trains on a cluster whose nodes fail, as the simulator runs it."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from planaria.core.job import JobConfig
from planaria.core.plan import PipelineTemplate
from planaria.planner.plans import PlanCatalog
from planaria.systems.account import Account


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryCosts:
    """What the parts of a recovery take, in seconds; docs/SIMULATE.md says where each is from.

    Attributes:
        startup_s: start of a job until its first iteration.
        node_start_s: time from when a machine is there until its node can join.
        detect_s: time from a loss until the coordinator notices it.
        answer_s: time until every member has left its epoch, without the action in progress.
        look_ahead_s: time until answers to losses of a new plan, and better plans, are found by a
            coordinator that looks ahead.
        decide_s: time to price the answers and to record the best.
        regroup_s: a recovery without its transfers.
        per_rank_s: time by which `answer_s`, `decide_s` and `regroup_s` are longer, each, for every
            rank of the cluster; 5,000 simulated nodes took 0.30, 0.57 and 0.70 s in
            `benchmarks/recovery.py`.
        switch_s: pause of training for a switch of plans at a commit.
        restart_s: start of a job anew, until it loads its layers, after it had ended.
        save_stall_s: time for which training stands still for each save.
        save_bytes_per_s: speed at which each node reads and writes saves.
        profile_factor: factor on all seconds of the profile, those of layers and of links; no
            recovery, but measured beside them.
    """

    startup_s: float = 20.0
    node_start_s: float = 10.0
    detect_s: float = 0.01
    answer_s: float = 0.02
    decide_s: float = 0.025
    look_ahead_s: float = 10.0
    regroup_s: float = 0.05
    per_rank_s: float = 1e-4
    switch_s: float = 0.02
    restart_s: float = 60.0
    save_stall_s: float = 0.0
    save_bytes_per_s: float = 1e9
    profile_factor: float = 1.0

    def with_ranks(self, num_ranks: int) -> "RecoveryCosts":
        """The costs on a cluster of so many ranks, whose part of them is in the others."""
        more_s = self.per_rank_s * num_ranks
        return replace(
            self,
            answer_s=self.answer_s + more_s,
            decide_s=self.decide_s + more_s,
            regroup_s=self.regroup_s + more_s,
            per_rank_s=0.0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The job and the cluster, which are the same for all systems that are compared.

    Attributes:
        job: configuration of the job; `cluster.nodes` is the number of nodes
            at work, `cluster.standby` that of nodes which wait to take the places of lost ones.
        catalog: plans of the job for every number of nodes.
        model: name of the model's profile.
    """

    job: JobConfig
    catalog: PlanCatalog
    costs: RecoveryCosts
    model: str

    @property
    def num_nodes(self) -> int:
        """The number of nodes at work while none is lost."""
        return self.job.cluster.nodes

    @property
    def num_machines(self) -> int:
        """The number of nodes that the cluster has while none is lost, standby nodes included."""
        return self.num_nodes + self.job.cluster.standby

    @property
    def failure_free_s(self) -> float:
        """The seconds of an iteration of the plan for all nodes, by the estimator."""
        plan = self.catalog.plans[self.num_nodes]
        return self.catalog.distribution([p.template for p in plan.pipelines])[0]

    @property
    def layer_bytes(self) -> tuple[int, ...]:
        """The bytes of each layer's state, parameters and optimizer state."""
        layers = self.catalog.problem.profile.layers
        return tuple(layer.parameter_bytes + layer.optimizer_bytes for layer in layers)

    def node_bytes(self, templates: Iterable[PipelineTemplate]) -> int:
        """The bytes of the largest state of a node in pipelines of these templates."""
        per_node, most = self.job.cluster.devices_per_node, 0
        for template in dict.fromkeys(templates):
            counts, device = [0] * template.num_nodes, 0
            for stage in template.stages:
                layers = self.layer_bytes[stage.first_layer : stage.end_layer]
                counts[device // per_node] += sum(layers)
                device += stage.num_devices
            most = max(most, *counts)
        return most


class SystemRun(Protocol):
    """A job of one system, to which things happen in order of time."""

    @property
    def account(self) -> Account:
        """The seconds and samples so far."""

    def run_until(self, now_s: float) -> None:
        """Goes on until a time; the account has all seconds until then."""

    def lose(self, nodes: tuple[int, ...], now_s: float) -> None:
        """Nodes are gone, with all that they held in memory."""

    def take_back(self, nodes: tuple[int, ...], now_s: float) -> None:
        """Nodes, or others in their places, are there again."""

    def give_notice(self, nodes: tuple[int, ...], now_s: float, *, deadline_s: float) -> None:
        """Nodes are told that they will be gone at `deadline_s`."""

    def set_speeds(self, speeds: Mapping[int, float], now_s: float) -> None:
        """Nodes go on at other speeds; 1 is the speed of the profile."""


class System(Protocol):
    """A system that is compared."""

    @property
    def name(self) -> str:
        """The name, as in `planaria simulate --systems`."""

    def begin(self, setting: Setting, *, absent: Collection[int] = ()) -> SystemRun:
        """A job that begins on the nodes of the cluster that are there, once they are enough.

        Args:
            absent: nodes that are not there at time 0. They may come later.
        """
