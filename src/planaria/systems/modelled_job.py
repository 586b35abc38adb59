"""A job whose iterations, pauses and saves are modelled, as every system that is compared has them.

The job trains, or pauses for some phases in a row, or waits for nodes. What it does when nodes are
lost or join is the business of a `Behaviour`, one for each system. Iterations between two events
are booked together.

Not modelled, for any of these systems: work that is given to slow nodes. The slowest node at work
sets the pace of all.
"""

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from math import floor, inf
from typing import Protocol

from planaria.core.plan import Plan
from planaria.observe.ledger import Category
from planaria.observe.recoveries import SourceTier
from planaria.systems.account import Account
from planaria.systems.save_times import Pending, saves_after
from planaria.systems.system import Setting

Phase = tuple[Category, float]  # What the job does while it does not train, and the seconds.


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How fast a job trains.

    Attributes:
        iteration_s: seconds of an iteration on nodes of the profile's speed, without stalls.
        stall_s: seconds of each iteration, on average, in which training stands still for saves.
        redundant_share: share of `iteration_s` that is redundant work, 0 to 1.
        nodes: nodes at work.
    """

    iteration_s: float
    nodes: frozenset[int]
    stall_s: float = 0.0
    redundant_share: float = 0.0


class StoredSaves:
    """The saves of a job in storage that all nodes reach, of which the newest complete one counts.

    A save is due after each `every` iterations, 0: never, and is begun unless one is being written
    (save_times.py). One that is being written when nodes are lost is lost, too.

    Attributes:
        write_s: seconds from the commit that a save is of until it is complete.
        newest: number of iterations of the newest complete save; 0 for the start.
    """

    def __init__(self, *, every: int, write_s: float) -> None:
        self.every, self.write_s, self.newest = every, write_s, 0
        self._pending: Pending | None = None

    def on_commits(self, number: int, num_committed: int, now_s: float, *, pace_s: float) -> None:
        """Begins and completes saves, after iterations of `pace_s` seconds, the last of which ends
        now."""
        complete, self._pending = saves_after(
            number,
            num_committed,
            now_s,
            pace_s=pace_s,
            every=self.every,
            write_s=self.write_s,
            pending=self._pending,
        )
        self.newest = max(self.newest, complete)

    def complete_by(self, now_s: float) -> None:
        """Completes the save that is being written, if it is by now."""
        if self._pending is not None and self._pending[0] <= now_s:
            self.newest, self._pending = max(self.newest, self._pending[1]), None

    def begin(self, num_committed: int, now_s: float, *, write_s: float) -> None:
        """Begins a save besides those after `every` iterations; it is complete after `write_s`."""
        self.complete_by(now_s)
        self._pending = (now_s + write_s, num_committed)

    @property
    def is_any(self) -> bool:
        """Whether there is a save, or will be one before anything else is trained."""
        return self.newest > 0 or (self._pending is not None and self._pending[1] > 0)

    def left_s(self, now_s: float) -> float:
        """Seconds until the save that is being written is complete; 0 if none is."""
        return max(0.0, self._pending[0] - now_s) if self._pending is not None else 0.0

    def interrupt(self, now_s: float) -> None:
        """Loses the save that is being written now."""
        self.complete_by(now_s)
        self._pending = None


class Behaviour(Protocol):
    """What a system does when something happens to its nodes."""

    def begin(self, job: "ModelledJob") -> None:
        """Sets the pace with which the job begins, after its start."""

    def on_lost(self, job: "ModelledJob", nodes: tuple[int, ...], now_s: float) -> None:
        """Answers the loss of members; `job.members` has them no more."""

    def on_joined(self, job: "ModelledJob", nodes: tuple[int, ...], now_s: float) -> None:
        """Answers nodes that are new in `job.members`, or that are there again."""

    def on_notice(self, job: "ModelledJob", nodes: tuple[int, ...], deadline_s: float) -> None:
        """Answers the notice that members will be lost at `deadline_s`."""


class ModelledJob:
    """A job of one system in virtual time; implements `SystemRun`.

    Attributes:
        account: seconds and samples so far.
        members: nodes that are there and have started.
        saves: saves of the job; those of `every` 0 if the system has none.
        absent: nodes that are not there at the start.
    """

    def __init__(
        self,
        setting: Setting,
        behaviour: Behaviour,
        saves: StoredSaves,
        *,
        absent: Collection[int] = (),
    ) -> None:
        self.setting, self.saves = setting, saves
        self.account = Account(setting.job.training.global_batch_size)
        self.absent = frozenset(absent)
        self.members = set(range(setting.num_nodes)) - self.absent
        self._behaviour = behaviour
        self._pace = Pace(iteration_s=inf, nodes=frozenset())
        self._speeds: dict[int, float] = {}
        self._arrivals: dict[int, int] = {}  # Number of times that each starting node was back.
        self._deadlines_s: dict[int, float] = {}  # Times at which nodes will be gone, as told.
        self._queue: list[tuple[float, int, Callable[[float], None]]] = []
        self._num_posted = 0
        self._phases: deque[tuple[Category, float]] = deque()  # With the times at which they end.
        self._trains = True  # Whether training follows the phases; else the job waits for nodes.
        self._has_begun = self._has_trained = False
        self._has_ended = True  # Whether the job does not run, and is not started again yet.
        self._starts_until_s = 0.0  # Time until which not every node holds its state.
        self._at_commit: Callable[[float], None] | None = None
        self._iteration_s = self._next_commit_s = inf
        self._left = 1.0  # Share of the iteration in flight that was not done before a pause.
        self._shares: dict[Category, float] = {}
        behaviour.begin(self)
        if self._pace.nodes:
            self.go_on(0.0)
        else:  # The nodes are too few or too small.
            self.wait(0.0)

    # -- what happens to nodes --------------------------------------------------------------------

    def lose(self, nodes: tuple[int, ...], now_s: float) -> None:
        """Nodes are gone; see `SystemRun`."""
        self.run_until(now_s)
        self.account.num_failures += 1
        lost = tuple(node for node in nodes if node in self.members)
        for node in nodes:
            self.members.discard(node)
            self._speeds.pop(node, None)
            self._arrivals.pop(node, None)
            self._deadlines_s.pop(node, None)
        if lost:
            self._behaviour.on_lost(self, lost, now_s)
            self._measure(now_s)

    def take_back(self, nodes: tuple[int, ...], now_s: float) -> None:
        """Nodes are there again; see `SystemRun`."""
        self.run_until(now_s)
        self._num_posted += 1
        self._arrivals |= dict.fromkeys(nodes, self._num_posted)
        self.post(
            now_s + self.setting.costs.node_start_s, partial(self._join, nodes, self._num_posted)
        )

    def give_notice(self, nodes: tuple[int, ...], now_s: float, *, deadline_s: float) -> None:
        """Nodes are told that they will be gone; see `SystemRun`."""
        self.run_until(now_s)
        self._deadlines_s |= dict.fromkeys(nodes, deadline_s)
        self._tell_notice(nodes, deadline_s)

    def _tell_notice(self, nodes: Collection[int], deadline_s: float) -> None:
        members = tuple(node for node in nodes if node in self.members)
        if members:
            self._behaviour.on_notice(self, members, deadline_s)

    def set_speeds(self, speeds: Mapping[int, float], now_s: float) -> None:
        """Nodes go on at other speeds; see `SystemRun`."""
        self.run_until(now_s)
        self._speeds |= speeds
        self._measure(now_s)

    def _join(self, nodes: Sequence[int], arrival: int, now_s: float) -> None:
        """Makes members of nodes that have started, unless they are gone again."""
        started = tuple(node for node in nodes if self._arrivals.get(node) == arrival)
        for node in started:
            del self._arrivals[node]
        self.members.update(started)
        if started:
            self._behaviour.on_joined(self, started, now_s)
            self._measure(now_s)
        for node in started:  # The notice may have come while it started.
            if self._deadlines_s.get(node, 0.0) > now_s:
                self._tell_notice((node,), self._deadlines_s[node])

    # -- what behaviours do -----------------------------------------------------------------------

    @property
    def is_training(self) -> bool:
        """Whether an iteration is in flight."""
        return self._trains and not self._phases

    @property
    def is_waiting(self) -> bool:
        """Whether the job waits for nodes, or will after its present phases."""
        return not self._trains

    @property
    def iteration_s(self) -> float:
        """The seconds of an iteration at the present pace."""
        return self._iteration_s

    def iteration_left_s(self, now_s: float) -> float:
        """Seconds until the iteration in flight is over; 0 if none is."""
        return self._next_commit_s - now_s if self.is_training else 0.0

    @property
    def trains_at_s(self) -> float:
        """The time at which the present phases, of which there is one or more, are over."""
        return self._phases[-1][1]

    def train_at(self, pace: Pace, now_s: float) -> None:
        """Trains at another pace; an iteration in flight goes on with it."""
        self._pace = pace
        self._measure(now_s)

    def start_left_s(self, now_s: float) -> float:
        """Seconds for which the job starts again; 0 if it does not."""
        return max(0.0, self._starts_until_s - now_s)

    def load_s(self, num_bytes: int) -> float:
        """Seconds in which a node loads so many bytes of the newest save; 0 before the first one,
        when the job begins from its start."""
        return num_bytes / self.setting.costs.save_bytes_per_s if self.saves.is_any else 0.0

    def interrupt(self, now_s: float, *, lost_s: float = inf) -> None:
        """Ends what the job does, but its first start: the iteration in flight is lost, and a save
        that is written.

        Args:
            lost_s: upper bound on the seconds of the iteration that are lost; what was done before
                counts for the next one.
        """
        self.saves.interrupt(now_s)
        self._at_commit = None
        self._stop(now_s, lost_s=lost_s)
        self.recover(SourceTier.LIVE)
        if lost_s == inf:
            self._lose_in_flight()

    def pause(self, now_s: float) -> None:
        """Ends training for now, if it is under way; what is done of the iteration in flight counts
        later."""
        if self.is_training:
            self._stop(now_s, lost_s=0.0)

    def wait(self, now_s: float, *phases: Phase) -> None:
        """Goes through phases after those that there are, and waits for nodes then."""
        self._trains = False
        self._add_phases(now_s, phases)

    def go_on(self, now_s: float, *phases: Phase) -> None:
        """Goes through phases after those that there are, and trains then. Where nothing was
        trained so far, the job starts instead."""
        if not self._has_begun:
            phases = ((Category.STARTUP, self.setting.costs.startup_s),)
        self._trains, self._has_begun, self._has_ended = True, True, False
        self._add_phases(now_s, phases)

    def start_again(self, now_s: float, *phases: Phase) -> None:
        """Goes on after phases until whose end not every node holds its state."""
        self.go_on(now_s, *phases)
        self._starts_until_s = self.trains_at_s

    def at_commit(self, act: Callable[[float], None]) -> None:
        """Calls a function after the next iteration, with that time, unless the job is interrupted
        before; only the newest such function is called."""
        self._at_commit = act

    def recover(self, tier: SourceTier) -> None:
        """Says that a job that has stopped goes on with a state that this tier keeps, or an older
        one if it says so, too. One that has not trained yet has none to recover."""
        if self._has_trained:
            self.account.recover(tier)

    def end(self) -> None:
        """Ends the job, which will be started again from its newest save, or from one that is being
        written; what was kept of an iteration is lost."""
        self._phases.clear()
        self._lose_in_flight()
        self.recover(SourceTier.DISK if self.saves.is_any else SourceTier.START)
        if not self._has_ended:
            self._has_ended = True
            self.account.num_restarts += 1

    def go_back_to_save(self) -> None:
        """Ends the job and undoes all iterations since the newest save."""
        self.end()
        self.account.go_back(self.saves.newest)

    def post(self, at_s: float, happen: Callable[[float], None]) -> None:
        """Calls a function at a time, with that time."""
        self._num_posted += 1
        heappush(self._queue, (at_s, self._num_posted, happen))

    # -- time -------------------------------------------------------------------------------------

    def run_until(self, now_s: float) -> None:
        """Goes on until a time; see `SystemRun`."""
        while self._queue and self._queue[0][0] <= now_s:
            at_s, _, happen = heappop(self._queue)
            self._advance(at_s)
            happen(at_s)
        self._advance(now_s)

    def _lose_in_flight(self) -> None:
        """Loses what was done of an iteration before a pause."""
        self.account.lose_part()
        self._left = 1.0

    def _stop(self, now_s: float, *, lost_s: float) -> None:
        self.account.settle(self.saves.newest)
        if self.is_training:
            self._has_trained = True
            self.account.close_recovery()
            kept_until_s = max(self.account.now_s, now_s - lost_s)
            done_s = self._iteration_s - (self._next_commit_s - kept_until_s)
            self._left = 1.0 - max(0.0, done_s) / self._iteration_s
            self.account.train_part(kept_until_s, self._shares)
            self.account.spend(Category.REDO, now_s)
        self._phases = deque(phase for phase in self._phases if phase[0] is Category.STARTUP)
        self._trains = False

    def _add_phases(self, now_s: float, phases: Sequence[Phase]) -> None:
        end_s = self._phases[-1][1] if self._phases else now_s
        for category, seconds in phases:
            end_s += seconds
            self._phases.append((category, end_s))
        if self._trains:
            self._next_commit_s = end_s + self._left * self._iteration_s

    def _advance(self, now_s: float) -> None:
        """Books phases and commits iterations that end by a time."""
        self._spend_phases(now_s)
        while self._at_commit is not None and self.is_training and self._next_commit_s <= now_s:
            act, self._at_commit = self._at_commit, None
            self._commit(1)
            act(self.account.now_s)
            self._spend_phases(now_s)
        if self.is_waiting and not self._phases:
            self.account.spend(Category.IDLE, now_s)
        elif self.is_training and self._next_commit_s <= now_s:
            self._commit(1 + floor((now_s - self._next_commit_s) / self._iteration_s))

    def _spend_phases(self, now_s: float) -> None:
        while self._phases:
            category, end_s = self._phases[0]
            self.account.spend(category, min(end_s, now_s))
            if end_s > now_s:
                return
            self._phases.popleft()

    def _commit(self, number: int) -> None:
        if self.account.has_part and number > 1:  # The others are alike.
            self._commit(1)
            number -= 1
        self._has_trained = True
        end_s = self._next_commit_s + (number - 1) * self._iteration_s
        self.account.train(number, end_s, self._shares)
        num_committed = self.account.num_iterations
        self.saves.on_commits(number, num_committed, end_s, pace_s=self._iteration_s)
        self.account.settle(self.saves.newest)
        self._next_commit_s = end_s + self._iteration_s
        self._left = 1.0

    def _measure(self, now_s: float) -> None:
        """Sets the seconds of an iteration, and what they are spent on."""
        pace, before_s = self._pace, self._iteration_s
        slowest = min((self._speeds.get(node, 1.0) for node in pace.nodes), default=1.0)
        self._iteration_s = pace.iteration_s / slowest + pace.stall_s
        stall = pace.stall_s / self._iteration_s
        idle = 1.0 - len(pace.nodes) / max(len(self.members), len(pace.nodes), 1)
        at_work = (1.0 - stall) * (1.0 - idle)
        self._shares = {
            Category.USEFUL: at_work * (1.0 - pace.redundant_share),
            Category.REDUNDANT: at_work * pace.redundant_share,
            Category.IDLE: (1.0 - stall) * idle,
            Category.CHECKPOINT_STALL: stall,
        }
        if self._trains and before_s != self._iteration_s and before_s < inf:
            since_s = self._phases[-1][1] if self._phases else now_s
            left = max(0.0, self._next_commit_s - since_s) / before_s
            self._next_commit_s = since_s + left * self._iteration_s


# -- what several systems need --------------------------------------------------------------------


class Places:
    """Which node is at each of a fixed number of places; None: it is empty."""

    def __init__(self, num_places: int, nodes: Sequence[int]) -> None:
        self.nodes: list[int | None] = [None] * num_places
        self.fill(nodes)

    def drop(self, nodes: Collection[int]) -> tuple[int, ...]:
        """Empties the places of nodes that are lost; returns these places."""
        emptied = tuple(place for place, node in enumerate(self.nodes) if node in set(nodes))
        for place in emptied:
            self.nodes[place] = None
        return emptied

    def fill(self, nodes: Sequence[int]) -> tuple[int, ...]:
        """Gives empty places to nodes that have none, in order; returns these places."""
        free = sorted(set(nodes).difference(self.at_work))
        filled = tuple(self.empty[: len(free)])
        for place, node in zip(filled, free, strict=False):
            self.nodes[place] = node
        return filled

    def move(self, source: int, target: int) -> None:
        """Moves the node at one place to another one, which is empty."""
        assert self.nodes[target] is None
        self.nodes[target], self.nodes[source] = self.nodes[source], None

    @property
    def empty(self) -> tuple[int, ...]:
        """The empty places."""
        return tuple(place for place, node in enumerate(self.nodes) if node is None)

    @property
    def at_work(self) -> frozenset[int]:
        """The nodes that have a place."""
        return frozenset(node for node in self.nodes if node is not None)


def bytes_by_place(setting: Setting, plan: Plan) -> tuple[int, ...]:
    """The bytes of the state at each place of a plan, whose node p is at place p."""
    per_node = setting.job.cluster.devices_per_node
    held: list[set[int]] = [set() for _ in plan.nodes]
    for rank, layers in plan.held_by_rank.items():
        held[rank // per_node].update(layers)  # The devices of a stage share its state.
    return tuple(sum(setting.layer_bytes[layer] for layer in layers) for layers in held)


def remote_s(setting: Setting) -> float:
    """Seconds in which all nodes together write or read a save of the whole state."""
    return sum(setting.layer_bytes) / setting.num_nodes / setting.costs.save_bytes_per_s


def saves_of_job(setting: Setting) -> StoredSaves:
    """The saves that the job's own configuration asks for, by all nodes together."""
    return StoredSaves(every=setting.job.checkpoint.persist_every, write_s=remote_s(setting))


def save_stall_s(setting: Setting) -> float:
    """Seconds of each iteration, on average, for which these saves stop training."""
    every = setting.job.checkpoint.persist_every
    return setting.costs.save_stall_s / every if every else 0.0
