"""The answers of several policies to the same event, for one choice among all of them.

Which answer is best depends on when the next failure comes and on what it would take with it;
`expected_samples_per_s` weighs that. This policy returns all answers to choose from, each plan
once.

Source: Odyssey, section III: adaptive selection of the fault tolerance policy.
Differs: any number of policies; all are priced by one estimator, with what each one moves.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planaria.core.cluster import ClusterEvent, ClusterState, NodesLost
from planaria.core.plan import Plan, Transition
from planaria.planner.reroute.reroutes import num_without_work
from planaria.policies.building import least_exposed
from planaria.policies.policy import Policy, Prices


@dataclass(frozen=True, slots=True)
class Adaptive:
    """The policy that combines others.

    Attributes:
        policies: policies that it asks; of equal plans, the first policy's answer is taken.
    """

    policies: tuple[Policy, ...]

    def propose(
        self, plan: Plan, cluster: ClusterState, event: ClusterEvent, prices: Prices
    ) -> tuple[Transition, ...]:
        """The answers of the policies that give work to the most nodes, and those that keep the
        plan.

        After a loss there are further ones: each answer with empty places, followed at later
        commits by the fastest answer without empty places.

        A policy counts by its answer with the most nodes at work. One that proposes to leave out
        slow nodes also proposes plans with them, so it does not drop out.
        """
        answers = [policy.propose(plan, cluster, event, prices) for policy in self.policies]
        num_at_work = [
            max((len(x.after.nodes) - num_without_work(x.after) for x in transitions), default=0)
            for transitions in answers
        ]
        most = max(num_at_work, default=0)
        distinct: list[Transition] = []
        for transitions, number in zip(answers, num_at_work, strict=True):
            for transition in transitions:
                if (number == most or transition.keeps_plan) and all(
                    transition.after != other.after for other in distinct
                ):
                    distinct.append(transition)
        stay = tuple(transition for transition in distinct if transition.keeps_plan)
        others = tuple(transition for transition in distinct if not transition.keeps_plan)
        others = least_exposed(others, cluster)
        two_plans = _with_second_plans(others) if isinstance(event, NodesLost) else ()
        return (*stay, *others, *two_plans)


def _with_second_plans(transitions: Sequence[Transition]) -> tuple[Transition, ...]:
    """The answers with empty places, each followed by the fastest answer without, to which the job
    changes at later commits (coordinator/change.py)."""
    complete = [transition for transition in transitions if not transition.after.gone]
    if not complete:
        return ()
    then = min(complete, key=lambda transition: transition.iteration_s)
    return tuple(
        replace(quick, answer=f"{quick.answer}, then {then.answer}", then=then)
        for quick in transitions
        if quick.after.gone
    )
