"""A job whose nodes come by themselves: a head and agents that know only its address and the token.

All of them run on this machine here; tests/hosts gives each a machine of its own.
"""

import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from helpers.command import Command, command, wait_for
from helpers.machines import JOB, PLANARIA, Machines, StayingAgents, free_port, machines
from planaria.checkpoint.disk.parts import RunPlace, newest_run
from planaria.checkpoint.disk.storage import Directory
from planaria.job.training_job import Job
from planaria.nodes.forkserver import ForkServer
from planaria.transport.credentials import write_credentials
from planaria.transport.sockets import address_text


@pytest.fixture(scope="module")
def local_hash(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The parameters that the job ends with where all nodes are processes of one machine."""
    directory = tmp_path_factory.mktemp("local")
    path = directory / "job.toml"
    path.write_text(JOB)
    job = Job.from_file(path, overrides=[f"checkpoint.directory={directory / 'checkpoints'}"])
    return job.train(server=server).report.final.parameters_sha256


@pytest.fixture(scope="module")
def staying(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StayingAgents]:
    """Two agents that serve the jobs of several tests."""
    agents = StayingAgents(tmp_path_factory.mktemp("staying"), num_agents=2)
    yield agents
    agents.close()


@pytest.mark.hosts
@pytest.mark.long
def test_nodes_that_came_by_themselves_train_to_the_same_bits(
    tmp_path: Path, local_hash: str, staying: StayingAgents
) -> None:
    """So they do where the head is killed meanwhile, which is tested every time."""
    with machines(tmp_path, nodes="2", staying=staying) as job:
        assert job.report()["final"]["parameters_sha256"] == local_hash


def ports(pid: int) -> list[int]:
    """The ports at which a process listens."""
    connections = psutil.Process(pid).net_connections("tcp")
    return [one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN]


def tls_version(port: int) -> str | None:
    """The version of TLS that is spoken at a port; whoever answers may refuse this end later."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(("127.0.0.1", port), timeout=60.0) as sock:
        return context.wrap_socket(sock).version()


@pytest.mark.long
def test_encrypted_links_carry_the_same_bits_before_and_after_a_loss(
    tmp_path: Path, local_hash: str
) -> None:
    with machines(tmp_path, nodes="3", settings=("cluster.encryption=on",)) as job:
        first, *_ = (job.join() for _ in range(3))
        job.head.wait_output("iteration 5 ")
        versions = [tls_version(port) for pid in job.worker_pids() for port in ports(pid)]
        os.kill(first.process.pid, signal.SIGKILL)
        report = job.report()

        assert versions == ["TLSv1.3"] * 3
        assert report["final"]["parameters_sha256"] == local_hash
        assert "lost" in [event["kind"] for event in report["events"]]


@pytest.mark.hosts
@pytest.mark.long
def test_an_agent_that_is_killed_costs_its_node_alone_and_another_one_joins(
    tmp_path: Path, local_hash: str
) -> None:
    with machines(tmp_path, nodes="3:4") as job:
        first, *_ = (job.join() for _ in range(3))
        job.head.wait_output("iteration 5 ")
        os.kill(first.process.pid, signal.SIGKILL)
        job.join()
        report = job.report()

        assert report["final"]["parameters_sha256"] == local_hash
        kinds = [event["kind"] for event in report["events"]]
        assert "lost" in kinds
        wait_for(lambda: not first.processes(), what="the killed agent's processes end, too")


@pytest.mark.hosts
@pytest.mark.long
def test_a_machine_that_is_told_to_leave_is_drained(tmp_path: Path, local_hash: str) -> None:
    with machines(tmp_path, nodes="3:4") as job:
        first, *_ = (job.join() for _ in range(3))
        job.head.wait_output("iteration 5 ")
        os.kill(first.process.pid, signal.SIGTERM)

        assert first.wait(timeout_s=60.0) == 0, first.output + first.errors
        report = job.report()
        assert report["final"]["parameters_sha256"] == local_hash
        assert all(event["redone_samples"] == 0 for event in report["events"])


@pytest.mark.long
def test_the_status_tells_what_links_carry(tmp_path: Path) -> None:
    """Two addresses of this machine stand for machines of two domains; the gradients are large."""
    settings = ("model.config.n_embd=320", "training.iterations=10000")
    with machines(tmp_path, nodes="2", settings=settings) as job:
        for number, domain in enumerate(("left", "right")):
            job.join(options=("--advertise", f"127.0.0.{2 + number}", "--domain", domain))
        job.head.wait_output("iteration 1 ")

        def is_measured() -> bool:
            text = job.ask("status", job.address)
            return " Gbit/s between domains" in text and "within a domain" not in text

        wait_for(is_measured, what="links have been measured")


def test_a_head_that_waits_for_machines_says_so_and_refuses_one_with_another_token(
    tmp_path: Path,
) -> None:
    with machines(tmp_path, nodes="3") as job:
        assert "no node has been started yet" in job.ask("status", job.address)
        refused = job.ask("drain", "0", "--head", job.address, code=2)
        assert "the job has not begun yet" in refused
        write_credentials(tmp_path / "other")
        arguments = ("agent", "--join", job.address, "--token-file", str(tmp_path / "other"))
        stranger = Command([*PLANARIA, *arguments], directory=tmp_path)

        assert stranger.wait() == 2
        assert f"--token-file = '{tmp_path / 'other'}'" in stranger.errors
        assert stranger.errors.count("\n") == 1


def test_a_head_that_is_killed_takes_its_living_nodes_up_again(
    tmp_path: Path, local_hash: str, staying: StayingAgents
) -> None:
    """No worker ends, and nothing but the iteration in flight may be done again."""
    with machines(tmp_path, nodes="2", staying=staying) as job:
        job.head.wait_output("iteration 5 ")
        before = job.worker_pids()
        job.kill_head()
        refused = job.start_head()
        assert refused.wait() == 2
        assert "--reattach" in refused.errors
        refused = job.start_head("--reattach", "--inject", "kill:1@30")
        assert refused.wait() == 2
        assert "know of no faults" in " ".join(refused.errors.split())

        job.start_head("--reattach")
        report = job.report()
        assert report["final"]["parameters_sha256"] == local_hash
        assert {worker["pid"] for worker in report["workers"]} == before


@pytest.mark.hosts
@pytest.mark.long
def test_resume_finds_the_living_nodes_of_a_lost_head_by_itself(
    tmp_path: Path, local_hash: str
) -> None:
    with machines(tmp_path, nodes="3") as job:
        for _ in range(3):
            job.join()
        job.head.wait_output("iteration 5 ")
        job.kill_head()
        job.start_head("--resume")

        assert job.report()["final"]["parameters_sha256"] == local_hash


@pytest.mark.hosts
@pytest.mark.long
def test_resume_begins_a_new_run_where_the_machines_of_a_lost_head_are_gone(
    tmp_path: Path, local_hash: str
) -> None:
    settings = ("checkpoint.persist_every=2", "cluster.lease_s=1.0", "cluster.patience_s=1.0")
    with machines(tmp_path, nodes="3", settings=settings) as job:
        for _ in range(3):
            job.join()
        job.head.wait_output("saved iteration")
        job.kill_head()
        for agent in job.agents:
            agent.process.kill()
        job.start_head("--resume")
        for _ in range(3):
            job.join()

        assert job.report()["final"]["parameters_sha256"] == local_hash


@pytest.mark.long
def test_nodes_without_a_head_save_what_they_hold_and_another_head_goes_on_from_it(
    tmp_path: Path, local_hash: str
) -> None:
    """The head is lost with a node on its machine, and with its journal. The other nodes cannot end
    the iteration, and nothing else was ever saved."""
    settings = ("cluster.lease_s=1.0", "cluster.patience_s=2.0")
    with machines(tmp_path, nodes="3", settings=settings) as job:
        first, *others = (job.join() for _ in range(3))
        job.head.wait_output("iteration 5 ")
        job.lose_head_machine(first)
        codes = [agent.wait(timeout_s=120.0) for agent in others]
        assert codes == [3, 3], [agent.output + agent.errors for agent in others]
        assert all("by itself in" in agent.output + agent.errors for agent in others)
        assert [path.name[:4] for path in job.saves.glob("[!.]*")] == ["run-"]

        job.start_head("--resume")
        for _ in range(3):
            job.join()
        report = job.report()
        assert report["final"]["parameters_sha256"] == local_hash
        assert report["iterations"][0]["iteration"] >= 5
        assert "made a save of iteration" in job.head.output + job.head.errors
        assert not any(path.name.startswith("run-") for path in job.saves.iterdir())


@pytest.mark.hosts
@pytest.mark.long
@pytest.mark.parametrize("host", ["", "127.0.0.3"], ids=["same address", "unknown address"])
def test_nodes_that_still_look_for_their_head_save_when_another_one_has_no_journal(
    host: str, tmp_path: Path, local_hash: str
) -> None:
    """It cannot take them up, so their state would be lost with them. No ordinary save was made."""
    with machines(tmp_path, nodes="3", settings=("cluster.lease_s=1.0",)) as job:
        first, *others = (job.join() for _ in range(3))
        job.head.wait_output("iteration 5 ")
        job.lose_head_machine(first)
        job.start_head("--resume", address=f"{host}:{free_port(host)}" if host else "")
        job.join()
        report = job.report()

        assert report["final"]["parameters_sha256"] == local_hash
        assert report["iterations"][0]["iteration"] >= 5
        assert [agent.wait() for agent in others] == [0, 0]


@pytest.mark.hosts
@pytest.mark.long
def test_a_head_that_comes_back_at_another_address_is_found_there(
    tmp_path: Path, local_hash: str
) -> None:
    """As one that is started on another machine, with the journal of the first."""
    with machines(tmp_path, nodes="3") as job:
        other = f"127.0.0.2:{free_port()}"
        for _ in range(3):
            job.join(other)
        job.head.wait_output("iteration 5 ")
        before = job.worker_pids()
        job.kill_head()
        job.start_head("--reattach", address=other)
        report = job.report()

        assert report["final"]["parameters_sha256"] == local_hash
        assert {worker["pid"] for worker in report["workers"]} == before


@pytest.mark.hosts
@pytest.mark.long
def test_a_head_at_an_address_that_nobody_named_takes_the_nodes_up(
    tmp_path: Path, local_hash: str, staying: StayingAgents
) -> None:
    """Nodes and agents read its address at the place of saves."""
    with machines(tmp_path, nodes="2", staying=staying) as job:
        job.head.wait_output("iteration 5 ")
        before = job.worker_pids()
        storage = Directory(job.saves)
        mark = RunPlace(storage, newest_run(storage)).head()
        assert mark is not None
        assert [address_text(address) for address in mark.addresses] == [job.address]
        job.kill_head()
        job.start_head("--reattach", address=f"127.0.0.3:{free_port('127.0.0.3')}")
        report = job.report()

        assert report["final"]["parameters_sha256"] == local_hash
        assert {worker["pid"] for worker in report["workers"]} == before


@pytest.mark.hosts
@pytest.mark.long
def test_an_agent_that_stays_serves_job_after_job(tmp_path: Path, local_hash: str) -> None:
    """Its fork server, which has imported torch, stays too."""
    with machines(tmp_path, nodes="3") as job:
        for _ in range(3):
            job.join("127.0.0.1:1", options=("--stay",))
        assert job.report()["final"]["parameters_sha256"] == local_hash
        servers = {agent.process.pid: job.fork_servers(agent) for agent in job.agents}
        job.start_head("--set", f"checkpoint.directory={tmp_path / 'second'}", address=job.address)

        assert job.report()["final"]["parameters_sha256"] == local_hash
        assert {agent.process.pid: job.fork_servers(agent) for agent in job.agents} == servers
        for agent in job.agents:
            agent.process.terminate()
        assert [agent.wait() for agent in job.agents] == [0, 0, 0]


# A time namespace, whose processes have a monotonic clock of their own.
ELSEWHEN = ("unshare", "--time", "--monotonic", "1000000")


@pytest.mark.skipif(
    os.geteuid() != 0
    or not shutil.which("unshare")
    or subprocess.run([*ELSEWHEN, "true"], capture_output=True, check=False).returncode != 0,
    reason="only root has another clock on this machine",
)
@pytest.mark.long
def test_a_machine_whose_clock_is_far_ahead_trains_like_any_other(tmp_path: Path) -> None:
    """Leases hold, and the timeline has its ranks beside the others', to within what is told."""
    timeline = tmp_path / "timeline.json"
    settings = ("training.iterations=12", "resilience.failures_tolerated=0")
    options = ("--timeline", str(timeline))
    with machines(tmp_path, nodes="2", settings=settings, options=options) as job:
        job.join()
        job.join(around=ELSEWHEN)
        report = job.report()

    trace = json.loads(timeline.read_text())
    errors_s = [iteration["clock_error_s"] for iteration in report["iterations"]]
    assert all(0.0 < error_s < 0.5 for error_s in errors_s), errors_s
    assert trace["otherData"] == {"clock_error_s": max(errors_s)}
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    wall_s = sum(max(i["seconds"], i["predicted_s"]) for i in report["iterations"])
    assert len({event["pid"] for event in spans}) == 2 * 2  # Predicted and measured, of two nodes.
    assert max(event["ts"] + event["dur"] for event in spans) < 1e6 * (wall_s + 60.0)
    assert report["events"] == []


FURTHER = (pytest.mark.hosts, pytest.mark.long)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "faults",
    [
        pytest.param(("kill:1@5.reduce",), marks=FURTHER),
        pytest.param(("hang:1@5", "leader:@15.commit"), marks=FURTHER),
        pytest.param(("crash:1@5.backward", "kill:0@5.transfer", "store=0.1:@8"), marks=FURTHER),
        pytest.param(("stall:1@5.forward", "forkserver:@9"), marks=FURTHER),
        pytest.param(("slow=3:1@5", "slow=1:1@25", "disk=1:@8"), marks=FURTHER),
    ],
)
def test_faults_strike_nodes_of_other_machines_at_their_step(
    faults: tuple[str, ...], tmp_path: Path, local_hash: str, staying: StayingAgents
) -> None:
    """What kills a node strikes before its step goes on, so that the iteration is not committed.

    The third machine does not stay: it leaves when the job is over, also without a node."""
    options = tuple(word for fault in faults for word in ("--inject", fault))
    settings = ("cluster.lease_s=2.0",)
    with machines(tmp_path, nodes="3", options=options, settings=settings, staying=staying) as job:
        leaving = job.join()
        report = job.report()

        assert leaving.wait() == 0
        assert "the job is finished" in leaving.output
        assert all(agent.process.poll() is None for agent in staying.agents)
        assert report["final"]["parameters_sha256"] == local_hash
        injected = {fault.partition(":")[0].partition("=")[0] for fault in faults}
        events = [event for event in report["events"] if event["kind"] in injected]
        assert {event["kind"] for event in events} == injected
        assert all(event["fired"] for event in events)
        assert "never injected" not in job.head.output
        assert "cannot be injected" not in job.head.errors


@pytest.mark.hosts
@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_preemption_takes_the_machine_away_and_a_join_lets_another_one_in(
    tmp_path: Path, local_hash: str
) -> None:
    """The place of the join is kept free until then."""
    options = ("--inject", "join:1@20", "--inject", "preempt:0@5")
    with machines(tmp_path, nodes="3:4", options=options) as job:
        for _ in range(4):
            job.join()
        report = job.report()

        assert report["final"]["parameters_sha256"] == local_hash
        assert all(event["redone_samples"] == 0 for event in report["events"])
        by_kind = {event["kind"]: event for event in report["events"]}
        assert by_kind["preempt"]["nodes"] == [0]
        assert by_kind["join"]["iteration"] >= 20
        assert sum("leaves the job" in agent.output for agent in job.agents) == 1


def test_faults_that_cannot_strike_other_machines_are_refused(tmp_path: Path) -> None:
    """Each with what would do."""
    (tmp_path / "job.toml").write_text(JOB)
    write_credentials(tmp_path / "token")
    train = ("train", str(tmp_path / "job.toml"), "--listen", "127.0.0.1:0")
    refusals = {
        "cut=4:1@5": "ip link set DEV down",
        "kill:9@5": "the job has nodes 0 to 4",
        "join:2@5": "write --nodes 3:5 or more",
    }
    for fault, remedy in refusals.items():
        options = ("--nodes", "3:4", "--inject", fault, "--token-file", str(tmp_path / "token"))
        result = command(*train, *options)

        assert result.exit_code == 2
        assert remedy in " ".join(result.stderr.split())


LONG = ("training.iterations=100000", "checkpoint.directory=saves", "checkpoint.persist_every=5")


def states(job: Machines) -> dict[int, str]:
    record = json.loads(job.ask("status", job.address, "--json"))
    return {node["node"]: node["state"] for node in record["nodes"]}


def test_status_saves_events_and_drains_work_over_the_network(
    tmp_path: Path, staying: StayingAgents
) -> None:
    """From any machine that has the token file. The machine of a drained node leaves."""
    settings = (*LONG, f"name=asked-{os.getpid()}")
    with machines(tmp_path, nodes="2:3", settings=settings, staying=staying) as job:
        job.head.wait_output("saved iteration ")

        record = json.loads(job.ask("status", job.address, "--json"))
        here = json.loads(job.ask("status", "--json", "--job", f"asked-{os.getpid()}"))
        assert {node["host"] for node in record["nodes"]} == {"127.0.0.1"}
        assert {node["state"] for node in record["nodes"]} == {"training"}
        assert sorted(node for nodes in record["pipelines"] for node in nodes) == [0, 1]
        assert record["iteration"] >= 5
        assert here.keys() == record.keys()
        assert here["nodes"] == record["nodes"]

        save = ("checkpoint", "save", "--head", job.address, "--name")
        where = Path(job.ask(*save, "best").strip())
        assert where.parent == tmp_path / "saves" / "best"
        assert where.is_dir()
        assert "'best': this name is taken" in job.ask(*save, "best", code=2)

        assert job.ask("drain", "1", "--head", job.address) == "node 1 has left\n"
        (event,) = json.loads(job.ask("events", "--head", job.address, "--json"))[:1]
        assert (event["kind"], event["nodes"]) == ("drained", [1])
        assert "there is no node 1; there are 0" in job.ask(
            "drain", "1", "--head", job.address, code=2
        )
        wait_for(
            lambda: None in {a.process.poll() for a in job.agents} != {None},
            what="one agent ends",
        )
        (left,) = (agent for agent in job.agents if agent.process.poll() is not None)
        assert left.wait() == 0
        assert "node 1 has left the job, as the user asked" in left.output
        assert states(job) == {0: "training"}


@pytest.mark.hosts
@pytest.mark.long
def test_a_drained_machine_gets_no_other_node_and_may_come_again(tmp_path: Path) -> None:
    """Its node was drained because somebody wants the machine; a new agent is a new offer."""
    with machines(tmp_path, nodes="2:3", settings=LONG[:1]) as job:
        job.join(options=("--stay",))
        job.join(options=("--stay",))
        job.head.wait_output("iteration 5 ")
        job.ask("drain", "0", "--head", job.address)
        wait_for(
            lambda: None in {a.process.poll() for a in job.agents} != {None},
            what="an agent that would stay ends",
        )
        assert "node 2 starts" not in job.head.output
        job.join()
        job.head.wait_output("node 2 starts")
