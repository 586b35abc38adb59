"""How a machine is asked for in place of a lost one, of Slurm, Kubernetes and a command."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from helpers.command import wait_for
from helpers.fake_kubernetes import FakeKubernetes, fake_kubernetes
from helpers.fake_scheduler import FakeScheduler
from planaria.errors import ConfigError
from planaria.nodes.head.remote import kubernetes_platform, platforms
from planaria.nodes.head.remote.kubernetes_platform import KubernetesPlatform
from planaria.nodes.head.remote.machine_operator import open_platform
from planaria.nodes.head.remote.platforms import LostMachine, Platform
from planaria.nodes.machine import EXIT_LEFT

POD = {"PLANARIA_KUBERNETES_POD": "cluster-0-abc", "PLANARIA_KUBERNETES_JOB": "cluster"}
LOST = LostMachine("host-3", "10.0.0.3", is_leaving=False)
HEADS = ("10.0.0.1:7320", "[fd00::1]:7320")
SBATCH = """\
echo "$*" >> "$FAKES/sbatch.words"
env | grep -c '^SLURM_' >> "$FAKES/sbatch.words"
echo "42;cluster"
"""


def opened(text: str, **environment: str) -> Platform:
    return open_platform(text, heads=HEADS, token_file="a token", environment=environment)


# -- a command ------------------------------------------------------------------------------------


def test_a_command_is_told_what_was_lost_and_where_the_head_is() -> None:
    """Whatever else it needs it has in its environment, as its user has."""
    words = '"$ZONE $PLANARIA_LOST_NAME $PLANARIA_LOST_HOST $PLANARIA_LOST_WHY $PLANARIA_HEAD"'
    platform = opened(f"echo {words}; echo more", ZONE="a", PATH="/usr/bin:/bin")

    assert platform.ask_for_machine(LOST) == "a host-3 10.0.0.3 lost 10.0.0.1:7320"
    assert " leaving " in platform.ask_for_machine(replace(LOST, is_leaving=True))
    assert " unfit " in platform.ask_for_machine(replace(LOST, is_leaving=True, is_unfit=True))
    assert opened("true", PATH="/usr/bin:/bin").ask_for_machine(LOST)


def test_a_command_that_fails_or_hangs_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its words, because it alone knows what is wrong."""
    assert opened("sleep 60 & exit 0", PATH="/usr/bin:/bin").ask_for_machine(LOST)
    with pytest.raises(OSError, match=r"the command ended with 3: no quota"):
        opened("echo no quota >&2; exit 3", PATH="/bin").ask_for_machine(LOST)
    monkeypatch.setattr(platforms, "REQUEST_TIMEOUT_S", 0.05)
    with pytest.raises(TimeoutError, match=r"the command got no answer in 0.05 s"):
        opened("exec sleep 60", PATH="/usr/bin:/bin").ask_for_machine(LOST)


def test_no_command_is_a_mistake() -> None:
    with pytest.raises(ConfigError, match="--operator = ' ': must be slurm, kubernetes, or a com"):
        opened(" ")


@pytest.mark.parametrize("text", ["true", "slurm"])
def test_a_head_that_no_machine_can_find_asks_for_none(text: str, scheduler: FakeScheduler) -> None:
    """Its interfaces are loopback or down, and it listens at all of them: an error of the program
    ended it."""
    with pytest.raises(ConfigError, match=f"--operator = '{text}': .* --listen ADDR:PORT"):
        open_platform(text, heads=(), token_file="", environment=scheduler.environment)


# -- Slurm ----------------------------------------------------------------------------------------


@pytest.fixture
def scheduler(tmp_path: Path) -> FakeScheduler:
    made = FakeScheduler(tmp_path / "fakes")
    made.write("sbatch", SBATCH)
    made.write("sinfo", 'echo "$*" >> "$FAKES/sinfo.words"; echo "down* (Not responding)"')
    made.write("squeue", 'echo "$*" >> "$FAKES/squeue.words"; echo 1-02:03:04')
    made.write("scontrol", 'echo "$*" >> "$FAKES/scontrol.words"; echo "$RECORD"')
    made.write("scancel", 'echo "$*" >> "$FAKES/scancel.words"')
    return made


def test_slurm_is_asked_for_one_machine_like_those_of_the_job(scheduler: FakeScheduler) -> None:
    """In a job of its own, which does not take itself for a part of this one."""
    platform = opened(
        "slurm",
        **scheduler.environment,
        SLURM_JOB_NAME="cluster",
        SLURM_JOB_PARTITION="gpus",
        SLURM_GPUS_PER_NODE="8",
        SLURM_CONF="/etc/slurm.conf",
        SLURM_PROCID="0",
    )

    told = "job 42 of Slurm is to bring one; Slurm calls host-3 down* (Not responding)"
    assert platform.ask_for_machine(LOST) == told
    words, num_variables = scheduler.words("sbatch")
    agent = f"{sys.executable} -m planaria agent --join '{','.join(HEADS)}' --notice slurm"
    for option in (
        "--nodes=1 --ntasks=1 --exclusive --mem=0",
        "--partition=gpus",
        "--gpus-per-node=8",
        "--time=1-02:03:04",
        "--job-name=cluster-more",
        f" {agent} --token-file 'a token' &",
    ):
        assert option in words
    assert "--account" not in words
    assert f"--exclude={LOST.name}" in words
    assert num_variables == "1"  # SLURM_CONF.
    assert "--jobs=7" in scheduler.words("squeue")[0]


def test_slurm_is_asked_about_this_task_of_an_array(scheduler: FakeScheduler) -> None:
    """One of them has the number of the array, of which Slurm shows all tasks."""
    array = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    opened("slurm", **scheduler.environment, **array).ask_for_machine(LOST)

    assert "--jobs=7_3" in scheduler.words("squeue")[0]
    assert scheduler.words("scontrol") == ["--oneliner show job 7_3"]


@pytest.mark.parametrize(("code", "ended"), [(0, 0), (2, 2), (3, 3), (EXIT_LEFT, 0)])
def test_a_spare_machine_that_slurm_drains_ends_well(
    code: int, ended: int, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm called a job that had done what it was told failed, which people look into."""
    scheduler.write("agent", f"exit {code}")

    assert run_of_spare(scheduler, monkeypatch).wait(timeout=60) == ended


def test_a_spare_machine_is_told_what_slurm_tells_its_shell(
    scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its time is over Slurm signals the shell alone; the node is to leave then."""
    scheduler.write(
        "agent",
        "trap 'sleep 0.1; exit 3' TERM; touch \"$FAKES/ready\"; while :; do sleep 0.01; done",
    )
    spare = run_of_spare(scheduler, monkeypatch)
    wait_for((scheduler.directory / "ready").exists, what="the agent listens")
    for number in (signal.SIGUSR1, signal.SIGTERM):
        spare.send_signal(number)

    assert spare.wait(timeout=60) == 3


def run_of_spare(
    scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> "subprocess.Popen[bytes]":
    """A shell that runs what Slurm is given for a machine, with a fake agent."""
    scheduler.write("sbatch", 'printf %s "${@: -1}" > "$FAKES/wrapped"; echo 42')
    monkeypatch.setattr(sys, "executable", str(scheduler.directory / "agent"))
    opened("slurm", **scheduler.environment).ask_for_machine(LOST)
    wrapped = (scheduler.directory / "wrapped").read_text()
    return subprocess.Popen(("/bin/sh", "-c", wrapped), env=scheduler.environment)


def test_what_slurm_has_not_granted_is_taken_back_at_the_end(scheduler: FakeScheduler) -> None:
    platform = opened("slurm", **scheduler.environment)
    platform.ask_for_machine(LOST)
    platform.ask_for_machine(LOST)
    platform.cancel_requests()

    assert scheduler.words("scancel") == ["--state=PENDING 42 42"]
    platform.ask_for_machine(LOST)  # The request was under way when the job ended.
    assert scheduler.words("scancel")[-1] == "--state=PENDING 42 42 42"


def test_without_the_time_that_is_left_slurm_decides_it(scheduler: FakeScheduler) -> None:
    for body in ("echo UNLIMITED", "exit 1"):
        scheduler.write("squeue", body)
        scheduler.write("sinfo", body.replace("UNLIMITED", ""))
        told = opened("slurm", **scheduler.environment).ask_for_machine(LOST)
        assert told == "job 42 of Slurm is to bring one"
    assert not any("--time" in words for words in scheduler.words("sbatch"))


@pytest.mark.parametrize(
    ("record", "options"),
    [
        ("Features=(null) DelayBoot=0 TresPerNode=gres:gpu:8", ["--gres=gpu:8"]),
        (
            "BatchFeatures=x Features=a100&[r1|r2] TresPerNode=cpu:1,gres/gpu:a100:8,gres/nic:1",
            ["--constraint=a100&[r1|r2]", "--gres=gpu:a100:8,nic:1"],
        ),
        # Of so many machines one rack each: a job of one machine cannot be that.
        ("Features=[r1*2&r2*2] Power=", ["--gpus-per-node=4"]),
        ("", ["--gpus-per-node=4"]),
    ],
)
def test_a_spare_machine_has_the_features_and_devices_of_the_job(
    record: str, options: list[str], scheduler: FakeScheduler
) -> None:
    """As Slurm tells them of the job: its environment has no --gres and no --constraint."""
    variables = {"RECORD": record, "SLURM_GPUS_PER_NODE": "4"}
    opened("slurm", **scheduler.environment, **variables).ask_for_machine(LOST)

    words = scheduler.words("sbatch")[0].split()
    own = ("--constraint", "--gres", "--gpus-per-node")
    assert [word for word in words if word.startswith(own)] == options
    assert scheduler.words("scontrol") == ["--oneliner show job 7"]


def test_a_spare_machine_s_agent_has_the_options_of_the_others(scheduler: FakeScheduler) -> None:
    """The shell of its machine expands the variables."""
    more = '--domain "$RACK"'
    opened("slurm", **scheduler.environment, PLANARIA_AGENT_OPTIONS=more).ask_for_machine(LOST)

    assert f"--token-file 'a token' {more} & " in scheduler.words("sbatch")[0]


@pytest.mark.parametrize(
    "state", ["down* (Not responding)", "drained (bad GPU)", "fail (ECC)", "idle* (none)"]
)
def test_slurm_says_what_it_has_against_a_machine(state: str, scheduler: FakeScheduler) -> None:
    """With the words of whoever, or whatever, has set the state."""
    scheduler.write("sinfo", f'echo "$*" >> "$FAKES/sinfo.words"; echo "{state}"')
    platform = opened("slurm", **scheduler.environment)

    assert platform.verdict_on("host-3", LOST.host) == f"Slurm calls it {state}"
    assert "--nodes=host-3" in scheduler.words("sinfo")[0]
    assert platform.give_back(LOST) == ""


@pytest.mark.parametrize("state", ["allocated (none)", "mixed (none)", "idle (none)", ""])
def test_slurm_has_nothing_against_a_machine_that_works(
    state: str, scheduler: FakeScheduler
) -> None:
    scheduler.write("sinfo", f'echo "{state}"')

    assert opened("slurm", **scheduler.environment).verdict_on("host-3", LOST.host) == ""


def test_a_slurm_that_does_not_answer_is_an_error(scheduler: FakeScheduler) -> None:
    scheduler.write("sinfo", "echo Unable to contact slurm controller >&2; exit 1")
    with pytest.raises(OSError, match="sinfo ended with 1: Unable to contact"):
        opened("slurm", **scheduler.environment).verdict_on("host-3", LOST.host)


def test_a_machine_is_asked_for_though_slurm_does_not_know_the_name_of_the_lost_one(
    scheduler: FakeScheduler,
) -> None:
    """Slurm refused the whole request then. It knows the others."""
    refuse = (
        'case "$*" in *--exclude=*cluster.local*) echo "Invalid node name specified" >&2; exit 1'
    )
    scheduler.write("sbatch", f"{refuse} ;; esac\n{SBATCH}")
    platform = opened("slurm", **scheduler.environment)
    other = LostMachine("host-4.cluster.local", "10.0.0.4", is_leaving=False)

    assert "job 42 of Slurm" in platform.ask_for_machine(other)
    assert "job 42 of Slurm" in platform.ask_for_machine(LOST)
    first, second = scheduler.words("sbatch")[::2]
    assert "--exclude" not in first
    assert f"--exclude={LOST.name} " in second


def test_a_machine_is_asked_for_though_slurm_has_forgotten_one_that_was_lost_before(
    scheduler: FakeScheduler,
) -> None:
    """Its name was left in all requests from then on, and each was refused."""
    platform = opened("slurm", **scheduler.environment)
    platform.ask_for_machine(LostMachine("host-4", "10.0.0.4", is_leaving=False))
    refuse = 'case "$*" in *--exclude=*host-4*) echo "Invalid node name specified" >&2; exit 1'
    scheduler.write("sbatch", f"{refuse} ;; esac\n{SBATCH}")

    for _ in range(2):
        assert "job 42 of Slurm" in platform.ask_for_machine(LOST)
    _, second, third = scheduler.words("sbatch")[::2]
    assert "--exclude" not in second
    assert f"--exclude={LOST.name} " in third


def test_what_slurm_refuses_is_an_error(scheduler: FakeScheduler) -> None:
    scheduler.write("sbatch", "echo error: Invalid account >&2; exit 1")
    with pytest.raises(OSError, match="sbatch ended with 1: error: Invalid account"):
        opened("slurm", **scheduler.environment).ask_for_machine(LOST)


def test_slurm_must_be_there(scheduler: FakeScheduler) -> None:
    environment = {**scheduler.environment, "SLURM_JOB_ID": ""}
    with pytest.raises(ConfigError, match="is of use only in a job of Slurm"):
        opened("slurm", **environment)
    environment = {**scheduler.environment, "PATH": "/nowhere"}
    with pytest.raises(ConfigError, match="there is no sbatch on this machine"):
        opened("slurm", **environment)


# -- Kubernetes -----------------------------------------------------------------------------------


@pytest.fixture
def kubernetes(tmp_path: Path) -> Iterator[FakeKubernetes]:
    with fake_kubernetes(tmp_path) as fake:
        fake.put_pod("cluster-0-abc", "10.0.0.1")
        fake.put_pod("cluster-3-def", LOST.host, verdict="NodeLost")
        fake.put_pod("a-daemon-of-the-machine", LOST.host, job="")
        fake.put_pod("cluster-2-was", LOST.host, phase="Failed")
        fake.put_pod("another-3-abc", LOST.host, job="another")
        yield fake


def in_pod(fake: FakeKubernetes) -> Platform:
    return KubernetesPlatform({**fake.environment, **POD}, fake.account)


def test_the_pod_of_a_lost_machine_fails_and_is_deleted(kubernetes: FakeKubernetes) -> None:
    """Nobody on that machine would ever say that it has ended: the Job waited for that for ever.
    It must not count against the limits of the Job, either."""
    platform = in_pod(kubernetes)
    told = "pod cluster-3-def is deleted, so that the Job makes another"

    assert platform.ask_for_machine(LOST) == f"{told}; Kubernetes says NodeLost of it"
    assert "cluster-3-def" not in kubernetes.pods
    (status,) = kubernetes.patched
    conditions = {condition["type"]: condition["status"] for condition in status["conditions"]}
    assert (status["phase"], conditions) == (
        "Failed",
        {"Ready": "False", "DisruptionTarget": "True"},
    )
    ((name, options),) = kubernetes.deleted
    assert (name, options["gracePeriodSeconds"]) == ("cluster-3-def", 0)
    assert "its pod has ended" in platform.ask_for_machine(LOST)
    assert len(kubernetes.deleted) == 1
    platform.cancel_requests()


def test_the_pod_of_a_machine_that_kubernetes_has_not_missed_yet_stays_for_a_while(
    kubernetes: FakeKubernetes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another pod might come to the same dead machine, and never begin there. The time counts from
    each loss: a machine that had been lost before and was back lost its pod at once."""
    now_s = 0.0
    monkeypatch.setattr(kubernetes_platform, "time", SimpleNamespace(monotonic=lambda: now_s))
    kubernetes.put_pod("cluster-3-def", LOST.host)
    platform = in_pod(kubernetes)

    for lost_s in (0.0, 1000.0):
        now_s = lost_s + 89.0
        with pytest.raises(OSError, match="has not missed its machine yet, and calls cluster-3-de"):
            platform.ask_for_machine(replace(LOST, lost_s=lost_s))
    assert "cluster-3-def" in kubernetes.pods
    assert not kubernetes.deleted
    now_s = 1091.0
    lost = replace(LOST, lost_s=1000.0)
    assert "pod cluster-3-def is deleted" in platform.ask_for_machine(lost)


def test_a_pod_that_is_told_to_go_is_left_in_peace(kubernetes: FakeKubernetes) -> None:
    """Its node hands over its layers in the time that the pod still has."""
    leaving = LostMachine("cluster-3", LOST.host, is_leaving=True)

    assert "once its own has ended" in in_pod(kubernetes).ask_for_machine(leaving)
    assert not kubernetes.deleted


def test_a_pod_is_known_by_its_address_in_a_further_network(kubernetes: FakeKubernetes) -> None:
    """Agents with `--interface net1` are reached there; the status of a pod does not have it."""
    own = '{"name": "cbr0", "ips": ["10.0.0.4"], "default": true}'
    networks = f'[{own}, {{"name": "none"}}, {{"name": "team/fast", "ips": ["192.168.1.4"]}}]'
    kubernetes.put_pod("cluster-4-abc", "10.0.0.4", verdict="NodeLost", networks=networks)
    kubernetes.put_pod("cluster-5-abc", "10.0.0.5", verdict="NodeLost", networks="no JSON text")
    told = in_pod(kubernetes).ask_for_machine(
        LostMachine("cluster-4", "192.168.1.4", is_leaving=False)
    )

    assert told.startswith("pod cluster-4-abc is deleted")
    assert [name for name, _ in kubernetes.deleted] == ["cluster-4-abc"]


def test_no_other_pod_is_deleted(kubernetes: FakeKubernetes) -> None:
    """The head's own, whose agent alone was lost, and those of other addresses or Jobs."""
    platform = in_pod(kubernetes)
    own = platform.ask_for_machine(LostMachine("cluster-0", "10.0.0.1", is_leaving=False))
    none = platform.ask_for_machine(LostMachine("cluster-7", "10.0.0.7", is_leaving=False))

    assert own == "its pod is that of the head, and stays"
    assert none == "no pod of the Job cluster has that address, so none is deleted"
    assert not kubernetes.deleted


def test_what_kubernetes_refuses_is_an_error(kubernetes: FakeKubernetes) -> None:
    """As where the role was not applied."""
    kubernetes.refusal = 403
    with pytest.raises(OSError, match=r"GET pods: Kubernetes answered 403: .*says the test"):
        in_pod(kubernetes).ask_for_machine(LOST)


def test_an_api_server_that_is_gone_is_an_error(tmp_path: Path) -> None:
    with fake_kubernetes(tmp_path) as fake:
        platform = in_pod(fake)
    with pytest.raises(OSError, match="refused"):
        platform.ask_for_machine(LOST)


def test_kubernetes_says_what_it_has_against_a_machine(kubernetes: FakeKubernetes) -> None:
    """Its own conditions, and those of detectors of problems, of which some say that all is well.
    Memory and disk may be short because of the job."""
    platform = in_pod(kubernetes)
    kubernetes.put_pod("cluster-3-def", LOST.host)
    kubernetes.rights = {"get"}
    kubernetes.conditions = {
        "host-3": {
            "KernelDeadlock": "False",
            "MemoryPressure": "True",
            "AcceleratedHardwareReady": "True",
            "StorageReady": "Unknown",
            "DiskNotReady": "False",
        }
    }
    assert platform.verdict_on("host-3", LOST.host) == ""
    kubernetes.conditions["host-3"] |= {"ReadonlyFilesystem": "True", "GpuHealthy": "False"}
    told = "Kubernetes says of it: ReadonlyFilesystem = True, GpuHealthy = False"
    assert platform.verdict_on("host-3", LOST.host) == told
    kubernetes.conditions["host-3"] = {"Ready": "Unknown"}
    kubernetes.put_pod("cluster-3-def", LOST.host, verdict="NodeNotReady")
    told = "Kubernetes says of it: NodeNotReady, Ready = Unknown"

    assert platform.verdict_on("host-3", LOST.host) == told


def test_without_a_right_to_machines_pods_alone_tell_of_them(
    kubernetes: FakeKubernetes, caplog: pytest.LogCaptureFixture
) -> None:
    """The user is told once what is missing."""
    platform = in_pod(kubernetes)
    for _ in range(2):
        assert platform.verdict_on("host-3", LOST.host) == "Kubernetes says of it: NodeLost"
    assert caplog.text.count("GET nodes/host-3: Kubernetes answered 403") == 1
    kubernetes.put_pod("cluster-3-def", LOST.host)
    assert platform.verdict_on("host-3", LOST.host) == ""
    kubernetes.rights = {"get"}
    kubernetes.conditions["host-3"] = {"KernelDeadlock": "True"}

    assert (
        platform.verdict_on("host-3", LOST.host) == "Kubernetes says of it: KernelDeadlock = True"
    )


def test_a_machine_that_kubernetes_has_not_any_more_is_unfit(kubernetes: FakeKubernetes) -> None:
    """Somebody has deleted it, and its pod stays for a while."""
    kubernetes.put_pod("cluster-3-def", LOST.host, machine="gone")
    kubernetes.rights, kubernetes.machines = {"get"}, {"host-0", "host-3"}

    told = "Kubernetes says of it: there is no such machine"
    assert in_pod(kubernetes).verdict_on("gone", LOST.host) == told


def test_what_was_so_before_the_pod_began_does_not_speak_against_its_machine(
    kubernetes: FakeKubernetes,
) -> None:
    """The machine has worked with it, whatever it means (EtcdIsVoter of k3s is no defect)."""
    kubernetes.put_pod("cluster-3-def", LOST.host, since="2026-01-31T12:00:00Z")
    kubernetes.rights, kubernetes.conditions = {"get"}, {"host-3": {"EtcdIsVoter": "True"}}
    kubernetes.conditions_since = "2026-01-31T11:59:59Z"
    platform = in_pod(kubernetes)
    assert platform.verdict_on("host-3", LOST.host) == ""
    kubernetes.conditions_since = "2026-01-31T12:00:01Z"

    assert platform.verdict_on("host-3", LOST.host) == "Kubernetes says of it: EtcdIsVoter = True"


def test_no_pod_comes_to_an_unfit_machine_again(kubernetes: FakeKubernetes) -> None:
    """The Job would have given the same machine to the next one. Its pod is ready, and goes all the
    same: the machine answers."""
    kubernetes.put_pod("cluster-3-def", LOST.host)
    kubernetes.rights = {"get", "patch"}
    platform = in_pod(kubernetes)

    told = "host-3 is cordoned, and pod cluster-3-def is deleted; the Job makes another"
    assert platform.give_back(LOST) == told
    assert kubernetes.cordoned == ["host-3"]
    assert "cluster-3-def" not in kubernetes.pods
    assert platform.give_back(LOST) == ""  # It has gone by itself.
    head = LostMachine("host-0", "10.0.0.1", is_leaving=False)
    assert platform.give_back(head) == "its pod is that of the head, and stays"
    assert kubernetes.cordoned == ["host-3"]


def test_who_may_not_take_machines_away_is_told_what_does(kubernetes: FakeKubernetes) -> None:
    """A new pod would come to the same machine, so this one stays; but none comes to one that is
    silent, whose pod nobody else would ever delete."""
    kubernetes.put_pod("cluster-3-def", LOST.host)
    platform = in_pod(kubernetes)
    with pytest.raises(
        PermissionError, match="kubectl cordon host-3; kubectl delete pod cluster-3-def"
    ):
        platform.give_back(LOST)
    assert "cluster-3-def" in kubernetes.pods
    kubernetes.put_pod("cluster-3-def", LOST.host, verdict="NodeNotReady")

    told = "Kubernetes gives host-3 no pods, and pod cluster-3-def is deleted"
    assert platform.give_back(LOST).startswith(told)
    assert "cluster-3-def" not in kubernetes.pods


def test_kubernetes_is_of_use_in_a_pod_only(kubernetes: FakeKubernetes) -> None:
    with pytest.raises(ConfigError, match="is of use only in a pod that has a service account"):
        open_platform("kubernetes", heads=HEADS, token_file="")
    with pytest.raises(ConfigError, match="PLANARIA_KUBERNETES_JOB must name"):
        KubernetesPlatform(kubernetes.environment, kubernetes.account)
    kubernetes.environment = {}
    with pytest.raises(ConfigError, match="KUBERNETES_SERVICE_HOST"):
        in_pod(kubernetes)
