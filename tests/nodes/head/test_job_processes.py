"""What a launcher knows of its agents and coordinators."""

import msgspec
import pytest

from helpers.offered_machines import node_spec
from planaria.core.job import ClusterConfig, JobConfig
from planaria.nodes.forkserver import UNKNOWN, exit_text
from planaria.nodes.head import job_processes
from planaria.nodes.head.job_processes import JobProcesses


def test_a_node_starts_on_a_machine_without_a_node() -> None:
    """And on one that no node has had where a machine was granted."""
    processes = JobProcesses()
    first = processes.assign_machine(0, starting=(), is_new=False)
    second = processes.assign_machine(1, starting=(0,), is_new=False)
    processes.add_agent(0, 10)
    processes.add_agent(1, 11)
    processes.add_exit(10, -9)

    assert len({first, second}) == 2
    assert processes.next_node == 2
    assert processes.assign_machine(2, starting=(), is_new=False) == first
    assert processes.assign_machine(3, starting=(2,), is_new=True) not in {first, second}


def test_a_node_has_the_devices_of_the_lost_one_that_it_reslots() -> None:
    """Its number would give it those of another live node, while others have none."""
    processes = JobProcesses()
    slots = [processes.assign_slot(node, starting=range(node)) for node in range(4)]
    for node in range(4):
        processes.add_agent(node, 10 + node)
    processes.add_exit(12, -9)
    job = JobConfig(cluster=ClusterConfig(devices_per_node=2))
    unknown = msgspec.structs.replace(node_spec(job, 4), device=1)
    known = msgspec.structs.replace(unknown, slot=processes.assign_slot(4, starting=()))

    assert slots == [0, 1, 2, 3]
    assert (known.device_number, unknown.device_number) == (5, 9)
    assert processes.assign_slot(5, starting=(4,)) == 4


def test_an_agent_may_end_before_its_pid_is_known() -> None:
    """The fork server tells exits and pids apart from each other."""
    processes = JobProcesses()
    nodes = processes.add_exit(10, 1)
    processes.add_agent(0, 10)

    assert nodes == ()
    assert processes.has_ended(0)
    assert not processes.live_agents
    assert [end.reason for end in processes.agent_ends()] == [f"its agent {exit_text(1)}"]


def test_a_process_may_have_the_pid_of_one_that_ended_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel gives each pid again, in a job of weeks. A node with such a pid was taken for lost
    at once, and its processes were never killed."""
    kills: list[int] = []
    monkeypatch.setattr(job_processes, "kill_group", kills.append)
    processes = JobProcesses()
    processes.add_agent(0, 10)
    processes.kill_node(0)
    processes.add_exit(10, -9)
    processes.add_coordinator(11)
    processes.add_exit(11, 1)
    processes.add_agent(1, 10)
    processes.add_agent(2, 11)

    assert processes.live_agents == {1: 10, 2: 11}
    assert [processes.has_ended(node) for node in range(3)] == [True, False, False]
    assert [end.node for end in processes.agent_ends()] == [0]
    assert not processes.have_ended()
    assert processes.add_exit(10, 3) == (1,)
    assert processes.agent_statuses() == {3}
    processes.kill_coordinator(11)
    processes.kill_node(0)
    processes.kill_node(2)
    assert kills == [10, 11]
    processes.add_exit(11, -9)
    processes.add_coordinator(10)
    processes.kill_coordinator(10)
    assert kills == [10, 11, 10]
    assert not processes.have_ended()
    processes.add_exit(10, -9)
    assert processes.have_ended()


def test_agents_that_were_killed_or_left_an_unknown_status_explain_no_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only how agents ended by themselves says why none is left."""
    kills: list[int] = []
    monkeypatch.setattr(job_processes, "kill_group", kills.append)
    processes = JobProcesses()
    for node in range(4):
        processes.add_agent(node, 10 + node)
    processes.add_coordinator(20)
    processes.add_exit(10, 3)
    processes.add_exit(11, UNKNOWN)
    processes.kill_other_nodes((0, 1, 3))
    processes.add_exit(12, -9)

    assert kills == [12]
    assert processes.agent_statuses() == {3}
    assert not processes.have_ended()
    processes.kill_all()
    assert sorted(kills) == [12, 13, 20]
    processes.add_exit(13, -9)
    processes.add_exit(20, -9)
    assert processes.have_ended()
