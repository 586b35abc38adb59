"""Jobs on several machines, which lose power, hang and are cut off while the job trains.

However it goes, the job ends with the bits that it has on one machine.
"""

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.command import wait_for
from helpers.fake_scheduler import FakeScheduler
from helpers.host_networks import needs_namespaces
from helpers.hosts import Host, Hosts
from helpers.machine_jobs import (
    LEASE_S,
    NUM_NODES,
    TIMEOUT_S,
    MachineJob,
    Machines,
    digests,
    joins,
    local_digests,
    losses,
    machine_job,
    pids,
)
from planaria.nodes.forkserver import ForkServer
from planaria.nodes.machine import EXIT_AGAIN

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(600)]

LINK_SILENCE_S = 120.0  # A connection between nodes breaks after that.
CUT_S = 10.0
# It has something against the machine whose name is in the file.
SINFO = """\
bad=$(cat "$FAKES/bad" 2> /dev/null) || bad=none
case "$*" in *"--nodes=$bad "*) echo "fail (ECC errors)" ;; *) echo "allocated (none)" ;; esac
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that all hosts see."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def expected(directory: Path, server: ForkServer) -> tuple[str, str]:
    """The digests of the job on one machine."""
    return local_digests(directory, server)


@pytest.fixture(scope="module")
def machines(directory: Path) -> Iterator[Machines]:
    """Six hosts: the head's, those of four nodes, and another one."""
    with Hosts(NUM_NODES + 2, shared=[directory]) as hosts:
        yield Machines(hosts, directory)


@pytest.fixture
def shared(directory: Path, request: pytest.FixtureRequest) -> Path:
    """A directory that all hosts see, of this test alone."""
    path: Path = directory / request.node.name
    path.mkdir()
    return path


@pytest.mark.long
def test_a_job_goes_on_when_a_machine_loses_power(
    machines: Machines, shared: Path, expected: tuple[str, str]
) -> None:
    """Nobody hears of it: the node's lease runs out. No other process ends."""
    hosts = machines.hosts
    with machine_job(machines, shared) as job:
        node = job.node(hosts[1])
        before = [pids(host) for host in machines.node_hosts[1:]]
        hosts[1].kill()
        job.wait_lost(node)
        assert [pids(host) for host in machines.node_hosts[1:]] == before
        report = job.report()

        assert digests(report) == expected
        assert losses(report) == [(node,)]
        assert sorted({0, 1, 2, 3} - {node}) == report["final"]["nodes"]
        assert "did not leave" not in job.head.output


@pytest.mark.long
def test_another_host_takes_the_job_up_when_that_of_the_head_and_a_node_lose_power(
    machines: Machines, shared: Path, expected: tuple[str, str]
) -> None:
    """As a rack does. The new head has the state directory, which is on a shared disk. The nodes
    that come back go on in their processes, and the one that does not is lost then."""
    hosts = machines.hosts
    with machine_job(machines, shared) as job:
        node = job.node(hosts[1])
        before = [pids(host) for host in machines.node_hosts[1:]]
        hosts[0].kill()
        hosts[1].kill()
        job.take_up(is_elsewhere=True)
        job.wait_lost(node)
        assert [pids(host) for host in machines.node_hosts[1:]] == before
        report = job.report()

        assert digests(report) == expected
        assert losses(report) == [(node,)]
        assert sorted({0, 1, 2, 3} - {node}) == report["final"]["nodes"]


@pytest.mark.long
def test_a_head_on_another_host_at_an_address_that_nobody_knows_takes_the_job_up(
    machines: Machines, shared: Path, expected: tuple[str, str]
) -> None:
    """That of the first head goes down and closes nothing. Nodes and agents read the new address at
    the place of saves, and no process ends."""
    hosts = machines.hosts
    with machine_job(machines, shared) as job:
        before = [pids(host) for host in machines.node_hosts]
        hosts[0].kill()
        job.take_up(is_elsewhere=True, is_known=False)
        job.wait_progress()
        assert [pids(host) for host in machines.node_hosts] == before
        report = job.report()

        assert digests(report) == expected
        assert losses(report) == []
        assert report["final"]["nodes"] == [0, 1, 2, 3]


@pytest.mark.long
@needs_namespaces
def test_a_machine_that_its_scheduler_calls_bad_is_left_once_a_worker_has_failed_there(
    machines: Machines, shared: Path, expected: tuple[str, str]
) -> None:
    """It finds nothing wrong with itself, and would have crashed twice more. Its node leaves in
    peace, and whoever starts its agent again hears why it gets no other."""
    scheduler = FakeScheduler(shared / "fakes")
    scheduler.write("sinfo", SINFO)
    scheduler.use_planaria()
    names = ("PATH", "FAKES", "SLURM_JOB_ID")
    machines.head_environment = {name: scheduler.environment[name] for name in names}
    options = ("--operator", "slurm", "--inject", "crash:2@30")
    try:
        with machine_job(machines, shared, *options) as job:
            [bad] = [host for host in machines.node_hosts if job.node(host) == 2]
            (scheduler.directory / "bad").write_text(bad.name)
            told = "Slurm calls it fail (ECC errors)"
            line = rf"^node 2 leaves the job, .* unfit: {re.escape(told)}$"
            job.head.wait_for_line(line, timeout_s=TIMEOUT_S)
            assert machines.agents[bad.index].wait(TIMEOUT_S) == EXIT_AGAIN
            again = job.join(bad)
            assert again.wait(TIMEOUT_S) == EXIT_AGAIN
            assert f"this machine cannot take part: {told}" in again.output
            report = job.report()

            assert digests(report) == expected
            assert losses(report) == []
            assert report["final"]["nodes"] == [0, 1, 3]
            [unfit] = [event for event in report["events"] if event["kind"] == "unfit"]
            assert told in unfit["reason"]
            assert "asked for a machine in place of" in job.head.output
    finally:
        machines.head_environment = {}


@pytest.mark.long
@needs_namespaces
def test_a_head_that_is_cut_off_for_a_while_costs_nothing(
    machines: Machines, shared: Path, expected: tuple[str, str]
) -> None:
    """It evicts nobody, no process ends, and nothing is done again."""
    hosts = machines.hosts
    with machine_job(machines, shared) as job:
        before = [pids(host) for host in hosts]
        hosts[0].cut()
        with pytest.raises(AssertionError, match="not within"):
            job.head.wait_for_line("^lost: ", timeout_s=max(CUT_S, 2.0 * LEASE_S))
        hosts[0].heal()
        job.wait_progress()
        assert [pids(host) for host in hosts] == before
        report = job.report()

        assert digests(report) == expected
        assert losses(report) == []
        assert report["final"]["epoch"] == 0
        assert report["final"]["nodes"] == [0, 1, 2, 3]
        assert all(event["redone_samples"] == 0 for event in report["events"])


@pytest.mark.long
def test_another_agent_takes_the_place_of_one_that_is_killed(
    machines: Machines, shared: Path, expected: tuple[str, str]
) -> None:
    """Its node ends with it, and the machine joins as a new node."""
    hosts = machines.hosts
    with machine_job(machines, shared) as job:
        node = job.node(hosts[1])
        assert machines.agents[1].kill() == -signal.SIGKILL
        job.wait_lost(node)
        wait_for(lambda: not hosts[1].processes(), what="the node ends with its agent")
        job.join(hosts[1])

        assert_back_as_node_4(job, hosts[1], lost=node, expected=expected)


@pytest.mark.long
@pytest.mark.parametrize("fault", ["hang", pytest.param("cut", marks=needs_namespaces)])
def test_a_machine_that_is_back_after_its_lease_joins_as_a_new_node(
    fault: str, machines: Machines, shared: Path, expected: tuple[str, str]
) -> None:
    """What its node did not hear of, it hears then, and ends; the same agent runs another one."""
    hosts = machines.hosts
    begin, end = {"hang": (Host.hang, Host.go_on), "cut": (Host.cut, Host.heal)}[fault]
    with machine_job(machines, shared) as job:
        node = job.node(hosts[1])
        begin(hosts[1])
        job.wait_lost(node)
        end(hosts[1])

        assert_back_as_node_4(job, hosts[1], lost=node, expected=expected, num_nodes=2)


def assert_back_as_node_4(
    job: MachineJob,
    host: Host,
    *,
    lost: int,
    expected: tuple[str, str],
    num_nodes: int = 1,
) -> None:
    """A host that has lost its node runs node 4, and nothing else was lost or joined.

    Args:
        num_nodes: number of nodes that its agent has run then.
    """
    assert job.node(host, num_nodes=num_nodes) == 4
    job.head.wait_for_line("^joined: node 4", timeout_s=TIMEOUT_S)
    report = job.report()
    assert digests(report) == expected
    assert (losses(report), joins(report)) == ([(lost,)], [(4,)])


@pytest.mark.long
def test_a_machine_joins_while_the_job_trains(
    machines: Machines, shared: Path, expected: tuple[str, str]
) -> None:
    """Where there may be five, the fifth is welcome at any time."""
    hosts = machines.hosts
    with machine_job(machines, shared, max_nodes=5) as job:
        job.join(hosts[5])
        job.head.wait_for_line("^joined: node 4", timeout_s=TIMEOUT_S)
        report = job.report()

        assert digests(report) == expected
        assert (losses(report), joins(report)) == ([], [(4,)])
        assert report["final"]["nodes"] == [0, 1, 2, 3, 4]


@pytest.mark.long
@needs_namespaces
def test_half_of_the_machines_are_lost_if_they_are_cut_off_from_the_head(
    machines: Machines, shared: Path, expected: tuple[str, str]
) -> None:
    """Those on the head's side go on, if they have all layers; the others come back."""
    hosts = machines.hosts
    with machine_job(machines, shared) as job:
        near = [host for host in machines.node_hosts if job.node(host) < 2]
        far = [host for host in machines.node_hosts if job.node(host) >= 2]
        hosts.cut_between([hosts[0], *near], far)
        job.wait_lost(2)
        hosts.heal_between([hosts[0], *near], far)
        for host in far:
            job.node(host, num_nodes=2)
        job.head.wait_for_line(r"(?s)^joined: .*^joined: |^joined: nodes ", timeout_s=TIMEOUT_S)
        report = job.report()

        assert digests(report) == expected
        assert sorted(node for nodes in losses(report) for node in nodes) == [2, 3]
        assert sorted(node for nodes in joins(report) for node in nodes) == [4, 5]


@pytest.mark.long
@needs_namespaces
@pytest.mark.parametrize("cut", ["one way", "between pipelines"])
def test_machines_that_reach_the_head_but_not_one_another_are_found_out(
    cut: str, machines: Machines, shared: Path, expected: tuple[str, str]
) -> None:
    """Their leases never run out, but their links break: who is complained of most has to go."""
    hosts = machines.hosts
    with machine_job(machines, shared) as job:
        first, second, third, fourth = sorted(machines.node_hosts, key=job.node)
        if cut == "one way":
            hosts.cut_one_way(first, second)
        else:
            hosts.cut_between([first, second], [third, fourth])
        job.head.wait_for_line("^lost: node", timeout_s=2 * LINK_SILENCE_S)
        report = job.report(timeout_s=2 * LINK_SILENCE_S)  # Machines come back, and go again.

        assert digests(report) == expected
        assert losses(report)


@pytest.mark.long
@needs_namespaces
def test_nodes_that_hold_what_others_lack_wait_for_the_network(
    machines: Machines, shared: Path, expected: tuple[str, str]
) -> None:
    """The stages of all pipelines are parted: whoever went would take the last copies along."""
    hosts = machines.hosts
    with machine_job(machines, shared) as job:
        first, second, third, fourth = sorted(machines.node_hosts, key=job.node)
        hosts.cut_between([first, third], [second, fourth])
        tries = r"(?s:^a link broke.*?)" * 4
        job.head.wait_for_line(tries, timeout_s=3 * LINK_SILENCE_S)
        hosts.heal_between([first, third], [second, fourth])
        job.wait_progress()
        report = job.report()

        assert digests(report) == expected
