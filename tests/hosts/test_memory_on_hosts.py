"""A user's own loop on several machines that lose power: ranks go on in place, from memory."""

import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from helpers.command import wait_for
from helpers.hosts import Host, Hosts, Process

pytestmark = [pytest.mark.hosts, pytest.mark.long, pytest.mark.timeout(600)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "fsdp2_in_process.py"
TIMEOUT_S = 120.0
RECOVERED_S = 10.0  # The goal; asserted at three times of it.


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A directory that all machines see."""
    path = tmp_path / "shared"
    path.mkdir()
    return path


@pytest.fixture
def hosts(shared: Path) -> Iterator[Hosts]:
    with Hosts(4, shared=[shared]) as made:
        yield made


def begin(hosts: Sequence[Host], *words: str, ranks: int = 1) -> list[Process]:
    """A torchrun on each host."""
    return [
        host.start(
            *(sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(hosts)}"),
            *(f"--node-rank={index}", f"--master-addr={hosts[0].address}", "--master-port=29411"),
            *(f"--nproc-per-node={ranks}", str(EXAMPLE), *words),
            *("--directory", str(host.directory / "memory")),
            env={
                "GLOO_SOCKET_IFNAME": interface(host),
                "OMP_NUM_THREADS": "1",
                # Torch asks for the name of each address, and test hosts have nobody to answer.
                "RES_OPTIONS": "timeout:1 attempts:1",
            },
        )
        for index, host in enumerate(hosts)
    ]


def interface(host: Host) -> str:
    """The name of the one that has the host's address."""
    told = host.run("ip", "-oneline", "address")
    found = re.search(rf"^\d+: (\S+) +inet {re.escape(host.address)}/", told, re.MULTILINE)
    assert found, told
    return found[1]


def lines(processes: Sequence[Process]) -> str:
    """What all of them have printed."""
    return "\n".join(process.output for process in processes)


def wait_line(processes: Sequence[Process], pattern: str, *, number: int = 1) -> None:
    """Until the pattern is there so often."""
    wait_for(
        lambda: len(re.findall(pattern, lines(processes), re.MULTILINE)) >= number,
        what=f"{number} times {pattern}",
        timeout_s=TIMEOUT_S,
    )


def assert_nothing_lost(processes: Sequence[Process], *, begins: int) -> None:
    """Each group began with the state that the one before had after the same iteration, the newest
    one or the one before."""
    told = lines(processes)
    after: dict[str, set[str]] = {}
    for number, value in re.findall(r"^iteration (\d+) (\w+)", told, re.MULTILINE):
        after.setdefault(number, set()).add(value)
    began = re.findall(r"^from (\d+) (\w+)", told, re.MULTILINE)
    assert len(began) == begins, told
    for number, value in began:
        assert number == "0" or value in after[number], told


@pytest.mark.parametrize("more", [(), ("--ddp",)], ids=["fsdp2", "ddp"])
def test_two_machines_of_four_are_lost_before_there_is_another_one(
    more: tuple[str, ...], hosts: Hosts
) -> None:
    """With three copies. The second one has the first rank, and torchrun's own store."""
    processes = begin(list(hosts), "--iterations", "100000", "--copies", "3", *more)
    seconds = []
    for number, lost in enumerate((3, 0)):
        wait_line(processes, rf"^iteration {40 * (number + 1)} ")
        hosts[lost].kill()
        killed_s = time.monotonic()
        wait_line(processes, r"^recovered", number=number + 1)
        seconds.append(time.monotonic() - killed_s)

    print(f"seconds from the loss of power to the first iteration: {seconds}")
    assert_nothing_lost(processes, begins=3)
    assert max(seconds) <= 3 * RECOVERED_S


def test_what_no_machine_has_any_more_is_read_from_the_saves(hosts: Hosts, shared: Path) -> None:
    """Two machines of two ranks: the one that is left goes on, for it alone can have claimed that
    at the place of the saves. Then it is lost, too."""
    pair = list(hosts)[:2]
    words = ("--iterations", "100000", "--copies", "2", "--persist-every", "20")
    saves = ("--saves", str(shared / "saves"))
    processes = begin(pair, *words, *saves, ranks=2)
    wait_line(processes, r"^iteration 40 ")
    pair[0].kill()
    wait_line(processes, r"^recovered")
    assert_nothing_lost(processes, begins=2)
    pair[1].kill()

    newest = max(int(path.name.split("-")[0]) for path in (shared / "saves").glob("*-*"))
    for host in pair:
        host.boot()
    again = begin(pair, *words, *saves, ranks=2)
    wait_line(again, r"^from \d+")
    (begun,) = re.findall(r"^from (\d+) ", lines(again), re.MULTILINE)
    assert 20 <= int(begun) <= newest
