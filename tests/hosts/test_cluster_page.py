"""The commands of docs/CLUSTER.md do what the page says: they are run word for word.

Each host has the name HEAD for the first one in its /etc/hosts. Without namespaces, where hosts
have no files of their own in /etc, the first host's address stands for that word.
"""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from helpers.command import wait_for
from helpers.host_networks import obstacle
from helpers.hosts import Host, Hosts, Process
from planaria.job.config import load_job
from planaria.job.training_job import Job
from planaria.nodes.forkserver import ForkServer

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(600)]

TIMEOUT_S: Final = 250.0
REPOSITORY: Final = Path(__file__).resolve().parents[2]
PAGE: Final = (REPOSITORY / "docs" / "CLUSTER.md").read_text()
JOB: Final = "examples/cluster.toml"
TOKEN: Final = ".config/planaria/token"


def commands(section: str) -> list[str]:
    """The lines of the fenced blocks of a section of the page."""
    _, start, rest = PAGE.partition(f"\n## {section}\n")
    assert start, f"docs/CLUSTER.md has no section {section!r}"
    blocks = re.findall(
        r"^```\w*\n(.*?)^```$", rest.partition("\n## ")[0], re.MULTILINE | re.DOTALL
    )
    return [line for block in blocks for line in block.splitlines()]


FIRST: Final = commands("Two machines in five minutes")
ANYWHERE: Final = commands("Look at it from anywhere")


class Page:
    """Two hosts at which the page's commands are run, in a directory that both see.

    Attributes:
        hosts: the machines; the first one is the page's first machine.
        directory: working directory of the commands, with the examples.
    """

    def __init__(self, hosts: Hosts, directory: Path) -> None:
        self.hosts = hosts
        self.directory = directory
        self._head_word = "HEAD"
        if obstacle():
            self._head_word = hosts[0].address
            return
        names = directory / "hosts"
        names.write_text(f"127.0.0.1 localhost\n{hosts[0].address} HEAD\n")
        for host in hosts:
            host.run("mount", "--bind", str(names), "/etc/hosts")

    def set_key(self, key: str, value: int) -> None:
        """Changes a number in the directory's copy of the example, not in the page's commands."""
        job = self.directory / JOB
        job.write_text(re.sub(f"^{key} = .*", f"{key} = {value}", job.read_text(), flags=re.M))

    def start(self, line: str, host: Host) -> Process:
        """Starts a line of the page in a shell."""
        return host.start("bash", "-c", self._line(line), cwd=self.directory)

    def run(self, line: str, host: Host) -> str:
        """Runs a line of the page in a shell; returns what it prints."""
        return host.run("bash", "-c", self._line(line), cwd=self.directory, timeout_s=TIMEOUT_S)

    def begin(self) -> tuple[Process, list[Process]]:
        """Does what "Two machines in five minutes" says; returns the head and the agents."""
        token, train, agent = FIRST
        self.run(token, self.hosts[0])
        for host in tuple(self.hosts)[1:]:
            copy = host.directory / TOKEN
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(self.hosts[0].directory / TOKEN, copy)
        head = self.start(train, self.hosts[0])
        return head, [self.start(agent, host) for host in self.hosts]

    def end(self) -> None:
        """Ends all processes, and forgets the run and the token."""
        for host in self.hosts:
            host.kill_processes()
            shutil.rmtree(host.directory / ".config", ignore_errors=True)
        shutil.rmtree(self.directory / "checkpoints", ignore_errors=True)

    def _line(self, line: str) -> str:
        return line.replace("HEAD", self._head_word)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """Two hosts that see one directory, with the repository's examples."""
    directory = tmp_path_factory.mktemp("shared")
    with Hosts(2, shared=[directory]) as made:
        yield Page(made, directory)


@pytest.fixture
def page(hosts: Page) -> Iterator[Page]:
    """The hosts, without anything of another test."""
    (hosts.directory / "examples").mkdir(exist_ok=True)
    shutil.copy(REPOSITORY / JOB, hosts.directory / JOB)
    yield hosts
    hosts.end()


def test_the_page_has_the_commands_that_these_tests_know_a_machine_for() -> None:
    """A command that is added to the page is added here, too."""
    assert [line.split()[:2] for line in FIRST] == [
        ["planaria", verb] for verb in ("token", "train", "agent")
    ]
    assert all(line.startswith("planaria ") and "HEAD:" in line for line in ANYWHERE)


@pytest.mark.long
def test_two_machines_train_as_the_page_says(
    page: Page, server: ForkServer, tmp_path: Path
) -> None:
    """To the same bits as one machine, and everybody ends with 0."""
    page.set_key("iterations", 20)
    head, agents = page.begin()
    endings = [process.wait(TIMEOUT_S) for process in (head, *agents)]
    assert endings == [0, 0, 0], [process.output for process in (head, *agents)]

    config = load_job(
        page.directory / JOB, overrides=(f"checkpoint.directory={tmp_path / 'here'}",)
    )
    final = Job(config).train(server=server).report.final
    assert final.parameters_sha256[:12] in head.output


@pytest.mark.long
def test_a_job_is_looked_at_from_anywhere_as_the_page_says(page: Page) -> None:
    """Each command works while the job trains, on the machine that is not the head's."""
    page.set_key("iterations", 100_000)
    page.set_key("persist_every", 5)
    head, agents = page.begin()
    head.wait_for_line("^saved iteration", timeout_s=TIMEOUT_S)
    printed = {line.split()[1]: page.run(line, page.hosts[1]) for line in ANYWHERE}

    assert re.search(r"^\s*1\s", printed["status"], re.MULTILINE)  # The row of node 1.
    assert "--bandwidth" in printed["doctor"]
    assert "tonight" in printed["checkpoint"]
    wait_for(lambda: 0 in [agent.returncode for agent in agents], what="node 1 leaves")
    assert head.stop(TIMEOUT_S) == 130, head.output  # As on Ctrl-C, after a save.
