"""What `planaria run` takes itself for, in environments as schedulers and launchers leave them."""

from collections.abc import Callable

import pytest

from planaria.cli.run_role import RunFlags, RunRole, run_role, slurm_hosts
from planaria.errors import ConfigError

Environment = dict[str, str]

# torch/distributed/elastic/agent/server/local_elastic_agent.py, and its documentation.
TORCHRUN = {
    "LOCAL_RANK": "0",
    "RANK": "1",
    "GROUP_RANK": "1",
    "ROLE_RANK": "1",
    "ROLE_NAME": "default",
    "LOCAL_WORLD_SIZE": "1",
    "WORLD_SIZE": "4",
    "GROUP_WORLD_SIZE": "4",
    "ROLE_WORLD_SIZE": "4",
    "MASTER_ADDR": "node1.example.com",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
# A job of four machines under `srun --ntasks-per-node=1`.
SLURM = {
    "SLURM_JOB_ID": "200505",
    "SLURM_JOB_NAME": "test-multi-nodes",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_JOB_NODELIST": "gnode[10,20,25,37]",
    "SLURM_NODELIST": "gnode[10,20,25,37]",
    "SLURM_NNODES": "4",
    "SLURM_NTASKS": "4",
    "SLURM_NPROCS": "4",
    "SLURM_TASKS_PER_NODE": "1(x4)",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gnode[10,20,25,37]",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
    "SLURM_LAUNCH_NODE_IPADDR": "10.2.0.17",
    "SLURM_SRUN_COMM_HOST": "10.2.0.17",
    "SLURMD_NODENAME": "gnode20",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_GTIDS": "1",
    "SLURM_CPUS_ON_NODE": "8",
}
# The same job in the script of sbatch, which runs on the first machine alone.
SBATCH = {
    **{name: text for name, text in SLURM.items() if not name.startswith("SLURM_STEP_")},
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURMD_NODENAME": "gnode10",
}
# A pod of an indexed job: its controller sets the index, and the pod's host name.
INDEXED = {
    "JOB_COMPLETION_INDEX": "1",
    "HOSTNAME": "example-job-1",
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "KUBERNETES_SERVICE_PORT": "443",
}
# Kubeflow's PyTorchJob with a master and workers.
PYTORCHJOB = {
    "PYTHONUNBUFFERED": "1",
    "MASTER_PORT": "23456",
    "PET_MASTER_PORT": "23456",
    "MASTER_ADDR": "pytorch-simple-master-0",
    "PET_MASTER_ADDR": "pytorch-simple-master-0",
    "WORLD_SIZE": "3",
    "RANK": "2",
    "PET_NPROC_PER_NODE": "auto",
    "PET_NODE_RANK": "2",
    "PET_NNODES": "3",
}
# The same with an elastic policy: there is no master, and no rank.
ELASTIC = {
    "PYTHONUNBUFFERED": "1",
    "PET_RDZV_ENDPOINT": "elastic-example-worker-0:23456",
    "PET_RDZV_BACKEND": "c10d",
    "PET_NNODES": "1:3",
    "PET_MAX_RESTARTS": "100",
}
# Kubeflow's TrainJob, whose machines are pods of an indexed job.
TRAINJOB = {
    **INDEXED,
    "HOSTNAME": "pytorch-simple-node-0-1",
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "8",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "pytorch-simple-node-0-0.pytorch-simple",
    "PET_MASTER_PORT": "29500",
}


def role(
    environment: Environment, *, here: str = "", hostname: str = "machine", **flags: str
) -> RunRole:
    """The role of a machine that has the address `here`."""
    return run_role(
        environment, RunFlags(**flags), hostname=hostname, is_here=lambda host: host == here
    )


def assert_refused(
    call: Callable[[], RunRole], field: str, *parts: str, value: str | None = None
) -> None:
    with pytest.raises(ConfigError) as caught:
        call()
    assert caught.value.field == field
    assert value is None or caught.value.value == value
    for part in parts:
        assert part in str(caught.value)


# -- options --------------------------------------------------------------------------------------


def test_the_machine_that_has_the_address_of_the_endpoint_is_the_head() -> None:
    """The same command line on each machine, as with torchrun."""
    flags = {"nnodes": "2:4", "rdzv_endpoint": "node1:29500", "nproc_per_node": "8"}

    assert role({}, here="node1", **flags) == RunRole(
        is_head=True,
        join="node1:29500",
        listen=":29500",
        min_nodes=2,
        max_nodes=4,
        devices_per_node=8,
        why="this machine is the head and an agent: node1 is this machine; "
        "2 to 4 machines (--nnodes) at node1:29500 (--rdzv-endpoint)",
    )
    assert role({}, here="node2", **flags) == RunRole(
        is_head=False,
        join="node1:29500",
        listen="",
        min_nodes=0,
        max_nodes=0,
        devices_per_node=8,
        why="this machine is an agent: node1 is not this machine; "
        "the head is at node1:29500 (--rdzv-endpoint)",
    )


def test_a_rank_decides_whatever_the_address_is() -> None:
    """Several ranks may share a machine, and a service's address may be none of a machine."""
    flags = {"nnodes": "2", "rdzv_endpoint": "127.0.0.1:29500"}
    head = role({}, here="127.0.0.1", node_rank="0", **flags)
    other = role({}, here="127.0.0.1", node_rank="1", **flags)
    behind_a_service = role({}, node_rank="0", nnodes="2", rdzv_endpoint="service:29500")

    assert (head.is_head, other.is_head, behind_a_service.is_head) == (True, False, True)
    assert head.why == (
        "this machine is the head and an agent: rank 0 (--node-rank); "
        "2 machines (--nnodes) at 127.0.0.1:29500 (--rdzv-endpoint)"
    )
    assert behind_a_service.why.endswith(
        "service is no address of this machine, so agents find the head only if their connections "
        "to it are passed on to here"
    )
    assert "no address" not in role({**PYTORCHJOB, "PET_NODE_RANK": "0"}).why


@pytest.mark.parametrize(
    ("endpoint", "join", "listen"),
    [
        ("node1", "node1:29400", ":29400"),
        ("10.0.0.1:1234", "10.0.0.1:1234", ":1234"),
        ("[fd00::1]:1234", "[fd00::1]:1234", ":1234"),
        ("[fd00::1]", "[fd00::1]:29400", ":29400"),
        ("localhost:1234", "localhost:1234", "localhost:1234"),
        ("127.0.0.2:1234", "127.0.0.2:1234", "127.0.0.2:1234"),
        ("[::1]:1234", "[::1]:1234", "[::1]:1234"),
    ],
)
def test_a_head_listens_at_the_port_of_its_endpoint(endpoint: str, join: str, listen: str) -> None:
    """At all addresses, but for a loopback, which no other machine can reach. A port that is not
    named is torchrun's."""
    head = role({}, node_rank="0", nnodes="2", rdzv_endpoint=endpoint)

    assert (head.join, head.listen) == (join, listen)


@pytest.mark.parametrize("environment", [{}, {"PET_NNODES": "1"}, {"PET_RDZV_ENDPOINT": ""}])
def test_a_machine_alone_is_the_head_of_itself(environment: Environment) -> None:
    """As `torchrun SCRIPT` runs on one machine."""
    alone = role(environment, here="127.0.0.1")

    assert (alone.is_head, alone.min_nodes, alone.max_nodes) == (True, 1, 1)
    assert (alone.join, alone.listen) == ("127.0.0.1:29400", "127.0.0.1:29400")
    assert "head" in alone.why
    assert "agent" in alone.why


def test_the_endpoint_of_a_standalone_torchrun_gets_a_port() -> None:
    """Port 0 is any port; the agent must know which, and is on the same machine."""
    alone = role({}, here="localhost", nnodes="1", rdzv_endpoint="localhost:0")

    assert alone.join == "localhost:29400"


def test_options_come_before_the_environment() -> None:
    """Fact by fact: the rank here is the environment's."""
    head = role(
        {**TRAINJOB, "PET_NODE_RANK": "0"},
        nnodes="2:8",
        nproc_per_node="4",
        rdzv_endpoint="other:1234",
    )

    assert (head.is_head, head.join, head.min_nodes, head.max_nodes) == (True, "other:1234", 2, 8)
    assert head.devices_per_node == 4


@pytest.mark.parametrize("text", ["auto", "gpu", "cpu", "xpu", ""])
def test_the_job_says_how_many_devices_a_machine_has_if_nobody_counts_them(text: str) -> None:
    """As cluster.devices_per_node."""
    assert role({"PET_NPROC_PER_NODE": text}, here="127.0.0.1").devices_per_node == 0


# -- mistakes in options --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["0", "-1", "two", "2:", ":2", "4:2", "1:2:3", "0:2", "2-4", "1.5", "9" * 12]
)
def test_a_number_of_machines_is_n_or_min_max(text: str) -> None:
    """The field is what the user wrote."""
    assert_refused(
        lambda: role({}, nnodes=text, rdzv_endpoint="a"), "--nnodes", "MIN:MAX", value=text
    )
    assert_refused(lambda: role({"PET_NNODES": text}, rdzv_endpoint="a"), "PET_NNODES", "MIN:MAX")


@pytest.mark.parametrize("text", ["0", "-1", "all", "2.0"])
def test_a_number_of_devices_is_positive(text: str) -> None:
    """Or one of torchrun's words."""
    assert_refused(lambda: role({}, here="127.0.0.1", nproc_per_node=text), "--nproc-per-node")


@pytest.mark.parametrize("text", ["-1", "first", "1.0"])
def test_a_rank_is_a_number_from_zero(text: str) -> None:
    """What the scheduler left unset may arrive as a text."""
    assert_refused(lambda: role({}, nnodes="2", rdzv_endpoint="a", node_rank=text), "--node-rank")
    environment = {"PET_NODE_RANK": text}
    assert_refused(lambda: role(environment, nnodes="2", rdzv_endpoint="a"), "PET_NODE_RANK")


def test_ranks_that_count_from_one_are_refused() -> None:
    """No machine would be the head, and all would wait for it."""
    assert_refused(
        lambda: role({}, nnodes="1:2", rdzv_endpoint="a", node_rank="2"),
        "--node-rank",
        "must be below 2, as --nnodes says; ranks count from 0",
    )


@pytest.mark.parametrize("text", ["http://a:1", "a:b", "a:99999", "a:", ":29400", "fd00::1", "::"])
def test_an_endpoint_is_a_host_and_a_port(text: str) -> None:
    """An IPv6 address stands in brackets."""
    assert_refused(lambda: role({}, nnodes="2", rdzv_endpoint=text), "--rdzv-endpoint")


@pytest.mark.parametrize("text", ["0.0.0.0:29400", "[::]:29400"])
def test_an_endpoint_is_not_all_addresses(text: str) -> None:
    """A head may listen there; nobody can join it there."""
    assert_refused(
        lambda: role({}, nnodes="2", rdzv_endpoint=text), "--rdzv-endpoint", "must name a host"
    )


def test_any_port_is_no_port_for_several_machines() -> None:
    """The others could not know which it is."""
    assert_refused(
        lambda: role({}, nnodes="2", rdzv_endpoint="node1:0"), "--rdzv-endpoint", "other than 0"
    )


def test_several_machines_need_a_place() -> None:
    """The error says what to give."""
    assert_refused(
        lambda: role({}, nnodes="2"), "--rdzv-endpoint", "the same on each machine", "HOST:29400"
    )
    assert_refused(lambda: role({"PET_NODE_RANK": "0"}), "--rdzv-endpoint")


def test_a_head_must_know_how_many_machines_there_are() -> None:
    """An agent need not; the head says it to nobody."""
    flags = {"rdzv_endpoint": "node1:29400"}

    assert_refused(lambda: role({}, here="node1", **flags), "--nnodes", "MIN:MAX")
    assert not role({}, here="node2", **flags).is_head


# -- torchrun, by itself and in Kubeflow ----------------------------------------------------------


def test_what_torchrun_starts_is_one_machine_of_its_group() -> None:
    """GROUP_RANK counts machines. torchrun listens at MASTER_PORT itself, so the head takes the
    next port."""
    other = role(TORCHRUN)
    head = role({**TORCHRUN, "GROUP_RANK": "0", "RANK": "0"})

    assert other.why == (
        "this machine is an agent: rank 1 (GROUP_RANK); "
        "the head is at node1.example.com:29501 (MASTER_ADDR)"
    )
    assert (head.is_head, head.listen, head.min_nodes, head.max_nodes) == (True, ":29501", 4, 4)


def test_torchrun_must_start_one_process_on_a_machine() -> None:
    """Else each of them would be an agent."""
    environment = {**TORCHRUN, "LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "32"}

    assert_refused(lambda: role(environment), "LOCAL_WORLD_SIZE", "--nproc-per-node=1", value="8")


def test_a_pytorchjob_has_ranks() -> None:
    """Its master is rank 0."""
    worker = role(PYTORCHJOB)
    master = role({**PYTORCHJOB, "RANK": "0", "PET_NODE_RANK": "0"})

    assert worker.why == (
        "this machine is an agent: rank 2 (PET_NODE_RANK); "
        "the head is at pytorch-simple-master-0:23456 (PET_MASTER_ADDR)"
    )
    assert (master.is_head, master.listen, master.max_nodes) == (True, ":23456", 3)
    assert master.devices_per_node == 0


def test_an_older_pytorchjob_counts_machines_by_rank_and_world_size() -> None:
    """It sets no variable of torchrun."""
    environment = {name: text for name, text in PYTORCHJOB.items() if not name.startswith("PET_")}
    worker = role(environment)
    master = role({**environment, "RANK": "0"})

    assert (worker.is_head, worker.join) == (False, "pytorch-simple-master-0:23456")
    assert (master.is_head, master.min_nodes, master.max_nodes) == (True, 3, 3)


def test_an_elastic_pytorchjob_has_a_place_and_no_ranks() -> None:
    """The machine that has the name of the place is the head."""
    head = role(ELASTIC, here="elastic-example-worker-0")
    other = role(ELASTIC)

    assert (head.is_head, head.listen, head.min_nodes, head.max_nodes) == (True, ":23456", 1, 3)
    assert (other.is_head, other.join) == (False, "elastic-example-worker-0:23456")


def test_a_server_of_etcd_is_no_machine_of_the_job() -> None:
    """It does not speak planaria's protocol."""
    environment = {**ELASTIC, "PET_RDZV_BACKEND": "etcd", "PET_RDZV_ENDPOINT": "etcd:2379"}

    assert_refused(
        lambda: role(environment), "PET_RDZV_ENDPOINT", "server of etcd", "--rdzv-endpoint"
    )
    assert role(environment, rdzv_endpoint="node1:29400").join == "node1:29400"


def test_a_trainjob_has_ranks() -> None:
    """The variables of torchrun and of Kubernetes agree."""
    other = role(TRAINJOB)
    head = role({**TRAINJOB, "PET_NODE_RANK": "0", "JOB_COMPLETION_INDEX": "0"})

    assert (other.is_head, other.join) == (False, "pytorch-simple-node-0-0.pytorch-simple:29500")
    assert (head.is_head, head.max_nodes, head.devices_per_node) == (True, 2, 8)


@pytest.mark.parametrize("port", ["0", "x", "70000"])
def test_a_master_port_is_a_port(port: str) -> None:
    """The name of the variable is that which was read."""
    assert_refused(lambda: role({**TRAINJOB, "PET_MASTER_PORT": port}), "PET_MASTER_PORT")


def test_a_master_without_a_port_has_torchrun_s() -> None:
    """Of two families of variables, the port belongs to its own address."""
    environment = {"PET_MASTER_ADDR": "[fd00::1]", "MASTER_PORT": "1", "PET_NODE_RANK": "1"}

    assert role(environment).join == "[fd00::1]:29400"


def test_variables_set_by_hand_are_enough() -> None:
    """As scripts have them that start a process on each machine by ssh."""
    environment = {"MASTER_ADDR": "node1", "MASTER_PORT": "1234", "NODE_RANK": "1"}

    assert role(environment).join == "node1:1234"
    assert role({**environment, "NODE_RANK": "0"}, nnodes="2").listen == ":1234"


# -- Slurm ----------------------------------------------------------------------------------------


def test_a_step_of_slurm_has_all_facts() -> None:
    """The first machine of its list is the head. The port is the job's own, because jobs may share
    a machine."""
    other = role(SLURM)
    head = role({**SLURM, "SLURM_NODEID": "0", "SLURM_PROCID": "0"}, here="gnode10")

    assert other.why == (
        "this machine is an agent: rank 1 (SLURM_NODEID); "
        "the head is at gnode10:20505 (SLURM_STEP_NODELIST)"
    )
    assert (head.is_head, head.join, head.listen) == (True, "gnode10:20505", ":20505")
    assert (head.min_nodes, head.max_nodes) == (4, 4)


def test_a_step_on_some_machines_of_a_job_is_these_machines() -> None:
    """Its own list comes before the job's."""
    environment = {
        **SLURM,
        "SLURM_STEP_NODELIST": "gnode[25,37]",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_NODEID": "0",
    }
    head = role(environment)

    assert (head.join, head.max_nodes) == ("gnode25:20505", 2)


def test_where_slurm_gives_no_list_the_machine_of_srun_is_the_place() -> None:
    """It is the first one, if srun runs in the script of a job."""
    lists = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    environment = {name: text for name, text in SLURM.items() if name not in lists}

    assert role(environment).join == "10.2.0.17:20505"


def test_the_script_of_a_job_of_several_machines_must_use_srun() -> None:
    """It runs on the first machine alone, and would wait for the others for ever."""
    assert_refused(lambda: role(SBATCH), "", "has 4 machines", "srun --ntasks-per-node=1")
    alone = role({**SBATCH, "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "gnode10"}, here="gnode10")
    assert (alone.is_head, alone.max_nodes) == (True, 1)
    assert "1 machine (SLURM_NNODES)" in alone.why


@pytest.mark.parametrize("tasks", ["8(x4)", "2", "1(x3),2", "2,1(x3)"])
def test_slurm_must_start_one_task_on_a_machine(tasks: str) -> None:
    """Else each task would be an agent."""
    environment = {**SLURM, "SLURM_STEP_TASKS_PER_NODE": tasks}

    assert_refused(lambda: role(environment), "SLURM_STEP_TASKS_PER_NODE", "--ntasks-per-node=1")


@pytest.mark.parametrize("tasks", ["1", "1(x4)", "1,1", "1(x2),1"])
def test_one_task_on_a_machine_is_written_in_many_ways(tasks: str) -> None:
    """Slurm joins equal numbers that are neighbours."""
    assert role({**SLURM, "SLURM_STEP_TASKS_PER_NODE": tasks}).join == "gnode10:20505"


def test_a_place_that_slurm_s_rank_contradicts_is_refused() -> None:
    """MASTER_ADDR is often exported in the script; where it is wrong, nobody would be there."""
    second = {**SLURM, "MASTER_ADDR": "gnode20"}
    first = {**second, "SLURM_NODEID": "0"}

    assert_refused(
        lambda: role(second, here="gnode20"),
        "MASTER_ADDR",
        "is this machine, but the head is on another one, as SLURM_NODEID = 1 says",
        "leave it out",
    )
    assert_refused(
        lambda: role(first, here="gnode10"),
        "MASTER_ADDR",
        "is not this machine, but the head is here, as SLURM_NODEID = 0 says",
    )
    assert role(first, here="gnode10", node_rank="0").is_head  # An option is meant so.
    assert role({**SLURM, "MASTER_ADDR": "gnode10"}, here="gnode20").join == "gnode10:29400"


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("m1", "m1"),
        ("m1,m2", "m1 m2"),
        ("n[001-003,7],m1", "n001 n002 n003 n7 m1"),
        ("foo[8-11]", "foo8 foo9 foo10 foo11"),
        ("n[09-11]", "n09 n10 n11"),
        (
            "rack[01-02]-node[01-02,5]",
            "rack01-node01 rack01-node02 rack01-node5 rack02-node01 rack02-node02 rack02-node5",
        ),
        ("d[1-2],n[01-02].example.com", "d1 d2 n01.example.com n02.example.com"),
        ("[1-2]", "1 2"),
        ("tux[0-1,12,20-21]", "tux0 tux1 tux12 tux20 tux21"),
    ],
)
def test_a_list_of_slurm_is_expanded(text: str, hosts: str) -> None:
    """Ranges keep leading zeros, and several brackets multiply."""
    assert slurm_hosts(text, field="SLURM_JOB_NODELIST") == tuple(hosts.split())


@pytest.mark.parametrize(
    "text",
    [
        *("", ",", "a,", ",a", "a,,b", "a b", "n[", "n]", "n[]", "n[1", "n1]", "n[[1]]"),
        *("n[a]", "n[1-]", "n[-1]", "n[3-1]", "n[1,]", "n[1-2-3]", "(null)\n", "n[1 - 2]"),
        *("n[0-65536]", "n[0-999],m[0-9999],r[0-99999]", "n[0-999][0-999]"),
    ],
)
def test_what_is_no_list_of_slurm_is_refused(text: str) -> None:
    """Also one that would fill the memory."""
    with pytest.raises(ConfigError, match="as Slurm writes it") as caught:
        slurm_hosts(text, field="SLURM_JOB_NODELIST")
    assert caught.value.field == "SLURM_JOB_NODELIST"


# -- Kubernetes -----------------------------------------------------------------------------------


def test_the_pod_of_index_0_is_the_head() -> None:
    """Whatever its name resolves to: it may not resolve before the pod is ready."""
    flags = {"nnodes": "3", "rdzv_endpoint": "example-job-0.headless-svc:29400"}
    head = role({**INDEXED, "JOB_COMPLETION_INDEX": "0"}, **flags)
    other = role(INDEXED, **flags)

    assert (head.is_head, head.listen, head.max_nodes) == (True, ":29400", 3)
    assert other.why == (
        "this machine is an agent: rank 1 (JOB_COMPLETION_INDEX); "
        "the head is at example-job-0.headless-svc:29400 (--rdzv-endpoint)"
    )


def test_a_pod_may_name_the_place_in_its_environment() -> None:
    """As a template of a pod sets it for all of them."""
    assert role({**INDEXED, "MASTER_ADDR": "example-job-0.headless-svc"}).join == (
        "example-job-0.headless-svc:29400"
    )


def test_a_pod_that_knows_no_place_is_told_its_likely_name() -> None:
    """Only the name of the service is unknown."""
    assert_refused(
        lambda: role(INDEXED, hostname="example-job-1", nnodes="3"),
        "--rdzv-endpoint",
        "example-job-0.SERVICE:29400",
        "headless service",
    )


def test_a_place_that_the_index_contradicts_is_refused() -> None:
    """Each pod would join itself."""
    assert_refused(
        lambda: role(INDEXED, here="$(hostname)", nnodes="3", rdzv_endpoint="$(hostname)"),
        "--rdzv-endpoint",
        "as JOB_COMPLETION_INDEX = 1 says",
        "name the machine of index 0",
    )
