"""A thousand nodes under simulation: the coordinator's own work and its records stay small.

Its code is the real one, so its processor seconds are, too. Those of 200 agents that are connected
to a real head are measured by benchmarks/agents.py.
"""

import time
from dataclasses import replace
from random import Random
from typing import Any, Final

import pytest

from planaria.coordinator import leadership
from planaria.coordinator.job_rules import Rules
from planaria.coordinator.state import JobState
from planaria.coordinator.step import Event as JobEvent
from planaria.coordinator.step import step
from planaria.core.job import PolicyName
from planaria.core.kinds import Ending
from planaria.core.records import Recovering, Running, ToLauncher
from planaria.simulator.checkers.checkers import Checkers
from planaria.simulator.fault_draws import Fault, FaultKind
from planaria.simulator.fault_injection import FaultInjection
from planaria.simulator.modelled.store import DiskModel
from planaria.simulator.scenario import LEASE_S, Scenario, StoreTrouble, planned_job
from planaria.simulator.simulated_cluster import SimulatedCluster
from planaria.store.store import Entry, Event

SEED: Final = 1
NUM_NODES: Final = 1000
LOST: Final = 500
JOIN_S_MAX: Final = 5.0
# Measured on a busy machine with two cores: 0.5 s to answer a loss, of which nearly all is the plan
# of the nodes that are left, and 0.7 s to take a thousand nodes in; 10 KiB for a plan.
ANSWER_CPU_S_MAX: Final = 2.0
JOIN_CPU_S_MAX: Final = 3.0
RECORD_BYTES_MAX: Final = 64 << 10
SCENARIO: Final = Scenario(
    NUM_NODES,
    10,
    1,
    num_layers=20,
    num_microbatches=2 * NUM_NODES // 10,
    num_machines=NUM_NODES,
    patience_s=15.0,
    wait_s=15.0,
    iterations=3,
)


class _Work(Checkers):
    """Checkers that also note what the coordinator's decisions and records take.

    Attributes:
        record_bytes: size of each record, by key.
        cpu_s: processor seconds of the coordinator's function in each phase: while nodes join,
            while they train, and from the loss until they train again.
        running_s: times at which the nodes began to train.
    """

    def __init__(self, cluster: SimulatedCluster) -> None:
        super().__init__(cluster)
        self.record_bytes: dict[str, int] = {}
        self.cpu_s = {"join": 0.0, "train": 0.0, "answer": 0.0}
        self.running_s: list[float] = []
        self._phase = "join"
        self._loop = cluster.loop

    def on_record(self, event: Event) -> None:
        """See SimulationObserver."""
        super().on_record(event)
        if isinstance(event, Entry):
            self.record_bytes[event.key] = len(event.value)

    def on_message(self, message: ToLauncher) -> None:
        """See SimulationObserver."""
        super().on_message(message)
        if isinstance(message, Recovering):
            self._phase = "answer"
        elif isinstance(message, Running):
            self._phase = "train"
            self.running_s.append(self._loop.now_s)

    def step(self, rules: Rules, state: JobState, event: JobEvent, now_s: float) -> Any:
        """The coordinator's function, timed."""
        start_s = time.process_time()
        result = step(rules, state, event, now_s)
        self.cpu_s[self._phase] += time.process_time() - start_s
        return result


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("policy", ["reinstantiate", "adaptive"])
def test_a_thousand_nodes_join_and_the_loss_of_one_is_answered_at_once(
    policy: PolicyName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no promise is broken, also where the policy is a choice, of which nothing was foreseen.
    The bounds are on processor time, and on bytes."""
    job = planned_job(replace(SCENARIO, policy=policy))
    cluster = SimulatedCluster(
        job,
        Random(SEED),
        disk_model=DiskModel(),
        store_trouble=StoreTrouble(),
        store_rng=Random(SEED),
    )
    work = cluster.observer = _Work(cluster)
    monkeypatch.setattr(leadership, "step", work.step)
    kill = Fault(
        kind=FaultKind.KILL,
        node=LOST,
        other=0,
        duration_s=0.0,
        breaks=True,
        place="backward",
        count=3 * NUM_NODES // 2,  # In the middle of iteration 1.
    )
    work.faults = FaultInjection(cluster, (kill,))
    cluster.begin({})
    cluster.loop.run(
        until_s=60.0, is_over=lambda: cluster.ended is not None or bool(work.violations)
    )

    assert work.violations == [], f"seed {SEED}"
    assert cluster.ended is not None
    assert cluster.ended.ending is Ending.FINISHED
    assert set(cluster.ended.nodes) == set(range(NUM_NODES)) - {LOST}
    ((lost_s, _, _),) = work.faults.injected
    joined_s, again_s = work.running_s
    assert joined_s <= JOIN_S_MAX
    assert again_s - lost_s <= LEASE_S + 1.0
    assert work.cpu_s["join"] <= JOIN_CPU_S_MAX
    assert work.cpu_s["answer"] <= ANSWER_CPU_S_MAX
    assert max(work.record_bytes.values()) <= RECORD_BYTES_MAX
