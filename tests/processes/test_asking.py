"""A job on machines is asked over the network, from any machine that has the token file."""

import json
import os
from pathlib import Path

import pytest

from helpers.command import wait_for
from helpers.machines import Machines, machines

pytestmark = pytest.mark.faults

LONG = ("training.iterations=100000", "checkpoint.directory=saves", "checkpoint.persist_every=5")


def states(job: Machines) -> dict[int, str]:
    record = json.loads(job.ask("status", job.address, "--json"))
    return {node["node"]: node["state"] for node in record["nodes"]}


def test_status_saves_events_and_drains_work_over_the_network(tmp_path: Path) -> None:
    with machines(tmp_path, nodes="2:3", settings=(*LONG, f"name=asked-{os.getpid()}")) as job:
        assert "no node has been started yet" in job.ask("status", job.address)
        refused = job.ask("drain", "0", "--head", job.address, code=2)
        assert "the job has not begun yet" in refused
        first, second = job.join(), job.join()
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
        (left,) = (agent for agent in (first, second) if agent.process.poll() is not None)
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
