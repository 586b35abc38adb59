"""The rules of a run: its settings, which do not change while a coordinator lives."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from planaria.core.commit import VectorLayout
from planaria.core.job import JobConfig
from planaria.core.plan import ModelProfile
from planaria.planner.plans import PlanCatalog
from planaria.policies.policy import Policy, Prices


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rules:
    """The settings of a run, which do not change.

    Attributes:
        policy: policy that proposes answers to losses.
        prices: prices of a recovery by the profile, before the job has measured any.
        n0: number of nodes of the smallest pipeline.
        max_nodes: largest number of nodes that there are plans for.
        profile: profile by which the work of ranks is known; None: slow nodes are not looked for.
        looks_ahead: whether answers to losses, and plans better than one chosen in a hurry, are
            searched ahead of need. If not, better plans are looked for at each commit.
        catalog: plans that the job can be re-formed to; None: its profile is not corrected.
        policy_of: function from such plans, which may have a corrected profile, to their policy.
        version_iterations: predicted number of iterations from one version of the copies in memory
            to the next.
        first_iteration: iteration at which this run starts.
        source: version of the disk tier that this run starts from; "": it starts from the seed.
        domains: name of the failure domain of each first node that is in one.
        speeds: speed of each first node whose machine is slower than the job's profile.
        processors: number of processors that all ranks share; 0: each rank has its own.
        clock: name of the monotonic clock that the coordinator reads.
    """

    job: JobConfig
    policy: Policy
    prices: Prices
    n0: int
    max_nodes: int
    num_layers: int
    layout: VectorLayout
    first_iteration: int
    source: str = ""
    profile: ModelProfile | None = None
    looks_ahead: bool = False
    catalog: PlanCatalog | None = None
    policy_of: Callable[[PlanCatalog], Policy] | None = None
    version_iterations: int = 1
    domains: Mapping[int, str] = field(default_factory=dict)
    speeds: Mapping[int, float] = field(default_factory=dict)
    processors: int = 0
    wait_s: float = 0.0
    clock: str = ""
