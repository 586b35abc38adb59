"""A real Slurm runs what `planaria launch` writes, on machines of which some are lost.

Five test hosts are its nodes, see helpers/slurm.py; a job begins on four of them. Each job ends
with the bits of one machine.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from helpers.command import wait_for
from helpers.host_networks import needs_namespaces
from helpers.machine_jobs import TIMEOUT_S, local_digests, write_job
from helpers.slow_layers import HURRY
from helpers.slurm import Slurm, missing_programs, slurm
from planaria.nodes.forkserver import ForkServer
from planaria.transport.credentials import write_credentials

pytestmark = [
    pytest.mark.clusters,
    pytest.mark.long,
    needs_namespaces,
    pytest.mark.skipif(bool(missing_programs()), reason=f"there is no {missing_programs()}"),
    pytest.mark.timeout(900),
]

NUM_NODES: Final = 5
ITERATIONS: Final = 600  # Long enough for an agent to ask Slurm twice, every 30 s.
SETTINGS: Final = (
    *("--set", f"training.iterations={ITERATIONS}"),
    *("--set", "cluster.device_memory_bytes=200000"),  # One node can hold the model.
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that all machines see."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def cluster(directory: Path) -> Iterator[Slurm]:
    """A Slurm of five nodes."""
    with slurm(directory, num_nodes=NUM_NODES) as made:
        yield made


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, server: ForkServer) -> tuple[str, str]:
    """The digests of the job on one machine."""
    return local_digests(tmp_path_factory.mktemp("local"), server, iterations=ITERATIONS)


class Launched:
    """A job that `planaria launch` has submitted.

    Attributes:
        number: its number in Slurm.
    """

    def __init__(self, cluster: Slurm, directory: Path) -> None:
        directory.mkdir()
        self._cluster = cluster
        self._directory = directory
        self._hurry = directory / "hurry"
        write_job(directory, directory / "saves")
        write_credentials(directory / "token")
        words = ("planaria", "launch", "job.toml", "--on", "slurm", "--nodes", "3:4", *SETTINGS)
        variables = {HURRY: str(self._hurry), "watch_s": "2"}
        process = cluster.start(*words, "--token-file", "token", cwd=directory, env=variables)
        assert process.wait(TIMEOUT_S) == 0, process.output
        self.number = process.output.split()[-1]

    @property
    def log(self) -> str:
        """What the job has printed so far."""
        path = self._directory / f"job-{self.number}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_log(self, pattern: str, *, timeout_s: float = TIMEOUT_S) -> re.Match[str]:
        """The first match of a line of the job's output, which it is waited for."""
        matches: list[re.Match[str]] = []

        def is_there() -> bool:
            match = re.search(pattern, self.log, re.MULTILINE)
            matches.extend([match] if match else [])
            return bool(match)

        try:
            wait_for(is_there, what=f"the job prints {pattern!r}", timeout_s=timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}; it has printed:\n{self.log}") from None
        return matches[0]

    def wait_state(self, state: str) -> None:
        """Waits until the job is in a state of Slurm."""
        wait_for(
            lambda: self._cluster.job_state(self.number) == state,
            what=f"the job is {state}",
            timeout_s=TIMEOUT_S,
        )

    def digests(self) -> tuple[str, str]:
        """The digests with which it has ended, once it may train as fast as it can."""
        self._hurry.touch()
        self.wait_state("COMPLETED")
        parts = (rf"^ {part} +([0-9a-f]{{64}})$" for part in ("parameters", "optimizer"))
        found = [re.search(part, self.log, re.MULTILINE) for part in parts]
        assert all(found), self.log
        return tuple(match[1] for match in found if match)  # type: ignore[return-value]


@pytest.fixture
def job(cluster: Slurm, directory: Path, request: pytest.FixtureRequest) -> Iterator[Launched]:
    """A job that trains on four machines. Afterwards all machines are there again."""
    launched = Launched(cluster, directory / request.node.name)
    try:
        launched.wait_log("^iteration 5 ")
        yield launched
    finally:
        cluster.restore()


def wait_for_other_machine(job: Launched, cluster: Slurm) -> None:
    """Waits until a node starts on the machine that the job did not begin on."""
    job.wait_log(r"^asked for a machine in place of \S+ \(.*\): job \d+ of Slurm is to bring one")
    job.wait_log(rf"^node \d+ starts on {cluster.nodes[4].name} ")


def test_the_loss_of_a_machine_costs_its_node_alone_and_another_one_takes_its_place(
    job: Launched, cluster: Slurm, expected: tuple[str, str]
) -> None:
    """Slurm's daemons and the tasks are killed there; allocation and step go on without it."""
    cluster.nodes[2].kill_processes()
    job.wait_log(r"^lost: node \d")
    wait_for_other_machine(job, cluster)

    assert job.digests() == expected
    assert "Restarts=0" in cluster.run("scontrol", "show", "job", job.number)


@pytest.mark.parametrize("is_drained", [False, True])
def test_the_loss_of_the_head_s_machine_loses_nothing_that_was_trained(
    is_drained: bool, job: Launched, cluster: Slurm, expected: tuple[str, str]
) -> None:
    """The others have the job queued again, and save what they hold when Slurm ends them."""
    if is_drained:  # Slurm never calls it down then.
        name = cluster.nodes[0].name
        cluster.run("scontrol", "update", f"nodename={name}", "state=drain", "reason=test")
    cluster.nodes[0].kill_processes()
    # Slurm takes half a minute to miss a machine, and two to start a job again.
    text = "made a save of iteration ([0-9]+) of what ranks"
    made = job.wait_log(text, timeout_s=2.0 * TIMEOUT_S)

    trained = [int(text) for text in re.findall(r"^iteration (\d+) ", job.log, re.MULTILINE)]
    assert int(made[1]) >= max(trained)
    assert job.digests() == expected
    assert "Restarts=1" in cluster.run("scontrol", "show", "job", job.number)


def test_a_machine_that_is_drained_is_left_in_peace(
    job: Launched, cluster: Slurm, expected: tuple[str, str]
) -> None:
    """Slurm interrupts nothing on it."""
    name = cluster.nodes[3].name
    cluster.run("scontrol", "update", f"nodename={name}", "state=drain", "reason=test")
    node = job.wait_log(rf"^node (\d+) starts on {name} ")[1]
    job.wait_log(rf"^node {node} leaves the job$")
    job.wait_log(r"^preempted: node \d+: .* moved while training went on")  # Nothing is redone.
    job.wait_log(rf"^node {node} has ended$")
    wait_for_other_machine(job, cluster)

    assert job.digests() == expected
    assert not re.search("^lost: ", job.log, re.MULTILINE)


def test_who_cancels_a_job_finds_it_saved(job: Launched, cluster: Slurm) -> None:
    """It is not queued again."""
    cluster.run("scancel", job.number)
    job.wait_log("^saved iteration ")
    job.wait_state("CANCELLED")

    assert "Restarts=0" in cluster.run("scontrol", "show", "job", job.number)
