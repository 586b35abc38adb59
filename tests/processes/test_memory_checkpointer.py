"""Loops of one's own under torchrun: ranks and nodes are killed, and memory has what they had."""

import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from helpers.forked_ranks import told_by_ranks
from helpers.keepers import keepers
from helpers.linked_ranks import wait_until
from helpers.machines import free_port
from planaria.checkpoint.memory.arena import Arena
from planaria.errors import CheckpointError
from planaria.nodes.forkserver import ForkServer
from planaria.torchrun.keeper import attach

pytestmark = pytest.mark.faults

TESTS = Path(__file__).parents[1]
EXAMPLE = TESTS.parent / "examples" / "fsdp2.py"
DDP = TESTS / "helpers" / "ddp_loop.py"
TIMEOUT_S = 110.0
ITERATIONS = 8


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """Where keepers of the test have their sockets; they end with it."""
    yield tmp_path
    for process in keepers(tmp_path):
        process.kill()


def begun(
    script: Path, *words: str, ranks: int = 1, options: tuple[str, ...] = ()
) -> subprocess.Popen[bytes]:
    """A torchrun of one node, whose ranks tell where they are if a signal ends them."""
    options = options or ("--standalone",)
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    return subprocess.Popen(
        [*command, *options, str(script), *words],
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONFAULTHANDLER": "1"},
    )


def ended(process: subprocess.Popen[bytes], code: int = 0) -> str:
    """What it wrote, once it has ended with this code."""
    _, told = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == code, told.decode()
    return told.decode()


def two_nodes(place: Path, *words: str, code: int) -> None:
    """Two nodes of one rank each, with a keeper of its own."""
    port = free_port("127.0.0.1")
    processes = [
        begun(
            EXAMPLE,
            *("--directory", str(place / f"node{node}"), "--hashes", str(place / "hashes"), *words),
            options=("--nnodes=2", f"--node-rank={node}", f"--master-port={port}"),
        )
        for node in range(2)
    ]
    for process in processes:
        ended(process, code)


def hashes(place: Path) -> tuple[dict[int, set[str]], list[tuple[int, str]]]:
    """The hashes after each iteration, and where runs began with which."""
    after: dict[int, set[str]] = {}
    begins = []
    for line in (place / "hashes").read_text().splitlines():
        kind, number, value = line.split(maxsplit=2)
        if kind == "from":
            begins.append((int(number), value))
        else:
            after.setdefault(int(number), set()).add(value)
    return after, begins


def assert_restored(place: Path) -> None:
    """The second run began with what the first one had, at its end or an iteration before."""
    after, begins = hashes(place)
    number, value = begins[1]
    assert number in (3, 4)
    assert value in after[number]


def alone(place: Path, *words: str, ranks: int) -> None:
    """A node with so many ranks, which uses the memory of node 0."""
    where = ("--directory", str(place / "node0"), "--hashes", str(place / "hashes"))
    ended(begun(EXAMPLE, *where, "--iterations", str(ITERATIONS), *words, ranks=ranks))


@pytest.mark.parametrize("script", [EXAMPLE, pytest.param(DDP, marks=pytest.mark.long)])
def test_a_killed_rank_goes_on_from_memory(script: Path, server: ForkServer, place: Path) -> None:
    """Whoever is started again has the state of the newest iteration, or of the one before if that
    was not through yet. (torchrun's own restarts leave gloo without links, see the example.) The
    second time the ranks are forked, for torchrun's import torch anew."""
    words = [str(place / "node0"), str(place / "hashes")]
    if script == EXAMPLE:
        words = ["--directory", words[0], "--hashes", words[1], "--dies", "1@4"]
        words += ["--iterations", str(ITERATIONS)]
    ended(begun(script, *words, ranks=2), code=1)
    told_by_ranks(
        server,
        "helpers.forked_ranks:run_script",
        place,
        script=str(script),
        words=words,
        port=free_port("127.0.0.1"),
    )

    after, begins = hashes(place)
    (none, _), (number, value) = begins
    assert none == 0
    assert number in (3, 4)
    assert after[number] == {value}
    assert sorted(after) == list(range(1, ITERATIONS + 1))
    assert all(len(values) == 1 for values in after.values())  # Also of what was done again.
    wait_until(lambda: not keepers(place))  # The job is over.


@pytest.mark.long
def test_a_lost_node_s_shard_comes_from_its_neighbour(place: Path) -> None:
    """Its memory is gone with it; a new node takes its place."""
    two_nodes(place, "--dies", "1@4", code=1)
    lost = [process for process in keepers(place) if "node1" in " ".join(process.cmdline())]
    for process in lost:
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=TIMEOUT_S)
    (place / "node1").rename(place / "gone")
    two_nodes(place, "--iterations", str(ITERATIONS), code=0)

    after, begins = hashes(place)
    assert len(lost) == 1
    number, value = begins[1]
    assert number in (3, 4)
    assert after[number] == {value}
    assert all(len(values) == 1 for values in after.values())


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 3])
def test_other_numbers_of_ranks_restore_the_same_state(ranks: int, place: Path) -> None:
    """The shards of two ranks are put together and cut anew, all from the memory of one node."""
    two_nodes(place, "--dies", "1@4", code=1)
    alone(place, ranks=ranks)

    assert_restored(place)


@pytest.mark.long
def test_fewer_ranks_read_the_memory_of_all(place: Path) -> None:
    """Three ranks of one node, then two."""
    where = ("--directory", str(place / "node0"), "--hashes", str(place / "hashes"))
    ended(begun(EXAMPLE, *where, "--dies", "1@4", ranks=3), code=1)
    alone(place, ranks=2)

    assert_restored(place)


@pytest.mark.long
def test_memory_that_lies_is_not_used(place: Path) -> None:
    """A bit of the newest version flips: the one before it is taken, and the reason is told."""
    where = ("--directory", str(place / "node0"), "--hashes", str(place / "hashes"))
    ended(begun(EXAMPLE, *where, "--dies", "1@4", ranks=2), code=1)
    (own,) = (place / "node0").iterdir()  # Of this machine.
    kept = attach(own, 0, num_slots=2, idle_s=60.0)
    arena = Arena(kept.fd)
    labels = arena.versions()[0]
    version = arena.read(0, labels[-1])
    version.content[len(version.content) // 2] ^= 4
    kept.close()
    process = begun(EXAMPLE, *where, "--iterations", str(ITERATIONS), ranks=2)
    told = ended(process)

    after, begins = hashes(place)
    number, value = begins[1]
    assert [label.age for label in labels] == [number, number + 1]
    assert after[number] == {value}
    assert f"iteration {number + 1} are not used" in told
    assert "has changed since it was written" in told


def test_a_keeper_outlives_those_who_ask_it_and_ends_alone(place: Path) -> None:
    """What one process left in a slot the next one finds, until nobody has come for a while."""
    first = attach(place, 0, num_slots=2, idle_s=0.5)
    other = attach(place, 1, num_slots=2, idle_s=0.5)
    os.pwrite(first.fd, b"here", 128)
    os.pwrite(other.fd, b"there", 128)
    (process,) = keepers(place)
    first.close()
    other.close()

    again = attach(place, 0, num_slots=1, idle_s=0.5)
    with (
        patch("planaria.torchrun.keeper.FREE_TIMEOUT_S", 0.1),
        pytest.raises(CheckpointError, match="give each job a name of its own") as caught,
    ):
        attach(place, 0, num_slots=1, idle_s=0.5)
    for told in (f"place 0 of the copies in {place}", f"used by process {os.getpid()}"):
        assert told in str(caught.value)
    assert os.pread(again.fd, 4, 128) == b"here"
    assert [os.pread(fd, 5, 128) for fd in again.further_fds] == [b"there"]
    again.close()
    process.wait(timeout=TIMEOUT_S)
    anew = attach(place, 0, num_slots=1, idle_s=60.0)
    assert os.pread(anew.fd, 4, 128) == bytes(4)
    anew.end()
    wait_until(lambda: not keepers(place))


def test_a_keeper_stays_for_as_long_as_the_newest_run_asks(place: Path) -> None:
    """It may be one that another run has started."""
    attach(place, 0, num_slots=1, idle_s=math.inf).close()
    (process,) = keepers(place)
    attach(place, 0, num_slots=1, idle_s=0.1).close()

    process.wait(timeout=TIMEOUT_S)
    assert keepers(place) == []


@pytest.mark.parametrize("idle_s", [math.inf, 1e9])
def test_a_keeper_may_stay_for_longer_than_the_kernel_counts(idle_s: float, place: Path) -> None:
    """What one process left is there for the next one."""
    first = attach(place, 0, num_slots=1, idle_s=idle_s)
    os.pwrite(first.fd, b"here", 128)
    first.close()
    wait_until(lambda: not keepers(place)[0].net_connections("unix")[1:])

    again = attach(place, 0, num_slots=1, idle_s=idle_s)

    assert os.pread(again.fd, 4, 128) == b"here"
    again.end()
