"""Bugs to plant: the rules of the commit protocol, each switched off."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import pytest

from planaria.coordinator import (
    change,
    leadership,
    outcomes,
    recovery,
    start,
    step,
    transition_choice,
)
from planaria.coordinator.commands import DecisionRecorded
from planaria.coordinator.frozen import replace
from planaria.coordinator.job_rules import Rules
from planaria.coordinator.leadership import Leadership
from planaria.coordinator.membership import trust
from planaria.coordinator.state import JobState, Step
from planaria.core.messages import (
    Abort,
    Fact,
    PeerUnreachable,
    ToNode,
    Welcome,
)
from planaria.core.persistent_map import PersistentMap
from planaria.core.plan import Plan
from planaria.core.records import Decision, Members, Outcome, encode_record
from planaria.planner.problem import Problem
from planaria.planner.reroute.reroutes import PricedPlan
from planaria.policies import reroute
from planaria.policies.value import best_transition
from planaria.protocol import agent_state
from planaria.protocol.agent_state import AgentState
from planaria.schedule import buckets
from planaria.schedule.action import Bucket
from planaria.simulator.modelled import layout
from planaria.simulator.modelled.executor import ModelledLayer, SimulatedExecutor
from planaria.simulator.modelled.layout import Samples
from planaria.simulator.modelled.links import SimulatedLinks
from planaria.simulator.modelled.worker import SimulatedWorker
from planaria.simulator.scenario import content_after
from planaria.store.embedded import EmbeddedStore
from planaria.store.logbook import Logbook
from planaria.store.store import ABSENT, Entry, Guard, Keys

Plant = Callable[[pytest.MonkeyPatch], None]


def members_are_not_recorded(patch: pytest.MonkeyPatch) -> None:
    """Whoever was evicted is a member again for the next coordinator."""

    async def record(self: Logbook, members: Members) -> None:
        if members.epoch == 0:
            await self._put("members", 0, encode_record(members))

    patch.setattr(Logbook, "record_members", record)


def outcomes_are_told_before_they_are_recorded(patch: pytest.MonkeyPatch) -> None:
    """All go on while the record is on its way to the disk."""
    real = Logbook.record_decision
    handles = Leadership.handle

    async def record(self: Logbook, outcome: Outcome, decision: Decision) -> None:
        self.__dict__["late"] = (outcome, decision)

    async def handle(self: Leadership[Any], event: Any, now_s: float) -> None:
        await handles(self, event, now_s)
        if isinstance(event, DecisionRecorded):
            await real(self._logbook, *self._logbook.__dict__.pop("late"))

    patch.setattr(Logbook, "record_decision", record)
    patch.setattr(Leadership, "handle", handle)


def outcomes_do_not_outlive_their_epoch(patch: pytest.MonkeyPatch) -> None:
    """The next epoch asks anew, also where the only witness is lost."""
    real = outcomes.outcome_of

    def outcome(state: JobState) -> Outcome:
        return real(replace(state, commits=replace(state.commits, outcome=None)))

    patch.setattr(recovery, "outcome_of", outcome)


def a_new_coordinator_ignores_outcomes(patch: pytest.MonkeyPatch) -> None:
    """It goes on from the members alone."""
    real = start.restored_step

    def restored(*arguments: Any, **keys: Any) -> Step:
        is_over = keys["decision"] is None or keys["decision"].order.epoch < keys["members"].epoch
        return real(*arguments, **{**keys, **({"outcome": None} if is_over else {})})

    patch.setattr(leadership, "restored_step", restored)


def outcomes_are_written_over(patch: pytest.MonkeyPatch) -> None:
    """A new coordinator decides again what the one before it had written."""
    puts, gets = EmbeddedStore.put, EmbeddedStore.get

    async def put(
        self: EmbeddedStore, key: str, value: bytes, *, guards: Sequence[Guard] = (), **keys: Any
    ) -> int:
        old = [guard for guard in guards if guard.revision != ABSENT]
        return await puts(self, key, value, guards=old, **keys)

    async def get(self: EmbeddedStore, key: str) -> Entry | None:
        return None if "/outcome/" in key else await gets(self, key)

    patch.setattr(EmbeddedStore, "put", put)
    patch.setattr(EmbeddedStore, "get", get)


def older_leaders_may_write(patch: pytest.MonkeyPatch) -> None:
    """The store does not ask who leads."""
    real = Logbook.__init__

    def begin(self: Logbook, store: Any, keys: Keys, *, fence: Guard, **others: Any) -> None:
        real(self, store, keys, fence=Guard(fence.key + "/nobody", ABSENT), **others)

    patch.setattr(Logbook, "__init__", begin)


def ranks_answer_before_they_leave(patch: pytest.MonkeyPatch) -> None:
    """The reductions of the epoch before go on behind the answer."""
    real = SimulatedWorker.on_coordinator_message

    def hear(self: SimulatedWorker, message: ToNode) -> None:
        if not isinstance(message, Abort) or message.epoch <= self.state.epoch:
            real(self, message)
            return
        self.state = replace(self.state, epoch=message.epoch)
        self._answer(message.epoch)
        self.process.after(0.05, lambda: self.links.abort(first_epoch=message.epoch))

    patch.setattr(SimulatedWorker, "on_coordinator_message", hear)


def the_vector_needs_no_gradients(patch: pytest.MonkeyPatch) -> None:
    """A rank enters the sum of the vector before its own reductions are in."""

    async def reduce(
        self: SimulatedExecutor, iteration: int, samples: Mapping[int, Samples]
    ) -> dict[int, Samples]:
        for index, bucket in self._layout.buckets[self._rank]:
            mine = tuple(samples.get(layer, ()) for layer in bucket.layers)
            for rank in set(bucket.ranks) - {self._rank}:
                self._links.send(rank, ("reduce", iteration, index), mine)
        return {}

    patch.setattr(SimulatedExecutor, "_reduce", reduce)


def steps_are_taken_twice(patch: pytest.MonkeyPatch) -> None:
    """An optimizer step does not look at the age of its layer."""

    def step(self: SimulatedWorker, layer: int, held: ModelledLayer, iteration: int) -> None:
        del self, layer
        held.content = content_after(held.content, iteration, held.gradient)
        held.age += 1

    patch.setattr(SimulatedWorker, "step", step)


def layers_of_other_ages_are_kept(patch: pytest.MonkeyPatch) -> None:
    """Whoever cannot get to the outcome's age goes on with what it has."""
    patch.setattr(SimulatedWorker, "keep_only_age", lambda *_: None)


def epochs_do_not_fence_links(patch: pytest.MonkeyPatch) -> None:
    """A message of an older epoch is taken for one of this."""
    real = SimulatedLinks._deliver

    def deliver(self: SimulatedLinks, peer: int, link: Any, message: Any) -> None:
        if message.epoch < self.epoch:
            message = replace(message, epoch=self.epoch)
        real(self, peer, link, message)

    patch.setattr(SimulatedLinks, "_deliver", deliver)


def one_report_commits(patch: pytest.MonkeyPatch) -> None:
    """An iteration counts as soon as one rank has applied it."""
    real = step._commit_reported

    def committed(rules: Rules, state: JobState, now_s: float) -> Step:
        reports = state.commits.reports_of(state.commits.next_iteration)
        if reports:
            one = reports[min(reports)]
            everyone = PersistentMap(dict.fromkeys(state.plan.all_ranks, one))
            reported = {**state.commits.reports, state.commits.next_iteration: everyone}
            state = replace(state, commits=replace(state.commits, reports=reported))
        return real(rules, state, now_s)

    patch.setattr(step, "_commit_reported", committed)


def evicted_nodes_are_admitted(patch: pytest.MonkeyPatch) -> None:
    """Whoever connects is served like a member."""

    async def admit(self: Leadership[Any], node: int, line: Any) -> bool:
        line.tell(Welcome(term=self.term))
        await self._logbook.grant((node,))
        self._connections[node] = line
        return True

    patch.setattr(Leadership, "admit", admit)


def leases_do_not_end(patch: pytest.MonkeyPatch) -> None:
    """A node that hangs stays a member."""

    async def watch(self: Leadership[Any]) -> None:
        del self

    patch.setattr(Leadership, "watch_leases", watch)


def agents_forget(patch: pytest.MonkeyPatch) -> None:
    """A new coordinator is not told again what the one before it was."""

    def said(state: Any, *_: Any) -> Any:
        return state

    patch.setattr("planaria.simulator.modelled.agent.on_report", said)


def everybody_is_trusted(patch: pytest.MonkeyPatch) -> None:
    """Nodes whose machines failed often are placed like all others."""
    patch.setattr(trust, "is_trusted", lambda *_: True)


def failures_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    """The members of a change are recorded without what is known of machines, as they once were."""

    async def record(self: Logbook, members: Members) -> None:
        failures = {} if members.is_planned else members.failures
        await real(self, msgspec.structs.replace(members, failures=failures))

    real = Logbook.record_members
    patch.setattr(Logbook, "record_members", record)


def recoveries_keep_the_plan(patch: pytest.MonkeyPatch) -> None:
    """Survivors that are not in the plan before stay idle."""
    real = best_transition

    def best(transitions: Any, **keys: Any) -> Any:
        found = real(transitions, **keys)
        return replace(found, after=replace(found.after, pipelines=found.after.pipelines[:1]))

    patch.setattr(transition_choice, "best_transition", best)


def jobs_begin_again(patch: pytest.MonkeyPatch) -> None:
    """Without any vector a job is taken for one before its first iteration, as it once was."""
    real = outcomes.outcome_of

    def outcome(state: JobState) -> Outcome:
        commits = replace(state.commits, next_iteration=state.commits.origin.iteration)
        return real(replace(state, commits=commits))

    patch.setattr(recovery, "outcome_of", outcome)


def broken_links_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A new coordinator is not told of them, as it once was not."""

    def said(state: AgentState, message: Fact, now_s: float) -> AgentState:
        return state if isinstance(message, PeerUnreachable) else real(state, message, now_s)

    real = agent_state.on_report
    patch.setattr("planaria.simulator.modelled.agent.on_report", said)


PLANTS: tuple[Plant, ...] = (
    members_are_not_recorded,
    outcomes_are_told_before_they_are_recorded,
    outcomes_do_not_outlive_their_epoch,
    a_new_coordinator_ignores_outcomes,
    outcomes_are_written_over,
    older_leaders_may_write,
    ranks_answer_before_they_leave,
    the_vector_needs_no_gradients,
    steps_are_taken_twice,
    layers_of_other_ages_are_kept,
    epochs_do_not_fence_links,
    one_report_commits,
    evicted_nodes_are_admitted,
    leases_do_not_end,
    agents_forget,
    recoveries_keep_the_plan,
    everybody_is_trusted,
    failures_are_forgotten,
    jobs_begin_again,
    broken_links_are_forgotten,
)


def silent_members_are_left_out(patch: pytest.MonkeyPatch) -> None:
    """Gradients are reduced among those alone who compute the layers."""
    real = buckets.buckets_of

    def buckets_of(plan: Plan) -> tuple[Bucket, ...]:
        return real(replace(plan, silent={}))

    patch.setattr(layout, "buckets_of", buckets_of)
    patch.setattr(layout, "_layout", layout._layout.__wrapped__)  # What is cached has them.


def a_new_coordinator_trusts_a_change(patch: pytest.MonkeyPatch) -> None:
    """It takes the members of a change for those of an epoch that has begun."""
    real = start.restored_step

    def restored_step(*arguments: Any, members: Members, **keys: Any) -> Step:
        members = msgspec.structs.replace(members, is_planned=False)
        return real(*arguments, members=members, **keys)

    patch.setattr(leadership, "restored_step", restored_step)


def who_never_comes_is_awaited(patch: pytest.MonkeyPatch) -> None:
    """A node that has no lease yet is waited for without end."""
    patch.setattr(
        "planaria.coordinator.step.check_missing", lambda _rules, state, _now_s: (state, ())
    )


def saves_are_of_no_use(patch: pytest.MonkeyPatch) -> None:
    """The job ends where no live node holds some layer."""
    patch.setattr("planaria.coordinator.recovery.back_point", lambda *_: None)


def empty_places_are_visited(patch: pytest.MonkeyPatch) -> None:
    """Microbatches keep their routes, also through places of nodes that are gone."""

    def best_reroute(problem: Problem, plan: Plan) -> PricedPlan:
        del problem
        return PricedPlan(plan, 0.001)

    patch.setattr(reroute, "best_reroute", best_reroute)


def what_is_no_better_is_changed_to(patch: pytest.MonkeyPatch) -> None:
    """A plan with empty places is left as soon as training goes on, for whatever is the best."""
    patch.setattr(change, "is_worthwhile", lambda *_: True)
