"""Checks that a job may end as it does: a fault excuses what follows from it, and nothing else."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from planaria.core.kinds import Ending
from planaria.core.plan import Plan
from planaria.core.records import Ended, Origin
from planaria.simulator.checkers.back_checker import (
    newest_copy,
    newest_known_save,
    newest_save,
    unused_grants,
)
from planaria.simulator.checkers.crash_log import CrashLog
from planaria.simulator.fault_draws import (
    LOOK_LIKE_ANY_LOSS,
    LOOK_LIKE_LOSS,
    MAKE_NODES_LEAVE,
    FaultKind,
)
from planaria.simulator.fault_injection import FaultInjection
from planaria.simulator.modelled.executor import NOT_YET
from planaria.simulator.modelled.rescue import RESCUES_MAX, RESTARTS_MAX
from planaria.simulator.modelled.worker import SimulatedWorker
from planaria.simulator.simulated_cluster import LAUNCHER, SimulatedCluster

_END_A_LEASE = (FaultKind.HANG, FaultKind.DETACH, FaultKind.SLOW, FaultKind.DISK, FaultKind.STUCK)
_WAITED_SHARE = 0.9  # Clocks are wrong by some percent.
_TOLD_S = 1.0  # The coordinator knows of a save that was reported this long ago.


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedEnd:
    """A job at its end, as seen from outside.

    Attributes:
        num_committed: number of iterations that count.
        outcome: iteration of the newest outcome on record.
        origin: origin on which the committed iterations are built.
        plan: the newest plan.
        gone: nodes that are no members any more.
        n0: number of nodes of the smallest pipeline.
        crashes: errors in workers.
        lost_s: time at which the launcher was last told of a loss.
        forsaken: nodes that ended themselves because no coordinator could answer them.
    """

    num_committed: int
    outcome: int
    origin: Origin
    plan: Plan
    gone: frozenset[int]
    n0: int
    crashes: CrashLog
    lost_s: float
    forsaken: frozenset[int]


class EndChecker:
    """Checks the end of one job."""

    def __init__(
        self, cluster: SimulatedCluster, faults: FaultInjection, observed: ObservedEnd, ended: Ended
    ) -> None:
        self._cluster = cluster
        self._scenario = cluster.job.scenario
        self._faults = faults
        self._observed = observed
        self._ended = ended

    def violations(self) -> Iterator[str]:
        """What is wrong with the end, in words."""
        ended, number = self._ended, self._observed.num_committed
        match ended.ending:
            case Ending.FINISHED:
                if number != self._scenario.iterations:
                    yield f"finished with {number} iterations"
                yield from self._wrong_in_saves(number)
            case Ending.STOPPED:
                if not self._cluster.stop_requested:
                    yield "stopped, and nobody asked for it"
                yield from self._wrong_in_saves(number)
            case Ending.LOST if self._is_forced:
                yield from self._wrong_in_forced()
            case Ending.LOST:
                yield from self._wrong_in_lost()
            case Ending.FAILED:
                yield from self._wrong_in_failed()
            case Ending.UNSAVED if self._has_bad_store():
                pass  # A node whose lease has run out writes nothing, and a store may refuse.
            case _:
                yield f"ended: {ended.ending}, {ended.reason}"

    def _wrong_in_saves(self, number: int) -> Iterator[str]:
        if (saved := newest_save(self._cluster)) != number:
            yield f"the newest checkpoint is of {saved}, {number} are committed"

    # -- no coordinator could go on ---------------------------------------------------------------

    @property
    def _is_forced(self) -> bool:
        reason = self._cluster.records.save_only_reason
        return bool(reason) and self._ended.reason.startswith(reason)

    def _wrong_in_forced(self) -> Iterator[str]:
        """Errors of an end after a full disk or too many lost coordinators; the live state must be
        saved first."""
        records, reason = self._cluster.records, self._ended.reason
        if not self._cluster.disk.is_full and records.num_restarts <= RESTARTS_MAX:
            yield f"ended, and every coordinator could go on: {reason}"
        reason_text = reason.removeprefix(records.save_only_reason)
        if "no node is left to save" in reason_text:
            live_members = [n for n in records.nodes if self._cluster.agents[n].process.is_alive]
            if live_members:
                yield f"nodes {live_members} are left, and the job ends unsaved: {reason}"
        elif "more coordinators ended before" in reason_text:
            if records.num_rescues < RESCUES_MAX:
                yield f"ended after {records.num_rescues} coordinators that only save: {reason}"
        else:
            yield from self._wrong_in_last_save(reason_text)

    # -- too little was left ----------------------------------------------------------------------

    def _wrong_in_lost(self) -> Iterator[str]:
        ended, observed, scenario = self._ended, self._observed, self._scenario
        kinds = (
            *LOOK_LIKE_LOSS,
            *MAKE_NODES_LEAVE,
            FaultKind.CRASH,
            FaultKind.STALL,
            FaultKind.RAISE,
            FaultKind.BLIND,
        )
        causes = self._struck_counts(*kinds)
        f = scenario.failures_tolerated
        if (
            causes.total() <= f
            and not self._struck_counts(*LOOK_LIKE_ANY_LOSS)
            and not observed.forsaken
        ):
            yield f"lost after {causes.total()} losses, f = {f}: {ended.reason}"
        num_left = len(set(ended.nodes) - set(self._struck_counts(FaultKind.NOTICE)))
        layer = re.match(r"no live node holds layer (\d+)", ended.reason)
        if layer:
            yield from self._wrong_in_missing(int(layer[1]))
            yield from self._wrong_in_going_back()
        elif not ended.nodes and not scenario.wait_s:
            pass  # No member is left that a granted machine could help.
        elif "cannot read a save" in ended.reason:  # Whoever starts the job again may find it.
            if not self._was_needed():
                yield f"could go on without the node: {ended.reason}"
        elif self._is_early:
            yield f"ended {self._cluster.loop.now_s - observed.lost_s} s after: {ended.reason}"
        elif (idle := self._unused_grants()) and not self._cluster.stop_requested:
            yield f"node {idle} had been granted, and the job ends: {ended.reason}"
        elif not self._is_short(num_left):
            yield f"{num_left} nodes are left, and the job ends: {ended.reason}"

    def _unused_grants(self) -> set[int]:
        gone = {*self._ended.nodes, *self._observed.gone}
        return unused_grants(self._cluster, self._faults) - gone

    @property
    def _is_early(self) -> bool:
        """Whether the job should still have waited for machines, because fewer than n0 are left."""
        waited_s = self._cluster.loop.now_s - self._observed.lost_s
        is_below = len(self._ended.nodes) < self._observed.n0
        is_asked = self._cluster.stop_requested
        return is_below and not is_asked and waited_s < _WAITED_SHARE * self._scenario.wait_s

    def _is_short(self, num_left: int) -> bool:
        """Whether a number of nodes is too small to go on."""
        scenario, n0 = self._scenario, self._observed.n0
        wanted = (scenario.failures_tolerated + 1) * n0
        return num_left < n0 or (scenario.stops_below and num_left < wanted)

    def _wrong_in_missing(self, layer: int) -> Iterator[str]:
        """The members that have a layer at the age at which all would go on, or can still bring it
        there; there must be none."""
        workers = [w for w in self._cluster.workers() if self._node(w) in self._ended.nodes]
        age = max((self._observed.outcome, *(w.state.vector_iteration + 1 for w in workers)))
        for worker in workers:
            if (layer_state := worker.layers.get(layer)) is None or layer_state.age == NOT_YET:
                continue
            is_complete = layer_state.gradients_of == layer_state.age == age - 1
            if layer_state.age == age or is_complete:
                yield f"rank {worker.rank} has layer {layer}, and the job ends without it"

    def _wrong_in_going_back(self) -> Iterator[str]:
        """The saves and copies to which all could go back; there must be none."""
        if saved := newest_known_save(self._cluster):
            yield f"a save of iteration {saved} is there, and the job ends"
        if copied := newest_copy(self._cluster, self._ended.nodes, self._observed.origin):
            yield f"copies of iteration {copied} are there, and the job ends"

    def _node(self, worker: SimulatedWorker) -> int:
        return worker.rank // self._scenario.devices_per_node

    # -- the code in workers raised ---------------------------------------------------------------

    def _wrong_in_failed(self) -> Iterator[str]:
        """Errors of an end after errors in workers.

        Such an end needs a mistake in the job's code, the same error on two nodes, or repeated
        errors on a node without which the others cannot go on.
        """
        ended, crashes = self._ended, self._observed.crashes
        if not crashes.num_mistakes() and not crashes.were_alike and not self._was_needed():
            errors = [(fact.node, fact.raised.error) for fact in crashes.recent]
            yield f"failed after {errors}, and could go on: {ended.reason}"
        reason_text = f"{ended.reason} {ended.failure.traceback if ended.failure else ''}"
        yield from self._wrong_in_last_save(reason_text)

    def _was_needed(self) -> bool:
        """Whether the others cannot go on without a node that had an error often."""
        staying = set(self._ended.nodes) - set(self._struck_counts(*MAKE_NODES_LEAVE))
        return any(
            self._is_short(len(staying - {node})) or self._is_alone(node, at_s)
            for node, at_s in self._observed.crashes.had_often.items()
        )

    def _is_alone(self, node: int, at_s: float) -> bool:
        """Whether a node had layers that no other member has, with no state to go back to.

        Args:
            at_s: time at which the node had had an error often.
        """
        per_node = self._scenario.devices_per_node
        plan, other_members = self._observed.plan, set(self._ended.nodes) - {node}
        elsewhere = {
            layer
            for rank, layers in plan.layers_by_rank.items()
            if rank // per_node in other_members
            for layer in layers
        }
        known_since_s = self._cluster.leader.known_since_s
        can_go_back = self._scenario.copies > 1 or any(
            known_since_s.get(save.source, at_s) < at_s - _TOLD_S
            for save in self._cluster.published
            if save.source not in self._cluster.damaged
        )
        return len(elsewhere) < self._scenario.num_layers and not can_go_back

    # -- the last save ----------------------------------------------------------------------------

    def _wrong_in_last_save(self, reason_text: str) -> Iterator[str]:
        """Errors of the last save: everything committed must be saved, or the message must give a
        true reason why it is not."""
        number = max(self._observed.num_committed, self._observed.origin.iteration)
        if max(newest_save(self._cluster), 0) >= number:
            return
        if layer := re.search(r"no live node holds layer (\d+)", reason_text):
            yield from self._wrong_in_missing(int(layer[1]))
        elif "no node is left" in reason_text:
            struck = self._struck_counts(*LOOK_LIKE_LOSS, *MAKE_NODES_LEAVE)
            agents = self._cluster.agents
            live = [n for n in self._cluster.records.nodes if agents[n].process.is_alive]
            left = set(live) - set(struck)
            if (
                left
                and not self._struck_counts(*LOOK_LIKE_ANY_LOSS)
                and not self._observed.forsaken
            ):
                yield f"nodes {sorted(left)} are left: {reason_text}"
        elif "not saved" not in reason_text and "nothing was saved" not in reason_text:
            saved = newest_save(self._cluster)
            yield f"{saved} saved of {number}: {self._ended.reason}, {reason_text}"
        elif not (self._has_bad_store() or self._could_not_save()):
            yield f"nothing kept the job from saving {number}: {reason_text}"

    def _has_bad_store(self) -> bool:
        """Whether saves may have failed because of the store or of a lease that had run out."""
        return bool(
            self._cluster.saves.num_bad or self._struck_counts(*_END_A_LEASE, FaultKind.SPOIL)
        )

    def _could_not_save(self) -> bool:
        """Whether a member could not answer, or code raised again after the job had failed."""
        members = [self._cluster.agents[node] for node in self._ended.nodes]
        processes = [w.process for agent in members for w in agent.workers]
        are_there = all(p.is_alive and p.stopped_s < 0.0 for p in processes)
        is_cut = any(self._cluster.network.is_cut(node, LAUNCHER) for node in self._ended.nodes)
        return not are_there or is_cut or self._observed.crashes.has_failed_twice()

    def _struck_counts(self, *kinds: FaultKind) -> Counter[int]:
        return Counter(node for _, fault, node in self._faults.injected if fault.kind in kinds)
