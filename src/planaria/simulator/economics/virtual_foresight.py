"""The policy of a simulated job whose coordinator looks ahead (policies/ahead.py).

A process beside the coordinator searches for better plans, and for answers to losses, from when a
plan begins. Here its answers are there `RecoveryCosts.look_ahead_s` later. A loss before that, or
of more nodes than are looked ahead for, is answered in a hurry. What is searched for large plans
takes minutes and is left out.

Differs: the process answers the likeliest losses first, one after the other; here all its answers
come at one time. It stops after some classes of losses; here every loss has its answer.
"""

from functools import lru_cache
from itertools import islice
from typing import Final, NamedTuple

from planaria.core.cluster import ClusterEvent, ClusterState, NodesLost
from planaria.core.job import JobConfig
from planaria.core.plan import Plan, Transition
from planaria.planner.layout.search import SearchResults
from planaria.planner.plans import PlanCatalog
from planaria.policies.ahead import SEARCH_STEPS_MAX
from planaria.policies.named import hurried_policy, layout_search, named_policy
from planaria.policies.policy import Prices
from planaria.policies.repartition import has_equal_nodes, templates_of
from planaria.policies.reroute import KnownReroutes
from planaria.policies.traits import TRAITS
from planaria.simulator.economics.remembered import Remembered

_HOPS_MAX: Final = 1 << 13  # Hops of the largest plan for which layouts are searched.


class VirtualForesight:
    """Answers in a hurry or at leisure; implements `Policy`.

    Attributes:
        is_ready: whether the answers for the present plan have been found.
    """

    def __init__(self, job: JobConfig, catalog: PlanCatalog) -> None:
        is_choice = TRAITS[job.resilience.policy].is_choice
        self.is_ready = False
        self._failures_ahead = job.resilience.failures_ahead
        common = common_results(catalog)
        self._searched = layout_search(job, catalog, common.layouts)
        self._sizes: set[int] = set()  # Numbers of nodes for which layouts were searched.
        self._thorough = Remembered(named_policy(job, catalog, self._searched, common.reroutes))
        hurried = hurried_policy if is_choice else named_policy
        self._hurried = Remembered(hurried(job, catalog, known=common.reroutes))

    def propose(
        self, plan: Plan, cluster: ClusterState, event: ClusterEvent, prices: Prices
    ) -> tuple[Transition, ...]:
        """The answers; see `Policy`."""
        is_large = sum(map(len, plan.routes)) > _HOPS_MAX
        if isinstance(event, NodesLost):
            alive = {node.node for node in cluster.nodes}
            num_lost = sum(node not in alive for node in plan.nodes)
            is_foreseen = self.is_ready and num_lost <= self._failures_ahead and not plan.silent
        else:
            is_foreseen = not (event.joined or event.leaving or event.slow) and self.is_ready
        if is_foreseen and not is_large:
            self._search(plan, cluster)
        elif is_large or isinstance(event, NodesLost):
            hurried = self._hurried.propose(plan, cluster, event, prices)
            if hurried:
                return hurried
        return self._thorough.propose(plan, cluster, event, prices)

    def _search(self, plan: Plan, cluster: ClusterState) -> None:
        """Searches for layouts of so many nodes, once, as far as the process does."""
        number = len(cluster.nodes)
        if number not in self._sizes and has_equal_nodes(plan, cluster):
            self._sizes.add(number)
            for _ in islice(self._searched.steps(number, templates_of(plan)), SEARCH_STEPS_MAX):
                pass


class CommonResults(NamedTuple):
    """What the searches of all runs with a catalog have found. It depends on the questions alone:
    no run finds anything else for it, but each finds it sooner."""

    layouts: SearchResults
    reroutes: KnownReroutes


@lru_cache(maxsize=4)  # A catalog is equal to itself only.
def common_results(catalog: PlanCatalog) -> CommonResults:
    """The results that runs with a catalog have in common so far."""
    return CommonResults(
        SearchResults(catalog.problem, catalog.templates), KnownReroutes(catalog.problem)
    )
