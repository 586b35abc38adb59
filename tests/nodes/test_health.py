"""Whether a machine is fit for a node, with drivers and commands of the test's own."""

import asyncio
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from planaria.core.job import ClusterConfig, JobConfig
from planaria.nodes import health
from planaria.nodes.health import health_problem, health_problem_in_time

CPU: Final = JobConfig(cluster=ClusterConfig(device="cpu"))
GPU: Final = JobConfig(cluster=ClusterConfig(device="cuda", devices_per_node=2))
# A module that stands for nvidia-ml-py; each device is a dict of what is unusual about it.
PYNVML: Final = """\
import json, os, time
DEVICES = json.loads(os.environ["DEVICES"])
NVML_MEMORY_ERROR_TYPE_UNCORRECTED = NVML_VOLATILE_ECC = 0
class NVMLError(Exception): pass
class NVMLError_LibraryNotFound(NVMLError): pass
def nvmlInit():
    if DEVICES is None: raise NVMLError_LibraryNotFound("no library")
    if DEVICES == "broken": raise NVMLError("Driver/library version mismatch")
    if DEVICES == "hangs": time.sleep(60)
def nvmlDeviceGetCount(): return len(DEVICES)
def refuse(value):
    error = NVMLError("Not Supported")
    error.value = value
    raise error
def nvmlDeviceGetHandleByIndex(index):
    if DEVICES[index].get("hidden"): refuse(DEVICES[index]["hidden"])
    return DEVICES[index]
def nvmlDeviceGetMemoryInfo(device):
    if device.get("lost"): raise NVMLError("GPU is lost")
    if device.get("refuses"): refuse(device["refuses"])
def nvmlDeviceGetTotalEccErrors(device, kind, counter):
    if "errors" not in device: raise NVMLError("Not Supported")
    return device["errors"]
def nvmlDeviceGetRemappedRows(device):
    if "rows" not in device: raise NVMLError("Not Supported")
    return device["rows"]
"""


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Has the examination find the module; `setenv("DEVICES", ..)` says which there are."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "pynvml.py").write_text(PYNVML)
    paths = (str(tmp_path / "modules"), *sys.path)
    monkeypatch.setenv("PYTHONPATH", ":".join(filter(None, paths)))
    monkeypatch.setattr(health, "_KERNEL_LOG", tmp_path / "kmsg")
    monkeypatch.setattr(health, "device_models", lambda: ["NVIDIA"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return monkeypatch


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The temporary directory of the machine."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))


def test_this_machine_is_fit(tmp_path: Path) -> None:
    """Nothing of the examination is left behind."""
    assert health_problem(CPU) == ""
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_machine_without_memory_is_unfit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "available_bytes", lambda: 7 << 20)
    assert health_problem(CPU).startswith("it has 7 MiB of memory left")
    # Unless its own node has taken it.
    assert health_problem(CPU, has_node=True) == ""


def test_a_disk_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """As one that is full, or mounted to be read only."""
    (tmp_path / "tmp").rmdir()
    assert str(tmp_path / "tmp") in health_problem(CPU)


def test_a_machine_that_ec2_retires_is_unfit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also once its node has left, or it would get the next one. Elsewhere nobody asks EC2."""
    monkeypatch.setattr(health, "ec2_problem", lambda: "EC2 retires it")

    assert health_problem(CPU, has_node=True, notice="ec2") == "EC2 retires it"
    job = replace(CPU, cluster=replace(CPU.cluster, notice="ec2"))
    assert health_problem(job, has_node=True) == "EC2 retires it"
    assert health_problem(job, has_node=True, notice="slurm") == ""
    assert health_problem(job) == "EC2 retires it"
    assert asyncio.run(health_problem_in_time(CPU, "ec2")) == "EC2 retires it"
    assert health_problem(CPU) == ""


def test_the_users_own_check_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that hangs is as bad."""

    def checked(command: str) -> str:
        job = replace(CPU, cluster=replace(CPU.cluster, health_check=command))
        return health_problem(job)

    assert checked("echo all is well") == ""
    assert checked("sleep 60 & exit 0") == ""  # What it leaves behind is not waited for.
    assert checked("echo the fan of $HOSTNAME stands; exit 1").startswith("the fan of")
    assert checked("exit 9") == "cluster.health_check ended with 9"
    monkeypatch.setattr(health, "_COMMAND_S", 0.05)
    assert checked("exec sleep 60") == "cluster.health_check has not ended within 0.05 s"


def test_the_devices_of_a_node_are_examined_without_a_temporary_directory(
    tmp_path: Path, devices: pytest.MonkeyPatch
) -> None:
    """A node may have filled it. Any failure of a worker made such a machine unfit."""
    (tmp_path / "tmp").rmdir()
    devices.setenv("DEVICES", json.dumps([{}, {}]))
    job = replace(GPU, cluster=replace(GPU.cluster, health_check="echo all is well"))

    assert health_problem(job, has_node=True) == ""


@pytest.mark.parametrize(
    ("there", "found"),
    [
        (None, ""),
        ([], ""),
        ([{}, {"errors": 0, "rows": [1, 1, False, False]}], ""),
        ([{"refuses": 3}], ""),
        ([{"refuses": 4}, {"errors": 3}], "GPU 1 has had 3 uncorrected memory errors"),
        ([{"hidden": 4}, {}], ""),
        ([{"hidden": 4}, {"errors": 3}], "GPU 1 has had 3 uncorrected memory errors"),
        ([{}, {"lost": True}], "GPU 1 does not answer (GPU is lost); start the machine anew"),
        ([{"errors": 3}, {}], "GPU 0 has had 3 uncorrected memory errors"),
        ([{"rows": [0, 0, False, True]}, {}], "GPU 0 has memory rows that can be replaced no more"),
        ([{"rows": [0, 1, True, False]}, {}], "GPU 0 has memory rows that are replaced once"),
        ("broken", "its GPUs cannot be examined (Driver/library version mismatch)"),
    ],
)
def test_devices_are_judged_by_their_library(
    there: object, found: str, devices: pytest.MonkeyPatch
) -> None:
    """One without error correction has nothing against it, nor has one that other jobs have.

    The library counts devices that a control group keeps from this user, and refuses them.
    """
    devices.setenv("DEVICES", json.dumps(there))

    told = health_problem(GPU)

    assert told.startswith(found) if found else told == ""


def test_devices_that_the_job_does_not_see_do_not_count(devices: pytest.MonkeyPatch) -> None:
    devices.setenv("DEVICES", json.dumps([{}, {"lost": True}, {}]))
    devices.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    assert health_problem(GPU) == ""


def test_a_driver_that_hangs_is_a_problem(devices: pytest.MonkeyPatch) -> None:
    """Its process is left behind, and killed."""
    devices.setenv("DEVICES", json.dumps("hangs"))
    devices.setattr(health, "_DEVICES_S", 2.0)
    assert health_problem(GPU).startswith("its GPUs do not answer within 2 s")


def test_without_the_library_nothing_is_found_wrong(
    devices: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """nvidia-ml-py is optional."""
    (tmp_path / "modules" / "pynvml.py").write_text("raise ImportError('there is none')")
    devices.setenv("DEVICES", "null")
    assert health_problem(GPU) == ""


def test_an_error_of_the_machine_in_the_kernels_log_counts_and_one_of_an_application_does_not(
    devices: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Those of long ago are over, which is half the time since this machine started."""
    devices.setenv("DEVICES", "null")
    log = tmp_path / "kmsg"
    now_us = int(1e6 * time.monotonic())
    devices.setattr(health, "_RECENT_S", 0.5 * time.monotonic())

    def record(number: int, at_us: int) -> str:
        return f"6,1234,{at_us},-;NVRM: Xid (PCI:0000:3b:00): {number}, pid=7, GPU has fallen off\n"

    log.write_text("".join(record(number, now_us) for number in (13, 31, 43, 45, 68)))
    assert health_problem(GPU) == ""
    log.write_text(record(79, 1))
    assert health_problem(GPU) == ""
    log.write_text(record(79, now_us) + record(13, now_us))
    assert health_problem(GPU).startswith(
        "its driver reports Xid 79 of the GPU at PCI:0000:3b:00: pid=7, GPU has fallen off;"
    )
    assert health_problem(CPU) == ""


def test_a_fault_of_the_examination_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended the agent, and its node with it."""

    def fail() -> int:
        raise ValueError("no number")

    monkeypatch.setattr(health, "available_bytes", fail)
    assert health_problem(CPU) == ""
