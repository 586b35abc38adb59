"""Machines on which the same paths are different files: nobody trains on them unknowingly."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.host_networks import needs_namespaces
from helpers.hosts import Host, Hosts, Process
from planaria.transport.credentials import write_credentials

pytestmark = [pytest.mark.hosts, needs_namespaces]

# Each host has a /tmp of its own.
DATA = Path("/tmp/planaria-test-data.txt")
OWN_SAVES = Path("/tmp/planaria-test-saves")
JOB = """
[model.config]
model_type = "gpt2"
n_layer = 2
[data]
path = "{data}"
[checkpoint]
directory = "{saves}"
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Hosts, Path]]:
    """A head's host and two machines, and a directory that they share."""
    shared = tmp_path_factory.mktemp("shared")
    write_credentials(shared / "token")
    with Hosts(3, shared=(shared,)) as made:
        yield made, shared


def start_head(host: Host, shared: Path, *, saves: Path) -> tuple[Process, str]:
    """A head that waits for two machines, and its address."""
    path = host.directory / "job.toml"
    path.write_text(JOB.format(data=DATA, saves=saves))
    words = ("train", str(path), "--listen", f"{host.address}:0", "--nodes", "2")
    head = host.start("planaria", *words, "--token-file", str(shared / "token"))
    return head, head.wait_for_line(r"planaria agent --join (\S+)")[1]


def join(host: Host, address: str, shared: Path, *, text: str) -> Process:
    """Starts the agent of a machine on which the data has this text."""
    host.run("sh", "-c", f"printf '{text}' > {DATA}")
    token = str(shared / "token")
    return host.start("planaria", "agent", "--join", address, "--token-file", token)


@pytest.mark.long
def test_other_data_at_the_same_path_is_refused(hosts: tuple[Hosts, Path]) -> None:
    """The head has no data at all, so the first machine's counts."""
    (head_host, first, second), shared = hosts
    head, address = start_head(head_host, shared, saves=shared / "saves")

    agents = {
        first.name: join(first, address, shared, text="the text"),
        second.name: join(second, address, shared, text="another text"),
    }
    refusal = head.wait_for_line(rf"^(host-\d) cannot take part: data\.path = '{DATA}'")
    refused = agents[refusal[1]]

    assert refused.wait() == 2
    assert "copy the same files to all machines" in refused.output
    head.kill()
    for host in (head_host, first, second):
        host.kill_processes()


@pytest.mark.long
def test_a_directory_of_saves_of_each_machine_is_refused(hosts: tuple[Hosts, Path]) -> None:
    """Each machine would keep its part of a save for itself, and none could be resumed from."""
    (head_host, first, second), shared = hosts
    head, address = start_head(head_host, shared, saves=OWN_SAVES)

    agent = join(first, address, shared, text="the text")

    assert agent.wait() == 2
    assert f"checkpoint.directory = '{OWN_SAVES}'" in agent.output
    assert "mount one file system at that path" in agent.output
    head.wait_for_line("host-1 cannot take part: checkpoint.directory")
    for host in (head_host, first, second):
        host.kill_processes()
