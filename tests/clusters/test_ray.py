"""A real Ray runs what `planaria launch` writes, on machines of which some are lost.

Four test hosts are its machines, see helpers/ray_cluster.py. The job ends with the bits of one.
"""

import re
from pathlib import Path
from typing import Final

import pytest

from helpers.host_networks import needs_namespaces
from helpers.hosts import Host
from helpers.machine_jobs import TIMEOUT_S, local_digests, write_job
from helpers.ray_cluster import RayCluster, has_ray, ray_cluster
from planaria.nodes.forkserver import ForkServer
from planaria.transport.credentials import write_credentials

pytestmark = [
    pytest.mark.clusters,
    pytest.mark.long,
    needs_namespaces,
    pytest.mark.skipif(not has_ray(), reason="the package ray is not installed"),
    pytest.mark.timeout(900),
]

NUM_MACHINES: Final = 4
# Long enough for Ray to bring two machines back. One node can hold the model.
SETTINGS: Final = ("training.iterations=9000", "cluster.device_memory_bytes=200000")


def machine_of_head(cluster: RayCluster) -> Host:
    """The machine on which Ray has the job's head."""
    for host in cluster.machines:
        for process in host.processes():
            if {"train", "--listen"} <= set(process.cmdline()):
                return host
    raise AssertionError("no machine has the head")


def test_ray_brings_back_a_drained_machine_a_lost_one_and_that_of_the_head(
    tmp_path: Path, server: ForkServer
) -> None:
    """All processes of a machine are killed, its raylet with them, and Ray is started again there.
    The node of the drained one has left before. The next head goes on with the living nodes."""
    path = write_job(tmp_path, tmp_path / "saves")
    write_credentials(tmp_path / "token")
    words = ("launch", path.name, "--on", "ray", "--nodes", "3:4", "--token-file", "token")
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    with ray_cluster(tmp_path, num_machines=NUM_MACHINES) as cluster:
        launch = cluster.start("planaria", *words, *settings, "--dry-run", cwd=tmp_path)
        assert launch.wait() == 0, launch.output
        (tmp_path / "program.py").write_text(launch.output)
        program = cluster.start("python", "program.py", cwd=tmp_path)
        program.wait_for_line(r"iteration 5 ", timeout_s=TIMEOUT_S)

        head = machine_of_head(cluster)
        drained, other = [host for host in cluster.machines if host is not head][:2]
        for host, event in (
            (drained, r"node \d has ended"),
            (other, r"lost: node \d"),
            (head, r"it runs node \d"),
        ):
            start = len(program.output)
            if host is drained:
                cluster.drain(host)
                program.wait_for_line(r"node \d leaves the job", timeout_s=TIMEOUT_S, start=start)
                program.wait_for_line(event, timeout_s=TIMEOUT_S, start=start)
                kept = r"preempted: node \d+: .* moved while training went on"  # Nothing is redone.
                program.wait_for_line(kept, timeout_s=TIMEOUT_S, start=start)
                assert "lost: node" not in program.output
            host.kill_processes()
            cluster.start_raylet(host)
            program.wait_for_line(event, timeout_s=TIMEOUT_S, start=start)
            place = rf"node \d+ starts on \S+ \({re.escape(host.address)}\)"
            program.wait_for_line(place, timeout_s=TIMEOUT_S, start=start)

        assert program.wait(TIMEOUT_S) == 0, program.output
        digests = [
            program.wait_for_line(rf" {part} +([0-9a-f]{{64}})$")[1]
            for part in ("parameters", "optimizer")
        ]
    assert tuple(digests) == local_digests(tmp_path, server, iterations=9000)
