"""The example GPT-2 on six machines, to each of which everything happens that a network can do.

The survival sweep of one machine (tests/processes/test_survive.py) has its faults injected; here
machines lose power, hang, and are cut off. Each job ends with the bits that it has on one machine.
"""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.gpt2_machines import gpt2_digests, gpt2_machines, gpt2_settings
from helpers.host_networks import needs_namespaces
from helpers.hosts import Host
from helpers.machine_jobs import (
    TIMEOUT_S,
    Machines,
    digests,
    losses,
    machine_job,
    pids,
)
from planaria.core.inject import RECOVERY_STEPS, STEPS
from planaria.nodes.forkserver import ForkServer

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.long,
    needs_namespaces,
    pytest.mark.timeout(900),
]

LINK_SILENCE_S = 120.0  # A connection between nodes breaks after that.
OUTAGE_S = 60.0
STRUCK_AT = 30


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that all hosts see."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def machines(directory: Path, server: ForkServer) -> Iterator[Machines]:
    """The head's host, those of six nodes, and another one."""
    with gpt2_machines(directory, gpt2_settings(directory, server)) as made:
        yield made


@pytest.fixture(scope="module")
def expected(directory: Path, server: ForkServer) -> tuple[str, str]:
    """The digests of the job on one machine."""
    return gpt2_digests(directory, server)


@pytest.fixture
def shared(directory: Path, request: pytest.FixtureRequest) -> Path:
    """A directory that all hosts see, of this test alone."""
    path: Path = directory / request.node.name
    path.mkdir()
    return path


@pytest.mark.parametrize("fault", [Host.kill, Host.hang, Host.cut], ids=lambda f: f.__name__)
def test_a_machine_that_falls_silent_is_lost_alone(
    fault: object, machines: Machines, shared: Path, expected: tuple[str, str]
) -> None:
    """No process ends on another machine."""
    assert callable(fault)
    with machine_job(machines, shared) as job:
        struck, *others = machines.node_hosts
        node = job.node(struck)
        before = [pids(host) for host in others]
        fault(struck)
        job.wait_lost(node)
        assert [pids(host) for host in others] == before
        report = job.report()

        assert digests(report) == expected
        assert losses(report) == [(node,)]


def test_half_of_the_machines_are_lost_where_they_are_cut_off_from_the_head(
    machines: Machines, shared: Path, expected: tuple[str, str]
) -> None:
    """The first three hold all layers, because pipelines are of neighbours."""
    hosts = machines.hosts
    with machine_job(machines, shared) as job:
        by_node = sorted(machines.node_hosts, key=job.node)
        hosts.cut_between([hosts[0], *by_node[:3]], by_node[3:])
        job.wait_lost(3)
        hosts.heal_between([hosts[0], *by_node[:3]], by_node[3:])
        report = job.report()

        assert digests(report) == expected
        assert sorted(node for nodes in losses(report) for node in nodes) == [3, 4, 5]


def test_a_machine_that_another_one_does_not_hear_is_found_out(
    machines: Machines, shared: Path, expected: tuple[str, str]
) -> None:
    """Both reach the head; their link is silent for two minutes before it breaks."""
    hosts = machines.hosts
    with machine_job(machines, shared) as job:
        first, second, *_ = sorted(machines.node_hosts, key=job.node)
        hosts.cut_one_way(first, second)
        job.head.wait_for_line("^lost: node [01]\\b", timeout_s=3 * LINK_SILENCE_S)
        report = job.report(timeout_s=3 * LINK_SILENCE_S)

        assert digests(report) == expected


def test_a_machine_that_is_told_to_leave_costs_nothing(
    machines: Machines, shared: Path, expected: tuple[str, str]
) -> None:
    """Its layers move while the others train."""
    with machine_job(machines, shared) as job:
        host = machines.node_hosts[0]
        node = job.node(host)
        machines.agents[host.index].signal(signal.SIGTERM)
        assert machines.agents[host.index].wait(TIMEOUT_S) == 0
        report = job.report()

        assert digests(report) == expected
        assert losses(report) == []
        assert node not in report["final"]["nodes"]
        assert all(event["redone_samples"] == 0 for event in report["events"])


def test_a_seventh_machine_joins(
    machines: Machines, shared: Path, expected: tuple[str, str]
) -> None:
    """Its place is kept free until then, so that it has imported torch."""
    seventh, join = tuple(machines.hosts)[-1], ("--inject", "join:1@60")
    with machine_job(machines, shared, *join, max_nodes=7, others=[seventh]) as job:
        report = job.report()

        assert digests(report) == expected
        assert losses(report) == []
        assert [event["nodes"] for event in report["events"] if event["kind"] == "join"] == [[6]]
        assert report["final"]["nodes"] == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("is_elsewhere", [False, True], ids=["there", "elsewhere"])
def test_a_head_that_is_killed_is_started_again(
    is_elsewhere: bool, machines: Machines, shared: Path, expected: tuple[str, str]
) -> None:
    """Elsewhere it has the journal, because the directory of states is on a shared disk."""
    with machine_job(machines, shared) as job:
        before = [pids(host) for host in machines.node_hosts]
        machines.hosts[0].kill()
        if not is_elsewhere:
            machines.hosts[0].boot()
        job.take_up(is_elsewhere=is_elsewhere)
        job.wait_progress()
        assert [pids(host) for host in machines.node_hosts] == before
        report = job.report()

        assert digests(report) == expected
        assert losses(report) == []


@pytest.mark.parametrize("step", STEPS)
def test_a_head_that_is_killed_at_any_step_is_started_again(
    step: str, machines: Machines, shared: Path, expected: tuple[str, str]
) -> None:
    """Of an iteration, or of the recovery from a crash; after a commit, once on another host."""
    crash = ("--inject", f"crash:1@{STRUCK_AT}") if step in RECOVERY_STEPS else ()
    with machine_job(machines, shared, *crash, "--inject", f"head:@{STRUCK_AT}.{step}") as job:
        assert job.head.wait(TIMEOUT_S) == -signal.SIGKILL
        job.take_up(is_elsewhere=step == "optimizer")
        report = job.report()

        assert digests(report) == expected
        assert losses(report) == []
        assert report["final"]["nodes"] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("loss", ["cut", "dead"])
def test_a_minute_without_the_head_costs_nothing(
    loss: str, machines: Machines, shared: Path, expected: tuple[str, str]
) -> None:
    """No worker process ends, nobody is evicted, and nothing is done again."""
    head_host = machines.hosts[0]
    with machine_job(machines, shared) as job:
        before = [pids(host) for host in machines.node_hosts]
        agent = machines.agents[machines.node_hosts[0].index]
        num_said = len(agent.output)
        if loss == "cut":
            head_host.cut()
        else:
            head_host.kill_processes()
        with pytest.raises(AssertionError, match="not within"):
            agent.wait_for_line("has ended|no head for", timeout_s=OUTAGE_S, start=num_said)
        assert [pids(host) for host in machines.node_hosts] == before
        if loss == "cut":
            head_host.heal()
            job.wait_progress()
        else:
            job.take_up(is_elsewhere=False)
        report = job.report()

        assert digests(report) == expected
        assert losses(report) == []
        assert all(event["redone_samples"] == 0 for event in report["events"])
        assert report["final"]["nodes"] == [0, 1, 2, 3, 4, 5]
