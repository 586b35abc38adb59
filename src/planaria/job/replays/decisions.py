"""The decisions of a run, made again by the real policies from the inputs in the report.

The policies are those of the coordinator, and they keep what they have searched from one decision
to the next, as in the run. An answer that had been found ahead of need is looked for in the same
order, from the plan of that time.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from planaria.coordinator.frozen import replace
from planaria.coordinator.learning.learned import Learning
from planaria.coordinator.learning.memory_estimates import fitted_rules
from planaria.coordinator.learning.overhead import prices_of, switch_s
from planaria.coordinator.learning.profile_correction import (
    corrected_plans,
    policy_of,
    restored_learning,
)
from planaria.coordinator.state import Commits, JobState, Membership, Saves
from planaria.coordinator.switching import KnownWaves, weighed_changes
from planaria.coordinator.transition_choice import choice_among
from planaria.core.findings import Findings
from planaria.core.persistent_map import PersistentMap
from planaria.core.plan import Plan, Transition
from planaria.core.records import DecisionInputs
from planaria.job.replays.recorded_run import RecordedRun
from planaria.nodes.head.leader_spec import LeaderSpec, outlines_of, rules_of
from planaria.observe.metrics import EventRecord
from planaria.policies.ahead import ForeseenAnswers, look_ahead
from planaria.policies.named import layout_search, named_policy
from planaria.policies.policy import Prices


@dataclass(frozen=True, slots=True)
class DecisionAgain:
    """A decision of the run, beside the one that was made again.

    Attributes:
        events: events that it answered, in order.
        answer: policy and answer of the run, as "POLICY: ANSWER".
        answer_again: the same of the decision that was made again; "": no policy knew an answer.
        is_same: whether the answer and the plan are the same.
    """

    events: tuple[EventRecord, ...]
    answer: str
    answer_again: str
    is_same: bool


def decisions_again(run: RecordedRun) -> Iterator[DecisionAgain]:
    """All decisions of the run with recorded inputs, made again in order."""
    decider = _Decider(run)
    for events in run.decisions:
        event = events[-1]
        assert event.inputs is not None
        best = decider.choice(event.inputs)
        again = "" if best is None else f"{best.policy}: {best.answer}"
        answer = f"{event.policy}: {event.answer}"
        is_same_plan = best is not None and _is_same_plan(best.after, run.plans[event.epoch])
        yield DecisionAgain(events, answer, again, again == answer and is_same_plan)


def _is_same_plan(plan: Plan, other: Plan) -> bool:
    return replace(plan, epoch=0, silent={}) == replace(other, epoch=0, silent={})


class _Decider:
    """Decides as the coordinator of a run; keeps policies with what they have searched."""

    def __init__(self, run: RecordedRun) -> None:
        self._run = run
        self._foreseen = ForeseenAnswers()
        self._rules = self._fitted = rules_of(_spec(run), self._foreseen)
        self._findings = Findings()
        self._learning = Learning()

    def choice(self, inputs: DecisionInputs) -> Transition | None:
        """The best answer; None if no policy knows one."""
        plan = self._run.plans[inputs.plan_epoch]
        self._note_findings(inputs, plan)
        rules = replace(
            self._fitted,
            version_iterations=inputs.version_iterations,
            processors=inputs.processors,
        )
        state = _state(inputs, plan, self._learning)
        prices = prices_of(rules, state)
        self._foreseen.clear()
        if inputs.is_foreseen:
            self._look_ahead(inputs, plan, prices)
        event = inputs.lost or inputs.changed
        assert event is not None
        transitions = policy_of(rules, state).propose(plan, inputs.cluster, event, prices)
        if inputs.changed is None:
            if inputs.cluster.lost_layers(rules.num_layers):
                transitions = tuple(
                    transition for transition in transitions if transition.goes_back
                )
            best, _ = choice_among(rules, state, transitions, inputs.priced_s)
            return best
        weighed = weighed_changes(
            transitions,
            iteration_s=inputs.iteration_s,
            waves=KnownWaves(leaving=inputs.changed.leaving, prices=prices),
            switch_s=partial(switch_s, rules, state),
        )
        best, _ = choice_among(rules, state, transitions, inputs.priced_s, weighed=weighed)
        return best

    def _note_findings(self, inputs: DecisionInputs, plan: Plan) -> None:
        """Has policies made anew when the profile is corrected, as the coordinator does."""
        findings, before = inputs.findings, self._findings
        is_fitted_anew = findings.more_bytes != before.more_bytes
        if is_fitted_anew:
            number = len(inputs.members)
            self._fitted = fitted_rules(self._rules, findings, number, is_new=True) or self._rules
        if is_fitted_anew or findings.layer_factors != before.layer_factors:
            self._learning = restored_learning(self._fitted, findings, plan)
        self._learning = replace(self._learning, findings=findings)
        self._findings = findings

    def _look_ahead(self, inputs: DecisionInputs, plan: Plan, prices: Prices) -> None:
        """Looks for the answers to losses of the plan, until the one that happened has its own."""
        job, catalog = self._rules.job, self._fitted.catalog
        event = inputs.lost or inputs.changed
        assert catalog is not None
        assert event is not None
        catalog = corrected_plans(catalog, inputs.findings.layer_factors)
        searched = layout_search(job, catalog)
        policy = named_policy(job, catalog, searched)
        ahead = job.resilience.failures_ahead
        for answer in look_ahead(policy, searched, plan, prices=prices, failures_ahead=ahead):
            if answer is not None:
                self._foreseen.add(plan, answer.lost, partial(tuple, answer.transitions))
                if self._foreseen.answers(plan, inputs.cluster, event, prices) is not None:
                    return


def _spec(run: RecordedRun) -> LeaderSpec:
    planned = run.planned
    return LeaderSpec(
        job=planned.config,
        plan=planned.plan,
        predicted_s=planned.predicted.iteration_s,
        problem=planned.problem,
        templates=dict(planned.catalog.templates),
        outlines=outlines_of(planned.catalog),
        first_iteration=run.first_iteration,
        source="",
        fingerprint={},
        directory="",
        token=b"",
    )


def _state(inputs: DecisionInputs, plan: Plan, learning: Learning) -> JobState:
    """The state of the coordinator at a decision, as far as prices depend on it."""
    saved = inputs.saved_iteration
    return JobState(
        term=1,
        epoch=inputs.cluster.epoch,
        nodes=inputs.members,
        plan=plan,
        commits=Commits(next_iteration=inputs.next_iteration),
        membership=Membership(history=inputs.history, domains=PersistentMap(inputs.domains)),
        saves=Saves(versions=((saved, 0),) if saved >= 0 else ()),
        learning=learning,
    )
