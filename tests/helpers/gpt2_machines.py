"""The example job, made small, on test hosts with a node on each of six."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from helpers.chaos import EXAMPLE, SHRUNK, chaos_job
from helpers.hosts import Hosts
from helpers.jobs import digests as digests_of_result
from helpers.machine_jobs import LEASE_S, Machines
from planaria.job.training_job import Job
from planaria.nodes.forkserver import ForkServer

NUM_NODES = 6
ITERATIONS = 150


def gpt2_settings(directory: Path, server: ForkServer) -> tuple[str, ...]:
    """What makes the example a job of small layers that two nodes can hold, and one cannot.

    Args:
        directory: directory that all hosts see; it gets the job's profile.
    """
    config = chaos_job("gpt2", directory / "profile", server)
    return (
        *SHRUNK,
        f"training.iterations={ITERATIONS}",
        f"model.profile={config.model.profile}",
        f"cluster.device_memory_bytes={config.cluster.device_memory_bytes}",
        f"cluster.lease_s={LEASE_S}",
    )


def gpt2_words(settings: tuple[str, ...], saves: Path) -> tuple[str, ...]:
    """The words of `planaria train` that name this job."""
    words = (word for setting in settings for word in ("--set", setting))
    return (str(EXAMPLE), "--set", f"checkpoint.directory={saves}", *words)


@contextmanager
def gpt2_machines(directory: Path, settings: tuple[str, ...]) -> Iterator[Machines]:
    """Eight hosts: the head's, those of six nodes, and another one."""
    with Hosts(NUM_NODES + 2, shared=[directory]) as hosts:
        yield Machines(hosts, directory, job_words=lambda _, saves: gpt2_words(settings, saves))


def gpt2_digests(directory: Path, server: ForkServer) -> tuple[str, str]:
    """What the same job ends with where its nodes are processes of this machine."""
    run = directory / "local"
    config = chaos_job("gpt2", run, server, nodes=2, f=0, iterations=ITERATIONS)
    return digests_of_result(Job(config).train(server=server))
