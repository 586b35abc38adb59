"""Machines name their failure domains: copies avoid them, and whom they expose is told."""

from collections.abc import Mapping
from dataclasses import replace

from helpers.coordinated import of_type, small_rules
from helpers.fake_cluster import FakeCluster
from helpers.jobs import shaped_plan, template
from planaria.coordinator.job_rules import Rules
from planaria.coordinator.placing import copies_of, named_domains
from planaria.core.cluster import ClusterEvent, ClusterState
from planaria.core.copies import LayerCopy
from planaria.core.job import CheckpointConfig
from planaria.core.messages import NodeArrived, StartEpoch
from planaria.core.plan import Pipeline, Plan, Transition, plain_plan
from planaria.core.records import Warned
from planaria.policies.policy import Prices

RACKS = {0: "left", 1: "left", 2: "right", 3: "right"}
HALVES = shaped_plan((2, 2), 6)  # Ranks 0 and 2 hold layers 0 to 4, ranks 1 and 3 the others.


class OnePipeline:
    """A policy: all nodes that are left are one pipeline, so each layer has one holder."""

    def propose(
        self, plan: Plan, cluster: ClusterState, event: ClusterEvent, prices: Prices
    ) -> tuple[Transition, ...]:
        nodes = tuple(node.node for node in cluster.nodes)
        pipelines = (Pipeline(template(len(nodes)), nodes),)
        return (
            Transition(
                before=plan,
                after=plain_plan(cluster.epoch, pipelines, (len(plan.routes),)),
                rounds=(),
                downtime_s=prices.regroup_s,
                iteration_s=1.0,
                redone_samples=event.redone_samples,
                policy="one pipeline",
                answer="all",
            ),
        )


def rules_with(*, copies: int, domains: Mapping[int, str]) -> Rules:
    """A job that keeps so many copies, and knows these domains from the start."""
    rules = replace(small_rules(), policy=OnePipeline(), domains=domains)
    return replace(rules, job=replace(rules.job, checkpoint=CheckpointConfig(copies=copies)))


def arrived(cluster: FakeCluster, domains: Mapping[int, str]) -> None:
    """The agents of nodes say where they run."""
    cluster.hear(
        *(
            NodeArrived(node=node, rank=node, machine=f"machine-{node}", domain=name)
            for node, name in domains.items()
        )
    )


def warnings(cluster: FakeCluster) -> list[str]:
    return [warned.text for warned in of_type(cluster.commands, Warned) if "domain" in warned.text]


def stays_in_domain(copy: LayerCopy) -> bool:
    return any(RACKS[target] == RACKS[copy.source] for target in copy.targets)


def test_the_first_copies_avoid_domains_that_the_head_knows() -> None:
    """Before any agent has said a word, as the first placement is on record before that."""
    plan = shaped_plan((4,), 6)

    blind = copies_of(rules_with(copies=2, domains={}), plan)
    knowing = copies_of(rules_with(copies=2, domains=RACKS), plan)

    assert any(map(stays_in_domain, blind))
    assert not any(map(stays_in_domain, knowing))


def test_later_copies_avoid_the_domains_of_nodes_that_have_arrived() -> None:
    cluster = FakeCluster(rules_with(copies=2, domains={}), HALVES)
    cluster.begin()
    arrived(cluster, RACKS)
    cluster.lose(3)

    last = of_type(cluster.commands, StartEpoch)[-1]
    assert last.plan.nodes == (0, 1, 2)
    assert last.copies
    assert not any(map(stays_in_domain, last.copies))


def test_the_domain_of_the_job_file_counts_where_it_has_one() -> None:
    rules = rules_with(copies=2, domains=RACKS)
    checkpoint = CheckpointConfig(copies=2, failure_domains=((0, 2), (1, 3)))
    rules = replace(rules, job=replace(rules.job, checkpoint=checkpoint))

    copies = copies_of(rules, shaped_plan((4,), 6))

    assert all({copy.source, *copy.targets} not in ({0, 2}, {1, 3}) for copy in copies)


def test_a_node_that_arrives_is_in_the_domain_that_it_names() -> None:
    rules = rules_with(copies=0, domains={0: "left", 1: "left"})

    assert named_domains(rules, {1: "right", 5: "left"}) == {"left": (0, 5), "right": (1,)}


def test_a_domain_whose_loss_takes_a_layer_is_warned_of_once() -> None:
    """After a loss that leaves each layer on one node; the next loss exposes nothing new."""
    cluster = FakeCluster(rules_with(copies=0, domains=RACKS), HALVES)
    cluster.begin()
    assert warnings(cluster) == []

    cluster.lose(3)
    once = warnings(cluster)
    cluster.lose(1)

    assert len(once) == 2
    assert "domain 'left' has all holders of " in once[0]
    assert "set checkpoint.copies" in once[0]
    assert warnings(cluster) == once


def test_a_job_within_one_domain_is_not_warned_of_it() -> None:
    cluster = FakeCluster(rules_with(copies=0, domains=dict.fromkeys(RACKS, "left")), HALVES)
    cluster.begin()
    cluster.lose(3)

    assert warnings(cluster) == []


def test_copies_elsewhere_expose_nothing() -> None:
    cluster = FakeCluster(rules_with(copies=2, domains=RACKS), HALVES)
    cluster.begin()
    cluster.lose(3)

    assert warnings(cluster) == []
