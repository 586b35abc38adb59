"""A cluster in whose workers something raises, for tests of what the coordinator makes of it."""

from helpers.coordinated import FIRST, of_type, small_rules
from helpers.fake_cluster import FakeCluster
from helpers.jobs import shaped_plan
from planaria.coordinator.commands import End
from planaria.coordinator.job_rules import Rules
from planaria.core.messages import Raised, SaveLayers
from planaria.core.plan import Plan

PLAN = shaped_plan((2, 2), 6)  # Ranks 0 and 2 hold layers 0 to 4, ranks 1 and 3 the others.
SINGLE = shaped_plan((2,), 6)
UNREADABLE = Raised(error="OSError", message="[Errno 5] data", first_layer=0, end_layer=5)
ELSEWHERE = Raised(error="OSError", message="[Errno 5] data", first_layer=5, end_layer=10)
MISTAKE = Raised(error="ValueError", message="a mistake", first_layer=5, end_layer=10)
NEXT = FIRST + 2


def trained(plan: Plan = PLAN, rules: Rules | None = None) -> FakeCluster:
    """The cluster once it has trained two iterations."""
    cluster = FakeCluster(rules or small_rules(), plan)
    cluster.begin()
    for iteration in range(FIRST, NEXT):
        cluster.train(iteration)
    return cluster


def ending(cluster: FakeCluster) -> End:
    end = cluster.commands[-1]
    assert isinstance(end, End)
    return end


def saves(cluster: FakeCluster) -> list[SaveLayers]:
    return of_type(cluster.commands, SaveLayers)


def replace_layers(raised: Raised, first_layer: int, end_layer: int) -> Raised:
    return Raised(
        error=raised.error, message=raised.message, first_layer=first_layer, end_layer=end_layer
    )
