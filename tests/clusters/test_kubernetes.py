"""What `planaria launch` writes for Kubernetes, checked by its schema and run on test hosts.

Five test hosts are machines, of which a job takes four; see helpers/kubernetes_cluster.py. The job
ends with the bits of one machine.
"""

import importlib.util
import re
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from helpers.command import command
from helpers.host_networks import needs_namespaces
from helpers.kubernetes_cluster import KubernetesCluster, kubernetes_cluster
from helpers.machine_jobs import TIMEOUT_S, local_digests, write_job
from helpers.slow_layers import HURRY
from planaria.nodes.forkserver import ForkServer
from planaria.nodes.machine import EXIT_LEFT
from planaria.transport.credentials import write_credentials

HAS_SCHEMA: Final = importlib.util.find_spec("kubernetes_validate") is not None
pytestmark = [
    pytest.mark.clusters,
    pytest.mark.long,
    pytest.mark.skipif(not HAS_SCHEMA, reason="kubernetes-validate is not installed"),
    pytest.mark.timeout(900),
]

NUM_MACHINES: Final = 5
ITERATIONS: Final = 1000
SETTINGS: Final = (f"training.iterations={ITERATIONS}", "cluster.device_memory_bytes=200000")
VERSIONS: Final = ("1.33.0", "1.37.0")
MORE: Final = ("--cpus", "16", "--memory", "64Gi")


def manifest(job: str, *options: str) -> list[dict[str, Any]]:
    """The objects that the command writes, each of which Kubernetes would take."""
    import kubernetes_validate

    words = ("launch", job, "--on", "kubernetes", "--image", "planaria", "--nodes", "3:4")
    printed = command(*words, *options, "--dry-run")
    assert printed.exit_code == 0, printed.output
    objects = list(yaml.safe_load_all(printed.output))
    for version in VERSIONS:
        for one in objects:
            kubernetes_validate.validate(one, version, strict=True)
    return objects


@pytest.mark.parametrize("options", [(), ("--devices-per-node", "8", "--namespace", "team", *MORE)])
def test_kubernetes_takes_every_object(options: tuple[str, ...]) -> None:
    """Its schema knows each field, and forbids all others."""
    assert len(manifest("examples/cluster.toml", *options)) == 5


@needs_namespaces
def test_the_job_outlives_the_loss_of_machines_and_a_drain(
    tmp_path: Path, server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine loses its power, and the head has its pod deleted. Another one is drained. Then the
    head's machine is lost and deleted: the next head goes on with the nodes that live."""
    write_job(tmp_path, tmp_path / "saves")
    write_credentials(tmp_path / "token")
    monkeypatch.chdir(tmp_path)
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    *_, job = manifest("job.toml", *settings)
    hurry = tmp_path / "hurry"
    variables = {HURRY: str(hurry)}
    with kubernetes_cluster(tmp_path, num_machines=NUM_MACHINES, variables=variables) as cluster:
        cluster.apply(job)
        wait_line(cluster, "^iteration 5 ")
        lost = cluster.lose_machine(2)
        wait_line(cluster, r"^lost: node \d")
        wait_line(cluster, rf"^asked for a machine .*: pod {lost.name} is deleted")
        wait_line(cluster, r"^joined: node 4")
        cluster.restore_machine(lost)
        cluster.drain(3)
        wait_line(cluster, r"^preempted: node \d+: .* moved while training went on")
        cluster.wait_for(
            lambda: [code for pod, code in cluster.ended if pod.index == 3] == [EXIT_LEFT],
            what="the pod ends",
            timeout_s=TIMEOUT_S,
        )
        wait_line(cluster, r"^joined: node 5")
        head = cluster.lose_machine(0)
        cluster.delete_machine(head)
        wait_line(cluster, r"it runs node \d")
        hurry.touch()
        cluster.wait_for(lambda: cluster.is_complete, what="the job is done", timeout_s=TIMEOUT_S)
        digests = re.findall(r" (?:parameters|optimizer) +([0-9a-f]{64})$", cluster.log, re.M)
    assert tuple(digests) == local_digests(tmp_path, server, iterations=ITERATIONS)


def wait_line(cluster: KubernetesCluster, pattern: str) -> None:
    """Waits until the pods of the head have printed a line."""
    cluster.wait_for(
        lambda: bool(re.search(pattern, cluster.log, re.MULTILINE)),
        what=f"the head prints {pattern!r}",
        timeout_s=TIMEOUT_S,
    )
