"""Invariants of every run, checked from outside the system.

    samples    the state of each layer, on a worker or in a checkpoint, comes from exactly the
               samples of all iterations up to its age
    one age    all ranks begin an epoch with layers of one age, which includes every iteration that
               counts
    the plan   covers the model, computes every microbatch once, gives every survivor work for which
               it has the layers, and can be run to its end; a changed plan differs from the old one
    trust      no layer is on distrusted nodes alone if trusted nodes could fill a pipeline, except
               under a policy that moves nothing
    records    each is written once, epochs rise by one, and only the newest coordinator writes
    commits    come in order, each with the samples of its iteration
    the end    of the job is justified by what happened, and comes soon after the last fault is over
    members    a node that is no member any more ends

Source: TigerBeetle's checkers, which watch and assert and take no part.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

import msgspec
import numpy as np

from planaria.coordinator.job_rules import Rules
from planaria.coordinator.membership.trust import DISTRUSTED_MIN, FORGIVEN_S
from planaria.core.kinds import ChangeKind
from planaria.core.messages import StartEpoch
from planaria.core.plan import Plan
from planaria.core.records import (
    Changed,
    Committed,
    Decision,
    Ended,
    Leading,
    Members,
    Origin,
    Outcome,
    Progress,
    Recorded,
    Recovering,
    Rescue,
    Running,
    ToLauncher,
    Warned,
    decode_pieces,
    decode_record,
)
from planaria.core.samples import sample_digest
from planaria.errors import DeadlockError
from planaria.policies.memory_checked import has_room
from planaria.policies.traits import TRAITS
from planaria.schedule.lower import plan_schedule
from planaria.simulator.checkers.absence import Absence
from planaria.simulator.checkers.back_checker import newest_copy, newest_known_save
from planaria.simulator.checkers.crash_log import CrashFact, CrashLog
from planaria.simulator.checkers.end_checker import EndChecker, ObservedEnd
from planaria.simulator.fault_draws import (
    LOOK_LIKE_ANY_LOSS,
    LOOK_LIKE_LOSS,
    MAKE_NODES_LEAVE,
    FaultKind,
)
from planaria.simulator.fault_injection import FaultInjection
from planaria.simulator.modelled.agent import machine_of
from planaria.simulator.modelled.executor import NOT_YET
from planaria.simulator.modelled.worker import SimulatedWorker
from planaria.simulator.scenario import LEASE_S, Scenario
from planaria.simulator.simulated_cluster import LAUNCHER, SimulatedCluster
from planaria.store.store import Entry, Event

_STILL_S: Final = 60.0  # Longest time between commits without a fault: that of a wait in vain.
PATIENCE_S: Final = 75.0  # Time from the last fault to the job's end: such a wait, and a recovery.
_COST_NOTHING: Final = {FaultKind.HEAD_CUT, FaultKind.JOIN, FaultKind.STOP, FaultKind.CLOCK}
# One that was replaced may go on and take over; the newer one then ends itself.
_HOLD_UP_HEAD: Final = (FaultKind.PAUSE, FaultKind.STUCK, FaultKind.REPLACE)
_LEAVES_S: Final = 4 * LEASE_S  # Longest time from an eviction to the end of a reachable node.


def vain_s(scenario: Scenario) -> float:
    """How much longer a job on several machines may wait in vain: for members that are lost, and
    that the head takes for cut off."""
    return scenario.patience_s + 3.0 * LEASE_S + scenario.wait_s if scenario.patience_s else 0.0


@dataclass(frozen=True, slots=True)
class _RecordedState:
    """The job's state according to the records."""

    epoch: int
    members: tuple[int, ...]
    gone: frozenset[int]
    outcome: int
    origin: Origin


class Checkers:
    """Watches a cluster and collects violations of the invariants.

    Attributes:
        faults: faults that strike the cluster.
        violations: violations in words, in order of time.
        moved_s: time of the last commit; before the first one, of the beginning of training.
    """

    def __init__(self, cluster: SimulatedCluster) -> None:
        self.faults: FaultInjection
        self.violations: list[str] = []
        self.moved_s = 0.0
        self._cluster = cluster
        self._job = cluster.job
        self._first_ages: dict[int, int] = {}
        self._records: set[tuple[str, str]] = set()
        self._pieces: dict[str, bytes] = {}
        self._term = -1
        self._term_s = 0.0  # Time at which it was recorded.
        self._epoch = -1
        self._members: tuple[int, ...] = cluster.job.plan.nodes
        self._lost_s = 0.0  # Time at which the launcher was last told of a loss.
        self._outcome = -1
        self._origin = Origin()
        # The grid of this policy may leave nodes without work, and ignores trust.
        self._policy = TRAITS[cluster.job.scenario.policy]
        self._num_committed = 0
        self._ranks: tuple[int, ...] = ()
        self._plans: tuple[Plan, ...] = ()  # The newest two without silent members.
        self._evicted_s: dict[int, float] = {}
        self._left_out: dict[int, frozenset[int]] = {}  # By epochs of changes without a plan yet.
        self._gone: set[int] = set()
        self._failures: dict[str, tuple[int, float]] = {}
        self._planned: set[int] = set()
        self._plan = cluster.job.plan
        self._fitted = cluster.job.rules
        self._crashes = CrashLog()
        self._furthest = 0  # Number of iterations that were ever committed.
        self._absence = Absence(cluster)
        self._num_before_back = 0
        self._launcher_state = self._recorded_state()  # As far as the launcher knows the records.

    def _recorded_state(self) -> "_RecordedState":
        gone = frozenset(self._gone)
        return _RecordedState(self._epoch, self._members, gone, self._outcome, self._origin)

    def _fail(self, text: str) -> None:
        self._cluster.log_event("VIOLATION", text)
        self.violations.append(f"{self._cluster.loop.now_s:.4f} s: {text}")

    def on_unexpected_error(self, error: BaseException) -> None:
        """See SimulationObserver."""
        self._fail(f"raised {error!r}")

    # -- samples and ages -------------------------------------------------------------------------

    def on_place(self, place: str, worker: SimulatedWorker, iteration: int) -> None:
        """See SimulationObserver."""
        if place in ("resume", "start", "optimizer"):
            self._check_contents(worker)
        self._check_on_record(place, worker)
        if place == "resume":
            epoch = worker.links.epoch
            age = self._first_ages.setdefault(epoch, iteration)
            if age != iteration:
                self._fail(f"epoch {epoch} begins at {age} and, on {worker.rank}, at {iteration}")
            if epoch == self._epoch and iteration < self._num_committed:
                self._fail(f"epoch {epoch} begins before {self._num_committed} committed ones")
        if place in ("resume", "start"):
            ages = {
                n: layer_state.age
                for n, layer_state in worker.layers.items()
                if layer_state.age != NOT_YET
            }
            if any(age != iteration for age in ages.values()):
                self._fail(f"rank {worker.rank} begins iteration {iteration} with ages {ages}")

    def _check_on_record(self, place: str, worker: SimulatedWorker) -> None:
        """Checks that the records that a worker acts on have been written."""
        kinds = {"answer": ("members",), "resume": ("members", "outcome", "plan")}
        if worker.state.epoch in self._planned:  # Its plan is recorded once it has begun.
            kinds["resume"] = ("members",)
        for kind in kinds.get(place, ()):
            if (kind, str(worker.state.epoch)) not in self._records:
                self._fail(f"rank {worker.rank} obeys, and there is no {kind}/{worker.state.epoch}")

    def _check_contents(self, worker: SimulatedWorker) -> None:
        for layer, layer_state in worker.layers.items():
            if layer_state.age == NOT_YET:
                continue
            if self._job.contents.get((layer, layer_state.age)) != layer_state.content:
                self._fail(f"rank {worker.rank}: layer {layer} of age {layer_state.age} is another")

    def on_save(self, iteration: int, layers: Mapping[int, int]) -> None:
        """See SimulationObserver."""
        for layer in range(self._job.scenario.num_layers):
            if self._job.contents[layer, iteration] != layers.get(layer):
                self._fail(f"the checkpoint of {iteration} has another layer {layer}")

    # -- records ----------------------------------------------------------------------------------

    def on_record(self, event: Event) -> None:
        """See SimulationObserver."""
        if not isinstance(event, Entry):
            return
        kind, name = event.key.rsplit("/", 2)[-2:]
        if name == "leader":
            self._check_term(int(event.value))
        elif name == "commit":
            self._check_progress(decode_record(event.value, Progress))
        elif kind == "piece":
            self._pieces[name] = event.value
        elif kind in ("members", "outcome", "plan"):
            if (kind, name) in self._records:
                self._fail(f"{kind}/{name} is written twice")
            self._records.add((kind, name))
            self._check_record(kind, self._joined_value(kind, name, event.value))

    def _joined_value(self, kind: str, epoch: str, value: bytes) -> bytes:
        """The value of a record, joined if it is stored in pieces."""
        if (pieces := decode_pieces(value)) is None:
            return value
        names = [f"{kind}-{epoch}-{pieces.term}-{index}" for index in range(pieces.num)]
        if missing := [name for name in names if name not in self._pieces]:
            self._fail(f"{kind}/{epoch} stands for pieces {missing}, which are not there")
        return b"".join(self._pieces[name] for name in names)

    def _check_term(self, term: int) -> None:
        if term != self._term + 1:
            self._fail(f"term {term} follows {self._term}")
        self._term, self._term_s = term, self._cluster.loop.now_s

    def _may_lead(self, term: int) -> bool:
        """Whether a coordinator of a term may say that it leads.

        One that led until this moment cannot know yet that another one has just recorded its term.
        """
        is_last = term == self._term - 1 and self._cluster.loop.now_s == self._term_s
        return term == self._term or is_last

    def _check_progress(self, progress: Progress) -> None:
        if progress.since == self._origin.epoch and progress.num_committed > self._num_committed:
            self._fail(f"{progress.num_committed} on record, {self._num_committed} committed")

    def _check_record(self, kind: str, value: bytes) -> None:
        if kind == "members":
            self._check_members(decode_record(value, Members))
        elif kind == "outcome":
            self._check_outcome(decode_record(value, Outcome))
        else:
            order = decode_record(value, Decision).order
            if isinstance(order, StartEpoch):
                self._check_plan(order.plan)
                # Nodes that leave with a change are told once its plan is on record.
                leaving = self._left_out.pop(order.epoch, frozenset()) & self._evicted_s.keys()
                self._evicted_s |= dict.fromkeys(leaving, self._cluster.loop.now_s)

    def _check_members(self, members: Members) -> None:
        if members.epoch != self._epoch + 1 or members.term != self._term:
            self._fail(f"{members} follows epoch {self._epoch} in term {self._term}")
        if self._gone.intersection(members.nodes):
            self._fail(f"{members} has a node that was no member any more")
        left_out = frozenset(self._members).difference(members.nodes)
        if members.is_planned:
            self._planned.add(members.epoch)
            self._left_out[members.epoch] = left_out
        else:  # In a planned change a node may stay after all, if the change is given up.
            self._gone |= left_out
        for node in left_out:
            self._check_cause(node)
            self._evicted_s[node] = self._cluster.loop.now_s
        for node in members.nodes:  # It may include one of a planned change that was given up.
            self._evicted_s.pop(node, None)
        self._epoch, self._members = members.epoch, members.nodes
        for machine, (count, last_s) in self._failures.items():
            is_forgiven = members.recorded.now_s - last_s > FORGIVEN_S
            if members.failures.get(machine, (0, 0.0))[0] < count and not is_forgiven:
                self._fail(f"{members} forgets of {self._failures}")
        self._failures = members.failures

    def _check_outcome(self, outcome: Outcome) -> None:
        if outcome.epoch != self._epoch:
            self._fail(f"an outcome of epoch {outcome.epoch} in epoch {self._epoch}")
        if outcome.origin.epoch == outcome.epoch:
            self._check_origin(outcome.origin)
        if outcome.origin.epoch != self._origin.epoch:
            self._fail(f"epoch {outcome.epoch} is built on epoch {outcome.origin.epoch}")
        is_anew = outcome.iteration == self._origin.iteration and not self._has_layers()
        if outcome.iteration < max(self._outcome, self._num_committed) and not is_anew:
            self._fail(
                f"epoch {outcome.epoch} goes on at {outcome.iteration}: {self._num_committed} are "
                f"committed, and an outcome before it said {self._outcome}"
            )
        if is_anew:
            self._num_committed = min(self._num_committed, outcome.iteration)
        self._outcome = outcome.iteration

    def _has_layers(self) -> bool:
        """Whether a member holds a layer; otherwise unrecorded commits are forgotten."""
        workers, per_node = self._cluster.workers(), self._cluster.job.scenario.devices_per_node
        of_members = [w for w in workers if w.rank // per_node in self._members]
        return any(held.age != NOT_YET for w in of_members for held in w.layers.values())

    def _check_origin(self, origin: Origin) -> None:
        """Checks that all go back to the newest state that has all layers (under morph, to the
        newest save unless the origin has copies); later iterations do not count any more."""
        saved = newest_known_save(self._cluster, source=self._origin.source)
        copied = newest_copy(self._cluster, self._members, self._origin)
        self._cluster.log_event("goes back", origin.iteration)
        is_saved = self._policy.goes_back and not origin.copied
        wanted = saved if is_saved else max(saved, copied)
        # A worker whose code raises at its start reports no copies.
        is_older = bool(self._crashes.num_mistakes()) and saved <= origin.iteration < wanted
        if origin.iteration != wanted and not is_older:
            self._fail(f"all go back to {origin.iteration}, not to {saved} or {copied}")
        self._origin, self._outcome = origin, origin.iteration
        self._num_before_back = self._num_committed
        self._num_committed = min(self._num_committed, origin.iteration)

    def _check_plan(self, plan: Plan) -> None:
        members = set(self._members) - self._waiting_nodes(plan)
        job, self._ranks, self._plan = self._job, plan.ranks, plan
        if not plan.silent:
            self._plans = (*self._plans[-1:], plan)
        if plan.epoch != self._epoch:
            self._fail(f"a plan of epoch {plan.epoch} in epoch {self._epoch}")
        num_layers, num_microbatches = job.scenario.num_layers, job.scenario.num_microbatches
        for text in wrong_in(plan, num_layers=num_layers, num_microbatches=num_microbatches):
            self._fail(text)
        staying = len(members - self._leaving_nodes())
        rules = self._fitted_rules()
        plans = self._plans_of(rules)
        most = len(plans[min(staying, max(plans))].nodes) if staying >= rules.n0 else 0
        goes_back = self._policy.goes_back
        is_short = len(plan.nodes) < most and not plan.silent and not goes_back
        if is_short or not set(plan.nodes) <= set(self._members):
            self._fail(f"of {self._members} only {plan.nodes} work")
        moves = self._policy.is_choice or not plan.gone
        if moves and not plan.silent and not goes_back:  # Otherwise it keeps older pipelines.
            self._check_trust(plan, members, staying)
        # With more nodes than there are plans for, nodes with too little memory may be used.
        is_foreseen = rules.n0 <= staying and len(self._members) in plans
        if rules is not job.rules and is_foreseen and not plan.silent:
            self._check_room(plan, rules, plans[staying])

    def _fitted_rules(self) -> Rules:
        """The rules with the newest memory estimates; checks that these were raised only after a
        worker had too little memory."""
        if (fitted_rules := self._cluster.leader.fitted_rules) is not None:
            self._fitted = fitted_rules
            if not any(fact.blame == "memory" for fact in self._crashes.facts):
                self._fail("estimates were raised, and nobody had too little memory")
        return self._fitted

    def _plans_of(self, rules: Rules) -> Mapping[int, Plan]:
        return rules.catalog.plans if rules.catalog else self._job.catalog.plans

    def _check_room(self, plan: Plan, rules: Rules, other: Plan) -> None:
        """Checks that the plan fits into memory, as estimated, if the prepared plan does.

        Args:
            other: the prepared plan for the nodes that stay.
        """
        assert rules.catalog is not None
        problem = rules.catalog.problem
        self._cluster.log_event("fitted", rules.n0)
        if has_room(problem, other) and not has_room(problem, plan):
            stages = [pipeline.template.stages for pipeline in plan.pipelines]
            self._fail(f"there is no memory for {stages}")

    def _waiting_nodes(self, plan: Plan) -> set[int]:
        """The members that wait for work until others have left, which have too little time."""
        if not self._left_out.get(plan.epoch):
            return set()
        return set(self._members).difference(self._plan.nodes, plan.nodes)

    def _check_trust(self, plan: Plan, members: Collection[int], num_staying: int) -> None:
        """Checks that no layer is on distrusted nodes alone, if trusted nodes can fill the smallest
        pipeline and no more nodes are idle than otherwise."""
        rules = self._fitted_rules()
        n0, plans = rules.n0, self._plans_of(rules)
        num_machines = self._job.scenario.num_machines
        machines = {node: machine_of(node, num_machines=num_machines) for node in members}
        trusted = {
            n
            for n, machine in machines.items()
            if self._failures.get(machine, (0, 0.0))[0] < DISTRUSTED_MIN
        }
        rest = plans.get(num_staying - n0)
        if rest is None or len(trusted - self._leaving_nodes()) < n0:
            return
        num_alone = num_exposed(plan, trusted)
        if num_alone and n0 + len(rest.nodes) >= len(plans[num_staying].nodes):
            pipelines = [pipeline.nodes for pipeline in plan.pipelines]
            self._fail(f"{num_alone} layers on distrusted nodes alone in pipelines {pipelines}")

    # -- what the launcher is told ----------------------------------------------------------------

    def on_message(self, message: ToLauncher) -> None:
        """See SimulationObserver."""
        match message:
            case Leading() if not self._may_lead(message.term):
                self._fail(f"term {message.term} leads in term {self._term}")
            case Recorded():
                self._launcher_state = self._recorded_state()
            case Committed():
                self._check_commit(message)
            case Warned() if message.untold == self._num_committed:
                self._num_committed += 1
                self._check_applied(message.untold)
            case Running():
                self.moved_s = self.moved_s or self._cluster.loop.now_s
                if message.epoch != self._epoch:
                    self._fail(f"epoch {message.epoch} runs in epoch {self._epoch}")
            case Recovering():
                self._lost_s = self._cluster.loop.now_s
                if not self._may_recover():
                    self._fail(f"{message.reason}: only the head was cut off, and all recover")
            case Changed() if {*message.kinds.values()} == {ChangeKind.REFORM}:
                if not is_another(*self._plans):
                    self._fail(f"epoch {message.epoch} begins with a change to the same plan")
            case Ended():
                self._check_end(message)

    def _check_commit(self, commit: Committed) -> None:
        numbers = [n for part in self._job.samples[commit.iteration] for n in part]
        if commit.sample_digest != sample_digest(np.array(numbers, dtype=np.int64)):
            self._fail(f"iteration {commit.iteration} is committed with other samples")
        if commit.iteration > self._num_committed:
            self._fail(f"iteration {commit.iteration} follows {self._num_committed - 1}")
        still_s = self._cluster.loop.now_s - max(self.moved_s, self.faults.end_s)
        if still_s > _STILL_S + vain_s(self._job.scenario):
            self._fail(f"nothing was committed for {still_s:.0f} s before {commit.iteration}")
        self.moved_s = self._cluster.loop.now_s
        # Error counts are reset neither by a repeated iteration nor by one that an outcome commits.
        if commit.iteration >= max(self._furthest, self._outcome):
            self._crashes.on_commit()
        self._furthest = max(self._furthest, commit.iteration + 1)
        self._num_committed = max(self._num_committed, commit.iteration + 1)
        self._check_applied(commit.iteration)

    def _check_applied(self, iteration: int) -> None:
        """Checks that all ranks that train have applied a committed iteration, unless an outcome on
        record covers it."""
        for worker in self._cluster.workers():
            ages = [
                layer_state.age
                for layer_state in worker.layers.values()
                if layer_state.age != NOT_YET
            ]
            is_young = any(age <= iteration for age in ages)
            at_work = worker.rank in self._ranks and worker.state.epoch == self._epoch
            if is_young and at_work and self._outcome <= iteration:
                self._fail(f"iteration {iteration} counts, and rank {worker.rank} lacks it")

    def _check_end(self, ended: Ended) -> None:
        observed = ObservedEnd(
            num_committed=self._num_committed,
            outcome=self._outcome,
            origin=self._origin,
            plan=self._plan,
            gone=frozenset(self._gone),
            n0=self._fitted_rules().n0,
            crashes=self._crashes,
            lost_s=self._lost_s,
            forsaken=self._absence.forsaken_nodes(),
        )
        for text in EndChecker(self._cluster, self.faults, observed, ended).violations():
            self._fail(text)

    def on_crash(self, fact: CrashFact) -> None:
        """See SimulationObserver."""
        self._crashes.add(fact)

    def on_standstill(self) -> None:
        """See SimulationObserver."""
        if not self._struck_nodes(*_HOLD_UP_HEAD):
            self._fail("the coordinator stands still, and nothing holds it up")

    def on_rescue(self, rescue: Rescue) -> None:
        """See SimulationObserver."""
        known_state = self._launcher_state
        # If the origins differ, the launcher does not know that all were to go back.
        if self._origin != known_state.origin:
            self._num_committed = self._num_before_back
        self._outcome, self._origin = known_state.outcome, known_state.origin
        self._term, self._epoch, self._members = rescue.term, known_state.epoch, known_state.members
        self._gone, self._failures = set(known_state.gone), {}
        for key in [key for key in self._records if int(key[1]) > known_state.epoch]:
            self._records.remove(key)
        # The rescue's members have a term that nobody reads: that of the members before, plus one.
        members = msgspec.structs.replace(rescue.members, term=rescue.term)
        self._records.add(("members", str(members.epoch)))
        self._check_members(members)
        self._launcher_state = self._recorded_state()

    # -- members ----------------------------------------------------------------------------------

    def _check_cause(self, node: int) -> None:
        """Checks that something happened that can look like the loss of an evicted node."""
        struck = {
            *self._struck_nodes(*LOOK_LIKE_LOSS),
            *self._leaving_nodes(),
            *self._crashes.frequent_nodes(),
        }
        struck |= self._absence.forsaken_nodes()
        anywhere = self._struck_nodes(*LOOK_LIKE_ANY_LOSS)
        if node not in struck and not anywhere:
            self._fail(f"node {node} is given up, and nothing happened to it")

    def _may_recover(self) -> bool:
        """Whether anything happened that costs an epoch.

        A head that is cut off costs none, unless its slow disk has kept nodes waiting before that.
        """
        kinds = {fault.kind for _, fault, _ in self.faults.injected}
        return not kinds <= _COST_NOTHING or bool(self._absence.forsaken_nodes())

    def _leaving_nodes(self) -> set[int]:
        """The nodes that the user drained or that got a preemption notice."""
        return set(self._struck_nodes(*MAKE_NODES_LEAVE))

    def _struck_nodes(self, *kinds: FaultKind) -> Counter[int]:
        return Counter(node for _, fault, node in self.faults.injected if fault.kind in kinds)

    def check_over(self, *, until_s: float) -> None:
        """Checks the invariants of a run that is over, at `until_s` at the latest."""
        if self._cluster.ended is None:
            self._fail(f"nothing came to an end by {until_s:.0f} s; {self._stuck_text()}")
        for text in self._cluster.recording.violations(self._cluster.launcher_s):
            self._fail(text)
        for node, evicted_s in self._evicted_s.items():
            process = self._cluster.agents[node].process
            is_free = process.is_alive and process.stopped_s < 0.0
            is_free = is_free and not self._cluster.network.is_cut(node, LAUNCHER)
            # Training may end before a planned change; then its leaving nodes await the last save.
            is_free = is_free and not (self._cluster.ended and node in self._cluster.ended.nodes)
            since_s = max(evicted_s, self.faults.end_s)
            if is_free and self._cluster.loop.now_s - since_s > _LEAVES_S:
                self._fail(f"node {node} is no member for long, and lives")

    def _stuck_text(self) -> str:
        leader = self._cluster.leader
        if not leader.is_serving:
            return "the coordinator does not serve"
        state = leader.leadership.state
        return f"epoch {state.epoch} of {state.nodes} waits for {state.phase.value}"


# -- what must hold of a single plan: it covers the model, and can be run to its end ---------------


def wrong_in(plan: Plan, *, num_layers: int, num_microbatches: int) -> Iterator[str]:
    """The errors of a plan in words; none if it is correct."""
    for route in (*plan.routes, *(pipeline.route() for pipeline in plan.pipelines)):
        ends = [0, *(hop.end_layer for hop in route)]
        starts = [*(hop.first_layer for hop in route), num_layers]
        if ends != starts:
            yield f"{route} does not cover the model once"
    yield from _wrong_in_work(plan)
    if len(plan.routes) != num_microbatches:
        yield f"{len(plan.routes)} microbatches"


def _wrong_in_work(plan: Plan) -> Iterator[str]:
    """Errors in the work of a plan: hops on ranks without their layers, ranks without work, or a
    schedule that deadlocks."""
    layers = {rank: set(own) for rank, own in plan.layers_by_rank.items()}
    hops = {hop for route in plan.routes for hop in route}
    for hop in hops:
        if not set(range(hop.first_layer, hop.end_layer)) <= layers.get(hop.rank, set()):
            yield f"{hop} is computed where its layers are not"
            return
    if idle := layers.keys() - {hop.rank for hop in hops}:
        yield f"ranks {sorted(idle)} have no work in {plan.routes}"
    try:
        plan_schedule(plan)
    except DeadlockError as error:
        yield f"the schedule of epoch {plan.epoch} does not end: {error}"


def is_another(plan: Plan, before: Plan) -> bool:
    """Whether two plans differ in more than their epoch."""
    return replace(plan, epoch=before.epoch) != before


def num_exposed(plan: Plan, trusted: Collection[int]) -> int:
    """The number of layers that no trusted node computes."""
    per_node = plan.devices_per_node
    of_trusted = [layers for r, layers in plan.layers_by_rank.items() if r // per_node in trusted]
    return plan.num_layers - len(set().union(*of_trusted))
