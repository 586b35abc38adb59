"""What a machine finds out about itself, and what it says to change."""

import os
import resource
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from planaria.core.checkups import CheckResult
from planaria.nodes import examination
from planaria.nodes.examination import (
    checks_of_this_machine,
    device_models,
    facts_of_this_machine,
)

UNLIMITED = resource.RLIM_INFINITY


def check(subject: str) -> CheckResult:
    (result,) = (one for one in checks_of_this_machine("127.0.0.1") if one.subject == subject)
    return result


def limits(monkeypatch: pytest.MonkeyPatch, **values: tuple[int, int]) -> None:
    """Gives this process other limits, by name, (soft, hard)."""
    before = resource.getrlimit
    by_number = {getattr(resource, f"RLIMIT_{name}"): pair for name, pair in values.items()}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: by_number.get(kind) or before(kind))


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_every_check_has_a_value_and_this_machine_can_run_jobs() -> None:
    """The tests themselves run jobs here."""
    results = checks_of_this_machine()

    assert all(result.value for result in results)
    assert len({result.subject for result in results}) == len(results)
    assert not [result for result in results if result.verdict == "problem"]


def test_an_examination_takes_no_time_and_changes_no_limit() -> None:
    """A machine examines itself while it runs a node."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE), len(os.listdir("/proc/self/fd"))
    checks_of_this_machine()

    assert (resource.getrlimit(resource.RLIMIT_NOFILE), len(os.listdir("/proc/self/fd"))) == before


def test_the_facts_for_the_head_name_versions_and_the_processor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for variable in ("SLURMD_NODENAME", "PLANARIA_KUBERNETES_NODE"):
        monkeypatch.delenv(variable, raising=False)
    facts = facts_of_this_machine("10.0.0.1", "rack")

    assert (facts.host, facts.domain, facts.name) == ("10.0.0.1", "rack", socket.gethostname())
    assert list(facts.versions) == ["python", "torch", "planaria"]
    assert facts.processor
    assert facts.memory_bytes > 0


def test_a_machine_has_the_name_that_slurm_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its host name may have a domain, and Slurm refuses that."""
    monkeypatch.setenv("SLURMD_NODENAME", "n7")

    assert facts_of_this_machine("10.0.0.1", "").name == "n7"


def test_a_machine_has_the_name_that_kubernetes_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its host name is that of its pod's index, which the next machine of that index has, too: it
    got no node for as long as the one that it replaced had earned."""
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    monkeypatch.setenv("PLANARIA_KUBERNETES_NODE", "gpu-7")

    assert facts_of_this_machine("10.0.0.1", "").name == "gpu-7"


@pytest.mark.parametrize(
    ("state", "error_s", "value", "verdict"),
    [
        (0, 0.0035, "synchronised, to within 4 ms", "ok"),
        (5, 16.0, "not synchronised", "warning"),
        (-1, 0.0, "the kernel does not say whether it is synchronised", "ok"),
    ],
)
def test_a_clock_that_nobody_sets_is_told(
    state: int, error_s: float, value: str, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examination, "_adjtimex", lambda: (state, error_s))

    assert (check("clock").value, check("clock").verdict) == (value, verdict)


def test_the_kernel_says_what_its_clock_is_like() -> None:
    """The fields lie where struct timex has them: 16 s is what an unset clock claims."""
    state, error_s = examination._adjtimex()

    assert -1 <= state <= 5
    assert 0.0 <= error_s <= 3600.0


def test_limits_that_are_too_low_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    limits(monkeypatch, NOFILE=(1024, 1024), NPROC=(100, 100))

    assert (check("open files").value, check("open files").verdict) == ("1024", "warning")
    assert "4096" in check("open files").remedy
    assert (check("processes").value, check("processes").verdict) == ("100", "warning")


def test_a_low_soft_limit_of_files_is_raised_by_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    limits(monkeypatch, NOFILE=(256, UNLIMITED), NPROC=(UNLIMITED, UNLIMITED))

    assert (check("open files").value, check("open files").verdict) == ("unlimited", "ok")


def test_a_container_may_allow_fewer_processes_than_the_user_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits(monkeypatch, NPROC=(UNLIMITED, UNLIMITED))
    write(tmp_path, "sys/fs/cgroup/pids.max", "64\n")

    assert examination._processes(tmp_path).value == "64"
    write(tmp_path, "sys/fs/cgroup/pids.max", "max\n")
    assert examination._processes(tmp_path).value == "unlimited"


def test_locked_memory_matters_only_to_a_fabric(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits(monkeypatch, MEMLOCK=(8 << 20, 8 << 20))

    assert examination._locked_memory(tmp_path).verdict == "ok"
    (tmp_path / "dev/infiniband").mkdir(parents=True)
    assert examination._locked_memory(tmp_path).verdict == "warning"
    assert examination._locked_memory(tmp_path).value == "8 MiB"
    limits(monkeypatch, MEMLOCK=(UNLIMITED, UNLIMITED))
    assert examination._locked_memory(tmp_path).verdict == "ok"


def test_little_shared_memory_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container of docker has 64 MiB unless it is asked for more."""

    def usage(_: object) -> Any:
        return type("Usage", (), {"total": 64 << 20})

    assert examination._shared_memory(tmp_path / "none").value.startswith("there is no ")
    monkeypatch.setattr(shutil, "disk_usage", usage)
    assert (check("shared memory").value, check("shared memory").verdict) == ("64 MiB", "warning")


def test_a_slow_clock_source_and_few_ports_are_told(tmp_path: Path) -> None:
    source = "sys/devices/system/clocksource/clocksource0/current_clocksource"
    write(tmp_path, source, "hpet\n")
    write(tmp_path, "proc/sys/net/ipv4/ip_local_port_range", "40000\t40999\n")

    assert examination._clock_source(tmp_path).verdict == "warning"
    assert examination._ports("127.0.0.1", tmp_path).verdict == "warning"
    write(tmp_path, source, "tsc\n")
    assert examination._clock_source(tmp_path).verdict == "ok"


def test_ports_that_cannot_be_opened_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: str) -> socket.socket:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(examination, "listening_socket", refuse)

    assert check("ports").verdict == "problem"
    assert "Operation not permitted" in check("ports").value


def test_devices_are_named_by_their_driver(tmp_path: Path) -> None:
    for number, model in enumerate(("NVIDIA H100", "NVIDIA H100", "NVIDIA A10")):
        text = f"Model: \t\t {model}\nIRQ:   \t\t 7\n"
        write(tmp_path, f"proc/driver/nvidia/gpus/000{number}/information", text)

    models = device_models(tmp_path)
    assert examination._counts_text(models) == "2 x NVIDIA H100, 1 x NVIDIA A10"
    write(tmp_path / "other", "dev/nvidia0", "")
    write(tmp_path / "other", "dev/nvidiactl", "")
    assert device_models(tmp_path / "other") == ["NVIDIA"]
    assert device_models(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("version", "devices", "verdict"),
    [
        ("2.13.0+cpu", [], "ok"),
        ("2.13.0+cpu", ["NVIDIA"], "warning"),
        ("2.13.0+cu130", ["NVIDIA"], "ok"),
        ("", [], "problem"),
    ],
)
def test_torch_must_be_there_and_fit_the_devices(
    version: str, devices: list[str], verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examination, "_version", lambda _: version)

    assert examination._torch(devices).verdict == verdict


def test_little_free_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "available_bytes", lambda: 100 << 20)

    assert check("memory").verdict == "warning"
    assert check("memory").value.startswith("100 MiB of ")
