"""Test hosts are like machines: what the tests of jobs on several of them stand on."""

import os
import signal
import socket
import textwrap
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from helpers.command import wait_for
from helpers.host_networks import Bridge, Loopback, is_alive, needs_namespaces
from helpers.hosts import Host, Hosts, Process

pytestmark = pytest.mark.hosts

# Prints what it receives over each connection, and sends it back.
ECHO = """
import socket, sys, threading
def serve(connection):
    try:
        while data := connection.recv(65536):
            print("received", data.decode())
            connection.sendall(data)
    except OSError as error:
        print(error)
    print("closed")
server = socket.create_server((sys.argv[1], 0))
print("port", server.getsockname()[1])
while True:
    threading.Thread(target=serve, args=(server.accept()[0],)).start()
"""
# Sends numbers, each after the echo of the one before.
COUNT = """
import itertools, socket, sys, time
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as connection:
    for number in itertools.count():
        connection.sendall(b"%d" % number)
        assert connection.recv(65536) == b"%d" % number
        print(number)
        time.sleep(0.01)
"""
# Prints each datagram; the other script sends one.
HEAR = """
import socket, sys
with socket.socket(type=socket.SOCK_DGRAM) as sock:
    sock.bind((sys.argv[1], 5000))
    print("hears")
    while True:
        print(sock.recv(65536).decode())
"""
SAY = """
import socket, sys
with socket.socket(type=socket.SOCK_DGRAM) as sock:
    sock.sendto(sys.argv[2].encode(), (sys.argv[1], 5000))
"""
# Takes a connection, and prints for how many seconds bytes come; the other script sends them.
TAKE = """
import socket, sys, time
server = socket.create_server((sys.argv[1], 5000))
print("listens")
with server.accept()[0] as connection:
    connection.recv(1)
    first_s = time.monotonic()
    while connection.recv(65536):
        last_s = time.monotonic()
print("seconds", last_s - first_s)
"""
GIVE = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000)) as connection:
    connection.sendall(bytes(int(sys.argv[2])))
"""


def python(script: str, *words: object) -> tuple[str, ...]:
    """The command line of a script that needs nothing but the standard library."""
    return "python", "-IS", "-u", "-c", textwrap.dedent(script), *map(str, words)


@pytest.fixture(
    scope="module", params=[pytest.param(Bridge, marks=needs_namespaces), pytest.param(Loopback)]
)
def any_hosts(request: pytest.FixtureRequest) -> Iterator[Hosts]:
    """Two hosts of each kind."""
    with Hosts(2, network=request.param) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """Three hosts in namespaces, on which every test leaves nothing."""
    with Hosts(3, network=Bridge) as hosts:
        yield hosts


@pytest.fixture
def idle(hosts: Hosts) -> Iterator[Hosts]:
    """The three hosts, restored after each test."""
    yield hosts
    for host in hosts:
        host.restore()


def echo(host: Host) -> tuple[Process, str]:
    """A server that echoes on a host, and its port."""
    server = host.start(*python(ECHO, host.address))
    return server, server.wait_for_line(r"^port (\d+)")[1]


def count(source: Host, target: Host) -> tuple[Process, Process]:
    """A process of the source that counts aloud with a server on the target, and that server."""
    server, port = echo(target)
    client = source.start(*python(COUNT, target.address, port))
    client.wait_for_line(r"^0$")
    return client, server


def wait_progress(client: Process) -> None:
    """Blocks until a process of `count` has printed another number, and one more."""
    client.wait_for_line(rf"^{len(client.output.split()) + 1}$")


def hear(host: Host) -> Process:
    """A process that prints the datagrams that come to a host."""
    listener = host.start(*python(HEAR, host.address))
    listener.wait_for_line("^hears$")
    return listener


def say(source: Host, target: Host, word: str) -> None:
    """Sends a datagram."""
    source.run(*python(SAY, target.address, word))


def words(listener: Process) -> list[str]:
    """What a process of `hear` has heard."""
    return listener.output.split()[1:]


def test_a_host_is_reached_at_its_address(any_hosts: Hosts) -> None:
    """Each has one of its own, and listens there alone."""
    client, server = count(any_hosts[0], any_hosts[1])

    server.wait_for_line("^received 0$")
    assert any_hosts[0].address != any_hosts[1].address
    client.kill()
    server.wait_for_line("^closed$")
    server.kill()


def test_a_process_tells_what_it_prints_and_how_it_ends(any_hosts: Hosts) -> None:
    """Output and errors are in their order; `run` returns the output alone."""
    host = any_hosts[0]
    script = "echo a; echo b >&2; echo $WORD; pwd; exit 3"
    process = host.start("sh", "-c", script, env={"WORD": "c"}, cwd=Path("/"))

    assert process.wait() == 3
    assert process.output == "a\nb\nc\n/\n"
    assert host.run("sh", "-c", "echo a; echo b >&2; pwd") == f"a\n{host.directory}\n"
    with pytest.raises(AssertionError, match="ended with 4: b"):
        host.run("sh", "-c", "echo b >&2; exit 4")
    with pytest.raises(AssertionError, match=r"has ended with 0:\s+a"):
        host.start("echo", "a").wait_for_line("^b$")
    with pytest.raises(AssertionError, match="there is no program nobody-has-this"):
        host.start("nobody-has-this")


def test_a_process_is_asked_to_end_or_is_killed(any_hosts: Hosts) -> None:
    """Its status says which; what it has started goes on when it is killed."""
    host = any_hosts[0]
    asked, killed = host.start("sleep", "100"), host.start("sh", "-c", "sleep 100 & echo $!; wait")
    killed.wait_for_line(r"^\d+$")

    assert asked.returncode is None
    assert asked.stop() == -signal.SIGTERM
    assert killed.kill() == -signal.SIGKILL
    (left,) = host.processes()
    assert left.name() == "sleep"
    left.kill()


def test_a_host_has_files_and_a_temporary_directory_of_its_own(any_hosts: Hosts) -> None:
    """What one writes there, the other does not see; this process sees a host's disk."""
    writer, reader = any_hosts
    write = "echo x > disk; echo x > ${TMPDIR:-/tmp}/temporary; echo ~"
    assert writer.run("sh", "-c", write) == f"{writer.directory}\n"

    assert (writer.directory / "disk").read_text() == "x\n"
    assert not (reader.directory / "disk").exists()
    assert reader.run("sh", "-c", "ls ${TMPDIR:-/tmp}/temporary || echo none").strip() == "none"


@needs_namespaces
def test_a_host_has_a_name_and_memory_of_its_own(idle: Hosts) -> None:
    """Shared memory, Unix sockets without a path and pids are a machine's own, too."""
    name = f"planaria-test-{uuid.uuid4().hex}"
    script = """
        import os, socket, sys
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind("\\0" + sys.argv[1])
            open("/dev/shm/" + sys.argv[1], "x")
            print(socket.gethostname(), max(map(int, filter(str.isdigit, os.listdir("/proc")))))
    """
    names = [host.run(*python(script, name)).split() for host in idle]

    assert [host_name for host_name, _ in names] == ["host-0", "host-1", "host-2"]
    assert all(int(pid) < 100 for _, pid in names)
    assert not Path("/dev/shm", name).exists()


@needs_namespaces
def test_hosts_see_what_they_share(tmp_path: Path) -> None:
    """A directory that is told to all of them is like a shared file system, and others are not."""
    shared, other = tmp_path / "shared", tmp_path / "other"
    shared.mkdir()
    other.mkdir()
    with Hosts(2, shared=[shared], network=Bridge) as hosts:
        hosts[0].run("sh", "-c", f"echo x > {shared}/file")

        assert hosts[1].run("cat", f"{shared}/file") == "x\n"
        assert hosts[1].run("sh", "-c", f"ls -d {other} || echo none").strip() == "none"


@needs_namespaces
def test_of_a_host_that_loses_power_nobody_hears(idle: Hosts) -> None:
    """A process that is killed closes its connections; a machine does not come to that."""
    (dies, loses_power), (first, second) = zip(
        count(idle[0], idle[1]), count(idle[0], idle[1]), strict=True
    )
    dies.kill()
    first.wait_for_line("^closed$")
    orphan = idle[0].start("sh", "-c", "setsid sleep 100 & sleep 100 & echo two")
    orphan.wait_for_line("^two$")

    idle[0].kill()
    assert idle[0].processes() == []
    assert loses_power.returncode == -signal.SIGKILL

    count(idle[2], idle[1])  # Whatever was on its way before has arrived by now.
    assert "closed" not in second.output
    assert second.returncode is None


@needs_namespaces
def test_a_host_that_boots_again_has_its_disk_and_its_address(idle: Hosts) -> None:
    """What was in memory is gone, temporary files too."""
    host = idle[0]
    host.run("sh", "-c", "echo x > disk; echo x > /tmp/temporary")
    say(idle[1], host, "its hardware address is known")
    host.kill()
    host.boot()

    assert host.run("sh", "-c", "cat disk; ls /tmp/temporary || echo none").split() == ["x", "none"]
    listener = hear(host)
    say(idle[1], host, "hello")
    listener.wait_for_line("^hello$")


def test_all_processes_of_a_host_hang(any_hosts: Hosts) -> None:
    """Also those that are started meanwhile, by whomever."""
    host = any_hosts[0]
    client, server = count(host, any_hosts[1])
    host.start("sh", "-c", "while true; do (setsid sleep 0.01 & sleep 0.01; wait); done")
    wait_for(lambda: len(host.processes()) >= 3, what="the processes are there")

    host.hang()
    statuses = {process.status() for process in host.processes()}
    assert statuses <= {psutil.STATUS_STOPPED, psutil.STATUS_DISK_SLEEP}  # The one: see vfork(2).
    assert any_hosts[1].run("echo", "alive") == "alive\n"

    host.go_on()
    wait_progress(client)
    for one in any_hosts:
        one.kill_processes()
        assert one.processes() == []
    assert server.wait() == -signal.SIGKILL


@needs_namespaces
def test_a_host_that_is_cut_off_loses_packets_both_ways(idle: Hosts) -> None:
    """They are lost without a word; after the cut its connections go on."""
    client, _ = count(idle[0], idle[1])
    inside, outside = hear(idle[0]), hear(idle[1])

    idle[0].cut()
    say(idle[0], idle[1], "lost")
    say(idle[1], idle[0], "lost")
    say(idle[0], idle[0], "inside")
    say(idle[2], idle[1], "outside")
    inside.wait_for_line("^inside$")
    outside.wait_for_line("^outside$")
    assert (words(inside), words(outside)) == (["inside"], ["outside"])
    assert client.returncode is None

    idle[0].heal()
    wait_progress(client)


@needs_namespaces
def test_a_one_way_cut_loses_packets_one_way(idle: Hosts) -> None:
    """The other way they arrive."""
    source, target, other = idle
    at_source, at_target = hear(source), hear(target)

    idle.cut_one_way(source, target)
    say(source, target, "lost")
    say(target, source, "arrives")
    say(other, target, "later")
    at_target.wait_for_line("^later$")
    at_source.wait_for_line("^arrives$")
    assert words(at_target) == ["later"]

    idle.heal_one_way(source, target)
    say(source, target, "healed")
    at_target.wait_for_line("^healed$")
    assert words(at_target) == ["later", "healed"]


@needs_namespaces
def test_a_cut_between_groups_leaves_each_group_connected(idle: Hosts) -> None:
    """Half of the machines are on the other side of a broken switch."""
    a, b, c = idle
    listeners = hear(a), hear(b), hear(c)

    idle.cut_between([a, b], [c])
    say(a, c, "lost")
    say(c, a, "lost")
    say(c, b, "lost")
    say(b, a, "near")
    say(a, b, "near")
    say(c, c, "near")
    for listener in listeners:
        listener.wait_for_line("^near$")
    assert [words(listener) for listener in listeners] == [["near"], ["near"], ["near"]]

    idle.heal_between([a, b], [c])
    say(c, a, "healed")
    listeners[0].wait_for_line("^healed$")


@needs_namespaces
def test_a_host_is_restored(idle: Hosts) -> None:
    """Whatever a test has done to it, the next test finds it as it was, but for its disk."""
    a, b, c = idle
    hear(b)
    idle.cut_between([a], [b, c])
    a.set_rate(1000)
    a.cut()
    b.hang()
    c.kill()

    for host in idle:
        host.restore()

    assert [host.processes() for host in idle] == [[], [], []]
    for source, target in ((a, b), (b, c), (c, a)):
        count(source, target)
    assert "qdisc" not in a.run("sh", "-c", "tc qdisc show dev eth0 | grep tbf || true")


@needs_namespaces
@pytest.mark.parametrize("slow", [0, 1], ids=["sender", "receiver"])
def test_a_host_sends_and_receives_at_its_rate(slow: int, idle: Hosts) -> None:
    """Bytes take the time that they must; where nothing is limited, they take less."""
    num_bytes, bytes_per_s = 1_000_000, 2_500_000

    def seconds() -> float:
        receiver = idle[1].start(*python(TAKE, idle[1].address))
        receiver.wait_for_line("^listens$")
        idle[0].run(*python(GIVE, idle[1].address, num_bytes))
        return float(receiver.wait_for_line(r"^seconds (\S+)$")[1])

    idle[slow].set_rate(bytes_per_s)
    limited_s = seconds()
    idle[slow].clear_rate()

    assert limited_s > 0.9 * num_bytes / bytes_per_s
    assert seconds() < limited_s


@pytest.mark.parametrize("network", [pytest.param(Bridge, marks=needs_namespaces), Loopback])
def test_everything_ends_with_the_hosts(network: Callable[[], Bridge | Loopback]) -> None:
    """Also where the test raises, a host hangs, and processes have left their sessions."""
    script = "setsid sleep 100 & setsid sleep 100 & echo two; wait"
    with pytest.raises(ZeroDivisionError), Hosts(2, network=network) as hosts:  # noqa: PT012
        starts = [host.start("sh", "-c", script) for host in hosts]
        for process in starts:
            process.wait_for_line("^two$")
        hosts[1].hang()
        left = [process for host in hosts for process in host.processes()]
        directory = hosts[0].directory
        assert len(left) >= 6
        _ = 1 / 0

    assert not any(is_alive(process) for process in left)
    assert not directory.exists()
    assert [process.returncode for process in starts] == [-signal.SIGKILL] * 2


@pytest.mark.parametrize("network", [pytest.param(Bridge, marks=needs_namespaces), Loopback])
def test_everything_ends_with_a_killed_test_run(network: Callable[[], Bridge | Loopback]) -> None:
    """The kernel ends the processes; the next run removes the files."""
    ours, theirs = socket.socketpair()
    run_pid = os.fork()
    if run_pid == 0:
        _run_until_killed(network, theirs)
    theirs.close()
    with ours:
        pids, directory = ours.recv(4096).decode().split(":")
    sleepers = [psutil.Process(int(pid)) for pid in pids.split(",")]

    os.kill(run_pid, signal.SIGKILL)
    os.waitpid(run_pid, 0)
    wait_for(lambda: not any(is_alive(one) for one in sleepers), what="its processes end")
    assert Path(directory).exists()
    with Hosts(0, network=Loopback):
        assert not Path(directory).exists()


def _run_until_killed(network: Callable[[], Bridge | Loopback], sock: socket.socket) -> None:
    try:
        with Hosts(1, network=network) as hosts:
            hosts[0].start("sh", "-c", "setsid sleep 100 & echo x; wait").wait_for_line("^x$")
            pids = ",".join(str(process.pid) for process in hosts[0].processes())
            sock.sendall(f"{pids}:{hosts[0].directory.parent}".encode())
            time.sleep(1000)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)
