"""A job of planaria in virtual time: the real coordinator, with nodes that are modelled.

The coordinator's function (coordinator/step.py) gets the events that it would get, and its policy
answers them. What its commands cost comes from measurements (`RecoveryCosts`) and from the profile:
the seconds until members answer, until layers have moved, and of an iteration.

Iterations between two events are jumped over: the coordinator gets no reports of them but those of
the last one, which it gets in full. While it watches for a better plan, or for the time at which a
node may join, the jumps become longer step by step, so that each doubling of the time since the
last event is noticed. After the speed of a node has changed none is jumped over, until the
coordinator has as many reports as it needs to believe in it (coordinator/learning/slowness.py).

Not modelled: nodes that hang, workers that crash, and coordinators that fail before all nodes do.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from math import floor, inf

from planaria.coordinator.commands import (
    AnswersFound,
    Command,
    DecisionRecorded,
    End,
    Evict,
    MembersRecorded,
    Notify,
    Publish,
    Published,
    RecordDecision,
    RecordMembers,
    Tell,
)
from planaria.coordinator.frozen import replace
from planaria.coordinator.job_rules import Rules
from planaria.coordinator.learning.profile_correction import iteration_s
from planaria.coordinator.learning.slowness import WINDOW, work_s_by_rank
from planaria.coordinator.start import first_step
from planaria.coordinator.state import JobState, Phase
from planaria.coordinator.step import Event, step_together
from planaria.core.copies import Label, LayerCopy
from planaria.core.findings import Findings
from planaria.core.messages import (
    AT_COMMIT,
    Abort,
    IterationDone,
    NodeLost,
    NoticeTaken,
    SaveLayers,
    Shutdown,
    StartEpoch,
    StopRequested,
    ToNode,
)
from planaria.core.persistent_map import PersistentMap
from planaria.core.plan import NodeKind
from planaria.core.records import (
    AwaitingMachine,
    Decided,
    Recovering,
    Running,
    Starting,
    ToLauncher,
)
from planaria.observe.ledger import Category
from planaria.observe.open_events import recovery_tier
from planaria.planner.problem import Problem
from planaria.planner.reroute.reroutes import PricedPlan, expected_times
from planaria.policies.building import transfer_s
from planaria.policies.traits import TRAITS
from planaria.policies.unequal_nodes import with_kinds
from planaria.simulator.economics.virtual_foresight import VirtualForesight
from planaria.simulator.economics.virtual_nodes import VirtualMachines, VirtualNodes
from planaria.simulator.economics.virtual_saves import VirtualSaves
from planaria.systems.account import Account
from planaria.systems.system import RecoveryCosts

PlanOf = Callable[[int], PricedPlan | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedRun:
    """A run that a simulated one repeats, as far as it is known.

    Attributes:
        on_notice: callback for what the coordinator tells its launcher, with the time.
        seconds_of: function from the state of the coordinator and the time to the seconds that an
            iteration takes; by default they are those that it predicts.
        evaluated_s: seconds of each iteration, on average, in which the job evaluates instead.
        findings: deviations from the profile that the coordinator knows from the start.
        head_lives: whether the coordinator survives the loss of all nodes; else the job ends.
    """

    on_notice: Callable[[ToLauncher, float], None] = lambda _message, _now_s: None
    seconds_of: Callable[[JobState, float], float] = lambda state, _now_s: iteration_s(state)
    evaluated_s: float = 0.0
    findings: Findings = field(default_factory=Findings)
    head_lives: bool = False


class PlanariaRun:
    """One job; implements `SystemRun`.

    Args:
        rules: rules of the job that begins.
        plan_of: function from a number of nodes to the plan of a job that begins on them; None if
            they are too few.
        problem: planning problem of the job.
        absent: machines that are not there at the start.
        replay: the run that this one repeats; None: it repeats none.

    Attributes:
        account: seconds and samples so far.
        machines: machines of the cluster.
    """

    def __init__(
        self,
        rules: Rules,
        plan_of: PlanOf,
        costs: RecoveryCosts,
        problem: Problem,
        *,
        absent: Collection[int] = (),
        replay: RepeatedRun | None = None,
    ) -> None:
        self._replay, self._per_node = replay or RepeatedRun(), rules.job.cluster.devices_per_node
        self.account = Account(rules.job.training.global_batch_size)
        self._rules, self._plan_of, self._costs, self._problem = rules, plan_of, costs, problem
        self._queue: list[tuple[float, int, Callable[[float], None]]] = []
        self._num_posted = 0
        num_machines = rules.job.cluster.nodes + rules.job.cluster.standby
        self.machines = VirtualMachines(m for m in range(num_machines) if m not in absent)
        self._num_reported = 0  # Iterations that are still to be reported one by one.
        self._nodes = VirtualNodes(rules.layout, devices_per_node=self._per_node)
        self._state: JobState
        self._saves = VirtualSaves(rules, costs)
        self._order: StartEpoch | None = None
        self._is_restarting = self._is_training = self._has_begun = False
        self._has_ended, self._category = True, Category.IDLE
        self._restart_if_enough(0.0)

    def _begin(self, rules: Rules, now_s: float, *, takes_s: float, category: Category) -> None:
        """Begins the job anew on all machines that can run nodes, as far as they can have work."""
        plan = self._plan_of(len(self.machines.started))
        assert plan is not None
        epoch = self._state.epoch + 1 if self._has_begun else 0
        self._rules, self._category, self._has_begun = rules, category, True
        self._is_training = self._has_ended = self._is_recovering = self._is_stopping = False
        self._next_commit_s, self._iteration_s = inf, 0.0
        self._shares: dict[Category, float] = {}
        self._stride = 1
        # The first version of copies of this epoch, and the copies; none before it trains.
        self._first_version, self._copies = Label(0, epoch, 0), tuple[LayerCopy, ...]()
        self._nodes = VirtualNodes(rules.layout, devices_per_node=self._per_node)
        for machine in sorted(self.machines.started):
            self._nodes.add(machine)
        first = replace(plan.plan, epoch=epoch)
        self._state, commands = first_step(rules, first, term=1, predicted_s=plan.iteration_s)
        learning = replace(self._state.learning, findings=self._replay.findings)
        self._state = replace(self._state, learning=learning)
        self._carry_out(commands, now_s)
        self._post(now_s + takes_s, partial(self._arrive, tuple(self._nodes.nodes)))

    @property
    def num_committed(self) -> int:
        """The number of iterations that the coordinator knows to be committed."""
        return self._state.commits.next_iteration

    # -- what happens to nodes --------------------------------------------------------------------

    def lose(self, nodes: tuple[int, ...], now_s: float) -> None:
        """Nodes are gone; see `SystemRun`."""
        self.run_until(now_s)
        self.account.num_failures += 1
        lost = [node for machine in nodes if (node := self._nodes.node_on(machine)) >= 0]
        is_restarting = self._is_restarting and not self.machines.started.isdisjoint(nodes)
        for machine in nodes:
            self.machines.lose(machine)
            self._nodes.remove_machine(machine)
        if not self._has_ended and any(self._state.is_member(node) for node in lost):
            self._interrupt(now_s)
        # A start begins once more; without any node there is no job.
        if is_restarting if self._has_ended else not (self._nodes.nodes or self._replay.head_lives):
            self._end(now_s)
        if self._has_ended:
            return
        known_s = now_s + self._costs.detect_s
        for node in lost:
            event = NodeLost(node=node, reason="its machine is gone")
            self._post(known_s, partial(self._deliver, (event,)))

    def take_back(self, nodes: tuple[int, ...], now_s: float) -> None:
        """Nodes are there again; see `SystemRun`."""
        self.run_until(now_s)
        starts_at_s = now_s + self._costs.node_start_s
        for machine in nodes:
            number = self.machines.take_back(machine, starts_at_s)
            self._post(starts_at_s, partial(self._start_node, machine, number))

    def give_notice(self, nodes: tuple[int, ...], now_s: float, *, deadline_s: float) -> None:
        """Nodes are told that they will be gone; see `SystemRun`."""
        self.run_until(now_s)
        self.machines.deadlines_s |= dict.fromkeys(nodes, deadline_s)
        for machine in nodes:
            self._tell_notice(machine, now_s)

    def _tell_notice(self, machine: int, now_s: float) -> None:
        """Has the node of a machine say that the machine will be gone, if it knows that."""
        after_s = self.machines.deadlines_s.get(machine, 0.0) - now_s
        node = -1 if self._has_ended else self._nodes.node_on(machine)
        if node >= 0 and after_s > 0.0:
            rank = node * self._per_node
            self._deliver((NoticeTaken(node=node, rank=rank, after_s=after_s),), now_s)

    def set_speeds(self, speeds: Mapping[int, float], now_s: float) -> None:
        """Nodes go on at other speeds; see `SystemRun`."""
        self.run_until(now_s)
        self.machines.set_speeds(speeds)
        # With a catalog these seconds, which no processors share, would correct the profile too.
        if self.machines.speeds and self._rules.profile is None and self._rules.catalog is None:
            self._rules = replace(self._rules, profile=self._problem.profile)
        self._num_reported = WINDOW + 1  # The one in flight has two speeds.
        if self._is_training:
            left = (self._next_commit_s - now_s) / self._iteration_s
            self._measure_iteration()
            self._next_commit_s = now_s + left * self._iteration_s

    def stand_still(self, now_s: float, *, until_s: float) -> None:
        """Training, if there is any, stops until a time; the iteration in flight is lost."""
        self.run_until(now_s)
        if self._is_training:
            self.account.stop(now_s)
            self.account.spend(Category.RESTART, until_s)
            self._next_commit_s = until_s + self._iteration_s

    def _start_node(self, machine: int, number: int, now_s: float) -> None:
        """Starts a node on a machine that is back, unless it is gone again."""
        is_there = self.machines.start(machine, number)
        self._restart_if_enough(now_s)
        if is_there and not self._has_ended and self._nodes.node_on(machine) < 0:
            self._arrive((self._nodes.add(machine),), now_s)

    def _arrive(self, nodes: Sequence[int], now_s: float) -> None:
        live = [node for node in nodes if node in self._nodes.nodes]
        self._deliver([event for node in live for event in self._nodes.arrivals(node)], now_s)
        for machine in map(self._nodes.machine_of, live):
            self._tell_notice(machine, now_s)  # It came while the machine started.

    # -- time -------------------------------------------------------------------------------------

    def run_until(self, now_s: float) -> None:
        """Goes on until a time; see `SystemRun`."""
        while True:
            next_s = self._queue[0][0] if self._queue else inf
            if self._has_trained(min(now_s, next_s)):
                continue
            if next_s > now_s:
                break
            at_s, _, happen = heappop(self._queue)
            self._book(at_s)
            happen(at_s)
        self._book(now_s)

    def _post(self, at_s: float, happen: Callable[[float], None]) -> None:
        self._num_posted += 1
        heappush(self._queue, (at_s, self._num_posted, happen))

    def _book(self, until_s: float) -> None:
        """Books the time until now, unless the job trains: iterations are booked once committed."""
        if not self._is_training:
            self.account.spend(self._category, until_s)

    def _has_trained(self, until_s: float) -> bool:
        """Commits iterations that end by a time; whether there were any."""
        if not self._is_training or self._next_commit_s > until_s:
            return False
        number = 1
        if self._state.change is None and not self._is_stopping:
            number += floor((until_s - self._next_commit_s) / self._iteration_s)
            if self._num_reported:
                number = 1
                self._num_reported -= 1
            elif self._is_watching():
                number = min(number, self._stride)
                self._stride *= 2
        self._commit(number)
        return True

    def _is_watching(self) -> bool:
        """Whether the coordinator may decide something at a commit though nothing happens."""
        state, members, job = self._state, self._state.membership, self._rules.job
        traits, is_searched = TRAITS[job.resilience.policy], state.search.is_plan_searched
        num_standby = job.cluster.standby if len(state.nodes) >= job.cluster.nodes else 0
        is_waiting = len(members.candidates) > num_standby or bool(members.leaving or state.idle)
        is_hurried = bool(state.plan.gone) or self._rules.looks_ahead
        return is_waiting or (traits.can_improve and not is_searched and is_hurried)

    def _commit(self, number: int) -> None:
        """Commits iterations; the coordinator gets the reports of the last one."""
        state = self._state
        end_s = self._next_commit_s + (number - 1) * self._iteration_s
        took_s = self._iteration_s if number > 1 else end_s - self.account.now_s
        self.account.train(number, end_s, self._shares)
        commits = state.commits
        last = commits.next_iteration + number - 1
        commits = replace(commits, next_iteration=last, furthest=max(commits.furthest, last))
        self._state = replace(state, commits=commits)
        self._next_commit_s = end_s + self._iteration_s
        if number > 1:
            self._save_commits(number - 1, last, end_s - self._iteration_s)
        switch = state.switch
        reports = self._nodes.reports(
            self._nodes.live_ranks_of(state.plan.all_ranks),
            epoch=state.epoch,
            iteration=last,
            seconds=took_s - self._replay.evaluated_s,
            computing_s=self._computing_s(),
            ends=self._is_stopping,
            switches=switch is not None and switch.is_told and not self._is_stopping,
        )
        self._note_reports(reports[:-1])
        self._deliver(reports[-1:], end_s, is_commit=True)
        self._save_commits(1, last + 1, end_s)
        if self._state.phase is Phase.SAVING and self._is_training:
            self._interrupt(end_s)
            self._category = Category.CHECKPOINT_STALL
            self._post_last_save(self._state.epoch, last + 1, end_s)
        elif self._state.epoch != state.epoch and self._state.phase is Phase.TRAINING:
            self._complete_copies()
            self._is_training, self._category = False, Category.REGROUP
            self._post_first_save(self._order, last + 1, end_s)
            self._post_ready(end_s + self._costs.switch_s, self._costs.switch_s, 0.0)

    def _save_commits(self, number: int, num_committed: int, now_s: float) -> None:
        """Saves as the job says after some more commits, the last of which is now."""
        each_s = self._iteration_s
        published = self._saves.on_commits(number, num_committed, now_s, iteration_s=each_s)
        self._tell_saved(published, now_s)

    def _note_reports(self, reports: Sequence[IterationDone]) -> None:
        """Has the coordinator know these reports of one iteration, all of which are open.

        It would note them one by one, and do nothing else before the last rank has reported.
        """
        state = self._state
        assert state.phase is Phase.TRAINING
        assert state.plan.epoch == state.epoch
        if reports:
            iteration, known = reports[0].iteration, state.commits.reports
            notes = {**known.get(iteration, {}), **{report.rank: report for report in reports}}
            commits = replace(state.commits, reports={**known, iteration: PersistentMap(notes)})
            self._state = replace(state, commits=commits)

    def _interrupt(self, now_s: float) -> None:
        """Stops training; the iteration in flight is lost."""
        if self._is_training:
            self._tell_saved(self._saves.complete_by(now_s), now_s)
            self.account.stop(now_s)
            self._complete_copies()
        self._saves.interrupt()
        self._is_training, self._category = False, Category.DETECT

    def _computing_s(self) -> dict[int, float]:
        """The seconds that each rank computes in an iteration; empty if no node is or was slow."""
        plan, profile, per_node = self._state.plan, self._rules.profile, self._per_node
        if profile is None or not (self.machines.speeds or self._state.speeds):
            return {}
        slow = self._nodes.slow_members(plan, self.machines.speeds)
        return {
            r: s / slow.get(r // per_node, 1.0) for r, s in work_s_by_rank(plan, profile).items()
        }

    def _plan_s(self) -> float:
        """The seconds of an iteration of the plan, its nodes as fast as they are now."""
        plan = self._state.plan
        slow = self._nodes.slow_members(plan, self.machines.speeds)
        plan_s = self._replay.seconds_of(self._state, self.account.now_s)
        if slow == plan.slow_nodes:
            return plan_s
        slower = with_kinds(plan, {n: NodeKind(s) for n, s in slow.items()})
        slower_s = expected_times(self._problem, slower).iteration_s
        return slower_s * plan_s / iteration_s(self._state)

    def _measure_iteration(self) -> None:
        """Sets the seconds of an iteration of the plan, and what they are spent on."""
        state, every = self._state, self._rules.job.checkpoint.persist_every
        plan_s, evaluated_s = self._plan_s(), self._replay.evaluated_s
        stall_s = self._costs.save_stall_s / every if every else 0.0
        self._iteration_s = plan_s + stall_s + evaluated_s
        idle = 1.0 - len(state.plan.nodes) / max(len(state.nodes), len(state.plan.nodes))
        seconds = {
            Category.USEFUL: plan_s * (1.0 - idle),
            Category.IDLE: plan_s * idle,
            Category.EVALUATION: evaluated_s,
            Category.CHECKPOINT_STALL: stall_s,
        }
        self._shares = {category: s / self._iteration_s for category, s in seconds.items()}

    # -- the coordinator --------------------------------------------------------------------------

    def _deliver(self, events: Sequence[Event], now_s: float, *, is_commit: bool = False) -> None:
        """Gives the coordinator events of one moment, and carries out what it commands."""
        if self._has_ended or not events:
            return
        if not is_commit:
            self._stride = 1
        self._state, commands = step_together(self._rules, self._state, events, now_s)
        self._carry_out(commands, now_s)
        if self._is_training and self._next_commit_s == inf:
            self._begin_iterations(now_s)

    def _begin_iterations(self, now_s: float) -> None:
        """Begins the first iteration of an epoch, in which silent ranks get their layers."""
        self._measure_iteration()
        if self.machines.speeds or self._state.speeds:
            self._num_reported = WINDOW + 1  # The first one of an epoch does not count.
        self._look_ahead(now_s)
        wave_s = 0.0
        if self._state.plan.silent and self._order is not None:
            wave_s = self._transfer_s(self._order)
        self._next_commit_s = now_s + max(self._iteration_s, wave_s)

    def _look_ahead(self, now_s: float) -> None:
        """Has answers for the plan of the new epoch searched, if the job looks ahead."""
        policy, epoch = self._rules.policy, self._state.epoch
        if not isinstance(policy, VirtualForesight):
            return

        def find(at_s: float) -> None:
            if epoch == self._state.epoch and not self._has_ended:
                policy.is_ready = True
                self._deliver((AnswersFound(epoch),), at_s)

        policy.is_ready = False
        self._post(now_s + self._costs.look_ahead_s, find)

    def _transfer_s(self, order: StartEpoch) -> float:
        transfers = [transfer for transfers in order.rounds for transfer in transfers]
        return transfer_s(transfers, self._rules.prices, devices_per_node=self._per_node)

    def _carry_out(self, commands: Sequence[Command], now_s: float) -> None:
        for command in commands:
            match command:
                case RecordMembers(members):
                    self._post(now_s, partial(self._deliver, (MembersRecorded(members.epoch),)))
                case RecordDecision(outcome, _):
                    decide = partial(self._deliver, (DecisionRecorded(outcome.epoch),))
                    self._post(now_s + self._costs.decide_s, decide)
                case Tell(message, nodes):
                    self._tell(message, nodes, now_s)
                case Notify(message):
                    self._on_notice(message, now_s)
                case Evict(nodes):
                    self._nodes.leave_out(nodes)
                case Publish(iteration, epoch):
                    self._post(now_s, partial(self._tell_saved, (Published(iteration, epoch),)))
                case End():
                    self._end(now_s)
                case _:
                    pass  # What a save leaves behind on the disk takes no time.

    def _tell(self, message: ToNode, nodes: tuple[int, ...], now_s: float) -> None:
        match message:
            case Abort(epoch=epoch):
                self._post(now_s + self._costs.answer_s, partial(self._answer, epoch))
            case StartEpoch(iteration=iteration):
                self._order = message
                if iteration != AT_COMMIT:
                    self._is_stopping = False  # Whoever still wants a stop says so again.
                    self._start_epoch(message, now_s)
            case SaveLayers(epoch=epoch, iteration=iteration, layers=layers):
                self._category = Category.CHECKPOINT_STALL
                if layers:
                    self._post_last_save(epoch, iteration, now_s)
            case StopRequested():
                self._is_stopping = True
            case Shutdown():
                self._nodes.leave_out(nodes)

    def _answer(self, epoch: int, now_s: float) -> None:
        """All members that live answer that they have left the epoch before."""
        state = self._state
        if epoch != state.epoch or self._has_ended:
            return
        commits = state.commits
        ranks = self._nodes.live_ranks(state.nodes)
        answers = self._nodes.answers(
            ranks, epoch=epoch, age=commits.next_iteration, origin=commits.origin
        )
        self._deliver(answers, now_s)

    def _start_epoch(self, order: StartEpoch, now_s: float) -> None:
        """Has all ranks connect and get their layers."""
        move_s = self._transfer_s(order)
        if order.source and not order.vector:
            move_s += self._saves.load_s(order.plan)
        connected_s = now_s + self._costs.regroup_s
        self._post(connected_s, partial(self._enter_transfer, order.epoch))
        self._post_first_save(order, order.iteration, connected_s + move_s)
        self._post_ready(connected_s + move_s, self._costs.regroup_s, move_s)

    def _enter_transfer(self, epoch: int, _now_s: float) -> None:
        if epoch == self._state.epoch and self._category in (Category.REGROUP, Category.RESTART):
            self._category = Category.TRANSFER

    def _post_ready(self, at_s: float, regroup_s: float, move_s: float) -> None:
        epoch = self._state.epoch

        def begin(now_s: float) -> None:
            state = self._state
            if epoch != state.epoch or self._has_ended:
                return
            since = state.commits.origin.epoch
            self._nodes.hold(state.plan, since=since)
            self._first_version = Label(since, epoch, state.commits.next_iteration)
            self._copies = self._order.copies if self._order is not None else ()
            ranks = self._nodes.live_ranks_of(state.plan.all_ranks)
            ready = self._nodes.ready(ranks, epoch=epoch, regroup_s=regroup_s, transfer_s=move_s)
            self._deliver(ready, now_s)

        self._post(at_s, begin)

    def _on_notice(self, message: ToLauncher, now_s: float) -> None:
        self._replay.on_notice(message, now_s)
        match message:
            case Recovering():
                if self._is_training:
                    self._interrupt(now_s)
                self._is_recovering, self._category = True, Category.DETECT
            case Decided(iteration=iteration):
                self._category = Category.DECIDE
                self.account.recover(recovery_tier(message, self.account.num_iterations))
                if iteration < self.account.num_iterations:
                    self.account.go_back(iteration)
            case Starting() if self._is_recovering:
                self._category = Category.REGROUP
            case AwaitingMachine():
                self._category = Category.IDLE
            case Running():
                self._is_recovering, self._is_training = False, True
                self._next_commit_s = inf  # Another loss may follow at once.

    def _complete_copies(self) -> None:
        """Completes the newest version of the copies in memory that had the time for it, because
        the epoch ends.

        A version begins when the one before is complete.
        """
        first, every = self._first_version, self._rules.version_iterations
        num_complete = (self._state.commits.next_iteration - first.age) // every
        if num_complete and self._copies:
            age = first.age + (num_complete - 1) * every
            self._nodes.keep(first._replace(age=age), self._copies)

    # -- saves, and the end -----------------------------------------------------------------------

    def _post_first_save(self, order: StartEpoch | None, iteration: int, now_s: float) -> None:
        if order is not None and order.persists:  # It may count at once.
            saved_s = self._saves.begin(iteration, now_s)
            self._post(saved_s, lambda s: self._tell_saved(self._saves.complete_by(s), s))

    def _post_last_save(self, epoch: int, iteration: int, now_s: float) -> None:
        saved = self._nodes.save_report(epoch=epoch, iteration=iteration)
        self._post(now_s + self._saves.write_s, partial(self._deliver, (saved,)))

    def _tell_saved(self, published: Sequence[Published], now_s: float) -> None:
        """Tells of complete saves, as those of this epoch, and of those that are removed."""
        for save in [Published(each.iteration, self._state.epoch) for each in published]:
            self.account.settle(save.iteration)
            self._deliver((save, *self._saves.on_published(save)), now_s)

    def _end(self, now_s: float) -> None:
        """The job is over; its user starts it again from the newest save, with enough nodes."""
        self._has_ended, self._is_training, self._category = True, False, Category.IDLE
        self._queue, self._is_restarting = [], False
        for machine, (at_s, number) in self.machines.starting.items():
            self._post(at_s, partial(self._start_node, machine, number))
        self._restart_if_enough(now_s)

    def _restart_if_enough(self, now_s: float) -> None:
        """Starts the job, or starts it again, if it does not run and has nodes enough."""
        is_over = self._has_ended and not self._is_restarting
        if not is_over or self._plan_of(len(self.machines.started)) is None:
            return
        if self._has_begun:
            self._is_restarting, self._category = True, Category.RESTART
            self._post(now_s + self._costs.restart_s, self._restart)
        else:
            takes_s, category = self._costs.startup_s, Category.STARTUP
            self._begin(self._rules, now_s, takes_s=takes_s, category=category)

    def _restart(self, now_s: float) -> None:
        self._is_restarting = False
        saved, source = self._saves.newest
        self.account.start_again(saved)
        rules = replace(self._rules, first_iteration=saved, source=source)
        self._begin(rules, now_s, takes_s=0.0, category=Category.RESTART)
